"""A few cases through torch.compile, which is slow."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import strategies as st

from . import test_flow, test_loss
from .budget import fuzz
from .strategies import REAL, Numbers, product

PLAIN = ("contiguous", "transposed", "columns", "rows")
"""Layouts of the tensors that are passed to compiled functions."""


@st.composite
def operator_cases(draw: st.DrawFn) -> test_flow.Case:
    options = product(dict, seed=range(64), dtype=REAL, shape=((3, 4), (2, 3, 4), (5,)), x_layout=PLAIN)
    gradient = product(Numbers, seed=range(64), layout=PLAIN, palette=("ordinary", "zeros"))
    operator = dataclasses.replace(draw(test_flow.operators()), module=False)
    arguments = tuple(
        argument and dataclasses.replace(argument, layout="contiguous") for argument in operator.arguments
    )
    return test_flow.Case(
        operator=dataclasses.replace(operator, arguments=arguments),
        context="compile",
        gradient=draw(gradient),
        **draw(options),
    )


@pytest.mark.compiled
@fuzz(operator_cases(), examples=6)
def test_compiled_operators(case: test_flow.Case) -> None:
    torch._dynamo.reset()
    trial = test_flow.Trial(case)
    compiled = torch.compile(trial.apply, backend="aot_eager", fullgraph=True)
    trial.check(torch.autograd.grad(compiled(trial.x), trial.x, trial.g)[0])


@st.composite
def loss_cases(draw: st.DrawFn) -> test_loss.Case:
    case = draw(test_loss.cases())
    heads = tuple(
        dataclasses.replace(
            item,
            layout="contiguous",
            target_layout="contiguous",
            form="list" if item.form in ("unbound", "same") else item.form,
            target_form="list" if item.target_form in ("unbound", "same") else item.target_form,
        )
        for item in case.heads[:2]
    )
    return dataclasses.replace(case, heads=heads, context="compile", weights_layout="contiguous")


@pytest.mark.compiled
@fuzz(loss_cases(), examples=4)
def test_compiled_loss(case: test_loss.Case) -> None:
    torch._dynamo.reset()
    trial = test_loss.Trial(case, case.seed)
    compiled = torch.compile(trial.run, backend="aot_eager", fullgraph=True)
    out = compiled()
    trial.check(out)
    trial.check_gradients(trial.gradients(out))
