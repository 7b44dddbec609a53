"""The entry points ("doors") of the loss: module, function, `torch.compile`, each `impl`, and the loss written by hand.

bench/loss.py runs this file. PyTorch chooses the instruction set once per process. So the module with AVX2 runs in a
separate process, and for comparison another process runs it with AVX-512. Both take turns with the contestants of this
process:

    python bench/doors.py --serve THREADS     # reads lines "bins repeats" from stdin, and writes seconds
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import gradscale_ext as gs
import harness
import losses

SIZE = (256, 5, 601, 18)
NARROW = (256, 5, 255, 18)
AGENT = "doors of the loss"
INSTRUCTION_SETS = {"avx2": "AVX2", "avx512": "AVX-512"}
#: Seconds per turn, and seconds of untimed calls before it: OpenMP threads of the previous contestant still spin on the
#: cores, and threads of another process have to wake up.
TURN, WARM_UP = 20e-3, 3e-3


def gradients_of(function: losses.Loss, inputs: losses.Inputs) -> Callable[[], object]:
    leaves = losses.leaves_of(inputs[0])
    return lambda: torch.autograd.grad(function(*inputs), leaves)


def make_compiled_reference(num_bins: int) -> losses.Loss:
    """The reference, compiled by the caller with torch.compile. All outputs are computed, as with `impl="compiled"`."""
    heads = gs.MultiStepLoss.muzero(gs.Support.muzero((num_bins - 1) // 2), value_weight=0.25).heads

    @functools.partial(torch.compile, dynamic=False)
    def outputs(predictions: Any, targets: Any, weights: torch.Tensor) -> gs.MultiStepLossOutput:
        return gs.reference.multi_step_loss(
            heads, predictions, targets, step_gradient_scale="unroll", importance_weights=weights
        )

    return lambda *inputs: outputs(*inputs).loss


def doors(num_bins: int) -> dict[str, losses.Loss]:
    """The loss function behind each entry point."""
    return {
        "module": losses.make_fused(num_bins),
        "function": losses.make_fused(num_bins, as_function=True),
        "module in torch.compile": torch.compile(losses.make_fused(num_bins), dynamic=False),
        'module, impl="compiled"': losses.make_fused(num_bins, impl="compiled"),
        "reference in torch.compile": make_compiled_reference(num_bins),
        'module, impl="reference"': losses.make_fused(num_bins, impl="reference"),
        "by hand, torch.compile": torch.compile(losses.usual_loss, dynamic=False),
        "by hand, eager": losses.usual_loss,
    }


class ModuleServer:
    """A process that times the module with another instruction set."""

    def __init__(self, capability: str) -> None:
        """Start the process, with as many threads as this process has."""
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(torch.get_num_threads())]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, num_bins: int, repeats: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(num_bins, repeats, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"process `{' '.join(map(str, self._process.args))}` ended")  # type: ignore[arg-type]
        return float(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Time calls of the module until stdin ends."""
    torch.set_num_threads(int(sys.argv[2]))

    @functools.cache
    def call(num_bins: int) -> Callable[[], object]:
        size = (*SIZE[:2], num_bins, SIZE[3])
        return gradients_of(losses.make_fused(num_bins), losses.make_inputs(*size))

    for line in sys.stdin:
        num_bins, repeats = map(int, line.split())
        print(warm_time(call(num_bins), repeats), flush=True)


class RemoteModule:
    """A contestant in another process, which measures the time."""

    def __init__(self, server: ModuleServer, num_bins: int) -> None:
        """The module for this number of bins."""
        self._server, self._num_bins = server, num_bins

    def __call__(self) -> object:
        return self.seconds(1)

    def seconds(self, repeats: int) -> float:
        return self._server.seconds(self._num_bins, repeats)


def warm_time(function: Callable[[], object], repeats: int) -> float:
    end = time.perf_counter() + WARM_UP
    while time.perf_counter() < end:
        function()
    return harness.wall_time(function, repeats)


def timed(function: Callable[[], object], repeats: int) -> float:
    return function.seconds(repeats) if isinstance(function, RemoteModule) else warm_time(function, repeats)


def rows_of(
    size: tuple[int, int, int, int], contestants: harness.Contestants, seconds: float
) -> Iterator[dict[str, Any]]:
    inputs = losses.make_inputs(*size)
    moved = 2 * sum(leaf.nbytes for leaf in losses.leaves_of(inputs[0]))
    moved += sum(target.nbytes for target in losses.leaves_of(inputs[1]))
    label = {"agent": AGENT, "size": "B {} K {} S {} A {}".format(*size), "dtype": "fp32", "pass": "forward+backward"}
    found = harness.measure(contestants, seconds, timed, TURN)
    for name, values in found.items():
        # A remote module needs as much memory as the module in this process.
        is_remote = isinstance(contestants[name], RemoteModule)
        local = contestants["module" if is_remote else name]
        compared = found["module with AVX-512" if is_remote else "module"]
        yield {
            **label,
            "threads": torch.get_num_threads(),
            "contestant": name,
            **values,
            "ratio": values["median_ms"] / compared["median_ms"],
            "gb_per_s": moved / values["median_ms"] / 1e6,
            "peak_mb": harness.peak_extra_bytes(local) / 2**20,
        }


def benchmark(seconds: float) -> Iterator[dict[str, Any]]:
    """Time all entry points at one size, and the module at two.

    If this machine has AVX-512, also time the module with AVX2 and with AVX-512, in processes of their own.
    """
    has_both = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    servers = {name: ModuleServer(name) for name in INSTRUCTION_SETS if has_both}
    try:
        for size in (SIZE, NARROW):
            torch._dynamo.reset()
            inputs, functions = losses.make_inputs(*size), doors(size[2])
            if size is NARROW:
                functions = {"module": functions["module"]}
            losses.check_same(functions, inputs)
            contestants = {name: gradients_of(function, inputs) for name, function in functions.items()}
            for name, server in servers.items():
                contestants[f"module with {INSTRUCTION_SETS[name]}"] = RemoteModule(server, size[2])
            yield from rows_of(size, contestants, seconds)
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__" and "--serve" in sys.argv:
    serve()
