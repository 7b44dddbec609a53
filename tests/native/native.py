"""Compiling the C++ programs of tests/cpp."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Tests of one group run in one process, so they compile once.
one_process = pytest.mark.xdist_group("native")


def default_compiler() -> list[str]:
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    pytest.skip(f"no C++ compiler (looked for {', '.join(names)})")


def compile_with(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-4000:]}"


def compile_all(commands: list[list[str]]) -> None:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_with, commands))


def fails_with(compiler: list[str], flags: list[str], prefix: list[str], folder: Path) -> str | None:
    """Reason why an empty program cannot be built with `flags` and run; None if it can."""
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    for command in (
        [*compiler, *flags, str(source), "-o", str(folder / "probe")],
        [*prefix, str(folder / "probe")],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return f"{shlex.join(command)} fails: {(done.stderr or done.stdout)[-500:]}"
    return None


def need_sanitizers(compiler: list[str], flags: list[str], folder: Path) -> None:
    failure = fails_with(compiler, flags, [], folder)
    if failure is not None:
        pytest.skip(f"no sanitizers: {failure}")
