"""The parts of n-step returns, compared with products and sums by definition, and with n-step returns."""

import inspect

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from test_returns import (
    FLAGS,
    assert_same,
    direct,  # noqa: F401
    gradient_of_gradient,
    lazily_negated,
    made_in_inference_mode,
    without_kernels,  # noqa: F401
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from trajectories import episodes, random_data

import gradscale_ext as gs

NAMES = ("rewards", "discount", *FLAGS)
MODULES = pytest.mark.parametrize("module", [gs, gs.reference])
EXACT = {"rtol": 0, "atol": 0}


def call(data, module=gs, **changes):
    return module.n_step_transitions(**{name: data[name] for name in NAMES} | {"n": 3} | changes)


def by_definition(data, n):
    """Sums and products in NumPy, row by row and episode by episode."""
    rewards, gamma = data["rewards"].double().numpy(), data["discount"].double().numpy()
    flags = [data[name].numpy() for name in FLAGS]
    sums, products, counts = np.zeros(rewards.shape), np.zeros(rewards.shape), np.zeros(rewards.shape, dtype=np.int64)
    for b in range(len(rewards)):
        for begin, end, is_over in episodes(*[flag[b] for flag in flags]):
            for t in range(begin, end):
                m = min(n, end - t)
                weights = np.concatenate([[1.0], np.cumprod(gamma[b, t : t + m])])
                sums[b, t] = (weights[:m] * rewards[b, t : t + m]).sum()
                products[b, t] = 0 if is_over and t + m == end else weights[m]
                counts[b, t] = m
    return tuple(map(torch.from_numpy, (sums, products, counts)))


def transposed(data):
    return {name: value.T if value is not None and value.dim() == 2 else value for name, value in data.items()}


@MODULES
@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 39, 40, 10**12])
@pytest.mark.any_version
def test_against_the_definition(n, module):
    for seed, ends in enumerate((0.0, 0.1, 0.3)):
        data = random_data(seed, 4, 40, ends=ends, padding=ends)
        data["discount"][:, ::5] *= -1
        expected = by_definition(data, n)
        assert_same(call(data, module, n=n), expected, rtol=1e-12, atol=1e-13)
        by_step = call(transposed(data), module, n=n, batch_first=False)
        assert_same([result.T for result in by_step], expected, rtol=1e-12, atol=1e-13)
        assert all(result.is_contiguous() for result in by_step)


@pytest.mark.parametrize("n", [1, 2, 5, 12, 100])
@pytest.mark.any_version
def test_the_parts_of_n_step_returns(n):
    """Exactly where no operation rounds; else to the rounding of sums in another order."""
    data = random_data(3, 6, 12, ends=0.2, padding=0.2, dtype=torch.float32)
    whole = {name: (4 * data[name]).round() for name in ("rewards", "next_values")}
    powers = {"discount": torch.tensor([0.5, 1.0, -0.5])[torch.arange(72).view(6, 12) % 3]}
    for arguments, tolerance in ((data, {"rtol": 1e-5, "atol": 1e-6}), (data | whole | powers, EXACT)):
        parts = call(arguments, n=n)
        index = (torch.arange(12) + parts.steps - 1).clamp(min=0)
        joined = parts.rewards + parts.discounts * arguments["next_values"].gather(1, index)
        options = {name: arguments[name] for name in NAMES}
        expected = gs.n_step_returns(next_values=arguments["next_values"], n=n, **options)
        assert_same((joined,), (expected,), **tolerance)
        zeros = gs.n_step_returns(next_values=torch.zeros(6, 12), n=n, **options)
        assert_same((parts.rewards,), (zeros,), **tolerance)


@pytest.mark.any_version
def test_dtypes_and_forms():
    data = random_data(4, 3, 9)
    expected = call(data)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        given = {name: data[name].to(dtype) for name in ("rewards", "discount")}
        parts = call(data | given)
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert [part.dtype for part in parts] == [wanted, wanted, torch.int64]
        truth = call(data | {name: value.double() for name, value in given.items()}, gs.reference)
        assert_same(parts, [part.to(own.dtype) for part, own in zip(truth, parts, strict=True)])
        mixed = call(data | {"rewards": given["rewards"]})
        assert mixed.rewards.dtype == torch.float64
    for form in (0.9, torch.tensor(0.9).double(), torch.full((1, 1), 0.9).double(), torch.full((3, 1), 0.9).double()):
        assert_same(call(data, discount=form), call(data, discount=torch.full((3, 9), 0.9).double()))
    wide = {name: torch.stack([data[name], data[name]], -1)[..., 0] for name in NAMES}
    assert_same(call(wide), expected, **EXACT)
    expanded = {name: data[name][:1].expand(3, 9) for name in NAMES}
    assert_same([part[1:2] for part in call(expanded)], [part[:1] for part in expected], **EXACT)
    none = dict.fromkeys(FLAGS)
    assert_same(
        call(data, **none),
        by_definition(data | {name: data["mask"] & False for name in FLAGS[:2]} | {"mask": data["mask"] | True}, 3),
    )


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@MODULES
def test_empty_tensors(shape, module):
    data = random_data(12, *shape, dtype=torch.float32)
    rewards = data["rewards"].requires_grad_()
    parts = call(data, module)
    assert [part.shape for part in parts] == [shape] * 3
    assert parts.steps.dtype == torch.int64
    if module is gs:
        assert torch.autograd.grad(parts.rewards.sum(), rewards)[0].shape == shape


# ---- Not finite, and zero -------------------------------------------------------------------------------------------


@MODULES
@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.any_version
def test_masked_entries_are_not_read(n, module):
    data = random_data(23, 6, 20, padding=0.3)
    live = data["mask"]
    spoilt = {name: torch.where(live, data[name], torch.nan) for name in ("rewards", "discount")}
    spoilt |= {flag: data[flag] | ~live for flag in ("terminated", "truncated")}
    expected, found = call(data, module, n=n), call(data | spoilt, module, n=n)
    assert_same(found, expected, **EXACT)
    assert all((part[~live] == 0).all() for part in found)


@MODULES
@pytest.mark.parametrize("n", [1, 2, 4, 20])
@pytest.mark.any_version
def test_nan_stays_in_its_window(n, module):
    """Compared with the definition of what is read: entry i of rewards by windows that hold it, not behind a discount
    of 0; a discount, by `rewards` if a later reward of the window is read, and by `discounts`."""
    for place in (0, 5, 9):
        for zero in (None, 3, 7):
            data = random_data(7, 3, 10, ends=0.15, padding=0.0)
            data["discount"][:, zero if zero is not None else slice(0)] = 0
            counts = call(data, n=n).steps
            begins = torch.arange(10)
            ends = begins + counts  # of each window
            holds = (begins <= place) & (place < ends)
            behind = torch.zeros_like(holds)
            if zero is not None:
                behind = (begins <= zero) & (zero < place)
            nan_rewards = data["rewards"].clone()
            nan_rewards[:, place] = torch.nan
            found = call(data | {"rewards": nan_rewards}, module, n=n)
            assert torch.equal(found.rewards.isnan(), holds & ~behind)
            assert found.discounts.isfinite().all()
            if zero == place:
                continue
            nan_discount = data["discount"].clone()
            nan_discount[:, place] = torch.nan
            found = call(data | {"discount": nan_discount}, module, n=n)
            assert torch.equal(found.rewards.isnan(), holds & ~behind & (place < ends - 1))
            last = (ends - 1).clamp(max=9)
            is_zero = data["terminated"].gather(1, last)
            if zero is not None:
                is_zero = is_zero | ((begins <= zero) & (zero < ends))
            assert torch.equal(found.discounts.isnan(), holds & ~is_zero)
            assert (found.discounts[is_zero] == 0).all()
            assert torch.equal(found.steps, counts)


@pytest.mark.any_version
def test_gradients_stay_in_their_window():
    """A NaN gradient of one result reaches the rewards of its window alone, not those behind a discount of 0."""
    for n in (1, 3, 20):
        data = random_data(8, 3, 12, ends=0.1, padding=0.1)
        data["discount"][:, 6] = 0
        rewards = data["rewards"].clone().requires_grad_()
        parts = call(data | {"rewards": rewards}, n=n)
        weights = torch.zeros(3, 12).double()
        weights[:, 4] = torch.nan
        (gradient,) = torch.autograd.grad(parts.rewards, rewards, weights)
        t = torch.arange(12)
        reached = (t >= 4) & (t < 4 + parts.steps[:, 4:5]) & (t <= 6)
        assert torch.equal(gradient.isnan(), reached)
        assert (gradient[~reached] == 0).all()


@pytest.mark.any_version
def test_a_product_that_underflows_is_not_a_termination():
    """Otherwise a bootstrap that is NaN would disappear."""
    parts = gs.n_step_transitions(torch.ones(1, 12), discount=1e-10, n=12)
    assert (parts.discounts > 0).all()
    torch.testing.assert_close(parts.rewards, torch.ones(1, 12))


# ---- Gradients and contexts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("batch_first", [True, False])
def test_gradients(n, batch_first):
    data = random_data(1, 3, 7)
    data = data if batch_first else transposed(data)
    weights = torch.linspace(-1, 2, 21).double().view(data["rewards"].shape)

    def loss(rewards, module=gs):
        parts = call(data | {"rewards": rewards}, module, n=n, batch_first=batch_first)
        return (parts.rewards * weights + parts.discounts + parts.steps).sum()

    rewards = data["rewards"].clone()
    (expected,) = torch.autograd.grad(loss(leaf := rewards.clone().requires_grad_(), gs.reference), leaf)
    (found,) = torch.autograd.grad(loss(leaf := rewards.clone().requires_grad_()), leaf)
    assert_same((found,), (expected,), rtol=1e-12, atol=1e-12)
    assert_same((torch.func.grad(loss)(rewards),), (expected,), rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(rewards)
    _, tangent = torch.func.jvp(loss, (rewards,), (direction,))
    torch.testing.assert_close(tangent, (expected * direction).sum())
    torch.testing.assert_close(
        torch.func.hessian(lambda x: loss(x) ** 2)(rewards).flatten(0, 1).flatten(1),
        2 * torch.outer(expected.flatten(), expected.flatten()),
    )

    def apply(rewards):
        return call(data | {"rewards": rewards}, n=n, batch_first=batch_first).rewards

    leaf = rewards.clone().requires_grad_()
    assert torch.autograd.gradcheck(apply, leaf, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(apply, leaf, check_fwd_over_rev=True)
    again = gradient_of_gradient(apply)
    _, expected = torch.func.jvp(
        lambda x: call(data | {"rewards": x}, gs.reference, n=n, batch_first=batch_first)[0], (rewards,), (direction,)
    )
    inputs = (leaf, torch.randn_like(expected, requires_grad=True), direction)
    assert_same((again(*inputs),), (expected,), rtol=1e-12, atol=1e-12)
    traced = make_fx(again, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    assert_same((traced(*inputs),), (expected,), rtol=1e-12, atol=1e-12)


@pytest.mark.any_version
def test_discounts_and_steps_are_constants(direct):  # noqa: F811
    data = random_data(2, 3, 7)
    parts = call(data | {"rewards": data["rewards"].clone().requires_grad_()})
    assert type(parts) is gs.NStepTransitions
    assert parts.rewards.requires_grad
    assert parts.rewards.grad_fn.name() == "NStepTransitionsBackward"
    assert not parts.discounts.requires_grad
    assert not parts.steps.requires_grad
    with forward_ad.dual_level():
        direction = torch.randn(3, 7).double()
        parts = call(data | {"rewards": forward_ad.make_dual(data["rewards"], direction)})
        tangents = [forward_ad.unpack_dual(part).tangent for part in parts]
        assert tangents[1:] == [None, None]
        assert_same((tangents[0],), (call(data | {"rewards": direction}).rewards,))
    assert all(part.grad_fn is None for part in call(data))


@pytest.mark.any_version
def test_numbers_and_lazy_negation_go_straight_to_cpp(direct):  # noqa: F811
    data = random_data(30, 3, 6)
    for n in (np.int64(2), np.uint8(2), True + 1):
        assert_same(call(data, n=n), call(data, n=2), **EXACT)
    lazy = data | {name: lazily_negated(data[name]) for name in ("rewards", "discount")}
    assert_same(call(lazy), call(data), **EXACT)


def test_vmap():
    examples = [random_data(seed, 3, 6) for seed in range(4)]
    for mapped in (*[(name,) for name in NAMES], NAMES):
        fixed = examples[0]
        stacked = {name: torch.stack([example[name] for example in examples]) for name in mapped}
        results = torch.func.vmap(lambda arguments, fixed=fixed: tuple(call(fixed | arguments)))(stacked)
        for i, example in enumerate(examples):
            expected = call(fixed | {name: example[name] for name in mapped}, gs.reference)
            assert_same([result[i] for result in results], expected)
    gradients = torch.func.vmap(torch.func.grad(lambda r: call(examples[0] | {"rewards": r}).rewards.sum()))
    rewards = torch.stack([example["rewards"] for example in examples])
    (expected,) = torch.autograd.grad(call(examples[0], rewards=(x := rewards[0].clone().requires_grad_()))[0].sum(), x)
    assert_same(gradients(rewards).unbind(), [expected] * 4)


@pytest.mark.compiled
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic):
    data = random_data(4, 3, 6, dtype=torch.float32)
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def results(rewards, discount, n):
        parts = call(data | {"rewards": rewards}, discount=discount, n=n)
        return parts.rewards * 2, parts.discounts, parts.steps + 1

    torch._dynamo.reset()
    compiled = torch.compile(results, fullgraph=True, backend=count, dynamic=dynamic)
    for k in range(5):
        runs = []
        for function in (results, compiled):
            rewards = data["rewards"].clone().requires_grad_()
            outputs = function(rewards, 0.9 + k / 100, 3)
            assert not outputs[1].requires_grad
            runs.append((*outputs, *torch.autograd.grad(outputs[0].square().sum(), rewards)))
        assert_same(runs[1], runs[0])
    assert count.frame_count <= 2


@pytest.mark.compiled
def test_other_contexts():
    data = random_data(5, 3, 6, dtype=torch.float32)
    expected = call(data)
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        with context():
            assert_same(call(data | {"rewards": data["rewards"].clone().requires_grad_()}), expected, **EXACT)
    for name in NAMES:
        rewards = data["rewards"].clone().requires_grad_()
        parts = call(data | {"rewards": rewards} | {name: made_in_inference_mode(data[name])})
        assert_same(parts, expected, **EXACT)
        if name != "rewards":
            torch.autograd.grad(parts.rewards.sum(), rewards)
    rewards = data["rewards"].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(call(data | {"rewards": rewards}).rewards.sum(), rewards)
    again = torch.utils.checkpoint.checkpoint(
        lambda x: call(data | {"rewards": x}).rewards.sum(), rewards, use_reentrant=False
    )
    assert_same(torch.autograd.grad(again, rewards), (wanted,), **EXACT)
    module = torch.nn.Module()
    module.forward = lambda rewards: tuple(call(data | {"rewards": rewards}))
    exported = torch.export.export(module, (data["rewards"],)).module()
    assert_same(exported(data["rewards"]), expected, **EXACT)
    with FakeTensorMode() as mode:  # reading a value would raise
        fake = call({name: mode.from_tensor(data[name]) for name in NAMES})
    assert [(part.shape, part.dtype) for part in fake] == [(part.shape, part.dtype) for part in expected]
    meta = call({name: data[name].to("meta") for name in NAMES})
    assert [(part.shape, part.dtype) for part in meta] == [(part.shape, part.dtype) for part in expected]


@pytest.mark.any_version
def test_constants_and_saved_tensors():
    data = random_data(13, 4, 9)
    for module in (gs, gs.reference):
        with pytest.raises(ValueError, match=r"n_step_transitions: discount requires grad.* write discount.detach\(\)"):
            call(data, module, discount=data["discount"].clone().requires_grad_())
    with pytest.raises(ValueError, match="discount has a tangent of forward mode"):
        torch.func.jvp(lambda x: call(data, discount=x).rewards, (data["discount"],), (data["discount"],))
    for name in ("discount", *FLAGS):
        buffers = data | {name: data[name].clone(), "rewards": data["rewards"].clone().requires_grad_()}
        parts = call(buffers)
        buffers[name].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            parts.rewards.sum().backward()


def test_bitwise_the_same_from_run_to_run():
    data = random_data(20, 64, 300, dtype=torch.float32)
    first = call(data, n=7)
    for _ in range(3):
        assert_same(call(data, n=7), first, **EXACT)


def test_large_results_take_pooled_memory():
    """Steps are int64: they are larger than the other results."""
    rewards = torch.randn(300, 500)
    parts = gs.n_step_transitions(rewards, discount=0.9, n=4)
    again = gs.n_step_transitions(rewards, discount=0.9, n=4)  # while the first results are in use
    assert_same(again, parts, **EXACT)
    assert parts.steps[:, :-3].eq(4).all()


def test_a_device_without_kernels_runs_the_reference(without_kernels):  # noqa: F811
    data = random_data(0)
    assert_same(call(data), call(data, gs.reference), **EXACT)


# ---- Arguments ------------------------------------------------------------------------------------------------------


@MODULES
@pytest.mark.any_version
def test_signature(module):
    signature = inspect.signature(module.n_step_transitions)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == (
        "(rewards, *, discount, n, terminated=None, truncated=None, mask=None, batch_first=True"
        + (", check=False)" if module is gs else ")")
    )
    assert signature.return_annotation == "NStepTransitions"
    assert gs.NStepTransitions._fields == ("rewards", "discounts", "steps")


@MODULES
@pytest.mark.any_version
def test_errors(module):
    data = random_data(14, 3, 6)
    for name in NAMES:
        value = data[name]
        dtype, other = ("bool", value.double()) if name in FLAGS else ("float", value.long())
        for wrong, error, message in (
            (value.tolist(), TypeError, "of type list"),
            (value.numpy(), TypeError, r"of type ndarray.*torch.as_tensor"),
            (other, TypeError, rf"its dtype is {other.dtype}; write {name}.{dtype}\(\)"),
            (value[..., None], ValueError, rf"its shape is \[3, 6, 1\]; write {name}.squeeze\(-1\)"),
            (value[0], ValueError, rf"its shape is \[6\].*rite {name}"),
            (value[:, :-1], ValueError, r"\[3, 6\].*its shape is \[3, 5\]"),
            (value.to("meta"), ValueError, "must be on the device of rewards, cpu, but it is on meta"),
        ):
            if not (name == "rewards" and error is ValueError and wrong.dim() == 2):
                with pytest.raises(error, match=f"^n_step_transitions: {name} .*{message}"):
                    call(data, module, **{name: wrong})
    for n, error in ((0, ValueError), (-3, ValueError), (True, TypeError), (2.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"^n_step_transitions: n must be an integer of at least 1"):
            call(data, module, n=n)
    for discount, error in ((1.5, ValueError), (float("nan"), ValueError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"^n_step_transitions: discount must be"):
            call(data, module, discount=discount)
    with pytest.raises(TypeError, match=r"^n_step_transitions: batch_first must be True or False"):
        call(data, module, batch_first=1)
