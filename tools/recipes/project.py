"""The description of a project, which each recipe gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .checkout import Checkout, Edit
from .lockstep import Side


@dataclass(frozen=True)
class Project:
    """A project, the lines of its source to replace, and how to run both its learner and ours.

    Args:
        name: the name on the command line and in the documentation.
        repository: owner and name on GitHub.
        commit: the commit that the recipe was measured with.
        marker: a file that every checkout has.
        edits: the lines to replace, with their replacements.
        sides: makes the project's learner and ours (in this order) from a checkout that can be imported, and on a
            device (second argument) if there is `captured`.
        captured: makes ours with a step that a CUDA graph can repeat, from a checkout and on a device.
        capture_edits: more lines to replace for it, because of what `diagnose_capture` finds in the project's step.
        batch: makes random data in the project's shapes from a seed.
        case: a description of the data and the network.
        steps: the number of learner steps in lockstep.
        tolerance: the largest allowed difference in float64. A recipe that sets a larger one gives the reason.
        roots, stand_ins: see `Checkout`.
        texts: text to replace in all of its files.
        texts_on_cpu: text to replace in them to run without a GPU.
    """

    name: str
    repository: str
    commit: str
    marker: str
    case: str
    edits: Sequence[Edit]
    sides: Callable[..., tuple[Side, Side]]
    batch: Callable[[int], Any]
    captured: Callable[[Checkout, torch.device], Side] | None = None
    capture_edits: Sequence[Edit] = ()
    steps: int = 20
    tolerance: float = 1e-10
    roots: Sequence[str] = (".",)
    stand_ins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    texts_on_cpu: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Name of the folder for a checkout."""
        return self.repository.split("/")[1]
