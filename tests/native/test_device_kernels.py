"""The CUDA kernels, whose PTX the simulated driver of tests/ptx runs: rows of every kind against fp64 truth in a C++
program, and faults in calls of the package.

`make simulated` runs the tests of the Python package through the same PTX.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launches
import pytest
from native import ROOT, compile_all, compile_with, default_compiler, one_process

from gradscale_ext import _kernels

pytestmark = one_process

CPP = ROOT / "tests" / "cpp"
SCRIPT = Path(__file__).with_name("launches.py")
ROWS = [CPP / f"test_{name}.cpp" for name in ("kernels", "rows", "decode", "elements")]
FLAGS = ["-std=c++17", "-fno-math-errno", "-Wno-unknown-pragmas", "-Werror=switch", "-O2", "-fno-strict-aliasing"]

# Faults: a call of launches.py, a file of csrc, text in it, the faulty text, and the report.
IN_SHARED = "data race in shared memory: "
IN_GLOBAL = "data race in global memory: "
FAULTS = {
    "missing barrier": (
        "rows of a block",
        "cuda/rows.cuh",
        "      __syncthreads();\n      value = static_cast<T>(shared[0]);",
        "      value = static_cast<T>(shared[0]);",
        IN_SHARED,
    ),
    "missing barrier before the next sum": (
        "rows of a block",
        "cuda/rows.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "",
        IN_SHARED,
    ),
    "blocks that do not wait for the last one": (
        "sums of several blocks",
        "loss/cuda/totals.cuh",
        "    __threadfence(); // the sums are seen before the block is counted\n",
        "",
        IN_GLOBAL,
    ),
    "sums that are read without a fence": (
        "sums of several blocks",
        "loss/cuda/totals.cuh",
        "    __threadfence();\n    store_totals",
        "    store_totals",
        IN_GLOBAL,
    ),
    "maps that are published without an order": (
        "chunks of rows",
        "returns/long_rows.cuh",
        "  store_released(&to->launch, launch);",
        "  to->launch = launch;",
        IN_GLOBAL,
    ),
    "missing barrier of a warp": (
        "rows of a warp",
        "cuda/lane_rows.cuh",
        "      __syncwarp();\n    }\n    load(0);",
        "    }\n    load(0);",
        IN_SHARED,
    ),
    "gradients that replace logits too early": (
        "rows of a warp",
        "cuda/lane_rows.cuh",
        "      __syncwarp(); // several lanes have read the last row, whose gradient replaces it\n",
        "",
        IN_SHARED,
    ),
    "missing barrier after counters are cleared": (
        "statistics",
        "statistics/statistics.cuh",
        "  __syncthreads();\n  const Group block",
        "  const Group block",
        IN_SHARED,
    ),
    "write behind a row": (
        "rows of a block",
        "cuda/rows.cuh",
        "    if (j >= 0 && j < width) {\n      row[j]",
        "    if (j >= 0 && j < width + 1) {\n      row[j]",
        IN_GLOBAL,
    ),
    "shared memory too small": (
        "sums of several blocks",
        "loss/cuda/totals.cuh",
        "  GRADSCALE_SHARED(double, shared, kWarps);\n  GRADSCALE_SHARED(unsigned, last, 1);",
        "  GRADSCALE_SHARED(double, shared, kWarps - 1);\n  GRADSCALE_SHARED(unsigned, last, 1);",
        "out of bounds: byte 56 of a shared array of 56 bytes",
    ),
    "divergent barrier": (
        "rows of a block",
        "cuda/rows.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "      if (threadIdx.x < 64) {\n        __syncthreads();\n      } else {\n        __syncthreads();\n      }\n",
        r"divergent barrier: warp \d+ waits in another one",
    ),
    "misaligned load": (
        "rows of a block",
        "cuda/rows.cuh",
        "A* out) {\n  if (size % kVector<T> == 0 && first >= 0 && first + size <= width && aligned(row + first)) {",
        "A* out) {\n  if (size % kVector<T> == 0 && first >= 0 && first + size <= width) {",
        "misaligned address 0x.*[48c] of lane",
    ),
    "lanes that do not come to a sum": (
        "rows of a block",
        "cuda/rows.cuh",
        "      value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));",
        "      if (rank != 3) {\n"
        "        value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));\n"
        "      }",
        "divergent collective",
    ),
}


def launchers(csrc):
    """The host code that starts kernels, which does not depend on PyTorch."""
    return [csrc / "cuda" / "lanes_of_row.cpp", *sorted(csrc.rglob("launch_*.cpp"))]


def run(program, *arguments, **variables):
    return subprocess.run([str(program), *arguments], env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def driver():
    path = Path(sys.prefix) / "driver.so"
    if not path.exists() or not isinstance(_kernels.compiler(), _kernels.Nvrtc):
        pytest.skip("there is no NVRTC, or the simulated driver is not built (make native)")
    return path


@pytest.fixture(scope="module")
def rows(driver, tmp_path_factory):
    """Builds the tests of rows and of decoding; returns the program, and a folder with the PTX of all its kernels."""
    folder = tmp_path_factory.mktemp("rows")
    csrc = ROOT / "csrc"
    sources = [*ROWS, *sorted(CPP.glob("device/*.cpp")), *launchers(csrc)]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    compile_with_flags = [*default_compiler(), *FLAGS, "-I", str(CPP), "-I", str(csrc)]
    compile_all([[*compile_with_flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)])
    program = folder / "rows"
    link = [*default_compiler(), "-pthread", *objects, str(driver), f"-Wl,-rpath,{driver.parent}"]
    compile_with([*link, "-o", str(program)])
    run(program, "device", "heap", KERNELS=str(folder))
    kernels = [line.split("\t") for line in (folder / "wanted").read_text().splitlines()]
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda kernel: _kernels.image_of(*kernel, "compute_90")[0], kernels))
    lines = []
    for (_, name), image in zip(kernels, images, strict=True):
        (folder / f"{len(lines)}.ptx").write_bytes(image.code.rstrip(b"\0"))
        lines.append(f"{name}\t{image.entry}\t{len(lines)}.ptx\n")
    (folder / "index").write_text("".join(lines))
    return program, folder


@pytest.mark.parametrize(("order", "place"), [("forward", "page"), ("reverse", "heap")])
def test_rows_against_truth(rows, order, place):
    """Every head, dtype and width; guard pages around the memory detect reads and writes out of bounds."""
    program, folder = rows
    done = run(program, "device", place, KERNELS=str(folder), PTX_ORDER=order)
    assert done.returncode == 0, (done.stdout + done.stderr)[:8000]
    assert re.search(r"(^|, )0 failed\n$", done.stdout), done.stdout


# ---- Launches -------------------------------------------------------------------------------------------------------


def outcomes(driver, calls, **variables):
    """The error and the digest of the results of each call, from sources and its name."""
    command = [sys.executable, str(SCRIPT), str(driver), json.dumps([(str(sources), call) for sources, call in calls])]
    environment = {**os.environ, "PTX_RACES": "1", "PTX_CHECK": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_launches_in_exact_memory_give_the_same_bits_in_every_order(driver, tmp_path):
    """Each tensor's memory touches a page without access, at its end or at its begin."""
    guards, source = tmp_path / "guards.so", SCRIPT.with_name("guarded_memory.cpp")
    compile_with([*default_compiler(), "-O2", "-shared", "-fPIC", str(source), "-o", str(guards)])
    calls = [(ROOT / "csrc", call) for call in launches.CALLS]
    found = [
        outcomes(driver, calls, LD_PRELOAD=str(guards), PTX_ORDER=order, PTX_SLICE=turn, GUARDED=side)
        for order, turn, side in (("forward", "0", "end"), ("reverse", "7", "end"), ("reverse", "0", "begin"))
    ]
    assert [error for outcome in found for error, _ in outcome] == [""] * 3 * len(calls)
    assert found[0] == found[1]


# ---- Faults ---------------------------------------------------------------------------------------------------------


def copy_with_fault(folder, fault):
    _, file, right, wrong, _ = FAULTS[fault]
    shutil.copytree(ROOT / "csrc", folder, ignore=shutil.ignore_patterns("*.cpp"))
    text = (folder / file).read_text()
    assert text.count(right) == 1, f"csrc/{file} has changed: let the fault follow it"
    (folder / file).write_text(text.replace(right, wrong))
    return folder


@pytest.fixture(scope="module")
def errors(driver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    calls = [(copy_with_fault(folder / str(k), fault), FAULTS[fault][0]) for k, fault in enumerate(FAULTS)]
    return {fault: error for fault, (error, _) in zip(FAULTS, outcomes(driver, calls), strict=True)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(errors, fault):
    assert re.search(FAULTS[fault][-1], errors[fault]), errors[fault]
