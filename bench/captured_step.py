"""Host time of a `CapturedStep` over the replay of its graph and its copies.

    python bench/captured_step.py --json bench/results/captured_step.json

There is no GPU here: the step is captured by the tests' stand-in for CUDA graphs, and the replay is then replaced by
nothing. What is left is what each call adds on any machine: reading the arguments, comparing everything that the graph
relies on with what it was (guards), and setting gradients. The copies of arguments and results are measured alone, and
subtracted. An audit is measured with the stand-in's replay, which takes as long as a plain step, next to a plain step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import gradscale_ext as gs
import harness
from gradscale_ext.capture import graphs
from gradscale_ext.capture.audit import next_audit

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import tape

NUM_PARAMETERS = (20, 100, 300, 1000)
BATCH = 8


CALLS = 10_000


def captured(num_parameters: int) -> tuple[gs.CapturedStep, list[torch.Tensor]]:
    """The step of a network of small linear layers with Adam, after its first audits; and its arguments."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_parameters // 2)))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    arguments = [torch.randn(BATCH, 4), torch.randn(BATCH, 4)]
    with mock.patch.object(graphs, "graphs_of", return_value=tape.TapeGraphs()):
        update = gs.CapturedStep(step, model, optimizer, audit=0)
        for _ in range(6):  # warm-up, capture, verification
            update(*arguments)
    return update, arguments


def contestants_of(update: gs.CapturedStep, arguments: list[torch.Tensor]) -> harness.Contestants:
    """The guards, a call without its replay, and its copies."""
    (own,) = update._captured
    own.graph.replay = lambda: None

    def copies() -> None:
        torch._foreach_copy_(own.inputs, arguments, non_blocking=True)
        own.result["loss"].clone()

    return {"guards": own.guards.compiled.hold, "call": lambda: update(*arguments), "copies": copies}


def audits_of(update: gs.CapturedStep, arguments: list[torch.Tensor]) -> harness.Contestants:
    """A call that is audited, and a plain call."""
    (own,) = update._captured

    def audit() -> None:
        own.next_audit = own.replays + 1
        update(*arguments)

    return {"audit": audit, "plain": lambda: update.plain(*arguments)}


def num_audits(calls: int) -> int:
    """Number of audits in a run of as many replays."""
    replay = count = 0
    while (replay := next_audit(replay, verify=2, audit=1024)) <= calls:
        count += 1
    return count


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    for num_parameters in NUM_PARAMETERS:
        update, given = captured(num_parameters)
        times = harness.measure(audits_of(update, given), arguments.seconds)
        times |= harness.measure(contestants_of(update, given), arguments.seconds)
        microseconds = {name: 1e3 * found["median_ms"] for name, found in times.items()}
        row = {
            "parameters": num_parameters,
            "guards_us": microseconds["guards"],
            "call_us": microseconds["call"] - microseconds["copies"],
            "audit_us": microseconds["audit"],
            "plain_us": microseconds["plain"],
            "audits_in_10000_calls": num_audits(CALLS),
        }
        print("  ".join(f"{name} {value:.1f}" for name, value in row.items()), flush=True)
        results.append({**row, "times": times})
    harness.write(arguments.json, "captured_step", results)


if __name__ == "__main__":
    main()
