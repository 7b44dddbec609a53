"""Calls whose kernels have a budget: user-level calls, with contiguous rows of a fixed width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import gradscale_ext as gs

STEPS = 6
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A call, the unit of its counts, and its budget.

    `make(batch)` makes the tensors, and returns the call to count and its number of units. `budget`: warp instructions
    of sm_90 per unit. `issue`: the largest ratio of issue time to memory time on an H200. `usual`: the budget with a
    batch of 256, whose rows do not fill an H200. `in_flight`: the minimum bytes of loads in flight per multiprocessor.
    `disagreement`: allowed relative difference of the estimate from the PTX, for instructions that map one to one.
    """

    name: str
    make: Callable[[int], tuple[Call, float]]
    unit_bytes: float  # bytes of logits, or of tensors, per unit
    budget: float
    batch: int
    unit: str = "row"
    issue: float = 0.7
    usual: float | None = None
    in_flight: int = 30_000
    disagreement: float = 0.05


def _loss(head: gs.heads.Head, width: int, dtype: torch.dtype, batch: int, stacked: bool = False) -> tuple[Call, float]:
    """One head at all steps, with importance weights. `stacked`: one tensor `[B, T, width]` with strided rows."""
    predictions = torch.randn(batch, STEPS, width).to(dtype)
    entries = predictions if stacked else [step.contiguous() for step in predictions.unbind(1)]
    for entry in [predictions] if stacked else entries:
        entry.requires_grad_()
    if isinstance(head, gs.SoftCrossEntropy):
        targets = torch.rand(batch, STEPS, width).softmax(2)
    else:
        targets = torch.randn(batch, STEPS) * (width - 1) / 12
    target_entries = targets if stacked else [step.contiguous() for step in targets.unbind(1)]
    weights = torch.rand(batch) + 0.5
    module = gs.MultiStepLoss(head=head)

    def call() -> object:
        return module(
            {"head": entries}, {"head": target_entries}, step_gradient_scale="unroll", importance_weights=weights
        )

    return call, batch * STEPS


def _decode(dtype: torch.dtype, batch: int) -> tuple[Call, float]:
    logits = torch.randn(batch * STEPS, 601).to(dtype)
    return lambda: gs.Support.muzero(300).decode(logits), batch * STEPS


def _decode_gradient(dtype: torch.dtype, batch: int) -> tuple[Call, float]:
    logits = torch.randn(batch * STEPS, 601).to(dtype).requires_grad_()
    values = gs.Support.muzero(300).decode(logits)
    gradient = torch.randn_like(values)
    return lambda: torch.autograd.grad(values, logits, gradient), batch * STEPS


def _statistics(dtype: torch.dtype, batch: int) -> tuple[Call, float]:
    sizes = [batch * 256, batch * 128, batch * 512, batch * 128]
    tensors = [(torch.randn(size) * 1e-3).to(dtype) for size in sizes]
    return lambda: gs.gradient_statistics(tensors), sum(sizes) * tensors[0].element_size() / 16


def _cases_of(dtype: torch.dtype) -> list[Case]:
    fp32 = dtype == torch.float32
    size, name = (4, "fp32") if fp32 else (2, "bf16")
    support = gs.Support.muzero(300)

    def of(what: str, make: Callable[..., tuple[Call, float]], *arguments: object, width: int = 601, **numbers) -> Case:
        return Case(f"{what}, {name}", partial(make, *arguments, dtype), width * size, **numbers)

    def loss(name: str, head: gs.heads.Head, width: int, fp32_budget: float, bf16_budget: float, **numbers) -> Case:
        budget = fp32_budget if fp32 else bf16_budget
        numbers = {"batch": 512} | numbers
        return of(f"{name} {width} with gradient", _loss, head, width, width=width, budget=budget, **numbers)

    def two_hot(width: int, *budgets: float, **numbers) -> Case:
        return loss("TwoHot", gs.TwoHot(gs.Support(-20, 20, width)), width, *budgets, **numbers)

    policy = gs.SoftCrossEntropy()
    return [
        loss("TwoHot", gs.TwoHot(support), 601, 260, 293, usual=630),
        of(
            "TwoHot 601 with gradient, stacked",
            partial(_loss, stacked=True),
            gs.TwoHot(support),
            601,
            budget=260 if fp32 else 293,
            batch=512,
        ),
        loss("HLGauss", gs.HLGauss(support), 601, 290, 322, usual=760),
        two_hot(255, 133, 141),
        # A row of 101 16-bit logits has few bytes for its number of shuffles.
        two_hot(101, 84, 100, issue=0.7 if fp32 else 1.1, in_flight=30_000 if fp32 else 28_000),
        *([two_hot(21, 28, 28, batch=2048)] if fp32 else []),
        loss("policy", policy, 18, 22.5, 22.7, batch=2048),
        loss("policy", policy, 82, 90, 93, batch=1024),
        loss("policy", policy, 362, 320, 320),
        of("decode 601", _decode, budget=160 if fp32 else 184, batch=512, issue=0.7 if fp32 else 0.85),
        of("gradient of decode 601", _decode_gradient, budget=290 if fp32 else 331, batch=512),
        # 16 bytes hold eight 16-bit elements: issuing may take 0.93 of the memory time.
        of(
            "statistics",
            _statistics,
            width=16 // size,
            budget=2 if fp32 else 3.2,
            batch=2048,
            unit="16 bytes",
            issue=0.7 if fp32 else 0.93,
        ),
    ]


def _trajectories(batch: int, steps: int, batch_first: bool = True) -> tuple[dict[str, torch.Tensor], float]:
    """Rewards, values, next values and two flags, and the number of units of 32 steps."""
    shape = (batch, steps) if batch_first else (steps, batch)
    numbers = {name: torch.randn(shape) for name in ("rewards", "values", "next_values")}
    flags = {name: torch.rand(shape) < 0.01 for name in ("terminated", "truncated")}
    return numbers | flags, batch * steps / 32


def _advantages(steps: int, batch_first: bool, batch: int) -> tuple[Call, float]:
    data, units = _trajectories(batch, steps, batch_first)
    call = partial(gs.generalized_advantages, **data, discount=0.99, lambda_=0.95, batch_first=batch_first)
    return call, units


def _returns(function: str, gradient: bool, batch: int, **options: float) -> tuple[Call, float]:
    data, units = _trajectories(batch, 128)
    del data["values"]
    if not gradient:
        return partial(getattr(gs, function), **data, discount=0.99, **options), units
    data["rewards"].requires_grad_()
    data["next_values"].requires_grad_()
    results = getattr(gs, function)(**data, discount=0.99, **options)
    inputs, gradients = (data["rewards"], data["next_values"]), torch.randn_like(results)
    return lambda: torch.autograd.grad(results, inputs, gradients), units


def _transitions(batch: int) -> tuple[Call, float]:
    data, units = _trajectories(batch, 128)
    given = {name: data[name] for name in ("rewards", "terminated", "truncated")}
    return partial(gs.n_step_transitions, **given, discount=0.99, n=5), units


def _muzero_targets(batch: int, by_row: bool = False) -> tuple[Call, float]:
    unroll_steps, n = 5, 10
    rewards, values = torch.randn(batch, unroll_steps + n), torch.randn(batch, unroll_steps + n + 1)
    td_steps = torch.full((batch,), n) if by_row else n
    options = {"num_unroll_steps": unroll_steps, "td_steps": td_steps, "discount": 0.997}
    return partial(gs.muzero_targets, rewards, values, **options), batch


def _returns_cases() -> list[Case]:
    """Trajectories of float32 numbers and one-byte flags.

    Advantages read 3 numbers and 2 flags per step, and write 2 numbers: 22 bytes. 4096 x 128 steps are 11.5 MB, which
    take at least 2.4 us at an H200's 4.8 TB/s; 16 x 1024 steps are 0.36 MB and 0.08 us, less than a launch. At the 4.3
    TB/s that a copy reaches, 32 steps take 0.164 ns, in which 132 multiprocessors issue 152 instructions; 0.7 of this
    is 106. λ-returns move 14 bytes, and so do their gradients: the memory time allows 97 instructions. MuZero's windows
    are 180 bytes, for which the memory time allows 39: they take longer to compute than to read, but 2048 of them take
    less than a microsecond.
    """

    def of(name: str, make: Callable[[int], tuple[Call, float]], step_bytes: int, **numbers) -> Case:
        return Case(f"{name}, fp32", make, 32 * step_bytes, unit="32 steps", **numbers)

    lambda_returns = partial(_returns, "lambda_returns", lambda_=0.95)
    return [
        of("advantages [B, T], T 128", partial(_advantages, 128, True), 22, budget=106, batch=512),
        # Many short rows: all addresses of a row are computed for its 32 steps. On the simulated H200, whose batch is
        # smaller, a warp has one row: 310 instructions.
        of(
            "advantages [B, T], T 32",
            partial(_advantages, 32, True),
            22,
            budget=175,
            batch=512,
            issue=1.15,
            disagreement=0.6,
        ),
        # One block per chunk of 1024 steps. The steps' maps y -> a + b y are composed within warps, then between warps.
        of(
            "advantages [B, T], few rows, T 1024",
            partial(_advantages, 1024, True),
            22,
            budget=125,
            batch=6,
            issue=0.85,
            disagreement=0.1,
        ),
        of("advantages [T, B], T 128", partial(_advantages, 128, False), 22, budget=106, batch=512),
        of("λ-returns, T 128", partial(lambda_returns, False), 14, budget=92, batch=512, issue=0.95),
        of(
            "gradient of λ-returns, T 128",  # which writes more than it reads
            partial(lambda_returns, True),
            14,
            budget=97,
            batch=512,
            issue=1,
            in_flight=24_000,
        ),
        # A thread reads the steps of its block and of the next block, mostly from the cache.
        of(
            "n-step returns, T 128",
            partial(_returns, "n_step_returns", False, n=5),
            14,
            budget=430,
            batch=512,
            issue=2.2,
            in_flight=6_000,
        ),
        of("n-step transitions, T 128", _transitions, 22, budget=400, batch=512, issue=2.2, in_flight=6_000),
        Case("MuZero targets, K 5, n 10, fp32", _muzero_targets, 180, 145, 2048, issue=4.5, in_flight=18_000),
        Case(
            "MuZero targets, K 5, n 10 by row, fp32",
            partial(_muzero_targets, by_row=True),
            188,
            150,
            2048,
            issue=4.5,
            in_flight=18_000,
        ),
    ]


CASES = [case for dtype in (torch.float32, torch.bfloat16) for case in _cases_of(dtype)] + _returns_cases()
