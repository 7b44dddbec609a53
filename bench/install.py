"""Time of `pip install .` with PyTorch installed, and nothing cached.

python bench/install.py --json bench/results/install.json
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parent.parent


def seconds() -> float:
    """Install a copy of the files under version control into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        source.mkdir()
        files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "--extract", f"--directory={source}"], input=files, check=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        begin = time.perf_counter()
        subprocess.run(
            [*command, f"--target={target}", str(source)], env=os.environ | {"CCACHE_DISABLE": "1"}, check=True
        )
        return time.perf_counter() - begin


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    taken = seconds()
    print(f"pip install .: {taken:.0f} s")
    harness.write(arguments.json, "install", [{"seconds": round(taken, 1)}])


if __name__ == "__main__":
    main()
