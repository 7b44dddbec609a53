"""Properties of every node that the package adds to the graph: it works after a failed backward pass, from several
threads, and after any change of its inputs between the forward and the backward pass."""

from __future__ import annotations

import threading

import pytest
import torch

import gradscale_ext as gs
from gradscale_ext.call.options import Options
from gradscale_ext.heads import record_of

POLICY = gs.SoftCrossEntropy()
SUPPORT = gs.Support(-5, 5, 11)


def _uniform(*shape):
    return torch.full(shape, 1 / shape[-1])


def _operator(x, mask=None):
    return torch.ops.gradscale_ext.multi_step_loss(
        [x], [_uniform(*x.shape)], [0], [0, -1], *record_of([POLICY]), [], *Options([], [], [], [mask], [], [])
    )[0]


W = torch.arange(1.0, 7.0)
G = torch.linspace(-1, 1, 132).reshape(6, 2, 11)
SCALE = torch.linspace(0.1, 2, 11)
LIMIT = torch.tensor([0.5])


def _stacked_loss(x, **options):
    return gs.multi_step_loss({"p": POLICY}, {"p": x}, {"p": _uniform(6, 2, 11)}, **options).loss


def _loss(x):
    return gs.multi_step_loss({"p": POLICY}, {"p": list(x.unbind(1))}, {"p": _uniform(6, 2, 11)}).loss


# Functions of one tensor [6, 2, 11], each with the incoming gradient of its result. The graph has one node of the
# package; its PyTorch nodes save nothing.
NODES = {
    "loss": (_loss, torch.tensor(1.0)),
    "stacked loss": (_stacked_loss, torch.tensor(1.0)),
    "scaled loss": (_stacked_loss, torch.tensor(3.0)),
    "half loss": (lambda x: _stacked_loss(x.bfloat16()), torch.tensor(1.0)),
    "scaled half loss": (lambda x: _stacked_loss(x.bfloat16()), torch.tensor(3.0)),
    "losses": (lambda x: _stacked_loss(x, reduction="none"), W),
    "operator": (_operator, torch.tensor(3.0)),
    "decode": (SUPPORT.decode, G[..., 0]),
    "l2_loss": (lambda x: gs.l2_loss([x, x]), torch.tensor(3.0)),
    "scale_gradient": (lambda x: gs.scale_gradient(x, SCALE), G),
    "clip_gradient_norm": (lambda x: gs.clip_gradient_norm(x, LIMIT, batch_dims=1), G),
    "normalize_gradient": (lambda x: gs.normalize_gradient(x, LIMIT, batch_dims=1), G),
    "clip_gradient_value": (lambda x: gs.clip_gradient_value(x, -SCALE, SCALE), G),
}


def differentiate(name, result, inputs, **options):
    # A clone, because an operator may write to a gradient without other owners.
    return torch.autograd.grad(result, inputs, NODES[name][1].clone(), **options)


nodes = pytest.mark.parametrize("name", NODES)


def data(seed=0):
    return torch.randn(6, 2, 11, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradient_of(name):
    x = data()
    return differentiate(name, NODES[name][0](x), x)[0]


def package_nodes(loss):
    """Nodes of the graph that belong to the package, by name."""
    names = {"MultiStepLoss", "MultiStepLossOperator", "Decode", "L2Loss", "ScaleGradient", "ClipGradientNorm",
             "NormalizeGradient", "ClipGradientValue"}  # fmt: skip
    waiting, found = [loss.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is not None:
            found += [node] if node.name().removesuffix("Backward") in names else []
            waiting += [following for following, _ in node.next_functions]
    assert found
    return found


class Interrupted(Exception):
    pass


class Once:
    """A hook whose first call raises an error, after setting its argument to zero if `overwrite`."""

    def __init__(self, overwrite=False):
        self.left, self.overwrite = 1, overwrite

    def __call__(self, given, *_):
        if self.left:
            self.left -= 1
            for gradient in (given if isinstance(given, tuple) else (given,)) if self.overwrite else ():
                if gradient is not None:
                    gradient.zero_()
            raise Interrupted


# ---- A pass that failed ---------------------------------------------------------------------------------------------


@nodes
@pytest.mark.parametrize("overwrite", [False, True], ids=["unchanged", "overwritten"])
@pytest.mark.parametrize("where", ["at the node", "after it"])
def test_a_failed_pass_can_be_repeated(name, where, overwrite):
    x = data()
    view = x.view_as(x)
    result = NODES[name][0](view)
    if where == "at the node":
        package_nodes(result)[0].register_hook(Once(overwrite))
    else:
        view.register_hook(Once(overwrite))
    expected = gradient_of(name)
    with pytest.raises(Interrupted):  # once the node has run, only a retained graph can run again, as in PyTorch
        differentiate(name, result, x, retain_graph=where == "after it")
    for retain_graph in (True, True, False):
        (gradient,) = differentiate(name, result, x, retain_graph=retain_graph)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        differentiate(name, result, x)


def test_a_rejected_pass_changes_nothing():
    x = data()
    half = x.bfloat16()
    loss = _stacked_loss(half)
    with torch.no_grad():
        half.add_(1)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        (loss * 2).backward()
    loss.backward(retain_graph=True)  # the gradient for grad_output 1 was computed with the loss
    loss.backward()
    assert torch.equal(x.grad, 2 * gradient_of("half loss"))


def test_masked_entries_of_the_operator_get_no_infinite_gradient():
    x, mask = data(), torch.arange(12).reshape(6, 2) % 3 > 0
    (gradient,) = torch.autograd.grad(_operator(x, mask), x, torch.tensor(float("inf")))
    assert torch.equal(gradient[~mask], torch.zeros(4, 11))
    assert not gradient[mask].isfinite().any()


# ---- Other threads --------------------------------------------------------------------------------------------------


def in_threads(function, *arguments, count=4):
    threads = [threading.Thread(target=function, args=arguments) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@nodes
def test_threads_that_share_a_graph(name):
    """One thread gets the gradient; the others get PyTorch's error or the gradient too."""
    expected = gradient_of(name)
    problems = []

    def run(result, x, barrier):
        barrier.wait()
        try:
            (gradient,) = differentiate(name, result, [x])
            if gradient is None or not torch.allclose(gradient, expected, rtol=1e-6, atol=0):
                problems.append(gradient)
        except RuntimeError as error:
            if "second time" not in str(error):
                problems.append(error)

    for _ in range(60):
        x = data()
        in_threads(run, NODES[name][0](x), x, threading.Barrier(4))
    assert not problems


@nodes
def test_threads_with_a_retained_graph(name):
    """Each thread writes to its gradient while the other threads still run."""
    x = data()
    result, expected, wrong = NODES[name][0](x), gradient_of(name), []

    def run():
        for _ in range(50):
            (gradient,) = differentiate(name, result, [x], retain_graph=True)
            wrong.extend([] if torch.equal(gradient, expected) else [gradient])
            gradient.fill_(float("nan"))

    in_threads(run)
    assert not wrong


# ---- Inputs that change between the passes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NODES if name != "operator"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_detached_leaf_gets_its_gradient(name, create_graph):
    x = data()
    result = NODES[name][0](x)
    edge = torch.autograd.graph.get_gradient_edge(x)
    if name == "loss" or "gradient" in name:  # x has views, and PyTorch cannot detach it from them in place
        x.requires_grad_(False)
    else:
        x.detach_()
    (gradient,) = differentiate(name, result, [edge], create_graph=create_graph)
    torch.testing.assert_close(gradient, gradient_of(name))


@pytest.mark.parametrize("name", ["stacked loss", "scaled loss", "losses", "decode", "l2_loss"])
def test_a_detached_intermediate_tensor_passes_its_gradients(name):
    """Second derivatives are also correct, or PyTorch raises an error about a detached tensor that it saved."""

    def derivatives(detaches):
        w = data()
        x = w * w
        result = NODES[name][0](x)
        if detaches:
            x.detach_()
        (first,) = differentiate(name, result, [w], create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), [w])[0]

    if "loss" not in name or name == "l2_loss":
        with pytest.raises(RuntimeError, match="detached in-place"):
            derivatives(True)
        return
    for got, expected in zip(derivatives(True), derivatives(False), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_detached_prediction_in_a_list_gets_its_gradient():
    x, y = (data(seed)[:, 0].detach().requires_grad_() for seed in (0, 1))
    loss = gs.multi_step_loss({"p": POLICY}, {"p": [x, y]}, {"p": _uniform(6, 2, 11)}).loss
    edges = [torch.autograd.graph.get_gradient_edge(leaf) for leaf in (x, y)]
    expected = torch.autograd.grad(loss, edges, retain_graph=True)
    x.detach_()
    for got, wanted in zip(torch.autograd.grad(loss, edges, create_graph=True), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_inputs_that_require_grad_later_get_no_gradient():
    """The graph is recorded in the forward pass."""
    x, constant, target = data(), data(1).detach(), _uniform(6, 2, 11)
    weights = torch.ones(6)
    loss = gs.multi_step_loss(
        {"a": POLICY, "b": POLICY}, {"a": x, "b": constant}, {"a": target, "b": target}, importance_weights=weights
    ).loss
    (expected,) = torch.autograd.grad(loss, [x], retain_graph=True)
    for tensor in (constant, target, weights):
        tensor.requires_grad_()
    (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
    torch.testing.assert_close(gradient, expected)
    later = torch.autograd.grad(gradient.square().sum(), [constant, target, weights], allow_unused=True)
    assert later == (None, None, None)


# ---- Compiled autograd ----------------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["loss", "operator", "decode", "l2_loss"])
def test_compiled_autograd_raises_with_a_remedy(name):
    x = data()
    result = NODES[name][0](x)
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with enabled, pytest.raises(NotImplementedError, match=r"Backward: compiled autograd cannot .* compile the"):
        result.backward(NODES[name][1])
