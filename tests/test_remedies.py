"""Errors of the loss suggest code that replaces the mistake."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import gradscale_ext as gs

B, T, S, A = 3, 6, 11, 4
SUPPORT = gs.Support(-5, 5, S)
HEADS = {
    "value": gs.TwoHot(SUPPORT),
    "reward": gs.TwoHot(SUPPORT, first_step=1),
    "policy": gs.SoftCrossEntropy(),
    "end": gs.BinaryCrossEntropy(),
    "size": gs.MeanSquaredError(),
}


def arguments():
    predictions = {
        "value": [torch.randn(B, S) for _ in range(T)],
        "reward": [torch.randn(B, S) for _ in range(T - 1)],
        "policy": [torch.randn(B, A) for _ in range(T)],
        "end": [torch.randn(B) for _ in range(T)],
        "size": [torch.randn(B) for _ in range(T)],
    }
    targets = {
        "value": [torch.randn(B) for _ in range(T)],
        "reward": [torch.randn(B) for _ in range(T - 1)],
        "policy": [torch.rand(B, A) for _ in range(T)],
        "end": [torch.rand(B) for _ in range(T)],
        "size": [torch.randn(B) for _ in range(T)],
    }
    return predictions, targets


def every(entries, change):
    entries[:] = [change(entry) for entry in entries]


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(T, S)] * B, layout=layout)


#: Changes to (predictions, targets, options), and the end of the message. test_all_advice.py has other mistakes, and
#: follows their remedies.
MISTAKES = {
    "NumPy targets": (
        lambda p, t, o: every(t["value"], torch.Tensor.numpy),
        "ndarray; convert it: torch.as_tensor(...)",
    ),
    "NumPy target": (lambda p, t, o: t.update(value=torch.ones(B, T).numpy()), "convert it: torch.as_tensor(...)"),
    "NumPy predictions": (lambda p, t, o: p.update(value=torch.ones(B, T, S).numpy()), "torch.as_tensor(...)"),
    "lists of numbers": (lambda p, t, o: every(t["value"], torch.Tensor.tolist), "convert it: torch.tensor(...)"),
    "numbers": (lambda p, t, o: t.update(policy=[1] * T), "an element for each sample: torch.tensor([...])"),
    "a number": (lambda p, t, o: p.update(value=3), "an element for each sample: torch.tensor([...])"),
    "a generator": (lambda p, t, o: t.update(value=iter(t["value"])), "make it a list: list(...)"),
    "list of weights": (
        lambda p, t, o: o.update(importance_weights=[1.0] * B),
        "convert importance_weights: torch.tensor(importance_weights)",
    ),
    "[B, 1] weights": (
        lambda p, t, o: o.update(importance_weights=torch.ones(B, 1)),
        "must have shape [B] = [3], but it has [3, 1]; write importance_weights.squeeze(-1)",
    ),
    "[B, T] weights": (
        lambda p, t, o: o.update(importance_weights=torch.ones(B, T)),
        "weights of steps go to step_weights",
    ),
    "integer weights": (lambda p, t, o: o.update(importance_weights=torch.ones(B).long()), "write .float()"),
    "NumPy mask": (lambda p, t, o: o.update(mask=torch.ones(B, T).numpy()), "convert mask: torch.as_tensor(mask)"),
    "nested lists": (lambda p, t, o: o.update(mask=[[True] * T] * B), "convert mask: torch.tensor(mask)"),
    "[B, K] mask of a head": (
        lambda p, t, o: o.update(mask={"reward": torch.ones(B, T - 1) > 0}),
        "write torch.cat([torch.ones_like(mask[:, :1]), mask], 1)",
    ),
    "[B, T] mask": (
        lambda p, t, o: o.update(mask=torch.ones(B, T) > 0, batch_first=False),
        "must have shape [T, B] = [6, 3], but it has [3, 6]; write mask.T, or batch_first=True where everything",
    ),
    "[T] mask": (lambda p, t, o: o.update(mask=torch.ones(T) > 0), "write mask.expand(3, 6)"),
    "[T] mask, time first": (
        lambda p, t, o: o.update(mask=torch.ones(T) > 0, batch_first=False),
        "write mask[:, None].expand(6, 3)",
    ),
    "[B, T, 1] mask": (lambda p, t, o: o.update(mask=torch.ones(B, T, 1) > 0), "write mask.squeeze(-1)"),
    "step weights by sample": (
        lambda p, t, o: o.update(step_weights=torch.ones(B)),
        "[T] = [6] or [B, T] = [3, 6], but it has [3]; a weight for each sample goes to importance_weights",
    ),
    "step weights without the root": (
        lambda p, t, o: o.update(step_weights=[1.0] * (T - 1)),
        "it has 5; T includes the root",
    ),
    "[B, 1] predictions": (
        lambda p, t, o: every(p["end"], lambda x: x.unsqueeze(-1)),
        "must have shape [B] for BinaryCrossEntropy, but it has [3, 1]; write prediction.squeeze(-1)",
    ),
    "[B, 1] and [B]": (lambda p, t, o: every(p["size"], lambda x: x.unsqueeze(-1)), "write target.unsqueeze(-1)"),
    "[B, 1] targets": (lambda p, t, o: every(t["value"], lambda x: x.unsqueeze(-1)), "write target.squeeze(-1)"),
    "encoded targets": (lambda p, t, o: every(t["value"], SUPPORT.two_hot), "pass raw scalars: the head encodes them"),
    "stacked encoded targets": (
        lambda p, t, o: t.update(value=SUPPORT.two_hot(torch.randn(B, T))),
        "the stacked target of head 'value' must have shape [B, T] for TwoHot, but it has [3, 6, 11]; pass raw "
        "scalars: the head encodes them",
    ),
    "encoded targets of another support": (
        lambda p, t, o: t.update(value=gs.Support(-1, 1, 3).two_hot(torch.randn(B, T))),
        "but it has [3, 6, 3]; pass raw scalars: the head encodes them",
    ),
    "[B, T, 1] targets": (
        lambda p, t, o: t.update(value=torch.randn(B, T, 1)),
        "must have shape [B, T] for TwoHot, but it has [3, 6, 1]; write target.squeeze(-1)",
    ),
    "[T, B, 1] targets": (
        lambda p, t, o: (
            p.clear(),
            t.clear(),
            p.update(end=torch.randn(T, B)),
            t.update(end=torch.rand(T, B, 1)),
            o.update(batch_first=False, heads={"end": HEADS["end"]}),
        ),
        "must have shape [T, B] for BinaryCrossEntropy, but it has [6, 3, 1]; write target.squeeze(-1)",
    ),
    "[B, T, 1] predictions": (
        lambda p, t, o: p.update(end=torch.randn(B, T, 1)),
        "must have shape [B, T] for BinaryCrossEntropy, but it has [3, 6, 1]; write prediction.squeeze(-1)",
    ),
    "[B, T, 1] classes": (
        lambda p, t, o: t.update(policy=torch.ones(B, T, 1).long()),
        "write target.squeeze(-1)",
    ),
    "flat logits of a divergence": (
        lambda p, t, o: (
            p.update(kl=[torch.randn(B, 8)] * T),
            t.update(kl=[torch.randn(B, 8)] * T),
            o.update(heads={**HEADS, "kl": gs.CategoricalKL()}),
        ),
        "must have shape [B, G, C] for CategoricalKL, but it has [3, 8]; write prediction.unflatten(-1, (G, C))",
    ),
    "an action too many": (
        lambda p, t, o: [entries.pop() for entries in t.values()],
        "the target of head 'value' must have 6 entries (first_step = 0; T = 6 steps, those of head 'value' with "
        "first_step = 0 and 6 predictions), but it has 5; K actions give K + 1 predictions: unroll with 4 actions, or "
        "give 6 targets",
    ),
    "an action too few": (
        lambda p, t, o: [entries.append(entries[0]) for entries in t.values()],
        "but it has 7; K actions give K + 1 predictions: unroll with 6 actions, or give 6 targets",
    ),
    "an action too many, stacked, as many samples as targets": (
        lambda p, t, o: (
            p.clear(),
            t.clear(),
            p.update(end=torch.randn(5, 6)),
            t.update(end=torch.rand(5, 5)),
            o.update(heads={"end": HEADS["end"]}),
        ),
        "but it has 5; K actions give K + 1 predictions: unroll with 4 actions, or give 6 targets",
    ),
    "targets of one head without the root": (
        lambda p, t, o: t["policy"].pop(),
        "but it has 5; a head that has nothing at the root is declared with first_step=1, and has no prediction for it",
    ),
    "the root as target of the only head": (
        lambda p, t, o: (
            [x.pop("value") for x in (p, t)],
            t["reward"].append(t["reward"][0]),
            [x.pop(name) for x in (p, t) for name in ("policy", "end", "size")],
            o.update(heads={"reward": HEADS["reward"]}),
        ),
        "but it has 6; leave out the target of the root",
    ),
    "integer targets": (lambda p, t, o: every(t["value"], torch.Tensor.long), "it is torch.int64; write .float()"),
    "bool targets": (lambda p, t, o: every(t["end"], torch.Tensor.bool), "it is torch.bool; write .float()"),
    "float8": (lambda p, t, o: every(p["value"], lambda x: x.to(torch.float8_e4m3fn)), "write .float()"),
    "complex": (lambda p, t, o: every(p["size"], lambda x: x.cfloat()), "it is torch.complex64; write .real"),
    "sparse": (lambda p, t, o: every(t["policy"], torch.Tensor.to_sparse), "torch.sparse_coo; write .to_dense()"),
    "nested": (
        lambda p, t, o: p.update(value=nested(torch.strided)),
        "torch.nested.to_padded_tensor(..., 0.0), and mask",
    ),
    "jagged": (
        lambda p, t, o: p.update(value=nested(torch.jagged)),
        "torch.nested.to_padded_tensor(..., 0.0), and mask",
    ),
    "masked": (
        lambda p, t, o: p.update(value=torch.masked.masked_tensor(torch.ones(B, T, S), torch.ones(B, T, S) > 0)),
        "is a MaskedTensor; give its get_data(), and its get_mask() as mask",
    ),
    "a target for the root": (
        lambda p, t, o: t["reward"].append(t["reward"][0]),
        "but it has 6; leave out the target of the root",
    ),
    "a head without the root": (
        lambda p, t, o: (p["policy"].pop(), t["policy"].pop()),
        "declared with first_step=1",
    ),
    "targets without the reward of the root": (
        lambda p, t, o: t.update(value=t["value"][1:]),
        "pass root_reward= to it, or declare the head with first_step=1 and leave out its prediction at the root",
    ),
    "a root too many": (
        lambda p, t, o: (p["reward"].append(p["reward"][0]), t["reward"].append(t["reward"][0])),
        "leave out the root in head 'reward', or its first_step",
    ),
    "a single step": (
        lambda p, t, o: p.update(value=p["value"][0]),
        "must have shape [B, T, 11] for TwoHot, but it has [3, 11]; a single step is a list: [prediction]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_suggest_code(mistake):
    change, words = MISTAKES[mistake]
    predictions, targets = arguments()
    options: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about nested and masked tensors
        change(predictions, targets, options)
        heads = options.pop("heads", HEADS)
        with pytest.raises((TypeError, ValueError)) as info:
            gs.multi_step_loss(heads, predictions, targets, **options)
    assert words in str(info.value)


def test_symbolic_trace():
    """A Proxy has no shape to check; torch.fx.wrap, which the message recommends, keeps the call as it is."""

    class Module(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x, target):
            return self.function(2 * x, target)

    by_tensor = lambda x, target: gs.multi_step_loss({"v": HEADS["value"]}, {"v": [x]}, {"v": [target]}).loss
    by_mapping = lambda x, target: gs.multi_step_loss({"v": HEADS["value"]}, x, target).loss
    for function in (by_tensor, by_mapping):
        with pytest.raises(TypeError, match=r"torch\.fx\.wrap, or use torch\.export"):
            torch.fx.symbolic_trace(Module(function))
    traced = torch.fx.symbolic_trace(Module(lambda x, target: wrapped_loss(x, target)))
    x, target = torch.randn(B, S), torch.randn(B)
    assert torch.equal(traced(x, target), by_tensor(2 * x, target))


def wrapped_loss(x, target):
    return gs.multi_step_loss({"v": HEADS["value"]}, {"v": [x]}, {"v": [target]}).loss


torch.fx.wrap("wrapped_loss")


@pytest.mark.compiled
def test_mistakes_are_found_while_compiling():
    predictions, targets = arguments()
    function = torch.compile(
        lambda mask: gs.multi_step_loss(HEADS, predictions, targets, mask=mask).loss, backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"write mask\.bool\(\)"):
        function(torch.ones(B, T))


def test_errors_of_heads_and_modules_say_what_to_write():
    for head in (gs.TwoHot, gs.HLGauss):
        name = head.__name__
        words = f"{name}: support must be a Support, but it is of type int; write {name}(Support.muzero()), or {name}("
        with pytest.raises(TypeError, match=re.escape(words)):
            head(601)
    words = (
        "MultiStepLoss: heads are keyword arguments, but a positional one is of type dict; write MultiStepLoss(value="
    )
    with pytest.raises(TypeError, match=re.escape(words)) as info:
        gs.MultiStepLoss(HEADS)
    assert "or MultiStepLoss(**heads)" in str(info.value)
