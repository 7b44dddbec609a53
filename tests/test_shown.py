"""What the results of the package look like at a prompt and in a notebook: as much as fits a screen."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

import gradscale_ext as gs


def fits(text):
    lines = text.splitlines()
    return len(lines) <= 40 and max(map(len, lines)) <= 100


def rows_of(html):
    """Cells of a table's rows, read by a parser that refuses what is not well-formed."""
    return [[cell.text or "" for cell in row] for row in ElementTree.fromstring(html).iter("tr")]


@pytest.fixture(scope="module")
def model():
    """160 parameters with long names."""
    names = [f"{'encoder_' * 12}{number}" for number in range(80)]
    return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})


def test_statistics(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    statistics = gs.gradient_statistics(model)
    assert fits(repr(statistics))
    lines = repr(statistics).splitlines()
    assert lines[1].split()[1:] == ["4", "2", "1", "1", "0", "0", "0"]
    assert lines[-2:] == ["... 150 more lines; print() shows all", "total norm: 21.91"]  # sqrt(80 * (4 + 2))
    assert len(lines) == 13
    assert len(str(statistics).splitlines()) == 162
    rows = rows_of(statistics._repr_html_())
    assert rows[2][1:] == ["2", "1.414", "1", "1", "0", "0", "0"]
    assert rows[-1] == ["... and 120 more"]


def test_statistics_with_wide_numbers():
    """Names give way to columns, so that every number can be read."""
    parameter = torch.nn.Parameter(torch.ones(500, 500))
    parameter.grad = torch.full((500, 500), -1.2345e-05)
    named = [("weights", parameter.detach()), ("encoder." * 12 + "weight", parameter), ("missing", None)]
    header, *rows = repr(gs.gradient_statistics(named)).splitlines()
    assert header.split() == ["tensor", "numel", "norm", "abs_max", "mean", "zeros", "nans", "infs"]
    assert max(map(len, rows)) <= 100
    name, *numbers = rows[1].removeprefix("gradient of ").split()
    assert numbers == ["250000", "0.006172", "1.234e-05", "-1.234e-05", "0", "0", "0"]
    assert name.startswith("encode...")
    assert name.endswith(".encoder.weight")
    assert rows[2].split() == ["missing", "no", "gradient"]


def test_output():
    heads = {f"<critic_{number}>": gs.MeanSquaredError() for number in range(60)}
    predictions = {name: [torch.full((4,), 2.0)] * 3 for name in heads}
    out = gs.multi_step_loss(heads, predictions, {name: torch.zeros(4, 3) for name in heads})
    assert fits(repr(out))
    lines = repr(out).splitlines()
    assert lines[0] == "MultiStepLossOutput(loss=tensor(720.), num_nonfinite=tensor(0))"
    assert len(lines) == 13
    assert lines[-1] == "... 50 more lines; print() shows all"
    assert len(str(out).splitlines()) == 62
    assert lines[2].split() == ["<critic_0>", "tensor(12.)", "tensor(4.)", "float32", "[4,", "3]"]
    rows = rows_of(out._repr_html_())
    assert rows[1] == ["<critic_0>", "tensor(12.)", "tensor(4.)", "float32 [4, 3]", ""]
    head = "critic." * 20 + "first"
    out = gs.multi_step_loss({head: gs.MeanSquaredError()}, {head: [torch.ones(4)]}, {head: torch.zeros(4, 1)})
    assert fits(repr(out))
    assert repr(out).splitlines()[1].split() == [*str(out).splitlines()[1].split()]
    assert head in str(out)
    assert "loss=float32 [4]" in repr(gs.reduce_multi_step(torch.ones(4, 3), reduction="none"))


@pytest.mark.parametrize("steps", [3, 100])
def test_named_tuples(steps):
    """Values where they fit into a line, else dtype and shape; a structure of other objects prints them."""
    rewards, values = torch.ones(1, steps), torch.zeros(1, steps + 1)
    discounted = {"values": values, "discount": 0.5}
    results = [
        gs.generalized_advantages(rewards, lambda_=1.0, **discounted),
        gs.n_step_transitions(rewards, discount=0.5, n=2),
        gs.vtrace(rewards, ratios=rewards, **discounted),
        gs.muzero_targets(rewards, values, num_unroll_steps=2, td_steps=1, discount=0.5),
    ]
    for result in results:
        assert fits(repr(result))
        lines = repr(result).splitlines()
        assert lines[0] == type(result).__name__
        assert [line.split()[0] for line in lines[1:]] == [*result._fields]
    first = "tensor([[1.7500, 1.5000, 1.0000]])" if steps == 3 else "float32 [1, 100]"
    assert repr(results[0]).splitlines()[1] == f"advantages  {first}"
    assert repr(results[3]).splitlines()[3] == "mask         tensor([[True, True, True]])"
    assert repr(gs.VTrace(None, "b" * 90)).splitlines() == ["VTrace", "targets     None", "advantages  " + "b" * 90]


def test_diagnosis(model):
    layers = list(model.values())
    loss = sum(layer(torch.ones(2)).detach().sum() + layer.weight.sum() for layer in layers)
    diagnosis = gs.diagnose_gradients(loss, model)
    assert fits(repr(diagnosis))
    assert repr(diagnosis).startswith("Findings on 80 tensors; the model has 160 parameters.\ndisconnected: ")
    assert "and 78 more" in repr(diagnosis)
    header, row = rows_of(diagnosis._repr_html_())
    assert (header[0], row[0]) == ("code", "disconnected")
    assert row[3] == diagnosis.findings[0].remedy
