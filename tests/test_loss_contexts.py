"""The loss in every context of PyTorch: correct, or a clear error; and its operator under PyTorch's own checks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import warnings

import pytest
import torch
from test_loss import ALL_HEADS, Walking, arguments, leaves, sizes_of, turned
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gradscale_ext as gs
from gradscale_ext.call.options import BY_HEAD, Options

pytestmark = pytest.mark.compiled

STEPS, BATCH = 3, 4
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 1]], dtype=torch.bool)
WIDTH = 12
# Compiled contexts have fewer heads, to save time: `A_FEW` with Inductor, `TRANSFORMED` for compiled transforms, which
# trace the large graph of the reference, and `EACH_KIND` otherwise.
KINDS = ("value", "wide_gauss", "bonus", "classes", "features", "huber", "end")
KINDS += ("quantiles", "prior", "consistency", "own")
EACH_KIND = {name: ALL_HEADS[name] for name in KINDS}
A_FEW = {name: ALL_HEADS[name] for name in ("value", "consistency", "own")}
TRANSFORMED = {name: ALL_HEADS[name] for name in ("value", "own")}


def make(batch=BATCH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    _, targets = arguments(batch=batch, steps=STEPS, heads=ALL_HEADS, dtype=dtype)
    return x, targets


def predictions_of(x, heads=ALL_HEADS):
    """Predictions as functions of one tensor `[B, WIDTH]`."""
    result = {}
    for number, (name, head) in enumerate(heads.items()):
        sizes = sizes_of(name, head)
        entries = [(k + 1) * 0.3 * x + 0.1 * number * x.sin() for k in range(STEPS - head.first_step)]
        result[name] = [entry[:, : math.prod(sizes)].reshape(-1, *sizes) for entry in entries]
    return result


def loss_with(function, targets, weights=WEIGHTS, mask=MASK, heads=ALL_HEADS):
    def loss_of(x):
        return function(
            heads,
            predictions_of(x, heads),
            {name: targets[name] for name in heads if name in targets},
            step_gradient_scale="unroll",
            importance_weights=weights,
            mask=mask,
        ).loss

    return loss_of


def gradient(function, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


X, TARGETS = make()
FUSED = loss_with(gs.multi_step_loss, TARGETS)


def pair(context):
    """The loss as a function of one tensor, and the same function by the reference."""
    heads = EACH_KIND if context.startswith(("compile", "export")) else ALL_HEADS
    if context == "compile" or context.startswith("compile of"):
        heads = A_FEW if context == "compile" else TRANSFORMED
    return [
        loss_with(function, TARGETS, heads=heads) for function in (gs.multi_step_loss, gs.reference.multi_step_loss)
    ]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


# ---- First derivatives ----------------------------------------------------------------------------------------------


def _vjp(f, x):
    value, pull = torch.func.vjp(f, x)
    return pull(torch.ones_like(value))[0]


def _stacked(f, x):
    """vmap over two copies of `x`."""
    both = torch.func.vmap(f)(torch.stack([x, x]))
    close(both[0], both[1])
    return both[0]


def _dual(f, x, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, direction))).tangent


def _with(manager, f, x):
    with manager:
        return gradient(f, x)


def _exported(f, x, strict):
    class Module(torch.nn.Module):
        def forward(self, x):
            return f(x)

    program = torch.export.export(Module(), (x,), strict=strict)
    assert any("multi_step_loss" in str(node.target) for node in program.graph.nodes)
    return gradient(program.module(), x)


def _reentrant(f, x):
    x = x.clone().requires_grad_()
    checkpoint(f, x, use_reentrant=True).backward()
    return x.grad


def _batched(f, x):
    x = x.clone().requires_grad_()
    (rows,) = torch.autograd.grad(f(x), x, torch.tensor([1.0, 2.0], dtype=x.dtype), is_grads_batched=True)
    close(rows[1], 2 * rows[0])
    return rows[0]


GRADIENTS = {
    "eager": gradient,
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "func.vjp": _vjp,
    "func.jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "func.jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "vmap of grad": lambda f, x: _stacked(torch.func.grad(f), x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(torch.stack([y, y])).mean())(x),
    "backward through vmap": lambda f, x: gradient(lambda y: torch.func.vmap(f)(torch.stack([y, y])).mean(), x),
    "is_grads_batched": _batched,
    "compile": lambda f, x: gradient(torch.compile(f, fullgraph=True), x),
    "compile, aot_eager": lambda f, x: gradient(torch.compile(f, fullgraph=True, backend="aot_eager"), x),
    "compile, eager": lambda f, x: gradient(torch.compile(f, fullgraph=True, backend="eager"), x),
    "compile of grad": lambda f, x: torch.compile(torch.func.grad(f), fullgraph=True, backend="aot_eager")(x),
    "compile of vmap of grad": lambda f, x: torch.compile(
        torch.func.vmap(torch.func.grad(f)), fullgraph=True, backend="aot_eager"
    )(torch.stack([x, x]))[1],
    "export": lambda f, x: _exported(f, x, strict=False),
    "export, strict": lambda f, x: _exported(f, x, strict=True),
    "checkpoint": lambda f, x: gradient(lambda y: checkpoint(f, y, use_reentrant=False), x),
    "checkpoint, reentrant": _reentrant,
    "compile of checkpoint": lambda f, x: gradient(
        torch.compile(lambda y: checkpoint(f, y, use_reentrant=False), fullgraph=True, backend="aot_eager"), x
    ),
    "saved-tensor hooks": lambda f, x: _with(
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t), f, x
    ),
    "anomaly mode": lambda f, x: _with(torch.autograd.detect_anomaly(check_nan=True), f, x),
    "autocast": lambda f, x: _with(torch.autocast("cpu", dtype=torch.bfloat16), f, x),
    "deterministic algorithms": lambda f, x: _with(_deterministic(), f, x),
}


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_kind_has_a_context():
    assert {type(head) for head in EACH_KIND.values()} == {type(head) for head in ALL_HEADS.values()}, "add to KINDS"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context", GRADIENTS)
def test_gradient(context):
    fused, reference = pair(context)
    close(GRADIENTS[context](fused, X), gradient(reference, X))


REFERENCE_IN = [context for context in GRADIENTS if "compile" not in context and "export" not in context]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context", REFERENCE_IN)
def test_gradient_of_the_reference(context):
    """The reference computes a second gradient, for `head_gradient_norms`, which must not disturb the context."""
    fused, reference = pair(context)
    close(GRADIENTS[context](reference, X), gradient(fused, X))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_an_entry_made_in_inference_mode(impl):
    with torch.inference_mode():
        constant = torch.randn(3, 4)
    x, target = torch.randn(3, 4, requires_grad=True), torch.full((3, 4), 0.25)
    heads = {"policy": gs.SoftCrossEntropy()}
    out = gs.multi_step_loss(heads, {"policy": [constant, x]}, {"policy": [target, target]}, impl=impl)
    (gradient,) = torch.autograd.grad(out.loss, x)
    torch.testing.assert_close(out.head_gradient_norms["policy"], gradient.norm())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context", ["eager", "backward through vmap", "checkpoint", "saved-tensor hooks"])
def test_gradient_norms_of_the_reference(context):
    targets = {name: TARGETS[name] for name in A_FEW if name in TARGETS}
    found = []

    def loss_of(x):
        out = gs.reference.multi_step_loss(A_FEW, predictions_of(x, A_FEW), targets)
        found.append(out.head_gradient_norms)
        return out.loss

    GRADIENTS[context](loss_of, X)
    predictions = predictions_of(X.clone().requires_grad_(), A_FEW)
    expected = gs.multi_step_loss(A_FEW, predictions, targets).head_gradient_norms
    for norms in found if context != "backward through vmap" else []:
        assert norms.keys() == expected.keys()
        for name, norm in norms.items():
            close(norm, expected[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "context",
    ["eager", "func.grad", "vmap of grad", "is_grads_batched", "compile, aot_eager", "export"],
)
def test_gradient_with_time_first(context):
    """There are as many samples as steps: confusing the two dimensions would change the gradient, and not raise."""
    x, targets = make(batch=STEPS)
    weights = torch.rand(STEPS, STEPS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"mask": MASK[:STEPS], "step_weights": weights, "step_gradient_scale": weights.sqrt()}
    targets = {name: targets[name] for name in A_FEW if name in targets}

    def loss_of(function, x, **options):
        return function(A_FEW, predictions_of(x, A_FEW), targets, **options).loss

    expected = gradient(lambda x: loss_of(gs.reference.multi_step_loss, x, **options), x)
    actual = GRADIENTS[context](lambda x: loss_of(gs.multi_step_loss, x, batch_first=False, **turned(options)), x)
    close(actual, expected)


# For an infinite element and a negative scale, reference.scale_gradient has a NaN gradient, as its docstring says.
@pytest.mark.parametrize(("value", "scale"), [(math.nan, 0.5), (math.nan, -0.5), (math.inf, 0.5)])
def test_a_nonfinite_loss_has_the_same_gradient_everywhere(value, scale):
    found = []
    for impl, create_graph in (("fused", False), ("auto", True), ("reference", False)):
        x = torch.tensor([[value, 0.5]], requires_grad=True)
        options = {"step_gradient_scale": [scale, 0.5], "impl": impl}
        out = gs.multi_step_loss({"own": gs.PerStepLoss()}, {"own": x}, {}, **options)
        found.append((torch.autograd.grad(out.loss, x, create_graph=create_graph)[0].detach(), out.head_gradient_norms))
    assert found[0][0].tolist() == [[scale, 0.5]]
    torch.testing.assert_close(found[1:], found[:1] * 2)


CONSTANTS = {
    "the target of head 'own' at step 0": lambda t: {"targets": {"own": t}},
    "importance_weights": lambda t: {"importance_weights": t[:, 0]},
    "step_weights": lambda t: {"step_weights": t},
    "step_gradient_scale": lambda t: {"step_gradient_scale": t},
    "the num_entries of head 'own'": lambda t: {"num_entries": {"own": t[0, 0]}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("context", ["jvp", "forward_ad"])
def test_constants_have_no_tangent(context, name):
    def loss_of(tensor):
        given = {"targets": {"own": torch.zeros(2, 3)}} | CONSTANTS[name](tensor)
        return gs.multi_step_loss({"own": gs.MeanSquaredError()}, {"own": torch.ones(2, 3)}, **given).loss

    def by_dual_number(tensor):
        with forward_ad.dual_level():
            loss_of(forward_ad.make_dual(tensor, tensor))

    differentiate = by_dual_number if context == "forward_ad" else lambda t: torch.func.jvp(loss_of, (t,), (t,))
    with pytest.raises(ValueError, match=f"multi_step_loss: {name} has a tangent of forward mode, .*; detach"):
        differentiate(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore")
def test_forward_mode_of_a_batched_loss():
    """vmap inside of jvp, and with a Hessian of it, with constants that are batched."""
    heads, x = {"own": gs.MeanSquaredError()}, torch.rand(3, 4, 2, dtype=torch.float64)
    targets, weights = torch.rand(3, 4, 2, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)

    def loss_of(x, targets, weights):
        return gs.multi_step_loss(heads, {"own": x}, {"own": targets}, importance_weights=weights).loss

    batched = lambda x: torch.func.vmap(loss_of)(x, targets, weights)
    one_by_one = lambda x: torch.stack([loss_of(*given) for given in zip(x, targets, weights, strict=True)])
    close(torch.func.jvp(batched, (x,), (x,))[1], torch.func.jvp(one_by_one, (x,), (x,))[1])
    close(torch.func.hessian(lambda x: batched(x).sum())(x), torch.func.hessian(lambda x: one_by_one(x).sum())(x))
    with pytest.raises(ValueError, match=r"the target of head 'own' .* has a tangent of forward mode"):
        torch.func.jvp(lambda t: torch.func.vmap(loss_of)(x, t, weights), (targets,), (targets,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context", ["func.grad", "compile, aot_eager", "export"])
def test_gradient_with_mappings_of_unusual_iteration(context):
    def loss_of(x):
        targets = Walking({name: TARGETS[name] for name in A_FEW if name in TARGETS})
        masks = Walking({"value": MASK, "own": ~MASK})
        return gs.multi_step_loss(A_FEW, Walking(predictions_of(x, A_FEW)), targets, mask=masks).loss

    close(GRADIENTS[context](loss_of, X), gradient(loss_of, X))


TANGENTS = {
    "func.jvp": lambda f, x: lambda v: torch.func.jvp(f, (x,), (v,))[1],
    "forward_ad": lambda f, x: lambda v: _dual(f, x, v),
    "compile of jvp": lambda f, x: torch.compile(
        lambda v: torch.func.jvp(f, (x,), (v,))[1], fullgraph=True, backend="aot_eager"
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context", TANGENTS)
def test_tangent(context):
    fused, reference = pair(context)
    push, expected = TANGENTS[context](fused, X), gradient(reference, X)
    generator = torch.Generator().manual_seed(3)
    for direction in (torch.ones_like(X), torch.randn(X.shape, generator=generator, dtype=X.dtype)):
        close(push(direction), (expected * direction).sum())


# ---- Values and second derivatives ----------------------------------------------------------------------------------


def _aot_eager(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def _under(manager, f, x):
    with manager:
        return f(x).clone()


VALUES = {
    "eager": lambda f, x: f(x),
    "no_grad": lambda f, x: _under(torch.no_grad(), f, x),
    "inference_mode": lambda f, x: _under(torch.inference_mode(), f, x),
    "vmap": _stacked,
    "compile, no_grad": lambda f, x: _under(torch.no_grad(), _aot_eager(f), x),
    "compile, inference_mode": lambda f, x: _under(torch.inference_mode(), _aot_eager(f), x),
    "compile of vmap": lambda f, x: torch.compile(torch.func.vmap(f), fullgraph=True, backend="aot_eager")(
        torch.stack([x, x])
    )[0],
}


@pytest.mark.parametrize("context", VALUES)
def test_value(context):
    fused, reference = pair(context)
    close(VALUES[context](fused, X), reference(X))


def _second_gradient(f, x):
    def directional(y):
        y = y.requires_grad_() if not y.requires_grad else y
        (g,) = torch.autograd.grad(f(y), y, create_graph=True)
        return g

    return torch.autograd.functional.jacobian(directional, x)


HESSIANS = {
    "create_graph": _second_gradient,
    "func.hessian": lambda f, x: torch.func.hessian(f)(x),
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
    "compile of hessian": lambda f, x: torch.compile(torch.func.hessian(f), fullgraph=True, backend="aot_eager")(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "context", [pytest.param(name, marks=[pytest.mark.slow] * (name == "compile of hessian")) for name in HESSIANS]
)
def test_second_derivative(context):
    expected = torch.autograd.functional.hessian(pair(context)[1], X, vectorize=True)
    torch.testing.assert_close(HESSIANS[context](pair(context)[0], X), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_has_no_second_derivative_and_says_so(backend):
    x = X.clone().requires_grad_()
    fused = loss_with(gs.multi_step_loss, TARGETS, heads=A_FEW)
    loss = torch.compile(fused, fullgraph=True, backend=backend)(x)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"second derivative|double backward"):
        torch.autograd.grad(torch.autograd.grad(loss, x, create_graph=True)[0].square().sum(), x)


# ---- The compiled operator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none", "batch_first": False}, {"reduction": "valid_mean", "nonfinite": "skip"}],
)
def test_compiled_outputs_equal_eager_ones(options):
    heads = A_FEW if options else EACH_KIND
    targets = {name: TARGETS[name] for name in heads if name in TARGETS}

    def outputs(x):
        mask = MASK if options.get("batch_first", True) else MASK.T
        out = gs.multi_step_loss(heads, predictions_of(x, heads), targets, mask=mask, **options)
        return out.loss, [getattr(out, field.name) for field in dataclasses.fields(out)[1:]]

    results = []
    for function in (outputs, _aot_eager(outputs)):
        x = X.clone().requires_grad_()
        with torch.no_grad():
            x[3, 0] = float("inf")
        loss, rest = function(x)
        grad_output = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64) if loss.dim() else None
        results.append((loss, rest, torch.autograd.grad(loss, x, grad_output)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("batch_first", [True, False])
def test_compiled_stacked_predictions(batch_first):
    heads = {"value": ALL_HEADS["value"], "reward": ALL_HEADS["reward"], "own": gs.PerStepLoss()}
    predictions, targets = arguments(heads=heads)
    dim = 1 if batch_first else 0
    stacked = {name: torch.stack(entries, dim).detach() for name, entries in predictions.items()}

    def function(predictions):
        return gs.multi_step_loss(heads, predictions, targets, batch_first=batch_first, step_weights=[1, 2, 3, 4]).loss

    results = []
    for run in (function, _aot_eager(function)):
        given = {name: entries.clone().requires_grad_() for name, entries in stacked.items()}
        results.append(torch.autograd.grad(run(given), list(given.values())))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_compiled_once_for_all_batch_sizes():
    torch._dynamo.config.error_on_recompile = True
    try:
        function = torch.compile(
            lambda x, targets, weights: loss_with(gs.multi_step_loss, targets, weights, None, A_FEW)(x),
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        for batch in (5, 7):  # sizes that no other dimension has
            x, targets = make(batch)
            weights = torch.rand(batch, dtype=torch.float64)
            expected = loss_with(gs.reference.multi_step_loss, targets, weights, None, A_FEW)
            actual = x.clone().requires_grad_()
            function(actual, targets, weights).backward()
            close(actual.grad, gradient(expected, x))
    finally:
        torch._dynamo.config.error_on_recompile = False


def test_exported_with_any_batch_size():
    module = gs.MultiStepLoss(value=ALL_HEADS["value"], classes=gs.SoftCrossEntropy())

    class Loss(torch.nn.Module):
        def forward(self, logits, policy, target, classes):
            predictions = {"value": [logits, 2 * logits], "classes": [policy, policy]}
            return module(predictions, {"value": [target, target], "classes": [classes, classes]}).loss

    def example(batch):
        return torch.randn(batch, 11), torch.randn(batch, 4), torch.randn(batch), torch.randint(4, (batch,))

    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(Loss(), example(4), dynamic_shapes=[{0: batch}] * 4)
    inputs = example(9)
    torch.testing.assert_close(program.module()(*inputs), Loss()(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_half_gradients_are_rounded_once(dtype):
    """Loss scaling multiplies before rounding, so that gradients below the smallest half number are kept."""
    logits = (torch.randn(64, 601, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    target = torch.linspace(-20, 20, 64)
    heads = {"v": gs.TwoHot(gs.Support.muzero())}
    function = _aot_eager(lambda x: gs.multi_step_loss(heads, {"v": [x]}, {"v": [target]}).loss)
    x = logits.clone().requires_grad_()
    (function(x) * 65536).backward()
    exact = logits.double().requires_grad_()
    (gs.reference.multi_step_loss(heads, {"v": [exact]}, {"v": [target]}).loss * 65536).backward()
    assert x.grad.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    error = (x.grad.double() - exact.grad).abs()
    assert (error <= 1.01 * unit * exact.grad.abs() + 2e-7 * exact.grad.abs().max()).all()


def test_gradients_with_grad_scaler():
    """After `unscale_`, the gradients equal those without a scaler."""
    gradients = []
    for scaled in (False, True):
        torch.manual_seed(0)
        linear = torch.nn.Linear(6, 11)
        optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        out = gs.multi_step_loss(
            {"v": ALL_HEADS["value"]}, {"v": [linear(torch.ones(4, 6))]}, {"v": [torch.arange(4.0)]}
        )
        scaler.scale(out.loss).backward()
        scaler.unscale_(optimizer)
        gradients.append(linear.weight.grad)
    torch.testing.assert_close(*gradients)


def test_opcheck():
    heads = {name: ALL_HEADS[name] for name in ("value", "reward", "classes", "own")}
    predictions, targets = arguments(heads=heads, batch=3, steps=3)
    record = gs.heads.record_of(heads.values())
    mask = torch.ones(3, 3, dtype=torch.bool)
    flat_targets = [target for entries in targets.values() for target in entries]
    for requires_grad in (True, False):
        flat = [p.detach().requires_grad_(requires_grad) for p in leaves(predictions)]
        for reduction, batch_first in (("mean", True), ("none", True), ("mean", False)):
            weight = torch.tensor(2.0, requires_grad=requires_grad)
            by_head = {
                "step_weights": [torch.rand(3)],  # of all heads
                "step_gradient_scale": [],
                "importance_weights": [None, torch.rand(3), None, None],
                "mask": [mask, None, None, None],
                "head_weights": [weight, None, None, weight],
                "num_entries": [torch.tensor(5.0), None, None, None] if reduction == "mean" else [],
            }
            options = Options(**by_head, reduction=reduction, batch_first=batch_first)
            torch.library.opcheck(
                torch.ops.gradscale_ext.multi_step_loss.default,
                (flat, flat_targets, [3, 2, 2, 3], [3, 2, 2, -1, -1], *record, [], *options),
                # test_aot_dispatch_dynamic compares outputs after a backward pass. The operator's outputs include
                # gradients, whose memory the backward pass takes, so that their content is undefined.
                test_utils=["test_schema", "test_autograd_registration", "test_faketensor"]
                + ["test_aot_dispatch_dynamic"] * (not requires_grad),
            )


def test_options_have_the_same_order_in_both_languages():
    schema = torch.ops.gradscale_ext.multi_step_loss.default._schema
    assert tuple(argument.name for argument in schema.arguments)[-len(Options._fields) :] == Options._fields


def test_the_operator_rejects_transforms():
    heads = {"own": gs.PerStepLoss()}
    record = gs.heads.record_of(heads.values())

    def operator(x):
        return torch.ops.gradscale_ext.multi_step_loss([x], [], [1], [-1], *record, [], *Options(*[[]] * len(BY_HEAD)))[
            0
        ]

    x = torch.ones(3)
    with pytest.raises(NotImplementedError, match=re.escape("gradscale_ext.multi_step_loss")):
        torch.func.grad(operator)(x)
    with pytest.raises(NotImplementedError, match="forward mode"), forward_ad.dual_level():
        operator(forward_ad.make_dual(x, x))


# ---- Other devices --------------------------------------------------------------------------------------------------


def test_devices_without_kernels_use_the_reference_with_one_warning():
    gs._context.say_once.cache_clear()
    heads = {"own": gs.PerStepLoss()}
    losses = torch.ones(3, 2, device="meta")
    with pytest.warns(UserWarning, match="no kernels for meta tensors"):
        assert gs.multi_step_loss(heads, {"own": losses}, {}).loss.device.type == "meta"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.multi_step_loss(heads, {"own": losses}, {})
