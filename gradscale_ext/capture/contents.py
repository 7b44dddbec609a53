"""Copies of tensors: what has changed since, by how much, and putting it back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_wrapper

from .generators import TorchGenerators
from .state import Item, memory_of, with_gradients


class Contents:
    """Copies of tensors, of their gradients, and of the states of PyTorch's generators."""

    @torch.no_grad()
    def __init__(self, items: Iterable[Item], generators: Iterable[torch.Generator] = ()) -> None:
        """Copy the memory of the tensors, each once."""
        self._items = list(items)
        self._tensors = self._now()
        self._gradients = [(item.value, item.value.grad) for item in self._items if item.value.is_leaf]
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in self._tensors.values():
            if (key := _key(tensor)) not in self._copies:
                whole = _whole(tensor)
                self._copies[key] = whole, whole.clone()
        self.generators = TorchGenerators(generators)

    def _now(self) -> dict[str, torch.Tensor]:
        """The tensors, and the gradients that they have now. The parts of a wrapper are items of their own."""
        return {item.name: item.value for item in with_gradients(self._items) if not _is_wrapper(item.value)}

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the contents, the gradients and the states of the generators."""
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for whole, copied in self._copies.values():
            if (memory := memory_of(whole)) is not None and memory.nbytes() != copied.nbytes:
                memory.resize_(copied.nbytes)
            whole.copy_(copied)
        self.generators.restore()

    @torch.no_grad()
    def differences(self) -> Iterator[tuple[str, float]]:
        """Names of the tensors that have changed, each with the largest difference of two elements."""
        same = {key for key, (whole, copied) in self._copies.items() if _is_same_memory(whole, copied)}
        now = self._now()
        for name in [*self._tensors, *(now.keys() - self._tensors.keys())]:
            one, two = self._tensors.get(name), now.get(name)
            if one is None or two is None:
                yield name, math.inf
            elif (one is not two or _key(one) not in same) and (distance := difference(self._copy_of(one), two)):
                yield name, distance

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = self._copies[_key(tensor)][1]
        if memory_of(tensor) is None:
            return copied
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=copied.device).set_(copied.untyped_storage(), *layout)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two elements; infinity for other shapes, or NaN in other places."""
    if one.shape != other.shape:
        return math.inf
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    same = (one == other) | ((one != one) & (other != other))
    if bool(same.all()):
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    largest = torch.where(same, 0, (one.to(wide) - other.to(wide)).abs()).amax().item()
    return math.inf if math.isnan(largest) else largest


def _key(tensor: torch.Tensor) -> int:
    memory = memory_of(tensor)
    return id(tensor) if memory is None else memory._cdata


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of all of a tensor's memory; tensors without memory of their own themselves."""
    memory = memory_of(tensor)
    return tensor.detach() if memory is None else torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _is_same_memory(whole: torch.Tensor, copied: torch.Tensor) -> bool:
    memory = memory_of(whole)
    return memory is not None and memory.nbytes() == copied.nbytes and torch.equal(whole, copied)
