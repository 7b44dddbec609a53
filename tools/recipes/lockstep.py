"""Two learners of one project, stepped on the same data: their differences and their times."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only

import gradscale_ext as gs

CPU = torch.device("cpu")


def _as_it_is(batch: Any) -> tuple[Any, ...]:
    return (batch,)


@dataclass(frozen=True)
class Side:
    """One learner.

    Args:
        step: runs one learner step on a batch, and returns what it reports, such as the loss and priorities.
        optimizers: the optimizers of `step`. Their parameters are the weights that are compared.
        loss: runs the loss alone, forward and backward, on given predictions, and returns these with their gradients.
            Not needed for a captured learner.
        modules: the modules that `step` changes.
        prepare: what is done before each step, outside of it: makes the arguments of `step` from a batch.
    """

    step: Callable[..., Mapping[str, Any]]
    optimizers: Sequence[torch.optim.Optimizer]
    loss: Callable[[], Sequence[torch.Tensor]] = list
    modules: Sequence[torch.nn.Module] = ()
    prepare: Callable[[Any], tuple[Any, ...]] = _as_it_is

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for optimizer in self.optimizers for parameter in _stepped(optimizer)]

    def run(self, batch: Any) -> Mapping[str, Any]:
        """One learner step on a batch."""
        return self.step(*self.prepare(batch))

    def observed(self) -> Side:
        """The same learner, whose step also reports the gradients that its optimizers read."""

        def step(*arguments: Any) -> dict[str, Any]:
            with _gradients(self.optimizers) as gradients:
                reported = {name: [value] for name, value in self.step(*arguments).items()}
            return {"gradients": gradients, **reported}

        return replace(self, step=step)

    def captured(self) -> Side:
        """The same learner, whose step is one CUDA graph from its fourth call on. On a CPU it is called as it is."""
        return replace(self, step=self._captured_step())

    def plain(self) -> Side:
        """The same learner, whose step is called as a captured step makes plain calls."""
        return replace(self, step=self._captured_step().plain)

    def _captured_step(self) -> gs.CapturedStep:
        return gs.CapturedStep(self.step, *self.modules, *self.optimizers)


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The optimizer's parameters, except those on the meta device."""
    return (p for group in optimizer.param_groups for p in group["params"] if not p.is_meta)


@dataclass
class Idle:
    """An optimizer that does nothing, for code that needs one to compute a loss."""

    param_groups: list[dict[str, Any]] = field(default_factory=lambda: [{"lr": 0.0}])

    def zero_grad(self, **_: Any) -> None: ...

    def step(self) -> None: ...


@contextlib.contextmanager
def double_precision(active: bool) -> Iterator[None]:
    """Make float64 the default, also for `.float()`: rounding errors are tiny, and larger differences are mistakes."""
    if not active:
        yield
        return
    default, convert = torch.get_default_dtype(), torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        torch.Tensor.float = convert  # type: ignore[method-assign]


def difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Largest difference of any element, divided by the largest value of theirs; inf if a value is not finite."""
    largest = scale = 0.0
    for mine, other in zip(map(_numbers, ours), map(_numbers, theirs), strict=True):
        if mine.shape != other.shape:
            raise ValueError(f"shapes differ: {tuple(mine.shape)} and {tuple(other.shape)}")
        if not (mine.isfinite().all() and other.isfinite().all()):
            return float("inf")
        if mine.numel():
            largest = max(largest, (mine - other).abs().max().item())
            scale = max(scale, other.abs().max().item())
    return largest / scale if scale else largest


def _numbers(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach().double().cpu()


def differences(
    ours: Side, theirs: Side, batches: Iterable[Any], together: bool = True, captured: bool = False
) -> dict[str, float]:
    """The largest `difference` over all steps: of the gradients, the weights, and each thing that a step reports.

    Both draw the same random numbers in each step. Gradients are read when the optimizers step.

    Args:
        together: every step starts from the weights and the optimizer's state of theirs, so that the differences are
            those of one step. Otherwise each learner continues from its own state.
        captured: run our step as a CUDA graph.
    """
    sides = [ours.observed().captured() if captured else ours.observed(), theirs.observed()]
    largest: dict[str, float] = {}
    for number, batch in enumerate(batches):
        if together:
            _bring_together(ours, theirs)
        found, expected = (_results(side, number, batch) for side in sides)
        if found.keys() != expected.keys():
            raise ValueError(f"steps report different things: {list(found)} and {list(expected)}")
        for name in found:
            largest[name] = max(largest.get(name, 0.0), difference(found[name], expected[name]))
    return largest


def _results(side: Side, seed: int, batch: Any) -> dict[str, Any]:
    _seed(seed)
    reported = dict(side.run(batch))
    return {"gradients": reported.pop("gradients"), "weights": side.weights(), **reported}


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed)


def _bring_together(ours: Side, theirs: Side) -> None:
    """Copy weights and optimizers' states into the tensors of ours, which a graph may have captured."""
    for mine, other in zip(ours.weights(), theirs.weights(), strict=True):
        mine.copy_(other)
    for optimizer, stepped in zip(ours.optimizers, theirs.optimizers, strict=True):
        for parameter, other in zip(_stepped(optimizer), _stepped(stepped), strict=True):
            _copy_state(optimizer.state[parameter], stepped.state.get(other, {}))


def _copy_state(own: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name in own.keys() - other.keys():
        del own[name]
    for name, value in other.items():
        if isinstance(own.get(name), torch.Tensor):
            own[name].copy_(value)
        else:
            own[name] = copy.deepcopy(value)


@contextlib.contextmanager
def _gradients(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.Tensor]]:
    """Copies of the gradients at the optimizers' steps, in the order of the weights."""
    by_optimizer: list[list[torch.Tensor]] = [[] for _ in optimizers]

    def keeper(kept: list[torch.Tensor]) -> Callable[..., None]:
        def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            kept.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in _stepped(optimizer))

        return keep

    hooks = [
        optimizer.register_step_pre_hook(keeper(kept)) for optimizer, kept in zip(optimizers, by_optimizer, strict=True)
    ]
    found: list[torch.Tensor] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    if not all(by_optimizer):
        raise ValueError("an optimizer was not stepped")
    found += [gradient for kept in by_optimizer for gradient in kept]


def times(
    contestants: Mapping[str, Callable[[], object]], seconds: float, device: torch.device = CPU, rounds: int = 3
) -> dict[str, float]:
    """Median time of each function per call, in milliseconds: CPU time, or on a GPU the time until it has finished.

    The functions take turns for `seconds`, and at least `rounds` times.
    """
    clock = time.process_time if device == CPU else lambda: _finished(device)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(found.values()))) < rounds:
        for name, function in contestants.items():
            start = clock()
            function()
            found[name].append(1e3 * (clock() - start))
    return {name: statistics.median(values) for name, values in found.items()}


def _finished(device: torch.device) -> float:
    """The time at which the device has finished its work."""
    torch.cuda.synchronize(device)
    return time.perf_counter()


def leaves(*shapes: Sequence[int], device: torch.device = CPU) -> list[torch.Tensor]:
    """Predictions for a loss alone, the same for the same shapes."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=random).to(device).requires_grad_() for shape in shapes]


def on(device: torch.device, batch: Any) -> Any:
    """A batch with its tensors on the device. NumPy arrays stay as they are."""
    return batch if device == CPU else tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def clear(predictions: Sequence[torch.Tensor]) -> None:
    for prediction in predictions:
        prediction.grad = None


def difference_alone(ours: Side, theirs: Side) -> float:
    """The `difference` of the gradients that the losses alone give. Both draw the same random numbers."""
    return difference(*map(_gradients_alone, (ours, theirs)))


def _gradients_alone(side: Side) -> list[torch.Tensor]:
    _seed(0)
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in side.loss()]
