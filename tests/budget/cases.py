"""Calls whose kernels have a budget: user-level calls, with contiguous rows of a fixed width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import gradscale_ext as gs

STEPS = 6
USUAL_BATCH = 256
MULTIPROCESSORS = 4  # of the simulated GPU, which the batches of the cases fill
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A call, the unit of its counts, and its budget.

    `make(batch)` makes the tensors, and returns the call to count and its number of units. `budget`: warp instructions
    of sm_90 per unit. `issue`: the largest ratio of issue time to memory time on an H200. `usual`: the budget with a
    batch of 256, whose rows do not fill an H200. `in_flight`: the minimum bytes of loads in flight per multiprocessor.
    `disagreement`: allowed relative difference of the estimate from the PTX, for instructions that map one to one.
    `chain`: a part of the name of the kernel that is counted, whose time is its chain of dependent steps: only the
    budget is checked. `measured`: times on a GPU before the kernel was written anew, for comparison.
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
    chain: str | None = None
    measured: str = ""


def _loss(
    head: gs.heads.Head,
    width: int,
    dtype: torch.dtype,
    batch: int,
    stacked: bool = False,
    targets_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[Call, float]:
    """One head at all steps, with importance weights. `stacked`: one tensor `[B, T, width]` with strided rows.

    `targets_of(predictions)` replaces targets in float32.
    """
    predictions = torch.randn(batch, STEPS, width).to(dtype)
    entries = predictions if stacked else [step.contiguous() for step in predictions.unbind(1)]
    for entry in [predictions] if stacked else entries:
        entry.requires_grad_()
    if targets_of is not None:
        targets = targets_of(predictions)
    elif isinstance(head, gs.SoftCrossEntropy):
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


def _divergence(dtype: torch.dtype, batch: int) -> tuple[Call, float]:
    """DreamerV3's divergence of two sets of latents, 32 distributions over 32 classes."""
    logits, others = torch.randn(2, batch, STEPS, 32, 32).to(dtype)
    module = gs.MultiStepLoss(head=gs.CategoricalKL(free_nats=1.0))
    return lambda: module({"head": logits.requires_grad_()}, {"head": others}), batch * STEPS


def _policy(actions: int | None, batch: int) -> tuple[Call, float]:
    """PPO with its value, with logits of `actions`, or with 6 normal distributions."""
    advantages, log_probs, returns = torch.randn(3, batch)
    target = {"advantages": advantages, "log_probs": log_probs - 1}
    if actions is None:
        head: gs.heads.Head = gs.GaussianPolicyGradient()
        prediction: object = {name: torch.randn(batch, 6, requires_grad=True) for name in ("means", "log_stds")}
        target["actions"] = torch.randn(batch, 6)
    else:
        head, prediction = gs.PolicyGradient(entropy_weight=0.01), torch.randn(batch, actions, requires_grad=True)
        target["actions"] = torch.randint(0, actions, (batch,))
    module = gs.MultiStepLoss(policy=head, value=gs.ClippedSquaredError(weight=0.25))
    predictions = {"policy": prediction, "value": torch.randn(batch, requires_grad=True)}
    targets = {"policy": target, "value": {"returns": returns, "values": returns}}
    return lambda: module(predictions, targets, steps=False), batch


def _muzero_loss(batch: int) -> tuple[Call, float]:
    """Three heads at 6, 5 and 6 steps, as in MuZero, and the number of warps of loss_totals.

    The heads predict numbers, because loss_totals does not depend on the kinds of heads.
    """
    heads = {
        name: gs.MeanSquaredError(first_step=first) for name, first in (("value", 0), ("reward", 1), ("policy", 0))
    }
    predictions = {
        name: [torch.randn(batch, requires_grad=True) for _ in range(head.first_step, STEPS)]
        for name, head in heads.items()
    }
    targets = {name: [torch.randn(batch) for _ in own] for name, own in predictions.items()}
    blocks = batch / 32 if batch <= 128 * 32 else batch / 128
    return partial(gs.multi_step_loss, heads, predictions, targets), 12 * blocks


def _backward(batch: int) -> tuple[Call, float]:
    """A backward pass that has nothing to compute, and the number of warps that it may launch."""
    call, _ = _muzero_loss(batch)
    loss = call().loss  # type: ignore[attr-defined]
    return loss.backward, 4 * 8 * MULTIPROCESSORS


def _decode(support: gs.Support, dtype: torch.dtype, batch: int) -> tuple[Call, float]:
    logits = torch.randn(batch * STEPS, support.num_bins).to(dtype)
    return lambda: support.decode(logits), batch * STEPS


def _decode_gradient(support: gs.Support, dtype: torch.dtype, batch: int) -> tuple[Call, float]:
    logits = torch.randn(batch * STEPS, support.num_bins).to(dtype).requires_grad_()
    values = support.decode(logits)
    gradient = torch.randn_like(values)
    return lambda: torch.autograd.grad(values, logits, gradient), batch * STEPS


def _statistics(dtype: torch.dtype, batch: int) -> tuple[Call, float]:
    sizes = [batch * 256, batch * 128, batch * 512, batch * 128]
    tensors = [(torch.randn(size) * 1e-3).to(dtype) for size in sizes]
    return lambda: gs.gradient_statistics(tensors), sum(sizes) * tensors[0].element_size() / 16


def _small_gradients(count: int, clips: bool) -> tuple[Call, float]:
    """`count` gradients of 1,000 float32 numbers, and their number: a warp each."""
    parameters = [torch.zeros(1000, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(1000)
    if clips:
        return lambda: gs.clip_gradients_(parameters, 1.0), count
    return lambda: gs.gradient_statistics(parameters), count


def _clipping_factor(count: int) -> tuple[Call, float]:
    """Clipping of `count` gradients, and the number of warps that compute its factor."""
    call, _ = _small_gradients(count, clips=True)
    return call, 8


def _cases_of(dtype: torch.dtype) -> list[Case]:
    fp32 = dtype == torch.float32
    size, name = (4, "fp32") if fp32 else (2, "bf16")
    support, raw = gs.Support.muzero(300), gs.Support.dreamer_v3()

    def of(what: str, make: Callable[..., tuple[Call, float]], *arguments: object, width: int = 601, **numbers) -> Case:
        return Case(f"{what}, {name}", partial(make, *arguments, dtype), width * size, **numbers)

    def loss(name: str, head: gs.heads.Head, width: int, fp32_budget: float, bf16_budget: float, **numbers) -> Case:
        budget = fp32_budget if fp32 else bf16_budget
        numbers = {"batch": 512} | numbers
        return of(f"{name} {width} with gradient", _loss, head, width, width=width, budget=budget, **numbers)

    def two_hot(width: int, *budgets: float, **numbers) -> Case:
        return loss("TwoHot", gs.TwoHot(gs.Support(-20, 20, width)), width, *budgets, **numbers)

    policy = gs.SoftCrossEntropy()
    # Budgets of rows contain what it costs that the order of a row's operations does not depend on its alignment: one
    # addition per element for an exact moment, about 25 instructions for a row of 601. One to seven instructions of a
    # row go to its maximum and the address of its gradient, which do not stay in registers: sm_120 spilled them. A part
    # of one asks whether the head has a second gradient.
    return [
        loss("TwoHot", gs.TwoHot(support), 601, 290, 324, usual=635),
        of(
            "TwoHot 601 with gradient, stacked",
            partial(_loss, stacked=True),
            gs.TwoHot(support),
            601,
            budget=290 if fp32 else 324,
            batch=512,
        ),
        loss("HLGauss", gs.HLGauss(support), 601, 329, 364, usual=815),
        two_hot(255, 147, 154),
        loss("TwoHot, raw,", gs.TwoHot(raw), 255, 189, 195, issue=0.7 if fp32 else 0.9),
        # A row of 101 16-bit logits has few bytes for its number of shuffles.
        two_hot(101, 91, 107, issue=0.7 if fp32 else 1.15, in_flight=30_000 if fp32 else 27_000),
        *([two_hot(21, 28, 28, batch=2048)] if fp32 else []),
        loss("policy", policy, 18, 22.5, 22.7, batch=2048),
        loss("policy", policy, 82, 94, 97, batch=1024),
        loss("policy", policy, 362, 330, 342),
        # 32 elements per lane, with two exponentials, a division and a logarithm each: 50 instructions; 40 shuffles and
        # 40 of their sums, and 220 for the factor, the sums and the addresses of a row. A bf16 row has 6 KB, which take
        # as long as 1,330 instructions. Each lane loads 32 bytes ahead, or 64 of fp32.
        of(
            "CategoricalKL 32 x 32 with gradient",
            _divergence,
            width=1024,
            budget=1950,
            batch=24,
            issue=0.75 if fp32 else 1.5,
            usual=2080,
            in_flight=30_000 if fp32 else 16_000,
        ),
        # A bf16 row with its target and gradient is 28 KB, which take 1.23 us of a multiprocessor's share of 3.0 TB/s.
        # In this time an H100 can issue 8,600 instructions per multiprocessor; with classes 5,800.
        *(
            of(
                f"policy 4672 with gradient, {kind}",
                partial(_loss, targets_of=targets_of),
                policy,
                4672,
                width=4672,
                budget=budget,
                batch=16,
                issue=0.7 if fp32 else 0.8,
                disagreement=0.5,  # the compiler keeps exponentials, which the PTX computes twice
                measured="98.6 us on an H100 for B 256 K 5 S 601 A 4672 with fp32, 27 % of its DRAM's peak",
            )
            for kind, targets_of, budget in (
                ("targets of the same type", lambda x: x.float().softmax(2).to(x.dtype), 3400),
                ("classes", lambda x: x.argmax(2), 3100),
            )
        ),
        of("decode 601", _decode, support, budget=183 if fp32 else 208, batch=512, issue=0.7 if fp32 else 0.85),
        of("gradient of decode 601", _decode_gradient, support, budget=313 if fp32 else 356, batch=512),
        of(
            "decode 255, raw",
            _decode,
            raw,
            width=255,
            budget=120 if fp32 else 125,
            batch=512,
            issue=0.7 if fp32 else 1.2,
        ),
        of(
            "gradient of decode 255, raw",
            _decode_gradient,
            raw,
            width=255,
            budget=213 if fp32 else 224,
            batch=512,
            issue=0.7 if fp32 else 1.05,
        ),
        # 16 bytes hold eight 16-bit elements: issuing may take 0.93 of the memory time.
        of(
            "statistics",
            _statistics,
            width=16 // size,
            budget=1.05 if fp32 else 1.65,
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


def _policy_cases() -> list[Case]:
    """PPO with a value, forward pass with gradients, fp32. A row has its logits and their gradients, an int64 action,
    three numbers of the policy and four of the value, and stores five results and two pairs of metrics. Rows so short
    are bound by their instructions: 32,768 of 18 actions have 7.5 MB, which take 1.7 us to move and 4.3 us to issue.
    """
    return [
        Case("PPO with value, 4 actions", partial(_policy, 4), 116, 45, 2048, issue=2, disagreement=0.6, in_flight=0),
        Case(
            "PPO with value, 18 actions", partial(_policy, 18), 228, 125, 1024, issue=2.5, disagreement=0.6, in_flight=0
        ),
        Case(
            "PPO with value, 6 normal distributions",
            partial(_policy, None),
            204,
            65,
            1024,
            issue=2,
            disagreement=0.6,
            in_flight=0,
        ),
    ]


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
        # Short rows: a quarter of a warp owns a row of 8 steps. All addresses of a row are computed for its steps.
        of(
            "advantages [B, T], T 8",
            partial(_advantages, 8, True),
            22,
            budget=175,
            batch=2048,
            issue=1.15,
            disagreement=0.6,
        ),
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
        # One block of 16 warps for a row of 1,025 to 2,048 steps. Two blocks of 8 warps needed a memset and an atomic
        # operation, and the second block waited for the first: 119 instructions for T 2048, 138 for T 1536, and about
        # 650 in the warp that waited, whose chain was the time of the call.
        of(
            "advantages [B, T], few rows, T 2048",
            partial(_advantages, 2048, True),
            22,
            budget=122,
            batch=4,
            issue=0.85,
            disagreement=0.1,
        ),
        of(
            "advantages [B, T], few rows, T 1536",  # a quarter of the warps have no steps
            partial(_advantages, 1536, True),
            22,
            budget=200,
            batch=4,
            issue=1.4,
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


def _latency_cases() -> list[Case]:
    """Kernels whose time does not depend on bytes.

    loss_totals: an H100 took 16.6 clocks for an instruction of a warp, which waits for the one before it. At this rate
    450 instructions take 4.3 us. The bytes, 20 for each row, take 3.7 us of 3.0 TB/s at a batch of 32,768, in addition
    to the instructions of the last block. The new kernel has not been measured.
    """
    of_totals = {"unit": "warp", "chain": "loss_totals"}
    return [
        Case(
            "loss_totals, B 256",
            _muzero_loss,
            20,
            450,
            256,
            measured="2,854 instructions, 28.3 us on an H100 with a cold cache, 21.7 with a warm one",
            **of_totals,
        ),
        Case("loss_totals, B 32768", _muzero_loss, 20, 800, 32768, measured="30.1 us on an H100", **of_totals),
        Case(
            "backward pass of a loss with grad_output 1",
            _backward,
            20,
            40,
            8192,
            unit="warp",
            chain="loss_rows",
            measured="1.5 to 3.3 us on an H100 for up to 774 blocks, 5.5 for 4,608, 32.7 for 49,920",
        ),
        # A warp for each tensor: 125 blocks, one for each multiprocessor, so that the time is the chain of one warp:
        # its entry in the list, its 32 elements per lane, and its results. At 8 clocks for an instruction, because two
        # warps share a scheduler, 770 take 3.5 us at 1.755 GHz, and three dependent reads or writes 2 us.
        Case(
            "statistics of 1,000 tensors of 1,000 numbers",
            partial(_small_gradients, clips=False),
            4000,
            770,
            1000,
            unit="warp",
            chain="chunk_statistics",
            measured="11,100 instructions in blocks of 8 warps, 7 launches, 41.2 us in a CUDA graph on an H100",
        ),
        # One block, for which scaled_units waits. 440 instructions take 2 us, and three dependent reads or writes 2 us.
        Case(
            "clipping factor of 1,000 tensors of 1,000 numbers",
            _clipping_factor,
            4000,
            440,
            1000,
            unit="warp",
            chain="find_clipping",
        ),
        # After the statistics, the factor, in one block, and this kernel: 430 instructions take 2 us, and the list, the
        # factor and two rounds of loads 2.8 us.
        Case(
            "clipping of 1,000 tensors of 1,000 numbers",
            partial(_small_gradients, clips=True),
            4000,
            430,
            1000,
            unit="warp",
            chain="scaled_units",
            measured="2,843 instructions in blocks of 8 warps, 16 launches in all, 71.9 us in a CUDA graph on an H100",
        ),
    ]


# ---- Launches of several heads --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixed:
    """The loss of several heads: `make()` returns the call, whose launch has a kernel of its own.

    `registers`: the most registers that its kernels may have on any GPU. With 128, a multiprocessor has 16 warps.
    """

    name: str
    make: Callable[[], Call]
    registers: int = 128


def _mixed(heads: dict[str, gs.heads.Head], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Call:
    """A loss of predictions and targets of zeros at all steps. `shapes` has the rows of heads without a support."""
    predictions, targets = {}, {}
    for name, head in heads.items():
        shape = (head.support.num_bins,) if isinstance(head, gs.TwoHot) else shapes.get(name, ())
        entries = [torch.zeros(USUAL_BATCH, *shape, dtype=dtype) for _ in range(head.first_step, STEPS)]
        predictions[name] = [entry.requires_grad_() for entry in entries]
        if isinstance(head, gs.PerStepLoss):
            continue
        has_numbers = isinstance(head, (gs.TwoHot, gs.BinaryCrossEntropy))
        target = torch.zeros(USUAL_BATCH) if has_numbers else torch.zeros(USUAL_BATCH, *shape)
        targets[name] = [target.to(dtype) if isinstance(head, gs.CategoricalKL) else target for _ in entries]
    return lambda: gs.multi_step_loss(heads, predictions, targets)


def _mixed_cases(dtype: torch.dtype) -> list[Mixed]:
    support, wide, symlog = gs.Support.dreamer_v3(), gs.Support.muzero(), gs.Support.tdmpc2()
    dreamer = {
        "reward": gs.TwoHot(support),
        "value": gs.TwoHot(support),
        "dynamics": gs.CategoricalKL(free_nats=1.0),
        "representation": gs.CategoricalKL(free_nats=1.0, prediction="p", weight=0.1),
        "continuation": gs.BinaryCrossEntropy(),
    }
    tdmpc2 = {
        "reward": gs.TwoHot(symlog, weight=0.1),
        **{f"value {k}": gs.TwoHot(symlog, weight=0.02) for k in range(5)},
        "consistency": gs.MeanSquaredError(weight=20.0),
        "termination": gs.BinaryCrossEntropy(),
        "policy": gs.PerStepLoss(),
    }
    efficient_zero = {
        "value": gs.TwoHot(wide, weight=0.25),
        "value_prefix": gs.TwoHot(wide, first_step=1),
        "policy": gs.SoftCrossEntropy(),
        "consistency": gs.NegativeCosine(eps=1e-5, weight=2.0, first_step=1),
    }
    latents = (32, 32)
    losses = (
        ("DreamerV3", dreamer, {"dynamics": latents, "representation": latents}),
        ("TD-MPC2", tdmpc2, {"consistency": (512,)}),
        ("EfficientZero", efficient_zero, {"policy": (18,), "consistency": (1024,)}),
    )
    kind = "fp32" if dtype == torch.float32 else "bf16"
    return [Mixed(f"{name}'s loss, {kind}", partial(_mixed, heads, shapes, dtype)) for name, heads, shapes in losses]


CASES = [case for dtype in (torch.float32, torch.bfloat16) for case in _cases_of(dtype)]
CASES += _policy_cases() + _returns_cases() + _latency_cases()
MIXED = [case for dtype in (torch.float32, torch.bfloat16) for case in _mixed_cases(dtype)]
