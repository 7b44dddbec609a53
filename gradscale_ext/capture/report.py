"""Findings about a captured step, and how they are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..diagnosis.report import Report

Code = Literal[
    "stale_number", "sync", "changing_shape", "changing_operators", "host_copy", "generator", "python_hook",
    "unnamed_state", "argument",
]  # fmt: skip


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
