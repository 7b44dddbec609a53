"""The formulas of heads, supports and transforms with 200 bits and exponents of any size.

Arrays are NumPy arrays of mpmath numbers. A formula returns its results and their error bounds: the rounding of the
terms of a sum, in the type of the computation, which is float32 for half types.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mpmath
import numpy as np
import torch

Array = np.ndarray
context = mpmath.mp.clone()
context.prec = 200
number = context.mpf
ZERO, ONE, HALF = number(0), number(1), number("0.5")


def _elementwise(function: Any, inputs: int = 1) -> Any:
    return np.frompyfunc(function, inputs, 1)


exp = _elementwise(lambda x: ZERO if x < -(10**7) else context.exp(x))
log = _elementwise(lambda x: -context.inf if x == 0 else context.log(x))
log1p, expm1, sqrt = map(_elementwise, (context.log1p, context.expm1, context.sqrt))
_product = _elementwise(lambda weight, x: ZERO if weight == 0 else weight * x, 2)
_finite = _elementwise(lambda x: ZERO if context.isinf(x) else abs(x))


def exact(tensor: torch.Tensor) -> Array:
    """The numbers of a tensor."""
    return _elementwise(number)(np.asarray(tensor.detach().double().tolist(), dtype=object))


class Precision(NamedTuple):
    """Of the type in which tensors of a dtype are computed."""

    eps: Any
    tiny: Any  # the smallest normal number; exponentials below it may be 0
    target_eps: Any  # of the type in which scalars are placed among bins

    @classmethod
    def of(cls, dtype: torch.dtype) -> Precision:
        info = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        return cls(number(info.eps), number(info.smallest_normal), number(2) ** -52)


class Rows(NamedTuple):
    """Losses `[N]` and gradients of rows, each with bounds on the error."""

    loss: Array
    loss_error: Array
    gradient: Array
    gradient_error: Array


# ---- Transforms and supports ----------------------------------------------------------------------------------------


def transformed(x: Array, name: str, eps: float) -> Array:
    size = abs(x)
    if name == "signed_hyperbolic":
        return x * (1 / (sqrt(size + 1) + 1) + number(eps))
    return np.sign(x) * log1p(size) if name == "symlog" else x


def transformed_slope(x: Array, name: str, eps: float) -> Array:
    size = abs(x)
    if name == "signed_hyperbolic":
        return HALF / sqrt(size + 1) + number(eps)
    return 1 / (size + 1) if name == "symlog" else x * 0 + 1


def transformed_back(y: Array, name: str, eps: float) -> Array:
    size = abs(y)
    if name == "signed_hyperbolic":
        e = number(eps)
        u = 2 * size / (sqrt((1 + 2 * e) ** 2 + 4 * e * size) + 1 + 2 * e)
        return np.sign(y) * u * (u + 2)
    return np.sign(y) * expm1(size) if name == "symlog" else y


def slope_back(y: Array, name: str, eps: float) -> Array:
    return 1 / transformed_slope(transformed_back(y, name, eps), name, eps)


def _range(support: Any) -> tuple[Any, Any, Any]:
    low, high = number(support.minimum), number(support.maximum)
    return low, high, (high - low) / (support.num_bins - 1)


def centers(support: Any) -> Array:
    """The bin values whose expectation the support computes."""
    low, _, width = _range(support)
    middles = np.array([low + width * j for j in range(support.num_bins)], dtype=object)
    return transformed_back(middles, support.transform, support.eps) if support.space == "raw" else middles


def two_hot(x: Array, support: Any, precision: Precision) -> tuple[Array, Array]:
    """`[N, S]` distributions, and the mass that rounding may move."""
    low, high, width = _range(support)
    y, values = transformed(x, support.transform, support.eps), centers(support)
    encoded = np.full((len(x), support.num_bins), ZERO, dtype=object)
    moved = encoded.copy()
    for row, (scalar, transformed_scalar) in enumerate(zip(x, y, strict=True)):
        if support.space == "raw":
            clamped = min(max(scalar, values[0]), values[-1])
            bin = min(max(j for j in range(support.num_bins) if values[j] <= clamped), support.num_bins - 2)
            gap = values[bin + 1] - values[bin]
            upper, blur = (clamped - values[bin]) / gap, (abs(clamped) + abs(values[bin]) + abs(values[bin + 1])) / gap
        else:
            clamped = min(max(transformed_scalar, low), high)
            position = (clamped - low) / width
            bin = min(int(context.floor(position)), support.num_bins - 2)
            upper, blur = position - bin, (abs(clamped) + max(abs(low), abs(high))) / width
        encoded[row, bin], encoded[row, bin + 1] = 1 - upper, upper
        # Next to a centre, moved mass may fall into the next bin.
        moved[row, max(bin - 1, 0) : bin + 3] = min(4 * blur * precision.target_eps, ONE)
    return encoded, moved


def _mass_between(low: Any, high: Any) -> Any:
    """Twice the mass of a normal distribution between two edges, in units of sqrt(2) standard deviations."""
    tail = lambda edge: ZERO if edge > 1000 else context.erfc(edge)
    if max(abs(low), abs(high)) < 1:
        return context.erf(high) - context.erf(low)
    if low > 0 or high < 0:
        inner, outer = sorted((abs(low), abs(high)))
        return tail(inner) - tail(outer)
    return 2 - tail(-low) - tail(high)


def hl_gauss(x: Array, support: Any, sigma_ratio: float, precision: Precision) -> tuple[Array, Array]:
    """The same for histograms of normal distributions, whose mass may be a difference of the error function."""
    low, high, width = _range(support)
    encoded = np.full((len(x), support.num_bins), ZERO, dtype=object)
    moved = encoded.copy()
    scale = 1 / (context.sqrt(2) * number(sigma_ratio))
    for row, y in enumerate(transformed(x, support.transform, support.eps)):
        clamped = min(max(y, low), high)
        edges = [((low - clamped) / width + j - HALF) * scale for j in range(support.num_bins + 1)]
        total = _mass_between(edges[0], edges[-1])
        # The error of an edge is the rounding of its terms, and the error of a mass is this times the density there.
        shift = 4 * (abs(clamped) + max(abs(low), abs(high)) + width) / width * scale * precision.target_eps
        density = [context.exp(-(max(abs(edge) - shift, ZERO) ** 2)) for edge in edges]
        for bin in range(support.num_bins):
            mass = _mass_between(edges[bin], edges[bin + 1]) / total
            encoded[row, bin] = mass
            moved[row, bin] = shift * (density[bin] + density[bin + 1]) / total + precision.target_eps * (
                mass + 1 / total
            )
    return encoded, moved


# ---- Logits ---------------------------------------------------------------------------------------------------------


def log_softmax(x: Array) -> tuple[Array, Array]:
    """The log-softmax along the last dimension, and the sum of the magnitudes of its terms."""
    below = x - x.max(-1, keepdims=True)
    logarithm = log(exp(below).sum(-1, keepdims=True))
    return below - logarithm, _finite(below) + logarithm + 1


def decoded(x: Array, support: Any, precision: Precision) -> Rows:
    """Values of logits `[N, S]`, and their derivatives."""
    eps, tiny, _ = precision
    logarithms, magnitude = log_softmax(x)
    p, values = exp(logarithms), centers(support)
    expectation = (p * values).sum(-1)
    largest = max(abs(values))
    size = eps * (p * magnitude * abs(values)).sum(-1) + tiny * largest
    gradient = p * (values - expectation[:, None])
    entering = eps * p * magnitude * (abs(values) + abs(expectation)[:, None]) + p * size[:, None] + tiny * largest
    if support.space == "raw":  # an error of a centre is multiplied by the slope, which is at most proportional to it
        steps = 4 + max(abs(number(support.minimum)), abs(number(support.maximum)))
        return Rows(expectation, size + steps * eps * (p * abs(values)).sum(-1), gradient, steps * entering)
    size = size + eps * largest  # equally spaced centres are rounded like the largest
    value = transformed_back(expectation, support.transform, support.eps)
    slope = slope_back(expectation, support.transform, support.eps)
    # The slope increases with the magnitude, so it is taken at the upper end of the error.
    above = slope_back(abs(expectation) + 4 * size, support.transform, support.eps)
    error = entering * above[:, None] + abs(gradient) * (above - slope + 8 * eps * above)[:, None]
    return Rows(value, size * above + eps * abs(value), gradient * slope[:, None], error)


def _cross_entropy(x: Array, t: Array, moved: Array, precision: Precision) -> Rows:
    """Rounding may move the targets by `moved`."""
    eps, tiny, _ = precision
    logarithms, magnitude = log_softmax(x)
    p, total, size = exp(logarithms), t.sum(-1, keepdims=True), abs(t).sum(-1, keepdims=True)
    loss_error = eps * _product(abs(t), magnitude).sum(-1) + _product(moved, _finite(logarithms)).sum(-1)
    error = eps * (p * magnitude * size + abs(t)) + moved + p * moved.sum(-1, keepdims=True) + tiny * size
    return Rows(-_product(t, logarithms).sum(-1), loss_error, p * total - t, error)


def _smoothed(t: Array, amount: float) -> Array:
    return t * (1 - number(amount)) + number(amount) / t.shape[-1]


def _two_hot_loss(head: Any, x: Array, target: Array, precision: Precision) -> Rows:
    t, moved = two_hot(target, head.support, precision)
    return _cross_entropy(x, _smoothed(t, head.label_smoothing), moved, precision)


def _hl_gauss_loss(head: Any, x: Array, target: Array, precision: Precision) -> Rows:
    return _cross_entropy(x, *hl_gauss(target, head.support, head.sigma_ratio, precision), precision)


def _soft_cross_entropy_loss(head: Any, x: Array, target: Array, precision: Precision) -> Rows:
    eps, tiny, _ = precision
    t = _smoothed(target, head.label_smoothing)
    # A share that the type of the computation cannot represent is rounded.
    loss, loss_error, gradient, error = _cross_entropy(x, t, np.full(x.shape, tiny * eps, dtype=object), precision)
    if head.subtract_target_entropy:
        own = _product(t, log(t))
        loss, loss_error = loss + own.sum(-1), loss_error + eps * (abs(own) + abs(t)).sum(-1) + 800 * tiny * eps
    logarithms, magnitude = log_softmax(x)
    p, weight = exp(logarithms), number(head.entropy_weight)
    entropy = -_product(p, logarithms).sum(-1, keepdims=True)
    terms = _product(p, magnitude * (1 + _finite(logarithms)))
    loss = loss - weight * entropy[:, 0]
    loss_error = loss_error + abs(weight) * (eps * terms + tiny * _finite(logarithms)).sum(-1)
    gradient = gradient + weight * _product(p, logarithms + entropy)
    error = error + abs(weight) * eps * (terms + p * magnitude * (entropy + terms.sum(-1, keepdims=True)))
    return Rows(loss, loss_error, gradient, error + abs(weight) * tiny * (_finite(logarithms) + entropy))


def _categorical_kl_loss(head: Any, x: Array, target: Array, precision: Precision) -> Rows:
    eps, tiny, _ = precision
    predicts_p, unimix = head.prediction == "p", number(head.unimix)
    (log_x, size_x), (log_t, size_t) = log_softmax(x), log_softmax(target)
    mixed = [exp(logarithms) * (1 - unimix) + unimix / x.shape[-1] for logarithms in (log_x, log_t)]
    logarithms = [log(mixture) for mixture in mixed] if unimix else [log_x, log_t]
    (p, q), (log_p, log_q) = (pair[:: 1 if predicts_p else -1] for pair in (mixed, logarithms))
    ratio = np.where(p == 0, ZERO, log_p) - log_q
    loss = _product(p, ratio).sum((-2, -1))
    largest = max((*_finite(log_p).flat, *_finite(log_q).flat, ONE))
    size_p = size_x if predicts_p else size_t  # an error of a logit is a relative error of its probability
    size = size_x + size_t + _finite(log_p) + _finite(log_q) + size_p * _finite(ratio)
    softmax = exp(log_x)
    if predicts_p:
        h, entering = _product(softmax, ratio), _product(softmax, size)
    else:
        quotient = p / np.where(q == 0, ONE, q)
        h = np.where(q == 0, p, softmax * quotient)
        entering = h * (size_x + size_t) + quotient * tiny / eps  # an exponential may be 0
    gradient = (1 if predicts_p else -1) * (1 - unimix) * (h - softmax * h.sum(-1, keepdims=True))
    entering = entering + softmax * (size_x * abs(h).sum(-1, keepdims=True) + entering.sum(-1, keepdims=True))
    free = loss < number(head.free_nats)
    gradient = np.where(free[:, None, None], ZERO, gradient)
    loss_error = eps * _product(p, size).sum((-2, -1)) + tiny * largest
    return Rows(
        np.where(free, number(head.free_nats), loss), loss_error, gradient, 2 * (eps * entering + tiny * largest)
    )


# ---- Numbers and vectors --------------------------------------------------------------------------------------------


def _difference(head: Any, x: Array, target: Array, precision: Precision) -> tuple[Array, Array]:
    """`[N, D]` differences from the transformed target, and their error."""
    t = transformed(target, head.transform, 1e-3)
    difference, error = x - t, precision.eps * abs(x - t)
    if head.transform != "identity":
        error = error + 2 * precision.eps * abs(t)
    return (a[:, None] if a.ndim == 1 else a for a in (difference, error))  # type: ignore[return-value]


def _mean_squared_error_loss(head: Any, x: Array, target: Array, precision: Precision) -> Rows:
    difference, error = _difference(head, x, target, precision)
    count, slope = difference.shape[-1], 2 * difference
    loss_error = (abs(slope) * error + 2 * precision.eps * difference**2).sum(-1) / count
    return Rows(
        (difference**2).sum(-1) / count, loss_error, slope / count, (2 * error + precision.eps * abs(slope)) / count
    )


def _huber_loss(head: Any, x: Array, target: Array, precision: Precision) -> Rows:
    difference, error = _difference(head, x, target, precision)
    delta, count, distance = number(head.delta), difference.shape[-1], abs(difference)
    limited = np.minimum(distance, delta)
    loss = (limited * (distance - limited / 2)).sum(-1) / count
    # Where it is clipped, an error of the difference does not change the gradient.
    entering = np.where(distance > delta + error, precision.eps * delta, error + precision.eps * limited)
    loss_error = 2 * (limited * error).sum(-1) / count + 4 * precision.eps * loss
    return Rows(loss, loss_error, np.sign(difference) * limited / count, entering / count)


def _binary_cross_entropy_loss(head: Any, x: Array, t: Array, precision: Precision) -> Rows:
    eps, tiny, _ = precision
    exponential = exp(-abs(x))
    positive, negative = np.maximum(x, ZERO) + log1p(exponential), np.maximum(-x, ZERO) + log1p(exponential)
    loss = _product(t, negative) + _product(1 - t, positive)
    sigmoid = np.where(x >= 0, ONE, exponential) / (1 + exponential)
    loss_error = eps * (4 * loss + np.where(t == 1, ZERO, positive)) + tiny
    return Rows(loss, loss_error, sigmoid - t, eps * (2 * sigmoid * (1 + np.maximum(-x, ZERO)) + t) + tiny)


def _negative_cosine_loss(head: Any, x: Array, t: Array, precision: Precision) -> Rows:
    eps, tiny, _ = precision
    least = number(head.eps)
    lengths = [sqrt((a * a).sum(-1, keepdims=True)) for a in (x, t)]
    divisor_x, divisor_t = (np.maximum(length, least) for length in lengths)
    unit_x, unit_t = x / divisor_x, t / divisor_t
    cosine, terms = (a.sum(-1, keepdims=True) for a in (unit_x * unit_t, abs(unit_x * unit_t)))
    gradient = (np.where(lengths[0] >= least, unit_x * cosine, ZERO) - unit_t) / divisor_x
    entering = 8 * eps * (abs(unit_t) + abs(unit_x) * terms) + tiny  # rounded before the division
    # Next to eps there are two derivatives.
    entering = np.where(abs(lengths[0] - least) < 8 * eps * least, context.inf, entering)
    return Rows(-cosine[:, 0], 4 * eps * terms[:, 0], gradient, entering / divisor_x)


def _quantile_huber_loss(head: Any, x: Array, target: Array, precision: Precision) -> Rows:
    count, samples, kappa = x.shape[-1], target.shape[-1], number(head.kappa)
    fractions = np.array([number(2 * i + 1) / (2 * count) for i in range(count)], dtype=object)[:, None]
    difference = target[:, None, :] - x[:, :, None]
    distance, weight = abs(difference), np.where(difference < 0, 1 - fractions, fractions)
    if kappa < precision.tiny:
        loss, slope = distance, np.sign(difference)
    else:
        limited = np.minimum(distance, kappa)
        loss, slope = limited / kappa * (distance - limited / 2), np.sign(difference) * limited / kappa
    weight = weight / samples / (1 if head.sum_over_quantiles else count)
    loss, size = (weight * loss).sum((1, 2)), (weight * abs(slope)).sum(-1)
    return Rows(loss, 8 * precision.eps * loss, -(weight * slope).sum(-1), 8 * precision.eps * size)


def _per_step_loss(head: Any, x: Array, target: None, precision: Precision) -> Rows:
    return Rows(x, x * 0, x * 0 + 1, x * 0)


_LOSSES = {
    "TwoHot": _two_hot_loss,
    "HLGauss": _hl_gauss_loss,
    "SoftCrossEntropy": _soft_cross_entropy_loss,
    "MeanSquaredError": _mean_squared_error_loss,
    "Huber": _huber_loss,
    "BinaryCrossEntropy": _binary_cross_entropy_loss,
    "NegativeCosine": _negative_cosine_loss,
    "QuantileHuber": _quantile_huber_loss,
    "CategoricalKL": _categorical_kl_loss,
    "PerStepLoss": _per_step_loss,
}


def rows_of(head: Any, x: torch.Tensor, target: torch.Tensor | None) -> Rows:
    """The losses of a head, one row per sample."""
    t = None if target is None else exact(target)
    return _LOSSES[type(head).__name__](head, exact(x), t, Precision.of(x.dtype))  # type: ignore[arg-type]


# ---- Comparison -----------------------------------------------------------------------------------------------------


def check_close(found: torch.Tensor, truth: Array, error: Array, what: str, tolerance: float = 4.0) -> None:
    """Check that `found` is the truth, rounded once to its type, within `tolerance` times `error`; infinite where the
    truth is beyond the largest number of the type."""
    info = torch.finfo(found.dtype)
    largest, eps, smallest = number(info.max), number(info.eps), number(info.smallest_normal)
    for index, (a, b, bound) in enumerate(
        zip(found.detach().double().flatten().tolist(), truth.flat, np.asarray(error).flat, strict=True)
    ):
        allowed = tolerance * bound + eps * abs(b) + smallest
        beyond = allowed > largest or (abs(b) + allowed > largest and a * b > 0)
        close = beyond if math.isinf(a) else abs(a - b) <= allowed
        assert close, f"{what}[{index}]: {a!r}, expected {context.nstr(b, 10)} +- {context.nstr(allowed, 3)}"
