"""Statistics of many gradients in one pass, and clipping by the norm of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _context, reference
from .._native import _C, DEVICE_TYPES, is_ordinary
from .._ranks import group_of
from .._table import fitted, html_table, shortened_name, table
from .shards import local_part, merged_over_groups

Gradients = Sequence[torch.Tensor | None]
Parameters = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Tensors = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor | None] | Iterable[tuple[str, torch.Tensor | None]]

BIN_EDGES = (-math.inf, *range(_C.histogram_first_edge, _C.histogram_first_edge + _C.histogram_bins - 1), math.inf)


@dataclass(frozen=True, repr=False)
class GradientStatistics:
    """What `gradient_statistics` found, for N tensors, on their device: nothing has been waited for.

    `norm`, `abs_max` and `mean` are over the finite elements; for complex tensors everything is about moduli. As a
    number (`float()`, `item()`, a format such as ``f"{statistics:.2f}"``, ``statistics > 10``) it is `total_norm`.
    `str()` is a table (`repr()` what of it fits a screen), and `to_dict()` plain numbers. All of these but the
    comparisons read the device.
    """

    names: list[str]
    is_gradient: list[bool]
    """Of each: True where a parameter was given, and the numbers are its gradient's; False where they are the given
    tensor's own."""
    _values: torch.Tensor
    _counts: torch.Tensor
    histogram: torch.Tensor
    """`[N, bins]` int64: finite elements other than 0 by ``log2 |g|``; histograms of several calls can be added."""
    norm_type: float = 2.0
    _clipping: torch.Tensor | None = None

    @property
    def numel(self) -> torch.Tensor:
        """`[N]` int64; 0 where there is no gradient."""
        return self._counts[0]

    @property
    def norm(self) -> torch.Tensor:
        """`[N]` float64: ``(sum |g|^p)^(1/p)``, p being `norm_type`."""
        return self._values[0]

    @property
    def abs_max(self) -> torch.Tensor:
        """`[N]` float64: the largest magnitude."""
        return self._values[1]

    @property
    def mean(self) -> torch.Tensor:
        """`[N]` float64; 0 where there are no finite elements."""
        return self._values[2]

    @property
    def zeros(self) -> torch.Tensor:
        """`[N]` int64; those that a sparse tensor does not store are counted."""
        return self._counts[1]

    @property
    def nans(self) -> torch.Tensor:
        """`[N]` int64."""
        return self._counts[2]

    @property
    def infs(self) -> torch.Tensor:
        """`[N]` int64."""
        return self._counts[3]

    @property
    def missing(self) -> torch.Tensor:
        """`[N]` bool: the gradient is None."""
        return self._counts[4].bool()

    @property
    def bin_edges(self) -> torch.Tensor:
        """`[bins + 1]` float64 on the CPU: bin i has ``edges[i] <= log2 |g| < edges[i + 1]``. The ends are infinite."""
        return torch.tensor(BIN_EDGES, dtype=torch.float64, device="cpu")

    @property
    def total_norm(self) -> torch.Tensor:
        """Scalar float64: the norm of all tensors together; NaN or inf where an element is."""
        return self.clipping[0]

    @property
    def clipping(self) -> torch.Tensor:
        """`[3]` float64: `total_norm`, what `clip_gradients_` multiplied by, and 1 where that is not 1, else 0."""
        if self._clipping is not None:
            return self._clipping
        return _clipping_of((self._values, self._counts, self.histogram), self.norm_type, math.inf, False)

    def item(self) -> float:
        """`total_norm` as a Python number. Waits for the device."""
        return self.total_norm.item()

    def __float__(self) -> float:
        return self.item()

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if specification else str(self)

    def __lt__(self, other: float | torch.Tensor) -> torch.Tensor:
        return self.total_norm < other

    def __le__(self, other: float | torch.Tensor) -> torch.Tensor:
        return self.total_norm <= other

    def __gt__(self, other: float | torch.Tensor) -> torch.Tensor:
        return self.total_norm > other

    def __ge__(self, other: float | torch.Tensor) -> torch.Tensor:
        return self.total_norm >= other

    def to_dict(self) -> dict[str, Any]:
        """Lists of Python numbers by field, and `total_norm`. Waits for the device."""
        fields = ("numel", "norm", "abs_max", "mean", "zeros", "nans", "infs", "missing", "histogram", "bin_edges")
        lists = {field: getattr(self, field).tolist() for field in fields}
        named = {"names": list(self.names), "is_gradient": list(self.is_gradient)}
        return {**named, **lists, "total_norm": self.item(), "norm_type": self.norm_type}

    def _table(self, names: list[str]) -> tuple[list[str], list[list[str]], str]:
        """Headers, a row for each tensor, and the total."""
        read = self.to_dict()
        columns = ("numel", "norm", "abs_max", "mean", "zeros", "nans", "infs")
        heading, labels = _labels(names, self.is_gradient, read["missing"])
        rows = [
            [label, "no gradient"] if missing else [label, *map(_number, numbers)]
            for label, missing, *numbers in zip(labels, read["missing"], *(read[c] for c in columns), strict=True)
        ]
        return [heading, *columns], rows, f"total norm: {read['total_norm']:.4g}"

    def __str__(self) -> str:
        headers, rows, total = self._table(self.names)
        return f"{table(headers, rows)}\n{total}"

    def __repr__(self) -> str:
        headers, rows, total = self._table([shortened_name(name) for name in self.names])
        return f"{fitted(table(headers, rows), 39)}\n{total}"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        headers, rows, total = self._table(self.names)
        return html_table(total, headers, rows)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _labels(names: list[str], is_gradient: list[bool], missing: list[bool]) -> tuple[str, list[str]]:
    """Heading and rows of a table's first column; a row names its kind where the heading does not."""
    kinds = {kind for kind, absent in zip(is_gradient, missing, strict=True) if kind or not absent}
    if kinds == {True}:
        return "gradient of", names
    return "tensor", [f"gradient of {name}" if kind else name for name, kind in zip(names, is_gradient, strict=True)]


def gradient_statistics(tensors: Tensors, names: Sequence[str] | None = None) -> GradientStatistics:
    """Size, norm, largest magnitude, mean, zeros, NaN, inf and a histogram of each gradient, in one pass over all.

    Of parameters the gradients are meant, as in `clip_gradients_`; any other tensor means itself. So ``p`` asks about
    ``p.grad``, and ``p.detach()`` about the weights. The table says which it was: "gradient of", or "tensor".

    On CUDA two kernel launches read each element once (`total_norm` is a third, when it is asked for), whatever the
    sizes and dtypes are; of more than 166 tensors, a small launch for every 166 comes before. Nothing is waited for.
    Sums are taken in float64 and in a fixed order, and no square overflows.

    Args:
        tensors: a module, a tensor, tensors, or pairs of name and tensor as from `named_parameters()`. A parameter is a
            leaf that requires grad (but within `torch.func`, where none gets a `grad`), or a `torch.nn.Parameter`, also
            a frozen one. Where its `grad` is None it is `missing`, as is a None in place of a tensor. Tensors are
            floating or complex, dense or sparse, of any shapes, and on any devices. Complex elements count by their
            modulus, and what a sparse tensor does not store as zeros.
            Of a DTensor all shards are meant: one all-reduce for all tensors, which every rank has to take part in.
        names: what to call them in tables; by default the names that came with them, or else their numbers.

    Returns:
        `GradientStatistics`, on the device of the first tensor.

    Raises:
        TypeError: an element is neither a floating or complex tensor nor None.
        ValueError: there are not as many names as tensors.

    >>> model = torch.nn.Linear(3, 1)
    >>> model.weight.grad = torch.tensor([[3.0, -4.0, 0.0]])
    >>> statistics = gradient_statistics(model)
    >>> statistics.norm.tolist(), statistics.zeros.tolist(), statistics.missing.tolist()
    ([5.0, 0.0], [1, 0], [False, True])
    >>> print(statistics)
    gradient of  numel  norm  abs_max  mean     zeros  nans  infs
    weight       3      5     4        -0.3333  1      0     0
    bias         no gradient
    total norm: 5
    >>> print(gradient_statistics([torch.ones(4)], names=["ones"]))
    tensor  numel  norm  abs_max  mean  zeros  nans  infs
    ones    4      2     1        1     0      0     0
    total norm: 2
    """
    own_names, given = _entries(tensors)
    is_gradient = _are_parameters(given)
    gradients: Gradients = given
    if any(is_gradient):
        gradients = [tensor.grad if kind else tensor for tensor, kind in zip(given, is_gradient, strict=True)]
    if names is None:
        names = own_names
    elif len(names) != len(gradients):
        raise ValueError(
            f"gradient_statistics: {len(gradients)} tensors need as many names, but there are {len(names)}"
        )
    parts = _by_kernels(gradients, 2.0)
    if parts is None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                _check("gradient_statistics", f"tensors[{index}]", gradient)
        parts = _statistics_of(gradients, 2.0, None)
    return GradientStatistics(list(names), is_gradient, *parts)


def _are_parameters(given: list[Any]) -> list[bool]:
    """Return True for entries whose gradients are meant, rather than the entries.

    The usual lists are recognised without a call for each tensor, which the statistics take 0.3 us for.
    """
    kinds = set(map(type, given))
    if kinds == {torch.nn.Parameter}:
        return [True] * len(given)
    if _context.is_transformed():  # a leaf is what torch.func differentiates by, and never has a `grad`
        return [isinstance(tensor, torch.nn.Parameter) for tensor in given]
    if kinds <= {torch.Tensor, type(None)}:
        return [tensor is not None and tensor.requires_grad and tensor.is_leaf for tensor in given]
    return [
        isinstance(tensor, torch.nn.Parameter)
        or (isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf)
        for tensor in given
    ]


_NUMBERS = [str(number) for number in range(1024)]


def _entries(tensors: Tensors | Parameters) -> tuple[list[str], list[Any]]:
    """Names (numbers where none were given) and entries, which are not checked yet."""
    if isinstance(tensors, torch.nn.Module):
        given: list[Any] = list(tensors.named_parameters())
    else:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    names = _NUMBERS[: len(given)] + [str(number) for number in range(len(_NUMBERS), len(given))]
    if tuple in map(type, given):
        for index, entry in enumerate(given):
            if type(entry) is tuple and len(entry) == 2 and isinstance(entry[0], str):
                names[index], given[index] = entry
    return names, given


Listener = Callable[[list[torch.Tensor]], Callable[[GradientStatistics], None]]
"""Callback that takes parameters before they are clipped, and returns one for the statistics from before it."""

listeners: list[Listener] = []
"""Callbacks that `clip_gradients_` makes before it clips; it calls what they return after it has clipped."""


@torch.no_grad()
def clip_gradients_(
    parameters: Parameters,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    nonfinite: str = "propagate",
    process_group: torch.distributed.ProcessGroup | None = None,
) -> GradientStatistics:
    """Multiply the gradients of `parameters` by ``min(1, max_norm / (total_norm + 1e-6))``, in place.

    The total norm is the norm of all gradients as one vector; the pass that takes their statistics computes it. The
    result equals `torch.nn.utils.clip_grad_norm_`, except where PyTorch's overflows: sums are taken in float64, of
    numbers scaled where even that is too narrow. Nothing is waited for, unless `nonfinite` is "error".

    Args:
        parameters: a module, a tensor, tensors, or pairs of name and tensor as from `named_parameters()`. Each is taken
            once; those without a gradient are passed over. Gradients may be dense, sparse, complex, on several devices,
            and of any floating dtype.
        max_norm: the largest norm that is left as it is, at least 0.
        norm_type: p of the norm: any number greater than 0, or inf.
        nonfinite: what happens where an element is NaN or inf. "propagate": what the formula gives, as in PyTorch (a
            NaN makes all gradients NaN). "skip": all gradients become 0, as the device decides, and the step does
            nothing. "error": RuntimeError that names the gradients, which are left as they are; this waits for the
            device.
        process_group: ranks that each hold a part of every gradient; the norm is over all parts (one all-reduce).
            DTensors know their ranks by themselves.

    Returns:
        `GradientStatistics` before clipping. As a number it is what `clip_grad_norm_` returns; where a tensor is needed
        (``torch.isfinite(...)``), take its `.total_norm`.

    Raises:
        TypeError, ValueError: what is wrong with an argument.
        RuntimeError: with `nonfinite="error"`, an element is not finite.

    >>> p = torch.zeros(2, requires_grad=True)
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> statistics = clip_gradients_([p], max_norm=1.0)
    >>> float(statistics), [round(element, 5) for element in p.grad.tolist()]
    (5.0, [0.6, 0.8])
    """
    named = _named(parameters)
    p, limit = _positive("norm_type", norm_type), _limit(max_norm)
    if nonfinite not in ("propagate", "skip", "error"):
        raise ValueError(f"clip_gradients_: nonfinite must be 'propagate', 'skip' or 'error', but it is {nonfinite!r}")
    group_of("clip_gradients_", process_group)
    gradients = [parameter.grad for _, parameter in named]
    parts = _statistics_of(gradients, p, process_group)
    clipping = _clipping_of(parts, p, limit, nonfinite == "skip")
    statistics = GradientStatistics([name for name, _ in named], [True] * len(named), *parts, p, clipping)
    if nonfinite == "error" and not math.isfinite(statistics.total_norm.item()):
        raise RuntimeError(_nonfinite(statistics))
    distinct = {id(gradient): gradient for gradient in gradients if gradient is not None}
    told = [listener([parameter for _, parameter in named]) for listener in listeners]
    _clip([local_part(gradient) for gradient in distinct.values()], clipping, nonfinite == "skip")
    for tell in told:
        tell(statistics)
    return statistics


def _check(function: str, argument: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else f"of type {type(tensor).__name__}"
        raise TypeError(f"{function}: {argument} must be a floating or complex tensor, but it is {kind}")


def _named(parameters: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Distinct parameters with their names."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for index, (name, parameter) in enumerate(zip(*_entries(parameters), strict=True)):
        _check("clip_gradients_", f"parameters[{index}]", parameter)
        named.setdefault(id(parameter), (name, parameter))
    return list(named.values())


def _positive(argument: str, value: Any) -> float:
    number = _real(argument, value)
    if not number > 0:
        raise ValueError(f"clip_gradients_: {argument} must be greater than 0, but it is {number}")
    return number


def _limit(max_norm: Any) -> float:
    number = _real("max_norm", max_norm)
    if not number >= 0:
        raise ValueError(f"clip_gradients_: max_norm must be at least 0, but it is {number}")
    return number


def _real(argument: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) or not hasattr(value, "__float__"):
        raise TypeError(f"clip_gradients_: {argument} must be a number, but it is of type {type(value).__name__}")
    return float(value)


def _nonfinite(statistics: GradientStatistics) -> str:
    bad = (statistics.nans + statistics.infs).tolist()
    shown = [
        f"{name} ({count} of {numel} elements)"
        for name, count, numel in zip(statistics.names, bad, statistics.numel.tolist(), strict=True)
        if count
    ]
    if not shown:
        largest, name = max(zip(statistics.abs_max.tolist(), statistics.names, strict=True))
        return (
            f"clip_gradients_: the norm of the gradients is beyond float64, with elements up to {largest:.4g} in "
            f"that of {name}; no gradient has been changed"
        )
    more = f", and {len(shown) - 5} more" if len(shown) > 5 else ""
    return f"clip_gradients_: NaN or inf in the gradients of {', '.join(shown[:5])}{more}; no gradient has been changed"


_PLAIN = (torch.Tensor, torch.nn.Parameter)

# ---- One device, several, and several processes ----------------------------------------------------------------------


def _by_kernels(gradients: Gradients, p: float) -> reference.Statistics | None:
    """Statistics by the fused pass; None where it does not take these tensors."""
    if not _context.is_eager():
        return None
    try:
        return _C.tensor_statistics(gradients, p)
    except TypeError:  # not even tensors
        return None


def _has_kernels(tensors: Iterable[torch.Tensor]) -> bool:
    return (
        _context.is_eager()
        and is_ordinary()
        and all(type(tensor) in _PLAIN and tensor.device.type in DEVICE_TYPES for tensor in tensors)
    )


def _on_one_device(gradients: Gradients, p: float) -> reference.Statistics:
    return _by_kernels(gradients, p) or reference.tensor_statistics(gradients, p)


def _statistics_of(
    gradients: Gradients, p: float, process_group: torch.distributed.ProcessGroup | None
) -> reference.Statistics:
    if process_group is None and (statistics := _by_kernels(gradients, p)) is not None:
        return statistics
    parts = [gradient if gradient is None else local_part(gradient) for gradient in gradients]
    devices = list(dict.fromkeys(part.device for part in parts if part is not None))
    statistics = _on_one_device(parts, p) if len(devices) <= 1 else _on_devices(parts, p, devices)
    return merged_over_groups(statistics, gradients, p, process_group)


def _on_devices(parts: Gradients, p: float, devices: list[torch.device]) -> reference.Statistics:
    """Statistics in the order of the tensors, on the first device, put together without an index from the host."""
    columns: list[Any] = [None] * len(parts)
    for device in devices:
        members = [i for i, part in enumerate(parts) if (devices[0] if part is None else part.device) == device]
        values, counts, histogram = _on_one_device([parts[i] for i in members], p)
        moved = [tensor.to(devices[0], non_blocking=True) for tensor in (values.T, counts.T, histogram)]
        for i, *column in zip(members, *moved, strict=True):
            columns[i] = column
    values, counts, histogram = (torch.stack(rows) for rows in zip(*columns, strict=True))
    return values.T.contiguous(), counts.T.contiguous(), histogram


def _clipping_of(parts: reference.Statistics, p: float, max_norm: float, skip: bool) -> torch.Tensor:
    values, counts, _ = parts
    clipping_of = _C.clipping_of if _has_kernels([values]) else reference.clipping_of
    return clipping_of(values, counts, p, max_norm, skip)


def _clip(gradients: list[torch.Tensor], clipping: torch.Tensor, skip: bool) -> None:
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        members = [gradient for gradient in gradients if gradient.device == device]
        clip_tensors = _C.clip_tensors if _has_kernels(members) else reference.clip_tensors
        clip_tensors(members, clipping.to(device, non_blocking=True), skip)
