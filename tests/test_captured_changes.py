"""Captured steps whose surroundings change, or that do what a graph cannot: each raises, or equals plain calls."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import threading
import types
import warnings
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import tape
import torch
from tests_of_capture import Learner, batches, bits

import gradscale_ext as gs
from gradscale_ext.capture import graphs

settings = types.ModuleType("settings")
settings.__file__ = __file__


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    monkeypatch.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())


def run(make, is_captured, *, before=None, around=None, count=14, **options):
    """Call a step `count` times. `before(learner, index)` runs before each call, and each call in `around(index)`."""
    learner, step, *state = make()
    call = gs.CapturedStep(step, *learner.state(), *state, **options) if is_captured else step
    torch.manual_seed(7)
    results = []
    with contextlib.nullcontext() if is_captured else tape.TapeGraphs().side_by_side():
        for index, batch in enumerate(batches(count)):
            if before:
                before(learner, index)
            with around(index) if around else contextlib.nullcontext():
                results.append(call(*batch).detach())
    everything = [part for part in (*learner.state(), *state) if not isinstance(part, torch.Generator)]
    generators = [part.get_state() for part in state if isinstance(part, torch.Generator)]
    return call, bits([results, everything, generators, torch.get_rng_state()])


def equal(make, *, num_graphs=1, **options):
    """Assert that captured calls equal plain ones."""
    call, captured = run(make, True, **options)
    assert captured == run(make, False, **options)[1]
    assert len(call.graphs) == num_graphs
    return call


def refused(make, match, *, at=None, **options):
    """Assert that captured calls raise, with the state of the plain calls so far, and that the next calls go on."""
    made, seen = [], []

    def make_and_keep():
        made.append(make())
        return made[-1]

    def before(learner, index):
        seen.append(index)
        if given := options.get("before"):
            given(learner, index)

    with pytest.raises(RuntimeError, match=match) as caught:
        run(make_and_keep, True, **{**options, "before": before})
    assert at is None or seen[-1] == at
    return str(caught.value)


def learner_of(step=None, optimizer=None):
    def make():
        learner = Learner() if optimizer is None else Learner(optimizer)
        return learner, step(learner) if step else learner.step

    return make


def fused(parameters):
    return torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9, fused=True)


def at(index, change):
    """Make a change before one call."""
    return lambda learner, now: change(learner) if now == index else None


# ---- The state changes between calls ---------------------------------------------------------------------------------

CHANGES = {
    "freeze": lambda own: own.model.head.weight.requires_grad_(False),
    "buffer": lambda own: own.model.body[1].register_buffer("running_mean", torch.ones(16)),
    "module": lambda own: setattr(own.model, "head", torch.nn.Linear(16, 3)),
    "activation": lambda own: own.model.body.__setitem__(2, torch.nn.Tanh()),
    "data": lambda own: setattr(own.model.head.weight, "data", torch.ones(3, 16)),
    "moments": lambda own: own.optimizer.state.clear(),
    "memory of a gradient": lambda own: setattr(own.model.head.weight.grad, "data", torch.ones(3, 16)),
    "gradients": lambda own: own.optimizer.zero_grad(set_to_none=True),
    "zeros": lambda own: own.optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_is_changed(name):
    torch.manual_seed(0)
    equal(learner_of(), before=at(8, CHANGES[name]), num_graphs=2 if name == "freeze" else 1)


def test_a_buffer_that_is_replaced_before_each_call():
    """Right, but slower than plain calls."""

    def replace(learner, index):
        learner.model.body[1].running_var = torch.ones(16)

    with pytest.warns(UserWarning, match=r"running_var.* has been replaced between the calls 3 times") as caught:
        run(learner_of(), True, before=replace, count=20)
    assert len(caught) == 1


def test_a_group_of_parameters_that_is_added():
    def make():
        learner = Learner()
        learner.scale = torch.nn.Parameter(torch.ones(3))

        def step(x, y):
            return learner.minimize((learner.model(x) * learner.scale - y).square().mean())

        return learner, step, learner.scale

    equal(make, before=at(8, lambda own: own.optimizer.add_param_group({"params": [own.scale]})))


@pytest.mark.parametrize("verify", [0, 2])
def test_layers_that_are_frozen_and_thawed(verify):
    """Also the gradients of frozen parameters, which `zero_grad` removes."""
    equal(
        learner_of(),
        before=lambda own, index: own.model.body.requires_grad_(index % 4 < 2),
        num_graphs=3,
        verify=verify,
        count=20,
    )


def test_training_that_is_toggled():
    equal(learner_of(), before=lambda own, index: own.model.train(index % 2 == 0), num_graphs=2)


OPTIONS = {
    "lr": (0.05, r"\['lr'\] is 0\.05, but a graph keeps tensor\(0\.1000\).*write .*lr=torch\.tensor"),
    "momentum": (0.5, r"\['momentum'\] is 0\.5, but a graph keeps 0\.9.*call reset\(\) after a change"),
    "weight_decay": (0.1, r"\['weight_decay'\] is 0\.1, but a graph keeps 0.*call reset\(\) after a change"),
    "nesterov": (True, r"\['nesterov'\] is True, but a graph keeps False.*call reset\(\) after a change"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_an_optimizer_that_change(name):
    value, match = OPTIONS[name]
    change = at(8, lambda own: own.optimizer.param_groups[0].__setitem__(name, value))
    refused(learner_of(optimizer=fused), match, at=8, before=change)


def test_numbers_of_layers_that_change():
    for change in (
        lambda own: setattr(own.model.dropout, "p", 0.5),
        lambda own: setattr(own.model.body[1], "momentum", 0.5),
        lambda own: setattr(own.model, "forward", lambda x: own.model.head(x[:, :1].expand(-1, 16))),
    ):
        refused(learner_of(), "differs from a plain step", at=13, before=at(8, change))


def scaled_step(learner):
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=3)

    def step(x, y):
        loss = (learner.model(x) - y).square().mean()
        learner.optimizer.zero_grad()
        learner.scaler.scale(loss).backward()
        learner.scaler.step(learner.optimizer)
        learner.scaler.update()
        return loss

    return step


def test_a_scale_that_changes():
    """The scale is a tensor, which the scaler and the user may change."""

    def make():
        learner = Learner(fused)
        return learner, scaled_step(learner), learner.scaler

    equal(make)
    equal(make, before=at(8, lambda own: own.scaler.update(64.0)))
    text = refused(make, "differs from a plain step", before=at(8, lambda own: own.scaler.set_growth_factor(4.0)))
    assert "_amp_update_scale_ gets the number 2, then 4" in text


# ---- The context changes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(index):
    torch.set_default_dtype(torch.float64 if index >= 7 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def precision(index):
    torch.set_float32_matmul_precision("high" if index >= 7 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


CONTEXTS = {
    "autocast": lambda index: torch.autocast("cpu", dtype=torch.bfloat16, enabled=index >= 7),
    "dtype": default_dtype,
    "precision": precision,
    "device": lambda index: torch.device("cpu") if index >= 7 else contextlib.nullcontext(),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_has_a_graph_of_its_own(name):
    def step(learner):
        return lambda x, y: learner.step(x, y) + torch.zeros(())

    equal(learner_of(step), around=CONTEXTS[name], num_graphs=2)


def test_contexts_that_no_graph_sees():
    double = lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: 2 * x, lambda x: x)
    around = lambda index: double() if index >= 8 else contextlib.nullcontext()
    refused(learner_of(), r"saved_tensors_hooks is active.*update\.plain", at=8, around=around)


def test_a_context_in_which_the_step_fails():
    """The step's own error, and the calls after it are right."""
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    torch.manual_seed(7)
    for index, batch in enumerate(batches(12)):
        with torch.set_grad_enabled(index != 8):
            if index == 8:
                with pytest.raises(RuntimeError, match="does not require grad"):
                    update(*batch)
            else:
                update(*batch)
    torch.manual_seed(7)
    with tape.TapeGraphs().side_by_side():
        for index, batch in enumerate(batches(12)):
            if index == 8:
                with torch.no_grad():
                    reference.model(batch[0])
                reference.optimizer.zero_grad()
            else:
                reference.step(*batch)
    assert bits(learner.model.state_dict()) == bits(reference.model.state_dict())


# ---- The step reads what changes -------------------------------------------------------------------------------------


def test_arrays_that_change():
    """A number of an array of NumPy, too."""

    def make():
        learner = Learner()
        learner.scale = numpy.ones(3, dtype=numpy.float32)
        return learner, lambda x, y: learner.step(x, y * float(learner.scale[0]))

    equal(make)
    refused(make, "differs from a plain step", at=13, before=at(8, lambda own: own.scale.__setitem__(0, 2.0)))


def test_a_deque_of_tensors_that_changes():
    """The graph reads the memory that was captured."""

    def make():
        learner = Learner()
        learner.last = deque([torch.ones(3), torch.zeros(3)], maxlen=2)
        return learner, lambda x, y: learner.step(x, y * learner.last[0] + learner.last[1])

    equal(make)
    refused(make, "differs from a plain step", at=13, before=at(8, lambda own: own.last.append(torch.full((3,), 2.0))))


def test_functions_and_objects_that_are_replaced():
    def make():
        learner = Learner()
        learner.loss, learner.options = torch.nn.functional.mse_loss, {"scale": 1.0}

        def step(x, y):
            return learner.minimize(learner.loss(learner.model(x), y) * learner.options["scale"])

        return learner, step

    equal(make, before=lambda own, index: setattr(own, "options", {"scale": 1.0}))
    for change in (
        lambda own: setattr(own, "loss", torch.nn.functional.l1_loss),
        lambda own: setattr(own, "options", {"scale": 2.0}),
        lambda own: own.options.update(scale=2.0),
    ):
        refused(make, "differs from a plain step", at=13, before=at(8, change))


def test_a_key_that_is_renamed():
    """The dict has as many items, with the same values."""

    def make():
        learner = Learner()
        learner.options = {"scale": 2.0}

        def step(x, y):
            return learner.minimize((learner.model(x) - y).square().mean() * learner.options.get("scale", 1.0))

        return learner, step

    def rename(own):
        own.options["other"] = own.options.pop("scale")

    refused(make, "differs from a plain step", at=13, before=at(8, rename))


factor = 1.0


def helper(x):
    return x * factor


def test_a_global_of_a_function_that_the_step_calls(monkeypatch):
    def step(learner):
        return lambda x, y: learner.step(helper(x), y)

    change = at(8, lambda own: monkeypatch.setitem(globals(), "factor", 2.0))
    refused(learner_of(step), "differs from a plain step", at=13, before=change)


class AttributeDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


@dataclass(slots=True)
class Slots:
    scale: float = 0.5


class Defined:
    scale = 0.5


def _options(kind, learner):
    """A holder of `scale`, and what reads it in a step."""
    if kind == "options of a module":
        learner.model.options = holder = SimpleNamespace(scale=0.5)
        return holder, lambda: learner.model.options.scale
    if kind == "class":
        Defined.scale = 0.5
        own = Defined()
        return Defined, lambda: own.scale
    if kind == "module of Python":
        settings.scale = 0.5
        return settings, lambda: settings.scale
    if kind == "deep":
        learner.options = SimpleNamespace(agent=SimpleNamespace(loss=SimpleNamespace(scale=0.5)))
        return learner.options.agent.loss, lambda: learner.options.agent.loss.scale
    if kind == "dict with attributes":
        own = AttributeDict(loss=AttributeDict(scale=0.5))
        return own.loss, lambda: own.loss.scale
    holder = Slots() if kind == "slots" else SimpleNamespace(scale=0.5)
    if kind == "default":
        return holder, lambda options=holder: options.scale
    return holder, lambda: holder.scale


PLACES = ["options of a module", "class", "module of Python", "deep", "dict with attributes", "slots", "default"]


@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_stays_for_long(place):
    """Where programs keep their options. The next audit, at replay 11, finds the change."""
    learner = Learner()
    holder, scale = _options(place, learner)

    def make():
        return learner, lambda x, y: learner.step(scale() * x, y)

    def before(_, index):
        holder.scale = 0.5 if index < 10 else 0.25

    text = refused(
        make,
        "differs from a plain step, because the step has changed since it was captured: mul gets the number",
        at=13,
        before=before,
    )
    assert "the number 0.5, then 0.25 at tests/test_captured_changes.py" in text
    assert "replay 5 agreed; the plain step was kept" in text


class RunningMean:
    """State without a dict of attributes."""

    __slots__ = ("count", "decay", "limits", "mean")

    def __init__(self):
        self.limits, self.mean, self.decay, self.count = (-3.0, 3.0), torch.zeros(6), 0.9, 0

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean.copy_(state["mean"])


def test_state_in_slots():
    def make():
        learner, running = Learner(), RunningMean()

        def step(x, y):
            running.mean.lerp_(x.mean(0), 1 - running.decay)
            running.count += 0
            return learner.step((x - running.mean).clamp(*running.limits), y)

        return learner, step, running

    equal(make)
    _, _, running = made = make()
    before = running.mean.clone(), running.count
    gs.diagnose_capture(made[1], batches(2), *made[0].state(), running)
    assert torch.equal(running.mean, before[0])
    assert running.count == before[1]

    def make_and_change():
        learner, step, running = make()
        learner.running = running
        return learner, step, running

    refused(make_and_change, r"lerp_ gets the number 0\.1\d*, then 0\.5", at=13, before=at(10, _decay))


def _decay(learner):
    learner.running.decay = 0.5


def test_a_nan_is_equal_to_itself():
    learner = Learner()
    learner.best, learner.optimizer.param_groups[0]["best"] = float("nan"), float("nan")

    def step(x, y):
        return {"loss": learner.step(x, y), "return": float("nan")}

    update = gs.CapturedStep(step, *learner.state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(10):
            learner.best = float("nan")
            learner.optimizer.param_groups[0]["best"] = float("nan")
            update(*batch)
    assert update.is_captured


@pytest.mark.parametrize(
    "change",
    [lambda b: b.update(td=b["x"]), lambda b: b.pop("w"), lambda b: b.update(w=b["x"]), lambda b: b["log"].append(1)],
)
def test_arguments_that_the_step_changes(change):
    """A replay would not do it, and plain calls have copies."""
    learner = Learner()

    def step(batch):
        loss = learner.step(batch["x"], batch["y"])
        change(batch)
        return loss

    update = gs.CapturedStep(step, *learner.state())
    x, y = batches(1)[0]
    with pytest.raises(RuntimeError, match=r"puts something else in argument 0\['(td|w|log)'\].* dict\(batch\)"):
        update({"x": x, "y": y, "w": x[0], "log": []})
    with pytest.warns(UserWarning, match="something else"):
        gs.CapturedStep(step, *learner.state(), fallback="eager")({"x": x, "y": y, "w": x[0], "log": []})


def test_a_container_of_another_type_in_an_argument():
    learner = Learner()

    def step(batch):
        batch["log"] = tuple(batch["log"])
        return learner.step(batch["x"], batch["y"])

    update = gs.CapturedStep(step, *learner.state())
    x, y = batches(1)[0]
    with pytest.raises(RuntimeError, match=r"puts something else in the arguments, .* dict\(batch\)"):
        update({"x": x, "y": y, "log": [1.0]})


def test_a_sparse_argument():
    learner = Learner()
    x, y = batches(1)[0]
    with pytest.raises(TypeError, match=r"argument 0 is of layout torch.sparse_coo.*to_dense"):
        gs.CapturedStep(learner.step, *learner.state())(x.to_sparse(), y)


def test_a_form_whose_plain_call_raised_is_not_captured():
    learner = Learner()

    def step(x, y):
        return learner.step(x, y)

    update = gs.CapturedStep(step, *learner.state(), fallback="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(5):
            update(*batch)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
                update(torch.zeros(8, 5), batches(1)[0][1])
    assert update.is_captured


@pytest.mark.parametrize("kind", ["Python", "NumPy", "iterator", "deque", "list", "count"])
def test_steps_that_do_something_else_each_time(kind, monkeypatch):
    """Also where two plain steps differ as much as a replay and a plain step: that is no noise."""
    monkeypatch.setattr(threading, "active_count", lambda: 2)  # another thread may draw from a generator

    def make():
        learner = Learner()
        own, numbers = random.Random(3), numpy.random.default_rng(3)
        given, last, log, count = iter(batches(64, seed=5)), deque([1.0], maxlen=4), [], itertools.count(1)

        def step(x, y):
            if kind == "iterator":
                x, y = next(given)
            elif kind == "deque":
                last.append(last[-1] / 2)
            elif kind == "list":
                log.append(0)
            factor = {"Python": own.random, "NumPy": numbers.random, "deque": lambda: last[-1]}
            factor |= {"list": lambda: len(log), "count": lambda: next(count), "iterator": lambda: 1.0}
            return learner.step(x, y * factor[kind]())

        return learner, step

    text = refused(make, "differs from a plain step", at=3)
    assert "finding" in text
    assert ("host_copy" if kind == "iterator" else "stale_number") in text


@pytest.mark.parametrize("kind", ["same", "other", "generator"])
def test_seeds_in_the_step(kind):
    def make():
        learner, count, generator = Learner(), itertools.count(), torch.Generator()

        def step(x, y):
            if kind == "generator":
                return learner.step(x + torch.randn(x.shape, generator=generator.manual_seed(4)), y)
            torch.manual_seed(5 if kind == "same" else next(count))
            return learner.step(x, y)

        return learner, step, generator

    text = refused(make, "differs from a plain step", at=3)
    assert kind == "generator" or "in the state of PyTorch's generator of cpu; no replay of it agreed before" in text


@pytest.mark.parametrize("kind", ["attribute", "item", "variable", "tuple"])
def test_a_hidden_state_that_the_step_replaces(kind):
    """The capture leaves a tensor of the graph there, which the first audit reads."""

    def make():
        learner = Learner()
        hidden = torch.zeros(3)
        learner.hidden, learner.memory, learner.states = hidden, [hidden], (hidden, hidden)

        def step(x, y):
            nonlocal hidden
            own = {"attribute": learner.hidden, "item": learner.memory[0], "variable": hidden}
            out = learner.model(x) + own.get(kind, learner.states[1])
            learner.hidden = learner.memory[0] = hidden = out.detach().mean(0)
            learner.states = (0, hidden)
            return learner.minimize((out - y).square().mean())

        return learner, step

    text = refused(
        make, "replay 1 of this graph differs from a plain step, which reads a tensor of shape .3. that", at=3
    )
    assert "unnamed_state" in text


@pytest.mark.parametrize("kind", ["list", "deque", "dict", "dicts"])
def test_logs_of_tensors_in_the_step(kind):
    """Nothing reads what the captured call leaves there. A replay appends nothing."""

    def make():
        learner = Learner()
        learner.log = {"list": [], "deque": deque(maxlen=20), "dict": {}, "dicts": []}[kind]
        made.append(learner)

        def step(x, y):
            loss = learner.step(x, y)
            if kind == "dict":
                learner.log[len(learner.log)] = loss.detach()
            else:
                learner.log.append({"loss": loss.detach()} if kind == "dicts" else loss.detach())
            return loss

        return learner, step

    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal(make)
    assert len(made[0].log) == 3 + 1 + 5, "warm-up, the captured call, and audits at replays 1, 2, 3, 5 and 11"


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("name", ["ExponentialLR", "CosineAnnealingLR", "StepLR"])
def test_schedules_inside_of_the_step(name, is_named):
    """Also with a rate that is a tensor: a schedule decides on the host what to do."""
    options = {"ExponentialLR": {"gamma": 0.9}, "CosineAnnealingLR": {"T_max": 10}, "StepLR": {"step_size": 10}}[name]

    def make():
        learner = Learner(fused)
        schedule = getattr(torch.optim.lr_scheduler, name)(learner.optimizer, **options)

        def step(x, y):
            loss = learner.step(x, y)
            schedule.step()
            return loss

        return learner, step, *([schedule] if is_named else [])

    text = refused(
        make, r"last_epoch \(3, then 4\), which a replay does not|step calls \w+\.step\(\), which counts", at=3
    )
    assert "step() outside of the step" in text


@pytest.mark.parametrize("changed", [False, True])
def test_an_average_with_a_number(changed):
    def make():
        learner = Learner()
        learner.decay, target = 0.1, copy.deepcopy(learner.model)

        def step(x, y):
            loss = learner.step(x, y)
            with torch.no_grad():
                for old, new in zip(target.parameters(), learner.model.parameters(), strict=True):
                    old.lerp_(new, learner.decay)
            return loss

        return learner, step, target

    if changed:
        refused(
            make,
            "lerp_ gets the number 0.1, then 0.5",
            at=13,
            before=at(9, lambda own: setattr(own, "decay", 0.5)),
        )
    else:
        equal(make)


def test_a_mode_that_the_step_leaves_changed():
    def step(learner):
        def call(x, y):
            learner.model.train()
            loss = learner.step(x, y)
            learner.model.eval()
            return loss

        return call

    refused(learner_of(step), r"Model.*\.training", at=3, before=lambda own, index: own.model.train())

    def freezing(learner):
        def call(x, y):
            loss = learner.step(x, y)
            learner.model.head.bias.requires_grad_(not learner.model.head.bias.requires_grad)
            return loss

        return call

    refused(learner_of(freezing), r"Model\.head\.bias\.requires_grad \(False, then True\)", at=3)


# ---- Calls -----------------------------------------------------------------------------------------------------------


def test_a_captured_step_inside_of_another():
    """The inner step becomes a part of the outer one's graph."""

    def make(is_captured):
        learner = Learner()
        inner = gs.CapturedStep(learner.step, *learner.state()) if is_captured else learner.step
        if is_captured:
            torch.manual_seed(1)
            for batch in batches(6, seed=9):
                inner(*batch)
        else:
            torch.manual_seed(1)
            with tape.TapeGraphs().side_by_side():
                for batch in batches(6, seed=9):
                    learner.step(*batch)
        return learner, lambda x, y: inner(x, y) * 2

    outer, captured = run(lambda: make(True), True)
    assert captured == run(lambda: make(False), False)[1]
    assert len(outer.graphs) == 1
    learner, step = make(True)
    assert gs.diagnose_capture(step, batches(2), *learner.state()).ok


def test_views_of_arguments():
    def step(learner):
        def call(x, y):
            learner.step(x, y)
            return x[:2].T

        return call

    equal(learner_of(step))


def test_gradients_of_arguments():
    """A gradient penalty, for example: the step asks for the gradient of its input."""

    def step(learner):
        def call(x, y):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(learner.model(x).sum(), x, create_graph=True)
            learner.minimize((slope.norm(dim=1) - 1).square().mean())
            return slope

        return call

    equal(learner_of(step))


def test_zeros_and_nan_as_arguments():
    """-0.0 is another number than 0.0, and NaN is the same at each call."""
    learner = Learner()
    update = gs.CapturedStep(lambda x, y, number: learner.step(x, y) * math.copysign(1.0, number), *learner.state())
    for index, batch in enumerate(batches(16)):
        number = (0.0, -0.0, float("nan"))[index % 3]
        assert (update(*batch, number) < 0) == (index % 3 == 1)
    assert [info.signature.rpartition(" ")[2] for info in update.graphs] == ["0.0", "-0.0", "nan"]


def test_an_argument_that_is_a_generator():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    with pytest.raises(TypeError, match=r"argument 0 is of type generator, but arguments and results are tensors"):
        update((x for x, _ in batches(1)), None)


def test_another_thread_makes_some_of_the_calls():
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    torch.manual_seed(7)
    for index, batch in enumerate(batches(14)):
        if index % 3 == 1:
            thread = threading.Thread(target=update, args=batch)
            thread.start()
            thread.join()
        else:
            update(*batch)
    torch.manual_seed(7)
    with tape.TapeGraphs().side_by_side():
        for batch in batches(14):
            reference.step(*batch)
    assert bits(learner.state()) == bits(reference.state())
    assert len(update.graphs) == 1
