"""Loads the compiled extension, and tells PyTorch what it cannot know of the operators from C++.

The other modules take `_C` from here, so that whatever is wrong with it is explained.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from .heads import NUMBER_OF_CATEGORICAL_KINDS


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


def _seen(function: Any) -> Any:
    """The function, as one that a mode such as `GradientTracer` or a default device sees being called."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return torch.overrides.handle_torch_function(call, (), *args)
        return function(*args)

    return call


for _name in ("multi_step_loss", "encode", "decode", "l2_loss"):
    setattr(_C, _name, _seen(getattr(_C, _name)))

# Devices whose tensors the kernels take.
DEVICE_TYPES = ("cpu", "cuda") if _C.cuda_version else ("cpu",)


def call(operator: str, x: torch.Tensor | torch.fx.Proxy, *arguments: Any) -> torch.Tensor:
    """A gradient-flow operator as the compiler, a transform, a tracer or a subclass of Tensor sees it.

    The overload is named: left to choose, PyTorch would read a scalar tensor as a number.
    """
    packet = getattr(torch.ops.gradscale_ext, operator)
    overload = packet.tensor if isinstance(arguments[0], torch.Tensor) else packet.default
    return overload(x, *arguments)  # type: ignore[no-any-return]


# ---- vmap: one call over all examples -------------------------------------------------------------------------------

Dims = tuple[int | None, ...]


def _example_first(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _lined_up(value: Any, dim: int | None, dims: int) -> Any:
    """A mapped tensor argument, its own dimensions lined up with the `dims` of one example."""
    if dim is None:
        return value
    value = value.movedim(dim, 0)
    return value.reshape(value.shape[0], *[1] * (dims - value.dim() + 1), *value.shape[1:])


def _elementwise_rule(operator: str) -> Any:
    """For arguments that broadcast to x."""

    def rule(info: Any, in_dims: Dims, x: torch.Tensor, *values: Any) -> Any:
        x = _example_first(x, in_dims[0], info.batch_size)
        lined_up = (_lined_up(value, dim, x.dim() - 1) for value, dim in zip(values, in_dims[1:], strict=True))
        return call(operator, x, *lined_up), 0

    return rule


def _norm_rule(operator: str) -> Any:
    """For a limit that broadcasts to the batch dimensions: the mapped one becomes the first of them."""

    def rule(info: Any, in_dims: Dims, x: torch.Tensor, limit: Any, batch_dims: int, *others: Any) -> Any:
        if any(dim is not None for dim in in_dims[2:]):
            raise RuntimeError(
                f"{operator}: vmap maps the counters; map a function that uses the operator without the module's "
                "counters, or keep the module's buffers out of in_dims"
            )
        x = _example_first(x, in_dims[0], info.batch_size)
        return call(operator, x, _lined_up(limit, in_dims[1], batch_dims), batch_dims + 1, *others), 0

    return rule


def _count_norms_rule(info: Any, in_dims: Dims, counts: torch.Tensor, within: torch.Tensor) -> Any:
    if in_dims[0] is None:
        torch.ops.gradscale_ext.count_norms(counts, within)
    else:
        within = _example_first(within, in_dims[1], info.batch_size)
        for own, seen in zip(counts.unbind(in_dims[0]), within.unbind(), strict=True):
            torch.ops.gradscale_ext.count_norms(own, seen)
    return None, None


for _operator, _rule in (
    ("scale_gradient", _elementwise_rule),
    ("reverse_gradient", _elementwise_rule),
    ("clip_gradient_value", _elementwise_rule),
    ("clip_gradient_norm", _norm_rule),
    ("normalize_gradient", _norm_rule),
):
    for _overload in ("", ".tensor"):
        torch.library.register_vmap(f"gradscale_ext::{_operator}{_overload}", _rule(_operator))
torch.library.register_vmap("gradscale_ext::count_norms", _count_norms_rule)


# ---- The multi-step loss: what its operator returns, for tracers -----------------------------------------------------


@torch.library.register_fake("gradscale_ext::multi_step_loss")  # type: ignore[misc]
def _multi_step_loss_shapes(
    predictions: list[torch.Tensor],
    targets: list[torch.Tensor],
    masks: list[torch.Tensor],
    step_weights: torch.Tensor | None,
    step_gradient_scale: torch.Tensor | None,
    importance_weights: torch.Tensor | None,
    heads: list[float],
    layout: list[int],
    wants: list[int],
    reduction: str,
    skip_nonfinite: bool,
    batch_first: bool,
) -> list[torch.Tensor]:
    device = predictions[0].device
    is_double = any(prediction.dtype == torch.float64 for prediction in predictions)
    options: dict[str, Any] = {"device": device, "dtype": torch.float64 if is_double else torch.float32}
    batch = predictions[0].shape[1 if layout[0] == 0 and not batch_first else 0]
    per_step, expected = [], []
    first = 0
    for count, kind in zip(layout[::3], heads[:: len(heads) * 3 // len(layout)], strict=True):
        steps = count or predictions[first].shape[1 if batch_first else 0]
        size, stride = ((batch, steps), (steps, 1)) if batch_first else ((steps, batch), (1, steps))
        per_step.append(torch.empty_strided(size, stride, **options))
        if kind < NUMBER_OF_CATEGORICAL_KINDS:
            expected.append(torch.empty_strided(size, stride, **options))
        first += max(count, 1)
    loss = torch.empty((batch,) if reduction == "none" else (), **options)
    gradients = [
        torch.empty(
            predictions[i].shape,
            device=device,
            dtype=torch.float64 if predictions[i].dtype == torch.float64 else torch.float32,
        )
        for i in wants
    ]
    return [
        loss,
        torch.empty((batch,), **options),
        torch.empty((len(per_step),), **options),
        torch.empty((), device=device, dtype=torch.int64),
        *per_step,
        *expected,
        *gradients,
    ]
