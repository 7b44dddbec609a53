"""What a captured graph relies on, and what has changed since."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .._native import _C
from .snapshot import SIZE, Change, Gradient, SavedTensor, Snapshot, address_of, changes_of, is_same, kind_of, num_hooks
from .state import Item, holds_attributes

MOST_ACCEPTED = 2
"""How often something may change without an effect before it is ignored."""


class Guards:
    """The state before a capture, which each replay expects."""

    def __init__(self, before: Snapshot, gradients: list[Gradient], *, with_outside: bool) -> None:
        """Expect what a snapshot has. `with_outside`: also what is not part of the state."""
        unread = {"private"} if with_outside else {"private", "reached"}
        self._containers = [one for one in before.containers if one[0].role not in unread]
        self._tensors = [saved for saved in before.tensors if saved.item.role == "kept"]
        self._gradients = {id(gradient.tensor): gradient for gradient in gradients}
        self._accepted: Counter[tuple[int, Any]] = Counter()
        """How often what is in a container has changed without an effect, by the container's id and the key."""
        self._compile()

    def _compile(self) -> None:
        """Make the function that compares everything. What has no keys is compared in Python."""
        self._compiled, self._values = _C.Guards(), list[tuple[Item, Any]]()
        self._attributes: list[tuple[Any, str, Any]] = []
        for item, pairs in self._containers:
            if isinstance(item.value, dict | list | types.CellType):
                wanted = {key for key, value in pairs if self._is_wanted(item, key, value)}
                keys = [key for key, _ in item._replace(keys=None).pairs()]
                is_whole = len(wanted) == len(keys) or item.role == "module"
                has_fixed_size = is_whole and self._accepted[id(item.value), SIZE] < MOST_ACCEPTED
                self._compiled.add_items(item.value, [key in wanted for key in keys], has_fixed_size)
            elif holds_attributes(item.value):
                self._attributes += [(item.value, k, held) for k, held in pairs if self._is_wanted(item, k, held)]
            elif self._is_wanted(item, None, None):
                self._values.append((item, pairs))
        for saved in self._tensors:
            gradient = self._gradients.get(id(saved.item.value))
            kind = _C.Gradient.any
            if gradient is not None and (gradient.before is None or gradient.is_used):
                kind = _C.Gradient.none if gradient.before is None else _C.Gradient.same
            self._compiled.add_tensor(saved.item.value, kind, saved.gradient)
        for gradient in self._gradients.values():
            self._compiled.add_result(gradient.tensor, gradient.after)

    def _is_wanted(self, item: Item, key: Any, value: Any) -> bool:
        kind = kind_of(item.role, key, value)
        return kind != "ignored" and not (kind == "attribute" and self._accepted[id(item.value), key] >= MOST_ACCEPTED)

    def hold(self) -> bool:
        """True if nothing has changed."""
        return (
            bool(self._compiled.hold())
            and all(is_same(item.pairs()[0], pairs[0]) for item, pairs in self._values)
            and all(is_same(getattr(holder, key, SIZE), held) for holder, key, held in self._attributes)
        )

    def set_gradients(self) -> None:
        """Give each parameter the gradient that a replay computes."""
        self._compiled.set_results()

    def keep_gradients(self) -> None:
        """Move the gradients of a plain step to the memory in which a replay leaves them."""
        self._compiled.keep_results()

    def changes(self) -> list[Change]:
        """What has changed."""
        found = [
            change
            for change in changes_of(self._containers)
            if change.kind != "ignored" and self._accepted[change.place] < MOST_ACCEPTED
        ]
        return [*found, *(change for saved in self._tensors for change in self._changes_of_tensor(saved))]

    def _changes_of_tensor(self, saved: SavedTensor) -> Iterator[Change]:
        name, tensor = saved.item.name, saved.item.value
        gradient = self._gradients.get(id(tensor))
        if tensor.requires_grad != saved.requires_grad:
            yield Change("flag", f"{name}.requires_grad", saved.requires_grad, tensor.requires_grad)
        elif gradient is not None and (gradient.before is None or gradient.is_used):
            now, before = tensor.grad is not None, gradient.before is not None
            if now != before:
                yield Change("gradient", f"{name}.grad", before, now)
            elif tensor.grad is not gradient.before:
                yield Change("identity", f"{name}.grad", None, None)
        if address_of(tensor) != saved.address or num_hooks(tensor) != saved.num_hooks:
            yield Change("identity", name, None, None)

    def accept_effects(self) -> None:
        """Expect what a plain step has left in attributes."""
        if all(change.kind == "attribute" for change in self.changes()):
            self.accept()

    def accept(self, changes: Sequence[Change] = ()) -> list[Change]:
        """Expect what containers hold now. Returns the changes that have been accepted a few times, and are ignored
        from now on."""
        self._accepted.update(change.place for change in changes)
        self._containers = [(item, item.pairs()) for item, _ in self._containers]
        self._compile()
        return [change for change in changes if self._accepted[change.place] == MOST_ACCEPTED]
