"""A small learner, for the tests of captured steps."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.dropout(self.body(x)))


def batches(count, seed=1, size=8):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(count)
    ]


class Learner:
    """A model, an optimizer, and a step; two of them are equal."""

    def __init__(self, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = make(self.model.parameters())

    def step(self, x, y):
        return self.minimize((self.model(x) - y).square().mean())

    def minimize(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self):
        return self.model, self.optimizer


def bits(state):
    """Everything in a state, as bytes."""
    if isinstance(state, torch.Tensor):
        return state.shape, state.detach().contiguous().view(
            torch.uint8
        ).numpy().tobytes() if state.dim() else state.item()
    if isinstance(state, torch.nn.Module):
        gradients = {name: bits(p.grad) for name, p in state.named_parameters()}
        return bits(state.state_dict()), gradients, state.training
    if hasattr(state, "state_dict"):
        return bits(state.state_dict())
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [bits(value) for value in state]
    return state
