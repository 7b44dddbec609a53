"""Categorical supports: scalars as distributions over bins."""

from __future__ import annotations

import functools
import math
import numbers
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import _context, _distributed, _numbers, _remedies
from ._native import _C, Refusal, seen_by_modes, warn_of_reference
from .reference import supports as reference
from .transforms import LARGEST_FLOAT32, TRANSFORMS, checked_eps, largest_transformed

_encode = seen_by_modes(_C.encode)
_decode = seen_by_modes(_C.decode)


@dataclass(frozen=True)
class Support:
    """`num_bins` centres, equally spaced over the inclusive range `minimum..maximum` in transformed coordinates.

    Args:
        minimum: first centre, in transformed coordinates.
        maximum: last centre, above `minimum`.
        num_bins: S, at least 2.
        transform: "identity", "signed_hyperbolic" (MuZero) or "symlog" (DreamerV3, TD-MPC2).
        eps: the epsilon of "signed_hyperbolic", at least 0 and finite in float32.
        space: the coordinates in which targets are interpolated and expectations computed. "transformed": the
            coordinates of the centres; the expectation is transformed back afterwards (MuZero, appendix F; TD-MPC2).
            "raw": the centres are transformed back first, which makes the decoded value an unbiased estimate
            (DreamerV3; rlax' unbiased pair).

    Raises:
        ValueError: an argument is out of range.

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
    space: Literal["transformed", "raw"] = "transformed"

    def __post_init__(self) -> None:
        """Check the numbers."""
        _numbers.integer_field("Support", self, "num_bins", 2)
        for argument in ("minimum", "maximum", "eps"):
            _numbers.real_field("Support", self, argument)
        if not (math.isfinite(self.minimum) and math.isfinite(self.maximum) and self.minimum < self.maximum):
            raise ValueError(
                "Support: minimum and maximum must be finite with minimum < maximum, "
                f"but they are {self.minimum} and {self.maximum}"
            )
        if self.transform not in TRANSFORMS:
            raise ValueError(f"Support: transform must be one of {', '.join(TRANSFORMS)}, but it is {self.transform!r}")
        if self.space not in ("transformed", "raw"):
            raise ValueError(f"Support: space must be 'transformed' or 'raw', but it is {self.space!r}")
        checked_eps("Support", self.eps)
        self._check_spacing()

    def _check_spacing(self) -> None:
        """Refuse centres that overflow float32, whose raw values overflow float64, or that are equal in float64. For
        space="raw", the raw values must be finite in float32 too, in which they are summed."""
        largest = max(abs(self.minimum), abs(self.maximum))
        limit = math.log(sys.float_info.max) if self.transform == "symlog" else LARGEST_FLOAT32
        if self.space == "raw":
            limit = min(limit, largest_transformed(self.transform, self.eps))
        spacing = (self.maximum - self.minimum) / (self.num_bins - 1)
        if not largest <= limit:
            raise ValueError(
                f"Support: minimum and maximum must be from {-limit:.6g} to {limit:.6g} for transform = "
                f"{self.transform!r} and space = {self.space!r}, but they are {self.minimum} and {self.maximum}"
            )
        if not spacing >= max(math.ulp(largest), sys.float_info.min):
            raise ValueError(
                f"Support: the centres must be distinct normal numbers, but {self.num_bins} centres from "
                f"{self.minimum} to {self.maximum} have a spacing of {spacing}"
            )

    @classmethod
    def muzero(cls, limit: int = 300) -> Support:
        """MuZero's support: integer centres from -limit to limit (601 bins by default), signed hyperbolic transform.

        Raises:
            ValueError: `limit` is not an integer of at least 1.
        """
        if not isinstance(limit, numbers.Real) or not 1 <= limit < math.inf or limit != int(limit):
            raise ValueError(f"Support.muzero: limit must be an integer of at least 1, but it is {limit!r}")
        return cls(-limit, limit, 2 * int(limit) + 1)

    @classmethod
    def linear(cls, minimum: float, maximum: float, num_bins: int) -> Support:
        """Centres that are raw values, equally spaced over ``minimum..maximum``: no transform, as in C51 (Bellemare et
        al. 2017) and for HL-Gauss critics.

        Raises:
            ValueError: an argument is out of range.

        >>> Support.linear(-10, 10, 51).centers()[:3]
        tensor([-10.0000,  -9.6000,  -9.2000])
        """
        return cls(minimum, maximum, num_bins, transform="identity")

    @classmethod
    def dreamer_v3(cls) -> Support:
        """DreamerV3's support: 255 bins, symexp of -20 to 20, interpolated in raw space (Hafner et al. 2023)."""
        return cls(-20, 20, 255, "symlog", space="raw")

    @classmethod
    def tdmpc2(cls) -> Support:
        """TD-MPC2's support: 101 bins, symlog from -10 to 10 (Hansen et al. 2024)."""
        return cls(-10, 10, 101, "symlog")

    def centers(self) -> torch.Tensor:
        """`[S]` float32 centres, in transformed coordinates whatever the `space`."""
        return reference.centers(self, _context.widest()).float()

    def two_hot(self, x: torch.Tensor) -> torch.Tensor:
        """Encode scalars `[...]` as distributions `[..., S]` with mass on at most two neighbouring bins.

        Args:
            x: floating tensor of raw (untransformed) scalars. Scalars out of range, including ±inf, are encoded as the
                end bin, and NaN as a row of NaN. If it requires grad, plain PyTorch computes the gradient.

        Returns:
            `[..., S]` in the dtype of `x`; each row sums to 1.

        Raises:
            TypeError: `x` is not a floating tensor.
        """
        _check_scalars("two_hot", x)
        if _distributed.is_distributed(x):
            return _distributed.by_whole(self.two_hot, x)  # type: ignore[no-any-return]
        encoded = _encode(self._compiled, 0.0, x) if _context.is_eager() else None
        if encoded is None or isinstance(encoded, Refusal):
            warn_of_reference("Support.two_hot", encoded)
            encoded = reference.two_hot(x, self)
        return encoded

    def hl_gauss(self, x: torch.Tensor, sigma_ratio: float = 0.75) -> torch.Tensor:
        """Encode scalars `[...]` as histograms `[..., S]` of a normal distribution around them.

        With y the transformed scalar, clamped to `minimum..maximum`, w the width of a bin, and edges e half a width
        either side of the centres::

            p_j = (Phi((e_{j+1} - y) / sigma) - Phi((e_j - y) / sigma)) / total,    sigma = sigma_ratio w

        The histogram is taken in transformed coordinates, where the bins are of equal width, whatever the `space`.

        Args:
            x: floating tensor of raw scalars. Scalars out of range, including ±inf, are encoded as the end of the
                range, and NaN as a row of NaN. If it requires grad, plain PyTorch computes the gradient.
            sigma_ratio: standard deviation divided by the width of a bin; finite, above 0.

        Returns:
            `[..., S]` in the dtype of `x`; each row sums to 1.

        Raises:
            TypeError: `x` is not a floating tensor.
            ValueError: `sigma_ratio` is out of range.

        From Imani & White 2018 and Farebrother et al. 2024, "Stop Regressing".

        >>> Support(-1, 1, 3, "identity").hl_gauss(torch.tensor([0.0]))
        tensor([[0.2407, 0.5186, 0.2407]])
        """
        _check_scalars("hl_gauss", x)
        sigma_ratio = _numbers.real("Support.hl_gauss: sigma_ratio", sigma_ratio)
        if not 0 < sigma_ratio < math.inf:
            raise ValueError(f"Support.hl_gauss: sigma_ratio must be finite and above 0, but it is {sigma_ratio}")
        if _distributed.is_distributed(x):
            return _distributed.by_whole(self.hl_gauss, x, sigma_ratio)  # type: ignore[no-any-return]
        encoded = _encode(self._compiled, sigma_ratio, x) if _context.is_eager() else None
        if encoded is None or isinstance(encoded, Refusal):
            warn_of_reference("Support.hl_gauss", encoded)
            encoded = reference.hl_gauss(x, self, sigma_ratio)
        return encoded

    def decode(self, logits: torch.Tensor, *, check: bool = False) -> torch.Tensor:
        """Scalars `[...]` that logits `[..., S]` predict: softmax, expectation, inverse transform in one kernel.

        Args:
            logits: floating tensor whose last dimension is `num_bins`.
            check: check the values too, and raise ValueError if they are NaN, inf or probabilities already. It waits
                for the device, and raises an error where there are no values to read, as in `multi_step_loss`.

        Returns:
            `[...]` float32 (float64 for float64 logits) raw scalars, differentiable; exactly 0 for uniform logits over
            a symmetric support.

        Raises:
            TypeError: `logits` is not a floating tensor.
            ValueError: the last dimension is not `num_bins`; with `check`, a wrong value.
        """
        values = None
        if _context.is_eager() and not check:
            values = _decode(self._compiled, self, logits)
            if not isinstance(values, Refusal):
                return values
        _check_scalars("decode", logits, "logits")
        if logits.dim() < 1 or logits.shape[-1] != self.num_bins:
            raise ValueError(
                f"Support.decode: logits must have shape [..., {self.num_bins}], but they have {tuple(logits.shape)}"
                + _remedies.remedy_for_bins(self.num_bins, logits.shape[-1] if logits.dim() else 0)
            )
        if _distributed.is_distributed(logits):
            decode = functools.partial(self.decode, check=check)
            return _distributed.by_whole(decode, logits)  # type: ignore[no-any-return]
        if check:
            _check_logits(logits, check)
            return self.decode(logits)
        warn_of_reference("Support.decode", values)
        return reference.decode(logits, self)

    def project(
        self,
        probabilities: torch.Tensor,
        rewards: torch.Tensor,
        discounts: torch.Tensor,
        *,
        check: bool = False,
    ) -> torch.Tensor:
        """Project the distribution of a distributional Bellman target onto the support, as C51 does.

        With c_j the raw centres and w_k the weights that `two_hot` gives to bin k::

            out_k = sum_j probabilities_j w_k(reward + discount c_j)

        So a row keeps its mass, even if an atom ``reward + discount c_j`` is equal to a centre or out of range.

        Args:
            probabilities: `[..., S]` floating tensor, of the next state; float64, float32, bfloat16 or float16.
            rewards: `[...]` floating tensor of raw rewards, or of n-step sums of rewards.
            discounts: `[...]` floating tensor; 0 where the episode has ended.
            check: check the values too, and raise ValueError if a row of `probabilities` is negative somewhere or does
                not add up to 1, as logits do not, or if a number is not finite; as in `decode`.

        Returns:
            `[..., S]`, float64 if one of the tensors is, else float32: a target of `SoftCrossEntropy`. All arguments
            are constants: there is no gradient. A row with NaN in one of its numbers is NaN.

        Raises:
            TypeError: an argument is not a floating tensor.
            ValueError: shapes or devices do not fit; with `check`, a wrong value.

        From Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning", algorithm 1.

        >>> support = Support(-1, 1, 3, "identity")
        >>> support.project(
        ...     torch.tensor([0.0, 0.5, 0.5]), torch.tensor(0.25), torch.tensor(0.5)
        ... )
        tensor([0.0000, 0.5000, 0.5000])
        """
        projected = None
        if _context.is_eager() and not check:
            projected = _C.project(self._compiled, probabilities, rewards, discounts)
            if not isinstance(projected, Refusal):
                return projected
        given = {"probabilities": probabilities, "rewards": rewards, "discounts": discounts}
        for argument, tensor in given.items():
            _check_scalars("project", tensor, argument)
            if tensor.device != probabilities.device:
                raise ValueError(
                    f"Support.project: {argument} must be on the device of probabilities, {probabilities.device}, "
                    f"but is on {tensor.device}"
                )
        if probabilities.dim() < 1 or probabilities.shape[-1] != self.num_bins:
            raise ValueError(
                f"Support.project: probabilities must have shape [..., {self.num_bins}], "
                f"but they have {tuple(probabilities.shape)}"
                + _remedies.remedy_for_bins(self.num_bins, probabilities.shape[-1] if probabilities.dim() else 0)
            )
        for argument in ("rewards", "discounts"):
            if given[argument].shape != probabilities.shape[:-1]:
                raise ValueError(
                    f"Support.project: {argument} must have the leading dimensions of probabilities, "
                    f"{tuple(probabilities.shape[:-1])}, but they have {tuple(given[argument].shape)}"
                    + _remedies.remedy_for_shape(argument, given[argument].shape, [probabilities.shape[:-1]])
                )
        if any(_distributed.is_distributed(tensor) for tensor in given.values()):
            project = functools.partial(self.project, check=check)
            return _distributed.by_whole(project, *given.values())  # type: ignore[no-any-return]
        if check:
            _check_atoms(given, check)
            return self.project(probabilities, rewards, discounts)
        warn_of_reference("Support.project", projected)
        return reference.project(probabilities, rewards, discounts, self)

    def numbers(self) -> dict[str, float]:
        """The support's numbers by the names that the kernels give them."""
        return {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "num_bins": self.num_bins,
            "transform": TRANSFORMS.index(self.transform),
            "eps": self.eps,
            "raw": self.space == "raw",
        }

    @functools.cached_property
    def _compiled(self) -> Any:
        """The support as the kernels read it."""
        return _C.Support(list(self.numbers()), list(self.numbers().values()))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `_compiled`, which is rebuilt when it is needed."""
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}


def _check_scalars(function: str, x: torch.Tensor, argument: str = "x") -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"Support.{function}: {argument} must be a tensor, but it is of type {type(x).__name__}"
            f"{_remedies.remedy_for_type(x, argument)}"
        )
    if fault := _remedies.remedy_for_kind(x):
        raise TypeError(f"Support.{function}: {argument} {fault}")
    if not x.is_floating_point():
        raise TypeError(
            f"Support.{function}: {argument} must be a floating tensor, but its dtype is {x.dtype}"
            f"{_remedies.remedy_for_dtype(x.dtype)}"
        )


def _check_logits(logits: torch.Tensor, check: bool) -> None:
    _numbers.check_flag("Support.decode: check", check)
    _context.require_values("Support.decode", "decode", logits)
    wrong = logits.isnan() | (logits == math.inf)
    if wrong.any():
        raise ValueError(
            f"Support.decode: logits must be finite or -inf, but {int(wrong.sum())} of {wrong.numel()} are NaN or inf"
        )
    if logits.numel() > 0 and _remedies.look_like_probabilities(logits).all():
        raise ValueError(
            "Support.decode: logits look like probabilities: all rows are at least 0 and add up to 1; leave out the "
            "softmax"
        )


def _check_atoms(given: dict[str, torch.Tensor], check: bool) -> None:
    _numbers.check_flag("Support.project: check", check)
    _context.require_values("Support.project", "project", *given.values())
    for argument, tensor in given.items():
        if not tensor.isfinite().all():
            raise ValueError(f"Support.project: {argument} must be finite, but a number is not")
    rows = given["probabilities"].reshape(-1, given["probabilities"].shape[-1])
    wrong = (~_remedies.look_like_probabilities(rows)).nonzero()
    if len(wrong) > 0:
        row = rows[wrong[0]]
        raise ValueError(
            f"Support.project: each row of probabilities must be at least 0 and add up to 1, but row {int(wrong[0])} "
            f"has a least element of {float(row.min()):.6g} and a sum of {float(row.sum()):.6g}; write "
            "logits.softmax(-1)"
        )


def _decode_gradient(
    logits: torch.Tensor, support: Support, grad_output: torch.Tensor, create_graph: bool
) -> torch.Tensor:
    """The gradient of `decode`, by the reference.

    Called from C++ when a backward pass is itself differentiated, and for a batched `grad_output`.
    """
    with torch.enable_grad():
        view = logits.view_as(logits)
        (gradient,) = torch.autograd.grad(reference.decode(view, support), view, grad_output, create_graph=create_graph)
    return gradient
