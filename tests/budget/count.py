"""Runs the calls of cases.py on the simulated driver, and prints their kernels' counts as JSON.

python tests/budget/count.py --driver .venv/driver.so [--batch 256] [part of a case's name ...]

The kernels are compiled for sm_90 with line information, and the PTX in their cubins is run. Prints one line per case:
its launches as the simulated driver reports them, each with its compiled kernel (file, name, registers, shared memory,
spills) and the estimated opcode counts of its machine code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import sass  # noqa: E402
import torch  # noqa: E402
from cases import CASES, Case  # noqa: E402

from gradscale_ext import _kernels  # noqa: E402
from gradscale_ext._native import _C  # noqa: E402


class Images:
    """The requested kernels, by the name of their entry."""

    def __init__(self) -> None:
        self.compiler = _kernels.Nvrtc("--generate-line-info")
        self.names: dict[str, tuple[str, str]] = {}
        self.images: dict[str, _kernels.Image] = {}
        self.blocks: dict[str, list[sass.Block]] = {}

    def ptx(self, file: str, name: str, major: int, minor: int, errors: list[str]) -> tuple[bytes, str]:
        assert not errors, errors
        image = _kernels._compiled(self.compiler, file, name, f"sm_{major}{minor}")
        self.names[image.entry] = file, name
        self.images[image.entry] = image
        self.blocks[image.entry] = sass.blocks_of(sass.disassembled(image.code), image.entry)
        return sass.ptx_of(image.code), image.entry

    def completed(self, record: dict) -> dict:
        """A launch's record, extended by the properties of its kernel."""
        entry = record.pop("entry")
        lines = dict(record.pop("lines"))
        file, name = self.names[entry]
        image, blocks = self.images[entry], self.blocks[entry]
        return record | {
            "file": file,
            "name": name,
            "registers": image.registers,
            "shared": image.shared,
            "spilled": image.spilled,
            "sass": sass.estimated(blocks, lines),
            "in_flight": sass.in_flight(blocks, lines),
        }


def count(case: Case, batch: int, images: Images) -> dict:
    torch.manual_seed(0)
    call, units = case.make(batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        os.environ |= {"PTX_REPORT": str(path), "PTX_LINES": "1"}
        call()
        del os.environ["PTX_REPORT"]
        records = [json.loads(line) for line in path.read_text().splitlines()]
    return {"case": case.name, "units": units, "launches": [images.completed(record) for record in records]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="part of a name")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--batch", type=int, help="instead of each case's own")
    options = parser.parse_args()
    images = Images()
    _C.use_driver_for_cpu(options.driver)
    _C.set_kernel_images(images.ptx)
    for case in CASES:
        if not options.cases or any(part in case.name for part in options.cases):
            print(json.dumps(count(case, options.batch or case.batch, images)), flush=True)


if __name__ == "__main__":
    main()
