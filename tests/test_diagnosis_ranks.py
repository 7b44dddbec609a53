"""Diagnoses of models with sharded or replicated parameters: FSDP2 in its variants, and DDP; on one rank and on two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from processes import Checks, one_server
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gradscale_ext.diagnosis.diagnosis import diagnose_gradients
from gradscale_ext.diagnosis.report import GradientDiagnosis
from gradscale_ext.diagnosis.tracer import GradientTracer

check = Checks()


class Network(nn.Module):
    """A network whose sizes two ranks cannot split evenly: the second rank has no part of the last bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.body(x))).mean()


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def by_layer(model: Network, **options: object) -> nn.Module:
    for layer in (model.body, model.middle):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def nested(model: Network) -> nn.Module:
    """A group of two modules, one of which contains a group."""
    fully_shard(model.body[0])
    fully_shard([model.body, model.last])
    return fully_shard(model)


def checkpointed(model: Network, kind: CheckpointImpl) -> nn.Module:
    model.middle = checkpoint_wrapper(model.middle, kind)
    return by_layer(model)


def compiled(model: Network) -> nn.Module:
    model.middle = torch.compile(model.middle, backend="aot_eager")
    return by_layer(model)


WAYS: dict[str, Callable[[Network], nn.Module]] = {
    "root": fully_shard,
    "root_resharded": functools.partial(fully_shard, reshard_after_forward=True),
    "layers": by_layer,
    "layers_resharded": functools.partial(by_layer, reshard_after_forward=True),
    "layers_kept": functools.partial(by_layer, reshard_after_forward=False),
    "nested": nested,
    "bfloat16": functools.partial(
        by_layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "checkpointed": functools.partial(checkpointed, kind=CheckpointImpl.NO_REENTRANT),
    "checkpointed_reentrant": functools.partial(checkpointed, kind=CheckpointImpl.REENTRANT),
    "compiled": compiled,
    "ddp": nn.parallel.DistributedDataParallel,
}


def batches(rank: int) -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 7, generator=generator) for _ in range(2)]


def traced(model: nn.Module, x: Tensor) -> tuple[Tensor, GradientTracer]:
    with GradientTracer() as tracer:
        loss = model(x)
    return loss, tracer


def found(diagnosis: GradientDiagnosis) -> set[tuple[str, str]]:
    return {(finding.code, finding.parameter) for finding in diagnosis.findings}


def gradients(model: nn.Module) -> list[Tensor | None]:
    grads = [p.grad for p in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def assert_same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def sound_model_has_no_findings(rank: int, way: str) -> None:
    """There are no findings before or after the backward pass, and a diagnosis does not change the gradients."""
    alone = WAYS[way](network())
    model = WAYS[way](network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(rank):
        alone(x).backward()
        before = gradients(model)
        loss, tracer = traced(model, x)
        for given, watched in ((None, None), (optimizer, tracer)):
            diagnosis = diagnose_gradients(loss, model, given, tracer=watched)
            assert diagnosis.findings == [], diagnosis
        assert_same(gradients(model), before)
        loss.backward()
        assert_same(gradients(model), gradients(alone))
        diagnosis = diagnose_gradients(loss, model, optimizer)
        assert diagnosis.findings == [], diagnosis


check |= {f"{way}_has_no_findings": functools.partial(sound_model_has_no_findings, way=way) for way in WAYS}


@check
def accumulated_gradients_stay_where_they_are(rank: int) -> None:
    """The gradients of the first batch are still pending on each rank when the second batch is diagnosed."""
    for way in ("root", "layers", "bfloat16"):
        models = [WAYS[way](network()) for _ in range(2)]
        for number, x in enumerate(batches(rank)):
            for model, is_diagnosed in zip(models, (False, True), strict=True):
                assert isinstance(model, FSDPModule)
                model.set_requires_gradient_sync(number == 1)
                loss = model(x)
                if is_diagnosed:
                    assert diagnose_gradients(loss, model).findings == []
                    if way != "bfloat16":  # FSDP2 does not expose gradients of another dtype
                        assert gradients(model) == [None] * 6
                loss.backward()
        assert_same(gradients(models[1]), gradients(models[0]))
        assert gradients(models[0])[0] is not None


class Faulty(Network):
    """`middle` is computed, but receives no gradient; `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.last(h + self.middle(h.detach()).detach()).mean()


@check
def disconnected_layers_are_found(rank: int) -> None:
    for sharded in ("body", "middle", "spare"), ("last",), ():
        torch.manual_seed(0)
        model = Faulty()
        for name in sharded:
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss, tracer = traced(model, next(iter(batches(rank))))
        cut = {f"middle.0.{name}" for name in ("weight", "bias")}
        unused = {f"spare.{name}" for name in ("weight", "bias")}
        for given in (None, optimizer):
            diagnosis = diagnose_gradients(loss, model, given)
            assert found(diagnosis) == {("disconnected", name) for name in cut | unused}
            diagnosis = diagnose_gradients(loss, model, given, tracer=tracer)
            assert {(code, name) for code, name in found(diagnosis) if name != "loss"} == (
                {("detached", name) for name in cut} | {("unused", name) for name in unused}
            )


@check
def zero_gradients_due_to_a_zero_parameter_are_no_finding(rank: int) -> None:
    """LoRA: the gradient of `down` is zero until the first step has moved `up`."""
    for sharded in ("down", "up"), ():
        torch.manual_seed(0)
        model = nn.Sequential()
        model.down, model.up = nn.Linear(7, 3, bias=False), nn.Linear(3, 5, bias=False)
        nn.init.zeros_(model.up.weight)
        for name in sharded:
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        for x in batches(rank):
            assert diagnose_gradients(model(x).sum(), model).findings == []


@check
def parameters_left_out_and_frozen_ones_are_named(rank: int) -> None:
    model = network()
    model.middle.requires_grad_(False)
    model = by_layer(model)
    optimizer = torch.optim.SGD([*model.middle.parameters(), *model.body.parameters()], lr=0.1)
    diagnosis = diagnose_gradients(model(next(iter(batches(rank)))), model, optimizer)
    assert found(diagnosis) == (
        {("frozen", f"middle.0.{name}") for name in ("weight", "bias")}
        | {("not_in_optimizer", f"last.{name}") for name in ("weight", "bias")}
    )


outcomes = check.outcomes(pytest.param(1, marks=pytest.mark.slow), 2)


@one_server
@pytest.mark.parametrize("name", check)
def test_diagnosis_on_ranks(name: str, outcomes: Callable[[str], None]) -> None:
    outcomes(name)
