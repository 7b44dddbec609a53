"""The simulated NVIDIA driver, on PTX that NVRTC generates."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

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
  __shared__ float of_warp[2];
  float v = x[blockIdx.x * 64 + threadIdx.x];
  for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(0xffffffffu, v, by);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) total[blockIdx.x] = of_warp[0] + of_warp[1];
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


@pytest.fixture(scope="module")
def image() -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"kernels.cu", 0, None, None)
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_90"])
    assert int(error) == 0
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return text


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


def test_a_kernel_with_a_struct_argument_writes_only_its_output(driver):
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


def test_launch_limits_are_the_same_as_in_cuda(driver):
    x = pointer(aligned(64))
    for blocks, threads in ((0, 32), (2**31, 32), (1, 0), (1, 65), (1, 1025)):
        assert driver.launch("block_total", x, x, blocks=blocks, threads=threads) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misaligned", "misaligned address 0x"),
        ("null", "follows the pointer 0xc"),
        ("nowhere", "no memory at 0x"),
        ("diverged", "divergent collective: the mask is ffffffff, but lanes 0000007f are here"),
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
    assert "out of bounds: 0x20 in a space of 32 bytes" in driver.error()


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
