"""Reasons why a graph would be wrong, with what to write instead. `CapturedStep` raises them as errors, and
`diagnose_capture` reports them as findings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..diagnosis.lines import Location
from .report import CaptureFinding, Code

_REMEDIES: dict[Code, str] = {
    "stale_number": "keep the number in a tensor on the device, and change the tensor with fill_() or copy_() between "
    "the steps, or pass it to the step as an argument",
    "sync": "return the tensor from the step, and read it afterwards, not at every step",
    "changing_shape": "pad to one shape and mask, or keep to a few shapes: CapturedStep captures one graph for each",
    "changing_operators": "compute both ways and choose with torch.where, or move the choice out of the step: one "
    "captured step for each way",
    "host_copy": "make the tensor before the step, or on the device: torch.full((), v, device=x.device), "
    "torch.zeros(..., device=x.device); pass data from the host to the step as an argument",
    "generator": "name the generator in the state of the step; draw numbers of Python and NumPy before the step, and "
    "pass them as tensors",
    "python_hook": "remove the hook before the graph is captured, or do its work after the step with what the step "
    "returns",
    "unnamed_state": "name the module, optimizer or tensor that holds it in the state of the step",
    "argument": "write to a copy, x.clone() or dict(batch), and return what is new",
}


@dataclass
class Problem:
    """A reason why no graph can make a step, or why a graph may be wrong."""

    code: Code
    cause: str
    remedy: str = ""
    """What to write instead. If empty, what fits every problem of the code."""
    location: Location | None = None
    key: str = ""
    """The same for problems on a line that have one reason."""
    is_certain: bool = True
    """False if a graph may be right."""

    def __post_init__(self) -> None:
        self.remedy = self.remedy or _REMEDIES[self.code]

    @property
    def text(self) -> str:
        """The cause with its line."""
        return f"{self.cause} at {self.location}: {self.location.source}" if self.location else self.cause

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


class Findings:
    """Problems of a step as findings, each once for its place and key. A problem of the whole step has the line on
    which the step is defined."""

    def __init__(self, step: Any) -> None:
        """Make an empty list."""
        self._definition = definition_of(step)
        self._seen: set[tuple[Code, Location | None, str]] = set()
        self.found: list[CaptureFinding] = []

    def add(self, problems: Iterable[Problem]) -> None:
        """Add those that are new."""
        for problem in problems:
            line = problem.location
            seen = problem.code, line, problem.key or ("" if line else problem.cause)
            if seen not in self._seen:
                self._seen.add(seen)
                line = line or (None if problem.code == "python_hook" else self._definition)
                place, source = (None, None) if line is None else (str(line), line.source or None)
                self.found.append(CaptureFinding(problem.code, problem.cause, problem.remedy, place, source))

    def has_any(self, code: Code, location: Location | None) -> bool:
        """True if there is a finding of this kind on the line."""
        return any(seen[:2] == (code, location) for seen in self._seen)


def text_of(value: Any) -> str:
    """A number, or a tuple of numbers, in a message."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return repr(value)


def definition_of(function: Any) -> Location | None:
    """The line on which a function or method is defined; None for other objects."""
    while hasattr(function, "__wrapped__") or isinstance(function, functools.partial):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    code = getattr(function, "__code__", None)
    return None if code is None else Location(code.co_filename, code.co_firstlineno)


# ---- What to write for optimizers and schedulers ---------------------------------------------------------------------


def _accepts(optimizer: torch.optim.Optimizer, argument: str) -> bool:
    return argument in inspect.signature(type(optimizer).__init__).parameters


def step_count_remedy(optimizer: torch.optim.Optimizer) -> str:
    """How an optimizer keeps its numbers on the device."""
    kind = type(optimizer).__name__
    if _accepts(optimizer, "fused"):
        also = ", or on a GPU capturable=True" if _accepts(optimizer, "capturable") else ""
        return f"{kind}(..., fused=True), which reads nothing on the host{also}"
    if _accepts(optimizer, "capturable"):
        return f"on a GPU, {kind}(..., capturable=True), which reads nothing on the host"
    return "an optimizer that reads nothing on the host, such as AdamW(..., fused=True)"


def _tensor_rate(optimizer: torch.optim.Optimizer | None) -> str:
    kind = "the optimizer" if optimizer is None else type(optimizer).__name__
    fused = ", fused=True" if optimizer is None or _accepts(optimizer, "fused") else ""
    return f"{kind}(..., lr=torch.tensor(0.001, device=device){fused}): schedulers change a tensor with fill_()"


def option_remedy(optimizer: torch.optim.Optimizer | None, key: str) -> str:
    """What to write where a number in the parameter groups changes; empty if the program decides."""
    if key in ("betas", "momentum"):
        return "write cycle_momentum=False for a scheduler that changes it"
    return f"write {_tensor_rate(optimizer)}" if key == "lr" else ""


def scheduler_remedy(optimizer: torch.optim.Optimizer | None = None) -> str:
    """Where a scheduler is called."""
    return f"call the scheduler's step() outside of the step, with {_tensor_rate(optimizer)}"
