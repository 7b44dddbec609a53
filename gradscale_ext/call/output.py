"""The output of a multi-step loss: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .._table import fitted_table, form, html_table, table


@dataclass(slots=True, repr=False)
class MultiStepLossOutput:
    """Loss, metrics and predictions of one call; everything on the device of the predictions, nothing synchronised.

    float32, or float64 when a prediction is float64. Only `loss` has a gradient.

    `head_means` contain no weights, so that runs with other weights can be compared; `head_losses` contain all weights,
    and add up to the loss.
    """

    loss: torch.Tensor
    """Scalar, or `[B]` with `reduction="none"`."""
    per_sample: torch.Tensor
    """`[B]`: L_b, the weighted sum over heads and steps, `head_weights` included, without importance weights."""
    per_step: dict[str, torch.Tensor]
    """By head `[B, T_h]` (`[T_h, B]` with ``batch_first=False``, `[B]` with ``steps=False``): each entry's loss without
    weights; 0 where masked."""
    expected: dict[str, torch.Tensor]
    """By head with a support, of the same shape: the decoded prediction, also where masked."""
    entropy: dict[str, torch.Tensor]
    """By policy head, of the same shape: the entropy of the prediction in nats, also where masked."""
    head_means: dict[str, torch.Tensor]
    """By head, a scalar: mean of `per_step` over the unmasked entries."""
    head_losses: dict[str, torch.Tensor]
    """By head, a scalar: its share of `loss`, with all weights and the reduction; they add up to ``loss.sum()``."""
    head_gradient_norms: dict[str, torch.Tensor]
    """By head whose predictions get a gradient, a scalar: the L2 norm of the gradient of ``loss.sum()`` with respect to
    the predictions, all weights and `step_gradient_scale` included, before it is rounded to their type."""
    max_abs_logit: dict[str, torch.Tensor]
    """By `TwoHot`, `HLGauss`, `SoftCrossEntropy` and `CategoricalKL` head, and `PolicyGradient` with logits, a scalar:
    the largest magnitude of the finite logits of its unmasked predictions; 0 if there are none."""
    num_nonfinite: torch.Tensor
    """int64 scalar: samples whose L_b is inf or NaN."""
    log_probs: dict[str, torch.Tensor] = field(default_factory=dict)
    """By `PolicyGradient` and `GaussianPolicyGradient` head, as `per_step`: the log-probability of the action, also
    where masked (NaN for a masked action out of range)."""
    approx_kl: dict[str, torch.Tensor] = field(default_factory=dict)
    """By head with ``log_probs`` among its fields, a scalar: mean of r - 1 - log r over the unmasked entries (k3)."""
    clip_fraction: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the same heads, a scalar: share of the unmasked entries whose r is outside of the clip; 0 without a clip."""

    def _heads(self) -> tuple[list[str], list[list[str]]]:
        """Headers and a row for each head."""
        rows = [
            [
                name,
                _scalar(self.head_losses[name]),
                _scalar(self.head_means[name]),
                form(self.per_step[name]),
                " ".join(key for key in ("expected", "entropy", "log_probs") if name in getattr(self, key)),
            ]
            for name in self.per_step
        ]
        return ["head", "loss", "mean", "per_step", "also"], rows

    def _summary(self) -> str:
        loss = _scalar(self.loss) if self.loss.dim() == 0 else form(self.loss)
        return f"MultiStepLossOutput(loss={loss}, num_nonfinite={_scalar(self.num_nonfinite)})"

    def __str__(self) -> str:
        """Scalars, and the shapes of everything else."""
        return f"{self._summary()}\n{table(*self._heads())}"

    def __repr__(self) -> str:
        """The first lines, with long names shortened."""
        return f"{self._summary()}\n{fitted_table(*self._heads(), lines=12)}"

    def _repr_html_(self) -> str:
        """The same, for notebooks."""
        return html_table(self._summary(), *self._heads())


def _scalar(tensor: torch.Tensor) -> str:
    return " ".join(str(tensor.detach()).split())
