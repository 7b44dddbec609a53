"""Runs the fuzzer in one process per processor until the time is over, each with its own seeds.

    python tests/fuzz/run.py --minutes 30

The first finding of a process, or a crash, ends that process. It is printed with the seed, and the exit status is 1.
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

GRACE = 600.0
"""Seconds after the end that a process has to make its finding smaller."""


def look(folder: Path, worker: int, until: float, tests: list[str], seed: int | None, report: list[str]) -> int:
    """Run the tests repeatedly, with another seed each time; returns the number of cases."""
    cases = 0
    while time.time() < until:
        chosen = random.SystemRandom().randrange(2**32) if seed is None else seed
        journal = folder / f"{worker}-{chosen}"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [f"--hypothesis-seed={chosen}", "--show-capture=no", *(tests or [str(HERE)])]
        environment = {
            "OMP_NUM_THREADS": "1",
            "MALLOC_PERTURB_": str(1 + chosen % 255),  # overwrite freed memory
            **os.environ,
            "GRADSCALE_FUZZ_UNTIL": str(until),
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
            output, _ = process.communicate(timeout=until - time.time() + GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            output = (process.communicate()[0] or "") + "\nit did not end"
        count, last = journal_of(journal)
        cases += count
        if process.returncode != 0:
            died = "" if process.returncode == 1 else f"\nexit status {process.returncode}; the last case was\n{last}"
            report.append(f"{output}{died}\nseed {chosen}: make fuzz SEED={chosen} runs the same cases again")
            break
        if seed is not None:
            break
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="one process, and once, with this seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("tests", nargs="*", help="files or tests, all by default")
    arguments = parser.parse_args()
    until = time.time() + 60 * arguments.minutes
    report: list[str] = []
    cases: list[int] = []
    with tempfile.TemporaryDirectory() as folder:

        def work(worker: int) -> None:
            cases.append(look(Path(folder), worker, until, arguments.tests, arguments.seed, report))

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
