"""Random generators: PyTorch's, which graphs repeat, and the ones of Python and NumPy, which they do not."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..diagnosis.lines import LIBRARY_PATHS, Location

CPU = "PyTorch's generator of cpu"
_NOT_TRACED = (*LIBRARY_PATHS, sysconfig.get_path("stdlib"), "<")


class TorchGenerators:
    """The states of PyTorch's own generators, of each device in use, and of others."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        """Save the states."""
        default = [torch.default_generator]
        for module in (torch.cuda, getattr(torch, "xpu", None)):
            if module is not None and module.is_available() and module.is_initialized():
                default += module.default_generators
        named = {f"PyTorch's generator of {generator.device}": generator for generator in default}
        self._generators = named | {f"generator {index} of the state": one for index, one in enumerate(generators)}
        self.save()

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def save(self) -> None:
        """Save the states anew."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # also called while modes are active
            self._states = self._now()

    def changed(self) -> list[str]:
        """Names of the generators that have drawn numbers, or were set, since."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return [name for name, state in self._now().items() if not torch.equal(state, self._states[name])]

    def restore(self) -> None:
        """Set the generators back."""
        for name, generator in self._generators.items():
            generator.set_state(self._states[name])


class HostGenerators:
    """The states of the generators of Python and NumPy: the global ones, and all others that a program has made."""

    def __init__(self) -> None:
        """Save the states."""
        numpy = sys.modules.get("numpy.random")
        of_all = {"Python's random": random._inst}
        if numpy is not None:
            of_all["NumPy's random"] = numpy.mtrand._rand
        self._global = {id(one): name for name, one in of_all.items()}
        kinds = {random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ())}
        every = [*of_all.values(), *(one for one in gc.get_objects() if type(one) in kinds)]
        self._generators = list({id(one): one for one in every}.values())
        self._before = [pickle.dumps(one) for one in self._generators]
        self._now, self._lines = list(self._before), dict[int, Location]()

    def drawn(self) -> Iterator[tuple[str, bool, Location | None]]:
        """Name, whether it is a global one, and line for each that has drawn numbers since."""
        for index, (one, before) in enumerate(zip(self._generators, self._before, strict=True)):
            if pickle.dumps(one) != before:
                kind = f"a {type(one).__module__.partition('.')[0]}.{type(one).__name__}"
                yield self._global.get(id(one), kind), id(one) in self._global, self._lines.get(index)

    def restore(self) -> None:
        """Set the global generators back. Another thread may use others."""
        for one, before in zip(self._generators, self._before, strict=True):
            if id(one) in self._global:
                then = pickle.loads(before)
                if isinstance(one, random.Random):
                    one.setstate(then.getstate())
                else:
                    one.set_state(then.get_state(legacy=False))

    @contextlib.contextmanager
    def noting_lines(self) -> Iterator[None]:
        """In this context, note the lines of the user that draw, unless a debugger follows them."""
        if sys.gettrace() is not None:
            yield
            return
        last: Location | None = None

        def trace(frame: types.FrameType, event: str, value: Any) -> Any:
            nonlocal last
            if frame.f_code.co_filename.startswith(_NOT_TRACED):
                return None
            for index, generator in enumerate(self._generators):
                state = pickle.dumps(generator)
                if state != self._now[index] and last is not None:
                    self._lines.setdefault(index, last)
                self._now[index] = state
            here = frame if event != "return" else frame.f_back
            if here is not None and not here.f_code.co_filename.startswith(_NOT_TRACED):
                last = Location(here.f_code.co_filename, here.f_lineno)
            return trace

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)
