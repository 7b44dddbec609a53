"""DTensors. A function that does not support them is computed by every rank, from the gathered tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.torch_version import TorchVersion

from . import _structures

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _is_imported() -> bool:
    """True once DTensor is imported, which takes a while; before that, no DTensor exists."""
    return "torch.distributed.tensor" in sys.modules


_is_imported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_distributed(value: object) -> bool:
    """True for a DTensor."""
    return _is_imported() and isinstance(value, torch.distributed.tensor.DTensor)


def mesh_of(*values: Any) -> DeviceMesh | None:
    """The mesh of the first DTensor in nested lists, tuples and mappings; None if there is none."""
    if not _is_imported():
        return None
    for value in values:
        if is_distributed(value):
            return value.device_mesh  # type: ignore[no-any-return]
        if isinstance(value, Mapping):
            value = [item for _, item in value.items()]  # a TensorDict iterates over its first dimension
        elif not isinstance(value, list | tuple):
            continue
        if (mesh := mesh_of(*value)) is not None:
            return mesh
    return None


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to the tensors of a structure. Mappings become dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(function, item) for key, item in value.items()}
    if _structures.is_leaf(value):
        return value
    return _structures.rebuilt("gradscale_ext", lambda _, item: mapped(function, item), value)


# In PyTorch 2.11, gradients lose their graph where they pass between DTensors and plain tensors.
_KEEPS_GRAPH_OF_GRADIENTS = TorchVersion(torch.__version__) >= "2.12.0a0"


def _refuse_gradient_graph(_: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"gradscale_ext: PyTorch {torch.__version__} has no second derivatives of DTensors (PyTorch 2.12 has); "
            "pass plain tensors, or differentiate without create_graph=True"
        )


def _with_checked_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Let a backward pass raise where it would silently give gradients without their graph."""
    if not _KEEPS_GRAPH_OF_GRADIENTS and tensor.requires_grad and not torch.compiler.is_compiling():
        tensor.register_hook(_refuse_gradient_graph)  # type: ignore[no-untyped-call]
    return tensor


def whole(value: Any) -> Any:
    """Gather each DTensor, and return plain tensors as they are. If there is a DTensor, every rank must call this."""

    def gathered(tensor: Any) -> torch.Tensor:
        return _with_checked_gradient(tensor.full_tensor()) if is_distributed(tensor) else tensor

    return mapped(gathered, value)


def with_whole_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Let a plain tensor be added to DTensors: its gradient is then a DTensor, and is gathered."""
    if tensor.requires_grad and not torch.compiler.is_compiling():
        tensor.register_hook(whole)  # type: ignore[no-untyped-call]
    return tensor


def replicated(value: Any, mesh: DeviceMesh) -> Any:
    """Make DTensors of plain tensors that are the same on every rank. Nothing is sent, and memory is shared."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * mesh.ndim
    return mapped(
        lambda tensor: tensor
        if is_distributed(tensor)
        else DTensor.from_local(tensor, mesh, placements, run_check=False),
        value,
    )


def by_whole(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Call a function with gathered tensors in place of DTensors. If `first` has a DTensor, results are replicated."""
    result = function(*whole((first, *others)))
    mesh = mesh_of(first)
    return result if mesh is None else replicated(mapped(_with_checked_gradient, result), mesh)
