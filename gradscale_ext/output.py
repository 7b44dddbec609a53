"""The output of a multi-step loss: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class MultiStepLossOutput:
    """Loss, metrics and predictions of one call; everything on the device of the predictions, nothing synchronised.

    float32, or float64 when a prediction is float64. Only `loss` has a gradient.
    """

    loss: torch.Tensor
    """Scalar, or `[B]` with `reduction="none"`."""
    per_sample: torch.Tensor
    """`[B]`: L_b, the weighted sum over heads and steps, without importance weights."""
    per_step: dict[str, torch.Tensor]
    """By head `[B, T_h]` (`[T_h, B]` with ``batch_first=False``): each entry's loss without weights; 0 where masked."""
    expected: dict[str, torch.Tensor]
    """By head with a support, of the same shape: the decoded prediction."""
    head_means: dict[str, torch.Tensor]
    """By head, a scalar: mean of `per_step` over the unmasked entries."""
    num_nonfinite: torch.Tensor
    """int64 scalar: samples whose L_b is inf or NaN."""
