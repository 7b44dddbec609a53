"""Which eager calls the kernels accept: sequences of numbers of any type, lazily negated tensors, tensors of inference
mode. Where an argument sends a call to the reference, a warning says which one and why."""

from __future__ import annotations

import array
import collections
import functools
import itertools
import warnings
from fractions import Fraction

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import gradscale_ext as gs
from gradscale_ext.loss import compiled, multi_step

B, T, S, A = 4, 3, 11, 5
SUPPORT = gs.Support(-5, 5, S)
HEADS = {
    "value": gs.TwoHot(SUPPORT),
    "gauss": gs.HLGauss(SUPPORT, first_step=1),
    "policy": gs.SoftCrossEntropy(),
    "size": gs.MeanSquaredError(),
    "latent": gs.CategoricalKL(),
}
#: Few heads compile faster.
FEW = {name: HEADS[name] for name in ("value", "size")}
SIZES = {"value": (S,), "gauss": (S,), "policy": (A,), "size": (), "latent": (2, 3)}
NUMBERS = [1.0, 0.5, 0.25]


def arguments(heads=HEADS):
    generator = torch.Generator().manual_seed(0)
    predictions, targets = {}, {}
    for name, head in heads.items():
        leading = (B, T - head.first_step)
        predictions[name] = torch.randn(*leading, *SIZES[name], generator=generator, dtype=torch.float64)
        sizes = () if head.decodes else SIZES[name]
        targets[name] = torch.rand(*leading, *sizes, generator=generator, dtype=torch.float64)
    return predictions, targets


@pytest.fixture
def fused_only(monkeypatch):
    """Fail the test if a call uses the reference."""
    for name in ("multi_step_loss", "loss_of"):
        monkeypatch.setattr(gs.reference, name, None)


@pytest.fixture(scope="module")
def quickly_compiled():
    """Let impl="compiled" compile without Inductor, which is slow, and once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        compiled._compiled.cache_clear()
        yield
        compiled._compiled.cache_clear()


def listed(given):
    return {name: list(entries.unbind(1)) for name, entries in given.items()}


WEIGHTS = {
    "step_weights": torch.rand(B, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "step_gradient_scale": torch.rand(T, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    "importance_weights": torch.rand(B, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
    "head_weights": {"value": torch.tensor(0.7, dtype=torch.float64), "size": torch.tensor(1.3, dtype=torch.float64)},
}


def mapped(change, given):
    if isinstance(given, torch.Tensor):
        return change(given)
    if isinstance(given, list):
        return [change(item) for item in given]
    return {name: mapped(change, item) for name, item in given.items()}


# ---- Sequences of numbers -------------------------------------------------------------------------------------------


class Numbers(list):
    pass


def arrays():
    np = pytest.importorskip("numpy")
    return {
        "NumPy": np.array(NUMBERS),
        "float32 of NumPy": np.array(NUMBERS, np.float32),
        "strided NumPy": np.repeat(np.array(NUMBERS), 2)[::2],
        "NumPy scalars": list(np.array(NUMBERS, np.float32)),
        "a memoryview of NumPy": memoryview(np.array(NUMBERS)),
    }


SEQUENCES = {
    "tuple": tuple(NUMBERS),
    "deque": collections.deque(NUMBERS),
    "UserList": collections.UserList(NUMBERS),
    "a subclass of list": Numbers(NUMBERS),
    "array": array.array("d", NUMBERS),
    "array of float32": array.array("f", NUMBERS),
    "memoryview": memoryview(array.array("d", NUMBERS)),
    "fractions": [Fraction(number) for number in NUMBERS],
    "tensors": [torch.tensor(number) for number in NUMBERS],
    "a deque of tensors": collections.deque(torch.tensor(number) for number in NUMBERS),
    "lazily negated tensors": [torch._neg_view(torch.tensor(-number)) for number in NUMBERS],
    "tensors of inference mode": [torch.inference_mode()(torch.tensor)(number) for number in NUMBERS],
    **arrays(),
}


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("argument", ["step_weights", "step_gradient_scale"])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_sequences_of_numbers_are_fused(sequence, argument, by_head, fused_only):
    predictions, targets = arguments()
    predictions = mapped(torch.Tensor.requires_grad_, predictions)
    results = []
    for numbers in (NUMBERS, SEQUENCES[sequence]):
        out = gs.multi_step_loss(HEADS, predictions, targets, **{argument: {"value": numbers} if by_head else numbers})
        results.append((out.loss, torch.autograd.grad(out.loss, list(predictions.values()))))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_what_is_no_sequence_of_numbers(impl):
    np = pytest.importorskip("numpy")

    class WithoutLength:
        def __getitem__(self, index):
            return NUMBERS[index]

    for given, words in (
        (np.ones((3, 1)), "of type ndarray; convert step_weights: torch.as_tensor"),
        (memoryview(np.ones((3, 1))), "of type memoryview"),
        (collections.UserDict(dict(enumerate(NUMBERS))), "step_weights names 0, which is not a head"),
        ({"value": collections.UserDict(dict(enumerate(NUMBERS)))}, "'value' must be a tensor or a sequence of 3 numb"),
        (dict(enumerate(NUMBERS)).values(), "of type dict_values; make step_weights a list: list"),
        (set(NUMBERS), "of type set"),
        (bytearray(3), "of type bytearray"),
        (WithoutLength(), "of type WithoutLength"),
        (array.array("u", "abc"), "sequence of numbers, but it holds 'a'"),
        (collections.deque([1.0]), "must have 3 numbers, one per step, but it has 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            gs.multi_step_loss(HEADS, *arguments(), step_weights=given, impl=impl)


@pytest.mark.compiled
@pytest.mark.parametrize("impl", ["fused", "compiled", "reference"])
def test_negative_step_weights(impl, quickly_compiled):
    """A number is checked in every call, a tensor only with check=True. A gradient scale may be negative."""
    heads = FEW if impl == "compiled" else HEADS
    predictions, targets = arguments(heads)
    for numbers in ([1.0, -0.5, 1.0], collections.deque([1.0, -0.5, 1.0]), [1.0, torch.tensor(-0.5), 1.0]):
        for given, label in ((numbers, "step_weights"), ({"value": numbers}, "the step_weights of head 'value'")):
            with pytest.raises(
                ValueError, match=rf"^multi_step_loss: {label} must be at least 0, but step 1 has -0\.5"
            ):
                gs.multi_step_loss(heads, predictions, targets, step_weights=given, impl=impl)
    late = {"size": gs.MeanSquaredError(first_step=1)}
    gs.multi_step_loss(
        late, {"size": torch.ones(B, 2)}, {"size": torch.ones(B, 2)}, step_weights=[-1.0, 1.0, 1.0], impl=impl
    )
    predictions = mapped(torch.Tensor.requires_grad_, predictions)
    scaled = [
        gs.multi_step_loss(heads, predictions, targets, step_gradient_scale=[number] * T, impl=impl).loss
        for number in (1.0, -1.0)
    ]
    forward, reversed_ = (torch.autograd.grad(loss, list(predictions.values())) for loss in scaled)
    torch.testing.assert_close(reversed_, tuple(-gradient for gradient in forward))
    weights = torch.tensor([1.0, -0.5, 1.0])
    assert gs.multi_step_loss(heads, predictions, targets, step_weights=weights, impl=impl).loss.isfinite()
    with pytest.raises(ValueError, match=r"step_weights must be finite and at least 0, but step 1 has -0\.5"):
        gs.multi_step_loss(heads, predictions, targets, step_weights=weights, impl=impl, check=True)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_negative_number_at_the_first_step_of_a_head(first, impl):
    weights = [1.0] * T
    weights[first] = -0.5
    heads = {"size": gs.MeanSquaredError(first_step=first)}
    steps = torch.ones(B, T - first)
    with pytest.raises(ValueError, match=rf"must be at least 0, but step {first} has -0\.5"):
        gs.multi_step_loss(heads, {"size": steps}, {"size": steps}, step_weights=weights, impl=impl)


@pytest.mark.compiled
def test_negative_step_weights_while_compiling():
    predictions, targets = arguments(FEW)
    function = torch.compile(
        lambda number: gs.multi_step_loss(FEW, predictions, targets, step_weights=[1.0, number, 1.0]).loss,
        backend="eager",
        fullgraph=True,
    )
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"step_weights must be at least 0, but step 1 has -0\.5"):
        function(-0.5)
    torch._dynamo.reset()


# ---- Tensors that PyTorch negates lazily ----------------------------------------------------------------------------


def lazily_negated(x):
    """The same numbers as x, in a tensor with PyTorch's negative bit. Gradients flow to x."""
    lazy = torch.complex(x, -x).conj().imag
    assert lazy.is_neg()
    return lazy


@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("argument", ["predictions", "targets", *WEIGHTS])
def test_lazily_negated_tensors_are_fused(argument, form, fused_only):
    results = []
    for lazy in (False, True):
        predictions, targets = arguments()
        weights = {name: mapped(torch.Tensor.clone, weight) for name, weight in WEIGHTS.items()}
        wanted = [x.requires_grad_() for x in [*predictions.values(), *weights["head_weights"].values()]]
        given = {"predictions": predictions, "targets": targets, **weights}
        if form == "list":
            given |= {name: listed(given[name]) for name in ("predictions", "targets")}
        if lazy:
            given[argument] = mapped(lazily_negated, given[argument])
        out = gs.multi_step_loss(HEADS, given.pop("predictions"), given.pop("targets"), **given)
        results.append((out.loss, out.head_gradient_norms, torch.autograd.grad(out.loss, wanted)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_lazily_negated_gradient_of_the_loss(reduction, fused_only):
    predictions, targets = arguments()
    wanted = [x.requires_grad_() for x in predictions.values()]
    out = gs.multi_step_loss(HEADS, predictions, targets, reduction=reduction)
    incoming = torch.rand(out.loss.shape, dtype=torch.float64)
    expected = torch.autograd.grad(out.loss, wanted, incoming, retain_graph=True)
    found = torch.autograd.grad(out.loss, wanted, lazily_negated(incoming))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- Calls that only the reference computes -------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A tensor that sees the operations of PyTorch, as quantized and other wrapped tensors do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrapped = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*unwrapped[0], **unwrapped[1]))


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


NAMED = {
    "predictions": "the prediction of head 'value'",
    "targets": "the target of head 'value'",
    "step_weights": "step_weights",
    "step_gradient_scale": "step_gradient_scale",
    "importance_weights": "importance_weights",
    "head_weights": "the head_weights of head 'value'",
    "mask": "mask",
}


@pytest.fixture
def fresh_messages():
    gs._context.say_once.cache_clear()


@pytest.mark.parametrize("argument", NAMED)
def test_an_argument_that_the_kernels_do_not_accept_is_named_once(argument, fresh_messages):
    predictions, targets = arguments()
    given = {"predictions": predictions, "targets": targets, **WEIGHTS, "mask": torch.ones(B, T) > 0}
    expected = gs.multi_step_loss(HEADS, **given).loss
    given[argument] = mapped(Wrapped, given[argument])
    message = f"^multi_step_loss: {NAMED[argument]} is of type Wrapped, not a plain torch.Tensor: convert it; plain Py"
    with pytest.warns(UserWarning, match=message) as caught:
        assert torch.equal(
            gs.multi_step_loss(HEADS, **given).loss.inner, gs.reference.multi_step_loss(HEADS, **given).loss.inner
        )
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(gs.multi_step_loss(HEADS, **given).loss.inner, expected)


WRONG = {
    "a prediction that is missing": ("prediction", lambda given: given.pop("size")),
    "a prediction of no head": ("prediction", lambda given: given.update(other=given["size"])),
    "no prediction": ("prediction", lambda given: given.update(value=[])),
    "another number of steps": ("prediction", lambda given: given.update(size=given["size"][:, :2])),
    "another batch": ("prediction", lambda given: given.update(size=given["size"][:3])),
    "another number of bins": ("prediction", lambda given: given.update(value=given["value"][..., :7])),
    "integers": ("prediction", lambda given: given.update(value=given["value"].long())),
    "a number": ("prediction", lambda given: given.update(value=1.0)),
    "a number in a list": ("prediction", lambda given: given["value"].__setitem__(1, 1.0)),
    "one of another shape": ("prediction", lambda given: given["value"].__setitem__(1, torch.rand(B, S + 1))),
    "a target of distributions": ("target", lambda given: given.update(value=torch.rand(B, T, S))),
    "a target that requires grad": ("target", lambda given: given["value"].requires_grad_()),
    "one target that requires grad": ("target", lambda given: given["value"][2].requires_grad_()),
    "half of the steps of a target": ("target", lambda given: given.update(value=given["value"][:, :1])),
    "a mask of numbers": ("mask", torch.ones(B, T)),
    "a mask of other steps": ("mask", {"value": torch.ones(B, 2) > 0}),
    "a mask of no head": ("mask", {"other": torch.ones(B, T) > 0}),
    "too few numbers": ("step_weights", [1.0, 2.0]),
    "text": ("step_weights", "1"),
    "a negative number": ("step_weights", {"value": [1.0, -1.0, 1.0]}),
    "text as a scale": ("step_gradient_scale", {"value": "roll"}),
    "weights of steps": ("importance_weights", torch.ones(B, T)),
    "a list of weights": ("importance_weights", [1.0] * B),
    "weights that require grad": ("importance_weights", {"value": torch.ones(B, requires_grad=True)}),
    "one head weight": ("head_weights", 2.0),
    "a negative head weight": ("head_weights", {"value": -1.0}),
    "a head weight with dimensions": ("head_weights", {"value": torch.ones(1)}),
    "no entries": ("num_entries", {"value": 0}),
    "a count of a half type": ("num_entries", {"value": torch.tensor(3, dtype=torch.float16)}),
    "an unknown reduction": ("reduction", "median"),
    "an unknown way": ("nonfinite", "raise"),
    "a number as a flag": ("batch_first", 1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals_and_errors_name_the_same_argument(wrong, monkeypatch):
    """The kernels refuse what is wrong, and Python, which checks the arguments again, says what to write."""
    argument, change = WRONG[wrong]
    predictions, targets = arguments()
    if "one" in wrong.split() or "list" in wrong.split():
        predictions, targets = listed(predictions), listed(targets)
    options = {}
    if argument in ("prediction", "target"):
        change(predictions if argument == "prediction" else targets)
    else:
        options[argument] = change
    refusals = []
    compute = multi_step._fused_loss
    monkeypatch.setattr(multi_step, "_fused_loss", lambda *call: refusals.append(compute(*call)) or refusals[-1])
    with pytest.raises((TypeError, ValueError)) as caught:
        gs.multi_step_loss(HEADS, predictions, targets, **options)
    (refusal,) = refusals
    assert isinstance(refusal, multi_step._C.Refusal)
    assert refusal.argument in str(caught.value).replace("the stacked ", "the ")
    assert argument in refusal.argument


@pytest.mark.parametrize("name", ["größe 🎯", "\ud800"])
def test_any_text_is_a_name_of_a_head(name):
    heads = {name: gs.SoftCrossEntropy()}
    assert gs.multi_step_loss(heads, {name: [torch.zeros(2, 3)]}, {name: [torch.tensor([0, 1])]}).loss.isfinite()
    with pytest.raises(ValueError, match="must be classes from 0 to 2, but sample 1 has 3"):
        gs.multi_step_loss(heads, {name: [torch.zeros(2, 3)]}, {name: [torch.tensor([0, 3])]})


@pytest.mark.parametrize(
    "context", ["vmap", "grad", "forward mode", "dispatch mode", "inference mode", "subclass without operations"]
)
def test_contexts_that_need_the_reference_are_silent(context, fresh_messages):
    """In these contexts the reference is the right path, or the kernels accept the call."""
    predictions, targets = arguments()
    x = predictions.pop("value")

    def loss(x):
        return gs.multi_step_loss(HEADS, {**predictions, "value": x}, targets).loss

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="multi_step_loss")
        if context == "vmap":
            torch.func.vmap(loss)(x[None])
        elif context == "grad":
            torch.func.grad(loss)(x)
        elif context == "forward mode":
            with forward_ad.dual_level():
                loss(forward_ad.make_dual(x, x))
        elif context == "dispatch mode":
            with Mode():
                loss(x)
        elif context == "inference mode":
            with torch.inference_mode():
                loss(x.clone())
        else:
            loss(x.as_subclass(type("Named", (torch.Tensor,), {})))


WITHOUT_ELEMENTS = {
    "classes": (gs.SoftCrossEntropy(), (0,), (0,)),
    "elements": (gs.MeanSquaredError(), (0,), (0,)),
    "classes of a group": (gs.CategoricalKL(), (4, 0), (4, 0)),
    "quantiles": (gs.QuantileHuber(), (0,), (5,)),
    "quantiles of the target": (gs.QuantileHuber(), (5,), (0,)),
}


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize(("head", "of_prediction", "of_target"), WITHOUT_ELEMENTS.values(), ids=WITHOUT_ELEMENTS)
def test_rows_without_elements(head, of_prediction, of_target, impl):
    predictions, targets = {"own": torch.zeros(3, 2, *of_prediction)}, {"own": torch.zeros(3, 2, *of_target)}
    with pytest.raises(ValueError, match=r"of head 'own' at step 0 must have shape \[3, .*but it has \[3, (4, )?0\]"):
        gs.multi_step_loss({"own": head}, predictions, targets, impl=impl)


# ---- Tensors of inference mode --------------------------------------------------------------------------------------


@torch.inference_mode()
def made_in_inference_mode(x):
    return x.clone()


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("argument", "impl", "create_graph"),
    [
        *itertools.product(NAMED, ["fused", "reference"], [False, True]),
        *[
            pytest.param(name, "compiled", False, marks=pytest.mark.slow if name not in ("predictions", "mask") else ())
            for name in NAMED
        ],
    ],
)
def test_constants_made_in_inference_mode(argument, impl, create_graph, quickly_compiled):
    heads = FEW if impl == "compiled" else HEADS
    results = []
    for constant in (torch.Tensor.clone, made_in_inference_mode):
        predictions, targets = arguments(heads)
        given = {"predictions": predictions, "targets": targets, **WEIGHTS, "mask": torch.ones(B, T) > 0}
        if argument == "predictions":  # all but one
            wanted = [predictions["size"].requires_grad_()]
            given[argument] = {name: x if name == "size" else constant(x) for name, x in predictions.items()}
        else:
            wanted = [x.requires_grad_() for x in predictions.values()]
            given[argument] = mapped(constant, given[argument])
        out = gs.multi_step_loss(heads, **given, impl=impl)
        gradients = torch.autograd.grad(out.loss, wanted, create_graph=create_graph)
        if create_graph:
            gradients = torch.autograd.grad(sum(x.square().sum() for x in gradients), wanted)
        results.append((out.loss.detach(), out.head_gradient_norms, gradients))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jvp"])
def test_transforms_of_constants_made_in_inference_mode(transform):
    predictions, targets = arguments()
    x = predictions.pop("value")
    results = []
    for constant in (torch.Tensor.clone, made_in_inference_mode):
        given = mapped(constant, targets)

        def loss(x, given=given):
            return gs.multi_step_loss(HEADS, {**predictions, "value": x}, given).loss

        if transform == "grad":
            results.append(torch.func.grad(loss)(x))
        elif transform == "vmap of grad":
            results.append(torch.func.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x])))
        else:
            results.append(torch.func.jvp(loss, (x,), (x,))[1])
    torch.testing.assert_close(*results, rtol=0, atol=0)
