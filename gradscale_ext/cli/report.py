"""The report of `python -m gradscale_ext` on machine and installation, also if the extension cannot be loaded."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import _kernels

Facts = dict[str, str]

VARIABLES = ("MAX_JOBS", "CXX", "CUDA_HOME", "OMP_NUM_THREADS")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line. `rest` gets the arguments of a subcommand, which parses them itself.

    From here on SIGPIPE ends the program, as it does other programs whose output is no longer read (`| head`).
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(
        prog="python -m gradscale_ext",
        description="Without a subcommand: versions, what the extension was built with, what runs here, a self-check.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    version = importlib.import_module("gradscale_ext").__version__
    parser.add_argument("--version", action="version", version=f"gradscale_ext {version}")
    commands = parser.add_subparsers(dest="command", metavar="check | bench | compile")
    for name, what in (
        ("check", "compare every operator and head with the reference, on the devices of this machine"),
        ("bench", "time the loss and the operators against eager PyTorch and torch.compile"),
        ("compile", "compile CUDA kernels before they are needed"),
    ):
        commands.add_parser(name, help=what, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command is None:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options


def device(text: str) -> str:
    """Read the name of a device from the command line."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"expected a device of this machine, got {text!r}: {reason}") from None
    return text


def positive(text: str) -> int:
    """Read an integer of at least 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def is_running() -> bool:
    """Return True while `python -m gradscale_ext` imports the package."""
    return sys.argv[:1] == ["-m"] and "gradscale_ext" in sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]


def without_extension(problem: str) -> int:
    """Print the report if the extension cannot be loaded: the facts that do not need it, and the problem."""
    options = parse(sys.argv[1:])
    show({**facts(), "problem": problem}, False, options.json)
    return 1


def show(facts: Facts, ok: bool, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        print(json.dumps({**{name.replace(" ", "_"): value for name, value in facts.items()}, "ok": ok}, indent=2))
    else:
        print("\n".join(f"{name:<14} {value}" for name, value in facts.items()))


def facts() -> Facts:
    """Collect the facts that do not need the extension."""
    driver = driver_version()
    variables = sorted(name for name in os.environ if name.startswith("GRADSCALE_") or name in VARIABLES)
    return {
        "gradscale_ext": str(importlib.import_module("gradscale_ext").__version__),
        "lies in": str(Path(__file__).parent.parent),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "compiled": compiled_with(),
        "OpenMP": f"{', '.join(openmp_libraries()) or 'none'}; {torch.get_num_threads()} threads",
        "environment": " ".join(f"{name}={os.environ[name]}" for name in variables) or "no relevant variables",
        "NVIDIA driver": driver_problem(driver) or (f"supports CUDA {driver}" if driver else "none"),
    }


def compiled_with() -> str:
    """Say which PyTorch and which compiler the extension was built with, as recorded by setup.py."""
    if importlib.util.find_spec("gradscale_ext._build") is None:
        return "not here"
    build = importlib.import_module("gradscale_ext._build")
    return f"against torch {build.TORCH_VERSION} by {getattr(build, 'COMPILER', 'an unknown compiler')}"


def openmp_libraries() -> list[str]:
    """OpenMP runtimes that this process has loaded. If there are several, they compete for the CPU cores."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))


def driver_version() -> str | None:
    """Newest CUDA that the NVIDIA driver supports, such as "13.0"; None without a driver. Initializes nothing."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def driver_problem(driver: str | None) -> str | None:
    """Reason why PyTorch, and with it the extension, can use no GPU under this driver."""
    needed = torch.version.cuda
    if driver is None or needed is None or int(driver.split(".")[0]) >= int(needed.split(".")[0]):
        return None
    return (
        f"supports CUDA {driver} at most, but PyTorch {torch.__version__} is built for CUDA {needed}; update the "
        f"driver, or install a PyTorch built for CUDA {driver.split('.')[0]} and compile gradscale_ext again"
    )


def kernels_in_words() -> str:
    """Where CUDA kernels come from."""
    if torch.version.cuda is None:
        return f"none: PyTorch {torch.__version__} is not built for CUDA (https://pytorch.org/get-started/locally)"
    using = _kernels.compiler()
    packaged = len(list(_kernels.PACKAGED.glob("*")))
    sources = [f"{packaged} came with the package"] if packaged else []
    if using is not None:
        sources.append(f"compiled by {using.version} when they are first needed, and kept in {_kernels.cache_folder()}")
    how = _kernels.HOW_TO_GET_A_COMPILER.format(major=torch.version.cuda.split(".")[0])
    return "; ".join(sources) or f"none: there is no compiler for them; {how}"
