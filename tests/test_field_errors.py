"""Errors of predictions and targets by field, of calls without steps, and of the arguments of policy heads."""

from __future__ import annotations

import re
from collections import UserList, deque
from typing import Any

import numpy as np
import pytest
import torch
from test_policy_losses import INF, NAN, doubles, every_implementation, run

import gradscale_ext as gs

B, T, A, D = 6, 3, 5, 2


def fields_of(**changed: Any) -> dict[str, Any]:
    """Of a policy with `[B, T]` discrete actions."""
    fields = {
        "actions": torch.zeros(B, T, dtype=torch.int64),
        "advantages": torch.ones(B, T),
        "log_probs": torch.zeros(B, T),
        **changed,
    }
    return {name: x for name, x in fields.items() if x is not None}


LOGITS = torch.zeros(B, T, A)
GAUSSIAN = {"means": torch.zeros(B, T, D), "log_stds": torch.zeros(D)}
WRONG = {  # head, prediction, target; error, and words of its message
    "a missing field": (
        gs.PolicyGradient(),
        LOGITS,
        fields_of(log_probs=None),
        ValueError,
        "no field 'log_probs'; write",
    ),
    "an unknown field": (gs.PolicyGradient(), LOGITS, fields_of(returns=LOGITS), ValueError, "'returns', which Pol"),
    "no mapping": (gs.PolicyGradient(), LOGITS, torch.ones(B, T), TypeError, "must be a mapping of fields"),
    "a list": (gs.PolicyGradient(), LOGITS, [torch.ones(B)] * T, TypeError, "write targets={'h': {'actions': ..., "),
    "a mapping": (gs.Huber(), torch.ones(B, T), {"x": torch.ones(B, T)}, TypeError, "it is a mapping of 'x'"),
    "a mapping of logits": (gs.PolicyGradient(), {"logits": LOGITS}, fields_of(), TypeError, "a mapping of 'logits'"),
    "a gradient": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=torch.ones(B, T, requires_grad=True))),
        *(ValueError, "'advantages' in the target of head 'h' at step 0 requires grad.*write advantages.detach()"),
    ),
    "a reference without kl_weight": (
        *(gs.PolicyGradient(), LOGITS, fields_of(reference_log_probs=torch.ones(B, T))),
        *(ValueError, "reference_log_probs needs a kl_weight above 0"),
    ),
    "no reference": (gs.PolicyGradient(kl_weight=1), LOGITS, fields_of(), ValueError, "no field 'reference_log_probs'"),
    "a shape": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=torch.ones(B, T, 1))),
        *(ValueError, "the stacked field 'advantages' in .* shape \\[B, T\\] .* write advantages.squeeze\\(-1\\)"),
    ),
    "a batch": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=[torch.ones(B + 1)] * T)),
        *(ValueError, f"'advantages' .* at step 0 must have shape \\[{B}\\] .* but it has \\[{B + 1}\\]"),
    ),
    "a number of steps": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=torch.ones(B, T - 1))),
        *(ValueError, f"'advantages' in the target of head 'h' must have {T} entries"),
    ),
    "int32": (
        *(gs.PolicyGradient(), LOGITS, fields_of(actions=torch.zeros(B, T, dtype=torch.int32))),
        *(TypeError, "must be torch.int64, but it is torch.int32; write actions.long()"),
    ),
    "advantages of integers": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=torch.ones(B, T, dtype=torch.int64))),
        *(TypeError, "'advantages' .* must be float64, float32, bfloat16 or float16"),
    ),
    "another device": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=torch.ones(B, T, device="meta"))),
        *(ValueError, "'advantages' .* is on meta, but the predictions are on cpu"),
    ),
    "NumPy": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=torch.ones(B, T).numpy())),
        *(TypeError, "'advantages' .* must be a tensor or a list .* torch.as_tensor"),
    ),
    "choices that do not add up": (
        *(gs.PolicyGradient(choices=(2, 2)), LOGITS, fields_of(actions=torch.zeros(B, T, 2, dtype=torch.int64))),
        *(
            ValueError,
            f"must have shape \\[{B}, 4\\] for PolicyGradient, but it has \\[{B}, {A}\\]; choices=\\(2, 2\\) ",
        ),
    ),
    "the width of choices": (
        *(gs.PolicyGradient(choices=(3, 5, 3)), LOGITS, fields_of(actions=torch.zeros(B, T, 3, dtype=torch.int64))),
        *(ValueError, f"; choices=\\(3, 5, 3\\) add up to 11, but the logits of head 'h' have width {A}$"),
    ),
    "the width of choices in a list": (
        *(gs.PolicyGradient(choices=(3, 5, 3)), list(LOGITS.unbind(1))),
        fields_of(actions=torch.zeros(B, T, 3, dtype=torch.int64)),
        *(ValueError, f"; choices=\\(3, 5, 3\\) add up to 11, but the logits of head 'h' have width {A}$"),
    ),
    "a list of choices": (
        *(gs.PolicyGradient(choices=(2, 3)), (LOGITS[..., :2], LOGITS[..., 2:])),
        fields_of(actions=torch.zeros(B, T, 2, dtype=torch.int64)),
        *(TypeError, "it is of type tuple, with a tensor for each choice; write torch.cat\\(prediction, -1\\)$"),
    ),
    "a list of choices for each step": (
        *(gs.PolicyGradient(choices=(2, 3)), [[LOGITS[:, 0, :2], LOGITS[:, 0, 2:]]] * T),
        fields_of(actions=torch.zeros(B, T, 2, dtype=torch.int64)),
        *(TypeError, "at step 0 must .* write \\[torch.cat\\(step, -1\\) for step in prediction\\]$"),
    ),
    "actions of choices without choices": (
        *(gs.PolicyGradient(), LOGITS, fields_of(actions=torch.zeros(B, T, 3, dtype=torch.int64))),
        *(ValueError, "; for several discrete choices, declare choices=\\(A_1, ..., A_3\\)$"),
    ),
    "actions of two choices in a list": (
        *(gs.PolicyGradient(), LOGITS, fields_of(actions=[torch.zeros(B, 2, dtype=torch.int64)] * T)),
        *(ValueError, "at step 0 .*; for several discrete choices, declare choices=\\(A_1, A_2\\)$"),
    ),
    "more choices than logits": (
        *(gs.PolicyGradient(), LOGITS, fields_of(actions=torch.zeros(B, T, A + 1, dtype=torch.int64))),
        *(ValueError, f"but it has \\[{B}, {T}, {A + 1}\\]$"),
    ),
    "one-hot actions": (
        *(gs.PolicyGradient(), LOGITS, fields_of(actions=torch.zeros(B, T, A, dtype=torch.int64))),
        *(ValueError, "; for one-hot actions, write actions.argmax\\(-1\\)$"),
    ),
    "log_probs of choices": (
        *(gs.PolicyGradient(choices=(2, 3)), LOGITS),
        fields_of(actions=torch.zeros(B, T, 2, dtype=torch.int64), log_probs=torch.zeros(B, T, 2)),
        *(ValueError, "; sum over the last dimension: write log_probs.sum\\(-1\\)$"),
    ),
    "reference_log_probs of dimensions in a list": (
        *(gs.GaussianPolicyGradient(kl_weight=1), GAUSSIAN),
        fields_of(actions=torch.zeros(B, T, D), reference_log_probs=[torch.zeros(B, D)] * T),
        *(ValueError, "at step 0 .*; sum over the last dimension: write reference_log_probs.sum\\(-1\\)$"),
    ),
    "log_probs of parts of an action": (
        *(gs.PolicyGradient(), LOGITS[..., 0], fields_of(actions=None, log_probs=torch.zeros(B, T, 3))),
        *(ValueError, "; sum over the last dimension: write log_probs.sum\\(-1\\)$"),
    ),
    "log_probs of all actions": (
        *(gs.PolicyGradient(), LOGITS, fields_of(log_probs=LOGITS)),
        *(
            ValueError,
            "; for the .* of the action, write log_probs.gather\\(-1, actions\\[..., None\\]\\).squeeze\\(-1\\)$",
        ),
    ),
    "log_probs of something else": (
        *(gs.PolicyGradient(), LOGITS, fields_of(log_probs=torch.zeros(B, T, A - 1))),
        *(ValueError, f"but it has \\[{B}, {T}, {A - 1}\\]$"),
    ),
    "means and deviations": (
        *(gs.PolicyGradient(), GAUSSIAN, fields_of(actions=torch.zeros(B, T, D)), TypeError),
        "; for continuous actions write MultiStepLoss.ppo\\(continuous=True\\), or GaussianPolicyGradient\\(\\)$",
    ),
    "advantages of samples": (
        *(gs.PolicyGradient(), LOGITS, fields_of(advantages=torch.ones(B))),
        *(ValueError, f"but it has \\[{B}\\]; write advantages\\[:, None\\].expand\\({B}, {T}\\)$"),
    ),
    "returns of samples": (
        *(gs.ClippedSquaredError(clip=None), torch.ones(B, T), {"returns": torch.ones(B)}),
        *(ValueError, f"but it has \\[{B}\\]; write returns\\[:, None\\].expand\\({B}, {T}\\)$"),
    ),
    "log_probs of samples": (
        *(gs.PolicyGradient(), LOGITS, fields_of(log_probs=torch.ones(B))),
        *(ValueError, f"'log_probs' .* must have shape \\[B, T\\] .* but it has \\[{B}\\]$"),
    ),
    "a single step": (
        *(gs.PolicyGradient(), [LOGITS[:, 0]], fields_of(actions=torch.zeros(B, dtype=torch.int64))),
        *(ValueError, "a single step is a list: \\[actions\\], or write steps=False"),
    ),
    "actions of choices": (
        *(gs.PolicyGradient(choices=(2, 3)), LOGITS, fields_of()),
        *(ValueError, "'actions' .* must have shape \\[B, T, 2\\]"),
    ),
    "entropy of log-probabilities": (
        *(gs.PolicyGradient(entropy_weight=0.1), LOGITS[..., 0], fields_of(actions=None)),
        *(ValueError, "head 'h' must have entropy_weight=0.0 for predictions .* but it is 0.1"),
    ),
    "choices of log-probabilities": (
        *(gs.PolicyGradient(choices=(2, 3)), LOGITS[..., 0], fields_of(actions=None)),
        *(ValueError, "head 'h' must have choices=None for predictions .* but it is"),
    ),
    "actions of log-probabilities": (
        *(gs.PolicyGradient(), LOGITS[..., 0], fields_of()),
        *(ValueError, "'actions' belongs to predictions \\[B, A\\]: write steps=False"),
    ),
    "one tensor for two": (gs.GaussianPolicyGradient(), LOGITS, fields_of(), TypeError, "predictions={'h': {'means': "),
    "a mapping for each step": (
        *(gs.GaussianPolicyGradient(), [{"means": LOGITS[:, 0], "log_stds": LOGITS[:, 0]}] * T, fields_of()),
        *(TypeError, "it is of type list; .* each a list: {field: \\[step\\[field\\] for step in steps\\] for field"),
    ),
    "no deviation": (
        *(gs.GaussianPolicyGradient(), {"means": LOGITS}, fields_of(actions=LOGITS)),
        *(ValueError, "the prediction of head 'h' has no field 'log_stds'"),
    ),
    "a deviation of another size": (
        *(gs.GaussianPolicyGradient(), {"means": LOGITS, "log_stds": torch.ones(2)}, fields_of(actions=LOGITS)),
        *(ValueError, f"'log_stds' in the prediction of head 'h' must have shape \\[{A}\\]"),
    ),
    "a deviation for each step": (
        *(gs.GaussianPolicyGradient(), {"means": LOGITS, "log_stds": [torch.ones(A)] * T}, fields_of(actions=LOGITS)),
        *(ValueError, f"'log_stds' in the prediction of head 'h' at step 0 must have shape \\[B, {A}\\]"),
    ),
    "discrete actions of a Gaussian": (
        *(gs.GaussianPolicyGradient(), GAUSSIAN, fields_of(actions=torch.zeros(B, T, D, dtype=torch.int64))),
        *(TypeError, "'actions' .* must be float64"),
    ),
    "no earlier values": (
        *(gs.ClippedSquaredError(), torch.ones(B, T), {"returns": torch.ones(B, T)}),
        *(ValueError, "no field 'values'; write targets={'h': {'returns': ..., 'values': ...}}"),
    ),
    "smoothed classes": (
        *(gs.SoftCrossEntropy(label_smoothing=0.1), LOGITS),
        {"classes": torch.zeros(B, T, 2, dtype=torch.int64), "probabilities": torch.ones(B, T, 2)},
        *(ValueError, "head 'h' must have label_smoothing=0.0 .* but it is 0.1"),
    ),
    "classes and probabilities of different sizes": (
        *(gs.SoftCrossEntropy(), LOGITS),
        {"classes": torch.zeros(B, T, 2, dtype=torch.int64), "probabilities": torch.ones(B, T, 3)},
        *(ValueError, f"'probabilities' .* must have shape \\[{B}, 2\\]"),
    ),
    "fractions of another size": (
        *(gs.QuantileHuber(), LOGITS, {"samples": torch.ones(B, T, 2), "fractions": torch.ones(B, T, 2)}),
        *(ValueError, f"'fractions' .* must have shape \\[{B}, {A}\\]"),
    ),
}


@every_implementation
@pytest.mark.parametrize("name", WRONG)
def test_errors_name_head_and_field(name, impl):
    head, prediction, target, error, words = WRONG[name]
    with pytest.raises(error, match=words) as info:
        gs.multi_step_loss({"h": head}, {"h": prediction}, {"h": target}, impl=impl)
    assert str(info.value).startswith("multi_step_loss: ")
    assert "'h'" in str(info.value)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_fields_may_require_grad_while_nothing_is_recorded(impl):
    target = fields_of(advantages=torch.ones(B, T, requires_grad=True))
    with torch.no_grad():
        run(gs.PolicyGradient(), LOGITS, target, impl, steps=True)


@every_implementation
def test_errors_without_steps(impl):
    x, target = LOGITS[:, 0], {name: field[:, 0] for name, field in fields_of().items()}
    for options, words in (
        ({"step_weights": [1.0]}, "step_weights needs steps, but steps=False"),
        ({"step_gradient_scale": "unroll"}, "step_gradient_scale needs steps"),
        ({"mask": torch.ones(B, 1, dtype=torch.bool)}, "shape \\[B\\] .* write mask.squeeze"),
    ):
        with pytest.raises(ValueError, match=words):
            run(gs.PolicyGradient(), x, target, impl, **options)
    with pytest.raises(ValueError, match="head 'h' must have first_step=0 with steps=False, but it has 1"):
        run(gs.PolicyGradient(first_step=1), x, target, impl)
    with pytest.raises(TypeError, match="must be one tensor with steps=False, but it is of type list"):
        run(gs.PolicyGradient(), [x], target, impl)
    with pytest.raises(TypeError, match=r"'advantages' .* must be one tensor with steps=False"):
        run(gs.PolicyGradient(), x, {**target, "advantages": [torch.ones(B)]}, impl)
    with pytest.raises(ValueError, match=f"must have shape .* but it has \\[{B}, {T}, {A}\\]"):
        run(gs.PolicyGradient(), LOGITS, target, impl)
    with pytest.raises(ValueError, match="write steps=False"):
        run(gs.PolicyGradient(), x, target, impl, steps=True)
    with pytest.raises(ValueError, match=r"; for several discrete choices, declare choices=\(A_1, A_2\)$"):
        run(gs.PolicyGradient(), x, {**target, "actions": torch.zeros(B, 2, dtype=torch.int64)}, impl)
    parts = {"actions": torch.zeros(B, 2, dtype=torch.int64), "log_probs": torch.zeros(B, 2)}
    with pytest.raises(ValueError, match=r"; sum over the last dimension: write log_probs.sum\(-1\)$"):
        run(gs.PolicyGradient(choices=(2, 3)), x, {**target, **parts}, impl)
    with pytest.raises(TypeError, match=r"with a tensor for each choice; write torch.cat\(prediction, -1\)$"):
        run(gs.PolicyGradient(choices=(2, 3)), list(x.split((2, 3), -1)), target, impl)
    with pytest.raises(TypeError, match="steps must be True or False"):
        run(gs.PolicyGradient(), x, target, impl, steps=0)


ARGUMENTS = {
    "clip=True": (
        {"clip": True},
        TypeError,
        "clip must be a number, a pair of numbers or None, but it is of type bool",
    ),
    "clip of text": ({"clip": "0.2"}, TypeError, "clip must be a number, a pair"),
    "clip below 0": ({"clip": -0.1}, ValueError, "clip must be finite and at least 0, but it is -0.1"),
    "an infinite clip": ({"clip": (0.2, INF)}, ValueError, "clip must be finite"),
    "one number": ({"clip": (0.2,)}, ValueError, "clip must be a number, a pair"),
    "a clip of log": ({"clip": 0.2, "surrogate": "log"}, ValueError, "clip must be None with surrogate='log'"),
    "no clip of cispo": ({"surrogate": "cispo"}, ValueError, "clip must be given with surrogate='cispo'"),
    "None for cispo": ({"surrogate": "cispo", "clip": None}, ValueError, "clip must be a number"),
    "another surrogate": (
        {"surrogate": "trpo"},
        ValueError,
        "surrogate must be 'ppo', 'log' or 'cispo', but it is 'trpo'",
    ),
    "dual_clip of 1": ({"dual_clip": 1}, ValueError, "dual_clip must be None, or finite and above 1, but it is 1"),
    "dual_clip of log": (
        {"dual_clip": 2, "surrogate": "log"},
        ValueError,
        "dual_clip must be None with surrogate='log'",
    ),
    "dual_clip of cispo": (
        {"dual_clip": 2, "surrogate": "cispo", "clip": 1},
        ValueError,
        "dual_clip must be None with",
    ),
    "an infinite entropy_weight": ({"entropy_weight": INF}, ValueError, "entropy_weight must be finite"),
    "a negative kl_weight": ({"kl_weight": -1}, ValueError, "kl_weight must be finite and at least 0"),
    "a negative weight": ({"weight": -1}, ValueError, "weight must be finite and at least 0"),
    "no choices": ({"choices": ()}, ValueError, "choices must be None or a tuple of at least one integer"),
    "choices of 0": ({"choices": (2, 0)}, ValueError, "choices must be"),
    "choices of numbers": ({"choices": (2.0,)}, TypeError, "choices must be"),
    "choices=True": ({"choices": (True,)}, TypeError, "choices must be"),
    "one choice": ({"choices": 3}, TypeError, "choices must be"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_errors_of_arguments(name):
    arguments, error, words = ARGUMENTS[name]
    for head in (gs.PolicyGradient, gs.GaussianPolicyGradient) if "choices" not in arguments else (gs.PolicyGradient,):
        with pytest.raises(error, match=f"{head.__name__}: {words}"):
            head(**arguments)


def test_arguments_are_kept():
    assert gs.PolicyGradient().clip == 0.2
    assert gs.PolicyGradient(surrogate="log").clip is None
    assert gs.PolicyGradient(clip=None).clip is None
    assert gs.PolicyGradient(clip=[0.2, 3]).clip == (0.2, 3)
    assert gs.PolicyGradient(clip=np.float32(0.25)) == gs.PolicyGradient(clip=0.25)
    assert gs.PolicyGradient(choices=np.array([2, 3])).choices == (2, 3)
    assert hash(gs.PolicyGradient(clip=[0.1, 0.2])) == hash(gs.PolicyGradient(clip=(0.1, 0.2)))
    for pair in (
        np.array([0.1, 0.2]),
        torch.tensor([0.1, 0.2], dtype=torch.float64),
        deque([0.1, 0.2]),
        UserList([0.1, 0.2]),
    ):
        assert gs.PolicyGradient(clip=pair) == gs.PolicyGradient(clip=(0.1, 0.2))
    for sizes in (np.array([2, 3]), torch.tensor([2, 3]), range(2, 4), deque([2, 3]), UserList([2, 3])):
        assert gs.PolicyGradient(choices=sizes) == gs.PolicyGradient(choices=(2, 3))
    with pytest.raises(TypeError, match="choices"):
        gs.GaussianPolicyGradient(choices=(2,))
    with pytest.raises(
        ValueError, match="ClippedSquaredError: clip must be None, or finite and at least 0, but it is -1"
    ):
        gs.ClippedSquaredError(clip=-1)
    with pytest.raises(TypeError, match="ClippedSquaredError: clip must be a number"):
        gs.ClippedSquaredError(clip=(0.1, 0.2))


def test_the_heads_of_ppo():
    heads = gs.MultiStepLoss.ppo().heads
    assert heads == {
        "policy": gs.PolicyGradient(clip=0.2, entropy_weight=0.01),
        "value": gs.ClippedSquaredError(clip=None, weight=0.25),
    }
    heads = gs.MultiStepLoss.ppo(
        clip=(0.1, 0.3), value_clip=0.4, value_weight=1, entropy_weight=0, choices=[2, 3]
    ).heads
    assert heads["policy"] == gs.PolicyGradient(clip=(0.1, 0.3), choices=(2, 3))
    assert heads["value"] == gs.ClippedSquaredError(clip=0.4, weight=0.5)
    assert gs.MultiStepLoss.ppo(continuous=True).heads["policy"] == gs.GaussianPolicyGradient(entropy_weight=0.01)
    with pytest.raises(TypeError, match="choices are of discrete actions, but continuous=True"):
        gs.MultiStepLoss.ppo(continuous=True, choices=(2,))


@every_implementation
def test_advantages_of_samples_in_the_other_order(impl):
    fields = {name: x.T for name, x in fields_of().items()}
    heads = {"h": gs.PolicyGradient()}
    call = lambda advantages: gs.multi_step_loss(
        *(heads, {"h": LOGITS.transpose(0, 1)}, {"h": {**fields, "advantages": advantages}}),
        batch_first=False,
        impl=impl,
    )
    with pytest.raises(ValueError, match=rf"must have shape \[T, B\] .*; write advantages.expand\({T}, {B}\)$"):
        call(torch.arange(B).float())
    right = call(torch.arange(B).float().expand(T, B))
    assert right.loss.item() == pytest.approx(-T * (B - 1) / 2 / A), "the ratio is 1 / A"


@every_implementation
def test_advantages_of_samples_in_a_column(impl):
    heads = {"h": gs.PolicyGradient()}
    for batch_first, turned in ((True, False), (True, True), (False, False), (False, True)):
        fields = {name: x if batch_first else x.T for name, x in fields_of().items()}
        fields["advantages"] = torch.arange(B).float()[:, None] if batch_first != turned else torch.ones(1, B)
        shape = f"{B}, {T}" if batch_first else f"{T}, {B}"
        logits = LOGITS if batch_first else LOGITS.transpose(0, 1)
        words = rf"; write advantages{'.T' if turned else ''}.expand({shape})"
        with pytest.raises(ValueError, match=re.escape(words) + "$"):
            gs.multi_step_loss(heads, {"h": logits}, {"h": fields}, batch_first=batch_first, impl=impl)


@every_implementation
@pytest.mark.parametrize("form", ["batch first", "time first", "lists"])
def test_a_prediction_with_a_step_too_many(form, impl):
    """Model outputs that are not shifted, and values that have the bootstrapped one still."""

    def as_form(x):
        return {"batch first": x, "time first": x.transpose(0, 1), "lists": list(x.unbind(1))}[form]

    def loss(logits, values, heads=None, **fields):
        heads = heads or gs.MultiStepLoss.ppo().heads
        policy = {name: as_form(x) for name, x in fields_of().items()}
        targets = {"policy": policy, "value": {"returns": as_form(torch.ones(B, T))}, **fields}
        predictions = {"policy": as_form(logits), "value": as_form(values)}
        return gs.multi_step_loss(heads, predictions, targets, batch_first=form != "time first", impl=impl)

    index = "[:, :-1]" if form == "batch first" else "[:-1]"
    values, more_logits, more_values = torch.ones(B, T), torch.zeros(B, T + 1, A), torch.ones(B, T + 1)
    of_policy = f"head 'policy' has {T + 1} steps and its fields 'actions', 'advantages', 'log_probs' {T}: write "
    of_value = f"head 'value' has {T + 1} steps and its field 'returns' {T}: write "
    loss(LOGITS, values)
    for logits, predicted, words in (
        (LOGITS, more_values, of_value),
        (more_logits, values, of_policy),
        (more_logits, more_values, of_policy),
    ):
        words = f"^multi_step_loss: the prediction of {words}prediction{re.escape(index)} to drop the last$"
        with pytest.raises(ValueError, match=words):
            loss(logits, predicted)
    heads = {"policy": gs.PolicyGradient(), "value": gs.Huber()}
    with pytest.raises(ValueError, match=f"head 'value' has {T + 1} steps and its target {T}: write"):
        loss(LOGITS, more_values, heads, value=as_form(values))
    # The other head says that it is not the last that is too many.
    with pytest.raises(ValueError, match=f"'actions' in .* must have {T + 1} entries"):
        loss(more_logits, more_values, heads, value=as_form(more_values))


@every_implementation
def test_means_with_a_step_too_many(impl):
    more, target = torch.zeros(B, T + 1, D), fields_of(actions=torch.zeros(B, T, D))
    for means, log_stds, code in (
        (more, torch.zeros(D), "means"),
        (more, more, "means"),
        (more[:, :-1], more, "log_stds"),
    ):
        prediction = {"means": means, "log_stds": log_stds}
        with pytest.raises(ValueError, match=rf"head 'h' has {T + 1} steps .* {T}: write {code}\[:, :-1\] to drop"):
            run(gs.GaussianPolicyGradient(), prediction, target, impl, steps=True)


REJECTED = {  # head, prediction, target, words
    "an illegal action": (
        *(gs.PolicyGradient(), torch.tensor([[0, -INF], [0, -INF]])),
        {"actions": torch.tensor([0, 1]), "advantages": torch.ones(2), "log_probs": -torch.ones(2)},
        "'actions' in the target of head 'h' is an illegal action: its logit is -inf: sample 1 has 1",
    ),
    "an illegal action of a choice": (
        *(gs.PolicyGradient(choices=(1, 2)), torch.tensor([[0, 0, 0], [0, 0, -INF]])),
        {"actions": torch.tensor([[0, 1], [0, 1]]), "advantages": torch.ones(2), "log_probs": -torch.ones(2)},
        "illegal action: its logit is -inf: sample 1 has \\[0, 1\\]",
    ),
    "NaN advantages": (
        *(gs.PolicyGradient(), torch.zeros(2)),
        {"advantages": torch.tensor([0, NAN]), "log_probs": torch.ones(2)},
        "'advantages' in the target of head 'h' is not finite: sample 1 has nan",
    ),
    "probabilities": (
        *(gs.PolicyGradient(), torch.zeros(2, 3)),
        {"actions": torch.tensor([0, 1]), "advantages": torch.ones(2), "log_probs": torch.tensor([-1, 0.5])},
        "'log_probs' in the target of head 'h' is above 0: sample 1 has 0.5",
    ),
    "an action out of range": (
        *(gs.PolicyGradient(), torch.zeros(2, 3)),
        {"actions": torch.tensor([0, 3]), "advantages": torch.ones(2), "log_probs": -torch.ones(2)},
        "must be actions from 0 to 2: sample 1 has 3",
    ),
    "a fraction": (
        *(gs.QuantileHuber(), torch.zeros(2, 1)),
        {"samples": torch.ones(2, 1), "fractions": torch.tensor([[0.5], [1.5]])},
        "must be in 0..1: sample 1 has \\[1.5\\]",
    ),
    "an illegal class": (
        *(gs.SoftCrossEntropy(), torch.tensor([[0, 0, -INF]] * 2)),
        {"classes": torch.tensor([[0, 2]] * 2), "probabilities": torch.tensor([[1.0, 0], [0.5, 0.5]])},
        "'probabilities' .* is positive where the logit is -inf.*sample 1",
    ),
    "values": (
        *(gs.ClippedSquaredError(), torch.zeros(2)),
        {"returns": torch.zeros(2), "values": torch.tensor([0, NAN])},
        "'values' .* is not finite: sample 1",
    ),
}


@every_implementation
@pytest.mark.parametrize("name", REJECTED)
def test_values_that_check_rejects(name, impl):
    head, prediction, target, words = REJECTED[name]
    with pytest.raises(ValueError, match=words):
        run(head, prediction, target, impl, check=True)
    run(head, prediction, target, impl, check=True, mask=torch.tensor([True, False]))


@every_implementation
def test_values_that_check_accepts(impl):
    """A density above 1, and log-probabilities of -inf."""
    fields = {"actions": torch.zeros(2, D), "advantages": torch.ones(2), "log_probs": torch.tensor([5, -INF])}
    prediction = {"means": torch.zeros(2, D), "log_stds": torch.full((D,), -9.0)}
    run(gs.GaussianPolicyGradient(), prediction, fields, impl, check=True)
    run(
        gs.PolicyGradient(),
        torch.ones(2),
        {name: fields[name] for name in ("advantages", "log_probs")},
        impl,
        check=True,
    )
    run(
        gs.ClippedSquaredError(clip=None),
        torch.ones(1),
        {"returns": doubles(1), "values": doubles(NAN)},
        impl,
        check=True,
    )


@every_implementation
def test_one_row_of_deviations(impl):
    """CleanRL's `actor_logstd` is `[1, D]`."""
    prediction = {"means": torch.zeros(B, D), "log_stds": torch.zeros(1, D)}
    target = {"actions": torch.zeros(B, D), "advantages": torch.ones(B)}
    with pytest.raises(ValueError, match=r"write log_stds\[0\] for one \[D\] of all samples"):
        run(gs.GaussianPolicyGradient(surrogate="log"), prediction, target, impl=impl, steps=False)
