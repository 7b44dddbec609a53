"""`python -m gradscale_ext compile`: compiles kernels ahead of time, on any machine.

The kernels of a call are found by making the call with CPU tensors, while C++ reports the names of the kernels instead
of launching them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import gradscale_ext as gs

from .. import _kernels
from .._native import _C
from . import report

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BATCH = 256


def kernels_of(calls: Sequence[Callable[[], object]]) -> list[tuple[str, str]]:
    """Return the file and name of each kernel that these calls, made with CPU tensors, would launch on a GPU."""
    names: dict[tuple[str, str], None] = {}
    _C.record_kernels(lambda file, name: names.setdefault((file, name)))
    try:
        for call in calls:
            call()
    finally:
        _C.record_kernels(None)
    return list(names)


def loss_calls(dtype: torch.dtype, actions: int, steps: int = 5) -> list[Callable[[], object]]:
    """Return calls of a MuZero agent's loss (lists and stacked, with and without gradients) and of `decode`."""
    support = gs.Support.muzero()
    loss_fn = gs.MultiStepLoss.muzero(support)

    def logits(width: int, stacked: bool) -> list[torch.Tensor] | torch.Tensor:
        if stacked:
            return torch.zeros(BATCH, steps + 1, width, dtype=dtype, requires_grad=True)
        return [torch.zeros(BATCH, width, dtype=dtype, requires_grad=True) for _ in range(steps + 1)]

    def loss(stacked: bool, wants_gradient: bool) -> None:
        widths = {"value": support.num_bins, "reward": support.num_bins, "policy": actions}
        predictions = {name: logits(width, stacked) for name, width in widths.items()}
        targets = {name: torch.zeros(BATCH, steps + 1) for name in ("value", "reward")}
        targets["policy"] = torch.full((BATCH, steps + 1, actions), 1 / actions)
        with torch.set_grad_enabled(wants_gradient):
            result = loss_fn(predictions, targets, step_gradient_scale="unroll").loss
        if wants_gradient:
            torch.autograd.backward(result, torch.tensor(2.0))

    def decode() -> None:
        rows = torch.zeros(BATCH, support.num_bins, dtype=dtype, requires_grad=True)
        torch.autograd.backward(support.decode(rows).sum())

    return [
        *(lambda s=stacked, w=wanted: loss(s, w) for stacked in (False, True) for wanted in (True, False)),
        decode,
    ]


def other_calls(dtype: torch.dtype) -> list[Callable[[], object]]:
    """Return calls of the gradient operators, of the functions on a model's gradients, and of the return functions."""

    def flow() -> None:
        for size in (64, 1 << 16):
            x = torch.zeros(4, size, dtype=dtype, requires_grad=True)
            for y in (
                gs.scale_gradient(x, torch.ones(1)),
                gs.scale_gradient(x, torch.ones(4, 1)),
                gs.clip_gradient_norm(x, 1.0, batch_dims=1),
                gs.normalize_gradient(x),
            ):
                torch.autograd.backward(y, torch.ones_like(y))

    def parameters() -> None:
        for count in (1, 300):  # short and long lists in the arguments of kernels
            many = [torch.nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(count)]
            many.append(torch.nn.Parameter(torch.zeros(1 << 18, dtype=dtype)))  # several chunks
            torch.autograd.backward(gs.l2_loss(many))
            gs.clip_gradients_(many, 1.0)
            many[-1] = torch.nn.Parameter(torch.zeros(2, 10_000, dtype=dtype))  # rows of several warps
            many[-1].grad = torch.ones_like(many[-1])
            gs.clip_gradients_(many, adaptive=0.01)  # finds nothing to clip, because norms are not computed
            _C.clip_units(
                [torch.ones_like(parameter) for parameter in many], torch.zeros(count + 2).double(), True, False
            )

    def returns() -> None:
        rewards, values = (torch.zeros(BATCH, 64, dtype=dtype, requires_grad=True) for _ in range(2))
        for function in (gs.lambda_returns, gs.generalized_advantages):
            result = function(rewards, values, values, discount=0.99, lambda_=0.95)
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        window = torch.zeros(BATCH, 10, dtype=dtype), torch.zeros(BATCH, 11, dtype=dtype)
        gs.muzero_targets(*window, num_unroll_steps=5, td_steps=5, discount=0.99)

    return [flow, parameters, returns]


def _architecture(text: str) -> str:
    """Read a compute capability from the command line: 90, 9.0 or sm_90 is sm_90."""
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a compute capability such as 90 or 9.0, got {text!r}")
    return f"sm_{found[1]}{found[2]}"


def _architectures_here() -> list[str]:
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    if not found:
        raise SystemExit("gradscale_ext compile: no GPU found; name the GPUs to compile for, as in --arch 90")
    return [f"sm_{major}{minor}" for major, minor in sorted(found)]


def _row(kernel: tuple[str, str], gpu: str, into: Path | None) -> tuple[str, bool]:
    """Compile a kernel. Returns its row of the table, and True if it spills registers.

    Raises:
        RuntimeError: the kernel could not be compiled or stored.
    """
    begin = time.perf_counter()
    try:
        image, source = _kernels.compile_into(into, *kernel, gpu) if into else _kernels.image_of(*kernel, gpu)
    except (RuntimeError, OSError) as error:
        raise RuntimeError(f"{kernel[1]} for {gpu}: {str(error).removeprefix('gradscale_ext: ')}") from error
    seconds = time.perf_counter() - begin
    numbers = f"{image.registers:>10}{image.shared:>8}{image.spilled:>9}{seconds:>9.2f}"
    return f"{gpu:<8}{numbers}  {source:<12}{kernel[1]}", image.spilled > 0


def main(arguments: Sequence[str]) -> int:
    """Compile a MuZero agent's kernels, and print their resource usage; the exit status is 1 if one cannot be
    compiled."""
    parser = argparse.ArgumentParser(prog="python -m gradscale_ext compile", description=main.__doc__)
    parser.add_argument(
        "--arch", nargs="+", type=_architecture, metavar="90", help="target GPUs (default: this machine's)"
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=DTYPES, help="dtypes of logits")
    parser.add_argument(
        "--actions", nargs="+", type=report.positive, default=[18], metavar="18", help="numbers of actions"
    )
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="write to this folder, not to the cache")
    options = parser.parse_args(arguments)
    into = options.into and options.into.expanduser()
    architectures = options.arch or _architectures_here()
    calls = [call for name in options.dtype for call in other_calls(DTYPES[name])]
    calls += [
        call for name in options.dtype for actions in options.actions for call in loss_calls(DTYPES[name], actions)
    ]
    kernels = kernels_of(calls)
    begin = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = [pool.submit(_row, kernel, gpu, into) for kernel in kernels for gpu in architectures]
    failures = [error for result in results if (error := result.exception()) is not None]
    rows = [result.result() for result in results if result.exception() is None]
    print(f"{'gpu':<8}{'registers':>10}{'shared':>8}{'spilled':>9}{'seconds':>9}  {'from':<12}kernel")
    for line, _ in rows:
        print(line)
    if spilling := sum(spills for _, spills in rows):
        print(f"{spilling} kernel{'s spill' if spilling > 1 else ' spills'} registers to memory, which may be slower")
    folder = into or _kernels.cache_folder()
    print(f"{len(rows)} kernels in {time.perf_counter() - begin:.1f} s, in {folder}")
    if failures:
        count = f"{len(failures)} kernel{'s' if len(failures) > 1 else ''} could not be compiled"
        print(f"gradscale_ext compile: {count}; {failures[0]}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
