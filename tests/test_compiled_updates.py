"""Clipping, statistics and monitors inside of compiled updates: the same bits and charts as in eager mode."""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import clip_grad_norm_
from torch.torch_version import TorchVersion

import gradscale_ext as gs
from gradscale_ext import GradientMonitor, _context

pytestmark = pytest.mark.compiled
#: torch.compile cannot format an object, nor vmap a view of another dtype.
IS_EARLIER = TorchVersion(torch.__version__) < "2.13.0a0"
INDUCTOR = os.environ.get("GRADSCALE_TEST_BACKEND", "inductor")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    _context.say_once.cache_clear()


def numbers(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(*others):
    """Parameters with gradients, one without, one that shares the gradient of another, and others."""
    weight, bias, matrix, twin = (
        nn.Parameter(numbers(shape, seed)) for seed, shape in enumerate([(4, 3), (3,), (2, 5), (2, 5)])
    )
    for seed, parameter in enumerate((weight, bias, matrix)):
        parameter.grad = numbers(parameter.shape, 10 + seed)
    twin.grad = matrix.grad
    return [weight, bias, nn.Parameter(numbers((2,), 9)), matrix, twin, *others]


def with_gradient(weight, gradient):
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    return parameter


def assert_same_bits(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def assert_same_clipping(compiled, eager, clipped, expected):
    """Compare the statistics, and the gradients of the parameters."""
    for field in ("_values", "_counts", "_clipping"):
        assert_same_bits(getattr(compiled, field), getattr(eager, field))
    assert (compiled.names, compiled.is_gradient, compiled.norm_type) == (
        eager.names,
        eager.is_gradient,
        eager.norm_type,
    )
    for ours, theirs in zip(clipped, expected, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_same_bits(ours.grad, theirs.grad)


# ---- Clipping --------------------------------------------------------------------------------------------------------

LIMITS = [
    {"max_norm": 0.5},
    {"max_norm": 1e9},
    {"max_norm": 0.5, "norm_type": 1},
    {"max_norm": 0.5, "norm_type": "inf"},
    {"adaptive": 0.1},
    {"adaptive": 0.1, "eps": 3.0},
    {"adaptive": 0.1, "unit": "tensor"},
]


@pytest.mark.parametrize(("bad", "backend"), [([None], INDUCTOR), ([math.nan, math.inf], "aot_eager")])
def test_the_bits_of_eager_mode(bad, backend):
    """One graph has all clippings, with gradients of several dtypes and layouts of memory."""
    options = [{**limit, "nonfinite": nonfinite} for limit in LIMITS for nonfinite in ("propagate", "skip")]

    def clip_all(given):
        return [gs.clip_gradients_(own, **option) for own, option in zip(given, options, strict=True)]

    def make(bad):
        others = [
            with_gradient(numbers((4, 3), 3, torch.bfloat16), numbers((4, 3), 4, torch.bfloat16)),
            with_gradient(numbers((4, 3), 5, torch.float64), numbers((3, 4), 6, torch.float64).t()),
            with_gradient(numbers((4, 3), 7), numbers((4, 6), 8)[:, ::2]),
            with_gradient(numbers((), 7), numbers((), 8)),
            with_gradient(numbers((0,), 7), numbers((0,), 8)),
        ]
        given = parameters(*others)
        if bad is not None:
            given[0].grad[1, 2] = bad
        return given

    compiled = torch.compile(clip_all, fullgraph=True, backend=backend)
    for one in bad:
        ours, theirs = ([make(one) for _ in options] for _ in range(2))
        for case in zip(compiled(ours), clip_all(theirs), ours, theirs, strict=True):
            assert_same_clipping(*case)


def test_complex_gradients():
    """Inductor computes their products in complex64, and eager mode in float64."""

    def clip(given):
        return gs.clip_gradients_(given, 0.5).norm, gs.clip_gradients_(given, adaptive=0.01).norm

    def random(shape, seed):
        return torch.complex(numbers(shape, seed), numbers(shape, seed + 1))

    ours, theirs = (
        parameters(*(with_gradient(random(shape, 1), random(shape, 3)) for shape in ((), (3,), (3, 4))))
        for _ in range(2)
    )
    torch.testing.assert_close(torch.compile(clip, fullgraph=True)(ours), clip(theirs), rtol=3e-7, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=3e-7, atol=0)


def test_no_parameters_and_no_gradients():
    frozen = [nn.Parameter(torch.ones(3))]
    clips = [lambda given: gs.clip_gradients_(given, 1.0), lambda given: gs.clip_gradients_(given, adaptive=0.1)]
    for clip, given in itertools.product(clips, ([], frozen)):
        statistics = torch.compile(clip, fullgraph=True, backend="aot_eager")(given)
        assert statistics.clipping.tolist() == [0, 1, 0]
        assert statistics.missing.tolist() == [True] * len(given)


def test_sparse_gradients_break_the_graph():
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2, 1])).sum().backward()
    total = torch.compile(lambda: float(gs.clip_gradients_(embedding, 0.1)), backend="aot_eager")()
    assert total == pytest.approx(math.sqrt(3 * (4 + 1)))
    assert embedding.weight.grad.to_dense().norm().item() == pytest.approx(0.1, rel=1e-4)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(seed=0):
    return numbers((8, 3), seed)


CLIPS = {
    "max_norm": lambda model: gs.clip_gradients_(model, 0.5),
    "adaptive": lambda model: gs.clip_gradients_(model, adaptive=0.01),
    "two parts": lambda model: (gs.clip_gradients_(model[2], 0.1), gs.clip_gradients_(model, 0.5)),
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.5),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.05),
    "nothing": lambda model: None,
}


def make_update(model, optimizer, clip):
    """A learner step as one function."""

    def update(x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        clip(model)
        optimizer.step()

    return update


def test_an_update_compiled_as_a_whole():
    def clip(model):
        return CLIPS["max_norm"](model), CLIPS["adaptive"](model)

    ends = []
    for compile in (lambda update: update, torch.compile):
        model = network()
        update = compile(make_update(model, torch.optim.SGD(model.parameters(), lr=0.1), clip))
        for seed in range(3):
            update(batch(seed))
        ends.append([parameter.detach() for parameter in model.parameters()])
    for ours, theirs in zip(*reversed(ends), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def forms():
    """Calls of a clipping in one graph, as they are made with `torch.nn.utils.clip_grad_norm_`."""
    model = network()
    given = list(model.parameters())
    yield "module", model, lambda clip: clip(model), ()
    yield "list", model, lambda clip: clip(given), ()
    yield "generator", model, lambda clip: clip(model.parameters()), ()
    yield "named_parameters", model, lambda clip: clip(model.named_parameters()), ()
    yield "argument", model, lambda clip, given: clip(given), (given,)


@pytest.mark.parametrize(("name", "model", "call", "arguments"), list(forms()), ids=[name for name, *_ in forms()])
@pytest.mark.parametrize("backward", ["outside", "inside"])
def test_one_graph_where_clip_grad_norm_has_one(name, model, call, arguments, backward, monkeypatch):
    """A backward pass within the graph needs an option of Dynamo. New gradients do not compile again."""
    graphs = CompileCounterWithBackend("aot_eager")
    if backward == "inside":
        monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
        model.zero_grad()

    def step(x, *arguments):
        if backward == "inside":
            model(x).square().sum().backward()
        return call(lambda given: gs.clip_gradients_(given, 0.5), *arguments)

    step = torch.compile(step, fullgraph=True, backend=graphs)
    for seed in range(3):
        expected = torch.autograd.grad(model(batch(seed)).square().sum(), model.parameters())
        norm = torch.cat([gradient.flatten() for gradient in expected]).double().norm()
        model.zero_grad()
        if backward == "outside":
            model(batch(seed)).square().sum().backward()
        statistics = step(batch(seed), *arguments)
        torch.testing.assert_close(statistics.total_norm, norm, rtol=1e-6, atol=0)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, (gradient * (0.5 / norm)).float(), rtol=1e-5, atol=1e-7)
    assert graphs.frame_count == 1


SCHEDULES = {
    "max_norm": lambda value: {"max_norm": value},
    "norm_type": lambda value: {"max_norm": 0.5, "norm_type": value},
    "adaptive": lambda value: {"adaptive": value},
    "adaptive and eps": lambda value: {"adaptive": value, "eps": value},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_that_change_make_at_most_two_graphs(schedule):
    graphs = CompileCounterWithBackend("aot_eager")
    options = SCHEDULES[schedule]
    clip = torch.compile(
        lambda given, value: gs.clip_gradients_(given, **options(value)), fullgraph=True, backend=graphs
    )
    for value in [0.1 * step + 0.05 for step in range(20)]:
        ours, theirs = parameters(), parameters()
        assert_same_clipping(clip(ours, value), gs.clip_gradients_(theirs, **options(value)), ours, theirs)
    assert graphs.frame_count <= 2


def test_a_limit_in_a_tensor_makes_one_graph():
    graphs = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(gs.clip_gradients_, fullgraph=True, backend=graphs)
    for value in (0.5, 1.0, 1e9):
        ours, theirs = parameters(), parameters()
        assert_same_clipping(clip(ours, torch.tensor(value)), gs.clip_gradients_(theirs, value), ours, theirs)
    assert graphs.frame_count == 1


def test_errors():
    given = parameters()
    given[1].grad[1] = math.nan
    before = given[0].grad.clone()
    clip = torch.compile(lambda: gs.clip_gradients_(given, 1.0, nonfinite="error"), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"NaN or inf in the gradients of 1 \(1 of 3 elements\)"):
        clip()
    assert torch.equal(given[0].grad, before)
    clip = torch.compile(lambda: gs.clip_gradients_(given, 1.0, nonfinite="error"), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="clip_gradients_: nonfinite='error' reads the norm on the"):
        clip()
    with pytest.raises(ValueError, match=r"clip_gradients_: max_norm must be at least 0, but it is -1.0"):
        torch.compile(lambda: gs.clip_gradients_(given, -1.0), backend="aot_eager")()
    with pytest.raises(TypeError, match=r"tensors\[0\] must be a floating or complex tensor, but it is torch.int64"):
        torch.compile(lambda x: gs.gradient_statistics([x]).norm, backend="aot_eager")(torch.ones(2).long())


# ---- Statistics ------------------------------------------------------------------------------------------------------

READINGS = {
    "float": float,
    "item": lambda statistics: statistics.item(),
    "str": str,
    "repr": repr,
    "format": lambda statistics: f"{statistics:.3f} {statistics}",
    "to_dict": lambda statistics: statistics.to_dict(),
    "comparisons": lambda statistics: (
        statistics > 1,
        statistics >= 1,
        statistics < torch.tensor(9.0),
        statistics <= 1,
    ),
    "fields": lambda statistics: (
        statistics.numel,
        statistics.norm,
        statistics.zeros,
        statistics.missing,
        statistics.bin_edges,
        statistics.total_norm,
    ),
}


@pytest.mark.parametrize("reading", [name for name in READINGS if name != "format" or not IS_EARLIER])
def test_results_are_read_in_compiled_code(reading):
    def read(given):
        before = READINGS[reading](gs.gradient_statistics(given, names=list("abcde")))
        return before, READINGS[reading](gs.clip_gradients_(given, 0.5))

    found, expected = torch.compile(read, backend="aot_eager")(parameters()), read(parameters())
    assert str(found) == str(expected)


def test_statistics_of_a_tensor_within_a_loss():
    """They are constants: no gradient flows through them."""

    def loss(x, weight):
        y = x @ weight
        statistics = gs.gradient_statistics([y, x], histogram=True)
        return (y * statistics.norm[0]).sum(), statistics.histogram

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        weight = numbers((3, 2), 0).requires_grad_()
        value, histogram = function(batch(), weight)
        value.backward()
        gradients.append((weight.grad, histogram))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_statistics_in_compiled_transforms():
    """Transforms run the reference, which must compile as well."""
    x = numbers((3, 5), 0)
    histogram = lambda row: gs.gradient_statistics([row], histogram=True).histogram
    mapped = torch.func.vmap(histogram)
    for function in (mapped,) if IS_EARLIER else (mapped, torch.compile(mapped, fullgraph=True)):
        assert_same_bits(function(x), torch.stack([histogram(row) for row in x]))
    penalty = lambda x: (gs.gradient_statistics([x]).norm * x.square().sum()).sum()
    gradient = torch.compile(torch.func.grad(penalty), fullgraph=True)(torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(gradient, torch.tensor([30.0, 40.0]))


def test_the_l2_loss_of_a_compiled_update():
    gradients = []
    for compile in (lambda update: update, torch.compile):
        model = network()

        @compile
        def update(model=model):
            loss = gs.l2_loss(model, 0.1)
            loss.backward()
            return loss.item(), float(gs.clip_gradients_(model, 0.5))

        gradients.append((*update(), *(parameter.grad for parameter in model.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0])


# ---- Monitors --------------------------------------------------------------------------------------------------------


def histories(clip, form, **options):
    """The charts of a monitor that is opened before the first update, and of one that is opened later."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = make_update(model, optimizer, CLIPS[clip])
    if form == "whole":
        update = torch.compile(update, backend="aot_eager")
    elif form == "parts":
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        compiled = torch.compile(CLIPS[clip], backend="aot_eager")
        update = make_update(torch.compile(model, backend="aot_eager"), optimizer, lambda _: compiled(model))
    charts = []
    for _ in range(2):
        with GradientMonitor(model, optimizer, every=2, **options) as monitor:
            for seed in range(3):
                update(batch(seed))
        update(batch(9))
        charts.append(monitor.history)
    return charts, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("form", ["whole", pytest.param("parts", marks=pytest.mark.slow)])
# "two parts" clips with max_norm too.
@pytest.mark.parametrize(
    "clip", [pytest.param("max_norm", marks=pytest.mark.slow), *[c for c in CLIPS if c != "max_norm"]]
)
def test_a_monitor_sees_compiled_updates(clip, form):
    (found, ours), (expected, theirs) = histories(clip, form), histories(clip, "eager")
    for charts, values in zip(found, expected, strict=True):
        assert charts.keys() == values.keys()
        assert ("clip_rate" in charts) == (clip != "nothing")
        for tag, points in values.items():
            assert charts[tag] == [(step, pytest.approx(value, rel=1e-4, abs=1e-7)) for step, value in points]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_a_monitor_charts_outputs_of_modules_that_are_compiled_later(form):
    (charts, _), (expected, _) = (histories("max_norm", form, activations=["0"])[0] for form in (form, "eager"))
    tag = "activation_gradient_norm/0/0"
    assert charts[tag] == [(step, pytest.approx(value, rel=1e-4)) for step, value in expected[tag]]


def test_a_monitor_says_once_that_it_has_no_charts_of_modules_that_were_compiled_before():
    """PyTorch ignores hooks that are added after a module has been compiled."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = torch.compile(make_update(model, optimizer, CLIPS["nothing"]), backend="aot_eager")
    update(batch())
    with GradientMonitor(model, optimizer, every=1, activations=["0"]) as monitor:
        with pytest.warns(UserWarning, match="GradientMonitor: no call of '0' has been seen") as caught:
            update(batch(0))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            update(batch(1))
            update(batch(2))
    assert len([warning for warning in caught if "GradientMonitor" in str(warning.message)]) == 1
    assert len(monitor.history["gradient_norm_total"]) == 3
    assert "activation_gradient_norm/0/0" not in monitor.history


@pytest.mark.parametrize("clip", ["max_norm", "adaptive", "clip_grad_norm_", "clip_grad_value_"])
def test_a_monitor_says_once_that_it_does_not_see_a_clipping_in_one_graph(clip):
    model = network()
    model(batch()).square().sum().backward()
    expected = network()
    expected(batch()).square().sum().backward()
    CLIPS[clip](expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = torch.compile(lambda: (CLIPS[clip](model), None)[1], fullgraph=True, backend="aot_eager")
    with GradientMonitor(model, optimizer, every=1) as monitor:
        with pytest.warns(UserWarning, match="is compiled with fullgraph=True, where no monitor sees it") as caught:
            compiled()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            torch._dynamo.reset()
            compiled()
        optimizer.step()
    assert len([warning for warning in caught if "GradientMonitor" in str(warning.message)]) == 1
    assert "gradient_norm_total" in monitor.history
    assert "clip_rate" not in monitor.history
    if clip == "max_norm":
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip", ["max_norm", "clip_grad_norm_"])
def test_a_monitor_of_other_parameters_does_not_break_the_graph(clip):
    model, other = network(), network(1)
    model(batch()).square().sum().backward()
    with GradientMonitor(other, torch.optim.SGD(other.parameters(), lr=0.1)), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(lambda: (CLIPS[clip](model), None)[1], fullgraph=True, backend="aot_eager")()
    total = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert total.item() == pytest.approx(0.5, rel=1e-5)


def test_a_monitor_sees_the_scaler_in_a_compiled_update():
    charts = []
    for compile in (lambda update: update, functools.partial(torch.compile, backend="aot_eager")):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)

        def update(factor, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            scaler.scale((factor * model(batch())).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        update = compile(update)
        with GradientMonitor(model, optimizer, every=1) as monitor:
            for factor in (1.0, 1e38, 1.0):
                update(torch.tensor(factor))
        charts.append(monitor.history)
    assert charts[0].keys() == charts[1].keys()
    assert charts[1]["skipped_steps"] == charts[0]["skipped_steps"] == [(1, 1.0)]
    for tag, values in charts[0].items():
        assert charts[1][tag] == [(step, pytest.approx(value, rel=1e-4, nan_ok=True)) for step, value in values]
