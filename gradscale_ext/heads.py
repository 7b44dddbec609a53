"""The heads of a multi-step loss: what each predicts, and how its loss is computed. Plain data.

A prediction or target is given per step. `B` is the batch, `S` the bins of a support, `A` the actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .support import Support


@dataclass(frozen=True, kw_only=True)
class Head:
    """What all heads have.

    Args:
        weight: factor of the head in the loss; finite, at least 0.
        first_step: 0 when the head predicts at the root too, 1 when its first prediction is that of the first recurrent
            step (it then has `T - 1` entries).
    """

    weight: float = 1.0
    first_step: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        name = type(self).__name__
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"{name}: weight must be finite and at least 0, but it is {self.weight}")
        if isinstance(self.first_step, bool) or not isinstance(self.first_step, int) or self.first_step < 0:
            raise ValueError(f"{name}: first_step must be an integer of at least 0, but it is {self.first_step!r}")


@dataclass(frozen=True)
class TwoHot(Head):
    """Categorical scalar head: cross-entropy of `[B, S]` logits with the two-hot encoding of `[B]` scalar targets.

    ``l = -sum_j t_j log softmax(x)_j``, where t puts all mass on the two bins next to the transformed target, in
    proportion to its distance from them (MuZero, appendix F).

    Args:
        support: the bins.
    """

    support: Support

    def __post_init__(self) -> None:
        """Check the support."""
        super().__post_init__()
        if not hasattr(self.support, "num_bins"):
            raise TypeError(f"TwoHot: support must be a Support, but it is of type {type(self.support).__name__}")


@dataclass(frozen=True)
class SoftCrossEntropy(Head):
    """Policy head: cross-entropy of `[B, A]` logits with `[B, A]` probabilities t (visit counts over their sum).

    ``l = -sum_a t_a log softmax(x)_a``. The t_a need not sum to 1. An action with logit -inf is illegal: with t_a = 0
    it adds nothing to loss or gradient.
    """


@dataclass(frozen=True)
class MeanSquaredError(Head):
    """Squared error of `[B]` or `[B, D]` predictions x with targets t of the same shape.

    ``l = mean over D of (x - transform(t))^2``.

    Args:
        transform: applied to the target: "identity", "signed_hyperbolic" (eps 1e-3) or "symlog".
    """

    transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity"

    def __post_init__(self) -> None:
        """Check the transform."""
        super().__post_init__()
        if self.transform not in ("identity", "signed_hyperbolic", "symlog"):
            raise ValueError(
                "MeanSquaredError: transform must be 'identity', 'signed_hyperbolic' or 'symlog', "
                f"but it is {self.transform!r}"
            )
