"""A watched forward pass: the parameters that each value depends on, and where the graph was cut."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import numbers
import operator
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .graph import (
    DEEP,
    free_without_recursion,
    gradient_function,
    is_freed_without_recursion,
    is_reentrant,
    leaf_of,
    metadata,
    walk,
)

_PACKAGES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Beginnings of the paths of files whose lines are never the user's.
_NOT_THE_USERS = (*(package + os.sep for package in _PACKAGES), copy.__file__, contextlib.__file__)

#: Calls whose results do not depend on the values of their operands, or that update parameters.
_NOT_FOLLOWED = {"grad", "_base", "requires_grad_", "backward", "broadcast_tensors"}
_NOT_FOLLOWED_PREFIXES = ("new_", "_foreach_", "_fused_")
#: Calls that make tensors from Python or NumPy values.
_FACTORIES = {
    "tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "from_dlpack", "scalar_tensor", "full", "full_like",
    "new_tensor", "new_full",
}  # fmt: skip
#: Operations that may have a Python or NumPy number as an operand, by their names without underscores at the ends.
_ARITHMETIC = {
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv",
    "true_divide", "multiply", "divide", "subtract", "pow", "rpow", "setitem", "fill", "where", "lerp",
}  # fmt: skip
#: Calls that read only the form (shape, dtype, device) of their first operand, or of the others.
_FORM_OF_FIRST = {"new_tensor", "new_full", "full_like"}
_FORM_OF_OTHERS = {"type_as", "to", "expand_as", "view_as", "reshape_as"}
#: A value counts as the one that was cut off if at most this number of calls are between it and the cut:
#: `x / x.pow(2).mean().sqrt().detach()` has three.
_FEW = 3
#: Calls through which a value leaves PyTorch.
_ESCAPES = {
    "item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__", "__dlpack__",
    "__cuda_array_interface__", "__reduce_ex__", "untyped_storage",
}  # fmt: skip


class Location(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        inside = os.path.relpath(self.file) if self.file.startswith(os.getcwd() + os.sep) else self.file
        return f"{inside}:{self.line}"

    @property
    def source(self) -> str:
        """The text of the line, where its file can be read."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class Cut:
    """A call through which no gradient flows back."""

    kind: Literal["detached", "no_grad", "integer_dtype"]
    call: str
    location: Location | None
    entered: Location | None = None
    """The line that turned gradients off."""


class _Origin(NamedTuple):
    """The values that a call cut off, by number: the sequence number of a node, or minus the bit of a leaf."""

    values: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    """These values and the ones that they were computed from, up to a few calls back."""


class _History(NamedTuple):
    """Origin of a value. A set of leaves is an integer with a bit for each."""

    live: int = 0
    """Leaves that the value sends gradients to."""
    cuts: Mapping[Cut, int] = {}
    """Leaves behind each cut that the value depends on."""
    location: Location | None = None
    """The line whose call made the value."""
    depth: int = 0
    """Number of calls behind the value."""
    outside: int = 0
    """Number of escapes that had happened when a number from outside PyTorch last went into the value."""
    has_data: bool = False
    """True if the value depends on anything but parameters."""
    fresh: Mapping[Cut, _Origin] = {}
    """Cuts behind the value whose results have not yet been combined with a value that has gradients."""
    relevant: frozenset[Cut] = frozenset()
    """Cuts whose results were combined with values other than the ones that were cut off."""

    def __or__(self, other: _History) -> _History:
        """History of a value that is computed from both."""
        cuts = dict(self.cuts)
        for cut, lost in other.cuts.items():
            cuts[cut] = cuts.get(cut, 0) | lost
        fresh = dict(self.fresh)
        for cut, origin in other.fresh.items():
            values, near = fresh.get(cut, _Origin())
            fresh[cut] = _Origin(values | origin.values, near | origin.near)
        return _History(
            self.live | other.live,
            cuts,
            depth=max(self.depth, other.depth),
            outside=max(self.outside, other.outside),
            has_data=self.has_data or other.has_data,
            fresh=fresh,
            relevant=self.relevant | other.relevant,
        )


class GradientTracer(TorchFunctionMode):
    """Watches a forward pass, so that `diagnose_gradients` can name the call and the line where a graph was cut.

    Every call of PyTorch in the `with` block is watched, with its operands and results. The tracer computes nothing and
    keeps no tensor alive. It can be entered again after the block, and then reports the last block only. Modules
    compiled with `torch.compile` run eagerly in the block; calls inside `torch.func` transforms are not watched. Each
    call takes longer than without a tracer.

    Raises:
        RuntimeError: it is entered while it is active.

    >>> import gradscale_ext as gs
    >>> layer = torch.nn.Linear(2, 1)
    >>> with GradientTracer() as tracer:
    ...     loss = layer(torch.ones(1, 2)).detach().sum()
    >>> diagnosis = gs.diagnose_gradients(loss, layer, tracer=tracer)
    >>> diagnosis.findings[0].code, diagnosis.findings[0].source
    ('detached', 'loss = layer(torch.ones(1, 2)).detach().sum()')
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        super().__init__()
        self._bits: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        self._next_bit = 1
        # The history of a value is in the metadata of the node that made it. For a value without a node it is here,
        # by the value's memory, which its views share.
        self._histories: MutableMapping[torch.UntypedStorage, _History] = WeakIdKeyDictionary()
        # Histories of values with a node, by their memory. A tensor that shares this memory but has no node was made
        # by a call that no mode sees.
        self._made: MutableMapping[torch.UntypedStorage, _History] = WeakIdKeyDictionary()
        self._active = False
        self._begin()

    def _begin(self) -> None:
        self.calls = 0
        self._used = 0
        self._escapes: dict[Cut, int] = {}
        self._gradients_off: Location | None = None

    def __enter__(self) -> GradientTracer:
        if self._active:
            raise RuntimeError("GradientTracer: this tracer is already active; use another one inside its `with` block")
        self._begin()
        self._eagerly = contextlib.ExitStack()
        self._eagerly.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        self._active = True
        return self

    def __exit__(self, *exception: Any) -> None:
        self._active = False
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._eagerly.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing in this context."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    # ---- What it saw ------------------------------------------------------------------------------------------------

    def used(self, leaf: torch.Tensor) -> bool:
        """Return True if a call combined the leaf's value with data. Computing its norm does not count."""
        return bool(self._used & self._bits.get(leaf, 0))

    def cuts_between(self, leaf: torch.Tensor, result: torch.Tensor) -> list[Cut]:
        """Cuts through which a result depends on a leaf."""
        bit = self._bits.get(leaf, 0)
        return [cut for cut, leaves in self._history(result).cuts.items() if leaves & bit]

    def cuts(self, result: torch.Tensor) -> list[Cut]:
        """Cuts through which a result depends on any leaf."""
        return list(self._history(result).cuts)

    def relevant_cuts(self, result: torch.Tensor) -> list[Cut]:
        """Cuts that keep gradients from values, although these may get some on other paths.

        Cuts whose result is combined with the value that was cut off are left out, as in
        `x + (x.round() - x).detach()` and `x / x.norm().detach()`, and cuts whose result became an index or the
        outcome of a comparison.
        """
        history = self._history(result)
        return [cut for cut in history.cuts if cut in history.relevant]

    def escapes(self, leaf: torch.Tensor, result: torch.Tensor | None = None) -> list[Cut]:
        """Calls by which values that depend on a leaf left PyTorch.

        With `result`: only calls before a number from outside last went into the result.
        """
        bit = self._bits.get(leaf, 0)
        end = None if result is None else self._history(result).outside
        return [cut for cut, leaves in list(self._escapes.items())[:end] if leaves & bit]

    def knows(self, root: Node) -> bool:
        """Return True if the tracer was active, or may have been, while part of the graph was recorded."""
        return any(self in metadata(node) or is_reentrant(node) for node in walk(root))

    def location(self, node: Node) -> Location | None:
        """The line whose call made a node."""
        history: _History | None = metadata(node).get(self)
        return history.location if history is not None else None

    # ---- Watching ---------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, and note what it did."""
        kwargs = kwargs or {}
        name = _name(func)
        if name == "_set_grad_enabled":
            self._gradients_off = None if args[0] else self._gradients_off or _users_line()
        if not self._active or not _is_followed(name) or torch._C._are_functorch_transforms_active():
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            operands = _tensors(_operands(name, args, kwargs))
            taken = [_Taken(t, gradient_function(t), self._history(t)) for t in operands]
            comes_in = bool(self._escapes) and (_takes_number(name, args, kwargs) or any(map(_is_array, taken)))
            outside = len(self._escapes) if comes_in else 0
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._note(name, outside, taken, [*_written(name, args, kwargs), *_tensors(result)])
        return result

    def _note(self, name: str, outside: int, taken: list[_Taken], given: list[torch.Tensor]) -> None:
        self.calls += bool(given)
        value = _History(outside=outside, has_data=outside > 0)
        for _, _, history in taken:
            value = value | history
        if not (value.live or value.cuts or value.outside):
            return
        location = _users_line()
        if name in _ESCAPES:
            cut = Cut("detached", name, location)
            self._escapes[cut] = self._escapes.get(cut, 0) | _union([value.live, *value.cuts.values()])
        if value.has_data and (given or name in _ESCAPES):
            # Writing to a parameter does not use its value.
            read = [t.history for t in taken if not (t.tensor.is_leaf and any(t.tensor is g for g in given))]
            self._used |= _union(leaves for history in read for leaves in (history.live, *history.cuts.values()))
        for tensor in given:
            node = gradient_function(tensor)
            before = next((t for t in taken if t.tensor is tensor), None)
            if node is None:
                live = self._bit(tensor) if tensor.requires_grad else 0
            elif before is not None and before.node is node:  # written to where gradients were off
                live = before.history.live
            else:
                live = value.live
            lost = value.live & ~live
            history = value
            if not (tensor.is_floating_point() or tensor.is_complex()):
                history = history._replace(fresh={}, relevant=frozenset())
            elif live:
                history = history._replace(fresh={}, relevant=value.relevant.union(self._relevant(name, taken)))
            if lost:
                cut = self._cut(name, tensor, location)
                origins = {} if cut.kind == "integer_dtype" else {cut: self._origin(taken, value.has_data)}
                history = history | _History(cuts={cut: lost}, fresh=origins)
            self._remember(tensor, node, history._replace(live=live, location=location, depth=value.depth + 1))

    def _cut(self, name: str, result: torch.Tensor, location: Location | None) -> Cut:
        if not (result.is_floating_point() or result.is_complex()):
            return Cut("integer_dtype", name, location)
        if result.is_inference() or not torch.is_grad_enabled():
            return Cut("no_grad", name, location, self._gradients_off)
        return Cut("detached", name, location)

    # ---- Relevant cuts ----------------------------------------------------------------------------------------------

    def _relevant(self, name: str, taken: list[_Taken]) -> Iterator[Cut]:
        """Cuts whose results a call takes without also computing with the values that were cut off."""
        for operand in taken:
            others = [t for t in taken if t is not operand and t.history.live]
            for cut, origin in operand.history.fresh.items():
                if name.strip("_") not in _ARITHMETIC or not any(self._is_one_of(origin, other) for other in others):
                    yield cut

    def _is_one_of(self, origin: _Origin, operand: _Taken) -> bool:
        """Return True if an operand is a value that was cut off, was computed from one, or is an input of one."""
        near = self._near(operand)
        return not origin.near.isdisjoint(near[:1]) or not origin.values.isdisjoint(near)

    def _origin(self, taken: list[_Taken], has_data: bool) -> _Origin:
        nears = [(t, self._near(t)) for t in taken if t.history.live]
        # A shared parameter alone does not relate values that are made of data.
        values = frozenset(near[0] for t, near in nears if t.node is not None or not has_data)
        return _Origin(values, frozenset(number for _, near in nears for number in near))

    def _near(self, operand: _Taken) -> list[int]:
        """Numbers of a value and of the values that it was computed from, up to a few calls back; see `_Origin`."""
        if operand.node is None:
            return [-self._bit(operand.tensor)]
        nodes = [operand.node]
        newest = nodes
        for call in range(_FEW):
            behind = {following for node in newest for following, _ in node.next_functions if following is not None}
            # Where data is involved, a parameter counts only as an operand of the last call, as in
            # `w + (w.round() * scale - w).detach()`.
            also_leaves = call == 0 or not operand.history.has_data
            newest = [node for node in behind if node not in nodes and (also_leaves or leaf_of(node) is None)]
            nodes = nodes + newest
        return [-self._bit(leaf) if (leaf := leaf_of(node)) is not None else node._sequence_nr() for node in nodes]

    # ---- Remembering ------------------------------------------------------------------------------------------------

    def _bit(self, leaf: torch.Tensor) -> int:
        if leaf not in self._bits:
            self._bits[leaf] = self._next_bit
            self._next_bit <<= 1
        return self._bits[leaf]

    def _remember(self, tensor: torch.Tensor, node: Node | None, history: _History) -> None:
        if node is not None:
            metadata(node)[self] = history
            for behind in walk(node, stop=self._is_known)[1:]:
                if not self._is_known(behind):
                    metadata(behind)[self] = history
            if history.depth % DEEP == 0:
                free_without_recursion(walk(node, stop=is_freed_without_recursion))
            if history.live and not tensor._is_view() and (memory := _memory(tensor)) is not None:
                self._made[memory] = history
        elif (history.cuts or history.outside) and (memory := _memory(tensor)) is not None:
            self._histories[memory] = history._replace(live=0)

    def _history(self, tensor: torch.Tensor) -> _History:
        node = gradient_function(tensor)
        if node is not None:
            return self._history_of(node)
        history, memory = _NO_HISTORY, _memory(tensor)
        if memory is not None:
            if memory in self._made and memory not in self._histories:
                self._histories[memory] = self._cut_unseen(tensor, self._made[memory])
            history = self._histories.get(memory, _NO_HISTORY)
        if not tensor.requires_grad:
            return history
        bit = self._bit(tensor)
        # Tensors detached from the leaf share its memory and so its history. The leaf does not depend on their cuts.
        cuts = {cut: leaves & ~bit for cut, leaves in history.cuts.items() if leaves & ~bit}
        fresh = {cut: origin for cut, origin in history.fresh.items() if cut in cuts}
        return _History(bit, cuts, outside=history.outside, fresh=fresh)

    def _cut_unseen(self, tensor: torch.Tensor, made: _History) -> _History:
        """History of a tensor that was made from a value by a call that no mode sees, such as `nn.Parameter(h)`."""
        call = "nn.Parameter" if isinstance(tensor, torch.nn.Parameter) else "a call that the tracer does not see"
        cut = Cut("detached", call, _users_line())
        return made._replace(live=0, relevant=frozenset()) | _History(cuts={cut: made.live}, fresh={cut: _Origin()})

    def _history_of(self, node: Node) -> _History:
        """History of a node, derived from the nodes behind it if a custom Function or an extension made it unseen."""
        if self not in metadata(node):
            history = _NO_HISTORY
            unseen = walk(node, stop=self._is_known)
            for behind in unseen:
                if (leaf := leaf_of(behind)) is not None:
                    history = history | _History(self._bit(leaf))
                elif self in metadata(behind):
                    history = history | metadata(behind)[self]
            for behind in unseen:
                if not self._is_known(behind):
                    metadata(behind)[self] = history
        return metadata(node)[self]  # type: ignore[no-any-return]

    def _is_known(self, node: Node) -> bool:
        return self in metadata(node) or leaf_of(node) is not None


_NO_HISTORY = _History(has_data=True)


class _Taken(NamedTuple):
    """An operand as it was before the call."""

    tensor: torch.Tensor
    node: Node | None
    history: _History


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _name(func: Any) -> str:
    """Name of a function; a property's own name where it is read, followed by "=" where it is set."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", name) + ("=" if name == "__set__" else "")
    return name


def _is_followed(name: str) -> bool:
    sets_another_property = name.endswith("=") and name != "data="
    skipped = name in _NOT_FOLLOWED or name.startswith(_NOT_FOLLOWED_PREFIXES) or name.endswith("_like")
    return not (sets_another_property or (skipped and name not in _FACTORIES))


def _operands(name: str, args: Any, kwargs: Any) -> Any:
    """Arguments whose values go into the result."""
    if name in _FORM_OF_FIRST:
        return args[1:], kwargs
    return args[:1] if name in _FORM_OF_OTHERS else (args, kwargs)


def _is_array(taken: _Taken) -> bool:
    """Return True if another library owns an operand's memory. No mode sees `torch.from_numpy`."""
    memory = _memory(taken.tensor) if taken.history is _NO_HISTORY else None
    return memory is not None and not memory.resizable()


def _takes_number(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if an argument is a Python or NumPy number, and not a literal in the calling function."""
    frame = _users_frame()
    literals = frame.f_code.co_consts if frame is not None else ()
    values = [*args, *kwargs.values()]
    if name in _FACTORIES:
        return not all(isinstance(value, numbers.Number) and value in literals for value in values[:1])
    floats = [v for v in values if isinstance(v, numbers.Real) and not isinstance(v, numbers.Integral)]
    return name.strip("_") in _ARITHMETIC and any(value not in literals for value in floats)


def _written(name: str, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensors that a call writes to: the first operand of `add_`, `x[i] = y` and `x.data = y`, and `out=`."""
    if name in ("__setitem__", "data=") or (name.endswith("_") and not name.endswith("__")):
        yield from _tensors(args[:1])
    yield from _tensors(kwargs.get("out"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse tensors, and wrappers
        return None


def _users_frame() -> FrameType | None:
    """The innermost frame outside of PyTorch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame


def _users_line() -> Location | None:
    frame = _users_frame()
    return None if frame is None else Location(frame.f_code.co_filename, frame.f_lineno)
