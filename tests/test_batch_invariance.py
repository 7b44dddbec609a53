"""A row gets the same bits wherever it is in memory, among any number of rows, and for any number of threads.

native/test_kernels.py runs this file for each instruction set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from test_loss import ALL_HEADS

import gradscale_ext as gs

ROWS = 70
# A CPU kernel computes 16 rows side by side: a row alone has each place of the first two groups and of the last one.
ALONE = (*range(33), *range(63, ROWS))
# Rows of at most 32 elements are computed side by side.
WIDTHS = (*range(2, 10), 12, 15, 16, 17, 20, 24, 31, 32, 33, 51, 101, 255, 601, 1501)
OFFSETS = (1, 2, 3, 5, 8, 15)
# Elements of a half type are converted before anything is computed: each width has one of them.
HALF_TYPES = (torch.bfloat16, torch.float16)
CASES = [
    (width, dtype)
    for index, width in enumerate(WIDTHS)
    for dtype in (torch.float32, torch.float64, HALF_TYPES[index % 2])
]
Rows = dict[str, torch.Tensor]  # by head, [rows, ...]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def heads_of(width: int) -> dict[str, gs.Head]:
    """All heads of test_loss.py, with supports of this width."""
    heads = {}
    for name, head in ALL_HEADS.items():
        changes = {"first_step": 0, "weight": 1.0}
        if hasattr(head, "support"):
            changes["support"] = dataclasses.replace(head.support, num_bins=width)
        heads[name] = dataclasses.replace(head, **changes)
    return heads


def inputs(width: int, dtype: torch.dtype) -> tuple[dict[str, gs.Head], Rows, Rows]:
    """Heads, predictions and targets, each of `width` elements where the head has a vector."""
    generator = torch.Generator().manual_seed(width)
    heads, sizes = heads_of(width), {"A": width, "D": width, "N": width, "M": 5, "G": 2, "C": (width + 1) // 2}
    predictions, targets = {}, {}
    for name, head in heads.items():
        form = head.forms[0] if name == "distance" else max(head.forms, key=lambda form: len(form.predictions[0].shape))
        shape = (width,) if hasattr(head, "support") else tuple(sizes[letter] for letter in form.predictions[0].shape)
        predictions[name] = torch.randn(ROWS, *shape, generator=generator).mul(3).to(dtype)
        if "classes" in name:
            targets[name] = torch.randint(width, (ROWS,), generator=generator)
        elif form.targets:
            shape = [sizes[letter] for letter in form.targets[0].shape if letter != "S"]
            target = torch.rand(ROWS, *shape, generator=generator)
            scale = 12 if hasattr(head, "support") else 1
            targets[name] = (target * scale).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return heads, predictions, targets


def results(heads: dict[str, gs.Head], predictions: Rows, targets: Rows) -> Rows:
    """Losses, decoded values, entropies and gradients of one step, by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in predictions.items()}
    out = gs.multi_step_loss(
        heads, {name: [x] for name, x in leaves.items()}, {name: [t] for name, t in targets.items()}, reduction="sum"
    )
    gradients = torch.autograd.grad(out.loss, list(leaves.values()))
    found = {f"gradient {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    for kind in ("per_step", "expected", "entropy"):
        found |= {f"{kind} {name}": tensor[:, 0] for name, tensor in getattr(out, kind).items()}
    return found


def assert_equal(found: Rows, expected: Rows, what: object, rows: slice | None = None) -> None:
    for name, tensor in found.items():
        wanted = expected[name] if rows is None else expected[name][rows]
        assert torch.equal(bits(tensor), bits(wanted)), (name, what)


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins `offset` elements after an aligned address."""
    memory = tensor.new_zeros(tensor.numel() + offset)
    return memory[offset:].view(tensor.shape).copy_(tensor)


def sliced(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy in a wider tensor, so that its rows have other alignments."""
    if tensor.dim() == 1:
        return tensor.new_zeros(len(tensor), offset + 1)[:, offset].copy_(tensor)
    memory = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + offset)
    return memory[..., offset:].copy_(tensor)


def mapped(function: Callable[..., torch.Tensor], rows: Rows, *arguments: object) -> Rows:
    return {name: function(tensor, *arguments) for name, tensor in rows.items()}


def part(rows: Rows, which: slice) -> Rows:
    return mapped(lambda tensor: tensor[which], rows)


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "dtype"), CASES)
def test_rows_of_the_loss(width, dtype):
    heads, predictions, targets = inputs(width, dtype)
    expected = results(heads, predictions, targets)
    for offset in OFFSETS:
        for place in (moved, sliced):
            found = results(heads, mapped(place, predictions, offset), mapped(place, targets, offset))
            assert_equal(found, expected, (place.__name__, offset))
    for count in (*range(2, 10), 15, 16, 17, 33, 69):
        rows = slice(ROWS - count, ROWS)
        assert_equal(results(heads, part(predictions, rows), part(targets, rows)), expected, (count, "rows"), rows)
    for row in ALONE:
        rows = slice(row, row + 1)
        assert_equal(results(heads, part(predictions, rows), part(targets, rows)), expected, f"row {row} alone", rows)


@pytest.mark.parametrize("width", [7, 33, 255, 601])
def test_threads_and_layouts_of_the_loss(width, threads):
    steps, rows = 3, slice(0, 23)
    heads, predictions, targets = inputs(width, torch.float32)
    expected = results(heads, predictions, targets)
    for stacked in (True, False):
        lists = [{name: [tensor[rows]] * steps for name, tensor in group.items()} for group in (predictions, targets)]
        leaves = {name: [x.clone().requires_grad_() for x in entries] for name, entries in lists[0].items()}
        given = lists[1]
        if stacked:
            leaves = {name: torch.stack(entries, 1).detach().requires_grad_() for name, entries in leaves.items()}
            given = {name: torch.stack(entries, 1) for name, entries in given.items()}
        out = gs.multi_step_loss(heads, leaves, given, reduction="sum")
        out.loss.backward()
        for step in range(steps):
            found = {f"per_step {name}": tensor[:, step] for name, tensor in out.per_step.items()}
            found |= {f"expected {name}": tensor[:, step] for name, tensor in out.expected.items()}
            found |= {f"entropy {name}": tensor[:, step] for name, tensor in out.entropy.items()}
            for name, entries in leaves.items():
                found[f"gradient {name}"] = entries.grad[:, step] if stacked else entries[step].grad
            assert_equal(found, expected, (step, stacked), rows)


@pytest.mark.parametrize(("width", "dtype"), CASES)
def test_rows_of_supports(width, dtype):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(ROWS, width, generator=generator).to(dtype)
    wanted = torch.randn(ROWS, generator=generator)
    for transform, space in (("identity", "transformed"), ("signed_hyperbolic", "transformed"), ("symlog", "raw")):
        support = gs.Support(-4, 6, width, transform=transform, space=space)

        def functions(logits: torch.Tensor, wanted: torch.Tensor, support: gs.Support = support) -> Rows:
            leaf = logits.detach().requires_grad_()
            values = support.decode(leaf)
            wanted = wanted.to(values.dtype)
            return {
                "decode": values,
                "gradient": torch.autograd.grad(values, leaf, wanted)[0],
                "two_hot": support.two_hot(wanted),
                "hl_gauss": support.hl_gauss(wanted, 0.75),
                "project": support.project(leaf.detach().exp(), wanted, wanted.abs()),
            }

        expected = functions(logits, wanted)
        for offset in OFFSETS:
            assert_equal(functions(moved(logits, offset), moved(wanted, offset)), expected, offset)
            assert_equal(functions(sliced(logits, offset), sliced(wanted, offset)), expected, offset)
        for row in ALONE:
            rows = slice(row, row + 1)
            assert_equal(functions(logits[rows], wanted[rows]), expected, f"row {row} alone", rows)


def test_equal_rows_get_equal_values(threads):
    support = gs.Support(-300, 300, 601)
    rows = torch.randn(601, generator=torch.Generator().manual_seed(0)).expand(640, 601).contiguous()
    assert len(support.decode(rows).unique()) == 1


@pytest.mark.parametrize("width", [1, 7, 16, 33, 601])
def test_rows_of_gradients_and_policies(width):
    generator = torch.Generator().manual_seed(width)
    x, q = torch.randn(2, ROWS, width, generator=generator)
    visits, value = torch.randint(5, (ROWS, width), generator=generator), torch.randn(ROWS, generator=generator)

    def functions(x: torch.Tensor, q: torch.Tensor, visits: torch.Tensor, value: torch.Tensor) -> Rows:
        leaf = x.detach().requires_grad_()
        clipped = gs.clip_gradient_norm(leaf, 0.5, batch_dims=1)
        normalized = gs.normalize_gradient(leaf, 2.0, batch_dims=1)
        return {
            "clip_gradient_norm": torch.autograd.grad(clipped, leaf, x)[0],
            "normalize_gradient": torch.autograd.grad(normalized, leaf, x)[0],
            "completed_q_policy": gs.completed_q_policy(x, q, visits, value),
        }

    expected = functions(x, q, visits, value)
    for offset in OFFSETS:
        for place in (moved, sliced):
            found = functions(*(place(tensor, offset) for tensor in (x, q, visits, value)))
            assert_equal(found, expected, (place.__name__, offset))
    for row in ALONE:
        rows = slice(row, row + 1)
        assert_equal(functions(x[rows], q[rows], visits[rows], value[rows]), expected, f"row {row} alone", rows)
