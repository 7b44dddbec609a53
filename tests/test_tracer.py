"""`GradientTracer` does not change what it traces, supports PyTorch's contexts, and keeps no tensor alive.

A cut is a call through which no gradient flows back.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradscale_ext as gs
from gradscale_ext.diagnosis.diagnosis import diagnose_gradients
from gradscale_ext.diagnosis.tracer import GradientTracer


def attention():
    layer = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    x = torch.randn(2, 5, 8)
    return layer, lambda: layer(x, x, x)[0]


def attention_in_evaluation():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    return layer, lambda: layer(x, x, x)[0]


def lstm():
    layer = nn.LSTM(4, 8, num_layers=2, dropout=0.2)
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 4), torch.randn(3, 4)])
    return layer, lambda: layer(packed)[0].data


def checkpointed(use_reentrant):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(3, 4, requires_grad=True)
    return layer, lambda: checkpoint(layer, x, use_reentrant=use_reentrant)


def autocast():
    layer = nn.Linear(4, 4)

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            return layer(torch.randn(3, 4)).float()

    return layer, call


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def function():
    layer = nn.Linear(4, 4)
    return layer, lambda: Squared.apply(layer(torch.ones(1, 4)))


def in_place():
    layer = nn.Linear(4, 4)

    def call():
        h = layer(torch.randn(3, 4))
        h[:, 0] = 0
        h[:, 1:].mul_(2).relu_()
        out = torch.empty(4)
        torch.sum(h.detach(), 0, out=out)
        return h + out

    return layer, call


def transforms():
    layer = nn.Linear(4, 1)
    parameters = dict(layer.named_parameters())

    def one(p, x):
        return torch.func.functional_call(layer, p, (x,)).squeeze(-1)

    def call():
        x = torch.randn(3, 4)
        per_sample = torch.func.vmap(torch.func.grad(one), (None, 0))(parameters, x)
        return torch.func.vmap(layer)(x) + per_sample["weight"].sum()

    return layer, call


def loader():
    layer = nn.Linear(4, 4)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 4)), 3, shuffle=True)
    return layer, lambda: torch.cat([layer(x) for (x,) in batches])


def ours():
    layer, loss_fn = nn.Linear(4, 2), gs.MultiStepLoss(policy=gs.SoftCrossEntropy())
    targets = {"policy": torch.full((3, 1, 2), 0.5)}
    return layer, lambda: loss_fn({"policy": [gs.scale_gradient(layer(torch.ones(3, 4)), 0.5)]}, targets).loss


def parametrized():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return layer, lambda: layer(torch.randn(3, 4))


CASES = {
    "attention": attention,
    "attention_in_evaluation": attention_in_evaluation,
    "lstm": lstm,
    "reentrant": lambda: checkpointed(True),
    "not_reentrant": lambda: checkpointed(False),
    "autocast": autocast,
    "function": function,
    "in_place": in_place,
    "transforms": transforms,
    "loader": loader,
    "ours": ours,
    "parametrized": parametrized,
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_tracing_changes_nothing(make):
    outcomes = []
    for tracer in (None, GradientTracer()):
        torch.manual_seed(0)
        layer, call = make()
        if tracer is None:
            result = call()
        else:
            with tracer:
                result = call()
            assert diagnose_gradients(result.sum(), layer, tracer=tracer).ok
        result.sum().backward()
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        outcomes.append((result.detach(), result.requires_grad, gradients, torch.get_rng_state()))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=0)


def test_no_activation_is_kept_alive():
    layer = nn.Linear(4, 4)
    with GradientTracer() as tracer:
        activation = layer(torch.ones(2, 4)).relu()
        cut = activation.detach()
        loss = activation.mul(cut).sum()
    alive = [weakref.ref(activation), weakref.ref(cut), weakref.ref(loss)]
    del activation, cut, loss
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    assert tracer.used(layer.weight)


def test_a_tracer_can_be_reused_but_not_nested():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    with GradientTracer() as tracer:
        first(torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="already active"), tracer:
            pass
        first(torch.ones(1, 2))
    with tracer:
        second(torch.ones(1, 2))
    assert (tracer.used(first.weight), tracer.used(second.weight)) == (False, True)


def test_an_exception_ends_tracing():
    with pytest.raises(ZeroDivisionError), GradientTracer() as tracer:
        torch.ones(1) / (1 // 0)
    with tracer:
        torch.ones(1).add(1)
    calls = tracer.calls
    torch.ones(1).add(1)
    assert tracer.calls == calls == 2


def test_grad_mode_is_unaffected():
    modes = []
    with GradientTracer():
        with torch.no_grad():
            modes.append(torch.is_grad_enabled())
            with torch.enable_grad():
                modes.append(torch.is_grad_enabled())
            modes.append(torch.is_grad_enabled())
        modes.append(torch.is_grad_enabled())
    assert modes == [False, True, False, True]


def test_compiled_modules_are_traced():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].register_forward_hook(lambda module, inputs, output: output.detach())
    compiled = torch.compile(model, backend="eager")
    with GradientTracer() as tracer:
        loss = compiled(torch.ones(1, 2)).sum()
    codes = {finding.code for finding in diagnose_gradients(loss, compiled, tracer=tracer).findings}
    assert codes == {"detached"}


def test_tensor_subclasses_are_supported():
    class Tagged(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs)

    counts = []
    x, w = torch.ones(3).as_subclass(Tagged), torch.ones(3, requires_grad=True)
    for tracer in (None, GradientTracer()):
        Tagged.calls = 0
        if tracer is None:
            result = (x * w).sum()
        else:
            with tracer:
                result = (x * w).sum()
        counts.append(Tagged.calls)
        assert type(result) is Tagged
    assert counts[0] == counts[1] > 0


def test_a_deep_graph_is_freed_without_recursion():
    x = nn.Parameter(torch.ones(1))
    with GradientTracer() as tracer:
        y = x * 1
        for _ in range(20_000):
            y = y + 1
    del y
    assert tracer.calls == 20_001


def test_writing_to_a_parameter_does_not_use_it():
    layer = nn.Linear(2, 2)
    with GradientTracer() as tracer:
        nn.init.normal_(layer.weight)
        with torch.no_grad():
            layer.bias.copy_(torch.ones(2) @ layer.weight)
        layer.zero_grad()
    assert (tracer.used(layer.weight), tracer.used(layer.bias)) == (True, False)


def test_setting_data_is_a_cut_and_setting_a_gradient_is_not():
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    with GradientTracer() as tracer:
        target.weight.data = source.weight * 2
        target.bias.grad = source.bias * 2
        loss = target(torch.ones(1, 2)).sum()
    assert [(cut.kind, cut.call) for cut in tracer.cuts_between(source.weight, loss)] == [("detached", "data=")]
    assert tracer.cuts_between(source.bias, loss) == []


def test_sparse_tensors_are_supported():
    weight = nn.Parameter(torch.ones(2, 2))
    with GradientTracer() as tracer:
        matrix = torch.eye(2).to_sparse()
        loss = torch.sparse.mm(matrix, weight).sum() + matrix.detach().sum()
        weight.detach().to_sparse()
    assert tracer.cuts_between(weight, loss) == []
    assert tracer.used(weight)


def test_values_that_leave_pytorch():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with GradientTracer() as tracer:
        (p * 2).sum().item()
        array = (q * 2).detach().numpy()
        literal = (p + 1.0) * 2
        outside = torch.from_numpy(array * 2) + 1
    assert tracer.escapes(p, literal) == tracer.escapes(q, literal) == []
    (item,) = tracer.escapes(p, outside)
    (numpy,) = tracer.escapes(q, outside)
    assert (item.call, numpy.call) == ("item", "numpy")
    assert str(item.location).rpartition(":")[0].endswith("test_tracer.py")


def test_reading_only_the_shape_of_an_operand_is_no_dependency():
    p = nn.Parameter(torch.ones(3))
    x = torch.ones(3)
    with GradientTracer() as tracer:
        h = p * x
        used = tracer._used
        tracer._used = 0
        given = [x.type_as(p), x.to(p), x.expand_as(p), x.view_as(p), torch.broadcast_tensors(x, p)[0]]
        given += [p.new([1.0, 2.0]), p.new(3, 4).fill_(0.0)]
        assert not tracer.used(p)
        steps = [(h > 0).type_as(h), (h > 0).to(h)]
        copied = h.new_tensor(h.tolist())
    assert used
    assert all(tracer.cuts_between(p, tensor) == [] for tensor in given)
    for step in steps:
        assert [(cut.kind, cut.call) for cut in tracer.cuts_between(p, step)] == [("integer_dtype", "gt")]
    assert [cut.call for cut in tracer.escapes(p, copied)] == ["tolist"]


def test_functions_of_this_package_are_traced():
    """The tracer finds a cut before the function, whose result then has no graph."""
    layer, support = torch.nn.Linear(4, 11), gs.Support(-5, 5, 11)
    module = gs.MultiStepLoss(value=gs.TwoHot(support))
    x, target = torch.randn(3, 4), torch.zeros(3)
    calls = {
        "loss": lambda h: module({"value": [h]}, {"value": [target]}).loss,
        "decode": lambda h: support.decode(h).mean(),
        "two_hot": lambda h: support.two_hot(h[:, 0]).square().mean(),
        "l2_loss": lambda h: gs.l2_loss([h]),
    }
    for name, function in calls.items():
        with gs.GradientTracer() as tracer:
            loss = function(layer(x).detach())
        codes = {finding.code for finding in gs.diagnose_gradients(loss, layer, tracer=tracer).findings}
        assert codes == {"detached"}, name


def test_relevant_and_irrelevant_cuts():
    """A cut is irrelevant if its result is combined with the value that was cut off, or only becomes a condition."""
    w = nn.Parameter(torch.ones(3))
    scale, data = torch.full((), 0.5), torch.ones(3)
    with GradientTracer() as tracer:
        x = w * data
        irrelevant = {
            "straight through": x + (x.round() - x).detach(),
            "round first": x.round().detach() - x.detach() + x,
            "scaled": x * 0.3 + x.detach() * 0.7,
            "normalised": x / x.pow(2).mean().sqrt().detach(),
            "score": torch.exp(x - x.detach()),
            "weight": w + ((w / scale).round() * scale - w).detach(),
            "index": torch.where(x.detach() > 0, x, 0.0),
        }
        relevant = {
            "state": torch.tanh(x).detach() @ w,
            "two calls later": x + torch.tanh(torch.tanh(x).detach() * w),
            "state and value": torch.cat([x, x.detach()]),
            "target": torch.nn.functional.mse_loss(x, (w * data * 2).sin().cos().exp().detach()),
            "written": data.clone().copy_(x.detach()) * w.sin(),
        }
        with torch.no_grad():
            y = x * 2  # y has no gradient, but w has one.
        relevant["no_grad"] = y @ w
    for name, result in irrelevant.items():
        assert tracer.relevant_cuts(result) == [], name
        assert tracer.cuts(result), name
    for name, result in relevant.items():
        assert len(tracer.relevant_cuts(result)) == 1, name
    assert tracer.relevant_cuts(relevant["no_grad"])[0].kind == "no_grad"
    assert tracer.relevant_cuts(x) == tracer.cuts(x) == tracer.relevant_cuts(w) == []


def test_a_failed_pass_leaves_no_cut():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    tracer = GradientTracer()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), tracer:
        layer(layer(x).detach().T)
    with tracer:
        result = layer(x)
    assert tracer.relevant_cuts(result) == []
