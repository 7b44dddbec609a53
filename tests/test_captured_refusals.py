"""What `CapturedStep` refuses or warns about is a finding of `diagnose_capture`, and right steps have neither."""

from __future__ import annotations

import copy
import random
import warnings
from types import SimpleNamespace

import numpy
import pytest
import tape
import torch
import torch.nn.utils.prune
from tests_of_capture import Learner, batches

import gradscale_ext as gs
from gradscale_ext.capture import graphs


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    monkeypatch.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())
    yield
    torch.use_deterministic_algorithms(False)


def complaint(step, state, given, before=lambda: None, after=lambda: None):
    """The error or the warning of a captured step, until its first audits; empty if there is neither."""
    update = gs.CapturedStep(step, *state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            for batch in given:
                before()
                update(*batch)
                after()
        except (RuntimeError, TypeError, ValueError, UserWarning) as error:
            return str(error)
    return ""


class Counting:
    """A learner whose step does something that a graph cannot repeat."""

    def __init__(self):
        self.learner, self.updates, self.statistics = Learner(), 0, {}
        self.target = copy.deepcopy(self.learner.model)
        self.draws = random.Random(1)

    def step_of(self, kind):
        return getattr(self, kind)

    def writes_to_an_argument(self, x, y):
        x.mul_(2.0)
        return self.learner.step(x, y)

    def writes_to_a_container(self, batch):
        batch["h"] = self.learner.step(batch["x"], batch["y"])
        return batch["h"]

    def counts(self, x, y):
        self.updates += 1
        return self.learner.step(x, y)

    def branches_rarely(self, x, y):
        self.updates += 1
        if self.updates % 100 == 0:
            self.target.load_state_dict(self.learner.model.state_dict())
        return self.learner.step(x, y)

    def returns_an_object(self, x, y):
        return SimpleNamespace(loss=self.learner.step(x, y))

    def toggles_a_mode(self, x, y):
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
        return self.learner.step(x, y)

    def leaves_eval(self, x, y):
        loss = self.learner.step(x, y)
        self.learner.model.eval()
        return loss

    def wants_a_gradient(self, x, y):
        return self.learner.step(x, y)

    def draws_rarely(self, x, y):
        return self.learner.step(x * (2 if self.draws.random() < 0.01 else 1), y)


REFUSED = {
    "writes_to_an_argument": ("argument", "the step writes to argument 0"),
    "writes_to_a_container": ("argument", "the step puts something else in argument 0['h']"),
    "counts": ("stale_number", "the step changes self.updates"),
    "branches_rarely": ("stale_number", "the step changes self.updates"),
    "returns_an_object": ("argument", "its result is of type SimpleNamespace"),
    "leaves_eval": ("stale_number", "the step changes Model"),
    "toggles_a_mode": ("stale_number", "the step changes PyTorch's deterministic mode"),
    "wants_a_gradient": ("argument", "argument 0 requires grad"),
    "draws_rarely": ("generator", "the step draws from a random.Random"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_is_found(kind):
    code, cause = REFUSED[kind]

    def given(count):
        if kind == "writes_to_a_container":
            return [({"x": x, "y": y},) for x, y in batches(count)]
        return [(x.requires_grad_(kind == "wants_a_gradient"), y) for x, y in batches(count)]

    agents = Counting(), Counting()
    own = [agent.step_of(kind) for agent in agents]
    states = [(*agent.learner.state(), agent.target) for agent in agents]
    if kind == "leaves_eval":
        model = agents[0].learner.model
        assert cause in complaint(own[0], states[0], given(4), before=model.train)
    else:
        assert cause in complaint(own[0], states[0], given(4))
    found = gs.diagnose_capture(own[1], given(2), *states[1]).findings
    assert any(finding.code == code and cause in finding.cause for finding in found), found


def test_a_kept_loss_is_refused_and_found():
    """Not a loss that the step itself keeps: its graph is on the stream that is captured."""
    learners, kept = [Learner() for _ in range(3)], []

    def keeping(x, y):
        kept.append(learners[2].step(x, y))
        return kept[-1]

    x, y = batches(1)[0]
    losses = [(learner.model(x) - y).square().mean() for learner in learners[:2]]
    text = complaint(learners[0].step, learners[0].state(), batches(4))
    (finding,) = gs.diagnose_capture(learners[1].step, batches(2), *learners[1].state()).findings
    assert finding.code == "unnamed_state"
    assert f"{finding.cause}; {finding.remedy}" in text
    assert "its graph reaches Model.body.0.weight" in finding.cause
    assert finding.remedy == "keep loss.detach() in place of loss"
    del losses
    assert gs.diagnose_capture(learners[1].step, batches(2), *learners[1].state()).ok
    assert gs.diagnose_capture(keeping, batches(2), *learners[2].state()).ok
    kept.clear()
    assert complaint(keeping, learners[2].state(), batches(6)) == ""


# ---- Right steps have neither a finding nor a warning ----------------------------------------------------------------


def old_norms(learner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(learner.model.head)
        torch.nn.utils.spectral_norm(learner.model.body[0])
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.1)
    return learner.step


def new_norms(learner):
    torch.nn.utils.parametrizations.weight_norm(learner.model.head)
    torch.nn.utils.parametrizations.spectral_norm(learner.model.body[0])
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.1)
    return learner.step


def statistics(learner):
    learner.statistics = {}

    def step(x, y):
        loss = learner.step(x, y)
        learner.last_loss = learner.statistics["loss"] = loss.detach()
        for name, parameter in learner.model.named_parameters():
            learner.statistics[name] = parameter.grad.norm()
        return loss

    return step


def a_flag(learner):
    return lambda x, y, is_warm: learner.step(x * 2 if is_warm else x, y)


RIGHT = {"old norms": old_norms, "new norms": new_norms, "statistics": statistics, "a flag": a_flag}


@pytest.mark.parametrize("kind", [*RIGHT, "two sizes"])
def test_right_steps(kind):
    learners = Learner(), Learner()
    steps = [RIGHT.get(kind, lambda learner: learner.step)(learner) for learner in learners]

    def given(count):
        if kind == "two sizes":
            return batches(count) + batches(count, size=5)
        return [(*batch, index % 2 == 0) if kind == "a flag" else batch for index, batch in enumerate(batches(count))]

    assert complaint(steps[0], learners[0].state(), given(16)) == ""
    diagnosis = gs.diagnose_capture(steps[1], given(2), *learners[1].state())
    assert diagnosis.ok, str(diagnosis)


def test_pruning_between_calls():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, batch in enumerate(batches(24)):
            if index in (8, 14):
                torch.nn.utils.prune.l1_unstructured(learner.model.head, "weight", 0.2)
            update(*batch)
    assert update.is_captured


# ---- Reads inside of operators ---------------------------------------------------------------------------------------


def square(x):
    return x.T @ x + 3 * torch.eye(x.shape[1], device=x.device)


EMBEDDING = torch.nn.Embedding(5, 3, max_norm=1.0)
READS = {
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(1).sum(),
    "cumprod": lambda x: x.cumprod(1).sum(),
    "det": lambda x: torch.linalg.det(square(x)),
    "slogdet": lambda x: torch.linalg.slogdet(square(x))[1],
    "svdvals": lambda x: torch.linalg.svdvals(x).sum(),
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[1].sum(),
    "eigh": lambda x: torch.linalg.eigh(square(x))[0].sum(),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(square(x)).sum(),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, ord=2),
    "pinv": lambda x: torch.linalg.pinv(x).sum(),
    "lstsq": lambda x: torch.linalg.lstsq(x, x).solution.sum(),
    "histc": lambda x: x.sum() + x.detach().histc(4).sum(),
    "Embedding": lambda x: x.sum() + EMBEDDING((x[:2, 0] > 0).long()).sum(),
    "inv": lambda x: torch.linalg.inv(square(x)).sum(),
}
INSTEAD = {
    "prod": lambda x: torch.exp(torch.log(x.abs() + 1).sum(1)).sum(),
    "cumprod": lambda x: torch.exp(torch.log(x.abs() + 1).cumsum(1)).sum(),
    "slogdet": lambda x: torch.linalg.lu_factor_ex(square(x))[0].diagonal(dim1=-2, dim2=-1).abs().log().sum(-1),
    "histc": lambda x: x.sum() + x.detach().histc(4, -1, 1).sum(),
    "inv": lambda x: torch.linalg.inv_ex(square(x))[0].sum(),
    "solve": lambda x: torch.linalg.solve_ex(square(x), x.T)[0].sum(),
    "max": lambda x: x.max() + x.min() + x.median(),
    "std": lambda x: x.std() + x.var(0).sum(),
    "multinomial": lambda x: x.sum() + torch.multinomial(x.detach().softmax(1), 1).sum(),
    "norm": lambda x: x.norm() + torch.linalg.vector_norm(x),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "cross_entropy": lambda x: torch.nn.functional.cross_entropy(x, x.detach().argmax(1)),
}


def step_with(learner, read):
    def step(x, y):
        hidden = learner.model(x)
        return learner.minimize((hidden - y).square().mean() + read(hidden))

    return step


@pytest.mark.parametrize("name", READS)
def test_reads_inside_of_operators(name):
    """At the operator's line in the forward pass, also if the backward pass reads. The stand-in refuses them, too."""
    learner = Learner()
    diagnosis = gs.diagnose_capture(step_with(learner, READS[name]), batches(2), *learner.state(), EMBEDDING)
    (finding,) = [finding for finding in diagnosis.findings if finding.code == "sync"]
    assert "lambda x" in finding.source, finding
    assert "cannot be captured" in complaint(step_with(learner, READS[name]), [*learner.state(), EMBEDDING], batches(4))


def test_the_line_of_a_read_in_the_backward_pass():
    """Not of another such operator that has no gradient."""
    learner = Learner()

    def step(x, y):
        hidden = learner.model(x)
        factor = hidden.detach().prod()
        loss = (hidden - y).square().mean() + hidden.prod(1).sum()  # here
        learner.minimize(loss)
        return loss, factor, x.prod()

    (finding,) = gs.diagnose_capture(step, batches(2), *learner.state()).findings
    assert finding.code == "sync"
    assert finding.source.endswith("# here")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):  # of the user: no second one
        assert gs.diagnose_capture(step, batches(2), *learner.state()).ok


@pytest.mark.parametrize("name", INSTEAD)
def test_what_operators_read_on_a_cpu_only(name):
    learner = Learner()
    diagnosis = gs.diagnose_capture(step_with(learner, INSTEAD[name]), batches(2), *learner.state())
    assert diagnosis.ok, str(diagnosis)
    assert complaint(step_with(learner, INSTEAD[name]), learner.state(), batches(5)) == ""


REFUSED_OPERATORS = {
    "a boolean index": lambda x: x[x > 0].sum(),
    "repeat_interleave": lambda x: x[0].repeat_interleave((x[0] > 0).long()).sum(),
    "bincount": lambda x: x.sum() + (x > 0).long().flatten().bincount().sum(),
    "torch.inverse": lambda x: torch.inverse(square(x)).sum(),
}


@pytest.mark.parametrize("name", REFUSED_OPERATORS)
def test_what_the_stand_in_refuses(name):
    learner = Learner()
    assert "cannot be captured" in complaint(step_with(learner, REFUSED_OPERATORS[name]), learner.state(), batches(4))


# ---- The host --------------------------------------------------------------------------------------------------------

FACTORIES = {
    "linspace": lambda x: torch.linspace(0, 1, 3).to(x),
    "arange": lambda x: torch.arange(3.0).to(x.device),
    "ones": lambda x: torch.ones(3),
    "eye": lambda x: torch.eye(3, dtype=x.dtype)[0],
    "device is None": lambda x: torch.zeros(3, device=None),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_without_a_device(name):
    learner = Learner()
    diagnosis = gs.diagnose_capture(lambda x, y: learner.step(x, y + FACTORIES[name](y)), batches(2), *learner.state())
    (finding,) = diagnosis.findings
    assert finding.code == "host_copy"
    assert "lambda x" in finding.source
    assert "device=x.device" in finding.remedy


def test_factories_with_a_device():
    learner = Learner()

    def step(x, y):
        learner.step(x, y + torch.linspace(0, 1, 3, device=x.device) + torch.zeros_like(y) + y.new_ones(3))
        with torch.device("cpu"):
            return torch.ones(3)

    assert gs.diagnose_capture(step, batches(2), *learner.state()).ok


def test_the_line_of_a_draw():
    """Not of the operator that comes next."""
    learner, own = Learner(), numpy.random.default_rng(1)

    def step(x, y):
        scale = numpy.random.rand()  # global
        shift = own.random()  # own
        index = random.randint(0, 2)  # Python
        return learner.step(x + 0 * (scale + shift + index), y)

    found = [f for f in gs.diagnose_capture(step, batches(2), *learner.state()).findings if f.code == "generator"]
    assert sorted(finding.source.partition("# ")[2] for finding in found) == ["Python", "global", "own"]
    assert {finding.remedy for finding in found} == {"draw before the step, and pass tensors as arguments"}


# ---- Advice ----------------------------------------------------------------------------------------------------------


def test_advice_for_distributions(monkeypatch):
    """It can be followed for OneHotCategorical, too."""
    learner, kind = Learner(), torch.distributions.Distribution
    monkeypatch.setattr(kind, "_validate_args", True)

    def step(x, y):
        return learner.step(x, y) + 0 * torch.distributions.OneHotCategorical(logits=y).sample().sum()

    finding = gs.diagnose_capture(step, batches(2), *learner.state()).findings[0]
    assert "Distribution.set_default_validate_args(False)" in finding.remedy
    kind.set_default_validate_args(False)
    assert gs.diagnose_capture(step, batches(2), *learner.state()).ok


def test_an_argument_that_is_another_number_in_each_batch():
    """Each number would have a graph of its own."""
    learner = Learner()
    step = lambda x, y, beta: learner.step(x * beta, y)
    given = [(*batch, beta) for batch, beta in zip(batches(2), (0.1, 0.2), strict=True)]
    (finding,) = gs.diagnose_capture(step, given, *learner.state()).findings
    assert finding.cause == "argument 2 is another number in each batch: 0.1, then 0.2"
    assert finding.remedy == "pass a tensor, whose value may change"
    assert gs.diagnose_capture(step, [(*batch, 0.5) for batch in batches(2)], *learner.state()).ok


def test_advice_for_an_early_stop():
    learner = Learner()

    def step(x, y):
        for _ in range(3):
            loss = learner.step(x, y)
            if loss > 100:
                break
        return loss

    finding = gs.diagnose_capture(step, batches(2), *learner.state()).findings[0]
    assert "an early stop goes between captured steps" in finding.remedy


def test_advice_for_averaged_weights():
    learner = Learner()
    average = torch.optim.swa_utils.AveragedModel(learner.model)

    def step(x, y):
        loss = learner.step(x, y)
        average.update_parameters(learner.model)
        return loss

    finding = gs.diagnose_capture(step, batches(2), *learner.state(), average).findings[0]
    assert finding.remedy == "call update_parameters() outside of the step"


# ---- Changes between the calls ---------------------------------------------------------------------------------------


def test_options_that_change_have_names_and_both_values():
    learner = Learner(lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, fused=True))
    update = gs.CapturedStep(learner.step, *learner.state())
    [update(*batch) for batch in batches(6)]
    learner.optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(RuntimeError, match=r"SGD\.param_groups\[0\]\['momentum'\] is 0\.5, but a graph keeps 0\.9"):
        update(*batches(1)[0])


def test_a_scaler_that_is_updated_outside_of_the_step():
    """The step leaves what it found in the scaler, which `update()` reads."""
    learner = Learner(lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

    def step(x, y):
        loss = (learner.model(x) - y).square().mean()
        learner.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(learner.optimizer)
        return loss

    text = complaint(step, [*learner.state(), scaler], batches(5), after=scaler.update)
    assert "the step calls GradScaler.step() without GradScaler.update(), which would find nothing" in text
    assert "call update() in the step, too" in text


def test_a_tensor_in_an_unnamed_object():
    """The first audit says what to write."""
    learner, memory = Learner(), SimpleNamespace(hidden=torch.zeros(3))

    def step(x, y):
        out = learner.model(x) + memory.hidden
        memory.hidden = out.detach().mean(0)
        return learner.minimize((out - y).square().mean())

    text = complaint(step, learner.state(), batches(6))
    assert "which reads a tensor of shape [3] that the captured step made and left somewhere" in text
    assert "write to it with copy_(), and name it in the state" in text
