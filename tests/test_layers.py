"""The layers of csrc/: no file includes from a folder above its own, no switch has a default, no file is long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# Machinery that names no kernel, formulas, the glue to PyTorch, and the families, which know nothing of each other.
LAYERS = {"port": 0, "math": 1, "host": 2, "flow": 3, "loss": 3, "tensors": 3}
FILES = sorted(path for path in CSRC.rglob("*") if path.is_file())
SIMULATOR = "simt.h"  # of tests/simt, in place of CUDA


def name(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_includes_point_down(file):
    """From its own folder, or from one of a lower layer; module.cpp, the front door, from everywhere."""
    here = file.parent
    assert file == CSRC / "module.cpp" or here.name in LAYERS
    for included in re.findall(r'^\s*#(?:include|define GRADSCALE_KERNELS) "([^"]+)"', file.read_text(), re.MULTILINE):
        if included != SIMULATOR:
            path = (here / included).resolve()
            assert path.is_file(), included
            assert here in (CSRC, path.parent) or LAYERS[path.parent.name] < LAYERS[here.name], included


@pytest.mark.parametrize("file", FILES, ids=name)
def test_switches_name_every_case(file):
    """A kind without a case of its own is an error of the compiler (-Werror=switch) where no default takes it."""
    assert "default:" not in file.read_text()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_files_have_one_subject(file):
    assert len(file.read_text().splitlines()) <= 500
