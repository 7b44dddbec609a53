"""Charts of gradients: the numbers that are written, their steps, and the absence of side effects."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import itertools
import math
import pickle
import runpy
import subprocess
import sys
import threading
import types
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs
from gradscale_ext import GradientMonitor
from gradscale_ext.monitor import _kept, monitor, plot
from gradscale_ext.statistics import listeners

EXAMPLES = Path(__file__).parent.parent / "examples"


class Writer:
    """Records its calls."""

    def __init__(self):
        self.scalars, self.flushed = [], 0

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def flush(self):
        self.flushed += 1

    def steps(self, tag):
        return [step for written, _, step in self.scalars if written == tag]


class HistogramWriter(Writer):
    def __init__(self):
        super().__init__()
        self.histograms = {}

    def add_histogram_raw(self, tag, **fields):
        self.histograms[tag] = fields


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


def weights(count):
    """Layers of one weight each."""
    return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(count)))


def batch(seed=0):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, steps=1, max_norm=None, seed=0):
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(seed + step)).square().sum().backward()
        if max_norm is not None:
            gs.clip_gradients_(model, max_norm)
        optimizer.step()


def set_gradients(model, *gradients):
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def norms(model):
    return {name: parameter.grad.double().norm().item() for name, parameter in model.named_parameters()}


def value(watching, tag):
    """The only value of a tag."""
    [(_, found)] = watching.history[tag]
    return found


def value_at(watching, tag, step):
    return dict(watching.history[tag])[step]


def with_sgd(lr=0.1, **options):
    """A model and its optimizer."""
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=lr, **options)


@contextlib.contextmanager
def watch(model=None, lr=0.1, fused=None, **options):
    """A model, its SGD optimizer, and an open monitor."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, fused=fused)
    with GradientMonitor(model, optimizer, **options) as watching:
        yield model, optimizer, watching


def approx(expected):
    return pytest.approx(expected, rel=1e-6)


# ---- Values of the charts --------------------------------------------------------------------------------------------


def test_numbers_by_hand():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        model.bias.copy_(torch.tensor([0.0, 2.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_gradients(model, torch.tensor([[1.0, 2.0], [0.0, 2.0]]), torch.tensor([0.0, 4.0]))
    with GradientMonitor(model, optimizer) as watching:
        optimizer.step()
    assert watching.history == {
        "gradient_norm/weight": [(0, 3.0)],
        "gradient_norm/bias": [(0, 4.0)],
        "gradient_norm_total": [(0, 5.0)],
        "update_to_weight_ratio/weight": [(0, approx(0.3 / 5))],
        "update_to_weight_ratio/bias": [(0, approx(0.4 / 2))],
    }


def test_modules_include_their_submodules():
    with watch() as (model, optimizer, watching):
        train(model, optimizer)
    expected = norms(model)
    found = {tag.removeprefix("module_gradient_norm/"): v for tag, [(_, v)] in watching.history.items()}
    for module in ("0", "2", "2.0", "3"):
        inside = [norm for name, norm in expected.items() if name.startswith(module + ".")]
        assert found[module] == approx(math.hypot(*inside))
    assert value(watching, "gradient_norm_total") == approx(math.hypot(*expected.values()))
    assert not {"1", "2.1", ""} & set(found)


def clip_by_pytorch(model, limit):
    clip_grad_norm_([*model.parameters()] if isinstance(model, nn.Module) else model, limit)


def clip_by_value(model, limit):
    nn.utils.clip_grad_value_([*model.parameters()] if isinstance(model, nn.Module) else model, limit / 10)


CLIPS = [gs.clip_gradients_, clip_by_pytorch, clip_by_value]


@pytest.mark.parametrize("fold", [256, 2])
def test_clip_rate(monkeypatch, fold):
    """The rate is a share of all steps, including those without a call that clips."""
    monkeypatch.setattr(_kept, "FOLD", fold)
    with watch(nn.Linear(1, 1, bias=False), lr=0.0, every=5) as (model, optimizer, watching):
        for norm in (1, 3, 1, None, 1, 3, 1, 1, 1, 1, 3):
            model.weight.grad = torch.full((1, 1), float(norm or 3))
            if norm is not None:
                gs.clip_gradients_(model, 2.0)
            optimizer.step()
    assert watching.history["clip_rate"] == [(0, 0.0), (5, approx(2 / 5)), (10, approx(1 / 5))]


PARTS = {
    "all": lambda model: [model],
    "all, all": lambda model: [model, model],
    "all, part": lambda model: [model, model[2]],
    "part, all": lambda model: [model[2], model],
    "parts": lambda model: [model[0], model[2], model[3]],
    "parts that overlap": lambda model: [model[:3], model[2:]],
    "many": lambda model: [model[0], model, model[3], model, model[2]],
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("parts", PARTS)
def test_a_step_that_is_clipped_several_times(parts, clip, every):
    """Norms are measured before each parameter's first clipping; no parameter, and no step, counts twice.

    With `every=1`, the gradients are views of one tensor, as in DDP's buckets.
    """
    with watch(lr=0.0, every=every) as (model, optimizer, watching):
        chosen, others = PARTS[parts](model), network(1)  # the optimizer does not hold the parameters of `others`
        train_gradients(others, 0)
        train_gradients(model, 0)
        if every == 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            pieces = flat.split([p.numel() for p in model.parameters()])
            set_gradients(model, *(g.view_as(p) for g, p in zip(pieces, model.parameters(), strict=True)))
        before = norms(model)
        small, large = [1e6] * len(chosen), [1.0] + [5.0] * (len(chosen) - 1)
        for limits in (large, small, small, [*small[1:], 1e-3], small):
            for part, limit in zip(chosen, limits, strict=True):
                clip(part, limit)
            clip(others, 1e-3)
            optimizer.step()
    for name, norm in before.items():
        assert value_at(watching, f"gradient_norm_before_clipping/{name}", 0) == approx(norm)
    inside = [norm for name, norm in before.items() if name.startswith("2.")]
    assert value_at(watching, "module_gradient_norm_before_clipping/2", 0) == approx(math.hypot(*inside))
    assert value_at(watching, "gradient_norm_total_before_clipping", 0) == approx(math.hypot(*before.values()))
    assert value_at(watching, "gradient_norm_total", 4) == approx(math.hypot(*norms(model).values()))
    rates = [(0, 1.0), (1, 0.0), (2, 0.0), (3, 1.0), (4, 0.0)] if every == 1 else [(0, 1.0), (2, 0.0), (4, 0.5)]
    assert watching.history["clip_rate"] == rates


def train_gradients(model, seed, set_to_none=True):
    model.zero_grad(set_to_none)
    model(batch(seed)).square().sum().backward()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf], ids=str)
def test_norms_before_clipping_have_the_norm_type_of_the_clipping(p, overlaps):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    elements = [3.0, -4.0, 5.0, -2.0]
    set_gradients(model, *(torch.full_like(q, g) for q, g in zip(model.parameters(), elements, strict=True)))
    with watch(model) as (_, optimizer, watching):
        for part in [model[1]] * overlaps + [model]:
            gs.clip_gradients_(part, 1.0, norm_type=p)
        optimizer.step()
    norm = lambda *elements: approx(torch.tensor(elements).norm(p).item())
    assert value(watching, "gradient_norm_total_before_clipping") == norm(*elements)
    assert value(watching, "module_gradient_norm_before_clipping/1") == norm(5.0, -2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_of_a_step_that_is_clipped_twice(bad):
    """Elements that are NaN or inf before the first clipping count once, although clipping may make others NaN."""
    with watch(lr=0.0) as (model, optimizer, watching):
        train_gradients(model, 0)
        model[0].bias.grad[1] = bad
        clip_by_pytorch(model[3], 1e-3)
        clip_by_pytorch(model, 1e-3)
        clip_by_pytorch(model, 1e-3)
        optimizer.step()
    assert value(watching, "nonfinite_gradients") == 1.0
    total = value(watching, "gradient_norm_total_before_clipping")
    assert math.isnan(total) if math.isnan(bad) else total == math.inf


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_clippings_of_an_abandoned_step_do_not_count(set_to_none, clip):
    """The next gradients, of all parameters or of some, are new tensors or are written into the old tensors."""
    with watch(lr=0.0, every=1) as (model, optimizer, watching):
        train_gradients(model, 1)
        clip(model, 1e-3)
        train_gradients(model, 0, set_to_none)
        before = norms(model)
        clip(model, 1e6)
        optimizer.step()
        train_gradients(model, 1, set_to_none)
        clip(model, 1e-3)
        kept = norms(model)
        fresh = torch.autograd.grad(model(batch(2)).square().sum(), model[3].parameters())
        for p, gradient in zip(model[3].parameters(), fresh, strict=True):
            if set_to_none:
                p.grad = gradient
            else:
                p.grad.copy_(gradient)
        renewed = norms(model[3])
        clip(model[3], 1e6)
        optimizer.step()
    for name, norm in before.items():
        assert value_at(watching, f"gradient_norm_before_clipping/{name}", 0) == approx(norm)
    assert watching.history["clip_rate"] == [(0, 0.0), (1, 1.0)]
    for name, norm in renewed.items():
        assert value_at(watching, f"gradient_norm_before_clipping/3.{name}", 1) == approx(norm)
    assert value_at(watching, "gradient_norm_before_clipping/0.weight", 1) > 10 * kept["0.weight"]


def test_a_parameter_that_gets_its_gradient_between_two_clippings():
    with watch(nn.Linear(2, 1), lr=0.0) as (model, optimizer, watching):
        model.weight.grad = torch.tensor([[3.0, 4.0]])
        gs.clip_gradients_(model, 1.0)
        model.bias.grad = torch.tensor([12.0])
        gs.clip_gradients_(model, 1.0)
        optimizer.step()
    assert value(watching, "gradient_norm_before_clipping/weight") == approx(5.0)
    assert value(watching, "gradient_norm_before_clipping/bias") == approx(12.0)
    assert value(watching, "gradient_norm_total_before_clipping") == approx(13.0)


CLIPS_OF_PYTORCH = {
    "torch.nn.utils": nn.utils.clip_grad_norm_,
    "an import of the function": lambda parameters, limit, p: clip_grad_norm_(iter(parameters), limit, norm_type=p),
    "its two parts": lambda parameters, limit, p: nn.utils.clip_grads_with_norm_(
        parameters, limit, nn.utils.get_total_norm([q.grad for q in parameters], p)
    ),
    **{f"value, {foreach}": lambda parameters, limit, _, foreach=foreach: nn.utils.clip_grad_value_(
        iter(parameters), limit / 5, foreach
    ) for foreach in (None, False, True)},
}  # fmt: skip


@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=str)
@pytest.mark.parametrize("way", CLIPS_OF_PYTORCH)
def test_clipping_by_pytorch(way, norm_type):
    clip, unwatched, before = CLIPS_OF_PYTORCH[way], network(), []
    norm_type = 2.0 if "value" in way else norm_type
    with watch(lr=0.0, every=2) as (model, optimizer, watching):
        for step in range(5):
            for other in (model, unwatched):
                train_gradients(other, step)
            before.append([parameter.grad.flatten().clone() for parameter in model.parameters()])
            for other in (model, unwatched):
                clip(list(other.parameters()), 1e6 if step in (1, 4) else 0.5, norm_type)
            for ours, theirs in zip(model.parameters(), unwatched.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
            optimizer.step()
    assert watching.history["clip_rate"] == [(0, 1.0), (2, 0.5), (4, 0.5)]
    totals = [(step, approx(torch.cat(before[step]).norm(norm_type).item())) for step in (0, 2, 4)]
    assert watching.history["gradient_norm_total_before_clipping"] == totals
    for (name, _), gradient in zip(model.named_parameters(), before[0], strict=True):
        assert value_at(watching, f"gradient_norm_before_clipping/{name}", 0) == approx(gradient.norm().item())


def test_repeated_parameters_count_once():
    with watch(nn.Linear(1, 1, bias=False), lr=0.0) as (model, optimizer, watching):
        model.weight.grad = torch.full((1, 1), 3.0)
        clip_by_pytorch([model.weight, model.weight], 1.0)
        optimizer.step()
    assert value(watching, "gradient_norm_total_before_clipping") == 3.0


def test_clip_rate_of_clipping_by_value_counts_inf_but_not_nan():
    with watch(nn.Linear(2, 1, bias=False), lr=0.0, every=1) as (model, optimizer, watching):
        for gradient in (math.inf, math.nan, 1.0):
            model.weight.grad = torch.tensor([[gradient, 0.5]])
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    assert watching.history["clip_rate"] == [(0, 1.0), (1, 0.0), (2, 0.0)]


@pytest.mark.parametrize("by", ["norm", "value"])
def test_a_failed_clipping_does_not_count(monkeypatch, by):
    def fails(*_):
        raise RuntimeError("out of memory")

    model, optimizer = with_sgd(lr=0.0)
    model(batch()).square().sum().backward()
    parts = ("_foreach_mul_", "_foreach_clamp_min_")
    with GradientMonitor(model, optimizer, every=1) as watching:
        clip = getattr(nn.utils, f"clip_grad_{by}_")
        with monkeypatch.context() as patch:
            for part in parts:
                patch.setattr(torch, part, fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                clip(model.parameters(), 1e-3, foreach=True)
        optimizer.step()
        clip(model.parameters(), 1e-3)
        optimizer.step()
    assert watching.history["clip_rate"] == [(1, 1.0)]
    assert steps_of(watching, "gradient_norm_total_before_clipping") == [1]


@pytest.mark.parametrize("by", ["norm", "value"])
def test_all_open_monitors_record_a_clipping(by):
    model, optimizer = with_sgd(lr=0.0)
    leaves = GradientMonitor(model, optimizer, every=1)
    with GradientMonitor(model, optimizer, every=1) as stays:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            getattr(nn.utils, f"clip_grad_{by}_")(model.parameters(), 1e-3)
            if step == 1:
                leaves.close()
            optimizer.step()
    assert steps_of(leaves, "gradient_norm_total_before_clipping") == [0]
    assert steps_of(stays, "gradient_norm_total_before_clipping") == [0, 1, 2]
    assert stays.history["clip_rate"] == [(0, 1.0), (1, 1.0), (2, 1.0)]


def test_closed_monitors_restore_clipping_by_pytorch():
    gc.collect()
    GradientMonitor(model := network(), torch.optim.SGD(model.parameters(), lr=0.1)).close()
    places = [(nn.utils.clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")]
    places += [(nn.utils.clip_grad, "clip_grad_value_"), (nn.utils, "clip_grad_value_")]
    found = [getattr(*place) for place in places]
    with GradientMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert all(getattr(*place) is not function for place, function in zip(places, found, strict=True))
    assert found == [getattr(*place) for place in places]
    assert found[0] is found[1]
    assert found[2] is found[3]


def test_clipping_by_pytorch_in_compiled_code():
    model = network()
    model(batch()).square().sum().backward()
    parameters = list(model.parameters())

    def clip():
        return nn.utils.clip_grad_norm_(parameters, 0.5)

    torch._dynamo.reset()
    with GradientMonitor(model, torch.optim.SGD(parameters, lr=0.1)):
        torch.compile(clip, fullgraph=True, backend="eager")()
    assert math.hypot(*norms(model).values()) == pytest.approx(0.5, rel=1e-5)


def test_nonfinite_gradients():
    with watch(nn.Linear(3, 1), every=1) as (model, optimizer, watching):
        for clip in (False, True):
            set_gradients(model, torch.tensor([[math.nan, 3.0, -math.inf]]), torch.tensor([4.0]))
            if clip:
                gs.clip_gradients_(model, 1.0, nonfinite="skip")
            optimizer.step()
        set_gradients(model, torch.ones(1, 3), torch.ones(1))
        optimizer.step()
    assert watching.history["nonfinite_gradients"] == [(0, 2.0), (1, 2.0)]
    assert watching.history["gradient_norm/weight"][:2] == [(0, 3.0), (1, 0.0)]
    assert math.isnan(watching.history["gradient_norm_total"][0][1])


def test_histograms():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_gradients(model, torch.tensor([[1.0, -1.5, 4.0, 0.0]]), torch.tensor([0.0]))
    writer = HistogramWriter()
    with GradientMonitor(model, optimizer, writer=writer):
        gs.clip_gradients_(model, 1e6)
        optimizer.step()
    expected = {
        "min": 0.0,
        "max": 3.0,
        "num": 3,
        "sum": 0.5 * 2 + 2.5,
        "sum_squares": 0.25 * 2 + 6.25,
        "bucket_limits": [1.0, 2.0, 3.0],
        "bucket_counts": [2, 0, 1],
        "global_step": 0,
    }
    assert writer.histograms == {
        "gradient_histogram/weight": expected,
        "gradient_histogram_before_clipping/weight": expected,
    }


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: gs.clip_gradients_(model, 1.0),
        lambda model: gs.clip_gradients_(model, adaptive=0.1, unit="tensor"),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    ],
    ids=["max_norm", "adaptive", "clip_grad_norm_", "clip_grad_value_"],
)
def test_histograms_before_clipping(clip):
    """Only the clipping of a step that is recorded computes one."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = HistogramWriter()
    with GradientMonitor(model, optimizer, writer=writer, every=2) as watching:
        for step in range(2):
            model.weight.grad = torch.tensor([[64.0, 32.0]])
            clip(model)
            found = watching._clippings[0].statistics
            assert found is None or (found.histogram is not None) == (step == 0)
            optimizer.step()
    before = writer.histograms["gradient_histogram_before_clipping/weight"]
    assert (before["bucket_limits"], before["bucket_counts"]) == ([6.0, 7.0], [1, 1])
    assert writer.histograms["gradient_histogram/weight"]["max"] <= 1


def test_histograms_before_the_clipping_of_parts():
    """They are of the part that this process has. The other ranks need no monitor, so nothing is exchanged for it."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = HistogramWriter()
    is_own = not torch.distributed.is_initialized()  # another test of this process may keep a group
    if is_own:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with GradientMonitor(model, optimizer, writer=writer):
            model.weight.grad = torch.tensor([[64.0, 32.0]])
            with CommDebugMode() as seen:
                gs.clip_gradients_(model, 1.0, process_group=torch.distributed.group.WORLD)
            optimizer.step()
    finally:
        if is_own:
            torch.distributed.destroy_process_group()
    assert list(seen.get_comm_counts().values()) == [1]
    assert writer.histograms["gradient_histogram_before_clipping/weight"]["bucket_counts"] == [1, 1]


def test_outer_bins_of_a_histogram_have_finite_edges():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.weight.grad = torch.tensor([[1e-38, 1e38]])
    writer = HistogramWriter()
    with GradientMonitor(model, optimizer, writer=writer):
        optimizer.step()
    fields = writer.histograms["gradient_histogram/weight"]
    assert fields["num"] == 2
    assert len(fields["bucket_limits"]) == 64
    assert all(math.isfinite(fields[name]) for name in ("min", "max", "sum", "sum_squares"))
    assert all(map(math.isfinite, fields["bucket_limits"]))


def test_weights_of_zero_have_no_ratio():
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientMonitor(model, optimizer, every=1) as watching:
        for _ in range(2):
            set_gradients(model, torch.ones(2, 2), torch.ones(2))
            optimizer.step()
    assert watching.history["update_to_weight_ratio/bias"] == [(1, approx(1.0))]


def test_without_histograms_and_updates():
    writer = HistogramWriter()
    with watch(writer=writer, histograms=False, updates=False) as (model, optimizer, watching):
        train(model, optimizer)
    assert writer.histograms == {}
    assert not [tag for tag in watching.history if tag.startswith("update")]


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_updates_of_all_dtypes_and_layouts(dtype, every):
    """Parameters are copied before a step. The memory of the copies is kept only if `every` is below 10."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.large = nn.Parameter(torch.randn(300, 512, generator=generator).to(dtype))
    model.strided = nn.Parameter(torch.randn(7, 5, generator=generator).to(dtype).t())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with GradientMonitor(model, optimizer, every=every) as watching:
        optimizer.step()
        assert bool(watching._weights._copies) == (every == 1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for name, parameter in model.named_parameters():
        update = (parameter.detach().to(wide) - before[name].to(wide)).norm()
        expected = (update / before[name].to(wide).norm()).item()
        rounding = 1e-5 if dtype == torch.complex64 else 1e-6  # the difference is rounded to complex64
        assert value(watching, f"update_to_weight_ratio/{name}") == pytest.approx(expected, rel=rounding)


def test_update_by_an_optimizer_that_replaces_the_memory():
    class Replacing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data * 0.5

    model = nn.Linear(3, 2)
    optimizer = Replacing(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    with GradientMonitor(model, optimizer) as watching:
        optimizer.step()
    assert value(watching, "update_to_weight_ratio/weight") == approx(0.5)


# ---- Which charts, and when ------------------------------------------------------------------------------------------


def test_modules_choose_charts():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2, bias=False)), "ab": nn.Linear(2, 2)})
    set_gradients(model, *(torch.ones_like(parameter) for parameter in model.parameters()))
    with watch(model, modules=["a"]) as (_, optimizer, watching):
        optimizer.step()
    tags = ("gradient_norm/a.0.weight", "update_to_weight_ratio/a.0.weight", "gradient_norm_total")
    assert set(watching.history) == {*tags, "module_gradient_norm/a", "module_gradient_norm/a.0"}
    assert value(watching, "gradient_norm_total") == approx(math.hypot(*norms(model).values()))


def test_written_one_interval_late():
    model, optimizer = with_sgd()
    writer = Writer()
    watching = GradientMonitor(model, optimizer, writer=writer, every=3, first_step=7, prefix="actor/")
    written = []
    for _ in range(8):
        train(model, optimizer)
        written.append(writer.steps("actor/gradient_norm_total"))
    assert written == [[], [], [], [7], [7], [7], [7, 10], [7, 10]]
    watching.close()
    assert writer.steps("actor/gradient_norm_total") == [7, 10, 13]
    assert writer.flushed == 1
    watching.close()
    assert len(writer.steps("actor/gradient_norm_total")) == 3
    assert watching.history["gradient_norm_total"] == [
        (s, v) for t, v, s in writer.scalars if t == "actor/gradient_norm_total"
    ]


def test_history_is_bounded(monkeypatch):
    monkeypatch.setattr(monitor, "HISTORY", 8)
    with watch(every=1) as (model, optimizer, watching):
        train(model, optimizer, 30)
    steps = [step for step, _ in watching.history["gradient_norm_total"]]
    assert len(steps) <= 8
    assert steps[0] == 0
    assert steps[-1] == 29


class Reads(TorchDispatchMode):
    """Counts the operations that synchronize."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += function in waits
        return function(*args, **(kwargs or {}))


def test_a_step_does_not_read_tensors_on_the_host(monkeypatch):
    """The first step is recorded; its numbers are read and written at the fourth step."""
    model, optimizer = with_sgd()
    read = []
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _f=original, _n=name, **k: (read.append(_n), _f(self, *a, **k))[1]
        )
    with GradientMonitor(model, optimizer, every=3, activations=["2"]):
        with Reads() as reads:
            train(model, optimizer, 3, max_norm=0.5)
        assert (reads.count, read) == (0, [])
        train(model, optimizer, 1)
    assert "tolist" in read  # the fourth step reads numbers, which shows that the patches detect reads


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_step_does_not_wait_for_a_gpu():
    found = []
    for device in ("cpu", "cuda"):
        inputs = batch().to(device)
        with watch(network().to(device), every=1, activations=["2"]) as (model, optimizer, watching):
            torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
            try:
                for _ in range(3):
                    optimizer.zero_grad()
                    model(inputs).square().sum().backward()
                    gs.clip_gradients_(model, 1.0)
                    optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append(watching.history)
    assert list(found[0]) == list(found[1])
    for tag, series in found[0].items():
        assert [v for _, v in found[1][tag]] == pytest.approx([v for _, v in series], rel=1e-4), tag


# ---- Writers that raise ----------------------------------------------------------------------------------------------


class FailingWriter(HistogramWriter):
    """A writer whose `method` raises at the calls with the numbers `calls`, counted from 1."""

    def __init__(self, method, *calls):
        super().__init__()
        self.calls, self.method, self.failing = 0, method, calls

    def _count(self, method):
        if method == self.method:
            self.calls += 1
            if self.calls in self.failing:
                raise OSError(f"disk full at call {self.calls}")

    def add_scalar(self, tag, value, step):
        self._count("add_scalar")
        super().add_scalar(tag, value, step)

    def add_histogram_raw(self, tag, **fields):
        self._count("add_histogram_raw")
        super().add_histogram_raw(tag, **fields)

    def flush(self):
        self._count("flush")
        super().flush()


class Caught:
    """Catches the writer's errors, as a training loop may do."""

    def __init__(self):
        self.errors = []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if isinstance(error, OSError):
            self.errors.append(str(error))
        return isinstance(error, OSError)


def plain_steps(model, optimizer, caught):
    for step in range(8):
        with caught:
            train(model, optimizer, max_norm=1.0 if step % 2 else 1e6, seed=step)


def steps_with_scaler(model, optimizer, caught):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().sum() * (OVERFLOW if step in (2, 3, 5) else 1.0)).backward()
        with caught:
            scaler.step(optimizer)
        assert not hasattr(optimizer, "found_inf")  # GradScaler.step has removed it, even if the writer raised
        scaler.update()


def closure_steps(model, optimizer, caught):
    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().sum()
        loss.backward()
        return loss

    for _ in range(8):
        with caught:
            optimizer.step(closure)


class Nested(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


LOOPS = {
    "plain": (plain_steps, torch.optim.SGD),
    "step of a base class": (plain_steps, Nested),
    "scaler": (steps_with_scaler, torch.optim.SGD),
    "scaler, fused": (steps_with_scaler, functools.partial(torch.optim.SGD, fused=True)),
    "closures": (closure_steps, torch.optim.SGD),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("method", "calls"), [("add_scalar", [2]), ("add_scalar", [1, 4]), ("add_histogram_raw", [1])])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_writer_that_raises_loses_no_record_and_no_step(loop, method, calls, every):
    """Each error reaches the loop once, the step at which it is raised counts, and training is unaffected."""
    run, kind = LOOPS[loop]
    histories, ends = [], []
    for failing in ([], calls):
        model = network()
        optimizer = kind(model.parameters(), lr=0.001)
        writer = FailingWriter(method, *failing)
        caught = Caught()
        with caught, GradientMonitor(model, optimizer, writer=writer, every=every) as watching:
            run(model, optimizer, caught)
        assert caught.errors == [f"disk full at call {call}" for call in failing]
        histories.append(watching.history)
        ends.append([*model.parameters()])
        assert writer.flushed == 1
    assert histories[0] == histories[1]
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_writer_that_raises_does_not_affect_other_monitors(loop):
    run, kind = LOOPS[loop]
    model = network()
    optimizer = kind(model.parameters(), lr=0.001)
    caught = Caught()
    writers = [FailingWriter("add_scalar", *calls) for calls in ((2,), (), (1,))]
    monitors = [GradientMonitor(model, optimizer, writer=writer, every=1) for writer in writers]
    run(model, optimizer, caught)
    for watching in monitors:
        watching.close()
    assert {"disk full at call 1", "disk full at call 2"} >= set(caught.errors)
    assert monitors[0].history == monitors[1].history == monitors[2].history
    assert [watching._taken for watching in monitors] == [8, 8, 8]
    assert writers[1].steps("gradient_norm_total") == steps_of(monitors[1], "gradient_norm_total")


@pytest.mark.parametrize("method", ["add_scalar", "flush"])
def test_a_writer_that_raises_while_the_monitor_is_closed(method):
    model, optimizer = with_sgd(lr=0.01, fused=True)
    watching = GradientMonitor(model, optimizer, writer=FailingWriter(method, 1))
    scaled_steps(model, optimizer, [1.0, OVERFLOW])
    with pytest.raises(OSError, match="disk full at call 1"):
        watching.close()
    watching.close()
    assert steps_of(watching, "gradient_norm_total") == [0]
    assert watching.history["skipped_steps"] == [(1, 1.0)]
    assert watching._writer.flushed == (method != "flush")
    assert not optimizer._optimizer_step_post_hooks
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_a_step_whose_record_fails_counts(monkeypatch):
    """The next step is recorded instead, and its clip rate includes the step whose record failed."""
    with watch(lr=0.0, every=2) as (model, optimizer, watching):
        for step in range(4):
            train_gradients(model, step)
            gs.clip_gradients_(model, 1e-3 if step == 2 else 1e6)
            with monkeypatch.context() as patch:
                if step == 2:
                    patch.setattr(watching._weights, "compare", lambda: (_ for _ in ()).throw(MemoryError))
                with contextlib.suppress(MemoryError):
                    optimizer.step()
    assert steps_of(watching, "gradient_norm_total") == [0, 3]
    assert watching.history["clip_rate"] == [(0, 0.0), (3, approx(1 / 3))]


# ---- Attaching and detaching -----------------------------------------------------------------------------------------


def test_a_monitor_without_a_reference_lives_as_long_as_its_optimizer():
    model, optimizer = with_sgd()
    writer = Writer()
    GradientMonitor(model, optimizer, writer=writer, every=1)
    gc.collect()
    train(model, optimizer, 2, max_norm=1.0)
    assert writer.steps("gradient_norm_total_before_clipping") == [0]
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("every", [1, 100])
def test_a_closed_monitor_keeps_its_history_and_not_its_model(every):
    model, optimizer = with_sgd()
    writer = Writer()
    watching = GradientMonitor(model, optimizer, writer=writer, every=every, activations=["0"])
    train(model, optimizer, 2, max_norm=1.0)
    gs.clip_gradients_(model, 1.0)
    watching.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model[0]._forward_hooks
    written = len(writer.scalars)
    train(model, optimizer, 3, max_norm=0.1)
    assert len(writer.scalars) == written
    assert watching._clippings == []
    gone = [weakref.ref(thing) for thing in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [thing() for thing in gone] == [None] * len(gone)
    assert watching._weights is None  # no copies of the parameters either
    assert 0 in steps_of(watching, "gradient_norm_total")
    assert "gradient_norm/0.weight" in watching.history


REPLACED = [
    (torch.amp.GradScaler, "step"),
    (nn.utils.clip_grad, "_clip_grads_with_norm_"),
    (nn.utils, "clip_grads_with_norm_"),
    (nn.utils.clip_grad, "clip_grad_value_"),
    (nn.utils, "clip_grad_value_"),
]


@pytest.fixture
def unreplaced():
    """The functions of PyTorch that monitors replace, as PyTorch defines them."""
    gc.collect()
    found = [getattr(*place) for place in REPLACED]
    assert not any(hasattr(function, "is_monitor_wrapper") for function in found)
    return found


@pytest.mark.parametrize("ways", list(itertools.product(["closed", "collected"], repeat=3)))
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_last_monitor_restores_the_functions_of_pytorch(unreplaced, order, ways):
    """A monitor is closed, or collected with its optimizer. The model stays, without hooks."""
    models = [network(seed) for seed in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    monitors = [GradientMonitor(*both, every=1, activations=["0"]) for both in zip(models, optimizers, strict=True)]
    for index, way in zip(order, ways, strict=True):
        assert all(getattr(*place) is not function for place, function in zip(REPLACED, unreplaced, strict=True))
        train(models[index], optimizers[index])
        if way == "closed":
            monitors[index].close()
        monitors[index] = optimizers[index] = None
        gc.collect()
        assert not models[index][0]._forward_hooks
    assert [getattr(*place) for place in REPLACED] == unreplaced
    assert listeners.watched == frozenset()


def test_a_monitor_that_cannot_be_attached_leaves_nothing_behind(unreplaced):
    class NoHooks(nn.Linear):
        def register_forward_hook(self, *_, **__):
            raise RuntimeError("no hooks")

    model = nn.Sequential(nn.Linear(2, 2), NoHooks(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no hooks"):
        GradientMonitor(model, optimizer, activations=["0", "1"])
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model[0]._forward_hooks
    assert [getattr(*place) for place in REPLACED] == unreplaced


def test_an_open_monitor_does_not_disturb_the_end_of_a_program():
    """Whatever is alive at the end, in whichever order the interpreter releases it. One process imports PyTorch."""
    script = """
import os, sys, torch, gradscale_ext as gs
import torch._dynamo  # which optimizers need, for all forks
torch.set_num_threads(1)
for keeps in ("monitor", "model", "None"):
    child = os.fork()
    if not child:
        break
    assert os.waitpid(child, 0)[1] == 0, keeps
else:
    sys.exit(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gs.GradientMonitor(model, optimizer, activations=[""])
model(torch.ones(1, 2)).sum().backward()
gs.clip_gradients_(model, 0.1)
optimizer.step()
kept = eval(keeps)
del model, optimizer, monitor
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Ways of training ------------------------------------------------------------------------------------------------


def test_gradient_accumulation():
    with watch(activations=["2"]) as (model, optimizer, watching):
        for seed in range(3):
            model(batch(seed)).square().sum().backward()
        optimizer.step()
    for name, norm in norms(model).items():
        assert value(watching, f"gradient_norm/{name}") == approx(norm)
    [tag] = [tag for tag in watching.history if tag.startswith("activation")]
    assert tag == "activation_gradient_norm/2/0"


# ---- Steps that a scaler skips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscaled", [None, "unscale_", "clipping"])
@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling(fused, unscaled):
    """The fused optimizer unscales the gradients in its step, unless the loop has already unscaled them."""
    plain = network()
    output = plain(batch())
    output.square().sum().backward()
    expected, writer = norms(plain), HistogramWriter()
    with watch(fused=fused, writer=writer, activations=["3"]) as (model, optimizer, watching):
        clip = {"unscale_": lambda: None, "clipping": lambda: gs.clip_gradients_(model, 0.25)}.get(unscaled)
        scaled_steps(model, optimizer, [1.0], before_step=clip)
    total = math.hypot(*expected.values())
    near = functools.partial(pytest.approx, rel=1e-5)
    assert value(watching, "activation_gradient_norm/3/0") == near(2 * output.norm().item())
    assert value(watching, "gradient_norm_total") == near(0.25 if unscaled == "clipping" else total)
    if unscaled == "clipping":
        assert value(watching, "gradient_norm_total_before_clipping") == approx(total)
        return
    for name, norm in expected.items():
        assert value(watching, f"gradient_norm/{name}") == near(norm)
    for name, parameter in plain.named_parameters():
        low, high = parameter.grad.abs().aminmax()
        fields = writer.histograms[f"gradient_histogram/{name}"]
        assert fields["min"] <= low.log2() + 1e-4
        assert fields["max"] >= high.log2() - 1e-4
        assert fields["max"] - fields["min"] <= (high / low).log2() + 2


def scaled_steps(model, optimizer, factors, scaler=None, before_step=None):
    """Runs a step for each factor of the loss; the scaler skips a step whose factor is inf."""
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=4.0)
    for seed, factor in enumerate(factors):
        optimizer.zero_grad()
        scaler.scale(model(batch(seed)).square().sum() * factor).backward()
        if before_step is not None:
            scaler.unscale_(optimizer)
            before_step()
        scaler.step(optimizer)
        scaler.update()


def steps_of(watching, tag):
    return [step for step, _ in watching.history.get(tag, [])]


OVERFLOW = math.inf


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_the_scaler_skips_are_recorded_as_such(fused):
    """Skipped steps count as steps, but have no norms, because their gradients were not used."""
    with watch(lr=0.01, fused=fused, every=1, activations=["0"]) as (model, optimizer, watching):
        scaled_steps(model, optimizer, [1.0, OVERFLOW, OVERFLOW, 1.0])
    assert steps_of(watching, "gradient_norm_total") == [0, 3]
    assert all(math.isfinite(total) for _, total in watching.history["gradient_norm_total"])
    assert steps_of(watching, "activation_gradient_norm/0/0") == [0, 3]
    assert watching.history["skipped_steps"] == [(1, 1.0), (2, 1.0)]
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert steps_of(watching, "nonfinite_gradients") == [1, 2]
    assert all(0 < count <= elements for _, count in watching.history["nonfinite_gradients"])


def test_skipped_steps_of_an_optimizer_that_skips_by_itself(monkeypatch):
    """The host cannot see which steps are skipped. The device counts them, and the next record includes the count."""
    monkeypatch.setattr(_kept, "FOLD", 2)
    with watch(lr=0.01, fused=True, every=4) as (model, optimizer, watching):
        scaled_steps(model, optimizer, [1.0, OVERFLOW, OVERFLOW, 1.0, 1.0, 1.0, OVERFLOW])
        assert "skipped_steps" not in watching.history
    assert steps_of(watching, "gradient_norm_total") == [0, 4]
    assert watching.history["skipped_steps"] == [(4, 2.0), (6, 1.0)]


def test_a_skipped_step_does_not_replace_a_due_record():
    with watch(lr=0.01, every=3) as (model, optimizer, watching):
        scaled_steps(model, optimizer, [OVERFLOW, 1.0, 1.0, OVERFLOW, OVERFLOW, 1.0, 1.0])
    assert steps_of(watching, "gradient_norm_total") == [1, 5, 6]


def test_nonfinite_gradients_of_a_skipped_step_are_counted_before_clipping():
    with watch(lr=0.01, every=1) as (model, optimizer, watching):
        clip = lambda: gs.clip_gradients_(model, 1e-3, nonfinite="skip")
        scaled_steps(model, optimizer, [1.0, OVERFLOW, 1.0], before_step=clip)
    assert steps_of(watching, "nonfinite_gradients") == [1]
    assert steps_of(watching, "skipped_steps") == [1]
    assert steps_of(watching, "gradient_norm_total_before_clipping") == [0, 2]
    assert steps_of(watching, "clip_rate") == [0, 2]


def test_nonfinite_gradients_of_a_skipped_step_are_counted_before_clipping_by_pytorch():
    """Clipping by a NaN norm makes all elements NaN."""
    model, optimizer = with_sgd(lr=0.01)
    is_bad, writer = iter([False, False, True]), Writer()
    model[0].bias.register_hook(lambda g: torch.where(torch.arange(4) == 0, math.nan, g) if next(is_bad) else g)
    with GradientMonitor(model, optimizer, writer=writer, every=100) as watching:
        clip = lambda: clip_grad_norm_(model.parameters(), 1e-3)
        scaled_steps(model, optimizer, [1.0] * 3, before_step=clip)
    assert all(parameter.grad.isnan().all() for parameter in model.parameters())
    assert watching.history["nonfinite_gradients"] == [(2, 1.0)]
    assert writer.steps("skipped_steps") == writer.steps("nonfinite_gradients") == [2]


def test_the_scaler_decides_which_steps_are_skipped():
    """A step is skipped even if its gradients are made finite after `unscale_`. Other optimizers are not recorded."""
    model, other = network(), network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientMonitor(model, optimizer, every=1) as watching:
        mend = lambda: [parameter.grad.nan_to_num_(0.0, 0.0, 0.0) for parameter in model.parameters()]
        scaled_steps(model, optimizer, [OVERFLOW], before_step=mend)
        scaled_steps(other, torch.optim.SGD(other.parameters(), lr=0.01), [OVERFLOW])
    assert watching.history == {"skipped_steps": [(0, 1.0)]}


def test_a_step_without_hooks_does_not_count_as_skipped():
    model, optimizer = with_sgd(lr=0.01)
    optimizer.step = types.MethodType(torch.optim.SGD.step.__wrapped__, optimizer)
    with GradientMonitor(model, optimizer, every=1) as watching:
        scaled_steps(model, optimizer, [1.0, OVERFLOW, 1.0])
    assert watching.history["skipped_steps"] == [(1, 1.0)]
    assert "gradient_norm_total" not in watching.history


def test_several_monitors_optimizers_and_scalers():
    models = [network(seed) for seed in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    first = [GradientMonitor(m, o, every=1) for m, o in zip(models, optimizers, strict=True)]
    second = GradientMonitor(models[0], optimizers[0], every=100)
    shared = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            scaler = torch.amp.GradScaler("cpu") if index == 2 else shared
            scaler.scale(model(batch()).square().sum() * (OVERFLOW if step == index else 1.0)).backward()
            scaler.step(optimizer)
            if index:
                scaler.update()
    for index, watching in enumerate(first):
        watching.close()
        assert watching.history["skipped_steps"] == [(index, 1.0)]
        assert steps_of(watching, "gradient_norm_total") == [step for step in range(4) if step != index]
    second.close()
    assert second.history["skipped_steps"] == [(0, 1.0)]
    assert steps_of(second, "gradient_norm_total") == [1]


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_add_no_synchronization(fused):
    """With a monitor, a step synchronizes as often as without one."""
    counts = []
    for watched in (False, True):
        model, optimizer = with_sgd(lr=0.01, fused=fused)
        watching = GradientMonitor(model, optimizer, activations=["0"]) if watched else None
        with Reads() as reads:
            scaled_steps(model, optimizer, [OVERFLOW])
        counts.append(reads.count)
        assert not watched or watching.history == {}
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("fused", "every"), [(False, 1), (False, 2), (True, 2)])
def test_training_is_the_same_bit_by_bit(fused, every):
    """A monitor does not change training, with a scaler that skips steps or without a scaler."""
    ends = []
    for watched in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        watching = GradientMonitor(model, optimizer, every=every, activations=["0", "2.0"]) if watched else None
        train(model, optimizer, 6, max_norm=1.0)
        scaled_steps(model, optimizer, [OVERFLOW, 1.0, OVERFLOW, 1.0, 1.0])
        ends.append([*model.parameters(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *ends))
    assert steps_of(watching, "skipped_steps")


@pytest.fixture
def original():
    """The original `GradScaler.step`, restored if other tests have left monitors open."""
    gc.collect()
    GradientMonitor(model := network(), torch.optim.SGD(model.parameters(), lr=0.1)).close()
    assert not hasattr(torch.amp.GradScaler.step, "__wrapped__")
    return torch.amp.GradScaler.step


def test_closed_monitors_restore_grad_scaler(original):
    model, optimizer = with_sgd(lr=0.01)
    first, second = (GradientMonitor(model, optimizer) for _ in range(2))
    assert torch.amp.GradScaler.step is not original
    assert torch.amp.GradScaler.step.__name__ == "step"
    first.close()
    assert torch.amp.GradScaler.step is not original
    second.close()
    assert torch.amp.GradScaler.step is original
    forgotten = weakref.ref(GradientMonitor(model, optimizer))
    del model, optimizer, first, second
    gc.collect()
    assert forgotten() is None
    other = network()
    scaled_steps(other, torch.optim.SGD(other.parameters(), lr=0.01), [1.0])
    assert torch.amp.GradScaler.step is original


def test_another_patch_of_the_scaler(monkeypatch, original):
    model, optimizer = with_sgd(lr=0.01)
    for close_first in (False, True):
        watching = GradientMonitor(model, optimizer, every=1)
        with monkeypatch.context() as patch:
            below, calls = torch.amp.GradScaler.step, []
            patch.setattr(
                torch.amp.GradScaler, "step", lambda self, *a, _b=below, _c=calls: (_c.append(1), _b(self, *a))[1]
            )
            again = GradientMonitor(model, optimizer, every=1)
            scaled_steps(model, optimizer, [1.0, OVERFLOW])
            if close_first:
                watching.close()
                again.close()
            scaled_steps(model, optimizer, [1.0])
            assert len(calls) == 3
        watching.close()
        again.close()
        assert watching.history["skipped_steps"] == again.history["skipped_steps"] == [(1, 1.0)]
        scaled_steps(model, optimizer, [1.0])
        assert torch.amp.GradScaler.step is original


def test_a_scaler_that_is_turned_off():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with watch(every=1, activations=["3"]) as (model, optimizer, watching):
        scaled_steps(model, optimizer, [1.0, OVERFLOW], scaler)
    assert steps_of(watching, "gradient_norm_total") == [0, 1]
    assert "skipped_steps" not in watching.history
    assert steps_of(watching, "nonfinite_gradients") == [1]


def test_a_step_of_the_scaler_that_raises():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(every=1) as (model, optimizer, watching):
        scaler.scale(model(batch()).square().sum() * OVERFLOW).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer)
        scaler.update()
        scaled_steps(model, optimizer, [1.0], scaler)
    assert watching.history["skipped_steps"] == [(0, 1.0)]
    assert steps_of(watching, "gradient_norm_total") == [1]


def test_a_picture_of_skipped_steps(tmp_path):
    pytest.importorskip("matplotlib")
    with watch(lr=0.01, every=1) as (model, optimizer, watching):
        scaled_steps(model, optimizer, [OVERFLOW])
    with pytest.raises(ValueError, match="two steps must have been recorded"):
        watching.plot()
    with GradientMonitor(model, optimizer, every=1) as watching:
        scaled_steps(model, optimizer, [1.0, 1.0, OVERFLOW])
    titles = [axes.get_title() for axes in watching.plot(tmp_path / "picture.png").axes]
    assert "gradient elements at step 1" in titles


def test_a_picture_of_a_history_that_was_thinned_to_skipped_steps(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(monitor, "HISTORY", 3)
    with watch(lr=0.01, every=1) as (model, optimizer, watching):
        scaled_steps(model, optimizer, [OVERFLOW, 1.0, OVERFLOW, 1.0])
    assert set(watching.history) == {"skipped_steps", "nonfinite_gradients"}
    figure = watching.plot()
    assert not [axes for axes in figure.axes if axes.collections]
    assert not panel(figure, "gradient norm").lines


# ---- Other ways of training ------------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lacks the attributes of its base class, as Accelerate's wrapper does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("deep", [False, True])
def test_wrapped_optimizers(deep):
    model, optimizer = with_sgd()
    wrapper = Wrapper(Wrapper(optimizer)) if deep else Wrapper(optimizer)
    with GradientMonitor(model, wrapper, every=1) as watching:
        train(model, wrapper, 2)
        scaled_steps(model, wrapper, [OVERFLOW])
    assert steps_of(watching, "gradient_norm_total") == [0, 1]
    assert steps_of(watching, "skipped_steps") == [2]
    assert not optimizer._optimizer_step_pre_hooks


def test_a_wrapper_that_hides_its_optimizer():
    class Hiding(Wrapper):
        def __init__(self, optimizer):
            self._secret = optimizer

        param_groups = property(lambda self: self._secret.param_groups)

    model = network()
    hiding = Hiding(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="optimizer is a Hiding, whose steps run no hooks; give the optimizer that it"):
        GradientMonitor(model, hiding)


def test_a_step_that_raises_is_not_recorded():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise ArithmeticError
            return super().step(closure)

    model = network()
    optimizer = Failing(model.parameters(), lr=0.1)
    with GradientMonitor(model, optimizer, every=1) as watching:
        for fails in (False, True, False):
            optimizer.fails = fails
            with contextlib.suppress(ArithmeticError):
                train(model, optimizer, seed=fails)
    assert steps_of(watching, "gradient_norm_total") == [0, 1]
    assert value_at(watching, "gradient_norm_total", 1) == approx(math.hypot(*norms(model).values()))


def test_copies_of_a_watched_model_and_optimizer_are_not_watched():
    """Copies do not hold the monitor or its writer, which cannot be copied."""
    writer = Writer()
    writer.lock = threading.Lock()
    with watch(writer=writer, every=1, activations=["0"]) as (model, optimizer, watching):
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            train(model, optimizer)
            duplicate(batch()).sum().backward()
            own = copy.deepcopy(optimizer)
            own.step()
        train(model, optimizer)
    assert steps_of(watching, "activation_gradient_norm/0/0") == [0, 1, 2]
    assert "activation_gradient_norm/0/1" not in watching.history


def test_closed_in_the_middle_of_a_step():
    model, optimizer = with_sgd()
    watching = GradientMonitor(model, optimizer, every=1)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().sum()
        loss.backward()
        watching.close()
        return loss

    train(model, optimizer)
    optimizer.step(closure)
    assert steps_of(watching, "gradient_norm_total") == [0]
    later = []
    optimizer.step(lambda: (later.append(GradientMonitor(model, optimizer, every=1)), closure())[1])
    train(model, optimizer)
    later[0].close()
    assert steps_of(later[0], "gradient_norm_total") == [0]


def test_monitors_come_and_go_while_other_threads_train(original):
    failures, stop = [], threading.Event()

    def trains(seed):
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        try:
            with GradientMonitor(model, optimizer, every=1) as watching:
                scaled_steps(model, optimizer, [1.0, OVERFLOW] * 4, before_step=lambda: gs.clip_gradients_(model, 1.0))
            assert steps_of(watching, "gradient_norm_total") == list(range(0, 8, 2))
            assert steps_of(watching, "skipped_steps") == list(range(1, 8, 2))
        except Exception as error:
            failures.append(error)

    def comes_and_goes():
        model, optimizer = with_sgd()
        while not stop.is_set():
            GradientMonitor(model, optimizer).close()

    restless = threading.Thread(target=comes_and_goes)
    threads = [threading.Thread(target=trains, args=(seed,)) for seed in range(3)]
    for thread in (restless, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    restless.join()
    assert not failures
    assert torch.amp.GradScaler.step is original


def test_compiled_model():
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with GradientMonitor(compiled, optimizer, modules=["0"], activations=["2"]) as watching:
        train(compiled, optimizer)
    assert {tag for tag in watching.history if tag.startswith(("gradient_norm/", "activation"))} == {
        "gradient_norm/0.weight",
        "gradient_norm/0.bias",
        "activation_gradient_norm/2/0",
    }
    assert value(watching, "gradient_norm/0.weight") == approx(norms(model)["0.weight"])


def test_frozen_and_later_unfrozen():
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientMonitor(model, optimizer, every=1) as watching:
        train(model, optimizer)
        model[0].requires_grad_(True)
        train(model, optimizer)
    for tag in ("gradient_norm/0.weight", "module_gradient_norm/0", "update_to_weight_ratio/0.bias"):
        assert [step for step, _ in watching.history[tag]] == [1]
    assert [step for step, _ in watching.history["gradient_norm/3.weight"]] == [0, 1]


def test_parameter_groups_that_are_added_later():
    model = network()
    optimizer = torch.optim.SGD([{"params": model[3].parameters(), "lr": 0.01}, {"params": [model[0].weight]}], lr=0.1)
    with GradientMonitor(model, optimizer, every=1) as watching:
        before = model[3].bias.detach().norm().item()
        train(model, optimizer)
        ratio = 0.01 * model[3].bias.grad.norm().item() / before
        optimizer.add_param_group({"params": model[2].parameters()})
        train(model, optimizer)
    steps = {tag: [step for step, _ in series] for tag, series in watching.history.items()}
    assert steps["gradient_norm/0.weight"] == [0, 1]
    assert steps["gradient_norm/2.0.weight"] == [1]
    assert "gradient_norm/0.bias" not in steps  # the optimizer does not hold this parameter
    assert watching.history["update_to_weight_ratio/3.bias"][0][1] == pytest.approx(ratio, rel=1e-5)


def test_parameters_outside_the_model():
    model, other = network(), network(1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with GradientMonitor(model, optimizer) as watching:
        (model(batch()).square().sum() + other(batch()).square().sum()).backward()
        optimizer.step()
    assert value(watching, "gradient_norm_total") == approx(math.hypot(*norms(model).values()))


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5)
            self.head.weight = self.embedding.weight

    with watch(Tied()) as (model, optimizer, watching):
        set_gradients(model, torch.full((5, 3), 2.0), torch.full((5,), 2.0))
        optimizer.step()
    assert value(watching, "gradient_norm/embedding.weight") == approx(math.sqrt(60))
    assert "gradient_norm/head.weight" not in watching.history
    assert value(watching, "module_gradient_norm/embedding") == approx(math.sqrt(60))
    assert value(watching, "module_gradient_norm/head") == approx(math.sqrt(80))
    assert value(watching, "gradient_norm_total") == approx(math.sqrt(80))


@pytest.mark.parametrize("keyword", [False, True])
def test_closures(keyword):
    """LBFGS evaluates its closure several times; the last gradients are recorded."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().sum()
        loss.backward()
        gs.clip_gradients_(model, 2.0)
        return loss

    before = model[0].weight.detach().clone()
    with GradientMonitor(model, optimizer) as watching:
        optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert value(watching, "gradient_norm_total") == approx(math.hypot(*norms(model).values()))
    ratio = (model[0].weight - before).norm() / before.norm()
    assert value(watching, "update_to_weight_ratio/0.weight") == pytest.approx(ratio.item(), rel=1e-5)
    assert value(watching, "clip_rate") == 1.0


def test_complex_and_sparse_gradients():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.tensor([3 + 4j, 0j]))
            self.embedding = nn.Embedding(6, 2, sparse=True)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.phase.grad = torch.tensor([0j, 6 - 8j])
    model.embedding(torch.tensor([1, 1, 4])).sum().backward()
    embedded = model.embedding.weight.detach().norm().item()
    with GradientMonitor(model, optimizer) as watching:
        optimizer.step()
    assert value(watching, "gradient_norm/phase") == 10.0
    assert value(watching, "update_to_weight_ratio/phase") == 1.0
    assert value(watching, "gradient_norm/embedding.weight") == approx(math.sqrt(10))
    assert value(watching, "update_to_weight_ratio/embedding.weight") == approx(0.5 * math.sqrt(10) / embedded)


@pytest.fixture
def mesh():
    """A mesh of one process. Its process group is created, unless another test has left one open."""
    is_ours = not torch.distributed.is_initialized()
    if is_ours:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    if is_ours:
        torch.distributed.destroy_process_group()


def clip_twice(model, limit):
    gs.clip_gradients_(model[3], limit / 2)
    clip_by_pytorch(model, limit)


@pytest.mark.parametrize("clips", [gs.clip_gradients_, clip_by_pytorch, clip_twice])
@pytest.mark.parametrize("every", [1, 100])
def test_sharded_parameters(mesh, every, clips):
    """FSDP2 gives the same numbers as the unsharded model, also for skipped steps."""
    histories = []
    for sharded in (False, True):
        model = network()
        if sharded:
            torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with GradientMonitor(model, optimizer, every=every) as watching:
            clip = functools.partial(clips, model, 1.0)
            scaled_steps(model, optimizer, [1.0, OVERFLOW, 1.0], before_step=clip)
        histories.append(watching.history)
    assert list(histories[0]) == list(histories[1])
    for tag, series in histories[0].items():
        assert histories[1][tag] == [(step, pytest.approx(number, rel=1e-5)) for step, number in series]


def test_a_model_with_named_parameters_of_its_own():
    """TorchRL's `LossModule.named_parameters` accepts fewer arguments than `nn.Module.named_parameters`."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = network()
            self.tied = self.model[0]

        def named_parameters(self, prefix="", recurse=True):
            return super().named_parameters(prefix=prefix, recurse=recurse)

        forward = lambda self, x: self.model(x)

    with watch(Loss()) as (model, optimizer, watching):
        train(model, optimizer)
    for name, norm in norms(model).items():
        assert value(watching, f"gradient_norm/{name}") == approx(norm)
    assert value(watching, "module_gradient_norm/tied") == approx(value(watching, "module_gradient_norm/model.0"))


def test_no_gradient_at_all():
    with watch() as (_, optimizer, watching):
        optimizer.step()
    assert watching.history == {"gradient_norm_total": [(0, 0.0)]}


# ---- Activations -----------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, cell=nn.GRUCell):
        super().__init__()
        self.cell = cell(3, 4)

    def forward(self, x, steps=4):
        states = [torch.zeros(len(x), 4)]
        for _ in range(steps):
            states.append(self.cell(x, states[-1]))
            states[-1].retain_grad()
        return states[1:]


def test_calls_of_a_recurrent_network_are_numbered():
    with watch(Recurrent(), every=1, activations=["cell"]) as (model, optimizer, watching):
        for _ in range(2):
            optimizer.zero_grad()
            states = model(batch())
            states[-1].square().sum().backward()
            optimizer.step()
    for call, state in enumerate(states):
        series = watching.history[f"activation_gradient_norm/cell/{call}"]
        assert [step for step, _ in series] == [0, 1]
        assert series[1][1] == approx(state.grad.norm().item())
    assert "activation_gradient_norm/cell/4" not in watching.history


def test_outputs_of_several_tensors():
    with watch(nn.Sequential(nn.LSTM(3, 4)), activations=["0"]) as (model, optimizer, watching):
        output, (hidden, _) = model(batch())
        (3 * output.sum() + 4 * hidden.sum()).backward()
        optimizer.step()
    expected = math.sqrt(9 * output.numel() + 16 * hidden.numel())
    assert value(watching, "activation_gradient_norm/0/0") == approx(expected)


def test_forward_passes_without_backward():
    """Activations without gradients or without consumers neither hide nor renumber those that have gradients."""
    with watch(activations=["3"]) as (model, optimizer, watching):
        with torch.no_grad():
            model(batch(5))
        output = model(batch())
        output.square().sum().backward()
        model(batch(6))
        optimizer.step()
    tags = [tag for tag in watching.history if tag.startswith("activation")]
    assert tags == ["activation_gradient_norm/3/0"]
    assert value(watching, tags[0]) == approx(2 * output.norm().item())


def test_activations_are_not_measured_in_unrecorded_steps(monkeypatch):
    model, optimizer = with_sgd()
    hooked = []
    original = torch.Tensor.register_hook
    monkeypatch.setattr(torch.Tensor, "register_hook", lambda self, f: (hooked.append(1), original(self, f))[1])
    counts = []
    with GradientMonitor(model, optimizer, every=3, activations=["0", "3"]):
        for _ in range(5):
            train(model, optimizer)
            counts.append(len(hooked))
    assert counts == [2, 2, 2, 4, 4]


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, but it is 0"),
        ({"every": 2.5}, TypeError, "every must be an integer, but it is of type float"),
        ({"first_step": True}, TypeError, "first_step must be an integer, but it is of type bool"),
        (
            {"writer": 3},
            TypeError,
            r"writer must be None, or have a method add_scalar\(tag, value, step\), .* of type int",
        ),
        ({"prefix": 1}, TypeError, "prefix must be a string, but it is of type int"),
        ({"histograms": 1}, TypeError, "histograms must be True or False, but it is of type int"),
        ({"updates": None}, TypeError, "updates must be True or False, but it is of type NoneType"),
        ({"modules": "0"}, TypeError, "modules must be a sequence of module names, but it is of type str"),
        ({"modules": ["4"]}, ValueError, "modules names '4', but the model's modules are '0', '1', '2', '2.0'"),
        ({"activations": ["layer"]}, ValueError, "activations names 'layer', but the model's modules are '0'"),
    ],
)
def test_errors(options, error, message):
    model, optimizer = with_sgd()
    with pytest.raises(error, match=f"GradientMonitor: {message}"):
        GradientMonitor(model, optimizer, **options)
    assert not optimizer._optimizer_step_pre_hooks


def test_errors_of_model_and_optimizer():
    model = network()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match="must hold parameters of model, but none of its 6 is among the 6 of the model"
    ):
        GradientMonitor(model, optimizer)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, but it is of type SGD"):
        GradientMonitor(optimizer, model)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, but it is of type generator"):
        GradientMonitor(model, model.parameters())


# ---- TensorBoard, pictures, Lightning --------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [True, False])
def test_few_tags_of_many_parameters(updates):
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(8))
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 1.0)
        parameter.grad = torch.full_like(parameter, [1.0, 1e-4, 3.0, 1e3, 0.0, 2.0, 0.5, 50.0][index % 8])
    for layer in model[4:]:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
    few, every = HistogramWriter(), HistogramWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with (
        GradientMonitor(model, optimizer, writer=few, updates=updates) as watching,
        GradientMonitor(model, optimizer, writer=every, updates=updates, tags="all"),
    ):
        gs.clip_gradients_(model, 1e6)
        optimizer.step()
    assert {tag for tag, *_ in every.scalars} == set(watching.history)
    written = {tag for tag, *_ in few.scalars}
    # Ratios are 1e-3 times the gradients; the worst ratio is 0, followed by 1e-4, 1e3, 50 and 3 times the usual one.
    # Without ratios the largest norms are chosen.
    worst = {"2.weight", "0.bias", "1.bias", "3.bias", "1.weight"} if updates else {
        "1.bias", "3.bias", "1.weight", "2.bias", "0.weight"}  # fmt: skip
    assert {tag.partition("/")[2] for tag in written if tag.startswith("gradient_norm/")} == worst
    assert {tag.partition("/")[2] for tag in few.histograms} == worst - {"2.weight"}
    assert {tag for tag, *_ in every.scalars} - written == {
        tag for tag in watching.history if tag.partition("/")[2] in {*dict(model.named_parameters())} - worst
    }
    assert {f"module_gradient_norm/{index}" for index in range(8)} | {"gradient_norm_total", "clip_rate"} <= written


@pytest.mark.xdist_group("clients")
def test_a_run_of_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="test", dir=str(tmp_path), mode="offline", settings=wandb.Settings(silent=True))
    logged, log = [], run.log
    monkeypatch.setattr(run, "log", lambda data, **options: (logged.append(data), log(data, **options)))
    with watch(writer=run, every=1, prefix="actor/") as (model, optimizer, watching):
        train(model, optimizer, 3)
    assert [entry["gradients/step"] for entry in logged] == [0, 1, 2]
    tags = [entry["gradients/actor/gradient_norm_total"] for entry in logged]
    assert tags == [v for _, v in watching.history["gradient_norm_total"]]
    assert run.summary["gradients/actor/gradient_norm/0.weight"] == watching.history["gradient_norm/0.weight"][-1][1]
    histogram = logged[-1]["gradients/actor/gradient_histogram/0.weight"]
    assert sum(histogram.histogram) == 12
    run.finish()


@pytest.mark.xdist_group("clients")  # whose tests import it too
def test_a_run_of_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    model, optimizer = with_sgd()
    with mlflow.start_run() as run, GradientMonitor(model, optimizer, writer=run, every=1) as watching:
        train(model, optimizer, 3)
    for tag in ("gradient_norm_total", "update_to_weight_ratio/0.weight"):
        read = mlflow.MlflowClient().get_metric_history(run.info.run_id, tag)
        assert [(metric.step, metric.value) for metric in read] == watching.history[tag]


def test_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer = with_sgd()
    with (
        tensorboard.SummaryWriter(tmp_path) as writer,
        GradientMonitor(model, optimizer, writer=writer, every=2, prefix="a/") as watching,
    ):
        train(model, optimizer, 3, max_norm=1.0)
    logs = EventAccumulator(str(tmp_path)).Reload()
    assert set(logs.Tags()["scalars"]) == {"a/" + tag for tag in watching.history}
    for tag, series in watching.history.items():
        events = [(event.step, event.value) for event in logs.Scalars("a/" + tag)]
        assert events == [(step, approx(v)) for step, v in series]
    for name, parameter in model.named_parameters():
        histogram = logs.Histograms(f"a/gradient_histogram/{name}")[-1]
        counts = histogram.histogram_value.bucket
        assert (histogram.step, sum(counts)) == (2, parameter.numel())
        log2 = parameter.grad.abs().log2()
        assert histogram.histogram_value.min == log2.min().floor()
        assert histogram.histogram_value.max == log2.max().floor() + 1


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with watch(every=1) as (model, optimizer, watching):
        with pytest.raises(ValueError, match="it has seen 0 steps, and records every 1"):
            watching.plot()
        train(model, optimizer, 4, max_norm=1.0)
    for home in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(home, str(tmp_path))
    figure = watching.plot("~/picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    heat = panel(figure, "gradient norm of each layer")
    layers = ["0", "2.0", "3"]
    assert [label.get_text() for label in heat.get_yticklabels()] == layers
    expected = [[v for _, v in watching.history[f"module_gradient_norm/{layer}"]] for layer in layers]
    assert heat.collections[0].get_array().tolist() == expected
    drawn = [line.get_ydata().tolist() for line in panel(figure, "gradient norm").lines]
    for tag in ("gradient_norm_total", "gradient_norm_total_before_clipping"):
        assert [v for _, v in watching.history[tag]] in drawn
    assert {text.get_text() for text in panel(figure, "gradient norm").texts} == {
        "0", "2.0", "3", "all layers", "before clipping",
    }  # fmt: skip
    [rate] = panel(figure, "share of steps that were clipped").lines
    assert rate.get_ydata().tolist() == [v for _, v in watching.history["clip_rate"]]
    ratios = panel(figure, "update-to-weight ratio (usually about 1e-3)")
    assert len(ratios.lines) == 6
    assert len(ratios.texts) == 4  # two highest and two lowest; the other lines are grey


class Unrolled(nn.Module):
    """A state that passes through one module several times, and heads that are called once."""

    def __init__(self, heads=1):
        super().__init__()
        self.dynamics = nn.Linear(2, 2, bias=False)
        self.heads = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(heads)])

    def forward(self, x, steps=12):
        for _ in range(steps):
            x = self.dynamics(x)
        return sum(head(x) for head in self.heads)


def test_plot_of_activations_by_call():
    pytest.importorskip("matplotlib")
    model = Unrolled()
    with torch.no_grad():
        model.dynamics.weight.copy_(2 * torch.eye(2))
        model.heads[0].weight.copy_(torch.tensor([[3.0, 4.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientMonitor(model, optimizer, every=1, activations=["dynamics", "heads.0"]) as watching:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    axes = panel(watching.plot(), "gradient norm at each call")
    assert axes.get_xlabel() == "call in a pass of step 29   (pale: earlier steps)"
    assert [text.get_text() for text in axes.texts] == ["heads.0", "dynamics"]
    lines = [line for line in axes.lines if line.get_linewidth() == 1.6]
    drawn = {len(line.get_xdata()): line for line in lines}
    assert drawn.keys() == {1, 12}
    assert drawn[12].get_xdata().tolist() == list(range(12))
    assert drawn[12].get_ydata().tolist() == [5.0 * 2 ** (11 - call) for call in range(12)]
    assert drawn[1].get_ydata().tolist() == [1.0]
    assert len(axes.lines) == 2 * (1 + 8)  # pale lines


def test_plot_of_many_activations_and_of_gradients_of_zero():
    pytest.importorskip("matplotlib")
    model = Unrolled(heads=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = [f"heads.{number}" for number in range(40)]
    for factor in (1.0, 0.0, math.nan):
        with GradientMonitor(model, optimizer, every=1, activations=names) as watching:
            for _ in range(2):
                optimizer.zero_grad()
                (factor * model(torch.ones(1, 2))).sum().backward()
                optimizer.step()
        figure = watching.plot()
        figure.draw_without_rendering()
        axes = panel(figure, "gradient norm at each call")
        assert len(axes.lines) == 80
        assert len(axes.texts) == 4


def panel(figure, title):
    [axes] = [axes for axes in figure.axes if axes.get_title() == title]
    return axes


def test_labels_of_lines_do_not_overlap():
    Text = pytest.importorskip("matplotlib.text").Text
    with watch(weights(6), lr=0.0, every=1) as (model, optimizer, watching):
        for _ in range(3):
            set_gradients(model, *[torch.full((1, 1), 1.0 + index / 1000) for index in range(6)])
            optimizer.step()
    figure = watching.plot()
    figure.draw_without_rendering()
    texts = sorted(panel(figure, "gradient norm").texts, key=lambda text: text.xyann[1])
    assert [text.get_text() for text in texts] == ["0", "1", "4", "5", "all layers"]
    boxes = [Text.get_window_extent(text) for text in texts]
    assert all(lower.ymax <= upper.ymin for lower, upper in pairwise(boxes))


def test_a_stray_bin_does_not_stretch_the_histograms():
    pytest.importorskip("matplotlib")
    with watch(nn.Linear(1000, 1, bias=False), lr=0.0) as (model, optimizer, watching):
        model.weight.grad = torch.ones(1, 1000)
        model.weight.grad[0, 0] = 2.0**-30
        optimizer.step()
    axes = panel(watching.plot(), "gradient elements at step 0")
    assert axes.get_xlim() == (0.0, 1.0)
    assert "0.1 % are outside" in axes.get_xlabel()


def test_a_norm_of_zero_and_a_missing_gradient_are_seen_in_the_heat_map():
    pytest.importorskip("matplotlib")
    with watch(weights(2), lr=0.0, every=1) as (model, optimizer, watching):
        for first in (torch.zeros(1, 1), None, torch.ones(1, 1)):
            set_gradients(model, first, torch.full((1, 1), 4.0))
            optimizer.step()
    [mesh] = panel(watching.plot(), "gradient norm of each layer").collections
    rgba = mesh.to_rgba(mesh.get_array())
    assert rgba[0, 0].tolist() == [0, 0, 0, 1]
    assert rgba[0, 1].tolist() == [0.85, 0.85, 0.85, 1]
    assert rgba[0, 2].tolist() not in (rgba[0, 0].tolist(), rgba[1, 2].tolist())


def test_a_picture_of_norms_that_end_at_zero_and_at_infinity(tmp_path):
    pytest.importorskip("matplotlib")
    with watch(weights(2), lr=0.0, every=1) as (model, optimizer, watching):
        for first, second in ((1.0, 2.0), (0.0, math.inf)):
            set_gradients(model, torch.full((1, 1), first), torch.full((1, 1), second))
            optimizer.step()
    texts = panel(watching.plot(tmp_path / "picture.png"), "gradient norm").texts
    heights = {text.get_text(): text.xy[1] for text in texts}
    assert heights == {"0": 0.0, "1": 0.0, "all layers": 1.0}


def test_labels_of_a_picture_are_short():
    shared = plot.short_names(["base.model.0.q_proj.default", "base.model.0.v_proj.default", "base.model.1.default"])
    assert list(shared.values()) == ["0.q_proj", "0.v_proj", "1"]
    assert plot.short_names(["body", "body.head"]) == {"body": "body", "body.head": "body.head"}
    assert plot.short_names(["encoder.weight"]) == {"encoder.weight": "encoder.weight"}
    long = "first." + "x" * 40 + ".last"
    assert plot.short_names([long, "other"])[long] == "first.xxxxxxxxx…xxxxxxxxxxx.last"


def test_plot_without_matplotlib(monkeypatch):
    with watch() as (model, optimizer, watching):
        train(model, optimizer)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="python -m pip install matplotlib"):
        watching.plot()


def test_a_picture_has_few_layers(monkeypatch):
    names = [f"blocks.{i}.{part}.weight" for i in range(12) for part in ("attention", "mlp")] + ["scale", "head.weight"]
    assert len(plot.layers_of(names)) == 26
    monkeypatch.setattr(plot, "MOST_LAYERS", 16)
    layers = plot.layers_of(names)
    assert list(layers) == [*(f"blocks.{i}" for i in range(12)), "scale", "head"]
    assert layers["blocks.3"] == ["blocks.3.attention.weight", "blocks.3.mlp.weight"]


def test_neighbours_of_a_long_list_are_merged():
    names = [f"net.blocks.{i}.{part}" for i in range(300) for part in ("weight", "bias")]
    layers = plot.layers_of(["stem.weight", *names])
    assert list(layers)[:2] == ["stem", "net.blocks.0…6"]
    assert [name for found in layers.values() for name in found] == ["stem.weight", *names]
    assert {len(found) for found in list(layers.values())[1:]} == {14, 16}
    assert 30 < len(layers) <= plot.MOST_LAYERS
    flat = plot.layers_of([f"{i}.weight" for i in range(50)])
    assert list(flat)[:2] == ["0…1", "2…3"]
    assert len(flat) == 25
    stages = [f"layer{stage}.{i}.conv.weight" for stage, blocks in enumerate((3, 8, 36, 3)) for i in range(blocks)]
    layers = plot.layers_of(stages)
    assert list(layers)[:4] == ["layer0.0", "layer0.1…2", "layer1.0…1", "layer1.2…3"]
    assert len(layers) == 26


def test_a_module_of_many_parameters_is_split(monkeypatch):
    model = nn.ModuleDict({"lstm": nn.LSTM(2, 3, num_layers=2), "cell": nn.LSTMCell(2, 3), "head": nn.Linear(3, 1)})
    names = list(dict(model.named_parameters()))
    assert list(plot.layers_of(names)) == [*(name for name in names if name.startswith("lstm")), "cell", "head"]
    monkeypatch.setattr(plot, "MOST_LAYERS", 5)
    assert list(plot.layers_of(names)) == ["lstm", "cell", "head"]


def test_merged_layers_have_the_norm_of_all_their_parameters(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot, "MOST_LAYERS", 2)
    with watch(weights(4), lr=0.0, every=1) as (model, optimizer, watching):
        for factor in (1.0, 2.0):
            set_gradients(model, *(torch.full((1, 1), factor * g) for g in (3.0, 4.0, 5.0, 12.0)))
            optimizer.step()
    heat = panel(watching.plot(), "gradient norm of each layer")
    assert [label.get_text() for label in heat.get_yticklabels()] == ["0…1", "2…3"]
    assert heat.collections[0].get_array().tolist() == [[5.0, 10.0], [13.0, 26.0]]


def test_axes_of_a_picture_of_few_steps_and_equal_norms():
    """Ticks of steps are integers, and norms that differ only by rounding have almost the same colour."""
    pytest.importorskip("matplotlib")
    with watch(nn.Linear(1, 1, bias=False), lr=0.0, every=1) as (model, optimizer, watching):
        for step in range(3):
            model.weight.grad = torch.full((1, 1), 1.0 + step * 1e-6)
            optimizer.step()
    figure = watching.plot()
    heat = panel(figure, "gradient norm of each layer")
    rgba = heat.collections[0].to_rgba(heat.collections[0].get_array())
    assert abs(rgba[0, 0] - rgba[0, 2]).max() < 0.01
    for axes in (heat, panel(figure, "gradient norm")):
        assert all(tick == int(tick) for tick in axes.get_xticks())


@pytest.fixture
def fit(monkeypatch):
    """A function that starts a fit with two optimizers, and takes a step with each. Lightning is a stub."""
    packages = {name: types.ModuleType(name) for name in ("lightning", "lightning.pytorch")}
    packages["lightning"].pytorch = packages["lightning.pytorch"]
    packages["lightning.pytorch"].Callback = type("Callback", (), {})
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delitem(sys.modules, "gradscale_ext.monitor.lightning", raising=False)

    def fit(writer):
        module = importlib.import_module("gradscale_ext.monitor.lightning")
        callback, model = module.GradientMonitorCallback(every=1), network()
        assert isinstance(callback, packages["lightning.pytorch"].Callback)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])]
        loggers = [types.SimpleNamespace(experiment=experiment) for experiment in (None, writer)]
        trainer = types.SimpleNamespace(optimizers=optimizers, loggers=loggers, global_step=5)
        callback.on_fit_start(trainer, model)
        for optimizer in optimizers:
            train(model, optimizer)
        return callback, trainer, model

    yield fit
    sys.modules.pop("gradscale_ext.monitor.lightning", None)


@pytest.mark.parametrize("ends", ["fit", "exception", "writer that raises"])
def test_lightning_callback(fit, ends):
    """However a fit ends, all monitors write and are closed."""
    writer = FailingWriter("add_scalar", *[1] * (ends == "writer that raises"))
    callback, trainer, model = fit(writer)
    if ends == "exception":
        callback.on_exception(trainer, model, RuntimeError())
    else:
        with pytest.raises(OSError, match="disk full") if writer.failing else contextlib.nullcontext():
            callback.on_fit_end(trainer, model)
    assert [steps_of(watching, "gradient_norm_total") for watching in callback.monitors] == [[5], [5]]
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)
    if not writer.failing:
        assert writer.steps("optimizer0/gradient_norm/0.weight") == [5]
        assert writer.steps("optimizer1/gradient_norm/3.weight") == [5]
        assert writer.steps("optimizer0/gradient_norm/3.weight") == []


def test_without_lightning(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gradscale_ext.monitor.lightning", raising=False)
    with pytest.raises(ImportError, match="needs Lightning"):
        importlib.import_module("gradscale_ext.monitor.lightning")


def test_example(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(sys, "argv", ["plain_loop_monitor.py", "--directory", str(tmp_path), "--steps", "30"])
    runpy.run_path(str(EXAMPLES / "plain_loop_monitor.py"), run_name="__main__")
    assert "clipped at" in capsys.readouterr().out
    assert (tmp_path / "gradients.png").exists()
    assert list(tmp_path.glob("events.out.tfevents.*"))
