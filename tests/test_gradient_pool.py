"""The memory pool of gradients: which memory is reused, which is not, and how much is held."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import gradscale_ext as gs

pytestmark = pytest.mark.cpu_kernels
SUPPORT = gs.Support.muzero(300)
HEADS = {"value": gs.TwoHot(SUPPORT), "policy": gs.SoftCrossEntropy()}
STEPS = 3
CALLS = 16  # unused memory is freed after this many calls


def arguments(batch=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    widths = {"value": 601, "policy": 200}
    predictions = {
        name: [torch.randn(batch, width, generator=generator).requires_grad_() for _ in range(STEPS)]
        for name, width in widths.items()
    }
    targets = {
        "value": [torch.randn(batch, generator=generator) for _ in range(STEPS)],
        "policy": [torch.rand(batch, 200, generator=generator).softmax(1) for _ in range(STEPS)],
    }
    return predictions, targets


PREDICTIONS, TARGETS = arguments()
BYTES = sum(4 * tensor.numel() for tensors in PREDICTIONS.values() for tensor in tensors)


def leaves(predictions):
    return [tensor for tensors in predictions.values() for tensor in tensors]


def function(predictions, targets, **options):
    return gs.multi_step_loss(HEADS, predictions, targets, **options)


def gradients(loss_fn=function, predictions=PREDICTIONS, targets=TARGETS, **options):
    return torch.autograd.grad(loss_fn(predictions, targets, **options).loss, leaves(predictions))


def addresses(tensors):
    return {tensor.data_ptr() for tensor in tensors}


@pytest.fixture(autouse=True)
def _empty():
    gc.collect()
    gs.empty_cache()


EXPECTED = [gradient.clone() for gradient in gradients()]


def same(tensors):
    return all(torch.equal(a, b) for a, b in zip(tensors, EXPECTED, strict=True))


# ---- Memory that is reused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [function, gs.MultiStepLoss(**HEADS)], ids=["function", "module"])
def test_memory_of_deleted_gradients_is_reused(loss_fn):
    first = addresses(gradients(loss_fn))
    assert addresses(gradients(loss_fn)) == first
    assert gs.empty_cache() == BYTES


def test_all_entry_points_share_one_pool():
    first = addresses(gradients())
    assert addresses(gradients(gs.MultiStepLoss(**HEADS))) == first
    assert gs.empty_cache() == BYTES
    compiled = torch.compile(lambda predictions, targets: function(predictions, targets), backend="aot_eager")
    gradients(compiled)
    assert gs.empty_cache() == BYTES  # one tensor that holds all gradients
    x = torch.randn(64, 601, requires_grad=True)
    torch.autograd.grad(SUPPORT.decode(x).sum(), x)
    assert gs.empty_cache() == x.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    predictions = {
        name: [t.detach().to(dtype).requires_grad_() for t in tensors] for name, tensors in PREDICTIONS.items()
    }
    expected = [g.clone() for g in gradients(predictions=predictions)]
    for _ in range(3):
        assert all(map(torch.equal, gradients(predictions=predictions), expected))
    assert gs.empty_cache() == sum(t.nbytes for t in leaves(predictions))


# ---- Memory that is not reused --------------------------------------------------------------------------------------

HOLDERS = {
    "gradient": lambda g: g,
    "detached": lambda g: g.detach(),
    "row": lambda g: g[3:4],
    "numpy": lambda g: g.numpy(),
    "storage": lambda g: g.untyped_storage(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "set_": lambda g: torch.empty(0).set_(g.untyped_storage()),
    "memoryview": lambda g: memoryview(g.numpy()),
    "data": lambda g: torch.nn.Parameter(g).data,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_held_memory_is_not_reused(hold):
    held = [hold(gradient) for gradient in gradients()]
    freed = gs.empty_cache()
    taken = addresses(gradients(step_weights=[9.0, 9.0, 9.0]))
    assert freed == 0
    assert len(taken) == len(EXPECTED)
    again = gradients(step_weights=[5.0, 5.0, 5.0])
    if isinstance(held[0], torch.Tensor) and held[0].shape == EXPECTED[0].shape:
        assert same(held)
        assert not addresses(held) & addresses(again)
    del again, held
    gc.collect()
    assert gs.empty_cache() == 2 * BYTES


def test_accumulated_gradients_are_not_overwritten():
    predictions, targets = arguments()
    for count in (1, 2, 3):
        function(predictions, targets).loss.backward()
        gradients(step_weights=[7.0, 7.0, 7.0])
        for leaf, expected in zip(leaves(predictions), EXPECTED, strict=True):
            torch.testing.assert_close(leaf.grad, count * expected, rtol=1e-6, atol=0)


def test_pending_gradients_of_a_graph_are_not_overwritten():
    pending = function(PREDICTIONS, TARGETS)
    retained = function(PREDICTIONS, TARGETS)
    first = torch.autograd.grad(retained.loss, leaves(PREDICTIONS), retain_graph=True)
    gradients(step_weights=[7.0, 7.0, 7.0])
    assert same(torch.autograd.grad(pending.loss, leaves(PREDICTIONS)))
    for gradient in first:
        gradient.zero_()
    del first, gradient
    gradients(step_weights=[7.0, 7.0, 7.0])
    assert same(torch.autograd.grad(retained.loss, leaves(PREDICTIONS)))


def test_a_kept_gradient_holds_only_its_own_memory():
    kept = [gradients()[0] for _ in range(5)]
    assert len(addresses(kept)) == 5
    assert gs.empty_cache() == BYTES - kept[0].nbytes


def test_resized_and_shared_storages():
    gradient, *others = gradients()
    expected = [other.clone() for other in others]
    gradient.untyped_storage().resize_(2 * gradient.nbytes)
    gradient.resize_(128, 601).fill_(7)
    others[0].share_memory_()
    assert all(map(torch.equal, others, expected))
    assert same(gradients())
    gradient.untyped_storage().resize_(0)
    assert same(gradients())
    assert all(map(torch.equal, others, expected))


def test_a_gradient_outlives_its_module_and_its_graph():
    module = gs.MultiStepLoss(**HEADS)
    alive = weakref.ref(module)
    held = gradients(module)
    del module
    gc.collect()
    assert alive() is None
    gradients(step_weights=[7.0, 7.0, 7.0])
    assert same(held)


def test_a_failed_pass_returns_its_memory():
    predictions, targets = arguments()

    def fail(gradient):
        raise RuntimeError("hook")

    handle = predictions["value"][1].register_hook(fail)
    with pytest.raises(RuntimeError, match="hook"):
        function(predictions, targets).loss.backward()
    handle.remove()
    for leaf in leaves(predictions):
        leaf.grad = None
    assert same(gradients())  # PyTorch's engine keeps the pending gradients of a failed pass until the next pass
    gc.collect()
    assert BYTES <= gs.empty_cache() <= 2 * BYTES
    with pytest.raises(ValueError, match="policy"):
        function(predictions, {**targets, "policy": targets["policy"][:2]})
    assert gs.empty_cache() == 0


# ---- How much memory is held ----------------------------------------------------------------------------------------


def test_alternating_sizes_hold_the_memory_of_the_largest():
    several = [arguments(batch) for batch in (64, 8, 17, 100, 33, 64, 90, 12)]
    largest = BYTES // 64 * 100 * 4 // 3  # blocks for batch 100, for 1/4 of it, for 1/16, ...: 4/3 in all
    for _ in range(3):
        for predictions, targets in several:
            expected = gs.multi_step_loss(HEADS, predictions, targets, impl="reference").loss
            loss = function(predictions, targets).loss
            torch.testing.assert_close(loss, expected)
            torch.autograd.grad(loss, leaves(predictions))
    assert BYTES // 64 * 90 <= gs.empty_cache() <= largest


@pytest.mark.parametrize("batches", [(32, 640), (640, 32)])
def test_two_very_different_sizes_keep_their_memory(batches):
    data = [arguments(batch) for batch in batches]
    first = [addresses(gradients(predictions=p, targets=t)) for p, t in data]
    for _ in range(3):
        assert [addresses(gradients(predictions=p, targets=t)) for p, t in data] == first


def test_unneeded_memory_is_freed():
    large = arguments(batch=640)
    gradients(predictions=large[0], targets=large[1])
    for _ in range(CALLS + 1):
        gradients()
    assert gs.empty_cache() <= 4 * BYTES  # a block may be four times as large as its gradient


def test_a_call_with_several_large_results_counts_as_one():
    first = gradients()
    held = sum(gradient.untyped_storage().nbytes() for gradient in first if gradient.nbytes >= 1 << 14)
    del first
    rewards, values = torch.zeros(512, 1024), torch.zeros(512, 1025)
    for _ in range(CALLS - 1):
        gs.generalized_advantages(rewards, values, discount=0.9, lambda_=0.9)
    assert gs.empty_cache() >= held + 2 * rewards.nbytes


def test_long_kept_gradients_are_freed_at_once():
    kept = [gradients() for _ in range(3 * CALLS)]
    del kept
    assert gs.empty_cache() <= (CALLS + 1) * BYTES
    assert gs.empty_cache() == 0


def test_small_gradients_use_malloc():
    predictions, targets = arguments(batch=2)
    gradients(predictions=predictions, targets=targets)
    assert gs.empty_cache() == 0


# ---- Threads and processes ------------------------------------------------------------------------------------------


def test_concurrent_threads():
    wrong = []

    def train(seed):
        predictions, targets = arguments(batch=32 + 8 * seed, seed=seed)
        expected = [g.clone() for g in gradients(predictions=predictions, targets=targets)]
        held = []
        for step in range(100):
            actual = gradients(predictions=predictions, targets=targets)
            held = [actual] if step % 3 else [*held, actual]
            if step % 10 == seed:
                gs.empty_cache()
            if not all(torch.equal(a, b) for kept in held for a, b in zip(kept, expected, strict=True)):
                wrong.append((seed, step))

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    gs.empty_cache()
    assert gs.empty_cache() == 0


SCRIPT = f"""
import os, sys, threading
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
torch.set_num_threads(1)  # a forked child has no OpenMP worker threads
from test_gradient_pool import *
"""


def run(script):
    result = subprocess.run([sys.executable, "-c", SCRIPT + script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_while_threads_use_the_pool():
    """After the fork, parent and child use the pool, and the gradients that both hold are unchanged in the child."""
    written = run("""
stop = threading.Event()
x = torch.randn(64, 601, requires_grad=True)

def decode():
    while not stop.is_set():
        torch.autograd.grad(SUPPORT.decode(x).sum(), x)
        gs.empty_cache()

threads = [threading.Thread(target=decode) for _ in range(2)]
for thread in threads:
    thread.start()
good = 0
for _ in range(20):
    held = gradients()
    child = os.fork()
    if child == 0:
        for _ in range(3):
            gs.empty_cache()
            torch.autograd.grad(SUPPORT.decode(x).sum(), x)[0].fill_(7)
        os._exit(0 if same(held) else 1)
    del held
    gradients(step_weights=[7.0, 7.0, 7.0])
    good += os.waitpid(child, 0)[1] == 0
    assert same(gradients())
stop.set()
print(good)
sys.late = gradients()  # memory of the pool may outlive the interpreter
torch.kept = gradients()
""")
    assert written.split() == ["20"]


# ---- Compiled losses ------------------------------------------------------------------------------------------------


def compiled():
    """A function that returns the gradients of a compiled loss whose incoming gradient is `factor`."""
    compiled_loss = torch.compile(lambda *args: function(*args).loss, fullgraph=True, backend="aot_eager")

    def call(predictions=PREDICTIONS, factor=1.0):
        loss = compiled_loss(predictions, TARGETS)
        return torch.autograd.grad(loss, leaves(predictions), torch.full_like(loss, factor))

    return call


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_compiled_gradients_are_multiplied(dtype):
    predictions = {
        name: [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        for name, tensors in PREDICTIONS.items()
    }
    call = compiled()
    for factor in (1.0, -2.5, 0.0, float("inf"), float("nan")):
        expected = [torch.where(own == 0, own, own * factor) for own in gradients(predictions=predictions)]
        torch.testing.assert_close(list(call(predictions, factor)), expected, equal_nan=True)


@pytest.mark.compiled
def test_the_gradients_of_a_retained_compiled_loss():
    with torch._functorch.config.patch(donated_buffer=False):
        loss = torch.compile(lambda *args: function(*args).loss, backend="aot_eager")(PREDICTIONS, TARGETS)
        first = torch.autograd.grad(loss, leaves(PREDICTIONS), retain_graph=True)
        for gradient in first:
            gradient.fill_(7)
        second = torch.autograd.grad(loss, leaves(PREDICTIONS), 3 * torch.ones_like(loss), retain_graph=True)
        last = torch.autograd.grad(loss, leaves(PREDICTIONS))
    expected = gradients()
    torch.testing.assert_close(second, [3 * gradient for gradient in expected])
    torch.testing.assert_close(last, expected)


@pytest.mark.compiled
def test_compiled_gradients_are_not_overwritten_by_later_calls():
    call = compiled()
    first = call()
    copies = [gradient.clone() for gradient in first]
    for _ in range(3):
        call()
        function(PREDICTIONS, TARGETS)
    assert all(map(torch.equal, first, copies))


@pytest.mark.compiled
def test_compiled_losses_in_a_loop_hold_the_memory_of_one():
    call = compiled()
    for _ in range(3):
        call()
    assert gs.empty_cache() <= BYTES + 4096 * 6


@pytest.mark.compiled
def test_compiled_gradients_of_saved_tensors_that_were_copied():
    with torch.autograd.graph.save_on_cpu():
        actual = compiled()()
    torch.testing.assert_close(actual, gradients())


@pytest.mark.compiled
def test_saved_gradients_that_something_else_holds_are_not_changed():
    held, before = [], []

    def pack(tensor):
        held.append(tensor.detach())
        before.append(tensor.clone())
        return tensor

    call = compiled()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        actual = call(factor=2.0)
    torch.testing.assert_close(actual, tuple(2 * gradient for gradient in EXPECTED))
    assert len(held) > 0
    assert all(map(torch.equal, held, before))
