"""Normalization of advantages and returns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from . import _context, _distributed, _numbers, _tensors
from ._buffers import ModuleWithNumbers
from ._native import _C, Refusal
from ._ranks import gathered, group_of, is_mapped
from ._trajectories import result_dtype


def standardize(
    x: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    eps: float = 1e-8,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """``(x - mean) / (std + eps)`` over the unmasked entries of all dimensions: the advantage normalization of PPO.

    With n the number of unmasked entries, the standard deviation equals ``x.std(unbiased=False)``::

        mean = sum x / n;    std = sqrt(sum (x - mean)^2 / n)

    Args:
        x: any shape, float64, float32, bfloat16 or float16.
        mask: bool, of the shape of `x`. Masked entries do not count, also if they are NaN or inf.
        eps: added to the standard deviation, at least 0.
        process_group: ranks whose entries count together; their shapes may differ. Every rank must make the call, which
            has one collective: an all-gather of four numbers of each rank.

    Returns:
        The shape of `x`, float64 if `x` is float64, else float32. Masked entries are exactly 0. All entries are 0, with
        a gradient of 0, if all unmasked entries are equal, as a single one is. Differentiable with respect to `x`; with
        a process group through the entries of this rank; the entries of other ranks are constants.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: the mask has another shape or device, `eps` is negative or not finite, or a process group is given
            with a DTensor, whose entries on all ranks count without one.
        NotImplementedError: a process group inside of `torch.func.vmap`.

    An unmasked entry is subtracted before the sums, which are computed in float64 where the device has it, so that
    advantages of 1e6 ± 1 keep their digits. An unmasked NaN makes every unmasked entry NaN. Nothing waits for the
    device.

    PPO (Schulman et al. 2017) is usually written with ``advantages.std()``, which divides by n - 1. TRL and verl call
    this "whitening" with a mask, and add their eps to the variance, inside of the square root.

    Related names: advantage normalization, whitening, `masked_whiten` (TRL), z-score.

    >>> advantages = torch.tensor([[1.0, 3.0, 5.0, 9.0]])
    >>> standardize(advantages, mask=torch.tensor([[True, False, True, False]]))
    tensor([[-1.,  0.,  1.,  0.]])
    """
    eps = _numbers.real("standardize: eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"standardize: eps must be finite and at least 0, but it is {eps}")
    # The usual call has a kernel, on the CPU.
    if process_group is None and _context.is_eager():
        found = _C.standardize(x, mask, eps)
        if not isinstance(found, Refusal):
            is_recorded = x.requires_grad and torch.is_grad_enabled()
            return _Standardized.apply(x, mask, eps, [found]) if is_recorded else found  # type: ignore[no-untyped-call]
    _tensors.check_floats("standardize", "x", x)
    if mask is not None:
        _tensors.check_mask("standardize", mask, "x", x)
    group, size = group_of("standardize", process_group)
    if _distributed.mesh_of(x, mask) is not None:
        _tensors.refuse_group("standardize", group, "x", x, mask)
        return _distributed.by_whole(lambda x, mask: standardize(x, mask=mask, eps=eps), x, mask)  # type: ignore[no-any-return]
    if x.numel() == 0:
        if not group:
            return x.to(result_dtype(x), copy=True)
        one, none = x.new_zeros(1), x.new_zeros(1, dtype=torch.bool)  # for the collective
        return standardize(one, mask=none, eps=eps, process_group=process_group)[:0].view(x.shape)
    centred, std = _moments(x, mask, group, size, process_group)
    standardized = (centred / _divisor(std, eps)).to(result_dtype(x))
    return standardized if mask is None else torch.where(mask, standardized, 0)


def _divisor(std: torch.Tensor, eps: float) -> torch.Tensor:
    """Entries that are all equal are zeros, and an infinite divisor makes their gradient 0."""
    return torch.where(std == 0, math.inf, std + eps)


class _Standardized(torch.autograd.Function):
    """Records a result of the kernel, which has another kernel for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mask: torch.Tensor | None, eps: float, found: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, None if mask is None else _context.saveable(mask))
        ctx.eps = eps
        return found[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, mask = ctx.saved_tensors
        if _context.is_eager() and not torch.is_grad_enabled():
            found = _C.standardize_gradient(x, mask, ctx.eps, gradient)
            if not isinstance(found, Refusal):
                return found, None, None, None
        return _gradient(x, mask, ctx.eps, gradient), None, None, None


def _gradient(x: torch.Tensor, mask: torch.Tensor | None, eps: float, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of `x` in operations that autograd records. With u = (x - mean) / std::

    (g - mean g - u std / (std + eps) mean(g u)) / (std + eps)
    """
    centred, std = _moments(x, mask, "", 1, None)
    divisor = _divisor(std, eps)
    g = gradient.to(centred.dtype)
    if mask is None:
        u, count = centred / torch.where(std == 0, 1, std), torch.full_like(std, x.numel())
    else:
        g, u = torch.where(mask, g, 0), torch.where(mask, centred, 0) / torch.where(std == 0, 1, std)
        count = mask.sum().clamp(min=1)
    result = (g - g.sum() / count - u * (std / divisor) * ((g * u).sum() / count)) / divisor
    return (result if mask is None else torch.where(mask, result, 0)).to(x.dtype)


def _moments(
    x: torch.Tensor, mask: torch.Tensor | None, group: str, size: int, process_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unmasked entries less their mean, in the widest dtype, and the standard deviation.

    An entry, which all ranks subtract from their own first, makes the differences small where all entries are large. It
    is not detached, and neither is the unit of `_root_mean_square`, although their gradients are 0 up to rounding: a
    `GradientTracer` would report the cuts.
    """
    wide = _context.widest(x.device)
    entries = x.to(wide)
    count: int | torch.Tensor = x.numel()
    if mask is None:
        first, divisor = entries.flatten()[0], count
        deviations = entries - first
    else:
        # An index with a dimension, because the host would read an index without one.
        found = mask.flatten().to(torch.uint8).argmax(0, keepdim=True)
        first, count = entries.flatten().gather(0, found).view(()), mask.sum()
        deviations, divisor = torch.where(mask, entries - first, 0), count.clamp(min=1)
    mean = deviations.sum() / divisor
    centred = deviations - mean
    counted = centred if mask is None else torch.where(mask, centred, 0)
    std = _root_mean_square(counted, None, divisor, is_safe=x.dtype != wide)
    if group:
        number = count.to(wide) if isinstance(count, torch.Tensor) else torch.full_like(mean, count)
        counts, firsts, means, stds = _columns(torch.stack([number, first, mean, std]), group, size, process_group)
        offsets = torch.where(counts > 0, firsts - first + means, 0)
        total = counts.sum().clamp(min=1)
        mean = (counts * offsets).sum() / total
        centred = deviations - mean
        spread = torch.cat([stds, offsets - mean])
        std = _root_mean_square(spread, torch.cat([counts, counts]), total, is_safe=False)
    return centred, std


def _root_mean_square(
    x: torch.Tensor, times: torch.Tensor | None, count: int | torch.Tensor, is_safe: bool
) -> torch.Tensor:
    """√(Σ times x² / count), with a gradient of 0 where it is 0. Unless squares can neither overflow nor
    underflow, the numbers are divided by the largest first."""
    unit: torch.Tensor | None = None
    if not is_safe:
        largest = x.abs().amax()
        unit = torch.where(largest == 0, 1, largest)
        x = x / unit
    squares = x * x if times is None else times * x * x
    mean = squares.sum() / count
    is_zero = mean == 0
    root = torch.where(is_zero, 1, mean).sqrt()
    return torch.where(is_zero, 0, root if unit is None else unit * root)


def _columns(own: torch.Tensor, group: str, size: int, process_group: Any) -> Any:
    """The columns of `own` of all ranks. Only the row of this rank has a gradient."""
    rows = gathered("standardize", own.detach()[None], group, size)
    rank = process_group.rank()
    return torch.cat([rows[:rank], own[None], rows[rank + 1 :]]).unbind(1)


def _counts(returns: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """True for finite, unmasked entries."""
    is_finite = returns.abs() < math.inf  # `isfinite` takes four operations
    return is_finite if mask is None else is_finite & mask


class ReturnScale(ModuleWithNumbers):
    """The scale of returns, which advantages are divided by: the range between two running percentiles.

    In training a call first updates the percentiles, unless no entry counts; then it gives the scale::

        running = decay running + (1 - decay) percentile    (from 0; of `low` and of `high`)
        scale   = max(minimum, running high - running low)

    Args:
        low, high: the percentiles as fractions, ``0 <= low < high <= 1``; interpolated linearly, as by NumPy.
        decay: of the running percentiles, ``0 <= decay < 1``.
        minimum: the smallest scale, at least 0.
        debias: divide both running percentiles by ``1 - decay^updates``, so that the first updates are not too small.
        process_group: ranks whose entries count together; every rank must make a call in training, with returns of the
            same shape and dtype, which are gathered: one collective. Not for DTensors.

    A call has two arguments: `returns`, of any shape, float64, float32, bfloat16 or float16; and `mask`, bool of this
    shape, or None. Masked and non-finite entries do not count. The result is a float32 scalar without gradient, as
    `scale` and `offset` are; nothing waits for the device. `eval()` stops the updates.

    The running percentiles, float64 where the device has it, and the number of updates are buffers, and part of
    `state_dict()`. Where DistributedDataParallel broadcasts buffers, all ranks get the buffers of rank 0.

    Raises:
        TypeError: an argument, also of a call, is of the wrong type or dtype.
        ValueError: an argument is out of range, or has the wrong shape or device.

    The defaults are DreamerV3's for returns (Hafner et al. 2023; its `retnorm`: "perc", rate 0.01, limit 1.0).
    `RunningScale` of TD-MPC2 starts at 1, and averages the clamped range instead of the percentiles.

    Related names: return normalization, `retnorm` and Moments (Dreamer), `RunningScale` (TD-MPC2).

    >>> return_scale = ReturnScale(low=0.0, high=1.0, decay=0.5)
    >>> return_scale(torch.tensor([2.0, 12.0]))
    tensor(5.)
    >>> return_scale.offset
    tensor(1.)
    """

    running_percentiles: torch.Tensor
    num_updates: torch.Tensor

    def __init__(
        self,
        low: float = 0.05,
        high: float = 0.95,
        decay: float = 0.99,
        minimum: float = 1.0,
        debias: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Check the numbers, and start at 0."""
        super().__init__()
        low, high = _numbers.real("ReturnScale: low", low), _numbers.real("ReturnScale: high", high)
        decay, minimum = _numbers.real("ReturnScale: decay", decay), _numbers.real("ReturnScale: minimum", minimum)
        if not 0 <= low < high <= 1:
            raise ValueError(
                f"ReturnScale: low and high must be fractions with 0 <= low < high <= 1, but they are {low} and {high}"
                + (f"; write {low / 100:g} and {high / 100:g}" if 0 <= low < high <= 100 else "")
            )
        if not 0 <= decay < 1:
            raise ValueError(f"ReturnScale: decay must be at least 0 and below 1, but it is {decay}")
        if not 0 <= minimum < math.inf:
            raise ValueError(f"ReturnScale: minimum must be finite and at least 0, but it is {minimum}")
        _numbers.check_flag("ReturnScale: debias", debias)
        self.low, self.high, self.decay, self.minimum, self.debias = low, high, decay, minimum, debias
        self._group = group_of("ReturnScale", process_group)
        # Compiled graphs lose updates of a float64 tensor without dimensions, which they treat as a number.
        self.register_buffer("running_percentiles", torch.zeros(2, dtype=_context.widest()))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self._initial = {"running_percentiles": 0.0, "num_updates": 0}

    if TYPE_CHECKING:  # torch.nn.Module says that a call takes anything, and returns Any

        def __call__(self, returns: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor: ...  # noqa: D102

    def forward(self, returns: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Update the percentiles in training, and return the scale."""
        _tensors.check_floats("ReturnScale", "returns", returns)
        if mask is not None:
            _tensors.check_mask("ReturnScale", mask, "returns", returns)
        _tensors.check_device("ReturnScale", "returns", returns, "the module", self.num_updates)
        if _distributed.mesh_of(returns, mask) is not None:
            _tensors.refuse_group("ReturnScale", self._group[0], "returns", returns, mask)
            return _distributed.by_whole(self.forward, returns, mask)  # type: ignore[no-any-return]
        if self.training and returns.numel() > 0:
            self._check_context(returns)
            with torch.no_grad():
                self._update(returns.detach(), mask)
        return self.scale

    def _check_context(self, returns: torch.Tensor) -> None:
        """Refuse contexts in which the buffers cannot be updated."""
        if is_mapped() or (_context.is_eager() and torch._C._functorch.is_functorch_wrapped_tensor(returns)):
            raise NotImplementedError(
                "ReturnScale: the running percentiles cannot be updated inside of vmap, or from tensors of another "
                "transform of torch.func; call it outside with all returns, or use eval() to read the scale"
            )
        if _context.is_eager() and self.num_updates.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "ReturnScale: the module was made in inference mode, and can be updated there only; make it outside"
            )

    @property
    def offset(self) -> torch.Tensor:
        """The running low percentile; 0 before any update."""
        return self._percentiles()[0].to(torch.float32, copy=True)

    @property
    def scale(self) -> torch.Tensor:
        """The last scale; `minimum` before any update."""
        low, high = self._percentiles().unbind()
        return (high - low).clamp(min=self.minimum).float()

    def _percentiles(self) -> torch.Tensor:
        if not self.debias:
            return self.running_percentiles
        weight = 1 - self.decay ** self.num_updates.to(self.running_percentiles.dtype)
        return self.running_percentiles / torch.where(self.num_updates == 0, 1, weight)

    def _update(self, returns: torch.Tensor, mask: torch.Tensor | None) -> None:
        running, in_group = self.running_percentiles, bool(self._group[0])
        if not in_group and _context.is_eager():
            found = _C.percentiles(returns, mask, self.low, self.high)
            if not isinstance(found, Refusal):
                if found[0] is not None:
                    running.mul_(self.decay).add_(found[0], alpha=1 - self.decay)
                    self.num_updates.add_(1)
                return
        # Entries that do not count are inf, and at the end after sorting.
        entries = torch.where(_counts(returns, mask), returns, math.inf).flatten()
        if in_group:
            entries = gathered("ReturnScale", entries, *self._group)
        entries = entries.sort().values.to(running.dtype)
        last = (entries < math.inf).sum() - 1
        place = last.clamp(min=0).to(running.dtype)
        places = torch.stack([place * self.low, place * self.high])
        floors = places.floor()
        below, above = entries.gather(0, floors.long()), entries.gather(0, places.ceil().long())
        share = places - floors
        percentiles = (1 - share) * below + share * above
        updated = self.decay * running + (1 - self.decay) * percentiles
        running.copy_(torch.where(last < 0, running, updated))
        self.num_updates.add_(last >= 0)

    def extra_repr(self) -> str:
        """The arguments."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in ("low", "high", "decay", "minimum", "debias"))
