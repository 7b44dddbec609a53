"""Compiles every CUDA source for the GPUs below, and fails when a kernel spills registers or uses local memory.

`make cuda-check`, or `python tests/cuda_check.py [file.cu ...]`. Needs nvcc and nothing else: no GPU, no PyTorch. What
ptxas says of each kernel is printed as a table, and in its own words where a kernel fails. Exit status: 0 when all is
well, 1 when a kernel or the compilation fails, 2 without nvcc.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# Flags of setup.py and PyTorch's build helper; tests/test_install.py compares. PyTorch 2.11 asks for C++17.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
    "-DGRADSCALE_WITH_CUDA=1",
    "-Xcompiler=-Werror=switch",
]
COLUMNS = ("arch", "registers", "shared", "stack", "spill stores", "spill loads", "kernel")


@dataclass
class Function:
    """Report of ptxas on one kernel, or a function called by one. Sizes are in bytes."""

    name: str  # mangled
    architecture: str
    registers: int | None = None  # of kernels only
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    lines: list[str] = field(default_factory=list)  # ptxas' own

    @property
    def fails(self) -> bool:
        return bool(self.stack or self.spill_stores or self.spill_loads)


def parse(text: str, architecture: str) -> tuple[list[Function], list[str]]:
    """The functions in the output of nvcc -Xptxas -v for one architecture, and all other lines but ptxas' chatter."""
    functions: dict[str, Function] = {}
    others = []
    kernel = current = Function("", architecture)
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '\S+'", line):
            kernel = current = functions.setdefault(match[1], Function(match[1], architecture))
        elif match := re.search(r"Function properties for '?([^\s']+)", line):
            current = functions.setdefault(match[1], Function(match[1], architecture))
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, current.spill_stores, current.spill_loads = map(int, match.groups())
            current.stack = max(current.stack, stack)
            current.lines.append(line.strip())
        elif match := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(match[1])
            sizes = {
                what: int(size) for size, what in re.findall(r"(\d+) bytes (smem|lmem|cumulative stack size)", line)
            }
            kernel.shared = sizes.pop("smem", 0)
            kernel.stack = max(kernel.stack, *sizes.values(), 0)
            kernel.lines.append(line.strip())
        elif line.strip() and not re.match(r"ptxas info\s*: (.* bytes gmem|Compile time|Overriding|\(C\d+\))", line):
            others.append(line)
    return list(functions.values()), others


def readable(names: list[str]) -> dict[str, str]:
    """Mangled names to C++ ones, without return type, arguments and our namespaces; as they are without c++filt."""
    if shutil.which("c++filt") is None:
        return {name: name for name in names}
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return {name: shorten(line) for name, line in zip(names, text.splitlines(), strict=True)}


def shorten(name: str) -> str:
    """`void gradscale::(anonymous namespace)::kernel<float, (Kind)1>(float*)` to `kernel<float, (Kind)1>`."""
    name = re.sub(r"_INTERNAL_\w+::|gradscale::|\(anonymous namespace\)::|^void ", "", name)
    depth = 0
    for index in range(len(name) - 1, -1, -1) if name.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(name[index], 0)
        if depth == 0:
            return name[:index]
    return name


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def compile_for(nvcc: str, source: Path, architecture: str) -> tuple[int, str]:
    """Compile one file for one architecture: nvcc's exit status and what it printed."""
    virtual = architecture.replace("sm_", "compute_")
    with tempfile.TemporaryDirectory() as folder:
        target = ["-Xptxas", "-v", f"-gencode=arch={virtual},code={architecture}", "-cubin", "-o", f"{folder}/code"]
        command = [nvcc, *FLAGS, *target, str(source)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns of numbers to the right; the kernel, which may be long, last."""
    widths = [max(len(row[column]) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS) - 1)]
    lines = []
    for row in (COLUMNS, *rows):
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)),
        ]
        lines.append("  ".join([*cells, row[-1]]))
    return "\n".join(lines)


def report(functions: list[Function]) -> int:
    """Print the table, and what fails in ptxas' own words; how many functions fail."""
    names = readable([function.name for function in functions])
    rows = []
    for f in functions:
        numbers = (f.registers if f.registers is not None else "-", f.shared, f.stack, f.spill_stores, f.spill_loads)
        rows.append((f.architecture, *map(str, numbers), names[f.name]))
    print(table(rows))
    failures = [function for function in functions if function.fails]
    for function in failures:
        print(f"\n{names[function.name]} for {function.architecture} spills or uses local memory:")
        print("\n".join(f"    {line}" for line in function.lines))
    return len(failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="CUDA sources; all below csrc/ if none is named")
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES, metavar="sm_XY")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers that run at once")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("cuda-check: no nvcc found on PATH, below CUDA_HOME or in /usr/local/cuda/bin; nothing was checked")
        return 2
    sources = options.files or sorted(ROOT.glob("csrc/**/*.cu"))
    work = list(product(sources, options.architectures))
    with ThreadPoolExecutor(options.jobs) as pool:
        outputs = list(pool.map(lambda item: compile_for(nvcc, *item), work))
    functions: list[Function] = []
    broken = 0
    for (source, architecture), (status, text) in zip(work, outputs, strict=True):
        found, others = parse(text, architecture)
        functions += found
        if status != 0 or others:
            print(f"{source} for {architecture}: nvcc {'failed' if status else 'says'}", *others, sep="\n    ")
        broken += status != 0
    functions.sort(key=lambda function: (function.name, options.architectures.index(function.architecture)))
    failures = report(functions)
    kernels = sum(function.registers is not None for function in functions)
    print(
        f"\ncuda-check: {len(sources)} files, {kernels} kernels for {' '.join(options.architectures)}: "
        f"{broken} compilations failed, {failures} functions spill or use local memory"
    )
    return 1 if broken or failures or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
