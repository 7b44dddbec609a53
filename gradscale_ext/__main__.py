"""`python -m gradscale_ext`: versions, what the extension was built with, what runs here, and a self-check."""

from __future__ import annotations

import ctypes
import importlib
import platform
import re
import sys
from typing import Any

import torch

import gradscale_ext as gs

from ._native import _C


def _self_check(device: str = "cpu") -> str | None:
    """Compare a fused loss and its gradient with the reference; returns the difference in words, or None."""
    logits = torch.linspace(-3, 3, 21, dtype=torch.float64, device=device).repeat(2, 1).requires_grad_()
    heads = {"value": gs.TwoHot(gs.Support(-10, 10, 21))}
    arguments = (heads, {"value": [gs.scale_gradient(logits, 0.5)]}, {"value": [logits.detach()[:, 3]]})
    results = []
    for function in (gs.multi_step_loss, gs.reference.multi_step_loss):
        loss = function(*arguments).loss
        results.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
    (loss, gradient), (expected_loss, expected_gradient) = results
    if torch.allclose(loss, expected_loss) and torch.allclose(gradient, expected_gradient):
        return None
    return f"the fused loss {loss.item()} or its gradient differs from the reference {expected_loss.item()} on {device}"


def _driver_version() -> str | None:
    """Newest CUDA that the NVIDIA driver supports, such as "13.0"; None without a driver. Initializes nothing."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _driver_problem(driver: str | None) -> str | None:
    """Reason why PyTorch, and with it the extension, can use no GPU under this driver."""
    needed = torch.version.cuda
    if driver is None or needed is None or _release(driver)[0] >= _release(needed)[0]:
        return None
    return (
        f"supports CUDA {driver} at most, but PyTorch {torch.__version__} is built for CUDA {needed}; update the "
        f"driver, or install a PyTorch built for CUDA {driver.split('.')[0]} and compile gradscale_ext again"
    )


def _gpu_problem(capability: tuple[int, int], built: Any, driver: str | None) -> str | None:
    """Reason why the compiled kernels do not run on a GPU of this compute capability.

    Machine code (sm_80) runs on its own generation from its own minor version on; PTX (compute_80) is compiled by the
    driver for any later GPU, if the driver is no older than the compiler that wrote it.
    """
    name = f"{capability[0]}.{capability[1]}"
    again = f'compile gradscale_ext again with TORCH_CUDA_ARCH_LIST="{name}"'
    ptx = False
    for code in built.CUDA_ARCHITECTURES:
        kind, major, minor, special = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code).groups()  # type: ignore[union-attr]
        own = (int(major), int(minor))
        if own == capability or (own <= capability and not special and (kind == "compute" or own[0] == capability[0])):
            if kind == "sm":
                return None
            ptx = True
    codes = " ".join(built.CUDA_ARCHITECTURES)
    if not ptx:
        return f"the kernels are compiled for {codes} and do not run on compute capability {name}; {again}"
    if driver is not None and _release(driver) < _release(built.CUDA_COMPILER):
        return (
            f"of the kernels' {codes} only PTX fits compute capability {name}, and a driver that supports CUDA "
            f"{driver} cannot read that of nvcc {built.CUDA_COMPILER}; update the driver, or {again}"
        )
    return None


def main() -> int:
    """Print the report; the exit status is 1 when the self-check fails or the kernels do not run on a GPU here."""
    built: Any = importlib.import_module("gradscale_ext._build")
    codes = " ".join(built.CUDA_ARCHITECTURES)
    driver = _driver_version()
    problem = _driver_problem(driver)
    print(f"gradscale_ext  {gs.__version__}")
    print(f"python         {platform.python_version()} on {platform.platform()}")
    print(f"torch          {torch.__version__} (the extension was compiled against {_C.torch_version})")
    print(f"CPU kernels    {_C.cpu_capability()} chosen; {torch.get_num_threads()} threads")
    print(f"CUDA kernels   {f'by nvcc {built.CUDA_COMPILER} for {codes}' if codes else f'none: {built.WHY_NO_CUDA}'}")
    print(f"NVIDIA driver  {problem or (f'supports CUDA {driver}' if driver else 'none')}")
    devices = ["cpu"]
    for index in range(0 if problem else torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        reason = _gpu_problem(capability, built, driver) if codes else None
        runs = reason or ("the kernels run here" if codes else "no kernels compiled, PyTorch's own are used")
        name = torch.cuda.get_device_name(index)
        print(f"GPU {index:<10} {name}, compute capability {capability[0]}.{capability[1]}: {runs}")
        problem = problem or reason
        if reason is None:
            devices.append(f"cuda:{index}")
    failure = next(filter(None, map(_self_check, devices)), None)
    print(f"self-check     {failure or 'passed on ' + ', '.join(devices)}")
    return 0 if failure is None and (problem is None or not codes) else 1


if __name__ == "__main__":
    sys.exit(main())
