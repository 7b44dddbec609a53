"""Supports. fuzz/test_tensors.py checks encoding and decoding against formulas."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import gradscale_ext as gs

ORACLE = json.loads((Path(__file__).parent / "oracles" / "transforms.json").read_text())["two_hot"]
SUPPORTS = [
    gs.Support.muzero(),
    gs.Support(-2, 7, 10),
    gs.Support(-3, 3, 6, "symlog"),
    gs.Support(0, 1, 2, "identity"),
    gs.Support(-3, 3, 7, "symlog", space="raw"),
    gs.Support(-2, 6, 40, space="raw"),
]
NAN, INF = float("nan"), float("inf")


def test_two_hot_oracle():
    support = gs.Support(ORACLE["minimum"], ORACLE["maximum"], ORACLE["num_bins"], "identity")
    x = torch.tensor(ORACLE["x"], dtype=torch.float64)
    expected = torch.tensor(ORACLE["p"], dtype=torch.float64)
    torch.testing.assert_close(support.two_hot(x), expected, rtol=1e-12, atol=1e-15)


def test_kernels_decode_and_encode_in_inference_mode(monkeypatch):
    """Agents act in inference mode, where the reference would be many times slower."""
    support, logits = gs.Support.muzero(), torch.randn(3, 601)
    expected = support.decode(logits), support.two_hot(logits[:, 0]), support.hl_gauss(logits[:, 0])
    for name in ("decode", "two_hot", "hl_gauss"):
        monkeypatch.delattr(gs.reference, name)
    with torch.inference_mode():
        for given in (logits, logits.clone()):
            found = support.decode(given), support.two_hot(given[:, 0]), support.hl_gauss(given[:, 0])
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)
    assert found[0].is_inference()


@pytest.mark.parametrize("num_bins", [2, 3, 21, 101, 255, 601])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit", [0.0, 3.25, -7.0])
@pytest.mark.parametrize("space", ["transformed", "raw"])
def test_uniform_logits_decode_to_exactly_zero(num_bins, dtype, logit, space):
    support = gs.Support(-10, 10, num_bins, space=space)
    logits = torch.full((3, num_bins), logit, dtype=dtype)
    assert torch.equal(
        support.decode(logits), torch.zeros(3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    )
    assert torch.equal(support.decode(logits.requires_grad_()).detach().double(), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("space", ["transformed", "raw"])
def test_decode_of_other_layouts_and_contexts(space):
    support = gs.Support(-5, 5, 11, space=space)
    logits = torch.randn(11, 4, dtype=torch.float64)
    expected = gs.reference.decode(logits.T, support)
    torch.testing.assert_close(support.decode(logits.T), expected)
    torch.testing.assert_close(torch.func.vmap(support.decode)(logits.T), expected)
    assert torch.autograd.gradcheck(support.decode, logits.T.contiguous().requires_grad_())
    with torch.inference_mode():
        torch.testing.assert_close(support.decode(logits.T), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(support.decode, backend="aot_eager", fullgraph=True)(logits.T), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", ["symlog", "signed_hyperbolic"])
@pytest.mark.parametrize("limits", [(-10, 10, 101), (-20, 20, 255), (-3, 8, 101), (-10, 10, 21), (-3, 8, 22)])
@pytest.mark.parametrize("space", ["transformed", "raw"])
def test_gradient_of_decode_at_a_saturated_softmax_is_exactly_zero(dtype, transform, limits, space):
    support = gs.Support(*limits, transform, space=space)
    x = (2000 * torch.eye(support.num_bins, dtype=dtype)).requires_grad_()
    (gradient,) = torch.autograd.grad(support.decode(x).sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))
    alone = x.detach()[3].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(support.decode(alone), alone)
    assert torch.equal(gradient, torch.zeros_like(alone))


def test_gradient_of_decode_in_other_contexts():
    support = gs.Support(-5, 5, 11)
    logits = torch.randn(4, 11, dtype=torch.float64)
    expected = torch.func.jacrev(lambda x: gs.reference.decode(x, support).sum())(logits)
    loss_of = lambda x: support.decode(x).sum()
    assert torch.autograd.gradgradcheck(support.decode, logits.clone().requires_grad_(), fast_mode=True)
    leaf = logits.clone().requires_grad_()
    loss_of(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)
    torch.testing.assert_close(torch.func.grad(loss_of)(logits), expected)
    (batched,) = torch.autograd.grad(loss_of(leaf), leaf, torch.ones(2, dtype=torch.float64), is_grads_batched=True)
    torch.testing.assert_close(batched[1], expected)
    torch._dynamo.reset()
    compiled = logits.clone().requires_grad_()
    torch.compile(loss_of, fullgraph=True, backend="aot_eager")(compiled).backward()
    torch.testing.assert_close(compiled.grad, expected)
    torch._dynamo.reset()
    value = support.decode(leaf)
    value.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.sum().backward()
    value = support.decode(leaf)
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@pytest.mark.parametrize("sigma_ratio", [5e-324, 1e-300, 1e-40, 1e-30, 1e30, 1e300, 1.7e308])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_hl_gauss_of_extreme_widths(dtype, sigma_ratio):
    support = gs.Support(-1, 1, 2, transform="identity")
    x = torch.tensor([-1.0, 0.3, 0.0, 1.0, 5.0], dtype=dtype)
    expected = [[1, 0], [0, 1], [0.5, 0.5], [0, 1], [0, 1]] if sigma_ratio < 1 else [[0.5, 0.5]] * 5
    for encode in (support.hl_gauss, lambda x, ratio: gs.reference.hl_gauss(x, support, ratio)):
        torch.testing.assert_close(encode(x, sigma_ratio), torch.tensor(expected, dtype=dtype))


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("sigma_ratio", [0.1, 0.75, 3.0, 50.0])
def test_hl_gauss_is_the_mass_of_a_normal(support, sigma_ratio):
    """Compared with the normal distribution function to 30 digits."""
    mpmath = pytest.importorskip("mpmath")
    x = torch.tensor([-1e9, -2.0, 0.0, 0.3, 5.0, 1e9], dtype=torch.float64)
    encoded = support.hl_gauss(x, sigma_ratio)
    forward = {"signed_hyperbolic": gs.signed_hyperbolic, "symlog": gs.symlog, "identity": lambda v: v}
    y = forward[support.transform](x).clamp(support.minimum, support.maximum)
    width = (support.maximum - support.minimum) / (support.num_bins - 1)
    with mpmath.workdps(30):
        for row, center in zip(encoded, y.tolist(), strict=True):
            cdf = [
                mpmath.ncdf(support.minimum + (j - 0.5) * width, center, sigma_ratio * width)
                for j in range(support.num_bins + 1)
            ]
            exact = [float((cdf[j + 1] - cdf[j]) / (cdf[-1] - cdf[0])) for j in range(support.num_bins)]
            torch.testing.assert_close(row, torch.tensor(exact, dtype=torch.float64), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(encoded.sum(-1), torch.ones_like(x))
    assert support.hl_gauss(torch.tensor([NAN, INF, -INF]), sigma_ratio)[0].isnan().all()
    assert support.hl_gauss(torch.tensor([INF, -INF, 1e30]), sigma_ratio).isfinite().all()


def test_presets():
    assert gs.Support.dreamer_v3() == gs.Support(-20, 20, 255, "symlog", space="raw")
    assert gs.Support.tdmpc2() == gs.Support(-10, 10, 101, "symlog")
    assert gs.Support.muzero(10) == gs.Support(-10, 10, 21)
    linear = gs.Support.linear(-5, 5, 11)
    assert linear == gs.Support(-5, 5, 11, "identity")
    assert torch.equal(linear.centers(), torch.arange(-5.0, 6.0))
    top = 1e4 * torch.nn.functional.one_hot(torch.tensor(10), 11)
    assert linear.decode(top) == 5
    assert gs.Support(-5, 5, 11).decode(top).item() == pytest.approx(34.6, abs=0.05)  # h⁻¹(5)
    with pytest.raises(ValueError, match="minimum < maximum"):
        gs.Support.linear(1, 1, 3)
    for limit in (2.5, 0, -3, INF, "a"):
        with pytest.raises(ValueError, match="limit must be an integer"):
            gs.Support.muzero(limit)


def test_a_support_is_immutable_data():
    support = gs.Support.muzero()
    assert support == gs.Support(-300, 300, 601)
    assert hash(support) == hash(gs.Support.muzero())
    support.decode(torch.zeros(601))
    assert pickle.loads(pickle.dumps(support)) == support
    assert copy.deepcopy(support).decode(torch.zeros(601)) == 0
    assert torch.equal(support.centers(), torch.arange(-300.0, 301.0))
    np = pytest.importorskip("numpy")
    assert type(gs.Support(-300, np.float32(300), np.int64(601)).num_bins) is int
    with pytest.raises(AttributeError):
        support.num_bins = 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 1, 1), "num_bins must be an integer of at least 2, but it is 1"),
        ((-1, 1, 2.0), "num_bins"),
        ((-1, 1, 2**32 + 5), r"num_bins must be an integer from 2 to 2\*\*31 - 1, but it is too large"),
        ((1, 1, 5), "minimum < maximum, but they are 1 and 1"),
        *[((*ends, 3, "identity"), "3.40282e.38 for transform") for ends in ((-1.7e308, 1.7e308), (0, 1e200))],
        ((-1000, 1000, 5, "symlog"), r"from -709\.783 to 709\.783 for transform = 'symlog'"),
        *[((*ends, 3, "identity"), "spacing") for ends in ((0.0, 5e-324), (1.0, 1 + 2**-52), (0.0, 4e-308))],
        ((0, INF, 5), "finite"),
        ((0, 1, 5, "log"), "transform must be one of identity, signed_hyperbolic, symlog, but it is 'log'"),
        ((0, 1, 5, "identity", -1.0), "eps must be at least 0 and finite in float32, but it is -1.0"),
        ((0, 1, 5, "identity", 1e39), r"eps must be at least 0 and finite in float32, but it is 1e\+39"),
        ((0, 1, 5, "identity", 0.0, "x"), "space must be 'transformed' or 'raw', but it is 'x'"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        gs.Support(*arguments)


def test_wrong_numbers():
    with pytest.raises(TypeError, match="Support: minimum must be a number, but it is of type str"):
        gs.Support("a", 1, 5)
    with pytest.raises(ValueError, match=r"from -88\.7228 to 88\.7228 for transform = 'symlog' and space = 'raw', but"):
        gs.Support(-300, 300, 601, "symlog", space="raw")
    with pytest.raises(TypeError, match="x must be a floating tensor, but it is of type float"):
        gs.symlog(1.0)


@pytest.mark.parametrize("context", [lambda f: f, torch.func.vmap])
def test_infinity_is_in_the_end_bin_of_a_range_that_float32_does_not_reach(context):
    support, x = gs.Support(-300, 300, 5, "symlog"), torch.tensor([-INF, INF])
    ends = torch.eye(5)[[0, 4]]
    assert torch.equal(context(support.two_hot)(x), ends)
    torch.testing.assert_close(context(lambda y: support.hl_gauss(y, 0.1))(x), ends, rtol=0, atol=1e-5)


def projected_by_hand(support, p, rewards, discounts):
    """Project one atom at a time (Bellemare et al. 2017, algorithm 1): `two_hot` distributes its mass."""
    centers = gs.reference.raw_centers(support, torch.float64)
    rows = zip(p.reshape(-1, support.num_bins), rewards.flatten(), discounts.flatten(), strict=True)
    result = [sum(m * support.two_hot(r + d * c) for m, c in zip(row, centers, strict=True)) for row, r, d in rows]
    return torch.stack(result).reshape(p.shape)


@pytest.mark.parametrize("support", SUPPORTS)
def test_project(support):
    g = torch.Generator().manual_seed(1)
    p = torch.randn(4, 3, support.num_bins, generator=g, dtype=torch.float64).softmax(-1)
    rewards = 5 * torch.randn(4, 3, generator=g, dtype=torch.float64)
    discounts = torch.tensor([0.0, 1.0, -1.0, 0.997], dtype=torch.float64)[:, None].expand(4, 3)
    rewards[0, 0] = rewards[1, 0] = 0  # discount 0: all mass moves to 0; discount 1: no mass moves
    rewards[2, 1], rewards[3, 1] = INF, -1e30
    expected = projected_by_hand(support, p, rewards, discounts)
    for found in (support.project(p, rewards, discounts), gs.reference.project(p, rewards, discounts, support)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.sum(-1), p.sum(-1), rtol=1e-13, atol=0)
        torch.testing.assert_close(found[1, 0], p[1, 0], rtol=1e-9, atol=1e-12)
    moved = p.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(support.project(moved, rewards, discounts), support.project(p, rewards, discounts))


@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize("value", [NAN, INF])
def test_nonfinite_values_stay_in_their_row(argument, value):
    support = gs.Support(-2, 2, 5, "identity")
    given = [torch.full((3, 5), 0.2), torch.zeros(3), torch.ones(3)]
    expected = support.project(*given)
    given[argument][1] = value
    for found in (support.project(*given), gs.reference.project(*given, support)):
        assert torch.equal(found[::2], expected[::2])
        is_end = argument == 1 and value == INF
        assert torch.equal(found[1], torch.tensor([0, 0, 0, 0, 1.0])) if is_end else found[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_project(dtype):
    support = gs.Support(-10, 10, 51, "identity")
    p, r, d = torch.randn(7, 51).softmax(-1).to(dtype), torch.randn(7).to(dtype), torch.rand(7).to(dtype)
    found = support.project(p, r, d)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, support.project(p.double(), r.double(), d.double()).float(), rtol=1e-6, atol=1e-7)
    assert support.project(p, r.double(), d).dtype == support.project(p, r, d.double()).dtype == torch.float64


def test_project_in_every_context():
    support = gs.Support(-10, 10, 51, "identity")
    p, r, d = torch.randn(7, 51).softmax(-1).requires_grad_(), torch.randn(7, requires_grad=True), torch.rand(7)
    expected = support.project(p, r, d)
    assert not expected.requires_grad
    torch.testing.assert_close(torch.vmap(support.project)(p, r, d), expected)
    torch.testing.assert_close(torch.vmap(support.project, in_dims=(0, None, None))(p, r[0], d[0])[0], expected[0])
    compiled = torch.compile(support.project, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(p, r, d), expected)
    with torch.inference_mode():
        torch.testing.assert_close(support.project(p, r, d), expected)
    gradient = torch.func.grad(lambda x: (support.project(x, r.detach(), d) * torch.arange(51)).sum())(p.detach())
    assert gradient.count_nonzero() == 0
    out, tangent = torch.func.jvp(lambda x: support.project(x, r.detach(), d), (p.detach(),), (torch.ones_like(p),))
    torch.testing.assert_close(out, expected)
    assert tangent.count_nonzero() == 0


def test_wrong_arguments_of_project():
    support = gs.Support(-10, 10, 51, "identity")
    p, r = torch.full((4, 51), 1 / 51), torch.zeros(4)
    for wrong, message in (
        ((p[:, 1:], r, r), r"probabilities must have shape \[\.\.\., 51\], but they have \(4, 50\)"),
        (
            (p, r[:, None], r),
            r"rewards must have the leading dimensions of probabilities, \(4,\), but they have \(4, 1\)",
        ),
        ((p, r, r[0]), r"discounts must have the leading dimensions of probabilities, \(4,\), but they have \(\)"),
        ((p, r.to("meta"), r), "rewards must be on the device of probabilities, cpu, but is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            support.project(*wrong)
    with pytest.raises(TypeError, match="discounts must be a tensor, but it is of type float"):
        support.project(p, r, 0.99)
    with pytest.raises(TypeError, match=r"rewards must be a floating tensor, but its dtype is torch\.int64"):
        support.project(p, r.long(), r)


def test_wrong_scalars_and_logits():
    support = gs.Support.muzero()
    for function in (support.two_hot, support.hl_gauss, support.decode):
        with pytest.raises(TypeError, match=r"floating tensor, but its dtype is torch\.int64"):
            function(torch.zeros(601, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"must be a tensor, but it is of type list; convert (x|logits): torch"):
            function([0.0])
        with pytest.raises(TypeError, match=r"(x|logits) must be dense, but its layout is torch.sparse_coo"):
            function(torch.zeros(601).to_sparse())
    for wrong in (True, "1", None, torch.ones((), requires_grad=True)):
        with pytest.raises(TypeError, match=r"hl_gauss: sigma_ratio must be a number, but it is of type"):
            support.hl_gauss(torch.zeros(1), wrong)
    with pytest.raises(ValueError, match="sigma_ratio must be finite and above 0, but it is 0"):
        support.hl_gauss(torch.zeros(1), 0)
    with pytest.raises(ValueError, match=r"\[\.\.\., 601\], but they have \(2, 600\)"):
        gs.Support.muzero().decode(torch.zeros(2, 600))


def test_the_largest_number_of_bins():
    support = gs.Support(-1, 1, 2**31 - 1, "identity")
    assert support.two_hot(torch.zeros(0)).shape == (0, 2**31 - 1)
    heads = {"a": gs.MeanSquaredError(first_step=2**31 - 1)}
    x = torch.randn(4, 3)
    torch.testing.assert_close(gs.multi_step_loss(heads, {"a": x}, {"a": x + 2}).loss, torch.tensor(12.0))


@pytest.mark.parametrize("limits", [(0, 20), (-20, 0), (-4, 6), (-19.5, 20), (3, 4)])
@pytest.mark.parametrize("num_bins", [2, 9, 40, 41])
def test_decoding_keeps_small_centres_next_to_large_ones(limits, num_bins):
    """There is no cancellation: the error is bounded relative to the sum of p |centre|."""
    support = gs.Support(*limits, num_bins, "symlog", space="raw")
    centers = gs.symexp(torch.linspace(*limits, num_bins, dtype=torch.float64))
    peaks = 80 * torch.eye(num_bins) - 60
    logits = torch.cat([peaks, torch.randn(64, num_bins, generator=torch.Generator().manual_seed(0)) * 10])
    probabilities = logits.double().softmax(-1)
    exact, size = probabilities @ centers, probabilities @ centers.abs()
    for decoded in (support.decode(logits), gs.reference.decode(logits, support)):
        assert ((decoded - exact).abs() <= 4e-6 * size).all()


def test_rounding_of_an_expectation_does_not_grow_with_the_number_of_bins():
    logits = torch.zeros(50, 4097, dtype=torch.float64)
    logits[:, 0] = torch.linspace(0.1, 5, 50)
    weights, bins = (logits - logits.amax(1, keepdim=True)).exp().tolist(), range(-2048, 2049)
    exact = [math.fsum(map(operator.mul, row, bins)) / math.fsum(row) for row in weights]
    decoded = gs.Support.linear(-2048, 2048, 4097).decode(logits)
    errors = (decoded - torch.tensor(exact, dtype=torch.float64)).abs() * 2**52 / 2048
    assert errors.mean() <= 1  # 0.2; 8 with a sum of running sums


# ---- Tensors that the kernels read, and the others ------------------------------------------------------------------


def lazily_negated(x):
    lazy = torch.complex(x, -x).conj().imag
    assert lazy.is_neg()
    return lazy


CALLS = {
    "decode": lambda support, x: support.decode(x),
    "two_hot": lambda support, x: support.two_hot(x[..., 0]),
    "hl_gauss": lambda support, x: support.hl_gauss(x[..., 0]),
    "project": lambda support, x: support.project(x, x[..., 0], x[..., 1]),
}


@pytest.fixture
def fused_only(monkeypatch):
    for name in CALLS:
        monkeypatch.setattr(gs.support.reference, name, None)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("support", [gs.Support(-5, 5, 11), gs.Support(-5, 5, 11, space="raw")])
def test_lazily_negated_tensors_are_fused(name, support, fused_only):
    x = torch.rand(7, 11, dtype=torch.float64)
    assert torch.equal(CALLS[name](support, lazily_negated(x)), CALLS[name](support, x))
    with torch.inference_mode():
        assert torch.equal(CALLS[name](support, lazily_negated(x)), CALLS[name](support, x))


def test_gradients_of_decode_with_lazy_negation(fused_only):
    support = gs.Support(-5, 5, 11)
    x = torch.rand(7, 11, dtype=torch.float64, requires_grad=True)
    incoming = torch.rand(7, dtype=torch.float64)
    (expected,) = torch.autograd.grad(support.decode(x), x, incoming)
    (found,) = torch.autograd.grad(support.decode(lazily_negated(x)), x, lazily_negated(incoming))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_that_the_kernels_do_not_accept_is_named_once(name):
    gs._context.say_once.cache_clear()
    support, x = gs.Support(-5, 5, 11), torch.rand(7, 11)
    argument = {"decode": "logits", "project": "probabilities"}.get(name, "x")
    given = TwoTensor(x, x)
    with pytest.warns(
        UserWarning, match=f"^Support.{name}: {argument} is of type TwoTensor, not a plain torch.Tensor: "
    ):
        found = CALLS[name](support, given)
    torch.testing.assert_close(found.a, CALLS[name](support, x))
    with pytest.warns(
        UserWarning, match=rf"^Support.{name}: {argument} is torch.float8_e4m3fn: write \.float\(\); plain"
    ):
        CALLS[name](support, x.to(torch.float8_e4m3fn))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[name](support, given)
        CALLS[name](support, x.to(torch.float8_e4m3fn))
        torch.func.vmap(lambda row: CALLS[name](support, row))(x)


def test_the_gradient_of_an_encoding_is_named_once():
    gs._context.say_once.cache_clear()
    x = torch.rand(7, requires_grad=True)
    for name in ("two_hot", "hl_gauss"):
        encode = getattr(gs.Support(-5, 5, 11), name)
        words = rf"Support.{name}: x requires grad: detach\(\) it, if the distributions need no gradient; plain PyTorch"
        with pytest.warns(UserWarning, match=words):
            assert encode(x).requires_grad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encode(x)
            encode(x.detach())
            with torch.no_grad():
                encode(x)


# ---- check=True -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_of_logits(dtype):
    support = gs.Support(-5, 5, 11)
    logits = torch.randn(7, 11, dtype=dtype)
    logits[1, 3] = -INF
    assert torch.equal(support.decode(logits, check=True), support.decode(logits))
    probabilities = logits.softmax(-1)
    mixed = torch.cat([logits[:1], probabilities])
    assert torch.equal(support.decode(mixed, check=True), support.decode(mixed))
    with pytest.raises(
        ValueError, match=r"^Support\.decode: logits look like probabilities: .*; leave out the softmax"
    ):
        support.decode(probabilities, check=True)
    for bad in (NAN, INF):
        logits[2, 0] = bad
        with pytest.raises(
            ValueError, match=r"^Support\.decode: logits must be finite or -inf, but 1 of 77 are NaN or"
        ):
            support.decode(logits, check=True)
    assert support.decode(logits[:0], check=True).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_of_a_projection(dtype):
    support = gs.Support(-5, 5, 11)
    logits, rewards, discounts = torch.randn(2, 7, 11), torch.randn(2, 7), torch.rand(2, 7)
    p = logits.softmax(-1).to(dtype)
    assert torch.equal(support.project(p, rewards, discounts, check=True), support.project(p, rewards, discounts))
    words = (
        r"^Support\.project: each row of probabilities must be at least 0 and add up to 1, but row {} has a least .*"
    )
    for row, changed in ((0, logits), (8, torch.where(torch.arange(14).view(2, 7, 1) == 8, 2 * p, p))):
        with pytest.raises(ValueError, match=words.format(row) + r"write logits\.softmax\(-1\)"):
            support.project(changed, rewards, discounts, check=True)
    for argument in ("rewards", "discounts"):
        given = {"rewards": rewards, "discounts": discounts, argument: torch.full((2, 7), NAN)}
        with pytest.raises(ValueError, match=rf"^Support\.project: {argument} must be finite"):
            support.project(p, **given, check=True)
    assert support.project(p[:0], rewards[:0], discounts[:0], check=True).shape == (0, 7, 11)


@pytest.mark.compiled
def test_check_needs_values():
    support, x = gs.Support(-5, 5, 11), torch.randn(7, 11)
    calls = {
        "decode": lambda x: support.decode(x, check=True).sum(),
        "project": lambda x: support.project(x.softmax(-1), x[..., 0], x[..., 1], check=True).sum(),
    }
    for name, call in calls.items():
        for function in (
            torch.compile(call, backend="eager", fullgraph=True),
            torch.func.vmap(call),
            torch.func.grad(call),
        ):
            words = rf"Support\.{name}: check=True reads values, .*; call {name} once outside"
            with pytest.raises(Exception, match=words):
                function(x)
        torch._dynamo.reset()
    for call in (support.decode, lambda x, check: support.project(x, x[:, 0], x[:, 0], check=check)):
        with pytest.raises(TypeError, match=r"^Support\.\w+: check must be True or False, but it is of type str"):
            call(x, check="no")
    with pytest.raises(ValueError, match=r"logits must have shape \[\.\.\., 11\]"):
        support.decode(x[:, :3], check=True)
