"""A stand-in for CUDA graphs on a CPU: it records the operators of a call, and replays them into the same memory.

As with CUDA, capturing changes nothing (the operators run, and what they wrote is put back), a replay runs no Python of
the call, its numbers are the ones of the captured call, its random numbers are new, and reading a value raises while
capturing. Memory that a capture allocated is poisoned before each replay: a graph may use it for something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradscale_ext import _context
from gradscale_ext.capture import graphs
from gradscale_ext.diagnosis import lines

lines.LIBRARY_PATHS = (*lines.LIBRARY_PATHS, __file__)

READS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
    "aten::bincount",
    "aten::embedding_renorm_",
    "aten::linalg_lstsq",
    "aten::linalg_pinv",
    "aten::_linalg_check_errors",
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
)
READ_IN_BACKWARD = ("aten::prod", "aten::cumprod", "aten::_linalg_det", "aten::_linalg_slogdet")
PYTHON_READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__float__",
    "__int__",
    "__array__",
    "__repr__",
    "__format__",
)
POISON = 0x7F  # float32 3.39e38, int64 9.2e18


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def reads(schema: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for operators that wait for a GPU, in themselves or in the backward pass, where a mode hides it."""
    if schema in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return bool(masks) and (schema == "aten::index" or args[2].numel() > 1)
    if schema == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if schema == "aten::histc":
        return len(args) < 4 or args[2] == args[3]
    return schema in READS or (schema in READ_IN_BACKWARD and torch.is_grad_enabled() and args[0].requires_grad)


def refuse(name: str) -> None:
    raise RuntimeError(f"operation not permitted when stream is capturing ({name})")


class ShownOperators(TorchDispatchMode):
    """Lets plain steps run the same operators as a tape, so that bits can be compared."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PythonReads(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in PYTHON_READS:
            refuse(name)
        self.tape.checks_on_cpu = name == "one_hot"  # reads its largest class, which it does not do on a GPU
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.tape.checks_on_cpu = False


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.made: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.replays = 0
        self.checks_on_cpu = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if reads(func._schema.name, args, kwargs):
            if self.checks_on_cpu:
                return func(*args, **kwargs)
            refuse(func._schema.name)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        operands = {memory(tensor) for tensor in tensors_of((args, kwargs))}
        for tensor in tensors_of((args, kwargs)):  # native_batch_norm writes to operands that its schema does not mark
            storage = tensor.untyped_storage()
            if storage._cdata not in self.made and storage._cdata not in self.before:
                self.before[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        for tensor in tensors_of(result):
            if memory(tensor) not in operands:
                self.made[memory(tensor)] = tensor.untyped_storage()
        hold = torch.Tensor.detach
        self.calls.append(
            (
                func,
                *(
                    tree_map(lambda x: hold(x) if isinstance(x, torch.Tensor) else x, part)
                    for part in (args, kwargs, result)
                ),
                torch.is_grad_enabled(),
            )
        )
        return result

    def undo(self) -> None:
        for storage, contents in self.before.values():
            storage.copy_(contents)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for storage in self.made.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
        for func, args, kwargs, result, has_grad in self.calls:
            schema = getattr(func, "_schema", None)
            if schema is not None and schema.is_mutable:
                func(*args, **kwargs)
                continue
            operands = {memory(tensor) for tensor in tensors_of((args, kwargs))}
            wanted = tensors_of(result)
            if wanted and all(memory(tensor) in operands for tensor in wanted):
                continue  # a view
            with torch.set_grad_enabled(has_grad):  # on which the results of an LSTM depend
                results = tensors_of(func(*args, **kwargs))
            for own, new in zip(wanted, results, strict=True):
                own.copy_(new)

    def launches(self) -> int | None:
        return len(self.calls)

    def memory(self) -> int:
        return sum(storage.nbytes() for storage in self.made.values())

    def reset(self) -> None:
        self.calls = []


def ask_for_capturable(optimizer: torch.optim.Optimizer) -> None:
    """What PyTorch's optimizers check on a GPU. On a CPU only fused ones can have `capturable`."""
    if not all(group["capturable"] for group in optimizer.param_groups if group.get("fused")):
        name = type(optimizer).__name__
        raise RuntimeError(f"Attempting CUDA graph capture of step() for an instance of {name}, not capturable")


@contextlib.contextmanager
def asking_for_capturable() -> Iterator[None]:
    with contextlib.ExitStack() as changed:
        for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
            if hasattr(torch.optim.Optimizer, name):
                changed.enter_context(mock.patch.object(torch.optim.Optimizer, name, ask_for_capturable))
        yield


class TapeGraphs:
    """`gradscale_ext.capture.graphs.Graphs` with tapes."""

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[list[str]]:
        with _context.showing_operators(), ShownOperators():
            yield []

    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Tape, Any]:
        tape = Tape()
        states = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
        try:
            with (
                _context.showing_operators(),
                graphs.seeming_to_capture(),
                asking_for_capturable(),
                PythonReads(tape),
                tape,
            ):
                result = call()
        finally:
            tape.undo()
            for generator, state in states:
                generator.set_state(state)
        return tape, result
