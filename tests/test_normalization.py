"""Standardized tensors and the scale of returns, against sums over the unmasked entries alone."""

from __future__ import annotations

import copy
import functools
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Checks, assert_passed, one_server, run_in_processes
from test_without_float64 import assert_same_without
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs

NAN, INF = math.nan, math.inf
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(5, 4), (7,), (2, 3, 4), (1,), (1, 1)]


def data(shape: tuple[int, ...] = (5, 4), dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 2
    mask = torch.rand(shape, generator=generator) < 0.6
    mask.view(-1)[-1] = True
    return x.to(dtype), mask


def spoilt(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """The tensor with another value in masked entries, which nothing may read."""
    return torch.where(mask, x, value)


def by_definition(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    if not mask.any():
        return torch.zeros(x.shape, dtype=torch.float64)
    counted = x[mask].double()
    result = torch.zeros(x.shape, dtype=torch.float64)
    result[mask] = (counted - counted.mean()) / (counted.std(unbiased=False) + eps)
    return result


class RejectReads(TorchDispatchMode):
    """Rejects operations that would wait for a device: reading a number, and shapes that depend on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique"), name
        if name in ("index", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "an index by mask"
        return function(*args, **(kwargs or {}))


def standardized(x: Tensor, **options: Any) -> Tensor:
    with RejectReads():
        return gs.standardize(x, **options)


class Named(Tensor):
    """A subclass that PyTorch's functions keep."""


def graphs_of(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> int:
    """Compile, compare every call with eager mode, and return the number of graphs."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), function(*arguments), rtol=1e-12, atol=1e-12)
    return counter.frame_count


# ---- standardize ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-8, 0.5, 0, 2])
def test_standardized_by_definition(shape, eps):
    x, mask = data(shape)
    is_constant = [mask.sum() == 1, x.numel() == 1]
    for given, constant in zip((mask, None), is_constant, strict=True):
        wanted = torch.zeros_like(x) if constant else by_definition(x, given, eps)
        for value in (0.0, NAN, INF):
            found = standardized(x if given is None else spoilt(x, mask, value), mask=given, eps=eps)
            assert found.is_contiguous()
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
            assert given is None or (found[~mask] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_and_views(dtype):
    x, mask = data(dtype=dtype)
    wide, wide_mask = (t.repeat_interleave(2, 1)[:, ::2] for t in (x, mask))
    negated = torch._neg_view(-x)
    assert negated.is_neg()
    for given in (x, wide, negated, x.t().contiguous().t()):
        for chosen in (None, mask, wide_mask):
            found = standardized(given, mask=chosen)
            assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(found.double(), by_definition(x, chosen), rtol=2e-7, atol=1e-7)
    rows = torch.tensor([[1.0], [3.0]], dtype=dtype).expand(2, 3)
    assert standardized(rows, eps=0).tolist() == [[-1.0] * 3, [1.0] * 3]
    columns = torch.tensor([True, False, True]).expand(2, 3)
    assert standardized(rows, mask=columns, eps=0).tolist() == [
        [-1.0, 0.0, -1.0],
        [1.0, 0.0, 1.0],
    ]


DIMENSIONS = [0, 1, 2, -1, -3, (0,), (0, 2), (2, 0), (-1, 1), (0, 1, 2), [1]]
OPTIONS = [
    {},
    {"correction": 1},
    {"correction": 2.5, "eps": 0.1},
    {"scale": False},
    {"scale": False, "leave_one_out": True},
]


def by_loop(x: Tensor, mask: Tensor | None, dim: Any, options: dict[str, Any]) -> Tensor:
    """Each slice by itself, in float64, of the unmasked entries alone."""
    dims = [dim] if isinstance(dim, int) else [*range(x.dim())] if dim is None else dim
    dims = [each % x.dim() for each in dims]
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    result = torch.zeros(x.shape, dtype=torch.float64)
    for index in np.ndindex(*[1 if each in dims else size for each, size in enumerate(x.shape)]):
        place = tuple(slice(None) if each in dims else number for each, number in enumerate(index))
        entries = x[place][mask[place]].double()
        n = len(entries)
        if n < 2:
            continue
        centred = entries - entries.mean()
        if options.get("leave_one_out"):
            centred = torch.stack([entries[i] - (entries.sum() - entries[i]) / (n - 1) for i in range(n)])
        elif options.get("scale", True):
            std = (centred.square().sum() / max(n - options.get("correction", 0), 1)).sqrt()
            centred = centred / (std + options.get("eps", 1e-8))
        result[place] = result[place].masked_scatter(mask[place], centred)
    return result


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_each_slice_by_itself(options, masked):
    for seed, dim in enumerate([None, *DIMENSIONS]):
        x, mask = data((3, 4, 5), seed=seed)
        mask[0], mask[:, 1], mask[:, :, 2] = False, False, False
        mask[2, 3, 4] = mask[2, 0, 2] = mask[1, 1, 1] = True
        chosen = mask if masked else None
        given, g = (spoilt(x, mask, NAN) if masked else x), data((3, 4, 5), seed=50 + seed)[0]
        leaf = given.clone().requires_grad_()
        found = standardized(leaf, mask=chosen, dim=dim, **options)
        assert found.shape == x.shape
        wanted_leaf = x.clone().requires_grad_()
        wanted = by_loop(wanted_leaf, chosen, dim, options)
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
        gradients = [torch.autograd.grad(y, each, g)[0] for y, each in ((found, leaf), (wanted, wanted_leaf))]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        single = standardized(given.float(), mask=chosen, dim=dim, **options)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), by_loop(x.float(), chosen, dim, options), rtol=2e-7, atol=1e-7)


def test_groups_of_answers():
    """GRPO: answers of equal reward, among others, are zeros without a gradient; a NaN stays in its group."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [NAN, 1.0, 2.0, 3.0]], requires_grad=True)
    found = standardized(rewards, dim=1)
    assert found[:2].tolist() == [[1.0, -1.0, -1.0, 1.0], [0.0] * 4]
    assert found[2].isnan().all()
    g = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)
    (first,) = torch.autograd.grad(found, rewards, g, create_graph=True)
    assert first[1].tolist() == [0.0] * 4
    (second,) = torch.autograd.grad(first[1].sum(), rewards)
    assert second[1].tolist() == [0.0] * 4
    assert standardized(torch.tensor(3.0), dim=0) == standardized(torch.tensor(3.0), dim=-1) == 0
    alone = standardized(torch.tensor([[5.0], [7.0]]), dim=1, scale=False, leave_one_out=True)
    assert alone.tolist() == [[0.0], [0.0]]
    assert standardized(torch.ones(3, 0, dtype=torch.float16), dim=1).dtype == torch.float32


def test_large_advantages_keep_their_digits():
    """1e6 ± 1 in float32, whose squares float32 cannot add; and far larger numbers in float64."""
    x = 1e6 + torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    wanted = by_definition(x)
    torch.testing.assert_close(standardized(x).double(), wanted, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(standardized(x.double()), wanted, rtol=1e-13, atol=1e-13)
    for factor in (1e300, 1e-300, 1e30, 1e-30):
        scaled = standardized((x - 1e6).double() * factor, eps=0)
        torch.testing.assert_close(scaled, wanted, rtol=1e-7, atol=1e-7)
    half = torch.tensor([60000.0, -60000.0, 0.0], dtype=torch.float16)
    torch.testing.assert_close(standardized(half).double(), by_definition(half), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_entries(dtype):
    """PyTorch adds up the parts of each thread."""
    x = (torch.randn(100_003, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 2).to(dtype)
    mask = torch.arange(100_003) % 7 > 2
    mask[:20_000] = False
    for chosen in (None, mask):
        found = gs.standardize(x, mask=chosen)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-7
        torch.testing.assert_close(found.double(), by_definition(x, chosen), rtol=tolerance, atol=tolerance)
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        torch.testing.assert_close(gs.standardize(x, mask=chosen), found, rtol=tolerance, atol=tolerance)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [0.1, 0.0, 1e30, -7.25])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_equal_entries_are_zeros_without_gradient(value, eps):
    mask = torch.tensor([[True, False, True], [False, True, True]])
    one = torch.tensor([[False, True, False], [False, False, False]])
    none = torch.zeros(2, 3, dtype=torch.bool)
    for dtype in (torch.float32, torch.float64):
        for chosen in (mask, one, none, None):
            fill = torch.full((2, 3), value, dtype=dtype)
            x = fill if chosen is None else torch.where(chosen, fill, NAN)
            leaf = x.clone().requires_grad_()
            found = gs.standardize(leaf, mask=chosen, eps=eps)
            (gradient,) = torch.autograd.grad(found, leaf, torch.arange(6.0, dtype=dtype).view(2, 3))
            assert found.tolist() == gradient.tolist() == [[0.0] * 3] * 2


def test_empty_tensors():
    for shape in ((0,), (3, 0), (0, 4)):
        x = torch.ones(shape, dtype=torch.float16).requires_grad_()
        for mask in (None, torch.ones(shape, dtype=torch.bool)):
            found = gs.standardize(x, mask=mask)
            assert found.shape == shape
            assert found.dtype == torch.float32
    assert gs.standardize(torch.tensor(3.0)) == 0
    assert gs.standardize(torch.tensor(3.0), mask=torch.tensor(True)) == 0


def test_nan_reaches_every_unmasked_entry():
    x, mask = data()
    for value in (NAN, INF):
        x[4, 3] = value
        found = standardized(x, mask=mask)
        assert found[mask].isnan().all()
        assert (found[~mask] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_gradients(masked):
    x, mask = data()
    mask = mask if masked else None
    g, h = data(seed=1)[0], data(seed=2)[0]
    leaf = (spoilt(x, mask, NAN) if masked else x).clone().requires_grad_()
    found = gs.standardize(leaf, mask=mask, eps=0.1)
    (first,) = torch.autograd.grad((found * g).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * h).sum(), leaf)

    truth_leaf = x.clone().requires_grad_()
    counted = truth_leaf if mask is None else truth_leaf[mask]
    plain = (counted - counted.mean()) / (counted.std(unbiased=False) + 0.1)
    weights = g.flatten() if mask is None else g[mask]
    (wanted,) = torch.autograd.grad((plain.flatten() * weights).sum(), truth_leaf, create_graph=True)
    (wanted_second,) = torch.autograd.grad((wanted * h).sum(), truth_leaf)
    torch.testing.assert_close(first, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, wanted_second, rtol=1e-12, atol=1e-12)
    if masked:
        assert (first[~mask] == 0).all()

    (by_kernel,) = torch.autograd.grad(gs.standardize(leaf, mask=mask, eps=0.1), leaf, g)
    torch.testing.assert_close(by_kernel, wanted.detach(), rtol=1e-12, atol=1e-12)
    (batched,) = torch.autograd.grad(
        gs.standardize(leaf, mask=mask, eps=0.1), leaf, torch.stack([g, h]), is_grads_batched=True
    )
    torch.testing.assert_close(batched[0], wanted.detach(), rtol=1e-12, atol=1e-12)

    tangent = torch.func.jvp(lambda x: gs.standardize(x, mask=mask, eps=0.1), (x,), (h,))[1]
    torch.testing.assert_close((tangent * g).sum(), (wanted * h).sum(), rtol=1e-12, atol=1e-12)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(gs.standardize(forward_ad.make_dual(x, h), mask=mask, eps=0.1))
        torch.testing.assert_close(dual.tangent, tangent, rtol=1e-12, atol=1e-12)
    by_func = torch.func.grad(lambda x: (gs.standardize(x, mask=mask, eps=0.1) * g).sum())(x)
    torch.testing.assert_close(by_func, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_gradients_of_each_dtype(dtype, eps):
    """Against float64: large entries, several parts, views, NaN in masked entries and gradients."""
    generator = torch.Generator().manual_seed(0)
    for shape, offset, factor in (((40, 700), 0.0, 1.0), ((5, 4), 1e4, 1.0), ((5, 4), 0.0, 1e300), ((6,), 0.0, 1e-300)):
        x = ((torch.randn(shape, generator=generator, dtype=torch.float64) + offset) * factor).to(dtype)
        if not x.isfinite().all() or (x == x.flatten()[0]).all():
            continue  # a range beyond the dtype
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        mask = torch.rand(shape, generator=generator) < 0.7
        mask.view(-1)[:2] = True
        for chosen in (None, mask):
            given = x if chosen is None else spoilt(x, mask, NAN)
            truth = x.double().requires_grad_()
            with RejectReads():
                wide = gs.standardize(truth, mask=chosen, eps=eps)
            (wanted,) = torch.autograd.grad(wide, truth, g)
            leaf = given.repeat_interleave(2, -1)[..., ::2].requires_grad_()
            found = gs.standardize(leaf, mask=chosen, eps=eps)
            upstream = (g if chosen is None else spoilt(g, mask, NAN)).to(found.dtype)
            (gradient,) = torch.autograd.grad(found, leaf, upstream)
            assert gradient.dtype == dtype
            atol = wanted.abs().max().item() * (1e-11 if dtype == torch.float64 else 1e-6)
            eps_of_dtype = torch.finfo(dtype).eps
            torch.testing.assert_close(gradient.double(), wanted.to(dtype).double(), rtol=eps_of_dtype, atol=atol)


@pytest.mark.parametrize("dtype", FLOATS)
def test_changes_in_place_and_inference_mode(dtype):
    leaf, g = torch.randn(5, dtype=dtype, requires_grad=True), torch.randn(5)
    x = leaf * 1
    found = gs.standardize(x)
    x.mul_(2)
    wanted = torch.autograd.grad(gs.standardize(leaf), leaf, g.to(found.dtype))
    assert torch.equal(*torch.autograd.grad(found, leaf, g.to(found.dtype)), *wanted)
    leaf = torch.randn(5).requires_grad_()
    with torch.inference_mode():
        mask = torch.ones(5, dtype=torch.bool)
    gs.standardize(leaf, mask=mask).square().sum().backward()
    assert leaf.grad.abs().max() < 1e-5  # the sum of squares is a constant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tracer_sees_no_cut(dtype):
    model, x = torch.nn.Linear(3, 2, dtype=dtype), data((5, 3), dtype)[0]
    return_scale = gs.ReturnScale()
    with gs.GradientTracer() as tracer:
        returns = model(x)
        loss = (gs.standardize(returns, mask=returns > -9) + returns / return_scale(returns)).square().sum()
    assert not gs.diagnose_gradients(loss, model, tracer=tracer).findings


@pytest.mark.compiled
@pytest.mark.parametrize(("masked", "backend"), [(False, "aot_eager"), (True, "aot_eager"), (True, "inductor")])
def test_compiled_standardize(masked, backend):
    x, mask = data(dtype=torch.float32)
    mask, g = mask if masked else None, data(seed=1)[0].float()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        found = function(leaf, mask)
        return found.detach(), torch.autograd.grad(found, leaf, g[: len(x)])[0]

    function = gs_standardize
    wanted = run(x)
    torch._dynamo.reset()
    function = torch.compile(gs_standardize, fullgraph=True, backend=backend)
    for found, truth in zip(run(x), wanted, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)
    traced = make_fx(gs_standardize)(x, mask)
    torch.testing.assert_close(traced(x, mask), wanted[0])


def gs_standardize(x: Tensor, mask: Tensor | None) -> Tensor:
    return gs.standardize(x, mask=mask)


@pytest.mark.compiled
def test_an_eps_that_changes_does_not_recompile():
    x, mask = data()
    calls = [(x, mask, eps) for eps in (1e-8, 0.1, 0.2, 0.3, 0.4)]
    assert graphs_of(lambda x, mask, eps: gs.standardize(x, mask=mask, eps=eps), calls) <= 2


@pytest.mark.compiled
def test_shapes_that_change_compile_twice():
    calls = [data((rows, 4)) for rows in (5, 6, 7, 8)]
    assert graphs_of(gs_standardize, calls) <= 2


@pytest.mark.compiled
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("options", [{}, {"correction": 1}, {"scale": False, "leave_one_out": True}])
def test_compiled_vmap_of_groups_that_change(options, dynamic):
    function = functools.partial(gs.standardize, **options)
    torch._dynamo.reset()
    mapped = torch.compile(torch.func.vmap(function), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    by_dim = torch.compile(lambda x: function(x, dim=1), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (4, 6, 7, 9):
        x, mask = data((3, size), seed=size)
        for call in (mapped, by_dim):
            torch.testing.assert_close(call(x), by_loop(x, None, 1, options), rtol=1e-12, atol=1e-12)
    masked = torch.compile(
        torch.func.vmap(lambda x, mask: function(x, mask=mask)), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for size in (4, 6, 7, 9):
        x, mask = data((3, size), seed=size)
        torch.testing.assert_close(masked(x, mask), by_loop(x, mask, 1, options), rtol=1e-12, atol=1e-12)


@pytest.mark.compiled
def test_standardize_in_contexts():
    x, mask = data()
    x = spoilt(x, mask, NAN)
    wanted = by_definition(x, mask)
    rows = torch.stack([by_definition(*row) for row in zip(x, mask, strict=True)])
    torch.testing.assert_close(torch.func.vmap(gs_standardize)(x, mask), rows)
    over_masks = torch.func.vmap(lambda mask: gs.standardize(x, mask=mask))(torch.stack([mask & False, mask]))
    torch.testing.assert_close(over_masks, torch.stack([torch.zeros_like(x), wanted]))
    full = data()[0]
    torch.testing.assert_close(
        torch.func.vmap(gs.standardize, in_dims=1, out_dims=1)(full),
        torch.stack([by_definition(column) for column in full.t()], 1),
    )
    with torch.inference_mode():
        torch.testing.assert_close(gs_standardize(x.clone(), mask), wanted)
    with torch.no_grad():
        assert not gs_standardize(x.clone().requires_grad_(), mask).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gs_standardize(x, mask), wanted)
        assert gs_standardize(x.bfloat16(), mask).dtype == torch.float32
    module = torch.nn.Module()
    module.forward = gs_standardize
    torch.testing.assert_close(torch.export.export(module, (x, mask)).module()(x, mask), wanted)
    with RejectReads():
        gs_standardize(x, mask)
        gs.standardize(x)
    meta = gs.standardize(x.to("meta"), mask=mask.to("meta"))
    assert meta.shape == x.shape
    assert type(gs.standardize(full.as_subclass(Named))) is Named


def test_standardize_without_float64(monkeypatch):
    x, mask = data(dtype=torch.float32)
    assert_same_without(monkeypatch, lambda: [gs.standardize(x), gs.standardize(x, mask=mask)])
    assert_same_without(monkeypatch, lambda: gs.standardize((x - 2) * 1e25))


@pytest.mark.parametrize(
    ("x", "changes", "error", "words"),
    [
        ([1.0], {}, TypeError, r"x must be a tensor, but it is of type list; convert x: torch.tensor\(x\)$"),
        (np.ones(2), {}, TypeError, r"x must be a tensor, .* torch.as_tensor\(x\)$"),
        (torch.ones(2).long(), {}, TypeError, r"x must be float64, .* dtype is torch.int64; write x.float\(\)$"),
        (torch.ones(2).bool(), {}, TypeError, r"dtype is torch.bool; write x.float\(\)$"),
        (torch.ones(2) * 1j, {}, TypeError, r"dtype is torch.complex64; write x.real$"),
        (torch.ones(2).to_sparse(), {}, TypeError, r"x must be dense, .* write .to_dense\(\)$"),
        (torch.ones(2), {"mask": [True, False]}, TypeError, "mask must be a bool tensor, but it is of type list"),
        (torch.ones(2), {"mask": torch.ones(2)}, TypeError, r"dtype is torch.float32; write mask.bool\(\)$"),
        (torch.ones(2, 3), {"mask": torch.ones(3, 2) > 0}, ValueError, r"\(2, 3\), but it has \(3, 2\); write mask.T$"),
        (torch.ones(2, 3), {"mask": torch.ones(2, 1) > 0}, ValueError, r"mask must have the shape of x, \(2, 3\), but"),
        (torch.ones(2), {"mask": (torch.ones(2) > 0).to("meta")}, ValueError, "mask must be on the device of x, cpu"),
        (torch.ones(2), {"eps": -1e-8}, ValueError, "eps must be finite and at least 0, but it is -1e-08"),
        (torch.ones(2), {"eps": NAN}, ValueError, "eps must be finite and at least 0, but it is nan"),
        (torch.ones(2), {"eps": "1"}, TypeError, "eps must be a number, but it is of type str"),
        (torch.ones(2), {"eps": True}, TypeError, "eps must be a number, but it is of type bool"),
        (torch.ones(2), {"correction": -1}, ValueError, "correction must be finite and at least 0, but it is -1.0"),
        (torch.ones(2), {"correction": INF}, ValueError, "correction must be finite and at least 0, but it is inf"),
        (torch.ones(2), {"correction": None}, TypeError, "correction must be a number, but it is of type NoneType"),
        (torch.ones(2), {"scale": 1}, TypeError, "scale must be True or False, but it is of type int"),
        (torch.ones(2), {"scale": False, "leave_one_out": 1}, TypeError, "leave_one_out must be True or False"),
        (torch.ones(2), {"leave_one_out": True}, ValueError, "leave_one_out=True has no .* write scale=False$"),
        (torch.ones(2), {"dim": 1}, ValueError, "dim must be from -1 to 0 for x of 1 dimensions, but it is 1$"),
        (torch.ones(2, 3), {"dim": (0, -3)}, ValueError, r"dim must be from -2 to 1 .*, but it is \(0, -3\)$"),
        (torch.ones(2, 3), {"dim": (1, -1)}, ValueError, r"dim must name each dimension once, .* is \(1, -1\)"),
        (torch.ones(2), {"dim": ()}, ValueError, r"and at least one, but it is \(\); None names all"),
        (torch.ones(2), {"dim": 0.0}, TypeError, "dim must be an integer, .* but it is 0.0$"),
        (torch.ones(2), {"dim": (True,)}, TypeError, r"dim must be an integer, .* but it is \(True,\)$"),
        (torch.ones(2), {"process_group": 1}, TypeError, "process_group must be a torch.distributed.ProcessGroup or"),
    ],
)
def test_wrong_arguments_of_standardize(x, changes, error, words):
    with pytest.raises(error, match=f"^standardize: .*{words}"):
        gs.standardize(x, **changes)


# ---- ReturnScale ----------------------------------------------------------------------------------------------------


def running_scales(calls: list[tuple[Tensor, Tensor | None]], **options: Any) -> list[tuple[float, float]]:
    """(scale, offset) after each call, by NumPy."""
    low, high = options.get("low", 0.05), options.get("high", 0.95)
    decay, minimum = options.get("decay", 0.99), options.get("minimum", 1.0)
    running, updates, found = np.zeros(2), 0, []
    for returns, mask in calls:
        entries = returns.double() if mask is None else returns.double()[mask]
        entries = entries[entries.isfinite()].numpy()
        if entries.size:
            running, updates = decay * running + (1 - decay) * np.quantile(entries, [low, high]), updates + 1
        shown = running / (1 - decay**updates) if options.get("debias") and updates else running
        found.append((max(minimum, shown[1] - shown[0]), shown[0]))
    return found


def scale_calls(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor | None]]:
    calls: list[tuple[Tensor, Tensor | None]] = [data((4, 6), dtype, seed) for seed in range(3)]
    calls += [(calls[0][0] * 50, None), (calls[1][0], torch.zeros(4, 6, dtype=torch.bool)), data((7,), dtype)]
    spoilt_returns = spoilt(*data((4, 6), dtype, 4), NAN)
    spoilt_returns[0, 1:3] = torch.tensor([INF, -INF])
    calls += [(spoilt_returns, None), (torch.full((3,), NAN, dtype=dtype), None), (torch.ones(0, 3, dtype=dtype), None)]
    calls += [(torch.tensor(5.0, dtype=dtype), None), data((2, 3, 4), dtype)]
    return calls


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"debias": True},
        {"decay": 0.0, "minimum": 0.0},
        {"decay": 0, "minimum": 0, "debias": True},
        {"low": 0.0, "high": 1.0, "decay": 0.5, "minimum": 0.1, "debias": True},
        {"low": 0.31, "high": 0.4, "decay": 0.7, "minimum": 1e-3},
    ],
)
def test_running_percentiles(options, dtype):
    module = gs.ReturnScale(**options)
    assert (float(module.scale), float(module.offset)) == (float(torch.tensor(options.get("minimum", 1.0))), 0.0)
    calls = scale_calls(dtype)
    seen = []
    for (returns, mask), (scale, offset) in zip(calls, running_scales(calls, **options), strict=True):
        with RejectReads():
            found = module(returns, mask)
        seen.append((found, float(found)))
        assert not found.requires_grad
        for result, wanted in ((found, scale), (module.scale, scale), (module.offset, offset)):
            assert (result.dtype, result.shape) == (torch.float32, ())
            assert float(result) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert all(float(tensor) == number for tensor, number in seen)  # later calls do not change earlier results
    state = module.state_dict()
    evaluated = module.eval()(calls[0][0] * 100)
    assert evaluated == seen[-1][0]
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_return_scale_of_another_project():
    """Percentiles by JAX, and the running ones as DreamerV3 computes them."""
    oracle = json.loads((Path(__file__).parent / "oracles" / "return_scale.json").read_text())
    options = {name: oracle[name] for name in ("low", "high", "decay")}
    modules = {"running": gs.ReturnScale(**options), "debiased": gs.ReturnScale(**options, debias=True)}
    alone = functools.partial(gs.ReturnScale, **options | {"decay": 0.0, "minimum": 0.0})
    for returns, mask, wanted in zip(oracle["returns"], oracle["mask"], oracle["calls"], strict=True):
        returns, mask = torch.tensor(returns, dtype=torch.float64), torch.tensor(mask)
        for name, module in modules.items():
            scale = module(returns, mask)
            low, high = wanted[name]
            assert float(scale) == pytest.approx(max(1.0, high - low), rel=1e-6)
            assert float(module.offset) == pytest.approx(low, rel=1e-6)
        if wanted["percentiles"] is not None:
            module = alone()
            module(returns, mask)
            torch.testing.assert_close(
                module.running_percentiles,
                torch.tensor(wanted["percentiles"], dtype=torch.float64),
                rtol=1e-12,
                atol=1e-12,
            )


def test_copies_and_states_of_a_return_scale():
    module = gs.ReturnScale(decay=0.5, debias=True)
    module(data()[0])
    other = gs.ReturnScale(decay=0.5, debias=True)
    other.load_state_dict(module.state_dict())
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other]
    assert not list(module.parameters())
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float64, torch.int64}
    before = module.scale
    for number, each in enumerate(copies):
        assert torch.equal(each.scale, before)
        each(data(seed=5)[0] * (10 + number))
    assert torch.equal(module.scale, before)
    assert len({float(each.scale) for each in copies}) == 3
    assert repr(module) == "ReturnScale(low=0.05, high=0.95, decay=0.5, minimum=1.0, debias=True)"
    half = copy.deepcopy(module).half()
    assert half.running_percentiles.dtype == torch.float64
    assert torch.equal(half.scale, before)
    with torch.device("meta"):
        meta = torch.nn.Sequential(gs.ReturnScale())
    assert meta[0].running_percentiles.is_meta
    built = meta.to_empty(device="cpu")[0]
    assert (float(built.scale), float(built.offset), int(built.num_updates)) == (1.0, 0.0, 0)


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("debias", [False, True])
def test_compiled_return_scale(debias, backend):
    eager = gs.ReturnScale(decay=0.9, debias=debias)
    compiled_module = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(compiled_module, fullgraph=True, backend=backend)
    for seed in range(3):
        returns, mask = data(dtype=torch.float32, seed=seed)
        returns = spoilt(returns, mask, NAN).requires_grad_()
        torch.testing.assert_close(compiled(returns, mask), eager(returns, mask), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(compiled_module.offset, eager.offset, rtol=1e-6, atol=1e-6)
        assert compiled_module.num_updates == seed + 1
    compiled_module.eval()
    torch.testing.assert_close(compiled(returns * 9, mask), eager.scale, rtol=1e-6, atol=1e-6)


@pytest.mark.compiled
def test_return_scale_in_contexts():
    returns, mask = data(dtype=torch.float32)
    ((wanted, offset),) = running_scales([(returns, mask)], decay=0.5)

    def check(call: Callable[[gs.ReturnScale], Tensor]) -> None:
        module = gs.ReturnScale(decay=0.5)
        assert float(call(module)) == pytest.approx(wanted, rel=1e-6)
        assert float(module.offset) == pytest.approx(offset, rel=1e-6)

    check(lambda module: torch.no_grad()(module)(returns, mask))
    check(lambda module: torch.inference_mode()(module)(returns, mask).clone())
    check(lambda module: torch.autocast("cpu", dtype=torch.bfloat16)(module)(returns, mask))
    check(lambda module: module(returns.clone().requires_grad_() * 1, mask=mask))
    leaf = returns.clone().requires_grad_()
    advantages = leaf / gs.ReturnScale(decay=0.5)(leaf, mask)
    (gradient,) = torch.autograd.grad(advantages.sum(), leaf)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 1 / wanted))
    module = gs.ReturnScale()
    with RejectReads():
        module(returns, mask)
        module(returns)
        assert module.scale.shape == module.offset.shape == ()


def test_return_scale_without_float64(monkeypatch):
    returns, mask = data(dtype=torch.float32)

    def run() -> list[Tensor]:
        module = gs.ReturnScale(decay=0.5, debias=True)
        return [module(returns, mask), module(returns), module.offset]

    assert_same_without(monkeypatch, run)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"low": 5, "high": 95},
            ValueError,
            "must be fractions .* they are 5.0 and 95.0; write low=0.05 and high=0.95$",
        ),
        ({"low": -0.1}, ValueError, "low and high must be fractions .*, but they are -0.1 and 0.95$"),
        ({"low": 0.5, "high": 0.5}, ValueError, "low and high must be fractions .* 0.5 and 0.5$"),
        ({"high": NAN}, ValueError, "low and high must be fractions"),
        ({"decay": 1.0}, ValueError, "decay must be at least 0 and below 1, but it is 1.0"),
        ({"decay": -0.1}, ValueError, "decay must be at least 0 and below 1, but it is -0.1"),
        ({"minimum": -1}, ValueError, "minimum must be finite and at least 0, but it is -1.0"),
        ({"minimum": None}, TypeError, "minimum must be a number, but it is of type NoneType"),
        ({"debias": 1}, TypeError, "debias must be True or False, but it is of type int"),
        ({"process_group": "world"}, TypeError, "process_group must be a torch.distributed.ProcessGroup or None"),
    ],
)
def test_wrong_arguments_of_return_scale(options, error, words):
    with pytest.raises(error, match=f"^ReturnScale: .*{words}"):
        gs.ReturnScale(**options)


@pytest.mark.parametrize(
    ("returns", "mask", "error", "words"),
    [
        ([1.0], None, TypeError, "returns must be a tensor, but it is of type list"),
        (torch.ones(2).int(), None, TypeError, r"dtype is torch.int32; write returns.float\(\)$"),
        (torch.ones(2), torch.ones(2), TypeError, r"mask must be a bool tensor, .* write mask.bool\(\)$"),
        (torch.ones(2), torch.ones(3) > 0, ValueError, r"the shape of returns, \(2,\), but it has \(3,\)"),
        (torch.ones(2, device="meta"), None, ValueError, "returns must be on the device of the module, cpu"),
    ],
)
def test_wrong_returns(returns, mask, error, words):
    with pytest.raises(error, match=f"^ReturnScale: .*{words}"):
        gs.ReturnScale()(returns, mask)


def test_contexts_without_updates():
    return_scale, returns = gs.ReturnScale(), torch.randn(2, 4)
    with pytest.raises(
        NotImplementedError, match=r"^ReturnScale: .*vmap.*; call it outside with all returns, or use ev"
    ):
        torch.func.vmap(return_scale)(returns)
    with pytest.raises(
        NotImplementedError, match=r"^ReturnScale: .* from tensors of another transform of torch.func; call"
    ):
        torch.func.grad(lambda x: (x / return_scale(x)).sum())(returns)
    assert return_scale.num_updates == 0
    return_scale(returns)
    assert torch.func.vmap(return_scale.eval())(returns).tolist() == [return_scale.scale] * 2
    with torch.inference_mode():
        return_scale = gs.ReturnScale()
        return_scale(returns)
    with pytest.raises(RuntimeError, match=r"^ReturnScale: the module was made in inference mode, .*; make it outside"):
        return_scale(returns)
    assert return_scale.num_updates == 1


# ---- Several ranks --------------------------------------------------------------------------------------------------

check = Checks()
RANKS = 2


def parts(tensor: Tensor) -> list[Tensor]:
    """The entries of each rank, of different shapes."""
    return [tensor[:2], tensor[2:].t()]


@check
def ranks_standardize_as_one(rank: int) -> None:
    group = dist.group.WORLD
    x, mask = data()
    for shift in (0.0, 1e6):
        for chosen in (None, mask, torch.arange(5)[:, None].expand(5, 4) < 2, mask & False):
            given = x + shift if chosen is None else spoilt(x + shift, chosen, NAN)
            wanted = parts(gs.standardize(given, mask=chosen, eps=0.1))[rank]
            own = None if chosen is None else parts(chosen)[rank]
            found = gs.standardize(parts(given)[rank], mask=own, eps=0.1, process_group=group)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-9 if shift else 1e-12)
    equal = gs.standardize(torch.full((3,), 0.1), eps=0.0, process_group=group)
    assert equal.tolist() == [0.0] * 3
    for options in OPTIONS:
        wanted = parts(by_loop(x, mask, None, options))[rank]
        found = gs.standardize(
            parts(spoilt(x, mask, NAN))[rank], mask=parts(mask)[rank], process_group=group, **options
        )
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"^standardize: process_group .* but dim is given; leave out one"):
        gs.standardize(x, dim=1, process_group=group)
    level = gs.standardize(torch.full((3,), float(rank)), eps=0.0, process_group=group)
    assert level.tolist() == [-1.0 + 2 * rank] * 3
    nothing = gs.standardize(x[: 2 * rank], process_group=group)  # rank 0 has no entries
    torch.testing.assert_close(nothing, by_definition(x[:2])[: 2 * rank])


def compare_gradients_of_entries(rank: int, backend: str) -> None:
    """The entries of other ranks are constants."""
    group = dist.group.WORLD
    x, mask = data()
    g = data(seed=1)[0]

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = parts(x)[rank].clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, parts(g)[rank])[0]

    def from_the_whole(own: Tensor) -> Tensor:
        rows = [own if other == rank else part for other, part in enumerate(parts(x))]
        entries, flags = torch.cat([rows[0], rows[1].t()]), mask
        return parts(gs.standardize(entries, mask=flags))[rank]

    wanted = gradient(from_the_whole)

    def by_ranks(own: Tensor) -> Tensor:
        return gs.standardize(own, mask=parts(mask)[rank], process_group=group)

    torch.testing.assert_close(gradient(by_ranks), wanted, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
    compiled = torch.compile(by_ranks, fullgraph=True, backend=backend)
    torch.testing.assert_close(gradient(compiled), wanted, rtol=1e-12, atol=1e-12)
    own = parts(x)[rank].clone()
    by_func = torch.func.grad(lambda own: (by_ranks(own) * parts(g)[rank]).sum())(own)
    torch.testing.assert_close(by_func, wanted, rtol=1e-12, atol=1e-12)


check["the entries of other ranks are constants"] = functools.partial(compare_gradients_of_entries, backend="aot_eager")


@check
def one_collective(rank: int) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    x, _ = data()
    scale = gs.ReturnScale(process_group=dist.group.WORLD)
    with CommDebugMode() as calls:
        gs.standardize(x, process_group=dist.group.WORLD)
    assert calls.get_total_counts() == 1
    with CommDebugMode() as calls:
        scale(x)
    assert calls.get_total_counts() == 1
    scale.eval()
    with CommDebugMode() as calls:
        scale(x)
    assert calls.get_total_counts() == 0


@check
def a_group_inside_of_vmap_is_refused(rank: int) -> None:
    """vmap would stack the results of collectives before they have arrived."""
    group = dist.group.WORLD
    x, mask = data()

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return gs.reduce_multi_step(x[None], mask=mask[None], reduction="valid_mean", process_group=group).loss

    cases: dict[str, Callable[..., Tensor]] = {
        "standardize": lambda x, mask: gs.standardize(x, mask=mask, process_group=group),
        "multi_step(_loss)?": loss,
    }

    def total(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, mask: function(x, mask).sum()

    for name, function in cases.items():
        for mapped in (torch.func.vmap(function), torch.func.vmap(torch.func.grad(total(function)))):
            for call in (mapped, torch.compile(mapped, fullgraph=True, backend="aot_eager")):
                torch._dynamo.reset()
                with pytest.raises(Exception, match=f"{name}: process_group cannot .* of torch.func.vmap, which does"):
                    call(x, mask)


@check
def ranks_have_one_return_scale(rank: int) -> None:
    modules = [gs.ReturnScale(decay=0.5, minimum=0.1, process_group=dist.group.WORLD) for _ in range(2)]
    torch._dynamo.reset()
    calls: list[Callable[..., Tensor]] = [modules[0], torch.compile(modules[1], fullgraph=True, backend="aot_eager")]
    alone = gs.ReturnScale(decay=0.5, minimum=0.1)
    assert copy.deepcopy(modules[0])._group == modules[0]._group
    for seed in range(3):
        returns, mask = data((4, 6), seed=seed)
        mask[:2] &= seed != 1  # rank 0 has no entries in the second call
        returns = spoilt(returns, mask, NAN)
        wanted = alone(returns, mask)
        own = slice(2 * rank, 2 * rank + 2)
        for call, module in zip(calls, modules, strict=True):
            torch.testing.assert_close(call(returns[own], mask[own]), wanted)
            torch.testing.assert_close(module.running_percentiles, alone.running_percentiles, rtol=1e-12, atol=1e-12)


outcomes = check.outcomes(RANKS)


@one_server
@pytest.mark.parametrize("name", check)
def test_two_ranks_are_one(name: str, outcomes: Callable[[str], None]) -> None:
    outcomes(name)


@one_server
@pytest.mark.any_version
@pytest.mark.compiled
def test_collectives_compiled_by_inductor(tmp_path: Path) -> None:
    by_inductor = functools.partial(compare_gradients_of_entries, backend="inductor")
    run_in_processes(RANKS, {"inductor": by_inductor}, tmp_path)
    assert_passed("inductor", RANKS, tmp_path)
