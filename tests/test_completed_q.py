"""The policy target of Gumbel MuZero, against sums over the actions of each row in Python, and against mctx."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_normalization import RejectReads, graphs_of
from test_without_float64 import assert_same_without
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gradscale_ext as gs

NAN, INF = math.nan, math.inf
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def data(seed: int = 0, batch: int = 8, actions: int = 5) -> list[Tensor]:
    """Rows without visits, with visits everywhere, with illegal actions, and with nothing legal."""
    g = torch.Generator().manual_seed(seed)
    logits, q = (torch.randn(batch, actions, generator=g, dtype=torch.float64) * 2 for _ in range(2))
    counts = torch.randint(9, (batch, actions), generator=g) * (torch.rand(batch, actions, generator=g) < 0.6)
    counts[0], counts[1] = 0, torch.arange(1, actions + 1)
    logits[2:4, 1:3] = -INF
    logits[4] = -INF
    counts[3] = torch.tensor([2, 7, 0, 0, 1])
    return [logits, q, counts, torch.randn(batch, generator=g, dtype=torch.float64)]


def by_definition(given: list[Tensor], **options: Any) -> Tensor:
    offset, factor, eps = (options.get(*pair) for pair in (("visit_offset", 50), ("value_scale", 0.1), ("eps", 1e-8)))
    rows = []
    for logits, q, counts, value in zip(*[tensor.double().tolist() for tensor in given], strict=True):
        legal = [a for a, logit in enumerate(logits) if logit != -INF]
        visited = [a for a in legal if counts[a] > 0]
        weights = [math.exp(logits[a] - max([logits[a] for a in legal])) for a in visited]
        total, visits = sum(weights), sum(counts[a] for a in visited)
        mean = sum(w * q[a] for w, a in zip(weights, visited, strict=True)) / (total or 1.0)
        mixed = (value + visits * mean) / (visits + 1) if options.get("mixed", True) else value
        completed = {a: q[a] if a in visited else mixed for a in legal}
        if options.get("rescale", True) and legal:
            low, span = min(completed.values()), max(completed.values()) - min(completed.values())
            completed = {a: (value - low) / (max(span, eps) or 1.0) for a, value in completed.items()}
        scale = (offset + max([counts[a] for a in visited], default=0)) * factor
        improved = {a: logits[a] + scale * completed[a] for a in legal}
        powers = {a: math.exp(logit - max(improved.values())) for a, logit in improved.items()}
        rows.append([powers.get(a, 0.0) / (sum(powers.values()) or 1.0) for a in range(len(logits))])
    return torch.tensor(rows, dtype=torch.float64)


def spoilt(given: list[Tensor], value: float) -> list[Tensor]:
    """Other numbers where nothing is read: Q without a visit, and Q and visits of illegal actions."""
    logits, q, counts, root = given
    illegal = logits == -INF
    return [logits, torch.where(illegal | (counts == 0), value, q), torch.where(illegal, value, counts.double()), root]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed": False},
        {"rescale": False},
        {"rescale": False, "mixed": False, "value_scale": 1},
        {"visit_offset": 0, "value_scale": 0.5, "eps": 3.0},
        {"eps": 0},
    ],
)
def test_policies_by_definition(options):
    for seed in range(3):
        given = data(seed)
        wanted = by_definition(given, **options)
        assert (wanted[4] == 0).all()
        for value in (0.0, NAN, INF, -INF):
            found = gs.completed_q_policy(*spoilt(given, value), **options)
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)
            assert (found[given[0] == -INF] == 0).all()
        torch.testing.assert_close(gs.completed_q_policy(*given, **options), wanted, rtol=1e-13, atol=1e-14)


def test_policies_of_mctx():
    oracle = json.loads((Path(__file__).parent / "oracles" / "completed_q.json").read_text())
    names = {"maxvisit_init": "visit_offset", "value_scale": "value_scale", "epsilon": "eps"}
    names |= {"rescale_values": "rescale", "use_mixed_value": "mixed"}
    floats = [torch.tensor(oracle[name], dtype=torch.float64) for name in ("prior_logits", "q_values", "value")]
    given = [*floats[:2], torch.tensor(oracle["visit_counts"]), floats[2]]
    for case in oracle["cases"]:
        options = {names[name]: value for name, value in case["options"].items()}
        found = gs.completed_q_policy(*given, **options)
        torch.testing.assert_close(found, torch.tensor(case["result"], dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_prior_probabilities_of_zero():
    """They count as the smallest normal number, so that one visited action alone has its Q as the mean."""
    given = [torch.tensor([-2000.0, 0.0, 0.0]), torch.tensor([3.0, 0.0, 0.0]), torch.tensor([3, 0, 0])]
    for dtype in (torch.float32, torch.float64):
        logits, q, counts, value = *[tensor.to(dtype) for tensor in given], torch.tensor(1.0, dtype=dtype)
        logits[1] = 1.0
        found = gs.completed_q_policy(logits, q, counts, value, rescale=False, visit_offset=0.0, value_scale=1.0)
        mixed = (1 + 3 * 3) / 4
        improved = torch.tensor([-2000 + 9.0, 1 + 3 * mixed, 3 * mixed], dtype=torch.float64).softmax(-1)
        torch.testing.assert_close(found.double(), improved, rtol=1e-6, atol=1e-7)


def test_an_unvisited_value_that_is_nan_reaches_its_row_alone():
    given = data()
    given[3][5] = NAN
    given[3][1] = NAN  # every action has visits
    found = gs.completed_q_policy(*given)
    assert found[5].isnan().any()
    wanted = by_definition([torch.where(t.isnan(), 0.0, t) if t.is_floating_point() else t for t in given])
    others = torch.arange(8) != 5
    torch.testing.assert_close(found[others], wanted[others], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_and_shapes(dtype):
    logits, q, counts, value = data()
    for logits_dtype, q_dtype in ((dtype, dtype), (torch.float32, dtype), (dtype, torch.bfloat16)):
        given = [logits.to(logits_dtype), q.to(q_dtype), counts, value.float()]
        found = gs.completed_q_policy(*given)
        is_double = torch.float64 in (logits_dtype, q_dtype)
        assert found.dtype == (torch.float64 if is_double else torch.float32)
        torch.testing.assert_close(found.double(), by_definition(given), rtol=1e-5, atol=1e-6)
    for counts_dtype in (torch.int32, torch.uint8, torch.float32, torch.float64):
        found = gs.completed_q_policy(logits.float(), q.float(), counts.to(counts_dtype), value.float())
        assert found.dtype == (torch.float64 if counts_dtype == torch.float64 else torch.float32)
    wanted = by_definition([logits, q, counts, value])
    wide = [torch._neg_view(-tensor.repeat_interleave(2, -1)[..., ::2]) for tensor in (logits, q)]
    assert wide[0].is_neg()
    torch.testing.assert_close(gs.completed_q_policy(*wide, counts, value), wanted)
    steps = [tensor.view(2, 4, *tensor.shape[1:]) for tensor in (logits, q, counts, value)]
    torch.testing.assert_close(gs.completed_q_policy(*steps), wanted.view(2, 4, 5))
    torch.testing.assert_close(gs.completed_q_policy(logits[0], q[0], counts[0], value[0]), wanted[0])
    for shape in ((0, 5), (3, 0), (0,)):
        empty = torch.zeros(shape)
        assert gs.completed_q_policy(empty, empty, empty, torch.zeros(shape[:-1])).shape == shape


def test_a_target_of_the_policy_head():
    logits, *rest = data()
    legal = torch.arange(8) != 4
    given = [tensor[legal] for tensor in (logits, *rest)]
    target = gs.completed_q_policy(*given)
    prediction = given[0].clone().requires_grad_()
    heads = {"policy": gs.SoftCrossEntropy()}
    out = gs.multi_step_loss(heads, {"policy": [prediction]}, {"policy": [target]}, reduction="sum", check=True)
    out.loss.backward()
    torch.testing.assert_close(prediction.grad, given[0].softmax(-1) - target)


@pytest.mark.compiled
def test_compiled_policies():
    given = spoilt(data(), NAN)
    wanted = by_definition(data())
    torch._dynamo.reset()
    compiled = torch.compile(gs.completed_q_policy, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), wanted, rtol=1e-12, atol=1e-14)
    singles = [tensor.float() for tensor in given]
    torch.testing.assert_close(compiled(*singles), wanted.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.compiled
def test_numbers_that_change_do_not_recompile():
    def policy(*arguments: Any) -> Tensor:
        given, (offset, scale, eps) = arguments[:4], arguments[4:]
        return gs.completed_q_policy(*given, visit_offset=offset, value_scale=scale, eps=eps)

    calls = [(*data(), 50.0 + k, 0.1 + k / 10, 1e-8 + k) for k in range(5)]
    assert graphs_of(policy, calls) <= 2
    assert graphs_of(gs.completed_q_policy, [tuple(data(batch=batch)) for batch in (8, 9, 10, 11)]) <= 2


@pytest.mark.compiled
def test_contexts():
    given, wanted = data(), by_definition(data())
    traced = make_fx(lambda *given: gs.completed_q_policy(*given))(*given)
    torch.testing.assert_close(traced(*given), wanted)
    module = torch.nn.Module()
    module.forward = gs.completed_q_policy
    torch.testing.assert_close(torch.export.export(module, tuple(given)).module()(*given), wanted)
    torch.testing.assert_close(torch.func.vmap(gs.completed_q_policy)(*given), wanted)
    columns = torch.func.vmap(gs.completed_q_policy, in_dims=(1, None, None, None))
    two = torch.stack([given[0], given[0] * 2], 1)
    torch.testing.assert_close(columns(two, *given[1:])[1], by_definition([given[0] * 2, *given[1:]]))
    with torch.inference_mode():
        torch.testing.assert_close(gs.completed_q_policy(*[tensor.clone() for tensor in given]), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gs.completed_q_policy(*given), wanted)
        singles = [tensor.float() for tensor in given]
        torch.testing.assert_close(gs.completed_q_policy(*singles), wanted.float(), rtol=1e-5, atol=1e-6)
    with RejectReads():
        gs.completed_q_policy(*given)
    assert gs.completed_q_policy(*[tensor.to("meta") for tensor in given]).shape == wanted.shape
    leaf = given[0].clone().requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(gs.completed_q_policy(leaf, *given[1:]), wanted)


def test_without_float64(monkeypatch):
    given = [tensor.float() for tensor in data()]
    assert_same_without(monkeypatch, lambda: gs.completed_q_policy(*given))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prior_logits": np.ones((2, 3))}, TypeError, r"prior_logits must be a tensor, .*torch.as_tensor\(prior_logi"),
        ({"q_values": torch.ones(2, 3).long()}, TypeError, r"q_values must be float64, .*write q_values.float\(\)$"),
        ({"value": torch.ones(2).int()}, TypeError, r"value must be float64, .*write value.float\(\)$"),
        ({"value": 0.5}, TypeError, "value must be a tensor, but it is of type float"),
        ({"visit_counts": torch.ones(2, 3) > 0}, TypeError, r"dtype is torch.bool; write visit_counts.long\(\)$"),
        ({"visit_counts": [[1, 2, 3]]}, TypeError, "visit_counts must be a tensor of integers or floats, but it is of"),
        ({"visit_counts": torch.ones(2, 3) * 1j}, TypeError, "write visit_counts.real$"),
        ({"prior_logits": torch.tensor(1.0)}, ValueError, r"must have shape \[..., A\], but they have no dimensions$"),
        ({"q_values": torch.ones(2, 4)}, ValueError, r"q_values must have shape \[2, 3\], but its shape is \[2, 4\]$"),
        ({"value": torch.ones(2, 1)}, ValueError, r"value .* \[2\], .* is \[2, 1\]; write value.squeeze\(-1\)$"),
        ({"value": torch.ones(2, device="meta")}, ValueError, "value must be on the device of prior_logits, cpu, but"),
        ({"eps": -1.0}, ValueError, "eps must be at least 0, but it is -1.0"),
        ({"visit_offset": INF}, ValueError, "visit_offset must be finite, but it is inf"),
        ({"value_scale": NAN}, ValueError, "value_scale must be finite, but it is nan"),
        ({"value_scale": "1"}, TypeError, "value_scale must be a number, but it is of type str"),
        ({"rescale": 1}, TypeError, "rescale must be True or False, but it is of type int"),
        ({"mixed": None}, TypeError, "mixed must be True or False, but it is of type NoneType"),
        *[
            ({name: torch.ones(shape).requires_grad_()}, ValueError, rf"{name} requires grad, .*{name}.detach\(\)$")
            for name, shape in {"prior_logits": (2, 3), "q_values": (2, 3), "visit_counts": (2, 3), "value": 2}.items()
        ],
    ],
)
def test_wrong_arguments(changes, error, words):
    given = {"prior_logits": torch.ones(2, 3), "q_values": torch.ones(2, 3)}
    given |= {"visit_counts": torch.ones(2, 3).long(), "value": torch.ones(2)}
    with pytest.raises(error, match=f"^completed_q_policy: .*{words}"):
        gs.completed_q_policy(**given | changes)


@pytest.mark.parametrize("name", ["prior_logits", "q_values", "value"])
def test_inputs_have_no_tangent(name):
    given = {"prior_logits": torch.ones(3), "q_values": torch.ones(3), "visit_counts": torch.ones(3)}
    given |= {"value": torch.ones(())}
    function = lambda tensor: gs.completed_q_policy(**given | {name: tensor})
    with pytest.raises(ValueError, match=f"{name} has a tangent of forward mode, .* write {name}.detach"):
        torch.func.jvp(function, (given[name],), (given[name],))
