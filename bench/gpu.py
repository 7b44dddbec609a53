"""Everything on a GPU: whole learner steps, the loss, returns, heads, decoding, gradient flow, statistics and l2_loss,
compared with eager PyTorch and its compiler.

    python bench/gpu.py --results bench/results        # writes bench/results/<name of the GPU>.json
    python bench/gpu.py --cpu-smoke                    # the same code on tiny CPU sizes; the figures mean nothing
    python bench/gpu.py --define GRADSCALE_RELAXED_POLLS --only "returns, advantages"    # a variant of the kernels

Eager PyTorch, the compiler in its default mode and our code are also captured in CUDA graphs; the compiler's modes
max-autotune and reduce-overhead capture their own graphs. Times are measured between events on the GPU, over
consecutive calls; where launching is slower than the GPU, they are launch times.

Calls rotate over copies of the inputs, at most 12, which together are three times as large as the L2 cache. The two
main sizes also have rows of "one set": every call reads the same copy, from the cache, as a loss does right after the
network has written its predictions.

Bytes that must move, for GB/s:

- loss: logits and targets read once; with a backward pass every gradient written once;
- decode: logits read once, values written once;
- gradient flow, with N bytes of gradient: 2 N for the negation that makes the incoming gradient, and 2 N, or 3 N where
  there is a norm (read, then read and written);
- l2_loss, with N bytes of parameters: N read, and in the backward pass N read and N written;
- whole steps: none are counted. The usual code and ours are timed as they are, with compiled networks, and captured by
  hand; ours also by `CapturedStep`, and by tensordict's CudaGraphModule where it is installed;
- returns and single heads: see bench/pieces.py.

"device copy" copies half as many bytes, because each byte is read and written.

Groups are measured in order of importance, and the results are written after each group, with what was left out for
want of time or memory. torch.compile is left out first.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import flow
import gradscale_ext as gs
import harness
import losses
import pieces
import policy_losses
import steps
import usual
from gradscale_ext import _kernels

Call = Callable[[], object]
Size = tuple[int, int, int, int]

#: B, K, S, A: the two main sizes, sizes of other published agents, and sizes with 1 GB of logits or more.
MAIN: list[Size] = [(256, 5, 601, 18), (1024, 5, 601, 362)]
OTHERS: list[Size] = [(64, 5, 601, 6), (2048, 5, 601, 82), (256, 5, 601, 4672), (256, 5, 21, 2)]
LARGE: list[tuple[Size, torch.dtype]] = [
    ((32768, 5, 601, 362), torch.float32),
    ((65536, 5, 601, 362), torch.bfloat16),
    ((8192, 5, 601, 4672), torch.float32),
]
LARGEST: list[tuple[Size, torch.dtype]] = [((131072, 5, 601, 362), torch.float32)]
SMOKE: Size = (4, 1, 21, 3)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
START_OF_WORK = re.compile(r"cu(da)?(LaunchKernel|GraphLaunch|Memcpy.*Async|Memset.*Async)")


@dataclass
class Bench:
    """Device, time limit, and the rows measured so far."""

    device: torch.device
    path: Path | None
    end: float
    seconds: float
    results: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        return self.end - time.monotonic()

    def has(self, seconds: float, what: str) -> bool:
        if self.left() >= seconds:
            return True
        self.leave_out(f"{what}: want of time")
        return False

    def fits(self, byte_count: float, what: str) -> bool:
        if not self.on_gpu or torch.cuda.mem_get_info()[0] > byte_count:
            return True
        self.leave_out(f"{what}: want of memory")
        return False

    def leave_out(self, what: str) -> None:
        print(f"left out: {what}", flush=True)
        self.left_out.append(what)

    def write(self) -> None:
        harness.write(self.path, "gpu", self.results, left_out=self.left_out)


# ---- Calls ----------------------------------------------------------------------------------------------------------


def sets_of(bench: Bench, moved: float) -> int:
    """Number of copies of the inputs to rotate for calls that move this many bytes."""
    cache = torch.cuda.get_device_properties().L2_cache_size if bench.on_gpu else 0
    return max(1, min(12, math.ceil(3 * cache / moved)))


def rotated(calls: Sequence[Call]) -> Call:
    following = itertools.cycle(calls)
    return calls[0] if len(calls) == 1 else lambda: next(following)()


def captured(call: Call) -> Call:
    """Capture a call in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay(result: object = result) -> None:  # keeps the graph's outputs alive
        graph.replay()

    return replay


def step_begins(call: Call) -> Call:
    """Tell compiler modes that use CUDA graphs that the last step's results may be overwritten."""

    def run() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return run


def device_copy(bench: Bench, byte_count: float, sets: int) -> Call:
    elements = max(1, int(byte_count) // 2)
    make = lambda: torch.empty(elements, dtype=torch.uint8, device=bench.device)
    pairs = [(make().fill_(1), make()) for _ in range(sets)]
    return rotated([functools.partial(to.copy_, source) for source, to in pairs])


# ---- Rows -----------------------------------------------------------------------------------------------------------


def launches_of(call: Call) -> dict[str, int]:
    """Count the launches of a call, and the kernels, copies and fills that the GPU ran for it."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = profile.events() or []
    on_gpu = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA and "Sync" not in e.name]
    return {"launches": sum(bool(START_OF_WORK.match(e.name)) for e in events), "kernels": len(on_gpu)}


def peak_mb(call: Call) -> float:
    """Peak memory of a call above the memory held before it."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(bench: Bench, label: dict[str, Any], calls: dict[str, Call], moved: float, ours: str) -> None:
    """Print and keep one row for each contestant."""
    timed = harness.gpu_time if bench.on_gpu else harness.wall_time
    statistics = harness.measure(calls, bench.seconds, timed, turn=2e-3)
    copied = statistics.get("device copy", {}).get("median_ms")
    for name, values in statistics.items():
        row = {
            **label,
            "contestant": name,
            **values,
            "ratio": values["median_ms"] / statistics[ours]["median_ms"],
            "gb_per_s": moved / values["median_ms"] / 1e6,
        }
        if copied is not None:
            row["copy_ratio"] = copied / values["median_ms"]
        if bench.on_gpu:
            row.update(launches_of(calls[name]))
            if "graph" not in name and "reduce" not in name and "max-" not in name:
                row["peak_mb"] = peak_mb(calls[name])
        show(row)
        bench.results.append(row)


def show(row: dict[str, Any]) -> None:
    label = "  ".join(str(row[key]) for key in ("group", "size", "dtype", "pass", "inputs") if key in row)
    numbers = f"{row['median_ms']:>10.4f} ms  p20 {row['p20_ms']:>9.4f}  p80 {row['p80_ms']:>9.4f}"
    rates = (
        f"{row['ratio']:>7.2f}x  {row['gb_per_s']:>8.1f} GB/s  {100 * row.get('copy_ratio', math.nan):>5.1f} % of copy"
    )
    counts = f"{row.get('launches', '-'):>4} launches  {row.get('kernels', '-'):>4} kernels"
    print(f"{label:<62} {row['contestant']:<30} {numbers}  {rates}  {counts}", flush=True)


def forget() -> None:
    """Release the compiled code, graphs and memory of a group."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- The loss -------------------------------------------------------------------------------------------------------


def make_inputs(bench: Bench, size: Size, dtype: torch.dtype, seed: int) -> losses.Inputs:
    """Inputs like those of losses.make_inputs(), generated on the device."""
    batch, unroll_steps, num_bins, actions = size
    generator = torch.Generator(bench.device).manual_seed(seed)
    steps = range(unroll_steps + 1)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=bench.device)
    predictions = {
        name: [normal(batch, width).to(dtype).requires_grad_() for _ in steps]
        for name, width in (("value", num_bins), ("reward", num_bins), ("policy", actions))
    }
    targets = {
        "value": [30 * normal(batch) for _ in steps],
        "reward": [normal(batch) for _ in steps],
        "policy": [normal(batch, actions).softmax(1) for _ in steps],
    }
    return predictions, targets, torch.rand(batch, generator=generator, device=bench.device)


def bytes_of(entries: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in losses.leaves_of(entries))


def both_passes(function: losses.Loss, inputs: losses.Inputs) -> Call:
    leaves = losses.leaves_of(inputs[0])
    return lambda: torch.autograd.grad(function(*inputs), leaves)


def forward_pass(function: losses.Loss, inputs: losses.Inputs) -> Call:
    def run() -> object:
        with torch.no_grad():
            return function(*inputs)

    return run


PASSES = {"forward": forward_pass, "forward+backward": both_passes}


def loss_group(
    bench: Bench,
    size: Size,
    dtype: torch.dtype,
    modes: Sequence[str] = (),
    passes: Sequence[str] = ("forward+backward",),
    eager: bool = True,
    warm: bool = False,
) -> None:
    """Measure our loss, the usual loss in eager mode (if `eager`), and the usual loss compiled in each of `modes`.

    `warm` adds the rows of "one set".
    """
    name = "B {} K {} S {} A {}".format(*size)
    forget()
    first = make_inputs(bench, size, dtype, 0)
    logits, targets = bytes_of(first[0]), bytes_of(first[1])
    sets = [first, *(make_inputs(bench, size, dtype, seed) for seed in range(1, sets_of(bench, 2 * logits + targets)))]
    fused = losses.make_fused(size[2])
    functions: dict[str, losses.Loss] = {"fused": fused}
    if eager:
        functions["eager"] = losses.usual_loss
    for mode in modes:
        own = "torch.compile" if mode == "default" else f"torch.compile {mode}"
        functions[own] = torch.compile(losses.usual_loss, dynamic=False, mode=mode)
    for wanted in passes:
        start = PASSES[wanted]
        if wanted == "forward+backward":
            losses.check_same({n: f for n, f in functions.items() if "-" not in n}, first)
        moved = targets + (logits if wanted == "forward" else 2 * logits)
        label = {"group": "loss", "size": name, "dtype": NAMES[dtype], "pass": wanted}
        for chosen in (sets, sets[:1]) if warm and len(sets) > 1 else (sets,):
            calls: dict[str, Call] = {}
            for contestant, function in functions.items():
                replays = "reduce-overhead" in contestant or "max-autotune" in contestant
                own_calls = [start(function, inputs) for inputs in chosen]
                calls[contestant] = rotated([step_begins(call) for call in own_calls] if replays else own_calls)
                if bench.on_gpu and not replays:
                    calls[f"{contestant}, CUDA graph"] = rotated([captured(call) for call in own_calls])
            calls["device copy"] = device_copy(bench, moved, len(chosen))
            inputs_label = "one set" if len(chosen) == 1 else f"{len(chosen)} sets"
            measure(bench, {**label, "inputs": inputs_label}, calls, moved, "fused")


# ---- Decoding -------------------------------------------------------------------------------------------------------


def decode_group(bench: Bench, batches: Sequence[int]) -> None:
    forget()
    support = gs.Support.muzero()
    bins = support.centers().to(bench.device)

    def chain(logits: torch.Tensor) -> torch.Tensor:
        return usual.inverse_h((torch.softmax(logits, 1) * bins).sum(1, keepdim=True))

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"fused": support.decode, "eager": chain}
    if bench.has(30, "torch.compile of decoding"):
        functions["torch.compile"] = torch.compile(chain, dynamic=False)
    for batch in batches:
        moved = batch * 602 * 4
        make = lambda batch=batch: 2 * torch.randn(batch, 601, device=bench.device)
        sets = [make() for _ in range(sets_of(bench, moved))]
        torch.testing.assert_close(support.decode(sets[0]), chain(sets[0])[:, 0], rtol=2e-3, atol=2e-3)
        with torch.no_grad():
            calls: dict[str, Call] = {}
            for contestant, function in functions.items():
                own_calls = [functools.partial(function, logits) for logits in sets]
                calls[contestant] = rotated(own_calls)
                if bench.on_gpu:
                    calls[f"{contestant}, CUDA graph"] = rotated([captured(call) for call in own_calls])
            calls["device copy"] = device_copy(bench, moved, len(sets))
            label = {"group": "decode", "size": f"B {batch} S 601", "dtype": "fp32", "pass": "decode"}
            measure(bench, {**label, "inputs": f"{len(sets)} sets"}, calls, moved, "fused")


# ---- Gradient flow --------------------------------------------------------------------------------------------------


def multiplied_in_place(x: torch.Tensor) -> torch.Tensor:
    return _MultipliedInPlace.apply(x)  # type: ignore[no-any-return]


class _MultipliedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient.mul_(0.5)


def flow_group(bench: Bench, operator: str, shapes: dict[str, tuple[int, ...]], compiler: bool) -> None:
    for size, shape in shapes.items():
        forget()
        elements = math.prod(shape)
        if not bench.fits(4 * 8 * elements, f"{operator} of {size}"):
            continue
        moved = 4 * elements * (5 if "norm" in operator else 4)
        ways = {name: way for name, way in flow.ways(operator).items() if compiler or "torch.compile" not in name}
        if operator == "scale_gradient":
            ways["view_as, multiply in place"] = multiplied_in_place

        def start(way: flow.Change, x: torch.Tensor, incoming: torch.Tensor) -> Call:
            return lambda: torch.autograd.grad(way(x).neg(), x, incoming)

        def make(shape: tuple[int, ...] = shape) -> tuple[torch.Tensor, torch.Tensor]:
            # A leaf: CUDA graphs cannot capture a gradient for a tensor that another stream has computed.
            leaf = torch.randn(shape, device=bench.device, requires_grad=True)
            return leaf, torch.randn(shape, device=bench.device)

        sets = [make() for _ in range(sets_of(bench, moved))]
        calls: dict[str, Call] = {}
        for contestant, way in ways.items():
            own_calls = [start(way, x, incoming) for x, incoming in sets]
            calls[contestant] = rotated(own_calls)
            if bench.on_gpu and contestant in (operator, "autograd.Function", "view_as, multiply in place"):
                calls[f"{contestant}, CUDA graph"] = rotated([captured(call) for call in own_calls])
        calls["device copy"] = device_copy(bench, moved, len(sets))
        label = {"group": operator, "size": size, "dtype": "fp32", "pass": "forward+backward"}
        measure(bench, {**label, "inputs": f"{len(sets)} sets"}, calls, moved, operator)


# ---- l2_loss --------------------------------------------------------------------------------------------------------


def l2_group(bench: Bench, count: int, width: int) -> None:
    """Measure l2_loss of `count` weights and biases, with the shapes of residual blocks."""
    forget()
    shapes = [(width, width, 3, 3) if i % 3 == 0 else (width,) for i in range(count)]
    parameters = [torch.randn(shape, device=bench.device).requires_grad_() for shape in shapes]
    elements = sum(p.numel() for p in parameters)

    def eager() -> torch.Tensor:
        return 0.5e-4 * torch.stack([p.square().sum() for p in parameters]).sum()

    def foreach() -> torch.Tensor:
        return 0.5e-4 * torch.stack(torch._foreach_norm(parameters)).square().sum()

    functions: dict[str, Callable[[], torch.Tensor]] = {
        "fused": lambda: gs.l2_loss(parameters, 1e-4),
        "eager": eager,
        "torch._foreach_norm": foreach,
    }
    for function in functions.values():
        torch.testing.assert_close(function(), eager(), rtol=1e-4, atol=0)
    calls: dict[str, Call] = {}
    for contestant, function in functions.items():
        calls[contestant] = lambda f=function: torch.autograd.grad(f(), parameters)
        if bench.on_gpu:
            calls[f"{contestant}, CUDA graph"] = captured(calls[contestant])
    moved = 3 * 4 * elements
    calls["device copy"] = device_copy(bench, moved, 1)
    label = {"group": "l2_loss", "size": f"{count} tensors, {4e-6 * elements:.0f} MB", "dtype": "fp32"}
    measure(bench, {**label, "pass": "forward+backward", "inputs": "one set"}, calls, moved, "fused")


# ---- Statistics and clipping -----------------------------------------------------------------------------------------


def statistics_group(bench: Bench, count: int, width: int) -> None:
    """Measure the statistics of `count` gradients, and clipping all gradients to half of their norm.

    After the first call of a clipping, its factor is just below 1, so later calls multiply the gradients too.
    """
    forget()
    parameters = [torch.empty(width, device=bench.device) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(width, device=bench.device)
    gradients = [parameter.grad for parameter in parameters]
    statistics: dict[str, Call] = {
        "fused": lambda: gs.gradient_statistics(gradients),
        "torch._foreach_norm": lambda: torch._foreach_norm(gradients),
    }
    norm = float(gs.gradient_statistics(gradients).total_norm)
    torch.testing.assert_close(norm, torch.stack(torch._foreach_norm(gradients)).norm().item(), rtol=1e-4, atol=0)
    clipping: dict[str, Call] = {
        "fused": lambda: gs.clip_gradients_(parameters, 0.5 * norm),
        "torch.nn.utils.clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parameters, 0.5 * norm),
    }
    moved = 4 * count * width
    label = {"group": "statistics", "size": f"{count} x {width}", "dtype": "fp32", "inputs": "one set"}
    for what, calls, passes in (("statistics", statistics, 1), ("clipping", clipping, 3)):
        if bench.on_gpu:
            calls |= {f"{contestant}, CUDA graph": captured(call) for contestant, call in list(calls.items())}
        calls["device copy"] = device_copy(bench, passes * moved, 1)
        measure(bench, {**label, "pass": what}, calls, passes * moved, "fused")


# ---- Whole learner steps ---------------------------------------------------------------------------------------------


def by_tensordict(step: Callable[..., object], batch: tuple[torch.Tensor, ...]) -> Call | None:
    """The step in tensordict's CudaGraphModule; None where it is not installed."""
    try:
        from tensordict.nn import CudaGraphModule
    except ImportError:
        return None
    module = CudaGraphModule(step, warmup=5)
    for _ in range(8):
        module(*batch)
    return lambda: module(*batch)


def step_group(bench: Bench, name: str, make: Callable[[], steps.Pair], compiler: bool) -> None:
    """Time a learner step. Each contestant has networks and an optimizer of its own."""
    calls: dict[str, Call] = {}

    def add(contestant: str, prepare: Callable[[], Call | None]) -> None:
        """Keep the other contestants if one of them cannot run."""
        try:
            if (call := prepare()) is not None:
                call()
                calls[contestant] = call
        except Exception as error:
            print(f"{name}: {contestant} cannot run: {type(error).__name__}: {str(error)[:300]}", flush=True)

    def plain(step: Callable[..., object], batch: tuple[torch.Tensor, ...]) -> Call:
        return lambda: step(*batch)

    def pair_with_compiled_networks(mode: str) -> steps.Pair:
        pair = make()
        for network in pair.networks.values():
            for function in ("initial", "recurrent", "encode", "next"):
                if hasattr(network, function):
                    setattr(network, function, torch.compile(getattr(network, function), mode=mode))
        return pair

    def captured_step(pair: steps.Pair) -> Call:
        update = gs.CapturedStep(pair.ours, *pair.states["ours"])
        for _ in range(8):
            update(*pair.batch)
        return plain(update, pair.batch)

    make().check()
    for kind in ("usual", "ours"):
        add(f"{kind}, eager", lambda kind=kind: plain(getattr(pair := make(), kind), pair.batch))
        if compiler:
            for mode in ("default", "reduce-overhead"):
                of_mode = functools.partial(pair_with_compiled_networks, mode)
                add(
                    f"{kind}, networks compiled ({mode})",
                    lambda kind=kind, of_mode=of_mode: step_begins(plain(getattr(pair := of_mode(), kind), pair.batch)),
                )
        if bench.on_gpu:
            by_hand = lambda kind=kind: captured(plain(getattr(pair := make(), kind), pair.batch))
            add(f"{kind}, captured by hand (CUDA graph)", by_hand)
    if bench.on_gpu:
        add("ours, CudaGraphModule of tensordict", lambda: by_tensordict((pair := make()).ours, pair.batch))
    add("CapturedStep", lambda: captured_step(make()))
    measure(bench, {"group": "step", "size": name, "pass": "whole step", "inputs": "one set"}, calls, 0, "CapturedStep")
    forget()


# ---- All ------------------------------------------------------------------------------------------------------------


# ---- Returns and single heads ---------------------------------------------------------------------------------------


def pieces_group(bench: Bench, group: str, what: str, make: Callable[[], Iterable[pieces.Piece]]) -> None:
    """Measure calls that are no losses of agents."""
    forget()
    for piece in make():
        calls = {"fused": piece.ours, **piece.others}
        if bench.on_gpu:
            for name, call in list(calls.items()):
                try:
                    calls[f"{name}, CUDA graph"] = captured(call)
                except Exception as error:  # some of the others cannot be captured
                    if name == "fused":
                        raise
                    bench.leave_out(f"{piece.size}, {name}, CUDA graph: {type(error).__name__}")
        calls["device copy"] = device_copy(bench, piece.moved, 1)
        label = {"group": group, "size": piece.size, "dtype": "fp32", "pass": what, "inputs": "one set"}
        measure(bench, label, calls, piece.moved, "fused")


def advantages_of(bench: Bench, sizes: Iterable[tuple[int, int]]) -> Iterator[pieces.Piece]:
    """Advantages in both orders of dimensions."""
    for (batch, length), batch_first in itertools.product(sizes, (True, False)):
        if bench.fits(60 * batch * length, f"GAE {batch} x {length}"):
            yield pieces.advantages(batch, length, bench.device, batch_first)


def copies(bench: Bench, sizes: Sequence[int]) -> None:
    """Measure the best bandwidth of this GPU's memory."""
    for size in sizes:
        if bench.fits(2 * size, f"copy of {size / 1e6:.0f} MB"):
            sets = sets_of(bench, size)
            label = {"group": "copy", "size": f"{size / 1e6:.0f} MB", "pass": "read+write", "inputs": f"{sets} sets"}
            measure(bench, label, {"device copy": device_copy(bench, size, sets)}, size, "device copy")
    forget()


def groups(bench: Bench) -> Iterator[tuple[str, float, Callable[[], None]]]:
    """Groups in order of importance: name, seconds that must be left to start the group, and function."""
    main, large = functools.partial(loss_group, bench), functools.partial(loss_group, bench)
    modes = ("default", "reduce-overhead", "max-autotune")
    yield "copies", 5, lambda: copies(bench, [16 * 10**6, 256 * 10**6, 10**9, 4 * 10**9])
    for name, make in steps.pairs(bench.device).items():
        yield f"step: {name}", 20, functools.partial(step_group, bench, name, make, compiler=False)
    for size in MAIN:
        yield f"loss {size}", 45, functools.partial(main, size, torch.float32, modes, warm=True)
    returns = functools.partial(pieces_group, bench, "returns", "forward")
    yield "returns, advantages", 20, lambda: returns(lambda: advantages_of(bench, pieces.SIZES))
    yield "returns, others", 8, lambda: returns(lambda: pieces.other_returns(1024, 128, bench.device))
    for count, width in ((1000, 1000), (10, 10**8)):
        yield f"statistics, {count} x {width}", 5, functools.partial(statistics_group, bench, count, width)
    own = functools.partial(pieces_group, bench, "heads", "forward+backward")
    yield "heads", 6, lambda: own(lambda: pieces.heads(1024, bench.device))
    yield "policies", 15, lambda: own(lambda: policy_losses.losses(32768, bench.device))
    for size, dtype in [*LARGE, *LARGEST]:
        eager = (size, dtype) not in LARGEST
        yield f"loss {size} {dtype}", 8, functools.partial(large, size, dtype, eager=eager)
    yield (
        "flow",
        8,
        lambda: flow_group(bench, "scale_gradient", {"64 MB": (1024, 16384), "1 GB": (16384, 16384)}, compiler=False),
    )
    shapes = {"9.4 MB": (1024, 64, 6, 6), "1 GB": (16384, 16384)}
    yield "flow, norms", 8, lambda: flow_group(bench, "clip_gradient_norm", shapes, compiler=bench.left() > 60)
    yield "l2_loss", 6, lambda: l2_group(bench, 300, 192)
    yield "decode", 8, lambda: decode_group(bench, (1, 32, 1024, 262144))
    for size in MAIN:
        yield f"loss {size} without gradient", 6, functools.partial(main, size, torch.float32, (), ("forward",))
    for size in MAIN:
        yield f"loss {size} bf16", 30, functools.partial(main, size, torch.bfloat16, ("default",))
    for size in OTHERS:
        with_modes = modes[:2] if bench.left() > 45 else modes[:1] if bench.left() > 25 else ()
        yield f"loss {size}", 4, functools.partial(main, size, torch.float32, with_modes)
    for size in MAIN:
        compiled = functools.partial(main, size, torch.float32, ("default",), ("forward",))
        yield f"loss {size} without gradient, torch.compile", 25, compiled
    for name, make in steps.pairs(bench.device).items():
        yield f"step: {name}, torch.compile", 90, functools.partial(step_group, bench, name, make, compiler=True)
    for size, dtype in LARGE[:2]:
        yield f"loss {size} {dtype}, torch.compile", 30, functools.partial(large, size, dtype, ("default",))


def smoke_groups(bench: Bench) -> Iterator[tuple[str, float, Callable[[], None]]]:
    yield "copies", 0, lambda: copies(bench, [1000])
    modes = ("default", "reduce-overhead", "max-autotune")
    yield "loss", 0, lambda: loss_group(bench, SMOKE, torch.float32, modes, tuple(PASSES), warm=True)
    yield "loss bf16", 0, lambda: loss_group(bench, SMOKE, torch.bfloat16)
    yield "loss alone", 0, lambda: loss_group(bench, SMOKE, torch.float32, eager=False)
    yield "flow", 0, lambda: flow_group(bench, "scale_gradient", {"1 KB": (4, 64)}, compiler=False)
    yield "flow, norms", 0, lambda: flow_group(bench, "clip_gradient_norm", {"1 KB": (4, 64)}, compiler=True)
    yield "l2_loss", 0, lambda: l2_group(bench, 7, 3)
    yield "decode", 0, lambda: decode_group(bench, (1, 3))
    yield "statistics", 0, lambda: statistics_group(bench, 7, 3)
    returns = functools.partial(pieces_group, bench, "returns", "forward")
    yield "returns, advantages", 0, lambda: returns(lambda: advantages_of(bench, [(3, 5), (1, 300)]))
    yield "returns, others", 0, lambda: returns(lambda: pieces.other_returns(3, 20, bench.device))
    yield "heads", 0, lambda: pieces_group(bench, "heads", "forward+backward", lambda: pieces.heads(3, bench.device))
    own = functools.partial(pieces_group, bench, "policies", "forward+backward")
    yield "policies", 0, lambda: own(lambda: policy_losses.losses(40, bench.device))
    for name, make in steps.pairs(bench.device, batch_size=2).items():
        yield f"step: {name}", 0, functools.partial(step_group, bench, name, make, compiler=False)


def bytes_needed(name: str) -> float:
    """Memory of a loss: about 25 times its logits in eager mode, seven times for ours alone."""
    found = re.search(r"\((\d+), (\d+), (\d+), (\d+)\)", name)
    if found is None:
        return 0.0
    batch, unroll_steps, num_bins, actions = map(int, found.groups())
    logits = 4.0 * batch * (unroll_steps + 1) * (2 * num_bins + actions)
    return logits * (7 if str(LARGEST[0][0]) in name else 25)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=harness.user_path, metavar="FOLDER", help="also write the results there")
    parser.add_argument("--minutes", type=float, default=3.4, help="time for everything")
    parser.add_argument("--seconds", type=float, default=0.6, help="time spent on each row of contestants")
    parser.add_argument("--cpu-smoke", action="store_true", help="run everything on tiny sizes of the CPU")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the groups whose names contain this text")
    parser.add_argument("--define", metavar="MACRO", help="compile the kernels with this macro, by NVRTC")
    options = parser.parse_args()
    if not options.cpu_smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; --cpu-smoke runs the same code without one")
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    if options.define:
        _kernels.OPTIONS = (*_kernels.OPTIONS, f"-D{options.define}")  # images have other names in the cache then
    path = None
    if device.type == "cuda":
        os.environ.setdefault("TEARDOWN_CUPTI", "1")  # a profiler that keeps running slows all later launches
        torch.cuda.init()
        torch._dynamo.config.recompile_limit = 64
    if options.results is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu smoke"
        name = f"{name} {options.define}" if options.define else name
        path = options.results / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    seconds = 0.01 if options.cpu_smoke else options.seconds
    bench = Bench(device, path, time.monotonic() + 60 * options.minutes, seconds)
    harness.show_machine()
    failed = []
    for name, least, group in smoke_groups(bench) if options.cpu_smoke else groups(bench):
        if options.only not in name:
            continue
        if not bench.has(least, name) or not bench.fits(bytes_needed(name), name):
            continue
        begun = time.monotonic()
        try:
            group()
        except Exception as error:  # the other groups are still worth measuring
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        print(f"{name}: {time.monotonic() - begun:.1f} s, {bench.left():.0f} s left", flush=True)
        bench.write()
    bench.write()
    if failed:
        print(f"groups that failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
