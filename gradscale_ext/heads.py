"""The heads of a multi-step loss: what each predicts, and how its loss is computed. Plain data.

All arguments except the support are keyword-only, so that no number is mistaken for another. A prediction or target
is given per step. `B` is the batch, `S` the bins of a support, `A` the actions, `D` features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from . import _numbers
from .transforms import TRANSFORMS

if TYPE_CHECKING:
    from .support import Support


#: A comparison with infinity would hold for every number that varies under torch.compile.
_LARGEST = sys.float_info.max
#: Details of heads in the order of `Detail` in csrc/loss/kernels.h.
DETAILS = (None, "expected", "entropy")


class Field(NamedTuple):
    """A tensor of a prediction or target."""

    name: str
    """Empty if the prediction or target is this one tensor, else its key in a mapping."""
    shape: tuple[str, ...]
    """Without the batch dimension. A letter is a size of at least 1, the same in all fields of a form."""
    classes: bool = False
    """True for int64, False for a floating dtype."""
    required: bool = True
    shared: bool = False
    """True if one tensor without a batch dimension is for all samples and steps."""


class Form(NamedTuple):
    """The tensors of one prediction and its target. The letters of a target without a name are the first letters of the
    prediction, or all of them are new."""

    predictions: tuple[Field, ...]
    targets: tuple[Field, ...]
    """Empty: the head has no target."""
    without: tuple[str, ...] = ()
    """Arguments of the head that must have their neutral value, 0 or None, in this form."""


def _form(prediction: tuple[str, ...], target: tuple[str, ...] | None, classes: bool = False) -> Form:
    """The form of a head whose prediction and target are one tensor each; None for a head without a target."""
    return Form((Field("", prediction),), () if target is None else (Field("", target, classes),))


@dataclass(frozen=True, kw_only=True)
class Head:
    """Base of all heads.

    Args:
        weight: factor of the head in the loss; finite, at least 0.
        first_step: 0 when the head predicts at the root too, 1 when it first predicts at the first recurrent
            step (it then has `T - 1` entries).
    """

    weight: float = 1.0
    first_step: int = 0

    kind: ClassVar[str] = ""
    """Name of the head's formula, in the kernels (`Kind` in csrc/loss/kernels.h) and in the reference."""
    forms: ClassVar[tuple[Form, ...]] = ()
    """The forms that a prediction and its target may have."""
    detail: ClassVar[Literal["expected", "entropy"] | None] = None
    """Results of the head in addition to its losses: decoded predictions if it has a support, or entropies."""
    has_largest_logit: ClassVar[bool] = False
    """True if predictions are logits of distributions. The output then has their largest magnitude."""

    @property
    def decodes(self) -> bool:
        """True if the head has a support. The output then has its decoded predictions."""
        return self.detail == "expected"

    @property
    def has_target(self) -> bool:
        """True if the loss compares predictions with targets."""
        return bool(self.forms[0].targets)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of letters in `forms` that the head determines."""
        return {"S": self.support.num_bins} if self.decodes else {}  # type: ignore[attr-defined]

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that changes how the kernels read its base."""
        base = cls.__mro__[1]
        for name in ("kind", "forms", "detail", "has_largest_logit", "decodes", "numbers", "has_target", "sizes"):
            if getattr(base, "kind", "") and name in {**cls.__dict__, **cls.__dict__.get("__annotations__", {})}:
                raise TypeError(
                    f"{cls.__name__}: a subclass of {cls.__mro__[1].__name__} must not have its own {name!r}"
                )

    def numbers(self) -> dict[str, float]:
        """The head's numbers by the names that the kernels give them (csrc/loss/kernels.h)."""
        return {"detail": DETAILS.index(self.detail), "weight": self.weight, "first_step": self.first_step}

    def __post_init__(self) -> None:
        """Check the numbers."""
        self._check("weight", 0 <= self._number("weight") <= _LARGEST, "finite and at least 0")
        _numbers.integer_field(type(self).__name__, self, "first_step", 0)

    def _check(self, argument: str, valid: bool, wanted: str) -> None:
        if not valid:
            raise ValueError(
                f"{type(self).__name__}: {argument} must be {wanted}, but it is "
                f"{_numbers.written(getattr(self, argument))}"
            )

    def _number(self, argument: str) -> float:
        """Read a number of Python's or NumPy's. A tensor, which could change later unseen, is refused."""
        return _numbers.real_field(type(self).__name__, self, argument)

    def _check_support(self, support: object) -> None:
        if not hasattr(support, "numbers"):
            name = type(self).__name__
            raise TypeError(
                f"{name}: support must be a Support, but it is of type {type(support).__name__}; write "
                f"{name}(Support.muzero()), or {name}(Support(minimum, maximum, num_bins))"
            )


@dataclass(frozen=True)
class TwoHot(Head):
    """Categorical scalar head: cross-entropy of `[B, S]` logits with the two-hot encoding of `[B]` scalar targets.

    ``l = -sum_j t_j log softmax(x)_j``, where t splits its mass between the two bins next to the target by linear
    interpolation, and is smoothed: ``t (1 - label_smoothing) + label_smoothing / S`` (MuZero, appendix F).

    Args:
        support: the bins.
        label_smoothing: 0 to 1.

    Related names: categorical value loss, `scalar_to_support` (muzero-general), `transform_to_2hot` (rlax).

    Logits that are all 0 have the loss log S, and p = 1/S; the gradient is p - t:

    >>> import gradscale_ext as gs, torch
    >>> head = gs.TwoHot(gs.Support(-2, 2, 5, transform="identity"))
    >>> logits, target = torch.zeros(1, 5, requires_grad=True), torch.tensor([0.25])
    >>> loss = gs.multi_step_loss(
    ...     {"value": head}, {"value": [logits]}, {"value": [target]}
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad
    (1.6094, tensor([[ 0.2000,  0.2000, -0.5500, -0.0500,  0.2000]]))
    """

    support: Support
    _: KW_ONLY
    label_smoothing: float = 0.0

    kind: ClassVar[str] = "two_hot"
    forms: ClassVar[tuple[Form, ...]] = (_form(("S",), ()),)
    detail: ClassVar[Literal["expected", "entropy"] | None] = "expected"
    has_largest_logit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check_support(self.support)
        self._check("label_smoothing", 0 <= self._number("label_smoothing") <= 1, "between 0 and 1")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        return {**super().numbers(), **self.support.numbers(), "label_smoothing": self.label_smoothing}


@dataclass(frozen=True)
class HLGauss(Head):
    """Categorical scalar head: cross-entropy of `[B, S]` logits with a histogram of a normal around `[B]` targets.

    The target of a bin is the mass that a normal around the transformed target, with a standard deviation of
    `sigma_ratio` bins, has between the bin's edges; see `Support.hl_gauss`. From Imani & White 2018 and Farebrother et
    al. 2024, "Stop Regressing".

    Args:
        support: the bins.
        sigma_ratio: standard deviation over the width of a bin; finite, above 0.

    Related names: histogram loss, HL-Gauss.

    With half a bin as standard deviation the middle of three bins has 0.6827 (one sigma) of the 0.9973 (three sigmas)
    within the edges, which is 0.6845; p is 1/3:

    >>> import gradscale_ext as gs, torch
    >>> head = gs.HLGauss(gs.Support(-1, 1, 3, transform="identity"), sigma_ratio=0.5)
    >>> logits, target = torch.zeros(1, 3, requires_grad=True), torch.tensor([0.0])
    >>> loss = gs.multi_step_loss(
    ...     {"value": head}, {"value": [logits]}, {"value": [target]}
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad
    (1.0986, tensor([[ 0.1756, -0.3512,  0.1756]]))
    """

    support: Support
    _: KW_ONLY
    sigma_ratio: float = 0.75

    kind: ClassVar[str] = "hl_gauss"
    forms: ClassVar[tuple[Form, ...]] = (_form(("S",), ()),)
    detail: ClassVar[Literal["expected", "entropy"] | None] = "expected"
    has_largest_logit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check_support(self.support)
        self._check("sigma_ratio", 0 < self._number("sigma_ratio") <= _LARGEST, "finite and above 0")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        return {**super().numbers(), **self.support.numbers(), "sigma_ratio": self.sigma_ratio}


@dataclass(frozen=True, kw_only=True)
class SoftCrossEntropy(Head):
    """Policy head: cross-entropy of `[B, A]` logits with `[B, A]` probabilities t, or with `[B]` int64 classes.

    A target may also be a mapping of ``{"classes": ..., "probabilities": ...}``, int64 and floating `[B, K]`: only K of
    many actions have a target (Sampled MuZero, Hubert et al. 2021). A class that comes twice counts twice, and
    probability 0 pads. `label_smoothing` must be 0 then.

    ``l = -sum_a t_a log p_a - entropy_weight H(p)``, with ``p = softmax(x)``, ``H(p) = -sum_a p_a log p_a`` and t after
    smoothing: ``t (1 - label_smoothing) + label_smoothing / A``. The t_a (visit counts over their sum) need not sum to
    1. An action with logit -inf is illegal: where t_a is 0 it adds nothing to loss, entropy or gradient.

    Args:
        label_smoothing: 0 to 1.
        entropy_weight: weight of the entropy bonus; finite.
        subtract_target_entropy: add ``sum_a t_a log t_a``: the loss is the Kullback-Leibler divergence ``KL(t || p)``.
            The gradient is the same.

    A class outside 0..A - 1 raises, or gives NaN where it cannot be read without a synchronisation.

    Related names: `CrossEntropyLoss` with probabilities, policy loss, KL divergence.

    >>> import gradscale_ext as gs, torch
    >>> logits = torch.zeros(1, 2, requires_grad=True)
    >>> target = torch.tensor([[0.75, 0.25]])
    >>> heads = {"policy": gs.SoftCrossEntropy()}
    >>> loss = gs.multi_step_loss(
    ...     heads, {"policy": [logits]}, {"policy": [target]}
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad  # log 2, and p - t
    (0.6931, tensor([[-0.2500,  0.2500]]))
    """

    label_smoothing: float = 0.0
    entropy_weight: float = 0.0
    subtract_target_entropy: bool = False

    kind: ClassVar[str] = "soft_cross_entropy"
    forms: ClassVar[tuple[Form, ...]] = (
        _form(("A",), ("A",)),
        _form(("A",), (), classes=True),
        Form(
            (Field("", ("A",)),),
            (Field("classes", ("K",), classes=True), Field("probabilities", ("K",))),
            without=("label_smoothing",),
        ),
    )
    detail: ClassVar[Literal["expected", "entropy"] | None] = "entropy"
    has_largest_logit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check("label_smoothing", 0 <= self._number("label_smoothing") <= 1, "between 0 and 1")
        self._check("entropy_weight", abs(self._number("entropy_weight")) <= _LARGEST, "finite")
        self._check("subtract_target_entropy", isinstance(self.subtract_target_entropy, bool), "True or False")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        return {
            **super().numbers(),
            "label_smoothing": self.label_smoothing,
            "entropy_weight": self.entropy_weight,
            "subtract_target_entropy": self.subtract_target_entropy,
        }


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(Head):
    """Squared error of `[B]` or `[B, D]` predictions x with targets t of the same shape.

    ``l = mean over D of (x - transform(t))^2``.

    Args:
        transform: applied to the target: "identity", "signed_hyperbolic" (eps 1e-3) or "symlog".

    Related names: MSE, `MSELoss`, squared error, latent consistency loss (TD-MPC2).

    >>> import gradscale_ext as gs, torch
    >>> prediction = torch.tensor([[3.0, 1.0]], requires_grad=True)
    >>> target = torch.tensor([[1.0, 1.0]])
    >>> loss = gs.multi_step_loss(
    ...     {"x": gs.MeanSquaredError()}, {"x": [prediction]}, {"x": [target]}
    ... ).loss
    >>> loss.backward()
    >>> loss.item(), prediction.grad  # (2^2 + 0^2) / 2, and 2 (x - t) / 2
    (2.0, tensor([[2., 0.]]))
    """

    transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity"

    kind: ClassVar[str] = "mean_squared_error"
    forms: ClassVar[tuple[Form, ...]] = (_form((), ()), _form(("D",), ("D",)))

    def __post_init__(self) -> None:
        """Check the transform."""
        super().__post_init__()
        self._check("transform", self.transform in TRANSFORMS, "'identity', 'signed_hyperbolic' or 'symlog'")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        return {**super().numbers(), "transform": TRANSFORMS.index(self.transform), "eps": 1e-3}


@dataclass(frozen=True, kw_only=True)
class Huber(Head):
    """Huber loss of `[B]` or `[B, D]` predictions x with targets t of the same shape.

    With ``d = x - transform(t)``, l is the mean over D of ``d^2 / 2`` where ``|d| <= delta`` and of
    ``delta (|d| - delta / 2)`` elsewhere, as `torch.nn.functional.huber_loss` (Huber 1964; DQN, Mnih et al. 2015).

    Args:
        delta: the magnitude of d from which on the loss is linear; finite, above 0.
        transform: applied to the target: "identity", "signed_hyperbolic" (eps 1e-3) or "symlog".

    Related names: `HuberLoss`; `SmoothL1Loss(beta=b)` is ``Huber(delta=b, weight=1 / b)``.

    >>> import gradscale_ext as gs, torch
    >>> prediction = torch.tensor([[3.0, 1.5]], requires_grad=True)
    >>> target = torch.tensor([[0.0, 1.0]])
    >>> loss = gs.multi_step_loss(
    ...     {"q": gs.Huber()}, {"q": [prediction]}, {"q": [target]}
    ... ).loss
    >>> loss.backward()
    >>> loss.item()  # (3 - 1/2 + 0.5^2 / 2) / 2
    1.3125
    >>> prediction.grad  # clamp(d, -1, 1) / 2
    tensor([[0.5000, 0.2500]])
    """

    delta: float = 1.0
    transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity"

    kind: ClassVar[str] = "huber"
    forms: ClassVar[tuple[Form, ...]] = (_form((), ()), _form(("D",), ("D",)))

    def __post_init__(self) -> None:
        """Check the number and the transform."""
        super().__post_init__()
        self._check("delta", 0 < self._number("delta") <= _LARGEST, "finite and above 0")
        self._check("transform", self.transform in TRANSFORMS, "'identity', 'signed_hyperbolic' or 'symlog'")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        transform = {"transform": TRANSFORMS.index(self.transform), "eps": 1e-3}
        return {**super().numbers(), **transform, "delta": self.delta}


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Head):
    """Cross-entropy of `[B]` logits x with `[B]` probabilities t in 0..1, e.g. of an episode's end.

    ``l = -t log sigmoid(x) - (1 - t) log sigmoid(-x)``, in a form that neither overflows nor cancels.

    Related names: BCE, `BCEWithLogitsLoss`, continue or termination loss (Dreamer, TD-MPC2).

    >>> import gradscale_ext as gs, torch
    >>> logits, target = torch.zeros(1, requires_grad=True), torch.ones(1)
    >>> loss = gs.multi_step_loss(
    ...     {"end": gs.BinaryCrossEntropy()}, {"end": [logits]}, {"end": [target]}
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad  # log 2, and sigmoid(0) - t
    (0.6931, tensor([-0.5000]))
    """

    kind: ClassVar[str] = "binary_cross_entropy"
    forms: ClassVar[tuple[Form, ...]] = (_form((), ()),)


@dataclass(frozen=True, kw_only=True)
class NegativeCosine(Head):
    """Negative cosine of the angle between `[B, D]` predictions x and targets t: the consistency loss of EfficientZero.

    ``l = -x.t / (max(|x|, eps) max(|t|, eps))`` (SimSiam, Chen & He 2021; EfficientZero, Ye et al. 2021).

    Args:
        eps: least length; finite, above 0.

    Related names: cosine similarity loss, consistency loss, SimSiam loss.

    >>> import gradscale_ext as gs, torch
    >>> prediction = torch.tensor([[3.0, 4.0]], requires_grad=True)
    >>> target = torch.tensor([[2.0, 0.0]])
    >>> loss = gs.multi_step_loss(
    ...     {"latent": gs.NegativeCosine()},
    ...     {"latent": [prediction]},
    ...     {"latent": [target]},
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4)  # -3/5
    -0.6
    >>> prediction.grad  # (cos x/|x| - t/|t|) / |x| = (0.6 [0.6, 0.8] - [1, 0]) / 5
    tensor([[-0.1280,  0.0960]])
    """

    eps: float = 1e-8

    kind: ClassVar[str] = "negative_cosine"
    forms: ClassVar[tuple[Form, ...]] = (_form(("D",), ("D",)),)

    def __post_init__(self) -> None:
        """Check the number."""
        super().__post_init__()
        self._check("eps", 0 < self._number("eps") <= _LARGEST, "finite and above 0")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        return {**super().numbers(), "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class QuantileHuber(Head):
    """Quantile regression of `[B, N]` quantiles x with `[B, M]` samples t of the target: the critics of QR-DQN and TQC.

    ``l = sum_i mean_j |tau_i - 1[u < 0]| huber(u) / kappa`` with ``u = t_j - x_i``, ``tau_i = (2 i + 1) / (2 N)`` from
    ``i = 0`` on, and ``huber(u) = u^2 / 2`` where ``|u| <= kappa``, else ``kappa (|u| - kappa / 2)`` (Dabney et al.
    2018; TQC, Kuznetsov et al. 2020). No `[B, N, M]` tensor of pairs is made.

    A target may also be a mapping of ``{"samples": ..., "fractions": ...}``, `[B, M]` and `[B, N]`: tau_i is then the
    fraction i, in 0..1, as it was sampled or predicted (IQN, Dabney et al. 2018; FQF, Yang et al. 2019).

    Args:
        kappa: the magnitude of u from which on the loss of a pair is linear; finite, at least 0. For 0, ``|u|``
            replaces huber(u) / kappa.
        sum_over_quantiles: False: the mean over i instead of the sum.

    Related names: `quantile_huber_loss` (Stable-Baselines3-contrib), quantile regression loss.

    >>> import gradscale_ext as gs, torch
    >>> quantiles = torch.tensor([[0.0, 1.0]], requires_grad=True)
    >>> samples = torch.tensor([[3.0]])
    >>> loss = gs.multi_step_loss(
    ...     {"q": gs.QuantileHuber()}, {"q": [quantiles]}, {"q": [samples]}
    ... ).loss
    >>> loss.backward()
    >>> loss.item(), quantiles.grad  # 1/4 (3 - 1/2) + 3/4 (2 - 1/2), and minus tau
    (1.75, tensor([[-0.2500, -0.7500]]))
    """

    kappa: float = 1.0
    sum_over_quantiles: bool = True

    kind: ClassVar[str] = "quantile_huber"
    forms: ClassVar[tuple[Form, ...]] = (
        _form(("N",), ("M",)),
        Form((Field("", ("N",)),), (Field("samples", ("M",)), Field("fractions", ("N",)))),
    )

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check("kappa", 0 <= self._number("kappa") <= _LARGEST, "finite and at least 0")
        self._check("sum_over_quantiles", isinstance(self.sum_over_quantiles, bool), "True or False")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        return {**super().numbers(), "kappa": self.kappa, "sum_over_quantiles": self.sum_over_quantiles}


@dataclass(frozen=True, kw_only=True)
class CategoricalKL(Head):
    """Kullback-Leibler divergence between `[B, G, C]` logits of G distributions over C classes: Dreamer's latents.

    ``l = max(free_nats, sum_g KL(p_g || q_g))`` with ``p = (1 - unimix) softmax + unimix / C``, and q likewise. The
    target gets no gradient, and the prediction none where the divergence is below `free_nats`. 0 log 0 is 0, and NaN
    stays NaN (DreamerV2 and V3, Hafner et al. 2021 and 2023).

    Args:
        unimix: share of the uniform distribution; 0 to 1. A class with logit -inf has probability 0 in the softmax.
        free_nats: finite, at least 0.
        prediction: "q": predictions are the logits of q, targets the logits of p: the dynamics loss, which trains
            the prior. "p": the other way round: the representation loss, which trains the posterior.

    Related names: dynamics loss and representation loss, KL balancing, free bits.

    >>> import gradscale_ext as gs, torch
    >>> prior = torch.zeros(1, 1, 2, requires_grad=True)
    >>> posterior = torch.tensor([[[0.0, -torch.inf]]])
    >>> loss = gs.multi_step_loss(
    ...     {"kl": gs.CategoricalKL(unimix=0)}, {"kl": [prior]}, {"kl": [posterior]}
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4), prior.grad  # log 2, and q - p
    (0.6931, tensor([[[-0.5000,  0.5000]]]))
    """

    unimix: float = 0.01
    free_nats: float = 0.0
    prediction: Literal["q", "p"] = "q"

    kind: ClassVar[str] = "categorical_kl"
    forms: ClassVar[tuple[Form, ...]] = (_form(("G", "C"), ("G", "C")),)
    has_largest_logit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        self._check("unimix", 0 <= self._number("unimix") <= 1, "between 0 and 1")
        self._check("free_nats", 0 <= self._number("free_nats") <= _LARGEST, "finite and at least 0")
        self._check("prediction", self.prediction in ("q", "p"), "'q' or 'p'")

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        numbers = {"unimix": self.unimix, "free_nats": self.free_nats, "predicts_p": self.prediction == "p"}
        return {**super().numbers(), **numbers}


@dataclass(frozen=True, kw_only=True)
class PerStepLoss(Head):
    """A `[B]` loss per step that the user computed, for weights, mask, reduction and metrics to act on. No target.

    >>> import gradscale_ext as gs, torch
    >>> losses = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> loss = gs.multi_step_loss(
    ...     {"own": gs.PerStepLoss(weight=0.5)}, {"own": [losses]}, {}
    ... ).loss
    >>> loss.backward()
    >>> loss.item(), losses.grad  # half the mean
    (1.0, tensor([0.2500, 0.2500]))
    """

    kind: ClassVar[str] = "per_step_loss"
    forms: ClassVar[tuple[Form, ...]] = (_form((), None),)


def record_of(heads: Iterable[Head]) -> tuple[list[str], list[float]]:
    """Heads as the kernels read them: a list of names, and a list with the number of each name.

    Each head adds its kind, with the number 0, its `numbers()`, and the size of each of its `choices`.
    """
    record: list[tuple[str, float]] = []
    for head in heads:
        record.append((head.kind, 0.0))
        record.extend(head.numbers().items())
        record.extend(("choice", size) for size in getattr(head, "choices", None) or ())
    return [name for name, _ in record], [float(number) for _, number in record]
