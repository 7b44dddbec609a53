"""What the package asks PyTorch about its contexts; a version that answers otherwise fails here first."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale_ext import _context


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_eager_is_no_compiler():
    assert _context.is_eager()
    seen = []

    def function(x):
        seen.append(_context.is_eager())
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
    {**ORDINARY, **OTHER}[name](lambda: answers.append(_context.is_ordinary()))
    assert answers == [name in ORDINARY]


def test_a_backward_pass_is_ordinary():
    answers = []
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda g: answers.append(_context.is_ordinary()))
    y.backward()
    assert answers == [True]


# ---- Under a transform of torch.func --------------------------------------------------------------------------------


def _asked(transformed):
    """A function of a tensor that keeps the answers."""

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
