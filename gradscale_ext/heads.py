"""The heads of a multi-step loss: what each predicts, and how its loss is computed. Plain data.

All arguments but the support go by keyword, so that no number is taken for another. A prediction or target is given
per step. `B` is the batch, `S` the bins of a support, `A` the actions, `D` features.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from .support import Support

#: The transforms as the kernels number them.
TRANSFORMS = {"identity": 0, "signed_hyperbolic": 1, "symlog": 2}


class Layout(NamedTuple):
    """Shapes of one prediction and its target behind the batch; a letter is a size of at least 1, the same in both."""

    prediction: tuple[str, ...]
    target: tuple[str, ...] | None
    """None: the head has no target."""
    classes: bool = False
    """The target is an int64 class index."""


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

    layouts: ClassVar[tuple[Layout, ...]] = ()
    """The forms that a prediction and its target may have."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        self._check("weight", 0 <= self._number("weight") < math.inf, "finite and at least 0")
        valid = isinstance(self.first_step, int) and not isinstance(self.first_step, bool) and self.first_step >= 0
        self._check("first_step", valid, "an integer of at least 0")

    def _check(self, argument: str, valid: bool, wanted: str) -> None:
        if not valid:
            raise ValueError(
                f"{type(self).__name__}: {argument} must be {wanted}, but it is {getattr(self, argument)!r}"
            )

    def _number(self, argument: str) -> float:
        """A number of Python's or NumPy's: a tensor would be read once, and what becomes of it later not be seen."""
        value = getattr(self, argument)
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(
                f"{type(self).__name__}: {argument} must be a number, but it is of type {type(value).__name__}"
            )
        return float(value)

    def _check_support(self, support: object) -> None:
        if not hasattr(support, "num_bins"):
            raise TypeError(
                f"{type(self).__name__}: support must be a Support, but it is of type {type(support).__name__}"
            )


@dataclass(frozen=True)
class TwoHot(Head):
    """Categorical scalar head: cross-entropy of `[B, S]` logits with the two-hot encoding of `[B]` scalar targets.

    ``l = -sum_j t_j log softmax(x)_j``, where t puts all mass on the two bins next to the target, in proportion to its
    distance from them, and is smoothed: ``t (1 - label_smoothing) + label_smoothing / S`` (MuZero, appendix F).

    Args:
        support: the bins.
        label_smoothing: 0 to 1.
    """

    support: Support
    _: KW_ONLY
    label_smoothing: float = 0.0

    layouts: ClassVar[tuple[Layout, ...]] = (Layout(("S",), ()),)

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check_support(self.support)
        self._check("label_smoothing", 0 <= self._number("label_smoothing") <= 1, "between 0 and 1")


@dataclass(frozen=True)
class HLGauss(Head):
    """Categorical scalar head: cross-entropy of `[B, S]` logits with a histogram of a normal around `[B]` targets.

    The target of a bin is the mass that a normal around the transformed target, with a standard deviation of
    `sigma_ratio` bins, has between the bin's edges; see `Support.hl_gauss`. From Imani & White 2018 and Farebrother et
    al. 2024, "Stop Regressing".

    Args:
        support: the bins.
        sigma_ratio: standard deviation over the width of a bin; finite, above 0.
    """

    support: Support
    _: KW_ONLY
    sigma_ratio: float = 0.75

    layouts: ClassVar[tuple[Layout, ...]] = (Layout(("S",), ()),)

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check_support(self.support)
        self._check("sigma_ratio", 0 < self._number("sigma_ratio") < math.inf, "finite and above 0")


@dataclass(frozen=True, kw_only=True)
class SoftCrossEntropy(Head):
    """Policy head: cross-entropy of `[B, A]` logits with `[B, A]` probabilities t, or with `[B]` int64 classes.

    ``l = -sum_a t_a log p_a - entropy_weight H(p)``, with ``p = softmax(x)``, ``H(p) = -sum_a p_a log p_a`` and t after
    smoothing: ``t (1 - label_smoothing) + label_smoothing / A``. The t_a (visit counts over their sum) need not sum to
    1. An action with logit -inf is illegal: where t_a is 0 it adds nothing to loss, entropy or gradient.

    Args:
        label_smoothing: 0 to 1.
        entropy_weight: of the entropy bonus; finite.
        subtract_target_entropy: add ``sum_a t_a log t_a``: the loss is the Kullback-Leibler divergence from p to t. The
            gradient is the same.

    A class that is no index of an action is an error, or NaN where it cannot be looked at without a synchronisation.
    """

    label_smoothing: float = 0.0
    entropy_weight: float = 0.0
    subtract_target_entropy: bool = False

    layouts: ClassVar[tuple[Layout, ...]] = (Layout(("A",), ("A",)), Layout(("A",), (), classes=True))

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check("label_smoothing", 0 <= self._number("label_smoothing") <= 1, "between 0 and 1")
        self._check("entropy_weight", math.isfinite(self._number("entropy_weight")), "finite")


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(Head):
    """Squared error of `[B]` or `[B, D]` predictions x with targets t of the same shape.

    ``l = mean over D of (x - transform(t))^2``.

    Args:
        transform: applied to the target: "identity", "signed_hyperbolic" (eps 1e-3) or "symlog".
    """

    transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity"

    layouts: ClassVar[tuple[Layout, ...]] = (Layout((), ()), Layout(("D",), ("D",)))

    def __post_init__(self) -> None:
        """Check the transform."""
        super().__post_init__()
        self._check("transform", self.transform in TRANSFORMS, "'identity', 'signed_hyperbolic' or 'symlog'")


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Head):
    """Cross-entropy of `[B]` logits x with `[B]` probabilities t in 0..1, e.g. of an episode's end.

    ``l = -t log sigmoid(x) - (1 - t) log sigmoid(-x)``, in a form that neither overflows nor cancels.
    """

    layouts: ClassVar[tuple[Layout, ...]] = (Layout((), ()),)


@dataclass(frozen=True, kw_only=True)
class NegativeCosine(Head):
    """Negative cosine of the angle between `[B, D]` predictions x and targets t: the consistency loss of EfficientZero.

    ``l = -x.t / (max(|x|, eps) max(|t|, eps))`` (SimSiam, Chen & He 2021; EfficientZero, Ye et al. 2021).

    Args:
        eps: least length; finite, above 0.
    """

    eps: float = 1e-8

    layouts: ClassVar[tuple[Layout, ...]] = (Layout(("D",), ("D",)),)

    def __post_init__(self) -> None:
        """Check the number."""
        super().__post_init__()
        self._check("eps", 0 < self._number("eps") < math.inf, "finite and above 0")


@dataclass(frozen=True, kw_only=True)
class PerStepLoss(Head):
    """A `[B]` loss per step that the user computed, for weights, mask, reduction and metrics to act on. No target."""

    layouts: ClassVar[tuple[Layout, ...]] = (Layout((), None),)


#: The heads as the kernels number them (`Kind` in csrc/loss/segment.h).
KINDS: tuple[type[Head], ...] = (
    TwoHot,
    HLGauss,
    SoftCrossEntropy,
    MeanSquaredError,
    BinaryCrossEntropy,
    NegativeCosine,
    PerStepLoss,
)
#: The first ones decode their predictions.
NUMBER_OF_CATEGORICAL_KINDS = 2


def kind_of(head: Head) -> int:
    """The number of a head's kind; a subclass is of the kind of its base."""
    return next(number for number, kind in enumerate(KINDS) if isinstance(head, kind))


def numbers_of(head: Head) -> list[float]:
    """A head as the kernels read it; the order is that of `head_from_numbers` in csrc/loss/segment.h."""
    support = getattr(head, "support", None)
    transform = support.transform if support is not None else getattr(head, "transform", "identity")
    return [
        float(kind_of(head)),
        float(head.first_step),
        float(head.weight),
        float(support.minimum) if support is not None else 0.0,
        float(support.maximum) if support is not None else 0.0,
        float(support.eps) if support is not None else float(getattr(head, "eps", 1e-3)),
        float(support.num_bins) if support is not None else 0.0,
        float(TRANSFORMS[transform]),
        float(support is not None and support.space == "raw"),
        float(getattr(head, "label_smoothing", 0.0)),
        float(getattr(head, "entropy_weight", 0.0)),
        float(getattr(head, "subtract_target_entropy", False)),
        float(getattr(head, "sigma_ratio", 0.0)),
    ]
