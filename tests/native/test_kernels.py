"""The CPU kernels alone, without PyTorch: tests/cpp is compiled with them, and run for every instruction set.

Twice: under AddressSanitizer and UBSan, and with release flags. Sanitizers do not see into the latter's vectorised
loops, but the guard pages around the tests' memory do.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from native import ROOT, compile_all, compile_with, default_compiler, need_sanitizers, one_process

pytestmark = [
    one_process,
    pytest.mark.skipif(os.name == "nt", reason="forbidden pages are made as POSIX has it"),
]

KERNELS = [
    ROOT / "csrc" / f"{name}.cpp"
    for name in (
        "flow/element_loops",
        "loss/cpu/rows",
        "support/kernels",
        "cpu/range",
        "statistics/statistics_kernels",
    )
]
MAIN = ROOT / "tests" / "cpp" / "test_kernels.cpp"
TESTS = sorted(path for path in MAIN.parent.glob("*.cpp") if path != MAIN)
FAULTY = MAIN.parent / "test_rows.cpp"

# PyTorch 2.11 compiles extensions as C++17, later ones as C++20.
COMMON = ["-std=c++17", "-fopenmp-simd", "-fno-math-errno", "-Werror=switch", "-I", str(ROOT / "csrc")]
RELEASE = ["-O3", "-fno-trapping-math"]
SANITIZE = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
# Without the second flag, which is part of -O2, GCC does not clear the upper register halves after the AVX-512 kernels,
# and all code that runs afterwards takes twice as long.
SANITIZED = ["-O1", "-fexpensive-optimizations", "-g1", *SANITIZE]


@pytest.fixture(scope="module")
def compiler():
    return default_compiler()


@pytest.fixture(scope="module")
def build(compiler, tmp_path_factory):
    """Builds a program from pairs of a source and its flags; reuses objects that were compiled for another program."""
    folder = tmp_path_factory.mktemp("kernels")
    objects = {}

    def build(name, sources, link_flags):
        commands = []
        used = []
        for source, flags in sources:
            key = (source, *flags)
            used.append(key)
            if key not in objects:
                objects[key] = str(folder / f"{source.stem}_{len(objects)}.o")
                commands.append([*compiler, *COMMON, *flags, "-c", str(source), "-o", objects[key]])
        compile_all(commands)
        program = str(folder / name)
        compile_with([*compiler, *link_flags, *[objects[key] for key in used], "-o", program])
        return program

    return build


def sources_of_tests(*defines):
    """The sources of the tests, which need no sanitizer: they check their own memory."""
    return [(source, ["-O2", *(defines if source == FAULTY else [])]) for source in TESTS]


@pytest.fixture(scope="module")
def sanitizers(compiler, tmp_path_factory):
    need_sanitizers(compiler, SANITIZED, tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def sanitized(build, sanitizers):
    return build("sanitized", [(source, SANITIZED) for source in [*KERNELS, MAIN]] + sources_of_tests(), SANITIZE)


@pytest.fixture(scope="module")
def faulty(build, sanitizers):
    sources = [(source, SANITIZED) for source in [*KERNELS, MAIN]] + sources_of_tests("-DGRADSCALE_TEST_FAULT")
    return build("faulty", sources, SANITIZE)


@pytest.fixture(scope="module")
def release(build):
    return build("release", [(source, RELEASE) for source in KERNELS] + [(MAIN, ["-O2"])] + sources_of_tests(), [])


def run(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def check_passes(program):
    done = run(program)
    assert done.returncode == 0, (done.stdout + done.stderr)[:8000]
    checks, failed = map(int, re.fullmatch(r"(\d+) checks, (\d+) failed\n", done.stdout).groups())
    assert checks > 1e6
    assert failed == 0


def test_kernels_under_sanitizers(sanitized):
    check_passes(sanitized)


def test_kernels_as_released(release):
    check_passes(release)


def test_a_write_past_a_row_is_detected(faulty):
    """AddressSanitizer checks the heap, and every instruction set reads up to the end of a page."""
    done = run(faulty, "default", "heap")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "in the kernels of default: two_hot, float32 width 2" in done.stderr
    for variant in run(faulty, "--list").stdout.split():
        done = run(faulty, variant, "page")
        assert done.returncode != 0
        assert re.search("AddressSanitizer: (SEGV|BUS) on unknown address", done.stderr), done.stderr
        assert f"in the kernels of {variant}: two_hot, float32 width 2" in done.stderr


def test_misaligned_rows_are_detected(sanitized):
    done = run(sanitized, "default", "misaligned")
    assert done.returncode != 0
    assert re.search("runtime error: .*misaligned address", done.stderr)
    assert "in the kernels of default: two_hot, float32 width 2" in done.stderr
