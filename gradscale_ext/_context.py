"""The one place that asks in which context of PyTorch a call is made."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])


def is_eager() -> bool:
    """Return False while torch.compile or torch.export traces, which must see the operators."""
    return not torch.compiler.is_compiling()


_shows = 0


@contextlib.contextmanager
def showing_operators() -> Iterator[None]:
    """Let dispatch modes see the package's operators, where they would see the operations of the reference."""
    global _shows
    _shows += 1
    try:
        yield
    finally:
        _shows -= 1


def shows_operators() -> bool:
    """Return True where calls have to be operators: while torch.compile traces, and in `showing_operators`."""
    return not is_eager() or _shows > 0


def is_transformed() -> bool:
    """Return True inside a torch.func transform, also while torch.compile traces one."""
    return bool(torch._C._are_functorch_transforms_active())


# torch.compiler.assume_constant_result does the same, but imports the compiler, which takes a second and 70 MB.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not_constant(tensor: torch.Tensor, name: str = "it") -> tuple[str, str] | None:
    """Say why a tensor, which gets no gradient, is differentiated all the same, and what to write instead."""
    instead = "detach() it" if name == "it" else f"write {name}.detach()"
    if tensor.requires_grad:
        return "requires grad", instead
    return ("has a tangent of forward mode", instead) if _has_tangent(tensor) else None


def _has_tangent(tensor: torch.Tensor) -> bool:
    # There is no public way to ask for the level outside of forward mode, and none to look into a tensor of vmap.
    if forward_ad._current_level < 0:
        return False
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def is_captured(device: torch.device) -> bool:
    """Return True for a GPU while a CUDA graph is captured."""
    may_be = device.type != "cpu" and is_eager() and torch.cuda.is_available()
    return may_be and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(function: str, name: str, device: torch.device) -> None:
    """Refuse a scalar on the CPU that has to be on a GPU while a CUDA graph is captured."""
    if is_captured(device):
        raise ValueError(
            f"{function}: {name} must be a number or a tensor on {device} while a CUDA graph is captured, but it is on "
            "cpu: a replay would copy it again, from memory that may have another use by then; before the capture, "
            f"write {name} = {name}.to({str(device)!r}), or {name} = {name}.item()"
        )


def check_constant(function: str, name: str, value: torch.Tensor) -> None:
    """Refuse a tensor that requires grad while gradients are recorded, or has a tangent of forward mode."""
    why = why_not_constant(value, name)
    if why and (torch.is_grad_enabled() or not value.requires_grad):
        raise ValueError(f"{function}: {name} {why[0]}, but it is a constant and gets no gradient; {why[1]}")


def has_values(*tensors: object) -> bool:
    """Return True if the tensors have values that Python can read: not while torch.compile, torch.export, make_fx or a
    torch.func transform traces, and not of fake tensors and meta tensors."""
    if not is_eager() or is_transformed():
        return False
    modes = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL)):
        return False
    fake = torch._subclasses.FakeTensor
    return not any(
        isinstance(tensor, fake) or (isinstance(tensor, torch.Tensor) and tensor.is_meta) for tensor in tensors
    )


def require_values(function: str, subject: str, *tensors: object) -> None:
    """Refuse ``check=True`` where there are no values. `subject` is the function in the words of its error."""
    if not has_values(*tensors):
        raise NotImplementedError(
            f"{function}: check=True reads values, which do not exist while torch.compile, torch.export or a "
            f"torch.func transform traces; call {subject} once outside of it with check=True, and inside without"
        )


def saveable(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that was made in inference mode, which autograd refuses to save for a backward pass.

    torch.compile cannot trace the question; it refuses to save such a tensor with an error of its own.
    """
    if is_eager() and tensor.is_inference() and not torch.is_inference_mode_enabled():
        return tensor.clone()
    return tensor


def allows_graph_breaks() -> bool:
    """Return True while torch.compile traces without fullgraph=True."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # not at the top: it imports the compiler

    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # torch.export, which traces without Dynamo
        return False
    return not (translator.one_graph or translator.error_on_graph_break)


allows_graph_breaks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _runs_no_compiled_code() -> bool:
    """Return True if no compiled code is running. Compiled code also compiles the functions that it calls."""
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is not None and callback() is None


def in_eager_mode(reason: str) -> Callable[[Function], Function]:
    """Decorate a function that torch.compile leaves to eager mode, with a graph break. With fullgraph=True, its error
    contains the reason. `torch.compiler.disable` does the same, but imports the compiler, which takes a second."""

    def decorate(function: Function) -> Function:
        disabled: list[Function] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules or _runs_no_compiled_code():
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
            return disabled[0](*args, **kwargs)

        call.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return call  # type: ignore[return-value]

    return decorate


def varies(number: float) -> bool:
    """Return True if torch.compile traces a Python number as a variable because it changed after the first graph."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # not at the top: it imports the compiler

    return not has_static_value(number)


def widest(device: torch.device | None = None) -> torch.dtype:
    """The widest real dtype that a device has; PyTorch's default device, if none is named. MPS has no float64, and some
    Intel GPUs have none."""
    device = device or torch.empty(0).device  # not torch.get_default_device(), which torch.compile does not trace
    if device.type == "mps" or (device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64):
        return torch.float32
    return torch.float64


def as_tensor(number: float, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a scalar tensor of a number, which may vary: a product stays in the graph, while torch.tensor(number) would
    make the number a constant, and compile a graph for every number."""
    return torch.ones((), dtype=dtype or widest(device), device=device) * number


def operand(number: float, x: torch.Tensor) -> Any:
    """A number for an operation with `x` that makes a varying number a constant of the graph: then a tensor instead."""
    return number if is_eager() or not varies(number) else as_tensor(number, x.device, x.dtype)


@in_eager_mode("a call causes a warning: call it once outside of a function with fullgraph=True to read it")
def warn(message: str) -> None:
    """Warn at the line of the user: the last frame that is neither of this package nor of PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("gradscale_ext", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


#: Warn, once for each message.
say_once = functools.cache(warn)


def say_why_slow(function: str, arguments: Mapping[str, object]) -> None:
    """Warn once that an eager call is slow, because an argument is a tensor whose operations run in Python."""
    if not has_values(*arguments.values()):
        return  # a tracer
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            say_once(
                f"gradscale_ext: {function} is called through PyTorch's dispatcher, which takes longer, because {name} "
                f"is a {type(value).__name__}, whose operations run in Python; give plain tensors where you can"
            )
            return
