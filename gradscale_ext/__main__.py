"""`python -m gradscale_ext`: a report on this machine and installation; `--help` names the subcommands.

Where the extension cannot be loaded, `_native` makes the report, and this file is not reached.
"""

from __future__ import annotations

import importlib
import sys

import torch

from . import _against_reference, _report
from ._native import _C, DEVICE_TYPES

COMMANDS = {"check": "_against_reference", "bench": "_bench", "compile": "_precompile"}


def report(as_json: bool = False) -> int:
    """Print the report; the exit status is 1 when the self-check fails, or the driver is too old for PyTorch."""
    too_old = _report.driver_problem(_report.driver_version()) is not None
    facts = {
        **_report.facts(),
        "CPU kernels": f"{_C.cpu_capability()} chosen",
        "CUDA kernels": _report.kernels_in_words(),
    }
    devices = ["cpu"]
    for index in range(0 if too_old else torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        runs = "kernels" if "cuda" in DEVICE_TYPES else "PyTorch's own operations"
        facts[f"GPU {index}"] = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}: {runs}"
        devices.append(f"cuda:{index}")
    failure = next(filter(None, map(_against_reference.self_check, devices)), None)
    facts["self-check"] = failure or "passed on " + ", ".join(devices)
    ok = failure is None and not too_old
    _report.show(facts, ok, as_json)
    return 0 if ok else 1


def main() -> int:
    """Do what the command line says: a subcommand, or the report where there is none."""
    options = _report.parse(sys.argv[1:])
    if options.command is None:
        return report(options.json)
    status: int = importlib.import_module(f"gradscale_ext.{COMMANDS[options.command]}").main(options.rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
