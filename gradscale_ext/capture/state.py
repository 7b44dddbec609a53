"""What a learner step changes: modules, optimizers, schedulers, tensors and generators, saved and restored in place."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_DICTS = (dict, defaultdict, OrderedDict)
_LISTS = (list, deque)
#: Containers whose contents are followed and restored. Other objects in attributes are constants.
_CONTAINERS = (*_DICTS, *_LISTS, set)
#: Attributes of a module that do not appear in the names of what they hold.
_UNNAMED = ("_parameters", "_buffers", "_modules")


#: Objects that are found in attributes of modules too, such as an agent's optimizers.
_UPDATERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


def _optimizers_in(root: Any) -> list[Any]:
    modules = root.modules() if isinstance(root, torch.nn.Module) else ()
    return [held for module in modules for held in vars(module).values() if isinstance(held, _UPDATERS)]


def _is_stateful(value: object) -> bool:
    """True for modules, optimizers, schedulers, scalers and the like."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Item(NamedTuple):
    """A tensor, a container, or the attributes of an object, with its name for messages."""

    name: str
    value: Any


class State:
    """The objects that a step changes, and everything that they hold."""

    def __init__(self, function: str, given: tuple[Any, ...]) -> None:
        """Collect the objects from nested lists, tuples and dicts. Raises TypeError for other types."""
        roots: list[Any] = []
        left = [(f"state[{index}]", value) for index, value in reversed(list(enumerate(given)))]
        while left:
            place, value = left.pop()
            if isinstance(value, torch.Tensor | torch.Generator) or _is_stateful(value):
                if not any(value is root for root in roots):
                    roots.append(value)
                    left += [(place, held) for held in _optimizers_in(value)]
            elif isinstance(value, list | tuple):
                left += [(f"{place}[{index}]", item) for index, item in reversed(list(enumerate(value)))]
            elif isinstance(value, Mapping):
                left += [(f"{place}[{key!r}]", item) for key, item in reversed(list(value.items()))]
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
        """Everything that the objects hold, each once."""
        seen: set[int] = set()
        names: dict[int, str] = {}
        own_names = {id(root): name for name, root in self.roots.items() if isinstance(root, _UPDATERS)}
        left = [Item(name, root) for name, root in reversed(self.roots.items())]
        while left:
            item = left.pop()
            if id(item.value) in seen or item.name != own_names.get(id(item.value), item.name):
                continue  # what is in another object, too, is named after itself
            if isinstance(item.value, torch.Tensor) and not _has_contents(item.value):
                continue
            seen.add(id(item.value))
            if isinstance(item.value, torch.Tensor):
                names[id(item.value)] = item.name
            if isinstance(item.value, torch.Tensor | torch.Generator) or type(item.value) in _CONTAINERS:
                yield item
            elif _is_stateful(item.value) and hasattr(item.value, "__dict__"):
                yield Item(item.name, vars(item.value))
            left += reversed(list(_children(item, names)))

    def modules(self) -> Iterator[Item]:
        """Every module, with its name."""
        for name, root in self.roots.items():
            if isinstance(root, torch.nn.Module):
                for path, module in root.named_modules():
                    yield Item(f"{name}.{path}" if path else name, module)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers among the objects, also of schedulers."""
        found: dict[str, torch.optim.Optimizer] = {}
        for name, root in self.roots.items():
            optimizer = root if isinstance(root, torch.optim.Optimizer) else getattr(root, "optimizer", None)
            if isinstance(optimizer, torch.optim.Optimizer) and not any(optimizer is one for one in found.values()):
                found[name] = optimizer
        return found

    def tensors(self) -> Iterator[Item]:
        """Every tensor, gradients included."""
        return (item for item in self.walk() if isinstance(item.value, torch.Tensor))

    def generators(self) -> list[torch.Generator]:
        """The generators among the objects."""
        return [root for root in self.roots.values() if isinstance(root, torch.Generator)]

    def named_tensors(self) -> Iterator[Item]:
        """Parameters and buffers of the modules, the tensors among the objects, and other parameters of optimizers."""
        seen: set[int] = set()
        for name, module in self.modules():
            for path, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in seen and _has_contents(tensor):
                    seen.add(id(tensor))
                    yield Item(f"{name}.{path}", tensor)
        for name, root in self.roots.items():
            if isinstance(root, torch.Tensor) and id(root) not in seen:
                seen.add(id(root))
                yield Item(name, root)
        for name, optimizer in self.optimizers().items():
            for index, group in enumerate(optimizer.param_groups):
                for place, tensor in enumerate(group["params"]):
                    if id(tensor) not in seen and _has_contents(tensor):
                        seen.add(id(tensor))
                        yield Item(f"{name}.param_groups[{index}]['params'][{place}]", tensor)

    def lasting_tensors(self) -> Iterator[Item]:
        """The tensors that are to be the same objects after each step: all but gradients, other attributes of modules,
        and what schedulers and scalers make anew."""
        yield from self.named_tensors()
        passing = (torch.nn.Module, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.Tensor)
        prefixes = tuple(f"{name}." for name, root in self.roots.items() if not isinstance(root, passing))
        for item in self.tensors():
            if item.name.startswith(prefixes) and not item.name.endswith(".grad"):
                yield item

    def passing_tensors(self) -> Iterator[Item]:
        """Tensors in attributes of modules that are neither parameters nor buffers."""
        lasting = {id(item.value) for item in self.lasting_tensors()}
        names = tuple(f"{name}." for name, root in self.roots.items() if isinstance(root, torch.nn.Module))
        for item in self.tensors():
            if item.name.startswith(names) and id(item.value) not in lasting and not item.name.endswith(".grad"):
                yield item

    def save(self, contents: Callable[[torch.Tensor], bool] = lambda tensor: True) -> Snapshot:
        """Copy everything, or of tensors only those contents that are wanted."""
        return Snapshot(list(self.walk()), contents)


def _has_contents(tensor: torch.Tensor) -> bool:
    """False on the meta device, and for what torch.vmap left over, such as parameters in the cache of a TensorDict."""
    return not (tensor.is_meta or is_functorch_wrapped_tensor(tensor))


def _children(item: Item, names: Mapping[int, str]) -> Iterator[Item]:
    name, value = item
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            yield from (Item(f"{name}.{part}", getattr(value, part)) for part in value.__tensor_flatten__()[0])
        if value.is_leaf and value.grad is not None:
            yield Item(f"{name}.grad", value.grad)
    elif type(value) in _DICTS:
        for index, (key, child) in enumerate(value.items()):
            is_tensor = isinstance(key, torch.Tensor)  # in the state of an optimizer
            yield Item(f"{name}[{names.get(id(key), f'parameter {index}') if is_tensor else repr(key)}]", child)
    elif type(value) in (*_LISTS, tuple):
        yield from (Item(f"{name}[{index}]", child) for index, child in enumerate(value))
    elif _is_stateful(value) and hasattr(value, "__dict__"):
        for key, child in vars(value).items():
            if key in _UNNAMED and isinstance(value, torch.nn.Module):
                yield from (Item(f"{name}.{part}", held) for part, held in child.items())
                yield Item(f"{name}.{key}", child)
            else:
                yield Item(f"{name}.{key}", child)


# ---- Saving and restoring --------------------------------------------------------------------------------------------


@dataclass
class _SavedTensor:
    name: str
    tensor: torch.Tensor
    alias: torch.Tensor
    """Shares the memory that the tensor had, with its sizes and strides."""
    gradient: torch.Tensor | None
    requires_grad: bool
    is_leaf: bool


@dataclass
class Snapshot:
    """A copy of a state, which can be put back in place, bit by bit."""

    items: list[Item]
    _wanted: Callable[[torch.Tensor], bool]
    _containers: list[tuple[Item, Any]] = field(init=False)
    _tensors: list[_SavedTensor] = field(init=False)
    _memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(init=False)
    _whole: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    _generators: list[tuple[torch.Generator, torch.Tensor]] = field(init=False)

    @torch.no_grad()
    def __post_init__(self) -> None:
        """Copy the contents."""
        self._containers, self._tensors, self._memory, self._whole, self._generators = [], [], {}, [], []
        for item in self.items:
            value = item.value
            if isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            elif isinstance(value, torch.Tensor):
                self._save_tensor(item.name, value)
            else:
                self._containers.append((item, list(value.items() if isinstance(value, dict) else value)))
        self.random = RandomNumbers()

    def _save_tensor(self, name: str, tensor: torch.Tensor) -> None:
        gradient = tensor.grad if tensor.is_leaf else None
        saved = _SavedTensor(name, tensor, tensor.detach(), gradient, tensor.requires_grad, tensor.is_leaf)
        self._tensors.append(saved)
        memory = memory_of(tensor)
        if not self._wanted(tensor):
            return
        if memory is not None:
            if memory._cdata not in self._memory:
                self._memory[memory._cdata] = memory, memory.clone()  # type: ignore[no-untyped-call]
        elif not is_traceable_wrapper_subclass(tensor):  # its parts are saved
            self._whole.append((saved.alias, tensor.detach().clone()))

    @torch.no_grad()
    def contents(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and copies of the tensors whose contents were saved."""
        for saved in self._tensors:
            memory = memory_of(saved.alias)
            if memory is not None and memory._cdata in self._memory:
                own = self._memory[memory._cdata][1]
                copied = torch.empty(0, dtype=saved.alias.dtype, device=own.device)
                layout = saved.alias.storage_offset(), saved.alias.shape, saved.alias.stride()
                yield saved.name, copied.set_(own, *layout)
        for alias, copied in self._whole:
            yield next(saved.name for saved in self._tensors if saved.alias is alias), copied

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back: the same objects, with the contents that they had."""
        for (_, container), contents in self._containers:
            _refill(container, contents)
        for saved in self._tensors:
            tensor = saved.tensor
            if _layout(tensor) != _layout(saved.alias):
                tensor.data = saved.alias
            if tensor.is_leaf and tensor.requires_grad != saved.requires_grad:
                tensor.requires_grad_(saved.requires_grad)
            if saved.is_leaf and tensor.is_leaf and tensor.grad is not saved.gradient:
                tensor.grad = saved.gradient
        for memory, contents in self._memory.values():
            if memory.nbytes() != contents.nbytes():
                memory.resize_(contents.nbytes())
            memory.copy_(contents)
        for tensor, contents in self._whole:
            tensor.copy_(contents)
        for generator, state in self._generators:
            generator.set_state(state)
        self.random.restore()


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for tensors without their own, such as sparse ones and wrappers."""
    if is_traceable_wrapper_subclass(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def _layout(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    memory = memory_of(tensor)
    if memory is None:
        return None
    return memory._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _refill(container: Any, contents: list[Any]) -> None:
    now = list(container.items() if isinstance(container, dict) else container)
    pairs = zip(now, contents, strict=False)
    if isinstance(container, dict):
        is_same = len(now) == len(contents) and all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    else:
        is_same = len(now) == len(contents) and all(a is b for a, b in pairs)
    if is_same:
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(contents)
    else:
        container.extend(contents)


def host_generators() -> dict[str, Any]:
    """The states of the global generators of Python, and of NumPy if it is loaded, in a form that can be compared."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        name, keys, *others = numpy.get_state()
        states["NumPy's random"] = name, keys.tobytes(), others
    return states


class RandomNumbers:
    """The states of the global generators: PyTorch's of each device in use, Python's, and NumPy's if it is loaded."""

    def __init__(self) -> None:
        """Save the states."""
        modules = (torch.cuda, getattr(torch, "xpu", None))
        self._devices = [module for module in modules if module is not None and _is_in_use(module)]
        self._cpu, self._python = torch.get_rng_state(), random.getstate()
        self._of_devices = [module.get_rng_state_all() for module in self._devices]
        self._numpy = sys.modules.get("numpy.random")
        self._of_numpy = None if self._numpy is None else self._numpy.get_state()
        self._of_host = host_generators()

    def changes(self) -> Iterator[str]:
        """The generators of the host that have changed since."""
        if not torch.equal(self._cpu, torch.get_rng_state()):
            yield "PyTorch's generator of the CPU"
        now = host_generators()
        yield from (library for library, state in self._of_host.items() if state != now[library])

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        for module, states in zip(self._devices, self._of_devices, strict=True):
            module.set_rng_state_all(states)
        if self._numpy is not None:
            self._numpy.set_state(self._of_numpy)


def _is_in_use(module: Any) -> bool:
    return bool(module.is_available() and module.is_initialized())
