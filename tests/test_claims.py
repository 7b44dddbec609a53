"""Sentences of the main pages that promise something about all cases, and the tests that show them.

A sentence with one of `WORDS` must be listed in `CLAIMS`: next to a test, or next to a reason if it is not a promise
about behaviour. If no test shows a sentence, promise less.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORDS = r"\b(?:never|every|everywhere|always|any|exactly|the same bits|no other|bit (?:by|for) bit)\b"
REASONS = {
    "definition": "it says what a word or a name means, or what a method of others does",
    "advice": "it says what to write",
    "title": "it is a heading",
}

#: By page and sentence, without its marks: a test, as path::name, or one of `REASONS`.
CLAIMS = {
    "README.md": {
        "A row of the loss gets the same bits in any batch, at any address and with any number of threads "
        "([what this covers](docs/faq.md#is-it-deterministic)).": (
            "tests/test_batch_invariance.py::test_threads_and_layouts_of_the_loss"
        ),
    },
    "docs/index.md": {},
    "docs/concepts.md": {
        "A MuZero learner unrolls its dynamics K steps from one observation and computes a loss at every step.": (
            "definition"
        ),
        "With `batch_dims=1` each sample has its own norm, and samples within the limit pass unchanged, bit for bit.": (
            "tests/test_flow_nonlinear.py::test_within_the_limit_passes_bit_identical"
        ),
    },
    "docs/start.md": {},
    "docs/how_to/captured_step.md": {
        "**The graph is audited**, to find changes that rule 2 leaves out: at replays 1, 2, 3, 5, 11, 23, 47 and so "
        "on, then at about every 1,024th (`audit`).": "tests/test_captured_audits.py::test_audits_are_at_primes",
        "return `loss`, and read it every 100 steps": "advice",
        "A target network every n-th step": "title",
        "TD3 trains its actor in every second step: two captured steps, and the choice between them stays in Python.": (
            "definition"
        ),
        "`update.plain(*batch)` makes a plain call at any time, for example under a profiler or a `GradientTracer`.": (
            "tests/test_captured_step.py::test_plain_calls_between_replays"
        ),
    },
}


def sentences_of(text: str) -> list[str]:
    """Sentences, headings and cells of tables, without code and the tables that bench/readme.py writes."""
    tables, fences, indented = r"<!-- table: .*?<!-- end: [^\n]*", r"^```.*?^```", r"^ {4}[^\n]*"
    rules, tags = r"^\|[ :|-]+\|$", r"</?\w[^>\n]*>"
    text = re.sub("|".join((tables, fences, indented, rules, tags)), "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=[-*|#] ?|\d+\. )", text)
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?])\s+|\s*\|\s*", block)]
    return [re.sub(r"^(?:[-#]+|\d+\.) ", "", " ".join(part.split())) for part in parts]


def claims_of(text: str) -> set[str]:
    """The sentences with one of `WORDS`, outside of inline code and the addresses of links."""
    plain = {sentence: re.sub(r"`[^`]*`|\]\([^)]*\)", " ", sentence) for sentence in sentences_of(text)}
    return {sentence for sentence, words in plain.items() if re.search(WORDS, words, re.IGNORECASE)}


def names_of_tests(path: Path) -> set[str]:
    """Functions of a file, and methods as Class::name."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


@pytest.mark.any_version
@pytest.mark.parametrize("page", CLAIMS)
def test_each_claim_is_listed(page):
    found = claims_of((ROOT / page).read_text())
    assert found - {*CLAIMS[page]} == set(), "list these sentences with the test that shows them, or promise less"
    assert {*CLAIMS[page]} - found == set(), f"these sentences are no longer in {page}"


@pytest.mark.any_version
def test_each_listed_test_exists():
    for shown in (shown for claims in CLAIMS.values() for shown in claims.values()):
        path, _, name = shown.partition("::")
        assert name in names_of_tests(ROOT / path) if name else shown in REASONS, shown
        assert not name or name.rpartition("::")[2].startswith("test_"), shown


@pytest.mark.any_version
def test_claims_are_found():
    """Over line breaks, in lists and cells; not in code, addresses and generated tables."""
    page = """# No other loss

    python -m every

Each row has the same
bits. It is slow. `every` [row](#every-row) counts, e.g. here.

- Rows never move! Some do.
1. Is it Always so?

| any | some |
| --- | --- |
| `x` | bit for bit |

```python
never = 1
```

<!-- table: speed -->
Every row was timed.
<!-- end: speed -->
It is new, nevertheless. Anything goes.
"""
    expected = ["No other loss", "Each row has the same bits.", "Rows never move!", "Is it Always so?", "any"]
    assert claims_of(page) == {*expected, "bit for bit"}
