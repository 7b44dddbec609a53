"""What a captured graph relies on, and what has changed since."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from .._native import _C
from .hooks import OF_MODULES, OF_OPTIMIZERS
from .state import State
from .surroundings import Part

MOST_ACCEPTED = 2
"""How often a number may change without an effect before it is ignored."""
Kind = Literal["number", "rate", "flag", "hook", "identity", "attribute", "gradient"]
"""A number or tensor in `param_groups`; `training` or `requires_grad`; hooks; which objects a container holds, or the
memory of a tensor; a number, string or tensor that the step may or may not read; whether a parameter has a gradient."""

_NUMBERS = (int, float, bool, str)


class Change(NamedTuple):
    """Something that is no longer as it was when a graph was captured."""

    kind: Kind
    name: str
    before: Any
    now: Any
    place: tuple[int, Any] = (0, None)
    """The id of the container, and the key."""


class Gradients(NamedTuple):
    """The gradients of the parameters before and after a step, by the parameters' ids."""

    before: dict[int, torch.Tensor | None]
    after: dict[int, torch.Tensor | None]
    used: set[int]
    """Parameters whose gradient from before the step wrote to, or left in place."""


class _Items(NamedTuple):
    """A dict or list that must keep its values."""

    name: str
    container: Any
    kind_of: Callable[[Any, Any], Kind | None]
    """The kind of an item, by its key and value; None if it may change."""
    values: dict[Any, Any]
    """The items that must not change."""
    names: Mapping[Any, str]
    """Their names, where these do not follow from the name of the container."""


class _Tensor(NamedTuple):
    name: str
    tensor: torch.Tensor
    requires_grad: bool
    has_gradient: bool | None
    """None if it does not matter."""


class Guards:
    """The state before a capture, which each replay expects."""

    def __init__(self, state: State, gradients: Gradients, places: Sequence[Part]) -> None:
        """Record the state, and the tensors and numbers at other places that the step can reach."""
        self._compiled, self._items, self._tensors = _C.Guards(), list[_Items](), list[_Tensor]()
        self._accepted: Counter[tuple[int, Any]] = Counter()
        for name, module in state.modules():
            self._add(name, vars(module), _kind_of_attribute)
            for key in ("_parameters", "_buffers", "_modules"):
                self._add(name, vars(module)[key], lambda key, value: "identity")
            for key in OF_MODULES:
                self._add(name, vars(module)[key], lambda key, value: "hook")
        for name, optimizer in state.optimizers().items():
            self._add_optimizer(name, optimizer)
        for name, tensor in state.named_tensors():
            self._add_tensor(name, tensor, gradients)
        self._add_places(places)

    def _add(
        self,
        name: str,
        container: Any,
        kind_of: Callable[[Any, Any], Kind | None],
        names: Mapping[Any, str] = types.MappingProxyType({}),
    ) -> None:
        def guarded(key: Any, value: Any) -> Kind | None:
            kind = kind_of(key, value) if not names or key in names else None
            is_ignored = kind == "attribute" and self._accepted[id(container), key] >= MOST_ACCEPTED
            return None if is_ignored else kind

        self._compiled.add_items(container, _wanted(container, guarded))
        self._items.append(_Items(name, container, guarded, _values(container, guarded), names))

    def _add_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._add(name, vars(optimizer), lambda key, value: "identity" if key in ("state", "param_groups") else None)
        self._add(f"{name}.param_groups", optimizer.param_groups, lambda key, value: "identity")
        for index, group in enumerate(optimizer.param_groups):
            place = f"{name}.param_groups[{index}]"
            self._add(place, group, _kind_of_option)
            self._add(f"{place}['params']", group["params"], lambda key, value: "identity")
        self._add(f"{name}.state", optimizer.state, lambda key, value: "identity")
        for index, own in enumerate(optimizer.state.values()):
            if isinstance(own, dict):
                self._add(f"{name}.state of parameter {index}", own, lambda key, value: "identity")
        for key in OF_OPTIMIZERS:
            if isinstance(hooks := vars(optimizer).get(key), dict):
                self._add(name, hooks, lambda key, value: "hook")

    def _add_places(self, places: Sequence[Part]) -> None:
        known = {id(items.container) for items in self._items}
        by_container: dict[int, list[Part]] = {}
        for part in places:
            if id(part.container) not in known:
                by_container.setdefault(id(part.container), []).append(part)
        for parts in by_container.values():
            self._add("", parts[0].container, _kind_of_part, {part.key: part.name for part in parts})

    def _add_tensor(self, name: str, tensor: torch.Tensor, gradients: Gradients) -> None:
        kind, before = _C.Gradient.any, gradients.before.get(id(tensor))
        if id(tensor) in gradients.before:
            if before is None:
                kind = _C.Gradient.none
            elif id(tensor) in gradients.used:
                kind = _C.Gradient.same
            self._compiled.add_result(tensor, gradients.after[id(tensor)])
        self._compiled.add_tensor(tensor, kind, before)
        has_gradient = None if kind is _C.Gradient.any else before is not None
        self._tensors.append(_Tensor(name, tensor, tensor.requires_grad, has_gradient))

    def hold(self) -> bool:
        """True if nothing has changed."""
        return bool(self._compiled.hold())

    def set_gradients(self) -> None:
        """Give each parameter the gradient that a replay computes."""
        self._compiled.set_results()

    def keep_gradients(self) -> None:
        """Move the gradients of a plain step to the memory in which a replay leaves them."""
        self._compiled.keep_results()

    def changes(self) -> list[Change]:
        """What has changed."""
        items, tensors = self._compiled.failures()
        found = [change for index in items for change in _changes(self._items[index])]
        return [*found, *(_change(self._tensors[index]) for index in tensors)]

    def accept(self, changes: Sequence[Change] = ()) -> None:
        """Expect what containers hold now. A place that has changed a few times without an effect is ignored."""
        self._accepted.update(change.place for change in changes)
        self._compiled.accept_items([_wanted(one.container, one.kind_of) for one in self._items])
        self._items = [one._replace(values=_values(one.container, one.kind_of)) for one in self._items]


def _pairs(container: Any) -> Any:
    if isinstance(container, types.CellType):
        return [(None, container.cell_contents)]
    return container.items() if isinstance(container, dict) else enumerate(container)


def _wanted(container: Any, kind_of: Callable[[Any, Any], Kind | None]) -> list[bool]:
    return [kind_of(key, value) is not None for key, value in _pairs(container)]


def _values(container: Any, kind_of: Callable[[Any, Any], Kind | None]) -> dict[Any, Any]:
    return {key: value for key, value in _pairs(container) if kind_of(key, value) is not None}


def _kind_of_option(key: str, value: Any) -> Kind:
    """The kind of an item of a parameter group."""
    return "identity" if key == "params" else "rate" if isinstance(value, torch.Tensor) else "number"


def _kind_of_attribute(key: str, value: Any) -> Kind | None:
    """The kind of an attribute of a module."""
    if key == "training":
        return "flag"
    if key in (*OF_MODULES, "_parameters", "_buffers", "_modules"):
        return "identity"
    return "attribute" if type(value) in _NUMBERS and not key.startswith("_") else None


def _kind_of_part(key: Any, value: Any) -> Kind | None:
    """The kind of something that the step can reach."""
    return "attribute" if isinstance(value, (*_NUMBERS, torch.Tensor)) else None


def _changes(items: _Items) -> Iterator[Change]:
    now = _values(items.container, items.kind_of)
    for key in dict.fromkeys([*items.values, *now]):
        before, after = items.values.get(key), now.get(key)
        is_same = before is after or (type(before) is type(after) in (*_NUMBERS, tuple) and before == after)
        if not is_same:
            kind = items.kind_of(key, after if key in now else before) or "attribute"
            shown = f".{key}" if kind in ("attribute", "flag") else f"[{key!r}]" if isinstance(key, str | int) else ""
            yield Change(kind, items.names.get(key, f"{items.name}{shown}"), before, after, (id(items.container), key))


def _change(own: _Tensor) -> Change:
    tensor = own.tensor
    if tensor.requires_grad != own.requires_grad:
        return Change("flag", f"{own.name}.requires_grad", own.requires_grad, tensor.requires_grad)
    if own.has_gradient is not None and (tensor.grad is not None) != own.has_gradient:
        return Change("gradient", f"{own.name}.grad", own.has_gradient, not own.has_gradient)
    return Change("identity", own.name, None, None)
