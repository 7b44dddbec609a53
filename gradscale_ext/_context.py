"""The one place that asks in which context of PyTorch a call is made."""

from __future__ import annotations

import torch


def is_eager() -> bool:
    """Whether Python runs for real: False while torch.compile traces, which cannot see into the pybind11 module."""
    return not torch.compiler.is_compiling()
