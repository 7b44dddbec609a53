"""What a step can reach besides its arguments and state: closures, globals, and the attributes of its object."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..monitor.monitor import GradientMonitor
from .state import State, memory_of

_DEPTH = 4
"""How many attributes, items and closures deep to look."""
_MOST = 200
"""The longest container to look into."""


class Part(NamedTuple):
    """A tensor, number or string, and where it is: a dict and its key, a list and its index, or the cell of a closure.
    Without a container, another value cannot be put there."""

    name: str
    value: Any
    container: Any = None
    key: Any = None

    def put(self, value: Any) -> None:
        """Put another value in its place."""
        if isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        elif self.container is not None:
            self.container[self.key] = value


class Surroundings:
    """The tensors and numbers that a step can reach, as they are now."""

    def __init__(self, step: Any, state: State) -> None:
        """Look around."""
        self._step = step
        known = {memory._cdata for _, tensor in state.tensors() if (memory := memory_of(tensor)) is not None}
        self._tensors: dict[int, tuple[str, torch.Tensor, int]] = {}
        self._numbers: dict[tuple[str, int], Part] = {}
        self.places: list[Part] = []
        """Places of tensors and numbers, where another value may be put."""
        for place, part in _reachable(step):
            if part.container is not None:
                self.places.append(part)
            tensor = part.value
            if not isinstance(tensor, torch.Tensor):
                self._numbers[place] = part
            elif not tensor.is_inference() and (memory := memory_of(tensor)) is not None and memory._cdata not in known:
                self._tensors.setdefault(id(tensor), (part.name, tensor, tensor._version))

    def written_tensors(self) -> Iterator[str]:
        """Names of the tensors outside of the state that have been written to since."""
        return (name for name, tensor, version in self._tensors.values() if tensor._version != version)

    def changed_numbers(self) -> Iterator[tuple[str, Any, Any]]:
        """Names and values of the numbers that have changed since."""
        return ((before.name, before.value, now.value) for before, now in self._changes())

    def restore(self) -> None:
        """Put the numbers back."""
        for before, _ in list(self._changes()):
            before.put(before.value)

    def _changes(self) -> Iterator[tuple[Part, Part]]:
        for place, part in _reachable(self._step):
            before = self._numbers.get(place)
            if before is not None and type(part.value) is type(before.value) and part.value != before.value:
                yield before, part


def _reachable(step: Any) -> Iterator[tuple[tuple[str, int], Part]]:
    """Tensors, numbers and strings, each with its name and a count: two closures may have variables of one name."""
    seen: set[int] = set()
    counts: Counter[str] = Counter()
    left: list[tuple[Part, int]] = [(Part("step", step), 0)]
    while left:
        part, depth = left.pop()
        if isinstance(part.value, torch.Tensor | int | float | str):
            yield (part.name, counts[part.name]), part
            counts[part.name] += 1
        elif id(part.value) not in seen and depth <= _DEPTH:
            seen.add(id(part.value))
            left += [(inner, depth + 1) for inner in _parts(part.name, part.value)]


def _parts(name: str, value: Any) -> Iterator[Part]:
    if isinstance(value, functools.partial):
        for inner in (value.func, value.args, value.keywords):
            yield Part(name, inner)
    elif isinstance(value, types.MethodType):
        yield Part("self" if name == "step" else name, value.__self__)
        yield from _parts(name, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _cells(value)
        wanted = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, int, float)
        own = {key: value.__globals__[key] for key in value.__code__.co_names if key in value.__globals__}
        yield from _items(value.__globals__, {key: held for key, held in own.items() if isinstance(held, wanted)}, "{}")
    elif isinstance(value, torch.nn.Module):
        for path, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield Part(f"{name}.{path}", tensor)
        yield from _items(vars(value), vars(value), f"{name}.{{}}")
    elif isinstance(value, dict) and len(value) <= _MOST:
        yield from _items(value, {key: held for key, held in value.items() if isinstance(key, str)}, f"{name}['{{}}']")
    elif isinstance(value, list | tuple) and len(value) <= _MOST:
        yield from _items(value, dict(enumerate(value)), f"{name}[{{}}]")
    elif not isinstance(value, type | types.ModuleType | GradientMonitor) and hasattr(value, "__dict__"):
        yield from _items(vars(value), vars(value), f"{name}.{{}}")


def _items(container: Any, items: dict[Any, Any], form: str) -> Iterator[Part]:
    fixed = isinstance(container, tuple)
    for key, held in items.items():
        yield Part(form.format(key), held) if fixed else Part(form.format(key), held, container, key)


def _cells(function: types.FunctionType) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Part(name, cell.cell_contents, cell)
        except ValueError:  # not assigned yet
            continue
