"""Values that leave PyTorch and come back, recognised by their numbers: lists, files and arrays have no history."""

from __future__ import annotations

import math
from collections import deque
from numbers import Number
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

#: Numbers that are kept of a value, evenly spaced, and values that are kept of each way.
MOST_NUMBERS, MOST_VALUES = 2**14, 16
#: Numbers are recognised if a coincidence is less likely than 2 to the power of minus this.
CERTAINTY = 16
#: The order of fewer numbers may be a coincidence.
FEWEST_IN_ORDER = 8

Way = TypeVar("Way")


class Numbers(NamedTuple):
    """Numbers of a value, evenly spaced if it has many."""

    values: Tensor
    """Float64, on the CPU, in one dimension."""
    dtype: torch.dtype
    """The type that they had."""
    numel: int
    """Number of all numbers of the value."""
    is_table: bool
    """True if the value has rows and columns."""

    @property
    def bits(self) -> int:
        """Binary digits of a number of the type, after the first one."""
        return -round(math.log2(torch.finfo(self.dtype).eps))

    @property
    def with_many_digits(self) -> Tensor:
        """The numbers that use more than about half of the digits. Others, such as 0.5, are in unrelated values too."""
        digits = torch.frexp(self.values).mantissa * 2 ** min(self.bits // 2 + 1, 12)
        return self.values[self.values.isfinite() & (digits != digits.trunc())]


class Outside(Generic[Way]):
    """The numbers of values that left PyTorch, by the ways that they took.

    A value has come back in one of two cases:

    - More of its numbers are among the ones that left than a coincidence explains.
    - It has as many numbers as a table that left, and in the same order or in the reverse order: they were
      changed one by one, as in `2 * x` or `np.tanh(x)`. The order of a single row is too often the order of other data.
    """

    def __init__(self) -> None:
        """Nothing has left."""
        self._left: dict[Way, _Left] = {}
        self._ways: dict[float, list[Way]] = {}
        self.count = 0
        """Number of values that left."""

    def leave(self, way: Way, tensor: Tensor) -> None:
        """Keep the numbers of a tensor that leaves."""
        self.count += 1
        self._ways.clear()
        self._left[way] = self._left.pop(way, _Left())  # the latest way becomes the last one
        with _disable_current_modes(), torch.no_grad():
            if (numbers := _numbers(tensor)) is not None:
                self._left[way].add(numbers)

    def ways_of(self, value: Any) -> list[Way]:
        """The ways by which a value, or parts of it, left. Numbers that left by several ways came by the latest.

        `value`: a tensor, a NumPy array, a nested list or a number.
        """
        if isinstance(value, float):  # such as the eps of a layer, again and again
            if value not in self._ways:
                self._ways[value] = self._find(value)
            return self._ways[value]
        return self._find(value)

    def _find(self, value: Any) -> list[Way]:
        with _disable_current_modes(), torch.no_grad():
            tensor = value if isinstance(value, Tensor) else _tensor(value)
            if tensor is None or (numbers := _numbers(tensor)) is None:
                return []
            found, others = [], numbers
            for way, left in reversed(self._left.items()):
                if (is_known := left.knows(others)) is not None:
                    found.append(way)
                    others = others._replace(values=others.values[~is_known])
            return found or [way for way, left in reversed(self._left.items()) if left.has_order_of(numbers)][:1]


class _Left:
    """The latest values that left by one way."""

    def __init__(self) -> None:
        self._values: deque[Numbers] = deque(maxlen=MOST_VALUES)
        self._sorted: dict[torch.dtype, Tensor] = {}

    def add(self, numbers: Numbers) -> None:
        """Keep numbers, but not the repetitions of a single one, which may be a constant."""
        if numbers.numel == 1 or len(_unique(numbers.values)) > 1:
            self._values.append(numbers)
            self._sorted.clear()

    def _known(self, dtype: torch.dtype) -> Tensor:
        """The different numbers with many digits, rounded to a type, in ascending order."""
        if dtype not in self._sorted:
            coarsest = min(self._values, key=lambda numbers: numbers.bits)
            together = coarsest._replace(values=torch.cat([numbers.values for numbers in self._values]))
            self._sorted[dtype] = _unique(together.with_many_digits.to(dtype).to(torch.float64))
        return self._sorted[dtype]

    def knows(self, numbers: Numbers) -> Tensor | None:
        """Return True for each number that left, or None if a coincidence explains them."""
        if not self._values or not len(known := self._known(numbers.dtype)):
            return None
        place = torch.searchsorted(known, numbers.values).clamp_(max=len(known) - 1)
        is_known = known[place] == numbers.values
        hits = len(_unique(place[is_known]))
        if hits == 0 or (hits == 1 and numbers.numel > 1):  # one of several may be a constant, as a probability of 1/3
            return None
        others = numbers._replace(values=numbers.values[~is_known]).with_many_digits
        pairs = len(known) * (hits + len(_unique(others)))
        bits = min(numbers.bits, *(left.bits for left in self._values))
        # Chernoff's bound for the probability of as many hits, if numbers are random in their last `bits` digits.
        is_coincidence = hits * math.log2(hits * 2**bits / (math.e * pairs)) < CERTAINTY
        return None if is_coincidence else is_known

    def has_order_of(self, numbers: Numbers) -> bool:
        """Return True if the numbers are a monotonic function of the ones of a table."""
        return any(_is_monotonic(left, numbers) for left in self._values)


def _is_monotonic(table: Numbers, numbers: Numbers) -> bool:
    if not table.is_table or not FEWEST_IN_ORDER <= table.numel == numbers.numel:
        return False
    if min(len(_unique(table.values)), len(_unique(numbers.values))) < FEWEST_IN_ORDER:
        return False
    results = numbers.values[table.values.argsort()]
    # np.tanh of two numbers next to each other may be in the wrong order, by a rounding error.
    rise, rounding = results.diff(), 4 * 2.0**-numbers.bits * results[1:].abs()
    return bool((rise >= -rounding).all() or (rise <= rounding).all())


def _numbers(tensor: Tensor) -> Numbers | None:
    """Numbers of a tensor; None for integers, and for a tensor whose memory cannot be read."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if is_wrapper or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.untyped_storage().nbytes():
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if real.numel() > MOST_NUMBERS:
        places = torch.arange(0, real.numel(), math.ceil(real.numel() / MOST_NUMBERS), device=real.device)
        values = real[torch.unravel_index(places, real.shape)]
    else:
        values = real.reshape(-1)
    is_table = sum(size > 1 for size in tensor.shape) > 1
    return Numbers(values.cpu().to(torch.float64, copy=True), real.dtype, real.numel(), is_table)


def _tensor(value: Any) -> Tensor | None:
    """A number, nested list or NumPy array as a tensor; None for other objects, and for lists of tensors."""
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, Tensor) or not (isinstance(first, Number) or hasattr(first, "__array__")):
        return None
    try:
        if hasattr(value, "dtype"):
            return torch.tensor(value, device="cpu")
        numbers = torch.tensor(value, dtype=torch.complex128, device="cpu")
    except Exception:  # a ragged list, or numbers that PyTorch does not know; the call itself raises the error
        return None
    return numbers if numbers.imag.any() else numbers.real


def _unique(values: Tensor) -> Tensor:
    return torch.unique(values)  # type: ignore[no-any-return]
