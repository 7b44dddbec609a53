"""What to write instead: the end of an error message, empty where there is nothing to recommend."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence

import torch


def instead_of(value: object, name: str = "it") -> str:
    """For something that is no tensor, and was given as the argument `name`."""
    if type(value).__module__ == "torch.fx.proxy":
        return (
            "; torch.fx.symbolic_trace cannot follow code that reads shapes: call it from a function that is marked "
            "with torch.fx.wrap, or use torch.export"
        )
    written = "..." if name == "it" else name
    if hasattr(value, "__array__"):
        return f"; convert {name}: torch.as_tensor({written})"
    if isinstance(value, Iterator):
        return f"; make {name} a list: list({written})"
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, torch.Tensor) for item in value):
            return f"; convert {name}: torch.stack({written})"
        if all(isinstance(item, numbers.Real) for item in value):
            return f"; convert {name}: torch.tensor({written})"
    return ""


def instead_of_kind(tensor: torch.Tensor) -> str | None:
    """What a tensor is that no kernel reads, and what to write; None for an ordinary one."""
    if type(tensor).__name__ == "MaskedTensor":
        return "is a MaskedTensor; give its get_data(), and its get_mask() as mask"
    if tensor.is_nested:
        return "is a nested tensor; write torch.nested.to_padded_tensor(..., 0.0), and mask the padding"
    if tensor.layout is not torch.strided:
        return f"must be dense, but its layout is {tensor.layout}; write .to_dense()"
    return None


def instead_of_dtype(dtype: torch.dtype) -> str:
    """For a dtype that should be one of the kernels' floating ones."""
    return "; write .real" if dtype.is_complex else "; write .float()"


def instead_of_shape(shape: Sequence[int], pattern: Sequence[int | str]) -> str:
    """For an entry that has a dimension of 1 too many or too few; sizes that are letters may be anything."""
    if len(shape) == len(pattern) + 1 and shape[-1] == 1 and _alike(shape[:-1], pattern):
        return "; write .squeeze(-1)"
    if len(shape) == len(pattern) - 1 and pattern[-1] == 1 and _alike(shape, pattern[:-1]):
        return "; write .unsqueeze(-1)"
    return ""


def _alike(shape: Sequence[int], pattern: Sequence[int | str]) -> bool:
    return len(shape) == len(pattern) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(shape, pattern, strict=True)
    )


def instead_of_step_shape(name: str, shape: Sequence[int], batch: int, steps: int, batch_first: bool) -> str:
    """For a mask, or weights of steps, that should be `[B, T]`; `[T, B]` without `batch_first`."""
    wanted = (batch, steps) if batch_first else (steps, batch)
    shape = tuple(shape)
    if shape == (*wanted, 1):
        return f"; write {name}.squeeze(-1)"
    if shape == wanted[::-1]:
        return f"; write {name}.T, or batch_first={not batch_first} where everything is of that order"
    if shape == ((batch, steps - 1) if batch_first else (steps - 1, batch)):
        root = (
            f"torch.cat([torch.ones_like({name}[:, :1]), {name}], 1)"
            if batch_first
            else f"torch.cat([torch.ones_like({name}[:1]), {name}])"
        )
        return (
            f"; T counts the root too, also for heads with first_step = 1, which do not read its entries: write {root}"
        )
    if name == "mask" and shape == (steps,):
        return f"; write mask.expand({batch}, {steps})" if batch_first else f"; write mask[:, None].expand(-1, {batch})"
    if shape == (batch,):
        if name != "mask":
            return "; a weight for each sample goes to importance_weights"
        return f"; write mask[:, None].expand(-1, {steps})" if batch_first else f"; write mask.expand({steps}, {batch})"
    return ""


def instead_of_count(what: str, given: int, wanted: int, first_step: int) -> str:
    """For a number of entries, as far as the root explains it."""
    if given == wanted - 1 and first_step == 0:
        return "; a head that has nothing at the root is declared with first_step=1"
    if given == wanted + 1 and first_step == 1 and what == "target":
        return "; leave out that of the root"
    return ""
