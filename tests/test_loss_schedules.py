"""Numbers of heads that follow a schedule, under torch.compile: at most two graphs for all values of a number, and one
more where it is exactly 0."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from test_loss import ALL_HEADS, arguments, leaves
from torch._dynamo.testing import CompileCounterWithBackend

import gradscale_ext as gs
from gradscale_ext.loss import compiled

pytestmark = pytest.mark.compiled

#: One head of each kind, with all its steps.
HEADS = {head.kind: dataclasses.replace(head, first_step=0) for head in ALL_HEADS.values()}
#: Every number of a head that a schedule may change. The numbers of a support are constants of a graph.
NUMBERS = [
    (kind, field.name) for kind, head in HEADS.items() for field in dataclasses.fields(head) if field.type == "float"
]
ABOVE_ZERO = ("sigma_ratio", "delta", "eps")
VALUES = [0.04 * (call + 1) for call in range(20)]
FUNCTIONS = {"operator": gs.multi_step_loss, "reference": gs.reference.multi_step_loss}


def named(numbers):
    """Each number, by the operator and by the reference. The reference of most heads, and the weight, which is the same
    code for all heads, run in .ci/run only."""

    def is_slow(kind, field, function):
        return (function == "reference" and kind not in ("huber", "soft_cross_entropy")) or (
            field == "weight" and kind != "huber"
        )

    cases = [
        pytest.param(
            kind,
            field,
            function,
            id=f"{kind}.{field}-{function}",
            marks=[pytest.mark.slow] if is_slow(kind, field, function) else [],
        )
        for kind, field in numbers
        for function in FUNCTIONS
    ]
    return pytest.mark.parametrize(("kind", "field", "function"), cases)


def changed(head, value):
    """A head with one value for all numbers."""
    fields = [field for kind, field in NUMBERS if kind == head.kind]
    return dataclasses.replace(head, **dict.fromkeys(fields, value))


def drawn(heads):
    """Predictions that require grad, and targets. Predictions are short, so that `NegativeCosine.eps` counts."""
    predictions, targets = arguments(steps=2, heads=heads)
    short = {name: [x.detach().mul(0.3).requires_grad_() for x in listed] for name, listed in predictions.items()}
    return short, targets


def check_loss(out, expected, predictions, rtol=1e-12):
    """Compare losses per sample, and gradients."""
    torch.testing.assert_close(out.per_sample, expected.per_sample, rtol=rtol, atol=rtol)
    found, truth = (torch.autograd.grad(given.loss, leaves(predictions)) for given in (out, expected))
    torch.testing.assert_close(found, truth, rtol=rtol, atol=rtol)


@pytest.fixture
def graphs(monkeypatch):
    """Count the graphs. A call fails where torch.compile would use eager mode because there are too many graphs."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@named(NUMBERS)
def test_two_graphs_for_all_values_of_a_number(kind, field, function, graphs):
    predictions, targets = drawn({kind: HEADS[kind]})

    def loss(value, function):
        return function({kind: dataclasses.replace(HEADS[kind], **{field: value})}, predictions, targets)

    run = torch.compile(loss, fullgraph=True, backend=graphs)
    losses = set()
    for value in VALUES:
        expected = loss(value, gs.multi_step_loss)
        check_loss(run(value, FUNCTIONS[function]), expected, predictions)
        losses.add(round(expected.loss.item(), 9))
    assert graphs.frame_count <= 2
    assert len(losses) > 5  # the number counts


@named([number for number in NUMBERS if number[1] not in ABOVE_ZERO])
def test_one_more_graph_for_zero(kind, field, function, graphs, monkeypatch):
    """PyTorch compiles a number that is found to be constant twice, and keeps one of the graphs."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)
    predictions, targets = drawn({kind: HEADS[kind]})

    def loss(value, function):
        return function({kind: dataclasses.replace(HEADS[kind], **{field: value})}, predictions, targets)

    run = torch.compile(loss, fullgraph=True, backend=graphs)
    for value in [0.3, 0.2, 0.0, 0.1, 0.0, 0.5]:
        check_loss(run(value, FUNCTIONS[function]), loss(value, gs.multi_step_loss), predictions)


class Learner(torch.nn.Module):
    """A model whose loss has other heads in each step."""

    def __init__(self):
        super().__init__()
        self.loss = gs.MultiStepLoss(**HEADS)

    def forward(self, predictions, targets):
        return self.loss(predictions, targets)


def ways_to_give_heads():
    """Name, the function that is compiled, and its arguments for a value."""

    def inside(value, predictions, targets):
        heads = {kind: changed(head, value) for kind, head in HEADS.items()}
        return gs.multi_step_loss(heads, predictions, targets)

    def module_inside(value, predictions, targets):
        return gs.MultiStepLoss(**{kind: changed(head, value) for kind, head in HEADS.items()})(predictions, targets)

    captured, learner = dict(HEADS), Learner()

    def outside(value):
        return {kind: changed(head, value) for kind, head in HEADS.items()}

    def closure(predictions, targets):
        return gs.multi_step_loss(captured, predictions, targets)

    def of_closure(value):
        captured.update(outside(value))
        return ()

    def of_module(value):
        learner.loss.heads = outside(value)
        return ()

    yield "inside", inside, lambda value: (value,)
    yield "a module made inside", module_inside, lambda value: (value,)
    yield "argument", gs.multi_step_loss, lambda value: (outside(value),)
    yield "captured", closure, of_closure
    yield "module", learner, of_module


@pytest.mark.parametrize(("way", "function", "arguments_for"), list(ways_to_give_heads()))
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fullgraph", "breaks"])
def test_ways_to_give_heads(way, function, arguments_for, fullgraph, graphs):
    predictions, targets = drawn(HEADS)
    run = torch.compile(function, fullgraph=fullgraph, backend=graphs)
    for value in VALUES:
        given = arguments_for(value)
        check_loss(run(*given, predictions, targets), function(*given, predictions, targets), predictions, rtol=1e-11)
    assert graphs.frame_count <= 2


def test_the_compiled_implementation(monkeypatch, graphs):
    """The first numbers are integers."""
    compiled._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    predictions, targets = drawn(HEADS)
    for value in [1, *VALUES]:
        heads = {kind: changed(head, value) for kind, head in HEADS.items()}
        out, expected = (gs.multi_step_loss(heads, predictions, targets, impl=impl) for impl in ("compiled", "fused"))
        check_loss(out, expected, predictions, rtol=1e-11)
    assert graphs.frame_count <= 2
    compiled._compiled.cache_clear()


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("function", ["operator", pytest.param("reference", marks=pytest.mark.slow)])
def test_inductor(function, dynamic, graphs):
    """Short heads, because Inductor compiles each of their loops. All other tests use AOTAutograd without Inductor."""
    graphs = CompileCounterWithBackend("inductor")
    kinds = HEADS if function == "operator" else ("huber", "soft_cross_entropy")
    chosen = {kind: HEADS[kind] for kind in kinds}
    predictions, targets = drawn(chosen)

    def loss(value, function):
        return function({kind: changed(head, value) for kind, head in chosen.items()}, predictions, targets)

    run = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=graphs)
    for value in VALUES:
        check_loss(run(value, FUNCTIONS[function]), loss(value, gs.multi_step_loss), predictions, rtol=1e-11)
    assert graphs.frame_count <= 2


def test_transforms_within_a_graph(graphs):
    predictions, targets = drawn({"huber": HEADS["huber"]})
    x, target = predictions["huber"][0].detach(), targets["huber"][:1]

    def loss(value, x):
        return gs.multi_step_loss({"huber": changed(HEADS["huber"], value)}, {"huber": [x]}, {"huber": target}).loss

    def transformed(value):
        batched = torch.vmap(lambda x: loss(value, x))(torch.stack([x, 2 * x]))
        return torch.func.grad(lambda x: loss(value, x))(x), batched

    run = torch.compile(transformed, fullgraph=True, backend=graphs)
    for value in VALUES:
        torch.testing.assert_close(run(value), transformed(value), rtol=1e-12, atol=1e-12)
    assert graphs.frame_count <= 2


def test_a_number_that_becomes_invalid(graphs):
    """The error of eager mode, in a call that has graphs for valid numbers already."""
    predictions, targets = drawn({"huber": HEADS["huber"]})

    def loss(value):
        return gs.multi_step_loss({"huber": gs.Huber(delta=value)}, predictions, targets).loss

    run = torch.compile(loss, backend=graphs)
    for value in (0.5, 0.25, 0.75):
        run(value)
    for value in (-1.0, 0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="Huber: delta must be finite and above 0, but it is"):
            run(value)
    torch.testing.assert_close(run(0.3), loss(0.3))
