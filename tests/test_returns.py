"""Returns: every promise of the page, against definitions that are sums and share no code with the package."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
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
        expected = call(
            function,
            {name: value.double() if value.is_floating_point() else value for name, value in data.items()},
            gs.reference,
        )
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


# ---- Gradients, in every context ------------------------------------------------------------------------------------

INPUTS = ("rewards", "values", "next_values")


def inputs_of(function):
    return INPUTS if function not in ("lambda_returns", "n_step_returns") else ("rewards", "next_values")


def scalar(function, data, module=gs, forms=False, **changes):
    """A function of the inputs whose gradient depends on every result."""
    names = inputs_of(function)

    def apply(*inputs):
        results = call(function, data | dict(zip(names, inputs, strict=True)), module, **changes)
        return sum(
            ((k + 1) * result.double() * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum()
            for k, result in enumerate(results)
        )

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
    tensors = FUNCTIONS[function][0]
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
        one = gs.generalized_advantages(
            data["rewards"], data["values"], data["next_values"], discount=discount, lambda_=lambda_
        )
        return (*one, gs.n_step_returns(data["rewards"], None, data["next_values"], discount=discount, n=n))

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend=count)
    for k in range(6):
        arguments = (0.9 + k / 100, 0.5 + k / 100, 2 + k)
        assert_same(compiled(*arguments), both(*arguments))
    assert count.frame_count <= 2


# ---- Episodes -------------------------------------------------------------------------------------------------------


def joined_and_split(function, count, module=gs):
    """Random trajectories as rows of one call, and the episodes of all of them as rows of their own, padded behind."""
    data = random_data(7, count, 12)
    joined = call(function, data, module)
    terminated, truncated, mask = (data[name] for name in FLAGS)
    rows, begins, ends = [], [], []
    is_end = torch.ones_like(mask)
    is_end[:, :-1] = (terminated | truncated)[:, :-1] | ~mask[:, 1:]
    is_begin = torch.ones_like(mask)
    is_begin[:, 1:] = is_end[:, :-1] | ~mask[:, :-1]
    rows, begins = (mask & is_begin).nonzero(as_tuple=True)
    ends = (mask & is_end).nonzero(as_tuple=True)[1] + 1
    steps = torch.arange(12)
    index = (begins[:, None] + steps).clamp(max=11)
    inside = steps < (ends - begins)[:, None]
    split = {
        name: torch.where(inside, value[rows[:, None], index], torch.nan if value.is_floating_point() else True)
        for name, value in data.items()
    }
    split["mask"] = inside
    results = call(function, split, module)
    expected = [torch.zeros_like(result) for result in joined]
    for out, result in zip(expected, results, strict=True):
        out[rows[:, None].expand_as(index)[inside], index[inside]] = result[inside]
    return joined, tuple(expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_joined_equals_split(function):
    assert_same(*joined_and_split(function, 10_000), rtol=1e-12, atol=1e-12)


def leaking(function):
    """The reference with the mistakes of peers: what each of them gives for the arguments of `call`."""

    def with_change(**changes):
        """`changes` give arguments from the data."""
        return lambda data: call(
            function, data | {name: change(data) for name, change in changes.items()}, gs.reference
        )

    def never(data):
        return torch.zeros_like(data["mask"])

    def either(data):
        return data["terminated"] | data["truncated"]

    def later(name):
        return lambda data: torch.nn.functional.pad(data[name], (1, 0))[:, :-1]

    def bootstrap_twice(data):
        twice = data["discount"] * data["next_values"] * data["truncated"]
        return tuple(result + twice for result in call(function, data, gs.reference))

    return {
        "truncation as termination": with_change(terminated=either),
        "truncation ignored": with_change(truncated=never),
        "termination as truncation": with_change(terminated=never, truncated=either),
        "flags one later": with_change(terminated=later("terminated"), truncated=later("truncated")),
        "rewards one later": with_change(rewards=later("rewards")),
        "next value of the reset state": with_change(
            next_values=lambda data: torch.cat([data["values"][:, 1:], data["next_values"][:, -1:]], 1)
        ),
        "padding read": with_change(mask=lambda data: ~never(data)),
        "bootstrap twice": bootstrap_twice,
        "view read as contiguous": with_change(rewards=lambda data: data["rewards"].T.reshape(data["rewards"].shape)),
    }


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mistakes_of_peers_are_caught(function):
    data = random_data(8, 30, 12)
    expected = tuple(by_definition(data, entry) for entry in FUNCTIONS[function][2])
    for mistaken in leaking(function).values():
        with pytest.raises(AssertionError):
            assert_same(mistaken(data), expected)


def test_vtrace_and_retrace_pair_c_with_different_steps():
    data = random_data(9, 8, 10)
    turned = data | {"ratios": data["ratios"].roll(-1, 1)}
    for function in ("vtrace", "retrace"):
        expected = tuple(by_definition(data, entry) for entry in FUNCTIONS[function][2])
        with pytest.raises(AssertionError):
            assert_same(call(function, turned), expected)


@pytest.mark.filterwarnings("ignore")
def test_against_torchrl():
    """Without masks and NaN, where TorchRL is right."""
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    data = random_data(15, 5, 17, padding=0.0) | {"discount": 0.9, "lambda_": 0.8, "mask": None}
    values, next_values, rewards = (data[name][..., None] for name in ("values", "next_values", "rewards"))
    flags = ((data["terminated"] | data["truncated"])[..., None], data["terminated"][..., None])
    expected, targets = functional.generalized_advantage_estimate(0.9, 0.8, values, next_values, rewards, *flags)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # its gamma * int is float32
    assert_same(call("generalized_advantages", data), (expected[..., 0], targets[..., 0]), **tolerance)
    expected = functional.td_lambda_return_estimate(0.9, 0.8, next_values, rewards, *flags)
    assert_same(call("lambda_returns", data), (expected[..., 0],), **tolerance)


# ---- What is not finite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("steps", [6, 40, 300])
@pytest.mark.parametrize("batch_first", [True, False])
def test_not_finite_as_in_the_reference(function, steps, batch_first):
    for seed in range(3):
        data = random_data(seed, 20, steps, ends=0.1)
        g = torch.Generator().manual_seed(seed)
        for name in ("rewards", "values", "next_values", "discount", "lambda_", "ratios"):
            where = torch.rand(20, steps, generator=g)
            data[name] = torch.where(
                where < 0.01,
                torch.nan,
                torch.where(where > 0.995, torch.inf if name not in ("discount", "lambda_") else 0.5, data[name]),
            )
            if name in ("discount", "lambda_", "ratios"):
                data[name] = torch.where((where > 0.2) & (where < 0.3), 0, data[name])
        names = inputs_of(function)
        for one in (data, {name: value.T.contiguous() for name, value in data.items()} if not batch_first else data):
            order = one is data
            leaves = tuple(one[name].clone().requires_grad_() for name in names)
            arguments = one | dict(zip(names, leaves, strict=True))
            results = call(function, arguments, batch_first=order)
            expected = call(function, arguments, gs.reference, batch_first=order)
            assert_same(results, expected, equal_nan=True)
            weights = [
                torch.where(torch.rand(result.shape, generator=g) < 0.02, torch.nan, 1.0).double() for result in results
            ]
            gradients = torch.autograd.grad(results, leaves, weights)
            data_of = {name: value for name, value in one.items()}
            finite = all(torch.isfinite(data_of[name]).all() for name in ("discount", "lambda_", "ratios"))
            if finite:
                assert_same(gradients, torch.autograd.grad(expected, leaves, weights), equal_nan=True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_stays_in_its_episode(function):
    data = random_data(11, 6, 40, dtype=torch.float32)
    names = inputs_of(function)
    clean = tuple(data[name].clone().requires_grad_() for name in names)
    expected = call(function, data | dict(zip(names, clean, strict=True)))
    t = 20
    data["terminated"][:, t] = True
    data["mask"][:, t : t + 2] = True
    expected = call(function, data | dict(zip(names, clean, strict=True)))
    weights = [torch.ones_like(result) for result in expected]
    wanted = torch.autograd.grad(expected, clean, weights)
    spoilt = {name: value.clone() for name, value in data.items()}
    for name in ("rewards", "values", "next_values", "discount", "lambda_", "ratios"):
        spoilt[name][:, t + 1 :] = torch.nan
    spoilt["next_values"][:, t] = torch.nan
    spoilt["lambda_"][:, t] = data["lambda_"][:, t] if function == "retrace" else torch.nan
    leaves = tuple(spoilt[name].clone().requires_grad_() for name in names)
    results = call(function, spoilt | dict(zip(names, leaves, strict=True)))
    for result, own in zip(results, expected, strict=True):
        torch.testing.assert_close(result[:, : t + 1], own[:, : t + 1])
    gradients = torch.autograd.grad(
        [result[:, : t + 1] for result in results], leaves, [weight[:, : t + 1] for weight in weights]
    )
    for gradient, own in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient[:, : t + 1], own[:, : t + 1])
    masked = data | {"mask": data["mask"].clone()}
    masked["mask"][:, 5] = False
    for result in call(function, masked):
        assert (result[:, 5] == 0).all()


# ---- Long rows ------------------------------------------------------------------------------------------------------

LONG = [(1, 1024), (2, 1025), (3, 1279)]


def spoilt(data, seed):
    """NaN, inf and coefficients of 0 in about one step of 200, more of them around multiples of 256 steps."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.arange(data["rewards"].shape[1])
    part = torch.where(((steps + 2) % 256 < 4) | ((-steps) % 256 < 3), 0.1, 0.002)
    result = dict(data)
    for name in ("rewards", "values", "next_values", "ratios"):
        where = torch.rand(data[name].shape, generator=g) < part / 4
        result[name] = torch.where(where, torch.nan if seed % 2 else torch.inf, data[name])
    for name in ("discount", "lambda_", "ratios"):
        result[name] = torch.where(torch.rand(data[name].shape, generator=g) < part, 0, result[name])
    return result


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("batch_first", [True, False])
def test_long_rows(function, shape, batch_first):
    """Rows that kernels cut into blocks of steps, with and without numbers that are not finite, and their gradients."""
    names = inputs_of(function)
    for seed, ends in ((0, 0.0), (1, 0.01)):
        clean = random_data(seed, *shape, ends=ends, padding=ends / 2)
        for data in (clean, spoilt(clean, seed)):
            turned = data if batch_first else {name: value.T.contiguous() for name, value in data.items()}
            found, expected = [], []
            for module, out in ((gs, found), (gs.reference, expected)):
                leaves = tuple(turned[name].clone().requires_grad_() for name in names)
                arguments = turned | dict(zip(names, leaves, strict=True))
                results = call(function, arguments, module, batch_first=batch_first)
                weights = [torch.linspace(-1, 2, result.numel()).reshape(result.shape).double() for result in results]
                weights[0][weights[0] > 1.99] = torch.nan
                out += [*results, *torch.autograd.grad(results, leaves, weights)]
            assert_same(found, expected, equal_nan=True, rtol=1e-9, atol=1e-9)


def test_long_rows_of_many_chunks_are_the_same_from_call_to_call():
    data = random_data(5, 1, 40_000, dtype=torch.float32, ends=0.0, padding=0.0)
    changes = {name: None for name in FLAGS} | {"discount": 0.999, "lambda_": 0.9999}
    results = call("generalized_advantages", data, **changes)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in data.items()}
    expected = call("generalized_advantages", wide, gs.reference, **changes)
    assert_same(results, tuple(value.float() for value in expected), rtol=1e-4, atol=1e-3)
    for _ in range(3):
        assert_same(call("generalized_advantages", data, **changes), results, rtol=0, atol=0)


# ---- Types, strides, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_types_and_strides(function):
    data = random_data(12, 4, 21, dtype=torch.float32)
    half = data | {name: data[name].bfloat16() for name in ("rewards", "next_values", "discount")}
    wide = {name: value.double() if value.is_floating_point() else value for name, value in half.items()}
    expected = tuple(result.float() for result in call(function, wide, gs.reference))
    assert_same(call(function, half), expected, rtol=1e-5, atol=1e-5)
    assert call(function, half | {"discount": torch.tensor(0.9, dtype=torch.float64)})[0].dtype == torch.float64
    names = inputs_of(function)
    leaves = [half[name].clone().requires_grad_() for name in names]
    gradients = torch.autograd.grad(
        sum(r.sum() for r in call(function, half | dict(zip(names, leaves, strict=True)))), leaves
    )
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in leaves]
    strided = {name: value.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3] for name, value in data.items()}
    assert_same(call(function, strided), call(function, data))
    expanded = data | {
        "rewards": torch.ones(1, 1).expand(4, 21),
        "mask": torch.ones(4, 1, dtype=torch.bool).expand(4, 21),
    }
    dense = {name: value.contiguous() for name, value in expanded.items()}
    assert_same(call(function, expanded), call(function, dense))
    for shape in ((0, 5), (3, 0)):
        empty = {name: value[: shape[0], : shape[1]] for name, value in data.items()}
        assert all(result.shape == shape for result in call(function, empty))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_constants_and_saved_flags(function):
    data = random_data(13, 4, 9)
    for name in FUNCTIONS[function][0] + ("discount",):
        leaf = data[name].clone().requires_grad_()
        argument = r"write " + name.replace("lambda_", "lambda_") + r".detach\(\)"
        with pytest.raises(ValueError, match=argument):
            call(function, data | {name: leaf})
        with torch.no_grad():
            call(function, data | {name: leaf})
    rewards = data["rewards"].clone().requires_grad_()
    results = call(function, data | {"rewards": rewards})
    data["terminated"].logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()
    assert all(result.grad_fn is None for result in call(function, data))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rewards": [[1.0]]}, TypeError, "lambda_returns: rewards must be a tensor, but it is of type list"),
        ({"rewards": torch.ones(3, 6).numpy()}, TypeError, "torch.as_tensor"),
        ({"rewards": torch.ones(3, 6).long()}, TypeError, r"write rewards.float\(\)"),
        ({"rewards": torch.ones(3, 6, 1)}, ValueError, r"write rewards.squeeze\(-1\)"),
        ({"rewards": torch.ones(6)}, ValueError, r"write rewards\[None\]"),
        ({"next_values": torch.ones(3, 5)}, ValueError, r"next_values must have shape \[3, 6\].*\[3, 5\]"),
        ({"next_values": None, "values": None}, ValueError, r"\[3, 6\].*\[3, 7\].*both are None"),
        ({"next_values": None, "values": torch.ones(3, 7)}, ValueError, "truncated cannot be given"),
        ({"next_values": None, "values": torch.ones(3, 6)}, ValueError, r"values must have shape \[3, 7\]"),
        ({"discount": torch.ones(6)}, ValueError, r"discount\[None\] or discount\[:, None\]"),
        ({"discount": 1.5}, ValueError, "discount must be from -1 to 1"),
        ({"discount": True}, TypeError, "discount must be a number"),
        ({"lambda_": -0.1}, ValueError, "lambda_ must be from 0 to 1"),
        ({"lambda_": float("nan")}, ValueError, "lambda_ must be from 0 to 1"),
        ({"terminated": torch.zeros(3, 6)}, TypeError, r"write terminated.bool\(\)"),
        ({"mask": torch.zeros(3, 5).bool()}, ValueError, r"mask must have shape \[3, 6\]"),
        ({"batch_first": 1}, TypeError, "batch_first must be a bool"),
        ({"values": torch.ones(3, 6, device="meta")}, ValueError, "device of rewards"),
    ],
)
def test_errors(changes, error, message):
    data = random_data(14, 3, 6)
    with pytest.raises(error, match=message):
        call("lambda_returns", data, **changes)


def test_errors_of_other_functions():
    data = random_data(14, 3, 6)
    for n, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="n must "):
            call("n_step_returns", data, n=n)
    for clip in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="clip_c must not be negative"):
            call("vtrace", data, clip_c=clip)
    with pytest.raises(ValueError, match="values must have shape"):
        call("generalized_advantages", data, values=torch.ones(3, 7))
    unclipped = by_definition(data, lambda e, t: vtrace_target(e, t, torch.inf, torch.inf))
    assert_same(call("vtrace", data, clip_rho=torch.inf, clip_c=torch.inf)[:1], (unclipped,))


# ---- MuZero ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_muzero_targets(batch_first):
    g = torch.Generator().manual_seed(1)
    rewards, nu = torch.randn(9, 8, generator=g), torch.randn(9, 9, generator=g)
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 8, 99, -3])
    over, players = torch.rand(9, generator=g) < 0.5, torch.randint(2, (9, 9), generator=g)
    for n in (1, 3, 10**12):
        for options in (
            {},
            {"to_play": players},
            {"to_play": players.bool(), "root_reward": torch.ones(9)},
            {"reward": "value_prefix", "prefix_horizon": 2},
            {"reward": "value_prefix", "root_reward": torch.ones(9)},
            {"discount": torch.rand(9, 1, generator=g)},
            {"discount": torch.tensor(0.0)},
        ):
            arguments = {
                "rewards": rewards,
                "root_values": nu,
                "lengths": lengths,
                "terminated": over,
                "discount": 0.9,
            } | options
            if not batch_first:
                arguments = {
                    k: v.T if isinstance(v, torch.Tensor) and v.dim() == 2 else v for k, v in arguments.items()
                }
            arguments |= {"num_unroll_steps": 11, "td_steps": n, "batch_first": batch_first}
            assert_same(gs.muzero_targets(**arguments), gs.reference.muzero_targets(**arguments))
    spoilt, values = rewards.clone(), nu.clone()
    for b in range(9):
        length = int(lengths[b].clamp(0, 8))
        spoilt[b, length:] = torch.nan
        values[b, length + 1 :] = torch.nan
    arguments = {"num_unroll_steps": 5, "td_steps": 3, "discount": 0.9, "lengths": lengths, "terminated": over}
    assert_same(gs.muzero_targets(spoilt, values, **arguments), gs.muzero_targets(rewards, nu, **arguments))
    mapped = torch.func.vmap(lambda r, length: gs.muzero_targets(r, nu, **(arguments | {"lengths": length})))
    stacked = mapped(torch.stack([rewards, -rewards]), torch.stack([lengths, lengths.flip(0)]))
    assert_same(
        [field[1] for field in stacked], gs.muzero_targets(-rewards, nu, **(arguments | {"lengths": lengths.flip(0)}))
    )
    empty = gs.muzero_targets(torch.ones(2, 0), torch.ones(2, 1), num_unroll_steps=2, td_steps=3, discount=0.9)
    assert empty.values.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert not empty.policy_mask.any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lengths": torch.tensor([1, 2])}, ValueError, "terminated must be given with lengths"),
        ({"lengths": torch.tensor([1.0, 2.0])}, TypeError, r"write lengths.long\(\)"),
        ({"to_play": torch.ones(2, 4)}, TypeError, "integers or bool"),
        ({"reward": "value_prefix", "to_play": torch.ones(2, 4).long()}, ValueError, "cannot be given with to_play"),
        ({"reward": "sum"}, ValueError, "'reward' or 'value_prefix'"),
        ({"num_unroll_steps": -1}, ValueError, "num_unroll_steps must be"),
        ({"td_steps": 0}, ValueError, "td_steps must be"),
        ({"prefix_horizon": 1.0}, TypeError, "prefix_horizon must be"),
        ({"root_values": torch.ones(2, 3)}, ValueError, r"root_values must have shape \[2, 4\]"),
        ({"root_values": torch.ones(2, 4, requires_grad=True)}, ValueError, r"write root_values.detach\(\)"),
        ({"discount": torch.ones(2, 3)}, ValueError, r"broadcast to \[2, 1\]"),
    ],
)
def test_errors_of_muzero_targets(changes, error, message):
    arguments = {
        "rewards": torch.ones(2, 3),
        "root_values": torch.ones(2, 4),
        "num_unroll_steps": 2,
        "td_steps": 2,
        "discount": 0.9,
    }
    with pytest.raises(error, match=message):
        gs.muzero_targets(**(arguments | changes))


@pytest.fixture
def without_kernels(monkeypatch):
    """As on a device that has no kernels."""
    monkeypatch.setattr(gs._native, "DEVICE_TYPES", ())
    monkeypatch.setattr(gs.returns._context, "is_eager", lambda: False)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_device_without_kernels_runs_the_reference(function, without_kernels):
    data = random_data(0)
    assert_same(call(function, data), call(function, data, gs.reference), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"reward": "value_prefix", "prefix_horizon": 2}])
def test_muzero_targets_of_a_device_without_kernels(options, without_kernels):
    rewards, values = torch.randn(3, 6), torch.randn(3, 7)
    options = {"num_unroll_steps": 4, "td_steps": 2, "discount": 0.9, **options}
    results = gs.muzero_targets(rewards, values, **options)
    assert_same(results, gs.reference.muzero_targets(rewards, values, **options), rtol=0, atol=0)
