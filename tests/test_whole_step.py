"""The example's learner step in every form: compiled, in half types, with activation checkpointing, exported."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts import BACKEND
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscale_ext as gs

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "muzero"))
from learner import loss_of, make_loss, make_optimizer
from networks import MuZeroNetwork
from replay import Batch

B, K, ACTIONS = 16, 3, 4
SUPPORT = gs.Support(-5, 5, 21)


def make_network(dtype: torch.dtype = torch.float32) -> MuZeroNetwork:
    torch.manual_seed(0)
    network = MuZeroNetwork((6,), ACTIONS, SUPPORT, hidden_size=8, layer_size=16).to(dtype)
    for p in network.parameters():  # heads begin at 0
        p.data += 0.1 * torch.randn_like(p)
    return network


def make_batch(seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    legal_actions = random(B, ACTIONS) < 1
    legal_actions[:, 0] = True
    policy = random(B, K + 1, ACTIONS)
    policy[:, 0].masked_fill_(~legal_actions, -torch.inf)
    return Batch(
        index=None,  # type: ignore[arg-type]
        observation=random(B, 6),
        legal_actions=legal_actions,
        actions=random(B, K).abs().mul(2).clamp(max=ACTIONS - 1).long(),
        targets={"value": random(B, K + 1), "reward": random(B, K), "policy": policy.softmax(-1)},
        mask=dict.fromkeys(("value", "reward", "policy"), random(B, K + 1) < 1),
        importance_weights=random(B).abs(),
    )


def arguments_of(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in Batch.__dataclass_fields__}


def train(steps: int, loss: Callable[..., Tensor], network: nn.Module, schedule: bool = True) -> list[float]:
    """Losses of `steps` steps, with schedules of the hidden state's scale, the weight decay and the learning rate."""
    optimizer = make_optimizer(network, 1e-3)
    losses = []
    for step in range(steps):
        done = step / steps if schedule else 0.0
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - done)
        value = loss(make_batch(step), 1e-4 * (1 + done), 0.5 + 0.5 * done)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def eager_loss(network: MuZeroNetwork) -> Callable[..., Tensor]:
    loss_function = make_loss(SUPPORT, "fused")
    return lambda batch, decay, scale: loss_of(network, loss_function, batch, decay, scale)[0]


@pytest.mark.compiled
def test_compiled_without_graph_breaks_and_recompilations():
    """Forty steps with schedules: one graph, and a second one when PyTorch sees that numbers vary."""
    truth = train(40, eager_loss(network := make_network()), network)
    network, loss_function = make_network(), make_loss(SUPPORT, "auto")

    def loss(tensors: dict[str, Any], decay: float, scale: float) -> Tensor:
        return loss_of(network, loss_function, Batch(**tensors), decay, scale)[0]

    torch._dynamo.reset()
    compiles = torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    before, graphs = compiles["unique_graphs"], []

    def counted(batch: Batch, decay: float, scale: float) -> Tensor:
        value = compiled(arguments_of(batch), decay, scale)
        graphs.append(compiles["unique_graphs"] - before)
        return value

    losses = train(40, counted, network)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(truth), rtol=1e-3, atol=1e-4)
    assert graphs[0] == 1
    assert graphs[2] == graphs[-1] <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype):
    """The loss accepts half-precision logits. With float16, a GradScaler scales the loss, and skips no step here."""
    truth = train(50, eager_loss(network := make_network()), network, schedule=False)
    network = make_network()
    inner = eager_loss(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=dtype == torch.float16)
    optimizer = make_optimizer(network, 1e-3)
    losses = []
    for step in range(50):
        with torch.autocast("cpu", dtype):
            value = inner(make_batch(step), 1e-4, 0.5)
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    assert scaler.get_scale() == (128.0 if scaler.is_enabled() else 1.0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(truth), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool):
    """The dynamics' activations are recomputed in the backward pass, and the gradients are the same."""
    network = make_network(torch.float64)
    batch, loss_function = make_batch(0, torch.float64), make_loss(SUPPORT, "fused")
    plain = torch.autograd.grad(loss_of(network, loss_function, batch, 1e-4)[0], list(network.parameters()))
    inner = network.recurrent_inference

    # Reentrant checkpointing passes no gradients through tensors in a dict.
    def flat(hidden: Tensor, action: Tensor) -> tuple[Tensor, ...]:
        outputs, hidden = inner(hidden, action)
        return outputs["reward"], outputs["value"], outputs["policy"], hidden

    def recurrent_inference(hidden: Tensor, action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        *outputs, hidden = checkpoint(flat, hidden, action, use_reentrant=use_reentrant)
        return dict(zip(("reward", "value", "policy"), outputs, strict=True)), hidden

    network.recurrent_inference = recurrent_inference  # type: ignore[method-assign]
    loss_of(network, loss_function, batch, 1e-4)[0].backward()
    for p, gradient in zip(network.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-13, atol=1e-13)


class Unrolled(nn.Module):
    """A model with gradient-flow operators, for torch.export. It returns the predictions of an unroll."""

    def __init__(self, network: MuZeroNetwork) -> None:
        super().__init__()
        self.network = network
        self.clip = gs.ClipGradientNorm(1.0, batch_dims=1)
        self.reverse = gs.ReverseGradient()

    def forward(self, observation: Tensor, legal_actions: Tensor, actions: Tensor) -> list[Tensor]:
        predictions = gs.unroll(
            lambda x: self.network.initial_inference(self.clip(self.reverse(x)), legal_actions),
            self.network.recurrent_inference,
            observation,
            actions,
        )
        return [tensor for entries in predictions.values() for tensor in entries]


def test_exported_models_predict_and_learn():
    """The exported program contains the operators, and its gradients equal the gradients of the model."""
    model, batch = Unrolled(make_network(torch.float64)), make_batch(0, torch.float64)
    inputs = (batch.observation.clone().requires_grad_(), batch.legal_actions, batch.actions)
    program = torch.export.export(copy.deepcopy(model), inputs)
    gradients = []
    for function in (model, program.module()):
        outputs = function(*inputs)
        gradients.append(torch.autograd.grad(sum(o.nan_to_num(neginf=0.0).sin().sum() for o in outputs), inputs[0])[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    assert sum(node.target is torch.ops.gradscale_ext.scale_gradient.default for node in program.graph.nodes) == K


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="AOTInductor needs a C++ compiler")
def test_models_are_packaged_by_aot_inductor(tmp_path: Path):
    model, batch = Unrolled(make_network()).eval(), make_batch(0)
    inputs = (batch.observation, batch.legal_actions, batch.actions)
    with torch.no_grad():
        program = torch.export.export(model, inputs)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        for found, expected in zip(torch._inductor.aoti_load_package(package)(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
