"""Lines of the user's code."""

from __future__ import annotations

import contextlib
import copy
import linecache
import logging
import os
import sys
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = [os.path.join(os.path.dirname(_TORCH), name) for name in ("numpy", "tensordict")]
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PACKAGES = (_TORCH, *_LIBRARIES, _OURS, os.path.dirname(logging.__file__))
#: Beginnings of the paths of files whose lines are never the user's.
LIBRARY_PATHS = (*(package + os.sep for package in _PACKAGES), copy.__file__, contextlib.__file__)


class Location(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        inside = os.path.relpath(self.file) if self.file.startswith(os.getcwd() + os.sep) else self.file
        return f"{inside}:{self.line}"

    @property
    def source(self) -> str:
        """The text of the line, where its file can be read."""
        return linecache.getline(self.file, self.line).strip()


def users_frame() -> FrameType | None:
    """The innermost frame outside of PyTorch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY_PATHS):
        frame = frame.f_back
    return frame


def users_line() -> Location | None:
    """The line of that frame."""
    frame = users_frame()
    return None if frame is None else Location(frame.f_code.co_filename, frame.f_lineno)
