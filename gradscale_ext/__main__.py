"""`python -m gradscale_ext`: versions, what the extension was built with, what runs here, and a self-check.

`python -m gradscale_ext compile --help`: CUDA kernels compiled before they are needed.
"""

from __future__ import annotations

import ctypes
import platform
import sys

import torch

import gradscale_ext as gs

from . import _kernels, _precompile
from ._native import _C, DEVICE_TYPES


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


def _kernels_in_words() -> str:
    """Where CUDA kernels come from."""
    if torch.version.cuda is None:
        return f"none: PyTorch {torch.__version__} is not built for CUDA (https://pytorch.org/get-started/locally)"
    using = _kernels.compiler()
    packaged = len(list(_kernels.PACKAGED.glob("*")))
    sources = [f"{packaged} came with the package"] if packaged else []
    if using is not None:
        sources.append(f"compiled by {using.version} when they are first needed, and kept in {_kernels.cache_folder()}")
    how = _kernels.HOW_TO_GET_A_COMPILER.format(major=torch.version.cuda.split(".")[0])
    return "; ".join(sources) or f"none: there is no compiler for them; {how}"


def report() -> int:
    """Print the report; the exit status is 1 when the self-check fails, or the driver is too old for PyTorch."""
    driver = _driver_version()
    problem = _driver_problem(driver)
    print(f"gradscale_ext  {gs.__version__}")
    print(f"python         {platform.python_version()} on {platform.platform()}")
    print(f"torch          {torch.__version__} (the extension was compiled against {_C.torch_version})")
    print(f"CPU kernels    {_C.cpu_capability()} chosen; {torch.get_num_threads()} threads")
    print(f"CUDA kernels   {_kernels_in_words()}")
    print(f"NVIDIA driver  {problem or (f'supports CUDA {driver}' if driver else 'none')}")
    devices = ["cpu"]
    for index in range(0 if problem else torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        runs = "kernels" if "cuda" in DEVICE_TYPES else "PyTorch's own operations"
        name = torch.cuda.get_device_name(index)
        print(f"GPU {index:<10} {name}, compute capability {capability[0]}.{capability[1]}: {runs}")
        devices.append(f"cuda:{index}")
    failure = next(filter(None, map(_self_check, devices)), None)
    print(f"self-check     {failure or 'passed on ' + ', '.join(devices)}")
    return 0 if failure is None and problem is None else 1


def main() -> int:
    """Do what the first argument says: `compile`, or the report where there is none."""
    if sys.argv[1:2] == ["compile"]:
        return _precompile.main(sys.argv[2:])
    return report()


if __name__ == "__main__":
    sys.exit(main())
