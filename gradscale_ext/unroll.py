"""The unroll of MuZero's pseudocode."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from . import _context, _remedies, _structures
from ._numbers import as_float
from .call.checks import is_mapping
from .flow import scale_gradient

Outputs = Mapping[str, torch.Tensor]

#: A tensor, or a structure of tensors.
Hidden = TypeVar("Hidden")
Observation = TypeVar("Observation")


def unroll(
    initial: Callable[[Observation], tuple[Outputs, Hidden]],
    recurrent: Callable[[Hidden, torch.Tensor], tuple[Outputs, Hidden]],
    observation: Observation,
    actions: torch.Tensor | Sequence[torch.Tensor],
    *,
    hidden_scale: float | torch.Tensor = 0.5,
) -> dict[str, list[torch.Tensor]]:
    """Run `initial` once and `recurrent` for every action, and collect what each head predicts at each step.

    As in MuZero's pseudocode, the gradient of the hidden state is scaled between each recurrent step and the next, and
    not at the root; the heads of a step see the unscaled state (Schrittwieser et al. 2020, appendix G).

    Args:
        initial: representation and prediction, ``initial(observation) -> (outputs, hidden)``.
        recurrent: dynamics and prediction, ``recurrent(hidden, action) -> (outputs, hidden)``. `outputs` maps
            each head's name to its prediction for the step, `[B, ...]`; `hidden` is a tensor, or a structure of tensors
            that `scale_gradient` accepts, such as the (h, c) of an LSTM.
        observation: passed to `initial` unchanged.
        actions: `[B, K]` or `[B, K, ...]` tensor, or a sequence of K tensors `[B, ...]`.
        hidden_scale: factor of the gradient from one recurrent step to the one before it, a finite number or a tensor
            that `scale_gradient` accepts.

    Returns:
        A dict of each head's list of predictions, ready for `MultiStepLoss`: K + 1 entries, or K for a head that
        `initial` leaves out (declare it with ``first_step=1``).

    Raises:
        ValueError: a head is present at one step and missing at another, `actions` has no step dimension or entries of
            different batch sizes, or `hidden_scale` is not finite.
        TypeError: `actions` is not a tensor or a sequence of tensors, a function does not return (outputs, hidden),
            `hidden` has a leaf that is not a floating or complex tensor, or `hidden_scale` is not a number or a tensor.

    Related names: initial and recurrent inference, backpropagation through time (BPTT).

    >>> outputs = unroll(
    ...     lambda observation: ({"value": observation}, observation),
    ...     lambda hidden, action: (
    ...         {"value": hidden + action, "reward": action},
    ...         hidden + action,
    ...     ),
    ...     torch.zeros(2),
    ...     torch.ones(2, 3),
    ... )
    >>> [len(outputs["value"]), len(outputs["reward"])]
    [4, 3]
    """
    steps = _steps_of(actions)
    _check_scale(hidden_scale)
    predictions, hidden = _outputs_and_hidden("initial(observation)", initial(observation))
    predictions = {head: [prediction] for head, prediction in predictions.items()}
    for k, action in enumerate(steps):
        outputs, hidden = _outputs_and_hidden("recurrent(hidden, action)", recurrent(hidden, action))
        if k == 0:  # heads that `initial` leaves out
            predictions.update({head: [] for head in outputs if head not in predictions})
        if outputs.keys() != predictions.keys():
            raise ValueError(
                f"unroll: recurrent step {k + 1} returned the heads {sorted(outputs)}, "
                f"but {sorted(predictions)} were expected"
            )
        for head, prediction in outputs.items():
            predictions[head].append(prediction)
        try:
            hidden = scale_gradient(hidden, hidden_scale)
        except (TypeError, ValueError) as error:
            owner = f"unroll: recurrent step {k + 1}"
            raise _structures.renamed(error, scale_gradient=owner, scale="hidden_scale", x="hidden") from None
    return predictions


def _steps_of(actions: Any) -> Sequence[torch.Tensor]:
    """One tensor `[B, ...]` per recurrent step."""
    if isinstance(actions, torch.Tensor):
        if actions.dim() < 2:
            raise ValueError(f"unroll: actions must have shape [B, K, ...], but it has {tuple(actions.shape)}")
        return actions.unbind(1)
    wanted = "a tensor [B, K, ...] or a sequence of K tensors [B, ...]"
    if not isinstance(actions, Sequence) or isinstance(actions, str):
        raise TypeError(
            f"unroll: actions must be {wanted}, but it is of type {type(actions).__name__}"
            f"{_remedies.remedy_for_type(actions, 'actions')}"
        )
    for k, action in enumerate(actions):
        if not isinstance(action, torch.Tensor):
            raise TypeError(
                f"unroll: actions must be {wanted}, but actions[{k}] is of type {type(action).__name__}; write "
                + (
                    "torch.as_tensor(actions)[None] for the steps of a single sample"
                    if isinstance(action, numbers.Number)
                    else "[torch.as_tensor(action) for action in actions] for an entry per step, or "
                    "torch.as_tensor(actions) for an entry per sample"
                )
            )
        if action.dim() < 1:
            raise ValueError(
                f"unroll: all entries of actions must be tensors [B, ...], but actions[{k}] has no dimensions; write "
                "torch.stack(actions)[None] for the steps of a single sample"
            )
        if action.shape[0] != actions[0].shape[0]:
            raise ValueError(
                f"unroll: all entries of actions must be tensors [B, ...] with the same B, but actions[{k}] has shape "
                f"{tuple(action.shape)} and actions[0] has shape {tuple(actions[0].shape)}; if the list has an entry "
                "for each sample instead of each step, write torch.nn.utils.rnn.pad_sequence(actions, "
                "batch_first=True), and mask the padding"
            )
    return actions


def _check_scale(hidden_scale: Any) -> None:
    if isinstance(hidden_scale, torch.Tensor) or not _context.is_eager():  # checked by scale_gradient
        return
    if not isinstance(hidden_scale, numbers.Real) or isinstance(hidden_scale, bool):
        raise TypeError(
            f"unroll: hidden_scale must be a number or a tensor, but it is of type {type(hidden_scale).__name__}"
        )
    if not math.isfinite(as_float("unroll: hidden_scale", hidden_scale)):
        raise ValueError(f"unroll: hidden_scale must be finite, but it is {hidden_scale}")


def _outputs_and_hidden(call: str, returned: Any) -> tuple[dict[str, Any], Any]:
    """Check that a function returned outputs, which may be any mapping, and the hidden state."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        outputs, hidden = returned
        if is_mapping(outputs):
            return dict(outputs.items()), hidden
    came = type(returned).__name__
    if isinstance(returned, tuple | list):
        came = f"{came} of {len(returned)} ({', '.join([type(item).__name__ for item in returned])})"
    raise TypeError(
        f"unroll: {call} must return (outputs, hidden), where outputs maps head names to predictions, but it "
        f"returned {'nothing' if returned is None else came}; for a model that returns (value, policy, hidden), pass "
        'a function that returns {"value": value, "policy": policy}, hidden'
    )
