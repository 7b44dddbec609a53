# ruff: noqa: B008 - defaults of parameters are the arguments of a wrong call
"""Every error and warning that says what to write: the code in it is run, and does what was meant."""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import tape
import torch

import gradscale_ext as gs
from gradscale_ext import _context
from gradscale_ext.capture import graphs


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    monkeypatch.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())


# ---- The table ------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A wrong call, whose message contains code that replaces an argument."""

    call: Callable[..., Any]
    """Without arguments, the wrong call. Code without a name replaces its first parameter."""
    meant: tuple[Any, ...]
    """For each piece of code in the message, in order: the expected result; None if it is for another mistake."""
    fill: tuple[str, ...] = ()
    """Code for each "..." in the message; for further ones, the first parameter."""


B, T, S = 4, 6, 601
SUPPORT = gs.Support.muzero()
_random = torch.Generator().manual_seed(0)
LOGITS, ACTIONS = torch.randn(B, T, S, generator=_random), torch.randn(B, T, 5, generator=_random)
R, V, Z, Q = torch.randn(4, B, T, generator=_random)
V1 = torch.randn(B, T + 1, generator=_random)
DONES = torch.rand(B, T, generator=_random) < 0.3
MASK = torch.rand(B, T, generator=_random) < 0.7
VISITS = torch.randint(1, 9, (B, T, 5), generator=_random)
CLASSES = torch.randint(0, 5, (B, T), generator=_random)
CHOSEN = torch.stack([CLASSES[:, 0] % 2, CLASSES[:, 1] % 3], -1)
RATIOS = Q.exp()
ROWS = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
PADDED, IS_ROW = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()


def lam(rewards=R, values=V1, next_values=None, discount=0.9, **options):
    return gs.lambda_returns(rewards, values, next_values, discount=discount, lambda_=0.8, **options)


def windows(rewards=R, root_values=V1, td_steps=2, discount=0.9, **options):
    return gs.muzero_targets(rewards, root_values, num_unroll_steps=3, td_steps=td_steps, discount=discount, **options)


def value_loss(predictions=LOGITS, targets=Z, head=gs.TwoHot(SUPPORT), **options):
    return gs.MultiStepLoss(value=head)({"value": predictions}, {"value": targets}, **options).loss


def two_losses(predictions, values, predicted, rewards, first_step=1, **options):
    """The loss of a value head and a reward head, which has no entry for the root if `first_step` is 1."""
    loss = gs.MultiStepLoss(value=gs.TwoHot(SUPPORT), reward=gs.MeanSquaredError(first_step=first_step))
    return loss({"value": predictions, "reward": predicted}, {"value": values, "reward": rewards}, **options).loss


def policy_loss(targets, predictions=ACTIONS, head=gs.SoftCrossEntropy(), **options):
    return value_loss(predictions, targets, head, **options)


CLIPPED = {"value": {"returns": Z, "values": Q}}
ACTION_FIELDS = {"value": {"actions": CLASSES[:, 0], "advantages": Z[:, 0], "log_probs": Q[:, 0]}}


def clipped_loss(targets):
    return gs.MultiStepLoss(value=gs.ClippedSquaredError())({"value": R}, targets).loss


def policy_gradient(targets, predictions=ACTIONS[:, 0], entropy_weight=0.0, steps=False):
    head = gs.PolicyGradient(entropy_weight=entropy_weight)
    return gs.MultiStepLoss(value=head)({"value": predictions}, targets, steps=steps).loss


def choices_loss(prediction, **changed):
    """Of two discrete choices without steps."""
    fields = {"actions": CHOSEN, "advantages": Z[:, 0], "log_probs": Q[:, 0], **changed}
    head = gs.PolicyGradient(choices=(2, 3))
    return gs.multi_step_loss({"value": head}, {"value": prediction}, {"value": fields}, steps=False).loss


def token_loss(prediction=ACTIONS, batch_first=True, **changed):
    """Of discrete actions with steps, in either order."""
    fields = {"actions": CLASSES, "advantages": Z, "log_probs": Q}
    fields = {name: x if batch_first else x.T for name, x in fields.items()} | changed
    heads = {"value": gs.PolicyGradient()}
    return gs.multi_step_loss(heads, {"value": prediction}, {"value": fields}, batch_first=batch_first).loss


def continuous_loss(loss):
    loss = loss if isinstance(loss, gs.MultiStepLoss) else gs.MultiStepLoss(policy=loss, value=gs.Huber(weight=0.0))
    is_preset = isinstance(loss.heads["value"], gs.ClippedSquaredError)
    predictions = {"policy": {"means": ACTIONS[:, 0], "log_stds": torch.zeros(5)}, "value": R[:, 0]}
    fields = {"actions": ACTIONS[:, 1], "advantages": Z[:, 0], "log_probs": Q[:, 0]}
    targets = {"policy": fields, "value": {"returns": V[:, 0]} if is_preset else V[:, 0]}
    return loss(predictions, targets, steps=False).head_means["policy"]


def gaussian_loss(log_stds):
    head = gs.GaussianPolicyGradient(surrogate="log")
    predictions = {"value": {"means": ACTIONS[:, 0], "log_stds": log_stds}}
    targets = {"value": {"actions": ACTIONS[:, 1], "advantages": Z[:, 0]}}
    return gs.MultiStepLoss(value=head)(predictions, targets, steps=False).loss


def reversed_gradient(**options):
    x = torch.ones(2, requires_grad=True)
    return torch.autograd.grad(gs.reverse_gradient(x, **options).sum(), x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch warns of both
    NESTED, JAGGED = (torch.nested.nested_tensor(ROWS, layout=layout) for layout in (torch.strided, torch.jagged))
    QUANTIZED = torch.quantize_per_tensor(Z, 0.1, 0, torch.qint8)


def unrolled(actions, batch=2):
    return gs.unroll(
        lambda state: ({"value": state}, state),
        lambda state, action: ({"value": 2 * state + action}, 2 * state + action),
        torch.ones(batch),
        actions,
    )["value"]


MODEL = torch.nn.Linear(6, 3)
START = copy.deepcopy(MODEL.state_dict())
BATCHES = torch.randn(8, 4, 6, generator=_random)


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())
    DOUBLED = gs.CapturedStep(lambda x: 2 * x, MODEL)


def watched(update):
    with gs.GradientTracer():
        return update(BATCHES[0])


def decay(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def trained(optimizer=None, inside=None, outside=None, plain=False, hook=False, hooks="raise"):
    """The parameters after some steps, the last of which are replays."""
    MODEL.load_state_dict(START)
    optimizer = optimizer or torch.optim.SGD(MODEL.parameters(), lr=0.001, momentum=0.9)
    handle = MODEL.register_forward_hook(lambda module, inputs, output: 2 * output) if hook else None

    def step(x):
        loss = MODEL(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if inside:
            inside(optimizer)

    update = step if plain else gs.CapturedStep(step, MODEL, optimizer, hooks=hooks)
    try:
        for x in BATCHES:
            update(x)
            if outside:
                outside(optimizer)
    finally:
        if handle:
            handle.remove()
    return [parameter.detach().clone() for parameter in MODEL.parameters()]


def trained_in_a_cycle(cycle_momentum, plain=False):
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=torch.tensor(0.001), momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 20, cycle_momentum=cycle_momentum)
    return trained(optimizer, outside=lambda _: schedule.step(), plain=plain)


def found(diagnosis):
    """The findings, with their remedies as a warning."""
    for remedy in {finding.remedy for finding in diagnosis.findings}:
        warnings.warn(remedy, stacklevel=2)
    return diagnosis.findings


def findings_of_kept_gradients(set_to_none):
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.001)

    def step(x):
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        MODEL(x).square().mean().backward()

    step(BATCHES[0])
    return found(gs.diagnose_capture(step, BATCHES.unbind(0), MODEL, optimizer))


def findings_of_checkpoint(use_reentrant):
    scale = torch.ones((), requires_grad=True)
    with warnings.catch_warnings(), gs.GradientTracer() as tracer:
        warnings.simplefilter("ignore")  # PyTorch warns of the same
        loss = (scale * torch.utils.checkpoint.checkpoint(MODEL, BATCHES[0], use_reentrant=use_reentrant)).sum()
    return found(gs.diagnose_gradients(loss, MODEL, tracer=tracer))


FRACTIONS = VISITS / VISITS.sum(-1, keepdim=True)
NAN_AT_ROOT = torch.cat([torch.full((B, 1), torch.nan), Z[:, 1:]], 1)
GROUPS = torch.randn(B, T, 2, 5, generator=_random)
PROBABILITIES = LOGITS[:, 0].softmax(-1)
ILLEGAL = torch.where(torch.arange(5) < 1, -torch.inf, ACTIONS)
LEGAL_TARGET = torch.where(torch.arange(5) < 1, 0, FRACTIONS)
LONG = torch.tensor([3, T, T + 2, T + 1])
ENDED = torch.tensor([True, True, True, False])
OPTIMIZER = torch.optim.SGD([{"params": [V]}, {"params": [Z]}], lr=0.1)
AGENTS, AGENT_VALUES = torch.stack([R, V], -1), torch.stack([V1, -V1], -1)
PLAYS = torch.zeros(B, T + 1)

CASES = {
    # Constants
    "detach": Case(
        lambda ratios=RATIOS.clone().requires_grad_(): gs.vtrace(R, V1, ratios=ratios, discount=0.9),
        (gs.vtrace(R, V1, ratios=RATIOS, discount=0.9),),
    ),
    "detach, reference": Case(
        lambda ratios=RATIOS.clone().requires_grad_(): gs.reference.vtrace(R, V1, ratios=ratios, discount=0.9),
        (gs.reference.vtrace(R, V1, ratios=RATIOS, discount=0.9),),
    ),
    # Names of arguments
    "scale": Case(
        lambda **given: reversed_gradient(**(given or {"alpha": 0.5})), ((torch.full((2,), -0.5),),), ("0.5",)
    ),
    "discount": Case(
        lambda **given: gs.lambda_returns(R, V1, lambda_=0.8, **(given or {"gamma": 0.9})), (lam(),), ("0.9",)
    ),
    "an argument that only the head has": Case(
        lambda loss=None, kl_weight=0.1: (loss or gs.MultiStepLoss.ppo(kl_weight=kl_weight)).heads["policy"].kl_weight,
        (0.1,),
        ("kl_weight",),
    ),
    # Types
    "array": Case(lambda x=Z.numpy(): gs.standardize(x), (gs.standardize(Z),)),
    "numbers": Case(lambda rewards=R.tolist(): lam(rewards), (lam(),)),
    "array of weights": Case(
        lambda importance_weights=Z[:, 0].abs().numpy(): value_loss(importance_weights=importance_weights),
        (value_loss(importance_weights=Z[:, 0].abs()),),
    ),
    "iterable": Case(
        lambda predictions=dict(enumerate(LOGITS.unbind(1))).values(): value_loss(predictions), (value_loss(),)
    ),
    "list of samples or steps": Case(lambda rewards=list(R): lam(rewards), (lam(), None)),
    "list of steps or samples": Case(lambda rewards=list(R.T): lam(rewards), (None, lam())),
    "list, time first": Case(lambda rewards=list(R.T): lam(rewards, V1.T, batch_first=False), (None, lam().T)),
    "list of masks": Case(lambda mask=list(MASK.T): value_loss(mask=mask), (value_loss(mask=MASK),)),
    "list of masks, time first": Case(
        lambda mask=list(MASK.T): value_loss(LOGITS.transpose(0, 1), Z.T, mask=mask, batch_first=False),
        (value_loss(mask=MASK),),
    ),
    "list of rows": Case(lambda x=list(Z): gs.standardize(x), (gs.standardize(Z),)),
    "list of games of different lengths": Case(lambda x=ROWS: gs.standardize(x), (gs.standardize(PADDED),)),
    # Kinds and dtypes
    "nested": Case(lambda expected=NESTED: gs.priorities(expected, PADDED), (gs.priorities(PADDED, PADDED),)),
    "jagged": Case(lambda x=JAGGED: gs.standardize(x, mask=IS_ROW), (gs.standardize(PADDED, mask=IS_ROW),)),
    "nested in flow": Case(lambda x=NESTED: gs.scale_gradient(x, 0.5), (PADDED,)),
    "quantized": Case(
        lambda expected=QUANTIZED: gs.priorities(expected, Z),
        (gs.priorities(QUANTIZED.dequantize(), Z),),
    ),
    "sparse": Case(lambda x=Z.to_sparse(): gs.standardize(x), (gs.standardize(Z),)),
    "complex x": Case(lambda x=Z.cfloat(): gs.standardize(x), (gs.standardize(Z),)),
    "integer x": Case(lambda x=CLASSES: gs.standardize(x), (gs.standardize(CLASSES.float()),)),
    "complex weights": Case(
        lambda weights=Z[:, 0].abs().cfloat(): value_loss(importance_weights=weights),
        (value_loss(importance_weights=Z[:, 0].abs()),),
    ),
    "integer predictions": Case(
        lambda predictions=LOGITS.long(): value_loss(predictions), (value_loss(LOGITS.long().float()),)
    ),
    "integer mask": Case(lambda mask=MASK.long(): gs.standardize(Z, mask=mask), (gs.standardize(Z, mask=MASK),)),
    "integer mask of a loss": Case(lambda mask=MASK.long(): value_loss(mask=mask), (value_loss(mask=MASK),)),
    "integer classes": Case(lambda targets=CLASSES.int(): policy_loss(targets), (policy_loss(CLASSES), None)),
    "numbers of different lengths": Case(
        lambda x=[row.tolist() for row in ROWS]: gs.standardize(x), (gs.standardize(PADDED),)
    ),
    "visits in floats": Case(lambda visits=VISITS.float(): policy_loss(visits, check=True), (policy_loss(FRACTIONS),)),
    "weights of steps on a device": Case(
        lambda step_weights=list(torch.ones(T, device="meta")): value_loss(
            LOGITS.to("meta"), Z.to("meta"), step_weights=step_weights, impl="reference"
        ),
        (torch.empty((), device="meta"),),
    ),
    "weights of samples on a device": Case(
        lambda step_weights=list(torch.ones(T, B, device="meta")): value_loss(
            LOGITS.to("meta"), Z.to("meta"), step_weights=step_weights, impl="reference"
        ),
        (torch.empty((), device="meta"),),
    ),
    "integer visits": Case(lambda visits=VISITS.int(): policy_loss(visits), (None, policy_loss(FRACTIONS))),
    "visits": Case(lambda visits=VISITS: policy_loss(visits), (policy_loss(FRACTIONS),)),
    "float classes": Case(lambda targets=CLASSES.float(): policy_loss(targets), (policy_loss(CLASSES),)),
    "complex priorities": Case(lambda expected=Z.cfloat(): gs.priorities(expected, V), (gs.priorities(Z, V),)),
    "complex visits": Case(
        lambda visit_counts=VISITS.cfloat(): gs.completed_q_policy(ACTIONS, ACTIONS, visit_counts, Z),
        (gs.completed_q_policy(ACTIONS, ACTIONS, VISITS, Z),),
    ),
    "bool visits": Case(
        lambda visit_counts=VISITS > 4: gs.completed_q_policy(ACTIONS, ACTIONS, visit_counts, Z),
        (gs.completed_q_policy(ACTIONS, ACTIONS, (VISITS > 4).long(), Z),),
    ),
    "float8": Case(
        lambda parameters=Z.to(torch.float8_e4m3fn): gs.l2_loss([parameters]),
        (gs.l2_loss([Z.to(torch.float8_e4m3fn).float()]),),
    ),
    "float8 without gradients": Case(
        lambda x=torch.ones(2).to(torch.float8_e8m0fnu): gs.scale_gradient(x, 0.5), (torch.ones(2),)
    ),
    # Devices
    "device": Case(
        lambda targets=Z: gs.priorities(V.to("meta"), targets), (gs.priorities(V.to("meta"), Z.to("meta")),)
    ),
    "device of a loss": Case(
        lambda targets=Z: value_loss(LOGITS.to("meta"), targets, impl="reference"),
        (value_loss(LOGITS.to("meta"), Z.to("meta"), impl="reference"),),
    ),
    # Shapes
    "squeeze": Case(
        lambda value=Z[..., None]: gs.completed_q_policy(ACTIONS, ACTIONS, VISITS, value),
        (gs.completed_q_policy(ACTIONS, ACTIONS, VISITS, Z),),
    ),
    "unsqueeze": Case(
        lambda mask=MASK[:, 0]: gs.standardize(Z[:, :1], mask=mask), (gs.standardize(Z[:, :1], mask=MASK[:, :1]),)
    ),
    "groups of classes": Case(
        lambda prediction=GROUPS.flatten(2), G=2, C=5, steps=True: value_loss(prediction, GROUPS, gs.CategoricalKL()),
        (value_loss(GROUPS, GROUPS, gs.CategoricalKL()), None),
    ),
    "no mapping of fields": Case(
        lambda targets={"value": Z}: clipped_loss(targets), (clipped_loss(CLIPPED),), ("Z", "Q")
    ),
    "a field is missing": Case(
        lambda targets={"value": {"returns": Z}}: clipped_loss(targets), (clipped_loss(CLIPPED),), ("Z", "Q")
    ),
    "logits without steps": Case(
        lambda targets=ACTION_FIELDS, steps=True: policy_gradient(targets, steps=steps),
        (None, policy_gradient(ACTION_FIELDS, steps=False)),
        ("Z[:, 0]", "Q[:, 0]"),
    ),
    "logits without steps and a bonus": Case(
        lambda entropy_weight=0.1, steps=True: policy_gradient(
            {"value": {"advantages": Z, "log_probs": Q}}, R, entropy_weight, steps
        ),
        (policy_gradient({"value": {"advantages": Z, "log_probs": Q}}, R, steps=True), None),
    ),
    "logits by choice": Case(
        lambda prediction=list(ACTIONS[:, 0].split((2, 3), -1)): choices_loss(prediction),
        (choices_loss(ACTIONS[:, 0]),),
    ),
    "logits by step and choice": Case(
        lambda prediction=[[x, x + 1] for x in ACTIONS[..., :2].unbind(1)]: gs.multi_step_loss(
            {"value": gs.PolicyGradient(choices=(2, 2), surrogate="log")},
            {"value": prediction},
            {"value": {"actions": torch.stack([CLASSES % 2] * 2, -1), "advantages": Z}},
        ).loss,
        (
            gs.multi_step_loss(
                {"value": gs.PolicyGradient(choices=(2, 2), surrogate="log")},
                {"value": torch.cat([ACTIONS[..., :2], ACTIONS[..., :2] + 1], -1)},
                {"value": {"actions": torch.stack([CLASSES % 2] * 2, -1), "advantages": Z}},
            ).loss,
        ),
    ),
    "log_probs by choice": Case(
        lambda log_probs=ACTIONS[:, 1, :2]: choices_loss(ACTIONS[:, 0], log_probs=log_probs),
        (choices_loss(ACTIONS[:, 0], log_probs=ACTIONS[:, 1, :2].sum(-1)),),
    ),
    "log_probs of all actions": Case(
        lambda log_probs=ACTIONS, actions=CLASSES: token_loss(log_probs=log_probs),
        (token_loss(log_probs=ACTIONS.gather(-1, CLASSES[..., None]).squeeze(-1)),),
        ("...",),
    ),
    "one-hot actions": Case(
        lambda actions=torch.nn.functional.one_hot(CLASSES, 5): token_loss(actions=actions), (token_loss(),)
    ),
    "continuous actions": Case(
        lambda loss=gs.PolicyGradient(): continuous_loss(loss),
        (
            continuous_loss(gs.GaussianPolicyGradient(entropy_weight=0.01)),
            continuous_loss(gs.GaussianPolicyGradient()),
        ),
    ),
    "advantages of samples": Case(
        lambda advantages=Z[:, 0]: token_loss(advantages=advantages), (token_loss(advantages=Z[:, :1].expand(B, T)),)
    ),
    "advantages of samples, time first": Case(
        lambda advantages=Z[:, 0]: token_loss(ACTIONS.transpose(0, 1), batch_first=False, advantages=advantages),
        (token_loss(advantages=Z[:, :1].expand(B, T)),),
    ),
    "advantages of samples in a column": Case(
        lambda advantages=Z[:, :1]: token_loss(advantages=advantages), (token_loss(advantages=Z[:, :1].expand(B, T)),)
    ),
    "a row of advantages of samples": Case(
        lambda advantages=Z[:, :1].T: token_loss(advantages=advantages),
        (token_loss(advantages=Z[:, :1].expand(B, T)),),
    ),
    "logits that are not shifted": Case(
        lambda prediction=torch.cat([ACTIONS, ACTIONS[:, :1]], 1): token_loss(prediction), (token_loss(),)
    ),
    "logits that are not shifted, time first": Case(
        lambda prediction=torch.cat([ACTIONS, ACTIONS[:, :1]], 1).transpose(0, 1): token_loss(prediction, False),
        (token_loss(),),
    ),
    "logits that are not shifted, list": Case(
        lambda prediction=[*ACTIONS.unbind(1), ACTIONS[:, 0]]: token_loss(prediction), (token_loss(),)
    ),
    "a row of deviations": Case(
        lambda log_stds=torch.zeros(1, 5): gaussian_loss(log_stds), (gaussian_loss(torch.zeros(5)),)
    ),
    "no clip for CISPO": Case(
        lambda clip=...: gs.PolicyGradient(surrogate="cispo", **({} if clip is ... else {"clip": clip})).bounds,
        ((1, 4),),
    ),
    "groups of classes in targets": Case(
        lambda target=GROUPS[:, 0].flatten(1): value_loss([GROUPS[:, 0]], [target], gs.CategoricalKL()),
        (value_loss(GROUPS[:, :1], GROUPS[:, :1], gs.CategoricalKL()),),
    ),
    "turned mask": Case(lambda mask=MASK.T: gs.standardize(Z, mask=mask), (gs.standardize(Z, mask=MASK),)),
    "column of step weights": Case(
        lambda step_weights=torch.arange(T)[:, None].float(): value_loss(step_weights=step_weights),
        (value_loss(step_weights=torch.arange(T).float()),),
    ),
    "column of step weights of as many samples": Case(
        lambda step_weights=torch.arange(B)[:, None].float(): value_loss(
            LOGITS[:, :B], Z[:, :B], step_weights=step_weights
        ),
        (
            value_loss(LOGITS[:, :B], Z[:, :B], step_weights=torch.arange(B)[:, None].expand(B, B).float()),
            value_loss(LOGITS[:, :B], Z[:, :B], step_weights=torch.arange(B).float()),
        ),
    ),
    "gradient scale by sample": Case(
        lambda step_gradient_scale=torch.ones(B): value_loss(step_gradient_scale=step_gradient_scale),
        (value_loss(step_gradient_scale=torch.ones(B, T)),),
    ),
    "turned mask of a loss": Case(
        lambda mask=MASK.T, batch_first=True: value_loss(
            list(LOGITS.unbind(1)), list(Z.unbind(1)), mask=mask, batch_first=batch_first
        ),
        (value_loss(mask=MASK), value_loss(mask=MASK)),
    ),
    "mask without the root": Case(
        lambda mask=MASK[:, 1:]: value_loss(LOGITS[:, 1:], Z[:, 1:], gs.TwoHot(SUPPORT, first_step=1), mask=mask),
        (value_loss(LOGITS[:, 1:], Z[:, 1:], gs.TwoHot(SUPPORT, first_step=1), mask=MASK),),
    ),
    "mask without the root, time first": Case(
        lambda mask=MASK.T[1:]: value_loss(
            LOGITS[:, 1:].transpose(0, 1), Z.T[1:], gs.TwoHot(SUPPORT, first_step=1), mask=mask, batch_first=False
        ),
        (value_loss(LOGITS[:, 1:], Z[:, 1:], gs.TwoHot(SUPPORT, first_step=1), mask=MASK),),
    ),
    "mask of steps": Case(lambda mask=MASK[:1]: value_loss(mask=mask), (value_loss(mask=MASK[:1].expand(B, T)),)),
    "mask of samples": Case(
        lambda mask=MASK[:, 0]: value_loss(mask=mask), (value_loss(mask=MASK[:, :1].expand(B, T)),)
    ),
    "mask of samples or steps": Case(
        lambda mask=MASK[:, 0]: value_loss(LOGITS[:, :B], Z[:, :B], mask=mask),
        (
            value_loss(LOGITS[:, :B], Z[:, :B], mask=MASK[:, :1].expand(B, B)),
            value_loss(LOGITS[:, :B], Z[:, :B], mask=MASK[:, 0].expand(B, B)),
        ),
    ),
    "targets by sample": Case(
        lambda target=list(Z), batch_first=True: value_loss(targets=target, batch_first=batch_first),
        (None, value_loss()),
    ),
    "targets by sample next to a list": Case(
        lambda target=list(Z): value_loss(list(LOGITS.unbind(1)), target), (None, value_loss())
    ),
    "targets by sample, time first": Case(
        lambda target=list(Z): value_loss(list(LOGITS.unbind(1)), target, batch_first=False), (None, value_loss())
    ),
    "targets in the other order": Case(lambda target=Z.T: value_loss(targets=target), (value_loss(), None)),
    "everything in the other order": Case(
        lambda batch_first=True: two_losses(LOGITS.transpose(0, 1), Z.T, V.T[1:], R.T[1:], batch_first=batch_first),
        (two_losses(LOGITS, Z, V[:, 1:], R[:, 1:]),),
    ),
    "stacked tensors in the other order": Case(
        lambda prediction=list(LOGITS.unbind(1)), batch_first=True: value_loss(
            prediction, Z.T, batch_first=batch_first
        ),
        (value_loss(), None),
    ),
    "predictions by sample": Case(
        lambda prediction=list(LOGITS), batch_first=False: value_loss(prediction, Z.T, batch_first=batch_first),
        (None, value_loss()),
    ),
    "priorities in the other order": Case(
        lambda batch_first=True: gs.priorities(list(V.T), Z.T, batch_first=batch_first), (gs.priorities(V, Z),)
    ),
    # Heads, mappings and numbers of a loss
    "class of a head": Case(
        lambda head=gs.MeanSquaredError: value_loss(Z, V, head), (value_loss(Z, V, gs.MeanSquaredError()),), ("",)
    ),
    "heads": Case(
        lambda heads=gs.TwoHot(SUPPORT): gs.multi_step_loss(heads, {"value": LOGITS}, {"value": Z}).loss,
        (value_loss(),),
        ("SUPPORT", ""),
    ),
    "predictions": Case(
        lambda predictions=LOGITS: gs.MultiStepLoss(value=gs.TwoHot(SUPPORT))(predictions, {"value": Z}).loss,
        (value_loss(),),
        ("*predictions.unbind(1)", ""),
    ),
    "targets": Case(
        lambda targets=Z: gs.MultiStepLoss(value=gs.TwoHot(SUPPORT))({"value": LOGITS}, targets).loss,
        (value_loss(),),
        ("*targets.unbind(1)", ""),
    ),
    "head_weights": Case(lambda head_weights=2.0: value_loss(head_weights=head_weights), (2 * value_loss(),), ("2.0",)),
    "num_entries": Case(lambda num_entries=B: value_loss(num_entries=num_entries), (value_loss(),), ("B",)),
    "positional heads": Case(
        lambda loss=None, heads={"value": gs.TwoHot(SUPPORT)}: (
            (loss or gs.MultiStepLoss(heads))({"value": LOGITS}, {"value": Z}).loss
        ),
        (value_loss(), value_loss()),
        ("SUPPORT", ""),
    ),
    "support": Case(
        lambda head=601, minimum=-300, maximum=300, num_bins=601: value_loss(
            head=head if isinstance(head, gs.TwoHot) else gs.TwoHot(head)
        ),
        (value_loss(), value_loss()),
    ),
    "a number for each step": Case(
        lambda step_weights=0.5: value_loss(step_weights=step_weights), (0.5 * value_loss(),)
    ),
    "weights of samples in a list": Case(
        lambda step_weights=list(Z.abs().T): value_loss(step_weights=step_weights), (value_loss(step_weights=Z.abs()),)
    ),
    "weights of samples in a list, time first": Case(
        lambda step_weights=list(Z.abs().T): value_loss(
            LOGITS.transpose(0, 1), Z.T, step_weights=step_weights, batch_first=False
        ),
        (value_loss(step_weights=Z.abs()),),
    ),
    "a scalar with a dimension": Case(
        lambda weight=torch.tensor([2.0]): value_loss(head_weights={"value": weight}), (2 * value_loss(),)
    ),
    "no entries": Case(lambda count=0: value_loss(num_entries={"value": count}), (B * value_loss(),)),
    "unimix": Case(
        lambda unimix=0.0: value_loss(
            ILLEGAL[:, :, None], ACTIONS[:, :, None], gs.CategoricalKL(unimix=unimix), check=True
        ),
        (value_loss(ILLEGAL[:, :, None], ACTIONS[:, :, None], gs.CategoricalKL(unimix=0.01)),),
    ),
    "label smoothing": Case(
        lambda label_smoothing=0.1: policy_loss(
            LEGAL_TARGET, ILLEGAL, gs.SoftCrossEntropy(label_smoothing=label_smoothing), check=True
        ),
        (policy_loss(LEGAL_TARGET, ILLEGAL),),
    ),
    # Trajectories
    "integer rewards": Case(lambda rewards=CLASSES: lam(rewards), (lam(CLASSES.float()),)),
    "complex rewards": Case(lambda rewards=R.cfloat(): lam(rewards), (lam(),)),
    "flags in place of values": Case(
        lambda next_values=DONES, terminated=None: gs.generalized_advantages(
            R, V1, next_values if terminated is None else None, discount=0.9, lambda_=0.8, terminated=terminated
        ),
        (None, gs.generalized_advantages(R, V1, discount=0.9, lambda_=0.8, terminated=DONES)),
    ),
    "integer flags in place of values": Case(
        lambda next_values=DONES.int(), terminated=None: gs.vtrace(
            R, V1, next_values if terminated is None else None, ratios=RATIOS, discount=0.9, terminated=terminated
        ),
        (None, gs.vtrace(R, V1, ratios=RATIOS, discount=0.9, terminated=DONES)),
    ),
    "integer values": Case(lambda values=V1.int(): lam(values=values), (lam(values=V1.int().float()),)),
    "integer next values of retrace": Case(
        lambda next_values=V.int(): gs.retrace(R, V, next_values, ratios=RATIOS, discount=0.9),
        (gs.retrace(R, V, V.int().float(), ratios=RATIOS, discount=0.9),),
    ),
    "integer flags": Case(lambda terminated=DONES.int(): lam(terminated=terminated), (lam(terminated=DONES),)),
    "one trajectory or steps": Case(lambda rewards=R[0]: lam(rewards, V1[:1]), (lam(R[:1], V1[:1]), None)),
    "steps or one trajectory": Case(
        lambda rewards=R[0]: lam(rewards, torch.ones(T, 2)), (None, lam(R[0][:, None], torch.ones(T, 2)))
    ),
    "one trajectory or steps, time first": Case(
        lambda rewards=R[0]: lam(rewards, V1[:1].T, batch_first=False), (lam(R[:1], V1[:1]).T, None)
    ),
    "a single reward": Case(lambda rewards=torch.tensor(2.0): lam(rewards, V1[:1, :2]), (2 + 0.9 * V1[:1, 1:2],)),
    "rewards with a dimension too many": Case(lambda rewards=R[..., None]: lam(rewards), (lam(),)),
    "several agents": Case(
        lambda result=None, rewards=AGENTS, values=AGENT_VALUES: lam(rewards, values) if result is None else result,
        (torch.stack([lam(), lam(V, -V1)], -1),),
        ("discount=0.9, lambda_=0.8",),
    ),
    "several agents with flags and next values": Case(
        lambda result=None, rewards=AGENTS, values=AGENTS, next_values=AGENT_VALUES[:, 1:], terminated=AGENTS > 1: (
            lam(rewards, values, next_values, terminated=terminated) if result is None else result
        ),
        (torch.stack([lam(R, R, V1[:, 1:], terminated=R > 1), lam(V, V, -V1[:, 1:], terminated=V > 1)], -1),),
        ("discount=0.9, lambda_=0.8",),
    ),
    "several agents with ratios": Case(
        lambda result=None, rewards=AGENTS, q_values=AGENTS, next_values=AGENTS, ratios=AGENTS.exp(): (
            gs.retrace(rewards, q_values, next_values, ratios=ratios, discount=0.9) if result is None else result
        ),
        (torch.stack([gs.retrace(x, x, x, ratios=x.exp(), discount=0.9) for x in (R, V)], -1),),
        ("discount=0.9",),
    ),
    "logarithms of ratios": Case(
        lambda ratios=RATIOS.log(): gs.retrace(R, V, V, ratios=ratios, discount=0.9, check=True),
        (gs.retrace(R, V, V, ratios=RATIOS, discount=0.9),),
    ),
    "several agents of games": Case(
        lambda result=None, rewards=AGENTS, root_values=AGENT_VALUES: (
            windows(rewards, root_values) if result is None else result
        ),
        (gs.MuZeroTargets(*[torch.stack(pair, -1) for pair in zip(windows(), windows(V, -V1), strict=True)]),),
        ("num_unroll_steps=3, td_steps=2, discount=0.9",),
    ),
    "values with a dimension too many": Case(lambda values=V1[..., None]: lam(values=values), (lam(),)),
    "values of one row": Case(lambda values=V1[0]: lam(R[:1], values), (lam(R[:1], V1[:1]),)),
    "values of all rows": Case(lambda values=V1[0]: lam(values=values), (lam(values=V1[:1].repeat(B, 1)),)),
    "values of all rows, time first": Case(
        lambda values=V1[0]: lam(R.T, values, batch_first=False), (lam(values=V1[:1].repeat(B, 1)).T,)
    ),
    "last values": Case(lambda next_values=V1[:, -1], values=V1[:, :-1]: lam(R, values, next_values), (lam(),)),
    "last values as a column": Case(
        lambda next_values=V1[:, -1:], values=V1[:, :-1]: lam(R, values, next_values), (lam(),)
    ),
    "last values, time first": Case(
        lambda next_values=V1[:, -1], values=V1.T[:-1]: lam(R.T, values, next_values, batch_first=False), (lam().T,)
    ),
    "last values, batch_first=False forgotten": Case(
        lambda next_values=V1[:, -1], values=V1.T[:-1], batch_first=True: lam(
            R.T, values, next_values, batch_first=batch_first
        ),
        (lam().T,),
    ),
    "last values, batch_first=False by mistake": Case(
        lambda next_values=V1[:, -1], values=V1[:, :-1], batch_first=False: lam(
            R, values, next_values, batch_first=batch_first
        ),
        (lam(),),
    ),
    "values without the last": Case(lambda values=V1[:, :-1], last_values=V1[:, -1]: lam(R, values), (lam(),)),
    "values without the last, time first": Case(
        lambda values=V1.T[:-1], last_values=V1[:, -1]: lam(R.T, values, batch_first=False), (lam().T,)
    ),
    "discounts along time or rows": Case(
        lambda discount=V[0].sigmoid(): lam(discount=discount), (lam(discount=V[:1].sigmoid()), None)
    ),
    "discounts along rows or time": Case(
        lambda discount=V[:, 0].sigmoid(): lam(discount=discount), (None, lam(discount=V[:, :1].sigmoid()))
    ),
    "discounts with a dimension too many": Case(
        lambda discount=V.sigmoid()[..., None]: lam(discount=discount), (lam(discount=V.sigmoid()),)
    ),
    "discounts of games": Case(
        lambda discount=V[:, 0].sigmoid(): windows(discount=discount), (windows(discount=V[:, :1].sigmoid()),)
    ),
    "discounts of games, time first": Case(
        lambda discount=V[:, 0].sigmoid(): windows(R.T, V1.T, discount=discount, batch_first=False)[0].T,
        (windows(discount=V[:, :1].sigmoid())[0],),
    ),
    "trajectories in the other order": Case(
        lambda batch_first=True: lam(R.T, V1.T, batch_first=batch_first), (lam().T,)
    ),
    "games in the other order": Case(
        lambda batch_first=False: windows(
            td_steps=CLASSES[:, :4] + 1, batch_first=batch_first, rewards=R[:, :3], root_values=V1[:, :4]
        ),
        (windows(R[:, :3], V1[:, :4], CLASSES[:, :4] + 1),),
    ),
    "padding": Case(
        lambda terminated=None: lam(
            mask=torch.arange(T).expand(B, T) < 4, values=V1, terminated=terminated, check=True
        ),
        (lam(mask=torch.arange(T).expand(B, T) < 4, terminated=torch.arange(T).expand(B, T) == 3),),
        ("torch.arange(6).expand(4, 6) == 3",),
    ),
    # Games
    "integer steps": Case(
        lambda td_steps=CLASSES[:, 0].int() + 1: windows(td_steps=td_steps), (windows(td_steps=CLASSES[:, 0] + 1),)
    ),
    "one number of steps": Case(lambda td_steps=torch.tensor(2): windows(td_steps=td_steps), (windows(),)),
    "a column of steps": Case(
        lambda td_steps=CLASSES[:, :1] + 1: windows(td_steps=td_steps), (windows(td_steps=CLASSES[:, 0] + 1),)
    ),
    "a row of steps, time first": Case(
        lambda td_steps=CLASSES[:, :1].T + 1: windows(R.T, V1.T, td_steps, batch_first=False)[0].T,
        (windows(td_steps=CLASSES[:, 0] + 1)[0],),
    ),
    "turned steps": Case(
        lambda td_steps=CLASSES[:3, :4].T + 1: windows(R[:3], V1[:3], td_steps),
        (windows(R[:3], V1[:3], CLASSES[:3, :4] + 1),),
    ),
    "a column of lengths": Case(
        lambda lengths=LONG[:, None].clamp(max=T): windows(lengths=lengths, terminated=ENDED),
        (windows(lengths=LONG.clamp(max=T), terminated=ENDED),),
    ),
    "integer lengths": Case(
        lambda lengths=LONG.int().clamp(max=T): windows(lengths=lengths, terminated=ENDED),
        (windows(lengths=LONG.clamp(max=T), terminated=ENDED),),
    ),
    "games that go on": Case(
        lambda lengths=LONG, terminated=ENDED: windows(lengths=lengths, terminated=terminated),
        (windows(lengths=torch.tensor([3, T, T, T]), terminated=torch.tensor([True, True, False, False])),),
    ),
    "players": Case(lambda to_play=PLAYS: windows(to_play=to_play), (windows(to_play=PLAYS.long()),)),
    "reward of the root": Case(
        lambda root_reward=None: two_losses(
            LOGITS[:, :4], Z[:, :4], V[:, :4], windows(root_reward=root_reward).rewards, first_step=0
        ),
        (two_losses(LOGITS[:, :4], Z[:, :4], V[:, :4], torch.cat([Q[:, :1], R[:, :3]], 1), first_step=0),),
        ("Q[:, 0]",),
    ),
    # Others
    "standard deviation of others": Case(
        lambda scale=True: gs.standardize(Z, scale=scale, leave_one_out=True),
        ((Z - Z.mean()) * (B * T) / (B * T - 1),),
    ),
    "percentages": Case(
        lambda low=12.3456789, high=95: gs.ReturnScale(low, high)(V), (gs.ReturnScale(0.123456789, 0.95)(V),)
    ),
    "logits in place of probabilities": Case(
        lambda probabilities=LOGITS[:, 0], logits=LOGITS[:, 0]: SUPPORT.project(
            probabilities, R[:, 0], R[:, 0].sigmoid(), check=True
        ),
        (SUPPORT.project(PROBABILITIES, R[:, 0], R[:, 0].sigmoid()),),
    ),
    "actions by sample": Case(lambda actions=ROWS: unrolled(actions), (unrolled(PADDED),)),
    "actions without samples": Case(lambda actions=list(ROWS[1]): unrolled(actions, 1), (unrolled(ROWS[1][None], 1),)),
    "numbers of actions": Case(lambda actions=[3.0, 4.0, 5.0]: unrolled(actions, 1), (unrolled(ROWS[1][None], 1),)),
    "lists of actions by step": Case(lambda actions=PADDED.T.tolist(): unrolled(actions), (unrolled(PADDED), None)),
    "lists of actions by sample": Case(lambda actions=PADDED.tolist(): unrolled(actions), (None, unrolled(PADDED))),
    "actions in NumPy": Case(lambda actions=PADDED.numpy(): unrolled(actions), (unrolled(PADDED),)),
    # Many tensors
    "names": Case(
        lambda names=(0, 1): [int(name) for name in gs.gradient_statistics([V, Z], names=names).names], ([0, 1],)
    ),
    "named parameters": Case(lambda parameters=[("a", V), ("b", Z)]: gs.l2_loss(parameters), (gs.l2_loss([V, Z]),)),
    "nested parameter": Case(lambda parameters=[NESTED]: gs.l2_loss(parameters), (gs.l2_loss(ROWS),)),
    "nested gradient": Case(
        lambda tensors=[JAGGED]: gs.gradient_statistics(tensors).total_norm,
        (gs.gradient_statistics(ROWS).total_norm,),
    ),
    "mapping of parameters": Case(lambda parameters={"a": V, "b": Z}: gs.l2_loss(parameters), (gs.l2_loss([V, Z]),)),
    "groups of an optimizer": Case(
        lambda parameters=None, optimizer=OPTIMIZER: gs.l2_loss(
            optimizer.param_groups if parameters is None else parameters
        ),
        (gs.l2_loss([V, Z]),),
    ),
    # Captured steps, and diagnoses
    "sparse argument": Case(lambda x=BATCHES[0].to_sparse(): DOUBLED(x), (2 * BATCHES[0],)),
    "array as an argument": Case(lambda x=BATCHES[0].numpy(): DOUBLED(x), (2 * BATCHES[0],)),
    "number of NumPy as a result": Case(
        lambda result=numpy.float32(2): gs.CapturedStep(lambda: result, MODEL)(), (2.0,)
    ),
    "rate in the step": Case(
        lambda optimizer=None, device="cpu": trained(optimizer, inside=decay),
        (trained(plain=True, inside=decay),),
        ("MODEL.parameters(), momentum=0.9",),
    ),
    "rate between the steps": Case(
        lambda optimizer=None, device="cpu": trained(optimizer, outside=decay),
        (trained(plain=True, outside=decay),),
        ("MODEL.parameters(), momentum=0.9",),
    ),
    "momentum between the steps": Case(
        lambda cycle_momentum=True: trained_in_a_cycle(cycle_momentum), (trained_in_a_cycle(False, plain=True),)
    ),
    "hook": Case(lambda hooks="raise": trained(hook=True, hooks=hooks), (trained(plain=True, hook=True),)),
    "mode": Case(lambda update=DOUBLED: watched(update), (2 * BATCHES[0],)),
    "a batch": Case(
        lambda batches=BATCHES[0], batch=BATCHES[0], another_batch=BATCHES[1]: (
            gs.diagnose_capture(lambda x: MODEL(x).sum(), batches, MODEL).findings
        ),
        ([],),
    ),
    "gradients that are kept": Case(lambda set_to_none=True: findings_of_kept_gradients(set_to_none), ([],)),
    "reentrant checkpoint": Case(lambda use_reentrant=True: findings_of_checkpoint(use_reentrant), ([],)),
}


# ---- Following what a message says ----------------------------------------------------------------------------------

#: What comes before code.
ADVICE = re.compile(r"\bwrite (?!to )|\bconvert \S+: |\bmake \S+ a list: |\bpass (?=\w+=)")


def said(call: Callable[[], Any]) -> tuple[str, Any]:
    """The error or the warnings of a call, and its result."""
    _context.say_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call()
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error), None
    return "\n".join([str(one.message) for one in caught if "PyTorch API of nested" not in str(one.message)]), result


def parameters_of(call: Callable[..., Any]) -> dict[str, Any]:
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    return dict(zip(names, call.__defaults__ or (), strict=True))


def code_at_start(text: str) -> str:
    """The longest expression at the start of a text, without commas outside of brackets."""
    for end in range(len(text), 0, -1):
        with contextlib.suppress(SyntaxError):
            code = text[:end].strip()
            if code.startswith("(") or not isinstance(ast.parse(code, mode="eval").body, ast.Tuple):
                ast.parse(code, mode="eval")
                return code
    return ""


def pieces(case: Case, text: str) -> Iterator[dict[str, str]]:
    """The pieces of code in a message: names of parameters, and the code of their values."""
    first = next(iter(parameters_of(case.call)), "")
    fill = itertools.chain(case.fill, itertools.repeat(first))
    for advice in ADVICE.split(text)[1:]:
        if re.match(r"\w+=([ ,;]|$)", advice):  # the name of an argument, without its value
            advice = advice.replace("=", "=...", 1)
        filled = re.sub(r"\.\.\.", lambda _: next(fill), advice)
        for piece in re.split(r",? or,? (?:if [^,]*, )?|, else ", filled):
            named = re.findall(r"(?:^| and )(\w+)=(?!=)(.*?)(?= and \w+=|$)", piece, re.DOTALL)
            arguments = {name: code_at_start(value) for name, value in named}
            code = code_at_start(f"{first}{piece}" if piece.startswith(".") else piece)
            if not named and code and not code.isidentifier():  # else prose
                arguments[first] = code
            if arguments:
                yield arguments | dict.fromkeys(re.findall(r" and leave out (\w+)$", piece), "None")


@pytest.mark.parametrize("name", CASES)
def test_advice_does_what_was_meant(name):
    case = CASES[name]
    text, _ = said(case.call)
    found = list(pieces(case, text))
    assert len(found) == len(case.meant), text
    names = vars(torch.optim) | vars(gs) | globals() | parameters_of(case.call)
    for arguments, meant in zip(found, case.meant, strict=True):
        if meant is not None:
            values = {name: eval(code, names) for name, code in arguments.items()}
            complaint, result = said(lambda values=values: case.call(**values))
            assert not complaint
            torch.testing.assert_close(result, meant)


@pytest.mark.parametrize(
    "call",
    [
        lambda: lam(values=None, next_values=V[:, -1]),
        lambda: lam(values=V1, next_values=V[:, -1]),
        lambda: lam(values=V, next_values=V[:, -1], truncated=DONES),
        lambda: lam([R[0], R[0][None]]),
        lambda: lam([[1.0, 2.0], 3.0]),
        lambda: lam(values=V1.T[:, :2]),
        lambda: windows(lengths=LONG[:3], terminated=ENDED),
        lambda: windows(lengths=-LONG, terminated=ENDED),
    ],
)
def test_errors_without_advice(call):
    """Where other advice of the same kind would fail."""
    text, result = said(call)
    assert text
    assert result is None
    assert not ADVICE.search(text), text


# ---- All messages are in the table ----------------------------------------------------------------------------------

PACKAGE, SOURCES = Path(gs.__file__).parent, Path(__file__).parents[1] / "csrc"

#: Parts of messages that the table cannot have, and why.
ELSEWHERE = {
    "while a CUDA graph is captured": "needs a GPU",
    "but the state is on": "needs two devices",
    "but it is a DTensor": "needs a process group",
    "and pass tracer=tracer": "the advice is a context, which most tests of test_diagnosis.py follow",
}


def literals() -> Iterator[tuple[str, range | None, str]]:
    """The texts with code in the sources: file, lines in a function, and a regular expression of the message."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        not_whole = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        not_whole |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in not_whole:
                parts = [node.value]
            else:
                continue
            if ADVICE.search("".join("{}" if part is None else part for part in parts)):
                lines = range(node.lineno, node.end_lineno + 1)
                is_run = any(lines[0] in range(one.body[0].lineno, one.end_lineno + 1) for one in functions)
                pattern = "".join(".*" if part is None else re.escape(part) for part in parts)
                yield str(path), lines if is_run else None, pattern
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in (".h", ".cpp"):
            source = re.sub(r"//.*", "", path.read_text())
            for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", source)):
                if ADVICE.search(text):
                    yield str(path), None, re.escape(text)


def lines_run(call: Callable[[], Any]) -> set[tuple[str, int]]:
    """The lines of the package that a call runs."""
    found, before = set(), sys.gettrace()

    def trace(frame, event, argument):
        found.add((frame.f_code.co_filename, frame.f_lineno))
        return trace if frame.f_code.co_filename.startswith(str(PACKAGE)) else None

    sys.settrace(trace)
    try:
        said(call)
    finally:
        sys.settrace(before)
    return found


@pytest.mark.any_version
def test_all_advice_is_in_the_table():
    seen = [(said(case.call)[0], lines_run(case.call)) for case in CASES.values()]
    missing = []
    for path, lines, pattern in literals():
        is_seen = any(
            re.search(pattern, text, re.DOTALL) and (lines is None or run & {(path, line) for line in lines})
            for text, run in seen
        )
        if not is_seen and not any(re.escape(part) in pattern for part in ELSEWHERE):
            missing.append(f"{path}:{lines and lines[0]}: {pattern}")
    assert not missing, "\n".join(missing)
