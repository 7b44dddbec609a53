"""Categorical supports: scalars as distributions over bins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from . import _context, reference
from ._library import _C

#: The transforms as the kernels number them.
TRANSFORMS = {"identity": 0, "signed_hyperbolic": 1, "symlog": 2}


@dataclass(frozen=True)
class Support:
    """`num_bins` centres, equally spaced over the inclusive range `minimum..maximum` in transformed coordinates.

    Args:
        minimum: first centre, in transformed coordinates.
        maximum: last centre, above `minimum`.
        num_bins: S, at least 2.
        transform: "identity", "signed_hyperbolic" (MuZero) or "symlog" (DreamerV3, TD-MPC2).
        eps: the epsilon of "signed_hyperbolic", at least 0.
        space: where targets are interpolated and expectations taken: "transformed", as in MuZero (Schrittwieser et al.
            2020, appendix F) and TD-MPC2.

    Raises:
        ValueError: an argument is out of range; `space` is not "transformed".

    >>> support = Support(-2, 2, 5, transform="identity")
    >>> support.two_hot(torch.tensor([0.25]))
    tensor([[0.0000, 0.0000, 0.7500, 0.2500, 0.0000]])
    >>> support.decode(torch.zeros(5))
    tensor(0.)
    """

    minimum: float
    maximum: float
    num_bins: int
    transform: Literal["identity", "signed_hyperbolic", "symlog"] = "signed_hyperbolic"
    eps: float = 1e-3
    space: Literal["transformed"] = "transformed"

    def __post_init__(self) -> None:
        """Check the numbers."""
        if isinstance(self.num_bins, bool) or not isinstance(self.num_bins, int) or self.num_bins < 2:
            raise ValueError(f"Support: num_bins must be an integer of at least 2, but it is {self.num_bins!r}")
        if not (math.isfinite(self.minimum) and math.isfinite(self.maximum) and self.minimum < self.maximum):
            raise ValueError(
                "Support: minimum and maximum must be finite with minimum < maximum, "
                f"but they are {self.minimum} and {self.maximum}"
            )
        if self.transform not in TRANSFORMS:
            raise ValueError(f"Support: transform must be one of {', '.join(TRANSFORMS)}, but it is {self.transform!r}")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"Support: eps must be finite and at least 0, but it is {self.eps}")
        if self.space != "transformed":
            raise ValueError(f"Support: space must be 'transformed', but it is {self.space!r}")

    @classmethod
    def muzero(cls, limit: float = 300) -> Support:
        """MuZero's support: integer centres from -limit to limit, 601 bins by default, of the signed hyperbolic."""
        return cls(-limit, limit, 2 * int(limit) + 1)

    def centers(self) -> torch.Tensor:
        """`[S]` float32 centres, in transformed coordinates."""
        return reference.centers(self, torch.float64).float()

    def two_hot(self, x: torch.Tensor) -> torch.Tensor:
        """Encode scalars `[...]` as distributions `[..., S]` with mass on at most two neighbouring bins.

        Args:
            x: floating tensor of raw (untransformed) scalars. Out of range, ±inf included: the end bin. NaN: a row of
                NaN.

        Returns:
            `[..., S]` in the dtype of `x`; each row sums to 1.
        """
        if not x.is_floating_point():
            raise TypeError(f"Support.two_hot: x must be a floating tensor, but its dtype is {x.dtype}")
        return reference.two_hot(x, self)

    def decode(self, logits: torch.Tensor) -> torch.Tensor:
        """Scalars `[...]` that logits `[..., S]` predict: softmax, expectation, inverse transform in one kernel.

        Args:
            logits: floating tensor whose last dimension is `num_bins`.

        Returns:
            `[...]` float32 (float64 for float64 logits) raw scalars, differentiable; exactly 0 for uniform logits over
            a symmetric support.

        Raises:
            ValueError: the last dimension is not `num_bins`.
        """
        if logits.dim() < 1 or logits.shape[-1] != self.num_bins:
            raise ValueError(
                f"Support.decode: logits must have shape [..., {self.num_bins}], but they have {tuple(logits.shape)}"
            )
        if _context.is_eager() and not (logits.requires_grad and torch.is_grad_enabled()):
            values = _C.decode(logits, self.minimum, self.maximum, self.eps, self.num_bins, TRANSFORMS[self.transform])
            if values is not None:
                return values
        return reference.decode(logits, self)
