"""The matrix of operators and returns in contexts (see contexts.py): a cell is right, or an error with instructions."""

from __future__ import annotations

import contexts
import pytest
from contexts import CASES, HAND_WRITTEN, RETURNS, Case, contexts_here, judge

pytestmark = pytest.mark.compiled

COMPILED = {"compile", "compile dynamic", "compile(func.grad)", "compile(vmap(grad))", "compile(jvp)", "export"}
FORWARD_MODE = {"func.jvp", "jacfwd", "hessian", "forward_ad", "compile(jvp)"}


def is_compiled_elsewhere(case: Case, context: str) -> bool:
    """True if this test runs the operator in this compiled context only with the other kind of argument.

    The kinds are numbers and tensors. `make matrix` judges both.
    """
    names = sorted({other.name for other in CASES})
    if context not in COMPILED or case.name not in names:
        return False
    is_tensor = (names.index(case.name) + sorted(COMPILED).index(context)) % 2 == 0
    kinds = {other.argument for other in CASES if other.name == case.name}
    return len(kinds) == 2 and case.argument != ("tensor" if is_tensor else "number")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "context"),
    [
        pytest.param(case, context, id=f"{case.name}-{case.argument}-{context}")
        for case in (*CASES, *RETURNS)
        for context in contexts_here(case)
        if not is_compiled_elsewhere(case, context)
    ],
)
def test_cell(case: Case, context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if context != "compile" or "batch_dims" in case.name:  # Inductor compiles each operator once
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
def test_the_matrix_detects_wrong_results(name: str, context: str, expected: str) -> None:
    (case,) = (case for case in HAND_WRITTEN if case.name == name)
    assert judge(case, context)[0] == expected
