"""N ranks train like one rank: steps on three processes, compared with the same steps on the whole batch."""

from __future__ import annotations

import functools
import itertools
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Checks, one_server
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs

check = Checks()
STEPS, UNROLL, BATCH, ACTIONS, HIDDEN = 12, 3, 12, 3, 5
SUPPORT = gs.Support(-5, 5, 11)
LIMIT = 0.05
LOSS = gs.MultiStepLoss(
    value=gs.TwoHot(SUPPORT, weight=0.5),
    reward=gs.HLGauss(SUPPORT, first_step=1),
    policy=gs.SoftCrossEntropy(entropy_weight=1e-2),
    hidden=gs.NegativeCosine(weight=0.1, first_step=1),
)


class Network(nn.Module):
    """A small MuZero with all five operators.

    Each rank's loss is divided by the mean number of samples, or of unmasked entries, per rank. Before the average over
    ranks its gradients are therefore `ranks` times as large as on one rank with the whole batch. So are the limits.
    """

    def __init__(self, ranks: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.ranks = ranks
        self.encode = nn.Linear(4, HIDDEN)
        self.dynamics = nn.GRUCell(ACTIONS, HIDDEN)
        self.heads = nn.ModuleDict(
            {name: nn.Linear(HIDDEN, size) for name, size in {"value": 11, "reward": 11, "policy": ACTIONS}.items()}
        )
        self.clip = gs.ClipGradientNorm(LIMIT * ranks, batch_dims=1)
        self.clip_all = gs.ClipGradientNorm(4 * LIMIT * ranks, process_group=group)
        self.scale, self.reverse = gs.ScaleGradient(0.5), gs.ReverseGradient(0.1)
        self.adversary = nn.Linear(HIDDEN, HIDDEN)

    def initial(self, observation: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        hidden = self.clip_all(self.encode(observation).tanh())
        return {name: head(hidden) for name, head in self.heads.items() if name != "reward"}, hidden

    def recurrent(self, hidden: Tensor, action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        hidden = self.clip(self.dynamics(nn.functional.one_hot(action, ACTIONS).to(hidden.dtype), hidden))
        clamped = gs.clip_gradient_value(self.scale(hidden), -10.0 * self.ranks, 10.0 * self.ranks)
        outputs = {name: head(clamped if name == "value" else hidden) for name, head in self.heads.items()}
        reversed_ = gs.normalize_gradient(self.reverse(hidden), 1e-3 * self.ranks, batch_dims=1)
        return outputs | {"hidden": self.adversary(reversed_)}, hidden

    def forward(self, observation: Tensor, actions: Tensor) -> dict[str, list[Tensor]]:
        return gs.unroll(self.initial, self.recurrent, observation, actions)


def batches(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The whole batch of every step, with a mask that leaves some ranks almost no entries."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        random = functools.partial(torch.randn, generator=generator, dtype=dtype)
        mask = torch.rand(BATCH, UNROLL + 1, generator=generator) < torch.linspace(0, 1, BATCH)[:, None]
        yield {
            "observation": random(BATCH, 4),
            "actions": torch.randint(ACTIONS, (BATCH, UNROLL), generator=generator),
            "value": random(BATCH, UNROLL + 1),
            "reward": random(BATCH, UNROLL),
            "policy": random(BATCH, UNROLL + 1, ACTIONS).softmax(-1),
            "hidden": random(BATCH, UNROLL, HIDDEN),
            "mask": mask,
            "importance_weights": random(BATCH).abs() + 0.1,
        }


def parts_of(ranks: int) -> list[slice]:
    """Parts of different sizes; the last rank has the largest."""
    bounds = [round(BATCH * (rank / ranks) ** 1.5) for rank in range(ranks + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


class Learner:
    """A network with its optimizer and monitor, on one rank with the whole batch or on several with parts of it."""

    def __init__(
        self, network: nn.Module, parallel: nn.Module, group: dist.ProcessGroup | None, reduction: str
    ) -> None:
        self.network, self.parallel, self.group, self.reduction = network, parallel, group, reduction
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        self.monitor = gs.GradientMonitor(network, self.optimizer, every=1)

    def step(self, whole: dict[str, Any], part: slice) -> gs.GradientStatistics:
        batch = {name: tensor[part] for name, tensor in whole.items()}
        out = LOSS(
            self.parallel(batch["observation"], batch["actions"]),
            {name: batch[name] for name in LOSS.heads},
            step_gradient_scale="unroll",
            importance_weights=batch["importance_weights"],
            normalize_importance_weights=True,
            mask=batch["mask"],
            reduction=self.reduction,
            process_group=self.group,
        )
        self.optimizer.zero_grad()
        (out.loss + gs.l2_loss(self.network, 1e-3)).backward()
        statistics = gs.clip_gradients_(self.network, 0.5)
        self.optimizer.step()
        return statistics


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_alike(name: str, ours: Tensor, truth: Tensor, tolerance: float) -> None:
    error = float((whole(ours.detach()) - truth.detach()).abs().max())
    assert error <= tolerance * max(1.0, float(truth.abs().max())), f"{name} is off by {error}"


def train(rank: int, way: str, dtype: torch.dtype, reduction: str) -> None:
    ranks, tolerance = dist.get_world_size(), 1e-12 if dtype == torch.float64 else 1e-6
    torch.manual_seed(0)
    alone = Network(1, None).to(dtype)
    network = Network(ranks, dist.group.WORLD).to(dtype)
    network.load_state_dict(alone.state_dict() | {n: b for n, b in network.state_dict().items() if "max_norm" in n})
    parallel: nn.Module = network
    if way == "ddp":
        parallel = nn.parallel.DistributedDataParallel(network)
    else:
        fully_shard(network, mesh=init_device_mesh("cpu", (ranks,)))
    one, ours = Learner(alone, alone, None, reduction), Learner(network, parallel, dist.group.WORLD, reduction)
    for number, batch in enumerate(batches(dtype)):
        expected = one.step(batch, slice(None))
        found = ours.step(batch, parts_of(ranks)[rank])
        assert found.names == expected.names
        for field in ("norm", "abs_max", "mean"):
            assert_alike(f"{field} at step {number}", getattr(found, field), getattr(expected, field), tolerance)
        assert torch.equal(found.numel, expected.numel)
    for (name, p), truth in zip(network.named_parameters(), alone.parameters(), strict=True):
        assert_alike(name, p, truth, tolerance)
    ours.monitor.close()
    one.monitor.close()
    tags = {"gradient_norm_total", "clipped", "gradient_norm/encode.weight"} & set(one.monitor.history)
    assert tags
    for tag in tags:
        for (step, value), (wanted_step, wanted) in zip(
            ours.monitor.history[tag], one.monitor.history[tag], strict=True
        ):
            assert step == wanted_step
            assert math.isclose(value, wanted, rel_tol=1e-5, abs_tol=1e-6), tag


def assert_one_all_reduce(function: Callable[[], object]) -> None:
    with CommDebugMode() as seen:
        function()
    ((name, count),) = seen.get_comm_counts().items()
    assert "reduce" in str(name)
    assert count == 1


@check
def one_all_reduce_for_all_statistics(rank: int) -> None:
    """Each call needs one all-reduce, and one more for a histogram, also if some ranks have no part of some tensors."""
    network = Network(1, None)
    fully_shard(network, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for p in network.parameters():
        p.grad = torch.zeros_like(p) + 1
    assert_one_all_reduce(lambda: gs.gradient_statistics(network))
    with CommDebugMode() as seen:
        gs.gradient_statistics(network, histogram=True)
    assert list(seen.get_comm_counts().values()) == [2]
    assert_one_all_reduce(lambda: gs.clip_gradients_(network, 1.0))
    for unit in ("row", "tensor"):
        assert_one_all_reduce(lambda unit=unit: gs.clip_gradients_(network, adaptive=0.1, unit=unit))
    plain = nn.Linear(2, 2)
    assert_one_all_reduce(lambda: gs.clip_gradients_(plain, 1.0, process_group=dist.group.WORLD))


@check
def one_all_reduce_for_the_counts_of_a_loss(rank: int) -> None:
    """A loss with a process group needs one all-reduce, and a second one if it normalises importance weights.

    A loss without a group needs none, and neither does the backward pass.
    """
    losses, group = torch.ones(3, 2, requires_grad=True), dist.group.WORLD
    for reduction in ("mean", "valid_mean"):
        for count, given in ((0, None), (1, group)):
            with CommDebugMode() as seen:
                loss = gs.reduce_multi_step(losses, reduction=reduction, process_group=given).loss  # type: ignore[arg-type]
                loss.backward()
            assert seen.get_total_counts() == count, seen.get_comm_counts()
    with CommDebugMode() as seen:
        gs.reduce_multi_step(
            losses, importance_weights=torch.ones(3), normalize_importance_weights=True, process_group=group
        )
    assert seen.get_total_counts() == 2


@check
def both_all_reduces_are_begun_before_one_is_waited_for(rank: int) -> None:
    calls: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "_c10d_functional":
                calls.append(function.__name__.split(".")[0])
            return function(*args, **(kwargs or {}))

    with Noted():
        gs.reduce_multi_step(
            torch.ones(3, 2),
            importance_weights=torch.ones(3),
            normalize_importance_weights=True,
            process_group=dist.group.WORLD,
        )
    assert calls == ["all_reduce", "all_reduce", "wait_tensor", "wait_tensor"]


@check
def a_compiled_loss_counts_over_the_ranks(rank: int) -> None:
    losses = torch.ones(3 + rank, 2, dtype=torch.float64, requires_grad=True)
    for reduction in ("mean", "valid_mean"):

        def loss(losses: Tensor, reduction: Any = reduction) -> Tensor:
            return gs.reduce_multi_step(losses, reduction=reduction, process_group=dist.group.WORLD).loss

        found = [function(losses) for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True))]
        gradients = [torch.autograd.grad(value, losses)[0] for value in found]
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(gradients[1], gradients[0])


@check
def a_nan_on_one_rank_makes_all_skip(rank: int) -> None:
    ranks = dist.get_world_size()
    plain = nn.Linear(2, 2)
    sharded = nn.Linear(2 * ranks, 2 * ranks)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    for network, group in ((plain, dist.group.WORLD), (sharded, None)):
        for p in network.parameters():
            p.grad = torch.ones_like(p)
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            local.view(-1)[0] = math.nan if rank == ranks - 1 else 1.0
        found = gs.clip_gradients_(network, 1.0, nonfinite="skip", process_group=group)
        assert found.nans.sum() == 2
        for p in network.parameters():
            assert (whole(p.grad) == 0).all()


@check
def an_error_of_one_rank_stays_on_that_rank(rank: int) -> None:
    """Invalid input raises before ranks wait for each other."""
    message = "process_group needs reduction 'mean' or 'valid_mean', but the reduction is 'sum'"
    with pytest.raises(ValueError, match=message):
        gs.reduce_multi_step(torch.ones(2, 2), reduction="sum", process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"^reduce_multi_step: process_group must be a "):
        gs.reduce_multi_step(torch.ones(2, 2), process_group="world")  # type: ignore[arg-type]


@check
def weights_are_normalised_over_all_ranks(rank: int) -> None:
    weights = torch.full((3,), float(rank + 1))
    losses = torch.ones(3, 1, dtype=torch.float64)
    for function in (gs.reduce_multi_step, reference_reduction):
        out = function(
            losses,
            importance_weights=weights,
            normalize_importance_weights=True,
            process_group=dist.group.WORLD,
        )
        assert out.loss.item() == pytest.approx((rank + 1) / dist.get_world_size())


def reference_reduction(losses: Tensor, **options: Any) -> gs.MultiStepLossOutput:
    return gs.reference.multi_step_loss({"loss": gs.PerStepLoss()}, {"loss": losses}, {}, **options)


@check
def a_rank_without_entries_joins(rank: int) -> None:
    """The average of the ranks' losses is the mean over the entries of the other ranks."""
    ranks = dist.get_world_size()
    losses = torch.full((4, 2), float(rank), dtype=torch.float64, requires_grad=True)
    for function in (gs.reduce_multi_step, reference_reduction):
        for given, mask in ((losses, torch.full((4, 2), rank > 0)), (losses[: 4 * (rank > 0)], None)):
            out = function(given, mask=mask, reduction="valid_mean", process_group=dist.group.WORLD)
            total = out.loss.detach().clone()
            dist.all_reduce(total)
            assert total.item() / ranks == pytest.approx(sum(range(ranks)) / (ranks - 1))
    nothing = gs.reduce_multi_step(
        losses, mask=torch.zeros(4, 2, dtype=torch.bool), reduction="valid_mean", process_group=dist.group.WORLD
    )
    assert nothing.loss.item() == 0


def sharded_learner(mesh: DeviceMesh, ranks: int) -> Learner:
    torch.manual_seed(0)
    network = Network(ranks, mesh.get_group()).double()
    fully_shard(network, mesh=mesh)
    return Learner(network, network, mesh.get_group(), "valid_mean")


def saved(learner: Learner, folder: str) -> None:
    model, optimizer = get_state_dict(learner.network, learner.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=learner.group)


def restored(learner: Learner, folder: str, limits: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load a checkpoint, set the limits for this number of ranks, and return the parameters."""
    model, optimizer = get_state_dict(learner.network, learner.optimizer)
    state = {"model": model, "optimizer": optimizer}
    checkpoint.load(state, checkpoint_id=folder, process_group=learner.group)
    set_state_dict(
        learner.network, learner.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    learner.network.load_state_dict(limits, strict=False)
    return parameters_of(learner)


def parameters_of(learner: Learner) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in learner.network.named_parameters()}


def steps_of(learner: Learner, steps: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Tensor]:
    for batch in steps:
        learner.step(batch, parts_of(ranks)[rank])
    return parameters_of(learner)


def limits_of(learner: Learner) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in learner.network.state_dict().items() if "max_norm" in name}


@check
def a_checkpoint_goes_on_with_another_number_of_ranks(rank: int) -> None:
    """Further training is bitwise the same with the same number of ranks, and up to rounding with more or fewer."""
    ranks, half = dist.get_world_size(), dist.get_world_size() // 2
    few, many = DeviceMesh("cpu", list(range(half))), init_device_mesh("cpu", (ranks,))
    steps = list(itertools.islice(batches(torch.float64), 6))
    for before, after in ((few, many), (many, few)):
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        wanted: list[Any] = [None, None]
        if rank < before.size():
            learner = sharded_learner(before, before.size())
            limits = limits_of(learner)
            now = steps_of(learner, steps[:3], rank, before.size())
            saved(learner, folders[0])
            later = steps_of(learner, steps[3:], rank, before.size())
            again = sharded_learner(before, before.size())
            same = restored(again, folders[0], limits)
            assert all(torch.equal(same[name], now[name]) for name in now)
            same = steps_of(again, steps[3:], rank, before.size())
            assert all(torch.equal(same[name], later[name]) for name in later)
            wanted = [now, later]
        dist.broadcast_object_list(wanted)
        if rank < after.size():
            learner = sharded_learner(after, after.size())
            same = restored(learner, folders[0], limits_of(learner))
            assert all(torch.equal(same[name], wanted[0][name]) for name in same)
            for name, p in steps_of(learner, steps[3:], rank, after.size()).items():
                assert_alike(name, p, wanted[1][name], 1e-12)


check |= {
    f"{way}_{str(dtype)[-7:]}_{reduction}": functools.partial(train, way=way, dtype=dtype, reduction=reduction)
    for way, dtype, reduction in (
        ("ddp", torch.float64, "valid_mean"),
        ("ddp", torch.float32, "mean"),
        ("fsdp", torch.float64, "mean"),
        ("fsdp", torch.float32, "valid_mean"),
    )
}


outcomes = check.outcomes(3)


@one_server
@pytest.mark.parametrize("name", check)
def test_many_ranks_train_as_one(name: str, outcomes: Callable[[str], None]) -> None:
    outcomes(name)


ENDS = """
import os, pathlib, signal, sys, time, torch, torch.distributed as dist
import gradscale_ext as gs
dist.init_process_group("gloo", *{rendezvous})
layer = torch.nn.Linear(2, 2)

def wait_for_rank_0(place):
    file = pathlib.Path(__file__ + place)
    if dist.get_rank() == 0:
        file.touch()
    while not file.exists():  # rank 1 ends after rank 0 has received all messages
        time.sleep(0.01)

for step in range(4):
    if step == 2:
        wait_for_rank_0("before the loss")
        if dist.get_rank() == 1:
            {end}
    out = gs.reduce_multi_step(layer(torch.ones(3, 2)), reduction="valid_mean", process_group=dist.group.WORLD)
    if step == 3:
        wait_for_rank_0("after the loss")
        if dist.get_rank() == 1:
            {later}
    out.loss.backward()
    gs.clip_gradients_(layer, 1.0, process_group=dist.group.WORLD)
"""
PATIENCE = 600  # seconds; a third of gloo's own timeout
KILL, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('of this rank alone')"


@pytest.mark.parametrize(
    ("end", "later", "function"),
    [
        pytest.param(RAISE, "pass", "reduce_multi_step", marks=pytest.mark.slow),
        ("pass", KILL, "gradient statistics"),
    ],
)
def test_the_error_names_the_call_that_a_rank_missed(end: str, later: str, function: str, tmp_path: Path) -> None:
    rendezvous = "[f'file://{sys.argv[2]}/store', None, 2, int(sys.argv[1])]"
    script = tmp_path / "train.py"
    script.write_text(ENDS.format(rendezvous=rendezvous, end=end, later=later))
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    ranks[1].communicate(timeout=PATIENCE)
    _, errors = ranks[0].communicate(timeout=PATIENCE)
    assert ranks[0].returncode != 0
    assert f"RuntimeError: {function}: rank 0 got no answer from the other ranks" in errors


@pytest.mark.slow
def test_torchrun_reports_the_rank_that_was_killed(tmp_path: Path) -> None:
    """It appears as the root cause or as another failure, because torchrun cannot tell which rank ended first."""
    script = tmp_path / "train.py"
    script.write_text(ENDS.format(rendezvous="[]", end=KILL, later="pass"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode != 0
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9 ", ended.stderr), ended.stderr
