"""Tensors of every dtype, layout and kind of value, described by plain data."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)

#: Kinds of values. Simple ones are first, because Hypothesis shrinks a failure towards the first.
PALETTES = ("ordinary", "zeros", "wide", "tiny", "huge", "inf", "nan", "everything")
LAYOUTS = (
    "contiguous",
    "transposed",
    "rotated",
    "expanded",
    "all_expanded",
    "columns",
    "rows",
    "offset",
    "channels_last",
    "overlapping",
    "negative",
    "conjugate",
    "numpy",
)

SHAPES = (
    *((3,), (2, 3), (1,), (4, 3), (2, 3, 4), (3, 4, 2), (4, 4), (5, 1, 3), (1, 1), (8, 8), (8, 2, 3), (2, 3, 4, 5)),
    *((), (0,), (3, 0), (0, 4), (2, 0, 3), (1, 5), (5, 1), (4, 1, 4), (2, 2, 2, 2), (4, 1, 3, 2), (3, 5, 1, 2)),
    *((7,), (16,), (17, 33), (2, 3, 2, 2, 2), (3, 700), (5000,), (33, 65), (8, 300)),
)
REPEATING = ("expanded", "all_expanded", "overlapping")
"""Layouts in which several elements share memory."""
SEEDS = range(64)


def product(kind: Callable[..., Any], **fields: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Build a `kind` with one choice per field, all drawn as one number, because Hypothesis draws slowly."""
    count = math.prod(map(len, fields.values()))
    assert count < 2**24, "Hypothesis draws small numbers too often from a larger range"

    def build(number: int) -> Any:
        chosen = {}
        for name, choices in fields.items():
            number, index = divmod(number, len(choices))
            chosen[name] = choices[index]
        return kind(**chosen)

    return st.integers(0, count - 1).map(build)


def random(*parts: object) -> np.random.Generator:
    """A generator seeded by all parts."""
    return np.random.default_rng(zlib.crc32(repr(parts).encode()))


def values(shape: tuple[int, ...], dtype: torch.dtype, palette: str, generator: np.random.Generator) -> torch.Tensor:
    """A contiguous tensor with values of the palette's kind."""
    if dtype.is_complex:
        parts = [values(shape, dtype.to_real(), palette, generator) for _ in range(2)]
        has_nan = parts[0].isnan() | parts[1].isnan()  # if the other part is inf, the modulus may be NaN or inf
        return torch.complex(*(torch.where(has_nan & part.isinf(), torch.nan, part) for part in parts))
    info = torch.finfo(dtype)
    ordinary = generator.standard_normal(shape)
    signs = generator.choice([-1.0, 1.0], shape)
    smallest = float(np.log2(info.smallest_normal)) + float(np.log2(info.eps))

    def spread(low: float, high: float) -> np.ndarray:
        return signs * np.exp2(generator.uniform(low, high, shape))

    def sprinkled(*special: float) -> np.ndarray:
        return np.where(generator.random(shape) < 0.2, generator.choice(special, shape), ordinary)

    largest = float(np.log2(info.max))
    chosen = {
        "ordinary": lambda: ordinary,
        "zeros": lambda: np.where(generator.random(shape) < 0.6, 0.0 * signs, ordinary),
        "wide": lambda: spread(smallest, largest),
        "tiny": lambda: spread(smallest - 1, smallest + 6),
        "huge": lambda: spread(largest - 3, largest),
        "inf": lambda: sprinkled(np.inf, -np.inf),
        "nan": lambda: sprinkled(np.nan),
        "everything": lambda: np.where(
            generator.random(shape) < 0.3,
            generator.choice([0.0, -0.0, info.tiny / 4, -info.tiny, info.max, info.min, np.inf, np.nan], shape),
            ordinary,
        ),
    }[palette]()
    return torch.from_numpy(np.asarray(chosen, dtype=np.float64)).reshape(shape).to(dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of the same shape in another layout, with its own memory. Expanded and overlapping layouts repeat
    values. If the layout is impossible for the shape, the result is contiguous."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    shape, dim = tensor.shape, tensor.dim()
    if layout == "transposed" and dim >= 2:
        order = list(reversed(range(dim)))
        return tensor.permute(order).contiguous().permute(order)
    if layout == "rotated" and dim >= 2:
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "expanded" and dim >= 1 and shape[0]:
        return tensor[:1].clone().expand(shape)
    if layout == "all_expanded" and tensor.numel():
        return tensor.flatten()[:1].clone().reshape(()).expand(shape)
    if layout == "columns" and dim >= 1:
        wide = tensor.new_full((*shape[:-1], 2 * shape[-1] + 1), 7.0)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if layout == "rows" and dim >= 1:
        tall = tensor.new_full((3 * shape[0], *shape[1:]), 7.0)
        tall[1::3] = tensor
        return tall[1::3]
    if layout == "offset":
        memory = torch.cat([tensor.new_full((1,), 7.0), tensor.flatten(), tensor.new_full((3,), 7.0)])
        return memory[1 : 1 + tensor.numel()].view(shape)
    if layout == "channels_last" and dim in (4, 5):
        return tensor.contiguous(memory_format=torch.channels_last if dim == 4 else torch.channels_last_3d)
    if layout == "overlapping" and tensor.numel():
        return tensor.flatten().clone().as_strided(shape, [1] * dim)
    if layout == "negative":
        return torch._neg_view(-tensor)
    if layout == "conjugate" and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    if layout == "numpy" and tensor.dtype != torch.bfloat16:
        return torch.from_numpy(np.array(tensor.numpy()))
    return tensor


def precise(tensor: torch.Tensor) -> np.ndarray:
    """The exact values of a tensor, in float64 or complex128."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return np.array(tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy())


def eps_of(dtype: torch.dtype) -> float:
    """The machine epsilon of the dtype in which tensors of `dtype` are computed: float32 for half types."""
    return torch.finfo(torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype).eps


def smallest_of(dtype: torch.dtype) -> float:
    """The smallest subnormal number of the dtype in which tensors of `dtype` are computed."""
    return smallest_normal_of(dtype) * eps_of(dtype)


def smallest_normal_of(dtype: torch.dtype) -> float:
    """The smallest normal number of the dtype in which tensors of `dtype` are computed."""
    return torch.finfo(torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype).smallest_normal


def bits(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor's values."""
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Watched:
    """Tensors whose whole memory must stay unchanged."""

    def __init__(self, *tensors: object) -> None:
        self.storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        self.before = [self._bytes(storage) for storage in self.storages]

    @staticmethod
    def _bytes(storage: torch.UntypedStorage) -> bytes:
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        return memory.numpy().tobytes()

    def check(self, what: str) -> None:
        for index, (storage, before) in enumerate(zip(self.storages, self.before, strict=True)):
            assert self._bytes(storage) == before, f"{what}: the memory of input {index} has changed"


def check_close(
    result: torch.Tensor, truth: np.ndarray, error: np.ndarray | float, what: str, *, lenient: np.ndarray | None = None
) -> None:
    """Check that the result is equal to the truth, rounded once to the dtype of the result, within `error`.

    The result must be NaN where the truth is NaN, and inf where the truth rounds to inf. It may be anything where
    `error` is infinite. Two complex numbers that are not finite are treated as equal; where `lenient`, so are two real
    numbers.
    """
    assert tuple(result.shape) == truth.shape, f"{what}: shape {tuple(result.shape)}, expected {truth.shape}"
    got, info = precise(result), torch.finfo(result.dtype)
    if np.iscomplexobj(got):
        truth = truth.astype(np.complex128)
        both = ~(np.isfinite(got) | np.isfinite(truth))
        got, truth = np.where(both, 0, got), np.where(both, 0, truth)
        got, truth = (np.stack([a.real, a.imag], -1) for a in (got, truth))
        error = error[..., None] if isinstance(error, np.ndarray) else error
    smallest = info.smallest_normal * info.eps
    rounding = np.maximum(np.abs(truth) * (info.eps / 2), max(smallest / 2, 5e-324)) * ROUNDING
    allowed = rounding + error
    close = (np.abs(got - truth) <= allowed) | np.isposinf(allowed)
    close |= (got == truth) | (np.isnan(got) & np.isnan(truth))
    close |= np.isinf(got) & (np.sign(got) == np.sign(truth)) & (np.abs(truth) + allowed >= info.max)
    if lenient is not None:
        close |= lenient & ~np.isfinite(got) & ~np.isfinite(truth)
    if not close.all():
        first = tuple(int(i) for i in np.argwhere(~close)[0])
        raise AssertionError(
            f"{what}{list(first)}: {got[first]!r}, expected {truth[first]!r} "
            f"+- {np.broadcast_to(allowed, close.shape)[first]:.3g} ({(~close).sum()} of {close.size} are wrong)"
        )


ROUNDING = 1.0 + 1e-6
"""Factor of half a unit in the last place, which allows for the rounding of the truth itself."""


class Described:
    """A case: Hypothesis prints it in one line, as Python."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Numbers:
    """The description of a tensor."""

    layout: str = "contiguous"
    palette: str = "ordinary"
    seed: int = 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return laid_out(values(shape, dtype, self.palette, random(self.seed)), self.layout)


numbers = product(Numbers, seed=SEEDS, layout=LAYOUTS, palette=PALETTES)
