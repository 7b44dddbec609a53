"""The CUDA kernels on the simulated driver of tests/ptx, which runs their PTX: calls of the package in guarded memory,
and injected faults, which the driver must report.

`make simulated` checks the results of the same kernels.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import launches
import pytest
from native import ROOT, compile_guards, one_process

pytestmark = one_process

SCRIPT = Path(__file__).with_name("launches.py")
# Faults: a call of launches.py, a file of csrc, text in it, the text that replaces it, and a pattern of the report.
IN_SHARED = "data race in shared memory: "
IN_GLOBAL = "data race in global memory: "
FAULTS = {
    "missing barrier": (
        "rows of a block",
        "cuda/thread_group.cuh",
        "      __syncthreads();\n      value = static_cast<T>(shared[0]);",
        "      value = static_cast<T>(shared[0]);",
        IN_SHARED,
    ),
    "missing barrier before the next sum": (
        "rows of a block",
        "cuda/thread_group.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "",
        IN_SHARED,
    ),
    "missing barrier before the maximum of a wide row is read": (
        "wide rows",
        "loss/cuda/wide_rows.cuh",
        "    put(kLargest, lane_maximum<32>(largest));\n    __syncthreads();\n",
        "    put(kLargest, lane_maximum<32>(largest));\n",
        IN_SHARED,
    ),
    "write past the end of a wide row": (
        "wide rows",
        "loss/cuda/wide_rows.cuh",
        "kStep * c + vector_size * thread_ < width;",
        "kStep * c + vector_size * thread_ < width + vector_size;",
        IN_GLOBAL,
    ),
    "block that is counted without a release": (
        "sums of several blocks",
        "cuda/device.h",
        "atom.acq_rel.gpu",
        "atom.acquire.gpu",
        IN_GLOBAL,
    ),
    "missing barrier before a block is counted": (
        "sums of several blocks",
        "loss/cuda/totals.cuh",
        "      store_samples();\n    }\n    __syncthreads();\n",
        "      store_samples();\n    }\n",
        "data race in",
    ),
    "missing barrier before parts are added up": (
        "sums of several blocks",
        "loss/cuda/totals.cuh",
        "importance_weights.at(sample_, 0) : 0;\n      __syncthreads();\n",
        "importance_weights.at(sample_, 0) : 0;\n",
        IN_SHARED,
    ),
    "results of chunks that are published without a release": (
        "chunks of rows",
        "returns/cuda/long_rows.cuh",
        "  store_released(&to->is_there, 1);",
        "  to->is_there = 1;",
        IN_GLOBAL,
    ),
    "polls of chunks without a fence": (
        "chunks of rows",
        "returns/cuda/long_rows.cuh",
        "load_acquired(&from.is_there) == 0",
        "*static_cast<const volatile uint64_t*>(&from.is_there) == 0",
        IN_GLOBAL,
    ),
    "missing barrier before the maps of a chunk's warps are read": (
        "chunks of rows",
        "returns/cuda/long_rows.cuh",
        "  __syncthreads();\n  const int place",
        "  const int place",
        IN_SHARED,
    ),
    "missing barrier before y of a chunk is read": (
        "chunks of rows",
        "returns/cuda/long_rows.cuh",
        "  __syncthreads();\n  const A chunk_value",
        "  const A chunk_value",
        IN_SHARED,
    ),
    "missing barrier between the rows of two blocks": (
        "rows of several blocks in one",
        "loss/cuda/multi_step_loss.cuh",
        "    __syncthreads(); // all warps have read what is in shared memory\n",
        "",
        IN_SHARED,
    ),
    "missing barrier of a warp": (
        "rows of a warp",
        "cuda/lane_rows.cuh",
        "      __syncwarp();\n    }\n    row_end_ = ",
        "    }\n    row_end_ = ",
        IN_SHARED,
    ),
    "gradients that replace logits too early": (
        "rows of a warp",
        "cuda/lane_rows.cuh",
        "      __syncwarp(); // all lanes have read these rows before gradients replace them\n",
        "",
        IN_SHARED,
    ),
    "write past the end of a row": (
        "rows of a block",
        "cuda/thread_group.cuh",
        "    if (j >= 0 && j < width) {\n      row[j]",
        "    if (j >= 0 && j < width + 1) {\n      row[j]",
        IN_GLOBAL,
    ),
    "shared memory too small": (
        "sums of several blocks",
        "loss/cuda/totals.cuh",
        "  GRADSCALE_SHARED(HeadSums, parts, kTotalsThreads);",
        "  GRADSCALE_SHARED(HeadSums, parts, 32);",
        r"out of bounds: byte -?\d+ of a shared array of \d+ bytes",
    ),
    "divergent barrier": (
        "rows of a block",
        "cuda/thread_group.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "      if (threadIdx.x < 64) {\n        __syncthreads();\n      } else {\n        __syncthreads();\n      }\n",
        r"divergent barrier: warp \d+ waits in another one",
    ),
    "misaligned load": (
        "rows of a block",
        "cuda/thread_group.cuh",
        "A* out) {\n  if (size % kVector<T> == 0 && first >= 0 && first + size <= width && aligned(row + first)) {",
        "A* out) {\n  if (size % kVector<T> == 0 && first >= 0 && first + size <= width) {",
        "misaligned address 0x.*[48c] of lane",
    ),
    "lanes of short rows that take the slower way alone": (
        "short rows of trajectories",
        "returns/cuda/recurrences.cuh",
        "  if (__any_sync(kWholeWarp, !is_finite(y))) {",
        "  if (!is_finite(y)) {",
        "divergent collective",
    ),
    "lanes that skip a shuffle": (
        "rows of a block",
        "cuda/thread_group.cuh",
        "      value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));",
        "      if (rank != 3) {\n"
        "        value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));\n"
        "      }",
        "divergent collective",
    ),
}


# ---- Launches -------------------------------------------------------------------------------------------------------


def outcomes(driver, calls, **variables):
    """The error and the digest of the results of each call. A call is its sources and its name."""
    command = [sys.executable, str(SCRIPT), str(driver), json.dumps([(str(sources), call) for sources, call in calls])]
    environment = {**os.environ, "PTX_RACES": "1", "PTX_CHECK": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_launches_in_guarded_memory_give_the_same_bits_in_every_order(driver, tmp_path):
    """Each tensor's memory ends at an inaccessible page, or begins right after one."""
    guards = compile_guards(tmp_path)
    calls = [(ROOT / "csrc", call) for call in launches.CALLS]
    found = [
        outcomes(driver, calls, LD_PRELOAD=str(guards), PTX_ORDER=order, PTX_SLICE=turn, GUARDED=side)
        for order, turn, side in (("forward", "0", "end"), ("reverse", "7", "end"), ("reverse", "0", "begin"))
    ]
    assert [error for outcome in found for error, _ in outcome] == [""] * 3 * len(calls)
    assert found[0] == found[1]


def test_results_do_not_depend_on_the_number_of_multiprocessors(driver):
    """A warp has as many rows as divide the rows of a call among all warps of the GPU."""
    calls = [(ROOT / "csrc", call) for call in launches.CALLS if "head" in call or "rows" in call]
    found = [outcomes(driver, calls, PTX_MULTIPROCESSORS=count) for count in ("1", "132")]
    assert found[0] == found[1]


def test_polls_of_chunks_with_one_fence_give_the_same_bits(driver):
    """A variant that `make gpu` measures."""
    calls = [(ROOT / "csrc", "chunks of rows")]
    found = [outcomes(driver, calls, NVRTC_OPTIONS=options) for options in ("", "-DGRADSCALE_RELAXED_POLLS")]
    assert found[0][0][0] == ""
    assert found[0] == found[1]


# ---- Faults ---------------------------------------------------------------------------------------------------------


def copy_with_fault(folder, fault):
    _, file, right, wrong, _ = FAULTS[fault]
    shutil.copytree(ROOT / "csrc", folder, ignore=shutil.ignore_patterns("*.cpp"))
    text = (folder / file).read_text()
    assert text.count(right) == 1, f"csrc/{file} has changed: change the fault too"
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
