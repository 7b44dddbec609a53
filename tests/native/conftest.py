"""Fixtures of these tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradscale_ext import _kernels


@pytest.fixture(scope="module")
def driver():
    path = Path(sys.prefix) / "driver.so"
    if not path.exists() or not isinstance(_kernels.compiler(), _kernels.Nvrtc):
        pytest.skip("there is no NVRTC, or the simulated driver is not built (make native)")
    return path
