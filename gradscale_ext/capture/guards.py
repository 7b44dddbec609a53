"""What a captured graph relies on, and what has changed since."""

from __future__ import annotations

import torch

from .._native import _C
from .snapshot import Change, Gradient, SavedTensor, Snapshot, changes_of, kind_of
from .state import Item


class Guards:
    """The state before a capture, which each replay expects."""

    def __init__(self, before: Snapshot, gradients: list[Gradient]) -> None:
        """Expect what a snapshot has."""
        self._gradients = {id(gradient.item.value): gradient for gradient in gradients}
        self._containers, self._tensors = before.containers, before.kept("kept", "optimizer")
        results = [Item(f"{item.name}.grad", after, "gradient") for item, _, after, _ in gradients if after is not None]
        self._results = [SavedTensor.of(item) for item in results]
        self._compile()

    def _compile(self) -> None:
        containers = []
        for item, pairs in self._containers:
            wanted = [kind_of(item.role, *pair) != "ignored" for pair in pairs]
            is_whole = item.role in ("kept", "optimizer", "options", "hooks") and (any(wanted) or not pairs)
            if is_whole or any(wanted):
                while wanted and not wanted[-1]:
                    wanted.pop()
                containers.append((item.value, wanted))
        expected = [(saved.item.value, saved.gradient) for saved in self._tensors if self._is_expected(saved)]
        results = [(gradient.item.value, gradient.after) for gradient in self._gradients.values()]
        tensors = [saved.item.value for saved in (*self._tensors, *self._results)]
        self.compiled = _C.Guards(containers, tensors, expected, results)

    def _is_expected(self, saved: SavedTensor) -> bool:
        """True if the graph relies on the gradient that a tensor has, or on having none."""
        gradient = self._gradients.get(id(saved.item.value))
        return gradient is not None and (gradient.before is None or gradient.is_used)

    def changes(self) -> list[Change]:
        """What has changed. If `compiled` sees something else, such as other attributes, it forgets that."""
        found = [change for change in changes_of(self._containers) if change.kind != "ignored"]
        for saved in (*self._tensors, *self._results):
            found += saved.changes()
        frozen = {change.name for change in found}
        for saved in self._tensors:
            name, tensor = saved.item.name, saved.item.value
            if f"{name}.requires_grad" in frozen or not self._is_expected(saved) or tensor.grad is saved.gradient:
                continue
            if tensor.grad is None or saved.gradient is None:
                found.append(Change("gradient", f"{name}.grad", saved.gradient is not None, tensor.grad is not None))
            else:
                found.append(Change("identity", f"{name}.grad", None, None))
        if not found:
            self._compile()
        return found

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """Move the gradients of a plain step to the memory in which a replay leaves them."""
        for item, _, after, _ in self._gradients.values():
            now = item.value.grad
            if now is None or after is None or now is after:
                continue
            if (now.shape, now.layout, now.dtype) == (after.shape, after.layout, after.dtype):
                after.copy_(now)
                item.value.grad = after
