"""`CapturedStep` with CUDA graphs: the rules that tests/test_captured_step.py checks with a stand-in on the CPU."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import socket

import pytest
import torch
from test_cuda import need_gpu
from tests_of_capture import Learner, batches, bits

import gradscale_ext as gs
from gradscale_ext.capture import graphs

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def deterministic():
    need_gpu()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class GpuLearner(Learner):
    """A learner on the GPU."""

    def __init__(self, make=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)):
        torch.manual_seed(0)
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.1))
        self.model.cuda()
        self.optimizer = make(self.model.parameters())


def on_gpu(given):
    return [tuple(tensor.cuda() for tensor in batch) for batch in given]


def calls(call, given):
    torch.manual_seed(7)
    return [call(*batch) for batch in given]


def host(value):
    """Tensors of a state on the CPU, to be compared bit by bit."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [host(item) for item in value]
    if isinstance(value, torch.nn.Module):
        return host(value.state_dict()), [host(parameter.grad) for parameter in value.parameters()]
    return host(value.state_dict()) if hasattr(value, "state_dict") else value


def assert_equal(one, other):
    assert bits(host(one)) == bits(host(other))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1, device="cuda"), momentum=0.9, fused=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam_capturable": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True),
    "adamw_tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2, device="cuda"), fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, capturable=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_equal_plain_ones(name):
    learner, reference = GpuLearner(OPTIMIZERS[name]), GpuLearner(OPTIMIZERS[name])
    update = gs.CapturedStep(learner.step, *learner.state())
    given = on_gpu(batches(20))
    got, wanted = calls(update, given), calls(reference.step, given)
    assert_equal(got, wanted)
    assert_equal(learner.state(), reference.state())
    (info,) = update.graphs
    assert info.launches > 20
    assert info.memory > 0


def test_a_replay_waits_for_nothing():
    learner = GpuLearner()
    update = gs.CapturedStep(learner.step, *learner.state())
    given = on_gpu(batches(8))
    calls(update, given)
    pinned = [tuple(tensor.pin_memory() for tensor in batch) for batch in batches(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in [*given, *pinned]:
            update(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_schedules_change_a_tensor():
    def make():
        learner = GpuLearner(OPTIMIZERS["adamw_tensor"])
        return learner, torch.optim.lr_scheduler.CosineAnnealingLR(learner.optimizer, 10)

    (learner, schedule), (reference, other) = make(), make()
    update = gs.CapturedStep(learner.step, *learner.state(), schedule)
    torch.manual_seed(7)
    for batch in on_gpu(batches(14)):
        update(*batch)
        schedule.step()
    torch.manual_seed(7)
    for batch in on_gpu(batches(14)):
        reference.step(*batch)
        other.step()
    assert_equal(learner.state(), reference.state())


def test_a_number_of_a_schedule_raises():
    learner = GpuLearner()
    update = gs.CapturedStep(learner.step, *learner.state())
    calls(update, on_gpu(batches(6)))
    learner.optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(RuntimeError, match=r"AdamW\.param_groups\[0\]\['lr'\] is 0\.0001, but a graph keeps 0\.01"):
        update(*on_gpu(batches(1))[0])


WRONG = {
    "item": (lambda own, x: own.model(x).sum().item(), "item"),
    "if": (lambda own, x: 1 if own.model(x).sum() > 0 else 0, "a use as a condition"),
    "mask": (lambda own, x: x[x > 0], "an index that is a mask"),
    "host": (lambda own, x: x + torch.tensor([1.0], device="cuda"), "torch.tensor makes a tensor on the host"),
    "cpu": (lambda own, x: x.cpu(), r"cpu\(\) waits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_captured_names_the_line(name):
    learner, reference = GpuLearner(), GpuLearner()
    wrong, line = WRONG[name]

    def step(x, y):
        wrong(learner, x)
        return learner.step(x, y)

    def plain(x, y):
        wrong(reference, x)
        return reference.step(x, y)

    update = gs.CapturedStep(step, *learner.state())
    given = on_gpu(batches(8))
    with pytest.raises(RuntimeError, match=r"cannot be\s+captured") as error:
        calls(update, given)
    assert "tests/gpu/test_captured_steps.py:" in str(error.value)
    assert re.search(line, " ".join(str(error.value).split()))
    calls(plain, given[:3])
    assert_equal(learner.state(), reference.state())
    torch.cuda.synchronize()


def test_a_capture_that_fails_leaves_nothing_behind(monkeypatch):
    """Also where PyTorch does not notice the wait beforehand: stream, generators and allocator are as before."""
    monkeypatch.setattr(graphs, "_noting_waits", lambda waits: contextlib.nullcontext())
    learner, is_wrong = GpuLearner(), True

    def step(x, y):
        loss = learner.step(x, y)
        if is_wrong:
            loss.item()
        return loss

    update = gs.CapturedStep(step, *learner.state())
    stream, given = torch.cuda.current_stream(), on_gpu(batches(8))
    with pytest.raises(RuntimeError, match=r"cannot be captured at .*loss\.item\(\)"):
        calls(update, given)
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(3)
    first = torch.randn(3, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(3, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    is_wrong = False
    calls(update, given)
    assert update.is_captured


def test_what_a_step_is_told_about_the_capture():
    learner, answers = GpuLearner(), []

    def step(x, y):
        answers.append(torch.cuda.is_current_stream_capturing())
        if not answers[-1]:
            assert (x == x).all()
        return learner.step(x, y)

    update = gs.CapturedStep(step, *learner.state())
    calls(update, on_gpu(batches(4)))
    assert update.is_captured
    assert answers == [False, False, False, True, False], "warm-up, capture, and a plain step that is compared"
    assert gs.diagnose_capture(step, on_gpu(batches(2)), *learner.state()).ok
    assert answers[5:] == [False, True, True]


def test_seeds_in_the_step():
    learner = GpuLearner()

    def step(x, y):
        torch.manual_seed(3)
        return learner.step(x, y)

    with pytest.raises(RuntimeError, match=r"cannot be captured|random numbers of device"):
        calls(gs.CapturedStep(step, *learner.state()), on_gpu(batches(8)))


def test_a_captured_step_inside_of_another():
    learner, reference = GpuLearner(), GpuLearner()
    inner = gs.CapturedStep(learner.step, *learner.state())
    given = on_gpu(batches(16))
    calls(inner, given[:8]), calls(reference.step, given[:8])
    outer = gs.CapturedStep(lambda x, y: inner(x, y) * 2, *learner.state())
    assert_equal(calls(outer, given[8:]), [2 * loss.detach() for loss in calls(reference.step, given[8:])])
    assert_equal(learner.state(), reference.state())
    assert outer.is_captured


def test_an_optimizer_that_counts_on_the_host():
    learner = GpuLearner(lambda p: torch.optim.Adam(p, lr=1e-2))
    update = gs.CapturedStep(learner.step, *learner.state())
    with pytest.raises(RuntimeError, match=r"fused=True.*capturable=True"):
        calls(update, on_gpu(batches(8)))
    assert {state["step"].item() for state in learner.optimizer.state.values()} == {3}


def test_a_generator_of_the_device():
    def make():
        learner, generator = GpuLearner(), torch.Generator("cuda").manual_seed(5)

        def step(x, y):
            return learner.step(x + torch.randn(x.shape, generator=generator, device="cuda"), y)

        return learner, generator, step

    (learner, generator, step), (reference, other, plain) = make(), make()
    update = gs.CapturedStep(step, *learner.state(), generator)
    given = on_gpu(batches(12))
    assert_equal(calls(update, given), calls(plain, given))
    assert_equal(learner.state(), reference.state())
    assert torch.equal(generator.get_state(), other.get_state())


def test_forms_share_memory():
    learner, reference = GpuLearner(), GpuLearner()
    update = gs.CapturedStep(learner.step, *learner.state())
    given = on_gpu([batches(20)[i] if i % 3 else batches(20, size=4)[i] for i in range(20)])
    assert_equal(calls(update, given), calls(reference.step, given))
    assert_equal(learner.state(), reference.state())
    assert len(update.graphs) == 2
    assert len({info.memory for info in update.graphs}) == 1


def test_gradients_accumulate_over_calls():
    def make():
        learner = GpuLearner()

        def backward(x, y):
            loss = (learner.model(x) - y).square().mean()
            loss.backward()
            return loss

        return learner, backward

    (learner, backward), (reference, plain) = make(), make()
    update = gs.CapturedStep(backward, *learner.state())
    for own, call in ((learner, update), (reference, plain)):
        torch.manual_seed(7)
        for index, batch in enumerate(on_gpu(batches(24))):
            call(*batch)
            if index % 3 == 2:
                own.optimizer.step()
                own.optimizer.zero_grad()
    assert_equal(learner.state(), reference.state())
    assert update.is_captured


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_everything_of_this_package_in_one_graph(compiled, dtype):
    """Unroll, loss, returns, targets, clipping and statistics, with autocast and torch.compile."""
    support = gs.Support.muzero(10)

    def make():
        torch.manual_seed(3)
        encoder, dynamics, heads = torch.nn.Linear(6, 32), torch.nn.Linear(38, 32), torch.nn.Linear(32, 46)
        model = torch.nn.ModuleList([encoder, dynamics, heads]).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        loss_fn = gs.MultiStepLoss.muzero(support)
        clip = gs.ClipGradientNorm(1.0, batch_dims=1).cuda()

        def predict(hidden):
            return dict(zip(("value", "reward", "policy"), heads(hidden).split((21, 21, 4), 1), strict=True))

        def initial(x):
            hidden = encoder(x).tanh()
            return predict(hidden), hidden

        def recurrent(hidden, action):
            hidden = clip(dynamics(torch.cat([hidden, action], 1)).tanh())
            return predict(hidden), hidden

        if compiled:
            initial, recurrent = torch.compile(initial), torch.compile(recurrent)

        def step(x, actions, rewards, policy):
            targets = gs.muzero_targets(
                rewards, rewards.new_zeros(len(x), 9), num_unroll_steps=3, td_steps=3, discount=0.9, root_reward=x[:, 0]
            )
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                out = loss_fn(
                    gs.unroll(initial, recurrent, x, actions),
                    {"value": targets.values, "reward": targets.rewards, "policy": policy},
                    step_gradient_scale="unroll",
                )
            optimizer.zero_grad()
            (out.loss + gs.l2_loss(model, 1e-4)).backward()
            statistics = gs.clip_gradients_(model, 1.0)
            optimizer.step()
            return out.loss, statistics.total_norm, out.expected["value"], out.head_gradient_norms

        return [model, optimizer, clip], step

    def given(count):
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(shape, generator=generator).cuda()
        return [(draw(16, 6), draw(16, 3, 6), draw(16, 8), draw(16, 4, 4).softmax(-1)) for _ in range(count)]

    (state, step), (reference, plain) = make(), make()
    update = gs.CapturedStep(step, *state)
    assert_equal(calls(update, given(12)), calls(plain, given(12)))
    assert_equal(state, reference)
    assert update.is_captured


def test_a_scaler_with_a_fused_optimizer():
    def make():
        learner, scaler = GpuLearner(), torch.amp.GradScaler("cuda", init_scale=1024.0)

        def step(x, y):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (learner.model(x) - y).square().mean()
            learner.optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(learner.optimizer)
            scaler.update()
            return loss

        return learner, scaler, step

    (learner, scaler, step), (reference, other, plain) = make(), make()
    update = gs.CapturedStep(step, *learner.state(), scaler)
    given = on_gpu(batches(12))
    given[9] = given[9][0] * torch.inf, given[9][1]  # a step that is skipped on the device
    calls(update, given), calls(plain, given)
    assert update.is_captured
    assert_equal(learner.optimizer.state_dict(), reference.optimizer.state_dict())
    assert scaler.get_scale() == other.get_scale() == 512.0
    unfused = GpuLearner(lambda p: torch.optim.SGD(p, lr=0.1))

    def step_of_another_optimizer(x, y):
        loss = (unfused.model(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(unfused.optimizer)

    update = gs.CapturedStep(step_of_another_optimizer, *unfused.state(), scaler)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        calls(update, on_gpu(batches(8)))


def test_distributed_data_parallel_on_one_rank():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        learner, reference = GpuLearner(), GpuLearner()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # PyTorch asks for a side stream
            learner.model = torch.nn.parallel.DistributedDataParallel(learner.model)
        torch.cuda.current_stream().wait_stream(side)
        with pytest.raises(ValueError, match="at least 11 with DistributedDataParallel"):
            gs.CapturedStep(learner.step, *learner.state())
        update = gs.CapturedStep(learner.step, *learner.state(), warmup=11)
        given = on_gpu(batches(20))
        assert_equal(calls(update, given), calls(reference.step, given))
        assert_equal(learner.model.module, reference.model)
        assert update.is_captured
    finally:
        torch.distributed.destroy_process_group()


def test_a_monitor_records_plain_steps():
    def make():
        learner = GpuLearner()
        monitor = gs.GradientMonitor(learner.model, learner.optimizer, every=5)

        def step(x, y):
            loss = (learner.model(x) - y).square().mean()
            learner.optimizer.zero_grad()
            loss.backward()
            gs.clip_gradients_(learner.model, 0.3)
            learner.optimizer.step()
            return loss

        return learner, monitor, step

    (learner, monitor, step), (reference, other, plain) = make(), make()
    update = gs.CapturedStep(step, *learner.state())
    given = on_gpu(batches(23))
    assert_equal(calls(update, given), calls(plain, given))
    monitor.close()
    other.close()
    assert update.is_captured
    assert_equal(learner.state(), reference.state())
    assert monitor.history == other.history
    assert {"clip_rate", "gradient_norm_total"} <= monitor.history.keys()


def test_results_and_copies():
    learner = GpuLearner()
    update = gs.CapturedStep(learner.step, *learner.state())
    kept = calls(update, on_gpu(batches(10)))
    assert len({tensor.data_ptr() for tensor in kept}) == 10
    copied = copy.deepcopy(update)
    assert not copied.is_captured
    update.reset()
    assert update.graphs == []
    calls(update, on_gpu(batches(6)))
    assert update.is_captured
