"""Returns: results compared with sums by definition, without code of the package; gradients, contexts, errors."""

from __future__ import annotations

import fractions
import inspect
import itertools
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from trajectories import (
    DEFINITIONS,
    by_definition,
    looped,
    muzero_row,
    n_step_return,
    random_data,
    retrace_target,
    vtrace_advantage,
    vtrace_target,
)

import gradscale_ext as gs
from gradscale_ext.capture.graphs import seeming_to_capture

FLAGS = ("terminated", "truncated", "mask")
TRAJECTORIES = ("rewards", "values", "next_values", "discount", *FLAGS)
#: Names of each function's additional tensors, and its additional numbers.
FUNCTIONS = {
    "lambda_returns": (("lambda_",), {}),
    "n_step_returns": ((), {"n": 3}),
    "generalized_advantages": (("lambda_",), {}),
    "vtrace": (("lambda_", "ratios"), {}),
    "retrace": (("lambda_", "ratios"), {}),
}
#: The limits of ratios among the arguments of a function.
CLIPS = {"vtrace": ("clip_rho", "clip_c", "clip_pg_rho"), "retrace": ("clip_c",)}


def call(function, data, module=gs, **changes):
    """The results of a function as a tuple. `changes` replace arguments."""
    tensors, others = FUNCTIONS[function]
    arguments = {name: data[name] for name in (*TRAJECTORIES, *tensors)} | others | changes
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
@pytest.mark.any_version
def test_reference_against_the_definitions(function, seed):
    data = random_data(seed)
    expected = tuple(by_definition(data, entry) for entry in DEFINITIONS[function])
    assert_same(call(function, data, gs.reference), expected, rtol=1e-12, atol=1e-13)


def window_data():
    """Arguments of `muzero_targets`: nine windows (one per row) that contain 0 to 8 steps of a game."""
    g = torch.Generator().manual_seed(0)
    data = {
        "rewards": torch.randn(9, 8, generator=g).double(),
        "root_values": torch.randn(9, 9, generator=g).double(),
        "lengths": torch.arange(9).flip(0),
        "terminated": torch.rand(9, generator=g) < 0.5,
        "to_play": torch.arange(9).expand(9, 9) % 2,
        "root_reward": torch.randn(9, generator=g).double(),
    }
    return data


def windows_by_definition(data, n, to_play=None, horizon=0, root_reward=None):
    rows = []
    for b in range(9):
        r, nu, length, is_over = (data[name][b].numpy() for name in ("rewards", "root_values", "lengths", "terminated"))
        own = None if to_play is None else to_play[b].numpy()
        root = None if root_reward is None else root_reward[b].item()
        rows.append(muzero_row(r, nu, int(length), bool(is_over), 5, n, 0.9, own, horizon, root))
    return tuple(torch.from_numpy(np.stack(field)) for field in zip(*rows, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("ratio", [torch.inf, 1e30, None])
@pytest.mark.any_version
def test_recurrences_with_infinite_and_large_numbers_against_loops(function, module, ratio):
    """An infinite number in each position of the inputs, and infinite or very large ratios, without a clip."""
    changes = dict.fromkeys(CLIPS.get(function, ()))
    for seed in range(6):
        data = random_data(seed, 20, 9, ends=0.05, padding=0.05)
        positions = (torch.arange(20), torch.randint(9, (20,), generator=torch.Generator().manual_seed(seed)))
        if ratio is None:
            for name in ("rewards", "values", "next_values"):
                data[name][positions] = torch.inf * (-1) ** seed
        else:
            data["ratios"][positions] = ratio
        expected = looped(function, data, clips=[None] * 3)
        assert_same(call(function, data, module, **changes), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.any_version
def test_a_coefficient_of_zero_among_others_that_are_not_finite_against_loops(function, module):
    """It excludes its term in any order of the factors. A discount and a lambda are in their range, or NaN."""
    names = ("discount", "lambda_", "ratios")
    for seed, (zero, other) in enumerate(itertools.permutations(names, 2)):
        number = torch.inf if other == "ratios" else torch.nan
        data = random_data(seed, 20, 9, ends=0.05, padding=0.05)
        positions = (torch.arange(20), torch.randint(9, (20,), generator=torch.Generator().manual_seed(seed)))
        data[zero][positions], data[other][positions] = 0.0, number
        expected = looped(function, data)
        assert_same(call(function, data, module), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("ratio", "q_value", "expected"), [(1e30, 2.0**30, 0.0), (torch.inf, 3.0, -torch.inf)])
@pytest.mark.any_version
def test_a_coefficient_of_retrace_multiplies_the_whole_difference(ratio, q_value, expected, module, batch_first):
    """c_1 (x_1 - Q_1 + γ c_2 (G_2 - Q_2)): the terms overflow if c_1 multiplies them separately."""
    unit = 2.0**30 if ratio == 1e30 else 1.0
    rewards = torch.tensor([[0.0, 0.0, 3 * unit]]).expand(40, 3)
    q_values = torch.tensor([[0.0, q_value, unit]]).expand(40, 3)
    ratios, next_values = torch.tensor([[1.0, ratio, 1.0]]).expand(40, 3), torch.zeros(40, 3)
    tensors = (rewards, q_values, next_values, ratios)
    *tensors, ratios = tensors if batch_first else [x.T for x in tensors]
    options = {"ratios": ratios, "discount": 0.5, "clip_c": None, "batch_first": batch_first}
    targets = module.retrace(*tensors, **options)
    assert ((targets if batch_first else targets.T)[:, 0] == expected).all()
    if ratio == 1e30:
        dense = tuple(x.contiguous() for x in tensors)
        directions = tuple(torch.ones_like(x) for x in dense)
        _, tangent = torch.func.jvp(lambda *given: module.retrace(*given, **options), dense, directions)
        assert tangent.isfinite().all()


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.any_version
def test_a_coefficient_of_vtrace_multiplies_the_whole_gradient(module, batch_first):
    """c_1 multiplies the gradient of targets_1 plus the one that comes from step 0: 1 - 0.5 * 4, times infinity."""
    rewards = torch.zeros(40, 3, requires_grad=True)
    ratios = torch.tensor([[1.0, torch.inf, 1.0]]).expand(40, 3)
    given = (rewards, torch.zeros(40, 3), torch.zeros(40, 3), ratios)
    *tensors, ratios = given if batch_first else [x.T for x in given]
    options = {"ratios": ratios, "discount": 0.5, "clip_rho": 1.0, "clip_c": None, "batch_first": batch_first}
    targets = module.vtrace(*tensors, **options).targets
    weights = torch.tensor([[-4.0, 1.0, 0.0]]).expand(40, 3)
    targets.backward(weights if batch_first else weights.T)
    torch.testing.assert_close(rewards.grad, torch.tensor([[-4.0, -1.0, -torch.inf]]).expand(40, 3))


@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.any_version
def test_muzero_targets_against_the_definition(n, module):
    data = window_data()
    random_players = torch.randint(2, (9, 9), generator=torch.Generator().manual_seed(1))
    for options in ({}, {"to_play": data["to_play"]}, {"to_play": random_players}, {"horizon": 2}, {"horizon": 5}):
        for root_reward in (None, data["root_reward"]):
            arguments = {**data, "to_play": options.get("to_play"), "root_reward": root_reward}
            if "horizon" in options:
                horizon = options["horizon"]
                arguments |= {"reward": "value_prefix", "prefix_horizon": horizon if horizon != 5 else None}
            results = module.muzero_targets(**arguments, num_unroll_steps=5, td_steps=n, discount=0.9)
            expected = windows_by_definition(data, n, root_reward=root_reward, **options)
            assert_same(results, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 40, 10**12])
@pytest.mark.any_version
def test_any_n(n):
    for ends in (0.0, 0.1):
        data = random_data(n % 5, 3, 40, ends=ends, padding=ends)
        expected = by_definition(data, lambda e, t: n_step_return(e, t, n))
        assert_same(call("n_step_returns", data, n=n), (expected,), rtol=1e-12, atol=1e-13)


# ---- Arguments ------------------------------------------------------------------------------------------------------

LAST_ARGUMENTS = "terminated=None, truncated=None, mask=None, batch_first=True, check=False)"
SIGNATURES = {
    "lambda_returns": "(rewards, values=None, next_values=None, *, discount, lambda_, " + LAST_ARGUMENTS,
    "n_step_returns": "(rewards, values=None, next_values=None, *, discount, n, " + LAST_ARGUMENTS,
    "generalized_advantages": "(rewards, values, next_values=None, *, discount, lambda_, " + LAST_ARGUMENTS,
    "vtrace": "(rewards, values, next_values=None, *, ratios, discount, lambda_=1.0, clip_rho=1.0, clip_c=1.0, "
    "clip_pg_rho=1.0, " + LAST_ARGUMENTS,
    "retrace": "(rewards, q_values, next_values, *, ratios, discount, lambda_=1.0, clip_c=1.0, " + LAST_ARGUMENTS,
    "muzero_targets": "(rewards, root_values, *, num_unroll_steps, td_steps, discount, lengths=None, terminated=None, "
    "to_play=None, reward='reward', prefix_horizon=None, root_reward=None, batch_first=True, check=False)",
}
FIELDS = {
    "generalized_advantages": (gs.GeneralizedAdvantages, ("advantages", "returns")),
    "vtrace": (gs.VTrace, ("targets", "advantages")),
    "muzero_targets": (gs.MuZeroTargets, ("values", "rewards", "mask", "policy_mask")),
}


@pytest.mark.parametrize("function", SIGNATURES)
@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.any_version
def test_signatures_and_names_of_results(function, module):
    signature = inspect.signature(getattr(module, function))
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    if module is gs.reference and function != "muzero_targets":
        assert "check" not in signature.parameters
        plain.append(inspect.Parameter("check", inspect.Parameter.KEYWORD_ONLY, default=False))
    assert str(inspect.Signature(plain)) == SIGNATURES[function]
    kind, fields = FIELDS.get(function, (torch.Tensor, None))
    assert signature.return_annotation == kind.__name__
    assert getattr(kind, "_fields", None) == fields


@pytest.mark.parametrize("clips", [(1.7, 0.6, 2.0), (0.5, 1.2, None), (0, 0, 0), (torch.inf, None, 0.9)])
@pytest.mark.any_version
def test_clips(clips):
    data = random_data(17, 6, 12)
    limits = tuple(torch.inf if clip is None else clip for clip in clips)
    names = dict(zip(("clip_rho", "clip_c", "clip_pg_rho"), clips, strict=True))
    for module in (gs, gs.reference):
        results = call("vtrace", data, module, **names)
        expected = (
            by_definition(data, lambda e, t: vtrace_target(e, t, *limits[:2])),
            by_definition(data, lambda e, t: vtrace_advantage(e, t, *limits)),
        )
        assert_same(results, expected)
        expected = by_definition(data, lambda e, t: retrace_target(e, t, limits[1]))
        assert_same(call("retrace", data, module, clip_c=clips[1]), (expected,))


@pytest.mark.any_version
def test_values_given_together_with_next_values():
    data = random_data(18, 3, 6)
    for function in ("lambda_returns", "n_step_returns"):
        expected = call(function, data, values=None)
        for values in (torch.full((3, 6), torch.nan), torch.full((3, 7), torch.nan)):
            assert_same(call(function, data, values=values), expected, rtol=0, atol=0)
    for function in ("generalized_advantages", "vtrace", "retrace"):
        with pytest.raises(ValueError, match=r"values must have shape \[3, 6\].* \[3, 7\]"):
            call(function, data, values=torch.ones(3, 7))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.any_version
def test_a_discount_of_zero_acts_as_a_termination(function):
    data = random_data(19, 6, 40)
    data["discount"][data["terminated"]] = 0
    data["next_values"][data["terminated"]] = torch.nan
    assert_same(call(function, data, terminated=None), call(function, data))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.any_version
def test_bitwise_the_same_from_run_to_run(function):
    data = random_data(20, 64, 300, dtype=torch.float32)
    leaves = [data[name].requires_grad_() for name in inputs_of(function)]
    runs = []
    for _ in range(3):
        results = call(function, data)
        runs.append((*results, *torch.autograd.grad([result.sum() for result in results], leaves)))
    for run in runs[1:]:
        assert all(torch.equal(result, first) for result, first in zip(run, runs[0], strict=True))


# ---- Gradients, in every context ------------------------------------------------------------------------------------

INPUTS = ("rewards", "values", "next_values")


def inputs_of(function):
    return INPUTS if function not in ("lambda_returns", "n_step_returns") else ("rewards", "next_values")


def scalar(function, data, module=gs, **changes):
    """A scalar function of the inputs whose gradient depends on every result, and these inputs."""
    names = inputs_of(function)

    def apply(*inputs):
        results = call(function, data | dict(zip(names, inputs, strict=True)), module, **changes)
        return sum(
            ((k + 1) * result.double() * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum()
            for k, result in enumerate(results)
        )

    return apply, tuple(data[name].clone() for name in names)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(3, 7), (1, 20)])
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


FORMS_OF_VALUES = pytest.mark.parametrize(
    ("function", "observations"),
    [
        *[(function, False) for function in FUNCTIONS],
        *[(function, True) for function in FUNCTIONS if function != "retrace"],
    ],
)


def gradient_of_gradient(apply):
    def again(value, weights, direction):
        (gradient,) = torch.autograd.grad(apply(value), value, weights, create_graph=True)
        return torch.autograd.grad(gradient, weights, direction)[0]

    return again


@FORMS_OF_VALUES
@pytest.mark.parametrize("batch_first", [True, False])
def test_gradients_of_the_gradient_of_one_input(function, observations, batch_first):
    """A function is linear in each input: the gradient of its gradient is the function, with zeros as other inputs."""
    data = random_data(6, *((3, 5) if batch_first else (5, 3)))
    if observations:
        data |= {"values": torch.randn((3, 6) if batch_first else (6, 3)).double(), "next_values": None}
        data["truncated"] = None
    for name in ("rewards", "values") if observations else inputs_of(function):

        def apply(value, module=gs, name=name):
            return torch.cat(call(function, data | {name: value}, module, batch_first=batch_first))

        again = gradient_of_gradient(apply)
        value, direction = data[name].clone().requires_grad_(), torch.randn_like(data[name])
        _, expected = torch.func.jvp(lambda value, apply=apply: apply(value, gs.reference), (data[name],), (direction,))
        inputs = (value, torch.randn_like(expected, requires_grad=True), direction)
        assert_same((again(*inputs),), (expected,), rtol=1e-12, atol=1e-12)
        traced = make_fx(again, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        assert_same((traced(*inputs),), (expected,), rtol=1e-12, atol=1e-12)


@FORMS_OF_VALUES
def test_batched_gradients(function, observations):
    """`is_grads_batched` and `vectorize` use the vmap of torch.autograd, which is not torch.func.vmap."""
    data = random_data(5, 3, 5) | {"discount": torch.tensor(0.9).double()}
    data["lambda_"] = data["lambda_"][:, :1]
    if observations:
        data |= {"values": torch.randn(3, 6).double(), "next_values": None, "truncated": None}
    names = ("rewards", "values") if observations else inputs_of(function)
    inputs = tuple(data[name] for name in names)
    for batch_first in (True, False):

        def apply(*values, batch_first=batch_first):
            arguments = data | dict(zip(names, values, strict=True))
            if not batch_first:
                arguments = {
                    key: value.T if value is not None and value.dim() else value for key, value in arguments.items()
                }
            results = call(function, arguments, batch_first=batch_first)
            return torch.cat([result.flatten() for result in results])

        expected = torch.func.jacrev(apply, tuple(range(len(names))))(*inputs)
        leaves = tuple(value.clone().requires_grad_() for value in inputs)
        results = apply(*leaves)
        weights = torch.eye(len(results), dtype=torch.float64)
        rows = torch.autograd.grad(results, leaves, weights, is_grads_batched=True, create_graph=True)
        assert_same(rows, expected)
        for strategy in ("reverse-mode", "forward-mode"):
            found = torch.autograd.functional.jacobian(apply, inputs, vectorize=True, strategy=strategy)
            assert_same(found, expected)

    def cubes(rewards):
        return (apply(rewards, *inputs[1:]) ** 3).sum()

    hessian = torch.autograd.functional.hessian(cubes, inputs[0], vectorize=True)
    torch.testing.assert_close(hessian, torch.func.hessian(cubes)(inputs[0]))


@pytest.mark.compiled
def test_numbers_that_change_do_not_recompile():
    data = random_data(4, 3, 6, dtype=torch.float32)
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def results(discount, lambda_, n):
        one = call("generalized_advantages", data, discount=discount, lambda_=lambda_)
        steps = call("n_step_returns", data, discount=discount, n=n)
        return (*one, *steps, *windows(discount=discount, td_steps=n))

    torch._dynamo.reset()
    compiled = torch.compile(results, fullgraph=True, backend=count)
    for k in range(6):
        arguments = (0.9 + k / 100, 0.5 + k / 100, 2 + k)
        assert_same(compiled(*arguments), results(*arguments))
    assert count.frame_count <= 2


@pytest.mark.compiled
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("function", "varying"),
    [
        ("vtrace", ("clip_rho", "clip_c", "clip_pg_rho")),
        ("retrace", ("clip_c",)),
    ],
)
def test_clips_that_change_do_not_recompile(function, varying, batch_first):
    """Results and gradients equal eager ones, also with NaN in ratios, in masked entries, and after a ratio of 0."""
    data = random_data(4, 6, 20)
    live = data["mask"]
    for name in ("rewards", "values", "next_values", "ratios"):
        data[name] = torch.where(live, data[name], torch.nan)
    data["next_values"][data["terminated"]] = torch.nan
    data["ratios"][:2, 5] = 0
    data["rewards"][0, 6:] = torch.nan
    data["discount"][1, 5] = torch.nan  # V-trace does not read it, because the ratio is 0
    data["ratios"][2, 15] = torch.nan
    data["ratios"][3, 15] = torch.inf
    for name in ("discount", "lambda_"):
        data[name][4, 10] = 0
    if not batch_first:
        data = {name: value.T for name, value in data.items()}
    names = inputs_of(function)
    kinds = [data]
    if function == "vtrace":
        observations = torch.cat([data["values"], data["values"][:, :1]], 1) if batch_first else None
        observations = torch.cat([data["values"], data["values"][:1]]) if observations is None else observations
        kinds.append(data | {"values": observations, "next_values": None, "truncated": None, "mask": None})
        kinds[-1] |= {"discount": torch.tensor(0.9), "lambda_": 0.8, "terminated": None}
    for arguments in kinds:
        inputs = [arguments[name] for name in names if arguments[name] is not None]
        given = [name for name in names if arguments[name] is not None]

        # The products in `clips` are computed outside of this function: inside, PyTorch 2.11 would recompile for each.
        def results(clips, *values, arguments=arguments, given=given):
            return call(function, arguments | dict(zip(given, values, strict=True)), batch_first=batch_first, **clips)

        count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        compiled = torch.compile(results, fullgraph=True, backend=count)
        for clip in (1.0, 0.9, 0.5, 1.7, 0.25, 0.0):
            clips = {name: clip * (k + 1) for k, name in enumerate(varying)}
            runs = []
            for function_of in (results, compiled):
                leaves = [value.clone().requires_grad_() for value in inputs]
                outputs = function_of(clips, *leaves)
                weights = [torch.linspace(-1, 2, out.numel()).reshape(out.shape).to(out.dtype) for out in outputs]
                runs.append((*outputs, *torch.autograd.grad(outputs, leaves, weights)))
            assert_same(runs[1], runs[0], equal_nan=True)
        assert count.frame_count <= 2


def test_no_value_is_read_by_the_host():
    """Fake tensors have no values, so reading one would raise."""
    data = random_data(4, 3, 6, dtype=torch.float32) | {"discount": torch.tensor(0.9), "lambda_": torch.tensor(0.9)}
    ends = {"lengths": torch.tensor([3, 1]), "terminated": torch.tensor([True, False]), "discount": torch.tensor(0.9)}
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) for name, value in data.items()}
        for function in FUNCTIONS:
            assert all(result.shape == (3, 6) for result in call(function, fake))
        window = {name: mode.from_tensor(value) for name, value in ends.items()}
        window |= {"rewards": torch.ones(2, 3), "root_values": torch.ones(2, 4)}
        assert windows(**window).values.shape == (2, 3)


# ---- Other projects -------------------------------------------------------------------------------------------------


ORACLE = json.loads((Path(__file__).parent / "oracles" / "returns.json").read_text())


@pytest.mark.parametrize("function", ORACLE["results"])
@pytest.mark.any_version
def test_against_rlax(function):
    wanted = [torch.tensor(result, dtype=torch.float64) for result in ORACLE["results"][function]]
    numbers = {name: value for name, value in ORACLE.items() if name != "results"}
    arrays = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    data = dict.fromkeys((*TRAJECTORIES, "ratios")) | {
        name: arrays[name] for name in ("rewards", "discount", "lambda_")
    }
    data |= {"values": arrays["values"], "ratios": arrays["ratios"]}
    changes = {"clip_rho": ORACLE["clip_rho"], "clip_pg_rho": ORACLE["clip_pg_rho"]} if function == "vtrace" else {}
    if function == "retrace":
        data |= {"values": arrays["q_values"], "next_values": arrays["expected_q_values"]}
        data["ratios"] = arrays["action_ratios"]
    assert_same(call(function, data, **changes), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.any_version
def test_against_torchrl():
    """TorchRL is correct only without masks and NaN."""
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    data = random_data(15, 5, 17, padding=0.0) | {"discount": 0.9, "lambda_": 0.8, "mask": None}
    values, next_values, rewards = (data[name][..., None] for name in ("values", "next_values", "rewards"))
    flags = ((data["terminated"] | data["truncated"])[..., None], data["terminated"][..., None])
    expected, targets = functional.generalized_advantage_estimate(0.9, 0.8, values, next_values, rewards, *flags)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # TorchRL computes gamma * int in float32
    assert_same(call("generalized_advantages", data), (expected[..., 0], targets[..., 0]), **tolerance)
    expected = functional.td_lambda_return_estimate(0.9, 0.8, next_values, rewards, *flags)
    assert_same(call("lambda_returns", data), (expected[..., 0],), **tolerance)
    log_ratios = data["ratios"].log()[..., None]
    terminated = data | {"truncated": None, "next_values": torch.cat([values[:, 1:], next_values[:, -1:]], 1)[..., 0]}
    arguments = (terminated["next_values"][..., None], rewards, flags[1], flags[1])
    advantages, targets = functional.vtrace_advantage_estimate(0.9, log_ratios, 0 * log_ratios, values, *arguments)
    assert_same(call("vtrace", terminated, lambda_=1.0), (targets[..., 0], advantages[..., 0]), **tolerance)


# ---- Non-finite values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("name", ["ratios", "lambda_"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.any_version
def test_coefficients_of_retrace_that_no_step_reads(module, name, batch_first):
    """Retrace reads c_t = lambda_t min(clip_c, ratio_t) at step t - 1.

    It does not read c_0, nor c_t if step t - 1 ends an episode or is masked.
    """
    data = random_data(24, 3, 8, ends=0, padding=0)
    data["terminated"][0, 1] = True
    data["truncated"][1, 3] = True
    data["mask"][2, 4] = False
    data[name][:] = 1
    gradients = []
    for value in (1.0, torch.nan):
        data[name][0, 0] = data[name][0, 2] = data[name][1, 4] = data[name][2, 5] = value
        leaves = [data[key].clone().requires_grad_() for key in ("rewards", "values", "next_values")]
        arguments = data | dict(zip(("rewards", "values", "next_values"), leaves, strict=True))
        if not batch_first:
            arguments = {key: tensor.T for key, tensor in arguments.items()}
        (result,) = call("retrace", arguments, module, batch_first=batch_first)
        gradients.append((result.detach(), *torch.autograd.grad(result.sum(), leaves)))
    # Steps with NaN or inf are summed in another order.
    assert_same(gradients[1], gradients[0], rtol=1e-13, atol=1e-13)


def assert_unreached(function, data, spoilt, kept, inputs_before, batch_first):
    """Check that neither NaN in later steps nor NaN gradients in earlier steps cross the end of the first `kept` steps.

    With the inputs `spoilt`, these steps have the same results and gradients. The last of them does not read
    `inputs_before`, whose gradients there are 0. If the incoming gradients of these steps are NaN, the gradients of
    later steps are 0.
    """
    names = inputs_of(function)

    def run(arguments, weight):
        leaves = [arguments[name].clone().requires_grad_() for name in names]
        arguments = arguments | dict(zip(names, leaves, strict=True))
        if not batch_first:
            arguments = {name: value.T for name, value in arguments.items()}
        results = call(function, arguments, batch_first=batch_first)
        weights = torch.zeros_like(arguments["rewards"])
        (weights if batch_first else weights.T)[:, :kept] = weight
        gradients = torch.autograd.grad(results, leaves, [weights] * len(results))
        return [result if batch_first else result.T for result in results], gradients

    (results, gradients), (expected, wanted) = run(data | spoilt, 1.0), run(data, 1.0)
    for result, own in zip(results, expected, strict=True):
        torch.testing.assert_close(result[:, :kept], own[:, :kept])
    for name, gradient, own in zip(names, gradients, wanted, strict=True):
        torch.testing.assert_close(gradient[:, :kept], own[:, :kept])
        assert name not in inputs_before or (gradient[:, kept - 1] == 0).all()
    for gradient in run(data, torch.nan)[1]:
        assert (gradient[:, kept:] == 0).all()


COEFFICIENTS = [(f, name) for f in FUNCTIONS for name in ("discount", "terminated", *FUNCTIONS[f][0])]


@pytest.mark.parametrize(("function", "name"), COEFFICIENTS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("steps", [9, 40])
@pytest.mark.any_version
def test_entries_after_a_coefficient_of_zero_are_not_read(function, name, batch_first, steps):
    """NaN in all entries after a coefficient of exactly 0, or a termination, reaches no earlier result or gradient."""
    data, t = random_data(21, 3, steps, ends=0, padding=0), 5
    place = t + (function == "retrace" and name in ("lambda_", "ratios"))  # Retrace uses c of the next step
    data[name][:, place] = name == "terminated"
    spoilt = {key: value.clone() for key, value in data.items() if value.is_floating_point()}
    for key, value in spoilt.items():
        value[:, t + 1 + (key == name and place > t) :] = torch.nan
    before = {"discount": ("next_values",), "terminated": ("next_values",), "ratios": ("rewards", "next_values")}.get(
        name, ()
    )
    before = before if place == t else ()
    for key in before:
        spoilt[key][:, t] = torch.nan
    assert_unreached(function, data, spoilt, t + 1, before, batch_first)


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize(
    ("function", "zero", "spoilt"),
    [
        *[(function, "discount", "lambda_") for function in ("lambda_returns", "generalized_advantages", "vtrace")],
        *[("vtrace", "ratios", name) for name in ("lambda_", "discount")],
        *[("retrace", *names) for names in (("ratios", "lambda_"), ("lambda_", "ratios"))],
    ],
)
@pytest.mark.any_version
def test_nan_next_to_a_coefficient_of_zero(function, zero, spoilt, module):
    """The product of a coefficient of 0 and a coefficient of NaN is 0, also in the gradients."""
    data = random_data(23, 3, 9, ends=0, padding=0)
    data[zero][:, 5] = 0
    found = []
    for value in (0.5, torch.nan):
        data[spoilt][:, 5] = value
        leaves = {name: data[name].clone().requires_grad_() for name in inputs_of(function)}
        results = call(function, data | leaves, module)
        found.append(
            (*results, *torch.autograd.grad(results, list(leaves.values()), [torch.ones(3, 9)] * len(results)))
        )
    assert_same(found[1], found[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize(
    "options", [{"function": "lambda_returns", "lambda_": 1.0}, {"function": "n_step_returns", "n": 3}]
)
@pytest.mark.any_version
def test_the_gradient_of_an_unread_next_value_is_zero_if_its_discount_is_nan(options, module):
    discount = torch.tensor([[0.9, torch.nan, 0.9]])
    next_values = torch.ones(1, 3, requires_grad=True)
    options = dict(options)
    function = getattr(module, options.pop("function"))
    result = function(torch.ones(1, 3), None, next_values, discount=discount, **options)
    (gradient,) = torch.autograd.grad(result.sum(), next_values)
    assert gradient[0, 1] == 0


@pytest.mark.parametrize("discount", [0.0, "tensor"])
@pytest.mark.parametrize("ratio", [torch.nan, torch.inf])
@pytest.mark.any_version
def test_gradients_of_retrace_do_not_read_a_ratio_behind_a_discount_of_zero(ratio, discount):
    data = random_data(24, 3, 9, ends=0, padding=0)
    data["discount"] = data["discount"] if discount == "tensor" else discount
    if discount == "tensor":
        data["discount"][:, 4] = 0
    found = []
    for value in (0.5, ratio):
        data["ratios"][:, 5] = value
        leaves = {name: data[name].clone().requires_grad_() for name in inputs_of("retrace")}
        (result,) = call("retrace", data | leaves, clip_c=None)
        found.append(torch.autograd.grad(result.sum(), list(leaves.values())))
    assert_same(found[1], found[0], rtol=1e-13, atol=1e-13)


def test_the_operator_needs_an_input():
    with pytest.raises(RuntimeError, match="rewards, values and next_values are all missing"):
        torch.ops.gradscale_ext.returns(
            True, "lambda_returns", [True] * 3, True, *[None] * 12, 1.0, 1.0, 1.0, 1.0, 1.0, 0, True
        )


def test_the_operator_knows_its_functions():
    with pytest.raises(ValueError, match=r"function must be one of lambda_returns, .*, but it is 'td'"):
        torch.ops.gradscale_ext.returns(
            False, "td", [True] * 3, True, torch.ones(2, 3), *[None] * 11, 1.0, 1.0, 1.0, 1.0, 1.0, 0, True
        )


@pytest.mark.any_version
def test_other_coefficients_of_zero():
    data = random_data(22, 3, 30, ends=0, padding=0)
    nan = torch.full((3, 30), torch.nan, dtype=torch.float64)
    targets, _ = call("vtrace", data, clip_rho=0.0, rewards=nan, next_values=nan)
    torch.testing.assert_close(targets, data["values"])
    assert (call("vtrace", data, clip_pg_rho=0.0, rewards=nan, next_values=nan)[1] == 0).all()
    expected = data["rewards"] + data["discount"] * data["next_values"]
    assert_same(call("retrace", data, clip_c=0.0, values=nan), (expected,))
    for one in (1.0, torch.ones(3, 30)):  # 1 - lambda_ is 0
        next_values = torch.where(torch.arange(30) < 29, nan, data["next_values"]).requires_grad_()
        (result,) = call("lambda_returns", data, lambda_=one, next_values=next_values)
        assert_same((result,), call("lambda_returns", data, lambda_=one))
        (gradient,) = torch.autograd.grad(result.sum(), next_values)
        assert (gradient[:, :-1] == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("steps", [9, 40])
@pytest.mark.any_version
def test_masked_entries_are_not_read(function, steps):
    data = random_data(23, 6, steps)
    names, live = inputs_of(function), data["mask"]
    spoilt = {key: torch.where(live, value, torch.nan) for key, value in data.items() if value.is_floating_point()}
    flags = {flag: data[flag] | ~live for flag in ("terminated", "truncated")}
    runs = []
    for arguments, weight in ((data, 1.0), (data | spoilt | flags, torch.where(live, 1.0, torch.nan).double())):
        leaves = [arguments[name].clone().requires_grad_() for name in names]
        results = call(function, arguments | dict(zip(names, leaves, strict=True)))
        gradients = torch.autograd.grad(results, leaves, [weight * torch.ones_like(result) for result in results])
        runs.append((*results, *gradients))
        assert all((value[~live] == 0).all() for value in runs[-1])
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("steps", [5, 32])
def test_many_short_rows(function, steps):
    data = random_data(6, 2200, steps)  # on a GPU, a warp computes several rows
    names = inputs_of(function)
    found = []
    for module in (gs, gs.reference):
        leaves = [data[name].clone().requires_grad_() for name in names]
        results = call(function, data | dict(zip(names, leaves, strict=True)), module)
        weights = [torch.linspace(0.5, 2, result.numel(), dtype=torch.float64).view_as(result) for result in results]
        found.append((*results, *torch.autograd.grad(results, leaves, weights)))
    assert_same(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [40_000, 135_000])  # of 1024 steps a chunk on a GPU, and 128 chunks a group
@pytest.mark.parametrize("with_infinity", [False, True])
def test_long_rows_of_many_chunks_are_the_same_from_call_to_call(steps, with_infinity):
    data = random_data(5, 1, steps, dtype=torch.float32, ends=0.0, padding=0.0)
    if with_infinity:  # in the last chunk of a group, and an end in the chunk that is walked after it
        data["rewards"][0, 4500], data["terminated"][0, 4000] = float("inf"), True
    changes = {"truncated": None, "mask": None, "discount": 0.999, "lambda_": 0.9999}
    results = call("generalized_advantages", data, **changes)
    rewards, values, next_values = (data[name][0].double() for name in INPUTS)
    continues = (~data["terminated"][0]).double()
    advantages, factors = [0.0], (0.999 * 0.9999 * continues).tolist()
    for step, delta in reversed([*enumerate((rewards + 0.999 * continues * next_values - values).tolist())]):
        advantages.append(delta + factors[step] * advantages[-1] if factors[step] else delta)
    expected = torch.tensor([advantages[:0:-1]], dtype=torch.float64)
    assert_same(results, (expected.float(), (expected + values).float()), rtol=1e-4, atol=1e-3)
    for _ in range(3):
        assert_same(call("generalized_advantages", data, **changes), results, rtol=0, atol=0)


# ---- Memory, constants, errors --------------------------------------------------------------------------------------


def row_results(function, data, rows=None, batch_first=True, laid_out=torch.Tensor.contiguous):
    """The results of some rows, and the gradients of their inputs, each `[B, T]`; MuZero's targets have others."""

    def arranged(tensor):
        return laid_out((tensor if batch_first else tensor.T) if tensor.dim() == 2 else tensor)

    given = {name: arranged(tensor if rows is None else tensor[rows]) for name, tensor in data.items()}
    if function == "muzero_targets":
        names = ("rewards", "lengths", "terminated", "to_play")
        options = {"num_unroll_steps": 4, "td_steps": 5, "discount": given["discounts"]}
        arguments = {name: given[name] for name in names} | {"root_values": given["observations"]} | options
        results = gs.muzero_targets(**arguments, batch_first=batch_first)
        return [result if batch_first else result.T for result in results]
    names = ("rewards",) if function == "n_step_transitions" else inputs_of(function)
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    if function == "n_step_transitions":
        flags = {name: given[name] for name in ("discount", *FLAGS)}
        results = gs.n_step_transitions(**leaves, **flags, n=3, batch_first=batch_first)[:2]
    else:
        clips = {name: 1.1 + index for index, name in enumerate(CLIPS.get(function, ()))}
        results = call(function, given | leaves, batch_first=batch_first, **clips)
    sums = results[:1] if function == "n_step_transitions" else results
    gradients = torch.autograd.grad(sums, list(leaves.values()), [given["weights"] for _ in sums])
    return [found.detach() if batch_first else found.detach().T for found in (*results, *gradients)]


def row_data(steps, rows=40):
    data = random_data(steps, rows, steps, ends=0.08, padding=0.05, dtype=torch.float32)
    g = torch.Generator().manual_seed(steps)
    data["weights"] = torch.randn(rows, steps, generator=g)
    return data


def window_rows(steps, rows=40):
    g = torch.Generator().manual_seed(steps)
    data = {"rewards": torch.randn(rows, steps, generator=g), "observations": torch.randn(rows, steps + 1, generator=g)}
    data |= {"discounts": torch.rand(rows, 1, generator=g), "terminated": torch.rand(rows, generator=g) < 0.5}
    data |= {"lengths": torch.randint(steps + 1, (rows,), generator=g)}
    return data | {"to_play": torch.randint(2, (rows, steps + 1), generator=g)}


def strided(tensor):
    """A copy whose entries are far from each other."""
    wide = tensor.new_zeros([3 * size for size in tensor.shape])[tuple([slice(1, None, 3)] * tensor.dim())]
    return wide.copy_(tensor)


EVERY_FUNCTION = (*FUNCTIONS, "n_step_transitions", "muzero_targets")
STEPS = (*range(1, 41), 100, 257)


@pytest.mark.parametrize("function", EVERY_FUNCTION)
@pytest.mark.any_version
def test_a_row_has_the_same_bits_wherever_it_is(function, pytestconfig):
    """Among any number of rows, in any layout, for any number of threads.

    On a GPU, recurrences over [T, B] have an order of their own.
    """
    threads = torch.get_num_threads()
    has_own_order = pytestconfig.getoption("--simulated-kernels") is not None and function in FUNCTIONS
    for steps in STEPS:
        data = window_rows(steps) if function == "muzero_targets" else row_data(steps)
        alone = [row_results(function, data, slice(row, row + 1)) for row in range(0, 40, 13)]
        expected = [torch.cat(results) for results in zip(*alone, strict=True)]
        others = {"all": {}, "[T, B]": {"batch_first": False}, "strided": {"laid_out": strided}}
        others["strided [T, B]"] = {"batch_first": False, "laid_out": strided}
        others["columns"] = {"laid_out": lambda x: x.T.contiguous().T if x.dim() == 2 else x}
        if has_own_order:
            others = {name: others[name] for name in ("all", "strided")}
        for name, options in others.items():
            for own_threads in (1, 3) if name == "all" else (threads,):
                torch.set_num_threads(own_threads)
                try:
                    found = row_results(function, data, **options)
                finally:
                    torch.set_num_threads(threads)
                for result, wanted in zip(found, expected, strict=True):
                    assert torch.equal(result[::13], wanted), f"{name}, {steps} steps"
        expanded = {key: tensor[13:14].expand(9, *tensor.shape[1:]) for key, tensor in data.items()}
        found = row_results(function, expanded, laid_out=lambda x: x)
        for result, wanted in zip(found, expected, strict=True):
            assert torch.equal(result, wanted[1:2].expand_as(result)), f"expanded, {steps} steps"


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows", "steps"), [(2, 1279), (8, 300)])
@pytest.mark.cpu_kernels
def test_rows_that_are_copied_in_several_pieces(function, rows, steps):
    """On a CPU, rewards `[B, T]` of a half type, passed as `[T, B]`: all operands and results are copied."""
    data = random_data(steps, rows, steps, ends=0.01, padding=0.0, dtype=torch.float32)
    names = inputs_of(function)
    data |= {name: data[name].bfloat16().float() for name in names}
    weights = torch.linspace(-1, 2, rows * steps).view(rows, steps)
    found = []
    for is_copied in (False, True):
        given = {name: x.T.contiguous() if is_copied else x for name, x in data.items()}
        given |= {name: data[name].bfloat16().T for name in names if is_copied}
        leaves = [given[name].requires_grad_() for name in names]
        results = call(function, given | dict(zip(names, leaves, strict=True)), batch_first=not is_copied)
        gradients = torch.autograd.grad(results, leaves, [weights.T if is_copied else weights] * len(results))
        found.append([x.T if is_copied else x for x in (*results, *gradients)])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected.to(ours.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("function", [*FUNCTIONS, "n_step_transitions"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.any_version
def test_numbers_that_are_not_finite_leave_the_bits_of_other_episodes(function, batch_first, pytestconfig):
    if pytestconfig.getoption("--simulated-kernels") is not None and not batch_first:
        pytest.skip("on a GPU, a row of [T, B] that is not finite is walked in another order")
    for steps in STEPS:
        data = row_data(steps)
        end = steps // 2
        data["terminated"][:, end] = True
        expected = row_results(function, data, batch_first=batch_first)
        later = torch.arange(steps) > end
        is_spoilt = torch.arange(40)[:, None] % 3 == 0
        for name, bad in (("rewards", torch.nan), ("values", torch.inf), ("next_values", -torch.inf)):
            spoilt = dict(data)
            spoilt[name] = torch.where(is_spoilt & later, bad, data[name])
            spoilt["weights"] = torch.where(is_spoilt & later, bad, data["weights"])
            found = row_results(function, spoilt, batch_first=batch_first)
            for result, wanted in zip(found, expected, strict=True):
                same = ~(is_spoilt & later)
                assert torch.equal(result[same], wanted[same]), f"{name}, {steps} steps"


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_tensors(function, shape):
    leaves = [torch.ones(shape, requires_grad=True) for _ in inputs_of(function)]
    empty = random_data(12, *shape, dtype=torch.float32)
    results = call(function, empty | dict(zip(inputs_of(function), leaves, strict=True)))
    gradients = torch.autograd.grad([result.sum() for result in results], leaves)
    assert all(value.shape == shape for value in (*results, *gradients))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_constants_and_saved_tensors(function):
    data = random_data(13, 4, 9)
    for name in (*FUNCTIONS[function][0], "discount"):
        leaf = data[name].clone().requires_grad_()
        for module in (gs, gs.reference):
            with pytest.raises(ValueError, match=rf"{function}: {name} requires grad.* write {name}.detach\(\)"):
                call(function, data | {name: leaf}, module)
        with pytest.raises(ValueError, match=rf"{function}: {name} has a tangent of .* write {name}.detach\(\)"):
            torch.func.jvp(lambda x, name=name: call(function, data | {name: x}), (data[name],), (data[name],))
        with torch.no_grad():
            call(function, data | {name: leaf})
    assert all(result.grad_fn is None for result in call(function, data))
    for name in (*FUNCTIONS[function][0], "discount", *FLAGS):
        buffers = data | {name: data[name].clone(), "rewards": data["rewards"].clone().requires_grad_()}
        results = call(function, buffers)
        buffers[name].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[0].sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.any_version
def test_errors_of_each_argument(function, module):
    data = random_data(14, 3, 6)
    for name in (*TRAJECTORIES, *FUNCTIONS[function][0]):
        value, is_rewards = data[name], name == "rewards"
        label = "q_values" if function == "retrace" and name == "values" else name
        dtype, other = ("bool", value.double()) if name in FLAGS else ("float", value.long())
        one_row = r"\[None\]" if is_rewards or name in ("discount", "lambda_") else r"\.expand\(3, 6\)"
        # next_values of one dimension may be the last ones of [T, B], which must not be expanded.
        advice = "$" if name == "next_values" else rf".*rite {label}{one_row}"
        for wrong, error, message in (
            (value.tolist(), TypeError, "of type list"),
            (value.numpy(), TypeError, r"of type ndarray.*torch.as_tensor"),
            (other, TypeError, rf"its dtype is {other.dtype}; write {label}.{dtype}\(\)"),
            (value[..., None], ValueError, rf"its shape is \[3, 6, 1\]; write {label}.squeeze\(-1\)"),
            (value[0], ValueError, rf"its shape is \[6\]{advice}"),
            (value[:, :-1], ValueError, r"\[3, 6\].*its shape is \[3, 5\]"),
            (value.to("meta"), ValueError, "must be on the device of rewards, cpu, but it is on meta"),
        ):
            if not (is_rewards and error is ValueError and wrong.dim() == 2):
                with pytest.raises(error, match=f"^{function}: {label} .*{message}"):
                    call(function, data, module, **{name: wrong})
    without = {name: None for name in ("values", "next_values")}
    with pytest.raises((TypeError, ValueError), match=f"^{function}: .*values .*None"):
        call(function, data, module, **without)
    with pytest.raises(TypeError, match=f"^{function}: batch_first must be True or False"):
        call(function, data, module, batch_first=1)
    with pytest.raises(ValueError, match=r"write rewards\[:, None\]"):
        call(function, data, module, rewards=torch.ones(6), batch_first=False)
    if function != "retrace":
        for cut in (True, False):
            changes = {"next_values": None, "values": torch.ones(3, 7), "truncated": torch.full((3, 6), cut)}
            with pytest.raises(ValueError, match=f"^{function}: truncated cannot be given with values"):
                call(function, data, module, **changes)


# ---- Eager calls go straight to C++ ---------------------------------------------------------------------------------


@pytest.fixture
def direct(monkeypatch):
    """Fails a test in which an eager call is handed back to Python, which calls the operator through the dispatcher."""

    def refuse(*_, **__):
        raise AssertionError("the call was handed back to Python")

    for name in ("check_trajectories", "check_window"):
        monkeypatch.setattr(gs.returns, name, refuse)


class Rank(int):
    pass


NUMBERS = (np.float32(0.5), np.float64(0.5), np.float16(0.5), fractions.Fraction(1, 2), torch.tensor(0.5))
WHOLE_NUMBERS = (np.int64(1), np.uint8(1), 1, Rank(1), True + 0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.any_version
def test_numbers_of_any_kind_go_straight_to_cpp(function, direct):
    data = random_data(30, 3, 6)
    numbers = [name for name in ("discount", "lambda_") if name == "discount" or name in FUNCTIONS[function][0]]
    clips = {"vtrace": ("clip_rho", "clip_c", "clip_pg_rho"), "retrace": ("clip_c",)}.get(function, ())
    for number in NUMBERS:
        for name in (*numbers, *(() if isinstance(number, torch.Tensor) else clips)):
            assert_same(call(function, data, **{name: number}), call(function, data, **{name: 0.5}), rtol=0, atol=0)
    for number in WHOLE_NUMBERS:
        for name in (*numbers, *clips):
            assert_same(call(function, data, **{name: number}), call(function, data, **{name: 1.0}), rtol=0, atol=0)
        if function == "n_step_returns":
            assert_same(call(function, data, n=number), call(function, data, n=1), rtol=0, atol=0)


@pytest.mark.any_version
def test_numbers_of_muzero_targets_go_straight_to_cpp(direct):
    for number in NUMBERS:
        assert_same(windows(discount=number), windows(discount=0.5))
    for number in WHOLE_NUMBERS:
        for name in ("num_unroll_steps", "td_steps", "prefix_horizon"):
            changes = {"reward": "value_prefix"} if name == "prefix_horizon" else {}
            assert_same(windows(**changes, **{name: number}), windows(**changes, **{name: 1}))


def lazily_negated(tensor):
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.any_version
def test_lazily_negated_tensors_go_straight_to_cpp(function, direct):
    data = random_data(31, 3, 6)
    names = [name for name in (*TRAJECTORIES, *FUNCTIONS[function][0]) if name not in FLAGS]
    inputs = inputs_of(function)
    runs = []
    for convert in (torch.clone, lazily_negated):
        leaves = [data[name].clone().requires_grad_() for name in inputs]
        changed = {name: convert(data[name]) for name in names}
        changed |= {name: convert(leaf) for name, leaf in zip(inputs, leaves, strict=True)}
        results = call(function, data | changed)
        weights = [torch.linspace(-1, 1, result.numel()).view_as(result) for result in results]
        runs.append((*results, *torch.autograd.grad(results, leaves, weights)))
    assert_same(runs[1], runs[0], rtol=0, atol=0)
    scalar_discount = {"discount": torch.tensor(0.9)}
    lazy_discount = {"discount": lazily_negated(torch.tensor(0.9))}
    assert_same(call(function, data | lazy_discount), call(function, data | scalar_discount), rtol=0, atol=0)
    imaginary = torch.complex(torch.zeros(3, 6).double(), -data["rewards"]).conj().imag  # a view that negates lazily
    assert imaginary.is_neg()
    assert_same(call(function, data | {"rewards": imaginary}), call(function, data), rtol=0, atol=0)


@pytest.mark.any_version
def test_lazily_negated_tensors_of_muzero_targets_go_straight_to_cpp(direct):
    data = window_data() | {"discount": torch.full((9, 1), 0.9)}
    arguments = {"num_unroll_steps": 5, "td_steps": 3}
    expected = gs.muzero_targets(**data, **arguments)
    for name, value in data.items():
        if value.dtype != torch.bool:
            assert_same(gs.muzero_targets(**data | {name: lazily_negated(value)}, **arguments), expected)


@pytest.mark.parametrize("function", ["lambda_returns", "n_step_returns"])
@pytest.mark.parametrize("steps", [6, 7])
@pytest.mark.any_version
def test_values_that_are_not_read_go_straight_to_cpp(function, steps, direct):
    data = random_data(32, 3, 6, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = torch.full((3, steps), torch.nan, dtype=dtype, requires_grad=True)
        rewards = data["rewards"].clone().requires_grad_()
        (result,) = call(function, data | {"values": values, "rewards": rewards})
        assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_same((result.float(),), call(function, data | {"values": None}))
        gradients = torch.autograd.grad(result.sum(), (rewards, values), allow_unused=True)
        (expected,) = torch.autograd.grad(call(function, data | {"values": None, "rewards": rewards})[0].sum(), rewards)
        assert_same(gradients[:1], (expected,))
        assert gradients[1] is None


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.any_version
def test_forward_mode_goes_straight_to_cpp(function, direct, monkeypatch):
    data = random_data(33, 3, 6)
    names = inputs_of(function)
    directions = [torch.linspace(-1, 2, 18).double().view(3, 6) * (k + 1) for k in range(len(names))]
    with forward_ad.dual_level():
        for convert in (torch.clone, lazily_negated):
            given = [
                forward_ad.make_dual(convert(data[name]), convert(direction))
                for name, direction in zip(names, directions, strict=True)
            ]
            results = call(function, data | dict(zip(names, given, strict=True)))
            tangents = [forward_ad.unpack_dual(result).tangent for result in results]
            zeros = data | dict(zip(names, directions, strict=True))  # a function is linear in its inputs
            assert_same(tangents, call(function, zeros))
        monkeypatch.undo()
        dual = forward_ad.make_dual(data["discount"], data["discount"])
        for grad in (torch.enable_grad, torch.no_grad):
            with grad(), pytest.raises(ValueError, match="discount has a tangent"):
                call(function, data | {"discount": dual})


@pytest.mark.any_version
def test_a_tensor_that_dispatches_in_python_is_named_once():
    gs._context.say_once.cache_clear()
    data = random_data(34, 2, 3, dtype=torch.float32)
    expected = call("lambda_returns", data)
    words = "lambda_returns is called through PyTorch's dispatcher, .*because next_values is a TwoTensor"
    given = data | {"next_values": TwoTensor(data["next_values"], data["next_values"])}
    with pytest.warns(UserWarning, match=words):
        (result,) = call("lambda_returns", given)
    assert_same((result.a, result.b), expected * 2)
    rewards = torch.arange(6.0).view(2, 3)
    with pytest.warns(UserWarning, match="muzero_targets is called through .*because rewards is a TwoTensor"):
        results = windows(rewards=TwoTensor(rewards, rewards))
    assert_same([result.a for result in results], windows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("lambda_returns", given)
        torch.func.vmap(lambda rewards: call("lambda_returns", data | {"rewards": rewards}))(data["rewards"][None])
        with FakeTensorMode() as mode:
            call("lambda_returns", {name: mode.from_tensor(value) for name, value in data.items()})


# ---- Tensors made in inference mode ---------------------------------------------------------------------------------


def made_in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


DIFFERENTIATED = {
    "backward": lambda f, x: torch.autograd.grad(f(x.requires_grad_()), x),
    "create_graph": lambda f, x: torch.autograd.grad(
        torch.autograd.grad(f(x.requires_grad_()) ** 2, x, create_graph=True)[0].square().sum(), x
    ),
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.autograd.grad(torch.func.vmap(f)(x.requires_grad_()[None]).sum(), x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x) ** 2)(x),
    "checkpoint": lambda f, x: torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(f, x.requires_grad_(), use_reentrant=False), x
    ),
    "no_grad": lambda f, x: [torch.no_grad()(f)(x)],
    "inference mode": lambda f, x: [torch.inference_mode()(f)(x)],
}


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("context", DIFFERENTIATED)
def test_tensors_made_in_inference_mode(context, function, module):
    """Autograd refuses to save such tensors. Each of the constants may be one, and each of the other inputs."""
    data = random_data(35, 2, 5)
    differentiate = DIFFERENTIATED[context]

    def total(x, arguments):
        results = call(function, arguments | {"next_values": x}, module)
        return sum(((k + 1) * result * torch.linspace(-1, 1, 10).view(2, 5)).sum() for k, result in enumerate(results))

    expected = differentiate(lambda x: total(x, data), data["next_values"].clone())
    names = (*TRAJECTORIES, *FUNCTIONS[function][0]) if module is gs else ()  # the reference uses PyTorch's operations
    for name in names:
        if name != "next_values":
            arguments = data | {name: made_in_inference_mode(data[name])}
            found = differentiate(lambda x, arguments=arguments: total(x, arguments), data["next_values"].clone())
            assert_same(found, expected)
    everything = {name: made_in_inference_mode(value) for name, value in data.items()}
    found = differentiate(lambda x: total(x, everything), data["next_values"].clone())
    assert_same(found, expected)


def test_a_copy_of_a_tensor_made_in_inference_mode_is_saved():
    data = random_data(36, 2, 5)
    mask, rewards = made_in_inference_mode(data["mask"]), data["rewards"].requires_grad_()
    expected = torch.autograd.grad(call("lambda_returns", data)[0].sum(), rewards)
    (result,) = call("lambda_returns", data | {"mask": mask})
    with torch.inference_mode():
        mask.zero_()  # as a rollout buffer is used again
    assert_same(torch.autograd.grad(result.sum(), rewards), expected)


@pytest.mark.compiled
def test_torch_compile_refuses_to_save_a_tensor_made_in_inference_mode():
    """torch.compile saves inputs of its graph itself, and its error says to clone them. A clone works."""
    data = random_data(37, 2, 5)
    mask, rewards = made_in_inference_mode(data["mask"]), data["rewards"].requires_grad_()

    def total(rewards, mask):
        return call("lambda_returns", data | {"rewards": rewards, "mask": mask})[0].sum()

    torch._dynamo.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"Inference tensors cannot be saved for backward.*make a clone"):
        compiled(rewards, mask)
    expected = torch.autograd.grad(total(rewards, data["mask"]), rewards)
    assert_same(torch.autograd.grad(compiled(rewards, mask.clone()), rewards), expected)
    with torch.no_grad():
        assert_same((compiled(rewards, mask),), (total(rewards, data["mask"]),))


# ---- Remedies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.any_version
def test_what_an_error_of_a_shape_says_to_write_is_accepted(function, batch_first):
    """Each argument with one dimension, of steps or of rows, and with a superfluous one."""
    names = (*TRAJECTORIES, *FUNCTIONS[function][0])
    found = 0
    for rows, steps in ((3, 6), (1, 6), (3, 1), (4, 4)):
        data = random_data(38, rows, steps, dtype=torch.float32) | {"truncated": None}
        data = {name: value if batch_first or value is None else value.T for name, value in data.items()}
        for name in names:
            if data[name] is None or name in ("rewards", "discount", "lambda_"):
                continue
            matrix = data[name]
            for wrong in (matrix[0].clone(), matrix[:, 0].clone(), matrix[..., None], matrix[:, :1].clone()):
                try:
                    call(function, data | {name: wrong}, batch_first=batch_first)
                    continue
                except ValueError as error:
                    written = re.search(
                        r"; .*?write (values=)?(.*?)(, and leave out next_values| if all .*|$)", str(error)
                    )
                if written is None or "batch_first=" in written[2]:  # test_all_advice.py reads the other order
                    continue
                label = "q_values" if function == "retrace" and name == "values" else name
                corrected = eval(written[2], {"torch": torch, "values": data["values"], label: wrong})
                changes = {"values": corrected, "next_values": None} if written[1] else {name: corrected}
                call(function, data | changes, batch_first=batch_first)
                found += 1
    assert found > 20


#: Options of each function, and the positional tensors after rewards, with the number of additional steps.
POSITIONAL = {
    "lambda_returns": ({"lambda_": 0.9}, {"values": 1}),
    "n_step_returns": ({"n": 2}, {"values": 1}),
    "n_step_transitions": ({"n": 2}, {}),
    "generalized_advantages": ({"lambda_": 0.9}, {"values": 1}),
    "vtrace": ({"ratios": torch.full((3, 4), 0.5)}, {"values": 1}),
    "retrace": ({"ratios": torch.full((3, 4), 0.5)}, {"q_values": 0, "next_values": 0}),
    "muzero_targets": ({"num_unroll_steps": 2, "td_steps": 2}, {"root_values": 1}),
}


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("function", POSITIONAL)
@pytest.mark.parametrize("shape", [(), (3, 4, 2), (3, 4, 1), (3, 4, 2, 5)])
@pytest.mark.any_version
def test_rewards_of_any_number_of_dimensions(function, shape, module):
    """The error says what to write, which gives what the function gives for each entry of the last dimensions."""
    options, others = POSITIONAL[function]
    options, compute = options | {"discount": 0.9}, getattr(module, function)
    g = torch.Generator().manual_seed(0)

    def made(more):
        sizes = [size + more * (dim == 1) for dim, size in enumerate(shape)]
        return torch.randn(sizes, generator=g)

    tensors = {"rewards": made(0)} | {name: made(more) for name, more in others.items()}
    with pytest.raises(ValueError, match=rf"^{function}: rewards must have shape \[B, [TL]\], .*write ") as raised:
        compute(**tensors, **options)
    written = re.search(r"write (.*)$", str(raised.value))[1]
    if len(shape) < 3 or shape[2] == 1:
        assert eval(written, tensors).dim() == 2
        return
    if module is gs.reference:
        return  # vmap fails for a negative out_dim of a result that does not depend on the mapped tensors

    def fields(results):
        return [results] if isinstance(results, torch.Tensor) else list(results)

    names = {
        "torch": torch,
        "options": options,
        function: lambda *given, options, **named: compute(*given, **named, **options),
    }
    results = fields(eval(written.replace("...", "options=options"), tensors | names))
    flat = [tensor.flatten(2).unbind(2) for tensor in tensors.values()]
    separate = [fields(compute(*entry, **options)) for entry in zip(*flat, strict=True)]
    for result, *expected in zip(results, *separate, strict=True):
        torch.testing.assert_close(result.flatten(2), torch.stack(expected, 2))


@pytest.mark.parametrize("function", POSITIONAL)
def test_a_coefficient_on_the_cpu_is_refused_while_a_graph_is_captured(function):
    """A graph would copy it at each replay, from an address that the host may have reused by then."""
    options, others = POSITIONAL[function]
    names = ["discount"] + ["lambda_"] * ("lambda_" in inspect.signature(getattr(gs, function)).parameters)
    for name in names:
        scalar = torch.tensor(0.9)
        with FakeTensorMode(allow_non_fake_inputs=True):
            moved = {
                key: torch.ones(x.shape, device="cuda") if isinstance(x, torch.Tensor) else x
                for key, x in options.items()
            }
            tensors = {key: torch.ones(3, 4 + more, device="cuda") for key, more in ({"rewards": 0} | others).items()}
            arguments = {**tensors, "discount": 0.5, **moved, name: scalar}
            with (
                seeming_to_capture(),
                pytest.raises(ValueError, match=rf"^{function}: {name} must be a number or") as e,
            ):
                getattr(gs, function)(**arguments)
        assert f"write {name} = {name}.to('cuda:0'), or {name} = {name}.item()" in str(e.value)


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"),
    [
        ("lambda_returns", {"next_values": None, "values": None}, ValueError, r"\[3, 6\].*\[3, 7\].*both are None"),
        ("lambda_returns", {"next_values": None}, ValueError, r"values must have shape \[3, 7\]"),
        ("lambda_returns", {"discount": torch.ones(6)}, ValueError, r"discount\[None\] if .* discount\[:, None\]"),
        ("lambda_returns", {"lambda_": torch.ones(3)}, ValueError, r"lambda_\[None\] if .* lambda_\[:, None\]"),
        *[("vtrace", {"discount": x}, ValueError, "discount must be from -1 to 1") for x in (1.5, -1.1, float("nan"))],
        *[("vtrace", {"lambda_": x}, ValueError, "lambda_ must be from 0 to 1") for x in (1.1, -0.1, float("nan"))],
        ("vtrace", {"discount": True}, TypeError, "discount must be a number"),
        *[("n_step_returns", {"n": n}, ValueError, "n must be") for n in (0, -3)],
        *[("n_step_returns", {"n": n}, TypeError, "n must be") for n in (True, 2.0, "2")],
        *[
            ("vtrace", {clip: x}, ValueError, f"{clip} must not be negative")
            for clip in ("clip_rho", "clip_c", "clip_pg_rho")
            for x in (-1.0, float("nan"))
        ],
        ("retrace", {"clip_c": -1}, ValueError, "clip_c must not be negative"),
        *[("vtrace", {name: 10**400}, ValueError, f"{name} must .*too large") for name in ("discount", "lambda_")],
        ("vtrace", {"clip_rho": 10**400}, ValueError, "clip_rho must .*too large"),
        ("n_step_returns", {"n": 10**30}, ValueError, "n must .*too large"),
        ("vtrace", {"ratios": 1}, TypeError, r"ratios must be a tensor of shape \[B, T\], but it is of type int$"),
        ("vtrace", {"mask": True}, TypeError, r"mask must be a bool tensor of shape \[B, T\], but it is of type bool$"),
        ("vtrace", {"discount": True}, TypeError, r"a tensor that broadcasts to \[3, 6\], but it is of type bool$"),
        ("vtrace", {"next_values": None, "values": torch.ones(7)}, ValueError, r"values must have shape \[B, T \+ 1\]"),
        ("vtrace", {"next_values": None, "values": 1.0}, TypeError, r"values must be a tensor of shape \[B, T \+ 1\]"),
        (
            "vtrace",
            {"next_values": None, "truncated": None, "values": torch.ones(4, 6)},
            ValueError,
            r"\[3, 7\].* \[4, 6\]; if rewards are .*pass batch_first=False$",
        ),
    ],
)
@pytest.mark.any_version
def test_errors(function, changes, error, message):
    data = random_data(14, 3, 6)
    for module in (gs, gs.reference):
        with pytest.raises(error, match=f"^{function}: .*{message}"):
            call(function, data, module, **changes)


# ---- MuZero ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_muzero_targets(batch_first):
    g = torch.Generator().manual_seed(1)
    rewards, nu = torch.randn(9, 8, generator=g), torch.randn(9, 9, generator=g)
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 8, 7, 6])
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
        length = int(lengths[b])
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


def windows(module=gs, **changes):
    arguments = {
        "rewards": torch.arange(6.0).view(2, 3),
        "root_values": torch.arange(8.0).view(2, 4),
        "num_unroll_steps": 2,
        "td_steps": 2,
        "discount": 0.9,
    }
    return module.muzero_targets(**(arguments | changes))


@pytest.mark.any_version
def test_muzero_targets_of_equivalent_arguments_other_dtypes_and_empty_windows():
    expected = windows()
    ended = torch.tensor([True, False])
    assert_same(windows(terminated=ended), windows(terminated=ended, lengths=torch.tensor([3, 3])))
    assert_same(windows(lengths=torch.tensor([3, 3]), terminated=~ended & ended), expected)
    for value in (torch.tensor(0.9), torch.tensor([[0.9]]), torch.full((2, 1), 0.9)):
        assert_same(windows(discount=value), expected)
    players = torch.arange(4).expand(2, 4) % 2
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.int64):  # alternating players equal a negative discount
        assert_same(windows(to_play=players.to(dtype)), windows(discount=-0.9))
    nan = torch.full((2, 4), torch.nan)
    assert_same(windows(root_values=nan, discount=0.0).values[:, :2], torch.arange(6.0).view(2, 3)[:, :2])
    for name, value in (("rewards", torch.ones(2, 3)), ("root_reward", torch.ones(2)), ("discount", torch.tensor(0.9))):
        results = windows(**{name: value.double()})
        assert [result.dtype for result in results] == [torch.float64] * 2 + [torch.bool] * 2
    assert (
        windows(rewards=torch.ones(2, 3).half(), root_values=torch.ones(2, 4).bfloat16()).values.dtype == torch.float32
    )
    for over in (True, False):
        one = {"rewards": torch.ones(2, 0), "root_values": torch.ones(2, 1), "terminated": torch.tensor([over, over])}
        empty = windows(**one)
        assert empty.values.tolist() == [[0.0 if over else 1.0, 0, 0]] * 2
        assert empty.mask.tolist() == [[True, over, over]] * 2
        assert not empty.policy_mask.any()
    assert windows(rewards=torch.ones(0, 3), root_values=torch.ones(0, 4)).values.shape == (0, 3)
    with torch.no_grad():
        assert_same(windows(root_values=torch.arange(8.0).view(2, 4).requires_grad_()), expected)


@pytest.mark.parametrize("name", ["rewards", "root_values", "root_reward", "discount"])
def test_muzero_targets_have_no_gradient(name):
    value = {"rewards": torch.ones(2, 3), "root_values": torch.ones(2, 4), "root_reward": torch.ones(2)}
    value = value.get(name, torch.tensor(0.9))

    def total(x):
        return windows(**{name: x}).values.sum()

    def in_forward_mode():
        with torch.autograd.forward_ad.dual_level():
            total(torch.autograd.forward_ad.make_dual(value, value))

    for fault, differentiate in (
        ("requires grad", lambda: torch.func.grad(total)(value)),
        ("has a tangent", lambda: torch.func.jvp(total, (value,), (value,))),
        ("has a tangent", in_forward_mode),
    ):
        with pytest.raises(ValueError, match=rf"^muzero_targets: {name} {fault}.*write {name}.detach\(\)"):
            differentiate()
    module = torch.nn.Module()
    module.forward = lambda x: windows(**{name: x})
    assert_same(torch.export.export(module, (value,)).module()(value), windows(**{name: value}))
    with torch.inference_mode():
        assert_same(windows(**{name: value}), windows(**{name: value}))


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lengths": torch.tensor([1, 2])}, ValueError, "terminated must be given with lengths"),
        ({"lengths": torch.tensor([1.0, 2.0])}, TypeError, r"write lengths.long\(\)"),
        ({"lengths": [1, 2]}, TypeError, "lengths must be .*of type list"),
        ({"lengths": torch.ones(2, 1).long(), "terminated": torch.ones(2) > 0}, ValueError, r"lengths.squeeze\(-1\)"),
        ({"terminated": torch.ones(2)}, TypeError, r"write terminated.bool\(\)"),
        ({"terminated": torch.ones(3) > 0}, ValueError, r"terminated must have shape \[2\].*\[3\]"),
        ({"to_play": torch.ones(2, 4)}, TypeError, "integers or bool"),
        ({"to_play": torch.ones(2, 3).long()}, ValueError, r"to_play must have shape \[2, 4\]"),
        ({"reward": "value_prefix", "to_play": torch.ones(2, 4).long()}, ValueError, "cannot be given with to_play"),
        ({"reward": "sum"}, ValueError, "'reward' or 'value_prefix'"),
        *[
            ({"num_unroll_steps": x}, ValueError if x == -1 else TypeError, "num_unroll_steps must")
            for x in (-1, 2.0, True)
        ],
        ({"num_unroll_steps": 2**63 - 1}, ValueError, r"from 0 to 2\*\*31 - 1, but it is too large"),
        *[({"td_steps": x}, ValueError if x == 0 else TypeError, "td_steps must") for x in (0, 1.0, True)],
        *[({"prefix_horizon": x}, ValueError if x == 0 else TypeError, "prefix_horizon must") for x in (0, 1.0, True)],
        ({"rewards": torch.ones(2, 3, 1)}, ValueError, r"write rewards.squeeze\(-1\)"),
        ({"rewards": torch.ones(2, 3).long()}, TypeError, r"write rewards.float\(\)"),
        ({"root_values": torch.ones(2, 3)}, ValueError, r"root_values must have shape \[2, 4\]"),
        ({"root_reward": torch.ones(2, 1)}, ValueError, r"write root_reward.squeeze\(-1\)"),
        ({"root_values": torch.ones(2, 4, device="meta")}, ValueError, "root_values must be on the device of rewards"),
        *[
            ({name: torch.ones(shape, requires_grad=True)}, ValueError, rf"write {name}.detach\(\)")
            for name, shape in {"rewards": (2, 3), "root_values": (2, 4), "root_reward": (2,), "discount": ()}.items()
        ],
        ({"discount": torch.ones(2, 3)}, ValueError, r"broadcast to \[2, 1\]"),
        ({"discount": torch.ones(2)}, ValueError, r"; write discount\[:, None\]$"),
        (
            {
                "discount": torch.ones(2),
                "rewards": torch.ones(3, 2),
                "root_values": torch.ones(4, 2),
                "batch_first": False,
            },
            ValueError,
            r"; write discount\[None\]$",
        ),
        ({"rewards": torch.ones(3, 2), "root_values": torch.ones(4, 2)}, ValueError, "pass batch_first=False$"),
        ({"root_values": torch.ones(4, 4)}, ValueError, r"its shape is \[4, 4\]$"),
        ({"root_values": torch.ones(2, 4), "batch_first": False}, ValueError, "pass batch_first=True$"),
        ({"root_values": torch.ones(4)}, ValueError, r"root_values must have shape \[B, L \+ 1\]"),
        ({"lengths": 1}, TypeError, r"lengths must be an int64 tensor of shape \[B\], but it is of type int$"),
        ({"root_reward": 1.0}, TypeError, r"root_reward must be a tensor of shape \[B\]"),
        *[
            ({"reward": "value_prefix", name: 10**30}, ValueError, f"{name} must .*too large")
            for name in ("num_unroll_steps", "td_steps", "prefix_horizon")
        ],
        ({"discount": 1.5}, ValueError, "discount must be from -1 to 1"),
        ({"batch_first": None}, TypeError, "batch_first must be True or False"),
    ],
)
@pytest.mark.any_version
def test_errors_of_muzero_targets(changes, error, message, module):
    with pytest.raises(error, match=f"^muzero_targets: .*{message}"):
        windows(module, **changes)


# ---- Values that muzero_targets refuses -----------------------------------------------------------------------------


def of_window(length=3, over=False, players=(0, 1, 0, 1), **changes):
    """`windows` with one row of three moves after a valid row."""
    lengths, terminated = torch.tensor([3, length]), torch.tensor([True, over])
    to_play = None if players is None else torch.tensor([[1, 0, 1, 0], players])
    return {"lengths": lengths, "terminated": terminated, "to_play": to_play, **changes}


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("length", [4, 30, -1, -3, 2**62])
@pytest.mark.any_version
def test_a_length_out_of_range_raises_on_a_cpu(length, module):
    message = rf"lengths must be from 0 to 3, the number of moves in rewards, but row 1 has {length}; a length counts"
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(ValueError, match=f"^muzero_targets: {message}"):
            windows(module, **of_window(length, players=None))
    arguments = of_window(length, batch_first=False, rewards=torch.ones(3, 2), root_values=torch.ones(4, 2))
    arguments["to_play"] = arguments["to_play"].T
    with pytest.raises(ValueError, match=f"^muzero_targets: {message}"):
        windows(module, **arguments)
    with pytest.raises(ValueError, match=message):
        windows(module, lengths=torch.tensor([9, 3, 9, length])[1::2], terminated=torch.tensor([True, False]))


@pytest.mark.compiled
def test_lengths_out_of_range_are_clamped_where_there_are_no_values():
    wrong, right = torch.tensor([30, -3]), torch.tensor([3, 0])
    terminated = torch.tensor([True, False])
    expected = windows(lengths=right, terminated=terminated)

    def apply(lengths):
        return tuple(windows(lengths=lengths, terminated=terminated))

    assert_same(torch.compile(apply, fullgraph=True, backend="aot_eager")(wrong), expected)
    mapped = torch.func.vmap(apply)(torch.stack([right, wrong]))
    assert_same([field[1] for field in mapped], expected)
    assert_same(make_fx(apply)(wrong)(wrong), expected)
    module = torch.nn.Module()
    module.forward = apply
    assert_same(torch.export.export(module, (wrong,)).module()(wrong), expected)
    with FakeTensorMode() as mode:
        given = {"lengths": mode.from_tensor(wrong), "terminated": mode.from_tensor(terminated)}
        fake = windows(rewards=torch.ones(2, 3), root_values=torch.ones(2, 4), **given)
    assert fake.values.shape == (2, 3)
    given |= {"rewards": mode.from_tensor(torch.ones(2, 3)), "root_values": mode.from_tensor(torch.ones(2, 4))}
    assert windows(**given).values.shape == (2, 3)  # outside of the mode


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"players": (0, 1, 2, 0)}, "0, 1 and 2"),
        ({"players": (2, -7, 0, 0)}, "-7, 0 and 2"),
        ({"players": (0, 0, 1, 2)}, "0, 1 and 2"),  # the player of the last state is read if the game goes on
        ({"players": (0, 1, 2, 9), "length": 2}, "0, 1 and 2"),
        ({"players": (3, 1, 2, 9), "over": True}, "1, 2 and 3"),
        ({"players": (0, 1, 2, 2), "num_unroll_steps": 0}, "0, 1 and 2"),
        ({"players": (0, 1, 2, 2), "num_unroll_steps": 1, "td_steps": 1}, "0, 1 and 2"),
        ({"players": (0, 1, 2, 2), "td_steps": 10**18}, "0, 1 and 2"),
    ],
)
@pytest.mark.any_version
def test_a_third_player_raises_on_a_cpu(changes, seen, module):
    message = (
        f"^muzero_targets: to_play must have at most two players in a row, but row 1 has {seen}: .*without to_play"
    )
    arguments = of_window(**changes)
    for dtype in (torch.int64, torch.int8):
        with pytest.raises(ValueError, match=message):
            windows(module, **arguments | {"to_play": arguments["to_play"].to(dtype)})
    by_step = {name: arguments[name].T for name in ("to_play",)} | {"batch_first": False}
    by_step |= {"rewards": torch.ones(3, 2), "root_values": torch.ones(4, 2)}
    with torch.inference_mode(), pytest.raises(ValueError, match=message):
        windows(module, **arguments | by_step)


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"players": (5, 5, 5, 5)},
        {"players": (1, 2, 1, 2)},  # the other row has players 0 and 1
        {"players": (0, 1, 0, -1), "over": True},  # nobody moves where the game has ended
        {"players": (0, 1, -1, 7), "length": 2, "over": True},
        {"players": (0, 1, 1, 7), "length": 2},
        {"players": (-1, 3, 4, 5), "length": 0, "over": True},
        {"players": (0, 1, 2, 3), "num_unroll_steps": 0, "td_steps": 1},
        {"players": (0, 1, 1, 2), "num_unroll_steps": 1, "td_steps": 1},
    ],
)
@pytest.mark.any_version
def test_entries_of_to_play_that_no_target_reads(changes, check, module):
    """They may hold anything: the targets equal the targets of equal players there, as the definition reads them."""
    arguments = of_window(**changes)
    results = windows(module, **arguments, check=check)
    steps, n = arguments.get("num_unroll_steps", 2), arguments.get("td_steps", 2)
    r, nu = torch.arange(6.0).view(2, 3).double().numpy(), torch.arange(8.0).view(2, 4).double().numpy()
    given = (arguments["lengths"], arguments["terminated"], arguments["to_play"])
    rows = [
        muzero_row(r[b], nu[b], int(given[0][b]), bool(given[1][b]), steps, n, 0.9, given[2][b].numpy()) for b in (0, 1)
    ]
    for result, field in zip(results, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(result, torch.from_numpy(np.stack(field)).to(result.dtype))


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"discount": torch.tensor(1.5)}, "discount must be from -1 to 1, but it is 1.5"),
        ({"discount": torch.tensor([[0.9], [torch.nan]])}, "discount must be from -1 to 1, but row 1 has nan"),
        (
            {"rewards": torch.tensor([[0, 1, 2], [0, torch.nan, 0]])},
            "the value target of row 1 at step 0 is NaN, because rewards has NaN at index 1 of the row; find",
        ),
        (
            {"root_values": torch.tensor([[0, 1, 2, 3], [0, 0, torch.nan, 0]])},
            "the value target of row 1 at step 0 is NaN, because root_values has NaN at index 2 of the row; find",
        ),
        (
            {"rewards": torch.tensor([[0, 1, torch.nan], [0, 0, 0]]), "td_steps": 1, "num_unroll_steps": 2},
            "the value target of row 0 at step 2 is NaN, because rewards has NaN at index 2",
        ),
        (
            {"rewards": torch.tensor([[torch.inf, 0, 0]] * 2), "root_values": torch.full((2, 4), -torch.inf)},
            "the value target of row 0 at step 0 is NaN, because infinite rewards and root_values",
        ),
        ({"root_reward": torch.tensor([0, torch.nan])}, "the reward target of row 1 at step 0 .* root_reward has NaN"),
    ],
)
@pytest.mark.any_version
def test_check_finds_values_that_cannot_be_intended(changes, message, module):
    windows(module, **changes)  # without check, the results are NaN, or meaningless
    with pytest.raises(ValueError, match=f"^muzero_targets: {message}"):
        windows(module, **changes, check=True)


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.any_version
def test_check_accepts_nan_that_no_target_reads(module):
    nan = torch.nan
    arguments = {
        "rewards": torch.tensor([[1, 2, nan], [1, nan, nan]]),
        "root_values": torch.tensor([[nan, nan, 3, nan], [nan, nan, nan, nan]]),
        "lengths": torch.tensor([2, 1]),
        "terminated": torch.tensor([False, True]),
    }
    expected = windows(module, **{k: v.nan_to_num() if v.is_floating_point() else v for k, v in arguments.items()})
    assert_same(windows(module, **arguments, check=True), expected)
    behind_zero = windows(module, root_values=torch.full((2, 4), nan), num_unroll_steps=1, discount=0.0, check=True)
    assert_same((behind_zero.values,), (torch.arange(6.0).view(2, 3)[:, :2],))


@pytest.mark.parametrize("module", [gs, gs.reference])
@pytest.mark.compiled
def test_check_needs_values(module):
    rewards = torch.arange(6.0).view(2, 3)

    def apply(rewards):
        return tuple(windows(module, rewards=rewards, check=True))

    assert_same(apply(rewards), windows(module))
    contexts = {
        "compile": lambda: torch.compile(apply, backend="aot_eager")(rewards),
        "compile, fullgraph": lambda: torch.compile(apply, fullgraph=True, backend="aot_eager")(rewards),
        "vmap": lambda: torch.func.vmap(apply)(rewards[None]),
        "make_fx": lambda: make_fx(apply)(rewards),
        "meta": lambda: windows(
            module, rewards=rewards.to("meta"), root_values=torch.ones(2, 4).to("meta"), check=True
        ),
    }
    for run in contexts.values():
        torch._dynamo.reset()
        with pytest.raises(Exception, match="muzero_targets: check=True reads values, which do not exist while"):
            run()
    for wrong in (1, None, torch.tensor(True)):
        with pytest.raises(TypeError, match="muzero_targets: check must be True or False"):
            windows(module, check=wrong)


@pytest.fixture
def without_kernels(monkeypatch):
    """Simulates a device without kernels."""
    monkeypatch.setattr(gs._native, "DEVICE_TYPES", ())
    monkeypatch.setattr(gs.returns._context, "is_eager", lambda: False)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_device_without_kernels_runs_the_reference(function, without_kernels):
    data = random_data(0)
    assert_same(call(function, data), call(function, data, gs.reference), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"reward": "value_prefix", "prefix_horizon": 2}])
def test_muzero_targets_on_a_device_without_kernels(options, without_kernels):
    rewards, values = torch.randn(3, 6), torch.randn(3, 7)
    options = {"num_unroll_steps": 4, "td_steps": 2, "discount": 0.9, **options}
    results = gs.muzero_targets(rewards, values, **options)
    assert_same(results, gs.reference.muzero_targets(rewards, values, **options), rtol=0, atol=0)


def on_meta(data):
    """The tensors without their values."""
    return {name: value.detach().to("meta") if torch.is_tensor(value) else value for name, value in data.items()}


def assert_same_shapes(results, expected):
    described = [[(x.shape, x.stride(), x.dtype) for x in tensors] for tensors in (results, expected)]
    assert described[0] == described[1]
    assert all(result.is_meta for result in results)


@pytest.mark.parametrize("function", [*FUNCTIONS, "n_step_transitions"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("observations", [False, True])
def test_shapes_of_results_and_gradients_without_values(function, batch_first, observations):
    """The function that allocates the results gives their shapes to tracers."""
    data = random_data(3, 4, 6)
    if function == "n_step_transitions":
        data = {name: data[name] for name in ("rewards", "discount", *FLAGS)} | {"n": 2}
    elif function == "retrace":
        data["next_values"] = data["next_values"].float()
    elif observations:
        data |= {"values": torch.randn(4, 7), "next_values": None, "truncated": None}
    if not batch_first:
        data = {name: value.T if torch.is_tensor(value) else value for name, value in data.items()}
    found = []
    for arguments in (data, on_meta(data)):
        names = [name for name in ("rewards", "values", "next_values") if arguments.get(name) is not None]
        arguments |= {name: arguments[name].detach().requires_grad_() for name in names}
        if function == "n_step_transitions":
            results = tuple(gs.n_step_transitions(**arguments, batch_first=batch_first))
        else:
            results = call(function, arguments, batch_first=batch_first)
        leaves = [arguments[name] for name in names]
        outputs = [result for result in results if result.requires_grad]
        ones = [torch.ones_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves, ones, materialize_grads=True)
        found.append([*results, *gradients])
    assert_same_shapes(found[1], found[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("root_reward", [None, torch.ones(3)])
def test_shapes_of_muzero_targets_without_values(batch_first, root_reward):
    data = {"rewards": torch.ones(3, 6), "root_values": torch.ones(3, 7).double(), "root_reward": root_reward}
    data = {name: x.T if not batch_first and torch.is_tensor(x) and x.dim() == 2 else x for name, x in data.items()}
    options = {"num_unroll_steps": 4, "td_steps": 2, "discount": 0.9, "batch_first": batch_first}
    assert_same_shapes(gs.muzero_targets(**on_meta(data), **options), gs.muzero_targets(**data, **options))


@pytest.mark.parametrize("operator", ["returns", "muzero_targets"])
def test_shapes_are_computed_in_one_place(operator):
    assert torch._library.simple_registry.singleton.find(f"gradscale_ext::{operator}").fake_impl.kernel is None


@pytest.mark.parametrize("steps", [5, 300])
def test_contiguous_rows_that_fill_several_tiles(steps):
    """Rows without a mask are joined; their ends are at other places of each tile of 256 steps."""
    data = random_data(0, 70, steps)
    data["mask"] = None
    narrow = {
        name: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in data.items()
    }
    for function in ("lambda_returns", "generalized_advantages"):
        for one, wanted in zip(call(function, narrow), call(function, data, gs.reference), strict=True):
            torch.testing.assert_close(one.double(), wanted.double(), rtol=1e-4, atol=1e-4)
