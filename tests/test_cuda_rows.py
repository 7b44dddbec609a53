"""Rows on a GPU have the same bits wherever they are: alone, among other rows, at any offset and stride, in lists and
stacked. Runs where test_cuda.py runs. tests/native/test_device_kernels.py compares GPUs of two sizes."""

from __future__ import annotations

import pytest
import torch
from test_cuda import device, heads_of, inputs_of
from test_returns import FLAGS, FUNCTIONS, call
from test_returns import inputs_of as inputs_of_returns
from trajectories import random_data

import gradscale_ext as gs

__all__ = ["device"]

pytestmark = pytest.mark.cuda

OFFSETS = (1, 2, 3, 5, 8, 15)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# One or two widths for each kind of rows: a lane, 8, 16 or 32 lanes, a block, and a group of threads.
LOSSES = [
    *(("two_hot", width, dtype) for width, dtype in ((33, F32), (101, BF16), (256, F32), (601, F32), (601, BF16))),
    *(("two_hot", width, dtype) for width, dtype in ((801, BF16), (1025, F32), (33, F64))),
    *(("smooth", 101, F32), ("raw", 255, F32), ("raw", 401, BF16), ("gauss", 21, F32), ("gauss", 601, BF16)),
    *(("policy", width, dtype) for width, dtype in ((82, BF16), (225, F32), (449, F32), (4672, BF16), (9, F64))),
    *(("bonus", 41, F32), ("bonus", 4672, F32), ("classes", 41, BF16), ("classes", 362, F32)),
    *(("distance", 33, F32), ("huber", 601, BF16), ("cosine", 82, F32), ("quantiles", 33, F32)),
]


def shifted(rows, offset, gap=0):
    """The same rows from element `offset` of new memory on, with `gap` elements between them."""
    count, width = rows.shape
    memory = torch.zeros(count * (width + gap) + offset, dtype=rows.dtype, device=rows.device)
    return memory[offset:].view(count, width + gap)[:, :width].copy_(rows)


def assert_same(found, expected, what):
    for a, b in zip(found, expected, strict=True):
        rows = (a != b).reshape(len(a), -1).any(1)
        assert not rows.any(), (
            f"{what}: {int(rows.sum())} of {len(rows)} rows differ, such as {rows.nonzero()[0].item()}"
        )


@pytest.mark.parametrize(("name", "width", "dtype"), LOSSES)
def test_losses_of_rows(name, width, dtype, device):
    head = heads_of(width)[name]
    count = 6 if width > 1024 else 70
    predictions, targets = inputs_of({name: head}, width, count)
    x, target = predictions[name][0].detach().to(device, dtype), targets[name][0].to(device)
    if target.is_floating_point():
        target = target.to(torch.promote_types(dtype, F32))
    assert_invariant(head, x, target, lambda rows: rows)


# (groups, classes) whose groups belong to 1 to 32 lanes and to a group of threads, and whose rows to 1 to 32 lanes.
@pytest.mark.parametrize("name", ["prior", "posterior"])
@pytest.mark.parametrize(
    ("groups", "classes", "dtype"),
    [
        *((1, 2, F32), (32, 2, BF16), (33, 5, F32), (3, 16, BF16), (1, 33, BF16), (33, 33, F32), (32, 32, F32)),
        *((32, 32, BF16), (2, 64, BF16), (1, 256, F32), (3, 257, F32), (3, 9, F64)),
    ],
)
def test_divergences_of_rows(groups, classes, dtype, name, device):
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(70, groups * classes, generator=generator).to(device, dtype) * 3 for _ in range(2))
    assert_invariant(heads_of(classes)[name], x, target, lambda rows: rows.unflatten(-1, (groups, classes)))


def assert_invariant(head, x, target, row_of):
    """Compare the results of rows `x` alone, among others, repeated, stacked, and at offsets. `row_of` gives rows the
    shape that the head expects."""
    count, width = x.shape
    target_row = row_of if target.shape == x.shape else lambda rows: rows

    def results(logits, own_target):
        """Losses, decoded values or entropies, and gradients, with a row for each entry."""
        leaf, steps = logits.detach().requires_grad_(), logits.dim() == 3
        rows, own_target = row_of(leaf), target_row(own_target)
        entries, own_targets = ({"head": given if steps else [given]} for given in (rows, own_target))
        out = gs.multi_step_loss({"head": head}, entries, own_targets, reduction="none")
        details = [field["head"] for field in (out.expected, out.entropy) if "head" in field]
        gradient = torch.autograd.grad(out.loss.sum(), leaf)[0]
        return [
            rows.reshape(len(logits) * (2 if steps else 1), -1) for rows in (out.per_step["head"], *details, gradient)
        ]

    together = results(x, target)
    few = [rows[:9] for rows in together]
    alone = [results(x[k : k + 1], target[k : k + 1]) for k in range(len(few[0]))]
    assert_same([torch.cat(parts) for parts in zip(*alone, strict=True)], few, "alone")
    repeated = results(x[1:2].repeat(count, 1), target[1:2].repeat(count, *[1] * (target.dim() - 1)))
    assert_same(repeated, [rows[1:2].expand_as(rows) for rows in together], "repeated")
    stacked = results(x.view(-1, 2, width), target.view(-1, 2, *target.shape[1:]))
    assert_same(stacked, together, "stacked")
    for offset in OFFSETS:
        assert_same(results(shifted(x[:9], offset), target[:9]), few, f"offset {offset}")
    assert_same(results(shifted(x[:9], 0, gap=1), target[:9]), few, "one element between rows")
    if target.dim() == 2 and target.is_floating_point():
        assert_same(results(x[:9], shifted(target[:9], 1)), few, "a target's offset of 1")


@pytest.mark.parametrize(
    ("width", "space", "dtype"),
    [
        *((33, "transformed", F32), (101, "transformed", BF16), (256, "raw", F32), (255, "raw", BF16)),
        *((601, "transformed", F32), (601, "raw", F32), (801, "transformed", BF16), (1025, "raw", F32)),
        (33, "transformed", F64),
    ],
)
def test_decoded_rows(width, space, dtype, device):
    support = gs.Support(-4, 6, width, transform="symlog", space=space)
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(0)).to(device, dtype) * 3

    def results(rows):
        leaf = rows.detach().requires_grad_()
        values = support.decode(leaf)
        return [values.detach(), torch.autograd.grad(values.sum(), leaf)[0]]

    together = results(x)
    few = [rows[:9] for rows in together]
    alone = [torch.cat(parts) for parts in zip(*(results(x[k : k + 1]) for k in range(9)), strict=True)]
    assert_same(alone, few, "alone")
    assert_same(results(x[1:2].repeat(70, 1)), [rows[1:2].expand_as(rows) for rows in together], "repeated")
    for offset in OFFSETS:
        assert_same(results(shifted(x[:9], offset)), few, f"offset {offset}")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("steps", [1, 5, 8, 9, 16, 17, 32, 40])
def test_rows_of_trajectories(function, steps, device):
    """Also next to rows that are not finite, with zeros of both signs, and with negative discounts."""
    count = 40
    data = random_data(steps, count, steps, ends=0.1, padding=0.05)
    data["rewards"][::3] = -0.0
    data["values"][::3] = 0.0
    data["next_values"][::3] = -0.0
    data["discount"][1::4] *= -1
    data["rewards"][5::8, steps // 2] = float("nan")
    data["next_values"][7::8, -1] = float("inf")
    data = {name: value.to(device, None if name in FLAGS else torch.float32) for name, value in data.items()}
    names = inputs_of_returns(function)

    def results(rows):
        """The bits of results and gradients."""
        given = {name: value[rows].contiguous() for name, value in data.items()}
        inputs = [given[name].detach().requires_grad_() for name in names]
        own = call(function, given | dict(zip(names, inputs, strict=True)))
        weights = [torch.linspace(-1, 2, steps, device=device).expand_as(result) for result in own]
        own = [*(result.detach() for result in own), *torch.autograd.grad(own, inputs, weights)]
        return [result.view(torch.int32) for result in own]

    together = results(slice(None))
    alone = [torch.cat(parts) for parts in zip(*(results(slice(k, k + 1)) for k in range(count)), strict=True)]
    assert_same(alone, together, "alone")
    moved = list(range(3, count)) + list(range(3))
    assert_same(results(moved), [rows[moved] for rows in together], "in other places")
    repeated = results([1] * count)
    assert_same(repeated, [rows[1:2].expand_as(rows) for rows in together], "repeated")
