"""Everything that a learner step can reach: what it may change by name (modules, optimizers, schedulers, tensors and
generators), and what its closures, globals and objects hold."""

from __future__ import annotations

import copyreg
import functools
import os
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..diagnosis.lines import NOT_THE_USERS
from ..monitor.monitor import GradientMonitor

_DICTS = (dict, defaultdict, OrderedDict)
_LISTS = (list, deque)
CONTAINERS = (*_DICTS, *_LISTS, set, types.CellType)
"""Containers whose contents are followed. Of other objects, the attributes are."""
_DEPTH = 5
"""How many attributes, items and closures deep to look outside of the state."""
_MOST = 200
"""The longest container to look into outside of the state."""
_INSTALLED = (*NOT_THE_USERS, os.path.dirname(os.__file__) + os.sep)
"""Beginnings of the paths of the standard library and of installed packages."""
_UPDATERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects that are found in attributes of modules too, such as an agent's optimizers."""

PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules")
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_HOOKS_OF_ALL = (
    ("every module", sys.modules["torch.nn.modules.module"], [f"_global{attribute}" for attribute in HOOKS_OF_MODULES]),
    (
        "every optimizer",
        sys.modules["torch.optim.optimizer"],
        ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
    ),
)

ROLES_REPLACED = ("attribute", "private")
"""Roles of tensors that a step may replace by others."""
Role = Literal[
    "kept", "optimizer", "options", "module", "hooks", "attribute", "private", "updater", "gradient", "reached"
]
"""What a tensor is, or what a container holds. Kept: parameters, buffers and tensors that are named in the state, which
are the same objects after each step. Optimizer: its state. Options: a group of parameters. Module: the attributes of a
module. Attribute: what is in such an attribute, which the step may replace. Private: the same in PyTorch's own ones.
Updater: what schedulers and scalers hold. Reached: not part of the state."""


class Item(NamedTuple):
    """A tensor, a generator, or a container (for objects, the dict of their attributes), with its name for messages."""

    name: str
    value: Any
    role: Role
    form: str = "{name}[{key!r}]"
    """The names of a container's items."""
    keys: frozenset[Any] | None = None
    """The keys that the step uses; None for all."""

    def place(self, key: Any) -> str:
        """The name of the item with this key; for a container without keys, the name of the container."""
        return self.name if key is None else self.form.format(name=self.name, key=key)

    def pairs(self) -> list[tuple[Any, Any]]:
        """The keys and values of a container. What has no keys is one value, in a form that can be compared."""
        value = self.value
        if isinstance(value, dict):
            pairs = value.items()
            return list(pairs) if self.keys is None else [pair for pair in pairs if pair[0] in self.keys]
        if holds_attributes(value):
            return list(_own_attributes(value).items())
        if isinstance(value, list):
            return list(enumerate(value))
        if isinstance(value, types.CellType):
            try:
                return [(None, value.cell_contents)]
            except ValueError:  # not assigned yet
                return []
        return [(None, value.tobytes() if is_array(value) else tuple(value))]


ATTRIBUTE, VARIABLE = "{name}.{key}", "{name}"
"""Forms of names: of what is in the dict of an object, and in the cell of a closure."""


def is_array(value: Any) -> bool:
    """True for arrays of NumPy that are small enough to be compared at each call."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.size <= _MOST and not value.dtype.hasobject


def holds_attributes(value: Any) -> bool:
    """True for classes that the user defines, and for objects with `__slots__`: their attributes are in no dict."""
    if isinstance(value, type):
        return _is_users(value)
    return _is_users(type(value)) and bool(copyreg._slotnames(type(value)))  # type: ignore[attr-defined]


def _is_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or (module is not None and _is_users_module(module))


def _own_attributes(value: Any) -> dict[str, Any]:
    """The attributes in the slots of an object, or the attributes of a class without methods and properties."""
    if isinstance(value, type):
        return {k: v for k, v in vars(value).items() if not (k.startswith("__") or hasattr(type(v), "__get__"))}
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


class StepHolder:
    """The base of `CapturedStep`, of which `State` follows the step, but not the graphs and counters."""

    _step: Any


class State:
    """The objects that a step changes, and everything that they and the step hold."""

    def __init__(self, function: str, given: tuple[Any, ...], step: Any = None) -> None:
        """Collect the objects from nested lists, tuples and dicts. Raises TypeError for other types."""
        self._step = step
        roots: list[Any] = []
        self._containers: list[Item] = []
        left = [(f"state[{index}]", value, False) for index, value in reversed(list(enumerate(given)))]
        while left:
            place, value, is_held = left.pop()
            if isinstance(value, torch.Tensor | torch.Generator) or _is_stateful(value):
                # A list or dict may hold another tensor later.
                is_new = not any(value is root for root in roots)
                if is_new and not (is_held and isinstance(value, torch.Tensor)):
                    roots.append(value)
                    left += [(place, held, False) for held in _updaters_in(value)]
            elif isinstance(value, list | tuple | Mapping):
                if isinstance(value, list | dict):
                    self._containers.append(Item(place, value, "kept"))
                is_held = isinstance(value, list | dict) or (is_held and isinstance(value, tuple))
                pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
                left += [(f"{place}[{key!r}]", item, is_held) for key, item in reversed(list(pairs))]
            else:
                raise TypeError(
                    f"{function}: state must be modules, optimizers, schedulers, tensors or torch.Generators, or "
                    f"lists, tuples and dicts of them, but {place} is of type {type(value).__name__}"
                    + ("; name the object that it belongs to" if callable(value) else "")
                )
        # Modules come first, because the state of an optimizer is named after the parameters.
        roots.sort(key=lambda root: not isinstance(root, torch.nn.Module))
        kinds = [type(root).__name__ for root in roots]
        self.roots = {
            kind if kinds.count(kind) == 1 else f"{kind}[{kinds[:index].count(kind)}]": root
            for index, (kind, root) in enumerate(zip(kinds, roots, strict=True))
        }

    def walk(self) -> Iterator[Item]:
        """Everything that the objects and the step hold, each once; first the objects."""
        seen: set[tuple[int, frozenset[str] | None]] = set()
        names: dict[int, str] = {}
        own_names = {id(root): name for name, root in self.roots.items() if isinstance(root, _UPDATERS)}
        left = [(Item("step", self._step, "reached"), 0)]
        left += [(Item(name, hooks, "hooks"), 0) for name, hooks in hooks_of_all()]
        left += [(item, 0) for item in self._containers]
        left += [(Item(name, root, "kept"), 0) for name, root in reversed(self.roots.items())]
        while left:
            item, depth = left.pop()
            if item.role in ("kept", "attribute") and _is_plain(item.value):
                left.insert(0, (item._replace(role="reached"), depth))  # after the whole state
                continue
            name, value, role, *_ = item
            is_tensor = isinstance(value, torch.Tensor)
            mark = id(value), item.keys
            if mark in seen or (role != "reached" and name != own_names.get(id(value), name)):
                continue  # what is in another object, too, is named after itself
            if (is_tensor and not has_contents(value)) or depth > _DEPTH:
                continue
            seen.add(mark)
            if is_tensor:
                names[id(value)] = name
            if is_tensor or isinstance(value, (torch.Generator, *CONTAINERS)) or is_array(value):
                yield item
            elif holds_attributes(value):
                yield item._replace(form=ATTRIBUTE, role="attribute" if role == "kept" else role)
            inner = _children_outside(item) if role == "reached" else _children(item, names)
            is_deeper = role == "reached" and not isinstance(value, types.CellType)
            left += reversed([(child, depth + (is_deeper and child.form != ATTRIBUTE)) for child in inner])

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module, with its name."""
        for name, root in self.roots.items():
            if isinstance(root, torch.nn.Module):
                yield from ((f"{name}.{path}" if path else name, module) for path, module in root.named_modules())

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers among the objects, also of schedulers."""
        found: dict[str, torch.optim.Optimizer] = {}
        for name, root in self.roots.items():
            optimizer = root if isinstance(root, torch.optim.Optimizer) else getattr(root, "optimizer", None)
            if isinstance(optimizer, torch.optim.Optimizer) and not any(optimizer is one for one in found.values()):
                found[name] = optimizer
        return found

    def uninitialized(self) -> str:
        """The name of a parameter of a lazy module that has not run yet; empty if there is none."""
        return next((name for name, tensor, *_ in self.tensors("kept") if torch.nn.parameter.is_lazy(tensor)), "")

    def generators(self) -> list[torch.Generator]:
        """The generators among the objects."""
        return [root for root in self.roots.values() if isinstance(root, torch.Generator)]

    def device(self) -> torch.device:
        """The device of the state. Raises ValueError for several."""
        found: dict[torch.device, str] = {}
        for name, tensor, *_ in self.tensors():
            if tensor.device.type != "cpu":
                found.setdefault(tensor.device, name)
        if len(found) > 1:
            places = ", ".join(f"{name} on {device}" for device, name in found.items())
            raise ValueError(f"CapturedStep: all tensors of the state must be on one device, but it has {places}")
        return next(iter(found), torch.device("cpu"))

    def tensors(self, *roles: Role) -> Iterator[Item]:
        """The tensors of the state that have one of the roles; without roles, every tensor, gradients included."""
        for item in self.walk():
            if isinstance(item.value, torch.Tensor) and (item.role in roles if roles else item.role != "reached"):
                yield item


def hooks_of_all() -> Iterator[tuple[str, dict[int, Any]]]:
    """Hooks that are not of a single module or optimizer, each with the name of what it is on."""
    for name, library, attributes in _HOOKS_OF_ALL:
        yield from ((name, vars(library)[attribute]) for attribute in attributes if attribute in vars(library))


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for tensors without their own, such as sparse ones and wrappers."""
    if is_traceable_wrapper_subclass(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def _is_stateful(value: object) -> bool:
    """True for modules, optimizers, schedulers, scalers and the like, not for their classes."""
    methods = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return not isinstance(value, type) and all(map(callable, methods))


def _updaters_in(root: Any) -> list[Any]:
    modules = root.modules() if isinstance(root, torch.nn.Module) else ()
    return [held for module in modules for held in vars(module).values() if isinstance(held, _UPDATERS)]


def _is_plain(value: Any) -> bool:
    """True for functions, and for objects that have no state for PyTorch, such as a model's options."""
    known = torch.Tensor, torch.Generator, torch.nn.Module, *_UPDATERS, *CONTAINERS, tuple
    return not (isinstance(value, known) or is_array(value) or _is_stateful(value))


def has_contents(tensor: torch.Tensor) -> bool:
    """False on the meta device, and for what torch.vmap left over, such as parameters in the cache of a TensorDict."""
    return not (tensor.is_meta or is_functorch_wrapped_tensor(tensor))


# ---- What is in an object --------------------------------------------------------------------------------------------


def _children(item: Item, names: Mapping[int, str]) -> Iterator[Item]:
    """What is in a part of the state."""
    name, value, role, *_ = item
    if item.form == ATTRIBUTE:  # what is in it comes from its object
        return
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            yield from (Item(f"{name}.{part}", getattr(value, part), role) for part in value.__tensor_flatten__()[0])
        if value.is_leaf and value.grad is not None:
            yield Item(f"{name}.grad", value.grad, "gradient")
    elif isinstance(value, torch.nn.Module):
        for key, held in vars(value).items():
            if key in PARTS_OF_MODULES:
                yield from (Item(f"{name}.{part}", tensor, "kept") for part, tensor in held.items())
            inner: Role = "private" if key in OF_EVERY_MODULE else "attribute"
            inner = "kept" if key in PARTS_OF_MODULES else "hooks" if key in HOOKS_OF_MODULES else inner
            yield Item(f"{name}.{key}", held, inner)
        yield Item(name, vars(value), "module", ATTRIBUTE)
        yield from _classes_of(value)
    elif isinstance(value, torch.optim.Optimizer):
        for index, group in enumerate(value.param_groups):
            yield Item(f"{name}.param_groups[{index}]", group, "options")
        yield Item(f"{name}.param_groups", value.param_groups, "optimizer")
        yield Item(f"{name}.state", value.state, "optimizer")
        for key, held in vars(value).items():
            yield Item(f"{name}.{key}", held, "hooks" if key in HOOKS_OF_OPTIMIZERS else "updater")
        yield Item(name, vars(value), "updater", ATTRIBUTE)
    elif isinstance(value, dict):
        for index, (key, held) in enumerate(value.items()):
            is_tensor = isinstance(key, torch.Tensor)  # in the state of an optimizer
            shown = names.get(id(key), f"parameter {index}") if is_tensor else repr(key)
            yield Item(f"{name}[{shown}]", held, "kept" if role == "options" else role)
    elif isinstance(value, (*_LISTS, tuple)):
        yield from (Item(f"{name}[{index}]", held, role) for index, held in enumerate(value))
    elif _is_stateful(value):
        inner = "updater" if isinstance(value, _UPDATERS) else role
        if holds_attributes(value):
            yield from (Item(f"{name}.{key}", held, inner) for key, held in _own_attributes(value).items())
        if hasattr(value, "__dict__"):
            yield from (Item(f"{name}.{key}", held, inner) for key, held in vars(value).items())
            is_read = inner == "kept" or isinstance(value, torch.amp.GradScaler)
            yield Item(name, vars(value), "attribute" if is_read else inner, ATTRIBUTE)


def _children_outside(item: Item) -> Iterator[Item]:
    """What is in something else that the step can reach."""
    name, value, role, *_ = item
    if isinstance(value, StepHolder):
        yield Item(name, value._step, role)
    elif isinstance(value, functools.partial):
        yield from (Item(name, held, role) for held in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield Item(name, value.__func__, role)
        yield Item("self" if name == "step" else name, value.__self__, role)
    elif isinstance(value, types.FunctionType):
        if value.__code__.co_filename.startswith(NOT_THE_USERS):
            return
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield Item(key, cell, role, VARIABLE)
        yield from (Item(key, held, role) for key, held in _defaults_of(value).items())
        used = Item("", value.__globals__, role, "{key}", _names_in(value.__code__))
        for key, held in used.pairs():
            yield Item(key, held, role)
            if isinstance(held, types.ModuleType) and _is_users_module(held):
                inside = Item(key, vars(held), role, ATTRIBUTE, used.keys)
                yield inside
                yield from (Item(inside.place(inner), value, role) for inner, value in inside.pairs())
        yield used
        yield from (Item(f"{name}.{key}", held, role) for key, held in vars(value).items())
        if vars(value):
            yield Item(name, vars(value), role, ATTRIBUTE)
    elif item.form == ATTRIBUTE or item.keys is not None or isinstance(value, str | types.ModuleType):
        return
    elif isinstance(value, (*CONTAINERS, tuple)):
        if isinstance(value, types.CellType) or len(value) <= _MOST:
            pairs = enumerate(value) if isinstance(value, (deque, set, tuple)) else item.pairs()
            yield from (Item(item.place(key), held, role) for key, held in pairs)
    elif isinstance(value, type):
        if _is_users(value):
            yield from (Item(f"{name}.{key}", held, role) for key, held in _own_attributes(value).items())
    elif not isinstance(value, torch.Tensor | GradientMonitor):
        if isinstance(value, torch.nn.Module):
            named = *value.named_parameters(), *value.named_buffers()
            yield from (Item(f"{name}.{path}", tensor, role) for path, tensor in named)
        if holds_attributes(value):
            yield from (Item(f"{name}.{key}", held, role) for key, held in _own_attributes(value).items())
        if hasattr(value, "__dict__"):
            yield from (Item(f"{name}.{key}", held, role) for key, held in vars(value).items())
            yield Item(name, vars(value), "updater" if isinstance(value, _UPDATERS) else role, ATTRIBUTE)
        yield from _classes_of(value)


def _classes_of(value: Any) -> Iterator[Item]:
    """The classes of an object that the user defines. The object inherits their attributes."""
    yield from (Item(kind.__name__, kind, "attribute") for kind in type(value).__mro__ if _is_users(kind))


def _defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The defaults of a function's arguments."""
    code, given = function.__code__, function.__defaults__ or ()
    first = code.co_argcount - len(given)
    return {**dict(zip(code.co_varnames[first:], given, strict=False)), **(function.__kwdefaults__ or {})}


def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function, and in the functions that it defines."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _is_users_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith(_INSTALLED)
