"""A copy of the state of a step: what has changed since, and putting it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any, Literal, NamedTuple

import torch

from .contents import Contents
from .generators import HostGenerators
from .state import Item, Role, State, memory_of

Kind = Literal["number", "rate", "flag", "hook", "identity", "gradient", "ignored"]
"""A number or tensor in `param_groups`; `training` or `requires_grad`; hooks; which objects a container holds, or the
memory of a tensor; whether a parameter has a gradient; something that no guard looks at."""
NUMBERS = (Number, str)
SIZE = object()
"""In place of what is not in a container."""


class Change(NamedTuple):
    """Something that is no longer as it was."""

    kind: Kind
    name: str
    before: Any
    now: Any
    item: Item | None = None
    key: Any = None

    @property
    def is_of_a_number(self) -> bool:
        """True if a number or string has become another one."""
        return type(self.before) is type(self.now) and (isinstance(self.now, NUMBERS) or is_numeric(self.now))


def kind_of(role: Role, key: Any, value: Any) -> Kind:
    """The kind of an item of a container."""
    if role == "options":
        return "identity" if key == "params" else "rate" if isinstance(value, torch.Tensor) else "number"
    if role == "module" and key == "training":
        return "flag"
    if role == "hooks":
        return "hook"
    if role in ("kept", "optimizer") and not isinstance(value, NUMBERS):
        return "identity"
    return "identity" if role == "updater" and key in ("state", "param_groups") else "ignored"


class Gradient(NamedTuple):
    """The gradient of a tensor before and after a step."""

    tensor: torch.Tensor
    before: torch.Tensor | None
    after: torch.Tensor | None
    is_used: bool
    """True if the step wrote to the gradient from before, or left it in place."""


class SavedTensor(NamedTuple):
    """A tensor as it was."""

    item: Item
    alias: torch.Tensor
    """Shares the memory that the tensor had, with its sizes and strides."""
    gradient: torch.Tensor | None
    gradient_version: int
    version: int
    requires_grad: bool
    num_hooks: int
    layout: tuple[Any, ...] | None

    @property
    def is_written(self) -> bool:
        """True if PyTorch has counted a write to it since."""
        tensor = self.item.value
        return not tensor.is_inference() and tensor._version != self.version


class Snapshot:
    """A copy of a state, which can be compared, and put back in place, bit by bit."""

    def __init__(self, state: State, is_copied: Callable[[Item], bool] = lambda item: True) -> None:
        """Copy everything, or of tensors only those contents that are wanted."""
        items = list(state.walk())
        self.containers = [(item, item.pairs()) for item in items if isinstance(item.value, dict | list)]
        self.tensors = [_saved(item) for item in items if isinstance(item.value, torch.Tensor)]
        own = (saved.item for saved in self.tensors if saved.item.role != "gradient")
        self.contents = Contents(filter(is_copied, own), state.generators())
        self.memory = {memory._cdata for saved in self.tensors if (memory := memory_of(saved.alias)) is not None}
        self.host_generators = HostGenerators()

    def changes(self) -> Iterator[Change]:
        """What containers hold that has changed since."""
        return changes_of(self.containers)

    def gradients(self) -> list[Gradient]:
        """The gradients then and now of tensors that may have one. Frozen ones may, from before they were frozen."""
        found = []
        for saved in self.tensors:
            tensor, before = saved.item.value, saved.gradient
            may_have_one = saved.item.role == "kept" and (tensor.is_floating_point() or tensor.is_complex())
            if tensor.is_leaf and (may_have_one or saved.requires_grad or before is not None):
                is_used = before is not None and (tensor.grad is before or before._version != saved.gradient_version)
                found.append(Gradient(tensor, before, tensor.grad, is_used))
        return found

    def restore(self) -> None:
        """Put the state back: the same objects, with the contents that they had."""
        for item, pairs in self.containers:
            _refill(item, pairs)
        for saved in self.tensors:
            tensor = saved.item.value
            if layout_of(tensor) != saved.layout:
                tensor.data = saved.alias
            if tensor.is_leaf and tensor.requires_grad != saved.requires_grad:
                tensor.requires_grad_(saved.requires_grad)
            if tensor.is_leaf and tensor.grad is not saved.gradient:
                tensor.grad = saved.gradient
        self.contents.restore()
        self.host_generators.restore()


def changes_of(containers: list[tuple[Item, list[tuple[Any, Any]]]]) -> Iterator[Change]:
    """What containers hold in place of what they held."""
    for item, pairs in containers:
        then, now = dict(pairs), dict(item.pairs())
        for key in {**then, **now}:
            before, after = then.get(key, SIZE), now.get(key, SIZE)
            if not is_same(before, after):
                kind = kind_of(item.role, key, before if after is SIZE else after)
                yield Change(kind, item.place(key), before, after, item, key)
                if type(before) is type(after) in (dict, list):
                    inner = Item(item.place(key), after, "kept" if item.role == "options" else item.role)
                    yield from changes_of([(inner, inner._replace(value=before).pairs())])


def num_hooks(tensor: torch.Tensor) -> int:
    """The number of hooks on a tensor."""
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def _saved(item: Item) -> SavedTensor:
    tensor = item.value
    gradient = tensor.grad if tensor.is_leaf else None
    versions = 0 if gradient is None else gradient._version, 0 if tensor.is_inference() else tensor._version
    return SavedTensor(
        item, tensor.detach(), gradient, *versions, tensor.requires_grad, num_hooks(tensor), layout_of(tensor)
    )


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The memory of a tensor, and how its elements are in it; None without memory of its own."""
    memory = memory_of(tensor)
    if memory is None:
        return None
    return memory._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def is_same(before: Any, after: Any) -> bool:
    """True for the same object, equal numbers and strings, and tuples of such values."""
    if before is after or type(before) is not type(after):
        return before is after
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    is_nan = isinstance(before, float) and before != before and after != after
    return is_nan or (isinstance(before, NUMBERS) and bool(before == after))


def is_numeric(value: Any) -> bool:
    """True for numbers, and tuples of them."""
    return isinstance(value, Number) or (isinstance(value, tuple) and bool(value) and all(map(is_numeric, value)))


def _refill(item: Item, pairs: list[tuple[Any, Any]]) -> None:
    container, now = item.value, item.pairs()
    if len(now) == len(pairs) and all(a is c and b is d for (a, b), (c, d) in zip(now, pairs, strict=True)):
        return
    if isinstance(container, dict):
        container.clear()
        container.update(pairs)
    else:
        container[:] = [value for _, value in pairs]
