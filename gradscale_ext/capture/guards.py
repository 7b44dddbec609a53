"""What a captured graph relies on, and what has changed since."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._native import _C
from .snapshot import Change, Gradient, SavedTensor, Snapshot, changes_of, kind_of, layout_of, num_hooks


class Guards:
    """The state before a capture, which each replay expects."""

    def __init__(self, before: Snapshot, gradients: list[Gradient]) -> None:
        """Expect what a snapshot has."""
        self._containers = [
            (item, pairs)
            for item, pairs in before.containers
            if not pairs or any(kind_of(item.role, *pair) != "ignored" for pair in pairs)
        ]
        self._tensors = [saved for saved in before.tensors if saved.item.role in ("kept", "optimizer")]
        self._gradients = {id(gradient.tensor): gradient for gradient in gradients}
        self._compile()

    def _compile(self) -> None:
        self._compiled = _C.Guards()
        for item, pairs in self._containers:
            wanted = [kind_of(item.role, key, value) != "ignored" for key, value in pairs]
            if item.role not in ("attribute", "module", "updater") or any(wanted):
                while wanted and not wanted[-1]:
                    wanted.pop()
                self._compiled.add_items(item.value, wanted)
        for saved in self._tensors:
            self._compiled.add_tensor(saved.item.value)
            if self._is_expected(saved):
                self._compiled.add_gradient(saved.item.value, saved.gradient)
        for gradient in self._gradients.values():
            self._compiled.add_result(gradient.tensor, gradient.after)

    def _is_expected(self, saved: SavedTensor) -> bool:
        """True if the graph relies on the gradient that a tensor has, or on having none."""
        gradient = self._gradients.get(id(saved.item.value))
        return gradient is not None and (gradient.before is None or gradient.is_used)

    def hold(self) -> bool:
        """True if nothing has changed."""
        if self._compiled.hold():
            return True
        if self.changes():
            return False
        self._compile()  # attributes have been added or removed
        return True

    def set_gradients(self) -> None:
        """Give each parameter the gradient that a replay computes."""
        self._compiled.set_results()

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """Move the gradients of a plain step to the memory in which a replay leaves them."""
        for tensor, _, after, _ in self._gradients.values():
            now = tensor.grad
            if now is None or after is None or now is after:
                continue
            if (now.shape, now.layout, now.dtype) == (after.shape, after.layout, after.dtype):
                after.copy_(now)
                tensor.grad = after

    def changes(self) -> list[Change]:
        """What has changed."""
        found = [change for change in changes_of(self._containers) if change.kind != "ignored"]
        return [*found, *(change for saved in self._tensors for change in self._changes_of_tensor(saved))]

    def _changes_of_tensor(self, saved: SavedTensor) -> Iterator[Change]:
        name, tensor = saved.item.name, saved.item.value
        if tensor.requires_grad != saved.requires_grad:
            yield Change("flag", f"{name}.requires_grad", saved.requires_grad, tensor.requires_grad)
        elif self._is_expected(saved):
            if (tensor.grad is None) != (saved.gradient is None):
                yield Change("gradient", f"{name}.grad", saved.gradient is not None, tensor.grad is not None)
            elif tensor.grad is not saved.gradient:
                yield Change("identity", f"{name}.grad", None, None)
        if layout_of(tensor) != saved.layout or num_hooks(tensor) != saved.num_hooks:
            yield Change("identity", name, None, None)
