"""Priorities of prioritised replay."""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch

from .. import _context, _distributed, _numbers, _remedies
from ..call.options import Entries, maybe_transposed


def priorities(
    expected: Entries,
    targets: Entries,
    *,
    steps: Literal["first", "mean", "max", "all"] = "first",
    alpha: float = 1.0,
    eps: float = 1e-6,
    batch_first: bool = True,
) -> torch.Tensor:
    """``p_b = (|nu_b - z_b| + eps)^alpha``, the priorities of prioritised replay.

    Args:
        expected: decoded predictions nu, `[B, T]` (``out.expected["value"]``) or a list of T tensors `[B]`.
        targets: their targets z, of the same form.
        steps: the error that the priority is computed from: ``|nu - z|`` of the "first" step (the root), its "mean" or
            "max" over the steps, or "all": one priority for each step.
        alpha: exponent, at least 0; 0 gives uniform priorities.
        eps: added to every error, so that no priority is 0; at least 0.
        batch_first: False: tensors with both dimensions are `[T, B]`, as in `multi_step_loss`.

    Returns:
        `[B]`, or for ``steps="all"`` `[B, T]` (`[T, B]` without `batch_first`). It has no gradient.

    Raises:
        ValueError: shapes differ, or an argument is out of range.
        TypeError: an argument is of the wrong type.

    From Schaul et al. 2016; nu and z as in MuZero, appendix G.

    >>> priorities(torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 5.0]]), eps=0.0)
    tensor([2.])
    """
    _numbers.check_flag("priorities: batch_first", batch_first)
    if _distributed.mesh_of(expected, targets) is not None:
        function = functools.partial(priorities, steps=steps, alpha=alpha, eps=eps, batch_first=batch_first)
        return _distributed.by_whole(function, expected, targets)  # type: ignore[no-any-return]
    nu, z = _stacked("expected", expected, batch_first), _stacked("targets", targets, batch_first)
    if nu.dim() != 2 or nu.shape != z.shape or nu.shape[1 if batch_first else 0] == 0:
        raise ValueError(
            f"priorities: expected and targets must both have shape {'[B, T]' if batch_first else '[T, B]'}, T at "
            f"least 1, but they have {tuple(nu.shape)} and {tuple(z.shape)}"
        )
    alpha, eps = _numbers.real("priorities: alpha", alpha), _numbers.real("priorities: eps", eps)
    if not (0 <= alpha < math.inf and 0 <= eps < math.inf):
        raise ValueError(f"priorities: alpha and eps must be finite and at least 0, but they are {alpha} and {eps}")
    error = maybe_transposed(nu - z, batch_first).abs()
    if steps == "first":
        error = error[:, 0]
    elif steps == "mean":
        error = error.mean(1)
    elif steps == "max":
        error = error.amax(1)
    elif steps == "all":
        error = maybe_transposed(error, batch_first)
    else:
        raise ValueError(f"priorities: steps must be 'first', 'mean', 'max' or 'all', but it is {steps!r}")
    if not _context.is_eager():
        return torch.pow(error + eps, _context.as_tensor(alpha, error.device, error.dtype))
    return (error + eps) ** alpha


def _stacked(argument: str, entries: Entries, batch_first: bool) -> torch.Tensor:
    """Stack a list; half types become float32, because a difference may be beyond their range."""
    if isinstance(entries, list | tuple):
        shapes = [tuple(entry.shape) if isinstance(entry, torch.Tensor) else type(entry).__name__ for entry in entries]
        if not entries or any(shape != shapes[0] or isinstance(shape, str) for shape in shapes):
            raise ValueError(f"priorities: {argument} must be a list of tensors [B], all alike, but it has {shapes}")
        entries = torch.stack(list(entries), 1 if batch_first else 0)
    if not isinstance(entries, torch.Tensor):
        raise TypeError(
            f"priorities: {argument} must be a tensor or a list of tensors, but it is of type {type(entries).__name__}"
            f"{_remedies.remedy_for_type(entries, argument)}"
        )
    if fault := _remedies.remedy_for_kind(entries):
        raise TypeError(f"priorities: {argument} {fault}")
    if entries.is_complex():
        raise TypeError(f"priorities: {argument} must be real, but its dtype is {entries.dtype}; write .real")
    return entries.detach() if entries.dtype == torch.float64 else entries.detach().float()
