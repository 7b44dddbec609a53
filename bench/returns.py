"""Our returns, compared with TorchRL's, with a Python loop, with NumPy, and with a copy of the same bytes.

    python bench/returns.py --json bench/results/returns.json

A copy is `dst.copy_(src)` of 11 bytes per entry, which moves the 22 bytes that advantages must move: rewards, values,
next values and two flags are read, two results are written. Advantages are timed with and without ends of episodes.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any

import numpy as np
import torch

import gradscale_ext as gs
import harness

SIZES = ((4096, 8), (32768, 8), (4096, 16), (32768, 16), (256, 64), (4096, 128), (16, 1024), (1, 32768))
DISCOUNT, LAMBDA = 0.99, 0.95
LONGEST_LOOP = 1024
TURN = 2e-3  # Enough for up to a hundred calls, because the first call after TorchRL's starts with cold caches.


def loop(rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any) -> tuple[Any, Any]:
    """The usual loop of PPO implementations."""
    advantages, a = torch.empty_like(rewards), 0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + DISCOUNT * next_values[:, t] * ~terminated[:, t] - values[:, t]
        a = delta + DISCOUNT * LAMBDA * ~(terminated[:, t] | truncated[:, t]) * a
        advantages[:, t] = a
    return advantages, advantages + values


def advantages(batch: int, steps: int, ends: float, seconds: float) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    rewards, values, next_values = (torch.randn(batch, steps, generator=g) for _ in range(3))
    terminated, truncated = (torch.rand(batch, steps, generator=g) < ends for _ in range(2))
    source, target = (torch.zeros(11 * batch * steps, dtype=torch.uint8) for _ in range(2))
    options = {"discount": DISCOUNT, "lambda_": LAMBDA, "terminated": terminated, "truncated": truncated}
    contestants = {
        "ours": functools.partial(gs.generalized_advantages, rewards, values, next_values, **options),
        "copy": functools.partial(target.copy_, source),
    }
    if steps <= LONGEST_LOOP:
        contestants["loop"] = functools.partial(loop, rewards, values, next_values, terminated, truncated)
    if importlib.util.find_spec("torchrl"):
        from torchrl.objectives.value import functional

        columns = [x.unsqueeze(-1) for x in (values, next_values, rewards, terminated | truncated, terminated)]
        forms = {"TorchRL, vectorised": functional.vec_generalized_advantage_estimate}
        if steps <= LONGEST_LOOP:
            forms["TorchRL, loop"] = functional.generalized_advantage_estimate
        for name, form in forms.items():
            contestants[name] = functools.partial(form, DISCOUNT, LAMBDA, *columns)
            torch.testing.assert_close(contestants[name]()[0].squeeze(-1), contestants["ours"]().advantages)
    row = {"size": f"GAE {batch} x {steps}", "ends": ends, "threads": torch.get_num_threads()}
    with torch.no_grad():
        return harness.rows(row, contestants, seconds, 22 * batch * steps, "ours", turn=TURN)


def dreamer(batch: int, steps: int, seconds: float) -> list[Any]:
    """Forward and backward."""
    g = torch.Generator().manual_seed(0)
    rewards = torch.randn(batch, steps, generator=g, requires_grad=True)
    values = torch.randn(batch, steps + 1, generator=g, requires_grad=True)

    def ours() -> None:
        returns = gs.lambda_returns(rewards, values, discount=DISCOUNT, lambda_=LAMBDA)
        torch.autograd.grad(returns.sum(), (rewards, values))

    def python_loop() -> None:
        g, returns = values[:, -1], []
        for t in reversed(range(steps)):
            g = rewards[:, t] + DISCOUNT * ((1 - LAMBDA) * values[:, t + 1] + LAMBDA * g)
            returns.append(g)
        torch.autograd.grad(torch.stack(returns, 1).sum(), (rewards, values))

    row = {"size": f"lambda returns {batch} x {steps}, with gradient", "ends": 0.0, "threads": torch.get_num_threads()}
    return harness.rows(row, {"ours": ours, "loop": python_loop}, seconds, 16 * batch * steps, "ours", turn=TURN)


def muzero(batch: int, unroll_steps: int, n: int, seconds: float) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    moves = unroll_steps + n
    rewards, values = torch.randn(batch, moves, generator=g), torch.randn(batch, moves + 1, generator=g)
    lengths = torch.randint(0, moves + 1, (batch,), generator=g)
    terminated = torch.rand(batch, generator=g) < 0.5
    powers = (0.997 ** np.arange(n)).astype(np.float32)
    arrays = [x.numpy() for x in (rewards, values, lengths, terminated)]

    def windows() -> tuple[Any, ...]:
        r, nu, length, over = arrays
        steps = np.arange(unroll_steps + 1)
        padded = np.zeros((batch, moves + n), dtype=np.float32)
        padded[:, :moves] = np.where(np.arange(moves) < length[:, None], r, 0)
        sums = np.lib.stride_tricks.sliding_window_view(padded, n, 1)[:, : unroll_steps + 1] @ powers
        m = np.clip(length[:, None] - steps, 0, n)
        last = np.minimum(steps + n, length[:, None])
        bootstrap = np.where((last == length[:, None]) & over[:, None], 0, np.take_along_axis(nu, last, 1))
        inside = steps <= length[:, None]
        z = np.where(inside, sums + np.float32(0.997) ** m * bootstrap, 0)
        return z, padded[:, :unroll_steps], inside | over[:, None], steps < length[:, None]

    ours = functools.partial(
        gs.muzero_targets,
        rewards,
        values,
        num_unroll_steps=unroll_steps,
        td_steps=n,
        discount=0.997,
        lengths=lengths,
        terminated=terminated,
    )
    for result, expected in zip(ours(), windows(), strict=True):
        torch.testing.assert_close(result, torch.from_numpy(expected).to(result.dtype), rtol=1e-4, atol=1e-4)
    row = {"size": f"MuZero {batch}, K {unroll_steps}, n {n}", "ends": 0.0, "threads": torch.get_num_threads()}
    return harness.rows(row, {"ours": ours, "NumPy windows": windows}, seconds, 4 * batch * moves, "ours", turn=TURN)


def transitions(batch: int, steps: int, n: int, seconds: float) -> list[Any]:
    """The parts of n-step targets, and the same parts from n-step returns of zeros and ones."""
    g = torch.Generator().manual_seed(0)
    rewards = torch.randn(batch, steps, generator=g)
    terminated, truncated = (torch.rand(batch, steps, generator=g) < 0.01 for _ in range(2))
    zeros, ones = torch.zeros(batch, steps), torch.ones(batch, steps)
    ends = {"terminated": terminated, "truncated": truncated}

    def three_calls() -> tuple[Any, ...]:
        options = {"n": n, **ends}
        sums = gs.n_step_returns(rewards, None, zeros, discount=DISCOUNT, **options)
        products = gs.n_step_returns(zeros, None, ones, discount=DISCOUNT, **options)
        return sums, products, gs.n_step_returns(ones, None, zeros, discount=1.0, **options).long()

    ours = functools.partial(gs.n_step_transitions, rewards, discount=DISCOUNT, n=n, **ends)
    for result, expected in zip(ours(), three_calls(), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    row = {"size": f"n-step transitions {batch} x {steps}, n {n}", "ends": 0.01, "threads": torch.get_num_threads()}
    contestants = {"ours": ours, "three calls of n_step_returns": three_calls}
    return harness.rows(row, contestants, seconds, 22 * batch * steps, "ours", turn=TURN)


def horizons(batch: int, unroll_steps: int, n: int, seconds: float) -> list[Any]:
    """EfficientZero's shorter horizons of old games, one for each row, and a loop over rows."""
    g = torch.Generator().manual_seed(0)
    moves = unroll_steps + n
    rewards, values = torch.randn(batch, moves, generator=g), torch.randn(batch, moves + 1, generator=g)
    td_steps = torch.randint(1, n + 1, (batch,), generator=g)
    numbers = {"num_unroll_steps": unroll_steps, "discount": 0.997}

    def loop_over_rows() -> list[Any]:
        rows = [
            gs.muzero_targets(r[None], nu[None], td_steps=horizon, **numbers)
            for r, nu, horizon in zip(rewards, values, td_steps.tolist(), strict=True)
        ]
        return [torch.cat(field) for field in zip(*rows, strict=True)]

    ours = functools.partial(gs.muzero_targets, rewards, values, td_steps=td_steps, **numbers)
    for result, expected in zip(ours(), loop_over_rows(), strict=True):
        torch.testing.assert_close(result, expected)
    row = {"size": f"MuZero {batch}, K {unroll_steps}, n by row", "ends": 0.0, "threads": torch.get_num_threads()}
    contestants = {"ours": ours, "loop over rows": loop_over_rows}
    return harness.rows(row, contestants, seconds, 4 * batch * moves, "ours", turn=TURN)


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for (batch, steps), ends in itertools.product(SIZES, (0.0, 0.01)):
            results += advantages(batch, steps, ends, arguments.seconds)
        results += dreamer(1024, 15, arguments.seconds)
        results += muzero(256, 5, 10, arguments.seconds)
        results += horizons(256, 5, 10, arguments.seconds)
        results += transitions(256, 64, 3, arguments.seconds)
        results += transitions(256, 64, 10, arguments.seconds)
    for row in results:
        harness.show(row)
    harness.write(arguments.json, "returns", results)


if __name__ == "__main__":
    main()
