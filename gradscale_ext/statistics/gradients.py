"""Statistics of many gradients in one pass, and clipping by the norm of all of them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from .. import _context, reference
from .._distributed import whole
from .._native import _C, is_ordinary
from .._numbers import as_float, check_flag, check_scalar, real
from .._ranks import group_of
from .._table import fitted_table, html_table, table
from .adaptive import AdaptiveClipping
from .listeners import callbacks, is_watched, leaves_graph
from .passes import Gradients, are_plain, by_kernels, clip, clipping_of, histograms_of, keys_of, listed, statistics_of
from .shards import local_part

Parameters = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Tensors = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor | None] | Iterable[tuple[str, torch.Tensor | None]]

BIN_EDGES = (
    -math.inf,
    *range(reference.HISTOGRAM_FIRST_EDGE, reference.HISTOGRAM_FIRST_EDGE + reference.HISTOGRAM_BINS - 1),
    math.inf,
)


@dataclass(frozen=True, repr=False, eq=False)  # == of tensors has no single truth value
class GradientStatistics:
    """The results of `gradient_statistics` for N tensors, on their device, without a synchronisation.

    `norm`, `abs_max` and `mean` are over the finite elements; complex elements enter by their modulus. Used as a number
    (`float()`, `item()`, a format such as ``f"{statistics:.2f}"``, ``statistics > 10``, ``statistics / 2``) or in a
    function of PyTorch (``torch.isfinite(statistics)``), the object is its `total_norm`. `str()` is a table, `repr()`
    has its first lines, with long names shortened, and `to_dict()` has plain numbers. `float()`, `item()`, formats,
    tables and `to_dict()` wait for the device.
    """

    names: list[str]
    """The names of the tensors, in the order of all other fields."""
    is_gradient: list[bool]
    """For each tensor: True if it is a parameter, and the numbers describe its gradient; False if they describe the
    tensor itself."""
    _values: torch.Tensor
    _counts: torch.Tensor
    histogram: torch.Tensor | None = None
    """`[N, bins]` int64: the number of finite nonzero elements by ``log2 |g|``; histograms can be added. None unless
    `gradient_statistics` is called with ``histogram=True``."""
    norm_type: float = 2.0
    """The p of `norm` and `total_norm`."""
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
        """`[N]` int64, including the elements that a sparse tensor does not store."""
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
        """`[3]` float64: `total_norm`, the factor by which `clip_gradients_` multiplied the gradients (with `adaptive`,
        the smallest factor of a unit), and 1 if that factor is not 1, else 0."""
        if self._clipping is not None:
            return self._clipping
        return clipping_of((self._values, self._counts), self.norm_type, math.inf, False)

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

    def __mul__(self, other: float | torch.Tensor) -> torch.Tensor:
        return self.total_norm * other

    __rmul__ = __mul__

    def __truediv__(self, other: float | torch.Tensor) -> torch.Tensor:
        return self.total_norm / other

    def __rtruediv__(self, other: float | torch.Tensor) -> torch.Tensor:
        return other / self.total_norm

    def __round__(self, digits: int | None = None) -> float:
        return round(self.item(), digits)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda statistics: statistics.total_norm, (args, kwargs or {}))
        return function(*args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Lists of Python numbers by field, and `total_norm`; `histogram` and `bin_edges` only if there is a histogram.
        Waits for the device."""
        fields = ["numel", "norm", "abs_max", "mean", "zeros", "nans", "infs", "missing"]
        if self.histogram is not None:
            fields += ["histogram", "bin_edges"]
        lists = {field: getattr(self, field).tolist() for field in fields}
        named = {"names": list(self.names), "is_gradient": list(self.is_gradient)}
        return {**named, **lists, "total_norm": self.item(), "norm_type": self.norm_type}

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        """Headers, a row for each tensor, and the total."""
        read = self.to_dict()
        columns = ("numel", "norm", "abs_max", "mean", "zeros", "nans", "infs")
        heading, labels = _labels(self.names, self.is_gradient, read["missing"])
        rows = [
            [label, "no gradient"] if missing else [label, *map(_number, numbers)]
            for label, missing, *numbers in zip(labels, read["missing"], *(read[c] for c in columns), strict=True)
        ]
        return [heading, *columns], rows, f"total norm: {read['total_norm']:.4g}"

    def __str__(self) -> str:
        headers, rows, total = self._table()
        return f"{table(headers, rows)}\n{total}"

    def __repr__(self) -> str:
        headers, rows, total = self._table()
        return f"{fitted_table(headers, rows, lines=12)}\n{total}"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        headers, rows, total = self._table()
        return html_table(total, headers, rows)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _labels(names: list[str], is_gradient: list[bool], missing: list[bool]) -> tuple[str, list[str]]:
    """Heading and labels of a table's first column. Under "tensor", the label of a gradient is "gradient of ..."."""
    kinds = {kind for kind, absent in zip(is_gradient, missing, strict=True) if kind or not absent}
    if kinds == {True}:
        return "gradient of", names
    return "tensor", [f"gradient of {name}" if kind else name for name, kind in zip(names, is_gradient, strict=True)]


def gradient_statistics(
    tensors: Tensors, names: Sequence[str] | None = None, *, histogram: bool = False
) -> GradientStatistics:
    """Size, norm, largest magnitude, mean, zeros, NaN and inf of each gradient, in one pass over all; and histograms.

    For a parameter, the statistics describe its gradient, as in `clip_gradients_`; for any other tensor, the tensor
    itself. So ``p`` gives the statistics of ``p.grad``, and ``p.detach()`` the statistics of the weights. The table
    says which: "gradient of", or "tensor".

    On CUDA, one kernel launch for every 1,000 tensors reads each element once, whatever the sizes and dtypes are. If a
    tensor has more than 256 KB, a second launch adds up its parts; reading `total_norm` adds another one. Nothing waits
    for the device. Sums are computed in float64 and in a fixed order, and no square overflows.

    Args:
        tensors: a module, a tensor, tensors, or pairs of name and tensor as from `named_parameters()`. A parameter is a
            leaf that requires grad (except within `torch.func`, where no leaf gets a `grad`), or a
            `torch.nn.Parameter`, even a frozen one. A parameter whose `grad` is None is `missing`, and so is a None in
            place of a tensor. Tensors are floating or complex, dense or sparse, of any shapes, and on any devices.
            Complex elements enter by their modulus, and elements that a sparse tensor does not store are zeros.
            A DTensor is counted with all its shards: each process group runs one all-reduce for all tensors together
            (and a second one for histograms), so every rank must make the call. An iterator without elements, which has
            probably been used up before, causes a warning.
        names: one per tensor, for tables; by default the names in `tensors`, or else the indices.
        histogram: True counts the elements of each tensor by their magnitude too, with about six of PyTorch's
            operations for each tensor, and temporary memory of 8 to 16 bytes for each element of the largest one.

    Returns:
        `GradientStatistics`, on the device of the first tensor.

    Raises:
        TypeError: an element is neither a floating or complex tensor nor None, or `histogram` is not a bool.
        ValueError: the number of names differs from the number of tensors.

    Related names: gradient norm, `get_total_norm`, gradient histogram.

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
    >>> found = gradient_statistics([torch.ones(4)], names=["ones"], histogram=True)
    >>> print(found)
    tensor  numel  norm  abs_max  mean  zeros  nans  infs
    ones    4      2     1        1     0      0     0
    total norm: 2
    >>> first = found.bin_edges.tolist().index(0)
    >>> found.histogram[0, first].item()  # elements with 0 <= log2 |g| < 1
    4
    """
    check_flag("gradient_statistics: histogram", histogram)
    own_names, given = _entries("gradient_statistics", "tensors", tensors)
    is_gradient = _are_parameters(given)
    gradients: Gradients = given
    if any(is_gradient):
        gradients = [tensor.grad if kind else tensor for tensor, kind in zip(given, is_gradient, strict=True)]
    names = own_names if names is None else _checked_names(names)
    if len(names) != len(gradients):
        raise ValueError(
            f"gradient_statistics: expected one name for each of {len(gradients)} tensors, but got {len(names)}"
        )
    parts = by_kernels(gradients, 2.0)
    if not parts:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                _check("gradient_statistics", f"tensors[{index}]", gradient)
        parts = statistics_of(gradients, 2.0, None)
    values, counts = parts
    histograms = histograms_of(gradients, counts) if histogram else None
    return GradientStatistics(names, is_gradient, values, counts, histograms)


def _are_parameters(given: list[Any]) -> list[bool]:
    """For each entry: True if it is a parameter, whose gradient is used instead of the entry.

    The usual lists are recognised without a call for each tensor: the statistics take only 0.3 us per tensor.
    """
    kinds = set(map(type, given))
    if kinds == {torch.nn.Parameter}:
        return [True] * len(given)
    if _context.is_transformed():  # torch.func's inputs are leaves too, but never get a `grad`
        return [isinstance(tensor, torch.nn.Parameter) for tensor in given]
    if kinds <= {torch.Tensor, type(None)}:
        return [tensor is not None and tensor.requires_grad and tensor.is_leaf for tensor in given]
    return [
        isinstance(tensor, torch.nn.Parameter)
        or (isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf)
        for tensor in given
    ]


_NUMBERS = [str(number) for number in range(1024)]


def _checked_names(names: Any) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"gradient_statistics: names must be a sequence of strings, but it is of type {type(names).__name__}"
        )
    found = list(names)
    for index, name in enumerate(found):
        if not isinstance(name, str):
            raise TypeError(
                f"gradient_statistics: names[{index}] must be a string, but it is of type {type(name).__name__}; write "
                "[str(name) for name in names]"
            )
    return found


def _entries(function: str, argument: str, tensors: Tensors | Parameters) -> tuple[list[str], list[Any]]:
    """Names (numbers where none were given) and entries, which are not checked yet."""
    if isinstance(tensors, torch.nn.Module):
        given: list[Any] = list(tensors.named_parameters())
    else:
        if not isinstance(tensors, Iterable):
            raise TypeError(
                f"{function}: {argument} must be a module or tensors, but it is of type {type(tensors).__name__}"
            )
        given = [tensors] if isinstance(tensors, torch.Tensor) else listed(function, argument, tensors)
    names = _NUMBERS[: len(given)] + [str(number) for number in range(len(_NUMBERS), len(given))]
    if tuple in map(type, given):
        for index, entry in enumerate(given):
            if type(entry) is tuple and len(entry) == 2 and isinstance(entry[0], str):
                names[index], given[index] = entry
    return names, given


@torch.no_grad()
def clip_gradients_(
    parameters: Parameters,
    max_norm: float | torch.Tensor | None = None,
    *,
    norm_type: float | Literal["inf"] = 2.0,
    adaptive: float | None = None,
    eps: float = 1e-3,
    unit: str = "row",
    nonfinite: str = "propagate",
    process_group: torch.distributed.ProcessGroup | None = None,
) -> GradientStatistics:
    """Clip the gradients of `parameters` in place: all by their total norm, or each unit by the norm of its weights.

    `max_norm` multiplies all gradients by ``min(1, max_norm / (total_norm + 1e-6))``. The total norm is the norm of all
    gradients as one vector. `torch.nn.utils.clip_grad_norm_` gives the same result, except where its norm
    overflows: sums are computed in float64, and numbers are scaled first if a sum would exceed the range of float64.

    `adaptive` multiplies each unit by ``min(1, adaptive * max(weight_norm, eps) / gradient_norm)``, with the 2-norms of
    the unit's gradient and of its weights: adaptive gradient clipping (Brock et al. 2021, https://arxiv.org/abs/2102.06171).
    A unit whose gradient is within its limit, or zero, keeps its bits.

    The pass that computes the statistics also computes the norms. Nothing waits for the device, unless `nonfinite` is
    "error".

    Inside of `torch.compile` the passes are operators of the graph, and gradients get the same bits (complex ones are
    multiplied in their own precision), with ``fullgraph=True`` too. Two clippings leave the graph, and run in eager
    mode: with `nonfinite` "error", which raises with ``fullgraph=True``, and of parameters that an open
    `GradientMonitor` watches, which does not see a clipping with ``fullgraph=True`` and says so once.

    Args:
        parameters: a module, a tensor, tensors, or pairs of name and tensor as from `named_parameters()`. A
            parameter that occurs twice is clipped once; parameters without a gradient are skipped. Gradients may be
            dense, sparse, complex, on several devices, and of any floating dtype. An iterator without elements, which
            has probably been used up before, causes a warning.
        max_norm: the largest norm that is not clipped, at least 0: a number, or a real tensor without dimensions, which
            is read on its device. On a GPU a tensor is not checked, and a negative or NaN one gives NaN.
        norm_type: p of the norm: any number greater than 0, or inf (also written "inf"). With `adaptive` it must be 2.
        adaptive: the largest ratio of norms that is not clipped, at least 0, in place of `max_norm`. Brock et al. use
            0.01 to 0.16, and DreamerV3 0.3 with ``unit="tensor"``. Leave out the parameters of a last linear layer, as
            Brock et al. do, by not passing them.
        eps: the norm used for weights whose norm is smaller, so that weights of 0 can be trained.
        unit: "row": an output unit, which is a slice of the first dimension: a row of a linear layer's weight, or a
            filter of a convolution. A tensor of fewer than two dimensions, such as a bias, is one unit. These are the
            units of timm. Brock et al. and optax have the same ones, except for a tensor in which only one dimension
            is longer than 1, such as ``[512, 1]``, which is one unit. `torch.nn.ConvTranspose2d` stores its input
            channels first, so each input channel is a unit. "tensor": each parameter, as in DreamerV3.
        nonfinite: what happens if an element is NaN or inf. "propagate": what the formula gives, as in PyTorch (with
            `max_norm`, a NaN makes all gradients NaN; with `adaptive`, the gradients of its unit). "skip": all
            gradients become 0; the device decides this, and nothing waits for it. (An optimizer with momentum still
            moves.) "error": a RuntimeError names the gradients, and none is changed; this waits for the device. With
            `adaptive`, NaN in weights is treated like NaN in gradients.
        process_group: ranks that each hold a part of every gradient; norms are over all parts (one all-reduce). With
            `adaptive`, parts are slices along the first dimension, so that rows are whole. DTensors need no
            `process_group`, because they store their ranks and dimensions.

    Returns:
        `GradientStatistics` before clipping. As a number it is what `clip_grad_norm_` returns; where a tensor is needed
        (``torch.isfinite(...)``), take its `.total_norm`.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: with `nonfinite="error"`, an element or the total norm is not finite.

    Related names: `clip_grad_norm_`; adaptive gradient clipping, AGC, `adaptive_clip_grad` (timm).

    >>> p = torch.zeros(2, requires_grad=True)
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> statistics = clip_gradients_([p], max_norm=1.0)
    >>> float(statistics), [round(element, 5) for element in p.grad.tolist()]
    (5.0, [0.6, 0.8])
    >>> weight = torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True)
    >>> weight.grad = torch.tensor([[0.0, 5.0], [0.0, 0.1]])
    >>> statistics = clip_gradients_([weight], adaptive=0.1)
    >>> weight.grad
    tensor([[0.0000, 0.5000],
            [0.0000, 0.1000]])
    """
    names, entries = _entries("clip_gradients_", "parameters", parameters)
    if (max_norm is None) == (adaptive is None):
        given = "neither" if max_norm is None else f"max_norm={max_norm} and adaptive={adaptive}"
        raise ValueError(f"clip_gradients_: give one of max_norm and adaptive, but it got {given}")
    p = _positive("norm_type", math.inf if norm_type == "inf" else norm_type)
    limit = _max_norm(max_norm) if adaptive is None else _limit("adaptive", adaptive)
    smallest = _limit("eps", eps)
    if adaptive is not None and p != 2:
        raise ValueError(f"clip_gradients_: norm_type must be 2 with adaptive, but it is {p}")
    if unit not in ("row", "tensor"):
        raise ValueError(f"clip_gradients_: unit must be 'row' or 'tensor', but it is {unit!r}")
    if nonfinite not in ("propagate", "skip", "error"):
        raise ValueError(f"clip_gradients_: nonfinite must be 'propagate', 'skip' or 'error', but it is {nonfinite!r}")
    group_of("clip_gradients_", process_group)
    # The usual call, in one step in C++. Monitors, a check of the norm and other ranks come between its passes.
    is_one_step = adaptive is None and nonfinite != "error" and process_group is None
    if is_one_step and not _context.shows_operators() and not is_watched(entries):
        parts = _C.clip_gradients(entries, p, limit, nonfinite == "skip")
        if parts is not None:
            return GradientStatistics(names, [True] * len(names), *parts[:2], None, p, parts[2])
    named = _distinct(names, entries)
    leaves = not _context.is_eager() and (nonfinite == "error" or leaves_graph([parameter for _, parameter in named]))
    clip_named = _clip_in_eager_mode if leaves else _clip
    return clip_named(named, p, limit, None if adaptive is None else unit, smallest, nonfinite, process_group)


def _clip(
    named: list[tuple[str, torch.Tensor]],
    p: float,
    limit: float | torch.Tensor,
    unit: str | None,
    eps: float,
    nonfinite: str,
    process_group: torch.distributed.ProcessGroup | None,
) -> GradientStatistics:
    """Clip gradients by checked arguments, and tell the monitors. With a `unit`, clipping is adaptive, and `limit` is
    the ratio of norms."""
    skip = nonfinite == "skip"
    units = None if unit is None else AdaptiveClipping(named, unit, process_group)
    parameters = [parameter for _, parameter in named]
    gradients = [parameter.grad for parameter in parameters]
    if units is None:
        parts = statistics_of(gradients, p, process_group)
        clipping = clipping_of(parts, p, limit, skip)
    else:
        parts = units.statistics()
        clipping = units.clipping(parts, limit, eps, skip)
    statistics = GradientStatistics([name for name, _ in named], [True] * len(named), *parts, None, p, clipping)
    if nonfinite == "error" and not math.isfinite(statistics.total_norm.item()):
        raise RuntimeError(_nonfinite(statistics))
    if nonfinite == "error" and units is not None and (bad := units.nonfinite_weights()):
        raise RuntimeError(f"clip_gradients_: NaN in the weights of {', '.join(bad[:5])}; no gradient has been changed")
    told = [callback(parameters) for callback in callbacks] if _context.is_eager() and is_watched(parameters) else []
    if units is None:
        present = [gradient for gradient in gradients if gradient is not None]
        distinct = list(dict(zip(keys_of(present), present, strict=True)).values())
        clip(distinct if are_plain(distinct) else [local_part(gradient) for gradient in distinct], clipping, skip)
    else:
        units.clip(skip)
    for tell in told:
        tell(statistics)
    return statistics


_clip_in_eager_mode = _context.in_eager_mode(
    "clip_gradients_: nonfinite='error' reads the norm on the host, which fullgraph=True does not allow; or a "
    "GradientMonitor watches the parameters"
)(_clip)


def _check(function: str, argument: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else f"of type {type(tensor).__name__}"
        raise TypeError(f"{function}: {argument} must be a floating or complex tensor, but it is {kind}")
    if tensor.is_nested:
        raise TypeError(f"{function}: {argument} is a nested tensor; write {argument}.values(), its elements")


def _distinct(names: list[str], given: list[Any]) -> list[tuple[str, torch.Tensor]]:
    """Distinct parameters with their names."""
    if _context.is_eager() and are_plain(given) and len(set(map(id, given))) == len(given):
        dtypes = {parameter.dtype for parameter in given}
        if all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
            return list(zip(names, given, strict=True))
    named: dict[object, tuple[str, torch.Tensor]] = {}
    for index, (name, parameter, key) in enumerate(zip(names, given, keys_of(given), strict=True)):
        if not (isinstance(parameter, torch.Tensor) and parameter.is_floating_point()):
            _check("clip_gradients_", f"parameters[{index}]", parameter)
        named.setdefault(key, (name, parameter))
    return list(named.values())


def _positive(argument: str, value: Any) -> float:
    number = _real(argument, value)
    if not number > 0:
        raise ValueError(f"clip_gradients_: {argument} must be greater than 0, but it is {number}")
    return number


def _max_norm(value: Any) -> float | torch.Tensor:
    """A number, or a tensor without dimensions, which is read on its device."""
    if not isinstance(value, torch.Tensor):
        return _limit("max_norm", value)
    check_scalar("clip_gradients_: max_norm", value)
    value = whole(value)
    return _limit("max_norm", value.item()) if value.is_cpu and _context.is_eager() and is_ordinary() else value


def _limit(argument: str, value: Any) -> float:
    number = _real(argument, value)
    if not number >= 0:
        raise ValueError(f"clip_gradients_: {argument} must be at least 0, but it is {number}")
    return number


def _real(argument: str, value: Any) -> float:
    name = f"clip_gradients_: {argument}"
    is_common = isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt | torch.Tensor)
    if not is_common and hasattr(value, "__float__") and getattr(value, "dtype", "") != "bool":
        value = as_float(name, value)  # a Decimal, or a NumPy array without dimensions
    return real(name, value)


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
            f"the gradient of {name}; no gradient has been changed"
        )
    more = f", and {len(shown) - 5} more" if len(shown) > 5 else ""
    return f"clip_gradients_: NaN or inf in the gradients of {', '.join(shown[:5])}{more}; no gradient has been changed"
