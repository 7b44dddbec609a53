"""`CapturedStep` with a stand-in for CUDA graphs on the CPU: every rule of its contract."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import traceback
from dataclasses import dataclass, field

import numpy
import pytest
import tape
import torch
from tests_of_capture import Learner, batches, bits
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradscale_ext as gs
from gradscale_ext.capture import graphs


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    monkeypatch.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())


def nothing(index):
    """Before or after a call."""


def captured_calls(update, given, seed=7, before=nothing, after=nothing):
    torch.manual_seed(seed)
    results = []
    for index, batch in enumerate(given):
        before(index)
        results.append(update(*batch))
        after(index)
    return results


def plain_calls(call, given, **options):
    """The results of plain calls, which run the operators that a tape runs."""
    with tape.TapeGraphs().side_by_side():
        return captured_calls(call, given, **options)


def assert_same(learner, update, reference, call, given):
    got, wanted = captured_calls(update, given), plain_calls(call, given)
    assert bits(got) == bits([tensor.detach() for tensor in wanted])
    assert bits(learner.state()) == bits(reference.state())
    assert update.is_captured


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, fused=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, amsgrad=True),
    "adamw_tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "two_groups": lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)], lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_equal_plain_ones(name):
    """BatchNorm's statistics, dropout's random numbers and gradients are equal too, bit by bit."""
    learner, reference = Learner(OPTIMIZERS[name]), Learner(OPTIMIZERS[name])
    update = gs.CapturedStep(learner.step, *learner.state())
    assert_same(learner, update, reference, reference.step, batches(20))
    assert len(update.graphs) == 1
    assert update._captured[0].graph.replays == 20 - 3


def test_each_call_trains_once_on_its_own_batch():
    """Also in the warm-up, and with one warm-up call and without verification."""
    for options in ({"warmup": 1, "verify": 0}, {"warmup": 1}, {"warmup": 5, "verify": 1}):
        learner, reference = Learner(), Learner()
        update = gs.CapturedStep(learner.step, *learner.state(), **options)
        assert_same(learner, update, reference, reference.step, batches(8))


# ---- State that plain calls change, and replays change alike ---------------------------------------------------------


def test_a_target_network_and_two_optimizers():
    def make():
        actor, critic = Learner(), Learner(OPTIMIZERS["adam_fused"])
        target = copy.deepcopy(critic.model)

        def step(x, y):
            with torch.no_grad():
                wanted = target(x) * 0.9 + y
            loss = (critic.model(x) - wanted).square().mean()
            critic.optimizer.zero_grad()
            loss.backward()
            critic.optimizer.step()
            gain = actor.model(x).mean()
            actor.optimizer.zero_grad(set_to_none=False)
            gain.neg().backward()
            actor.optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), critic.model.parameters(), strict=True):
                    old.lerp_(new, 0.05)
            return {"loss": loss, "gain": gain, "count": 3}

        return step, [*actor.state(), *critic.state(), target]

    (step, state), (plain, reference) = make(), make()
    update = gs.CapturedStep(step, {"actor": state[:2]}, state[2:])
    got, wanted = captured_calls(update, batches(20)), plain_calls(plain, batches(20))
    assert bits([(out["loss"], out["gain"], out["count"]) for out in got]) == bits(
        [(out["loss"].detach(), out["gain"].detach(), out["count"]) for out in wanted]
    )
    assert bits(state) == bits(reference)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_without_a_module(set_to_none):
    """The temperature of SAC, for example, which only its optimizer holds."""

    def make():
        temperature = torch.tensor([0.5], requires_grad=True)
        optimizer = torch.optim.SGD([temperature], lr=0.1)

        def step(x, y):
            optimizer.zero_grad(set_to_none)
            loss = (temperature.exp() * (x.mean() + y.mean())).sum()
            loss.backward()
            optimizer.step()
            return loss

        return temperature, optimizer, step

    (temperature, optimizer, step), (reference, _, plain) = make(), make()
    update = gs.CapturedStep(step, optimizer)
    got, wanted = captured_calls(update, batches(8)), plain_calls(plain, batches(8))
    assert bits([got, temperature, temperature.grad]) == bits([[x.detach() for x in wanted], reference, reference.grad])
    assert len(update.graphs) == 1


class Ensemble(torch.nn.Module):
    """Four linear layers in one vmap call, through a template on the meta device, as in TD-MPC2."""

    def __init__(self):
        super().__init__()
        self.template = torch.nn.Linear(6, 3, device="meta")
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(4, *shape)) for shape in ((3, 6), (3,)))
        self.cache = {}

    def forward(self, x):
        def call(weight, bias):
            self.cache["weight"] = weight  # TensorDicts keep such tensors, too
            return torch.func.functional_call(self.template, {"weight": weight, "bias": bias}, x)

        return torch.vmap(call)(self.weight, self.bias)


def test_tensors_without_contents():
    """Parameters on the meta device, and tensors that torch.vmap left in a dict, are no state."""

    def make():
        torch.manual_seed(0)
        model = Ensemble()
        optimizer = OPTIMIZERS["adam_fused"](model.parameters())

        def step(x, y):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return model, optimizer, step

    (model, optimizer, step), (reference, _, plain) = make(), make()
    update = gs.CapturedStep(step, model, optimizer)
    got, wanted = captured_calls(update, batches(8)), plain_calls(plain, batches(8))
    assert bits(got) == bits([loss.detach() for loss in wanted])
    for name in ("weight", "bias"):
        one, other = getattr(model, name), getattr(reference, name)
        assert bits([one, one.grad]) == bits([other, other.grad])
    assert len(update.graphs) == 1
    assert gs.diagnose_capture(step, batches(2), model, optimizer).ok


class RecurrentModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.head = torch.nn.LSTM(6, 8, batch_first=True), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.memory(x[:, None].expand(-1, 4, -1))[0][:, -1])


def test_a_recurrent_network():
    def make():
        learner = Learner(OPTIMIZERS["adam_fused"])
        learner.model = RecurrentModel()
        learner.optimizer = OPTIMIZERS["adam_fused"](learner.model.parameters())
        return learner

    learner, reference = make(), make()
    assert_same(learner, gs.CapturedStep(learner.step, *learner.state()), reference, reference.step, batches(20))


def test_micro_batches_accumulate_in_one_step():
    def make():
        learner = Learner()

        def step(x, y):
            learner.optimizer.zero_grad()
            for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
                ((learner.model(part) - target).square().mean() / 4).backward()
            gs.clip_gradients_(learner.model, 0.5)
            learner.optimizer.step()

        return learner, step

    (learner, step), (reference, plain) = make(), make()
    update = gs.CapturedStep(step, *learner.state())
    captured_calls(update, batches(12)), plain_calls(plain, batches(12))
    assert bits(learner.state()) == bits(reference.state())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_calls(set_to_none):
    """The optimizer steps outside, after every third call: a replay adds to the gradients that are there."""

    def make():
        learner = Learner()

        def backward(x, y):
            loss = (learner.model(x) - y).square().mean()
            loss.backward()
            return loss

        return learner, backward

    (learner, backward), (reference, plain) = make(), make()
    update = gs.CapturedStep(backward, *learner.state())

    def every_third(own):
        def step(index):
            if index % 3 == 2:
                own.optimizer.step()
                own.optimizer.zero_grad(set_to_none=set_to_none)

        return step

    got = captured_calls(update, batches(24), after=every_third(learner))
    wanted = plain_calls(plain, batches(24), after=every_third(reference))
    assert bits(got) == bits([loss.detach() for loss in wanted])
    assert bits(learner.state()) == bits(reference.state())
    assert update.is_captured


def test_each_form_of_arguments_has_a_graph():
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    given = [batches(20)[i] if i % 3 else batches(20, size=4)[i] for i in range(20)]
    assert_same(learner, update, reference, reference.step, given)
    assert {info.signature for info in update.graphs} == {
        "float32 [8, 6], float32 [8, 3]",
        "float32 [4, 6], float32 [4, 3]",
    }


def test_eval_and_train_have_graphs_of_their_own():
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    captured_calls(update, batches(20), before=lambda index: learner.model.train(index % 3 != 2))
    plain_calls(reference.step, batches(20), before=lambda index: reference.model.train(index % 3 != 2))
    assert bits(learner.state()) == bits(reference.state())
    assert len(update.graphs) == 2


@pytest.mark.parametrize("how", ["copy", "assign", "optimizer", "data", "requires_grad"])
def test_a_state_that_is_loaded(how):
    """The graph goes on where it is right, and another is captured where it is not."""
    learner, reference = Learner(OPTIMIZERS["adam_fused"]), Learner(OPTIMIZERS["adam_fused"])
    update = gs.CapturedStep(learner.step, *learner.state())
    saved = copy.deepcopy([part.state_dict() for part in Learner(OPTIMIZERS["adam_fused"]).state()])

    def change(own):
        if how == "copy":
            own.model.load_state_dict(saved[0])
        elif how == "assign":
            own.model.load_state_dict(copy.deepcopy(saved[0]), assign=True)
            own.optimizer.param_groups[0]["params"] = list(own.model.parameters())
            own.optimizer.state.clear()
        elif how == "optimizer":
            own.optimizer.load_state_dict(copy.deepcopy(own.optimizer.state_dict()))
        elif how == "data":
            own.model.head.weight.data = torch.ones(3, 16)
        else:
            own.model.body.requires_grad_(False)
            own.model.body.zero_grad()

    captured_calls(update, batches(16), before=lambda index: change(learner) if index == 8 else None)
    plain_calls(reference.step, batches(16), before=lambda index: change(reference) if index == 8 else None)
    assert bits(learner.state()) == bits(reference.state())
    assert update.is_captured


@pytest.mark.parametrize("scheduler", ["exponential", "cosine", "warm_up"])
def test_a_schedule_of_a_tensor(scheduler):
    make = {
        "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        "warm_up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10)),
    }[scheduler]
    learner, reference = Learner(OPTIMIZERS["sgd_fused"]), Learner(OPTIMIZERS["sgd_fused"])
    schedules = make(learner.optimizer), make(reference.optimizer)
    update = gs.CapturedStep(learner.step, *learner.state(), schedules[0])
    captured_calls(update, batches(14), after=lambda _: schedules[0].step())
    plain_calls(reference.step, batches(14), after=lambda _: schedules[1].step())
    assert bits(learner.state()) == bits(reference.state())
    assert len(update.graphs) == 1


def test_the_loss_the_returns_and_clipping_of_this_package():
    support = gs.Support(-5, 5, 11, "identity")

    def make():
        torch.manual_seed(3)
        net = torch.nn.Linear(6, 3 * 11)
        optimizer = torch.optim.Adam(net.parameters(), fused=True)
        loss_fn = gs.MultiStepLoss(value=gs.TwoHot(support), policy=gs.SoftCrossEntropy(), q=gs.HLGauss(support))
        clip = gs.ClipGradientNorm(0.1, batch_dims=1)

        def step(x, rewards):
            heads = clip(net(x)).unflatten(1, (3, 11))
            value, policy, q = (gs.scale_gradient(head, 0.5) for head in heads.unbind(1))
            returns = gs.lambda_returns(rewards, next_values=rewards, discount=0.9, lambda_=0.5)
            target = {"value": [returns[:, 0]], "policy": [torch.softmax(policy.detach(), 1)], "q": [returns[:, 1]]}
            out = loss_fn({"value": [value], "policy": [policy], "q": [q]}, target)
            optimizer.zero_grad()
            (out.loss + gs.l2_loss(net, 1e-3)).backward()
            statistics = gs.clip_gradients_(net, 0.1)
            optimizer.step()
            return out, statistics.total_norm, gs.priorities([out.expected["value"][:, 0]], [returns[:, 0]])

        return [net, optimizer, clip], step

    (state, step), (reference, plain) = make(), make()
    update = gs.CapturedStep(step, *state)
    got, wanted = captured_calls(update, batches(12)), plain_calls(plain, batches(12))
    for (out, norm, priority), (other, other_norm, other_priority) in zip(got, wanted, strict=True):
        assert isinstance(out, gs.MultiStepLossOutput)
        assert bits(out.loss) == bits(other.loss.detach())
        assert bits(out.expected) == bits(other.expected)
        assert bits([norm, priority]) == bits([other_norm, other_priority])
    assert bits(state) == bits(reference)


# ---- Wrong steps: each raises, or is right ---------------------------------------------------------------------------


def refusal(step, state, match, given=None, **options):
    """The error of a step that no graph can make, with the state and the plain steps before it as they were."""
    update = gs.CapturedStep(step, *state, **options)
    with pytest.raises(RuntimeError, match=match) as caught:
        captured_calls(update, given or batches(8))
    return str(caught.value)


def test_a_number_in_param_groups():
    learner = Learner()
    schedule = torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.5)
    update = gs.CapturedStep(learner.step, *learner.state(), schedule)
    captured_calls(update, batches(6))
    schedule.step()
    before = bits(learner.state())
    with pytest.raises(RuntimeError) as error:
        update(*batches(1)[0])
    assert bits(learner.state()) == before
    text = str(error.value)
    assert "SGD.param_groups[0]['lr'] is 0.05, but a graph keeps 0.1" in text
    assert "write SGD(..., lr=torch.tensor(0.001, device=device), fused=True): schedulers change a tensor" in text
    learner.optimizer.param_groups[0]["lr"] = 0.1
    update(*batches(1)[0])


def test_a_rate_that_is_replaced():
    learner = Learner(OPTIMIZERS["sgd_fused"])
    update = gs.CapturedStep(learner.step, *learner.state())
    captured_calls(update, batches(6))
    learner.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    with pytest.raises(RuntimeError, match=r"\['lr'\] is another tensor .* fill_\(\)"):
        update(*batches(1)[0])


def test_a_schedule_inside_the_step():
    learner = Learner()
    schedule = torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.9)

    def step(x, y):
        learner.step(x, y)
        schedule.step()

    text = refusal(step, [*learner.state(), schedule], r"param_groups\[0\]\['lr'\]")
    assert "(0.0729, then 0.06561), which a replay does not at tests/test_captured_step.py" in text
    assert "schedule.step(); call the scheduler's step() outside of the step, with SGD(..., lr=torch.tensor(" in text
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**3)
    assert schedule.last_epoch == 3


def test_a_counter_of_an_optimizer():
    """No schedule is to blame."""
    learner = Learner()
    learner.optimizer.calls = 0

    def step(x, y):
        learner.optimizer.calls += 1
        return learner.step(x, y)

    text = refusal(step, learner.state(), r"SGD\.calls \(3, then 4\), which a replay does not")
    assert "change it outside of the step" in text
    assert "schedul" not in text


def test_an_optimizer_that_counts_on_the_host():
    learner = Learner(lambda p: torch.optim.Adam(p, lr=1e-2))
    text = refusal(learner.step, learner.state(), "cannot be captured")
    assert "Adam reads its step count on the host" in text
    assert "self.optimizer.step()" in text
    assert "fused=True" in text
    assert {state["step"].item() for state in learner.optimizer.state.values()} == {3}


READS = {
    "item": lambda loss: loss.item(),
    "if": lambda loss: loss + 1 if loss > 0 else loss,
    "print": lambda loss: print(loss),
    "float": lambda loss: float(loss),
    "numpy": lambda loss: loss.detach().numpy(),
    "tolist": lambda loss: loss.tolist(),
    "nonzero": lambda loss: (loss > 0).nonzero(),
    "f-string": lambda loss: f"{loss:.3f}",
}


@pytest.mark.parametrize("read", READS)
def test_a_step_that_waits_for_the_device(read):
    learner = Learner()

    def step(x, y):
        loss = learner.step(x, y)
        READS[read](loss)  # here

    text = refusal(step, learner.state(), "cannot be captured at ")
    assert "sync" in text
    assert "READS[read](loss)  # here" in text or "lambda loss" in text


def test_what_a_refusal_leaves():
    """State, gradients and random numbers are those of the plain calls before it."""
    learner, reference = Learner(), Learner()

    def step(x, y):
        learner.step(x, y).item()

    refusal(step, learner.state(), "cannot be captured")
    state = torch.get_rng_state()
    plain_calls(reference.step, batches(3))
    assert bits(learner.state()) == bits(reference.state())
    assert torch.equal(state, torch.get_rng_state())


def test_a_number_that_changes_in_a_closure():
    """The capture names it, and the first audit shows that the number is stale."""
    learner = Learner()
    count = 0

    def step(x, y):
        nonlocal count
        count += 1
        decay = min(0.9, count / (count + 10))
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.mul_(1 - 0.01 * decay)
        return learner.step(x, y)

    update = gs.CapturedStep(step, *learner.state())
    captured_calls(update, batches(3))
    with (
        pytest.warns(UserWarning, match=r"the step changes count \(3, then 4\), which a replay does not; keep it in a"),
        pytest.raises(
            RuntimeError,
            match=r"replay 1 of this graph differs from a plain step, because the step has changed .*: mul_ gets",
        ) as error,
    ):
        update(*batches(5)[4])
    assert "stale_number" in str(error.value)
    assert "parameter.mul_(1 - 0.01 * decay)" in str(error.value)


def test_a_number_that_changes_is_named_once():
    """Not again for each graph."""
    learner, count = Learner(), 0

    def step(x, y, self=None):
        nonlocal count
        count += 1
        return learner.step(x, y)

    update = gs.CapturedStep(step, *learner.state())
    with pytest.warns(UserWarning, match="the step changes count") as caught:
        captured = [update(*batch, self=0) for size in (4, 8) for batch in batches(6, size=size)]
    assert len(captured) == 12
    assert len(update.graphs) == 2
    assert len(caught) == 1


def test_variables_of_one_name_in_two_closures():
    """Neither is taken for the other, which would look like a number that the step changes."""

    def scaled_by(factor):
        return lambda loss: factor * loss

    def make():
        learner, factor, twice = Learner(), 3.0, scaled_by(2.0)

        def step(x, y):
            return learner.minimize(twice(factor * (learner.model(x) - y).square().mean()))

        return learner, step

    (learner, step), (reference, plain) = make(), make()
    assert_same(learner, gs.CapturedStep(step, *learner.state()), reference, plain, batches(8))


def test_numbers_of_an_object_that_the_step_changes_are_named():
    """Also numbers of NumPy. Lists are not looked into."""

    class Agent:
        def __init__(self):
            self.learner, self.updates, self.counts, self.total = Learner(), 0, [0], numpy.int64(0)

        def update(self, x, y):
            self.updates += 1
            self.counts[0] += 1
            self.total += 1
            return self.learner.step(x, y)

    agent = Agent()
    update = gs.CapturedStep(agent.update, *agent.learner.state())
    with pytest.warns(UserWarning, match=r"the step changes self\.\w+") as caught:
        captured_calls(update, batches(8))
    names = [str(one.message).partition(", which")[0] for one in caught]
    assert sorted(names) == [
        f"CapturedStep: the step changes self.total ({numpy.int64(3)!r}, then {numpy.int64(4)!r})",
        "CapturedStep: the step changes self.updates (3, then 4)",
    ]


def test_results_belong_to_the_caller():
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    kept = captured_calls(update, batches(10))
    assert len({tensor.data_ptr() for tensor in kept}) == 10
    assert bits(kept) == bits([tensor.detach() for tensor in plain_calls(reference.step, batches(10))])
    assert not any(tensor.requires_grad for tensor in kept)
    update = gs.CapturedStep(Learner().step, *learner.state(), copy_outputs=False, verify=0)


def test_results_have_the_types_that_the_step_returns():
    learner = Learner()

    def step(x, y):
        return learner.step(x, y), x.shape, {"stride": x.stride(), "dtype": x.dtype}

    update = gs.CapturedStep(step, *learner.state())
    for _, shape, others in captured_calls(update, batches(6)):
        assert type(shape) is torch.Size
        assert shape == (8, 6)
        assert others == {"stride": (6, 1), "dtype": torch.float32}


def test_results_that_are_part_of_the_state_or_of_the_arguments():
    """Copies too, also of plain calls: later calls write to the state."""
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(lambda x, y: (learner.step(x, y), learner.model.head.bias, x)[1:], *learner.state())
    given, wanted = batches(8), []
    kept = captured_calls(update, given)
    plain_calls(
        reference.step, given, after=lambda i: wanted.append((reference.model.head.bias.detach().clone(), given[i][0]))
    )
    assert bits(kept) == bits(wanted)
    assert not {x.data_ptr() for x, _ in given} & {x.data_ptr() for _, x in kept}


def test_results_of_the_graph_are_overwritten_if_asked_for():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state(), copy_outputs=False)
    results = captured_calls(update, batches(10))
    assert results[-1] is results[-2]


def test_results_of_the_graph_that_the_caller_keeps():
    """In an attribute of the step's object: a replay writes to them, the step does not."""
    agent = Agent()
    update = gs.CapturedStep(agent.update, *agent.learner.state(), copy_outputs=False)
    for index, batch in enumerate(batches(12)):
        agent.updates = index
        agent.last = update(*batch)
    assert agent.last is update._captured[0].result


def ignored(*arguments):
    """A hook."""


HOOKS = {
    "Model.head": lambda own: own.model.head.register_forward_hook(ignored),
    "Model.head.weight": lambda own: own.model.head.weight.register_hook(ignored),
    "Model.head.bias": lambda own: own.model.head.bias.register_post_accumulate_grad_hook(ignored),
    "SGD": lambda own: own.optimizer.register_step_post_hook(ignored),
    "every module": lambda own: torch.nn.modules.module.register_module_forward_hook(ignored),
    "every optimizer": lambda own: register_optimizer_step_post_hook(ignored),
}


@pytest.mark.parametrize("place", HOOKS)
def test_hooks(place):
    learner = Learner()
    handle = HOOKS[place](learner)
    try:
        text = refusal(learner.step, learner.state(), "has the hook ignored")
        assert f"{place} has the hook" in text
        assert "hooks='ignore'" in text
        update = gs.CapturedStep(learner.step, *learner.state(), hooks="ignore")
        captured_calls(update, batches(5))
    finally:
        handle.remove()
    captured_calls(update, batches(5))
    assert update.is_captured


@pytest.mark.parametrize("place", HOOKS)
def test_a_hook_that_comes_between_replays(place):
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    captured_calls(update, batches(6))
    handle = HOOKS[place](learner)
    try:
        update(*batches(1)[0])  # a plain call
        with pytest.raises(RuntimeError, match=f"{re.escape(place)} has the hook"):
            update(*batches(1)[0])
    finally:
        handle.remove()
    update(*batches(1)[0])


def test_a_hook_that_comes_later():
    learner, seen = Learner(), []
    update = gs.CapturedStep(learner.step, *learner.state())
    captured_calls(update, batches(6))
    handle = learner.model.head.weight.register_hook(lambda gradient: seen.append(1))
    update(*batches(1)[0])  # a plain call
    with pytest.raises(RuntimeError, match=r"Model\.head\.weight has the hook"):
        update(*batches(1)[0])
    handle.remove()
    update(*batches(1)[0])
    assert len(seen) == 1


class ClippingLearner(Learner):
    """Clips, makes `steps` steps of the optimizer in each call, and is watched by a monitor."""

    def __init__(self, steps, every):
        super().__init__()
        self.steps = steps
        self.monitor = gs.GradientMonitor(self.model, self.optimizer, every=every)

    def step(self, x, y):
        for _ in range(self.steps):
            loss = (self.model(x) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            gs.clip_gradients_(self.model, 0.5)
            self.optimizer.step()
        return loss


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (1, 5), (2, 5), (2, 2), (3, 100)])
def test_a_monitor_has_the_charts_of_plain_calls(steps, every):
    learner, reference = ClippingLearner(steps, every), ClippingLearner(steps, every)
    update = gs.CapturedStep(learner.step, *learner.state())
    given = batches(23)
    assert bits(captured_calls(update, given)) == bits(plain_calls(reference.step, given))
    assert bits(learner.state()) == bits(reference.state())
    assert update.is_captured
    learner.monitor.close()
    reference.monitor.close()
    assert learner.monitor.history == reference.monitor.history
    assert {"clip_rate", "gradient_norm_total"} <= learner.monitor.history.keys()
    assert learner.monitor.history["clip_rate"][-1][1] > 0


def test_a_monitor_that_is_opened_and_closed_between_replays():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    given = batches(30)
    captured_calls(update, given[:8])
    monitor = gs.GradientMonitor(learner.model, learner.optimizer, every=4, first_step=8)
    captured_calls(update, given[8:20])
    monitor.close()
    assert [step for step, _ in monitor.history["gradient_norm_total"]] == [8, 12, 16]
    captured_calls(update, given[20:])
    assert monitor._taken == 12
    reference = Learner()
    for part in (given[:8], given[8:20], given[20:]):
        plain_calls(reference.step, part)
    assert bits(learner.state()) == bits(reference.state())


def test_a_tracer_sees_plain_calls_only():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    captured_calls(update, batches(6))
    with gs.GradientTracer(), pytest.raises(RuntimeError, match=r"GradientTracer is active.*update\.plain"):
        update(*batches(1)[0])
    with gs.GradientTracer() as tracer:
        update.plain(*batches(1)[0])
    assert tracer.calls
    with pytest.raises(RuntimeError, match=r"detect_anomaly is active.*update\.plain"), torch.autograd.detect_anomaly():
        update(*batches(1)[0])
    with torch.device("cpu"):  # a mode too, but one that changes nothing here
        update(*batches(1)[0])


def test_state_that_the_step_replaces():
    learner = Learner()
    learner.model.hidden = torch.zeros(3)

    def step(x, y):
        out = learner.model(x) + learner.model.hidden
        learner.model.hidden = out.detach().mean(0)
        return learner.minimize((out - y).square().mean())

    text = refusal(step, learner.state(), "replay 2 of this graph differs from a plain step, in the result by")
    assert "unnamed_state" in text


def test_state_that_the_captured_call_makes():
    """With a warm-up of one call, a head that is trained later has no moments yet."""
    learner = Learner(OPTIMIZERS["momentum"])
    learner.model.body.requires_grad_(False)
    update = gs.CapturedStep(learner.step, *learner.state(), warmup=1, verify=0)
    captured_calls(update, batches(1))
    learner.model.body.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"makes SGD\.state\[.*'momentum_buffer'\] .*raise warmup"):
        captured_calls(update, batches(1))
    assert all(parameter.grad is None for parameter in learner.model.body.parameters())


def test_a_lazy_module():
    """A plain call initializes it. One that the plain calls do not use is refused."""
    learner = Learner()
    learner.model.lazy = torch.nn.LazyLinear(3)
    refusal(learner.step, learner.state(), r"Model\.lazy\.weight is uninitialized; call its lazy module once")
    update = gs.CapturedStep(learner.step, *learner.state(), fallback="eager")
    with pytest.warns(UserWarning, match="is uninitialized"):
        captured_calls(update, batches(5))
    with pytest.raises(ValueError, match=r"diagnose_capture: Model\.lazy\.weight is uninitialized"):
        gs.diagnose_capture(learner.step, batches(2), *learner.state())
    update = gs.CapturedStep(lambda x, y: learner.step(x, y) + learner.model.lazy(x).mean(), *learner.state())
    captured_calls(update, batches(5))
    assert update.is_captured


def test_state_that_is_not_named():
    learner, average = Learner(), torch.zeros(())

    def step(x, y):
        loss = learner.step(x, y)
        average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss

    refusal(step, learner.state(), "mul_ writes to a tensor that is not part of the state at .*average.mul_")
    text = refusal(learner.step, [learner.optimizer], "writes to a tensor that is not part of the state")
    assert "name what holds it" in text
    update = gs.CapturedStep(step, *learner.state(), average)
    captured_calls(update, batches(8))


def test_a_target_that_is_not_named():
    """`.data` hides the writes from PyTorch's counters. The target has the plain steps only."""
    learner, target = Learner(), Learner().model
    reference, average = copy.deepcopy((learner, target))

    def step(own, target, *batch):
        loss = own.step(*batch)
        for old, new in zip(target.parameters(), own.model.parameters(), strict=True):
            old.data.copy_(0.9 * old.data + 0.1 * new.data)
        return loss

    refusal(
        lambda *batch: step(learner, target, *batch),
        learner.state(),
        r"copy_ writes to a tensor that is not part of the state at .*old\.data\.copy_",
    )
    plain_calls(lambda *batch: step(reference, average, *batch), batches(3))
    assert bits([*learner.state(), target]) == bits([*reference.state(), average])


@pytest.mark.parametrize("write", [lambda x: x.clamp_(-1, 1), lambda x: x.data.clamp_(-1, 1)])
def test_arguments_that_the_step_writes_to(write):
    learner = Learner()

    def step(x, y):
        write(x)
        return learner.step(x, y)

    refusal(step, learner.state(), r"the step writes to argument 0 at .*clamp_.*; write to a copy")


def test_an_argument_of_the_state_that_the_step_writes_to():
    learner, average = Learner(), torch.zeros(6)
    update = gs.CapturedStep(
        lambda x, y, mean: (mean.lerp_(x.mean(0), 0.1), learner.step(x, y)), *learner.state(), average
    )
    captured = (update(*batch, average) for batch in batches(6))
    with pytest.raises(RuntimeError, match=r"writes to argument 2 at .*a tensor of the state is used where it is"):
        list(captured)


@pytest.mark.parametrize("library", ["python", "numpy"])
def test_random_numbers_of_the_host(library):
    import random

    learner = Learner()

    def step(x, y):
        noise = random.random() if library == "python" else numpy.random.rand()
        return learner.step(x + noise, y)

    refusal(step, learner.state(), {"python": "Python's random", "numpy": "NumPy's random"}[library])


def test_generators():
    """A generator that is named in the state is registered with the graph."""

    def make():
        learner, generator = Learner(), torch.Generator().manual_seed(5)

        def step(x, y):
            return learner.step(x + torch.randn(x.shape, generator=generator), y)

        return learner, generator, step

    (learner, generator, step), (reference, other, plain) = make(), make()
    update = gs.CapturedStep(step, *learner.state(), generator)
    assert_same(learner, update, reference, plain, batches(12))
    assert torch.equal(generator.get_state(), other.get_state())


def test_too_many_graphs_name_the_argument():
    learner = Learner()

    def step(x, y, beta=0.5):
        return learner.step(x * beta, y)

    update = gs.CapturedStep(step, *learner.state(), max_graphs=2, verify=0)
    given = [batches(1, size=size)[0] for size in (3, 4, 5, 6) for _ in range(5)]
    with pytest.raises(RuntimeError) as error:
        captured_calls(update, given)
    assert "there are 2 graphs already (max_graphs), and argument 0 keeps changing" in str(error.value)
    assert "float32 [3, 6], then float32 [4, 6], then float32 [5, 6]; pad it" in str(error.value)
    update = gs.CapturedStep(step, *learner.state(), max_graphs=2, verify=0)
    given = [(*batch, beta) for beta in (0.1, 0.2, 0.3) for batch in batches(5)]
    with pytest.raises(RuntimeError, match=r"argument 2 keeps changing: 0\.1, then 0\.2, then 0\.3; pass a tensor"):
        captured_calls(update, given)


def test_too_many_strides_name_the_argument():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state(), max_graphs=1, verify=0)
    captured_calls(update, batches(5))
    match = r"the strides of argument 0 keep changing: \[6, 1\], then \[1, 8\]; pass x\.contiguous\(\), or raise"
    with pytest.raises(RuntimeError, match=match):
        captured_calls(update, [(x.T.contiguous().T, y) for x, y in batches(5)])


def test_a_number_that_is_another_one_at_each_call():
    """No call comes again, so that none is captured."""
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(lambda x, y, count: learner.step(x, y), *learner.state())
    match = r"argument 2 keeps changing: 13, then 14, then 15, then 16, then 17; pass a tensor, whose value may"
    with pytest.warns(UserWarning, match=match) as caught:
        captured_calls(update, [(*batch, count) for count, batch in enumerate(batches(40), 1)])
    assert len(caught) == 1
    assert len(update._known) <= 16
    plain_calls(reference.step, batches(40))
    assert bits(learner.state()) == bits(reference.state())
    captured_calls(update, [(*batch, 0) for batch in batches(4)])
    assert update.is_captured


@dataclass
class Counted:
    values: torch.Tensor
    count: int = field(init=False, default=0)


def test_wrong_arguments_and_results():
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    x, y = batches(1)[0]
    with pytest.raises(TypeError, match=r"argument 1 is of type numpy\.ndarray.*torch\.as_tensor"):
        update(x, y.numpy())
    with pytest.raises(ValueError, match=r"argument 0 requires grad"):
        update(x.requires_grad_(), y)
    with pytest.raises(TypeError, match=r"argument y\[0\] is of type Counted.* built again .*field count is"):
        update(x, y=[Counted(y)])
    with pytest.raises(TypeError, match="its result is of type object"):
        gs.CapturedStep(lambda: object())()
    with pytest.raises(TypeError, match=r"its result is of type numpy\.float32.*write float\(\.\.\.\)"):
        gs.CapturedStep(lambda: numpy.float32(1))()
    with pytest.raises(TypeError, match=r"its result\['a'\]\[0\] is of type set"):
        gs.CapturedStep(lambda: {"a": [set()]})()
    for arguments, error, match in (
        ((3,), TypeError, "step must be callable, but it is of type int"),
        ((len, 3), TypeError, r"state\[0\] is of type int"),
        ((len, torch.nn.Linear), TypeError, r"state\[0\] is of type type"),
        ((len, [torch.zeros(1), {"a": "b"}]), TypeError, r"state\[0\]\[1\]\['a'\] is of type str"),
    ):
        with pytest.raises(error, match=match):
            gs.CapturedStep(*arguments)
    for options, error, match in (
        ({"warmup": 0}, ValueError, "warmup must be an integer of at least 1, but it is 0"),
        ({"verify": -1}, ValueError, "verify must be an integer of at least 0"),
        ({"max_graphs": 1.0}, TypeError, "max_graphs must be an integer of at least 1, but it is of type float"),
        ({"fallback": "plain"}, ValueError, "fallback must be None or 'eager', but it is 'plain'"),
        ({"hooks": None}, ValueError, "hooks must be 'raise' or 'ignore'"),
        ({"copy_outputs": 1}, TypeError, "copy_outputs must be True or False"),
    ):
        with pytest.raises(error, match=match):
            gs.CapturedStep(len, **options)


# ---- Exceptions, threads, copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [0, 2, 3, 4, 5])
def test_an_exception_of_the_step(call):
    """In a plain call, while capturing, and in the plain step of a verification: the next calls go on."""
    learner, reference, calls = Learner(), Learner(), []

    def step(x, y):
        calls.append(1)
        if len(calls) == call + 1:
            raise KeyError("mine")
        return learner.step(x, y)

    update = gs.CapturedStep(step, *learner.state())
    torch.manual_seed(7)
    failed = {}
    for index, batch in enumerate(batches(12)):
        try:
            update(*batch)
        except KeyError as error:
            failed[index] = str(error)
    assert list(failed.values()) == ["'mine'"]
    torch.manual_seed(7)
    with tape.TapeGraphs().side_by_side():
        for index, batch in enumerate(batches(12)):
            if index not in failed:
                reference.step(*batch)
    assert bits(learner.state()) == bits(reference.state())
    assert update.is_captured


def test_errors_are_of_a_public_type():
    """With the error of the step as their cause, and no others."""
    learner = Learner()

    def step(x, y):
        loss = learner.step(x, y)
        loss.item()
        return loss

    update = gs.CapturedStep(step, *learner.state())
    captured_calls(update, batches(3))
    with pytest.raises(RuntimeError, match="cannot be captured") as caught:
        update(*batches(1)[0])
    assert type(caught.value) is RuntimeError
    assert "captur" in str(caught.value.__cause__)
    assert "_Refused" not in "".join(traceback.format_exception(caught.value))


def test_an_interrupt_while_capturing():
    """Leaves the state of the plain calls, which a program may save then."""
    learner, calls = Learner(), []

    def step(x, y):
        calls.append(1)
        loss = learner.step(x, y)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss

    update = gs.CapturedStep(step, *learner.state())
    captured_calls(update, batches(3))
    before = bits([*learner.state(), torch.get_rng_state()])
    with pytest.raises(KeyboardInterrupt):
        update(*batches(1)[0])
    assert bits([*learner.state(), torch.get_rng_state()]) == before
    captured_calls(update, batches(3))
    assert update.is_captured


def test_fallback_calls_the_step():
    learner, reference = Learner(), Learner()

    def step(x, y):
        loss = learner.step(x, y)
        loss.item()
        return loss

    update = gs.CapturedStep(step, *learner.state(), fallback="eager")
    with pytest.warns(UserWarning, match="cannot be captured") as caught:
        got = captured_calls(update, batches(8))
    assert len(caught) == 1
    assert not update.is_captured
    assert bits([loss.detach() for loss in got]) == bits(
        [loss.detach() for loss in plain_calls(reference.step, batches(8))]
    )
    assert bits(learner.state()) == bits(reference.state())


def test_fallback_after_a_replay_that_differs():
    learner, reference, count = Learner(), Learner(), [1]

    def make(own):
        return lambda x, y: own.step(x * count[0], y)

    update = gs.CapturedStep(make(learner), *learner.state(), fallback="eager")

    def calls(call):
        torch.manual_seed(7)
        for index, batch in enumerate(batches(12)):
            count[0] = 1 + (index > 4)
            call(*batch)

    with pytest.warns(UserWarning, match="mul gets the number 1, then 2"):
        calls(update)
    with tape.TapeGraphs().side_by_side():
        calls(make(reference))
    assert bits(learner.state()) == bits(reference.state())


def test_two_threads_and_a_step_that_calls_itself():
    learner = Learner()
    running, done = threading.Event(), threading.Event()

    def step(x, y):
        if threading.current_thread() is not threading.main_thread():
            running.set()
            done.wait(60)
        return learner.step(x, y)

    update = gs.CapturedStep(step, *learner.state())
    thread = threading.Thread(target=lambda: update(*batches(1)[0]))
    thread.start()
    running.wait(60)
    with pytest.raises(RuntimeError, match="already running, in another thread or because it calls itself"):
        update(*batches(1)[0])
    done.set()
    thread.join()
    captured_calls(update, batches(8))
    own = gs.CapturedStep(lambda: own())
    with pytest.raises(RuntimeError, match="already running"):
        own()


def test_copies_leave_out_graphs():
    class Agent:
        def __init__(self):
            self.learner = Learner()

        def update(self, x, y):
            return self.learner.step(x, y)

    agent = Agent()
    update = gs.CapturedStep(agent.update, *agent.learner.state(), warmup=2)
    captured_calls(update, batches(5))
    copied = copy.deepcopy(update)
    assert update.is_captured
    assert not copied.is_captured
    before = bits(agent.learner.state())
    captured_calls(copied, batches(5))
    assert copied.is_captured
    assert bits(agent.learner.state()) == before, "the copy trains a model of its own"
    closure = Learner()
    own = type("Own", (gs.CapturedStep,), {})
    shared = copy.deepcopy(own(lambda x, y: closure.step(x, y), *closure.state()))
    assert type(shared) is own
    before = bits(closure.state())
    captured_calls(shared, batches(5))
    assert bits(closure.state()) != before, "a step that is a closure keeps its state"
    loaded = pickle.loads(pickle.dumps(gs.CapturedStep(closure.step, *closure.state(), verify=1)))
    captured_calls(loaded, batches(5))
    assert loaded.is_captured


class ModuleAgent(torch.nn.Module):
    """Holds its captured steps, and is part of their state."""

    def __init__(self):
        super().__init__()
        self.learner = Learner()
        self.model, self.optimizer = self.learner.state()
        self.update = gs.CapturedStep(self.step, self, self.optimizer)
        self.evaluate = gs.CapturedStep(self.loss, self)

    def step(self, x, y):
        return self.learner.step(x, y)

    def loss(self, x, y):
        return (self.model(x) - y).square().mean()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda agent: pickle.loads(pickle.dumps(agent))])
def test_copies_of_an_object_that_holds_its_captured_step(make):
    agent = ModuleAgent()
    captured_calls(agent.update, batches(6))
    copied, own = make(agent), make(agent.update)
    before = bits([agent.model, agent.optimizer])
    captured_calls(copied.update, batches(6))
    captured_calls(own, batches(6))
    assert copied.update.is_captured
    assert own.is_captured
    assert bits([agent.model, agent.optimizer]) == before
    captured_calls(agent.update, batches(6))
    assert bits([copied.model, copied.optimizer]) == bits([agent.model, agent.optimizer])


def test_reset_frees_graphs():
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    torch.manual_seed(7)
    for index, batch in enumerate(batches(12)):
        if index == 6:
            update.reset()
            assert update.graphs == []
        update(*batch)
    plain_calls(reference.step, batches(12))
    assert bits(learner.state()) == bits(reference.state())
    assert update.is_captured


def test_plain_calls_between_replays():
    learner, reference = Learner(), Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    torch.manual_seed(7)
    for index, batch in enumerate(batches(16)):
        (update.plain if index % 4 == 3 else update)(*batch)
    plain_calls(reference.step, batches(16))
    assert bits(learner.state()) == bits(reference.state())


class Agent:
    def __init__(self):
        self.learner, self.config, self.updates = Learner(), {"entropy": 0.1}, 0
        self.mask = torch.ones(3)

    def update(self, x, y):
        return self.learner.step(x * self.config["entropy"] * scale_of_the_module, y * self.mask)


scale_of_the_module = 1.0


def test_modes_have_graphs_of_their_own():
    learner = Learner()

    def evaluate(x, y):
        with torch.no_grad():
            return (learner.model(x) - y).square().mean()

    update = gs.CapturedStep(evaluate, *learner.state())
    captured_calls(update, batches(6))
    with torch.no_grad():
        captured_calls(update, batches(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured_calls(update, batches(3))
    with torch.inference_mode():
        captured_calls(update, batches(3))
        captured_calls(update, [[x * 1 for x in batch] for batch in batches(3)])
    assert len(update.graphs) == 4


def test_a_cpu_without_the_stand_in_calls_the_step(monkeypatch):
    monkeypatch.undo()
    learner = Learner()
    update = gs.CapturedStep(learner.step, *learner.state())
    results = captured_calls(update, batches(8))
    assert results[0].requires_grad
    assert not update.is_captured
    assert update.graphs == []
    assert update.plain(*batches(1)[0]).requires_grad
    assert "graphs=0" in repr(update)
