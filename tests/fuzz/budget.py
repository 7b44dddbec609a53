"""Number of examples of the fuzzer: a fixed set in the ordinary tests, new ones in `make fuzz`.

A fuzz test takes one case: a frozen dataclass of plain numbers and names, from which it builds tensors. Hypothesis
therefore prints a failure as a case that can be pasted into a plain test.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

UNTIL = float(os.environ.get("GRADSCALE_FUZZ_UNTIL", 0))
"""When `make fuzz` ends, in seconds since 1970; 0 in the ordinary tests."""
JOURNAL = os.environ.get("GRADSCALE_FUZZ_JOURNAL")
"""The file with the number of cases and the last case, which `make fuzz` reads after a crash."""
MORE = 16
"""Each pytest run of `make fuzz` has this many times as many examples as `make test`."""

# Hypothesis loads a profile named "ci" for all tests, so these profiles have other names.
_common: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "report_multiple_bugs": False,
    "phases": (Phase.generate, Phase.shrink),
}
settings.register_profile("fuzz-ci", derandomize=True, **_common)
settings.register_profile("fuzz", **_common)


class _Journal:
    """Counts cases, and records each one before it runs."""

    def __init__(self) -> None:
        self.cases = 0
        self.file = open(JOURNAL, "w") if JOURNAL else None  # noqa: SIM115, open for the lifetime of the process

    def write(self, case: Any) -> None:
        self.cases += 1
        if self.file is not None:
            self.file.seek(0)
            self.file.write(f"{self.cases}\n{case!r}\n")
            self.file.truncate()
            self.file.flush()


_journal = _Journal()


def fuzz(cases: st.SearchStrategy[Any], examples: int) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Run a test on `examples` cases, or, in `make fuzz`, on more until the time is over."""

    def decorate(test: Callable[[Any], None]) -> Callable[[], None]:
        failed = False

        @settings(settings.get_profile("fuzz" if UNTIL else "fuzz-ci"), max_examples=examples * (MORE if UNTIL else 1))
        @given(case=cases)
        @functools.wraps(test)
        def run(case: Any) -> None:
            nonlocal failed
            if UNTIL and time.time() > UNTIL and not failed:  # a failure is shrunk first
                pytest.skip("the time is over")
            _journal.write(case)
            try:
                with np.errstate(all="ignore"):  # formulas of inf and NaN
                    test(case)
            except BaseException:
                failed = True
                raise

        return run

    return decorate


def journal_of(path: Path) -> tuple[int, str]:
    """The number of cases that a process has run, and the last one."""
    if not path.exists():
        return 0, ""
    count, _, case = path.read_text().partition("\n")
    return int(count or 0), case.strip()
