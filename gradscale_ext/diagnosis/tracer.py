"""A watched forward pass: the parameters that each value depends on, and where the graph was cut."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from .calls import (
    ARITHMETIC,
    ESCAPES,
    FROM_OUTSIDE,
    FROM_OUTSIDE_UNSEEN,
    is_followed,
    is_table,
    name_of,
    operands_of,
    takes_number,
    tensors_in,
    written,
)
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
from .lines import Location, users_line

#: A value counts as the one that was cut off if at most this number of calls are between it and the cut:
#: `x / x.pow(2).mean().sqrt().detach()` has three.
_FEW = 3


@dataclass(frozen=True)
class Cut:
    """A call through which no gradient flows back."""

    kind: Literal["detached", "no_grad", "integer_dtype"]
    call: str
    location: Location | None
    entered: Location | None = None
    """The line that turned gradients off."""
    returned: Location | None = None
    """The line that made a tensor of the same shape outside of PyTorch, after the value had left."""


class Escape(NamedTuple):
    """A call through which values left PyTorch."""

    call: str
    location: Location | None
    cuts: tuple[Cut, ...]
    """The cuts behind the values; the call itself is one where they had a gradient."""


class _Origin(NamedTuple):
    """The values that a call cut off, by number: the sequence number of a node, or minus the bit of a leaf."""

    values: frozenset[int] = frozenset()
    nearby: frozenset[int] = frozenset()
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
    """Number of escapes that had happened when any number from outside PyTorch last went into the value."""
    has_data: bool = False
    """True if the value depends on anything but parameters."""
    pending: Mapping[Cut, _Origin] = {}
    """Cuts behind the value whose results have not yet been combined with a value that has gradients."""
    relevant: frozenset[Cut] = frozenset()
    """Cuts whose results were combined with values other than the ones that were cut off."""

    def __or__(self, other: _History) -> _History:
        """History of a value that is computed from both."""
        cuts = dict(self.cuts)
        for cut, lost in other.cuts.items():
            cuts[cut] = cuts.get(cut, 0) | lost
        pending = dict(self.pending)
        for cut, origin in other.pending.items():
            values, nearby = pending.get(cut, _Origin())
            pending[cut] = _Origin(values | origin.values, nearby | origin.nearby)
        return _History(
            self.live | other.live,
            cuts,
            depth=max(self.depth, other.depth),
            outside=max(self.outside, other.outside),
            has_data=self.has_data or other.has_data,
            pending=pending,
            relevant=self.relevant | other.relevant,
        )


class GradientTracer(TorchFunctionMode):
    """Watches a forward pass, so that `diagnose_gradients` can name the call and the line where a graph was cut.

    Every call of PyTorch in the `with` block is watched, with its operands and results. A value of two or more
    dimensions that leaves PyTorch, as an array or a list, is taken to come back where a tensor of its shape is made
    from an array or a list later in the block. The tracer keeps no tensor alive, and calls no operation that another
    mode sees. It can be entered again after the block, and then reports the last block only. Modules compiled with
    `torch.compile` run eagerly in the block; calls inside `torch.func` transforms are not watched. Each call takes
    longer than without a tracer.

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
        self._escapes: dict[Escape, _History] = {}
        # The last call by which a table left PyTorch, by its shape.
        self._left: dict[torch.Size, Escape] = {}
        self._gradients_off: Location | None = None

    def __enter__(self) -> GradientTracer:
        if self._active:
            raise RuntimeError("GradientTracer: this tracer is already active; use another one inside its `with` block")
        self._begin()
        self._eagerly = contextlib.ExitStack()
        self._eagerly.enter_context(torch.compiler.set_stance("force_eager"))
        self._eagerly.enter_context(self._watching_makers())
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

    def escapes(self, leaf: torch.Tensor, result: torch.Tensor | None = None) -> list[Escape]:
        """Calls by which values that depend on a leaf left PyTorch.

        With `result`: only calls before a number from outside last went into the result.
        """
        bit = self._bits.get(leaf, 0)
        end = None if result is None else self._history(result).outside
        escapes = [
            escape._replace(cuts=tuple(cut for cut, lost in left.cuts.items() if lost & bit))
            for escape, left in list(self._escapes.items())[:end]
        ]
        return [escape for escape in escapes if escape.cuts]

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
        name = name_of(func)
        if name == "_set_grad_enabled":
            self._gradients_off = None if args[0] else self._gradients_off or users_line()
        if not self._active or not is_followed(name) or torch._C._are_functorch_transforms_active():
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            operands = tensors_in(operands_of(name, args, kwargs))
            taken = [_Input(t, gradient_function(t), self._history(t)) for t in operands]
            is_made = name in FROM_OUTSIDE and not taken
            if self._escapes and takes_number(name, [*args, *kwargs.values()]):
                taken.append(_Input(_NUMBERS, None, _NO_HISTORY._replace(outside=len(self._escapes))))
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._note(name, taken, [*written(name, args, kwargs), *tensors_in(result)])
            if is_made:
                self._made_outside(result)
        return result

    def _note(self, name: str, taken: list[_Input], given: list[torch.Tensor]) -> None:
        self.calls += bool(given)
        value = functools.reduce(operator.or_, (t.history for t in taken), _History())
        if not (value.live or value.cuts or value.outside):
            return
        location = users_line()
        if name in ESCAPES and (value.live or value.cuts):
            self._leave(name, location, taken, value)
        if value.has_data and (given or name in ESCAPES):
            # Writing to a parameter does not use its value.
            read = [t.history for t in taken if not any(t.tensor is g and g.is_leaf for g in given)]
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
                history = history._replace(pending={}, relevant=frozenset())
            elif live:
                history = history._replace(pending={}, relevant=value.relevant.union(self._relevant(name, taken)))
            if lost:
                cut = self._cut(name, tensor, location)
                origins = {} if cut.kind == "integer_dtype" else {cut: self._origin(taken, value.has_data)}
                history = history | _History(cuts={cut: lost}, pending=origins)
            self._remember(tensor, node, history._replace(live=live, location=location, depth=value.depth + 1))

    def _cut(self, name: str, result: torch.Tensor, location: Location | None) -> Cut:
        if not (result.is_floating_point() or result.is_complex()):
            return Cut("integer_dtype", name, location)
        if result.is_inference() or not torch.is_grad_enabled():
            return Cut("no_grad", name, location, self._gradients_off)
        return Cut("detached", name, location)

    # ---- Values that leave PyTorch and come back --------------------------------------------------------------------

    def _leave(self, name: str, location: Location | None, taken: list[_Input], value: _History) -> None:
        """Note that a value leaves. The call is a cut, unless the value has been cut off before."""
        if value.live:
            cut, origin = Cut("detached", name, location), self._origin(taken, value.has_data)
            value = value._replace(live=0) | _History(cuts={cut: value.live}, pending={cut: origin})
        escape = Escape(name, location, tuple(value.cuts))
        self._escapes[escape] = self._escapes.get(escape, _History())._replace(pending={}) | value
        self._left.update((t.tensor.shape, escape) for t in taken if is_table(t.tensor))

    def _made_outside(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was made from a Python or NumPy value. If a table of its shape left PyTorch before, the
        tensor is taken to be this table, changed or not."""
        escape = self._left.get(tensor.shape)
        if escape is not None and tensor.is_floating_point() and (memory := _memory(tensor)) is not None:
            left, line = self._escapes[escape], users_line()
            returned = {cut: replace(cut, returned=line) for cut in left.cuts}
            cuts = {returned[cut]: lost for cut, lost in left.cuts.items()}
            pending = {returned[cut]: origin for cut, origin in left.pending.items()}
            self._histories[memory] = left._replace(live=0, cuts=cuts, pending=pending, location=line)

    @contextlib.contextmanager
    def _watching_makers(self) -> Iterator[None]:
        """Replace the functions that make tensors but are seen by no mode."""

        def watched(function: Any) -> Any:
            @functools.wraps(function)
            def make(*args: Any, **kwargs: Any) -> Any:
                tensor = function(*args, **kwargs)
                modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # of this thread
                if self._active and self in modes:
                    with torch._C.DisableTorchFunction():
                        self._made_outside(tensor)
                return tensor

            return make

        originals = [(owner, name, getattr(owner, name)) for owner, name in FROM_OUTSIDE_UNSEEN]
        for owner, name, function in originals:
            setattr(owner, name, watched(function))
        try:
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)

    # ---- Relevant cuts ----------------------------------------------------------------------------------------------

    def _relevant(self, name: str, taken: list[_Input]) -> Iterator[Cut]:
        """Cuts whose results a call takes without also computing with the values that were cut off."""
        for operand in taken:
            others = [t for t in taken if t is not operand and t.history.live]
            for cut, origin in operand.history.pending.items():
                if name.strip("_") not in ARITHMETIC or not any(self._is_one_of(origin, other) for other in others):
                    yield cut

    def _is_one_of(self, origin: _Origin, operand: _Input) -> bool:
        """Return True if an operand is a value that was cut off, was computed from one, or is an input of one."""
        nearby = self._nearby(operand)
        return not origin.nearby.isdisjoint(nearby[:1]) or not origin.values.isdisjoint(nearby)

    def _origin(self, taken: list[_Input], has_data: bool) -> _Origin:
        all_nearby = [(t, self._nearby(t)) for t in taken if t.history.live]
        # A shared parameter alone does not relate values that are made of data.
        values = frozenset(nearby[0] for t, nearby in all_nearby if t.node is not None or not has_data)
        return _Origin(values, frozenset(number for _, nearby in all_nearby for number in nearby))

    def _nearby(self, operand: _Input) -> list[int]:
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
            # An array may share memory that PyTorch did not allocate, and may have been written to.
            is_shared = not memory.resizable()
            history = self._histories.get(memory) or history._replace(outside=len(self._escapes) if is_shared else 0)
        if not tensor.requires_grad:
            return history
        bit = self._bit(tensor)
        # Tensors detached from the leaf share its memory and so its history. The leaf does not depend on their cuts.
        cuts = {cut: leaves & ~bit for cut, leaves in history.cuts.items() if leaves & ~bit}
        pending = {cut: origin for cut, origin in history.pending.items() if cut in cuts}
        return _History(bit, cuts, outside=history.outside, pending=pending)

    def _cut_unseen(self, tensor: torch.Tensor, made: _History) -> _History:
        """History of a tensor that was made from a value by a call that no mode sees, such as `nn.Parameter(h)`."""
        call = "nn.Parameter" if isinstance(tensor, torch.nn.Parameter) else "a call that the tracer does not see"
        cut = Cut("detached", call, users_line())
        return made._replace(live=0, relevant=frozenset()) | _History(cuts={cut: made.live}, pending={cut: _Origin()})

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


class _Input(NamedTuple):
    """An operand as it was before the call."""

    tensor: torch.Tensor
    node: Node | None
    history: _History


#: Represents the Python and NumPy numbers that a call takes.
_NUMBERS = torch.empty(0)


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse tensors, and wrappers
        return None
