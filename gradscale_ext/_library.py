"""Loads the compiled extension, and tells PyTorch what it cannot know of the operators from C++.

The other modules take `_C` from here, so that whatever is wrong with it is explained.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch


def _explain(error: ImportError) -> ImportError:
    """What an import error of the extension means, and the command that mends it."""
    rebuild = (
        "python -m pip install --no-build-isolation --force-reinstall --no-deps gradscale-ext (or . in a checkout)"
    )
    if importlib.util.find_spec("gradscale_ext._C") is None:
        return ImportError(
            f"gradscale_ext is not compiled here: {__path_of_package()} has no extension module _C. If this is "
            "the source checkout shadowing an installed gradscale_ext, start Python from another folder or install the "
            f"checkout with `python -m pip install --no-build-isolation -e .`; otherwise rebuild: {rebuild}."
        )
    built = _version_built_with()
    if built is not None and built != torch.__version__:
        return ImportError(
            f"gradscale_ext was compiled against PyTorch {built}, but PyTorch {torch.__version__} is installed now; a "
            f"C++ extension must be compiled again after that. Rebuild: {rebuild}. ({error})"
        )
    return ImportError(f"the compiled extension of gradscale_ext could not be loaded: {error}. Rebuild: {rebuild}.")


def __path_of_package() -> str:
    specification = importlib.util.find_spec("gradscale_ext")
    return str(specification.origin).removesuffix("__init__.py") if specification else "gradscale_ext"


def _version_built_with() -> str | None:
    try:
        return str(importlib.import_module("gradscale_ext._build").TORCH_VERSION)
    except ImportError:
        return None


def _release(version: str) -> str:
    return version.split("+")[0]


try:
    from . import _C as _C
except ImportError as error:
    raise _explain(error) from error

if _release(_C.torch_version) != _release(torch.__version__):
    raise _explain(ImportError("its symbols resolve, but its data structures may differ"))


def scale_gradient(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """The operator as the compiler sees it.

    The overload is named: left to choose, PyTorch would read a scalar tensor as a number.
    """
    operator = torch.ops.gradscale_ext.scale_gradient
    overload = operator.tensor if isinstance(scale, torch.Tensor) else operator.default
    return overload(x, scale)  # type: ignore[no-any-return]


def _scale_gradient_vmap(info: Any, in_dims: tuple[int | None, None], x: torch.Tensor, scale: float) -> Any:
    return scale_gradient(x, scale), in_dims[0]


def _scale_gradient_tensor_vmap(
    info: Any, in_dims: tuple[int | None, int | None], x: torch.Tensor, scale: torch.Tensor
) -> Any:
    x_dim, scale_dim = in_dims
    x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    if scale_dim is not None:
        scale = scale.movedim(scale_dim, 0)
        # Line the scale up with the dimensions of one example.
        scale = scale.reshape(info.batch_size, *[1] * (x.dim() - scale.dim()), *scale.shape[1:])
    return scale_gradient(x, scale), 0


torch.library.register_vmap("gradscale_ext::scale_gradient", _scale_gradient_vmap)
torch.library.register_vmap("gradscale_ext::scale_gradient.tensor", _scale_gradient_tensor_vmap)
