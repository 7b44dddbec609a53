"""`python -m gradscale_ext`: a report on this machine and installation; `--help` names the subcommands.

Where the extension cannot be loaded, `_native` makes the report, and this file is not reached.
"""

from __future__ import annotations

import importlib
import sys

import torch

from ._native import _C, DEVICE_TYPES
from .cli import check, report


def print_report(as_json: bool = False) -> int:
    """Print the report; the exit status is 1 when the self-check fails, or the driver is too old for PyTorch."""
    too_old = report.driver_problem(report.driver_version()) is not None
    facts = {
        **report.facts(),
        "CPU kernels": f"{_C.cpu_capability()} chosen",
        "CUDA kernels": report.kernels_in_words(),
    }
    devices = ["cpu"]
    for index in range(0 if too_old else torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        runs = "kernels" if "cuda" in DEVICE_TYPES else "PyTorch's own operations"
        facts[f"GPU {index}"] = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}: {runs}"
        devices.append(f"cuda:{index}")
    failure = next(filter(None, map(check.self_check, devices)), None)
    facts["self-check"] = failure or "passed on " + ", ".join(devices)
    ok = failure is None and not too_old
    report.show(facts, ok, as_json)
    return 0 if ok else 1


def main() -> int:
    """Do what the command line says: a subcommand, or the report where there is none."""
    options = report.parse(sys.argv[1:])
    if options.command is None:
        return print_report(options.json)
    status: int = importlib.import_module(f"gradscale_ext.cli.{options.command}").main(options.rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
