"""`python -m gradscale_ext bench`: the loss at the user's sizes, compared with PyTorch as it is usually written."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

import gradscale_ext as gs

from .. import reference
from . import report

Times = tuple[float, float, float]
"""First quartile, median and third quartile, in milliseconds."""
Results = dict[str, dict[str, Times]]
Work = Callable[[], object]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def works(options: argparse.Namespace) -> dict[str, dict[str, Work]]:
    """The implementations to time, by name, for each thing that is measured."""
    device, steps, dtype = options.device, options.unroll + 1, DTYPES[options.dtype]
    support = gs.Support.muzero((options.bins - 1) // 2)

    def logits(width: int) -> list[torch.Tensor]:
        return [torch.randn(options.batch, width, device=device, dtype=dtype).requires_grad_() for _ in range(steps)]

    predictions = {
        "value": logits(support.num_bins),
        "reward": logits(support.num_bins),
        "policy": logits(options.actions),
    }
    targets = {name: [torch.randn(options.batch, device=device) for _ in range(steps)] for name in ("value", "reward")}
    targets["policy"] = [entry.detach().float().softmax(-1) for entry in logits(options.actions)]
    loss_fn = gs.MultiStepLoss.muzero(support)
    leaves = [entry for entries in predictions.values() for entry in entries]

    def eager() -> torch.Tensor:
        total = torch.zeros(options.batch, device=device)
        for k in range(steps):
            loss = torch.zeros(options.batch, device=device)
            for name, entries in predictions.items():
                target = targets[name][k]
                encoded = target if name == "policy" else reference.two_hot(target, support)
                loss = loss - (encoded * entries[k].float().log_softmax(-1)).sum(-1)
            scale = 1 / max(options.unroll, 1) if k > 0 else 1.0
            total = total + loss * scale + loss.detach() * (1 - scale)
        return total.mean()

    def fused() -> torch.Tensor:
        return loss_fn(predictions, targets, step_gradient_scale="unroll").loss

    rows = predictions["value"][0].detach()
    gradients = [torch.nn.Parameter(torch.randn(256, 256, device=device)) for _ in range(60)]
    for parameter in gradients:
        parameter.grad = torch.randn_like(parameter)

    def usual_decode() -> torch.Tensor:
        return reference.decode(rows, support)

    found: dict[str, dict[str, Work]] = {
        "loss, forward and backward": {
            "fused": lambda: torch.autograd.grad(fused(), leaves),
            "eager": lambda: torch.autograd.grad(eager(), leaves),
        },
        "decode": {"fused": lambda: support.decode(rows), "eager": usual_decode},
        "clip 60 gradients": {
            "fused": lambda: gs.clip_gradients_(gradients, 1.0),
            "eager": lambda: torch.nn.utils.clip_grad_norm_(gradients, 1.0),
        },
    }
    if not options.no_compile:
        compiled, decode = torch.compile(eager), torch.compile(usual_decode)
        found["loss, forward and backward"]["torch.compile"] = lambda: torch.autograd.grad(compiled(), leaves)
        found["decode"]["torch.compile"] = decode
    return found


def milliseconds(work: Work, seconds: float, device: str) -> Times:
    """Times of at least three calls in at least `seconds`, after one untimed call that may compile."""

    def synchronize() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    low, median, high = statistics.quantiles(times, n=4)
    return low, median, high


def warn_if_busy() -> None:
    """Warn if other processes take a share of the processors."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load > processors / 4:
        print(
            f"warning: a load of {load:.1f} on {processors} processors before the measurement; other processes make "
            "times longer and less certain",
            file=sys.stderr,
        )


def chart(results: Results, width: int = 40) -> str:
    """Draw a bar for each median, with the quartiles, in the order of `results`. The longest bar of each group has the
    full width.

    >>> print(chart({"decode": {"fused": (0.9, 1.0, 1.3), "eager": (3.5, 4.0, 4.25)}}, width=8))
    decode
      fused         ##            1.000 ms (0.900 to 1.300)
      eager         ########      4.000 ms (3.500 to 4.250)  4.0 x
    """
    block = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    lines = []
    for what, times in results.items():
        lines.append(what)
        longest = max(median for _, median, _ in times.values())
        for way, (low, median, high) in times.items():
            bar = block * max(1, round(width * median / longest))
            ratio = "" if way == "fused" else f"  {median / times['fused'][1]:.1f} x"
            lines.append(f"  {way:<13} {bar:<{width}}  {median:>9.3f} ms ({low:.3f} to {high:.3f}){ratio}")
    return "\n".join(lines)


def show(results: Results) -> None:
    """Print the chart, in colours where rich is installed."""
    if importlib.util.find_spec("rich") is None:
        print(chart(results))
        return
    import rich.console
    import rich.text

    console = rich.console.Console()
    for line in chart(results, max(10, min(60, console.width - 66))).splitlines():
        colour = "bold green" if line.startswith("  fused") else "" if line.startswith("  ") else "bold"
        console.print(rich.text.Text(line, colour))


def main(arguments: Sequence[str]) -> int:
    """Time the loss of a MuZero agent, decoding and clipping, fused and as usually written, in about a minute: medians,
    and in parentheses the quartiles, between which half of the calls are."""
    parser = argparse.ArgumentParser(prog="python -m gradscale_ext bench", description=main.__doc__)
    for name, default, what in (
        ("batch", 256, "samples"),
        ("unroll", 5, "recurrent steps"),
        ("bins", 601, "bins of the support, an odd number"),
        ("actions", 18, "actions of the policy"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="dtype of the logits (float32)")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=report.device, default=default_device, help="where to compute")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each implementation (2)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes long")
    parser.add_argument("--json", action="store_true", help="print milliseconds as JSON")
    options = parser.parse_args(arguments)
    if options.batch < 1 or options.unroll < 0 or options.actions < 1 or options.bins < 3 or options.bins % 2 == 0:
        parser.error("batch and actions must be at least 1, unroll at least 0, and bins an odd number of at least 3")
    warn_if_busy()
    results: Results = {}
    for what, ways in works(options).items():
        for way, work in ways.items():
            if not options.json:
                print(f"measuring {what}: {way}", file=sys.stderr)
            results.setdefault(what, {})[way] = milliseconds(work, options.seconds, options.device)
    if options.json:
        medians = {what: {way: median for way, (_, median, _) in ways.items()} for what, ways in results.items()}
        quartiles = {what: {way: (low, high) for way, (low, _, high) in ways.items()} for what, ways in results.items()}
        print(json.dumps({"milliseconds": medians, "quartiles": quartiles, **vars(options)}, indent=2))
    else:
        show(results)
    return 0
