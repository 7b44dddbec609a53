"""The objects that a learner step changes: modules, optimizers, schedulers, tensors and generators."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_UPDATERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects that are found in attributes of modules too, such as an agent's optimizers."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules")
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_HOOKS_OF_ALL = (
    ("every module", sys.modules["torch.nn.modules.module"], [f"_global{attribute}" for attribute in HOOKS_OF_MODULES]),
    (
        "every optimizer",
        sys.modules["torch.optim.optimizer"],
        ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
    ),
)

Role = Literal["kept", "optimizer", "options", "module", "hooks", "attribute", "updater", "gradient"]
"""What a tensor is, or what a container holds. Kept: parameters, buffers and tensors that are named in the state, which
are the same objects after each step. Optimizer: its state. Options: a group of parameters. Module: the attributes of a
module. Attribute: what is in such an attribute, which the step may replace. Updater: what schedulers and scalers hold.
"""


class Item(NamedTuple):
    """A tensor, a generator, or a container (for objects, the dict of their attributes), with its name for messages."""

    name: str
    value: Any
    role: Role
    pattern: str = "{name}[{key!r}]"
    """The names of a container's items."""

    def place(self, key: Any) -> str:
        """The name of the item with this key."""
        return self.pattern.format(name=self.name, key=key)

    def pairs(self) -> list[tuple[Any, Any]]:
        """The keys and values of a container."""
        return list(dict.items(self.value) if isinstance(self.value, dict) else enumerate(self.value))


ATTRIBUTE = "{name}.{key}"
"""The pattern of names of what is in the dict of an object."""


class State:
    """The objects that a step changes, and everything that they hold."""

    def __init__(self, function: str, given: tuple[Any, ...]) -> None:
        """Collect the objects from nested lists, tuples and dicts. Raises TypeError for other types."""
        self._containers: list[Item] = []
        found = [
            root for index, value in enumerate(given) for root in self._roots_in(value, f"state[{index}]", function)
        ]
        roots = list({id(root): root for root in found}.values())
        # Modules come first, because the state of an optimizer is named after the parameters.
        roots.sort(key=lambda root: not isinstance(root, torch.nn.Module))
        kinds = [type(root).__name__ for root in roots]
        self.roots = {
            kind if kinds.count(kind) == 1 else f"{kind}[{kinds[:index].count(kind)}]": root
            for index, (kind, root) in enumerate(zip(kinds, roots, strict=True))
        }

    def _roots_in(self, value: Any, place: str, function: str, is_held: bool = False) -> Iterator[Any]:
        if isinstance(value, torch.Tensor | torch.Generator) or _is_stateful(value):
            if not (is_held and isinstance(value, torch.Tensor)):  # a list or dict may hold another tensor later
                yield value
                yield from _updaters_in(value)
        elif isinstance(value, list | tuple | Mapping):
            if isinstance(value, list | dict):
                self._containers.append(Item(place, value, "kept"))
            is_held = isinstance(value, list | dict) or (is_held and isinstance(value, tuple))
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                yield from self._roots_in(item, f"{place}[{key!r}]", function, is_held)
        else:
            raise TypeError(
                f"{function}: state must be modules, optimizers, schedulers, tensors or torch.Generators, or lists, "
                f"tuples and dicts of them, but {place} is of type {type(value).__name__}"
                + ("; name the object that it belongs to" if callable(value) else "")
            )

    def walk(self) -> Iterator[Item]:
        """Everything that the objects hold, each once."""
        seen: set[int] = set()
        names: dict[int, str] = {}
        own_names = {id(root): name for name, root in self.roots.items() if isinstance(root, _UPDATERS)}
        left = [
            Item(name, vars(library)[attribute], "hooks")
            for name, library, attributes in _HOOKS_OF_ALL
            for attribute in attributes
            if attribute in vars(library)
        ]
        left += [*self._containers, *(Item(name, root, "kept") for name, root in reversed(self.roots.items()))]
        while left:
            item = left.pop()
            name, value, *_ = item
            is_tensor = isinstance(value, torch.Tensor)
            if id(value) in seen or name != own_names.get(id(value), name):
                continue  # what is in another object, too, is named after itself
            if is_tensor and not has_contents(value):
                continue
            seen.add(id(value))
            if is_tensor:
                names[id(value)] = name
            if isinstance(value, torch.Tensor | torch.Generator | dict | list):
                yield item
            left += reversed(list(_children(item, names)))

    def modules(self) -> list[torch.nn.Module]:
        """Every module."""
        return [part for root in self.roots.values() if isinstance(root, torch.nn.Module) for part in root.modules()]

    def is_distributed(self) -> bool:
        """True if there is a DistributedDataParallel."""
        return any(type(module).__name__ == "DistributedDataParallel" for module in self.modules())

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers among the objects, also of schedulers."""
        found: dict[str, torch.optim.Optimizer] = {}
        for name, root in self.roots.items():
            optimizer = root if isinstance(root, torch.optim.Optimizer) else getattr(root, "optimizer", None)
            if isinstance(optimizer, torch.optim.Optimizer) and not any(optimizer is one for one in found.values()):
                found[name] = optimizer
        return found

    def optimizer_of(self, name: str) -> torch.optim.Optimizer | None:
        """The optimizer whose state or groups have something of this name in messages; None if there is none."""
        return self.optimizers().get(name.partition(".")[0])

    def is_scheduler(self, name: str) -> bool:
        """True if something of this name is of a scheduler."""
        return not isinstance(self.roots.get(name.partition(".")[0]), torch.optim.Optimizer | torch.amp.GradScaler)

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
            if isinstance(item.value, torch.Tensor) and (not roles or item.role in roles):
                yield item


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """The hooks on a tensor."""
    after_accumulation = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return [*(tensor._backward_hooks or {}).values(), *after_accumulation.values()]


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for tensors without their own, such as sparse ones and wrappers."""
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
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


def gradients_of(item: Item) -> list[Item]:
    """The gradient that a tensor has now, if there is one, and its parts if it is a wrapper."""
    if not item.value.is_leaf or item.value.grad is None:
        return []
    gradient = Item(f"{item.name}.grad", item.value.grad, "gradient")
    return [gradient, *_children(gradient, {})]


def with_gradients(items: Iterable[Item]) -> Iterator[Item]:
    """Tensors, each with the gradient that it has now."""
    for item in items:
        yield item
        yield from gradients_of(item)


def has_contents(tensor: torch.Tensor) -> bool:
    """False on the meta device, and for what torch.vmap left over, such as parameters in the cache of a TensorDict."""
    return not (tensor.is_meta or is_functorch_wrapped_tensor(tensor))


# ---- What is in an object --------------------------------------------------------------------------------------------


def _children(item: Item, names: Mapping[int, str]) -> Iterator[Item]:
    """What is in a part of the state."""
    name, value, role, *_ = item
    if item.pattern == ATTRIBUTE:  # what is in it comes from its object
        return
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            yield from (Item(f"{name}.{part}", getattr(value, part), role) for part in value.__tensor_flatten__()[0])
        yield from gradients_of(item)
    elif isinstance(value, torch.nn.Module):
        for key, held in vars(value).items():
            if key in PARTS_OF_MODULES:
                yield from (Item(f"{name}.{part}", tensor, "kept") for part, tensor in held.items())
            inner: Role = "kept" if key in PARTS_OF_MODULES else "hooks" if key in HOOKS_OF_MODULES else "attribute"
            yield Item(f"{name}.{key}", held, inner)
        yield Item(name, vars(value), "module", ATTRIBUTE)
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
    elif isinstance(value, list | tuple):
        yield from (Item(f"{name}[{index}]", held, role) for index, held in enumerate(value))
    elif _is_stateful(value):
        inner = "updater" if isinstance(value, _UPDATERS) else role
        slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
        own = {key: getattr(value, key) for key in slots if hasattr(value, key)} | getattr(value, "__dict__", {})
        yield from (Item(f"{name}.{key}", held, inner) for key, held in own.items())
        if hasattr(value, "__dict__"):
            yield Item(name, vars(value), "updater" if inner == "updater" else "attribute", ATTRIBUTE)
