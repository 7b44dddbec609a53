"""Compiles kernels with one NVRTC for each GPU generation, and prints registers, shared memory and spills as JSON.

python tests/budget/registers.py [--nvrtc FOLDER] [--targets sm_90] < a JSON list of [file of csrc, C++ name]

FOLDER is where `pip install --target FOLDER nvidia-cuda-nvrtc` has put an NVRTC; without it, the environment's is used.
A process can load only one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from gradscale_ext import _kernels  # noqa: E402

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def load(folder: Path) -> None:
    """Load the NVRTC in this folder, before cuda.bindings loads another."""
    libraries = [path for path in folder.rglob("libnvrtc.so.*") if ".alt." not in path.name]
    if len(libraries) != 1:
        raise SystemExit(f"expected one libnvrtc.so.* in {folder}, found {len(libraries)}")
    ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nvrtc", type=Path, metavar="FOLDER")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="kernels that are compiled at once")
    options = parser.parse_args()
    if options.nvrtc is not None:
        load(options.nvrtc)
    compiler = _kernels.Nvrtc()

    def compiled(kernel: tuple[str, str, str]) -> dict[str, object]:
        file, name, target = kernel
        image = _kernels._compiled(compiler, file, name, target)
        return {
            "compiler": compiler.version,
            "file": file,
            "kernel": name,
            "target": target,
            "registers": image.registers,
            "shared": image.shared,
            "spilled": image.spilled,
        }

    kernels = [(file, name, target) for file, name in json.load(sys.stdin) for target in options.targets]
    with ThreadPoolExecutor(options.jobs) as pool:
        print(json.dumps(list(pool.map(compiled, kernels))))


if __name__ == "__main__":
    main()
