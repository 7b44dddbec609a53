"""Runs the fuzzer in one process per processor for a number of minutes. Each run has its own seed.

    python tests/fuzz/run.py --minutes 30

A process ends at its first failure or crash, which is printed with the seed; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fuzz.budget import journal_of  # noqa: E402

TIMEOUT = 2700
"""Seconds of one test, which has many more examples here than in the ordinary tests. After them the test hangs."""
GRACE = 600.0
"""Seconds after the deadline in which a process may still shrink a failing case."""


def run_until(folder: Path, worker: int, deadline: float, tests: list[str], seed: int | None, report: list[str]) -> int:
    """Run the tests repeatedly, with a new seed each time; returns the number of cases."""
    cases = 0
    while time.time() < deadline:
        chosen = random.SystemRandom().randrange(2**32) if seed is None else seed
        journal = folder / f"{worker}-{chosen}"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [f"--hypothesis-seed={chosen}", "--show-capture=no", f"--timeout={TIMEOUT}", *(tests or [str(HERE)])]
        environment = {
            "OMP_NUM_THREADS": "1",
            "MALLOC_PERTURB_": str(1 + chosen % 255),  # overwrite freed memory
            **os.environ,
            "GRADSCALE_FUZZ_UNTIL": str(deadline),
            "GRADSCALE_FUZZ_JOURNAL": str(journal),
        }
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=HERE.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=deadline - time.time() + GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            output = (process.communicate()[0] or "") + "\ntimed out"
        count, last = journal_of(journal)
        cases += count
        if process.returncode != 0:
            crash = "" if process.returncode == 1 else f"\nexit status {process.returncode}; the last case was\n{last}"
            report.append(f"{output}{crash}\nseed {chosen}: make fuzz SEED={chosen} runs the same cases again")
            break
        if seed is not None:
            break
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="run once, in one process, with this seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("tests", nargs="*", help="files or tests, all by default")
    arguments = parser.parse_args()
    deadline = time.time() + 60 * arguments.minutes
    report: list[str] = []
    cases: list[int] = []
    with tempfile.TemporaryDirectory() as folder:

        def work(worker: int) -> None:
            cases.append(run_until(Path(folder), worker, deadline, arguments.tests, arguments.seed, report))

        processes = 1 if arguments.seed is not None else arguments.processes
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for text in report:
        print(text, "", sep="\n")
    print(f"fuzz: {sum(cases):,} cases, {len(report)} findings")
    return 1 if report else 0


if __name__ == "__main__":
    sys.exit(main())
