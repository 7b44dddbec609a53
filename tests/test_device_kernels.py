"""The CUDA kernels, thread by thread in the simulator of tests/simt: against fp64 truth, under sanitizers, with faults.

`make simulated` runs the tests of the Python package through the same kernels.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys

import pytest
from native import (
    ROOT,
    compile_all,
    compile_with,
    default_compiler,
    need_sanitizers,
    one_process,
    run_in_order,
    thread_sanitizing_compiler,
    without_randomized_addresses,
)

pytestmark = [
    one_process,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
        reason="the simulator's fibers are made for Linux on x86-64 and AArch64",
    ),
]

SIMT = ROOT / "tests" / "simt"
CPP = ROOT / "tests" / "cpp"
ROWS = [CPP / f"test_{name}.cpp" for name in ("kernels", "rows", "decode", "elements")]
COMMON = ["-std=c++20", "-fno-math-errno", "-Wno-unknown-pragmas", "-I", str(SIMT)]
PLAIN = ["-O2"]
ADDRESS = ["-O1", "-g1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
THREAD = ["-O1", "-g1", "-fsanitize=thread", "-DGRADSCALE_THREADS=64"]  # of 256 it would see a part

# What is put into a copy of the sources, and what then happens to the program: its name, the sanitizer it is built
# with, and what is said.
FAULTS = {
    "missing barrier": (
        "port/rows.cuh",
        "      __syncthreads();\n      value = static_cast<T>(shared[0]);",
        "      value = static_cast<T>(shared[0]);",
        ("launches", THREAD, "ThreadSanitizer: data race"),
    ),
    "missing barrier before the next sum": (
        "port/rows.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "",
        ("launches", THREAD, "ThreadSanitizer: data race"),
    ),
    "blocks that do not wait for the last one": (
        "loss/multi_step_loss.cuh",
        "    __threadfence(); // the sums are seen before the block is counted\n",
        "",
        ("launches", THREAD, "ThreadSanitizer: data race"),
    ),
    "write behind a row": (
        "port/rows.cuh",
        "    if (j >= 0 && j < width && (j < skip_begin || j >= skip_end)) {",
        "    if (j >= 0 && j <= width && (j < skip_begin || j >= skip_end)) {",
        ("launches", ADDRESS, "AddressSanitizer: heap-buffer-overflow"),
    ),
    "shared memory too small": (
        "loss/multi_step_loss.cuh",
        "  GRADSCALE_SHARED(double, shared, kWarps);\n  GRADSCALE_SHARED(unsigned, last, 1);",
        "  GRADSCALE_SHARED(double, shared, kWarps - 1);\n  GRADSCALE_SHARED(unsigned, last, 1);",
        ("launches", ADDRESS, "AddressSanitizer: heap-buffer-overflow"),
    ),
    "divergent barrier": (
        "port/rows.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "      if (threadIdx.x < 64) {\n        __syncthreads();\n      } else {\n        __syncthreads();\n      }\n",
        ("launches", PLAIN, r"divergent barrier: comes to __syncthreads at \S+:\d+ while others wait in __syncthreads"),
    ),
    "misaligned load": (
        "port/rows.cuh",
        "  if (size % kVector<T> == 0 && first >= 0 && first + size <= width && aligned(row + first)) {",
        "  if (size % kVector<T> == 0 && first >= 0 && first + size <= width) {",
        ("launches", PLAIN, "misaligned load16 of 16 bytes"),
    ),
    "lanes that do not come to a sum": (
        "port/rows.cuh",
        "      value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));",
        "      if (rank != 3) {\n"
        "        value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));\n"
        "      }",
        ("launches", PLAIN, "divergent collective"),
    ),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds the tests of rows (fp64 truth) or of launches from a tree of sources; what is there is used again."""
    built = {}

    def build(name, flags, csrc=ROOT / "csrc"):
        key = (name, *flags, csrc)
        if key not in built:
            folder = tmp_path_factory.mktemp(name)
            if flags == THREAD:
                compiler = thread_sanitizing_compiler(flags, folder)
            else:
                compiler = default_compiler()
                need_sanitizers(compiler, flags, folder)
            built[key] = program(compiler, name, flags, csrc, folder)
        return built[key]

    return build


def program(compiler, name, flags, csrc, folder):
    tests = [*ROWS, SIMT / "simulated_variants.cpp"] if name == "rows" else [SIMT / "test_launches.cpp"]
    sources = {
        SIMT / "simt.cpp": ["-O2"],  # without sanitizers, which it tells of the threads
        SIMT / "device_kernels.cpp": [*flags, "-fno-strict-aliasing"],
        **{test: flags if name == "launches" else ["-O2"] for test in tests},
    }
    objects = {source: str(folder / f"{source.stem}.o") for source in sources}
    include = [*COMMON, "-I", str(csrc), "-I", str(CPP)]
    compile_all(
        [[*compiler, *include, *sources[source], "-c", str(source), "-o", objects[source]] for source in sources]
    )
    compile_with([*compiler, *flags, "-pthread", *objects.values(), "-o", str(folder / name)])
    return folder / name


def check_passes(done):
    assert done.returncode == 0, (done.stdout + done.stderr)[:8000]
    assert re.search(r"(^|, )0 failed\n$", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("order", "place", "largest"), [("forward", "heap", ""), ("reverse", "page", "33"), ("random", "page", "33")]
)
def test_rows_against_truth(build, order, place, largest):
    """Every head, dtype and width; forbidden pages beside the memory see what is read or written outside."""
    check_passes(run_in_order(build("rows", PLAIN), order, place, largest))


def test_rows_under_sanitizers(build):
    check_passes(run_in_order(build("rows", ADDRESS), "random", "heap", "33"))


@pytest.mark.parametrize("flags", [PLAIN, ADDRESS], ids=["plain", "sanitized"])
def test_launches(build, flags):
    check_passes(run_in_order(build("launches", flags)))


def test_launches_have_no_races(build):
    check_passes(run_in_order(build("launches", THREAD), "small", prefix=without_randomized_addresses()))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(build, fault, tmp_path):
    """In a copy of the very kernels."""
    file, right, wrong, (name, flags, message) = FAULTS[fault]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    text = (ROOT / "csrc" / file).read_text()
    assert text.count(right) == 1, f"csrc/{file} has changed: let the fault follow it"
    (tmp_path / "csrc" / file).write_text(text.replace(right, wrong))
    prefix = without_randomized_addresses() if flags == THREAD else []
    done = run_in_order(build(name, flags, tmp_path / "csrc"), "small", prefix=prefix)
    assert done.returncode != 0
    assert re.search(message, done.stderr), done.stderr[:4000]
