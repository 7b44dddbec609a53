"""Benchmark tools: timing of several contestants in one run, peak memory, tables and JSON."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import gradscale_ext

RESULTS = Path(__file__).parent / "results"
TURN = 100e-6  # seconds
Contestants = dict[str, Callable[[], object]]


def user_path(path: str) -> Path:
    """A path on the command line. Shells do not expand the "~" of --json=~/file."""
    return Path(path).expanduser()


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=user_path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each row of contestants")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    return parsed


def gpu() -> dict[str, str]:
    """Name and software of the current GPU; empty if this process has not used one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    properties = torch.cuda.get_device_properties()
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", driver.read_text()) if driver.exists() else None
    return {
        "gpu": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "L2 cache": f"{properties.L2_cache_size / 2**20:.0f} MB",
        "memory": f"{properties.total_memory / 2**30:.0f} GB",
        "driver": found[0] if found else _nvidia_smi_driver(),
        "cuda": str(torch.version.cuda),
    }


def _nvidia_smi_driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def machine() -> dict[str, str]:
    """Hardware and software behind the figures."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = dict(re.findall(r"^(model name|model|cpu family)\s*: (.*)$", information.read_text(), re.M))
        cpu = f"{found.get('model name', cpu)} (family {found.get('cpu family')}, model {found.get('model')})"
    return {
        **gpu(),
        "cpu": cpu,
        "cores": str(torch.multiprocessing.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "gradscale_ext": gradscale_ext.__version__,
    }


def wall_time(function: Callable[[], object], repeats: int) -> float:
    """Seconds for this many calls on the CPU."""
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return time.perf_counter() - start


def gpu_time(function: Callable[[], object], repeats: int) -> float:
    """Seconds from the start of the first call to the end of the last one on the GPU.

    They include waiting for the CPU if it launches more slowly than the GPU works.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(
    contestants: Contestants,
    seconds: float,
    timed: Callable[[Callable[[], object], int], float] = wall_time,
    turn: float = TURN,
) -> dict[str, dict[str, float]]:
    """Median, 20th and 80th percentile of the times that `turns` measures, in ms."""
    return {name: summary(values) for name, values in turns(contestants, seconds, timed, turn).items()}


def turns(
    contestants: Contestants,
    seconds: float,
    timed: Callable[[Callable[[], object], int], float] = wall_time,
    turn: float = TURN,
) -> dict[str, list[float]]:
    """Seconds per call, for each turn. Contestants take turns, so that a slow phase of the machine affects all of them.

    A turn has as many calls as take `turn` seconds, at most 100, so that caches left cold by other contestants hardly
    matter.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    repeats = {name: _calls_in(turn, function, timed) for name, function in contestants.items()}
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    rounds = 0
    shuffled = random.Random(0)
    while (time.perf_counter() < end or rounds < 5) and rounds < 3000:
        # The order changes every time, because a contestant that follows one that fills the caches starts cold.
        for name in shuffled.sample(list(contestants), len(contestants)):
            times[name].append(timed(contestants[name], repeats[name]) / repeats[name])
        rounds += 1
    gc.enable()
    return times


def _calls_in(
    seconds: float, function: Callable[[], object], timed: Callable[[Callable[[], object], int], float]
) -> int:
    """Number of calls, 1 to 100, that take about this long; the contestant is warm afterwards."""
    fastest = min(timed(function, 1) for _ in range(5))
    return max(1, min(100, round(seconds / fastest)))


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    pick = lambda quantile: 1e3 * ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]
    return {"median_ms": pick(0.5), "p20_ms": pick(0.2), "p80_ms": pick(0.8), "runs": len(ordered)}


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silence file descriptor 2, because the profiler's C++ library writes to it directly."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """Peak bytes of PyTorch's CPU allocator during a call, above the bytes held before it."""
    function()
    gc.collect()
    with _quiet_stderr(), torch.profiler.profile(profile_memory=True) as profile:
        function()
    held = peak = 0
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def rows(
    label: dict[str, Any],
    contestants: Contestants,
    seconds: float,
    moved_bytes: float,
    ours: str,
    turn: float = TURN,
) -> list[dict[str, Any]]:
    """One row per contestant: times, ratio to ours, GB/s of the bytes that must move, peak memory."""
    statistics = measure(contestants, seconds, turn=turn)
    return [
        {
            **label,
            "contestant": name,
            **values,
            "ratio": values["median_ms"] / statistics[ours]["median_ms"],
            "gb_per_s": moved_bytes / values["median_ms"] / 1e6,
            "peak_mb": peak_extra_bytes(contestants[name]) / 2**20,
        }
        for name, values in statistics.items()
    ]


def show_machine() -> None:
    print("  ".join(f"{key}: {value}" for key, value in machine().items()), flush=True)


def show(row: dict[str, Any]) -> None:
    label = "  ".join(str(value) for key, value in row.items() if key in ("operator", "size", "pass"))
    over_copy = f"  {row['over_copy']:>6.2f} copies" if "over_copy" in row else ""
    print(
        f"{label:<44} {row['contestant']:<28} {row['median_ms']:>9.4f} ms  p20 {row['p20_ms']:>9.4f}  "
        f"p80 {row['p80_ms']:>9.4f}  {row['ratio']:>6.2f}x  {row['gb_per_s']:>7.2f} GB/s  {row['peak_mb']:>8.2f} MB"
        f"{over_copy}",
        flush=True,
    )


def write(path: Path | None, name: str, results: list[dict[str, Any]], **more: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"benchmark": name, "machine": machine(), "rows": results, **more}, indent=1) + "\n")
        print(f"written to {path}")
