"""Checks of the arguments of `muzero_targets`: plain data for the kernels and the reference."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch

from . import _numbers
from ._tensors import written
from ._trajectories import Checker, Discount


class Window(NamedTuple):
    """The arguments of `muzero_targets`, as given and as checked.

    `td_steps` is an integer, or a tensor with an integer per row, or per row and unroll step. In a checked window,
    `prefix_horizon` is 0 for rewards that are not summed.
    """

    rewards: torch.Tensor
    root_values: torch.Tensor
    num_unroll_steps: int
    td_steps: int | torch.Tensor
    discount: Discount
    lengths: torch.Tensor | None
    terminated: torch.Tensor | None
    to_play: torch.Tensor | None
    reward: str
    prefix_horizon: int | None
    root_reward: torch.Tensor | None
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


def check_window(window: Window) -> Window:
    """Check the arguments of `muzero_targets`, without looking at values.

    Raises:
        TypeError: a type or dtype is wrong.
        ValueError: a shape, device or number is wrong, or an argument requires grad.
    """
    function = "muzero_targets"
    rewards, root_values, *_ = window
    others = {name: getattr(window, name) for name in ("root_values", "discount", "to_play")}
    check = Checker(function, rewards, window.batch_first, others, "L")
    _numbers.check_flag(f"{function}: check", window.check)
    check.floats("root_values", root_values, 1)
    check.shaped("root_values", root_values, 1, ", one step more than rewards")
    num_unroll_steps = check.integer("num_unroll_steps", window.num_unroll_steps, 0, 2**31 - 1)
    td_steps = _checked_td_steps(check, window.td_steps, num_unroll_steps + 1)
    discount = check.coefficient("discount", window.discount, -1, per_step=False)
    if window.lengths is not None:
        _check_lengths(check, window.lengths, window.terminated)
    check.flags("terminated", window.terminated, are_per_row=True)
    if window.to_play is not None:
        _check_players(check, window.to_play)
    if window.root_reward is not None:
        check.floats("root_reward", window.root_reward, None)
        check.per_row("root_reward", window.root_reward)
    horizon = _checked_horizon(check, window, num_unroll_steps)
    for name in ("rewards", "root_values", "root_reward"):
        check.constant(name, getattr(window, name))
    return window._replace(
        num_unroll_steps=num_unroll_steps, td_steps=td_steps, discount=discount, prefix_horizon=horizon
    )


def _check_lengths(check: Checker, lengths: Any, terminated: Any) -> None:
    check.tensor("lengths", lengths, None, "an int64 tensor")
    check.dtype("lengths", lengths, lengths.dtype == torch.int64, "an int64 tensor")
    check.per_row("lengths", lengths)
    if terminated is None:
        raise ValueError(
            f"{check.function}: terminated must be given with lengths: a bool tensor of shape [{check.batch}], True "
            "if the game ended, by its rules, after the recorded moves"
        )


def _check_players(check: Checker, to_play: Any) -> None:
    check.tensor("to_play", to_play, 1, "a tensor of integers or bool")
    is_integral = not (to_play.is_floating_point() or to_play.is_complex())
    check.dtype("to_play", to_play, is_integral, "a tensor of integers or bool")
    check.shaped("to_play", to_play, 1, ", one step more than rewards")


def _checked_horizon(check: Checker, window: Window, num_unroll_steps: int) -> int:
    """The number of steps after which a sum of rewards restarts; 0 if rewards are not summed."""
    reward, horizon = window.reward, window.prefix_horizon
    if reward not in ("reward", "value_prefix"):
        raise ValueError(f"{check.function}: reward must be 'reward' or 'value_prefix', but it is {reward!r}")
    horizon = num_unroll_steps if horizon is None else check.integer("prefix_horizon", horizon, 1)
    if reward == "reward":
        return 0
    if window.to_play is not None:
        raise ValueError(
            f"{check.function}: reward='value_prefix' cannot be given with to_play: rewards of different players "
            "cannot be summed"
        )
    return max(horizon, 1)
