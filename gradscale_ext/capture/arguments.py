"""Arguments and results of a step: nested structures whose leaves are tensors and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .. import _structures
from .hooks import default_devices

_CONTAINERS = (tuple, dict, list)
_LEAVES = (torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

#: The form of a structure, which can be compared: None for a leaf, else its type, and the keys and forms of its parts.
Form = Any
#: Makes the error for a leaf of another type, from its place and value.
Refuse = Callable[[str, Any], Exception]


class Leaf(NamedTuple):
    """A tensor or constant, and its place for messages, such as ``[0]['obs']``."""

    place: str
    value: Any


def flatten(value: Any, refuse: Refuse) -> tuple[Form, list[Leaf]]:
    """The form of a structure, and its leaves."""
    leaves: list[Leaf] = []
    return _form_of(value, "", leaves, refuse), leaves


def _form_of(value: Any, place: str, leaves: list[Leaf], refuse: Refuse) -> Form:
    kind = type(value)
    if kind in _CONTAINERS:
        pairs = dict.items(value) if kind is dict else enumerate(value)
        return kind, *[(key, _form_of(item, f"{place}[{key!r}]", leaves, refuse)) for key, item in pairs]
    if isinstance(value, _LEAVES):
        leaves.append(Leaf(place, value))
        return None
    parts = []
    for key, item in _items(value, place, refuse):
        name, shown = (key.name, f".{key.name}") if isinstance(key, dataclasses.Field) else (key, f"[{key!r}]")
        parts.append((name, _form_of(item, f"{place}{shown}", leaves, refuse)))
    return kind, *parts


def _items(value: Any, place: str, refuse: Refuse) -> Iterable[tuple[Any, Any]]:
    """The keys and items of a structure of another type, which can be built again with other items."""
    if _structures.is_leaf(value):
        raise refuse(place, value)
    items: list[tuple[Any, Any]] = []

    def look(key: Any, item: Any) -> Any:
        items.append((key, item))
        return item

    try:
        _structures.rebuilt("CapturedStep", look, value)
    except TypeError as error:
        reason = f"it cannot be built again with other items: {error.__cause__}"
        raise TypeError(f"{refuse(place, value)}; {reason}") from error
    return items


def _build(like: Any, leaves: Iterable[Any]) -> Any:
    """A structure like another one, with other leaves."""
    left = iter(leaves)
    if isinstance(like, _LEAVES):
        return next(left)
    return _structures.mapped("CapturedStep", lambda leaf: next(left), like)


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """Apply a function to the tensors of a result that has been flattened before, without an error."""

    def changed(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return changed(result) if _structures.is_leaf(result) else _structures.mapped("CapturedStep", changed, result)


class Arguments(NamedTuple):
    """The arguments of a call."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    form: Form
    """Everything that decides which graph is right: structure, constants, shapes, and the modes of PyTorch."""
    leaves: list[Leaf]

    def tensors(self) -> list[Leaf]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf.value, torch.Tensor)]

    def build(self, tensors: Iterable[torch.Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with other tensors, or with tensors of the CPU moved to the device."""
        own = iter([value for _, value in self.tensors()] if tensors is None else tensors)
        leaves = (next(own) if isinstance(value, torch.Tensor) else value for _, value in self.leaves)
        built: tuple[tuple[Any, ...], dict[str, Any]] = _build(self.given, leaves)
        return built

    def changed_in(
        self, built: tuple[tuple[Any, ...], dict[str, Any]], tensors: Iterable[torch.Tensor] | None = None
    ) -> str:
        """The argument among those that were built in which the step has put something else; empty if there is none."""
        wanted = flatten(self.build(tensors), refuse_argument)[1]
        try:
            form, now = flatten(built, refuse_argument)
        except TypeError:
            return "the arguments"
        if form != self.form[0]:
            places = dict.fromkeys(place for place, _ in now) | dict.fromkeys(place for place, _ in wanted)
            both = {place for place, _ in now} & {place for place, _ in wanted}
            return next((argument(place) for place in places if place not in both), "the arguments")
        for (place, value), (_, then) in zip(now, wanted, strict=True):
            if value is not then and (isinstance(value, torch.Tensor) or value != then):
                return argument(place)
        return ""


def read(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Arguments:
    """Read the arguments. Tensors of the CPU are moved to the device."""
    structure, leaves = flatten((args, kwargs), refuse_argument)
    forms: list[Any] = []
    for index, (place, value) in enumerate(leaves):
        if not isinstance(value, torch.Tensor):
            # The text of a float tells -0.0 from 0.0, and is the same for each NaN.
            forms.append((type(value), repr(value) if isinstance(value, float | complex) else value))
            continue
        if value.device != device:
            if value.device.type != "cpu":
                raise ValueError(
                    f"CapturedStep: {argument(place)} is on {value.device}, but the state is on {device}; "
                    f"write .to('{device}')"
                )
            value = value.to(device, non_blocking=True)
            leaves[index] = Leaf(place, value)
        if value.layout != torch.strided:
            raise TypeError(
                f"CapturedStep: {argument(place)} is of layout {value.layout}, but arguments are dense tensors; "
                "write .to_dense()"
            )
        if value.requires_grad:
            raise ValueError(f"CapturedStep: {argument(place)} requires grad, but arguments are data; detach() it")
        forms.append((value.dtype, value.shape, value.stride()))
    return Arguments((args, kwargs), (structure, tuple(forms), _context(device)), leaves)


def _context(device: torch.device) -> tuple[Any, ...]:
    """The modes of PyTorch that decide what a step computes."""
    kind = device.type
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        default_devices(),
    )


@torch.inference_mode(False)
def like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for an argument, with the same strides. PyTorch counts writes to it, in inference mode too."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def argument(place: str) -> str:
    """An argument as messages name it: the place starts with [0] for positional ones, and [1] for the others."""
    first, _, items = place[4:].partition("]")
    return "argument " + first.strip("'") + items if place else "the arguments"


def refuse_argument(place: str, value: Any) -> Exception:
    return TypeError(
        f"CapturedStep: {argument(place)} is of type {_type_name(value)}, but arguments are tensors, numbers, "
        "strings, bools, None, dtypes and devices, in lists, tuples, dicts, dataclasses and registered pytree nodes"
        + ("; write torch.as_tensor(...)" if hasattr(value, "__array__") else "")
    )


def refuse_result(place: str, value: Any) -> Exception:
    return TypeError(
        f"CapturedStep: its result{place} is of type {_type_name(value)}, but a step returns tensors, numbers, "
        "strings, bools, None, dtypes and devices, in lists, tuples, dicts, dataclasses and registered pytree nodes"
        + ("; write float(...)" if hasattr(value, "__float__") else "")
    )


def _type_name(value: Any) -> str:
    """The name of a type; for NumPy's types with the module, because numpy.float32 is not torch.float32."""
    kind = type(value)
    return f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__


def _form_text(form: Any) -> str:
    if isinstance(form[0], torch.dtype):
        return f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"
    return str(form[1]) if issubclass(form[0], float | complex) else repr(form[1])


def text_of(form: Form) -> str:
    """The signature of a call."""
    return ", ".join(map(_form_text, form[1]))


def what_changes(forms: list[Form], arguments: Arguments) -> str:
    """Say which argument keeps changing, and what to write instead."""
    form, every = arguments.form, [*forms, arguments.form]
    if any(one[0] != form[0] or len(one[1]) != len(form[1]) for one in forms):
        return "the structure of the arguments keeps changing; pass the same lists and dicts at each call"
    for index, (place, value) in enumerate(arguments.leaves):
        seen = dict.fromkeys(one[1][index] for one in every)
        texts = dict.fromkeys(map(_form_text, seen))
        if len(texts) > 1:
            is_tensor = isinstance(value, torch.Tensor)
            remedy = "pad it to one shape, or to a few" if is_tensor else "pass a tensor, whose value may change"
            return f"{argument(place)} keeps changing: {', then '.join(texts)}; {remedy}"
        if len(seen) > 1:
            strides = ", then ".join(str(list(one[2])) for one in seen)
            return f"the strides of {argument(place)} keep changing: {strides}; pass x.contiguous()"
    return (
        "the state or the context keeps changing (train() and eval(), requires_grad, gradients that are set to None "
        "between some calls, autocast); make separate captured steps"
    )


def integer(name: str, value: Any, least: int) -> int:
    """Check an integer argument of CapturedStep itself."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"CapturedStep: {name} must be an integer, but it is of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"CapturedStep: {name} must be at least {least}, but it is {value}")
    return int(value)
