"""The CUDA kernels in C++ programs, against fp64 truth: rows of every kind by their PTX, and whole launches in the
simulator of tests/simt, thread by thread, under sanitizers and with faults.

`make simulated` runs the tests of the Python package through the same PTX.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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

from gradscale_ext import _kernels

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
COMMON = ["-std=c++17", "-fno-math-errno", "-Wno-unknown-pragmas", "-Werror=switch", "-I", str(SIMT), "-I", str(CPP)]
PLAIN = ("-O2",)
ADDRESS = ("-O1", "-g1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
THREAD = ("-O1", "-g1", "-fsanitize=thread", "-DGRADSCALE_THREADS=64")  # with 256 it would see only some of the threads

# Faults for a copy of the sources of a program: compiler flags, file, text, its replacement, and the report when FAULT
# is true, which the environment makes it for one of them.
FAULTS = {
    "missing barrier": (
        THREAD,
        "cuda/rows.cuh",
        "      __syncthreads();\n      value = static_cast<T>(shared[0]);",
        "      if (!FAULT) {\n        __syncthreads();\n      }\n      value = static_cast<T>(shared[0]);",
        "ThreadSanitizer: data race",
    ),
    "missing barrier before the next sum": (
        THREAD,
        "cuda/rows.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "      if (!FAULT) {\n        __syncthreads();\n      }\n",
        "ThreadSanitizer: data race",
    ),
    "blocks that do not wait for the last one": (
        THREAD,
        "loss/cuda/totals.cuh",
        "    __threadfence(); // the sums are seen before the block is counted\n",
        "    if (!FAULT) {\n      __threadfence();\n    }\n",
        "ThreadSanitizer: data race",
    ),
    "write behind a row": (
        ADDRESS,
        "cuda/rows.cuh",
        "    if (j >= 0 && j < width) {\n      row[j]",
        "    if (j >= 0 && j < width + FAULT) {\n      row[j]",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "shared memory too small": (
        ADDRESS,
        "loss/cuda/totals.cuh",
        "  GRADSCALE_SHARED(double, shared, kWarps);\n  GRADSCALE_SHARED(unsigned, last, 1);",
        "  GRADSCALE_SHARED(double, enough, kWarps);\n  GRADSCALE_SHARED(double, small, kWarps - 1);\n"
        "  double* shared = FAULT ? small : enough;\n  GRADSCALE_SHARED(unsigned, last, 1);",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "divergent barrier": (
        PLAIN,
        "cuda/rows.cuh",
        "      __syncthreads(); // what was in shared memory has been read\n",
        "      if (FAULT && threadIdx.x < 64) {\n"
        "        __syncthreads();\n"
        "      } else {\n"
        "        __syncthreads();\n"
        "      }\n",
        r"divergent barrier: comes to __syncthreads at \S+:\d+ while others wait in __syncthreads",
    ),
    "misaligned load": (
        PLAIN,
        "cuda/rows.cuh",
        "A* out) {\n  if (size % kVector<T> == 0 && first >= 0 && first + size <= width && aligned(row + first)) {",
        "A* out) {\n"
        "  if (size % kVector<T> == 0 && first >= 0 && first + size <= width && (FAULT || aligned(row + first))) {",
        "misaligned load16 of 16 bytes",
    ),
    "lanes that do not come to a sum": (
        PLAIN,
        "cuda/rows.cuh",
        "      value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));",
        "      if (!FAULT || rank != 3) {\n"
        "        value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));\n"
        "      }",
        "divergent collective|names lanes that returned",
    ),
}
SWITCH = '#include <cstdlib>\nstatic const int injected = std::atoi(std::getenv("GRADSCALE_FAULT"));\n'


def launchers(csrc):
    """The host code that starts kernels, which does not depend on PyTorch."""
    return [csrc / "cuda" / "lanes_of_row.cpp", *sorted(csrc.rglob("launch_*.cpp"))]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds the test of launches from a source tree, and reuses existing objects."""
    folder = tmp_path_factory.mktemp("device_kernels")
    compilers, objects, programs = {}, {}, {}

    def compiler_for(flags):
        if flags == THREAD:
            return thread_sanitizing_compiler(flags, folder)
        compiler = default_compiler()
        need_sanitizers(compiler, flags, folder)
        return compiler

    def build(flags, csrc=ROOT / "csrc"):
        key = (flags, csrc)
        if key in programs:
            return programs[key]
        if flags not in compilers:
            compilers[flags] = compiler_for(flags)
        sources = [
            (SIMT / "simt.cpp", ("-O2",)),  # without sanitizers: it reports the fibers to them
            *((source, (*flags, "-fno-strict-aliasing")) for source in (SIMT / "device_kernels.cpp", *launchers(csrc))),
            (SIMT / "test_launches.cpp", flags),
        ]
        compiler = compilers[flags]
        used, commands = [], []
        for source, own in sources:
            command = (*compiler, *COMMON, "-I", str(csrc), *own, "-c", str(source), "-o")
            if command not in objects:
                objects[command] = str(folder / f"{source.stem}_{len(objects)}.o")
                commands.append([*command, objects[command]])
            used.append(objects[command])
        compile_all(commands)
        programs[key] = folder / f"launches_{len(programs)}"
        compile_with([*compiler, *flags, "-pthread", *used, "-o", str(programs[key])])
        return programs[key]

    return build


def check_passes(done):
    assert done.returncode == 0, (done.stdout + done.stderr)[:8000]
    assert re.search(r"(^|, )0 failed\n$", done.stdout), done.stdout


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Builds the tests of rows and of decoding; returns the program, and a folder with the PTX of all its kernels."""
    driver = Path(sys.prefix) / "driver.so"
    if not driver.exists() or not isinstance(_kernels.compiler(), _kernels.Nvrtc):
        pytest.skip("there is no NVRTC, or the driver's stand-in is not built (make test)")
    folder = tmp_path_factory.mktemp("rows")
    csrc = ROOT / "csrc"
    sources = [*ROWS, SIMT / "device_variants.cpp", SIMT / "kernels_of_ptx.cpp", *launchers(csrc)]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    compiler = default_compiler()
    flags = [*COMMON, "-I", str(csrc), "-O2", "-fno-strict-aliasing"]
    compile_all([[*compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)])
    program = folder / "rows"
    compile_with([*compiler, "-pthread", *objects, str(driver), f"-Wl,-rpath,{driver.parent}", "-o", str(program)])
    run_in_order(program, "device", "heap", variables={"KERNELS": str(folder)})
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
    check_passes(run_in_order(program, "device", place, variables={"KERNELS": str(folder), "PTX_ORDER": order}))


@pytest.fixture(scope="module")
def faulty(build, tmp_path_factory):
    """Builds the test of launches from a copy of the kernels with injected faults."""
    folders = {}

    def faulty(flags):
        if flags not in folders:
            folders[flags] = tmp_path_factory.mktemp("faulty") / "csrc"
            shutil.copytree(ROOT / "csrc", folders[flags])
            for number, (of_flags, file, right, wrong, _) in enumerate(FAULTS.values(), 1):
                if of_flags == flags:
                    path = folders[flags] / file
                    text = path.read_text()
                    assert text.count(right) == 1, f"csrc/{file} has changed: let the fault follow it"
                    path.write_text(text.replace(right, wrong.replace("FAULT", f"(injected == {number})")))
            header = folders[flags] / "cuda" / "rows.cuh"
            header.write_text(header.read_text().replace("#pragma once\n", f"#pragma once\n{SWITCH}"))
        return build(flags, folders[flags])

    return faulty


def run(program, flags, fault, *arguments):
    """Run the test of launches with the fault of this number; 0 is none."""
    prefix = without_randomized_addresses() if flags == THREAD else []
    return run_in_order(program, *arguments, prefix=prefix, variables={"GRADSCALE_FAULT": str(fault)})


@pytest.mark.parametrize("flags", [PLAIN, ADDRESS, THREAD], ids=["plain", "address", "thread"])
def test_launches(faulty, flags):
    """The program with switchable faults, without any: it must pass, so that a failure is due to a fault."""
    check_passes(run(faulty(flags), flags, 0, *(["small"] if flags == THREAD else [])))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(faulty, fault):
    flags, *_, message = FAULTS[fault]
    done = run(faulty(flags), flags, 1 + list(FAULTS).index(fault), "small")
    assert done.returncode != 0
    assert re.search(message, done.stderr), done.stderr[:4000]
