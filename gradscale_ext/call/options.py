"""The record of a call of the multi-step loss: its options, and the types of its tensors. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch

#: One tensor per step, or one tensor with a dimension of steps.
Entries = torch.Tensor | Sequence[torch.Tensor]
#: The same, or a mapping of field names to the tensors of each field.
FieldEntries = Entries | Mapping[str, Entries]
StepNumbers = torch.Tensor | Sequence[float] | None
StepWeights = StepNumbers | Mapping[str, StepNumbers]
StepGradientScale = StepNumbers | Literal["unroll"] | Mapping[str, StepNumbers | Literal["unroll"]]
ImportanceWeights = torch.Tensor | Mapping[str, torch.Tensor | None] | None
HeadWeights = Mapping[str, torch.Tensor | float] | None
NumEntries = Mapping[str, torch.Tensor | float] | None
Mask = torch.Tensor | Mapping[str, torch.Tensor] | None
Reduction = Literal["mean", "sum", "none", "valid_mean"]
Nonfinite = Literal["propagate", "skip"]
REDUCTIONS, NONFINITES = get_args(Reduction), get_args(Nonfinite)


class Options(NamedTuple):
    """Everything in a call except heads, predictions and targets; see `multi_step_loss`."""

    step_weights: StepWeights = None
    step_gradient_scale: StepGradientScale = None
    importance_weights: ImportanceWeights = None
    mask: Mask = None
    head_weights: HeadWeights = None
    num_entries: NumEntries = None
    reduction: Reduction = "mean"
    nonfinite: Nonfinite = "propagate"
    batch_first: bool = True
    steps: bool = True


#: Options that may be mappings of head names: the first fields of `Options`.
BY_HEAD = ("step_weights", "step_gradient_scale", "importance_weights", "mask", "head_weights", "num_entries")


def unroll_scale(steps: int) -> tuple[float, ...]:
    """The numbers of ``step_gradient_scale="unroll"``: 1 for the root and 1/K after."""
    return (1.0,) + (1.0 / max(steps - 1, 1),) * (steps - 1)


def as_given(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """Turn a tensor from `[B, T]` to the caller's form."""
    return maybe_transposed(tensor, options.batch_first) if options.steps else tensor.squeeze(1)


def maybe_transposed(tensor: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Turn a tensor from the caller's order to `[B, T]`, or back. A tensor of one dimension is returned unchanged."""
    return tensor if batch_first or tensor.dim() != 2 else tensor.transpose(0, 1)
