"""``impl="compiled"``: the reference under torch.compile, and "auto" on devices without kernels."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pytest
import torch
from test_loss import ALL_HEADS, HEADS, arguments, compare
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import gradscale_ext as gs
from gradscale_ext.loss import compiled, multi_step

pytestmark = pytest.mark.compiled
OWN = {"own": gs.PerStepLoss()}
FEW = {name: HEADS[name] for name in ("distance", "features")}


@pytest.fixture
def graphs(monkeypatch):
    """Count the graphs, and compile with aot_eager, because the C++ compilation of Inductor is slow."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    compiled._compiled.cache_clear()
    yield counter
    compiled._compiled.cache_clear()


@pytest.fixture
def without_kernels(monkeypatch):
    """CPU tensors are treated as tensors of a device without kernels."""
    with torch._subclasses.FakeTensorMode():  # a refusal that names no argument
        refusal = multi_step._C.l2_loss([], 1.0)
    monkeypatch.setattr(multi_step, "_fused_loss", lambda *_: refusal)
    monkeypatch.setattr(multi_step, "DEVICE_TYPES", ("cuda",))
    monkeypatch.setattr(multi_step, "_without_compiler", {})
    gs._context.say_once.cache_clear()


def both(heads, predictions, targets, **options):
    """The compiled loss and the reference."""
    return [gs.multi_step_loss(heads, predictions, targets, impl=impl, **options) for impl in ("compiled", "reference")]


@pytest.mark.parametrize(("stacked", "steps"), [(False, 1), (True, 2)])
def test_equals_the_reference(graphs, stacked, steps):
    """Four heads have lists of predictions, four others stacked ones. Every head and step adds to the compile time."""
    names = ("gauss", "classes", "features", "consistency") if stacked else ("value", "bonus", "end", "own")
    heads = {name: ALL_HEADS[name] for name in names}
    predictions, targets = arguments(heads=heads, steps=steps)
    if stacked:
        predictions, targets = (
            {name: torch.stack(entries).detach() for name, entries in given.items()} for given in (predictions, targets)
        )
        for prediction in predictions.values():
            prediction.requires_grad_()
    mask = torch.tensor([[True, True], [True, False], [False, True]])[:, :steps]
    options = dict(
        step_weights=[1.0, 0.5][:steps],
        step_gradient_scale="unroll",
        importance_weights=torch.tensor([1.0, 2.0, 0.5]),
        mask=mask.T if stacked else mask,
        batch_first=not stacked,
        nonfinite="skip",
        reduction="valid_mean",
    )
    for _ in range(2):
        compare(*both(heads, predictions, targets, **options), predictions)
    assert graphs.frame_count == 1


@pytest.mark.slow
def test_inductor_compiles_the_loss():
    heads = {"value": gs.TwoHot(gs.Support(-1, 1, 5))}
    predictions, targets = {"value": torch.randn(4, 1, 5, requires_grad=True)}, {"value": torch.rand(4, 1)}
    compare(*both(heads, predictions, targets), predictions, rtol=1e-5)


def test_schedules_and_batches_do_not_compile_again(graphs):
    """When a number or a size changes for the first time, it becomes a variable of the graph."""
    for call in range(4):
        heads = {
            "value": gs.TwoHot(gs.Support(-1, 1, 5), weight=0.5 / (call + 1)),
            "policy": gs.SoftCrossEntropy(entropy_weight=0.1 / (call + 1)),
        }
        batch = 4 + call
        predictions = {"value": torch.randn(batch, 1, 5, requires_grad=True), "policy": torch.randn(batch, 1, 3)}
        targets = {"value": torch.rand(batch, 1), "policy": torch.rand(batch, 1, 3).softmax(-1)}
        fused, expected = both(heads, predictions, targets, step_weights=[1.0 - 0.1 * call])
        torch.testing.assert_close(fused.loss, expected.loss)
    assert graphs.frame_count == 2


def test_each_form_of_a_call_has_its_own_graphs(graphs, monkeypatch):
    """Each number of steps compiles, although torch.compile keeps at most `recompile_limit` graphs of one function."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    for steps in range(1, 5):
        x = torch.ones(3, steps, requires_grad=True)
        compare(*both(OWN, {"own": list(x.unbind(1))}, {}, reduction="sum"), {"own": x})
    assert graphs.frame_count == 4


def test_the_module_and_an_enclosing_graph(graphs):
    predictions, targets = arguments(heads=FEW, steps=2)
    expected = gs.multi_step_loss(FEW, predictions, targets)
    module = gs.MultiStepLoss(**FEW)
    compare(module(predictions, targets, impl="compiled"), expected, predictions)
    enclosing = torch.compile(lambda: module(predictions, targets, impl="compiled").loss, fullgraph=True)
    torch.testing.assert_close(enclosing(), expected.loss)


def test_wrong_arguments_raise_before_compilation(graphs):
    with pytest.raises(ValueError, match="step_weights must have 2 numbers"):
        gs.multi_step_loss(OWN, {"own": torch.ones(3, 2)}, {}, step_weights=[1.0], impl="compiled")
    assert graphs.frame_count == 0


def test_tensors_that_are_not_plain_raise(graphs):
    def loss(x):
        return gs.multi_step_loss(OWN, {"own": x}, {}, impl="compiled").loss

    x = torch.ones(3, 2)
    for function, argument in ((torch.func.grad(loss), x), (torch.func.vmap(loss), x[None])):
        with pytest.raises(NotImplementedError, match="impl='reference' computes this call"):
            function(argument)
    with pytest.raises(NotImplementedError, match="impl='compiled' accepts plain tensors"), forward_ad.dual_level():
        loss(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match="impl='compiled' accepts plain tensors"), FakeTensorMode() as mode:
        loss(mode.from_tensor(x))
    with torch.inference_mode():
        assert loss(x) == 2


def test_second_derivatives_raise(graphs):
    x = torch.rand(4, 2, requires_grad=True)
    out = gs.multi_step_loss({"m": gs.MeanSquaredError()}, {"m": x}, {"m": torch.zeros(4, 2)}, impl="compiled")
    with pytest.raises(NotImplementedError, match="no second derivative; impl='reference' computes it"):
        torch.autograd.grad(out.loss, x, create_graph=True)
    torch.autograd.grad(out.loss, x)


def test_a_modified_prediction_keeps_its_gradient_or_raises(graphs):
    x = torch.rand(4, 2, 3, requires_grad=True)
    for heads in ({"m": gs.SoftCrossEntropy()}, {"m": gs.NegativeCosine()}):
        prediction, targets = x * 1, {"m": torch.ones(4, 2, 3) / 3}
        (expected,) = torch.autograd.grad(gs.multi_step_loss(heads, {"m": x}, targets).loss, x)
        out = gs.multi_step_loss(heads, {"m": prediction}, targets, impl="compiled")
        with torch.no_grad():
            prediction.mul_(2)
        try:
            (gradient,) = torch.autograd.grad(out.loss, x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        else:
            torch.testing.assert_close(gradient, expected)


def test_auto_compiles_on_devices_without_kernels(graphs, without_kernels):
    predictions, targets = arguments(heads=FEW, steps=2)
    with pytest.warns(UserWarning, match="no kernels for cpu tensors here; .* compiled by torch.compile"):
        out = gs.multi_step_loss(FEW, predictions, targets)
    assert graphs.frame_count == 1
    compare(out, gs.reference.multi_step_loss(FEW, predictions, targets), predictions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.multi_step_loss(FEW, predictions, targets)
        torch.func.grad(lambda x: gs.multi_step_loss(OWN, {"own": x}, {}).loss)(torch.ones(3, 2))


def test_auto_uses_the_reference_where_the_compiler_fails(monkeypatch, without_kernels):
    tried = []

    def broken(graph, inputs):
        tried.append(graph)
        raise RuntimeError("no compiler for this device")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    compiled._compiled.cache_clear()
    predictions, targets = arguments(heads=FEW, steps=2)
    with pytest.warns(UserWarning, match="torch.compile failed: .*no compiler for this device"):
        out = gs.multi_step_loss(FEW, predictions, targets)
    compare(out, gs.reference.multi_step_loss(FEW, predictions, targets), predictions)
    gs.multi_step_loss(FEW, predictions, targets)
    assert len(tried) == 1
    with pytest.raises(Exception, match="no compiler for this device"):
        gs.multi_step_loss(FEW, predictions, targets, impl="compiled")
    compiled._compiled.cache_clear()


def test_heads_share_a_graph_when_only_floats_differ():
    a, b = gs.SoftCrossEntropy(weight=0.5), gs.SoftCrossEntropy(weight=0.25, entropy_weight=0.1)
    assert compiled._constants(a) == compiled._constants(b)
    assert compiled._constants(a) != compiled._constants(dataclasses.replace(a, first_step=1))
