"""Sentences of README and docs/ that promise something about all cases, and the tests that show them.

A sentence with one of `WORDS` must be listed in `CLAIMS`: next to a test, or next to a reason if it is not a promise
about behaviour. If no test shows a sentence, promise less.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
#: Without docs/api, whose text is the docstrings.
PAGES = ["README.md", *(page for page in DOCS if not page.startswith("docs/api/"))]
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
    "docs/concepts.md": {
        "A MuZero learner unrolls its dynamics K steps from one observation and computes a loss at every step.": (
            "definition"
        ),
        "With `batch_dims=1` each sample has its own norm, and samples within the limit pass unchanged, bit for bit.": (
            "tests/test_flow_nonlinear.py::test_within_the_limit_passes_bit_identical"
        ),
    },
    "docs/how_to/captured_step.md": {
        "Audits are at replay 1, which is in the fourth call, at replays 2, 3, 5, 11, 23, 47 and so on, and then at "
        "about every 1,024th (`audit`).": "tests/test_captured_audits.py::test_audits_are_at_primes",
        "return `loss`, and read it every 100 steps": "advice",
        "A target network every n-th step": "title",
        "TD3 trains its actor in every second step: two captured steps, and the choice between them stays in Python.": (
            "definition"
        ),
        "`update.plain(*batch)` makes a plain call at any time, for example under a profiler or a `GradientTracer`.": (
            "tests/test_captured_step.py::test_plain_calls_between_replays"
        ),
    },
    "docs/design.md": {
        "`tests/native/test_formulas.py` replaces an expression of the formulas of logits and policies at a time, and "
        "checks that exactly the kernels that use it give wrong results.": (
            "tests/native/test_formulas.py::test_faults_of_the_cpu"
        ),
        "The `detach` formulas are right in every context of the matrix, except that they round the last bit of the "
        "value.": "tests/test_docs.py::test_the_detach_formulas_are_wrong_in_the_last_bit_only",
        "Every level of PyTorch then treats them as native, and one mechanism is right in every context of the "
        "matrix.": "tests/test_matrix.py::test_cell",
    },
    "docs/faq.md": {
        "Repeated calls give the same bits, on a CPU with any number of threads; `make gpu` compares 100 calls on a "
        "GPU.": "tests/test_batch_invariance.py::test_threads_and_layouts_of_the_loss",
    },
    "docs/gradients.md": {
        "Every `every`-th step of the optimizer is recorded; its numbers are copied to the host while training "
        "continues, and are written one interval later, so that no step waits.": (
            "tests/test_monitor.py::test_written_one_interval_late"
        ),
        "Mixed precision needs no further code: a step that `torch.amp.GradScaler` skips is recorded at once, for any "
        "`every`, as `skipped_steps` and `nonfinite_gradients`.": (
            "tests/test_monitor.py::test_a_skipped_step_does_not_replace_a_due_record"
        ),
        "The device decides this without synchronization, and NaN never reaches the parameters.": (
            "tests/test_adaptive.py::test_skip_and_error"
        ),
    },
    "docs/how_to/dann.md": {
        "The features get the classifier's gradient times `-scale`, in every context that "
        "[the matrix](../benchmarks.md#where-each-way-of-changing-a-gradient-is-right) lists; a hand-written "
        "`autograd.Function` is silently wrong in some of them.": "tests/test_matrix.py::test_cell",
    },
    "docs/how_to/exploding_gradients.md": {
        "`state = tuple(s.detach() for s in state)` every n steps is truncated backpropagation: it cuts instead of "
        "limiting.": "definition",
    },
    "docs/how_to/gpu_without_nvcc.md": {
        "`python -m gradscale_ext check` compares every operator and head with the reference on each device, and "
        "prints times.": "tests/test_install.py::test_check_covers_every_operator_and_head",
    },
    "docs/how_to/loss_is_nan.md": {
        "`mask=`: it adds exactly nothing to value and gradient": (
            "tests/test_fields.py::test_masked_entries_add_nothing"
        ),
    },
    "docs/how_to/ppo.md": {
        "**An advantage of 0** gives a policy loss and a gradient of exactly 0, also if the ratio is infinite.": (
            "tests/test_policy_losses.py::test_no_advantage_and_an_undefined_ratio"
        ),
        "Actions of masked entries may be any number, -100 for example.": (
            "tests/test_fields.py::test_masked_entries_add_nothing"
        ),
    },
    "docs/how_to/resuming.md": {
        "A deterministic run that continues from a checkpoint gives the same bits as one that was never interrupted, "
        "if everything that changes is saved: model, optimizer, running averages, random numbers, the number of the "
        "step, and the order of the data.": "tests/test_muzero.py::test_an_interrupted_run_continues_identically",
    },
    "docs/how_to/tokens.md": {
        "`dim=1` of `[prompts, answers]` standardizes each group by itself; groups whose answers have equal rewards "
        "give exactly 0.": "tests/test_normalization.py::test_equal_entries_are_zeros_without_gradient",
        "Tokens under the mask may be any number, for example -100.": (
            "tests/test_fields.py::test_masked_entries_add_nothing"
        ),
    },
    "docs/how_to/torch_compile.md": {
        "A tensor, or the buffer of the module form (`gs.ScaleGradient(0.5).scale`), never causes another one.": (
            "tests/test_flow_nonlinear.py::test_a_schedule_does_not_recompile"
        ),
        "The same holds for the numbers of heads (`weight`, `entropy_weight`, `delta` ...), with one more compilation "
        "where a number is exactly 0.": "tests/test_loss_schedules.py::test_one_more_graph_for_zero",
    },
    "docs/how_to/using_a_gpu.md": {
        "With your sizes on your GPU, `python -m gradscale_ext bench` times the loss, and `python -m gradscale_ext "
        "check` compares every operator with the reference.": (
            "tests/test_install.py::test_check_covers_every_operator_and_head"
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
@pytest.mark.parametrize("page", PAGES)
def test_each_claim_is_listed(page):
    found, listed = claims_of((ROOT / page).read_text()), {*CLAIMS.get(page, {})}
    assert found - listed == set(), "list these sentences with the test that shows them, or promise less"
    assert listed - found == set(), f"these sentences are no longer in {page}"


@pytest.mark.any_version
def test_each_listed_test_exists():
    assert {*CLAIMS} <= {*PAGES}
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
