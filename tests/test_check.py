"""check=True: the errors that it finds in values, the values that it accepts, and its messages."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch

import gradscale_ext as gs

INF, NAN = math.inf, math.nan
SUPPORT = gs.Support(-5, 5, 5)
HEADS = {
    "value": gs.TwoHot(SUPPORT),
    "reward": gs.HLGauss(SUPPORT, first_step=1),
    "policy": gs.SoftCrossEntropy(),
    "action": gs.SoftCrossEntropy(first_step=1),
    "end": gs.BinaryCrossEntropy(),
    "state": gs.MeanSquaredError(),
    "own": gs.PerStepLoss(),
}
B, T, A = 3, 2, 4


def arguments():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(B, T, *shape, generator=generator)

    predictions = {
        "value": random(5),
        "reward": random(5)[:, 1:],
        "policy": random(A),
        "action": random(A)[:, 1:],
        "end": random(),
        "state": random(2),
        "own": random(),
    }
    targets = {
        "value": random(),
        "reward": random()[:, 1:],
        "policy": random(A).softmax(-1),
        "action": torch.tensor([[0], [3], [2]]),
        "end": random().sigmoid(),
        "state": random(2),
    }
    return predictions, targets


def put(tensor, value, *index):
    tensor[index] = torch.as_tensor(value, dtype=tensor.dtype)


#: Changes to (predictions, targets, options), and a part of the message.
FAULTS = {
    "raw visit counts": (
        lambda p, t, o: put(t["policy"], [30, 12, 8, 0], 1, 1),
        "the target of head 'policy' at step 1 is not a distribution: sample 1 has [30, 12, 8, 0]; write "
        "visits / visits.sum(-1, keepdim=True)",
    ),
    "few visit counts": (
        lambda p, t, o: put(t["policy"], [1, 0, 1, 1], 0, 0),
        "is not a distribution: sample 0 has",
    ),
    "a probability above 1": (lambda p, t, o: put(t["policy"], [1.5, 0.1, 0, 0], 0, 0), "is not a distribution"),
    "a negative probability": (
        lambda p, t, o: put(t["policy"], [0.6, -0.1, 0.3, 0.2], 2, 0),
        "the target of head 'policy' at step 0 has negative probabilities: sample 2 has [0.6, -0.1, 0.3, 0.2]",
    ),
    "visits divided by zero": (
        lambda p, t, o: put(t["policy"], NAN, 2, 1),
        "'policy' at step 1 is not finite: sample 2",
    ),
    "a target on an illegal action": (
        lambda p, t, o: put(p["policy"], -INF, 1, 0, 3),
        "the target of head 'policy' at step 0 is positive where the logit is -inf, which makes the loss infinite: "
        "sample 1",
    ),
    "a softmax before the head": (
        lambda p, t, o: p.update(policy=p["policy"].softmax(-1)),
        "the prediction of head 'policy' at step 0 looks like probabilities: all its rows are at least 0 and add up to "
        "1: sample 0",
    ),
    "a softmax in half precision": (
        lambda p, t, o: p.update(value=p["value"].softmax(-1).bfloat16()),
        "TwoHot expects logits: leave out the softmax",
    ),
    "a softmax in the recurrent network": (
        lambda p, t, o: put(p["action"], p["action"].softmax(-1)),
        "the prediction of head 'action' at step 1 looks like probabilities",
    ),
    "a NaN logit": (
        lambda p, t, o: put(p["value"], NAN, 1, 1, 4),
        "the prediction of head 'value' at step 1 is not finite: sample 1 has [",
    ),
    "an infinite prediction": (lambda p, t, o: put(p["state"], -INF, 0, 0, 1), "'state' at step 0 is not finite"),
    "a NaN loss": (lambda p, t, o: put(p["own"], NAN, 2, 1), "'own' at step 1 is not finite: sample 2 has nan"),
    "a NaN scalar": (
        lambda p, t, o: put(t["reward"], NAN, 1, 0),
        "the target of head 'reward' at step 1 is NaN: sample 1 has nan; mask entries without a target",
    ),
    "a NaN vector": (
        lambda p, t, o: put(t["state"], NAN, 1, 0, 1),
        "the target of head 'state' at step 0 is not finite",
    ),
    "an end beyond 1": (
        lambda p, t, o: put(t["end"], 255, 2, 1),
        "the target of head 'end' at step 1 must be in 0..1: sample 2 has 255",
    ),
    "a NaN end": (lambda p, t, o: put(t["end"], NAN, 2, 1), "'end' at step 1 must be in 0..1: sample 2 has nan"),
    "a class out of range": (
        lambda p, t, o: put(t["action"], 4, 1, 0),
        "the target of head 'action' at step 1 must be classes from 0 to 3: sample 1 has 4",
    ),
    "a negative importance weight": (
        lambda p, t, o: o.update(importance_weights=torch.tensor([1.0, -0.5, 1.0])),
        "importance_weights must be finite and at least 0, but sample 1 has -0.5",
    ),
    "a NaN importance weight": (
        lambda p, t, o: o.update(importance_weights=torch.tensor([1.0, 1.0, NAN])),
        "but sample 2 has nan",
    ),
    "an infinite step weight": (
        lambda p, t, o: o.update(step_weights=[1.0, INF]),
        "step_weights must be finite and at least 0, but step 1 has inf",
    ),
    "a negative step weight": (
        lambda p, t, o: o.update(step_weights=torch.tensor([[1.0, 1.0], [1.0, -2.0], [1.0, 1.0]])),
        "but sample 1 at step 1 has -2",
    ),
    "a NaN gradient scale": (
        lambda p, t, o: o.update(step_gradient_scale=[NAN, 1.0]),
        "step_gradient_scale must be finite, but step 0 has nan",
    ),
}


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_errors_are_found(fault, time_first):
    change, words = FAULTS[fault]
    predictions, targets = arguments()
    options: dict = {}
    change(predictions, targets, options)
    if time_first:
        predictions = {name: x.transpose(0, 1) for name, x in predictions.items()}
        targets = {name: t.transpose(0, 1) for name, t in targets.items()}
        options = {name: o.T if isinstance(o, torch.Tensor) and o.dim() == 2 else o for name, o in options.items()}
        options["batch_first"] = False
    for function in (lambda *a, **k: gs.multi_step_loss(HEADS, *a, **k), gs.MultiStepLoss(**HEADS)):
        with pytest.raises(ValueError, match=r"^multi_step_loss: ") as info:
            function(predictions, targets, check=True, **options)
        assert words in str(info.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_masked_entries_are_not_checked(fault):
    predictions, targets = arguments()
    options: dict = {"mask": torch.zeros(B, T, dtype=torch.bool)}
    FAULTS[fault][0](predictions, targets, options)
    gs.multi_step_loss(HEADS, predictions, targets, check=True, **options)


FIVE = gs.Support(-2, 2, 5, transform="identity")
#: A head, logits and a target of one sample at one step, and a part of the message.
ILLEGAL = {
    "label smoothing": (
        gs.SoftCrossEntropy(label_smoothing=0.1),
        [1.0, 2.0, -INF],
        [1.0, 0.0, 0.0],
        "the target of head 'x' at step 0 is positive where the logit is -inf after label_smoothing = 0.1, which makes "
        "the loss infinite: sample 0 has [1, 0, 0]; write label_smoothing=0.0 for a head with illegal actions",
    ),
    "label smoothing of classes": (
        gs.SoftCrossEntropy(label_smoothing=0.1),
        [1.0, 2.0, -INF],
        1,
        "after label_smoothing = 0.1, which makes the loss infinite: sample 0 has 1; write label_smoothing=0.0",
    ),
    "label smoothing over bins": (
        gs.TwoHot(FIVE, label_smoothing=0.5),
        [-INF, 0.0, 0.0, 0.0, 0.0],
        1.25,
        "after label_smoothing = 0.5, which makes the loss infinite: sample 0 has 1.25; write label_smoothing=0.0",
    ),
    "the class of an illegal action": (
        gs.SoftCrossEntropy(),
        [1.0, 2.0, -INF],
        2,
        "is positive where the logit is -inf, which makes the loss infinite: sample 0 has 2; give illegal actions",
    ),
    "a two-hot bin": (gs.TwoHot(FIVE), [0.0, 0.0, 0.0, -INF, 0.0], 0.25, "is positive where the logit is -inf"),
    "a bin of a histogram": (gs.HLGauss(FIVE), [0.0, 0.0, 0.0, -INF, 0.0], 0.25, "is positive where the logit is -inf"),
    "a divergence": (
        gs.CategoricalKL(unimix=0.0),
        [[0.0, -INF]],
        [[0.0, 0.0]],
        "is positive where the logit is -inf, which makes the loss infinite: sample 0 has [0, 0]; write unimix=0.01",
    ),
    "a divergence of p": (
        gs.CategoricalKL(unimix=0.0, prediction="p"),
        [[0.0, 0.0]],
        [[0.0, -INF]],
        "is positive where the logit is -inf, which makes the loss infinite: sample 0 has [0, -inf]; write unimix",
    ),
    "no legal action": (
        gs.SoftCrossEntropy(),
        [-INF, -INF],
        [0.0, 0.0],
        "the prediction of head 'x' at step 0 has only logits of -inf, whose softmax is NaN: sample 0",
    ),
}


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("name", ILLEGAL)
def test_targets_on_illegal_logits(name, impl):
    head, logits, target, words = ILLEGAL[name]
    logits, target = torch.tensor([[logits]]), torch.tensor([[target]])
    call = functools.partial(gs.multi_step_loss, {"x": head}, {"x": logits}, {"x": target}, impl=impl)
    assert not call().loss.isfinite()
    with pytest.raises(ValueError, match=r"^multi_step_loss: ") as info:
        call(check=True)
    assert words in str(info.value)
    call(check=True, mask=torch.tensor([[False]]))


def test_illegal_logits_without_a_target_pass():
    heads = {
        "policy": gs.SoftCrossEntropy(),
        "class": gs.SoftCrossEntropy(),
        "value": gs.TwoHot(FIVE),
        "gauss": gs.HLGauss(FIVE, sigma_ratio=0.02),
        "kl": gs.CategoricalKL(unimix=0.0),
        "mixed": gs.CategoricalKL(),
    }
    illegal = torch.tensor([[[-INF, 0.0, 1.0, 0.0, 2.0]]])
    predictions = {name: illegal.unsqueeze(2) if name in ("kl", "mixed") else illegal for name in heads}
    targets = {
        "policy": torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0]]]),
        "class": torch.tensor([[3]]),
        "value": torch.tensor([[0.25]]),
        "gauss": torch.tensor([[0.0]]),
        "kl": predictions["kl"],
        "mixed": torch.zeros(1, 1, 1, 5),
    }
    assert gs.multi_step_loss(heads, predictions, targets, check=True).loss.isfinite()


@pytest.mark.parametrize("head", [gs.TwoHot, gs.HLGauss])
def test_scalars_beyond_the_support(head):
    """The share counts finite unmasked targets, and the support in the message holds them."""
    targets = torch.tensor([[0.0, 1.0], [40.0, INF], [-3.0, 4.0], [200.0, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [True, True], [False, True]])

    def call(support, **options):
        return gs.multi_step_loss({"x": head(support)}, {"x": torch.zeros(4, 2, 5)}, {"x": targets}, **options)

    with pytest.warns(UserWarning, match="beyond its support") as found:
        out = call(gs.Support(-3, 3, 5), mask=mask, check=True)
    assert torch.equal(out.loss, call(gs.Support(-3, 3, 5), mask=mask).loss)
    (message,) = [str(warning.message) for warning in found]
    wider = (
        "Support(minimum=-6.0, maximum=6.0, num_bins=5, transform='signed_hyperbolic', eps=0.001, space='transformed')"
    )
    assert message.startswith(
        "multi_step_loss: 16.67% of the targets of head 'x' are beyond its support and are encoded as its ends; "
        f"{wider} holds them, with wider bins"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(eval(f"gs.{wider}"), mask=mask, check=True)
        call(gs.Support(-3, 3, 5), mask=mask & (targets.abs() < 10), check=True)
        call(gs.Support(-3, 3, 5), mask=mask)
    targets = torch.tensor([[-2.5, 7.0], [0.0, 200.0], [1.0, 1.0], [1.0, 1.0]])
    with pytest.warns(UserWarning, match=r"12\.50%.*Support\(minimum=-3\.0, maximum=200\.0, .*'identity'"):
        call(gs.Support(-2, 200, 5, "identity"), check=True)


def test_targets_at_the_ends_of_a_support_are_not_beyond():
    for support in (gs.Support.muzero(), gs.Support.tdmpc2(), gs.Support.dreamer_v3()):
        ends = gs.reference.raw_centers(support, torch.float32)[[0, -1]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gs.multi_step_loss(
                {"x": gs.TwoHot(support)}, {"x": torch.zeros(1, 2, support.num_bins)}, {"x": ends[None]}, check=True
            )


def test_a_mask_of_another_head_hides_no_error():
    predictions, targets = arguments()
    targets["value"][1, 1] = NAN
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 1] = False
    gs.multi_step_loss(HEADS, predictions, targets, mask={"value": mask}, check=True)
    with pytest.raises(ValueError, match="'value' at step 1 is NaN"):
        gs.multi_step_loss(HEADS, predictions, targets, mask={"policy": mask}, check=True)


def test_weights_that_no_head_reads_are_not_checked():
    heads, targets = {"action": HEADS["action"]}, {"action": arguments()[1]["action"]}
    predictions = {"action": arguments()[0]["action"]}
    gs.multi_step_loss(heads, predictions, targets, step_weights=[NAN, 1.0], check=True)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    weights = torch.tensor([[1.0, 1.0], [1.0, NAN], [1.0, 1.0]])
    gs.multi_step_loss(heads, predictions, targets, step_weights=weights, mask=mask, check=True)


@pytest.mark.parametrize("by_head", [False, True])
def test_importance_weights_of_masked_samples_are_not_checked(by_head):
    heads = {"a": gs.PerStepLoss(), "b": gs.PerStepLoss(first_step=1)}
    losses = {"a": torch.ones(3, 2), "b": torch.ones(3, 1)}
    weights = torch.tensor([1.0, NAN, 1.0])
    options = {"importance_weights": {"b": weights} if by_head else weights, "check": True}
    whole, root = torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool)
    whole[1] = root[1, 1] = False
    out = gs.multi_step_loss(heads, losses, {}, mask={"b": root} if by_head else whole, **options)
    assert out.loss.isfinite()
    with pytest.raises(ValueError, match="sample 1 has nan; mask an entry to leave it out"):
        gs.multi_step_loss(heads, losses, {}, mask={"a": whole}, **options)
    if not by_head:  # head "a" reads the sample at step 0
        with pytest.raises(ValueError, match="sample 1 has nan"):
            gs.multi_step_loss(heads, losses, {}, mask=root, **options)


def test_valid_values_pass():
    predictions, targets = arguments()
    expected = gs.multi_step_loss(HEADS, predictions, targets).loss
    assert torch.equal(gs.multi_step_loss(HEADS, predictions, targets, check=True).loss, expected)
    targets["policy"][0, 0] *= 0.25  # a weighted distribution
    targets["policy"][1, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    targets["policy"][2, 0] = 0.0
    targets["value"][0, 0] = INF  # the end bin
    predictions["policy"][1, 0, 0] = -INF  # an illegal action
    predictions["value"][1] = predictions["value"][1].softmax(-1)  # one row is a distribution
    targets["end"][0] = torch.tensor([0.0, 1.0])
    options = {"step_gradient_scale": [-1.0, 0.5], "step_weights": [0.0, 1.0], "importance_weights": torch.zeros(B)}
    assert gs.multi_step_loss(HEADS, predictions, targets, check=True, **options).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rounded_distributions_pass(dtype):
    logits = torch.randn(64, 1, 362, generator=torch.Generator().manual_seed(0))
    target = (3 * logits).softmax(-1).to(dtype)
    gs.multi_step_loss({"p": gs.SoftCrossEntropy()}, {"p": logits.to(dtype)}, {"p": target}, check=True)


def test_an_empty_batch_passes():
    heads = {"value": HEADS["value"], "policy": HEADS["policy"]}
    predictions = {"value": torch.empty(0, 1, 5), "policy": torch.empty(0, 1, 4)}
    targets = {"value": torch.empty(0, 1), "policy": torch.empty(0, 1, 4)}
    assert gs.multi_step_loss(heads, predictions, targets, importance_weights=torch.empty(0), check=True).loss == 0


def test_changes_neither_value_nor_gradient():
    gradients = []
    for check in (False, True):
        predictions, targets = arguments()
        predictions = {name: x.requires_grad_() for name, x in predictions.items()}
        out = gs.multi_step_loss(HEADS, predictions, targets, step_gradient_scale="unroll", check=check)
        gradients.append(torch.autograd.grad(out.loss, list(predictions.values())))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_shape_errors_come_first():
    predictions, targets = arguments()
    with pytest.raises(ValueError, match="importance_weights must have shape"):
        gs.multi_step_loss(HEADS, predictions, targets, importance_weights=torch.ones(4), check=True)


def test_reduce_multi_step():
    losses = torch.ones(2, 3)
    losses[1, 2] = NAN
    with pytest.raises(ValueError, match="'loss' at step 2 is not finite: sample 1 has nan"):
        gs.reduce_multi_step(losses, check=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False
    assert gs.reduce_multi_step(losses, mask=mask, check=True).loss == 2.5


@pytest.mark.compiled
def test_contexts_without_values_raise():
    losses = torch.ones(2, 3)

    def loss_of(x):
        return gs.reduce_multi_step(x, check=True).loss

    for function in (
        torch.func.grad(loss_of),
        lambda x: torch.func.vmap(loss_of)(x.unsqueeze(0)),
        lambda x: torch.func.jvp(loss_of, (x,), (x,)),
        torch.compile(loss_of, backend="eager", fullgraph=True),
        torch.compile(torch.func.grad(loss_of), backend="eager", fullgraph=True),
        lambda x: torch.export.export(type("Module", (torch.nn.Module,), {"forward": lambda s, y: loss_of(y)})(), (x,)),
    ):
        with pytest.raises(Exception, match="check=True reads values"):
            function(losses)
    for manager in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with manager:
            assert loss_of(losses) == 3
