"""Priorities of prioritised replay."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from .. import _context, _distributed, _numbers, _remedies, _tensors
from ..call.options import Entries, maybe_transposed

_STEPS = ("first", "mean", "max", "all")


def priorities(
    expected: Entries,
    targets: Entries,
    *,
    steps: Literal["first", "mean", "max", "all"] = "first",
    alpha: float = 1.0,
    eps: float = 1e-6,
    batch_first: bool = True,
    mask: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor:
    """``p_b = (|nu_b - z_b| + eps)^alpha``, the priorities of prioritised replay.

    Args:
        expected: decoded predictions nu, `[B, T]` (``out.expected["value"]``) or a list of T tensors `[B]`.
        targets: their targets z, of the same form.
        steps: the error that the priority is computed from: ``|nu - z|`` of the "first" unmasked step (the root, if
            nothing is masked), its "mean" or "max" over the unmasked steps, or "all": one priority for each step.
        alpha: exponent, at least 0; 0 gives uniform priorities.
        eps: added to every error, so that no priority is 0; at least 0.
        batch_first: False: tensors with both dimensions are `[T, B]`, as in `multi_step_loss`.
        mask: `[B, T]` bool, False where there is no target, as in `multi_step_loss`. Masked entries do not count, also
            if they are NaN; their priority with "all" is eps^alpha, as is the priority of a sample without an unmasked
            entry.
        check: raise ValueError if an unmasked entry is NaN, or if its error is. It waits for the device, and raises an
            error under torch.compile, torch.export and torch.func transforms, where there are no values to read.

    Returns:
        `[B]`, or for ``steps="all"`` `[B, T]` (`[T, B]` without `batch_first`). It has no gradient. Without `check`,
        the priority of an error that is NaN is NaN, and 1 if `alpha` is 0; a replay buffer must not store NaN, because
        sums over priorities become NaN.

    Raises:
        ValueError: shapes or devices differ, an argument is out of range, or with `check`, an entry is NaN.
        TypeError: an argument is of the wrong type.
        NotImplementedError: ``check=True`` where there are no values.

    From Schaul et al. 2016; nu and z as in MuZero, appendix G.

    Related names: PER, prioritized experience replay, TD-error priorities.

    >>> expected, targets = torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 5.0]])
    >>> priorities(expected, targets, eps=0.0)
    tensor([2.])
    >>> priorities(
    ...     expected, targets, steps="mean", eps=0.0, mask=torch.tensor([[True, False]])
    ... )
    tensor([2.])
    """
    _numbers.check_flag("priorities: batch_first", batch_first)
    _numbers.check_flag("priorities: check", check)
    if _distributed.mesh_of(expected, targets, mask) is not None:
        options: dict[str, Any] = {"steps": steps, "alpha": alpha, "eps": eps, "batch_first": batch_first}

        def of_whole(expected: Entries, targets: Entries, mask: torch.Tensor | None) -> torch.Tensor:
            return priorities(expected, targets, mask=mask, check=check, **options)

        return _distributed.by_whole(of_whole, expected, targets, mask)  # type: ignore[no-any-return]
    nu, z = _stacked("expected", expected, batch_first), _stacked("targets", targets, batch_first)
    if nu.dim() != 2 or nu.shape != z.shape or nu.shape[1 if batch_first else 0] == 0:
        raise ValueError(
            f"priorities: expected and targets must both have shape {'[B, T]' if batch_first else '[T, B]'}, T at "
            f"least 1, but they have {tuple(nu.shape)} and {tuple(z.shape)}{_remedy_for_order(nu, z, batch_first)}"
        )
    _tensors.check_device("priorities", "targets", z, "expected", nu.device)
    alpha, eps = _numbers.real("priorities: alpha", alpha), _numbers.real("priorities: eps", eps)
    if not (0 <= alpha < math.inf and 0 <= eps < math.inf):
        raise ValueError(f"priorities: alpha and eps must be finite and at least 0, but they are {alpha} and {eps}")
    if steps not in _STEPS:
        raise ValueError(f"priorities: steps must be 'first', 'mean', 'max' or 'all', but it is {steps!r}")
    if mask is not None:
        _tensors.check_mask("priorities", mask, "expected", nu)
    if check:
        _context.require_values("priorities", "priorities", nu, z, mask)
        _check_values(nu, z, mask, batch_first)
    error = (nu - z).abs()
    if mask is not None:
        error = torch.where(mask, error, 0)
        mask = maybe_transposed(mask, batch_first)
    if steps != "all":
        error = _reduced(steps, maybe_transposed(error, batch_first), mask)
    if not _context.is_eager():
        return torch.pow(error + eps, _context.as_tensor(alpha, error.device, error.dtype))
    return error + eps if alpha == 1 else (error + eps) ** alpha


def _remedy_for_order(nu: torch.Tensor, z: torch.Tensor, batch_first: bool) -> str:
    """Remedy for a list of steps next to a stacked tensor in the other order."""
    is_turned = nu.dim() == 2 and nu.shape == z.shape[::-1]
    order = "[T, B]" if batch_first else "[B, T]"
    return f"; if stacked tensors are {order}, write batch_first={not batch_first}" if is_turned else ""


def _reduced(steps: str, error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Reduce errors `[B, T]`, which are 0 where masked, to `[B]`."""
    if steps == "max":
        return error.amax(1)
    if mask is None:
        return error[:, 0] if steps == "first" else error.mean(1)
    if steps == "first":
        return error.gather(1, mask.to(torch.uint8).argmax(1, keepdim=True)).squeeze(1)
    return error.sum(1) / mask.sum(1).clamp(min=1)


def _check_values(nu: torch.Tensor, z: torch.Tensor, mask: torch.Tensor | None, batch_first: bool) -> None:
    """Refuse unmasked entries that are NaN, or whose difference is."""
    wrong = (nu - z).isnan() if mask is None else (nu - z).isnan() & mask
    found = maybe_transposed(wrong, batch_first).nonzero()
    if len(found):
        sample, step = found[0].tolist()
        at = (sample, step) if batch_first else (step, sample)
        named = "expected" if nu[at].isnan() else "targets" if z[at].isnan() else "the difference of infinite entries"
        raise ValueError(
            f"priorities: {named} is NaN at sample {sample}, step {step}; find where it comes from, or mask it"
        )


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
