"""Ends of error messages that say what to write instead; empty where there is nothing to recommend."""

from __future__ import annotations

import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch

from . import _context
from ._context import Function

#: How to install something into this environment; environments of uv have no pip. (find_spec("pip") would keep
#: setuptools from being imported later.)
_HAS_PIP = any(os.path.isdir(os.path.join(folder, "pip")) for folder in sys.path)
INSTALL = "python -m pip install" if _HAS_PIP else "uv pip install"


def without_parameter(name: str) -> Callable[[Function], Function]:
    """Hide a parameter that accepts arguments only to refuse them from the signature that Python and the docs show."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        shown = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate


def remedy_for_type(value: object, name: str = "it", dims: Mapping[str, int] | None = None) -> str:
    """Remedy for an argument `name` that is not a tensor. `dims`: the dimensions along which a list of tensors may have
    to be stacked, by what they mean."""
    if is_proxy(value):
        return (
            "; torch.fx.symbolic_trace cannot follow code that reads shapes: call it from a function that is marked "
            "with torch.fx.wrap, or use torch.export"
        )
    written = "..." if name == "it" else name
    if hasattr(value, "__array__"):
        return f"; convert {name}: torch.as_tensor({written})"
    if isinstance(value, Iterable) and not isinstance(value, list | tuple | str | bytes | bytearray | Mapping | Set):
        return f"; make {name} a list: list({written})"
    if isinstance(value, list | tuple) and (code := _code_for_list(value, written, dims)):
        return f"; convert {name}: {code}"
    if _is_number(value):
        return "; a tensor has an element for each sample: torch.tensor([...])"
    return ""


def _code_for_list(value: Sequence[object], written: str, dims: Mapping[str, int] | None) -> str:
    """Code that makes a tensor of a list of tensors or of nested lists of numbers; empty if there is none."""
    tensors = [item for item in value if isinstance(item, torch.Tensor)]
    if value and len(tensors) == len(value):
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            can_be_padded = () not in shapes and len({shape[1:] for shape in shapes}) == 1
            return _padded(written) if can_be_padded else ""
        if tensors[0].dim() == 0 or not dims:
            return f"torch.stack({written})"
        codes = [f"torch.stack({written}{f', {dim}' if dim else ''}){meaning}" for meaning, dim in dims.items()]
        return ", or ".join(codes)
    if not _is_number(_first_leaf(value)):
        return ""
    lengths = {len(row) if isinstance(row, list | tuple) else 0 for row in value}
    if len(lengths) > 1:
        return "" if 0 in lengths else _padded(f"[torch.tensor(row) for row in {written}]")
    return f"torch.tensor({written})"


def _padded(rows: str) -> str:
    return f"torch.nn.utils.rnn.pad_sequence({rows}, batch_first=True), and mask the padding"


def is_proxy(value: object) -> bool:
    """Return True for a tensor's placeholder in torch.fx.symbolic_trace."""
    return type(value).__module__ == "torch.fx.proxy"


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)


def _first_leaf(value: object) -> object:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


def remedy_for_kind(tensor: torch.Tensor, has_mask: bool = True) -> str | None:
    """Fault and remedy of a kind of tensor that no kernel reads; None for an ordinary tensor."""
    if type(tensor).__name__ == "MaskedTensor":
        return "is a MaskedTensor; give its get_data()" + (", and its get_mask() as mask" if has_mask else "")
    if tensor.is_nested:
        mask = ", and mask the padding" if has_mask else ""
        return f"is a nested tensor; write torch.nested.to_padded_tensor(..., 0.0){mask}"
    if tensor.is_quantized:
        return "is quantized; write .dequantize()"
    if tensor.layout is not torch.strided:
        return f"must be dense, but its layout is {tensor.layout}; write .to_dense()"
    return None


def look_like_probabilities(x: torch.Tensor) -> torch.Tensor:
    """True for rows (slices of the last dimension) that are at least 0 and add up to 1."""
    tolerance = 1e-3 if x.dtype in (torch.float32, torch.float64) else 2e-2
    total = x.sum(-1, dtype=_context.widest(x.device))
    return (x >= 0).all(-1) & ((total - 1).abs() <= tolerance)


def remedy_for_dtype(dtype: torch.dtype) -> str:
    """Remedy for a dtype that no kernel accepts."""
    return "; write .real" if dtype.is_complex else "; write .float()"


def remedy_for_shape(name: str, shape: Sequence[int], patterns: Iterable[Sequence[int | str]]) -> str:
    """Remedy for a missing or superfluous last dimension of 1, or for groups of classes in one dimension; letters stand
    for any size."""
    for pattern in patterns:
        if len(shape) == len(pattern) + 1 and shape[-1] == 1 and fits(shape[:-1], pattern):
            return f"; write {name}.squeeze(-1)"
        if len(shape) == len(pattern) - 1 and pattern[-1] == 1 and fits(shape, pattern[:-1]):
            return f"; write {name}.unsqueeze(-1)"
        if len(shape) == len(pattern) - 1 >= 2 and fits(shape[:-1], pattern[:-2]):
            groups, classes = pattern[-2:]
            if shape[-1] == math.prod(pattern[-2:]) if isinstance(groups, int) else groups == "G":
                return f"; write {name}.unflatten(-1, ({groups}, {classes}))"
    return ""


def remedy_for_bins(num_bins: int, given: int) -> str:
    """Remedy for logits of another number of bins than a support has."""
    return f"; give the last layer {num_bins} outputs, or the support num_bins={given}" if given > 1 else ""


def fits(shape: Sequence[int], pattern: Sequence[int | str]) -> bool:
    """Return True if a shape matches a pattern. A letter in the pattern matches any size of at least 1."""
    return len(shape) == len(pattern) and all(
        size >= 1 if isinstance(wanted, str) else size == wanted for size, wanted in zip(shape, pattern, strict=True)
    )


def remedy_for_step_shape(name: str, shape: Sequence[int], batch: int, steps: int, batch_first: bool) -> str:
    """Remedy for a mask, or weights of steps, that should be `[B, T]`, or `[T, B]` without `batch_first`."""
    wanted = (batch, steps) if batch_first else (steps, batch)
    shape = tuple(shape)
    if name != "mask" and shape == (batch, 1) == (steps, 1) and batch_first:
        return (
            f"; write {name}.expand({batch}, {steps}) for an entry per sample, or {name}.squeeze(-1) for one per step"
        )
    if shape == (*wanted, 1) or (name != "mask" and shape == (steps, 1)):
        return f"; write {name}.squeeze(-1)"
    if shape == wanted[::-1]:
        return f"; write {name}.T, or batch_first={not batch_first} where everything has that order"
    if shape == ((batch, steps - 1) if batch_first else (steps - 1, batch)):
        root = (
            f"torch.cat([torch.ones_like({name}[:, :1]), {name}], 1)"
            if batch_first
            else f"torch.cat([torch.ones_like({name}[:1]), {name}])"
        )
        return f"; T includes the root, whose entries are ignored by heads with first_step = 1: write {root}"
    if shape == (steps - 1,):
        return "; T includes the root"
    if shape == (batch,) and name == "step_weights":
        return "; a weight for each sample goes to importance_weights"
    if len(shape) == 2 and all(own in (1, size) for own, size in zip(shape, wanted, strict=True)):
        return f"; write {name}.expand({wanted[0]}, {wanted[1]})"
    as_row, as_column = (f"{name}{index}.expand({wanted[0]}, {wanted[1]})" for index in ("", "[:, None]"))
    for_sample, for_step = (as_column, as_row) if batch_first else (as_row, as_column)
    if shape == (batch,) == (steps,):
        return f"; write {for_sample} for an entry per sample, or {for_step} for an entry per step"
    if shape in ((batch,), (steps,)):
        return f"; write {for_sample if shape == (batch,) else for_step}"
    return ""


def remedy_for_count(
    what: str,
    entries: Sequence[torch.Tensor | None],
    wanted: int,
    batch: int,
    first_step: int,
    longest: str,
    longest_first_step: int,
    surplus: int | None,
    batch_first: bool,
) -> str:
    """Remedy for a number of entries that differs from the number of the head `longest`. The targets of all heads have
    `surplus` more entries than their predictions; None if heads differ."""
    first = entries[0]
    if first is not None and first.dim() > 0 and first.shape[0] == wanted != batch:
        return (
            f"; samples and steps look exchanged: write {what}.transpose(0, 1) for a stacked tensor, or "
            f"torch.stack({what}{'' if batch_first else ', 1'}) for a list by sample"
        )
    if what == "target" and surplus and (first_step == 0 or surplus < 0):
        return (
            f"; K actions give K + 1 predictions: unroll with {len(entries) + first_step - 1} actions, or give "
            f"{wanted} targets"
        )
    if what == "target" and len(entries) == wanted + 1 and first_step == 1:
        return "; leave out the target of the root"
    if what in ("prediction", "target") and len(entries) == wanted - 1 and first_step == 0:
        if what == "target" and first is not None and first.dim() == 1:
            return (
                "; for targets of gs.muzero_targets, pass root_reward= to it, or declare the head with first_step=1 "
                "and leave out its prediction at the root"
            )
        if longest_first_step == 1:
            return f"; leave out the root in head '{longest}', or its first_step=1"
        return "; a head that has nothing at the root is declared with first_step=1, and has no prediction for it"
    return ""
