"""Third-party clients, each with a small task: TensorDict, TorchRL, Lightning and Accelerate.

Install them with `python -m pip install ".[clients]"`; the tests that need them import them.
"""

from __future__ import annotations

import functools
import logging
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import gradscale_ext as gs

pytestmark = pytest.mark.xdist_group("clients")  # one process imports them once

BATCH, STEPS, BINS, ACTIONS = 16, 6, 11, 3
HEADS = {
    "value": gs.TwoHot(gs.Support(-5, 5, BINS, transform="identity"), weight=0.25),
    "policy": gs.SoftCrossEntropy(),
}


class Network(nn.Module):
    """Predictions of all steps from one observation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.value = nn.Linear(16, STEPS * BINS)
        self.policy = nn.Linear(16, STEPS * ACTIONS)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.value(hidden).unflatten(-1, (STEPS, BINS)), self.policy(hidden).unflatten(-1, (STEPS, ACTIONS))


def network():
    torch.manual_seed(0)
    return Network()


@functools.cache
def batch(size=BATCH):
    """Observations, targets, mask and weights."""
    generator = torch.Generator().manual_seed(1)
    targets = {
        "value": 2 * torch.randn(size, STEPS, generator=generator),
        "policy": torch.randn(size, STEPS, ACTIONS, generator=generator).softmax(-1),
    }
    mask = torch.rand(size, STEPS, generator=generator) > 0.2
    return torch.randn(size, 4, generator=generator), targets, mask, torch.rand(size, generator=generator)


def by_hand(predictions, targets, mask, weights, scale=None):
    """The loss of these heads in plain PyTorch, with the gradient of each step multiplied by `scale`."""
    centers = torch.arange(-5.0, 6.0)
    two_hot = (1 - (targets["value"].clamp(-5, 5)[..., None] - centers).abs()).clamp(min=0)
    value = -(two_hot * predictions["value"].log_softmax(-1)).sum(-1)
    policy = -(targets["policy"] * predictions["policy"].log_softmax(-1)).sum(-1)
    steps = torch.where(mask, 0.25 * value + policy, 0.0)
    if scale is not None:
        steps = steps * scale + steps.detach() * (1 - scale)
    return (weights * steps.sum(1)).mean()


UNROLL = torch.tensor([1.0] + [1 / (STEPS - 1)] * (STEPS - 1))


# ---- TensorDict ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tensordicts():
    """Predictions, targets, and a mask for each head. Iteration over a TensorDict yields samples, not head names."""
    pytest.importorskip("tensordict")
    from tensordict import TensorDict

    _, targets, mask, _ = batch()
    generator = torch.Generator().manual_seed(2)
    predictions = {
        "value": torch.randn(BATCH, STEPS, BINS, generator=generator),
        "policy": torch.randn(BATCH, STEPS, ACTIONS, generator=generator),
    }
    return tuple(TensorDict(entries, [BATCH]) for entries in (predictions, targets, dict.fromkeys(HEADS, mask)))


def loss_of(predictions, targets, masks):
    weights = batch()[3]
    loss_fn = gs.MultiStepLoss(**HEADS)
    return loss_fn(predictions, targets, mask=masks, importance_weights=weights, step_gradient_scale="unroll").loss


def expected_of(predictions, targets):
    """Loss and gradients computed by hand."""
    leaves = {name: predictions[name].detach().clone().requires_grad_() for name in HEADS}
    _, _, mask, weights = batch()
    loss = by_hand(leaves, targets, mask, weights, UNROLL)
    return loss.detach(), dict(zip(HEADS, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_gradients(found, expected):
    assert set(found.keys()) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("given", ["everything", "predictions", "targets", "mask"])
def test_tensordicts(tensordicts, given):
    predictions, targets, _ = tensordicts
    predictions.requires_grad_()
    entries = [
        entry if given in ("everything", name) else dict(entry.items())
        for name, entry in zip(("predictions", "targets", "mask"), tensordicts, strict=True)
    ]
    loss = loss_of(*entries)
    loss.backward()
    expected, gradients = expected_of(predictions, targets)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
    assert_gradients({name: predictions[name].grad for name in HEADS}, gradients)


def test_tensordicts_in_func_grad(tensordicts):
    predictions, targets, masks = tensordicts
    gradient, loss = torch.func.grad_and_value(loss_of)(predictions, targets, masks)
    expected, gradients = expected_of(predictions, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_gradients(gradient, gradients)


@pytest.mark.parametrize("size", [BATCH, 2], ids=["many", "as many as heads"])
def test_tensordicts_in_compiled_code(tensordicts, size):
    predictions, targets, masks = (entries[:size] for entries in tensordicts)
    predictions.requires_grad_()
    loss_fn = gs.MultiStepLoss(**HEADS)

    def loss_of(predictions, targets, masks):
        return loss_fn(predictions, targets, mask=masks, reduction="sum").loss

    eager = torch.autograd.grad(loss_of(predictions, targets, masks), list(predictions.values()))
    torch._dynamo.reset()
    loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(predictions, targets, masks)
    torch.testing.assert_close(loss, loss_of(predictions, targets, masks), rtol=1e-5, atol=0)
    for found, expected in zip(torch.autograd.grad(loss, list(predictions.values())), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def graded(function, *arguments):
    return torch.func.grad(function)(*arguments)


@pytest.mark.parametrize("change", ["missing", "more"])
@pytest.mark.parametrize("entries", [0, 1, 2], ids=["predictions", "targets", "mask"])
@pytest.mark.parametrize("call", [lambda function, *a: function(*a), graded], ids=["eager", "func.grad"])
def test_tensordicts_without_a_head_or_with_another(tensordicts, call, entries, change):
    """The message is the same as for a dict. If predictions or targets are wrong, it names the head."""
    messages = []
    for kind in (lambda entry: dict(entry.items()), lambda entry: entry):
        given = [entry.clone() for entry in tensordicts]
        if change == "missing":
            del given[entries]["policy"]
        else:
            given[entries]["extra"] = given[entries]["policy"]
        try:
            call(loss_of, *map(kind, given))
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("")
    assert messages[0] == messages[1]
    assert ("policy" if change == "missing" else "extra") in messages[0] or entries == 2


# ---- TorchRL ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def loss_module():
    """Losses like TorchRL's separate the model's parameters from the model, and store everything in TensorDicts."""
    pytest.importorskip("torchrl")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictParams
    from torchrl.objectives import LossModule

    class MuZeroLoss(LossModule):
        model: TensorDictModule
        model_params: TensorDictParams
        target_model_params: TensorDictParams
        out_keys = ["loss_muzero", "priority"]  # noqa: RUF012

        def __init__(self, model):
            super().__init__()
            self.in_keys = ["observation", "target", "mask", "weight"]
            self.convert_to_functional(model, "model", create_target_params=False)
            self.loss = gs.MultiStepLoss(**HEADS)

        def forward(self, tensordict):
            with self.model_params.to_module(self.model):
                predictions = self.model(tensordict.select("observation")).select("value", "policy")
            out = self.loss(
                predictions,
                tensordict["target"],
                mask=tensordict["mask"],
                importance_weights=tensordict["weight"],
                step_gradient_scale="unroll",
            )
            priority = gs.priorities(out.expected["value"], tensordict["target", "value"])
            return TensorDict({"loss_muzero": out.loss, "priority": priority.mean()}, [])

    return MuZeroLoss(TensorDictModule(network(), ["observation"], ["value", "policy"]))


def replayed():
    from tensordict import TensorDict

    observations, targets, mask, weights = batch()
    return TensorDict(
        {"observation": observations, "target": TensorDict(targets, [BATCH]), "mask": mask, "weight": weights}, [BATCH]
    )


def test_a_loss_module_trains(loss_module):
    """Its gradients agree with the formula; `clip_gradients_` and the monitor accept the module unchanged."""
    data, plain = replayed(), network()
    observations, targets, mask, weights = batch()
    ours = torch.optim.SGD(loss_module.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    with gs.GradientMonitor(loss_module, ours, every=1) as watching:
        for _ in range(5):
            ours.zero_grad()
            loss = loss_module(data)["loss_muzero"]
            loss.backward()
            norm = gs.clip_gradients_(loss_module, 0.5)
            ours.step()

            theirs.zero_grad()
            expected = by_hand(dict(zip(HEADS, plain(observations), strict=True)), targets, mask, weights, UNROLL)
            expected.backward()
            their_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0)
            assert float(norm) == pytest.approx(float(their_norm), rel=1e-5)
    prefix = "model_params.module."
    assert norm.names == [prefix + name for name, _ in plain.named_parameters()]
    for mine, other in zip(loss_module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert [step for step, _ in watching.history[f"gradient_norm/{prefix}body.weight"]] == [0, 1, 2, 3, 4]
    assert watching.history["gradient_norm_total_before_clipping"][-1][1] == pytest.approx(float(norm))


# ---- Lightning -------------------------------------------------------------------------------------------------------


def fit(module, callbacks, size=5 * BATCH, **options):
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    observations, targets, mask, _ = batch(size)
    data = torch.utils.data.TensorDataset(observations, targets["value"], targets["policy"], mask)
    torch.manual_seed(0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **{**quiet, **options})
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=BATCH))
    return trainer


@pytest.fixture
def lightning_module():
    pytest.importorskip("lightning")
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, factors=(), manual=False):
            super().__init__()
            self.network, self.loss = network(), gs.MultiStepLoss(**HEADS)
            self.automatic_optimization, self.factors = not manual, dict(factors)
            self.norms, self.monitor = [], None

        def training_step(self, batch, index):
            observations, value, policy, mask = batch
            predictions = dict(zip(HEADS, self.network(observations), strict=True))
            loss = self.loss(predictions, {"value": value, "policy": policy}, mask=mask).loss
            loss = loss * self.factors.get(index, 1.0)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                self.monitor = self.monitor or gs.GradientMonitor(self, optimizer, every=1)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_train_batch_end(self, *_):
            gradients = [parameter.grad.flatten() for parameter in self.parameters()]
            self.norms.append(torch.cat(gradients).norm().item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module


def monitored():
    from gradscale_ext.monitor.lightning import GradientMonitorCallback

    return GradientMonitorCallback(every=1)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.69}, {"precision": "bf16-mixed"}], ids=str)
def test_lightning(lightning_module, options):
    """The callback records the optimizer's gradients, clipped by the trainer or not, and does not affect training."""
    watched, alone, callback = lightning_module(), lightning_module(), monitored()
    trainer = fit(watched, [callback], **options)
    fit(alone, [], **options)
    [monitor] = callback.monitors
    totals = monitor.history["gradient_norm_total"]
    assert [step for step, _ in totals] == list(range(trainer.global_step))
    assert [norm for _, norm in totals] == pytest.approx(watched.norms, rel=1e-5)
    limit = options.get("gradient_clip_val", math.inf)
    assert max(watched.norms) <= limit + 1e-5
    before = [norm for _, norm in monitor.history.get("gradient_norm_total_before_clipping", [])]
    assert [rate for _, rate in monitor.history.get("clip_rate", [])] == [float(norm > limit) for norm in before]
    assert len(before) == (len(totals) if math.isfinite(limit) else 0)
    assert not before or min(before) < limit < max(before)
    assert "gradient_norm/network.body.weight" in monitor.history
    assert all(map(torch.equal, watched.parameters(), alone.parameters()))


def test_lightning_clips_by_value(lightning_module):
    module, callback = lightning_module({0: 1e-3}), monitored()
    fit(module, [callback], gradient_clip_val=0.01, gradient_clip_algorithm="value")
    history = callback.monitors[0].history
    assert [norm for _, norm in history["gradient_norm_total"]] == pytest.approx(module.norms, rel=1e-5)
    assert [rate for _, rate in history["clip_rate"]] == [0.0] + [1.0] * 4
    norms = zip(history["gradient_norm_total_before_clipping"], module.norms, strict=True)
    assert [step for (step, before), after in norms if before > 1.01 * after] == [1, 2, 3, 4]


def test_lightning_skips_a_step(lightning_module):
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    module, callback = lightning_module({2: math.inf}), monitored()
    fit(module, [callback], plugins=[MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=0.5)
    [monitor] = callback.monitors
    assert [step for step, _ in monitor.history["gradient_norm_total"]] == [0, 1, 3, 4]
    assert monitor.history["skipped_steps"] == [(2, 1.0)]
    assert [step for step, _ in monitor.history["nonfinite_gradients"]] == [2]


def test_lightning_writes_to_tensorboard(lightning_module, tmp_path):
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = monitored()
    fit(lightning_module(), [callback], logger=TensorBoardLogger(tmp_path, name="", version=""))
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("gradient_norm_total")
    expected = callback.monitors[0].history["gradient_norm_total"]
    assert [(event.step, event.value) for event in events] == [
        (step, pytest.approx(v, rel=1e-6)) for step, v in expected
    ]


@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_lightning_writes_to_a_run(lightning_module, tmp_path, monkeypatch, library):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip(library)
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

    if library == "wandb":
        logger = WandbLogger(save_dir=tmp_path, mode="offline")
    else:
        logger = MLFlowLogger(tracking_uri=(tmp_path / "runs").as_uri())
    callback = monitored()
    fit(lightning_module(), [callback], logger=logger)
    expected = callback.monitors[0].history["gradient_norm_total"]
    if library == "wandb":
        assert logger.experiment.summary["gradients/gradient_norm_total"] == expected[-1][1]
        logger.experiment.finish()
    else:
        read = logger.experiment.get_metric_history(logger.run_id, "gradient_norm_total")
        assert [(metric.step, metric.value) for metric in read] == expected


def test_lightning_wraps_the_optimizer(lightning_module):
    module = lightning_module(manual=True)
    fit(module, [])
    module.monitor.close()
    assert [norm for _, norm in module.monitor.history["gradient_norm_total"]] == pytest.approx(module.norms, rel=1e-5)


# ---- Accelerate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator():
    """Make an accelerator for a precision. Accelerate has no scaler on the CPU: "fp16" gets one here, as on a GPU."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def make(precision, **options):
        accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
        if precision == "fp16":
            accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=16.0), True
        return accelerator

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    yield make
    forget()


LIMIT = 0.25  # smaller than the first steps' norms, larger than the last ones


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("ours", [False, True], ids=["their clipping", "our clipping"])
def test_accelerate(accelerator, precision, ours):
    """The monitor is attached after `prepare`; a step that overflows is skipped in fp16, and recorded as skipped."""
    accelerator = accelerator(precision)
    model, loss_fn = network(), gs.MultiStepLoss(**HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    observations, targets, mask, weights = batch()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before, skipped = [], []
    with gs.GradientMonitor(model, optimizer, every=1) as watching:
        for step in range(5):
            optimizer.zero_grad()
            predictions = dict(zip(HEADS, model(observations), strict=True))
            loss = loss_fn(predictions, targets, mask=mask, importance_weights=weights).loss
            accelerator.backward(loss * math.inf if (step, precision) == (2, "fp16") else loss)
            if ours:
                accelerator.unscale_gradients()
                before.append(float(gs.clip_gradients_(model, LIMIT)))
            else:
                before.append(float(accelerator.clip_grad_norm_(model.parameters(), LIMIT)))
            optimizer.step()
            scheduler.step()
            skipped.append(optimizer.step_was_skipped)
    taken = [step for step in range(5) if not skipped[step]]
    assert taken == ([0, 1, 3, 4] if precision == "fp16" else [0, 1, 2, 3, 4])
    totals = dict(watching.history["gradient_norm_total"])
    assert list(totals) == taken
    assert totals == {step: pytest.approx(min(before[step], LIMIT), rel=1e-5) for step in taken}
    assert [step for step, _ in watching.history.get("skipped_steps", [])] == [2] * (precision == "fp16")
    clipped = watching.history.get("gradient_norm_total_before_clipping")
    assert clipped == [(step, pytest.approx(before[step])) for step in taken]
    changed = [not norm <= LIMIT for norm in before]
    since = [changed[first + 1 : last + 1] for first, last in pairwise([-1, *taken])]
    assert watching.history["clip_rate"] == [(step, sum(s) / len(s)) for step, s in zip(taken, since, strict=True)]
    assert 0 < sum(changed) < 5


def test_accelerate_clips_by_value(accelerator):
    accelerator, model = accelerator("no"), nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with gs.GradientMonitor(model, optimizer, every=1) as watching:
        for inputs in ([3.0, 4.0], [0.6, 0.8]):
            optimizer.zero_grad()
            accelerator.backward(model(torch.tensor(inputs)).sum())
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    assert watching.history["clip_rate"] == [(0, 1.0), (1, 0.0)]
    assert watching.history["gradient_norm_total_before_clipping"] == [(0, 5.0), (1, pytest.approx(1.0))]
    assert watching.history["gradient_norm_total"] == [(0, pytest.approx(math.sqrt(2))), (1, pytest.approx(1.0))]


def test_accelerate_accumulates(accelerator):
    """Steps that Accelerate omits for gradient accumulation count neither as steps nor as skipped steps."""
    accelerator = accelerator("fp16", gradient_accumulation_steps=2)
    model = network()
    observations, targets, mask, _ = batch()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    with gs.GradientMonitor(model, optimizer, every=1) as watching:
        for _ in range(4):
            with accelerator.accumulate(model):
                predictions = dict(zip(HEADS, model(observations), strict=True))
                accelerator.backward(gs.multi_step_loss(HEADS, predictions, targets, mask=mask).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert [step for step, _ in watching.history["gradient_norm_total"]] == [0, 1]
    assert "skipped_steps" not in watching.history
