"""The fuzzer's cases on the CPU kernels of each instruction set, with an inaccessible page next to each tensor.

Sanitizers do not check vectorised loops, but guard pages catch their errors. `make sanitized` runs the same cases under
AddressSanitizer and UBSan.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from native import ROOT, compile_guards

READ_BYTE = """
import ctypes, torch
memory = torch.ones(1000)
ctypes.c_char.from_address(memory.data_ptr() + {offset}).value
"""


@pytest.fixture(scope="module")
def guards(tmp_path_factory):
    return compile_guards(tmp_path_factory.mktemp("guards"))


def run(guards, side, *arguments, **variables):
    environment = {**os.environ, "LD_PRELOAD": str(guards), "GUARDED": side, **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)


has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
needs_avx512 = pytest.mark.skipif(not has_avx512, reason="the processor has no AVX-512")


# Vectors of all instruction sets begin at the first element, so one of them shows that nothing before it is read.
@pytest.mark.parametrize(
    ("capability", "side"),
    [("default", "end"), ("avx2", "end"), pytest.param("avx512", "end", marks=needs_avx512), ("avx2", "begin")],
)
def test_fuzzer_cases(guards, capability, side):
    options = ["-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/fuzz"]
    done = run(guards, side, *options, "--ignore=tests/fuzz/test_compiled.py", ATEN_CPU_CAPABILITY=capability)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_batch_invariance(guards, capability):
    options = ["-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/test_batch_invariance.py"]
    done = run(guards, "end", *options, ATEN_CPU_CAPABILITY=capability)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def test_the_environment_selects_the_instruction_set(guards):
    program = "import gradscale_ext._C as c; print(c.cpu_capability())"
    found = run(guards, "end", "-c", program, ATEN_CPU_CAPABILITY="default").stdout
    assert found.strip() in ("DEFAULT", "NO AVX")


@pytest.mark.parametrize(("side", "offset"), [("end", 4000), ("begin", -1)])
def test_memory_beyond_a_tensor_cannot_be_accessed(guards, side, offset):
    assert run(guards, side, "-c", READ_BYTE.format(offset=0)).returncode == 0
    assert run(guards, side, "-c", READ_BYTE.format(offset=offset)).returncode == -signal.SIGSEGV
