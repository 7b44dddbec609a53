"""A copy of the state of a step: what has changed since, and putting it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any, Literal, NamedTuple

import torch

from .contents import Contents
from .generators import HostGenerators
from .modes import Modes
from .problems import text_of
from .state import Item, Role, State, hooks_of_tensor, memory_of

Kind = Literal["number", "rate", "flag", "hook", "identity", "gradient", "ignored"]
"""A number or tensor in `param_groups`; `training` or `requires_grad`; hooks; which objects a container holds, or the
memory of a tensor; whether a parameter has a gradient; something that no guard looks at."""
NUMBERS = (Number, str)
_NOTHING = object()
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
        return type(self.before) is type(self.now) and (isinstance(self.now, NUMBERS) or _is_numeric(self.now))

    def __str__(self) -> str:
        return f"{self.name} ({text_of(self.before)}, then {text_of(self.now)})" if self.is_of_a_number else self.name


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

    item: Item
    """The tensor."""
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

    @classmethod
    def of(cls, item: Item) -> SavedTensor:
        """Save a tensor, without its contents."""
        tensor = item.value
        gradient = tensor.grad if tensor.is_leaf else None
        versions = 0 if gradient is None else gradient._version, 0 if tensor.is_inference() else tensor._version
        alias, hooks = tensor.detach(), len(hooks_of_tensor(tensor))
        return cls(item, alias, gradient, *versions, tensor.requires_grad, hooks, _layout_of(tensor))

    @property
    def is_written(self) -> bool:
        """True if PyTorch has counted a write to it since."""
        tensor = self.item.value
        return not tensor.is_inference() and tensor._version != self.version

    def changes(self) -> Iterator[Change]:
        """What has changed, apart from the contents and the gradient."""
        name, tensor = self.item.name, self.item.value
        if tensor.requires_grad != self.requires_grad:
            yield Change("flag", f"{name}.requires_grad", self.requires_grad, tensor.requires_grad)
        if _layout_of(tensor) != self.layout or len(hooks_of_tensor(tensor)) != self.num_hooks:
            yield Change("identity", name, None, None)

    def restore(self) -> None:
        """Put back everything except the contents."""
        tensor = self.item.value
        if _layout_of(tensor) != self.layout:
            tensor.data = self.alias
        if tensor.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.is_leaf and tensor.grad is not self.gradient:
            tensor.grad = self.gradient


class Snapshot:
    """A copy of a state, which can be compared, and put back in place, bit by bit."""

    def __init__(self, state: State, is_copied: Callable[[Item], bool] = lambda item: True) -> None:
        """Copy everything, or of tensors only those contents that are wanted."""
        items = list(state.walk())
        self.containers = [(item, item.pairs()) for item in items if isinstance(item.value, dict | list)]
        self.tensors = [SavedTensor.of(item) for item in items if isinstance(item.value, torch.Tensor)]
        own = (saved.item for saved in self.tensors if saved.item.role != "gradient")
        self.contents = Contents(filter(is_copied, own), state.generators())
        self.memory = {memory._cdata for saved in self.tensors if (memory := memory_of(saved.alias)) is not None}
        self.host_generators = HostGenerators()
        self._device = state.device()
        self.modes = Modes.of(self._device)

    def kept(self, *roles: Role) -> list[SavedTensor]:
        """The tensors that have one of the roles."""
        return [saved for saved in self.tensors if saved.item.role in roles]

    def changes(self) -> Iterator[Change]:
        """What has changed since, apart from contents and gradients."""
        yield from changes_of(self.containers)
        for saved in self.kept("kept", "optimizer"):
            yield from saved.changes()

    def gradients(self) -> list[Gradient]:
        """The gradients then and now of tensors that may have one. Frozen ones may, from before they were frozen."""
        found = []
        for saved in self.tensors:
            tensor, before = saved.item.value, saved.gradient
            may_have_one = saved.item.role == "kept" and (tensor.is_floating_point() or tensor.is_complex())
            if tensor.is_leaf and (may_have_one or saved.requires_grad or before is not None):
                is_used = before is not None and (tensor.grad is before or before._version != saved.gradient_version)
                found.append(Gradient(saved.item, before, tensor.grad, is_used))
        return found

    def restore(self) -> None:
        """Put the state back: the same objects, with the contents that they had."""
        for item, pairs in self.containers:
            now = item.pairs()
            if len(now) != len(pairs) or any(
                a is not c or b is not d for (a, b), (c, d) in zip(now, pairs, strict=True)
            ):
                item.value.clear()
                if isinstance(item.value, dict):
                    item.value.update(pairs)
                else:
                    item.value.extend(value for _, value in pairs)
        for saved in self.tensors:
            saved.restore()
        self.contents.restore()
        self.host_generators.restore()
        self.modes.restore(self._device)


def changes_of(containers: list[tuple[Item, list[tuple[Any, Any]]]]) -> Iterator[Change]:
    """What containers hold in place of what they held."""
    for item, pairs in containers:
        then, now = dict(pairs), dict(item.pairs())
        for key in {**then, **now}:
            before, after = then.get(key, _NOTHING), now.get(key, _NOTHING)
            if not is_same(before, after):
                kind = kind_of(item.role, key, before if after is _NOTHING else after)
                yield Change(kind, item.place(key), before, after, item, key)
                if type(before) is type(after) in (dict, list):
                    inner = Item(item.place(key), after, "kept" if item.role == "options" else item.role)
                    yield from changes_of([(inner, inner._replace(value=before).pairs())])


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The memory of a tensor, and how its elements are in it; None without memory of its own."""
    memory = memory_of(tensor)
    if memory is None:
        return None
    return memory._cdata, memory.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def is_same(before: Any, after: Any) -> bool:
    """True for the same object, equal numbers and strings, and tuples of such values."""
    if before is after or type(before) is not type(after):
        return before is after
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    is_nan = isinstance(before, float) and before != before and after != after
    return is_nan or (isinstance(before, NUMBERS) and bool(before == after))


def _is_numeric(value: Any) -> bool:
    """True for numbers, and tuples of them."""
    return isinstance(value, Number) or (isinstance(value, tuple) and bool(value) and all(map(_is_numeric, value)))
