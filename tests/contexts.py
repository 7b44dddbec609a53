"""The matrix: gradient-flow operators and returns in every context of PyTorch, against the closed form in float64.

A cell is right if values and gradients agree with the formula, wrong if they do not and nothing was raised, and an
error otherwise. `tests/test_matrix.py` asserts the cells of this package; `bench/matrix.py` records them next to the
usual hand-written ways.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from trajectories import DEFINITIONS, by_definition

import gradscale_ext as gs

Tensor = torch.Tensor
Pairs = Iterable[tuple[Tensor, Tensor]]

POINT = torch.linspace(0.5, 1.6, 12, dtype=torch.float64).view(3, 4)
DIRECTION = torch.linspace(1.0, -1.0, 12, dtype=torch.float64).view(3, 4)
WEIGHTS = torch.tensor([[0.1, -0.2, 0.3, 0.2], [2.0, -3.0, 1.0, 0.5], [-1.0, 4.0, 2.0, -8.0]], dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """An operator with its arguments, and the closed forms of its effects on a tensor and on a gradient."""

    name: str
    argument: str
    """'number' or 'tensor'."""
    operator: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    values: tuple[float | Tensor, ...]
    """The arguments of operator and formula after the tensor."""
    linear: bool
    """True if forward mode is defined for the operator, so that every cell must be right."""
    forward: Callable[[Tensor], Tensor] | None = None
    """The closed form of the effect on a tensor; None if the operator returns it unchanged."""

    def value(self, x: Tensor) -> Tensor:
        return x if self.forward is None else self.forward(x)

    def loss(self, x: Tensor) -> Tensor:
        """The true value of `model`."""
        return (self.value(x * x) * WEIGHTS).sum()

    def apply(self, x: Tensor) -> Tensor:
        return self.operator(x, *self.values)

    def closed_form(self, g: Tensor) -> Tensor:
        return self.formula(g, *self.values)

    def on(self, device: str) -> Case:
        """The same case with its arguments on another device."""
        moved = (value.to(device) if isinstance(value, Tensor) else value for value in self.values)
        return dataclasses.replace(self, values=tuple(moved))

    def model(self, x: Tensor, z: Tensor = WEIGHTS) -> Tensor:
        """``sum op(x^2) z``: the incoming gradient of the operator is z."""
        return (self.apply(x * x) * z).sum()

    def gradient(self, x: Tensor, z: Tensor = WEIGHTS) -> Tensor:
        """The true gradient of `model` with respect to x."""
        return self.closed_form(z) * 2 * x

    def squared_model(self, x: Tensor, z: Tensor = WEIGHTS) -> Tensor:
        """``sum op(x^2)^2 z / 2``: the incoming gradient of the operator depends on the operator's result."""
        return (self.apply(x * x) ** 2 * z).sum() / 2

    def squared_gradient(self, x: Tensor, z: Tensor = WEIGHTS) -> Tensor:
        """The true gradient of `squared_model` with respect to x."""
        return self.closed_form(self.value(x * x) * z) * 2 * x

    def second(self, v: Tensor, x: Tensor = POINT, z: Tensor = WEIGHTS) -> tuple[Tensor, Tensor]:
        """The true gradients, with respect to x and z, of ``sum v * gradient of squared_model``.

        The operator also changes the gradient that reaches its result in the second pass.
        """
        y = self.value(x * x)
        incoming = (y * z).requires_grad_()
        (to_incoming,) = torch.autograd.grad(self.closed_form(incoming), incoming, 2 * x * v)
        to_x = self.closed_form(y * z) * 2 * v + self.closed_form(to_incoming * z) * 2 * x
        return to_x.detach(), to_incoming * y


# ---- Operators, and their closed forms ------------------------------------------------------------------------------


def _norm(g: Tensor, batch_dims: int, p: float) -> Tensor:
    inner = tuple(range(batch_dims, g.dim()))
    magnitude = g.abs()
    norm = magnitude.amax(inner) if math.isinf(p) else (magnitude**p).sum(inner) ** (1 / p)
    return norm.reshape(*g.shape[:batch_dims], *[1] * len(inner))


def _limit(value: float | Tensor, g: Tensor, batch_dims: int) -> Tensor:
    limit = torch.as_tensor(value, dtype=torch.float64)
    return limit.reshape(*limit.shape, *[1] * (g.dim() - batch_dims)) if limit.dim() else limit


def clipped(g: Tensor, max_norm: float | Tensor, batch_dims: int, p: float) -> Tensor:
    norm = _norm(g, batch_dims, p)
    return g * torch.minimum(torch.ones_like(norm), _limit(max_norm, g, batch_dims) / norm)


def normalized(g: Tensor, length: float | Tensor, batch_dims: int, p: float) -> Tensor:
    norm = _norm(g, batch_dims, p)
    return g * torch.where(norm == 0, 0, _limit(length, g, batch_dims) / norm)


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def clamped(g: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    return torch.minimum(torch.maximum(g, torch.as_tensor(low)), torch.as_tensor(high))


def _cases() -> list[Case]:
    cases = []
    for argument, scale in (("number", 1 / 3), ("tensor", _tensor(0.5, 0.0, -2.0, 1.0))):
        cases += [
            Case("scale_gradient", argument, gs.scale_gradient, lambda g, s: g * s, (scale,), True),
            Case("reverse_gradient", argument, gs.reverse_gradient, lambda g, s: -g * s, (scale,), True),
        ]
    for n, p, number, tensor in ((0, 2.0, 2.0, torch.tensor(3.0)), (1, 3.0, 1.5, _tensor(0.2, 9.0, 3.0))):
        groups = {"batch_dims": n, "norm_type": p}
        suffix = ", batch_dims=1" if n else ""
        for function, formula in ((gs.clip_gradient_norm, clipped), (gs.normalize_gradient, normalized)):
            operator = functools.partial(function, **groups)
            closed_form = functools.partial(formula, batch_dims=n, p=p)
            cases += [
                Case(function.__name__ + suffix, argument, operator, closed_form, (limit,), False)
                for argument, limit in (("number", number), ("tensor", tensor))
            ]
    for argument, bounds in (
        ("number", (-1.0, 0.25)),
        ("tensor", (-_tensor(0.5, 1.0, 2.0, 3.0), torch.tensor(1.5))),
    ):
        cases.append(Case("clip_gradient_value", argument, gs.clip_gradient_value, clamped, bounds, False))
    return cases


def _returns(function: str, x: Tensor, discount: Tensor, lambda_: float, ratios: Tensor, truncated: Tensor) -> Tensor:
    """A sum of the results of a function with multiples of x as inputs."""
    options: dict[str, Any] = {"discount": discount, "truncated": truncated.expand(x.shape)}
    if function == "n_step_returns":
        options["n"] = 3
    else:
        options["lambda_"] = lambda_
    if function in ("vtrace", "retrace"):
        options["ratios"] = ratios.expand(x.shape)
    results = getattr(gs, function)(x, 3 * x, -2 * x, **options)
    return results if isinstance(results, Tensor) else results[0] + 2 * results[1]


def _returns_cases() -> list[Case]:
    # These numbers are exact in every dtype.
    discount, ratios, lambda_ = _tensor(0.75, 0.5, 0.875, 1.0), _tensor(0.5, 2.0, 0.75, 1.25), 0.75
    truncated = torch.tensor([[False, False, True, False]])
    unit, no = torch.eye(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.bool)
    data = {"rewards": unit, "values": 3 * unit, "next_values": -2 * unit, "terminated": no, "mask": ~no}
    data |= {"discount": discount.expand(4, 4), "lambda_": lambda_ + 0 * unit, "ratios": ratios.expand(4, 4)}
    data["truncated"] = truncated.expand(4, 4)
    cases = []
    for function, entries in DEFINITIONS.items():
        matrix = sum((k + 1) * by_definition(data, entry) for k, entry in enumerate(entries))

        def transposed(g: Tensor, *_: Any, matrix: Tensor = matrix) -> Tensor:
            return g @ matrix.T

        def forward(x: Tensor, matrix: Tensor = matrix) -> Tensor:
            return x @ matrix

        values = (discount[None].float(), lambda_, ratios[None].float(), truncated)
        cases.append(Case(function, "tensor", functools.partial(_returns, function), transposed, values, True, forward))
    return cases


CASES = _cases()
RETURNS = _returns_cases()


# ---- Hand-written ways to scale a gradient by a third, for comparison -----------------------------------------------

SCALE = 1 / 3


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * SCALE

    @staticmethod
    def vmap(info, in_dims, x):  # type: ignore[no-untyped-def]
        return _Function.apply(x), in_dims[0]


class _FunctionWithJvp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * SCALE

    @staticmethod
    def jvp(ctx, tangent):  # type: ignore[no-untyped-def]
        return tangent.view_as(tangent) * SCALE


def _hook(x: Tensor) -> Tensor:
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * SCALE)
    return y


_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd.Function": _Function.apply,
    "Function with jvp": _FunctionWithJvp.apply,
    "tensor hook": _hook,
    "s*x + (1-s)*x.detach()": lambda x: SCALE * x + (1 - SCALE) * x.detach(),
    "d + s*(x-d), d = x.detach()": lambda x: x.detach() + SCALE * (x - x.detach()),
}

HAND_WRITTEN = [Case(name, "number", way, lambda g: g * SCALE, (), True) for name, way in _WAYS.items()]


# ---- Contexts -------------------------------------------------------------------------------------------------------

Context = Callable[[Case], Pairs]
CONTEXTS: dict[str, Context] = {}


def _context(name: str) -> Callable[[Context], Context]:
    def register(function: Context) -> Context:
        CONTEXTS[name] = function
        return function

    return register


def backward(function: Callable[[Tensor], Tensor], x: Tensor = POINT) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def _check(case: Case, function: Callable[[Tensor], Tensor]) -> Pairs:
    loss, gradient = backward(function)
    return [(loss, case.loss(POINT)), (gradient, case.gradient(POINT))]


def _batch() -> Tensor:
    return torch.stack([POINT, 2 - POINT])


def _gradient_batch(case: Case) -> Tensor:
    return torch.stack([case.gradient(x) for x in _batch()])


SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, 3.4e38, 1 / 3]


@_context("forward exact")
def _forward(case: Case) -> Pairs:
    x = torch.tensor([SPECIAL, SPECIAL[::-1], [1 / k for k in range(1, 9)]], dtype=torch.float32)[:, :4]
    for y in (case.apply(x), case.apply(x.clone().requires_grad_()).detach()):
        yield y.contiguous().view(torch.int32), x.contiguous().view(torch.int32)


@_context("eager")
def _eager(case: Case) -> Pairs:
    return _check(case, case.model)


@_context("no_grad")
def _no_grad(case: Case) -> Pairs:
    with torch.no_grad():
        return [(case.apply(POINT.clone().requires_grad_()), case.value(POINT))]


@_context("inference_mode")
def _inference_mode(case: Case) -> Pairs:
    with torch.inference_mode():
        return [(case.apply(POINT.clone().requires_grad_()).clone(), case.value(POINT))]


@_context("create_graph")
def _create_graph(case: Case) -> Pairs:
    x, z = POINT.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
    (first,) = torch.autograd.grad(case.squared_model(x, z), x, create_graph=True)
    yield first.detach(), case.squared_gradient(POINT)
    yield from zip(torch.autograd.grad((first * DIRECTION).sum(), (x, z)), case.second(DIRECTION), strict=True)


@_context("func.grad")
def _func_grad(case: Case) -> Pairs:
    gradient = torch.func.grad(case.squared_model)
    yield gradient(POINT), case.squared_gradient(POINT)
    second = torch.func.grad(lambda x, z: (gradient(x, z) * DIRECTION).sum(), argnums=(0, 1))
    yield from zip(second(POINT, WEIGHTS), case.second(DIRECTION), strict=True)
    leaf = POINT.clone().requires_grad_()
    (outer,) = torch.autograd.grad((gradient(leaf) * DIRECTION).sum(), leaf)
    yield outer, case.second(DIRECTION)[0]


@_context("func.vjp")
def _func_vjp(case: Case) -> Pairs:
    value, pull_back = torch.func.vjp(lambda x: case.apply(x * x), POINT)
    return [(value, case.value(POINT * POINT)), (pull_back(WEIGHTS)[0], case.gradient(POINT))]


@_context("vmap")
def _vmap(case: Case) -> Pairs:
    leaf = _batch().requires_grad_()
    values = torch.func.vmap(case.model)(leaf)
    values.sum().backward()
    return [(values.detach(), torch.stack([case.loss(x) for x in _batch()])), (leaf.grad, _gradient_batch(case))]


@_context("vmap(grad)")
def _vmap_grad(case: Case) -> Pairs:
    yield torch.func.vmap(torch.func.grad(case.model))(_batch()), _gradient_batch(case)
    last = torch.func.vmap(torch.func.grad(case.model), in_dims=-1)(_batch().movedim(0, -1))
    yield last, _gradient_batch(case)


@_context("grad(vmap)")
def _grad_vmap(case: Case) -> Pairs:
    total = torch.func.grad(lambda x: torch.func.vmap(case.model)(x).sum())
    return [(total(_batch()), _gradient_batch(case))]


@_context("jacrev")
def _jacrev(case: Case) -> Pairs:
    jacobian = torch.func.jacrev(lambda x: torch.stack([case.model(x), case.model(x, 2 * WEIGHTS)]))(POINT)
    yield jacobian, torch.stack([case.gradient(POINT), case.gradient(POINT, 2 * WEIGHTS)])
    second = torch.func.jacrev(torch.func.jacrev(case.squared_model))(POINT)
    rows = [case.second(unit.view(3, 4))[0] for unit in torch.eye(12, dtype=torch.float64)]
    yield second.reshape(12, 3, 4), torch.stack(rows)


@_context("hessian")
def _hessian(case: Case) -> Pairs:
    hessian = torch.func.hessian(case.squared_model)(POINT).reshape(12, 3, 4)
    rows = [case.second(unit.view(3, 4))[0] for unit in torch.eye(12, dtype=torch.float64)]
    return [(hessian, torch.stack(rows))]


@_context("func.jvp")
def _func_jvp(case: Case) -> Pairs:
    value, tangent = torch.func.jvp(case.model, (POINT,), (DIRECTION,))
    return [(value, case.loss(POINT)), (tangent, (case.gradient(POINT) * DIRECTION).sum())]


@_context("jacfwd")
def _jacfwd(case: Case) -> Pairs:
    return [(torch.func.jacfwd(case.model)(POINT), case.gradient(POINT))]


@_context("forward_ad")
def _forward_ad(case: Case) -> Pairs:
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(case.model(forward_ad.make_dual(POINT, DIRECTION)))
        return [(dual.primal, case.loss(POINT)), (dual.tangent, (case.gradient(POINT) * DIRECTION).sum())]


# Inductor takes most of the time, but does not change the gradient: a run of the tests may choose another backend.
BACKEND = os.environ.get("GRADSCALE_TEST_BACKEND", "inductor")


@_context("compile")
def _compile(case: Case) -> Pairs:
    return _check(case, torch.compile(case.model, fullgraph=True, backend=BACKEND))


@_context("compile dynamic")
def _compile_dynamic(case: Case) -> Pairs:
    def model(x: Tensor, z: Tensor) -> Tensor:
        return (case.apply(x.t().contiguous().t() * x) * z).sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=BACKEND)
    for rows in (3, 1, 2):
        if case.argument == "tensor" and "batch_dims" in case.name and rows != 3:
            continue  # its limits are for three samples
        x, z = POINT[:rows], WEIGHTS[:rows]
        _, gradient = backward(lambda leaf, z=z: compiled(leaf, z), x)
        yield gradient, case.gradient(x, z)


@_context("compile(func.grad)")
def _compile_grad(case: Case) -> Pairs:
    gradient = torch.func.grad(case.squared_model)
    yield torch.compile(gradient, fullgraph=True, backend=BACKEND)(POINT), case.squared_gradient(POINT)
    second = torch.compile(torch.func.grad(lambda x: (gradient(x) * DIRECTION).sum()), fullgraph=True, backend=BACKEND)
    yield second(POINT), case.second(DIRECTION)[0]


@_context("compile(vmap(grad))")
def _compile_vmap_grad(case: Case) -> Pairs:
    compiled = torch.compile(torch.func.vmap(torch.func.grad(case.model)), fullgraph=True, backend=BACKEND)
    return [(compiled(_batch()), _gradient_batch(case))]


@_context("compile(jvp)")
def _compile_jvp(case: Case) -> Pairs:
    compiled = torch.compile(lambda x, t: torch.func.jvp(case.model, (x,), (t,)), fullgraph=True, backend=BACKEND)
    value, tangent = compiled(POINT, DIRECTION)
    return [(value, case.loss(POINT)), (tangent, (case.gradient(POINT) * DIRECTION).sum())]


class _Module(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(POINT.clone())
        self.case = case

    def forward(self, z: Tensor) -> Tensor:
        return self.case.model(self.x, z)


@_context("export")
def _export(case: Case) -> Pairs:
    for strict in (False, True):
        module = torch.export.export(_Module(case), (WEIGHTS,), strict=strict).module()
        value = module(WEIGHTS)
        value.backward()
        yield value.detach(), case.loss(POINT)
        yield module.x.grad, case.gradient(POINT)


@_context("checkpoint")
def _checkpoint(case: Case) -> Pairs:
    for reentrant in (False, True):
        yield from _check(case, lambda x, r=reentrant: checkpoint(case.model, x, use_reentrant=r))


@_context("saved-tensor hooks")
def _saved_tensor_hooks(case: Case) -> Pairs:
    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            return case.model(x)

    return _check(case, run)


@_context("autocast")
def _autocast(case: Case) -> Pairs:
    x = POINT.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.nn.functional.linear(x, torch.eye(4))
        y = case.apply(hidden)
    y.backward(WEIGHTS.to(y.dtype))
    assert y.dtype == (torch.bfloat16 if case.forward is None else torch.float32)
    assert x.grad is not None
    expected = case.closed_form(WEIGHTS.to(y.dtype).double())
    for result, exact in ((y, case.value(hidden.double())), (x.grad, expected)):
        scale = exact.abs() if case.forward is None else exact.abs().max()  # of the largest term of a sum
        close = (result.double() - exact).abs() <= 2**-7 * scale  # bfloat16 keeps eight bits
        yield close, torch.ones_like(close)


@_context("anomaly mode")
def _anomaly(case: Case) -> Pairs:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            return _check(case, case.model)


def _process_group() -> None:
    """A group of one process, which runs the code of larger groups. It stays open, because DDP must not outlive it."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@_context("DDP")
def _ddp(case: Case) -> Pairs:
    _process_group()
    module = torch.nn.parallel.DistributedDataParallel(_Module(case))
    value = module(WEIGHTS)
    value.backward()
    return [(value.detach(), case.loss(POINT)), (module.module.x.grad, case.gradient(POINT))]


@_context("FSDP2")
def _fsdp2(case: Case) -> Pairs:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _process_group()
    module = _Module(case)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    value = module(WEIGHTS)
    value.backward()
    return [(value.detach(), case.loss(POINT)), (module.x.grad.full_tensor(), case.gradient(POINT))]


@_context("CUDA graph")
def _cuda_graph(case: Case) -> Pairs:
    x, z = POINT.cuda().requires_grad_(), WEIGHTS.cuda()
    x.grad = torch.zeros_like(x)
    on_gpu = case.on("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            on_gpu.model(x, z).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.model(x, z).backward()
    x.grad.zero_()
    graph.replay()
    return [(x.grad.cpu(), case.gradient(POINT))]


# ---- Judging --------------------------------------------------------------------------------------------------------


def contexts_here(case: Case) -> list[str]:
    """Contexts that can run on this machine, and that apply to `case`."""
    names = [name for name in CONTEXTS if torch.cuda.is_available() or not name.startswith("CUDA")]
    return names if case.forward is None else [name for name in names if name != "forward exact"]


def judge(case: Case, context: str) -> tuple[str, str]:
    """'right', 'wrong' or 'error', with the observed result."""
    torch._dynamo.reset()
    try:
        pairs = [(result, expected) for result, expected in CONTEXTS[context](case)]
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    for result, expected in pairs:
        exact = not result.is_floating_point()
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-9, "atol": 1e-12}
        if result.dtype != expected.dtype or result.shape != expected.shape:
            return "wrong", f"{result.dtype} {tuple(result.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        if not torch.allclose(result, expected, **tolerance):
            return "wrong", f"{result.flatten()[:4].tolist()}, expected {expected.flatten()[:4].tolist()}"
    return "right", ""
