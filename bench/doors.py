"""The doors of the loss: the module, the function, `torch.compile` around them, and what they replace.

bench/loss.py runs this file. A process has one instruction set, so that the module with AVX2 runs in a process of its
own, which takes its turns with the contestants of this one:

    python bench/doors.py --serve     # reads lines "size turns" from stdin, and writes seconds
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import harness
import loss

SIZE = (256, 5, 601, 18)
NARROW = (256, 5, 255, 18)
AGENT = "doors of the loss"
#: Seconds: the threads of the process whose turn is over still spin for a while on the cores of the next one.
TURN = 20e-3


def gradients_of(function: loss.Loss, inputs: loss.Inputs) -> Callable[[], object]:
    leaves = loss.leaves_of(inputs[0])
    return lambda: torch.autograd.grad(function(*inputs), leaves)


def doors(num_bins: int) -> dict[str, loss.Loss]:
    """Each door with the call that it is."""
    return {
        "module": loss.make_fused(num_bins),
        "function": loss.make_fused(num_bins, as_function=True),
        "module in torch.compile": torch.compile(loss.make_fused(num_bins), dynamic=False),
        'module, impl="compiled"': loss.make_fused(num_bins, impl="compiled"),
        'module, impl="reference"': loss.make_fused(num_bins, impl="reference"),
        "by hand, torch.compile": torch.compile(loss.usual_loss, dynamic=False),
        "by hand, eager": loss.usual_loss,
    }


class Process:
    """The module in a process with another instruction set."""

    def __init__(self, capability: str) -> None:
        """Start it with as many threads as this process has."""
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
            raise RuntimeError(f"the process of {' '.join(map(str, self._process.args))} ended")  # type: ignore[arg-type]
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
        return gradients_of(loss.make_fused(num_bins), loss.make_inputs(*size))

    for line in sys.stdin:
        num_bins, repeats = map(int, line.split())
        print(harness.wall_time(call(num_bins), repeats), flush=True)


class Elsewhere:
    """A contestant in another process. Its time is taken there."""

    def __init__(self, process: Process, num_bins: int) -> None:
        """The module for this number of bins."""
        self._process, self._num_bins = process, num_bins

    def __call__(self) -> object:
        return self.seconds(1)

    def seconds(self, repeats: int) -> float:
        return self._process.seconds(self._num_bins, repeats)


def timed(function: Callable[[], object], repeats: int) -> float:
    return function.seconds(repeats) if isinstance(function, Elsewhere) else harness.wall_time(function, repeats)


def rows_of(
    size: tuple[int, int, int, int], contestants: harness.Contestants, seconds: float
) -> Iterator[dict[str, Any]]:
    inputs = loss.make_inputs(*size)
    moved = 2 * sum(leaf.nbytes for leaf in loss.leaves_of(inputs[0]))
    moved += sum(target.nbytes for target in loss.leaves_of(inputs[1]))
    label = {"agent": AGENT, "size": "B {} K {} S {} A {}".format(*size), "dtype": "fp32", "pass": "forward+backward"}
    found = harness.measure(contestants, seconds, timed, TURN)
    for name, values in found.items():
        here = contestants["module" if isinstance(contestants[name], Elsewhere) else name]  # the same memory
        yield {
            **label,
            "threads": torch.get_num_threads(),
            "contestant": name,
            **values,
            "ratio": values["median_ms"] / found["module"]["median_ms"],
            "gb_per_s": moved / values["median_ms"] / 1e6,
            "peak_mb": harness.peak_extra_bytes(here) / 2**20,
        }


def benchmark(seconds: float) -> Iterator[dict[str, Any]]:
    """All doors at one size, and the module for AVX2 and, where this machine has it, AVX-512, at two."""
    capability = torch.backends.cpu.get_cpu_capability()
    process = Process("avx2") if capability.startswith("AVX512") else None
    try:
        for size in (SIZE, NARROW):
            torch._dynamo.reset()
            inputs, functions = loss.make_inputs(*size), doors(size[2])
            if size is NARROW:
                functions = {"module": functions["module"]}
            loss.check_same(functions, inputs)
            contestants = {name: gradients_of(function, inputs) for name, function in functions.items()}
            if process is not None:
                contestants["module with AVX2"] = Elsewhere(process, size[2])
            yield from rows_of(size, contestants, seconds)
    finally:
        if process is not None:
            process.close()


if __name__ == "__main__" and "--serve" in sys.argv:
    serve()
