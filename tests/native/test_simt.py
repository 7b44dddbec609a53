"""The simulator of CUDA kernels, tests/simt, and the faults that it must detect.

A correct kernel passes for every order of its threads: plain, under AddressSanitizer and UBSan, and under
ThreadSanitizer. Each injected fault is detected, by the simulator itself or by the matching sanitizer.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
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
RUNTIME = SIMT / "simt.cpp"
KERNEL = SIMT / "faults.cuh"

COMMON = ["-Wall", "-Wextra", "-Werror", "-pthread", "-I", str(ROOT / "csrc"), "-I", str(SIMT)]
PLAIN = ["-std=c++17", "-O1"]
ADDRESS = ["-std=c++20", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread"]

ORDERS = ["forward", "reverse", "random"]
BARRIERS = [number for number, line in enumerate(KERNEL.read_text().splitlines(), 1) if "__syncthreads()" in line]
DIVERGENT_BARRIERS, BARRIER = BARRIERS[:2], BARRIERS[2]
WHO = r"simt: kernel cross_entropy, block \d+, thread \d+: "

# Faults that the simulator itself detects, and its messages.
REFUSED = {
    "DIVERGENT_BARRIER": (
        WHO + r"divergent barrier: comes to __syncthreads at \S*faults\.cuh:(\d+)"
        r" while others wait in __syncthreads at \S*faults\.cuh:(\d+)\n"
    ),
    "MISALIGNED_LOAD": WHO + r"misaligned load16 of 16 bytes, address 0x[0-9a-f]*[48c](, at \S+:\d+)?\n",
    "RETURN_BEFORE_BARRIER": (
        r"simt: kernel cross_entropy, block \d+: deadlock: 32 of 96 threads returned, 64 wait in __syncthreads"
        rf" at \S*faults\.cuh:{BARRIER} \(the first is thread 0\)\n"
    ),
}

# Faults that AddressSanitizer detects, and the functions that contain them.
OUT_OF_BOUNDS = {
    "SHARED_WRITE_OUT_OF_BOUNDS": "cross_entropy",
    "GLOBAL_WRITE_OUT_OF_BOUNDS": "store_gradient",
}

# Faults that ThreadSanitizer detects, and the functions that contain them.
RACES = {
    "MISSING_BARRIER": "cross_entropy",
    "MISSING_WARP_BARRIER": "store_gradient",
    "RACE_OF_BLOCKS": "cross_entropy",
    "RACE_OF_BLOCKS_ACROSS_BARRIER": "cross_entropy",
    "MISSING_FENCE": "add_up_losses",
}


def build(compiler, flags, faults, folder):
    """Builds the test of the runtime, the kernel, and the kernel with each of the faults."""
    standard, *_ = flags
    runtime = str(folder / "simt.o")
    compile_with([*compiler, *COMMON, standard, "-O2", "-c", str(RUNTIME), "-o", runtime])  # without a sanitizer
    programs = {"runtime": (SIMT / "test_runtime.cpp", []), "correct": (SIMT / "test_faults.cpp", [])}
    for fault in faults:
        programs[fault] = (SIMT / "test_faults.cpp", [f"-DFAULT=FAULT_{fault}"])
    commands = [
        [*compiler, *COMMON, *flags, *defines, str(source), runtime, "-o", str(folder / name)]
        for name, (source, defines) in programs.items()
    ]
    compile_all(commands)
    return folder


@pytest.fixture(scope="module")
def compiler():
    return default_compiler()


@pytest.fixture(scope="module")
def plain(compiler, tmp_path_factory):
    return build(compiler, PLAIN, REFUSED, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def address_sanitized(compiler, tmp_path_factory):
    folder = tmp_path_factory.mktemp("address")
    need_sanitizers(compiler, ADDRESS, folder)
    return build(compiler, ADDRESS, OUT_OF_BOUNDS, folder)


@pytest.fixture(scope="module")
def thread_sanitized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thread")
    return build(thread_sanitizing_compiler(THREAD, folder), THREAD, RACES, folder)


@pytest.fixture
def programs(request):
    return request.getfixturevalue(request.param)


def run(program, order, *, seed=1, prefix=None):
    return run_in_order(program, order=order, seed=seed, prefix=prefix)


def check_passes(done, least_checks):
    assert done.returncode == 0, (done.stdout + done.stderr)[:8000]
    checks, failed = map(int, re.fullmatch(r"(\d+) checks, (\d+) failed\n", done.stdout).groups())
    assert checks > least_checks
    assert failed == 0
    assert done.stderr == ""


every_build = pytest.mark.parametrize("programs", ["plain", "address_sanitized", "thread_sanitized"], indirect=True)
every_order = pytest.mark.parametrize("order", ORDERS)


@every_build
@every_order
def test_runtime(programs, order):
    check_passes(run(programs / "runtime", order, prefix=without_randomized_addresses()), 1000)


@every_build
@every_order
def test_correct_kernel(programs, order):
    check_passes(run(programs / "correct", order, prefix=without_randomized_addresses()), 10000)


@pytest.mark.parametrize("seed", range(2, 10))
def test_correct_kernel_in_random_orders(plain, seed):
    check_passes(run(plain / "correct", "random", seed=seed), 10000)


@every_order
@pytest.mark.parametrize("fault", REFUSED)
def test_simulator_rejects(plain, fault, order):
    done = run(plain / fault, order)
    assert done.returncode == 2, done.stdout + done.stderr
    said = re.fullmatch(REFUSED[fault], done.stderr)
    assert said, done.stderr
    if fault == "DIVERGENT_BARRIER":
        assert sorted(map(int, said.groups())) == DIVERGENT_BARRIERS


@every_order
@pytest.mark.parametrize("fault", OUT_OF_BOUNDS)
def test_address_sanitizer_detects(address_sanitized, fault, order):
    done = run(address_sanitized / fault, order)
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert re.search(r"WRITE of size \d+ ", done.stderr)
    check_is_in(OUT_OF_BOUNDS[fault], done.stderr)


@every_order
@pytest.mark.parametrize("fault", RACES)
def test_thread_sanitizer_detects(thread_sanitized, fault, order):
    done = run(thread_sanitized / fault, order, prefix=without_randomized_addresses())
    assert done.returncode == 66, done.stdout + done.stderr
    assert "ThreadSanitizer: data race" in done.stderr
    check_is_in(RACES[fault], done.stderr)


def check_is_in(function, report):
    """A sanitizer names functions if it finds a symbolizer."""
    if "faults.cuh:" in report:
        assert re.search(rf"SUMMARY: .*faults\.cuh:\d+.* in .*{function}", report), report


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SIMT_ORDER", "sideways", 'SIMT_ORDER must be forward, reverse or random, but is "sideways"'),
        ("SIMT_SEED", "1x", 'SIMT_SEED must be a whole number, but is "1x"'),
    ],
)
def test_bad_environment(plain, variable, value, message):
    environment = {**os.environ, variable: value}
    done = subprocess.run([str(plain / "correct")], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"simt: {message}\n"
