"""The unroll of MuZero's pseudocode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .flow import scale_gradient

Outputs = Mapping[str, torch.Tensor]


def unroll(
    initial: Callable[[Any], tuple[Outputs, torch.Tensor]],
    recurrent: Callable[[torch.Tensor, torch.Tensor], tuple[Outputs, torch.Tensor]],
    observation: Any,
    actions: torch.Tensor | Sequence[torch.Tensor],
    *,
    hidden_scale: float = 0.5,
) -> dict[str, list[torch.Tensor]]:
    """Run `initial` once and `recurrent` for every action, and collect what each head predicts at each step.

    As in the pseudocode the gradient of the hidden state is scaled after every recurrent step, on its way to the next
    one, and not on the root; the heads of a step see the unscaled state (Schrittwieser et al. 2020, appendix G).

    Args:
        initial: representation and prediction, ``initial(observation) -> (outputs, hidden)``.
        recurrent: dynamics and prediction, ``recurrent(hidden, action) -> (outputs, hidden)``. `outputs` maps a head's
            name to its prediction for the step, `[B, ...]`.
        observation: handed to `initial` as it is.
        actions: `[B, K]` or `[B, K, ...]` tensor, or a sequence of K tensors `[B, ...]`.
        hidden_scale: factor of the gradient from one recurrent step to the one before it.

    Returns:
        Head's name to the list of its predictions, ready for `MultiStepLoss`: K + 1 entries, or K for a head that
        `initial` leaves out (declare it with ``first_step=1``).

    Raises:
        ValueError: a head is there at one step and missing at another, or `actions` has no step dimension.

    >>> outputs = unroll(
    ...     lambda observation: ({"value": observation}, observation),
    ...     lambda hidden, action: ({"value": hidden + action, "reward": action}, hidden + action),
    ...     torch.zeros(2), torch.ones(2, 3))
    >>> [len(outputs["value"]), len(outputs["reward"])]
    [4, 3]
    """
    if isinstance(actions, torch.Tensor):
        if actions.dim() < 2:
            raise ValueError(f"unroll: actions must have shape [B, K, ...], but it has {tuple(actions.shape)}")
        actions = actions.unbind(1)
    outputs, hidden = initial(observation)
    predictions = {head: [prediction] for head, prediction in outputs.items()}
    for k, action in enumerate(actions):
        outputs, hidden = recurrent(hidden, action)
        if k == 0:  # heads that the root does not have
            predictions.update({head: [] for head in outputs if head not in predictions})
        if outputs.keys() != predictions.keys():
            raise ValueError(
                f"unroll: recurrent step {k + 1} gave the heads {sorted(outputs)}, "
                f"but {sorted(predictions)} were expected"
            )
        for head, prediction in outputs.items():
            predictions[head].append(prediction)
        hidden = scale_gradient(hidden, hidden_scale)
    return predictions
