"""`make gpu`: build, compile the kernels for the local GPU, test, run compute-sanitizer, measure.

    python tests/gpu/run.py --results bench/results --minutes 9

Needs Python with a CUDA build of PyTorch and NVRTC (included by pip) or nvcc, a C++ compiler, pytest, hypothesis and
ninja; no network, no other package. Every step has a time limit, and part of the time is reserved for the benchmarks.
The exit status is 1 if a step failed or timed out; the other steps still run, and all measurements are written.

Some choices in the kernels can only be decided by measuring variants on a GPU:

- polls of earlier chunks (csrc/returns/cuda/long_rows.cuh): measured here with GRADSCALE_RELAXED_POLLS, in a process of
  its own, for advantages of few long rows; the results are in build/gpu;
- warps per multiprocessor among which rows are divided (csrc/cuda/row_shape.h): build with another number,
  `CFLAGS="-O1 -g0 -DGRADSCALE_WARPS=32" make gpu`, and compare the groups "loss" and "decode";
- lanes for each width of rows: change the tables kLanesOfBins and kLanesOfActions in csrc/cuda/row_shape.cpp, build,
  and compare "loss" and "decode"; kernels compile for any number of lanes that divides 32;
- wide rows as a launch of their own: csrc/loss/cuda/launch_loss.cpp gives all rows of a call to one launch, whose
  number of registers is the largest of its kinds of rows. With WideRows in a second launch, rows of lanes and of thread
  groups would have more warps. It needs a second list of row ranges, and a second grid.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "gpu"
#: Seconds reserved for the benchmarks, and for the remaining work after them.
BENCHMARKS, ENDING = 255.0, 8.0
#: Seconds for each variant of the kernels, out of the time for the benchmarks, and the variants: a macro, and the group
#: of bench/gpu.py that shows its effect.
VARIANT = 40.0
VARIANTS = {"GRADSCALE_RELAXED_POLLS": "returns, advantages"}
#: The tests that are most relevant to a GPU, besides test_cuda.py, test_cuda_rows.py and tests/gpu; longest first.
ORDINARY = {
    "test_loss_contexts": [],
    "test_flow_nonlinear": [],
    "test_flow": [],
    "test_returns": [],
    "test_loss": [],
    "test_matrix": ["-k", "CUDA"],
    "test_support": [],
    "test_context": [],
    "test_tensors": [],
    "test_transforms": [],
    "test_unroll": [],
    "test_package": [],
}
SANITIZERS = ("memcheck", "racecheck", "initcheck")
NO_TESTS = 5  # pytest's exit status


@dataclass
class Step:
    name: str
    command: list[str]
    limit: float
    log: Path | None = None
    """File for the output, which is shown otherwise."""
    status: int | None = None
    """Exit status; None if the step did not end within its limit."""
    seconds: float = 0.0
    words: str = ""
    """Words reported in place of the exit status."""

    def failed(self) -> bool:
        return not self.words and self.status not in (0, NO_TESTS if "pytest" in self.command else 0)

    def outcome(self) -> str:
        if self.words:
            return self.words
        return f"did not end in {self.limit:.0f} s" if self.status is None else f"exit status {self.status}"


def environment(**more: str) -> dict[str, str]:
    """Environment of all steps: this checkout takes precedence over an installed package, and there is no network."""
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "GRADSCALE_NEED_GPU": "1",
        "GRADSCALE_CACHE_DIR": str(LOGS / "kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(LOGS / "inductor"),
        "TRITON_CACHE_DIR": str(LOGS / "triton"),
    }
    return {**os.environ, **own, **more}


def run(step: Step, **more: str) -> Step:
    """Run a step; on a timeout it is interrupted, and killed if it continues."""
    start = time.monotonic()
    if step.limit <= 0:
        step.words = ""
        step.limit = 0
        return step
    with open(os.devnull) if step.log is None else open(step.log, "w") as log:
        output = None if step.log is None else log
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )
        for wait, kill in ((step.limit, signal.SIGINT), (5.0, signal.SIGKILL)):
            try:
                status = process.wait(wait)
                step.status = status if kill == signal.SIGINT else None
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, kill)
        process.wait()
    step.seconds = time.monotonic() - start
    return step


def show(step: Step) -> None:
    print(f"---- {step.name}: {step.outcome()}, {step.seconds:.0f} s", flush=True)
    if step.log is not None and step.log.exists():
        lines = step.log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-(50 if step.failed() else 2) :]), flush=True)


def find_sanitizer() -> str | None:
    """compute-sanitizer next to nvcc, on PATH or in the usual folders."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    homes += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    homes += ["/usr/local/cuda", "/opt/cuda"]
    folders = [os.path.join(home, part) for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def sanitize(tool: str, sanitizer: str, limit: float) -> Step:
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99", sys.executable, "tests/gpu/small.py"]
    step = Step(f"compute-sanitizer {tool}", command, limit, LOGS / f"{tool}.log")
    # Without PyTorch's caching allocator every tensor is a separate allocation with known bounds.
    run(step, PYTORCH_NO_CUDA_MEMORY_CACHING="1", OMP_NUM_THREADS="1")
    if step.status != 0 and step.log is not None and "Device not supported" in step.log.read_text(errors="replace"):
        step.words = "not run: compute-sanitizer says that the device is not supported here"
    return step


def ordinary(name: str, options: list[str], limit: float) -> Step:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/{name}.py", *options]
    return run(Step(name, command, limit, LOGS / f"{name}.log"), OMP_NUM_THREADS="2")


def beside_each_other(limit: float) -> list[Step]:
    """Run the sanitizers and the ordinary tests at the same time, because none of them measures anything."""
    sanitizer = find_sanitizer()
    end = time.monotonic() + limit
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max_workers=max(4, min(14, cores - 2))) as pool:
        left = lambda: end - time.monotonic()
        running = []
        if sanitizer is not None:
            running += [pool.submit(lambda t=tool: sanitize(t, sanitizer, left())) for tool in SANITIZERS]
        running += [pool.submit(lambda n=n, o=o: ordinary(n, o, left())) for n, o in ORDINARY.items()]
        steps = [future.result() for future in running]
    if sanitizer is None:
        words = "not run: no compute-sanitizer next to nvcc, on PATH or in /usr/local/cuda"
        steps.insert(0, Step("compute-sanitizer", [], 0, words=words))
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything")
    options = parser.parse_args()
    results = options.results.resolve()
    end = time.monotonic() + 60 * options.minutes - ENDING
    before_benchmarks = lambda: end - BENCHMARKS - time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    python = sys.executable
    done: list[Step] = []

    def step(name: str, limit: float, *command: str, log: str | None = None, **more: str) -> Step:
        print(f"==== {name} (at most {limit:.0f} s)", flush=True)
        done.append(run(Step(name, [python, *command], limit, LOGS / log if log else None), **more))
        show(done[-1])
        return done[-1]

    # Half of the time of -O3. The kernels of the GPU are compiled apart from it, and the CPU kernels are not measured.
    flags = {"CFLAGS": os.environ.get("CFLAGS", "-O1 -g0")}
    build = step("build", min(240, before_benchmarks()), "setup.py", "build_ext", "--inplace", log="build.log", **flags)
    if not build.failed():
        step("kernels", min(60, before_benchmarks()), "-m", "gradscale_ext", "compile", log="kernels.log")
        step("environment report", min(60, before_benchmarks()), "-m", "gradscale_ext")
        pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-ra", "--durations=5"]
        own_tests = ("tests/test_cuda.py", "tests/test_cuda_rows.py", "tests/gpu")
        step("tests of the GPU", min(200, before_benchmarks()), *pytest, *own_tests)
        print(f"==== compute-sanitizer and ordinary tests (at most {before_benchmarks():.0f} s)", flush=True)
        for own in beside_each_other(before_benchmarks()):
            show(own)
            done.append(own)
        measure = lambda name, seconds, folder, *more: step(
            name, seconds, "bench/gpu.py", "--results", str(folder), "--minutes", f"{(seconds - 12) / 60:.2f}", *more
        )
        measure("benchmarks", end - len(VARIANTS) * VARIANT - time.monotonic(), results)
        for macro, group in VARIANTS.items():
            measure(f"variant {macro}", end - time.monotonic(), LOGS, "--define", macro, "--only", group)
    failed = [own for own in done if own.failed()]
    print("\n" + "\n".join(f"{'FAILED' if own in failed else 'ok':>8}  {own.name}: {own.outcome()}" for own in done))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
