"""The cost of monitoring gradients in a training step.

    python bench/monitor.py --json bench/results/monitor.json --seconds 60

Each contestant trains its own copy of the same model with Adam, on the same batch, in turns. "usual way" is written by
hand: `param.grad.norm().item()` and `add_histogram` for each parameter, at every step. It has a separate run, together
with a loop without monitoring, because the memory that it allocates and frees slows down the contestant that follows. A
step ends when the writer's thread is done; otherwise the thread would continue in the next contestant's turn. The
figure of `every=100` is the mean of 99 steps that record nothing and one step of `every=1`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import statistics
import tempfile
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

import harness
from gradscale_ext import GradientMonitor

Step = Callable[[], None]
Log = Callable[[nn.Module], None]
Make = Callable[[], tuple[nn.Module, torch.Tensor]]
WITHOUT, SELDOM, ALWAYS, USUAL = "without", "every=100", "every=1, histograms", "usual way"
ROUNDS = 3
RUNS = ((WITHOUT, SELDOM, ALWAYS), (WITHOUT, USUAL))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    return model, torch.randn(2048, 784)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    size = 384
    layer = nn.TransformerEncoderLayer(size, nhead=6, dim_feedforward=4 * size, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=12, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(8192, size), encoder, nn.Linear(size, 256)), torch.randint(8192, (16, 128))


MODELS: dict[str, Make] = {"MLP, batch of 2048": mlp, "transformer of 12 layers, 16 sequences of 128": transformer}


def training_step(
    model: nn.Module,
    batch: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    writer: SummaryWriter,
    log_gradients: Log | None = None,
) -> Step:
    targets = model(batch).detach().flatten(0, -2).argmax(-1)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch).flatten(0, -2), targets).backward()
        if log_gradients is not None:
            log_gradients(model)
        optimizer.step()
        writer.flush()

    return step


def usual_way(writer: SummaryWriter) -> Log:
    steps = itertools.count()

    def log_gradients(model: nn.Module) -> None:
        step = next(steps)
        for name, parameter in model.named_parameters():
            writer.add_scalar(f"gradient_norm/{name}", parameter.grad.norm().item(), step)
            writer.add_histogram(f"gradient/{name}", parameter.grad, step)

    return log_gradients


def contestants(
    names: tuple[str, ...], original: nn.Module, batch: torch.Tensor, folder: str, stack: contextlib.ExitStack
) -> harness.Contestants:
    steps: harness.Contestants = {}
    for name in names:
        model = copy.deepcopy(original)
        optimizer = torch.optim.Adam(model.parameters(), 1e-5)
        writer = stack.enter_context(SummaryWriter(tempfile.mkdtemp(dir=folder)))
        if name in (SELDOM, ALWAYS):
            every = 1 if name == ALWAYS else 10**9
            stack.enter_context(GradientMonitor(model, optimizer, writer=writer, every=every, tags="all"))
        log_gradients = usual_way(writer) if name == USUAL else None
        steps[name] = training_step(model, batch, optimizer, writer, log_gradients)
    return steps


def one_round(names: tuple[str, ...], make: Make, seconds: float) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        times = harness.turns(contestants(names, *make(), folder, stack), seconds, turn=0.0)
    if SELDOM in times:
        times[SELDOM] = [
            0.99 * seldom + 0.01 * always for seldom, always in zip(times[SELDOM], times[ALWAYS], strict=True)
        ]
    return times


def measured(names: tuple[str, ...], make: Make, seconds: float) -> dict[str, dict[str, float]]:
    """Times from several rounds, and the cost of monitoring.

    Each round has new models, because the place of a model in memory alters the times by about 1 %. The cost is the
    median ratio to the step without monitoring in the same turn: slow phases of the machine affect this ratio least.
    """
    torch.manual_seed(0)
    rounds = [one_round(names, make, seconds / ROUNDS) for _ in range(ROUNDS)]
    times = {name: [time for found in rounds for time in found[name]] for name in names}
    return {
        name: {
            **harness.summary(times[name]),
            "cost_percent": 100 * (statistics.median(map(operator.truediv, times[name], times[WITHOUT])) - 1),
        }
        for name in names
    }


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    for model, make in MODELS.items():
        parameters = sum(parameter.numel() for parameter in make()[0].parameters())
        for names in RUNS:
            for contestant, row in measured(names, make, arguments.seconds).items():
                results.append({"model": model, "parameters": parameters, "contestant": contestant, **row})
                print(
                    f"{model:<46} {contestant:<20} {row['median_ms']:>9.2f} ms  p20 {row['p20_ms']:>9.2f}  "
                    f"p80 {row['p80_ms']:>9.2f}  {row['cost_percent']:>+8.2f} %  ({row['runs']:.0f} steps)",
                    flush=True,
                )
    harness.write(arguments.json, "monitor", results)


if __name__ == "__main__":
    main()
