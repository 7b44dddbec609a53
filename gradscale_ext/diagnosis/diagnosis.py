"""Why a parameter has no gradient, or no useful one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import Node

from .fsdp import sharded_parameters
from .graph import NOTHING, Hop, amount, gradient_function, gradients, leaves, operation, walk
from .lines import Location
from .report import Code, Finding, GradientDiagnosis, finding_of, shortened
from .tracer import Cut, GradientTracer

#: A gradient below this fraction of the largest gradient of all parameters is vanishing.
VANISHING = 1e-9
#: A gradient below this magnitude is vanishing in any case: the gradient of the loss itself is 1.
ABSOLUTE = 1e-12
#: A gradient below this magnitude will underflow in float32: in the next layers, or when it is squared.
UNDERFLOW = 1e-30

#: A layer gets a note if at least this share of its units is dead. Half may be dead in a healthy layer: at
#: initialisation, about every other ReLU is off for a whole batch that repeats one sample.
DEAD = 0.75
#: A layer with fewer units may reach that share by chance.
DEAD_UNITS = 16
#: So may one with fewer samples: a unit that is active for one sample in ten is always off in 43 % of batches of 8.
DEAD_SAMPLES = 8

#: Operations whose derivative is zero wherever it exists, by the names of their nodes.
ZERO_DERIVATIVE = {
    "Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn", "Heaviside", "Bernoulli", "Poisson", "Normal",
}  # fmt: skip
#: Smooth functions whose derivative rounds to zero far out.
SATURATING = {
    "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Logsumexp", "Exp", "Expm1", "Erf", "Erfc", "Softplus", "Gelu",
    "Silu", "Elu", "Celu", "LogSigmoid", "Mish", "Atan", "BinaryCrossEntropyWithLogits",
}  # fmt: skip

#: Operations that only scale or round, so that a gradient that becomes zero in them has underflowed.
SCALING = {"ToCopy", "Mean"}

_PARTIAL_REMEDY = (
    "nothing if the cut is intended, as for targets, advantages and truncated backpropagation; else leave the call "
    "out: what is behind it learns from the other paths only; scale_gradient weakens a path without cutting it"
)
_DEAD_REMEDY = "if more batches show the same: a smaller learning rate, a normalisation in front, leaky ReLU or GELU"
_NOT_HELD_REMEDY = (
    "nothing if it is not to be trained by this loss (a target network, the other network of a GAN, an actor in the "
    "critic's loss); else give it to the optimizer"
)
_TRACE = (
    "run the forward pass under `with GradientTracer() as tracer:` and pass tracer=tracer: the report then says "
    "whether the parameter was used, and names the line that cut it off"
)


def diagnose_gradients(
    loss: torch.Tensor,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    tracer: GradientTracer | None = None,
) -> GradientDiagnosis:
    """Find the parameters that get no gradient, or none that trains them, and say why.

    Call it between the forward pass and `loss.backward()`. It differentiates the loss once, with every node of the
    graph watched (the user's hooks on tensors and modules run once more), and leaves gradients, hooks, buffers, random
    numbers and the graph as they were. Where the graph has been freed already, it reads `.grad`, and cannot say where a
    gradient was lost.

    Under FSDP2 every rank has to call it: parameters are gathered, one group after the other, and sharded again.

    ================  ==================================================================================================
    disconnected      the loss does not depend on it, as far as can be seen
    detached          the loss depends on it only through `detach()`, `.data`, `.item()` or another cut of the graph
    no_grad           the loss depends on it only through a call under `torch.no_grad()` or in inference mode
    integer_dtype     the loss depends on it only through integers or booleans
    unused            no call used it with data, or only calls on empty tensors did
    zero_derivative   every path to it leads through a function whose derivative is zero everywhere
    vanishing         saturation or underflow, or a gradient below 1e-9 of the largest one, or below 1e-12
    all_zero          exactly zero for another reason: dead ReLUs, masks, products with zero
    nonfinite         NaN or inf
    frozen            `requires_grad` is False
    not_in_optimizer  it has a gradient that no optimizer uses; a note for parameters of the model
    non_leaf          a tensor that looks like a parameter, but is the result of an operation
    ================  ==================================================================================================

    Notes are findings that may be intended; they leave `GradientDiagnosis.ok` True. A finding on a parameter of the
    model that the optimizers do not hold is a note, because that may be a choice (a target network, the other network
    of a GAN), except for NaN and inf. Other notes are cuts that a tracer saw enter the loss (`detached`, `no_grad`)
    although other paths send gradients to the same parameters, one note named "loss" for each line; and layers with
    ReLUs or clamps that block the gradients of most units (`all_zero`).

    The first four and `unused` are told apart only with a tracer. Without one, a parameter that the graph does not
    reach is `disconnected`, or `integer_dtype` if the loss itself is an integer. A zero gradient is not a finding if it
    was multiplied by a parameter that is zero now and will not be after the first step (LoRA, zero-initialised layers),
    or if a normalisation makes the bias before it superfluous.

    Args:
        loss: scalar tensor.
        model: the module whose parameters, and tensors in attributes, are examined.
        optimizer: the optimizer that steps on this loss, or a sequence of several. Parameters that get a gradient
            but are in no optimizer, and frozen parameters that are in one, are then findings too. Without optimizers,
            every frozen parameter is a note.
        tracer: the tracer that watched the forward pass.

    Returns:
        `GradientDiagnosis`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: `loss` is not one real number, or its graph has been freed and there is no `.grad` either; `tracer`
            has watched nothing, or another forward pass.
        RuntimeError: PyTorch cannot differentiate the loss.

    Related names: `grad is None`, unused parameters, `find_unused_parameters`.

    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    ...     def forward(self, x):
    ...         return self.head(self.body(x).detach()).mean()
    >>> model = Model()
    >>> with GradientTracer() as tracer:
    ...     loss = model(torch.ones(2, 4))
    >>> [
    ...     (finding.code, finding.parameter)
    ...     for finding in diagnose_gradients(loss, model, tracer=tracer).findings
    ... ]
    [('detached', 'body.weight'), ('detached', 'body.bias')]
    """
    _check(loss, model, tracer)
    optimizers = _optimizers(optimizer)
    with tracer.paused() if tracer is not None else contextlib.nullcontext():
        diagnosis = _Diagnosis(loss, model, optimizers, tracer)
        findings = sorted(diagnosis.findings(), key=lambda finding: finding.is_note)
        return GradientDiagnosis(findings, len(diagnosis.named))


def _wrong(argument: str, expected: str, value: Any) -> TypeError:
    return TypeError(f"diagnose_gradients: {argument} must be {expected}, but it is of type {type(value).__name__}")


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer] | None:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return None if optimizer is None else [optimizer]
    if not isinstance(optimizer, Iterable) or isinstance(optimizer, str | torch.Tensor):
        raise _wrong("optimizer", "a torch.optim.Optimizer or None, or a sequence of optimizers", optimizer)
    optimizers = list(optimizer.values() if isinstance(optimizer, Mapping) else optimizer)
    for index, one in enumerate(optimizers):
        if not isinstance(one, torch.optim.Optimizer):
            raise _wrong(f"optimizer[{index}]", "a torch.optim.Optimizer", one)
    if not optimizers:
        raise ValueError("diagnose_gradients: optimizer must be one or several, but it is an empty sequence; give None")
    return optimizers


def _check(loss: Any, model: Any, tracer: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise _wrong("loss", "a tensor", loss)
    if loss.numel() != 1:
        raise ValueError(f"diagnose_gradients: loss must be a scalar, but it has shape {tuple(loss.shape)}")
    if loss.is_complex():
        raise ValueError(f"diagnose_gradients: loss must be real, but it is a tensor of dtype {loss.dtype}")
    if not isinstance(model, torch.nn.Module):
        raise _wrong("model", "a torch.nn.Module", model)
    if tracer is not None and not isinstance(tracer, GradientTracer):
        raise _wrong("tracer", "a GradientTracer or None", tracer)
    if tracer is not None and tracer.calls == 0:
        raise ValueError(
            "diagnose_gradients: tracer must have watched the forward pass, but it has seen no call of PyTorch"
        )
    if tracer is not None and loss.grad_fn is not None and not tracer.knows(loss.grad_fn):
        raise ValueError(
            "diagnose_gradients: tracer must have watched the forward pass of this loss, but it has seen no operation "
            "of its graph"
        )


class _Diagnosis:
    """The facts about one loss and model, and the findings that follow from them."""

    def __init__(
        self,
        loss: torch.Tensor,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer] | None,
        tracer: GradientTracer | None,
    ) -> None:
        self.loss, self.model, self.tracer = loss, model, tracer
        sharded = sharded_parameters(model)
        leaf_of = {id(parameter.shard): parameter.leaf for parameter in sharded}
        self.is_zero = {id(parameter.leaf): parameter.is_zero for parameter in sharded}
        given = [p for o in optimizers or () for group in o.param_groups for p in group["params"]]
        held = [leaf_of.get(id(p), p) for p in given]
        self.held = None if optimizers is None else {id(p) for p in held}
        self.named = {name: leaf_of.get(id(p), p) for name, p in model.named_parameters()}
        kept = list(_unregistered(model))
        # Tensors other than the model's parameters may be trained as well.
        self.own_leaves = {name: tensor for name, tensor in kept if tensor.is_leaf and tensor.requires_grad}
        self.own_results = {name: tensor for name, tensor in kept if gradient_function(tensor) is not None}

        wanted = [p for p in (*self.named.values(), *self.own_leaves.values()) if p.requires_grad]
        found, self.flow = gradients(loss, wanted, model, sharded)
        self.reached = {id(p) for p, g in zip(wanted, found, strict=True) if g is not None or self.flow.reaches(p)}
        self.sizes = {id(p): amount(g).largest for p, g in zip(wanted, found, strict=True)}
        seen = [] if self.flow.is_freed else [p for p in wanted if self.flow.reaches(p)]
        self.arrived = {id(p): self.flow.arrived_near(p) for p in seen}
        # Optimizers that hold no tensor of this model or loss belong to other models, and say nothing about this one.
        known = {id(p) for p in (*self.named.values(), *self.own_leaves.values())}
        self.are_its_optimizers = any(id(p) in known or self.flow.reaches(p) for p in held)
        self.dead_rows = {id(p): _dead_rows(g) for p, g in zip(wanted, found, strict=True) if g is not None}
        self.blamed: set[tuple[Any, ...]] = set()
        self.largest = max(filter(math.isfinite, self.sizes.values()), default=0.0)
        self.largest_arrived = max(self.arrived.values(), default=0.0)

    def findings(self) -> Iterator[Finding]:
        """Findings on parameters one by one, and then on the loss as a whole."""
        for name, parameter in self.named.items():
            if torch.nn.parameter.is_lazy(parameter) or parameter.numel():
                for finding in self._parameter_findings(name, parameter):
                    yield _as_left_out(finding) if self._is_left_out(parameter) else finding
        for name, leaf in self.own_leaves.items():
            if id(leaf) in self.reached:
                yield from self._not_in_optimizer(name, leaf)
        for name, result in self.own_results.items():
            yield from self._non_leaf(name, result)
        if not torch.isfinite(self.loss) and not any(math.isinf(s) or math.isnan(s) for s in self.sizes.values()):
            yield finding_of("nonfinite", "loss", f"the loss is {self.loss.item()}, though all gradients are finite")
        yield from self._partial_cuts()

    def _parameter_findings(self, name: str, parameter: torch.Tensor) -> Iterator[Finding]:
        size = self.sizes.get(id(parameter), 0.0)
        if not parameter.requires_grad:
            yield from self._frozen(name, parameter)
        elif id(parameter) not in self.reached:
            yield self._unreached(name, parameter)
        elif not math.isfinite(size):
            yield self._nonfinite(name, parameter)
        elif size == 0 and (finding := self._zero(name, parameter)) is not None:
            yield finding
        elif size and self._vanishes(parameter, VANISHING * self.largest, VANISHING * self.largest_arrived):
            cause = f"its gradient is below {VANISHING:g} of the largest, and so is the gradient where it is used"
            yield finding_of("vanishing", name, cause)
        elif size and self._vanishes(parameter, ABSOLUTE, ABSOLUTE):
            cause = f"its gradient, and the gradient where it is used, are below {ABSOLUTE:g}; the loss has gradient 1"
            yield finding_of("vanishing", name, cause)
        else:
            yield from self._dead_units(name, parameter)
            yield from self._not_in_optimizer(name, parameter)

    def _vanishes(self, parameter: torch.Tensor, size: float, arrived: float) -> bool:
        # Large gradients that cancel add up to a small one, so the gradients that arrive must be small too.
        return self.sizes[id(parameter)] < size and self.arrived.get(id(parameter), math.inf) < arrived

    def _is_left_out(self, parameter: torch.Tensor) -> bool:
        """Return True if the optimizers of this model were given, and none of them holds the parameter."""
        return self.held is not None and id(parameter) not in self.held and self.are_its_optimizers

    # ---- Not trained by an optimizer --------------------------------------------------------------------------------

    def _frozen(self, name: str, parameter: torch.Tensor) -> Iterator[Finding]:
        if self.held is None:
            yield finding_of("frozen", name, "requires_grad is False", is_note=True)
        elif id(parameter) in self.held:
            yield finding_of("frozen", name, "requires_grad is False, yet the optimizer holds it: it is never updated")

    def _not_in_optimizer(self, name: str, leaf: torch.Tensor) -> Iterator[Finding]:
        if self.held is not None and id(leaf) not in self.held:
            more = "" if self.are_its_optimizers else "; what they hold is neither in the model nor in the loss"
            more += "" if name in self.named else "; it is not among model.parameters()"
            yield finding_of("not_in_optimizer", name, f"it gets a gradient, but no optimizer holds it{more}")

    def _non_leaf(self, name: str, result: torch.Tensor) -> Iterator[Finding]:
        if self._line(gradient_function(result)) is not None:
            return  # made in the forward pass that the tracer watched
        ends = {id(leaf) for leaf in leaves(walk(result.grad_fn))}
        registered = {id(parameter) for parameter in self.named.values()}
        if ends and not ends & registered and not ends <= (self.held or set()):
            made_by = operation(node) if (node := gradient_function(result)) is not None else ""
            cause = f"it is the result of an operation ({made_by}) that ran once: the gradient goes on to the operands"
            yield finding_of("non_leaf", name, f"{cause}, and no optimizer can train it")

    # ---- Cut off ----------------------------------------------------------------------------------------------------

    def _unreached(self, name: str, parameter: torch.Tensor) -> Finding:
        """Explain why the loss sends no gradient to a parameter."""
        about_loss = ""
        if self.loss.grad_fn is None and self.loss.requires_grad and id(self.loss) not in self.reached:
            about_loss = (
                "; requires_grad_() on a loss without a graph only silences the error of backward(), and gives no "
                "parameter a gradient"
            )
        elif self.loss.grad_fn is None and not self.loss.requires_grad:
            about_loss = "; the loss has no graph at all"
        if self.tracer is None:
            cause = f"the graph of the loss does not lead to it{about_loss}"
            if not (self.loss.is_floating_point() or self.loss.requires_grad):
                cause = f"the loss is of dtype {self.loss.dtype}, which has no derivative"
                return finding_of("integer_dtype", name, cause)
            return finding_of("disconnected", name, cause, remedy=_TRACE)
        cuts = self.tracer.cuts_between(parameter, self.loss)
        if cuts:
            cut = _likeliest(cuts)
            self.blamed.add(_place(cut))
            if cut.entered is not None and self._is_left_out(parameter):
                cause = "the loss depends on it only through what was computed while gradients were off"
                return finding_of("no_grad", name, cause, cut.entered)
            possibly = "" if cut.returned is None else "possibly: "
            return finding_of(cut.kind, name, f"{possibly}{_cut_cause(cut)}{about_loss}", cut.location)
        escapes = self.tracer.escapes(parameter, self.loss)
        if escapes:
            cut = _likeliest(escapes[-1].cuts)
            cause = f"possibly: {_cut_cause(cut)}"
            cause += "" if cut.call == escapes[-1].call else f"; {escapes[-1].call}() took it out of PyTorch"
            return finding_of(cut.kind, name, f"{cause}{about_loss}", cut.location)
        left = next(iter(self.tracer.escapes(parameter)), None)
        code: Code = "disconnected"
        if not self.tracer.used(parameter):
            code, cause = "unused", "no call took it together with data while the tracer watched"
        elif left is None:
            cause = "it was used, but nothing made of it enters the loss"
        else:
            cause = "it was used, but no path from it to the loss was seen"
        if left is None:
            return finding_of(code, name, f"{cause}{about_loss}")
        cut = _likeliest(left.cuts)
        is_choice = cut.kind == "integer_dtype"
        cause += f"; {left.call}() took {f'results of {cut.call}' if is_choice else 'values made of it'} out of PyTorch"
        cause += ", and what became of them is not seen"
        return finding_of(code, name, f"{cause}{about_loss}", cut.location if is_choice else left.location)

    def _partial_cuts(self) -> Iterator[Finding]:
        """Yield a note for each cut on a path to parameters that gradients reach on other paths."""
        if self.tracer is None:
            return
        # Cuts are intended where a value is kept, as in running statistics and the weights of a target network.
        own = [t for t in (*self.named.values(), *self.model.buffers()) if not torch.nn.parameter.is_lazy(t)]
        kept = {cut for tensor in own for cut in self.tracer.cuts(tensor)}
        leaves = {name: leaf for name, leaf in (self.named | self.own_leaves).items() if id(leaf) in self.reached}
        trained = {name: leaf for name, leaf in leaves.items() if not self._is_left_out(leaf)}
        behind = {name: set(self.tracer.cuts_between(leaf, self.loss)) for name, leaf in trained.items()}
        places: dict[tuple[Any, ...], list[Cut]] = {}
        for cut in self.tracer.relevant_cuts(self.loss):
            if cut not in kept and _place(cut) not in self.blamed:
                places.setdefault(_place(cut), []).append(cut)
        for cuts in places.values():
            names = [name for name in trained if not behind[name].isdisjoint(cuts)]
            if names:
                listed = ", ".join(shortened(names, 3))
                cause = f"a cut enters the loss: {_result_of(cuts[0])} sends no gradient to {listed}; other paths do"
                location = cuts[0].entered or cuts[0].location
                yield finding_of(cuts[0].kind, "loss", cause, location, remedy=_PARTIAL_REMEDY, is_note=True)

    # ---- Reached by a gradient that is of no use --------------------------------------------------------------------

    def _nonfinite(self, name: str, parameter: torch.Tensor) -> Finding:
        cause = f"its gradient has {'NaN' if math.isnan(self.sizes[id(parameter)]) else 'inf'}"
        origin = self.flow.nonfinite_origin(parameter)
        if origin is not None:
            cause += f", which {origin.name()} was the first to compute from finite gradients"
        if not torch.isfinite(self.loss):
            cause += f"; the loss itself is {self.loss.item()}"
        return finding_of("nonfinite", name, cause, self._line(origin))

    def _zero(self, name: str, parameter: torch.Tensor) -> Finding | None:
        losses = self.flow.losses(parameter)
        if any(loss.cancelled or any(map(self._is_about_to_move, loss.other_factors)) for loss in losses):
            return None
        if not losses:
            if self.flow.is_freed:
                cause = "its gradient is zero; a freed graph shows neither where it was lost nor if that is a fault"
                return finding_of("all_zero", name, cause, is_note=True)
            cause = "its gradient is exactly zero; a reentrant checkpoint does not show where it was lost"
            return finding_of("all_zero", name, cause)
        if all(loss.sent == NOTHING and operation(loss.node) == "CompiledFunction" for loss in losses):
            return finding_of("disconnected", name, "a compiled region uses it, but does not lead to it", remedy=_TRACE)
        filled = [loss for loss in losses if loss.sent.numel or loss.sent == NOTHING]
        if not filled:
            return finding_of("unused", name, "everything computed with it is an empty tensor")
        codes = {_loss_code(loss) for loss in filled}
        code = codes.pop() if len(codes) == 1 else "all_zero"
        names = ", ".join(dict.fromkeys(loss.node.name() for loss in filled))
        return finding_of(code, name, _CAUSE_OF_LOSS[code].format(names), self._line(*(loss.node for loss in filled)))

    def _dead_units(self, name: str, parameter: torch.Tensor) -> Iterator[Finding]:
        """Note that most rows of a weight get no gradient, because ReLUs or clamps let none through."""
        rows = self.dead_rows.get(id(parameter))
        if rows is None or len(rows) < DEAD_UNITS or rows.sum() < DEAD * len(rows):
            return
        stops = [stop for stop in self.flow.stops(parameter) if stop.samples >= DEAD_SAMPLES]
        if not stops:
            return
        dead = int((rows & torch.stack([stop.units for stop in stops]).any(0)).sum())
        if dead >= DEAD * len(rows):
            names = ", ".join(dict.fromkeys(stop.node.name() for stop in stops))
            cause = f"{dead} of {len(rows)} units dead: {names} blocks their gradients for the whole batch"
            line = self._line(*(stop.node for stop in stops))
            yield finding_of("all_zero", name, cause, line, remedy=_DEAD_REMEDY, is_note=True)

    def _is_about_to_move(self, factor: torch.Tensor) -> bool:
        """Return True for a factor that is a parameter and zero now, but not after the first step."""
        if self.sizes.get(id(factor), 0.0) == 0:
            return False
        return self.is_zero[id(factor)] if id(factor) in self.is_zero else not factor.any()

    def _line(self, *nodes: Node | None) -> Location | None:
        """The line whose call made a node: the first of `nodes` that the tracer saw."""
        if self.tracer is None:
            return None
        lines = (self.tracer.location(node) for node in nodes if node is not None)
        return next((line for line in lines if line is not None), None)


def _likeliest(cuts: Iterable[Cut]) -> Cut:
    """The cut that is most likely to be a fault."""
    return min(cuts, key=lambda cut: ("detached", "no_grad", "integer_dtype").index(cut.kind))


_CAUSE_OF_LOSS = {
    "zero_derivative": "every path to it leads through {}, whose derivative is zero or not defined",
    "vanishing": "its gradient has become zero in {}, by saturation or underflow",
    "all_zero": "its gradient has become exactly zero in {}",
}


def _place(cut: Cut) -> tuple[Any, ...]:
    """Key shared by the cuts of one line, or of one block where gradients are off."""
    return cut.kind, cut.entered if cut.kind == "no_grad" else cut.location or cut.call


def _result_of(cut: Cut) -> str:
    result = "what was computed while gradients were off" if cut.kind == "no_grad" else f"the result of {cut.call}"
    return result + _return_of(cut)


def _return_of(cut: Cut) -> str:
    return "" if cut.returned is None else f" (which may come back at {cut.returned}, in a tensor of its shape)"


def _as_left_out(finding: Finding) -> Finding:
    """The finding as a note, for a parameter that is not trained here."""
    if finding.code == "nonfinite" or finding.is_note:
        return finding
    more = "" if finding.code == "not_in_optimizer" else "; no optimizer holds it"
    return replace(finding, cause=finding.cause + more, remedy=_NOT_HELD_REMEDY, is_note=True)


def _dead_rows(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return True for each zero row of a matrix's gradient; None for vectors, sharded and sparse gradients."""
    is_plain = type(gradient) in (torch.Tensor, torch.nn.Parameter) and gradient.layout == torch.strided
    return gradient.detach().flatten(1).eq(0).all(1) if is_plain and gradient.dim() > 1 else None


def _cut_cause(cut: Cut) -> str:
    call = f"the loss depends on it only through the result of {cut.call}{_return_of(cut)}"
    if cut.kind == "integer_dtype":
        return f"{call}, integers or booleans, which have no derivative"
    if cut.kind == "no_grad":
        return f"{call}, called while gradients were off" + (f" (since {cut.entered})" if cut.entered else "")
    return f"{call}, which is cut off from the graph"


def _loss_code(loss: Hop) -> Code:
    kind = operation(loss.node)
    if kind in ZERO_DERIVATIVE or loss.sent == NOTHING or getattr(loss.node, "_saved_rounding_mode", None):
        return "zero_derivative"
    underflows = kind in SCALING or _is_scaled(loss)
    underflows |= all(arrived.largest < max(UNDERFLOW, arrived.tiny) for arrived in loss.arrived)
    return "vanishing" if loss.sent.largest == 0 and (kind in SATURATING or underflows) else "all_zero"


def _is_scaled(loss: Hop) -> bool:
    """Return True if the operand was multiplied or divided by a constant without zeros."""
    if operation(loss.node) not in ("Mul", "Div") or any(n for n, _ in loss.node.next_functions[1:]):
        return False
    factor = getattr(loss.node, "_saved_other", None)
    return isinstance(factor, torch.Tensor | float | int) and bool(torch.as_tensor(factor).all())


def _unregistered(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors in modules' attributes, also in lists and dicts, with their paths."""
    known = {id(registered) for registered in (*model.parameters(), *model.modules())}

    def search(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor | torch.nn.Module | list | tuple | dict):
            if id(value) in known:
                return
            known.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, torch.nn.Module):
            yield from ((f"{path}.{name}", parameter) for name, parameter in value.named_parameters())
        elif isinstance(value, list | tuple | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from search(f"{path}.{key}", item)

    for prefix, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name not in _REGISTRIES}
        for name, value in (*module._buffers.items(), *attributes.items()):
            yield from search(f"{prefix}.{name}" if prefix else name, value)


_REGISTRIES = {"_parameters", "_buffers", "_modules"}
