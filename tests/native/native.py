"""Compiles the library that these tests preload."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# pytest-xdist runs a group of tests in one process, so that each module compiles the library only once.
one_process = pytest.mark.xdist_group("native")


def compile_library(library: Path, source: Path, *options: str) -> Path:
    """Compile a source of these tests into a library."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    compilers = [shlex.split(name) for name in names if shutil.which(shlex.split(name)[0])]
    if not compilers:
        pytest.skip(f"no C++ compiler (looked for {', '.join(names)})")
    command = [*compilers[0], *options, "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-4000:]}"
    return library


def compile_guards(folder: Path) -> Path:
    """Compile guarded_memory.cpp into a library for LD_PRELOAD."""
    return compile_library(folder / "guards.so", Path(__file__).with_name("guarded_memory.cpp"), "-O2")
