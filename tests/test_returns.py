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


# ---- Gradients, in every context --------------------------------------------------------------------------------------

INPUTS = ("rewards", "values", "next_values")


def inputs_of(function):
    return INPUTS if function not in ("lambda_returns", "n_step_returns") else ("rewards", "next_values")


def scalar(function, data, module=gs, forms=False, **changes):
    """A function of the inputs whose gradient depends on every result."""
    names = inputs_of(function)

    def apply(*inputs):
        results = call(function, data | dict(zip(names, inputs, strict=True)), module, **changes)
        return sum(((k + 1) * result.double() * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum() for k, result in enumerate(results))

    return apply, tuple(data[name].clone() for name in names)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(3, 7), (2, 40)])
def test_gradients(function, shape):
    data = random_data(1, *shape)
    names = inputs_of(function)
    loss, inputs = scalar(function, data)
    expected_loss, _ = scalar(function, data, gs.reference)
    expected = torch.func.grad(expected_loss, tuple(range(len(names))))(*inputs)
    leaves = tuple(value.clone().requires_grad_() for value in inputs)
    assert_same(torch.autograd.grad(loss(*leaves), leaves), expected, rtol=1e-11, atol=1e-12)
    assert_same(torch.func.grad(loss, tuple(range(len(names))))(*inputs), expected, rtol=1e-11, atol=1e-12)
    directions = tuple(torch.randn_like(value) for value in inputs)
    _, tangent = torch.func.jvp(loss, inputs, directions)
    torch.testing.assert_close(tangent, sum((g * d).sum() for g, d in zip(expected, directions, strict=True)))

    def apply(*values):
        return call(function, data | dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(apply, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(apply, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("function", ["lambda_returns", "n_step_returns", "generalized_advantages", "vtrace"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_values_of_all_observations(function, batch_first):
    data = random_data(2, 4, 9)
    observations = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    rewards = data["rewards"].clone().requires_grad_()
    changes = {"truncated": None, "rewards": rewards}

    def turned(changes):
        if batch_first:
            return data, changes
        return {name: value.T for name, value in data.items()}, {
            name: value.T if isinstance(value, torch.Tensor) else value for name, value in changes.items()
        }

    one, others = turned(changes | {"values": observations, "next_values": None})
    results = call(function, one, **others, batch_first=batch_first)
    split = {"values": observations[:, :-1], "next_values": observations[:, 1:]}
    one, others = turned(changes | split)
    expected = call(function, one, gs.reference, **others, batch_first=batch_first)
    assert_same(results, expected)
    weights = [torch.randn_like(result) for result in results]
    got = torch.autograd.grad(results, (rewards, observations), weights, create_graph=True)
    assert_same(got, torch.autograd.grad(expected, (rewards, observations), weights))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_vmap_over_each_argument(function):
    examples = [random_data(seed, 3, 6) for seed in range(4)]
    tensors, others, _ = FUNCTIONS[function]
    names = (*TRAJECTORIES, *tensors)
    for mapped in (*[(name,) for name in names], names):
        fixed = {name: examples[0][name] for name in names}
        stacked = {name: torch.stack([example[name] for example in examples]) for name in mapped}

        def one(arguments, fixed=fixed):
            return call(function, fixed | arguments)

        results = torch.func.vmap(one)(stacked)
        for i, example in enumerate(examples):
            expected = call(function, fixed | {name: example[name] for name in mapped}, gs.reference)
            assert_same(tuple(result[i] for result in results), expected)
    for name in ("discount", "lambda_")[: len(tensors) + 1]:
        numbers = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        results = torch.func.vmap(lambda number, name=name: call(function, examples[0] | {name: number}))(numbers)
        for i in range(3):
            assert_same(tuple(result[i] for result in results), call(function, examples[0] | {name: numbers[i]}))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.untraced
def test_compiled_and_exported(function):
    data = random_data(3, 3, 6)
    loss, inputs = scalar(function, data)
    argnums = tuple(range(len(inputs)))
    expected = torch.func.grad(scalar(function, data, gs.reference)[0], argnums)(*inputs)
    for options in ({}, {"dynamic": True}):
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", **options)
        leaves = tuple(value.clone().requires_grad_() for value in inputs)
        assert_same(torch.autograd.grad(compiled(*leaves), leaves), expected)
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(loss, argnums), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*inputs), expected)
    compiled = torch.compile(lambda *values: torch.func.jvp(loss, values, values), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs)[1], sum((g * v).sum() for g, v in zip(expected, inputs, strict=True)))

    class Module(torch.nn.Module):
        def forward(self, *values):
            return loss(*values)

    for strict in (True, False):
        exported = torch.export.export(Module(), inputs, strict=strict).module()
        leaves = tuple(value.clone().requires_grad_() for value in inputs)
        assert_same(torch.autograd.grad(exported(*leaves), leaves), expected)
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):
        leaves = tuple(value.clone().requires_grad_() for value in inputs)
        total = checkpoint(loss, *leaves, use_reentrant=reentrant)
        assert_same(torch.autograd.grad(total, leaves) if not reentrant else _backward(total, leaves), expected)
    with torch.inference_mode():
        assert_same(call(function, data), call(function, data, gs.reference))


def _backward(total, leaves):
    total.backward()
    return tuple(leaf.grad for leaf in leaves)


@pytest.mark.untraced
def test_numbers_that_change_do_not_recompile():
    data = random_data(4, 3, 6, dtype=torch.float32)
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def both(discount, lambda_, n):
        one = gs.generalized_advantages(data["rewards"], data["values"], data["next_values"], discount=discount, lambda_=lambda_)
        return (*one, gs.n_step_returns(data["rewards"], None, data["next_values"], discount=discount, n=n))

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend=count)
    for k in range(6):
        arguments = (0.9 + k / 100, 0.5 + k / 100, 2 + k)
        assert_same(compiled(*arguments), both(*arguments))
    assert count.frame_count <= 2
