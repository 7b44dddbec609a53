"""Modules that keep numbers as buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _context


class ModuleWithNumbers(torch.nn.Module):
    """Base of modules whose numbers are buffers, which may change without recompiling."""

    _initial: dict[str, float]

    def _keep(self, **values: float | torch.Tensor | None) -> None:
        """Register tensors as they are, and numbers as scalars in the widest dtype on the tensors' device."""
        self._initial = {}
        device = next((value.device for value in values.values() if isinstance(value, torch.Tensor)), None)
        for name, value in values.items():
            if value is not None and not isinstance(value, torch.Tensor):
                self._initial[name] = value
                value = torch.tensor(value, dtype=_context.widest(device), device=device)
            self.register_buffer(name, value)

    def reset_parameters(self) -> None:
        """Set the buffers to the numbers that the module was built with; a buffer that was given as a tensor stays.

        `to_empty()` calls it for a module that was built on the meta device, as FSDP does for the layers of PyTorch.
        """
        for name, number in self._initial.items():
            self._buffers[name].fill_(number)  # type: ignore[union-attr]

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ModuleWithNumbers:
        """Let `.to()` and `.half()` move the buffers, but round them only for a device that has no float64."""
        widest = _context.widest(function(torch.empty(0, device="cpu")).device)
        buffers = {
            name: value.to(widest) if value.dtype == torch.float64 else value
            for name, value in self.named_buffers(recurse=False)
        }
        for name, value in buffers.items():
            setattr(self, name, value)
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        for name, value in buffers.items():
            moved = getattr(self, name)
            if value.is_meta and not moved.is_meta:
                self.reset_parameters()
            elif moved.dtype != value.dtype:
                setattr(self, name, value.to(moved.device))
        return self

    def _shown(self) -> dict[str, Any]:
        """The values that `repr` shows: the buffers, as they are now."""
        return dict(self._buffers)

    def extra_repr(self) -> str:
        """The arguments."""
        text = []
        for name, value in self._shown().items():
            is_number = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_meta
            text.append(f"{name}={value.item() if is_number else value}")
        return ", ".join(text)
