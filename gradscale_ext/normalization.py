"""Normalization of advantages and returns."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import torch

from . import _context, _distributed, _numbers, _tensors
from ._buffers import ModuleWithNumbers
from ._ranks import gathered, group_of, is_mapped
from ._tensors import result_dtype


def standardize(
    x: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    dim: int | tuple[int, ...] | None = None,
    scale: bool = True,
    leave_one_out: bool = False,
    correction: float = 0,
    eps: float = 1e-8,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """``(x - mean) / (std + eps)`` over the unmasked entries: the advantage normalization of PPO, GRPO and RLOO.

    With n the number of unmasked entries of all dimensions, or of a slice over the dimensions `dim`::

        mean = sum x / n;    std = sqrt(sum (x - mean)^2 / max(n - correction, 1))

    Args:
        x: any shape, float64, float32, bfloat16 or float16.
        mask: bool, of the shape of `x`. Masked entries do not count, also if they are NaN or inf.
        dim: a dimension or several: each slice over them is standardized by itself, as the answers to a prompt in GRPO,
            ``dim=1`` of `[prompts, answers]`. None: all dimensions.
        scale: False: only ``x - mean``.
        leave_one_out: subtract the mean of the other unmasked entries, ``n / (n - 1) (x - mean)``, as RLOO does; with
            ``scale=False`` only.
        correction: at least 0; the default 0 gives ``x.std(unbiased=False)``, and 1 gives ``x.std()``.
        eps: added to the standard deviation, at least 0.
        process_group: ranks whose entries count together; their shapes may differ. Every rank must make the call, which
            has one collective: an all-gather of four numbers of each rank. Not with `dim`.

    Returns:
        The shape of `x`, float64 if `x` is float64, else float32. Masked entries are exactly 0. All entries are 0 if
        all unmasked entries are equal, as a single one is; with ``scale=True`` their gradient is 0, too. Differentiable
        with respect to `x`; with a process group through the entries of this rank; the entries of other ranks are
        constants.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: the mask has another shape or device; `dim` is no dimension of `x`, or names one twice; `eps` or
            `correction` is negative or not finite; `leave_one_out` with ``scale=True``; a process group with `dim`, or
            with a DTensor, whose entries on all ranks count without one.
        NotImplementedError: a process group inside of `torch.func.vmap`.

    An unmasked entry is subtracted before the sums, which are computed in float64 where the device has it, so that
    advantages of 1e6 ± 1 keep their digits. An unmasked NaN makes every unmasked entry of its slice NaN. Nothing waits
    for the device.

    PPO (Schulman et al. 2017) is usually written with ``advantages.std()``, which divides by n - 1: ``correction=1``.
    TRL and verl call this "whitening" with a mask, and add their eps to the variance, inside of the square root.

    Related names: advantage normalization, whitening, `masked_whiten` (TRL), z-score, group-relative advantages (GRPO),
    leave-one-out baseline (RLOO).

    >>> advantages = torch.tensor([[1.0, 3.0, 5.0, 9.0]])
    >>> standardize(advantages, mask=torch.tensor([[True, False, True, False]]))
    tensor([[-1.,  0.,  1.,  0.]])
    >>> standardize(advantages, dim=1, scale=False, leave_one_out=True)
    tensor([[-4.6667, -2.0000,  0.6667,  6.0000]])
    """
    eps, correction = _not_negative("eps", eps), _not_negative("correction", correction)
    _numbers.check_flag("standardize: scale", scale)
    _numbers.check_flag("standardize: leave_one_out", leave_one_out)
    if leave_one_out and scale:
        raise ValueError("standardize: leave_one_out=True has no standard deviation to divide by; write scale=False")
    _tensors.check_floats("standardize", "x", x)
    if mask is not None:
        _tensors.check_mask("standardize", mask, "x", x)
    dims = _dimensions(x, dim)
    group, size = group_of("standardize", process_group)
    if group and dims:
        raise ValueError(
            "standardize: process_group counts the entries of all dimensions, but dim is given; leave out one of both"
        )
    options: dict[str, Any] = {"scale": scale, "leave_one_out": leave_one_out, "correction": correction, "eps": eps}
    if _distributed.mesh_of(x, mask) is not None:
        _tensors.refuse_group("standardize", group, "x", x, mask)
        return _distributed.by_whole(lambda x, mask: standardize(x, mask=mask, dim=dim, **options), x, mask)  # type: ignore[no-any-return]
    if x.numel() == 0:
        if not group:
            return x.to(result_dtype(x), copy=True)
        one, none = x.new_zeros(1), x.new_zeros(1, dtype=torch.bool)  # for the collective
        return standardize(one, mask=none, process_group=process_group, **options)[:0].view(x.shape)
    flags = None if mask is None else _rows(_context.saveable(mask), dims)
    centred, count, std = _moments(_rows(x, dims), flags, correction, group, size, process_group, has_std=scale)
    if std is not None:
        divisor = std + eps
        # A reciprocal is faster, and has room enough for the other dtypes.
        centred = centred / divisor if x.dtype == centred.dtype else centred * divisor.reciprocal()
    elif leave_one_out:
        centred = centred * (count / _at_least_one(count - 1))
    result = centred.to(result_dtype(x))
    if flags is not None:
        result = torch.where(flags, result, 0)
    if not dims:
        return result.reshape(x.shape)
    sizes = [x.shape[each] for each in dims]
    return torch.unflatten(result, -1, sizes).movedim(_last(dims), dims)


def _not_negative(name: str, value: Any) -> float:
    number = _numbers.real(f"standardize: {name}", value)
    if not 0 <= number < math.inf:
        raise ValueError(f"standardize: {name} must be finite and at least 0, but it is {number}")
    return number


def _dimensions(x: torch.Tensor, dim: Any) -> tuple[int, ...]:
    """The dimensions of each slice, from 0; empty if the slice is the tensor."""
    if dim is None:
        return ()
    given = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    for each in given:
        if isinstance(each, bool) or not isinstance(each, numbers.Integral):
            raise TypeError(
                f"standardize: dim must be an integer, a tuple of integers or None, but it is {dim!r}"
                if isinstance(dim, tuple | list | bool | float)
                else f"standardize: dim must be an integer, a tuple of integers or None, but it is of type "
                f"{type(dim).__name__}"
            )
    end = max(x.dim(), 1)
    dims = tuple(int(each) + end if each < 0 else int(each) for each in given)
    if not all(0 <= each < end for each in dims):
        raise ValueError(
            f"standardize: dim must be from {-end} to {end - 1} for x of {x.dim()} dimensions, but it is {dim}"
        )
    if len(set(dims)) != len(dims) or not dims:
        raise ValueError(
            f"standardize: dim must name each dimension once, and at least one, but it is {dim}; None names all"
        )
    return dims if x.dim() else ()


def _last(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(-len(dims), 0))


def _rows(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The slices as rows of the last dimension; a single row if `dims` is empty."""
    return x.movedim(dims, _last(dims)).flatten(-len(dims)) if dims else x.flatten()


def _at_least_one(number: float | torch.Tensor) -> Any:
    return number.clamp(min=1) if isinstance(number, torch.Tensor) else max(number, 1)


def _moments(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    correction: float,
    group: str,
    size: int,
    process_group: Any,
    has_std: bool,
) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
    """The entries of each row less their mean, in the widest dtype; the number of unmasked entries; and the standard
    deviation, infinite if it is 0, so that quotients and their gradients are 0.

    An entry, which all ranks subtract from their own first, makes the differences small where all entries are large. It
    is not detached, and neither is the unit of `_root_mean_square`, although their gradients are 0 up to rounding: a
    `GradientTracer` would report the cuts.
    """
    wide = _context.widest(x.device)
    entries = x.to(wide)
    if mask is None:
        count: Any = x.shape[-1]
        if not _context.is_eager():  # torch.compile cannot divide a tensor of vmap by a number that varies
            count = _context.as_tensor(count, x.device)
        first = entries[..., :1]
        deviations = entries - first
    else:
        count = mask.sum(-1, keepdim=True).to(wide)
        first = entries.gather(-1, mask.max(-1, keepdim=True).indices)
        deviations = torch.where(mask, entries - first, 0)
    mean = deviations.sum(-1, keepdim=True) / _at_least_one(count)
    centred = deviations - (mean if mask is None else mean * mask)
    std: torch.Tensor | None = None
    if has_std or group:
        divisor = _at_least_one(count - (0 if group else correction))
        std = _root_mean_square(centred, None, divisor, is_safe=x.dtype != wide)
    if group:
        assert std is not None
        own = torch.cat([torch.ones_like(mean) * count, first, mean, torch.where(std == math.inf, 0, std)])
        counts, firsts, means, stds = _columns(own, group, size, process_group)
        offsets = torch.where(counts > 0, firsts - first + means, 0)
        count = _at_least_one(counts.sum())
        mean = (counts * offsets).sum() / count
        centred = deviations - mean
        spread = torch.cat([stds, offsets - mean])
        divisor = _at_least_one(count - correction)
        std = _root_mean_square(spread, torch.cat([counts, counts]), divisor, is_safe=False)
    return centred, count, std if has_std else None


def _root_mean_square(x: torch.Tensor, times: torch.Tensor | None, count: Any, is_safe: bool) -> torch.Tensor:
    """√(Σ times x² / count) of each row, and inf, with a gradient of 0, where all x are 0. Unless squares can neither
    overflow nor underflow, the numbers are divided by the largest first."""
    unit: torch.Tensor | None = None
    if not is_safe:
        largest = x.abs().amax(-1, keepdim=True)
        unit = torch.where(largest == 0, 1, largest)
        x = x / unit
    squares = x * x if times is None else times * x * x
    mean = squares.sum(-1, keepdim=True) / count
    root: torch.Tensor = mean.masked_fill(mean.logical_not(), math.inf).sqrt()
    return root if unit is None else unit * root


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
                + (f"; write low={low / 100} and high={high / 100}" if 0 <= low < high <= 100 else "")
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
        _tensors.check_device("ReturnScale", "returns", returns, "the module", self.num_updates.device)
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
