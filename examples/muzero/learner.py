"""The learner step, as in the pseudocode of MuZero (Schrittwieser et al. 2020, `update_weights`)."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import ProcessGroup

import gradscale_ext as gs
from networks import MuZeroNetwork
from replay import Batch

LossFunction = Callable[..., gs.MultiStepLossOutput]


def make_loss(support: gs.Support, implementation: str, process_group: ProcessGroup | None = None) -> LossFunction:
    """The loss of value, reward and policy. `implementation` is "fused", or "reference" for the same in plain PyTorch.

    With a process group, the loss is the mean over the samples of all ranks, and importance weights are divided by the
    largest weight of all ranks.
    """
    loss_function = gs.MultiStepLoss(
        value=gs.TwoHot(support),
        reward=gs.TwoHot(support, first_step=1),  # the root has no reward
        policy=gs.SoftCrossEntropy(),
    )
    ranks = {"process_group": process_group, "normalize_importance_weights": True} if process_group else {}
    return functools.partial(loss_function, impl=implementation, **ranks)


def make_optimizer(network: MuZeroNetwork, learning_rate: float | torch.Tensor) -> torch.optim.Optimizer:
    """Adam with one fused call for all parameters, because most of them are tiny."""
    return torch.optim.Adam(network.parameters(), lr=learning_rate, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Change the learning rate, which is a tensor in a captured step: a graph would keep a number."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def loss_of(
    network: nn.Module,
    loss_function: LossFunction,
    batch: Batch,
    weight_decay: float,
    hidden_scale: float = 0.5,
) -> tuple[torch.Tensor, gs.MultiStepLossOutput]:
    """Unroll the model along the actions of the batch, and compare all its predictions with the targets.

    As in the pseudocode, the gradients of the K recurrent steps are scaled by 1/K each, and the gradient through the
    hidden state is halved at every step by `gs.unroll` in the network's `forward`.
    """
    predictions = network(batch.observation, batch.legal_actions, batch.actions, hidden_scale)
    output = loss_function(
        predictions,
        batch.targets,
        step_gradient_scale="unroll",
        importance_weights=batch.importance_weights,
        mask=batch.mask,
    )
    return output.loss + gs.l2_loss(network, weight_decay), output


def update_weights(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: LossFunction,
    batch: Batch,
    weight_decay: float,
    hidden_scale: float = 0.5,
) -> gs.MultiStepLossOutput:
    """One learner step: fits all predictions to the targets."""
    loss, output = loss_of(network, loss_function, batch, weight_decay, hidden_scale)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return output


def make_update(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: LossFunction,
    weight_decay: float,
    captured: bool = False,
) -> Callable[[Batch], gs.MultiStepLossOutput]:
    """The learner step as a function of a batch. Captured, a GPU runs it as one launch."""

    def update(batch: Batch) -> gs.MultiStepLossOutput:
        return update_weights(network, optimizer, loss_function, batch, weight_decay)

    return gs.CapturedStep(update, network, optimizer) if captured else update


def hidden_state_gradients(
    network: MuZeroNetwork, loss_function: LossFunction, batch: Batch, weight_decay: float, hidden_scale: float
) -> list[float]:
    """Norms of the gradients at the hidden states of the root and of each unroll step, in a learner step of a copy.

    They are measured at the outputs of representation and dynamics, before the hidden state is scaled to 0..1.
    """
    copied = copy.deepcopy(network)
    optimizer = make_optimizer(copied, learning_rate=0.0)
    with gs.GradientMonitor(copied, optimizer, every=1, activations=("representation", "dynamics")) as monitor:
        update_weights(copied, optimizer, loss_function, batch, weight_decay, hidden_scale)
    calls = ["representation/0", *(f"dynamics/{step}" for step in range(batch.actions.shape[1]))]
    return [monitor.history[f"activation_gradient_norm/{call}"][0][1] for call in calls]


def time_learner_step(
    network: MuZeroNetwork, batches: list[Batch], learning_rate: float, weight_decay: float, repetitions: int
) -> dict[str, float]:
    """Median time of a learner step in ms: with each implementation of the loss and, on a GPU, captured.

    They take turns, on separate copies.
    """
    device = next(network.parameters()).device
    kinds = ["fused", "reference", *(["captured"] if device.type == "cuda" else [])]
    milliseconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    updates = {}
    for kind in kinds:
        copied, is_captured = copy.deepcopy(network), kind == "captured"
        rate = torch.tensor(learning_rate, device=device) if is_captured else learning_rate
        loss_function = make_loss(network.support, "fused" if is_captured else kind)
        updates[kind] = make_update(copied, make_optimizer(copied, rate), loss_function, weight_decay, is_captured)
    warm_up = 10
    for repetition in range(warm_up + repetitions):
        batch = batches[repetition % len(batches)]
        for kind, update in updates.items():
            start = time.perf_counter()
            update(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repetition >= warm_up:
                milliseconds[kind].append(1e3 * (time.perf_counter() - start))
    return {kind: statistics.median(times) for kind, times in milliseconds.items()}
