"""Heads, supports and transforms at the ends of float32 and float64, against exact formulas with 200 bits.

Where the exact result is finite, so is ours, unless the difference of two inputs overflows: inputs are at most half,
and logits a quarter, of the largest number.
"""

from __future__ import annotations

import itertools
import math

import exact
import mpmath
import numpy as np
import pytest
import torch

import gradscale_ext as gs

DTYPES = [torch.float32, torch.float64]
ALL_DTYPES = [*DTYPES, torch.bfloat16, torch.float16]
LARGEST = {dtype: torch.finfo(dtype).max for dtype in ALL_DTYPES}
TINY = {dtype: torch.finfo(dtype).smallest_normal for dtype in ALL_DTYPES}


def ends(dtype, limit=0.5):
    """Magnitudes at the ends of a dtype, and between."""
    info = torch.finfo(dtype)
    root = math.sqrt(info.max / 2)  # the square of twice this number overflows
    magnitudes = [0.0, info.smallest_normal * info.eps, info.smallest_normal, 1.0, 80.0, root, info.max * limit]
    if dtype == torch.float16:
        return [*magnitudes, 1e-3, 100.0]
    more = [1e-300, 1e-154, 1e154, 1e300, 700.0] if dtype == torch.float64 else []
    return [*magnitudes, 1e-30, 1e-19, 1e19, 1e30, *more]


def drawn(dtype, shape, generator, limit=0.5, other=None):
    """Numbers of which half are at the ends of the dtype, and a quarter equal to `other`, or next to it."""
    extreme = generator.choice(ends(dtype, limit), shape) * generator.choice([-1.0, 1.0], shape)
    drawn = torch.tensor(
        np.where(generator.random(shape) < 0.6, extreme, 3 * generator.standard_normal(shape)), dtype=dtype
    )
    if other is None:
        return drawn
    near = torch.where(torch.tensor(generator.random(shape) < 0.5), other, torch.nextafter(other, drawn))
    return torch.where(torch.tensor(generator.random(shape) < 0.3), near, drawn)


def drawn_logits(dtype, shape, generator):
    """Logits at the ends of the dtype, or with exponentials that underflow."""
    steps = torch.tensor(generator.choice([0.0, 1.0, -1.0, -80.0, -88.0, -300.0, -1e4], shape), dtype=dtype)
    rows = torch.tensor(generator.random((shape[0], *[1] * (len(shape) - 1))) < 0.5)
    return torch.where(rows, steps, drawn(dtype, shape, generator, 0.25))


def drawn_probabilities(dtype, shape, generator):
    return torch.tensor(generator.choice([0.0, 0.0, 0.25, 0.5, 1.0, 1e-8, *ends(dtype)[1:3]], shape), dtype=dtype)


def check_rows(head, x, target, tolerance=4.0):
    """Compare the losses and gradients of one head, fused and by the reference, with the exact ones."""
    truth = exact.rows_of(head, x, target)
    targets = {} if target is None else {"head": [target]}
    for impl in ("fused", "reference"):
        leaf = x.detach().requires_grad_()
        out = gs.multi_step_loss({"head": head}, {"head": [leaf]}, targets, reduction="none", impl=impl)
        (gradient,) = torch.autograd.grad(out.loss.sum(), leaf)
        check_results(out.per_step["head"][:, 0], gradient, truth, f"{head}, {impl}", tolerance)


def check_results(values, gradient, truth, what, tolerance=4.0):
    """Compare values and gradients of rows. The gradient of an infinite value may be anything."""
    exact.check_close(values, truth.loss, truth.loss_error, what, tolerance)
    finite = np.array([abs(loss) <= torch.finfo(values.dtype).max for loss in truth.loss], dtype=bool)
    kept = [a.reshape(len(finite), -1)[finite] for a in (truth.gradient, truth.gradient_error)]
    exact.check_close(gradient.reshape(len(finite), -1)[finite], *kept, f"gradient of {what}", tolerance)


# ---- Heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("transform", ["identity", "signed_hyperbolic", "symlog"])
def test_mean_squared_error(transform, dtype):
    generator = np.random.default_rng(0)
    for shape in ((60,), (60, 1), (60, 3), (20, 17)):
        x = drawn(dtype, shape, generator)
        check_rows(gs.MeanSquaredError(transform=transform), x, drawn(dtype, shape, generator, other=x))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("transform", ["identity", "symlog"])
def test_huber(transform, dtype):
    generator = np.random.default_rng(0)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    for delta in (TINY[computed], 1e-30, 1.0, 1e30, LARGEST[computed], LARGEST[torch.float64]):
        for shape in ((40,), (20, 3)):
            x = drawn(dtype, shape, generator)
            head = gs.Huber(delta=delta, transform=transform)
            check_rows(head, x, drawn(dtype, shape, generator, other=x))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("sum_over_quantiles", [True, False])
def test_quantile_huber(sum_over_quantiles, dtype):
    generator = np.random.default_rng(0)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    for kappa in (0, 5e-324, TINY[computed], 1e-30, 1.0, 1e30, LARGEST[computed], 1e39, LARGEST[torch.float64]):
        head = gs.QuantileHuber(kappa=kappa, sum_over_quantiles=sum_over_quantiles)
        x = drawn(dtype, (20, 3), generator)
        check_rows(head, x, drawn(dtype, (20, 3), generator, other=x)[:, :2].contiguous())


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_binary_cross_entropy(dtype):
    generator = np.random.default_rng(0)
    x, target = drawn(dtype, (200,), generator), drawn_probabilities(dtype, (200,), generator)
    check_rows(gs.BinaryCrossEntropy(), x, target)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_negative_cosine(dtype):
    generator = np.random.default_rng(0)
    for eps in (TINY[torch.float64], 1e-300, 1e-30, 1e-8, 1.0, 1e30, 1e300, LARGEST[torch.float64]):
        for width in (1, 3, 17):
            x, target = (drawn(dtype, (20, width), generator, 0.05) for _ in range(2))
            check_rows(gs.NegativeCosine(eps=eps), x, target)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("prediction", ["q", "p"])
def test_categorical_kl(prediction, dtype):
    generator = np.random.default_rng(0)
    shares = (0.0, 5e-324, 1e-300, 1e-45, 1e-38, 1e-30, 1e-20, 1e-8, 0.01, 1.0)
    pairs = list(itertools.product(shares, (0.0, 1e-30, 1e30)))
    for unimix, free_nats in pairs[prediction == "p" :: 2]:
        shape = (4, 2, generator.choice([1, 2, 3, 17]))
        x, target = (drawn_logits(dtype, shape, generator) for _ in range(2))
        check_rows(gs.CategoricalKL(unimix=unimix, free_nats=free_nats, prediction=prediction), x, target)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("subtract_target_entropy", [False, True])
def test_soft_cross_entropy(subtract_target_entropy, dtype):
    generator = np.random.default_rng(0)
    pairs = list(itertools.product((0.0, 5e-324, 1e-30, 0.1, 1.0), (0.0, 1e-300, 1e-30, 0.1, -1e30)))
    for label_smoothing, entropy_weight in pairs[subtract_target_entropy::2]:
        shape = (4, generator.choice([1, 3, 17, 41]))
        head = gs.SoftCrossEntropy(
            label_smoothing=label_smoothing,
            entropy_weight=entropy_weight,
            subtract_target_entropy=subtract_target_entropy,
        )
        check_rows(head, drawn_logits(dtype, shape, generator), drawn_probabilities(dtype, shape, generator))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_per_step_loss(dtype):
    check_rows(gs.PerStepLoss(), drawn(dtype, (100,), np.random.default_rng(0), 1.0), None)


# ---- Supports -------------------------------------------------------------------------------------------------------

FLOAT32_MAX = LARGEST[torch.float32]
SUPPORTS = (
    *(gs.Support(-5, 5, 11, "identity"), gs.Support(-3e38, 3e38, 5, "identity"), gs.Support(0, 1e-300, 4, "identity")),
    *(gs.Support(-FLOAT32_MAX, FLOAT32_MAX, 19, "identity"), gs.Support(-1e-40, 1e-40, 4, "identity")),
    *(gs.Support(-1e30, 1e30, 7), gs.Support(-10, 10, 9, eps=0.0), gs.Support(-10, 10, 9, eps=1e-300)),
    *(gs.Support(-10, 10, 9, eps=1e30), gs.Support(-1e18, 1e18, 9, eps=0.0), gs.Support(1e30, 1.0001e30, 5)),
    *(gs.Support(-88, 88, 9, "symlog", space="raw"), gs.Support(-80, 80, 40, "symlog", space="raw")),
    *(gs.Support(-700, 700, 9, "symlog"), gs.Support(1e-300, 2e-300, 5, "symlog", space="raw")),
    *(gs.Support(-1e-30, 1e-30, 5, "symlog"), gs.Support(1, 1 + 1e-12, 5, "identity")),
    *(gs.Support(-1e18, 1e18, 9, eps=0.0, space="raw"), gs.Support(0, 1e-30, 20, "identity", space="raw")),
)


def drawn_scalars(dtype, support, count, generator):
    """Scalars at the ends of the dtype and inside the support."""
    inside = exact.exact(torch.tensor(generator.uniform(support.minimum, support.maximum, count)))
    inside = exact.transformed_back(inside, support.transform, support.eps)
    inside = torch.tensor([float(x) for x in inside], dtype=torch.float64).clamp(-LARGEST[dtype], LARGEST[dtype])
    return torch.where(
        torch.tensor(generator.random(count) < 0.5), inside.to(dtype), drawn(dtype, (count,), generator, 1)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
def test_heads_with_supports(support, dtype):
    generator = np.random.default_rng(0)
    heads = [gs.TwoHot(support, label_smoothing=amount) for amount in (0.0, 1e-30, 0.1)]
    heads += [gs.HLGauss(support, sigma_ratio=ratio) for ratio in (0.75, 0.05, 20.0, 5e-324, 1e-30, 1e30, 1e300)]
    for head in heads[(SUPPORTS.index(support) + DTYPES.index(dtype)) % 2 :: 2]:  # each head in one of the dtypes
        logits = drawn_logits(dtype, (6, support.num_bins), generator)
        check_rows(head, logits, drawn_scalars(dtype, support, 6, generator), tolerance=16.0)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
def test_encoding(support, dtype):
    generator = np.random.default_rng(0)
    x, precision = drawn_scalars(dtype, support, 8, generator), exact.Precision.of(dtype)
    truth = exact.two_hot(exact.exact(x), support, precision)
    for found in (support.two_hot(x), gs.reference.two_hot(x, support)):
        exact.check_close(found, *truth, f"two_hot, {support}")
    for ratio in ((0.75, 1e-300), (20.0, 1e300))[(SUPPORTS.index(support) + ALL_DTYPES.index(dtype)) % 2]:
        truth = exact.hl_gauss(exact.exact(x), support, ratio, precision)
        for found in (support.hl_gauss(x, ratio), gs.reference.hl_gauss(x, support, ratio)):
            exact.check_close(found, *truth, f"hl_gauss, {support}, {ratio}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
def test_decoding(support, dtype):
    logits = drawn_logits(dtype, (8, support.num_bins), np.random.default_rng(0)).requires_grad_()
    truth = exact.decoded(exact.exact(logits), support, exact.Precision.of(dtype))
    for decode in (support.decode, lambda x: gs.reference.decode(x, support)):
        values = decode(logits)
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        if support.maximum - support.minimum > LARGEST[dtype]:  # a difference of centres overflows
            gradient = torch.tensor([[float(x) for x in row] for row in truth.gradient], dtype=dtype)
        check_results(values, gradient, truth, f"{support}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
def test_projection(support, dtype):
    generator = np.random.default_rng(0)
    p = drawn_probabilities(dtype, (6, support.num_bins), generator)
    rewards = drawn_scalars(dtype, support, 6, generator)
    discounts = torch.tensor(generator.choice([0.0, 1.0, -1.0, 0.997, 1e-30], 6), dtype=dtype)
    results = support.project(p, rewards, discounts), gs.reference.project(p, rewards, discounts, support)
    values, precision = gs.reference.raw_centers(support, torch.float64), exact.Precision.of(dtype)
    for row in range(6):
        # Atoms as the kernels round them, so that only their distribution over the bins is compared.
        atoms = rewards[row].double() + discounts[row].double() * values
        encoded, moved = exact.two_hot(exact.exact(atoms), support, precision)
        mass = exact.exact(p[row])[:, None]
        error = (mass * moved * 4).sum(0) + (mass * encoded).sum(0) * precision.eps
        for found in results:
            exact.check_close(found[row], (mass * encoded).sum(0), error, f"project, {support}, row {row}")


# ---- Transforms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-300, 1e-30, 1e-3, 1.0, 1e30, 1e37])
def test_hyperbolic_transforms(eps, dtype):
    magnitudes = torch.tensor(ends(dtype, 1.0), dtype=dtype)
    for function, formula, slope in (
        (gs.signed_hyperbolic, exact.transformed, exact.transformed_slope),
        (gs.signed_parabolic, exact.transformed_back, exact.slope_back),
    ):
        x = torch.cat([magnitudes, -magnitudes]).requires_grad_()
        y = function(x, eps)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        values, slopes = (f(exact.exact(x), "signed_hyperbolic", eps) for f in (formula, slope))
        precision = exact.Precision.of(dtype).eps
        exact.check_close(y, values, abs(values) * precision, f"{function.__name__}, eps {eps}")
        kept = np.array([abs(value) <= LARGEST[dtype] / 4 for value in values], dtype=bool)
        slopes = slopes[kept]
        exact.check_close(gradient[kept], slopes, 4 * slopes * precision, f"slope of {function.__name__}, eps {eps}")


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_logarithmic_transforms(dtype):
    magnitudes = torch.tensor(ends(dtype, 1.0), dtype=dtype)
    for function, formula, slope in (
        (gs.symlog, exact.transformed, exact.transformed_slope),
        (gs.symexp, exact.transformed_back, exact.slope_back),
    ):
        x = torch.cat([magnitudes, -magnitudes])
        x = x[x.abs() < 1e4].requires_grad_() if function is gs.symexp else x.requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        values, slopes = (f(exact.exact(x), "symlog", 0.0) for f in (formula, slope))
        precision = exact.Precision.of(dtype).eps
        exact.check_close(y, values, abs(values) * precision, function.__name__)
        exact.check_close(gradient, slopes, 4 * slopes * precision, f"slope of {function.__name__}")


# ---- Single numbers -------------------------------------------------------------------------------------------------


def test_the_smallest_mass_of_a_histogram():
    support = gs.Support(-5, 5, 11, "identity")
    expected = (mpmath.erfc(4.5 / 0.75 / math.sqrt(2)) - mpmath.erfc(5.5 / 0.75 / math.sqrt(2))) / 2
    assert float(expected) == pytest.approx(9.8658e-10, rel=1e-4)
    for dtype, tolerance in ((torch.float32, 2e-7), (torch.float64, 1e-13)):
        x = torch.zeros(1, dtype=dtype)
        for found in (gs.reference.hl_gauss(x, support, 0.75), torch.vmap(support.hl_gauss)(x)):
            assert found[0, [0, -1]].tolist() == pytest.approx([float(expected)] * 2, rel=tolerance)
        # Kernels subtract error functions in float64.
        assert support.hl_gauss(x)[0, [0, -1]].tolist() == pytest.approx([float(expected)] * 2, abs=2e-16)


def test_a_large_kappa():
    head, x, target = gs.QuantileHuber(kappa=1e30), torch.zeros(1, 1), torch.full((1, 1), 1e20)

    def loss(x, target, impl):
        return gs.multi_step_loss({"q": head}, {"q": [x]}, {"q": [target]}, impl=impl).loss

    for impl in ("fused", "reference"):
        assert loss(x, target, impl).item() == pytest.approx(2.5e9)
    batched = torch.vmap(lambda x, target: loss(x, target, "auto"))(x[None], target[None])
    assert batched.item() == pytest.approx(2.5e9)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_uniform_share_of_1e_30(dtype, impl):
    logits, target = torch.tensor([[[0.0, -80.0, 0.0]], [[0.0, 0.0, 0.5]]], dtype=dtype).unsqueeze(1)
    head = gs.CategoricalKL(unimix=1e-30)
    loss = gs.multi_step_loss({"kl": head}, {"kl": [logits]}, {"kl": [target]}, impl=impl).loss
    assert loss.item() == pytest.approx(18.6678091, rel=5e-7)
