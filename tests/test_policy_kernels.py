"""The kernels of policy losses and of targets by field against the reference in float64, on a CPU."""

from __future__ import annotations

import pytest
import torch
from policies import (
    CASES,
    EXTREMES,
    assert_extremes_are_right,
    assert_large_ratios_are_right,
    assert_right,
    inputs_of,
    leaves_of,
    results_of,
)

import gradscale_ext as gs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("name", "dtype"),
    # Elements of half types are converted before anything is computed: each case has one of the two.
    [(name, dtype) for index, name in enumerate(CASES) for dtype in (*DTYPES[:2], DTYPES[2 + index % 2])],
    ids=str,
)
def test_results(name, dtype):
    assert_right(name, (37, 3), dtype)
    mask = torch.rand(37, 3, generator=torch.Generator().manual_seed(1)) > 0.3
    assert_right(name, (37, 3), dtype, mask=mask, reduction="none", step_weights=[1.0, 0.5, 2.0])
    assert_right(name, (40,), dtype, steps=False)
    assert_right(name, (17,), dtype, steps=False, mask=mask[:17, 0], reduction="valid_mean")


@pytest.mark.parametrize("name", CASES)
def test_other_layouts(name):
    head, prediction, target = inputs_of(name, (19, 4))
    expected = results_of(head, prediction, target, impl="fused")

    def turned(tree):
        if isinstance(tree, dict):
            return {key: turned(value) for key, value in tree.items()}
        return tree if tree.dim() == 1 else tree.transpose(0, 1)

    def listed(tree):
        if isinstance(tree, dict):
            return {key: listed(value) for key, value in tree.items()}
        return tree if tree.dim() == 1 else list(tree.unbind(1))

    def strided(tree):
        if isinstance(tree, dict):
            return {key: strided(value) for key, value in tree.items()}
        return tree if tree.dim() == 1 else torch.stack([tree, tree], -1)[..., 1]

    leaves = leaves_of(prediction)
    for arrange, options in ((turned, {"batch_first": False}), (listed, {}), (strided, {})):
        predictions, targets = {"p": arrange(prediction)}, {"p": arrange(target)}
        out = gs.multi_step_loss({"p": head}, predictions, targets, impl="fused", **options)
        losses = out.per_step["p"] if options == {} else out.per_step["p"].t()
        assert torch.equal(losses, expected["per_step"])
        gradients = torch.autograd.grad(out.loss, leaves)
        for i, gradient in enumerate(gradients):
            torch.testing.assert_close(gradient, expected[f"gradient {i}"], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_rows_alone_have_the_same_bits(name):
    head, prediction, target = inputs_of(name, (37,), torch.float32)

    def rows(tree, chosen):
        if isinstance(tree, dict):
            return {key: rows(value, chosen) for key, value in tree.items()}
        own = tree if len(tree) != 37 else tree[chosen]
        return own.detach().requires_grad_(tree.requires_grad) if own.is_floating_point() else own

    together = results_of(head, rows(prediction, slice(None)), target, impl="fused", steps=False, reduction="none")
    for i in (0, 5, 36):
        alone = results_of(head, rows(prediction, [i]), rows(target, [i]), impl="fused", steps=False, reduction="none")
        for key in ("per_step", "entropy", "log_probs", "gradient 0"):
            if key in together:
                assert torch.equal(alone[key][0], together[key][i]), key


@pytest.mark.parametrize("name", CASES)
def test_other_gradients_of_the_loss(name):
    """A factor of the loss, one per sample, and a second pass through a kept graph."""
    head, prediction, target = inputs_of(name, (9, 2))
    leaves = leaves_of(prediction)
    for reduction in ("mean", "none"):
        options = {"reduction": reduction}
        out = gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target}, impl="fused", **options)
        expected = gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target}, impl="reference", **options)
        for factor in (1.0, -2.5):
            weight = torch.full_like(out.loss, factor) * torch.arange(1.0, 1 + out.loss.numel()).view_as(out.loss)
            found = torch.autograd.grad(out.loss, leaves, weight, retain_graph=True)
            wanted = torch.autograd.grad(expected.loss, leaves, weight, retain_graph=True)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_only_one_field_of_a_prediction_requires_grad():
    for field in ("means", "log_stds"):
        head, prediction, target = inputs_of("normal 6", (9, 2))
        given = {key: value if key == field else value.detach() for key, value in prediction.items()}
        results = []
        for impl in ("fused", "reference"):
            out = gs.multi_step_loss({"p": head}, {"p": given}, {"p": target}, impl=impl)
            gradient = torch.autograd.grad(out.loss, prediction[field])[0]
            results.append((gradient, out.head_gradient_norms["p"]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-13)


def test_large_ratios():
    assert_large_ratios_are_right()


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name):
    assert_extremes_are_right(name)


def test_samples_that_are_skipped():
    for name in ("ppo 4", "normal 6", "shared 6"):
        head, prediction, target = inputs_of(name, (9, 2))
        target["advantages"][4, 1] = torch.nan
        results = [results_of(head, prediction, target, impl=impl, nonfinite="skip") for impl in ("fused", "reference")]
        for key, value in results[0].items():
            torch.testing.assert_close(value, results[1][key], rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
def test_compiled(name):
    torch._dynamo.reset()
    head, prediction, target = inputs_of(name, (9, 2))

    def loss(prediction, target):
        out = gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target})
        return out.loss, out.log_probs, out.approx_kl, out.clip_fraction, out.entropy

    leaves = leaves_of(prediction)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")  # test_inductor.py has a program of each head
    expected, found = loss(prediction, target), compiled(prediction, target)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(results[0], leaves) for results in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_have_the_shapes_of_results(name):
    head, prediction, target = inputs_of(name, (9, 2))

    def loss(prediction, target):
        out = gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target})
        return out.loss, out.per_step, out.log_probs, out.approx_kl, out.clip_fraction, out.entropy

    exported = torch.export.export(Called(loss), (prediction, target)).module()
    torch.testing.assert_close(exported(prediction, target), loss(prediction, target))


@pytest.mark.compiled
def test_a_mask_without_steps_in_a_graph():
    head, prediction, target = inputs_of("ppo 4", (9,))
    mask = torch.arange(9) % 2 == 0

    def loss(prediction, target, mask):
        return gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target}, steps=False, mask=mask).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(prediction, target, mask), loss(prediction, target, mask))


class Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}, {"reduction": "none"}, {"mask": True}], ids=str)
@pytest.mark.parametrize(("batch", "steps", "size"), [(1, 1, 1), (15, 2, 32), (16, 1, 33), (47, 3, 70), (2000, 2, 6)])
def test_gradient_of_shared_deviations(batch, steps, size, options, dtype):
    """It is the sum over all samples and steps of the gradients of equal deviations of each, rounded once."""
    g = torch.Generator().manual_seed(batch)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    means, shared = normal(batch, steps, size), (normal(size) / 4).requires_grad_()
    target = {"actions": normal(batch, steps, size), "advantages": normal(batch, steps)}
    if "reduction" not in options and options:
        means[batch // 2, 0] = torch.nan  # in a sample that counts nothing
    if "mask" in options:
        options = {"mask": torch.rand(batch, steps, generator=g) < 0.8}
        options["mask"][batch // 2, 0] = False
    means.requires_grad_()
    head = gs.GaussianPolicyGradient(surrogate="log", entropy_weight=0.1)
    factor = torch.rand(batch, generator=g, dtype=torch.float64)

    def gradients(scales, means, target, impl):
        prediction = {"p": {"means": means, "log_stds": scales}}
        out = gs.multi_step_loss({"p": head}, prediction, {"p": target}, impl=impl, **options)
        loss = (out.loss * factor).sum() if out.loss.dim() else 3 * out.loss
        return torch.autograd.grad(loss, [scales, means]), out.head_gradient_norms["p"]

    (found, of_means), norm = gradients(shared, means, target, "fused")
    each = shared.detach().double().expand(batch, steps, size).clone().requires_grad_()
    precise = {name: x.double() for name, x in target.items()}
    (expected, means_expected), _ = gradients(each, means.detach().double().requires_grad_(), precise, "reference")
    (_, _), norm_expected = gradients(
        shared.detach().double().requires_grad_(), means.detach().double().requires_grad_(), precise, "reference"
    )
    eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    magnitude = expected.abs().sum((0, 1))
    tolerance = eps * found.abs() + 20 * min(eps, 6e-8) * magnitude + least
    assert ((found.double() - expected.sum((0, 1))).abs() <= tolerance).all()
    torch.testing.assert_close(of_means.double(), means_expected, rtol=20 * eps, atol=least)
    torch.testing.assert_close(norm.double(), norm_expected, rtol=1e-5, atol=1e-6)
