"""Findings about a captured step, their remedies, and how they are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..diagnosis.lines import Location
from ..diagnosis.report import Report

Code = Literal[
    "stale_number", "sync", "changing_shape", "changing_operators", "host_copy", "generator", "python_hook",
    "unnamed_state", "argument",
]  # fmt: skip

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


@dataclass(frozen=True)
class CaptureFinding:
    """One thing that a CUDA graph of a step would get wrong."""

    code: Code
    """The kind of fault, such as "sync"."""
    cause: str
    """What happened, in a sentence."""
    remedy: str
    """What to write instead."""
    location: str | None = None
    """File and line of the user's code, such as "train.py:12", where known."""
    source: str | None = None
    """Text of that line."""


@dataclass(frozen=True, repr=False)
class CaptureDiagnosis(Report):
    """What `diagnose_capture` found.

    `str()` is a table for logs, `repr()` a report cut to fit a screen, and `rich.print` shows a table for terminals.
    """

    findings: list[CaptureFinding]
    """A finding for each cause and place."""
    num_calls: int
    """Number of calls of PyTorch in a step."""

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain values, for JSON."""
        return {"ok": self.ok, "num_calls": self.num_calls, "findings": [asdict(finding) for finding in self.findings]}

    def _summary(self) -> str:
        if not self.findings:
            return f"No findings: a graph of this step, of {self.num_calls} calls of PyTorch, is right."
        count = "1 finding" if len(self.findings) == 1 else f"{len(self.findings)} findings"
        return f"{count}: a graph of this step would be wrong, or cannot be captured."


class Findings:
    """A list of findings, each once for its place and key."""

    def __init__(self) -> None:
        """Make an empty list."""
        self._seen: set[tuple[Code, Location | None, Any]] = set()
        self.found: list[CaptureFinding] = []

    def add(self, code: Code, cause: str, location: Location | None, remedy: str | None = None, key: Any = "") -> None:
        """Add a finding with the text of its line, and the remedy of its code unless another is given."""
        if not self.has(code, location, key):
            self._seen.add((code, location, key))
            line, source = (None, None) if location is None else (str(location), location.source or None)
            self.found.append(CaptureFinding(code, cause, remedy or _REMEDIES[code], line, source))

    def has(self, code: Code, location: Location | None, key: Any) -> bool:
        """True if there is such a finding."""
        return (code, location, key) in self._seen

    def has_any(self, code: Code, location: Location | None) -> bool:
        """True if there is a finding of this kind on the line."""
        return any(seen[:2] == (code, location) for seen in self._seen)
