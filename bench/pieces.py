"""Returns and single heads for bench/gpu.py: our call, the usual code, and the bytes that must move."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import gradscale_ext as gs
import usual

Call = Callable[[], Any]
DISCOUNT, LAMBDA = 0.99, 0.95
#: B, T: as many rows as a GPU has threads, short rows, few long rows, one row.
SIZES = (
    (4096, 8),
    (32768, 8),
    (4096, 16),
    (32768, 16),
    (256, 64),
    (4096, 128),
    (65536, 128),
    (16384, 16),
    (16, 1024),
    (1, 32768),
    (1, 2**22),
)
#: The longest loop over steps that is captured in a CUDA graph.
LONGEST_LOOP = 128


class Piece(NamedTuple):
    """A call of ours, and other ways to compute the same."""

    size: str
    ours: Call
    others: dict[str, Call]
    moved: float
    """Bytes that must move."""


def trajectories(batch: int, steps: int, device: torch.device) -> dict[str, torch.Tensor]:
    g = torch.Generator(device).manual_seed(0)
    names = ("rewards", "values", "next_values", "log_ratios")
    made = {name: torch.randn(batch, steps, generator=g, device=device) for name in names}
    made["log_ratios"] /= 10
    flags = ("terminated", "truncated")
    return made | {name: torch.rand(batch, steps, generator=g, device=device) < 0.01 for name in flags}


def advantages_by_loop(data: dict[str, torch.Tensor]) -> torch.Tensor:
    """The usual loop of PPO implementations."""
    continues = ~(data["terminated"] | data["truncated"])
    delta = data["rewards"] + DISCOUNT * data["next_values"] * ~data["terminated"] - data["values"]
    factors, a, advantages = DISCOUNT * LAMBDA * continues, torch.zeros_like(delta[:, 0]), []
    for t in reversed(range(delta.shape[1])):
        a = delta[:, t] + factors[:, t] * a
        advantages.append(a)
    return torch.stack(advantages[::-1], 1)


def advantages(batch: int, steps: int, device: torch.device, batch_first: bool = True) -> Piece:
    data = trajectories(batch, steps, device)
    given = {
        name: data[name] if batch_first else data[name].T.contiguous()
        for name in ("rewards", "values", "next_values", "terminated", "truncated")
    }
    three = [given.pop(name) for name in ("rewards", "values", "next_values")]
    options: dict[str, Any] = {"discount": DISCOUNT, "lambda_": LAMBDA, "batch_first": batch_first}
    ours = functools.partial(gs.generalized_advantages, *three, **given, **options)
    others: dict[str, Call] = {}
    if batch_first and steps <= LONGEST_LOOP:
        others["loop"] = functools.partial(advantages_by_loop, data)
    if batch_first and importlib.util.find_spec("torchrl") and batch * steps < 2**20:
        from torchrl.objectives.value import functional

        done = data["terminated"] | data["truncated"]
        in_order = (data["values"], data["next_values"], data["rewards"], done, data["terminated"])
        columns = [x.unsqueeze(-1) for x in in_order]
        form = functools.partial(functional.vec_generalized_advantage_estimate, DISCOUNT, LAMBDA, *columns)
        others["TorchRL, vectorised"] = lambda: form()[0].squeeze(-1)
    for other in others.values():
        torch.testing.assert_close(other(), ours().advantages, rtol=1e-3, atol=1e-3)
    shape = f"{batch} x {steps}" if batch_first else f"{batch} x {steps}, [T, B]"
    return Piece(f"GAE {shape}", ours, others, 22 * batch * steps)


def other_returns(batch: int, steps: int, device: torch.device) -> Iterator[Piece]:
    """The other functions of returns at one size, each with the bytes that it reads and writes."""
    data = trajectories(batch, steps, device)
    rewards, values, following = data["rewards"], data["values"], data["next_values"]
    ends = {"terminated": data["terminated"], "truncated": data["truncated"]}
    on_policy = {"discount": DISCOUNT, **ends}
    size, entries = f"{batch} x {steps}", batch * steps
    bootstrapped = torch.cat([values, following[:, -1:]], 1)
    ratios = data["log_ratios"].exp()
    calls: dict[str, tuple[Call, int]] = {
        "lambda returns": (lambda: gs.lambda_returns(rewards, None, following, lambda_=LAMBDA, **on_policy), 14),
        "n-step returns": (lambda: gs.n_step_returns(rewards, None, following, n=5, **on_policy), 14),
        "n-step transitions": (lambda: gs.n_step_transitions(rewards, n=5, **on_policy), 22),
        "V-trace": (lambda: gs.vtrace(rewards, values, following, ratios=ratios, **on_policy), 26),
        "Retrace": (lambda: gs.retrace(rewards, values, following, ratios=ratios, lambda_=LAMBDA, **on_policy), 22),
        "MuZero targets, K 5, n 10": (
            lambda: gs.muzero_targets(rewards, bootstrapped, num_unroll_steps=5, td_steps=10, discount=DISCOUNT),
            8,
        ),
    }
    for name, (call, byte_count) in calls.items():
        yield Piece(f"{name} {size}", call, {}, byte_count * entries)


def loss_of(module: gs.MultiStepLoss, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return module({"head": [x]}, {"head": [t]}).loss


def gradient(function: Callable[..., torch.Tensor], x: torch.Tensor, t: torch.Tensor) -> Any:
    return torch.autograd.grad(function(x, t), x)


def heads(batch: int, device: torch.device) -> Iterator[Piece]:
    """Heads with a loss of their own, forward and backward, next to the usual code."""
    g = torch.Generator(device).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g, device=device)
    functional = torch.nn.functional

    def huber(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return functional.smooth_l1_loss(x, t)

    def quantiles(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        difference = t.unsqueeze(1) - x.unsqueeze(2)
        fractions = (torch.arange(x.shape[1], device=device) + 0.5) / x.shape[1]
        weights = (fractions[:, None] - (difference < 0).float()).abs()
        pairs = functional.huber_loss(difference, torch.zeros_like(difference), reduction="none")
        return (weights * pairs).sum(1).mean()

    def kl(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        p, q = x.log_softmax(-1), t.log_softmax(-1)
        return (p.exp() * (p - q)).sum((-1, -2)).mean()

    def raw_bins(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return usual.cross_entropy(x, usual.raw_two_hot(t, 255, 20.0)).mean()

    raw = gs.TwoHot(gs.Support.dreamer_v3())
    cases: dict[str, tuple[gs.Head, tuple[int, ...], Callable[..., torch.Tensor]]] = {
        "Huber": (gs.Huber(), (batch,), huber),
        "TwoHot, raw, S 255": (raw, (batch, 255), raw_bins),
        "TwoHot, raw, S 255, imagined steps": (raw, (15 * batch, 255), raw_bins),
        "QuantileHuber, N 200": (gs.QuantileHuber(), (batch, 200), quantiles),
        "CategoricalKL, G 32 C 32": (gs.CategoricalKL(prediction="p", unimix=0), (batch, 32, 32), kl),
    }
    for name, (head, shape, usual_code) in cases.items():
        x, t = normal(*shape).requires_grad_(), normal(*(shape[:1] if head is raw else shape))
        fused = functools.partial(loss_of, gs.MultiStepLoss(head=head))
        ours, other = (functools.partial(gradient, function, x, t) for function in (fused, usual_code))
        torch.testing.assert_close(ours(), other(), rtol=1e-3, atol=1e-5)
        yield Piece(f"{name}: B {shape[0]}", ours, {"eager": other}, 8 * x.numel() + 4 * t.numel())
