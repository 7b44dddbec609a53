"""Gradient-flow operators and returns in every context: right, or an error that says what to do; never wrong."""

from __future__ import annotations

import contexts
import pytest
from contexts import CASES, HAND_WRITTEN, RETURNS, Case, contexts_here, judge

pytestmark = pytest.mark.untraced

FORWARD_MODE = {"func.jvp", "jacfwd", "hessian", "forward_ad", "compile(jvp)"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "context"),
    [
        pytest.param(case, context, id=f"{case.name}-{case.argument}-{context}")
        for case in (*CASES, *RETURNS)
        for context in contexts_here(case)
    ],
)
def test_cell(case: Case, context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (context, case.argument) != ("compile", "tensor"):  # Inductor compiles each operator once
        monkeypatch.setattr(contexts, "BACKEND", "aot_eager")
    verdict, seen = judge(case, context)
    if case.linear or context not in FORWARD_MODE:
        assert verdict == "right", seen
    else:
        assert verdict == "error", seen
        assert "NotImplementedError" in seen
        assert "no meaning for the tangents of forward mode" in seen
        assert "use reverse mode" in seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("tensor hook", "func.jvp", "wrong"),
        ("tensor hook", "vmap", "wrong"),
        ("autograd.Function", "func.jvp", "error"),
        ("s*x + (1-s)*x.detach()", "forward exact", "wrong"),
        ("s*x + (1-s)*x.detach()", "hessian", "right"),
        ("autograd.Function", "eager", "right"),
    ],
)
def test_the_matrix_can_tell_right_from_wrong(name: str, context: str, expected: str) -> None:
    (case,) = (case for case in HAND_WRITTEN if case.name == name)
    assert judge(case, context)[0] == expected
