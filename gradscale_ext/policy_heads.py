"""The heads of policy gradients, and the clipped value loss that goes with them. Plain data."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from . import _numbers
from .heads import _LARGEST, Field, Form, Head

SURROGATES = ("ppo", "log", "cispo")
"""Surrogates of policy gradients, in the order of their numbers in the kernels."""
_INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class PolicyHead(Head):
    """Base of the heads of policy gradients."""

    clip: float | tuple[float, float] | None = ...  # type: ignore[assignment]  # left out
    dual_clip: float | None = None
    surrogate: Literal["ppo", "log", "cispo"] = "ppo"
    entropy_weight: float = 0.0
    kl_weight: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        name = type(self).__name__
        clip: Any = self.clip
        self._check("surrogate", self.surrogate in SURROGATES, "'ppo', 'log' or 'cispo'")
        if clip is ...:
            if self.surrogate == "cispo":
                raise ValueError(
                    f"{name}: clip must be given with surrogate='cispo'; write clip=(1, 4) for ratios up to 5"
                )
            object.__setattr__(self, "clip", 0.2 if self.surrogate == "ppo" else None)
        elif clip is None:
            self._check("clip", self.surrogate != "cispo", "a number or a pair of numbers with surrogate='cispo'")
        elif (pair := _listed(clip)) is not None:
            self._check("clip", len(pair) == 2, "a number, a pair of numbers or None")
            wanted = "a number, a pair of numbers or None"
            object.__setattr__(self, "clip", tuple(_kept(f"{name}: clip", item, wanted) for item in pair))
        else:
            object.__setattr__(self, "clip", _kept(f"{name}: clip", clip, "a number, a pair of numbers or None"))
        if clip is not ... and self.surrogate == "log":
            self._check("clip", clip is None, "None with surrogate='log', which has no ratio")
        self._check("clip", all(0 <= bound <= _LARGEST for bound in self.bounds or ()), "finite and at least 0")
        if self.dual_clip is not None:
            self._check("dual_clip", 1 < self._number("dual_clip") <= _LARGEST, "None, or finite and above 1")
            self._check("dual_clip", self.surrogate == "ppo", f"None with surrogate={self.surrogate!r}")
        self._check("entropy_weight", abs(self._number("entropy_weight")) <= _LARGEST, "finite")
        self._check("kl_weight", 0 <= self._number("kl_weight") <= _LARGEST, "finite and at least 0")

    @property
    def bounds(self) -> tuple[float, float] | None:
        """`clip` as a pair: the ratio is clipped to 1 - low and 1 + high."""
        return (self.clip, self.clip) if isinstance(self.clip, int | float) else self.clip

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        low, high = self.bounds or (_INFINITY, _INFINITY)
        return {
            **super().numbers(),
            "surrogate": SURROGATES.index(self.surrogate),
            "clip_low": low,
            "clip_high": high,
            "dual_clip": _INFINITY if self.dual_clip is None else self.dual_clip,
            "entropy_weight": self.entropy_weight,
            "kl_weight": self.kl_weight,
        }

    def _fields(self) -> tuple[Field, ...]:
        """The fields that all forms of the head have."""
        fields = (Field("advantages", ()), Field("log_probs", (), required=self.surrogate != "log"))
        return (*fields, Field("reference_log_probs", ())) if self.kl_weight != 0 else fields


def _listed(value: Any) -> list[Any] | None:
    """A sequence of any type as a list, such as MultiDiscrete.nvec, which is NumPy's. None for other types."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def _kept(argument: str, value: Any, wanted: str) -> float:
    """A number as it is given, if it is Python's."""
    number = _numbers.real(argument, value, wanted)
    return value if type(value) in (int, float) else number


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyHead):
    """Policy gradient of discrete actions: PPO, A2C, IMPALA, GRPO, CISPO.

    The prediction is `[B, A]` logits, or `[B]` log-probabilities of actions that were computed elsewhere (other
    distributions, fused last layers, hybrid actions). The target is a mapping of fields:

    - ``actions``: int64 `[B]`; `[B, G]` with `choices`. Not with log-probabilities as prediction.
    - ``advantages`` A: `[B]`.
    - ``log_probs``: `[B]`, the log-probability of the whole action under the policy that chose it. May be left out for
      ``surrogate="log"``.
    - ``reference_log_probs``: `[B]`, under the reference policy; if `kl_weight` is not 0, and only then.

    With ``d = log p(a) - log_probs``, ``r = exp(d)`` and ``clamp(r)`` between 1 - low and 1 + high:

    - "ppo": ``l = -min(r A, clamp(r) A)`` (Schulman et al. 2017), or ``-r A`` with ``clip=None``.
    - "log": ``l = -A log p(a)``: REINFORCE, A2C, IMPALA (A from `vtrace`), AWR and MARWIL (A is their weight).
    - "cispo": ``l = -stop(clamp(r)) A log p(a)`` (MiniMax-M1, 2025).

    Then ``- entropy_weight H(p) + kl_weight (exp(e) - e - 1)`` is added, with ``e = reference_log_probs - log p(a)``
    (Schulman's k3; GRPO). Where A is 0 the surrogate is exactly 0, whatever r is.

    Args:
        clip: a number c, for (c, c), or (low, high), each finite and at least 0; low >= 1 is no lower bound. Left out,
            it is 0.2 for "ppo" and None for "log". "cispo" needs a clip. (0.2, 0.28) is DAPO's.
        dual_clip: above 1: where A < 0, l is at most ``-dual_clip A`` (Ye et al. 2020). For "ppo".
        surrogate: "ppo", "log" or "cispo".
        entropy_weight: weight of the entropy bonus; finite. 0 where the prediction is log-probabilities.
        kl_weight: weight of the divergence from the reference policy; finite, at least 0.
        choices: sizes (A_1, ..., A_G), which add up to A, of G independent choices whose logits are side by side, as
            Gymnasium's MultiDiscrete has them. log p(a) and H are sums over the choices.

    The actions of masked entries may be out of range, as -100 is.

    Related names: `ClipPPOLoss` (TorchRL), clipped surrogate objective, policy loss.

    With log_probs = log 1/2 the ratio is 1, and with A = 1 the gradient is p - 1[a]:

    >>> import gradscale_ext as gs, math, torch
    >>> logits = torch.zeros(1, 2, requires_grad=True)
    >>> fields = {
    ...     "actions": torch.tensor([0]),
    ...     "advantages": torch.ones(1),
    ...     "log_probs": torch.tensor([-math.log(2)]),
    ... }
    >>> heads = {"policy": gs.PolicyGradient()}
    >>> loss = gs.multi_step_loss(
    ...     heads, {"policy": logits}, {"policy": fields}, steps=False
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad
    (-1.0, tensor([[-0.5000,  0.5000]]))
    """

    choices: tuple[int, ...] | None = None

    kind: ClassVar[str] = "policy_gradient"
    detail: ClassVar[Literal["expected", "entropy"] | None] = "entropy"
    has_largest_logit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.choices is None:
            return
        wanted = "None or a tuple of at least one integer of at least 1"
        choices = _listed(self.choices)
        if choices is None or not all(
            isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in choices
        ):
            raise TypeError(f"PolicyGradient: choices must be {wanted}, but it is {self.choices!r}")
        self._check("choices", len(choices) > 0 and all(1 <= size < 2**31 for size in choices), wanted)
        object.__setattr__(self, "choices", tuple(int(size) for size in choices))

    @property
    def forms(self) -> tuple[Form, ...]:  # type: ignore[override]
        """With logits, or with log-probabilities."""
        actions = Field("actions", ("G",) if self.choices else (), classes=True)
        return (
            Form((Field("", ("A",)),), (actions, *self._fields())),
            Form((Field("", ()),), self._fields(), without=("entropy_weight", "choices")),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of letters in `forms` that `choices` determines."""
        return {"A": sum(self.choices), "G": len(self.choices)} if self.choices else {}


@dataclass(frozen=True, kw_only=True)
class GaussianPolicyGradient(PolicyHead):
    """Policy gradient of continuous actions with independent normal distributions, as in PPO.

    The prediction is a mapping of ``means`` `[B, D]` and ``log_stds``: `[B, D]`, or one `[D]` for all samples and
    steps. The target is the mapping of `PolicyGradient`, with ``actions`` `[B, D]`. ``log p(a)`` and the entropy are
    sums over D; the losses and the other arguments are as in `PolicyGradient`.

    For a policy that squashes actions by tanh, pass the actions before tanh, and log_probs without the correction:
    it cancels in r. The entropy is the normal distribution's.

    Related names: `Normal`, `Independent`, diagonal Gaussian policy.

    With a = 1, a mean of 0 and a deviation of 1, ``-log p(a)`` is 1/2 + log(2 pi) / 2:

    >>> import gradscale_ext as gs, torch
    >>> means = torch.zeros(1, 1, requires_grad=True)
    >>> log_stds = torch.zeros(1, requires_grad=True)
    >>> heads = {"policy": gs.GaussianPolicyGradient(surrogate="log")}
    >>> fields = {"actions": torch.ones(1, 1), "advantages": torch.ones(1)}
    >>> predictions = {"policy": {"means": means, "log_stds": log_stds}}
    >>> loss = gs.multi_step_loss(
    ...     heads, predictions, {"policy": fields}, steps=False
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4), means.grad, log_stds.grad
    (1.4189, tensor([[-1.]]), tensor([0.]))
    """

    kind: ClassVar[str] = "gaussian_policy_gradient"
    detail: ClassVar[Literal["expected", "entropy"] | None] = "entropy"

    @property
    def forms(self) -> tuple[Form, ...]:  # type: ignore[override]
        """With a deviation for each sample, or with one for all."""
        targets = (Field("actions", ("D",)), *self._fields())
        means = Field("means", ("D",))
        return tuple(Form((means, Field("log_stds", ("D",), shared=is_shared)), targets) for is_shared in (False, True))


@dataclass(frozen=True, kw_only=True)
class ClippedSquaredError(Head):
    """Squared error of `[B]` values with `[B]` returns, clipped around earlier values: the value loss of PPO.

    The target is a mapping of ``returns`` R and ``values`` v_old, both `[B]`; v_old are the values as predicted when
    the data were collected. ``l = max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2)``. The gradient is that
    of the larger term, and 0 if that is the second and v is clipped. There is no factor 1/2: write `weight`.

    Args:
        clip: finite, at least 0. None: ``l = (v - R)^2``; ``values`` may be left out, and are not read.

    Related names: clipped value loss, `clip_vloss` (CleanRL).

    >>> import gradscale_ext as gs, torch
    >>> value = torch.ones(1, requires_grad=True)
    >>> fields = {"returns": torch.tensor([2.0]), "values": torch.zeros(1)}
    >>> heads = {"value": gs.ClippedSquaredError()}
    >>> loss = gs.multi_step_loss(
    ...     heads, {"value": value}, {"value": fields}, steps=False
    ... ).loss
    >>> loss.backward()
    >>> round(loss.item(), 4)  # max(1, (0.2 - 2)^2), in which v is clipped
    3.24
    >>> value.grad.item() == 0
    True
    """

    clip: float | None = 0.2

    kind: ClassVar[str] = "clipped_squared_error"

    def __post_init__(self) -> None:
        """Check the number."""
        super().__post_init__()
        if self.clip is not None:
            self._check("clip", 0 <= self._number("clip") <= _LARGEST, "None, or finite and at least 0")

    @property
    def forms(self) -> tuple[Form, ...]:  # type: ignore[override]
        """With earlier values, which may be left out if they are not read."""
        targets = (Field("returns", ()), Field("values", (), required=self.clip is not None))
        return (Form((Field("", ()),), targets),)

    def numbers(self) -> dict[str, float]:
        """The head's numbers by name."""
        return {**super().numbers(), "clip_high": _INFINITY if self.clip is None else self.clip}
