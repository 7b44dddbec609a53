"""The functions that ask PyTorch in which context a call is made: eager, compiled, or under a transform.

If a version of PyTorch answers differently, these tests fail first.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs
from gradscale_ext import _context
from gradscale_ext._native import is_ordinary


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_is_eager_is_false_only_in_compiled_and_exported_code():
    assert _context.is_eager()

    def function(x):
        return x * (2 if _context.is_eager() else 3)

    x = torch.ones(1)
    assert torch.compile(function, backend="eager")(x).item() == 3
    assert torch.compile(function, backend="aot_eager")(x).item() == 3
    for strict in (False, True):
        torch._dynamo.reset()
        exported = torch.export.export(Exported(), (x,), strict=strict)
        assert exported.module()(x).item() == 3
    assert torch.func.grad(lambda x: function(x).sum())(x).item() == 2


class Exported(torch.nn.Module):
    def forward(self, x):
        return x * (2 if _context.is_eager() else 3)


ORDINARY = {
    "eager": lambda ask: ask(),
    "no_grad": lambda ask: _within(torch.no_grad(), ask),
    "enable_grad": lambda ask: _within(torch.enable_grad(), ask),
    "autocast": lambda ask: _within(torch.autocast("cpu", dtype=torch.bfloat16), ask),
    "forward-mode level": lambda ask: _within(forward_ad.dual_level(), ask),
    "anomaly": lambda ask: _within(torch.autograd.set_detect_anomaly(True), ask),
    "saved-tensor hooks": lambda ask: _within(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), ask),
    "default device": lambda ask: _within(torch.device("cpu"), ask),
}
OTHER = {
    "inference_mode": lambda ask: _within(torch.inference_mode(), ask),
    "vmap": lambda ask: torch.func.vmap(lambda x: _after(ask, x))(torch.ones(2)),
    "grad": lambda ask: torch.func.grad(lambda x: _after(ask, x))(torch.ones(())),
    "jvp": lambda ask: torch.func.jvp(lambda x: _after(ask, x), (torch.ones(()),), (torch.ones(()),)),
    "functionalize": lambda ask: torch.func.functionalize(lambda x: _after(ask, x))(torch.ones(())),
    "dispatch mode": lambda ask: _within(Passing(), ask),
    "fake tensors": lambda ask: _within(torch._subclasses.FakeTensorMode(), ask),
    "make_fx": lambda ask: torch.fx.experimental.proxy_tensor.make_fx(lambda x: _after(ask, x))(torch.ones(())),
}


def _within(manager, ask):
    with manager:
        ask()


def _after(ask, x):
    ask()
    return x * 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ORDINARY, *OTHER])
def test_ordinary_contexts(name):
    answers = []
    {**ORDINARY, **OTHER}[name](lambda: answers.append(is_ordinary()))
    assert answers == [name in ORDINARY]


def test_a_backward_pass_is_ordinary():
    answers = []
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda g: answers.append(is_ordinary()))
    y.backward()
    assert answers == [True]


# ---- Under a transform of torch.func --------------------------------------------------------------------------------


def _asked(transformed):
    """A function of a tensor that appends the answer of `is_transformed` to the list."""

    def function(x):
        transformed.append(_context.is_transformed())
        return (x * x).sum()

    return function


TRANSFORMS = {
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "func.vjp": lambda f, x: torch.func.vjp(f, x),
    "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "compile of grad": lambda f, x: torch.compile(torch.func.grad(f), fullgraph=True, backend="eager")(x),
    "compile of vmap": lambda f, x: torch.compile(torch.func.vmap(f), fullgraph=True, backend="eager")(x),
}
UNTRANSFORMED = {
    "eager": lambda f, x: f(x),
    "no_grad": lambda f, x: _within(torch.no_grad(), lambda: f(x)),
    "inference_mode": lambda f, x: _within(torch.inference_mode(), lambda: f(x)),
    "backward": lambda f, x: f(x.requires_grad_()).backward(),
    "compile": lambda f, x: torch.compile(f, fullgraph=True, backend="aot_eager")(x),
}


@pytest.mark.parametrize("name", [*TRANSFORMS, *UNTRANSFORMED])
def test_transforms(name):
    torch._dynamo.reset()
    answers = []
    {**TRANSFORMS, **UNTRANSFORMED}[name](_asked(answers), torch.ones(3))
    torch._dynamo.reset()
    assert set(answers) == {name in TRANSFORMS}


# ---- Schedules: Python numbers that change from call to call --------------------------------------------------------


def _priorities(x, a):
    return gs.priorities(x, torch.zeros_like(x), alpha=a) * x.sum()


def _unrolled(x, a):
    outputs = gs.unroll(lambda o: ({"v": o}, o), lambda h, k: ({"v": h * k}, h * k), x, [x] * 3, hidden_scale=a)
    return outputs["v"][-1]


def _weighted(**options):
    def loss(x, a):
        weights = {name: [1.0, a, a * 0.5, 1.0, a**2] for name in options}
        target = {"m": torch.zeros_like(x)}
        return gs.multi_step_loss({"m": gs.MeanSquaredError()}, {"m": x}, target, reduction="none", **weights).loss

    return loss


SCHEDULED = {
    "scale_gradient": gs.scale_gradient,
    "scale_gradient of a dict": lambda x, a: gs.scale_gradient({"h": x}, a)["h"],
    "reverse_gradient": gs.reverse_gradient,
    "clip_gradient_norm": gs.clip_gradient_norm,
    "clip_gradient_norm per sample": lambda x, a: gs.clip_gradient_norm(x, a, batch_dims=1),
    "clip_gradient_value": lambda x, a: gs.clip_gradient_value(x, -a, a),
    "clip_gradient_value from above": lambda x, a: gs.clip_gradient_value(x, None, a),
    "normalize_gradient": lambda x, a: gs.normalize_gradient(x, a, batch_dims=1),
    "step_weights": _weighted(step_weights=True),
    "step_gradient_scale": _weighted(step_gradient_scale=True),
    "l2_loss": lambda x, a: gs.l2_loss([x], weight=a) * x.detach().sum(1),
    "priorities": _priorities,
    "hidden_scale": _unrolled,
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_compiles_at_most_twice(name):
    """torch.compile compiles once for the first number, as a constant, and once for all other numbers."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = SCHEDULED[name]
    compiled = torch.compile(lambda x, a: function(x * 1, a), backend=counter, fullgraph=True)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for step in range(20):
        a = 0.1 + 0.05 * step
        results = [f(x, a) for f in (compiled, function)]
        gradients = [torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view_as(y))[0] for y in results]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients)
    assert counter.frame_count <= 2
