"""What guards do not see between two calls: an audit finds it, with the line and the number."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import warnings
import weakref
from types import SimpleNamespace

import numpy
import pytest
import tape
import torch
from tests_of_capture import Learner, batches

import gradscale_ext as gs
from gradscale_ext.capture import graphs
from gradscale_ext.capture.audit import next_audit


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    monkeypatch.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())


def calls_until_error(step, state, match, *, change=lambda index: None, count=120, **options):
    """Calls from the change on until one raises, which `match` describes. `change(index)` returns True if it changes
    something."""
    update, since = gs.CapturedStep(step, *state, **options), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, batch in enumerate(batches(count)):
            if change(index) and since is None:
                since = index
            try:
                update(*batch)
            except RuntimeError as error:
                if match not in str(error):
                    raise
                return index - (since or 0)
    return None


def test_audits_are_at_primes():
    numbers = [0]
    while numbers[-1] < 6000:
        numbers.append(next_audit(numbers[-1], verify=2, audit=1024))
    assert numbers[1:] == [1, 2, 3, 5, 11, 23, 47, 97, 193, 389, 787, 1579, 2609, 3637, 4663, 5689, 6719]
    assert next_audit(2, verify=2, audit=0) == 0
    assert next_audit(0, verify=0, audit=8) == 3


def test_audits_are_listed():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state(), audit=4)
    for batch in batches(24):
        update(*batch)
    assert [audit.replay for audit in update.audits] == [1, 2, 3, 5, 11, 17]
    assert {(audit.graph, audit.largest_difference) for audit in update.audits} == {(0, 0.0)}


def test_a_tensor_that_is_replaced_by_an_equal_one():
    """The graph keeps the old one alive, and is captured again at the next audit."""
    learner = Learner()
    options = SimpleNamespace(scale=torch.full((3,), 0.5))
    update = gs.CapturedStep(lambda x, y: learner.step(x, y * options.scale), *learner.state())
    for batch in batches(8):
        update(*batch)
    old = weakref.ref(options.scale.untyped_storage())
    memory = options.scale.data_ptr()
    options.scale = options.scale.clone()
    gc.collect()
    (graph,) = update._captured
    assert any(one.data_ptr() == memory for one in graph.record.foreign.values())
    assert old() is not None
    for batch in batches(10):
        update(*batch)
    assert [audit.graph for audit in update.audits] == [0] * 5 + [1] * 3
    assert update.is_captured
    assert graph is not update._captured[0]


def test_a_number_without_an_effect_on_the_batch():
    """The limit of a clip that nothing reaches."""
    learner, options = Learner(), SimpleNamespace(limit=1e6)

    def change(index):
        options.limit = 1e6 if index < 8 else 2e6
        return index >= 8

    found = calls_until_error(
        lambda x, y: learner.step(x.clamp(max=options.limit), y),
        learner.state(),
        "clamp gets the number 1e+06, then 2e+06 at tests/test_captured_audits.py",
        change=change,
    )
    assert found == 5


def test_a_step_that_draws_on_the_host():
    """No two plain steps are a measure of the noise."""
    for seed in range(8):
        learner, staging, draws = Learner(), torch.zeros(8, 6), numpy.random.default_rng(seed)

        def step(x, y, learner=learner, staging=staging, draws=draws):
            staging.copy_(torch.from_numpy(draws.random((8, 6), dtype=numpy.float32)))
            return learner.step(x + staging, y)

        assert calls_until_error(step, [*learner.state(), staging], "", count=8) == 3


@pytest.mark.parametrize("kind", ["slice", "transposed"])
def test_parameters_whose_layout_changes(kind):
    learner = Learner()
    bank = torch.randn(2, 16, 16)
    learner.model.square = torch.nn.Parameter(bank[0])

    def step(x, y):
        return learner.step(x, y) + (learner.model.square * torch.arange(16.0)).sum().detach()

    learner.model.register_buffer("steps", torch.arange(16.0))
    update = gs.CapturedStep(step, *learner.state())
    for batch in batches(10):
        update(*batch)
    assert update._captured[0].guards.compiled.hold()
    learner.model.square.data = bank[1] if kind == "slice" else bank[0].t()
    assert not update._captured[0].guards.compiled.hold()


def test_memory_that_is_resized():
    """The storage is the same object, at another address: another graph is captured."""
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    for batch in batches(10):
        update(*batch)
    weight = learner.model.head.weight
    before = weight.data_ptr()
    weight.untyped_storage().resize_(2**24)
    assert weight.data_ptr() != before
    for batch in batches(2):  # before the next audit of the first graph
        update(*batch)
    assert {audit.graph for audit in update.audits} == {0, 1}


@pytest.mark.parametrize("make", [numpy.random.default_rng, numpy.random.RandomState, random.Random])
def test_a_generator_that_chooses_rarely(make, monkeypatch):
    """Refused when it is captured. If other threads run, which may have drawn the numbers, a warning."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    learner, draws = Learner(), make(0)
    draw = draws.random if hasattr(draws, "random") else draws.random_sample
    step = lambda x, y: learner.step(x * (2 if draw() < 0.01 else 1), y)
    match = "the step draws from a "
    assert calls_until_error(step, learner.state(), match) == 3
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    update = gs.CapturedStep(step, *learner.state())
    with pytest.warns(UserWarning, match=match):
        [update(*batch) for batch in batches(4)]


def test_a_loss_that_is_kept():
    learner = Learner()
    kept = (learner.model(batches(1)[0][0])).sum()
    update = gs.CapturedStep(learner.step, *learner.state())
    with pytest.raises(RuntimeError, match=r"is still kept, and its graph reaches Model\..*loss\.detach\(\)"):
        [update(*batch) for batch in batches(4)]
    del kept
    update(*batches(1)[0])
    assert update.is_captured


class Wrong:
    """Steps that a graph repeats wrongly. `change` is called before the call with index 9, and later."""

    def __init__(self):
        self.learner = Learner()
        self.state = list(self.learner.state())
        self.own = SimpleNamespace(a=SimpleNamespace(b=[{"c": 1.0}]), nets=[torch.nn.Linear(6, 6) for _ in range(2)])
        self.log, self.which, self.text = [], 0, "mean"
        self.bank = torch.randn(4, 6)
        self.count = itertools.count(1)
        self.scale = torch.ones(6)

    def step_of(self, name):
        call, own = self.learner.step, self.own
        return {
            "number in a list of dicts": lambda x, y: call(x * own.a.b[0]["c"], y),
            "length of a list": lambda x, y: call(x * (1 + len(self.log)), y),
            "choice of a network": lambda x, y: call(own.nets[self.which](x).detach(), y),
            "row of a bank": lambda x, y: call(x + self.bank[self.which], y),
            "name of a reduction": lambda x, y: call(x + getattr(torch, self.text)(x), y),
            "exponent": lambda x, y: call(x.abs() ** self.which, y),
            "dtype": lambda x, y: call(x.to(torch.float64 if self.which else torch.float32).float(), y),
            "order of operands": lambda x, y: call(x - x.flip(0) if self.which else x.flip(0) - x, y),
            "another tensor": lambda x, y: call(x * self.scale, y),
            "iterator": lambda x, y: call(x / next(self.count), y),
            "size": lambda x, y: call(x + x[: 1 + self.which].mean(0), y),
            "branch": lambda x, y: call(x.tanh() if self.which else x, y),
        }[name]

    def change(self, index):
        if index >= 9:
            self.own.a.b[0]["c"], self.which, self.text = 0.5, 1, "amax"
            self.log = [1]
            self.scale = torch.full((6,), 2.0) if index == 9 else self.scale
        return index >= 9


NAMES = [
    "number in a list of dicts", "length of a list", "choice of a network", "row of a bank", "name of a reduction",
    "exponent", "dtype", "order of operands", "another tensor", "iterator", "size", "branch",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_twelve_wrong_steps_are_found_at_the_next_audit(name):
    """The change comes before replay 7; the next audit is at replay 11."""
    wrong = Wrong()
    found = calls_until_error(wrong.step_of(name), wrong.state, "differs from a plain step", change=wrong.change)
    assert found == (3 if name == "iterator" else 4)
