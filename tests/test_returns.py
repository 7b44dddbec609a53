"""Returns: every promise of the page, against definitions that are sums and share no code with the package."""

from __future__ import annotations

import pytest
import torch
from trajectories import (
    advantage,
    by_definition,
    lambda_return,
    muzero_row,
    n_step_return,
    random_data,
    retrace_target,
    vtrace_advantage,
    vtrace_target,
)

import gradscale_ext as gs

FLAGS = ("terminated", "truncated", "mask")
TRAJECTORIES = ("rewards", "values", "next_values", "discount", *FLAGS)
#: By name: the arguments that it takes besides, and the entries of its results by definition.
FUNCTIONS = {
    "lambda_returns": (("lambda_",), {}, (lambda_return,)),
    "n_step_returns": ((), {"n": 3}, (lambda e, t: n_step_return(e, t, 3),)),
    "generalized_advantages": (("lambda_",), {}, (advantage, lambda e, t: advantage(e, t) + e["v"][t])),
    "vtrace": (("lambda_", "ratios"), {}, (vtrace_target, vtrace_advantage)),
    "retrace": (("lambda_", "ratios"), {}, (retrace_target,)),
}


def call(function, data, module=gs, **changes):
    """The results of a function as a tuple. `changes` replace arguments; None leaves them out."""
    tensors, others, _ = FUNCTIONS[function]
    arguments = {name: data[name] for name in (*TRAJECTORIES, *tensors)} | others | changes
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if function == "retrace":
        arguments["q_values"] = arguments.pop("values")
    results = getattr(module, function)(**arguments)
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def assert_same(results, expected, **tolerance):
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, **tolerance)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_reference_against_the_definitions(function, seed):
    data = random_data(seed)
    expected = tuple(by_definition(data, entry) for entry in FUNCTIONS[function][2])
    assert_same(call(function, data, gs.reference), expected, rtol=1e-12, atol=1e-13)


def test_reference_of_muzero_targets_against_the_definition():
    g = torch.Generator().manual_seed(0)
    for n in (1, 3, 20):
        rewards, nu = torch.randn(9, 8, generator=g).double(), torch.randn(9, 9, generator=g).double()
        lengths, over = torch.arange(9), torch.rand(9, generator=g) < 0.5
        players = torch.randint(2, (9, 9), generator=g)
        for to_play in (None, players):
            results = gs.reference.muzero_targets(
                rewards,
                nu,
                num_unroll_steps=5,
                td_steps=n,
                discount=0.9,
                lengths=lengths,
                terminated=over,
                to_play=to_play,
            )
            for b in range(9):
                own = None if to_play is None else to_play[b].numpy()
                row = muzero_row(rewards[b].numpy(), nu[b].numpy(), b, bool(over[b]), 5, n, 0.9, own)
                for result, expected in zip(results, row, strict=True):
                    torch.testing.assert_close(result[b], torch.from_numpy(expected))


# ---- The kernels against the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 5), (5, 16), (2, 47), (70, 9), (2, 600)])
def test_kernels_against_the_reference(function, seed, batch, steps):
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        data = random_data(seed, batch, steps, dtype=dtype)
        expected = call(function, {name: value.double() if value.is_floating_point() else value for name, value in data.items()}, gs.reference)
        expected = tuple(value.to(dtype) for value in expected)
        assert_same(call(function, data), expected, rtol=tolerance, atol=tolerance)
        turned = {name: value.T for name, value in data.items()}
        results = call(function, turned, batch_first=False)
        assert_same(tuple(result.T for result in results), expected, rtol=tolerance, atol=tolerance)
        turned = {name: value.T.contiguous() for name, value in data.items()}
        results = call(function, turned, batch_first=False)
        assert all(result.is_contiguous() for result in results)
        assert_same(tuple(result.T for result in results), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 40, 10**12])
def test_any_n(n):
    for ends in (0.0, 0.1):
        data = random_data(n % 5, 3, 40, ends=ends, padding=ends)
        expected = by_definition(data, lambda e, t: n_step_return(e, t, n))
        assert_same(call("n_step_returns", data, n=n), (expected,), rtol=1e-12, atol=1e-13)
