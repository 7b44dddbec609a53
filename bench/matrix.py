"""Judges the gradient-flow operators, the usual hand-written ways and the returns in every context of PyTorch.

    python bench/matrix.py --json bench/results/matrix.json

Results are kept by version of PyTorch: a run replaces the results of the installed version. `tests/contexts.py` defines
how a cell is judged; `tests/test_matrix.py` asserts the cells of this package.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from contexts import CASES, CONTEXTS, HAND_WRITTEN, RETURNS, contexts_here, judge

from harness import user_path

WORST_FIRST = ("wrong", "error", "right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=user_path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    verdicts: dict[str, dict[str, str]] = {}
    for context in CONTEXTS:
        for case in (*CASES, *HAND_WRITTEN, *RETURNS):
            if context not in contexts_here(case):
                continue
            verdict, seen = judge(case, context)
            name = case.name.split(",")[0] if case in CASES else case.name
            row = verdicts.setdefault(name, {})
            # The verdict on an operator is the worst verdict on its cases, which differ in their arguments.
            row[context] = min(row.get(context, "right"), verdict, key=WORST_FIRST.index)
            if verdict != "right":
                summary = seen.splitlines()[0][:120] if seen else ""
                print(f"{context:<22} {case.name:<34} {case.argument:<7} {verdict:<6} {summary}", flush=True)
    if arguments.json is not None:
        everything = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        everything[torch.__version__.split("+")[0]] = verdicts
        arguments.json.write_text(json.dumps(dict(sorted(everything.items())), indent=1) + "\n")
        print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
