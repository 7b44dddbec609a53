"""Type checkers accept a typical script that uses the package, and report the lines with mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
from typing import NamedTuple

import torch
from typing_extensions import assert_type

import gradscale_ext as gs


class State(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def initial(observation: torch.Tensor) -> tuple[dict[str, torch.Tensor], State]:
    return {"value": observation}, State(observation, observation)


def recurrent(state: State, action: torch.Tensor) -> tuple[dict[str, torch.Tensor], State]:
    return {"value": state.h + action}, state


heads: dict[str, gs.Head] = {"value": gs.TwoHot(gs.Support.muzero(), weight=0.25)}
loss_fn = gs.MultiStepLoss(**heads)
predictions = gs.unroll(initial, recurrent, torch.zeros(2, 601), torch.zeros(2, 3))
targets = {"value": torch.zeros(2, 4)}
out = loss_fn(predictions, targets, step_gradient_scale="unroll")
assert_type(out, gs.MultiStepLossOutput)
assert_type(gs.multi_step_loss(heads, predictions, targets).loss, torch.Tensor)
assert_type(gs.ScaleGradient(0.5)(State(out.loss, out.loss)), State)
assert_type(gs.ClipGradientNorm(1.0)(out.loss), torch.Tensor)
assert_type(gs.scale_gradient([out.loss], 0.5), list[torch.Tensor])
assert_type(gs.standardize(out.loss), torch.Tensor)
assert_type(gs.ReturnScale()(out.loss), torch.Tensor)
assert_type(gs.MultiStepLoss.muzero(root_reward=False), gs.MultiStepLoss)
assert_type(loss_fn(predictions, targets, num_entries={"value": 8}), gs.MultiStepLossOutput)
norm: float = float(gs.clip_gradients_([torch.zeros(2)], 1.0))
"""

#: Lines with mistakes, and parts of mypy's messages.
MISTAKES = {
    'loss_fn(predictions, targets, step_gradient_scales="unroll")': 'Unexpected keyword argument "step_gradient_s',
    'loss_fn(predictions, targets, reduction="average")': 'Argument "reduction" to "__call__" of "MultiStepLoss"',
    "gs.TwoHot(gs.Support.muzero(), label_smooth=0.1)": 'Unexpected keyword argument "label_smooth"',
    "gs.ScaleGradient(0.5)(out.loss, 0.5)": 'Too many arguments for "__call__"',
    "gs.unroll(initial, lambda state, action: (state.hidden, state), targets, out.loss)": '"State" has no attribute',
}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + "\n".join(MISTAKES))
    return tmp_path / "script.py"


FIRST = SCRIPT.count("\n") + 1
WRONG_LINES = set(range(FIRST, FIRST + len(MISTAKES)))


def test_mypy(script):
    """Only the lines with mistakes have errors."""
    pytest.importorskip("mypy")
    # The options and the cache of `make lint`, in which PyTorch has already been analysed.
    options = ["--strict", f"--config-file={ROOT}/pyproject.toml", f"--cache-dir={ROOT}/.mypy_cache"]
    command = [sys.executable, "-m", "mypy", *options, script.name]
    environ = {**os.environ, "MYPYPATH": str(ROOT)}
    said = subprocess.run(command, capture_output=True, text=True, cwd=script.parent, env=environ).stdout
    errors = re.findall(r"^(.*):(\d+): error: (.*)$", said, re.MULTILINE)
    assert {(file, int(line)) for file, line, _ in errors} == {(script.name, line) for line in WRONG_LINES}, said
    for number, expected in enumerate(MISTAKES.values(), start=FIRST):
        assert any(int(line) == number and expected in message for _, line, message in errors), said


def test_pyright(script):
    pytest.importorskip("basedpyright")
    configuration = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (script.parent / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, script.name]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=script.parent).stdout)
    errors = said["generalDiagnostics"]
    assert {Path(error["file"]).name for error in errors} == {script.name}
    assert {error["range"]["start"]["line"] + 1 for error in errors} == WRONG_LINES, errors
