"""The results of the CUDA kernels, against `gradscale_ext.reference` on the CPU in float64 with the same inputs.

The tests need a GPU and are skipped without one; with GRADSCALE_NEED_GPU=1, which `make gpu` sets, they fail instead.
With --simulated-kernels=LIBRARY the same tests run the same kernels on CPU tensors. How calls run on a GPU (streams,
graphs, launches, synchronizations) is tested in gpu/test_execution.py.

Tolerances: float64 1e-12; float32 a few roundings; half types the same, plus one rounding of the result.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from contexts import CASES, POINT, WEIGHTS
from exact import check_close as check_exact
from exact import rows_of
from test_adaptive import assert_clipped, parameters_of
from test_loss import ALL_HEADS, OPTIONS, arguments, leaves, norm_of_gradients, with_zeros_in_gradients
from test_returns import FLAGS, FUNCTIONS, call, window_data
from test_returns import inputs_of as inputs_of_returns
from trajectories import random_data

import gradscale_ext as gs
from gradscale_ext._native import _C, DEVICE_TYPES

pytestmark = pytest.mark.cuda

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none", "valid_mean"]
WIDTHS = [1, 2, 31, 33, 82, 362, 601, 1025, 4672, 9001]
FALLBACKS = ("multi_step_loss", "loss_of", "decode", "l2_loss", "tensor_statistics", "clipping_of")
FALLBACKS += ("unit_norms", "clip_units")


class Reference:
    """The functions of `gradscale_ext.reference`, for tests to call. `refused` makes calls by the package fail."""

    def __init__(self):
        self.asked = False
        for name in FALLBACKS:
            setattr(self, name, self._asking(getattr(gs.reference, name)))

    def _asking(self, function):
        def ask(*args, **kwargs):
            self.asked = True
            try:
                return function(*args, **kwargs)
            finally:
                self.asked = False

        return ask

    def refused(self, name):
        function = getattr(gs.reference, name)

        def refuse(*args, **kwargs):
            assert self.asked, f"reference.{name} was called where a kernel was expected"
            return function(*args, **kwargs)

        return refuse


REFERENCE = Reference()


def need_gpu():
    """Skip, or fail if GRADSCALE_NEED_GPU=1 requires the GPU and its kernels."""
    if torch.cuda.is_available() and "cuda" in DEVICE_TYPES:
        return
    reason = "gradscale_ext has no compiler for its kernels" if torch.cuda.is_available() else "there is no GPU"
    if os.environ.get("GRADSCALE_NEED_GPU") == "1":
        pytest.fail(f"GRADSCALE_NEED_GPU=1 is set, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def device(request):
    if request.config.getoption("--simulated-kernels") is not None:
        return torch.device("cpu")
    need_gpu()
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def kernels_only(request, monkeypatch):
    """Fails a test in which plain PyTorch replaces a kernel, unless the test uses `by_reference`."""
    if "by_reference" not in request.fixturenames:
        for name in FALLBACKS:
            owner = gs.reference.supports if name == "decode" else gs.reference
            monkeypatch.setattr(owner, name, REFERENCE.refused(name))


@pytest.fixture
def by_reference():
    """Allows the reference, which computes second derivatives, transforms and l2_loss in the compiler."""


def converted(entries, device, dtype=None):
    """Tensors in lists and dicts, moved to a device, floating ones converted to a dtype; requires_grad is preserved."""
    if isinstance(entries, dict):
        return {name: converted(value, device, dtype) for name, value in entries.items()}
    if isinstance(entries, list | tuple):
        return type(entries)(converted(value, device, dtype) for value in entries)
    if not isinstance(entries, torch.Tensor):
        return entries
    floating = entries.is_floating_point()
    moved = entries.detach().to(device=device, dtype=dtype if floating else None, copy=True)
    return moved.requires_grad_(entries.requires_grad)


def tolerance_of(dtype):
    return 1e-12 if dtype == torch.float64 else 3e-6


def check_close(ours, truth, dtype, scale=None, what=""):
    """Compare. The tolerance is relative to `scale` (default: the largest value), plus one rounding of a half type."""
    assert ours.shape == truth.shape, what
    if scale is None:
        finite = truth.detach()[truth.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = tolerance_of(dtype)
    rounding = torch.finfo(ours.dtype).eps if ours.dtype.itemsize == 2 else 0.0
    least = torch.finfo(ours.dtype).smallest_normal * rounding
    torch.testing.assert_close(
        ours.detach().cpu().double(),
        truth.detach().double(),
        rtol=0.51 * rounding,
        atol=tolerance * scale + least,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def largest(truth):
    """Magnitude of a gradient, for a tolerance; a gradient that is zero up to rounding counts as 1e-3."""
    finite = truth.detach()[truth.isfinite()]
    return max(float(finite.abs().max()) if finite.numel() else 0.0, 1e-3)


def check_outputs(heads, out, truth, dtype):
    width = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.num_nonfinite.item() == truth.num_nonfinite.item()
    scalars = ("head_means", "head_losses", "head_gradient_norms", "max_abs_logit")
    for field in ("loss", "per_sample", "per_step", *scalars, "expected", "entropy"):
        ours, theirs = getattr(out, field), getattr(truth, field)
        assert not isinstance(theirs, dict) or ours.keys() == theirs.keys()
        pairs = (
            {name: (ours[name], theirs[name]) for name in theirs} if isinstance(theirs, dict) else {"": (ours, theirs)}
        )
        for name, (a, b) in pairs.items():
            assert a.dtype == width
            scale = max(largest(b), 1.0)
            if field == "expected":
                support = heads[name].support
                scale = max(scale, gs.reference.raw_centers(support, torch.float64).abs().max().item())
            check_close(a, b, dtype, scale, f"{field} {name}")


def check(heads, predictions, targets, device, dtype, *, grad_output=None, function=None, target_dtype=None, **options):
    """Compare outputs and gradients; `predictions` are rounded to `dtype` first. Returns our output and gradients."""
    ours = converted(predictions, device, dtype)
    exact = converted(ours, "cpu", torch.float64)
    target_dtype = target_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    our_targets = converted(targets, device, target_dtype)
    function = function or gs.multi_step_loss
    out = function(heads, ours, our_targets, **converted(options, device))
    truth = REFERENCE.multi_step_loss(heads, exact, converted(our_targets, "cpu", torch.float64), **options)
    check_outputs(heads, out, truth, dtype)
    assert out.loss.device.type == device.type
    factor = None if grad_output is None else torch.as_tensor(grad_output, dtype=out.loss.dtype)
    factors = (None, None) if factor is None else (factor.to(device), factor.double())
    found = torch.autograd.grad(out.loss, leaves(ours), factors[0])
    expected = torch.autograd.grad(truth.loss, leaves(exact), factors[1])
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == dtype
        check_close(a, b, dtype, scale=largest(b), what=f"gradient {number}")
    return out, found


# ---- The loss -------------------------------------------------------------------------------------------------------


def heads_of(width):
    support = gs.Support(-20, 20, max(width, 2))
    raw = gs.Support(-4, 6, max(width, 2), transform="symlog", space="raw")
    return {
        "two_hot": gs.TwoHot(support, weight=0.25),
        "smooth": gs.TwoHot(support, label_smoothing=0.1),
        "raw": gs.TwoHot(raw),
        "gauss": gs.HLGauss(support),
        "policy": gs.SoftCrossEntropy(weight=1.5),
        "bonus": gs.SoftCrossEntropy(label_smoothing=0.2, entropy_weight=0.3, subtract_target_entropy=True),
        "classes": gs.SoftCrossEntropy(),
        "distance": gs.MeanSquaredError(transform="signed_hyperbolic"),
        "huber": gs.Huber(delta=2.0),
        "quantiles": gs.QuantileHuber(kappa=0.5),
        "prior": gs.CategoricalKL(free_nats=1.0),
        "posterior": gs.CategoricalKL(unimix=0.0, prediction="p"),
        "cosine": gs.NegativeCosine(),
        "end": gs.BinaryCrossEntropy(),
        "own": gs.PerStepLoss(weight=0.1),
    }


def inputs_of(heads, width, batch, steps=1, seed=0):
    """Lists of per-step predictions and targets."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    predictions, targets = {}, {}
    for name, head in heads.items():
        vector = bool(head.forms[-1].predictions[0].shape)
        shape = (head.support.num_bins,) if hasattr(head, "support") else (width,) if vector else ()
        if isinstance(head, gs.CategoricalKL):
            shape = (3, width)
        predictions[name] = [(normal(*shape) * 3).requires_grad_() for _ in range(steps)]
        if name == "own":
            continue
        if hasattr(head, "support"):
            make = lambda: normal() * 30
        elif name == "classes":
            make = lambda: torch.randint(width, (batch,), generator=generator)
        elif name in ("policy", "bonus"):
            make = lambda: normal(width).softmax(-1)
        elif name == "end":
            make = lambda: normal().sigmoid()
        elif name == "quantiles":
            make = lambda: normal(min(width, 300) + 33)  # the reference has a tensor of all pairs
        else:
            make = lambda shape=shape: normal(*shape)
        targets[name] = [make() for _ in range(steps)]
    return predictions, targets


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        *((width, torch.float32) for width in WIDTHS),
        *((width, torch.bfloat16) for width in (1, 33, 601)),
        *((width, torch.float16) for width in (82, 4672)),
        *((width, torch.float64) for width in (2, 601)),
    ],
)
def test_widths(width, dtype, device):
    heads = heads_of(width)
    check(heads, *inputs_of(heads, width, batch=5), device, dtype)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (449, torch.float32),
        (1858, torch.bfloat16),
        (4672, torch.float32),
        (4672, torch.bfloat16),
        (9001, torch.float16),
        (20000, torch.float32),
        (20481, torch.float32),
    ],
)
def test_wide_policies(width, dtype, device):
    """Most actions are illegal in one row, and one entry is masked."""
    heads = {name: heads_of(33)[name] for name in ("policy", "bonus", "classes")}
    predictions, targets = inputs_of(heads, width, batch=3)
    with_entropy = gs.SoftCrossEntropy(entropy_weight=0.3, subtract_target_entropy=True)
    smooth = gs.SoftCrossEntropy(label_smoothing=0.1)
    for name, like, head in (
        ("entropy", "policy", with_entropy),
        ("entropy of classes", "classes", with_entropy),
        ("smooth classes", "classes", smooth),
    ):
        heads[name] = head
        predictions[name] = [step.detach().clone().requires_grad_() for step in predictions[like]]
        targets[name] = [step.clone() for step in targets[like]]
    illegal = torch.rand(width, generator=torch.Generator().manual_seed(1)) < 0.9
    for name in ("policy", "entropy"):
        with torch.no_grad():
            predictions[name][0][1, illegal] = -math.inf
        targets[name][0][1, illegal] = 0
    mask = {"policy": torch.tensor([[True], [True], [False]])}
    target_dtype = None if width % 2 else dtype
    for grad_output in (1.0, -0.5):
        out, _ = check(
            heads, predictions, targets, device, dtype, mask=mask, grad_output=grad_output, target_dtype=target_dtype
        )
    assert out.per_step["policy"].isfinite().all()


@pytest.mark.parametrize("illegal", ["one action", "one lane's", "all but one"])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(8192, torch.float32), (8193, torch.float32), (20480, torch.float32), (10928, torch.bfloat16)],
)
def test_illegal_actions_of_wide_policies(width, dtype, illegal, device):
    """The lanes of a warp differ in whether one of their actions is illegal. Except at the width 8192, threads have too
    few registers for the targets, and load them again in step."""
    actions = torch.arange(width)
    patterns = {"one action": actions == width - 700, "one lane's": actions % 512 == 77, "all but one": actions != 700}
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, width, generator=generator, dtype=torch.float64)
    given = torch.randn(2, width, generator=generator, dtype=torch.float64).softmax(1)
    logits[1, patterns[illegal]] = -math.inf
    given[1, patterns[illegal]] = 0
    heads = {"policy": gs.SoftCrossEntropy(), "classes": gs.SoftCrossEntropy(entropy_weight=0.3)}
    targets = {"policy": [given], "classes": [torch.tensor([3, 700])]}
    predictions = {name: [logits.clone().requires_grad_()] for name in heads}
    _, found = check(heads, predictions, targets, device, dtype)
    for gradient in found:
        assert (gradient.cpu()[1, patterns[illegal]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 2, 33, 300, 513])
def test_batches(batch, dtype, device):
    """More than 256 samples are summed over several blocks."""
    heads = heads_of(5)
    out, _ = check(heads, *inputs_of(heads, 5, batch, steps=2), device, dtype, step_gradient_scale="unroll")
    if batch == 0:
        assert out.loss.item() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, reduction, dtype, device):
    predictions, targets = arguments(heads=ALL_HEADS)
    grad_output = [1.0, -2.0, 0.5] if reduction == "none" else None
    keywords = {**OPTIONS[options], "reduction": reduction}
    check(ALL_HEADS, predictions, targets, device, dtype, grad_output=grad_output, **keywords)


def repeated(given, batch):
    """Options for 3 samples, extended to `batch` samples."""
    if isinstance(given, dict):
        return {name: repeated(value, batch) for name, value in given.items()}
    by_sample = isinstance(given, torch.Tensor) and given.dim() > 0 and given.shape[0] == 3
    return given[torch.arange(batch) % 3] if by_sample else given


# A set of loss_totals has 32 samples; from 4,097 samples on, a block has several sets.
SEVERAL_BLOCKS = [40, 70]


SIZES = [(40, 0), (70, 0), (70, 20)]  # samples, and further heads: of 26, a block sums up 12 at a time
BLOCKS = [
    (name, nonfinite, reduction, *SIZES[(i + j + k) % 3])
    for i, name in enumerate(["none", *OPTIONS])
    for j, reduction in enumerate(REDUCTIONS)
    for k, nonfinite in enumerate(["propagate", "skip"])
]


@pytest.mark.parametrize(("name", "nonfinite", "reduction", "batch", "more_heads"), BLOCKS)
def test_options_of_several_blocks(name, nonfinite, reduction, batch, more_heads, device):
    """With samples to skip in each set of samples."""
    heads = {
        name: head for name, head in ALL_HEADS.items() if name in ("value", "reward", "policy", "raw", "end", "own")
    }
    heads |= {f"own {k}": gs.PerStepLoss(weight=1 + k, first_step=k % 3) for k in range(more_heads)}
    predictions, targets = arguments(batch, heads=heads)
    if nonfinite == "skip":
        with torch.no_grad():
            predictions["value"][1][[7, 33, batch - 1], 2] = math.nan
            predictions["own"][0][[8, 33, batch - 2]] = math.inf
            if more_heads:
                predictions["own 19"][2][[9, 40]] = math.nan
    keywords = {**repeated(OPTIONS.get(name, {}), batch), "reduction": reduction, "nonfinite": nonfinite}
    keywords = {
        name: {k: v for k, v in value.items() if k in heads} if isinstance(value, dict) else value
        for name, value in keywords.items()
    }
    grad_output = torch.linspace(-1, 2, batch) if reduction == "none" else None
    check(heads, predictions, targets, device, torch.float32, grad_output=grad_output, **keywords)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("reduction", ["mean", "none", "valid_mean"])
@pytest.mark.parametrize("batch", [4096, 4100, 9000])
def test_blocks_with_several_sets_of_samples(batch, reduction, nonfinite, device):
    heads = {"own": gs.PerStepLoss(weight=0.5), "end": gs.BinaryCrossEntropy()}
    predictions, targets = inputs_of(heads, 1, batch, steps=2)
    mask = torch.rand(batch, 2, generator=torch.Generator().manual_seed(3)) < 0.7
    if nonfinite == "skip":
        with torch.no_grad():
            predictions["own"][1][[5, 40, 70, batch - 1]] = math.nan
            mask[[5, 40, 70, batch - 1]] = True
    grad_output = torch.linspace(-1, 2, batch) if reduction == "none" else None
    options = {"mask": mask, "reduction": reduction, "nonfinite": nonfinite, "grad_output": grad_output}
    out, _ = check(heads, predictions, targets, device, torch.float32, **options)
    assert out.num_nonfinite.item() == (4 if nonfinite == "skip" else 0)


@pytest.mark.parametrize("batch", [5, *SEVERAL_BLOCKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_output", [1.0, -0.5])
@pytest.mark.parametrize("options", [{"reduction": "none"}, {"reduction": "valid_mean", "nonfinite": "skip"}], ids=str)
def test_head_weights(options, grad_output, dtype, batch, device):
    """Weights differ by head, and head weights get their gradients; one is 0."""
    heads = {name: heads_of(33)[name] for name in ("two_hot", "policy", "own")}
    predictions, targets = inputs_of(heads, 33, batch, steps=3)
    if "nonfinite" in options:
        with torch.no_grad():
            predictions["policy"][1][3] = math.inf
    generator = torch.Generator().manual_seed(3)
    given = {
        "head_weights": {
            "two_hot": torch.tensor(0.5, requires_grad=True),
            "policy": torch.tensor(0.0, dtype=torch.float64, requires_grad=True),
            "own": 2.0,
        },
        "importance_weights": {"policy": torch.rand(batch, generator=generator)},
        "step_weights": {"two_hot": [1.0, 0.5, 0.25], "own": torch.rand(batch, 3, generator=generator)},
        "step_gradient_scale": {"policy": "unroll"},
        "mask": {"two_hot": torch.rand(batch, 3, generator=generator) < 0.7},
    }
    factors = [grad_output, -2.0, 0.5, 1.0, 0.0] * (batch // 5)
    factor = factors if options["reduction"] == "none" else grad_output
    ours = converted(given, device)
    found = []

    def function(*args, **keywords):
        out = gs.multi_step_loss(*args, **{**keywords, **ours})
        weights = [ours["head_weights"][name] for name in ("two_hot", "policy")]
        loss_gradient = torch.as_tensor(factor, dtype=out.loss.dtype, device=device)
        found.extend(torch.autograd.grad(out.loss, weights, loss_gradient, retain_graph=True))
        return out

    check(heads, predictions, targets, device, dtype, grad_output=factor, function=function, **given, **options)
    exact = converted(converted(predictions, "cpu", dtype), "cpu", torch.float64)
    truth = REFERENCE.multi_step_loss(heads, exact, converted(targets, "cpu", torch.float64), **given, **options)
    weights = [given["head_weights"][name] for name in ("two_hot", "policy")]
    expected = torch.autograd.grad(truth.loss, weights, torch.as_tensor(factor, dtype=torch.float64))
    for a, b in zip(found, expected, strict=True):
        check_close(a, b, torch.float32, max(largest(b), 1.0), "gradient of a head weight")


@pytest.mark.parametrize("reduction", ["mean", "valid_mean"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [5, *SEVERAL_BLOCKS])
def test_num_entries(batch, masked, reduction, device):
    """Counts as numbers, as tensors of each type, and of 0; one head keeps its own."""
    heads = {name: heads_of(33)[name] for name in ("two_hot", "policy", "own", "end")}
    predictions, targets = inputs_of(heads, 33, batch, steps=3)
    mask = torch.rand(batch, 3, generator=torch.Generator().manual_seed(3)) < 0.7
    options = {"mask": mask if masked else {"two_hot": mask}, "reduction": reduction}
    for counts in ((7, torch.tensor(11), torch.tensor(2.5)), (torch.tensor(0), torch.tensor(3.0).double(), 0.5)):
        given = {"num_entries": dict(zip(("two_hot", "policy", "own"), counts, strict=True))}
        check(heads, predictions, targets, device, torch.float32, grad_output=0.5, **options, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_output", [1.0, 65536.0, -0.5, 0.0, [1.0, 65536.0, -0.5, 0.0]], ids=str)
def test_grad_output(grad_output, dtype, device):
    """The kernels recognize a gradient of 1; the factor of a loss scaler is not rounded."""
    heads = heads_of(33)
    grad_output = torch.tensor(grad_output)
    if dtype == torch.float16:
        grad_output[grad_output == 65536] = 128.0  # stays within float16's range
    reduction = "none" if grad_output.dim() else "mean"
    check(heads, *inputs_of(heads, 33, batch=4), device, dtype, grad_output=grad_output, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_infinite_grad_output(reduction, dtype, device):
    """No element of a gradient stays finite, except elements that are 0. Masked entries stay 0."""
    heads = heads_of(33)
    predictions, targets = converted(inputs_of(heads, 33, batch=4), device, dtype)
    mask = torch.tensor([[True], [False], [True], [True]], device=device)
    out = gs.multi_step_loss(heads, predictions, targets, mask=mask, reduction=reduction)
    incoming = torch.ones_like(out.loss)
    finite = torch.autograd.grad(out.loss, leaves(predictions), incoming, retain_graph=True)
    infinite = torch.autograd.grad(out.loss, leaves(predictions), incoming * math.inf)
    for a, b in zip(finite, infinite, strict=True):
        assert not b[a != 0].isfinite().any()
        assert (b[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_twice(dtype, device):
    predictions, targets = converted(inputs_of(heads_of(33), 33, batch=4), device, dtype)
    out = gs.multi_step_loss(heads_of(33), predictions, targets)
    for factor in (1.0, 0.25):
        g = torch.tensor(factor, device=device)
        first = torch.autograd.grad(out.loss, leaves(predictions), g, retain_graph=True)
        again = torch.autograd.grad(out.loss, leaves(predictions), g, retain_graph=True)
        assert all(torch.equal(a, b) and a is not b for a, b in zip(first, again, strict=True))
        first[0].zero_()  # belongs to the caller
    last = torch.autograd.grad(out.loss, leaves(predictions))
    whole = torch.autograd.grad(gs.multi_step_loss(heads_of(33), predictions, targets).loss, leaves(predictions))
    assert all(torch.equal(a, b) for a, b in zip(last, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("width", [3, 601])
def test_stacked(width, batch_first, dtype, device):
    heads = heads_of(width)
    dim = 1 if batch_first else 0
    predictions, targets = (
        {name: torch.stack([e.detach() for e in entries], dim) for name, entries in given.items()}
        for given in inputs_of(heads, width, batch=3, steps=4)
    )
    predictions = {name: entries.requires_grad_() for name, entries in predictions.items()}
    check(heads, predictions, targets, device, dtype, batch_first=batch_first, step_weights=[1.0, 0.5, 0.25, 2.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 33, 82, 601, 4672])
def test_memory_that_is_not_aligned_or_not_contiguous(width, dtype, device):
    heads = {"policy": gs.SoftCrossEntropy(), "distance": gs.MeanSquaredError()}
    generator = torch.Generator().manual_seed(width)
    batch = 3

    def layouts():
        """The same values in tensors with arbitrary alignment."""
        values = torch.randn(batch, width, generator=generator, dtype=torch.float64).to(device, dtype)
        for offset in (1, 3):
            shifted = torch.zeros(batch * width + offset, dtype=dtype, device=device)[offset:].view(batch, width)
            yield shifted.copy_(values)
        yield torch.zeros(batch, width + 1, dtype=dtype, device=device)[:, 1:].copy_(values)
        yield torch.zeros(batch, 2 * width, dtype=dtype, device=device)[:, ::2].copy_(values)
        yield torch.zeros(width, batch, dtype=dtype, device=device).t().copy_(values)
        yield values[:1].expand(batch, width)

    predictions = {name: [x.detach().requires_grad_() for x in layouts()] for name in heads}
    targets = {name: [x.detach().abs() for x in layouts()] for name in heads}
    strided = {name: list(reversed([x.detach() for x in layouts()])) for name in heads}
    for chosen in (targets, strided):
        out = gs.multi_step_loss(heads, predictions, chosen)
        exact = converted(predictions, "cpu", torch.float64)
        truth = REFERENCE.multi_step_loss(heads, exact, converted(chosen, "cpu", torch.float64))
        check_outputs(heads, out, truth, dtype)
        found = torch.autograd.grad(out.loss, leaves(predictions))
        for a, b in zip(found, torch.autograd.grad(truth.loss, leaves(exact)), strict=True):
            check_close(a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_of_the_predictions_dtype(dtype, device):
    heads = heads_of(33)
    check(heads, *inputs_of(heads, 33, batch=4), device, dtype, target_dtype=dtype)


@pytest.mark.parametrize("steps", [41, 120])
def test_many_steps(steps, device):
    """More tensors than fit into the arguments of a launch."""
    heads = {name: head for name, head in heads_of(5).items() if name in ("two_hot", "policy", "raw")}
    check(heads, *inputs_of(heads, 5, batch=2, steps=steps), device, torch.float32, step_gradient_scale="unroll")


def test_dtypes_of_one_call(device):
    """Predictions in float64 together with other dtypes use separate kernels."""
    heads = {"a": gs.SoftCrossEntropy(), "b": gs.SoftCrossEntropy(), "c": gs.TwoHot(gs.Support(-4, 6, 9, space="raw"))}
    heads["d"] = heads["c"]
    dtypes = dict(zip(heads, (torch.float64, torch.bfloat16, torch.float32, torch.float64), strict=True))
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(3, 2, 9, generator=generator, dtype=torch.float64) for name in heads}
    ours = {n: x.to(device=device, dtype=dtypes[n], copy=True).requires_grad_() for n, x in values.items()}
    exact = converted(ours, "cpu", torch.float64)
    targets = {n: (2 * x).softmax(-1) if n in "ab" else 5 * x[..., 0] for n, x in values.items()}
    out = gs.multi_step_loss(heads, ours, converted(targets, device))
    truth = REFERENCE.multi_step_loss(heads, exact, targets)
    assert out.loss.dtype == torch.float64
    assert abs(out.loss.item() - truth.loss.item()) < 3e-6 * abs(truth.loss.item())
    found = torch.autograd.grad(out.loss, leaves(ours))
    for name, a, b in zip(heads, found, torch.autograd.grad(truth.loss, leaves(exact)), strict=True):
        assert a.dtype == dtypes[name]
        check_close(a, b, dtypes[name], what=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("grad_output", [None, 0.5])
@pytest.mark.parametrize("batch", [5, 70])
def test_nonfinite(batch, nonfinite, grad_output, dtype, device):
    heads = heads_of(33)
    predictions, targets = inputs_of(heads, 33, batch, steps=2)
    with torch.no_grad():
        predictions["two_hot"][0][1, 7] = math.nan
        predictions["policy"][1][3] = math.inf
        predictions["distance"][0][batch - 1, 0] = -math.inf
    out, _ = check(heads, predictions, targets, device, dtype, nonfinite=nonfinite, grad_output=grad_output)
    assert out.num_nonfinite.item() == 3
    assert out.loss.isfinite().item() == (nonfinite == "skip")


def test_a_loss_that_overflows_when_it_is_rounded(device):
    """The sum over heads, in float64, is larger than any float32."""
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss()}
    losses = torch.tensor([1.0, 3e38, 2.0], device=device, requires_grad=True)
    predictions = {name: [losses] for name in heads}
    out = gs.multi_step_loss(heads, predictions, {}, nonfinite="skip", reduction="sum")
    assert out.per_sample.tolist() == [2.0, math.inf, 4.0]
    assert (out.num_nonfinite.item(), out.loss.item()) == (1, 6.0)
    assert torch.autograd.grad(out.loss, losses)[0].tolist() == [2.0, 0.0, 2.0]
    double = {name: [losses.double()] for name in heads}
    assert gs.multi_step_loss(heads, double, {}, nonfinite="skip").num_nonfinite.item() == 0


@pytest.mark.parametrize("grad_output", [None, math.inf])
def test_weights_that_are_not_finite(grad_output, device):
    """A gradient scale of 0, a mask and nonfinite="skip" give gradients of 0 even where weights are NaN or inf."""
    positive = ("two_hot", "raw", "gauss", "policy", "distance")  # the sum of infinities of both signs would be NaN
    heads = {name: head for name, head in heads_of(33).items() if name in positive}
    predictions, targets = inputs_of(heads, 33, batch=4, steps=2)
    weights = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, math.nan], [math.nan, math.inf]])
    options = {
        "step_weights": weights,
        "importance_weights": torch.tensor([1.0, math.inf, math.nan, math.nan]),
        "step_gradient_scale": [0.0, 0.0],
        "mask": torch.tensor([[True, True], [True, True], [True, True], [False, False]]),
        "nonfinite": "skip",
    }
    out, found = check(heads, predictions, targets, device, torch.float32, grad_output=grad_output, **options)
    assert out.num_nonfinite.item() == 1
    assert all((g == 0).all() for g in found)
    options["importance_weights"] = torch.tensor([1.0, 2.0, math.nan, math.nan])
    assert check(heads, predictions, targets, device, torch.float32, **options)[0].loss.isfinite()


@pytest.mark.parametrize("weight", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("width", [5, 101, 601])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_of_gradients_that_are_not_finite(dtype, width, weight, device):
    heads, predictions, targets = with_zeros_in_gradients(dtype, width)
    predictions = {name: x.detach().to(device).requires_grad_() for name, x in predictions.items()}
    targets = {name: t.to(device) for name, t in targets.items()}
    weights = torch.tensor([1.0, 1.0, weight, 1.0, 1.0], device=device)
    out = gs.multi_step_loss(heads, predictions, targets, importance_weights=weights)
    gradients = torch.autograd.grad(out.loss, list(predictions.values()))
    found = torch.stack(list(out.head_gradient_norms.values())).double()
    expected = torch.stack([norm_of_gradients(gradient) for gradient in gradients])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
def test_shares_of_infinite_head_weights(masked, device):
    """A loss of 0 times an infinite weight is NaN, in `loss` and in `head_losses`, unless it is masked."""
    losses = torch.tensor([[1.0, 2.0], [0.0, 0.0]], device=device)
    mask = torch.tensor([[True, True], [not masked, not masked]], device=device)
    weights = {"a": torch.tensor(math.inf, device=device)}
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss()}
    out = gs.multi_step_loss(heads, {"a": losses, "b": losses}, {}, mask=mask, head_weights=weights, reduction="sum")
    expected = torch.tensor([math.inf if masked else math.nan, 3.0], device=device)
    torch.testing.assert_close(torch.stack(list(out.head_losses.values())), expected, equal_nan=True)
    torch.testing.assert_close(out.loss, expected[0], equal_nan=True)


def test_infinite_entries_that_are_masked(device):
    heads = heads_of(33)
    predictions, targets = inputs_of(heads, 33, batch=3, steps=2)
    with torch.no_grad():
        for entries in (*predictions.values(), *targets.values()):
            if entries[0].is_floating_point():
                entries[1][1] = math.nan
    mask = torch.tensor([[True, True], [True, False], [False, True]])
    for reduction in ("mean", "valid_mean"):
        out, found = check(heads, predictions, targets, device, torch.float32, mask=mask, reduction=reduction)
        assert out.loss.isfinite()
        assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1e-160), (torch.float64, 1e160), (torch.float32, 1e30)])
def test_the_cosine_of_long_and_short_vectors(dtype, scale, device):
    x, t = torch.randn(2, 3, 82, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    heads = {"cosine": gs.NegativeCosine(eps=1e-37)}
    ours = converted((scale * x).requires_grad_(), device, dtype)
    exact = converted(ours, "cpu", torch.float64)
    targets = converted(scale * t, device, dtype)
    loss = gs.multi_step_loss(heads, {"cosine": [ours]}, {"cosine": [targets]}).loss
    truth = REFERENCE.multi_step_loss(heads, {"cosine": [exact]}, {"cosine": [converted(targets, "cpu", x.dtype)]}).loss
    check_close(loss, truth, dtype)
    found, expected = torch.autograd.grad(loss, ours)[0], torch.autograd.grad(truth, exact)[0]
    check_close(found.double() * scale, expected * scale, dtype)


@pytest.mark.parametrize("kappa", [0.0, 1e-39])
def test_quantiles_next_to_their_targets(kappa, device):
    x = torch.zeros(3, 2, device=device, requires_grad=True)
    targets = torch.tensor([[1e-40], [-1e-45], [0.0]], device=device)
    loss = gs.multi_step_loss({"q": gs.QuantileHuber(kappa=kappa)}, {"q": [x]}, {"q": [targets]}, reduction="sum").loss
    assert torch.autograd.grad(loss, x)[0].tolist() == [[-0.25, -0.75], [0.75, 0.25], [0.0, 0.0]]


@pytest.mark.parametrize("prediction", ["q", "p"])
@pytest.mark.parametrize("unimix", [5e-324, 1e-45, 1e-30, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_uniform_share_next_to_small_probabilities(dtype, unimix, prediction, device):
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([0.0, 1.0, -80.0, -300.0], dtype=dtype)
    logits, targets = choices[torch.randint(4, (2, 6, 2, 5), generator=generator)]
    head = gs.CategoricalKL(unimix=unimix, prediction=prediction)
    truth = rows_of(head, logits, targets)
    x = logits.to(device).requires_grad_()
    out = gs.multi_step_loss({"kl": head}, {"kl": [x]}, {"kl": [targets.to(device)]}, reduction="sum")
    check_exact(out.per_step["kl"].cpu(), truth.loss, truth.loss_error, "loss")
    gradient = torch.autograd.grad(out.loss, x)[0].cpu()
    check_exact(gradient, truth.gradient, truth.gradient_error, "gradient")


def divergence_inputs(groups, classes, batch, steps=2):
    """Predictions and targets of CategoricalKL, alone and next to a head of other rows; no two rows are equal."""
    generator = torch.Generator().manual_seed(classes)
    scale = torch.linspace(0.05, 4, batch, dtype=torch.float64)[:, None, None]
    predictions, targets = {}, {}
    for name in ("dynamics", "representation"):
        draw = lambda: torch.randn(batch, groups, classes, generator=generator, dtype=torch.float64) * scale
        predictions[name] = [draw().requires_grad_() for _ in range(steps)]
        targets[name] = [draw() for _ in range(steps)]
    predictions["end"] = [torch.randn(batch, generator=generator).double().requires_grad_() for _ in range(steps)]
    targets["end"] = [torch.rand(batch, generator=generator).double() for _ in range(steps)]
    return predictions, targets


@pytest.mark.parametrize("unimix", [0.01, 0.0, 1e-34])
@pytest.mark.parametrize(
    ("groups", "classes", "batch", "dtype"),
    [
        *(
            (1, 2, 70, torch.float32),
            (1, 5, 40, torch.bfloat16),
            (1, 33, 40, torch.float16),
            (1, 256, 5, torch.float32),
        ),
        *((32, 2, 5, torch.bfloat16), (32, 5, 40, torch.float32), (32, 32, 70, torch.float32)),
        *((32, 32, 40, torch.bfloat16), (32, 33, 5, torch.float32), (32, 64, 5, torch.float16)),
        *(
            (33, 5, 5, torch.float16),
            (33, 32, 5, torch.float32),
            (33, 64, 5, torch.bfloat16),
            (3, 100, 40, torch.float32),
        ),
        *((3, 257, 5, torch.float32), (2, 600, 5, torch.bfloat16), (5, 9, 40, torch.float64)),
    ],
)
def test_divergences(groups, classes, batch, dtype, unimix, device):
    """Some rows are below the free nats, some are masked, and weights differ by sample and step."""
    predictions, targets = divergence_inputs(groups, classes, batch)
    with torch.no_grad():
        alone = ({"dynamics": entries["dynamics"]} for entries in (predictions, targets))
        rows = REFERENCE.multi_step_loss({"dynamics": gs.CategoricalKL()}, *alone).per_step["dynamics"]
    middle = rows.flatten().sort().values[batch - 1 : batch + 1]
    free_nats = middle.mean().item()  # between two rows
    heads = {
        "dynamics": gs.CategoricalKL(unimix=unimix, free_nats=free_nats),
        "end": gs.BinaryCrossEntropy(),
        "representation": gs.CategoricalKL(unimix=unimix, free_nats=free_nats, prediction="p", weight=0.1),
    }
    generator = torch.Generator().manual_seed(1)
    out, found = check(
        heads,
        {name: predictions[name] for name in heads},
        {name: targets[name] for name in heads},
        device,
        dtype,
        target_dtype=dtype,
        mask=torch.rand(batch, 2, generator=generator) < 0.8,
        importance_weights=torch.rand(batch, generator=generator, dtype=torch.float64) + 0.5,
        step_weights=[1.0, 0.5],
        step_gradient_scale="unroll",
        grad_output=-0.5,
    )
    assert 0 < (out.per_step["dynamics"] == torch.tensor(free_nats, dtype=out.loss.dtype)).sum() < 2 * batch
    assert sum((gradient != 0).any().item() for gradient in found) == len(found)


def test_many_divergences(device):
    """A warp computes several rows one after the other. Every second one is masked, and has the largest logits."""
    predictions, targets = ({"kl": entries["dynamics"]} for entries in divergence_inputs(32, 2, 1700, steps=1))
    mask = torch.arange(1700) % 2 == 1
    with torch.no_grad():
        predictions["kl"][0][~mask] *= 20
    heads = {"kl": gs.CategoricalKL(free_nats=3.0)}
    out, _ = check(heads, predictions, targets, device, torch.float32, mask=mask[:, None])
    assert out.per_step["kl"].count_nonzero() == 850


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prediction", ["q", "p"])
@pytest.mark.parametrize(("dtype", "target_dtype"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_divergences_of_views(dtype, target_dtype, prediction, offset, device):
    """Rows that are not aligned, with gaps between them, and targets of another type."""
    predictions, targets = divergence_inputs(33, 12, 33, steps=1)

    def view(rows, dtype):
        memory = torch.full((33 * 397 + offset,), math.nan, dtype=dtype, device=device)
        return memory[offset:].view(33, 397)[:, :396].unflatten(1, (33, 12)).copy_(rows)

    head, x, target = gs.CategoricalKL(prediction=prediction), *(e["dynamics"][0] for e in (predictions, targets))
    ours, own_target = view(x.detach(), dtype).requires_grad_(), view(target, target_dtype)
    out = gs.multi_step_loss({"kl": head}, {"kl": [ours]}, {"kl": [own_target]}, reduction="sum")
    exact = ours.detach().cpu().double().requires_grad_()
    truth = REFERENCE.multi_step_loss(
        {"kl": head}, {"kl": [exact]}, {"kl": [own_target.cpu().double()]}, reduction="sum"
    )
    check_outputs({"kl": head}, out, truth, dtype)
    found, expected = (torch.autograd.grad(loss, leaf)[0] for loss, leaf in ((out.loss, ours), (truth.loss, exact)))
    check_close(found, expected, dtype, scale=largest(expected))


@pytest.mark.parametrize("prediction", ["q", "p"])
@pytest.mark.parametrize(("groups", "classes"), [(1, 5), (32, 32), (33, 33), (2, 300)])
def test_divergences_of_classes_without_probability(groups, classes, prediction, device):
    """One class, the classes of one lane, or all but one have probability 0, in one distribution or in both. A group
    whose logits are NaN, or all -inf, makes its row NaN, and no other."""
    predictions, targets = ({"kl": entries["dynamics"]} for entries in divergence_inputs(groups, classes, 7, steps=1))
    x, target = predictions["kl"][0], targets["kl"][0]
    places = torch.arange(classes)
    with torch.no_grad():
        x[0, 0, 1] = target[1, -1, -1] = -math.inf
        x[2, 0, places % 4 == 1] = target[2, 0, places % 4 == 1] = -math.inf
        x[3, -1, 1:] = target[4, -1, :-1] = -math.inf
    head = {"kl": gs.CategoricalKL(prediction=prediction)}
    out, _ = check(head, predictions, targets, device, torch.float32)
    assert out.per_step["kl"].isfinite().all()
    with torch.no_grad():
        x[5, -1], target[6, 0, 0] = -math.inf, math.nan
    out = gs.multi_step_loss(
        head, converted(predictions, device, torch.float32), converted(targets, device, torch.float32)
    )
    assert out.per_step["kl"].isfinite()[:, 0].tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("prediction", ["q", "p"])
@pytest.mark.parametrize("unimix", [0.01, 0.0])
def test_the_divergence_of_equal_distributions_is_zero(unimix, prediction, device):
    x = torch.randn(40, 32, 32, generator=torch.Generator().manual_seed(0)).to(device) * 5
    leaf = x.clone().requires_grad_()
    head = {"kl": gs.CategoricalKL(unimix=unimix, prediction=prediction)}
    loss = gs.multi_step_loss(head, {"kl": [leaf]}, {"kl": [x]}, reduction="sum").loss
    assert loss.item() == 0
    assert torch.autograd.grad(loss, leaf)[0].abs().max() <= 1e-6  # a sum of 32 probabilities, rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_of_targets_and_logits(dtype, device):
    """Infinite targets map to the end bins; illegal actions cost nothing; an invalid class gives NaN."""
    support = gs.Support.muzero()
    heads = {"value": gs.TwoHot(support), "gauss": gs.HLGauss(support), "policy": gs.SoftCrossEntropy()}
    generator = torch.Generator().manual_seed(0)
    scalars = torch.tensor([math.inf, -math.inf, 0.0, 1e30, -3012.33], dtype=torch.float64)
    logits = torch.randn(5, 601, generator=generator, dtype=torch.float64)
    logits[2, 5] = 1e4
    policy = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    visits = torch.rand(5, 9, generator=generator, dtype=torch.float64).softmax(-1)
    policy[:, 3], visits[:, 3] = -math.inf, 0.0
    predictions = {"value": [logits.requires_grad_()], "gauss": [logits.clone()], "policy": [policy.requires_grad_()]}
    targets = {"value": [scalars], "gauss": [scalars], "policy": [visits]}
    _, found = check(heads, predictions, targets, device, dtype)
    assert found[2][:, 3].count_nonzero().item() == 0
    for width in (9, 33, 1301, 4672) if device.type == "cuda" else ():  # other devices check classes and raise an error
        classes = torch.tensor([0, width, -1, 3, width - 1], device=device)
        logits = torch.zeros(5, width, device=device, dtype=dtype)
        out = gs.multi_step_loss({"policy": gs.SoftCrossEntropy()}, {"policy": [logits]}, {"policy": [classes]})
        assert out.per_step["policy"].isnan()[:, 0].tolist() == [False, True, True, False, False]


# ---- Derivatives, transforms, autocast, the compiler ----------------------------------------------------------------


def test_compiled(device, by_reference):
    """The loss, decoding, flow operators and l2_loss stay in one graph, forward and backward."""
    support = gs.Support(-5, 5, 33)
    heads = {"value": gs.TwoHot(support), "policy": gs.SoftCrossEntropy()}

    def step(x, scalars, visits):
        hidden = gs.clip_gradient_norm(gs.scale_gradient(x * 2, 0.5), 0.01, batch_dims=1)
        out = gs.multi_step_loss(
            heads, {"value": [hidden], "policy": [hidden]}, {"value": [scalars], "policy": [visits]}
        )
        return out.loss + gs.l2_loss([x], 1e-3), out.expected["value"]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 33, generator=generator).to(device)
    given = (torch.randn(5, generator=generator).to(device), torch.rand(5, 33, generator=generator).to(device))
    torch._dynamo.reset()
    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        loss, expected = function(leaf, *given)
        loss.backward()
        results.append((loss.detach(), expected, leaf.grad))
    torch._dynamo.reset()
    for ours, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, ours, rtol=1e-5, atol=1e-6)


# ---- Decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("space", ["transformed", "raw"])
def test_decode(space, width, dtype, device):
    support = gs.Support(-4, 6, width, transform="symlog", space=space)
    generator = torch.Generator().manual_seed(width)
    values = (torch.randn(2, 3, width, generator=generator, dtype=torch.float64) * 3).to(dtype)
    incoming = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    exact = values.double().requires_grad_()
    truth = REFERENCE.decode(exact, support)
    (expected,) = torch.autograd.grad(truth, exact, incoming)
    scale = gs.reference.raw_centers(support, torch.float64).abs().max().item()
    wide = torch.zeros(2, 3, width + 3, dtype=dtype)
    wide[..., 3:] = values
    for given in (
        values.to(device),
        wide.to(device)[..., 3:],
        values.to(device).transpose(0, 1).contiguous().transpose(0, 1),
    ):
        leaf = given.detach().requires_grad_()
        decoded = support.decode(leaf)
        check_close(decoded, truth.detach(), dtype, scale)
        (gradient,) = torch.autograd.grad(decoded, leaf, incoming.to(device, decoded.dtype))
        check_close(gradient, expected, dtype, scale=max(float(expected.abs().max()), 1e-2 * scale))
    with torch.no_grad():
        check_close(support.decode(values.to(device)), truth.detach(), dtype, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("space", ["transformed", "raw"])
@pytest.mark.parametrize(("limit", "width"), [(10, 101), (20, 255), (10, 64), (3, 1030)])
def test_gradient_of_decode_at_a_saturated_softmax(limit, width, space, dtype, device):
    """One bin has all the mass: its centre is the expectation, and the logits have no gradient."""
    support = gs.Support(-limit, limit, width, transform="symlog", space=space)
    chosen = torch.arange(0, width, max(width // 24, 1))
    logits = torch.zeros(len(chosen), width, dtype=dtype)
    logits[torch.arange(len(chosen)), chosen] = 2000
    leaf = logits.to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(support.decode(leaf).sum(), leaf)
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("limit", [20, 40, 80])
@pytest.mark.parametrize("width", [21, 255, 601, 1001])
def test_raw_centres_whose_terms_cancel(width, limit, device):
    """Logits that are nearly symmetric: the expectation is small, compared with the centres. It is exactly 0 for the
    first row, which is symmetric."""
    support = gs.Support(-limit, limit, width, "symlog", space="raw")
    half = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    slope = torch.tensor([0.0, 1e-6, 1e-4, 1e-2, 1.0])[:, None]
    logits = half + half.flip(-1) + slope * torch.linspace(-1, 1, width)
    centers = gs.reference.raw_centers(support, torch.float64)
    p = logits.double().softmax(-1)
    largest = (p * centers.abs()).sum(-1, keepdim=True)
    for batch in (1, 32):
        given = logits.repeat(batch, 1).to(device).requires_grad_()
        values = support.decode(given)
        error = (values.detach().cpu().double() - (p * centers).sum(-1).repeat(batch)) / largest[:, 0].repeat(batch)
        assert error.abs().max() < 1e-6
        if limit == 20:
            assert values[::5].count_nonzero() == 0
        (gradient,) = torch.autograd.grad(values.sum(), given)
        expected = p * (centers - (p * centers).sum(-1, keepdim=True))
        error = (gradient.cpu().double() - expected.repeat(batch, 1)) / largest.repeat(batch, 1)
        assert error.abs().max() < 1e-6
        head = gs.TwoHot(support)
        expected = gs.multi_step_loss({"a": head}, {"a": [given]}, {"a": [values.detach()]}).expected["a"][:, 0]
        error = (expected.cpu().double() - values.detach().cpu().double()) / largest[:, 0].repeat(batch)
        assert error.abs().max() < 1e-6
        if limit == 20:
            assert expected[::5].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 63, 64, 65, 101, 255, 256, 401, 601, 640, 801, 1023, 1024])
def test_uniform_logits_over_raw_centres(width, dtype, device):
    support = gs.Support(-20, 20, width, "symlog", space="raw")
    logits = torch.full((5, width), 0.375, dtype=dtype, device=device, requires_grad=True)
    values = support.decode(logits)
    assert values.tolist() == [0.0] * 5
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    expected = (gs.reference.raw_centers(support, torch.float64) / width).expand(5, -1)
    torch.testing.assert_close(
        gradient.cpu().double(), expected, rtol=1e-5 if dtype == torch.float32 else 4e-3, atol=1e-9
    )
    out = gs.multi_step_loss({"a": gs.TwoHot(support)}, {"a": [logits]}, {"a": [torch.zeros(5, device=device)]})
    assert out.expected["a"][:, 0].tolist() == [0.0] * 5


def test_decode_of_uniform_and_of_no_logits(device):
    support = gs.Support.muzero()
    assert support.decode(torch.zeros(3, 601, device=device)).tolist() == [0.0, 0.0, 0.0]
    assert support.decode(torch.zeros(0, 601, device=device)).shape == (0,)
    assert support.decode(torch.zeros(601, device=device)).shape == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 33, 601, 1025])
@pytest.mark.parametrize("space", ["transformed", "raw"])
def test_encode(space, width, dtype, device):
    support = gs.Support(-4, 6, width, transform="symlog", space=space)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e30, math.e - 1], dtype=torch.float64)
    scalars = torch.cat([special, torch.randn(15, generator=torch.Generator().manual_seed(width)).double() * 30])
    rounded = torch.stack([scalars, -scalars], 1).to(dtype)
    exact = rounded.double()
    for given in (rounded.to(device), rounded.to(device).t().contiguous().t()):
        # The neighbours of a scalar are found in the precision of its dtype, and a bin may be as narrow as 1e-2.
        check_close(support.two_hot(given), gs.reference.two_hot(exact, support), dtype, scale=100.0)
        check_close(support.hl_gauss(given, 0.75), gs.reference.hl_gauss(exact, support, 0.75), dtype, scale=100.0)
    assert support.two_hot(torch.tensor(math.nan, device=device)).isnan().all()
    assert support.two_hot(torch.zeros(0, 3, device=device)).shape == (0, 3, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 33, 51, 129])
@pytest.mark.parametrize("space", ["transformed", "raw"])
def test_project(space, width, dtype, device):
    support = gs.Support(-4, 6, width, transform="symlog", space=space)
    generator = torch.Generator().manual_seed(width)
    p = torch.randn(11, width, generator=generator).softmax(-1).to(dtype)
    rewards = (10 * torch.randn(11, generator=generator)).to(dtype)
    discounts = torch.tensor([0, 1, -1, 0.5, 1e-12, 0.997, 0.9, 300, 2, 1, 1]).to(dtype)
    rewards[:2], rewards[8] = 0, math.nan
    p[10, 1] = math.nan
    found = support.project(p.to(device), rewards.to(device), discounts.to(device)).cpu()
    expected = gs.reference.project(p, rewards, discounts, support)
    assert found.dtype == expected.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
    again = support.project(p.to(device), rewards.to(device), discounts.to(device)).cpu()
    assert torch.equal(again.nan_to_num(-1), found.nan_to_num(-1))
    assert support.project(p[:0].to(device), rewards[:0].to(device), discounts[:0].to(device)).shape == (0, width)


# ---- Gradient flow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.argument}")
def test_flow_in_float64(case, in_place, device):
    leaf = POINT.to(device).requires_grad_()
    y = case.on(device).apply(leaf)
    assert torch.equal(y.detach(), leaf.detach())
    incoming = WEIGHTS.to(device)
    if in_place:
        y, incoming = y.neg(), -incoming  # the incoming gradient has no other owner
    (gradient,) = torch.autograd.grad(y, leaf, incoming)
    torch.testing.assert_close(gradient.cpu(), case.closed_form(WEIGHTS), rtol=1e-12, atol=1e-12)
    if not in_place:
        assert torch.equal(incoming.cpu(), WEIGHTS)


def norms(g, p=2.0):
    return g.flatten(1).abs().amax(1) if math.isinf(p) else g.flatten(1).abs().pow(p).sum(1).pow(1 / p)


def beside(limit, g):
    return limit.reshape(-1, *[1] * (g.dim() - 1))


# By name: an operator of x and of tensor arguments `a`, and its gradient as a formula of the incoming gradient `g`.
FLOW = {
    "scale": (lambda x, a: gs.scale_gradient(x, 1 / 3), lambda g, a: g / 3),
    "scale, tensor": (lambda x, a: gs.scale_gradient(x, a["last"]), lambda g, a: g * a["last"]),
    "scale, scalar of the CPU": (lambda x, a: gs.scale_gradient(x, torch.tensor(0.75)), lambda g, a: g * 0.75),
    "reverse": (lambda x, a: gs.reverse_gradient(x, 0.3), lambda g, a: g * -0.3),
    "reverse, tensor": (lambda x, a: gs.reverse_gradient(x, a["sample"]), lambda g, a: -g * a["sample"]),
    "clip value": (lambda x, a: gs.clip_gradient_value(x, -0.4, 0.7), lambda g, a: g.clamp(-0.4, 0.7)),
    "clip value, tensor": (
        lambda x, a: gs.clip_gradient_value(x, None, a["last"]),
        lambda g, a: torch.minimum(g, a["last"]),
    ),
    "clip norm": (
        lambda x, a: gs.clip_gradient_norm(x, 2.0, batch_dims=1),
        lambda g, a: g * beside((2.0 / norms(g)).clamp(max=1), g),
    ),
    "clip norm, tensor": (
        lambda x, a: gs.clip_gradient_norm(x, a["limit"], batch_dims=1, norm_type=3.0),
        lambda g, a: g * beside((a["limit"] / norms(g, 3.0)).clamp(max=1), g),
    ),
    "clip norm, infinity": (
        lambda x, a: gs.clip_gradient_norm(x, 0.5, batch_dims=1, norm_type=math.inf),
        lambda g, a: g * beside((0.5 / norms(g, math.inf)).clamp(max=1), g),
    ),
    "clip norm, whole": (
        lambda x, a: gs.clip_gradient_norm(x, 1.5),
        lambda g, a: g * (1.5 / g.norm()).clamp(max=1),
    ),
    "normalize": (lambda x, a: gs.normalize_gradient(x, 3.0, batch_dims=1), lambda g, a: g * beside(3.0 / norms(g), g)),
    "normalize, tensor": (
        lambda x, a: gs.normalize_gradient(x, a["limit"], batch_dims=1),
        lambda g, a: g * beside(a["limit"] / norms(g), g),
    ),
    "normalize, whole": (lambda x, a: gs.normalize_gradient(x), lambda g, a: g / g.norm()),
}
SHAPES = [(3, 1), (5, 33), (2, 601), (2, 9001), (3, 4, 6, 6), (1, 70001)]


# Elements of half types are converted before anything is computed: each operator and shape has one of the two.
FLOW_CASES = [
    (operator, shape, dtype)
    for i, operator in enumerate(FLOW)
    for j, shape in enumerate(SHAPES)
    for dtype in (*DTYPES[:2], DTYPES[2 + (i + j) % 2])
]


@pytest.mark.parametrize(("operator", "shape", "dtype"), FLOW_CASES, ids=str)
def test_flow(operator, shape, dtype, device):
    """Incoming gradients that are exclusively owned, shared, misaligned, transposed and expanded."""
    apply, formula = FLOW[operator]
    generator = torch.Generator().manual_seed(len(operator))
    g = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    numbers = {
        "last": torch.rand(shape[-1:], generator=generator).sub(0.5),
        "sample": torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator),
        "limit": torch.rand(shape[0], generator=generator).mul(3),
    }
    expected = formula(g.double(), {name: value.double() for name, value in numbers.items()})
    on_device = converted(numbers, device)
    shifted = torch.zeros(g.numel() + 1, dtype=dtype, device=device)[1:].view(shape).copy_(g)
    transposed = g.to(device).transpose(0, -1).contiguous().transpose(0, -1)
    for owned, incoming in ((True, g.to(device)), (False, g.to(device)), (False, shifted), (False, transposed)):
        x = torch.zeros(shape, dtype=dtype, device=device).requires_grad_()
        y = apply(x, on_device)
        (gradient,) = torch.autograd.grad(y.neg() if owned else y, x, -incoming if owned else incoming)
        assert gradient.dtype == dtype
        check_close(gradient, expected, dtype)
        if not owned:
            assert torch.equal(incoming.cpu(), g)
    same = torch.full(shape, 0.5, dtype=torch.float64)
    leaf = torch.zeros(shape, dtype=dtype, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(
        apply(leaf, on_device), leaf, torch.tensor(0.5, dtype=dtype, device=device).expand(shape)
    )
    check_close(gradient, formula(same, {name: value.double() for name, value in numbers.items()}), dtype)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
@pytest.mark.parametrize(
    "operator", ["scale", "scale, tensor", "reverse", "clip norm", "clip norm, whole", "normalize"]
)
@pytest.mark.parametrize("size", [33, 9001])
def test_flow_of_complex_tensors(operator, dtype, size, device):
    apply, formula = FLOW[operator]
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(2, size, generator=generator, dtype=torch.complex128).to(dtype)
    numbers = {"last": torch.rand(size, generator=generator)}
    expected = formula(g.to(torch.complex128), {"last": numbers["last"].double()})
    tolerance = 1e-12 if dtype == torch.complex128 else 3e-6
    for owned in (True, False):
        x = torch.zeros(2, size, dtype=dtype, device=device).requires_grad_()
        y = apply(x, converted(numbers, device))
        (gradient,) = torch.autograd.grad(y.neg() if owned else y, x, (-g if owned else g).to(device))
        torch.testing.assert_close(gradient.cpu().to(torch.complex128), expected, rtol=tolerance, atol=tolerance)


def test_flow_of_special_values(device):
    """A scale of 0 gives zeros for any gradient; norms never overflow or underflow; NaN in a gradient is preserved."""
    incoming = torch.tensor([[math.inf, 1.0, -2.0], [math.nan, 3.0, 0.5], [0.0, 0.0, 0.0]], device=device)
    backward = lambda operator, g: torch.autograd.grad(operator(x := torch.zeros_like(g).requires_grad_()), x, g)[
        0
    ].cpu()
    assert torch.equal(backward(lambda x: gs.scale_gradient(x, 0.0), incoming), torch.zeros(3, 3))
    assert torch.equal(backward(lambda x: gs.normalize_gradient(x, batch_dims=1), incoming)[2], torch.zeros(3))
    assert backward(lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=1), incoming)[1].isnan().all()
    for size in (3, 5000):
        for value in (3e38, 1e-45):
            g = torch.full((2, size), value, device=device)
            expected = torch.full((2, size), size**-0.5)
            normalized = backward(lambda x: gs.normalize_gradient(x, batch_dims=1), g)
            torch.testing.assert_close(normalized, expected, rtol=1e-6, atol=0)


# ---- l2_loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 9, 450])
def test_l2_loss(count, dtype, device):
    """Empty, scalar, large, strided, frozen and many tensors: more than fit into the arguments of a launch."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (1,), (3, 5), (17000,), (0, 4), (2, 3, 4, 5), (64, 33), (7,)]
    values = [
        torch.randn(shapes[i % len(shapes)] if i < 18 else (1 + i % 5,), generator=generator, dtype=torch.float64)
        for i in range(count)
    ]
    parameters = [x.to(device=device, dtype=dtype).requires_grad_() for x in values]
    if count > 1:
        parameters.append(parameters[7].detach().t().requires_grad_())
        parameters.append(parameters[3].detach()[:, 1:4])
    exact = [p.detach().cpu().double().requires_grad_(p.requires_grad) for p in parameters]
    loss, truth = gs.l2_loss(parameters, 1e-2), REFERENCE.l2_loss(exact, 1e-2)
    check_close(loss, truth.detach(), dtype)
    wanted = [p for p in parameters if p.requires_grad]
    found = torch.autograd.grad(loss * 3, wanted)
    expected = torch.autograd.grad(truth * 3, [p for p in exact if p.requires_grad])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        check_close(a, b, dtype)


def test_l2_loss_of_several_dtypes(device):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(301, generator=generator).to(device=device, dtype=t).requires_grad_() for t in DTYPES]
    exact = [p.detach().cpu().double().requires_grad_() for p in parameters]
    loss, truth = gs.l2_loss(parameters, 0.1), REFERENCE.l2_loss(exact, 0.1)
    assert loss.dtype == torch.float64
    check_close(loss, truth.detach(), torch.float32)  # squares of narrower elements are added in float32
    loss.backward()
    truth.backward()
    for ours, theirs in zip(parameters, exact, strict=True):
        check_close(ours.grad, theirs.grad, ours.dtype)


# ---- Statistics and clipping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 2.0, 3.14, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 450])
def test_statistics(count, dtype, p, device):
    """Statistics of empty, missing, strided, complex and many tensors, then clipping."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(7,), (0,), (3, 5), (70001,), (), (64, 33)]
    values = [
        torch.randn(sizes[i % 6] if i < 12 else (1 + i % 50,), generator=generator, dtype=torch.float64)
        for i in range(count)
    ]
    values = [x * 10.0 ** (i % 9 - 5) for i, x in enumerate(values)]
    if dtype in (torch.float32, torch.float64):
        values.append(torch.complex(values[0], values[0].flip(0)))
    values = [x.to(dtype.to_complex() if x.is_complex() else dtype) for x in values]
    if count > 1:
        values[2] = values[2].t()
        values[3][5:900:7] = 0
    parameters = [torch.zeros_like(x, device=device) for x in values]
    for parameter, x in zip(parameters, values, strict=True):
        parameter.grad = x.to(device, copy=True)
    parameters.append(torch.zeros(3, device=device))
    exact = [x.to(torch.complex128 if x.is_complex() else torch.float64) for x in values]
    found = gs.clip_gradients_(parameters, 0.5, norm_type=p)
    norms, counts = REFERENCE.tensor_statistics([*exact, None], p)
    # Squares of elements that are narrower than float64 are added in float32.
    loose = 1e-12 if dtype == torch.float64 else 1e-6 if dtype == torch.float32 else 1e-7
    torch.testing.assert_close(torch.stack([found.norm, found.abs_max]).cpu(), norms[:2], rtol=loose, atol=0)
    magnitudes = torch.stack([x.abs().mean() if x.numel() else torch.zeros(()) for x in [*exact, torch.zeros(1)]])
    assert ((found.mean.cpu() - norms[2]).abs() <= 2 * loose * magnitudes).all()
    assert torch.equal(found.missing.cpu(), counts[4].bool())
    assert torch.equal(found.zeros.cpu(), counts[1])
    total = REFERENCE.clipping_of(norms, counts, p, 0.5, False)
    assert found.total_norm.item() == pytest.approx(total[0].item(), rel=loose)
    for parameter, x in zip(parameters, exact, strict=False):
        real = torch.view_as_real if x.is_complex() else torch.Tensor
        check_close(real(parameter.grad), real(x * total[1]), dtype)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_statistics_of_a_tensor_do_not_depend_on_the_others(dtype, p, device):
    """Tensors of one warp, of one block and of several, unaligned ones and elements that are not finite among them, in
    lists for one launch and for two. Their results have the same bits, and are right."""
    generator = torch.Generator().manual_seed(1)
    bytes_of_one_warp, bytes_of_a_block = 16384, 262144
    size = torch.empty((), dtype=dtype).element_size()
    counts = [1, 31, 999, *(n // size + k for n in (bytes_of_one_warp, bytes_of_a_block) for k in (-1, 0, 1))]
    own = [torch.randn(n + 1, generator=generator).to(device, dtype)[k % 2 :][:n] for k, n in enumerate(counts)]
    own[2][::7] = 0
    for tensor in (own[2], own[7]):
        tensor[3], tensor[-1] = math.nan, -math.inf
    small = [torch.full((1 + k % 5,), 0.5, device=device, dtype=dtype) for k in range(1100)]
    norms, numbers = REFERENCE.tensor_statistics([tensor.double().cpu() for tensor in own], p)
    found = None
    for gradients, first in ((own, 0), (small[:5] + own[::-1], 5), (small + own, 1100)):
        values, counted = (part.cpu() for part in _C.tensor_statistics(gradients, p))
        order = slice(first, first + len(own))
        result = values[:, order], counted[:, order]
        if gradients[first] is not own[0]:
            result = result[0].flip(1), result[1].flip(1)
        found = found or result
        assert all(torch.equal(ours, before) for ours, before in zip(result, found, strict=True))
    assert torch.equal(found[1][:4], numbers[:4])
    torch.testing.assert_close(found[0][:2], norms[:2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_of_unaligned_gradients(dtype, device):
    """Of one warp and of several, more than one launch has."""
    sizes = [1, 3, 130, 1000, 4096, 4097, 9001, *([2] * 1200)]
    memory = [torch.randn(size + 1).to(device, dtype) for size in sizes]
    parameters = [torch.zeros(size, device=device, dtype=dtype, requires_grad=True) for size in sizes]
    for k, parameter in enumerate(parameters):
        parameter.grad = memory[k][1:] if k % 2 == 0 else memory[k][:-1]
    before = [part.clone() for part in memory]
    exact = [parameter.grad.to("cpu", torch.float64, copy=True) for parameter in parameters]
    gs.clip_gradients_(parameters, 3.0)
    factor = 3.0 / (math.sqrt(sum(float(gradient.square().sum()) for gradient in exact)) + 1e-6)
    for k, (parameter, gradient) in enumerate(zip(parameters, exact, strict=True)):
        check_close(parameter.grad, gradient * factor, dtype)
        outside = 0 if k % 2 == 0 else -1
        assert torch.equal(memory[k][outside], before[k][outside])


@pytest.mark.parametrize("dtype", DTYPES)
def test_histograms(dtype, device):
    own = [torch.randn(size).to(dtype) * 10.0 ** (size % 7 - 3) for size in (0, 1, 31, 5000)]
    own[3][:40] = 0
    own[2][3], own[3][50] = math.nan, -math.inf
    moved = [*(tensor.to(device) for tensor in own), None]
    found = gs.gradient_statistics(moved, histogram=True)
    assert torch.equal(found.histogram.cpu(), gs.gradient_statistics([*own, None], histogram=True).histogram)


def test_skipping_is_decided_on_the_device(device):
    p = torch.zeros(1000, device=device)
    for bad, expected in ((math.nan, 0.0), (math.inf, 0.0), (1.0, 1000**-0.5)):
        p.grad = torch.ones(1000, device=device)
        p.grad[500] = bad
        statistics = gs.clip_gradients_([p], 1.0, nonfinite="skip")
        torch.testing.assert_close(p.grad.cpu(), torch.full((1000,), expected))
        assert int(statistics.nans + statistics.infs) == (0 if bad == 1.0 else 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64], ids=str)
def test_a_limit_in_a_tensor_is_read_on_the_device(dtype, device):
    parameters = [torch.zeros(2, device=device) for _ in range(2)]
    for limit in (0, 2, 1000):
        for parameter in parameters:
            parameter.grad = torch.tensor([3.0, 4.0], device=device)
        statistics = gs.clip_gradients_(parameters[:1], torch.tensor(limit, dtype=dtype, device=device))
        expected = gs.clip_gradients_(parameters[1:], limit)
        assert torch.equal(statistics.clipping, expected.clipping)
        assert torch.equal(parameters[0].grad, parameters[1].grad)
    values, counts = _C.tensor_statistics([parameters[0].grad], 2.0)
    for limit in (2.0, -1.0, math.nan, math.inf):
        found = _C.clipping_of(values, counts, 2.0, torch.tensor(limit, device=device), False)
        assert found[1].item() == pytest.approx(min(1, limit / 5) if limit >= 0 else math.nan, nan_ok=True)


@pytest.mark.parametrize("unit", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_adaptive_clipping(dtype, unit, device):
    """Rows and tensors that one warp handles or several share, with empty, strided, zero and non-finite ones."""
    shapes = [(7, 5), (3, 4097), (0, 4), (4, 0), (), (13,), (9000,), (2, 3, 3, 3), (6, 8)]
    parameters = parameters_of(dtype, shapes)
    before, on_device = [], []
    for parameter in parameters:
        before.append(parameter.grad.clone())
        on_device.append(torch.nn.Parameter(parameter.detach().to(device)))
        on_device[-1].grad = parameter.grad.to(device, copy=True)
    on_device[-1].grad = on_device[-1].grad.t().contiguous().t()
    gs.clip_gradients_(on_device, adaptive=0.1, unit=unit)
    for parameter, other in zip(parameters, on_device, strict=True):
        parameter.grad = other.grad.cpu()
    assert sum(assert_clipped(parameters, before, 0.1, 1e-3, unit)) >= 5
    for nonfinite, expected in (("propagate", [0.1, math.nan]), ("skip", [0.0, 0.0])):
        p = torch.nn.Parameter(torch.ones(2, 1, dtype=dtype, device=device))
        p.grad = torch.tensor([[1.0], [math.nan]], device=device).to(dtype)
        gs.clip_gradients_([p], adaptive=0.1, nonfinite=nonfinite)
        found = torch.view_as_real(p.grad)[..., 0] if dtype.is_complex else p.grad
        assert found.flatten().tolist() == pytest.approx(expected, rel=4e-3, nan_ok=True)


def test_adaptive_clipping_of_many_tensors(device):
    """More than fit into the arguments of a launch."""
    shapes = [(1 + i % 7, 1 + i % 13) if i % 3 else (1 + i % 50,) for i in range(350)]
    parameters = parameters_of(torch.float32, shapes)
    before = [parameter.grad.clone() for parameter in parameters]
    on_device = [torch.nn.Parameter(parameter.detach().to(device)) for parameter in parameters]
    for other, gradient in zip(on_device, before, strict=True):
        other.grad = gradient.to(device, copy=True)
    gs.clip_gradients_(on_device, adaptive=0.1)
    for parameter, other in zip(parameters, on_device, strict=True):
        parameter.grad = other.grad.cpu()
    assert sum(assert_clipped(parameters, before, 0.1, 1e-3, "row")) > 250


# ---- Returns --------------------------------------------------------------------------------------------------------


# One chunk of 8 warps, one of 16 (not whole, whole), and three of 8.
LONG_ROWS = [(3, 1024), (2, 1100), (1, 2048), (2, 2100)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows", "steps"), [(7, 2), (70, 5), (70, 8), (71, 16), (9, 32), (70, 33), *LONG_ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_returns(function, rows, steps, dtype, device):
    data = random_data(3, rows, steps, ends=0.05, padding=0.02)
    given = {name: value if name in FLAGS else value.to(dtype) for name, value in data.items()}
    found, names = [], inputs_of_returns(function)
    for module, where, own in ((gs, device, dtype), (gs.reference, torch.device("cpu"), torch.float64)):
        arguments = {name: value.to(where, None if name in FLAGS else own) for name, value in given.items()}
        inputs = [arguments[name].requires_grad_() for name in names]
        results = call(function, arguments, module)
        weights = [torch.linspace(-1, 2, rows * steps).view(rows, steps).to(result) for result in results]
        found.append((*results, *torch.autograd.grad(results, inputs, weights)))
    for ours, truth in zip(*found, strict=True):
        check_close(ours, truth, dtype, what=function)


@pytest.mark.parametrize("function", ["lambda_returns", "vtrace", "retrace"])
@pytest.mark.parametrize(("rows", "steps"), [(40, 9), (40, 40), (3, 1100), (3, 2100)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_returns_of_one_row_that_is_not_finite(function, rows, steps, batch_first, number, device):
    """Lanes of a warp, and warps of a block, agree on the slower way."""
    data = {name: value.float() for name, value in random_data(4, rows, steps, ends=0.05).items() if name not in FLAGS}
    data |= {name: torch.zeros(rows, steps, dtype=torch.bool) for name in FLAGS[:2]}
    data["mask"] = torch.ones(rows, steps, dtype=torch.bool)
    data["rewards"][1, steps // 2] = number
    truth = call(function, {name: x if name in FLAGS else x.double() for name, x in data.items()}, gs.reference)
    placed = {name: (x if batch_first else x.T).contiguous().to(device) for name, x in data.items()}
    for ours, expected in zip(call(function, placed, batch_first=batch_first), truth, strict=True):
        ours = ours if batch_first else ours.T
        assert not expected.isfinite().all()
        check_close(ours, expected, torch.float32, what=function)


@pytest.mark.parametrize("function", ["lambda_returns", "vtrace"])
@pytest.mark.parametrize("steps", [1100, 2048, 2100])
def test_a_long_row_that_is_not_finite_keeps_other_episodes(function, steps, device):
    """The walk is backwards for results, forwards for gradients. What precedes the number in the walk keeps its bits;
    what follows the end of its episode is rounded in another order."""
    data = random_data(6, 2, steps, ends=0.0, padding=0.0, dtype=torch.float32)
    data["terminated"][0, [100, 1000]] = True
    data["discount"].fill_(0.995)
    data["lambda_"].fill_(0.99)
    data["ratios"].clamp_(min=0.9)
    names = inputs_of_returns(function)
    preceding, following = [], []
    for spoilt in (False, True):
        given = {name: value.to(device, copy=True) for name, value in data.items()}
        weights = torch.linspace(-1, 2, 2 * steps).view(2, steps).to(device)
        if spoilt:
            given["rewards"][0, 300] = torch.nan
        leaves = [given[name].requires_grad_() for name in names]
        results = call(function, given)
        if spoilt:
            weights[0, 900] = torch.nan
        gradients = torch.autograd.grad(results[0], leaves, weights)
        preceding.append([*(x.detach()[:, 301:] for x in results), *(x[:, :900] for x in gradients)])
        following.append([*(x.detach()[:, :101] for x in results), *(x[:, 1001:] for x in gradients)])
    for ours, clean in zip(preceding[1], preceding[0], strict=True):
        assert torch.equal(ours, clean)
    for ours, clean in zip(following[1], following[0], strict=True):
        torch.testing.assert_close(ours, clean, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("steps", "overflow"), [(1100, 700), (2048, 60), (2100, 700)])
def test_sums_of_a_long_row_that_overflow_in_a_few_lanes(steps, overflow, device):
    """The sum over a warp's steps is in range, and its parts are not."""
    back = overflow - 10
    rewards, next_values = torch.zeros(2, steps), torch.zeros(2, steps)
    next_values[:, -1] = 3e38
    rewards[1, overflow], rewards[1, back] = 1e38, -3e38
    found = gs.lambda_returns(rewards.to(device), None, next_values.to(device), discount=1.0, lambda_=1.0).cpu()
    assert (found[0] == next_values[0, -1]).all()
    assert (found[1, overflow + 1 :] == next_values[1, -1]).all()
    assert (found[1, back + 1 : overflow + 1] == torch.inf).all()
    torch.testing.assert_close(found[1, : back + 1], torch.full((back + 1,), 1e38))


@pytest.mark.parametrize(("rows", "steps", "n"), [(70, 33, 1), (70, 33, 5), (70, 33, 10**12), (2, 1100, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_first", [True, False])
def test_n_step_transitions(n, rows, steps, dtype, batch_first, device):
    data = random_data(3, rows, steps, ends=0.05, padding=0.02)
    data = {name: data[name] for name in ("rewards", "discount", *FLAGS)}
    data = {name: (value if batch_first else value.T).contiguous() for name, value in data.items()}
    given = {name: value if name in FLAGS else value.to(dtype) for name, value in data.items()}
    found = []
    for module, where, own in ((gs, device, dtype), (gs.reference, torch.device("cpu"), torch.float64)):
        arguments = {name: value.to(where, None if name in FLAGS else own) for name, value in given.items()}
        rewards = arguments["rewards"].requires_grad_()
        parts = module.n_step_transitions(**arguments, n=n, batch_first=batch_first)
        weights = torch.linspace(-1, 2, rows * steps).view(parts.rewards.shape).to(parts.rewards)
        found.append((*parts, *torch.autograd.grad(parts.rewards, rewards, weights)))
    for ours, truth in zip(*found, strict=True):
        if ours.dtype == torch.int64:
            assert torch.equal(ours.cpu(), truth)
        else:
            check_close(ours, truth, dtype, what="n_step_transitions")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"to_play": None, "reward": "value_prefix"},
        {"root_reward": None},
        {"td_steps": torch.tensor([1, 2, 3, -1, 0, 20, 2**63 - 1, 1, 3])},
        {"td_steps": torch.arange(54).view(6, 9).T % 7 - 1},
    ],
)
def test_targets_of_muzero(changes, device):
    arguments = window_data() | {"num_unroll_steps": 5, "td_steps": 3, "discount": 0.9} | changes
    moved = converted(arguments, device)
    truth = gs.reference.muzero_targets(**arguments)
    for check in (False, True):
        for ours, expected in zip(gs.muzero_targets(**moved, check=check), truth, strict=True):
            torch.testing.assert_close(ours.cpu(), expected, rtol=1e-12, atol=1e-12)


def test_values_that_muzero_targets_refuses_on_a_gpu(device):
    """Without `check`, lengths are clamped, and nothing is read back."""
    arguments = window_data() | {"num_unroll_steps": 5, "td_steps": 3, "discount": 0.9}
    wrong = arguments | {"lengths": arguments["lengths"] * 2 - 5}
    players = arguments | {"to_play": torch.arange(9).expand(9, 9) % 3}
    for changed, name in ((wrong, "lengths"), (players, "to_play")):
        with pytest.raises(ValueError, match=f"^muzero_targets: {name} must"):
            gs.muzero_targets(**converted(changed, device), check=True)
    if device.type == "cuda":
        clamped = wrong | {"lengths": wrong["lengths"].clamp(0, 8)}
        truth = gs.reference.muzero_targets(**clamped)
        for ours, expected in zip(gs.muzero_targets(**converted(wrong, device)), truth, strict=True):
            torch.testing.assert_close(ours.cpu(), expected, rtol=1e-12, atol=1e-12)
