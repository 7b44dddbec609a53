"""Arguments and results of a step: nested structures whose leaves are tensors and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .. import _structures
from .modes import Modes, watching_mode

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = (torch.Tensor, *_CONSTANTS)

#: A nested structure without its leaves: None for a leaf, else its type, its keys and the structures of its items.
Structure = Any
Given = tuple[tuple[Any, ...], dict[str, Any]]


def argument(place: str) -> str:
    """An argument as messages name it: the place starts with [0] for positional ones, and [1] for the others."""
    first, _, items = place[4:].partition("]")
    return "argument " + first.strip("'") + items if place else "the arguments"


def result(place: str) -> str:
    """A part of a result as messages name it."""
    return f"its result{place}"


def named_leaves(value: Any, name: Callable[[str], str], place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a structure, of all types, each with its place, such as ``[0]['obs']``."""
    if _structures.is_leaf(value):
        yield place, value
        return
    items: list[tuple[Any, Any]] = []

    def look(key: Any, item: Any) -> Any:
        items.append((f".{key.name}" if isinstance(key, dataclasses.Field) else f"[{key!r}]", item))
        return item

    try:
        _structures.rebuilt("CapturedStep", look, value)
    except TypeError as error:
        raise _structures.renamed(error, x=name(place)) from error
    for key, item in items:
        yield from named_leaves(item, name, place + key)


def flatten(value: Any, name: Callable[[str], str]) -> tuple[Structure, list[Any]]:
    """The structure of a value, and its leaves. Raises TypeError for a leaf that is neither a tensor nor a constant."""
    leaves: list[Any] = []
    try:
        return _structure_of(value, leaves), leaves
    except TypeError:
        for place, leaf in named_leaves(value, name):
            if not isinstance(leaf, _LEAVES):
                kind = type(leaf)  # with the module for NumPy's types, because numpy.float32 is not torch.float32
                shown = f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__
                instead = "torch.as_tensor" if name is argument else "float"
                has_numbers = hasattr(leaf, "__array__" if name is argument else "__float__")
                raise TypeError(
                    f"CapturedStep: {name(place)} is of type {shown}, but arguments and results are tensors, numbers, "
                    "strings, bools, None, dtypes and devices, in lists, tuples, dicts, dataclasses and registered "
                    "pytree nodes" + (f"; write {instead}(...)" if has_numbers else "")
                ) from None
        raise


def _structure_of(value: Any, leaves: list[Any]) -> Structure:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *[_structure_of(item, leaves) for item in value]
    if kind is dict:
        return kind, *[(key, _structure_of(item, leaves)) for key, item in value.items()]
    if isinstance(value, _LEAVES):
        leaves.append(value)
        return None
    if _structures.is_leaf(value):
        raise TypeError
    parts: list[Any] = []

    def look(key: Any, item: Any) -> Any:
        parts.append((key.name if isinstance(key, dataclasses.Field) else key, _structure_of(item, leaves)))
        return item

    _structures.rebuilt("CapturedStep", look, value)
    return kind, *parts


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with another tensor in the place of each one."""

    def changed(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return changed(value) if _structures.is_leaf(value) else _structures.mapped("CapturedStep", changed, value)


class Signature(NamedTuple):
    """Everything of a call that decides which graph is right."""

    structure: Structure
    leaves: tuple[Any, ...]
    """For each leaf: dtype, shape and strides of a tensor, type and value of a constant."""
    modes: Modes


class Arguments(NamedTuple):
    """The arguments of a call."""

    given: Given
    signature: Signature
    tensors: list[torch.Tensor]
    """The tensors, on the device."""
    watcher: str = ""
    """The name of a mode that sees the calls of PyTorch, which a replay does not make; empty if there is none."""

    def leaves(self) -> list[tuple[str, Any]]:
        """Each leaf with its name for messages."""
        return [(argument(place), leaf) for place, leaf in named_leaves(self.given, argument)]

    def names(self) -> list[str]:
        """The names of the tensors."""
        return _names_of_tensors(self.given)

    def build(self, tensors: Iterable[torch.Tensor] | None = None) -> Given:
        """The same arguments with other tensors, or with the ones on the device."""
        own = iter(self.tensors if tensors is None else tensors)
        built: Given = each_tensor(lambda _: next(own), self.given)
        return built

    def changed_in(self, built: Given, tensors: Iterable[torch.Tensor] | None = None) -> str:
        """The argument among those that were built in which the step has put something else; empty if there is none."""
        then = dict(named_leaves(self.build(tensors), argument))
        now = dict(named_leaves(built, argument))
        for place in now | then:
            one, other = then.get(place, then), now.get(place, now)
            if one is not other and not (
                isinstance(one, _CONSTANTS) and isinstance(other, _CONSTANTS) and one == other
            ):
                return argument(place)
        return "" if _structure_of(built, []) == self.signature.structure else argument("")


def read(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Arguments:
    """Read the arguments. Tensors of the CPU are moved to the device."""
    given = args, kwargs
    structure, leaves = flatten(given, argument)
    tensors: list[torch.Tensor] = []
    described: list[Any] = []
    for value in leaves:
        if not isinstance(value, torch.Tensor):
            # The text of a float tells -0.0 from 0.0, and is the same for each NaN.
            described.append((type(value), repr(value) if isinstance(value, float | complex) else value))
            continue
        is_elsewhere = value.device != device
        if value.layout != torch.strided or value.requires_grad or (is_elsewhere and value.device.type != "cpu"):
            raise _refusal(_names_of_tensors(given)[len(tensors)], value, device)
        if is_elsewhere:
            value = value.to(device, non_blocking=True)
        tensors.append(value)
        described.append((value.dtype, value.shape, value.stride()))
    return Arguments(given, Signature(structure, tuple(described), Modes.of(device)), tensors, watching_mode())


def _names_of_tensors(given: Given) -> list[str]:
    return [argument(place) for place, leaf in named_leaves(given, argument) if isinstance(leaf, torch.Tensor)]


def _refusal(name: str, value: torch.Tensor, device: torch.device) -> Exception:
    """The error for a tensor that is no data of the device or the CPU."""
    if value.device != device and value.device.type != "cpu":
        return ValueError(
            f"CapturedStep: {name} is on {value.device}, but the state is on {device}; write .to('{device}')"
        )
    if value.layout != torch.strided:
        return TypeError(
            f"CapturedStep: {name} is of layout {value.layout}, but arguments are dense tensors; write .to_dense()"
        )
    return ValueError(f"CapturedStep: {name} requires grad, but arguments are data; detach() it")


@torch.inference_mode(False)
def like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for an argument, with the same strides. PyTorch counts writes to it, in inference mode too."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _text_of_leaf(leaf: Any) -> str:
    kind, value, *_ = leaf
    if isinstance(kind, torch.dtype):
        return f"{str(kind).removeprefix('torch.')} {list(value)}"
    return str(value) if issubclass(kind, float | complex) else repr(value)


def text_of_signature(signature: Signature) -> str:
    """Shapes, dtypes and constants, for messages."""
    return ", ".join(map(_text_of_leaf, signature.leaves))


def what_changes(signatures: list[Signature], arguments: Arguments) -> str:
    """Say which argument keeps changing, and what to write instead."""
    now, every = arguments.signature, [*signatures, arguments.signature]
    if any(one.structure != now.structure or len(one.leaves) != len(now.leaves) for one in signatures):
        return "the structure of the arguments keeps changing; pass the same lists and dicts at each call"
    for index, (name, value) in enumerate(arguments.leaves()):
        seen = dict.fromkeys(one.leaves[index] for one in every)
        texts = dict.fromkeys(map(_text_of_leaf, seen))
        if len(texts) > 1:
            is_tensor = isinstance(value, torch.Tensor)
            remedy = "pad it to one shape, or to a few" if is_tensor else "pass a tensor, whose value may change"
            return f"{name} keeps changing: {', then '.join(texts)}; {remedy}"
        if len(seen) > 1:
            strides = ", then ".join(str(list(one[2])) for one in seen)
            return f"the strides of {name} keep changing: {strides}; pass x.contiguous()"
    return (
        "the state or the context keeps changing (train() and eval(), requires_grad, gradients that are set to None "
        "between some calls, autocast); make separate captured steps"
    )
