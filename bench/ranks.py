"""The messages that ranks exchange in a learner step, and their cost on this machine.

    python bench/ranks.py --json bench/results/ranks.json --seconds 20

1, 2 and 4 processes of one thread each, joined by gloo, train the same network with DistributedDataParallel. Each
process has its own batch of the same size. Messages are counted where PyTorch sends them; times are medians of
rank 0 over steps in which all processes take part.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs
import harness

B, K, ACTIONS, HIDDEN = 64, 5, 18, 512
PROCESSES = (1, 2, 4)
WARM_UP = 5  # steps that are not counted
LOSS = gs.MultiStepLoss.muzero()


class Network(nn.Module):
    """Perceptrons with as many parameters as a small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(512, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.dynamics = nn.Sequential(nn.Linear(HIDDEN + ACTIONS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        sizes = {"value": 601, "reward": 601, "policy": ACTIONS}
        self.heads = nn.ModuleDict({name: nn.Linear(HIDDEN, size) for name, size in sizes.items()})

    def predict(self, hidden: Tensor) -> dict[str, Tensor]:
        return {name: head(hidden) for name, head in self.heads.items()}

    def initial(self, observation: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        hidden = self.encode(observation)
        return self.predict(hidden), hidden

    def recurrent(self, hidden: Tensor, action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        hidden = self.dynamics(torch.cat([hidden, nn.functional.one_hot(action, ACTIONS).float()], 1))
        return self.predict(hidden), hidden

    def forward(self, observation: Tensor, actions: Tensor) -> dict[str, list[Tensor]]:
        return gs.unroll(self.initial, self.recurrent, observation, actions)


class Messages(TorchDispatchMode):
    """Bytes of the tensors that are reduced over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_reduce" in str(function) or "allreduce" in str(function):
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return function(*args, **(kwargs or {}))


def worker(rank: int, processes: int, folder: str, seconds: float, enter: Callable[[int], None] | None) -> None:
    if enter is not None:
        enter(rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    found = train(seconds)
    # Gloo's threads must end before the interpreter does: free all objects that hold the process group.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


def train(seconds: float) -> dict[str, Any]:
    """The messages and times of learner steps."""
    network = Network()
    parallel = nn.parallel.DistributedDataParallel(network)
    buckets: list[int] = []
    complete: list[float] = []

    def counted(group, bucket):  # not annotated: DDP checks annotations, which are strings in this file
        buckets.append(bucket.buffer().numel() * bucket.buffer().element_size())
        complete.append(time.perf_counter())
        return default_hooks.allreduce_hook(group, bucket)

    parallel.register_comm_hook(None, counted)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    observation, actions = torch.randn(B, 512), torch.randint(ACTIONS, (B, K))
    targets = {"value": torch.randn(B, K + 1), "reward": torch.randn(B, K + 1), "policy": torch.rand(B, K + 1, ACTIONS)}
    mask = torch.rand(B, K + 1) < 0.9

    shared: dict[str, Any] = {"process_group": dist.group.WORLD}

    def loss_of(predictions: dict[str, list[Tensor]]) -> Tensor:
        return LOSS(
            predictions, targets, mask=mask, step_gradient_scale="unroll", reduction="valid_mean", **shared
        ).loss

    parts = ("forward", "loss", "backward", "clip", "optimizer", "step", "first bucket complete")
    times: dict[str, list[float]] = {name: [] for name in parts}
    sent: dict[str, list[int]] = {}

    def watched(name: str, function: Callable[[], Any]) -> Any:
        """Call the function, and record the messages of the first call of this name."""
        if name in sent:
            return function()
        with Messages() as messages:
            result = function()
        sent[name] = messages.bytes
        return result

    end, running = time.perf_counter() + seconds, torch.ones(())
    while running:
        buckets.clear()
        complete.clear()
        dist.barrier()
        marks = [time.perf_counter()]
        predictions = parallel(observation, actions)
        marks.append(time.perf_counter())
        loss = watched("loss", lambda predictions=predictions: loss_of(predictions))
        marks.append(time.perf_counter())
        loss.backward()
        sent["gradients"] = list(buckets)
        marks.append(time.perf_counter())
        # With a process group, clip_gradients_ sends the messages that it sends for sharded gradients.
        watched("clip", lambda: gs.clip_gradients_(network, 10.0, **shared))
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        for name, start, stop in zip(times, marks, marks[1:], strict=False):
            times[name].append(stop - start)
        times["step"].append(marks[-1] - marks[0])
        times["first bucket complete"].append(complete[0] - marks[2])
        running = torch.tensor(float(time.perf_counter() < end or len(times["step"]) <= WARM_UP))
        dist.broadcast(running, 0)
    all_reduce_ms = {name: 1e3 * all_reduce_alone(sum(sent[name])) for name in ("loss", "gradients")}
    return {
        "milliseconds": {name: 1e3 * statistics.median(values[WARM_UP:]) for name, values in times.items()},
        "messages": sent,
        "all_reduce_ms": all_reduce_ms,
        "steps": len(times["step"]) - WARM_UP,
        "parameters": sum(p.numel() for p in network.parameters()),
        "tensors": len(list(network.parameters())),
    }


def all_reduce_alone(size: int) -> float:
    """Seconds of an all-reduce of this many bytes without any computation in parallel."""
    numbers, times = torch.zeros(size // 4), []
    for _ in range(30):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measured(processes: int, seconds: float, enter: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Results of rank 0 after this many seconds of learner steps; each process calls `enter` first."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (processes, folder, seconds, enter), nprocs=processes)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    options = harness.arguments(__doc__)
    found = {}
    for processes in PROCESSES:
        found[processes] = measured(processes, options.seconds)
        print(processes, found[processes])
    result = {
        "machine": {**harness.machine(), "threads": "1 per process"},
        "batch of a rank": B,
        "measured": found,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
