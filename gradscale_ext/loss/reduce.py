"""The reduction of the multi-step loss alone."""

from __future__ import annotations

import torch

from .. import _context
from ..call.checks import rename
from ..call.options import (
    Entries,
    HeadWeights,
    ImportanceWeights,
    Mask,
    Nonfinite,
    NumEntries,
    Reduction,
    StepGradientScale,
    StepWeights,
)
from ..call.output import MultiStepLossOutput
from ..heads import PerStepLoss
from .multi_step import multi_step_loss


def reduce_multi_step(
    losses: Entries,
    *,
    step_weights: StepWeights = None,
    step_gradient_scale: StepGradientScale = None,
    importance_weights: ImportanceWeights = None,
    head_weights: HeadWeights = None,
    mask: Mask = None,
    reduction: Reduction = "mean",
    num_entries: NumEntries = None,
    nonfinite: Nonfinite = "propagate",
    process_group: torch.distributed.ProcessGroup | None = None,
    normalize_importance_weights: bool = False,
    batch_first: bool = True,
    check: bool = False,
) -> MultiStepLossOutput:
    """The weights, mask and reduction of `multi_step_loss` alone, for per-step losses that the user computed.

    Args:
        losses: `[B, T]` (`[T, B]` without `batch_first`), or a list or tuple of T tensors `[B]`.
        step_weights, step_gradient_scale, importance_weights, mask, reduction, nonfinite: as in `multi_step_loss`.
        head_weights, num_entries: as in `multi_step_loss`, of the head "loss".
        process_group, normalize_importance_weights, batch_first, check: as in `multi_step_loss`.

    Returns:
        `MultiStepLossOutput` with one head, "loss".

    Raises:
        ValueError, TypeError: as `multi_step_loss` does.

    >>> reduce_multi_step(
    ...     torch.tensor([[1.0, 2.0], [3.0, 4.0]]), step_weights=[1.0, 0.5]
    ... ).loss
    tensor(3.5000)
    """
    try:
        return multi_step_loss(
            {"loss": PerStepLoss()},
            {"loss": losses},
            {},
            step_weights=step_weights,
            step_gradient_scale=step_gradient_scale,
            importance_weights=importance_weights,
            head_weights=head_weights,
            mask=mask,
            reduction=reduction,
            num_entries=num_entries,
            nonfinite=nonfinite,
            process_group=process_group,
            normalize_importance_weights=normalize_importance_weights,
            batch_first=batch_first,
            check=check,
        )
    except Exception as error:
        if _context.is_eager():  # torch.compile does not trace a changed message
            rename(error, "multi_step_loss", "reduce_multi_step")
        raise
