"""Calls of the operators of returns through the dispatcher, and their rules for vmap."""

from __future__ import annotations

from typing import Any

import torch

from . import _context, _distributed, _native, reference
from ._tensors import result_dtype
from ._trajectories import FUNCTIONS, Discount, MuZeroTargets, Trajectories
from ._window_values import check_targets, check_values
from ._windows import Window

Dims = tuple[int | None, ...]


def _split(value: Discount, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor | None, float]:
    """Split a coefficient into the two arguments of an operator, a tensor or None, and a number.

    A number that varies under `torch.compile` becomes a tensor: each value of a number would be compiled as a constant.
    """
    if isinstance(value, torch.Tensor):
        return value, 1.0
    if not _context.is_eager() and _context.varies(value):
        return _context.as_tensor(value, device, dtype), 1.0
    return None, value


def run(function: str, call: Trajectories) -> tuple[torch.Tensor, ...]:
    """Run a checked call with the operator, or with the reference on devices without a kernel."""
    _context.say_why_slow(function, call._asdict())
    if _distributed.mesh_of(*call) is not None:
        return _distributed.by_whole(lambda whole: run(function, Trajectories(*whole)), tuple(call))  # type: ignore[no-any-return]
    device = call.rewards.device
    if device.type not in (*_native.DEVICE_TYPES, "meta"):
        results = reference.of_trajectories(function, call)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)
    dtype = result_dtype(*call)
    discounts, discount = _split(call.discount, dtype, device)
    lambdas, lambda_ = _split(call.lambda_, dtype, device)
    rewards, values = call.rewards, call.values
    if call.next_values is not None and not FUNCTIONS[function].reads_values:
        # The operator does not read values, but the dtype of the results depends on theirs.
        rewards = rewards.double() if dtype == torch.float64 else rewards
        values = None
    clips, limits = zip(*[_split(clip, dtype, device) for clip in call.clips], strict=True)
    inputs = (rewards, values, call.next_values, call.ratios, discounts, lambdas, *clips)
    flags = (call.terminated, call.truncated, call.mask)
    numbers = (discount, lambda_, *limits, call.n, call.batch_first)
    is_adjoint, wants = False, [False] * 3
    observations = call.next_values is None and bool(FUNCTIONS[function].values)
    return tuple(torch.ops.gradscale_ext.returns(is_adjoint, function, wants, observations, *inputs, *flags, *numbers))


def run_muzero(window: Window) -> MuZeroTargets:
    """Compute the targets of a checked window with the operator, or with the reference on devices without a kernel."""
    _context.say_why_slow("muzero_targets", window._asdict())
    if _distributed.mesh_of(*window) is not None:
        return _distributed.by_whole(lambda whole: run_muzero(Window(*whole)), tuple(window))  # type: ignore[no-any-return]
    device = window.rewards.device
    if device.type not in (*_native.DEVICE_TYPES, "meta"):
        return reference.of_window(window)
    check_values(window)
    discounts, discount = _split(window.discount, result_dtype(*window), device)
    horizons, td_steps = (window.td_steps, 1) if isinstance(window.td_steps, torch.Tensor) else (None, window.td_steps)
    results = MuZeroTargets(
        *torch.ops.gradscale_ext.muzero_targets(
            window.rewards,
            window.root_values,
            window.lengths,
            window.terminated,
            window.to_play,
            window.root_reward,
            discounts,
            horizons,
            discount,
            window.num_unroll_steps,
            td_steps,
            window.prefix_horizon,
            window.batch_first,
        )
    )
    check_targets(window, results)
    return results


# ---- vmap: mapped examples become rows ------------------------------------------------------------------------------


def _as_rows(value: Any, dim: int | None, examples: int, rows: int, batch_first: bool) -> Any:
    """Turn the mapped dimension of an argument into rows. Mapped scalars become a column with one entry per row."""
    if not isinstance(value, torch.Tensor):
        return value
    inner = value.dim() - (dim is not None)
    if inner == 0:
        if dim is None:
            return value
        column = value[:, None].expand(examples, rows).reshape(-1)
        return column[:, None] if batch_first else column[None]
    row_dim = 0 if batch_first or inner == 1 else 1
    if dim is None:
        if value.shape[row_dim] == 1 and rows != 1:
            return value  # broadcast over the rows of all examples
        value = value.unsqueeze(row_dim).expand(*value.shape[:row_dim], examples, *value.shape[row_dim:])
    else:
        value = value.movedim(dim, row_dim)
    if value.shape[row_dim + 1] != rows:  # broadcasts over the rows of an example
        value = value.expand(*value.shape[: row_dim + 1], rows, *value.shape[row_dim + 2 :])
    return value.flatten(row_dim, row_dim + 1)


def _rule(operator: Any) -> Any:
    """Make the vmap rule of an operator."""

    def rule(info: Any, in_dims: Dims, *arguments: Any) -> Any:
        batch_first, examples = arguments[-1], info.batch_size
        given, dim = next(
            (value, dim) for value, dim in zip(arguments, in_dims, strict=True) if isinstance(value, torch.Tensor)
        )
        shape = list(given.shape)
        if dim is not None:
            del shape[dim]
        rows = shape[0 if batch_first else 1]
        flat = [
            _as_rows(value, dim if isinstance(value, torch.Tensor) else None, examples, rows, batch_first)
            for value, dim in zip(arguments, in_dims, strict=True)
        ]
        results = operator(*flat)
        row_dim = 0 if batch_first else 1
        return [result.unflatten(row_dim, (examples, rows)) for result in results], [row_dim] * len(results)

    return rule


torch.library.register_vmap("gradscale_ext::returns", _rule(torch.ops.gradscale_ext.returns))
torch.library.register_vmap("gradscale_ext::muzero_targets", _rule(torch.ops.gradscale_ext.muzero_targets))
