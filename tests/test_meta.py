"""Supports, heads and modules that are built on the meta device, under FakeTensorMode, and inside of compiled and
exported functions."""

from __future__ import annotations

import math

import pytest
import torch
from test_loss import ALL_HEADS, OPTIONS, arguments, gradients
from torch._subclasses import FakeTensorMode

import gradscale_ext as gs

SUPPORTS = {
    "muzero": gs.Support.muzero,
    "dreamer_v3": gs.Support.dreamer_v3,
    "tdmpc2": gs.Support.tdmpc2,
    **{
        f"{transform}, {space}": lambda transform=transform, space=space: gs.Support(-3, 4, 9, transform, space=space)
        for transform in ("identity", "signed_hyperbolic", "symlog")
        for space in ("transformed", "raw")
    },
}
MODULES = {
    "ScaleGradient": lambda: gs.ScaleGradient(0.5),
    "ReverseGradient": lambda: gs.ReverseGradient(2.0),
    "ClipGradientNorm": lambda: gs.ClipGradientNorm(1.5, batch_dims=1),
    "NormalizeGradient": lambda: gs.NormalizeGradient(0.1),
    "ClipGradientValue": lambda: gs.ClipGradientValue(-0.5, None),
}
WITHOUT_VALUES = {"meta": lambda: torch.device("meta"), "fake": FakeTensorMode}


@pytest.mark.parametrize("without_values", WITHOUT_VALUES)
def test_supports_and_heads_are_plain_numbers(without_values):
    with WITHOUT_VALUES[without_values]():
        supports = {name: build() for name, build in SUPPORTS.items()}
        heads = {name: type(head)(**vars(head)) for name, head in ALL_HEADS.items()}
        module, muzero = gs.MultiStepLoss(**heads), gs.MultiStepLoss.muzero()
        assert all(support.centers().shape == (support.num_bins,) for support in supports.values())
    assert supports == {name: build() for name, build in SUPPORTS.items()}
    assert dict(module.heads) == ALL_HEADS
    assert dict(muzero.heads) == dict(gs.MultiStepLoss.muzero().heads)
    predictions, targets = arguments(heads=ALL_HEADS)
    expected = gs.multi_step_loss(ALL_HEADS, predictions, targets)
    assert torch.equal(module(predictions, targets).loss, expected.loss)


@pytest.mark.parametrize(
    ("transform", "eps", "inverse"),
    [("symlog", 0.0, gs.symexp), *[("signed_hyperbolic", eps, gs.signed_parabolic) for eps in (0.0, 1e-3, 0.5)]],
)
def test_the_largest_raw_support(transform, eps, inverse):
    """The raw values of its ends are finite in float32, and the raw values of slightly larger ends are not."""
    with pytest.raises(ValueError, match="minimum and maximum must be from -"):
        gs.Support(-1e39, 1e39, 5, transform, eps, space="raw")
    low, high = 1.0, 1e39  # the largest support that is accepted, by bisection
    for _ in range(300):
        middle = math.sqrt(low * high)
        try:
            support = gs.Support(-middle, middle, 5, transform, eps, space="raw")
            low = middle
        except ValueError:
            high = middle
    found = torch.tensor([low, low * (1 + 1e-6)], dtype=torch.float64)
    ends = inverse(found, eps).float() if transform == "signed_hyperbolic" else inverse(found).float()
    assert ends.isfinite().tolist() == [True, False]
    logits = torch.tensor([[-200.0, 0.0, 0.0, 0.0, 200.0]])
    for decoded in (support.decode(logits), gs.reference.decode(logits, support)):
        assert decoded.item() == pytest.approx(ends[0].item(), rel=1e-6)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("options", OPTIONS)
def test_losses_under_a_meta_default_device(options, impl):
    """Tensors that a call makes are on the device of its arguments, not on PyTorch's default device."""
    predictions, targets = arguments(heads=ALL_HEADS)
    expected = gs.multi_step_loss(ALL_HEADS, predictions, targets, impl=impl, **OPTIONS[options])
    with torch.device("meta"):
        found = gs.multi_step_loss(ALL_HEADS, predictions, targets, impl=impl, **OPTIONS[options])
    assert torch.equal(found.loss, expected.loss)
    for a, b in zip(gradients(found, predictions), gradients(expected, predictions), strict=True):
        assert torch.equal(a, b)


def test_bounds_under_a_meta_default_device():
    """A number next to a tensor is stored on the device of the tensor."""
    x, bound = torch.zeros(3, requires_grad=True), torch.tensor(0.5)
    with torch.device("meta"):
        y = gs.clip_gradient_value(x, -0.25, bound)
        module = gs.ClipGradientValue(-0.25, bound)
    for clipped in (y, module(x)):
        (gradient,) = torch.autograd.grad(clipped, x, torch.tensor([-1.0, 0.125, 1.0]))
        assert gradient.tolist() == [-0.25, 0.125, 0.5]
    module.min.fill_(7)
    module.reset_parameters()
    assert module.min == -0.25


# ---- Modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_a_module_from_the_meta_device_has_its_numbers(name):
    """`to_empty` leaves memory as it is."""
    expected = MODULES[name]()
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), MODULES[name]())
    assert all(buffer.is_meta for buffer in model[1].buffers())
    model.to_empty(device="cpu")
    assert [(k, v.dtype, v.tolist()) for k, v in model[1].named_buffers()] == [
        (k, v.dtype, v.tolist()) for k, v in expected.named_buffers()
    ]
    assert repr(model[1]) == repr(expected)
    for buffer in model[1].buffers():
        buffer.fill_(7)
    model[1].reset_parameters()  # as FSDP does
    assert repr(model[1]) == repr(expected)
    model[1].half()
    assert repr(model[1]) == repr(expected)


@pytest.mark.parametrize("assign", [True, False])
def test_loading_into_a_module_from_the_meta_device(assign):
    with torch.device("meta"):
        scale = gs.ScaleGradient(0.5)
    if not assign:
        scale.to_empty(device="cpu")
    scale.load_state_dict(gs.ScaleGradient(0.25).state_dict(), assign=assign)
    x = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(scale(x), x)[0].item() == 0.25


@pytest.mark.parametrize("name", MODULES)
def test_modules_without_values_are_printed(name):
    with torch.device("meta"):
        shown = repr(MODULES[name]())
    assert shown.startswith(f"{name}(")
    assert "device='meta'" in shown
    with FakeTensorMode():
        assert repr(MODULES[name]()) == repr(MODULES[name]())


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"adaptive": 0.1}])
def test_clipping_of_fake_gradients(options):
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.ones(3, 3))
        parameter.grad = torch.ones(3, 3)
        assert gs.clip_gradients_([parameter], **options).total_norm.shape == ()


# ---- Compiled and exported functions --------------------------------------------------------------------------------


def _compared(function, *tensors):
    """Compare value and gradient of a function with the compiled function."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        value = call(*leaves)
        gradient = torch.autograd.grad(value.sum(), leaves, allow_unused=True) if value.requires_grad else ()
        results.append((value.detach(), gradient))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


@pytest.mark.compiled
@pytest.mark.parametrize("name", SUPPORTS)
def test_supports_in_compiled_functions(name):
    num_bins = SUPPORTS[name]().num_bins
    logits = torch.randn(3, num_bins, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scalars = logits[:, 0].contiguous()
    _compared(lambda x: SUPPORTS[name]().decode(x), logits)
    _compared(lambda x: SUPPORTS[name]().two_hot(x.detach()), scalars)
    _compared(lambda x: SUPPORTS[name]().hl_gauss(x.detach(), 0.5), scalars)
    _compared(lambda p, r: SUPPORTS[name]().project(p, r, r), logits.softmax(-1), scalars)
    _compared(lambda x: x * SUPPORTS[name]().centers(), logits)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ALL_HEADS)
def test_heads_in_compiled_functions(name):
    head = ALL_HEADS[name]
    given = {field: value for field, value in vars(head).items() if field != "support"}
    support = getattr(head, "support", None)
    predictions, targets = arguments(heads={name: head})

    def loss(*entries):
        built = {} if support is None else {"support": gs.Support(**vars_of(support))}
        heads = {name: type(head)(**built, **given)}
        return gs.multi_step_loss(heads, {name: list(entries)}, targets).loss

    entries = predictions[name]
    _compared(loss, *(entries.unbind(1) if isinstance(entries, torch.Tensor) else entries))


def vars_of(support):
    return {field: getattr(support, field) for field in ("minimum", "maximum", "num_bins", "transform", "eps", "space")}


@pytest.mark.compiled
@pytest.mark.parametrize("name", MODULES)
def test_modules_in_compiled_functions(name):
    x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _compared(lambda y: MODULES[name]()(y * 1) * x, x)


class Decoding(torch.nn.Module):
    def forward(self, logits):
        return gs.Support.dreamer_v3().decode(logits)


@pytest.mark.compiled
@pytest.mark.parametrize("strict", [True, False])
def test_supports_in_exported_programs(strict):
    torch._dynamo.reset()
    logits = torch.randn(3, 255, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(Decoding(), (logits,), strict=strict)
    torch.testing.assert_close(program.module()(logits), Decoding()(logits), rtol=1e-12, atol=0)
