"""The compiled extension `_C`, loaded, or an error that explains what is wrong with it."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.compiler.config

from . import _context, _kernels
from ._context import Function
from ._remedies import INSTALL

REBUILD = f"compile gradscale_ext again, in a checkout: `{INSTALL} --force-reinstall --no-deps .`"


def _explain(error: ImportError) -> ImportError:
    """Say what an import error of the extension means, and the command that fixes it."""
    if importlib.util.find_spec("gradscale_ext._C") is None:
        return ImportError(
            f"gradscale_ext is not compiled here: {__package_path()} has no extension module _C. If this is a "
            "checkout that shadows an installed gradscale_ext, start Python from another folder; otherwise compile it, "
            f"in the checkout: `{INSTALL} -e .`"
        )
    built = _built("TORCH_VERSION")
    if built is not None and built != torch.__version__:
        return ImportError(
            f"gradscale_ext was compiled against PyTorch {built}, but PyTorch {torch.__version__} is installed now; "
            f"install PyTorch {_release(built)} again: `{INSTALL} torch=={_release(built)}`, or {REBUILD} ({error})"
        )
    return ImportError(f"the compiled extension of gradscale_ext could not be loaded: {error}; {REBUILD}")


def __package_path() -> str:
    specification = importlib.util.find_spec("gradscale_ext")
    return str(specification.origin).removesuffix("__init__.py") if specification else "gradscale_ext"


def _built(name: str) -> str | None:
    """What setup.py wrote about the build under this name."""
    try:
        return str(getattr(importlib.import_module("gradscale_ext._build"), name))
    except (ImportError, AttributeError):
        return None


def _release(version: str) -> str:
    return version.split("+")[0]


try:
    from . import _C as _C

    if _release(_C.torch_version) != _release(torch.__version__):
        raise ImportError("its symbols resolve, but its data structures may differ")
except ImportError as error:
    from .cli import report

    if report.is_running():
        raise SystemExit(report.without_extension(str(_explain(error)))) from None
    raise _explain(error) from error


# torch.compile keeps graphs on the disk, with the operations that it traced in this package. A program that imports
# another build of the package must not find them.
torch.compiler.config.cache_key_tag += f"gradscale_ext {_built('SOURCES')}"


def seen_by_modes(function: Function) -> Function:
    """Wrap a function of `_C` so that a mode such as `GradientTracer` or a default device sees its calls."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return torch.overrides.handle_torch_function(call, (), *args)
        return function(*args)

    return call  # type: ignore[return-value]


#: Devices whose tensors the kernels accept.
DEVICE_TYPES = ("cpu", "cuda") if torch.version.cuda and _kernels.can_be_had() else ("cpu",)
if "cuda" in DEVICE_TYPES:
    _C.set_kernel_images(_kernels.code_and_entry)


Refusal = _C.Refusal


def is_ordinary() -> bool:
    """Return True if autograd is on, and no transform, tracer or dispatch mode is active."""
    return _C.ordinary_context()


def warn_of_reference(function: str, returned: object) -> None:
    """Warn once that a call falls back to plain PyTorch on a device with kernels, and why.

    `returned`: what an eager entry point returned. Nothing is said where it names no argument, because plain
    PyTorch is the right path: in torch.func transforms, in forward mode and in dispatch modes, which must see the
    operations, and on devices without kernels.
    """
    if isinstance(returned, Refusal) and returned.argument:
        _context.say_once(
            f"{function}: {returned.argument} {returned.problem}; plain PyTorch computes such calls, many times slower "
            "than kernels"
        )
