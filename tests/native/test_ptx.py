"""The simulated NVIDIA driver, on PTX that NVRTC generates."""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("native")

SOURCE = """
extern "C" {
struct Sum { const float* a; const float* b; float* result; long long count; float scale; };
__global__ void sum(const __grid_constant__ Sum s) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < s.count) s.result[i] = s.a[i] + s.scale * s.b[i];
}
__global__ void __launch_bounds__(64) block_total(const float* x, float* total) {
  __shared__ float warp_value[2];
  float v = x[blockIdx.x * 64 + threadIdx.x];
  for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(0xffffffffu, v, by);
  if (threadIdx.x % 32 == 0) warp_value[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) total[blockIdx.x] = warp_value[0] + warp_value[1];
}
__global__ void misaligned(float* p) { *(float4*)(p + 1) = make_float4(1, 2, 3, 4); }
__global__ void null(float* p) { p[3] = 1; }
__global__ void nowhere(float* p) { p[-(1ll << 40)] = 1; }
__global__ void beyond(float* p, int i) { __shared__ float s[8]; s[i] = *p; __syncthreads(); *p = s[i / 2]; }
__global__ void diverged(float* p) {
  if (threadIdx.x < 7) p[threadIdx.x] = __shfl_xor_sync(0xffffffffu, p[threadIdx.x], 1);
}
__global__ void trapped() { __trap(); }
__global__ void endless(volatile int* p) { while (*p == 0) {} }
}
"""


@pytest.fixture(scope="module")
def library():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", "--silent", ".venv/driver.so"], cwd=ROOT, env=environment, check=True)
    return ROOT / ".venv/driver.so"


@functools.cache
def compiled(source: str, *options: str) -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None)
    options = ("--gpu-architecture=compute_90", "--std=c++17", *options)
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(error) == 0, log.decode()
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return text


@pytest.fixture(scope="module")
def image() -> bytes:
    return compiled(SOURCE)


class Driver:
    """Calls of the library's C API, and one loaded module."""

    def __init__(self, path: Path, image: bytes):
        self.call = ctypes.CDLL(str(path))
        self.call.gradscale_last_error.restype = ctypes.c_char_p
        self.module = self.load(image)

    def load(self, image: bytes, error: int = 0) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        assert self.call.cuModuleLoadData(ctypes.byref(module), image) == error
        return module

    def function(self, name: str, error: int = 0) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        assert self.call.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()) == error
        return function

    def launch(self, name: str, *arguments, blocks: int = 1, threads: int = 32) -> int:
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        return self.call.cuLaunchKernel(self.function(name), *(blocks, 1, 1), *(threads, 1, 1), 0, None, pointers, None)

    def error(self) -> str:
        return self.call.gradscale_last_error().decode()


@pytest.fixture
def driver(library, image, tmp_path):
    return Driver(shutil.copy(library, tmp_path), image)  # a separate library with its own state


def pointer(buffer) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(buffer))


def aligned(count: int) -> ctypes.Array:
    memory = (ctypes.c_float * (count + 8))()
    result = (ctypes.c_float * count).from_address(-(-ctypes.addressof(memory) // 32) * 32)
    result.memory = memory
    return result


class Sum(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "result")),
        ("count", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def add(driver: Driver, count: int, scale: float) -> list[float]:
    a, b, result = ((ctypes.c_float * count)(*values) for values in (range(count), range(0, 2 * count, 2), [0] * count))
    numbers = Sum(ctypes.addressof(a), ctypes.addressof(b), ctypes.addressof(result), count, scale)
    assert driver.launch("sum", numbers, blocks=-(-count // 128), threads=128) == 0
    return list(result)


def test_a_kernel_with_a_struct_argument(driver):
    assert add(driver, 300, 0.5) == [2 * i for i in range(300)]


def test_blocks_sum_over_shuffles_and_shared_memory(driver, monkeypatch):
    x = (ctypes.c_float * 192)(*range(192))
    for name, value in (("PTX_CHECK", "1"), ("PTX_SLICE", "3"), ("PTX_ORDER", "reverse")):
        total = (ctypes.c_float * 3)()
        monkeypatch.setenv(name, value)
        assert driver.launch("block_total", pointer(x), pointer(total), blocks=3, threads=64) == 0
        assert list(total) == [sum(range(k, k + 64)) for k in (0, 64, 128)]


def test_invalid_images_and_functions(driver, image):
    driver.function("subtract", error=500)
    driver.load(b"\x7fELF", error=200)
    driver.load(image.replace(b"sm_90", b"sm_100"), error=218)
    driver.load(image[: len(image) // 2] + b"\0", error=218)
    driver.load(image.replace(b"shfl.sync.bfly", b"shfl.sync.away"), error=218)
    assert "the instruction is not known" in driver.error()
    driver.call.gradscale_pretend_capture(1)
    driver.load(image, error=900)
    mode = ctypes.c_int(2)
    assert driver.call.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    driver.load(image)


def one_instruction(instruction: str) -> bytes:
    """A kernel that stores the result %r1 of an instruction; %r2 is 0."""
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry one(.param .u64 one_param_0)
{{
  .reg .b16 %rs<3>;
  .reg .b32 %r<3>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [one_param_0];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r2, 0;
  cvt.u16.u32 %rs2, %r2;
  {instruction}
  st.global.u32 [%rd2], %r1;
  ret;
}}
\0""".encode()


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("mov.u32 %r1, 17;", 17),
        ("mov.u32 %r1, 017;", 15),
        ("mov.u32 %r1, -0x11;", 2**32 - 17),
        ("add.u32 %r1, %r2, 00U;", 0),
        ("set.eq.u32.u32 %r1, %r2, 0;", 2**32 - 1),
        ("set.eq.f32.u32 %r1, %r2, 0;", 0x3F800000),
    ],
)
def test_results_agree_with_the_specification_of_ptx(driver, instruction, expected):
    driver.module = driver.load(one_instruction(instruction))
    found = aligned(1)
    assert driver.launch("one", pointer(found), threads=1) == 0
    assert int.from_bytes(bytes(found), "little") == expected


@pytest.mark.parametrize("instruction", ["mov.u32 %r1, 018;", "set.eq.f16.f16 %rs1, %rs2, %rs2;"])
def test_invalid_numbers_and_unknown_instructions_are_refused(driver, instruction):
    driver.load(one_instruction(instruction), error=218)
    assert instruction.split()[-1].rstrip(";") in driver.error()


def test_launch_limits_are_the_same_as_in_cuda(driver):
    x = pointer(aligned(64))
    for blocks, threads in ((0, 32), (2**31, 32), (1, 0), (1, 65), (1, 1025)):
        assert driver.launch("block_total", x, x, blocks=blocks, threads=threads) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misaligned", "misaligned address 0x"),
        ("null", "dereferences the invalid pointer 0xc"),
        ("nowhere", "no memory at 0x"),
        ("diverged", "divergent collective: the mask is ffffffff, but lanes 0000007f execute it"),
        ("trapped", "trap"),
    ],
)
def test_errors_in_the_middle_of_a_kernel_are_reported(driver, name, message):
    x = aligned(64)
    arguments = {"null": [ctypes.c_void_p()], "trapped": []}.get(name, [pointer(x)])
    assert driver.launch(name, *arguments) == 719
    text = ctypes.c_char_p()
    driver.call.cuGetErrorString(719, ctypes.byref(text))
    assert text.value is not None
    assert f"kernel {name}, block 0, warp 0: " in text.value.decode()
    assert message in driver.error()
    assert add(driver, 5, 1) == [0, 3, 6, 9, 12]


def test_shared_memory_has_bounds(driver):
    assert driver.launch("beyond", pointer(aligned(1)), ctypes.c_int(8), threads=1) == 719
    assert "lane 0 is out of bounds: byte 32 of a shared array of 32 bytes" in driver.error()


def test_endless_kernel_is_stopped(driver, monkeypatch):
    monkeypatch.setenv("PTX_LIMIT", "20000")
    assert driver.launch("endless", pointer(ctypes.c_int(0))) == 719
    assert "the launch has not ended after 20000 instructions" in driver.error()


def test_threads_launch_at_the_same_time_once_they_have_a_context(driver):
    context, results = ctypes.c_void_p(), {}
    assert driver.call.cuInit(0) == 0
    assert driver.launch("trapped") == 201
    assert driver.call.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0

    def work(number: int) -> None:
        assert driver.call.cuCtxSetCurrent(context) == 0
        results[number] = [add(driver, 200, number) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [[i * (1 + 2 * n) for i in range(200)]] * 20 for n in range(2)}


def test_report_counts_instructions_and_sectors(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("PTX_REPORT", str(tmp_path / "report.json"))
    x, total = aligned(128), aligned(2)
    assert driver.launch("block_total", pointer(x), pointer(total), blocks=2, threads=64) == 0
    record = json.loads((tmp_path / "report.json").read_text())
    assert (record["kernel"], record["grid"], record["block"]) == ("block_total", 2, 64)
    assert record["classes"]["shuffle"] == 2 * 2 * 5
    assert (record["load_sectors"], record["memory_loaded"]) == (2 * 2 * 4, 128 * 4)
    assert (record["store_sectors"], record["bytes_stored"]) == (2, 8)


# ---- Faults ---------------------------------------------------------------------------------------------------------

KERNEL = (ROOT / "tests" / "ptx" / "faults.cu").read_text()
IN_SHARED = "data race in shared memory: lane .* what thread .*, and nothing orders them"
IN_GLOBAL = r"data race in global memory: lane .* what thread \d+ of block \d has .*, and nothing orders them"
FAULTS = {
    "missing_barrier": IN_SHARED,
    "shared_write_out_of_bounds": "lane 0 is out of bounds: byte 24 of a shared array of 24 bytes",
    "divergent_barrier": "divergent barrier: warp [01] waits in another one",
    "misaligned_load": "misaligned address 0x.*[48c] of lane 0",
    "global_write_out_of_bounds": "no memory at 0x.*000, at `st.global",
    "missing_warp_barrier": IN_SHARED,
    "missing_second_warp_barrier": IN_SHARED,
    "block_race": IN_GLOBAL,
    "block_race_across_barrier": IN_GLOBAL,
    "missing_fence": IN_GLOBAL,
    "reader_missing_fence": IN_GLOBAL,
    "block_fence": IN_GLOBAL,
    "return_before_barrier": "divergent barrier: warp 2 has returned",
    "return_before_shuffle": "divergent collective: the mask is ffffffff, but lanes ffffff7f execute it",
}


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "target", "loss", "gradient", "total", "finished")),
        ("width", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


def guarded(values: torch.Tensor) -> torch.Tensor:
    """A copy whose memory ends at an inaccessible page."""
    size = values.numel() * values.itemsize
    end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=end - size)
    return copy.copy_(values.reshape(-1)).view_as(values)


def cross_entropy(driver: Driver, rows: int, width: int) -> int:
    """Launches the kernel, and compares its results with double precision. Returns the error code of the launch."""
    stride = -(-width // 4) * 4
    torch.manual_seed(width)
    logits = guarded(torch.randn(rows, stride) * 6)
    target = guarded(torch.randint(width, (rows,)))
    loss, gradient, total = (guarded(torch.full(shape, torch.nan)) for shape in ((rows,), (rows, stride), (1,)))
    finished = guarded(torch.zeros(1, dtype=torch.int32))
    pointers = [tensor.data_ptr() for tensor in (logits, target, loss, gradient, total, finished)]
    if (result := driver.launch("cross_entropy", Arguments(*pointers, width, stride), blocks=rows, threads=96)) != 0:
        return result
    exact = logits[:, :width].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, target, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient[:, :width].double(), exact.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(total.double(), expected.sum().view(1), rtol=0, atol=1e-4)
    return 0


def with_fault(library, folder, monkeypatch, fault, order="forward", slice="0") -> Driver:
    for name, value in (("PTX_RACES", "1"), ("PTX_CHECK", "1"), ("PTX_ORDER", order), ("PTX_SLICE", slice)):
        monkeypatch.setenv(name, value)
    return Driver(shutil.copy(library, folder), compiled(KERNEL, f"-DFAULT={fault}"))


every_order = pytest.mark.parametrize(("order", "slice"), [("forward", "0"), ("reverse", "0"), ("reverse", "7")])


@every_order
def test_a_correct_kernel_passes(library, tmp_path, monkeypatch, order, slice):
    driver = with_fault(library, tmp_path, monkeypatch, "none", order, slice)
    assert [cross_entropy(driver, 5, width) for width in (64, 601, 1, 33, 2048)] == [0] * 5, driver.error()


@every_order
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(library, tmp_path, monkeypatch, fault, order, slice):
    driver = with_fault(library, tmp_path, monkeypatch, fault, order, slice)
    rows = 1 if fault == "global_write_out_of_bounds" else 5
    assert cross_entropy(driver, rows, 2048) == 719
    assert re.search(FAULTS[fault], driver.error())
