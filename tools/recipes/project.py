"""The facts about a project in its recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .checkout import Checkout, Edit
from .lockstep import Side


@dataclass(frozen=True)
class Project:
    """A project, the lines of it that change, and how to step both ways.

    Args:
        name: as on the command line, and in the documentation.
        repository: its owner and name on GitHub.
        commit: what the recipe was measured with.
        marker: a file that every checkout has.
        edits: its lines that ours replace.
        sides: the project's learner and ours (in this order), from a checkout that can be imported.
        batch: random data in the project's shapes, the same for the same seed.
        case: what the data and the network are, in words.
        steps: how many are taken in lockstep.
        tolerance: the largest difference in float64. The recipe gives the reason for a larger one.
        roots, stand_ins: as of `Checkout`.
        texts: words of its source with their replacement; without a GPU, for example.
    """

    name: str
    repository: str
    commit: str
    marker: str
    case: str
    edits: Sequence[Edit]
    sides: Callable[[Checkout], tuple[Side, Side]]
    batch: Callable[[int], Any]
    steps: int = 20
    tolerance: float = 1e-10
    roots: Sequence[str] = (".",)
    stand_ins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Name of a folder with a checkout."""
        return self.repository.split("/")[1]
