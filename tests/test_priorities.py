"""Priorities with masks and checks, against sums over the unmasked steps of each sample in Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import gradscale_ext as gs

NAN, INF = math.nan, math.inf
STEPS = ("first", "mean", "max", "all")


def data(seed=0, batch=5, steps=4):
    g = torch.Generator().manual_seed(seed)
    expected, targets = (torch.randn(batch, steps, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(batch, steps, generator=g) < 0.6
    mask[0], mask[1], mask[2] = False, True, torch.arange(steps) == 2
    return expected, targets, mask


def by_definition(expected, targets, mask, steps, alpha, eps):
    rows = []
    for nu, z, live in zip(expected.tolist(), targets.tolist(), mask.tolist(), strict=True):
        errors = [abs(a - b) if is_live else 0.0 for a, b, is_live in zip(nu, z, live, strict=True)]
        counted = [error for error, is_live in zip(errors, live, strict=True) if is_live] or [0.0]
        error = {"first": counted[0], "mean": sum(counted) / len(counted), "max": max(counted), "all": errors}[steps]
        rows.append([(e + eps) ** alpha for e in error] if steps == "all" else (error + eps) ** alpha)
    return torch.tensor(rows, dtype=torch.float64)


def spoilt(tensor, mask, value):
    """The tensor with another value in masked entries, which nothing may read."""
    return torch.where(mask, tensor, value)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("alpha", "eps"), [(1.0, 1e-6), (0.6, 0.5), (0.0, 0.0), (2, 0.25)])
def test_masked_entries_do_not_count(alpha, eps, batch_first, steps):
    expected, targets, mask = data()
    options = {"steps": steps, "alpha": alpha, "eps": eps, "batch_first": batch_first}
    truth = by_definition(expected, targets, mask, steps, alpha, eps)
    turned = (lambda x: x) if batch_first else torch.t
    for value in (0.0, NAN, INF):
        for tensors in (
            (spoilt(expected, mask, value), targets),
            (expected, spoilt(targets, mask, value)),
            (spoilt(expected, mask, value), spoilt(targets, mask, value)),
        ):
            given = [turned(tensor) for tensor in tensors]
            lists = [list(tensor.unbind(1)) for tensor in tensors]
            for entries in (given, lists):
                for check in (False, True):
                    result = gs.priorities(*entries, **options, mask=turned(mask), check=check)
                    found = turned(result) if steps == "all" else result
                    torch.testing.assert_close(found, truth, rtol=1e-14, atol=1e-14)
    everything = torch.ones_like(mask)
    unmasked = gs.priorities(expected, targets, steps=steps, alpha=alpha, eps=eps)
    masked = gs.priorities(expected, targets, steps=steps, alpha=alpha, eps=eps, mask=everything)
    torch.testing.assert_close(masked, unmasked, rtol=1e-15, atol=0)


@pytest.mark.parametrize("steps", STEPS)
def test_dtypes_and_views(steps):
    expected, targets, mask = data(1)
    for dtypes in ((torch.float32,) * 2, (torch.bfloat16, torch.float64), (torch.float16, torch.float32)):
        given = [tensor.to(dtype) for tensor, dtype in zip((expected, targets), dtypes, strict=True)]
        truth = by_definition(*[tensor.double() for tensor in given], mask, steps, 0.7, 1e-3)
        wide = [tensor.repeat_interleave(2, 1)[:, ::2] for tensor in given]
        result = gs.priorities(*wide, steps=steps, alpha=0.7, eps=1e-3, mask=mask.repeat_interleave(2, 1)[:, ::2])
        assert result.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
        torch.testing.assert_close(result.double(), truth, rtol=1e-6, atol=1e-6)
    empty = gs.priorities(torch.ones(0, 3), torch.ones(0, 3), steps=steps, mask=torch.ones(0, 3) > 0, check=True)
    assert empty.shape == ((0, 3) if steps == "all" else (0,))
    leaf = expected.clone().requires_grad_()
    assert not gs.priorities(leaf, targets, steps=steps, mask=mask).requires_grad


@pytest.mark.compiled
@pytest.mark.parametrize("steps", STEPS)
def test_contexts(steps):
    expected, targets, mask = data(2)
    expected = spoilt(expected, mask, NAN)
    truth = by_definition(expected, targets, mask, steps, 0.6, 1e-6)

    def apply(expected, targets, mask):
        return gs.priorities(expected, targets, steps=steps, alpha=0.6, mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(apply, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(expected, targets, mask), truth)
    module = torch.nn.Module()
    module.forward = apply
    exported = torch.export.export(module, (expected, targets, mask)).module()
    torch.testing.assert_close(exported(expected, targets, mask), truth)
    torch.testing.assert_close(make_fx(apply)(expected, targets, mask)(expected, targets, mask), truth)
    rows = torch.func.vmap(lambda *row: apply(*[entry[None] for entry in row])[0])(expected, targets, mask)
    torch.testing.assert_close(rows, truth)
    over_masks = torch.func.vmap(lambda mask: apply(expected, targets, mask))(torch.stack([~mask, mask]))
    torch.testing.assert_close(over_masks[1], truth)
    with torch.inference_mode():
        torch.testing.assert_close(apply(expected, targets, mask.clone()), truth)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("batch_first", [True, False])
def test_check_refuses_nan(batch_first, value):
    """The difference of two infinite entries is NaN too."""
    expected, targets, mask = data()
    sample, step = mask.nonzero()[-1].tolist()
    for changed in ("expected", "targets") if math.isnan(value) else ("the difference of infinite entries",):
        given = {"expected": expected.clone(), "targets": targets.clone()}
        for name in given if math.isinf(value) else (changed,):
            given[name][sample, step] = value
        arguments = {name: tensor if batch_first else tensor.t() for name, tensor in given.items()}
        arguments |= {"mask": mask if batch_first else mask.t(), "batch_first": batch_first}
        for steps in STEPS:
            result = gs.priorities(**arguments, steps=steps)
            rows = result if steps != "all" or batch_first else result.t()
            assert rows[sample].isnan().any() or steps == "first"
            assert not rows[:sample].isnan().any()
            with pytest.raises(
                ValueError, match=f"^priorities: {changed} is NaN at sample {sample}, step {step}; .*mask it$"
            ):
                gs.priorities(**arguments, steps=steps, check=True)
        everywhere = {**arguments, "mask": None}
        with pytest.raises(ValueError, match=f"is NaN at sample {sample}, step {step};"):
            gs.priorities(**everywhere, check=True)


@pytest.mark.compiled
def test_check_needs_values():
    expected, targets, mask = data()

    def apply(expected):
        return gs.priorities(expected, targets, mask=mask, check=True)

    contexts = (
        lambda: torch.compile(apply, backend="aot_eager")(expected),
        lambda: torch.compile(apply, fullgraph=True, backend="aot_eager")(expected),
        lambda: torch.func.vmap(apply)(expected[None]),
        lambda: make_fx(apply)(expected),
        lambda: gs.priorities(expected.to("meta"), targets.to("meta"), check=True),
    )
    for run in contexts:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="priorities: check=True reads values, which do not exist while"):
            run()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mask": [[True]]}, TypeError, "mask must be a bool tensor, but it is of type list"),
        ({"mask": torch.ones(5, 4)}, TypeError, r"its dtype is torch.float32; write mask.bool\(\)"),
        ({"mask": torch.ones(4, 5) > 0}, ValueError, r"\(5, 4\), but it has \(4, 5\); write mask.T$"),
        ({"mask": torch.ones(5, 4, 1) > 0}, ValueError, r"it has \(5, 4, 1\); write mask.squeeze\(-1\)$"),
        ({"mask": torch.ones(5) > 0}, ValueError, r"must have the shape of expected, \(5, 4\), but it has \(5,\)$"),
        ({"mask": (torch.ones(5, 4) > 0).to("meta")}, ValueError, "mask must be on the device of expected, cpu"),
        ({"mask": (torch.ones(5, 4) > 0).to_sparse()}, TypeError, r"mask must be dense, .*write \.to_dense"),
        ({"check": 1}, TypeError, "check must be True or False, but it is of type int"),
        ({"check": None}, TypeError, "check must be True or False, but it is of type NoneType"),
        ({"steps": "last"}, ValueError, "steps must be 'first', 'mean', 'max' or 'all', but it is 'last'"),
    ],
)
def test_wrong_arguments(changes, error, words):
    expected, targets, _ = data()
    with pytest.raises(error, match=f"^priorities: .*{words}"):
        gs.priorities(expected, targets, **changes)
