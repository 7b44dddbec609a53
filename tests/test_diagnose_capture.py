"""`diagnose_capture`: what a CUDA graph of a step would get wrong, with the line, and nothing else."""

from __future__ import annotations

import copy
import logging
import random
from dataclasses import dataclass

import numpy
import pytest
import torch
from tests_of_capture import Learner, batches, bits

import gradscale_ext as gs
from gradscale_ext.capture.modes import Modes


def codes(diagnosis):
    return [(finding.code, finding.source) for finding in diagnosis.findings]


def found(step, *state, given=None, before=lambda: None):
    """The findings, after a check that everything is as it was."""
    before()
    everything = bits(list(state))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    diagnosis = gs.diagnose_capture(step, given or batches(2), *state)
    assert bits(list(state)) == everything
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert diagnosis.ok == (not diagnosis.findings)
    return diagnosis


def only(diagnosis):
    assert len(diagnosis.findings) == 1, str(diagnosis)
    return diagnosis.findings[0]


# ---- Steps that a graph repeats --------------------------------------------------------------------------------------

RIGHT = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam_fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw_tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_where_nothing_is_wrong(name):
    learner = Learner(RIGHT[name])
    diagnosis = found(learner.step, *learner.state())
    assert diagnosis.ok
    assert "No findings: a graph of this step" in str(diagnosis)


def test_a_muzero_step_with_everything_of_this_package():
    """One-hot actions, an unroll, a loss with weights, returns, clipping and a target network."""
    torch.manual_seed(0)
    encoder, dynamics, head = torch.nn.Linear(6, 8), torch.nn.Linear(8 + 3, 8), torch.nn.Linear(8, 11 + 11 + 3)
    model = torch.nn.ModuleList([encoder, dynamics, head])
    target = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_fn = gs.MultiStepLoss.muzero(gs.Support(-5, 5, 11))
    clip = gs.ClipGradientNorm(1.0, batch_dims=1)

    def heads(hidden):
        return dict(zip(("value", "reward", "policy"), head(clip(hidden)).split((11, 11, 3), 1), strict=True))

    def initial(x):
        hidden = encoder(x).tanh()
        return heads(hidden), hidden

    def recurrent(hidden, action):
        one_hot = torch.nn.functional.one_hot(action, 3).float()
        hidden = dynamics(torch.cat([hidden, one_hot], 1)).tanh()
        return heads(hidden), hidden

    def step(x, actions, rewards, weights):
        root = gs.signed_hyperbolic(rewards.new_zeros(len(x), 8))
        targets = gs.muzero_targets(rewards, root, num_unroll_steps=3, td_steps=2, discount=0.9, root_reward=x[:, 0])
        policy = torch.softmax(rewards[:, :4, None].expand(-1, -1, 3), -1)
        out = loss_fn(
            gs.unroll(initial, recurrent, x, actions),
            {"value": targets.values, "reward": targets.rewards, "policy": policy},
            step_gradient_scale="unroll",
            importance_weights=weights,
            mask=targets.mask,
        )
        optimizer.zero_grad()
        (out.loss + gs.l2_loss(model, 1e-4)).backward()
        gs.clip_gradients_(model, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), 0.01)
        return out.loss, gs.priorities(out.expected["value"], targets.values)

    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn(5, 6, generator=generator),
            torch.randint(3, (5, 3), generator=generator),
            torch.randn(5, 7, generator=generator),
            torch.rand(5, generator=generator),
        )

    diagnosis = found(step, model, target, optimizer, clip, given=[batch(1), batch(2)])
    assert diagnosis.ok, str(diagnosis)
    assert diagnosis.num_calls < 900


def test_what_pytorch_checks_on_a_cpu_only():
    learner = Learner()

    def step(x, y):
        torch.nn.functional.one_hot(y.argmax(1), 3)
        y = y.clone()
        y[y > 0] = 0.0
        torch.quantile(y, 0.5)
        return learner.step(x, y.masked_fill(y > 1, 1.0))

    assert found(step, *learner.state()).ok


def test_caches_and_constants_outside_of_the_state():
    learner, mask = Learner(), torch.ones(3)
    learner.model.cache = None

    def step(x, y):
        if learner.model.cache is None:
            learner.model.cache = torch.arange(3.0)
        return learner.step(x, y * mask + learner.model.cache)

    assert found(step, *learner.state()).ok


CAPTURING = {
    "torch.cuda": lambda: torch.cuda.is_current_stream_capturing(),
    "torch.cuda.graphs": lambda: torch.cuda.graphs.is_current_stream_capturing(),
    "available": lambda: torch.cuda.is_available() and torch.cuda.is_current_stream_capturing(),
    "torch._C": lambda: torch.cuda.is_available() and torch._C._cuda_isCurrentStreamCapturing(),
}


@pytest.mark.parametrize("name", CAPTURING)
def test_checks_that_a_capture_leaves_out(name):
    """PyTorch answers as during a capture, except in the first call, which stands for a plain one."""
    learner, answers = Learner(), []

    def step(x, y):
        is_plain = not answers and not torch.cuda.is_available()  # a CPU build of PyTorch raises when it is asked
        answers.append(CAPTURING["available" if is_plain else name]())
        if not answers[-1] and not (x == x).all():
            raise ValueError
        return learner.step(x, y)

    is_available = torch.cuda.is_available
    assert found(step, *learner.state()).ok
    assert answers == [False, True, True, True]  # the last one under the profiler
    assert torch.cuda.is_available is is_available
    assert "is_capturing" not in vars(torch.cuda.Stream)
    assert not CAPTURING["available"]()


def test_a_step_that_chooses_a_device():
    """`torch.cuda.is_available()` alone is answered truthfully."""
    learner = Learner()

    def step(x, y):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return learner.step(x.to(device), y)

    if not torch.cuda.is_available():
        assert found(step, *learner.state()).ok


def test_the_distribution_of_torchrl():
    distributions = pytest.importorskip("torchrl.modules.distributions")
    learner = Learner()

    def step(x, y):
        location = learner.model(x)
        policy = distributions.TanhNormal(location, torch.ones_like(location), high=x.new_ones(3), low=-x.new_ones(3))
        learner.minimize(policy.log_prob(y.tanh() * 0.9).mean())

    diagnosis = found(step, *learner.state())
    assert "sync" not in {code for code, _ in codes(diagnosis)}, str(diagnosis)


# ---- Steps that a graph gets wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam"])
def test_a_step_count_on_the_host(kind):
    learner = Learner(lambda p: getattr(torch.optim, kind)(p))
    finding = only(found(learner.step, *learner.state()))
    assert (finding.code, finding.source) == ("stale_number", "self.optimizer.step()")
    assert finding.cause == f"{kind} reads its step count on the host; a graph keeps the number (2)"
    assert "capturable=True" in finding.remedy
    assert ("fused=True" in finding.remedy) == kind.startswith("Adam")


@pytest.mark.parametrize(
    ("kind", "read"), [("ASGD", "its eta"), ("Adafactor", "its step count"), ("LBFGS", "values"), ("Rprop", "")]
)
def test_what_an_optimizer_reads(kind, read):
    options = {"max_iter": 2} if kind == "LBFGS" else {}
    learner = Learner(lambda p: getattr(torch.optim, kind)(p, **options))
    diagnosis = found(lambda x, y: learner.step(x, y) if kind != "LBFGS" else _lbfgs(learner, x, y), *learner.state())
    causes = [finding.cause for finding in diagnosis.findings]
    assert any(f"{kind} reads {read} on the host" in cause for cause in causes) == bool(read)


def _lbfgs(learner, x, y):
    def closure():
        learner.optimizer.zero_grad()
        loss = (learner.model(x) - y).square().mean()
        loss.backward()
        return loss

    learner.optimizer.step(closure)


def test_a_schedule():
    learner = Learner()
    schedule = torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.5)

    def step(x, y):
        learner.step(x, y)
        schedule.step()

    finding = only(found(step, *learner.state(), schedule))
    assert (finding.code, finding.source) == ("stale_number", "schedule.step()")
    assert finding.cause == "the step changes SGD.param_groups[0]['lr'] (0.05, then 0.025), which a replay does not"
    assert "lr=torch.tensor(0.001, device=device), fused=True" in finding.remedy


@pytest.mark.parametrize("fused", [True, False])
def test_a_schedule_of_a_tensor(fused):
    """A fused optimizer reads it on the device. A schedule inside of the step counts its calls on the host."""
    learner = Learner(lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), fused=fused))
    exponential = torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.5)

    def step(x, y):
        learner.step(x, y)
        exponential.step()

    diagnosis = found(step, *learner.state(), exponential)
    if fused:
        assert found(learner.step, *learner.state(), exponential).ok
        finding = only(diagnosis)
        assert (finding.code, finding.source) == ("stale_number", "exponential.step()")
        assert "ExponentialLR.step(), which counts on the host" in finding.cause
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(learner.optimizer, 10)

        def step_with_cosine(x, y):
            learner.step(x, y)
            cosine.step()

        finding = only(found(step_with_cosine, *learner.state(), cosine))
        assert (finding.code, finding.source) == ("stale_number", "cosine.step()")
        assert "outside of the step" in finding.remedy
    else:
        finding, of_schedule = diagnosis.findings
        assert of_schedule.source == "exponential.step()"
        assert "SGD reads its learning rate, a tensor, on the host" in finding.cause
        assert finding.remedy == "SGD(..., fused=True), which reads nothing on the host"


@pytest.mark.parametrize("kind", ["chained", "sequential", "plateau"])
def test_schedulers_that_the_step_calls(kind):
    """Also those that consist of others, and have no count of their own."""
    schedulers = torch.optim.lr_scheduler
    learner = Learner(lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), fused=True))
    own = learner.optimizer
    scheduler = {
        "chained": lambda: schedulers.ChainedScheduler([schedulers.ExponentialLR(own, 0.9)]),
        "sequential": lambda: schedulers.SequentialLR(own, [schedulers.ExponentialLR(own, 0.9) for _ in "ab"], [100]),
        "plateau": lambda: schedulers.ReduceLROnPlateau(own),
    }[kind]()

    def step(x, y):
        learner.step(x, y)
        scheduler.step(*[1.0] * (kind == "plateau"))

    finding = only(found(step, *learner.state(), scheduler))
    assert finding.code == "stale_number"
    assert f"{type(scheduler).__name__}.step(), which counts on the host" in finding.cause
    assert found(learner.step, *learner.state(), scheduler).ok


def test_a_number_of_an_operator():
    learner, count = Learner(), 0

    def step(x, y):
        nonlocal count
        count += 1
        return learner.step(x * (1 / count), y)  # a float

    counter, finding = found(step, *learner.state()).findings
    assert counter.cause == "the step changes count (1, then 2), which a replay does not"
    assert (finding.code, finding.source) == ("stale_number", "return learner.step(x * (1 / count), y)  # a float")
    assert finding.cause == "mul gets the number 0.5, then 0.333333"
    assert "fill_()" in finding.remedy


def test_numbers_of_this_package():
    """Scales, weights of heads and discounts are compared, and reported at the line of the call."""
    learner, count = Learner(), 0

    def step(x, y):
        nonlocal count
        count += 1
        out = learner.model(x)
        hidden = gs.scale_gradient(out, 1 / count)  # scale
        returns = gs.lambda_returns(y, next_values=y, discount=1 / count, lambda_=0.5)  # discount
        heads = {"a": gs.MeanSquaredError(weight=1 / count)}
        loss = gs.multi_step_loss(heads, {"a": [hidden]}, {"a": [returns]}).loss  # weight
        learner.minimize(loss)

    diagnosis = found(step, *learner.state())
    lines = {(source or "").partition("# ")[2] for code, source in codes(diagnosis) if code == "stale_number"}
    assert {"scale", "discount", "weight"} <= lines


READS = {
    "item": (lambda t: t.sum().item(), "item() waits", "return the tensor"),
    "float": (lambda t: float(t.sum()), "float() waits", "return the tensor"),
    "int": (lambda t: int(t.sum()), "int() waits", "return the tensor"),
    "if": (lambda t: 1 if t.sum() > 0 else 0, "a use as a condition", "torch.where"),
    "assert_": (lambda t: bool((t == t).all()), "a use as a condition", "before or after the step"),
    "nonzero": (lambda t: t.nonzero(), "nonzero waits", "torch.where(mask, x, 0)"),
    "where": (lambda t: torch.where(t > 0), "nonzero waits", "torch.where(mask, x, 0)"),
    "masked_select": (lambda t: t.masked_select(t > 0), "masked_select waits", "torch.where(mask, x, 0)"),
    "mask_index": (lambda t: t[t > 0], "an index that is a mask", "torch.where(mask, x, 0)"),
    "mask_write": (
        lambda t: t.clone().__setitem__(t > 0, t[:1, 0].expand(int((t > 0).sum()))),
        "a mask",
        "torch.where",
    ),
    "tolist": (lambda t: t.tolist(), "tolist() waits", "return the tensor"),
    "numpy": (lambda t: t.detach().numpy(), "numpy() waits", "return the tensor"),
    "asarray": (lambda t: numpy.asarray(t.detach()), "a conversion to NumPy", "return the tensor"),
    "cpu": (lambda t: t.cpu(), "cpu() waits", "return the tensor"),
    "to": (lambda t: t.to("cpu"), "to('cpu') waits", "return the tensor"),
    "to, by name": (lambda t: t.to(device="cpu", dtype=torch.float64), "to('cpu') waits", "return the tensor"),
    "print": (lambda t: print(t.sum()), "print or str() waits", "print after the step"),
    "log": (lambda t: logging.makeLogRecord({"msg": "%s", "args": (t,)}).getMessage(), "print or str()", "print after"),
    "f-string": (lambda t: f"{t.sum():.2f}", "an f-string", "return the tensor"),
    "range": (lambda t: range((t > 0).sum()), "a use as an index or size", "return the tensor"),
    "unique": (lambda t: t.unique(), "unique waits", "x.sort(), and a comparison of neighbours"),
    "bincount": (lambda t: (t > 0).long().flatten().bincount(), "bincount waits", "scatter_add_"),
    "repeats": (lambda t: t[0].repeat_interleave((t[0] > 0).long()), "repeat_interleave waits", "output_size=n"),
    "one_hot": (lambda t: torch.nn.functional.one_hot((t > 0).long()), "waits", "num_classes=n"),
    "equal": (lambda t: torch.equal(t, t), "torch.equal waits", "return the tensor"),
    "allclose": (lambda t: torch.allclose(t, t), "torch.allclose waits", "return the tensor"),
    "cholesky": (lambda t: torch.linalg.cholesky(t.T @ t + torch.eye(3)), "torch.linalg", "cholesky_ex"),
    "normal": (lambda t: torch.normal(t, t.abs()), "torch.normal with a tensor as std", "torch.randn_like"),
    "categorical": (
        lambda t: torch.distributions.Categorical(logits=t, validate_args=True),
        "checks its arguments",
        "torch.distributions.Distribution.set_default_validate_args(False)",
    ),
    "number": (lambda t: t.add(t, alpha=t.sum()), "a tensor used as a number", "return the tensor"),
    "clip_error": (lambda t: gs.clip_gradients_([t], 1.0, nonfinite="error"), "waits", "nonfinite='error'"),
}


def test_a_device_that_is_the_cpu_in_a_diagnosis_is_no_finding():
    learner, device = Learner(), "cpu"

    def step(x, y):
        return learner.step(x.to(device), y.to(torch.device(device)).to(device=device))

    assert found(step, *learner.state()).ok


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READS)
def test_what_waits_for_the_device(name, capsys):
    learner = Learner()
    read, cause, remedy = READS[name]

    def step(x, y):
        read(y)
        return learner.step(x, y)

    diagnosis = found(step, *learner.state())
    syncs = [finding for finding in diagnosis.findings if finding.code == "sync"]
    assert any(cause in finding.cause and remedy in finding.remedy for finding in syncs), str(diagnosis)
    assert all("read" in (finding.source or "") or "lambda t" in (finding.source or "") for finding in syncs)


def test_a_scaler():
    learner = Learner()
    scaler = torch.amp.GradScaler("cpu")

    def step(x, y):
        loss = (learner.model(x) - y).square().mean()
        learner.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(learner.optimizer)
        scaler.update()

    diagnosis = found(step, *learner.state(), scaler)
    assert ("sync", "scaler.step(learner.optimizer)") in codes(diagnosis)
    assert any("fused=True" in finding.remedy for finding in diagnosis.findings)


def test_shapes_that_change():
    """Two sizes of a batch are two right graphs."""
    learner, sizes = Learner(), iter((8, 8, 5, 5))
    given = [batches(1)[0], batches(1, size=5)[0]]
    assert found(learner.step, *learner.state(), given=given).ok

    def step(x, y):
        size = next(sizes)
        return learner.step(x[:size], y[:size])

    slice_, finding, *_ = found(step, *learner.state()).findings
    assert slice_.cause == "slice gets the number 8, then 5"
    assert finding.code == "changing_shape"
    assert "[8, 6]" in finding.cause
    assert "[5, 6]" in finding.cause
    assert "pad" in finding.remedy


def test_operators_that_change():
    learner, count = Learner(), 0

    def step(x, y):
        nonlocal count
        count += 1
        if count % 2:
            x = x.abs()  # only sometimes
        return learner.step(x, y)

    counter, finding = found(step, *learner.state()).findings
    assert counter.cause.startswith("the step changes count (")
    assert (finding.code, finding.source) == ("changing_operators", "x = x.abs()  # only sometimes")
    assert "abs" in finding.cause
    assert "torch.where" in finding.remedy


def test_more_is_found_after_operators_that_change():
    learner, count = Learner(), 0

    def step(x, y):
        nonlocal count
        count += 1
        x = x.abs() if count % 2 else x
        loss = learner.step(x, y)
        return loss * count

    expected = ["stale_number", "changing_operators", "stale_number"]  # count, abs, and the number of mul
    assert [code for code, _ in codes(found(step, *learner.state()))] == expected


HOST = {
    "tensor": lambda: torch.tensor([1.0, 2.0, 3.0]),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0, 3.0]),
    "from_numpy": lambda: torch.from_numpy(numpy.ones(3, dtype=numpy.float32)),
    "new_tensor": lambda: torch.zeros(3).new_tensor([1.0, 2.0, 3.0]),
    "constructor": lambda: torch.Tensor([1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("name", HOST)
def test_tensors_that_are_made_on_the_host(name):
    learner, make = Learner(), HOST[name]

    def step(x, y):
        return learner.step(x, y + make())

    diagnosis = found(step, *learner.state())
    assert {code for code, _ in codes(diagnosis)} == {"host_copy"}
    assert "before the step" in diagnosis.findings[0].remedy


def test_generators():
    learner, generator = Learner(), torch.Generator().manual_seed(1)

    def step(x, y):
        return learner.step(x + torch.randn(x.shape, generator=generator), y)  # noise

    state = generator.get_state()
    finding = only(found(step, *learner.state()))
    assert (finding.code, finding.source.partition("# ")[2]) == ("generator", "noise")
    assert torch.equal(generator.get_state(), state), "it is put back although it is not part of the state"
    assert found(step, *learner.state(), generator).ok
    assert torch.equal(generator.get_state(), state)


SEEDS = {
    "manual_seed": lambda state, draws: torch.manual_seed(3),
    "another seed each time": lambda state, draws: torch.manual_seed(draws.getrandbits(20)),
    "set_rng_state": lambda state, draws: torch.set_rng_state(state),
    "default_generator": lambda state, draws: torch.default_generator.manual_seed(3),
}


@pytest.mark.parametrize("name", SEEDS)
def test_a_step_that_seeds(name):
    """A graph goes on drawing where the call before ended."""
    learner, state, draws = Learner(), torch.get_rng_state(), random.Random(1)

    def step(x, y):
        SEEDS[name](state, draws)
        return learner.step(x, y)

    finding, *others = found(step, *learner.state()).findings
    assert [other.cause.partition(",")[0] for other in others] == ["the step draws from a random.Random"] * (
        name == "another seed each time"
    )
    assert finding.code == "generator"
    assert "sets the state of PyTorch's generator" in finding.cause
    assert "before" in finding.remedy


def test_draws_after_the_last_call_of_pytorch():
    learner = Learner()

    def step(x, y):
        learner.step(x, y)
        numpy.random.rand()

    finding = only(found(step, *learner.state()))
    assert (finding.code, finding.location is not None) == ("generator", True)


def test_a_number_that_the_step_returns():
    learner, calls = Learner(), [0]

    def step(x, y):
        calls[0] += 1
        return {"loss": learner.step(x, y), "calls": calls[0], "best": float("nan")}

    finding = only(found(step, *learner.state()))
    assert (finding.code, finding.cause) == ("stale_number", "the step returns 2, then 3 in its result['calls']")
    assert finding.source == "def step(x, y):"


def test_a_number_in_a_loss_is_found_once():
    """Not again in the backward pass."""
    learner, calls = Learner(), [0]

    def step(x, y):
        calls[0] += 1
        loss = (learner.model(x) - y).square().mean() * (1 / calls[0])  # here
        learner.minimize(loss)

    finding = only(found(step, *learner.state()))
    assert finding.source.endswith("# here")


def test_gradients_that_the_step_before_made():
    learner = Learner()

    def step(x, y):
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        (learner.model(x) - y).square().mean().backward()

    finding = found(step, *learner.state()).findings[0]
    assert (finding.code, finding.source) == ("unnamed_state", "learner.optimizer.step()")
    assert "pass set_to_none=False to zero_grad()" in finding.remedy
    learner = Learner()

    def right(x, y):
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=False)
        (learner.model(x) - y).square().mean().backward()

    assert found(right, *learner.state(), before=lambda: right(*batches(1)[0])).ok


def test_a_functional_step():
    """Its dict has other tensors after each step."""
    weights = {"w": torch.ones(6, 3)}
    own = weights["w"]

    def step(x, y):
        weights["w"] = weights["w"] - 0.1 * x.t() @ (x @ weights["w"] - y)

    finding = found(step, weights).findings[0]
    assert weights["w"] is own
    assert (own == 1).all()
    assert (finding.code, finding.source) == (
        "unnamed_state",
        'weights["w"] = weights["w"] - 0.1 * x.t() @ (x @ weights["w"] - y)',
    )


def test_an_argument_without_elements():
    learner = Learner()
    given = [(*batch, torch.zeros(0, 3)) for batch in batches(2)]
    assert found(lambda x, y, z: (learner.step(x, y), z.sum()), *learner.state(), given=given).ok


def test_tensors_that_numpy_converts():
    """The line is the user's, not NumPy's."""
    learner = Learner()

    def step(x, y):
        return float(numpy.mean([learner.step(x, y).detach(), x.mean()]))  # here

    diagnosis = found(step, *learner.state())
    assert {code for code, _ in codes(diagnosis)} == {"sync"}
    assert all(finding.source.endswith("# here") for finding in diagnosis.findings)


def test_a_schedule_of_the_momentum():
    learner = Learner(lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True))
    schedule = torch.optim.lr_scheduler.OneCycleLR(learner.optimizer, 0.1, total_steps=50)

    def step(x, y):
        learner.step(x, y)
        schedule.step()

    found_here = found(step, *learner.state(), schedule)
    betas = [finding for finding in found_here.findings if "betas" in finding.cause]
    assert len(betas) == 1
    assert "cycle_momentum=False" in betas[0].remedy
    assert not any("step count" in finding.cause for finding in found_here.findings)


def test_a_schedule_that_does_not_change_the_rate_here():
    learner = Learner()
    schedule = torch.optim.lr_scheduler.StepLR(learner.optimizer, 100)

    def step(x, y):
        learner.step(x, y)
        schedule.step()

    finding = only(found(step, *learner.state(), schedule))
    assert (finding.code, finding.source) == ("stale_number", "schedule.step()")
    assert "step" not in vars(schedule)


def test_a_step_that_seeds_its_own_generator():
    learner, generator = Learner(), torch.Generator()

    def step(x, y):
        generator.manual_seed(3)
        return learner.step(x + torch.randn(x.shape, generator=generator), y)

    assert only(found(step, *learner.state(), generator)).code == "generator"


@pytest.mark.parametrize("preserve", [True, False])
def test_a_step_with_checkpoints(preserve):
    """Activation checkpointing sets the state of generators, to repeat dropout, which a capture refuses."""
    learner = Learner()

    def step(x, y):
        hidden = torch.utils.checkpoint.checkpoint(learner.model, x, use_reentrant=False, preserve_rng_state=preserve)
        learner.minimize((hidden - y).square().mean())

    finding = found(step, *learner.state()).findings
    assert bool(finding) == preserve
    if finding:
        assert "such as dropout, out of torch.utils.checkpoint" in finding[0].remedy


@pytest.mark.parametrize("library", ["Python's random", "NumPy's random"])
def test_random_numbers_of_the_host(library):
    learner = Learner()

    def step(x, y):
        if (random.random() if library.startswith("Python") else numpy.random.rand()) > 2:
            raise AssertionError
        return learner.step(x, y)

    finding = only(found(step, *learner.state()))
    assert finding.code == "generator"
    assert library in finding.cause
    assert finding.location.startswith(("tests/", "/"))


@pytest.mark.parametrize(
    ("mode", "change"),
    {
        "grad mode (True, then False)": lambda: torch.set_grad_enabled(False),
        "default dtype (torch.float32, then torch.float64)": lambda: torch.set_default_dtype(torch.float64),
        "default devices ([], then [device(type='meta')])": lambda: torch.set_default_device("meta"),
        "deterministic mode (0, then 2)": lambda: torch.use_deterministic_algorithms(True),
        "autocast (False, then True)": lambda: torch.set_autocast_enabled("cpu", True),
        "autocast dtype (torch.bfloat16, then torch.float16)": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    }.items(),
)
@pytest.mark.parametrize("raises", [False, True])
def test_modes_that_the_step_leaves_changed(mode, change, raises):
    """They are found, and put back, also if the step raises."""
    learner, before = Learner(), Modes.of(torch.device("cpu"))

    def step(x, y):
        loss = learner.step(x, y)
        change()
        if raises:
            raise KeyError("of the user")
        return loss.detach()

    if raises:
        with pytest.raises(KeyError, match="of the user"):
            gs.diagnose_capture(step, batches(2), *learner.state())
    else:
        (finding,) = gs.diagnose_capture(step, batches(2), *learner.state()).findings
        assert finding.code == "stale_number"
        assert f"the step changes PyTorch's {mode}" in finding.cause
        assert finding.source == "def step(x, y):"
    assert Modes.of(torch.device("cpu")) == before


def test_findings_about_the_whole_step_have_the_line_of_its_definition():
    learner = Learner()

    class Agent:
        def __init__(self):
            self.steps = 0

        def step(self, batch):
            self.steps += 1
            batch["h"] = 1
            return learner.step(*batch["xy"]).detach()

    agent = Agent()
    found = gs.diagnose_capture(agent.step, [{"xy": pair} for pair in batches(2)], *learner.state()).findings
    assert {finding.code for finding in found} == {"argument", "stale_number"}
    assert {finding.source for finding in found} == {"def step(self, batch):"}


def test_hooks():
    learner = Learner()
    learner.model.head.register_forward_hook(lambda *args: None)
    learner.model.head.weight.register_hook(lambda gradient: None)
    learner.optimizer.register_step_pre_hook(lambda *args: None)
    findings = found(learner.step, *learner.state()).findings
    places = {finding.cause.partition(" ")[0]: finding.source for finding in findings}
    assert places == {
        "Model.head": "learner.model.head.register_forward_hook(lambda *args: None)",
        "Model.head.weight": "learner.model.head.weight.register_hook(lambda gradient: None)",
        "SGD": "learner.optimizer.register_step_pre_hook(lambda *args: None)",
    }
    assert len(findings) == 3
    normalised = torch.nn.utils.weight_norm(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(normalised.parameters(), lr=0.1)

    def step(x, y):
        loss = (normalised(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert found(step, normalised, optimizer).ok


def test_state_that_is_not_named():
    learner, average = Learner(), torch.zeros(())

    def step(x, y):
        loss = learner.step(x, y)
        average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss

    finding = found(step, *learner.state()).findings[0]
    assert average == 0, "it is put back although it is not part of the state"
    assert (finding.code, finding.source) == ("unnamed_state", "average.mul_(0.9).add_(loss.detach(), alpha=0.1)")
    assert found(step, *learner.state(), average).ok
    before = bits(learner.model)
    diagnosis = gs.diagnose_capture(learner.step, batches(2), learner.optimizer)
    assert {code for code, _ in codes(diagnosis)} == {"unnamed_state"}
    assert bits(learner.model)[0] == before[0]


def test_a_tensor_that_the_step_before_made():
    learner, kept = Learner(), {}

    def step(x, y):
        out = learner.model(x)
        if "hidden" in kept:
            out = out + kept["hidden"]
        kept["hidden"] = out.detach()
        learner.minimize((out - y).square().mean())

    finding = only(found(step, *learner.state()))
    assert (finding.code, finding.source) == ("unnamed_state", 'out = out + kept["hidden"]')
    assert "that the step before made" in finding.cause
    learner.model.hidden = torch.zeros(8, 3)

    def step_with_attribute(x, y):
        learner.model.hidden = learner.model(x).detach() + learner.model.hidden
        learner.step(x, y)

    finding = only(found(step_with_attribute, *learner.state()))
    assert "reads a tensor of shape [8, 3] that the step before made" in finding.cause
    assert "copy_()" in finding.remedy


# ---- Arguments, errors, reports --------------------------------------------------------------------------------------


def test_everything_is_put_back_when_the_step_raises():
    learner = Learner(lambda p: torch.optim.Adam(p))
    calls = []

    def step(x, y):
        calls.append(1)
        learner.step(x, y)
        random.random()
        learner.model.eval()
        learner.model.head.weight.requires_grad_(False)
        learner.optimizer.param_groups[0]["lr"] = 3.0
        if len(calls) == 2:
            raise KeyError("mine")

    everything, state = bits(learner.state()), torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        gs.diagnose_capture(step, batches(2), *learner.state())
    assert bits(learner.state()) == everything
    assert learner.model.training
    assert learner.model.head.weight.requires_grad
    assert learner.optimizer.param_groups[0]["lr"] == 1e-3
    assert not learner.optimizer.state
    assert torch.equal(state, torch.get_rng_state())


def test_gradients_are_put_back():
    learner = Learner()
    learner.model.head.weight.grad = kept = torch.full((3, 16), 5.0)
    found(learner.step, *learner.state())
    assert learner.model.head.weight.grad is kept
    assert kept.eq(5).all()
    assert learner.model.head.bias.grad is None


def test_one_argument_and_several():
    learner = Learner()
    pairs = [list(batch) for batch in batches(2)]
    assert found(lambda pair: learner.step(*pair), *learner.state(), given=pairs).ok
    named = [{"x": x, "y": y} for x, y in batches(3)]
    assert found(lambda batch: learner.step(**batch), *learner.state(), given=named).ok


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def test_a_batch_that_is_a_dataclass():
    learner = Learner()
    given = [Batch(*batch) for batch in batches(2)]
    assert found(lambda batch: learner.step(batch.x, batch.y), *learner.state(), given=given).ok


@pytest.mark.parametrize(
    ("write", "found_codes"),
    [
        (lambda x: x.mul_(2.0), {"argument"}),
        (lambda x: x.data.mul_(2.0), {"argument"}),
        (lambda x: x.requires_grad_(), set()),
    ],
)
def test_batches_are_left_as_they_are(write, found_codes):
    """Also gradients of arguments, which are no state that the step before left."""
    learner, given = Learner(), batches(2)

    def step(x, y):
        write(x)
        return learner.step(x, y)

    diagnosis = found(step, *learner.state(), given=given)
    assert {code for code, _ in codes(diagnosis)} == found_codes
    assert bits(given) == bits(batches(2))
    assert not any(x.requires_grad or x.grad is not None for x, _ in given)


def test_wrong_arguments():
    learner = Learner()
    for arguments, error, match in (
        ((3, batches(2)), TypeError, "step must be callable, but it is of type int"),
        ((learner.step, batches(1)), ValueError, "at least two batches"),
        ((learner.step, torch.zeros(2)), TypeError, r"write \[batch, another_batch\]"),
        ((learner.step, batches(2), "model"), TypeError, r"diagnose_capture: .*state\[0\] is of type str"),
    ):
        with pytest.raises(error, match=match):
            gs.diagnose_capture(*arguments)


def test_how_a_report_is_shown():
    learner = Learner(lambda p: torch.optim.Adam(p))
    diagnosis = gs.diagnose_capture(lambda x, y: learner.step(x, y).item(), batches(2), *learner.state())
    text = str(diagnosis)
    assert text.startswith("2 findings: a graph of this step would be wrong, or cannot be captured.")
    assert "What to do:\n" in text
    assert "stale_number: Adam(..., fused=True)" in text
    assert repr(diagnosis).count("\n") < 20
    assert "<table>" in diagnosis._repr_html_()
    assert diagnosis.to_dict()["findings"][0]["code"] == "stale_number"
    assert len(diagnosis.__rich__().rows) == 2


def test_a_monitor_is_left_as_it_is():
    learner = Learner()
    monitor = gs.GradientMonitor(learner.model, learner.optimizer, every=1)

    def step(x, y):
        loss = (learner.model(x) - y).square().mean()
        learner.optimizer.zero_grad()
        loss.backward()
        gs.clip_gradients_(learner.model, 0.5)
        gs.clip_gradients_(learner.model, adaptive=0.01)
        learner.optimizer.step()

    step(*batches(1)[0])
    diagnosis = gs.diagnose_capture(step, batches(2), *learner.state())
    assert diagnosis.ok, diagnosis
    assert diagnosis.num_calls < 100  # the operators of clip_gradients_, not the reference's
    monitor.close()
    assert [at for at, _ in monitor.history["gradient_norm_total"]] == [0]
    assert monitor._taken == 1


class Agent(torch.nn.Module):
    """A module that holds its optimizers and schedulers, as many agents do."""

    def __init__(self, **options):
        super().__init__()
        self.model = Learner().model
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def update(self, x, y):
        self.optimizer.zero_grad()
        (self.model(x) - y).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()


def test_optimizers_in_attributes_of_a_module():
    agent = Agent(lr=torch.tensor(0.1), fused=True)
    before = bits([agent, agent.optimizer, agent.scheduler])
    diagnosis = gs.diagnose_capture(agent.update, batches(3), agent)
    assert codes(diagnosis) == [("stale_number", "self.scheduler.step()")]
    assert bits([agent, agent.optimizer, agent.scheduler]) == before
    agent = Agent(lr=0.1)
    for state in ([agent], [agent, agent.optimizer], [agent.optimizer, agent.scheduler, agent]):
        diagnosis = gs.diagnose_capture(agent.update, batches(3), *state)
        assert [code for code, _ in codes(diagnosis)] == ["stale_number"], diagnosis


def test_tensors_of_the_state_that_a_step_replaces():
    learner, target = Learner(), Learner()

    def step(x, y):
        learner.step(x, y)
        for parameter, own in zip(learner.model.parameters(), target.model.parameters(), strict=True):
            own.data = 0.1 * parameter.data + 0.9 * own.data

    diagnosis = gs.diagnose_capture(step, batches(3), *learner.state(), target.model)
    (finding,) = diagnosis.findings
    assert finding.code == "unnamed_state"
    assert finding.source.startswith("own.data = 0.1 *")
    assert "copy_()" in finding.remedy
