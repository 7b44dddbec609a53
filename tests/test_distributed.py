"""Two processes: norms over a process group, DistributedDataParallel, FSDP2, DTensor."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contexts import CASES, Case, clipped
from processes import Checks, one_server
from torch.distributed.device_mesh import init_device_mesh

import gradscale_ext as gs
from gradscale_ext._ranks import waiting

RANKS = 2
GRADIENT = torch.linspace(-3, 4, 24, dtype=torch.float64).view(4, 6)
check = Checks()


def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The columns of `tensor` that belong to a rank."""
    return tensor.chunk(RANKS, dim=1)[rank].contiguous()


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@check
def norm_over_the_group(rank: int) -> None:
    group = dist.group.WORLD
    for batch_dims, p in ((0, 2.0), (1, 2.0), (1, 1.0), (0, math.inf), (1, 3.0)):
        for limit in (1.5, torch.tensor([1.5, 0.1, 7.0, 100.0]) if batch_dims else torch.tensor(0.5)):
            expected = part(clipped(GRADIENT, limit, batch_dims, p), rank)
            x = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
            y = gs.clip_gradient_norm(x, limit, batch_dims=batch_dims, norm_type=p, process_group=group)
            y.backward(part(GRADIENT, rank))
            assert_close(x.grad, expected)


@check
def norm_over_the_group_neither_overflows_nor_vanishes(rank: int) -> None:
    for size in (1e30, 1e-30):
        g = size * GRADIENT.float()
        x = torch.zeros(4, 3, requires_grad=True)
        gs.clip_gradient_norm(x, size, process_group=dist.group.WORLD).backward(part(g, rank))
        expected = part(clipped(g.double(), size, 0, 2.0), rank)
        torch.testing.assert_close(x.grad.double() / size, expected / size, rtol=1e-6, atol=0)


@check
def a_rank_without_elements_takes_part(rank: int) -> None:
    for batch_dims in (0, 1):
        for p in (2.0, math.inf):
            g = GRADIENT if rank == 0 else GRADIENT[:, :0]
            x = torch.zeros_like(g, requires_grad=True)
            gs.clip_gradient_norm(x, 1.5, batch_dims=batch_dims, norm_type=p, process_group=dist.group.WORLD).backward(
                g
            )
            assert_close(x.grad, clipped(GRADIENT, 1.5, batch_dims, p) if rank == 0 else g)


@check
def norm_over_the_group_in_a_second_derivative(rank: int) -> None:
    g = part(GRADIENT, rank).requires_grad_()
    x = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    y = gs.clip_gradient_norm(x, 1.5, batch_dims=1, process_group=dist.group.WORLD)
    (first,) = torch.autograd.grad(y, x, g, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), g)
    whole = GRADIENT.clone().requires_grad_()
    (expected,) = torch.autograd.grad((clipped(whole, 1.5, 1, 2.0) ** 2).sum(), whole)
    assert_close(second, part(expected, rank))


@check
def norm_over_the_group_compiled(rank: int) -> None:
    module = gs.ClipGradientNorm(1.5, batch_dims=1, process_group=dist.group.WORLD)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    functional = torch.compile(
        lambda x: gs.clip_gradient_norm(x, 1.5, batch_dims=1, process_group=dist.group.WORLD),
        backend="aot_eager",
        fullgraph=True,
    )
    for function in (compiled, functional):
        x = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
        function(x).backward(part(GRADIENT, rank))
        assert_close(x.grad, part(clipped(GRADIENT, 1.5, 1, 2.0), rank))


class Model(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.x = torch.nn.Parameter(torch.linspace(0.5, 1.6, 12, dtype=torch.float64).view(3, 4))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.case.model(self.x, z)


def local_weights(rank: int) -> torch.Tensor:
    return torch.linspace(-2, 3, 12, dtype=torch.float64).view(3, 4) * (rank + 1)


def mean_gradient(case: Case) -> torch.Tensor:
    """Average over the ranks of the expected gradients. The operators of a rank see only the gradient of that rank."""
    x = Model(case).x.detach()
    return sum(case.gradient(x, local_weights(rank)) for rank in range(RANKS)) / RANKS


@check
def distributed_data_parallel(rank: int) -> None:
    for case in CASES:
        model = torch.nn.parallel.DistributedDataParallel(Model(case))
        model(local_weights(rank)).backward()
        assert_close(model.module.x.grad, mean_gradient(case))


@check
def a_module_under_ddp_used_twice_before_backward(rank: int) -> None:
    """DDP writes to buffers before each forward pass. The backward pass of an earlier pass must not fail."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), gs.ScaleGradient(0.5), gs.ClipGradientNorm(1.0))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    (parallel(torch.ones(2, 3)) + parallel(torch.zeros(2, 3))).sum().backward()
    assert model[0].weight.grad.isfinite().all()


@check
def fully_sharded(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for case in CASES:
        model = Model(case)
        fully_shard(model, mesh=mesh)
        model(local_weights(rank)).backward()
        assert_close(model.x.grad.full_tensor(), mean_gradient(case))


@check
def distributed_tensors(rank: int) -> None:
    """A DTensor keeps its placement, and its norms are computed over the whole tensor."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    x0 = torch.linspace(0.5, 1.6, 12, dtype=torch.float64).view(3, 4)
    z0 = torch.linspace(-2, 3, 12, dtype=torch.float64).view(3, 4)
    for case in CASES:
        if case.argument == "tensor":
            continue
        x = distribute_tensor(x0, mesh, [Shard(1)]).requires_grad_()
        y = case.apply(x * x)
        assert y.placements == (Shard(1),)
        (y * distribute_tensor(z0, mesh, [Shard(1)])).sum().backward()
        assert_close(x.grad.full_tensor(), case.gradient(x0, z0))


SIZES = ((8, 3), (4, 5), (1, 2), (6,))


def whole_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]


def assert_same_statistics(found: gs.GradientStatistics, gradients: list[torch.Tensor], p: float) -> None:
    values, counts = gs.reference.tensor_statistics(gradients, p)
    assert_close(torch.stack([found.norm, found.abs_max, found.mean]), values)
    own = torch.stack([found.numel, found.zeros, found.nans, found.infs, found.missing.long()])
    assert torch.equal(own, counts)


@check
def clipping_of_parts_in_a_process_group(rank: int) -> None:
    """Every rank has some rows of each gradient, or none."""
    for p in (1.0, 2.0, 3.0, math.inf):
        gradients = whole_gradients()
        gradients[1][0, 0] = 0
        parameters = [torch.zeros_like(gradient.chunk(RANKS)[0]) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parts = gradient.chunk(RANKS)
            parameter.data = parts[rank].clone() if rank < len(parts) else gradient[:0]
            parameter.grad = parameter.data.clone()
        found = gs.clip_gradients_(parameters, 0.7, norm_type=p, process_group=dist.group.WORLD)
        assert_same_statistics(found, gradients, p)
        total = torch.cat([gradient.flatten() for gradient in gradients]).norm(p)
        assert_close(found.total_norm, total)
        for parameter in parameters:
            assert_close(parameter.grad, parameter.data * 0.7 / (total + 1e-6))


@check
def statistics_and_clipping_of_distributed_tensors(rank: int) -> None:
    """Gradients are sharded over one or two mesh dimensions, replicated, plain or missing. Each element counts once."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    meshes = {
        init_device_mesh("cpu", (RANKS,)): ([Shard(0)], [Shard(1)], [Replicate()], None),
        init_device_mesh("cpu", (1, RANKS)): ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate()] * 2, None),
    }
    for mesh, placements in meshes.items():
        gradients = whole_gradients()
        given = [
            gradient.clone() if placement is None else distribute_tensor(gradient.clone(), mesh, placement)
            for gradient, placement in zip(gradients, placements, strict=True)
        ]
        found = gs.gradient_statistics([*given, None], histogram=True)
        assert_same_statistics(found, [*gradients, None], 2.0)
        assert torch.equal(found.histogram, gs.gradient_statistics([*gradients, None], histogram=True).histogram)
        parameters = [torch.zeros_like(gradient) for gradient in given]
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient
        found = gs.clip_gradients_(parameters, 0.5)
        total = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert_close(found.total_norm, total)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            assert_close(grad, gradient * 0.5 / (total + 1e-6))
    partial = DTensor.from_local(torch.ones(3), next(iter(meshes)), [Partial()])
    with pytest.raises(ValueError, match="number 0 is a DTensor with partial sums"):
        gs.gradient_statistics([partial])


@check
def clipping_under_fsdp(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (RANKS,)))
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for model in (plain, sharded):
        model(x).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
    found = gs.clip_gradients_(sharded, 0.3)
    assert_close(found.total_norm, expected)
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad)


def clipped_adaptively(weight: torch.Tensor, gradient: torch.Tensor, unit: str) -> torch.Tensor:
    """The formula for unsharded tensors, with ``adaptive=0.3`` and ``eps=0.5``."""
    rows = (
        tensor.flatten(1) if unit == "row" and tensor.dim() > 1 else tensor.view(1, -1) for tensor in (weight, gradient)
    )
    weights, gradients = rows
    limit = 0.3 * weights.norm(dim=1, keepdim=True).clamp(min=0.5)
    return (gradients * (limit / gradients.norm(dim=1, keepdim=True)).clamp(max=1)).view_as(gradient)


@check
def adaptive_clipping_of_parts_in_a_process_group(rank: int) -> None:
    """Every rank has some rows of each gradient, or none. On the last rank, a `grad` of None is treated as zero."""
    for unit in ("row", "tensor"):
        gradients = whole_gradients()
        weights = [gradient.cos() for gradient in gradients]
        last = gradients[-1].chunk(RANKS)
        last[RANKS - 1].zero_()
        parameters = []
        for weight, gradient in zip(weights, gradients, strict=True):
            own = [(whole.chunk(RANKS) + (whole[:0],) * RANKS)[rank].clone() for whole in (weight, gradient)]
            parameters.append(own[0].requires_grad_())
            parameters[-1].grad = None if rank == RANKS - 1 and gradient is gradients[-1] else own[1]
        gs.clip_gradients_(parameters, adaptive=0.3, eps=0.5, unit=unit, process_group=dist.group.WORLD)
        for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
            expected = clipped_adaptively(weight, gradient, unit)
            if parameter.grad is not None:
                assert_close(parameter.grad, (expected.chunk(RANKS) + (expected[:0],) * RANKS)[rank])


@check
def adaptive_clipping_of_distributed_tensors(rank: int) -> None:
    """Rows and tensors are on one rank or split over ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    meshes = {
        init_device_mesh("cpu", (RANKS,)): ([Shard(0)], [Shard(1)], [Replicate()], None),
        init_device_mesh("cpu", (1, RANKS)): ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate()] * 2, None),
    }
    for mesh, placements in meshes.items():
        for unit in ("row", "tensor"):
            gradients = whole_gradients()
            parameters = []
            for gradient, placement in zip(gradients, placements, strict=True):
                pair = [gradient.cos(), gradient.clone()]
                if placement is not None:
                    pair = [distribute_tensor(whole, mesh, placement) for whole in pair]
                parameters.append(pair[0].requires_grad_())
                parameters[-1].grad = pair[1]
            found = gs.clip_gradients_(parameters, adaptive=0.3, eps=0.5, unit=unit)
            assert_same_statistics(found, gradients, 2.0)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                assert_close(grad, clipped_adaptively(gradient.cos(), gradient, unit))


@check
def adaptive_clipping_under_fsdp(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (RANKS,)))
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for unit in ("row", "tensor"):
        for model in (plain, sharded):
            model.zero_grad()
            model(x).sum().backward()
            gs.clip_gradients_(model, adaptive=0.1, unit=unit)
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert_close(ours.grad.full_tensor(), theirs.grad)


outcomes = check.outcomes(RANKS)


@one_server
@pytest.mark.parametrize("name", check)
def test_two_processes(name: str, outcomes: Callable[[str], None]) -> None:
    outcomes(name)


@pytest.mark.parametrize("wrong", ["WORLD", 3])
def test_wrong_process_group(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"must be a torch.distributed.ProcessGroup or None"):
        gs.clip_gradient_norm(torch.ones(2), 1.0, process_group=wrong)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Create a default group of one rank, unless another test has left one open."""
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if is_ours:
        dist.destroy_process_group()


def reduce_losses(process_group: Any) -> None:
    gs.reduce_multi_step(torch.ones(2, 2), reduction="valid_mean", process_group=process_group)


def clip(process_group: Any) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), 5.0)
    try:
        gs.clip_gradients_([p], 1.0, process_group=process_group)
    finally:
        assert p.grad.tolist() == [5.0, 5.0]


GROUPED: dict[str, Callable[[Any], object]] = {
    "reduce_multi_step": reduce_losses,
    "clip_gradients_": clip,
    "clip_gradient_norm": lambda group: gs.clip_gradient_norm(torch.ones(2), 1.0, process_group=group),
    "ClipGradientNorm": lambda group: gs.ClipGradientNorm(1.0, process_group=group),
}


@pytest.mark.parametrize("name_is_reused", [False, True])
@pytest.mark.parametrize("function", GROUPED)
def test_the_error_names_a_destroyed_process_group(function: str, name_is_reused: bool, one_rank: None) -> None:
    """The error is the same if a later group has the same name."""
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    if name_is_reused:
        name, later = group.group_name, dist.new_group([0])
        torch.distributed.distributed_c10d._unregister_process_group(later.group_name)
        torch.distributed.distributed_c10d._register_process_group(name, later)
    message = f"{function}: process_group must be in use, but the group '{group.group_name}' has been destroyed"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GROUPED[function](group)
    if name_is_reused:
        dist.destroy_process_group(later)


def test_pytorch_reports_a_group_for_another_device(one_rank: None) -> None:
    group = dist.new_group([0], backend="cuda:gloo")
    for function in (reduce_losses, clip):
        with pytest.raises(RuntimeError, match=r"^No backend type associated with device type cpu"):
            function(group)
    dist.destroy_process_group(group)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:29091: Connection reset by peer. This is typically"),
        RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:18150. This is typically caused by a"),
        RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("Wait timeout"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        dist.DistBackendError("WorkNCCL(SeqNum=3, OpType=ALLREDUCE) ran for 1800 milliseconds before timing out."),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the server crash?"),
    ],
    ids=lambda error: str(error)[-40:],
)
def test_the_error_says_that_other_ranks_do_not_answer(error: RuntimeError, one_rank: None) -> None:
    with pytest.raises(RuntimeError, match=r"^f: rank 0 got no answer from the other ranks") as raised, waiting("f"):
        raise error
    assert str(error) in str(raised.value)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Tensors must be contiguous"),
        RuntimeError("Could not resolve the process group registered under the name 1"),
        torch.OutOfMemoryError("CUDA out of memory; a process timed out"),
        torch.AcceleratorError("CUDA error: the launch timed out and was terminated", 702),
        NotImplementedError("no timeout on this device"),
        RecursionError("maximum recursion depth exceeded"),
        dist.DistBackendError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"),
        ValueError("timed out"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_errors_that_are_not_about_other_ranks_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, waiting("f"):
        raise error
    assert raised.value is error
