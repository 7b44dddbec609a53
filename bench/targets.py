"""What lies between a trajectory and a loss, compared with the usual code: operations (launches on a GPU) and time.

    python bench/targets.py --json FILE

The usual code is three lines for advantages (with a mask, four), `torch.quantile` of the unmasked entries for the scale
of returns, which waits for a device, and for completed Q-values LightZero's loop over environments in NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs
import harness


class CountOperations(TorchDispatchMode):
    """Counts operations that compute or copy; views do neither."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not function.is_view
        return function(*args, **(kwargs or {}))


def rows(size: str, contestants: harness.Contestants, seconds: float, moved_bytes: float) -> list[Any]:
    found = harness.rows(
        {"size": size, "threads": torch.get_num_threads()}, contestants, seconds, moved_bytes, "ours", turn=2e-3
    )
    for row in found:
        with CountOperations() as operations:
            contestants[row["contestant"]]()
        row["operations"] = operations.number
    return found


def advantages(batch: int, steps: int, seconds: float) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(batch, steps, generator=g), torch.rand(batch, steps, generator=g) < 0.8
    eps = 1e-8

    def usual() -> torch.Tensor:
        return (x - x.mean()) / (x.std(unbiased=False) + eps)

    def usual_with_mask() -> torch.Tensor:
        count = mask.sum()
        mean = (x * mask).sum() / count
        variance = ((x - mean) ** 2 * mask).sum() / count
        return (x - mean) / (variance.sqrt() + eps) * mask

    torch.testing.assert_close(gs.standardize(x, eps=eps), usual())
    torch.testing.assert_close(gs.standardize(x, mask=mask, eps=eps), usual_with_mask())
    plain = {"ours": lambda: gs.standardize(x, eps=eps), "usual": usual}
    masked = {"ours": lambda: gs.standardize(x, mask=mask, eps=eps), "usual": usual_with_mask}
    label = f"standardize {batch} x {steps}"
    return rows(label, plain, seconds, 8 * x.numel()) + rows(label + ", mask", masked, seconds, 9 * x.numel())


def returns(batch: int, steps: int, seconds: float) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(batch, steps, generator=g) * 10, torch.rand(batch, steps, generator=g) < 0.8
    module, running = gs.ReturnScale(), torch.zeros(2)
    fractions = torch.tensor([0.05, 0.95])

    def usual() -> torch.Tensor:
        running.mul_(0.99).add_(0.01 * torch.quantile(x[mask], fractions))
        return (running[1] - running[0]).clamp(min=1.0)

    torch.testing.assert_close(module(x, mask), usual())
    contestants = {"ours": lambda: module(x, mask), "torch.quantile": usual}
    return rows(f"ReturnScale {batch} x {steps}, mask", contestants, seconds, 5 * x.numel())


def policies(batch: int, actions: int, seconds: float) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    logits, q = (torch.randn(batch, actions, generator=g) for _ in range(2))
    counts = torch.randint(9, (batch, actions), generator=g) * (torch.rand(batch, actions, generator=g) < 0.5)
    value = torch.randn(batch, generator=g)
    arrays = [tensor.numpy() for tensor in (logits, q, counts, value)]

    def loop() -> list[np.ndarray]:
        policies = []
        for prior, q_row, visits, root in zip(*arrays, strict=True):
            p = np.exp(prior - prior.max())
            p /= p.sum()
            visited, total = visits > 0, visits.sum()
            if total:
                root = (root + total * (p[visited] * q_row[visited]).sum() / p[visited].sum()) / (total + 1)
            completed = np.where(visited, q_row, root)
            completed = (completed - completed.min()) / max(completed.max() - completed.min(), 1e-8)
            improved = prior + (50 + visits.max()) * 0.1 * completed
            improved = np.exp(improved - improved.max())
            policies.append(improved / improved.sum())
        return policies

    def ours() -> torch.Tensor:
        return gs.completed_q_policy(logits, q, counts, value)

    torch.testing.assert_close(ours(), torch.from_numpy(np.stack(loop())), check_dtype=False, rtol=1e-4, atol=1e-5)
    contestants = {"ours": ours, "NumPy loop": loop}
    return rows(f"completed Q {batch} x {actions}", contestants, seconds, 20 * batch * actions)


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    for size in ((16, 16), (256, 64), (4096, 128)):
        results += advantages(*size, arguments.seconds)
    results += returns(16, 1024, arguments.seconds)
    results += policies(256, 18, arguments.seconds)
    results += policies(64, 362, arguments.seconds)
    for row in results:
        harness.show(row)
        print(f"{'':<44} {row['contestant']:<28} {row['operations']:>6} operations")
    harness.write(arguments.json, "targets", results)


if __name__ == "__main__":
    main()
