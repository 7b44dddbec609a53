"""Replicated and sharded DTensors give the same numbers as plain tensors, on one rank and on two."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Checks, one_server
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map

import gradscale_ext as gs

check = Checks()
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0))
B, T = 5, 3  # five samples, which two ranks cannot split evenly
SUPPORT = gs.Support(-5, 5, 11)
HEADS = {
    "value": gs.TwoHot(SUPPORT, weight=0.5),
    "reward": gs.HLGauss(SUPPORT, first_step=1),
    "policy": gs.SoftCrossEntropy(entropy_weight=1e-2),
    "hidden": gs.NegativeCosine(),
}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def spread(tensor: Tensor, placement: Placement | None) -> Tensor:
    """The tensor itself if `placement` is None, otherwise a DTensor with this placement that is a leaf."""
    if placement is None:
        return tensor
    return distribute_tensor(tensor.detach(), mesh(), [placement]).requires_grad_(tensor.requires_grad)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    else:
        torch.testing.assert_close(whole(ours), theirs, rtol=1e-12, atol=1e-12)


def assert_same_output(ours: gs.MultiStepLossOutput, theirs: gs.MultiStepLossOutput) -> None:
    for field in (
        "loss",
        "per_sample",
        "per_step",
        "expected",
        "entropy",
        "head_means",
        "head_losses",
        "head_gradient_norms",
        "max_abs_logit",
    ):
        assert_same(getattr(ours, field), getattr(theirs, field))
    assert whole(ours.num_nonfinite) == theirs.num_nonfinite


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def arguments() -> tuple[dict[str, list[Tensor]], dict[str, Tensor], dict[str, Any]]:
    """Per-step predictions, stacked targets, and options, which are the same on every rank."""
    torch.manual_seed(0)
    sizes = {"value": (T, 11), "reward": (T - 1, 11), "policy": (T, 3), "hidden": (T, 4)}
    predictions = {name: [random(B, size).requires_grad_() for _ in range(t)] for name, (t, size) in sizes.items()}
    targets = {
        "value": random(B, T),
        "reward": random(B, T - 1),
        "policy": random(B, T, 3).softmax(-1),
        "hidden": random(B, T, 4),
    }
    options = {
        "mask": torch.rand(B, T) < 0.7,
        "step_weights": torch.rand(B, T, dtype=torch.float64),
        "importance_weights": torch.rand(B, dtype=torch.float64),
    }
    return predictions, targets, options


def mixture_loss(impl: str, **more: Any) -> None:
    """Compare the loss for every mixture of plain, replicated and sharded predictions, targets and options."""
    kinds = (None, *PLACEMENTS)
    for prediction_kind, target_kind, option_kind in itertools.product(kinds, kinds, kinds):
        predictions, targets, options = arguments()
        expected = gs.multi_step_loss(HEADS, predictions, targets, impl=impl, **options, **more)
        expected.loss.backward()
        given = {name: [spread(entry, prediction_kind) for entry in entries] for name, entries in predictions.items()}
        found = gs.multi_step_loss(
            HEADS,
            given,
            {name: spread(target, target_kind) for name, target in targets.items()},
            impl=impl,
            **{name: spread(option, option_kind) for name, option in options.items()},
            **more,
        )
        assert isinstance(found.loss, DTensor) == (prediction_kind is not None)
        assert_same_output(found, expected)
        wanted = [entry.grad for entries in predictions.values() for entry in entries]
        if prediction_kind is not None:
            found.loss.backward()
            ours = [entry for entries in given.values() for entry in entries]
            for entry, gradient in zip(ours, wanted, strict=True):
                assert entry.grad.placements == entry.placements
                assert_same(entry.grad, gradient)


@check
def fused_loss(rank: int) -> None:
    mixture_loss("auto")


@check
def loss_by_the_reference(rank: int) -> None:
    mixture_loss("reference")


@check
def the_reference_itself(rank: int) -> None:
    predictions, targets, options = arguments()
    expected = gs.reference.multi_step_loss(HEADS, predictions, targets, **options)
    given = {name: [spread(entry, Shard(0)) for entry in entries] for name, entries in predictions.items()}
    assert_same_output(gs.reference.multi_step_loss(HEADS, given, targets, **options), expected)


@check
def compiled_loss(rank: int) -> None:
    predictions, targets, _ = arguments()
    expected = gs.multi_step_loss(HEADS, predictions, targets).loss
    expected.backward()
    given = {name: [spread(entry, Shard(0)) for entry in entries] for name, entries in predictions.items()}

    def loss(predictions: dict[str, list[Tensor]]) -> Tensor:
        return gs.multi_step_loss(HEADS, predictions, targets).loss

    found = torch.compile(loss, backend="aot_eager", fullgraph=True)(given)
    found.backward()
    assert_same(found, expected)
    assert_same(given["value"][0].grad, predictions["value"][0].grad)


@check
def loss_over_valid_entries_with_normalized_weights_and_checks(rank: int) -> None:
    mixture_loss("auto", reduction="valid_mean", normalize_importance_weights=True, check=True)


def policies() -> tuple[dict[str, gs.Head], dict[str, Any], dict[str, Any]]:
    """Heads with targets by field, logits of three actions, means with shared deviations, and values."""
    torch.manual_seed(0)
    heads = {
        "policy": gs.PolicyGradient(entropy_weight=0.1),
        "gaussian": gs.GaussianPolicyGradient(entropy_weight=0.1),
        "value": gs.ClippedSquaredError(clip=0.2),
    }
    predictions = {
        "policy": random(B, 3).requires_grad_(),
        "gaussian": {"means": random(B, 2).requires_grad_(), "log_stds": random(2).requires_grad_()},
        "value": random(B).requires_grad_(),
    }
    rows = {"advantages": random(B), "log_probs": -random(B).abs()}
    targets = {
        "policy": {"actions": torch.randint(3, (B,)), **rows},
        "gaussian": {"actions": random(B, 2), **rows},
        "value": {"returns": random(B), "values": random(B)},
    }
    return heads, predictions, targets


@check
def losses_of_policies(rank: int) -> None:
    """Deviations that all samples share have no dimension to shard."""
    for kind, target_kind, impl in itertools.product(PLACEMENTS, (None, *PLACEMENTS), ("auto", "reference")):
        heads, predictions, targets = policies()
        expected = gs.multi_step_loss(heads, predictions, targets, steps=False)
        expected.loss.backward()
        given = tree_map(lambda x: spread(x, kind if x.shape[0] == B else Replicate()), predictions)  # noqa: B023
        wanted = tree_map(lambda x: spread(x, target_kind), targets)  # noqa: B023
        found = gs.multi_step_loss(heads, given, wanted, steps=False, impl=impl)
        found.loss.backward()
        assert_same_output(found, expected)
        for field in ("log_probs", "approx_kl", "clip_fraction"):
            assert_same(getattr(found, field), getattr(expected, field))
        for ours, other in zip(tree_leaves(given), tree_leaves(predictions), strict=True):
            assert ours.grad.placements == ours.placements
            assert_same(ours.grad, other.grad)


@check
def plain_and_distributed_predictions_in_one_call(rank: int) -> None:
    """Each gradient has the same kind as its tensor."""
    predictions, targets, _ = arguments()
    gs.multi_step_loss(HEADS, predictions, targets).loss.backward()
    kinds = {"value": Shard(0), "reward": None, "policy": Shard(1), "hidden": Replicate()}
    given = {
        name: [spread(p.detach().clone().requires_grad_(), kinds[name]) for p in entries]
        for name, entries in predictions.items()
    }
    gs.multi_step_loss(HEADS, given, targets).loss.backward()
    for name, entries in given.items():
        for ours, theirs in zip(entries, predictions[name], strict=True):
            assert isinstance(ours.grad, DTensor) == (kinds[name] is not None)
            assert_same(ours.grad, theirs.grad)


@check
def stacked_predictions_with_the_steps_first(rank: int) -> None:
    for placement in (*PLACEMENTS, Shard(1)):
        losses = random(T, B).requires_grad_()
        dist.broadcast(losses.data, 0)
        expected = gs.reduce_multi_step(losses, reduction="none", batch_first=False)
        expected.loss.square().sum().backward()
        given = spread(losses, placement)
        found = gs.reduce_multi_step(given, reduction="none", batch_first=False)
        found.loss.square().sum().backward()
        assert_same_output(found, expected)
        assert_same(given.grad, losses.grad)


@check
def second_derivative_of_a_loss(rank: int) -> None:
    for placement in PLACEMENTS:
        predictions, targets, _ = arguments()
        second = []
        for kind in (None, placement):
            x = spread(predictions["value"][0].detach().requires_grad_(), kind)
            loss = gs.multi_step_loss(
                {"value": HEADS["value"]}, {"value": [x]}, {"value": [targets["value"][:, 0]]}
            ).loss
            if kind is not None and TorchVersion(torch.__version__) < "2.12.0a0":
                with pytest.raises(NotImplementedError, match="no second derivatives of DTensors"):
                    torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)
                loss.backward()  # the first derivative is still available
                continue
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            first.square().sum().backward()
            second.append(x.grad)
        assert_same(second[-1], second[0])


@check
def returns(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values, root_values = (torch.randn(B, T + i, generator=generator).double() for i in (0, 0, 1))
    for placement in PLACEMENTS:
        given = [spread(tensor, placement) for tensor in (rewards, values, root_values)]
        ours = gs.generalized_advantages(given[0], given[1], given[1], discount=0.9, lambda_=0.8)
        theirs = gs.generalized_advantages(rewards, values, values, discount=0.9, lambda_=0.8)
        assert_same(ours._asdict(), theirs._asdict())
        leaves = [spread(rewards.clone().requires_grad_(), kind) for kind in (placement, None)]
        parts = [gs.n_step_transitions(leaf, discount=0.9, n=2) for leaf in leaves]
        assert_same(parts[0]._asdict(), parts[1]._asdict())
        for one in parts:
            one.rewards.square().sum().backward()
        assert_same(leaves[0].grad, leaves[1].grad)
        td_steps = torch.arange(B) % 3 + 1
        for horizons in ((1, 1), (spread(td_steps, placement), td_steps)):
            windows = [
                gs.muzero_targets(r, v, num_unroll_steps=2, td_steps=n, discount=0.9)
                for r, v, n in zip((given[0], rewards), (given[2], root_values), horizons, strict=True)
            ]
            assert_same(windows[0]._asdict(), windows[1]._asdict())


@check
def errors_name_the_argument(rank: int) -> None:
    """Errors of shapes show the size of the whole batch, not of a rank's part of it."""
    losses = spread(torch.ones(4, 2), Shard(0))
    with pytest.raises(ValueError, match=r"importance_weights must have shape \[B\] = \[4\], but it has \[3\]"):
        gs.reduce_multi_step(losses, importance_weights=torch.ones(3))
    with pytest.raises(TypeError, match=r"scale must be .* but it is a DTensor; write scale.full_tensor\(\)"):
        gs.scale_gradient(torch.ones(4), spread(torch.ones(4), Replicate()))
    with pytest.raises(TypeError, match=r"max must be .* but it is a DTensor; write max.full_tensor\(\)"):
        gs.clip_gradient_value(torch.ones(4), 0.0, spread(torch.ones(4), Replicate()))


@check
def encoding_and_decoding(rank: int) -> None:
    torch.manual_seed(0)
    x, logits = random(B), random(B, T, 11).requires_grad_()
    expected = SUPPORT.decode(logits)
    expected.square().sum().backward()
    for placement in PLACEMENTS:
        assert_same(SUPPORT.two_hot(spread(x, placement)), SUPPORT.two_hot(x))
        assert_same(SUPPORT.hl_gauss(spread(x, placement), 0.5), SUPPORT.hl_gauss(x, 0.5))
    for placement in (*PLACEMENTS, Shard(2)):
        given = spread(logits, placement)
        found = SUPPORT.decode(given)
        assert_same(found, expected)
        found.square().sum().backward()
        assert_same(given.grad, logits.grad)
        p, moved = logits.detach().softmax(-1), [spread(random(B, T), Shard(0)) for _ in range(2)]
        assert_same(
            SUPPORT.project(spread(p, placement), *moved), SUPPORT.project(p, *(m.full_tensor() for m in moved))
        )
    partial = DTensor.from_local(x, mesh(), [Partial()])  # the sum of all ranks' parts
    assert_same(SUPPORT.two_hot(partial), SUPPORT.two_hot(x * dist.get_world_size()))


@check
def priorities_of_mixtures(rank: int) -> None:
    torch.manual_seed(0)
    nu, z = random(B, T), random(B, T)
    expected = gs.priorities(nu, z, steps="max", alpha=0.6)
    for one, other in itertools.product((None, *PLACEMENTS), repeat=2):
        given = spread(nu, one), spread(z, other)
        assert_same(gs.priorities(*given, steps="max", alpha=0.6), expected)
        assert_same(gs.priorities(*(list(t.unbind(1)) for t in given), steps="max", alpha=0.6), expected)
    mask = torch.rand(B, T) < 0.6
    for steps, *kinds in itertools.product(("first", "mean", "all"), *[(None, *PLACEMENTS)] * 3):
        tensors = [spread(tensor, kind) for tensor, kind in zip((nu, z, mask), kinds, strict=True)]
        expected = gs.priorities(nu, z, steps=steps, mask=mask)
        assert_same(gs.priorities(*tensors[:2], steps=steps, mask=tensors[2], check=True), expected)


@check
def normalization_of_mixtures(rank: int) -> None:
    torch.manual_seed(0)
    x, mask, g = random(B, T), torch.rand(B, T) < 0.6, random(B, T)
    leaf = x.clone().requires_grad_()
    expected = gs.standardize(leaf, mask=mask)
    expected.backward(g)
    scale = gs.ReturnScale(decay=0.5, minimum=0.1)(x, mask)
    for one, other in itertools.product((None, *PLACEMENTS, Shard(1)), (None, *PLACEMENTS)):
        given, flags = spread(x.clone().requires_grad_(), one), spread(mask, other)
        found = gs.standardize(given, mask=flags)
        assert isinstance(found, DTensor) == (one is not None)
        assert_same(found, expected)
        found.backward(g if one is None else spread(g, Replicate()))
        assert_same(given.grad, leaf.grad)
        module = gs.ReturnScale(decay=0.5, minimum=0.1)
        assert_same(module(given, flags), scale)
        assert_same(given / module(given, flags), x / module.scale)
    given = spread(x, Shard(0))
    module = gs.ReturnScale(process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^standardize: process_group cannot .* x.to_local\(\)$"):
        gs.standardize(given, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^ReturnScale: process_group cannot .* returns.to_local\(\)$"):
        module(given)


@check
def policies_of_completed_values(rank: int) -> None:
    torch.manual_seed(0)
    given = [random(B, T), random(B, T), torch.randint(3, (B, T)), random(B)]
    expected = gs.completed_q_policy(*given)
    for one, other in itertools.product((None, *PLACEMENTS), repeat=2):
        kinds = (one, other, other, one)
        tensors = [spread(tensor, kind) for tensor, kind in zip(given, kinds, strict=True)]
        found = gs.completed_q_policy(*tensors)
        assert isinstance(found, DTensor) == (one is not None)
        assert_same(found, expected)


@check
def l2_loss_of_mixtures(rank: int) -> None:
    """The loss is a plain scalar, and its sum with another loss has the right gradients."""
    torch.manual_seed(0)
    weights = [random(B, 2), random(3)]
    expected = 0.1 * sum(w.square().sum() / 2 for w in weights)
    for kinds in itertools.product((None, *PLACEMENTS), repeat=2):
        given = [spread(w.clone().requires_grad_(), kind) for w, kind in zip(weights, kinds, strict=True)]
        loss = gs.l2_loss(given, 0.1)
        assert type(loss) is Tensor
        assert_same(loss, expected)
        # The other loss is a DTensor too if the model uses FSDP2 or tensor parallelism.
        for kind in (None, *PLACEMENTS) if any(kinds) else (None,):
            x = spread(random(B).requires_grad_(), kind)
            gradients = torch.autograd.grad(gs.l2_loss(given, 0.1) + x.square().sum(), [x, *given])
            for ours, theirs in zip(gradients, [2 * whole(x.detach()), *(0.1 * w for w in weights)], strict=True):
                assert_same(ours, theirs)


@check
def operators_with_tensor_arguments(rank: int) -> None:
    torch.manual_seed(0)
    x, g, per_sample, everywhere = random(B, 4), random(B, 4), torch.rand(B).double(), torch.rand(B, 1).double()
    cases: list[tuple[Callable[..., Tensor], Tensor]] = [
        (gs.scale_gradient, everywhere),
        (gs.reverse_gradient, everywhere),
        (lambda x, limit: gs.clip_gradient_norm(x, limit, batch_dims=1), per_sample),
        (lambda x, norm: gs.normalize_gradient(x, norm, batch_dims=1), per_sample),
        (lambda x, bound: gs.clip_gradient_value(x, -bound, bound), everywhere),
    ]
    for operator, argument in cases:
        expected = x.clone().requires_grad_()
        operator(expected, argument).backward(g)
        for placement, argument_placement in itertools.product((*PLACEMENTS, Shard(1)), (None, *PLACEMENTS)):
            given = spread(x.clone().requires_grad_(), placement)
            result = operator(given, spread(argument, argument_placement))
            assert result.placements == (placement,)
            result.backward(spread(g, placement))
            assert_same(given.grad, expected.grad)


@check
def norms_of_samples(rank: int) -> None:
    """A norm is over a whole sample, however it is sharded."""
    torch.manual_seed(0)
    g = random(B, 4)
    norms = g.norm(dim=1)
    limit = norms.sort().values[2:4].mean()  # far from each norm, whose last bit depends on the placement
    for placement in (*PLACEMENTS, Shard(1)):
        module = gs.ClipGradientNorm(float(limit), batch_dims=1)
        x = spread(torch.zeros(B, 4, dtype=torch.float64).requires_grad_(), placement)
        module(x).backward(spread(g, placement))
        assert_same(x.grad, g * (limit / norms).clamp(max=1)[:, None])


outcomes = check.outcomes(pytest.param(1, marks=pytest.mark.slow), 2)


@one_server
@pytest.mark.parametrize("name", check)
def test_distributed_tensors(name: str, outcomes: Callable[[str], None]) -> None:
    outcomes(name)
