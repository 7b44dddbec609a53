"""What a monitor keeps from step to step, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..statistics.gradients import gradient_statistics
from ..statistics.shards import local_part

FOLD = 256
"""Number of steps whose values are kept before one launch adds them up."""


@dataclass
class Rehearsal:
    """What steps would have added to a monitor. If a graph captured them, a replay writes these tensors again."""

    steps: int = 0
    clip_results: Sequence[torch.Tensor] = ()
    skipped_steps: Sequence[torch.Tensor] = ()


class Sum:
    """Sum of small tensors, which the device adds up now and then."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def add(self, part: torch.Tensor) -> None:
        self.parts.append(part)
        if len(self.parts) == FOLD:
            self.parts = [torch.stack(self.parts).sum(0)]

    def take(self) -> torch.Tensor | None:
        """Return the sum and start again; None where nothing was added."""
        parts, self.parts = self.parts, []
        return torch.stack(parts).sum(0) if parts else None


class Weights:
    """Copies of parameters from before a step."""

    def __init__(self, keeps_memory: bool) -> None:
        """Choose whether to keep the copies' memory: new memory takes as long as copying."""
        self._keeps_memory = keeps_memory
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def keep(self, parameters: dict[str, torch.Tensor]) -> None:
        """Copy the parameters."""
        self._names = list(parameters)
        self._parameters = list(parameters.values())  # not their memory, which an optimizer may replace
        if list(map(_form, self._parameters)) != list(map(_form, self._copies)):
            self._copies = [torch.empty_like(p, dtype=_precise(p)) for p in self._parameters]
        if self._copies:
            torch._foreach_copy_(list(map(local_part, self._copies)), list(map(local_part, self._parameters)))

    def compare(self) -> tuple[list[str], torch.Tensor] | None:
        """Names `[N]`, and norms `[2, N]` of the copies and of the updates since."""
        if not self._names:
            return None
        weights = gradient_statistics(self._copies).norm
        torch._foreach_sub_(list(map(local_part, self._copies)), list(map(local_part, self._parameters)))
        updates = gradient_statistics(self._copies).norm
        self._parameters = []
        if not self._keeps_memory:
            self._copies = []
        return self._names, torch.stack([weights, updates])


def _precise(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a copy: differences of half types would be rounded."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, _precise(tensor), tensor.device
