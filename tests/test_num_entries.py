"""Gradient accumulation: `num_entries`, the divisors of "mean" and "valid_mean" in place of a call's own counts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Checks, one_server
from test_head_weights import LOSSES, fresh_compiler, run  # noqa: F401
from test_loss import HEADS, arguments, compare, leaves
from torch import Tensor

import gradscale_ext as gs

IMPLEMENTATIONS = ["fused", "operator", "reference", "compiled"]
REDUCTIONS = ["mean", "valid_mean"]
BATCH, STEPS, PARTS = 7, 2, (slice(0, 2), slice(2, 2), slice(2, 6), slice(6, 7))
MASK = torch.rand(BATCH, STEPS, generator=torch.Generator().manual_seed(1)) < 0.6
MASK[6] = False  # the last micro-batch has no entries
OPTIONS: dict[str, Any] = {
    "mask": MASK,
    "importance_weights": torch.rand(BATCH, generator=torch.Generator().manual_seed(2)),
    "step_gradient_scale": "unroll",
}


def counts_of(heads: dict[str, gs.Head], reduction: str, mask: Tensor = MASK) -> dict[str, Tensor]:
    """The counts of a whole batch, as a user computes them."""
    if reduction == "mean":
        return {name: torch.tensor(len(mask)) for name in heads}
    return {name: mask[:, head.first_step :].sum() for name, head in heads.items()}


def part_of(value: Any, part: slice) -> Any:
    if isinstance(value, dict):
        return {name: part_of(entry, part) for name, entry in value.items()}
    if isinstance(value, list):
        return [part_of(entry, part) for entry in value]
    return value[part] if isinstance(value, Tensor) else value


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("kind", "impl", "reduction"),
    [
        *itertools.product(["tensors", "floats", "float32"], ["fused"], REDUCTIONS),
        *itertools.product(["tensors"], ["operator", "reference"], REDUCTIONS),
        ("tensors", "compiled", "valid_mean"),
        pytest.param("tensors", "compiled", "mean", marks=pytest.mark.slow),
    ],
)
def test_micro_batches_add_up_to_the_batch(kind, impl, reduction):
    heads = LOSSES if impl in ("operator", "compiled") else HEADS
    predictions, targets = arguments(batch=BATCH, steps=STEPS, heads=heads)
    truth = gs.reference.multi_step_loss(heads, predictions, targets, reduction=reduction, **OPTIONS)
    wanted = torch.autograd.grad(truth.loss, leaves(predictions))
    counts: dict[str, Any] = counts_of(heads, reduction)
    if kind != "tensors":
        counts = {name: count.float() if kind == "float32" else float(count) for name, count in counts.items()}
    loss, shares = torch.zeros((), dtype=torch.float64), dict.fromkeys(heads, 0.0)
    found = [torch.zeros_like(gradient) for gradient in wanted]
    for part in PARTS:
        given = [part_of(entries, part) for entries in (predictions, targets, OPTIONS)]
        out = run(impl, heads, *given[:2], **given[2], reduction=reduction, num_entries=counts)
        loss = loss + out.loss.detach()
        shares = {name: shares[name] + share for name, share in out.head_losses.items()}
        for total, gradient in zip(found, torch.autograd.grad(out.loss, leaves(predictions)), strict=True):
            total += gradient
    torch.testing.assert_close(loss, truth.loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shares, truth.head_losses, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.compiled
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_output(reduction, impl):
    """A head that is not named keeps its own count; only the loss and what is derived from it changes."""
    heads = LOSSES if impl in ("operator", "compiled") else {name: HEADS[name] for name in LOSSES}
    predictions, targets = arguments(heads=heads)
    mask = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    given: dict[str, Any] = {"mask": {"value": mask}, "reduction": reduction, "nonfinite": "skip"}
    own = {"value": 6.0 if reduction == "valid_mean" else 3.0, "policy": 12.0 if reduction == "valid_mean" else 3.0}
    counts = {"value": torch.tensor(2.5, dtype=torch.float64), "policy": 8}
    weights = {name: own[name] / float(count) for name, count in counts.items()}
    truth = gs.reference.multi_step_loss(heads, predictions, targets, head_weights=weights, **given)
    found = run(impl, heads, predictions, targets, num_entries=counts, **given)
    plain = gs.reference.multi_step_loss(heads, predictions, targets, **given)
    truth.per_sample = plain.per_sample  # head weights are part of L_b, counts are not
    compare(found, truth, predictions)


@pytest.mark.parametrize(
    ("impl", "dtypes"),
    [
        *itertools.product(["fused", "reference"], [(torch.int64, torch.float32, torch.float64)]),
        *[pytest.param(impl, [torch.int64], marks=pytest.mark.compiled) for impl in ("operator", "compiled")],
    ],
)
def test_a_count_of_zero_is_one(impl, dtypes):
    """As with "valid_mean", a head without an entry has a loss of 0, and a divisor of 1."""
    x = torch.ones(2, 3, requires_grad=True)
    heads = {"a": gs.PerStepLoss()}
    for mask, total in ((torch.zeros(2, 3, dtype=torch.bool), 0.0), (None, 6.0)):
        for dtype in dtypes:
            counts = {"a": torch.zeros((), dtype=dtype)}
            out = run(impl, heads, {"a": x}, {}, mask=mask, reduction="valid_mean", num_entries=counts)
            assert out.loss.item() == total
            (gradient,) = torch.autograd.grad(out.loss, x)
            assert gradient.tolist() == [[total / 6] * 3] * 2


def test_other_doors():
    """The module, the reduction alone, `batch_first=False`, a negated tensor and the second derivative."""
    losses = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    count = torch._neg_view(torch.tensor(-4.0))
    assert count.is_neg()
    for given in (count, 4, 4.0, torch.tensor(4, dtype=torch.int32)):
        assert gs.reduce_multi_step(losses, num_entries={"loss": given}).loss.item() == 15 / 4
        module = gs.MultiStepLoss(a=gs.PerStepLoss())
        for impl in ("fused", "reference"):
            out = module({"a": losses.t()}, {}, num_entries={"a": given}, batch_first=False, impl=impl)
            assert out.loss.item() == 15 / 4
    heads, prediction = {"a": gs.MeanSquaredError()}, torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    target = {"a": [torch.zeros(2, dtype=torch.float64)]}
    for value in (8, torch.tensor(8)):
        loss = gs.multi_step_loss(heads, {"a": [prediction]}, target, num_entries={"a": value}).loss
        (first,) = torch.autograd.grad(loss, prediction, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), prediction)
        assert first.tolist() == [0.25, 0.5]
        assert second.tolist() == [0.25, 0.25]


def test_transforms():
    x = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    counts = torch.tensor([2.0, 5.0])

    def loss(x: Tensor, count: Tensor) -> Tensor:
        return gs.reduce_multi_step(x, num_entries={"loss": count}).loss

    torch.testing.assert_close(torch.func.vmap(loss, (None, 0))(x, counts), 21 / counts.double())
    gradient = torch.func.vmap(torch.func.grad(loss), (None, 0))(x, counts)
    torch.testing.assert_close(gradient, (1 / counts.double())[:, None, None].expand(2, 2, 3))
    _, tangent = torch.func.jvp(lambda x: loss(x, counts[0]), (x,), (torch.ones_like(x),))
    assert tangent == 3
    with torch.inference_mode():
        assert loss(x.clone(), torch.tensor(3)) == 7


@pytest.mark.compiled
@pytest.mark.parametrize("impl", ["fused", "compiled"])
@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_counts_that_change_do_not_compile_again(kind, impl, fresh_compiler):  # noqa: F811
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss(first_step=1)}
    predictions = {"a": torch.ones(2, 3), "b": torch.ones(2, 2)}

    def loss(count: Any) -> Tensor:
        return gs.multi_step_loss(heads, predictions, {}, num_entries={"a": count, "b": 2}, impl=impl).loss

    function = loss if impl == "compiled" else torch.compile(loss, fullgraph=True)
    for number in (5, 7, 8, 9, 11):
        assert function(kind(number)).item() == pytest.approx(6 / number + 2, rel=1e-6)
    assert fresh_compiler.frame_count <= 2


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "num_entries must be a mapping of head names to numbers or tensors": ({"num_entries": 8}, TypeError),
    "num_entries names 'vlaue', which is not a head": ({"num_entries": {"vlaue": 8}}, ValueError),
    "the num_entries of head 'value' must be finite and above 0, but it is -1": (
        {"num_entries": {"value": -1}},
        ValueError,
    ),
    "the num_entries of head 'value' must be finite and above 0, but it is 0; write max(count, 1) if a batch may have "
    "no entries": ({"num_entries": {"value": 0}}, ValueError),
    "the num_entries of head 'value' must be finite and above 0, but it is inf": (
        {"num_entries": {"value": float("inf")}},
        ValueError,
    ),
    "the num_entries of head 'value' must be finite and above 0, but it is nan": (
        {"num_entries": {"value": float("nan")}},
        ValueError,
    ),
    "the num_entries of head 'value' must be a number or a tensor without dimensions, but it has shape [1]; write "
    ".reshape(())": ({"num_entries": {"value": torch.ones(1)}}, ValueError),
    "the num_entries of head 'value' must be a number or a tensor without dimensions, but it is of type bool": (
        {"num_entries": {"value": True}},
        TypeError,
    ),
    "the num_entries of head 'value' must be a number or a tensor without dimensions, but it is of type str": (
        {"num_entries": {"value": "8"}},
        TypeError,
    ),
    "the num_entries of head 'value' must be an integer, float64 or float32, but it is torch.bfloat16; count with "
    "mask.sum(), which is int64": ({"num_entries": {"value": torch.tensor(8.0, dtype=torch.bfloat16)}}, TypeError),
    "the num_entries of head 'value' must be an integer, float64 or float32, but it is torch.bool": (
        {"num_entries": {"value": torch.tensor(True)}},
        TypeError,
    ),
    "the num_entries of head 'value' is on meta, but the predictions are on cpu": (
        {"num_entries": {"value": torch.ones((), device="meta")}},
        ValueError,
    ),
    "the num_entries of head 'value' requires grad": (
        {"num_entries": {"value": torch.tensor(8.0, requires_grad=True)}},
        ValueError,
    ),
    "num_entries needs reduction 'mean' or 'valid_mean', but the reduction is 'sum'; leave out num_entries": (
        {"num_entries": {"value": 8}, "reduction": "sum"},
        ValueError,
    ),
    "num_entries needs reduction 'mean' or 'valid_mean', but the reduction is 'none'": (
        {"num_entries": {}, "reduction": "none"},
        ValueError,
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_counts(message):
    predictions, targets = arguments()
    options, error = WRONG[message]
    for impl in ("auto", "reference", "compiled"):
        with pytest.raises(error) as info:
            gs.multi_step_loss(HEADS, predictions, targets, impl=impl, **options)
        assert message in str(info.value)


def test_check_reads_counts():
    predictions, targets = arguments()
    for value in (-1.0, float("nan"), float("inf")):
        counts = {"value": torch.tensor(value)}
        with pytest.raises(
            ValueError, match="the num_entries of head 'value' must be finite and at least 0, but it is"
        ):
            gs.multi_step_loss(HEADS, predictions, targets, num_entries=counts, check=True)
    gs.multi_step_loss(HEADS, predictions, targets, num_entries={"value": torch.tensor(3)}, check=True)


# ---- Several ranks --------------------------------------------------------------------------------------------------

check = Checks()
RANKS = 2


@check
def micro_batches_of_two_ranks(rank: int) -> None:
    """The average over the ranks of the sums over micro-batches is the gradient of the whole batch."""
    parts = [PARTS[:2], PARTS[2:]]
    for reduction, compiled in (("mean", False), ("valid_mean", False), ("valid_mean", True)):
        heads = LOSSES if compiled else HEADS
        predictions, targets = arguments(batch=BATCH, steps=STEPS, heads=heads)
        truth = gs.reference.multi_step_loss(heads, predictions, targets, reduction=reduction, **OPTIONS)
        wanted = torch.autograd.grad(truth.loss, leaves(predictions))
        own = torch.cat([MASK[part] for part in parts[rank]])
        counts = counts_of(heads, reduction, own)
        group = dist.group.WORLD
        call = functools.partial(gs.multi_step_loss, heads, reduction=reduction, process_group=group)
        if compiled:
            torch._dynamo.reset()
        function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        found = [torch.zeros_like(gradient) for gradient in wanted]
        for part in parts[rank]:
            given = [part_of(entries, part) for entries in (predictions, targets, OPTIONS)]
            out = function(*given[:2], **given[2], num_entries=counts)
            for total, gradient in zip(found, torch.autograd.grad(out.loss, leaves(predictions)), strict=True):
                total += gradient
        for total, gradient in zip(found, wanted, strict=True):
            dist.all_reduce(total)
            torch.testing.assert_close(total / RANKS, gradient, rtol=1e-12, atol=1e-12)


outcomes = check.outcomes(RANKS)


@one_server
@pytest.mark.parametrize("name", check)
def test_two_ranks_are_one(name: str, outcomes: Callable[[str], None]) -> None:
    outcomes(name)


def test_valid_mean_counts_no_steps_before_the_first():
    heads = {"reward": gs.PerStepLoss(first_step=1), "value": gs.PerStepLoss()}
    losses = {"reward": torch.ones(2, 2), "value": torch.ones(2, 3)}
    mask = torch.tensor([[True, True, True], [True, True, False]])
    out = gs.multi_step_loss(heads, losses, {}, mask=mask, reduction="valid_mean")
    assert out.head_losses["reward"].item() == 1.0
