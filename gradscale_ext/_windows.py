"""Checks of the arguments of `muzero_targets`: plain data for the kernels and the reference."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch

from . import _numbers
from ._tensors import written
from ._trajectories import Checker, Discount


class Window(NamedTuple):
    """A checked call of `muzero_targets`. `prefix_horizon` is 0 for rewards that are not summed.

    `td_steps` is an integer, or a tensor with an integer per row, or per row and unroll step.
    """

    rewards: torch.Tensor
    root_values: torch.Tensor
    lengths: torch.Tensor | None
    terminated: torch.Tensor | None
    to_play: torch.Tensor | None
    root_reward: torch.Tensor | None
    discount: Discount
    num_unroll_steps: int
    td_steps: int | torch.Tensor
    prefix_horizon: int
    batch_first: bool
    check: bool


def _checked_td_steps(check: Checker, td_steps: Any, num_steps: int) -> int | torch.Tensor:
    """Check td_steps: an integer, or an int64 tensor `[B]` or `[B, num_steps]`."""
    if isinstance(td_steps, numbers.Number | torch.SymInt):
        return check.integer("td_steps", td_steps, 1)
    sizes = (check.batch, num_steps) if check.batch_first else (num_steps, check.batch)
    check.tensor("td_steps", td_steps, None, "an integer of at least 1, or an int64 tensor")
    check.dtype("td_steps", td_steps, td_steps.dtype == torch.int64, "an integer or an int64 tensor")
    check.on_device("td_steps", td_steps)
    shape = tuple(td_steps.shape)
    if shape not in ((check.batch,), sizes):
        remedy = ""
        if not shape:
            remedy = f"; write td_steps.expand({check.batch})"
        elif shape == ((check.batch, 1) if check.batch_first else (1, check.batch)):
            remedy = f"; write td_steps.squeeze({-1 if check.batch_first else 0})"
        elif shape == sizes[::-1]:
            remedy = "; write td_steps.T"
        raise ValueError(
            f"{check.function}: td_steps must be an integer, or have shape [{check.batch}] or {written(sizes)}, "
            f"but its shape is {written(shape)}{remedy}"
        )
    return td_steps  # type: ignore[no-any-return]


def check_window(
    rewards: Any,
    root_values: Any,
    num_unroll_steps: Any,
    td_steps: Any,
    discount: Any,
    lengths: Any,
    terminated: Any,
    to_play: Any,
    reward: Any,
    prefix_horizon: Any,
    root_reward: Any,
    batch_first: Any,
    check_values: Any,
) -> Window:
    """Check the arguments of `muzero_targets`, without looking at values.

    Raises:
        TypeError: a type or dtype is wrong.
        ValueError: a shape, device or number is wrong, or an argument requires grad.
    """
    function = "muzero_targets"
    others = {"root_values": root_values, "discount": discount, "to_play": to_play}
    check = Checker(function, rewards, batch_first, others, "L")
    _numbers.check_flag(f"{function}: check", check_values)
    check.floats("root_values", root_values, 1)
    check.shaped("root_values", root_values, 1, ", one step more than rewards")
    num_unroll_steps = check.integer("num_unroll_steps", num_unroll_steps, 0, 2**31 - 1)
    td_steps = _checked_td_steps(check, td_steps, num_unroll_steps + 1)
    discount = check.coefficient("discount", discount, -1, per_step=False)
    if lengths is not None:
        check.tensor("lengths", lengths, None, "an int64 tensor")
        check.dtype("lengths", lengths, lengths.dtype == torch.int64, "an int64 tensor")
        check.per_row("lengths", lengths)
        if terminated is None:
            raise ValueError(
                f"{function}: terminated must be given with lengths: a bool tensor of shape [{check.batch}], True "
                "if the game ended, by its rules, after the recorded moves"
            )
    check.flags("terminated", terminated, are_per_row=True)
    if to_play is not None:
        check.tensor("to_play", to_play, 1, "a tensor of integers or bool")
        is_integral = not (to_play.is_floating_point() or to_play.is_complex())
        check.dtype("to_play", to_play, is_integral, "a tensor of integers or bool")
        check.shaped("to_play", to_play, 1, ", one step more than rewards")
    if root_reward is not None:
        check.floats("root_reward", root_reward, None)
        check.per_row("root_reward", root_reward)
    if reward not in ("reward", "value_prefix"):
        raise ValueError(f"{function}: reward must be 'reward' or 'value_prefix', but it is {reward!r}")
    horizon = num_unroll_steps if prefix_horizon is None else check.integer("prefix_horizon", prefix_horizon, 1)
    is_prefix = reward == "value_prefix"
    if is_prefix and to_play is not None:
        raise ValueError(
            f"{function}: reward='value_prefix' cannot be given with to_play: rewards of different players cannot "
            "be summed"
        )
    for name, value in (("rewards", rewards), ("root_values", root_values), ("root_reward", root_reward)):
        check.constant(name, value)
    return Window(
        rewards=rewards,
        root_values=root_values,
        lengths=lengths,
        terminated=terminated,
        to_play=to_play,
        root_reward=root_reward,
        discount=discount,
        num_unroll_steps=num_unroll_steps,
        td_steps=td_steps,
        prefix_horizon=max(horizon, 1) if is_prefix else 0,
        batch_first=batch_first,
        check=check_values,
    )
