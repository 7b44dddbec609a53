"""How calls run on a GPU: captured in CUDA graphs, on side streams, on another device, without synchronization, the
number of launches, bitwise determinism, memory use, and tensors beyond 2^31 elements.
"""

from __future__ import annotations

import gc

import pytest
import torch
from test_cuda import DTYPES, FLOW, REFERENCE, converted, heads_of, inputs_of, need_gpu
from test_loss import leaves
from test_whole_step import SUPPORT, Batch, arguments_of, loss_of, make_batch, make_loss, make_network
from torch.utils._pytree import tree_leaves, tree_map_only

import gradscale_ext as gs

pytestmark = pytest.mark.cuda

WIDTH, BATCH, STEPS = 33, 6, 3
SLEEP = 200_000_000  # GPU clock cycles, about 100 ms


@pytest.fixture
def device():
    need_gpu()
    return torch.device("cuda")


class Update:
    """A loss with the optional arguments that an update uses; `step` runs its forward and backward passes."""

    def __init__(self, device, dtype=torch.float32, seed=0, **options):
        self.heads = heads_of(WIDTH)
        given = inputs_of(self.heads, WIDTH, BATCH, STEPS, seed=seed)
        self.predictions, self.targets = (converted(entries, device, torch.float32) for entries in given)
        self.predictions = converted(self.predictions, device, dtype)
        generator = torch.Generator().manual_seed(seed)
        self.options = {
            "step_weights": [1.0, 0.5, 0.25],
            "step_gradient_scale": "unroll",
            "importance_weights": torch.rand(BATCH, generator=generator).to(device),
            "mask": (torch.rand(BATCH, STEPS, generator=generator) < 0.8).to(device),
            **options,
        }

    def loss(self):
        return gs.multi_step_loss(self.heads, self.predictions, self.targets, **self.options)

    def step(self):
        """Every output and gradient, in a list."""
        out = self.loss()
        found = torch.autograd.grad(out.loss, leaves(self.predictions))
        scalars = [out.loss.detach(), *out.head_means.values(), *out.head_losses.values(), out.num_nonfinite]
        entries = [*out.per_step.values(), *out.expected.values(), *out.entropy.values()]
        return [*scalars, out.per_sample, *entries, *found]

    def tensors(self):
        return [*leaves(self.predictions), *leaves(self.targets), *tensors_of(self.options)]


def tensors_of(options):
    return [value for value in options.values() if isinstance(value, torch.Tensor)]


def flow_step(x, numbers, incoming):
    """The result of all flow operators, applied one after the other, and its gradient for an incoming gradient."""
    y = x
    for apply, _ in FLOW.values():
        y = apply(y, numbers)
    return [y.detach(), *torch.autograd.grad(y.neg(), x, incoming)]


def flow_inputs(device, seed=0, shape=(4, 9001)):
    generator = torch.Generator().manual_seed(seed)
    x, incoming = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    numbers = {
        "last": torch.rand(shape[-1:], generator=generator).to(device),
        "sample": torch.rand(shape[0], 1, generator=generator).to(device),
        "limit": torch.rand(shape[0], generator=generator).to(device),
    }
    return x.requires_grad_(), numbers, incoming


def decode_step(logits, incoming):
    support = gs.Support.muzero()
    values = support.decode(logits)
    return [
        values.detach(),
        support.two_hot(incoming),
        support.hl_gauss(incoming),
        *torch.autograd.grad(values, logits, incoming),
    ]


def decode_inputs(device, seed=0, rows=70):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 601, generator=generator).to(device).requires_grad_()
    return logits, torch.randn(rows, generator=generator).to(device)


def l2_step(parameters):
    loss = gs.l2_loss(parameters, 1e-2)
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def clipping_step(gradients):
    """The statistics of gradients, and clipped copies of them."""
    parameters = [torch.zeros_like(gradient) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    found = gs.clip_gradients_(parameters, 1.0, nonfinite="skip")
    histogram = gs.gradient_statistics(gradients, histogram=True).histogram
    fields = [found.norm, found.mean, found.zeros, found.missing, histogram, found.total_norm]
    return [*fields, *(parameter.grad for parameter in parameters)]


def l2_inputs(device, seed=0, count=300):
    generator = torch.Generator().manual_seed(seed)
    sizes = [1 + 977 * i % 40000 for i in range(count)]
    return ([torch.randn(size, generator=generator).to(device).requires_grad_() for size in sizes],)


def cases(device, seed=0):
    """Functions without arguments by name, each with its input tensors."""
    plain, half = Update(device, seed=seed), Update(device, torch.bfloat16, seed=seed, reduction="valid_mean")
    skip = Update(device, seed=seed, nonfinite="skip")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "step_weights": torch.rand(BATCH, STEPS, generator=generator).to(device),
        "step_gradient_scale": torch.rand(STEPS, generator=generator, dtype=torch.float64).to(device),
    }
    weighted = Update(device, torch.float64, seed=seed, reduction="sum", **weights)
    flow, decode, l2 = flow_inputs(device, seed), decode_inputs(device, seed), l2_inputs(device, seed)
    gradients = [x.detach() for x in l2[0]]
    return {
        "loss": (plain.step, plain.tensors()),
        "loss of bfloat16, mean of valid entries": (half.step, half.tensors()),
        "loss of float64, tensors as weights": (weighted.step, weighted.tensors()),
        "loss, nonfinite samples skipped": (skip.step, skip.tensors()),
        "flow": (lambda: flow_step(*flow), [flow[0], *flow[1].values(), flow[2]]),
        "decode": (lambda: decode_step(*decode), list(decode)),
        "l2_loss": (lambda: l2_step(*l2), list(l2[0])),
        "clip_gradients_": (lambda: clipping_step(gradients), gradients),
    }


CASES = [
    "loss",
    "loss of bfloat16, mean of valid entries",
    "loss of float64, tensors as weights",
    "loss, nonfinite samples skipped",
    "flow",
    "decode",
    "l2_loss",
    "clip_gradients_",
]
every_case = pytest.mark.parametrize("name", CASES)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b)), f"result {number} differs"


def bits(x):
    """Bits of a tensor, where NaN equals itself, and -0 differs from 0."""
    return x.detach().contiguous().cpu().view(-1).view(torch.uint8)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("private_pool", [True, False])
def test_capture_and_replay_with_other_inputs(name, private_pool, device):
    step, inputs = cases(device)[name]
    first_expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle() if private_pool else None):
        captured = step()
    graph.replay()
    assert_same(captured, first_expected)
    for seed in (1, 2):
        other_step, other_inputs = cases(device, seed)[name]
        with torch.no_grad():
            for own, other in zip(inputs, other_inputs, strict=True):
                own.copy_(other)
        graph.replay()
        assert_same(captured, other_step())


def test_capture_of_the_examples_learner_step(device):
    """Unroll, loss, backward pass and optimizer in one graph, compared with the same steps without a graph."""
    batches = [make_batch(seed) for seed in range(4)]
    losses = {False: [], True: []}
    for is_captured, found in losses.items():
        network, loss_function = make_network().to(device), make_loss(SUPPORT, "fused")
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True, capturable=True)
        tensors = tree_map_only(torch.Tensor, lambda x: x.to(device), arguments_of(batches[0]))
        given = Batch(**tensors)

        def step(network=network, optimizer=optimizer, loss_function=loss_function, given=given):
            loss, _ = loss_of(network, loss_function, given, 1e-4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # warm-up steps on the first batch, as a capture requires
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            with torch.cuda.graph(graph):
                loss = step()
        for batch in batches:
            for own, other in zip(tree_leaves(tensors), tree_leaves(arguments_of(batch)), strict=True):
                if own is not None:  # the field `index` is None
                    own.copy_(other)
            if is_captured:
                graph.replay()
            else:
                loss = step()
            found.append(loss.item())
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


# ---- Streams and devices --------------------------------------------------------------------------------------------


@every_case
def test_side_stream(name, device):
    """Inputs that arrive late on the call's stream: a launch on any other stream would read the old values."""
    step, inputs = cases(device)[name]
    expected = step()
    arriving = [x.detach().clone() for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    def run(cycles):
        with torch.no_grad():
            for x in inputs:
                x.zero_()
        torch.cuda._sleep(cycles)
        with torch.no_grad():
            for x, late in zip(inputs, arriving, strict=True):
                x.copy_(late)
        found = step()
        waited = stream.query()  # query now: a stream queues about a thousand launches, then the next one blocks
        results = [x.clone() for x in found]
        for x in found:
            x.zero_()  # reveals early frees and writes
        return results, waited

    with torch.cuda.stream(stream):
        run(1000)  # allocates memory and loads kernels, which may synchronize
        stream.synchronize()
        results, waited = run(SLEEP)
        assert not waited, "the call waited for the GPU"
    stream.synchronize()
    assert_same(results, expected)


@every_case
def test_two_streams_at_once(name, device):
    """Temporary memory of a call belongs to the call's stream."""
    runs = [cases(device, seed)[name] for seed in (0, 1)]
    expected = [step() for step, _ in runs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = [[], []]
    for round in range(20):
        for which, ((step, _), stream) in enumerate(zip(runs, streams, strict=True)):
            with torch.cuda.stream(stream):
                if round % 5 == which:
                    torch.cuda._sleep(SLEEP // 100)
                found[which].append(step())
    torch.cuda.synchronize()
    for stream_result, wanted in zip(found, expected, strict=True):
        for results in stream_result:
            assert_same(results, wanted)


@every_case
def test_second_device(name):
    need_gpu()
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    first, _ = cases(torch.device("cuda:0"))[name]
    second, _ = cases(torch.device("cuda:1"))[name]
    expected = first()
    with torch.cuda.device(0):
        found = second()
        assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in found)
    torch.cuda.synchronize(1)
    assert_same(found, expected)


def test_tensors_of_two_devices_are_rejected(device):
    update = Update(device)
    update.targets["policy"][0] = update.targets["policy"][0].cpu()
    with pytest.raises(ValueError, match=r"policy.*cuda"):
        update.loss()


# ---- Waiting, launches, memory --------------------------------------------------------------------------------------


@every_case
def test_nothing_waits_for_the_gpu(name, device):
    step, _ = cases(device)[name]
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
        torch.cuda._sleep(SLEEP)
        step()
        assert not torch.cuda.current_stream().query(), "something waited in a way that PyTorch does not see"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@pytest.mark.parametrize("operator", FLOW)
def test_no_flow_operator_waits_for_the_gpu(operator, device):
    x, numbers, incoming = flow_inputs(device)
    apply = FLOW[operator][0]
    for _ in range(2):
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(apply(x, numbers), x, incoming)
            torch.autograd.grad(apply(x, numbers).neg(), x, incoming)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def kernels_of(function):
    """Names of the kernels that a call starts, as recorded by the profiler: all, and ours."""
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names = [event.name for event in events if "Sync" not in event.name and "Activity Buffer" not in event.name]
    assert names, "the profiler saw nothing on the GPU"
    return names, [name for name in names if "gradscale::" in name]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_launches_of_the_loss(dtype, reduction, device):
    """Two launches for the forward pass and one for the backward pass, for any heads and steps."""
    options = {"reduction": reduction, "importance_weights": None, "step_weights": [0.5, 1.0, 1.0]}
    update = Update(device, dtype, **options)
    incoming = torch.ones(BATCH, device=device, dtype=update.loss().loss.dtype) if reduction == "none" else None
    everything, ours = kernels_of(lambda: torch.autograd.grad(update.loss().loss, leaves(update.predictions), incoming))
    assert len(ours) <= 3, ours
    assert len(everything) <= 4, everything  # PyTorch fills grad_output with 1
    out = update.loss()
    _, forward = kernels_of(update.loss)
    assert len(forward) <= 2, forward
    for factor in (incoming, torch.full_like(out.loss, 0.5)):
        _, backward = kernels_of(
            lambda factor=factor: torch.autograd.grad(out.loss, leaves(update.predictions), factor, retain_graph=True)
        )
        assert len(backward) <= 1, backward


def test_launches_without_a_gradient_and_peak_memory(device):
    heads = {"value": gs.TwoHot(gs.Support.muzero()), "policy": gs.SoftCrossEntropy()}
    x = torch.randn(4096, 601, device=device)
    predictions = {"value": [x.clone().requires_grad_()], "policy": [x.clone().requires_grad_()]}
    targets = {"value": [x[:, 0].clone()], "policy": [x.softmax(-1)]}
    size = x.numel() * x.element_size()

    def peak(function):
        function()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = function()
        extra = torch.cuda.max_memory_allocated() - before
        del kept
        return extra

    def without():
        with torch.no_grad():
            return gs.multi_step_loss(heads, predictions, targets)

    def update():
        return torch.autograd.grad(gs.multi_step_loss(heads, predictions, targets).loss, leaves(predictions))

    everything, ours = kernels_of(without)
    assert len(ours) <= 2, ours
    assert everything == ours
    assert peak(without) < size / 4
    assert peak(update) < 2 * size * 1.1  # the gradients and no other tensor of this size


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("scale", 1),
        ("scale, tensor", 1),
        ("reverse", 1),
        ("clip value", 1),
        ("clip norm", 2),
        ("normalize", 2),
        ("clip norm, whole", 2),
    ],
)
@pytest.mark.parametrize("width", [64, 9001])
def test_launches_of_flow_operators(name, most, width, device):
    x, numbers, incoming = flow_inputs(device, shape=(4, width))
    y = FLOW[name][0](x, numbers)
    everything, _ = kernels_of(lambda: torch.autograd.grad(y, x, incoming, retain_graph=True))
    assert 1 <= len(everything) <= most, everything
    forward, _ = kernels_of(lambda: (FLOW[name][0](x, numbers), incoming.neg()))
    assert len(forward) == 1, forward  # only the negation


def test_launches_of_decode_and_l2_loss(device):
    logits, incoming = decode_inputs(device)
    everything, ours = kernels_of(lambda: gs.Support.muzero().decode(logits))
    assert len(everything) == len(ours) == 1, everything
    values = gs.Support.muzero().decode(logits)
    everything, ours = kernels_of(lambda: torch.autograd.grad(values, logits, incoming, retain_graph=True))
    assert len(everything) == len(ours) == 1, everything
    (parameters,) = l2_inputs(device, count=100)
    everything, ours = kernels_of(lambda: gs.l2_loss(parameters))
    assert len(everything) == len(ours) == 2, everything
    loss = gs.l2_loss(parameters)
    everything, ours = kernels_of(
        lambda: torch.autograd.grad(loss, parameters, torch.ones_like(loss), retain_graph=True)
    )
    assert len(ours) == 1, everything
    assert len(everything) <= 2, everything


def test_launches_of_statistics_and_clipping(device):
    (parameters,) = l2_inputs(device, count=100)
    gradients = [parameter.detach() for parameter in parameters]
    everything, ours = kernels_of(lambda: gs.gradient_statistics(gradients))
    assert len(everything) == len(ours) == 2, everything
    everything, ours = kernels_of(lambda: gs.gradient_statistics(gradients).total_norm)
    assert len(everything) == len(ours) == 3, everything
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    everything, ours = kernels_of(lambda: gs.clip_gradients_(parameters, 1.0, nonfinite="skip"))
    assert len(everything) == len(ours) == 4, everything


# ---- Determinism ----------------------------------------------------------------------------------------------------


@every_case
def test_bitwise_the_same_100_times(name, device):
    step, _ = cases(device)[name]
    expected = [bits(x) for x in step()]
    for _ in range(99):
        for own, x in zip(expected, step(), strict=True):
            assert torch.equal(bits(x), own)


def test_bitwise_the_same_for_large_batches(device):
    """Many blocks, which finish in any order."""
    heads = {"value": gs.TwoHot(gs.Support.muzero()), "policy": gs.SoftCrossEntropy()}
    x = torch.randn(20000, 2, 601, device=device, generator=torch.Generator(device).manual_seed(0))
    predictions = {"value": x, "policy": x.clone().requires_grad_()}
    targets = {"value": x[..., 0].clone(), "policy": x.softmax(-1)}

    def step():
        out = gs.multi_step_loss(heads, predictions, targets)
        return [out.loss, *out.head_means.values(), *torch.autograd.grad(out.loss, predictions["policy"])]

    expected = [x.detach().clone() for x in step()]
    for _ in range(100):
        for own, x in zip(expected, step(), strict=True):
            assert torch.equal(own, x)


# ---- Beyond 2^31 elements -------------------------------------------------------------------------------------------


def free_gigabytes():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 1e9


def test_more_than_2_to_the_31_elements(device):
    if free_gigabytes() < 40:
        pytest.skip("less than 40 GB of the GPU's memory are free")
    rows, width = 3_600_000, 601
    assert rows * width > 2**31
    support = gs.Support.muzero()
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, 1, width, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    logits.requires_grad_()
    scalars = torch.empty(rows, 1, device=device).normal_(std=30.0, generator=generator)
    out = gs.multi_step_loss({"value": gs.TwoHot(support)}, {"value": logits}, {"value": scalars}, reduction="sum")
    (gradient,) = torch.autograd.grad(out.loss, logits)
    chosen = torch.tensor([0, 1, 2**31 // width - 1, 2**31 // width, 2**31 // width + 1, rows - 2, rows - 1])
    exact = logits.detach()[chosen.to(device)].cpu().double().requires_grad_()
    truth = REFERENCE.multi_step_loss(
        {"value": gs.TwoHot(support)},
        {"value": exact},
        {"value": scalars[chosen.to(device)].cpu().double()},
        reduction="sum",
    )
    (expected,) = torch.autograd.grad(truth.loss, exact)
    close = {"rtol": 2**-8, "atol": 1e-6}
    torch.testing.assert_close(
        out.per_step["value"][chosen.to(device)].cpu().double(), truth.per_step["value"], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(gradient[chosen.to(device)].cpu().double(), expected, **close)
    sums = gradient.view(rows, width).sum(1, dtype=torch.float32)  # every row was written: the sum of each row is zero
    assert sums.abs().max().item() < 0.02
    mean = out.per_step["value"].double().mean().item()
    assert out.loss.item() == pytest.approx(mean * rows, rel=1e-5)
    with torch.no_grad():
        values = support.decode(logits)
    torch.testing.assert_close(values[chosen.to(device)].cpu().double(), truth.expected["value"], rtol=1e-3, atol=1e-3)
    del gradient, values, sums, out

    flat = logits.detach().view(-1).requires_grad_()
    tail = slice(-1001, None)
    for apply, factor in ((lambda x: gs.clip_gradient_value(x, -0.5, 0.5), None), (gs.normalize_gradient, 1.0)):
        (gradient,) = torch.autograd.grad(apply(flat), flat, flat.detach())
        wanted = flat.detach()[tail].double()
        wanted = wanted.clamp(-0.5, 0.5) if factor is None else wanted / (flat.numel() ** 0.5)
        torch.testing.assert_close(gradient[tail].double(), wanted, rtol=1e-2, atol=0)
        del gradient
    loss = gs.l2_loss([flat], 1.0)
    assert loss.item() == pytest.approx(flat.numel() / 2, rel=1e-2)
    (gradient,) = torch.autograd.grad(loss, flat)
    assert torch.equal(gradient[tail], flat.detach()[tail])


# ---- Every dtype, at the size of a real update ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_of_real_size(dtype, device):
    """256 samples, 6 steps, 601 bins and 18 actions: thousands of blocks at once, compared row by row."""
    heads = {"value": gs.TwoHot(gs.Support.muzero(), weight=0.25), "policy": gs.SoftCrossEntropy()}
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    given = {"value": normal(256, 6, 601), "policy": normal(256, 6, 18)}
    targets = {"value": normal(256, 6) * 30, "policy": normal(256, 6, 18).softmax(-1)}
    ours = {name: x.to(device=device, dtype=dtype).requires_grad_() for name, x in given.items()}
    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in ours.items()}
    out = gs.multi_step_loss(heads, ours, converted(targets, device), step_gradient_scale="unroll")
    truth = REFERENCE.multi_step_loss(heads, exact, targets, step_gradient_scale="unroll")
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    assert out.loss.item() == pytest.approx(truth.loss.item(), rel=tolerance)
    rounding = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
    for name in heads:
        torch.testing.assert_close(
            out.per_step[name].cpu().double(), truth.per_step[name], rtol=tolerance, atol=tolerance
        )
    for a, b in zip(
        torch.autograd.grad(out.loss, leaves(ours)), torch.autograd.grad(truth.loss, leaves(exact)), strict=True
    ):
        least = torch.finfo(dtype).smallest_normal * rounding
        atol = tolerance * b.abs().max().item() + least
        torch.testing.assert_close(a.cpu().double(), b, rtol=0.51 * rounding, atol=atol)
