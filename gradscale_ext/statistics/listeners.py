"""Open monitors, as clippings see them: which parameters they watch, and whom a clipping tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _context

Listener = Callable[[list[torch.Tensor]], Callable[[Any], None]]
"""Callback that gets the parameters before clipping, and returns a callback for the `GradientStatistics` from before
clipping."""

callbacks: list[Listener] = []
"""`clip_gradients_` calls these before it clips watched parameters, and the callbacks that they return afterwards."""

watched: frozenset[int] = frozenset()
"""The ids of the parameters that open monitors watch. torch.compile traces a clipping again when they change."""


def is_watched(parameters: list[torch.Tensor]) -> bool:
    """Return True if an open monitor watches one of the parameters."""
    return bool(watched) and not watched.isdisjoint([id(parameter) for parameter in parameters])


def leaves_graph(parameters: list[torch.Tensor]) -> bool:
    """Return True if torch.compile traces a clipping that monitors can see only in eager mode. With fullgraph=True it
    cannot be left to eager mode, which is said once."""
    if _context.is_eager() or not is_watched(parameters):
        return False
    if _context.allows_graph_breaks():
        return True
    _say_unseen()
    return False


def _say_unseen() -> None:
    _context.say_once(
        "GradientMonitor: a clipping of its parameters is compiled with fullgraph=True, where no monitor sees it: the "
        "charts have no norms before clipping and no clip rate. Compile without fullgraph, or clip outside of the "
        "compiled function"
    )


_say_unseen._dynamo_marked_constant = True  # type: ignore[attr-defined]
