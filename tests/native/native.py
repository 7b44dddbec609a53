"""Compiling and running the C++ programs of tests/cpp and tests/simt."""

from __future__ import annotations

import os
import platform
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


def without_randomized_addresses() -> list[str]:
    """Prefix of a command that disables address space randomisation for ThreadSanitizer, where allowed."""
    prefix = ["setarch", platform.machine(), "-R"]
    if shutil.which("setarch") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
        return prefix
    return []


def thread_sanitizing_compiler(flags: list[str], folder: Path) -> list[str]:
    """Find a compiler with ThreadSanitizer, clang first, because its programs take a tenth of the time of GCC's."""
    candidates = [["clang++"], *[[f"clang++-{version}"] for version in range(19, 13, -1)], default_compiler()]
    failures = []
    for candidate in candidates:
        if shutil.which(candidate[0]) is None:
            continue
        failure = fails_with(candidate, flags, without_randomized_addresses(), folder)
        if failure is None:
            return candidate
        failures.append(failure)
    pytest.skip("no ThreadSanitizer: " + "; ".join(failures))


def run_in_order(
    program: Path,
    *arguments: str,
    order: str = "forward",
    seed: int = 1,
    prefix: list[str] | None = None,
    variables: dict[str, str] | None = None,
):
    """Run a program that contains the simulator."""
    environment = {
        **os.environ,
        "SIMT_ORDER": order,
        "SIMT_SEED": str(seed),
        "ASAN_OPTIONS": "detect_leaks=0",  # needs permissions that a container may lack
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        **(variables or {}),
    }
    command = [*(prefix or []), str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
