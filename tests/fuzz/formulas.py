"""The contract's formulas in NumPy and float64, written independently: nothing here uses the package's arithmetic.

Where a result is rounded, a second array gives the allowed rounding in units of the machine epsilon of the dtype of the
computation: the sum of the magnitudes of its terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


# ---- Gradient flow --------------------------------------------------------------------------------------------------


def scaled(g: Array, scale: Array | float) -> Array:
    """g * scale; exact zeros where the scale is 0."""
    scale = np.broadcast_to(scale, g.shape)
    return np.where(scale == 0, 0, times(g, scale))


def times(g: Array, factor: Array | float) -> Array:
    """Complex times real, part by part."""
    if not np.iscomplexobj(g):
        return g * factor
    result = np.empty_like(g)
    result.real, result.imag = g.real * factor, g.imag * factor
    return result


def clamped(g: Array, low: Array | float, high: Array | float) -> Array:
    return np.where(np.isnan(g), g, np.minimum(np.maximum(g, low), high))


def resized(g: Array, limits: Array | float, batch_dims: int, p: float, clips: bool) -> tuple[Array, Array]:
    """Each norm group clipped or scaled to its limit; and a mask of groups that are within their limit, or empty."""
    limits = np.broadcast_to(limits, g.shape[:batch_dims])
    result, within = np.empty_like(g), np.ones(g.shape[:batch_dims], bool)
    for index in np.ndindex(*g.shape[:batch_dims]):
        result[index], within[index] = _resized_group(g[index], float(limits[index]), p, clips)
    return result, within


def _resized_group(g: Array, limit: float, p: float, clips: bool) -> tuple[Array, bool]:
    # The exponent range of long double is large enough that neither a power nor a sum overflows.
    wide = g.astype(np.clongdouble if np.iscomplexobj(g) else np.longdouble)
    size = np.abs(wide)
    norm = norm_of(size, p)
    if limit == 0:
        return np.zeros_like(g), clips and norm == 0
    if np.isnan(size).any():
        return np.full_like(g, complex(math.nan, math.nan) if np.iscomplexobj(g) else math.nan), False
    if norm == 0 or (clips and norm <= limit):
        return g, clips
    return times(wide, limit / norm).astype(g.dtype), False


def norm_of(size: Array, p: float) -> Array:
    """|g|_p of moduli."""
    return size.max(initial=0) if math.isinf(p) else (size**p).sum() ** (1 / np.longdouble(p))


def resized_backward(
    g: Array, v: Array, limits: Array | float, batch_dims: int, p: float, clips: bool, margin: float
) -> tuple[Array, Array]:
    """The gradient of ``Re sum(conj(v) * resized(g))`` with respect to g without zero elements; and the sum of the
    magnitudes of its terms, infinite where the derivative is not well defined: next to the limit, for equal
    largest elements in the maximum norm, and for elements close to 0 if p < 1."""
    limits = np.broadcast_to(limits, g.shape[:batch_dims])
    result, magnitude = np.empty_like(g), np.empty(g.shape)
    for index in np.ndindex(*g.shape[:batch_dims]):
        group, cotangent, size = g[index], v[index], np.abs(g[index])
        if not size.size:
            continue
        limit, norm = limits[index], norm_of(size, p)
        unclear = clips and math.isfinite(limit) and abs(norm - limit) <= margin * limit
        unclear |= math.isinf(p) and (size == norm).sum() > 1
        unclear |= p < 1 and size.min() < 1e-3 * size.max()
        if clips and norm <= limit:
            result[index], magnitude[index] = cotangent, np.inf if unclear else 0
            continue
        direction = group / size
        slope = direction * (size == norm) if math.isinf(p) else direction * (size / norm) ** (p - 1)
        along = (cotangent.conj() * group).real
        result[index] = limit * (cotangent / norm - slope * along.sum() / norm**2)
        magnitude[index] = limit * (np.abs(cotangent) / norm + np.abs(slope) * np.abs(along).sum() / norm**2)
        magnitude[index] = np.inf if unclear else magnitude[index]
    return result, magnitude


# ---- Transforms and supports ----------------------------------------------------------------------------------------


def signed_hyperbolic(x: Array, eps: float) -> Array:
    size = np.abs(x)
    return np.where(np.isinf(x), x, np.sign(x) * (size / (np.sqrt(size + 1) + 1) + eps * size))


def signed_parabolic(y: Array, eps: float) -> Array:
    """The inverse: ``u = sqrt(|x| + 1) - 1`` solves ``|y| = u + eps u (u + 2)``, here without cancellation."""
    size = np.abs(y)
    u = 2 * size / (np.sqrt((1 + 2 * eps) ** 2 + 4 * eps * size) + 1 + 2 * eps)
    return np.where(np.isinf(y), y, np.sign(y) * u * (u + 2))


def transformed(x: Array, name: str, eps: float) -> Array:
    if name == "signed_hyperbolic":
        return signed_hyperbolic(x, eps)
    return np.sign(x) * np.log1p(np.abs(x)) if name == "symlog" else x


def transformed_back(y: Array, name: str, eps: float) -> Array:
    if name == "signed_hyperbolic":
        return signed_parabolic(y, eps)
    return np.sign(y) * np.expm1(np.abs(y)) if name == "symlog" else y


def slope_back(y: Array, name: str, eps: float) -> Array:
    """The derivative of `transformed_back`: 1 over the derivative of the transform at the result."""
    x = np.abs(transformed_back(y, name, eps))
    if name == "signed_hyperbolic":
        return 1 / (0.5 / np.sqrt(x + 1) + eps)
    return x + 1 if name == "symlog" else np.ones_like(y)


def centers(support: Any) -> Array:
    """Bin values whose expectation the support computes."""
    middles = np.linspace(support.minimum, support.maximum, support.num_bins)
    return transformed_back(middles, support.transform, support.eps) if support.space == "raw" else middles


def two_hot(x: Array, support: Any) -> tuple[Array, Array]:
    """`[N, S]` distributions for scalars `[N]`, and the part of each bin's mass that rounding may move."""
    last, width = support.num_bins - 1, (support.maximum - support.minimum) / (support.num_bins - 1)
    y = np.clip(transformed(x, support.transform, support.eps), support.minimum, support.maximum)
    position = (y - support.minimum) / width
    ends = max(abs(support.minimum), abs(support.maximum))
    blur = (np.abs(y) + ends) / width
    if support.space == "raw":
        middles = centers(support)
        clipped = np.clip(x, middles[0], middles[-1])
        lower = np.clip(np.searchsorted(middles, clipped, "right") - 1, 0, last - 1)
        gap = middles[lower + 1] - middles[lower]
        upper = (clipped - middles[lower]) / gap
        blur = 4 * (np.abs(clipped) + np.abs(middles[lower]) + np.abs(middles[lower + 1])) / gap  # 4 rounding steps
    else:
        lower = np.clip(np.floor(np.nan_to_num(position)), 0, last - 1).astype(int)
        upper = position - lower
    result, moved = np.zeros((len(x), last + 1)), np.zeros((len(x), last + 1))
    for row, (bin, weight, amount) in enumerate(zip(lower, upper, blur, strict=True)):
        result[row, bin], result[row, bin + 1] = 1 - weight, weight
        # Next to a centre, moved mass may fall into the next bin.
        moved[row, max(bin - 1, 0) : bin + 3] = amount
        if np.isnan(x[row]):
            result[row] = np.nan
    return result, moved


_erf = np.vectorize(math.erf, otypes=[float])


def hl_gauss(x: Array, support: Any, sigma_ratio: float) -> tuple[Array, Array]:
    """The same for histograms of normal distributions."""
    width = (support.maximum - support.minimum) / (support.num_bins - 1)
    y = np.clip(transformed(x, support.transform, support.eps), support.minimum, support.maximum)[:, None]
    edges = support.minimum + width * (np.arange(support.num_bins + 1) - 0.5)
    arguments = (edges - y) / (math.sqrt(2) * sigma_ratio * width)
    below = _erf(arguments)
    total = below[:, -1:] - below[:, :1]
    # The error of an edge is the rounding of its terms, and the error of the mass is this times the density there.
    ends = max(abs(support.minimum), abs(support.maximum)) + width
    off = (np.abs(y) + ends) / (sigma_ratio * width) * np.exp(-np.minimum(arguments**2, 700)) + 1
    return (below[:, 1:] - below[:, :-1]) / total, (off[:, 1:] + off[:, :-1] + off[:, :1] + off[:, -1:]) / total


def log_softmax(x: Array) -> tuple[Array, Array]:
    """The log-softmax along the last dimension, and the sum of the magnitudes of its terms."""
    largest = x.max(-1, keepdims=True)
    below = x - largest
    logarithm = np.log(np.exp(below).sum(-1, keepdims=True))
    return below - logarithm, np.where(np.isinf(below), 0, np.abs(below)) + logarithm + 1


def product(weight: Array, x: Array) -> Array:
    """0 times infinity is 0."""
    return np.where((weight == 0) & ~np.isnan(x), 0.0, weight * x)


def chosen(kept: Array, x: Array) -> Array:
    """0 where `kept` is False, even for NaN and inf."""
    return np.where(kept, x, 0.0)


def decoded(x: Array, support: Any) -> tuple[Array, Array]:
    """`[N]` expectations of logits `[N, S]`, transformed back; and the magnitudes of their terms."""
    logarithms, magnitude = log_softmax(x)
    p, middles = np.exp(logarithms), centers(support)
    expectation, size = p @ middles, (p * magnitude) @ np.abs(middles)
    if support.space == "raw":
        return expectation, size + 4 * p @ np.abs(middles)  # rounding steps of a transform
    size = size + max(abs(support.minimum), abs(support.maximum))  # equally spaced centres are rounded like the ends
    back = transformed_back(expectation, support.transform, support.eps)
    # The slope increases with the magnitude, so it is taken at the upper end of the error.
    return back, size * slope_back(np.abs(expectation) + 1e-4 * size, support.transform, support.eps) + np.abs(back)


# ---- Losses of heads: [N] rows, their gradients, and how far rounding may take both ---------------------------------

Rows = tuple[Array, Array, Array, Array]
"""Losses `[N]` and the magnitudes that enter them, gradients and the magnitudes that enter those."""


def cross_entropy(x: Array, t: Array, moved: Array) -> Rows:
    """``-sum t log p`` for logits x and targets t; rounding may move the targets by `moved`."""
    logarithms, magnitude = log_softmax(x)
    p, total = np.exp(logarithms), t.sum(-1, keepdims=True)
    loss = -product(t, logarithms).sum(-1)
    size = product(np.abs(t), magnitude).sum(-1) + product(moved, np.abs(logarithms)).sum(-1)
    entering = p * magnitude * np.abs(total) + p * moved.sum(-1, keepdims=True) + np.abs(t) + moved
    return loss, size, p * total - t, entering


def smoothed(t: Array, amount: float) -> Array:
    return t * (1 - amount) + amount / t.shape[-1] if amount else t


def two_hot_loss(head: Any, x: Array, target: Array) -> Rows:
    t, moved = two_hot(target, head.support)
    return cross_entropy(x, smoothed(t, head.label_smoothing), moved * (1 - head.label_smoothing))


def hl_gauss_loss(head: Any, x: Array, target: Array) -> Rows:
    return cross_entropy(x, *hl_gauss(target, head.support, head.sigma_ratio))


FLUSHED = 1e-28
"""Magnitude of exponentials below the smallest number, which are 0, also where a ratio or logarithm multiplies them."""


def entropy_terms(x: Array) -> tuple[Array, Array]:
    """``-p log p`` of every action, and the magnitudes of its terms."""
    logarithms, magnitude = log_softmax(x)
    p = np.exp(logarithms)
    return -product(p, logarithms), product(p, magnitude * (1 + np.abs(np.where(p == 0, 0, logarithms)))) + FLUSHED


def soft_cross_entropy_loss(head: Any, x: Array, target: Array) -> Rows:
    t = target
    if target.ndim == 1:
        t = (target[:, None] == np.arange(x.shape[-1])).astype(np.float64)
    t = smoothed(t, head.label_smoothing)
    loss, size, gradient, entering = cross_entropy(x, t, np.zeros_like(t))
    logarithms, magnitude = log_softmax(x)
    p = np.exp(logarithms)
    if head.subtract_target_entropy:
        own = product(t, np.log(t))
        loss, size = loss + own.sum(-1), size + np.abs(own).sum(-1) + np.abs(t).sum(-1)
    if head.entropy_weight:
        action_entropies, terms = entropy_terms(x)
        entropy = action_entropies.sum(-1, keepdims=True)
        loss = loss - head.entropy_weight * entropy[:, 0]
        weight = abs(head.entropy_weight)
        size = size + weight * terms.sum(-1)
        gradient = gradient + head.entropy_weight * product(p, logarithms + entropy)
        entering = entering + weight * (terms + p * magnitude * (entropy + terms.sum(-1, keepdims=True)))
    return loss, size, gradient, entering


def mean_squared_error_loss(head: Any, x: Array, target: Array) -> Rows:
    t = transformed(target, head.transform, 1e-3)
    x, t = (a[:, None] if a.ndim == 1 else a for a in (x, t))
    difference, size = x - t, np.abs(x) + np.abs(t)
    loss, count = (difference**2).mean(-1), x.shape[-1]
    return (
        loss,
        loss * 4 + (2 * np.abs(difference) * size).mean(-1),
        2 * difference / count,
        (2 * size + 2 * np.abs(difference)) / count,
    )


def huber_loss(head: Any, x: Array, target: Array) -> Rows:
    t = transformed(target, head.transform, 1e-3)
    x, t = (a[:, None] if a.ndim == 1 else a for a in (x, t))
    difference, size, count = x - t, np.abs(x) + np.abs(t), x.shape[-1]
    distance, slope = np.abs(difference), np.clip(difference, -head.delta, head.delta)
    loss = np.where(distance <= head.delta, difference**2 / 2, head.delta * (distance - head.delta / 2))
    # A rounding error of the difference changes the gradient by the same amount, or not at all in the linear part.
    entering = np.where(distance > head.delta * (1 + 1e-3) + 1e-2 * size, head.delta, size + np.abs(slope))
    return loss.mean(-1), (4 * loss + 2 * np.abs(slope) * size).mean(-1), slope / count, entering / count


def binary_cross_entropy_loss(head: Any, x: Array, t: Array) -> Rows:
    def softplus(x: Array) -> Array:
        return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))

    loss = product(t, softplus(-x)) + product(1 - t, softplus(x))
    exponential = np.exp(-np.abs(x))
    sigmoid = np.where(x >= 0, 1, exponential) / (1 + exponential)
    # 1 - t is rounded too.
    size = np.abs(loss) + product(t, softplus(-x)) + np.where(t == 1, 0, softplus(x))
    return loss, size * 2, sigmoid - t, 2 * sigmoid * (1 + np.where(x < 0, np.abs(x), 0)) + t + 1e-30


def negative_cosine_loss(head: Any, x: Array, t: Array) -> Rows:
    def length(a: Array) -> Array:
        largest = np.maximum(np.abs(a).max(-1, keepdims=True), 1e-300)
        return largest * np.sqrt(((a / largest) ** 2).sum(-1, keepdims=True))

    length_x, length_t = length(x), length(t)
    unit_x, unit_t = x / np.maximum(length_x, head.eps), t / np.maximum(length_t, head.eps)
    cosine = (unit_x * unit_t).sum(-1, keepdims=True)
    terms = np.abs(unit_x * unit_t).sum(-1, keepdims=True)
    has_direction = length_x >= head.eps
    gradient = -(unit_t - np.where(has_direction, unit_x * cosine, 0)) / np.maximum(length_x, head.eps)
    entering = (np.abs(unit_t) + np.abs(unit_x) * terms) / np.maximum(length_x, head.eps)
    # Next to eps there are two derivatives.
    entering = np.where(np.abs(length_x - head.eps) < 1e-5 * head.eps, np.inf, entering)
    size = x.shape[-1] ** 0.5
    return -cosine[:, 0], terms[:, 0] * (2 + size), gradient, entering * (4 + size)


def quantile_huber_loss(head: Any, x: Array, target: Array) -> Rows:
    count, kappa = x.shape[-1], head.kappa
    fractions = ((np.arange(count) + 0.5) / count)[None, :, None]
    u = target[:, None, :] - x[:, :, None]
    distance, size = np.abs(u), np.abs(target[:, None, :]) + np.abs(x[:, :, None])
    weight = np.where(u < 0, 1 - fractions, fractions)
    if kappa == 0:
        loss, slope = distance, np.where(np.isnan(u), u, np.sign(u))
    else:
        loss = np.where(distance <= kappa, u**2 / (2 * kappa), distance - kappa / 2)
        slope = np.clip(u / kappa, -1, 1)
    share = 1 / target.shape[-1] / (1 if head.sum_over_quantiles else count)
    # Rounding the difference changes the slope unless it is clipped, and may change the sign, and so the weight.
    near = size / kappa if kappa > 0 else np.where(distance > 1e-6 * size, 1, np.inf)
    entering = weight * (np.abs(slope) + np.where(distance < 2 * kappa + 1e-2 * size, near, 1))
    return (
        (weight * loss).sum((1, 2)) * share,
        (weight * (4 * loss + 2 * np.abs(slope) * size)).sum((1, 2)) * share,
        -(weight * slope).sum(-1) * share,
        4 * entering.sum(-1) * share,
    )


def categorical_kl_loss(head: Any, x: Array, target: Array) -> Rows:
    predicts_p, unimix = head.prediction == "p", head.unimix
    (log_x, size_x), (log_t, size_t) = log_softmax(x), log_softmax(target)
    softmax = np.exp(log_x)

    def mixed(logarithms: Array) -> tuple[Array, Array]:
        mixture = np.exp(logarithms) * (1 - unimix) + unimix / x.shape[-1]
        return mixture, np.log(mixture) if unimix else logarithms

    (mine, log_mine), (other, log_other) = mixed(log_x), mixed(log_t)
    (p, log_p), (q, log_q) = ((mine, log_mine), (other, log_other))[:: 1 if predicts_p else -1]
    size = size_x + size_t
    ratio = np.where(p == 0, 0, log_p) - log_q
    loss = product(p, ratio).sum((-2, -1))
    size_p = size_x if predicts_p else size_t  # an error of a logit is a relative error of its probability
    relative = size_p * (np.abs(ratio) + np.abs(product(p, ratio).sum(-1, keepdims=True)))
    terms = product(p, np.abs(np.where(p == 0, 0, log_p)) + np.abs(log_q) + size + relative)
    if predicts_p:
        h, large = product(softmax, ratio), product(softmax, np.abs(np.where(p == 0, 0, log_p)) + np.abs(log_q) + size)
    else:
        h = p * (softmax / q) if unimix else p
        large = np.abs(h) * size
    own = softmax * size_x
    gradient = (1 if predicts_p else -1) * (h - softmax * h.sum(-1, keepdims=True))
    entering = large + own * np.abs(h).sum(-1, keepdims=True) + softmax * large.sum(-1, keepdims=True)
    free = loss < head.free_nats
    gradient, entering = (np.where(free[:, None, None], 0, (1 - unimix) * a) for a in (gradient, entering))
    near = np.abs(loss - head.free_nats) < 1e-5 * terms.sum((-2, -1))  # where there are two derivatives
    entering = np.where(near[:, None, None], np.inf, entering)
    entering = 2 * entering + FLUSHED
    return np.where(free, head.free_nats, loss), terms.sum((-2, -1)) + head.free_nats, gradient, entering


def per_step_loss(head: Any, x: Array, target: None) -> Rows:
    return x, np.zeros_like(x), np.ones_like(x), np.zeros_like(x)


# ---- Losses of policies and of clipped values: predictions, targets and gradients by field -------------------------

Fields = dict[str, Array]
Sized = tuple[Array, Array]
"""A result, and the magnitudes that enter it."""
FieldRows = tuple[Array, Array, Fields, Fields]
"""`Rows` with gradients by field. A gradient is infinite where the contract does not define it."""


def exponential(x: Array, largest: float) -> Array:
    """exp(x); inf above the largest number of the dtype of the computation."""
    result = np.exp(x)
    return np.where(result > largest, np.inf, result)


def finite_size(x: Array) -> Array:
    return np.where(np.isfinite(x), np.abs(x), 0)


def unless_zero(weight: Array, x: Array) -> Array:
    """0 where the weight is 0, whatever x is."""
    return np.where(weight == 0, 0.0, weight * x)


def has_nan(*arrays: Array) -> Array:
    """`[N]`: True where a number of the row is NaN."""
    return np.any([np.isnan(a).any(tuple(range(1, a.ndim))) for a in arrays], axis=0)


def groups(head: Any, logits: Array) -> list[Array]:
    """The logits of each choice."""
    choices = getattr(head, "choices", None)
    return np.split(logits, np.cumsum(choices)[:-1], -1) if choices else [logits]


def standard_scores(x: Fields, t: Fields) -> tuple[Sized, Sized]:
    """``(a - mean) / std``, and 1 / std."""
    scale = np.exp(-x["log_stds"])
    scale_size = scale * (2 + np.abs(x["log_stds"]))
    difference, size = t["actions"] - x["means"], np.abs(t["actions"]) + np.abs(x["means"])
    return (difference * scale, size * scale + np.abs(difference) * scale_size), (scale, scale_size)


def action_log_probs(head: Any, x: Fields, t: Fields) -> Sized:
    """Log-probabilities of the actions; NaN for an action out of range."""
    if "means" in x:
        (z, size), _ = standard_scores(x, t)
        log_prob = (-(z**2) / 2 - x["log_stds"] - math.log(2 * math.pi) / 2).sum(-1)
        size = (np.abs(z) * size + z**2 + np.abs(x["log_stds"]) + 1).sum(-1)
        return log_prob, np.where(np.isfinite(log_prob), size, 0)
    if x[""].ndim == 1:
        return x[""], np.zeros(len(x[""]))
    total, total_size = np.zeros(len(x[""])), np.zeros(len(x[""]))
    for logits, action in zip(groups(head, x[""]), np.atleast_2d(t["actions"].T), strict=True):
        in_range = (action >= 0) & (action < logits.shape[-1])
        index = np.where(in_range, action, 0).astype(int)[:, None]
        logarithms, size = (np.take_along_axis(a, index, -1)[:, 0] for a in log_softmax(logits))
        total, total_size = total + np.where(in_range, logarithms, np.nan), total_size + size
    return total, total_size


def policy_entropies(head: Any, x: Fields) -> Sized:
    """Entropies, summed over choices or dimensions."""
    if "means" in x:
        terms = x["log_stds"] + 0.5 + math.log(2 * math.pi) / 2
        return terms.sum(-1), (np.abs(x["log_stds"]) + 2).sum(-1)
    parts = [[array.sum(-1) for array in entropy_terms(logits)] for logits in groups(head, x[""])]
    return sum(entropy for entropy, _ in parts), sum(size for _, size in parts)


def divergences(d: Array, size: Array, largest: float) -> tuple[Sized, Sized]:
    """``exp(d) - 1 - d``, and its derivative ``exp(d) - 1``, for d of which `size` epsilons may be off."""
    e, beyond = exponential(d, largest), np.expm1(d)
    value = np.where(np.isinf(e), np.inf, beyond - d)
    value_size = np.abs(beyond) * size + np.abs(beyond) + np.abs(d) + 1e-6 * size**2
    return (value, value_size), (np.where(np.isinf(e), np.inf, beyond), e * size + np.abs(beyond))


@dataclass
class Ratios:
    """``d = log p(a) - log_probs``, ``r = exp(d)``, and the error of r, which may move it across a bound."""

    d: Array
    d_size: Array
    r: Array
    r_size: Array
    lower: float
    upper: float

    @classmethod
    def of(cls, head: Any, x: Fields, t: Fields, largest: float) -> Ratios:
        log_prob, size = action_log_probs(head, x, t)
        old = t["log_probs"]
        d = np.where((log_prob == -np.inf) & (old == -np.inf), -np.inf, log_prob - old)
        d_size = size + finite_size(log_prob) + finite_size(old)
        r = exponential(d, largest)
        bounds = (head.clip, head.clip) if isinstance(head.clip, int | float) else head.clip
        low, high = bounds or (np.inf, np.inf)
        return cls(d, d_size, r, r * (d_size + 2) + FLUSHED * np.isfinite(d), 1 - low, 1 + high)

    def is_near(self, bound: float) -> Array:
        return np.abs(self.r - bound) < 1e-5 * (self.r_size + abs(bound))

    def clamped(self) -> Sized:
        """The ratio, clamped to its bounds."""
        inside = (self.r >= self.lower) & (self.r <= self.upper)
        inside |= self.is_near(self.lower) | self.is_near(self.upper)
        result = np.where(np.isnan(self.r), np.nan, np.minimum(np.maximum(self.r, self.lower), self.upper))
        return result, np.where(inside, self.r_size, 0) + finite_size(result)


def surrogate(head: Any, x: Fields, t: Fields, largest: float) -> tuple[Sized, Sized]:
    """Losses without entropy and divergence, and their derivatives with respect to log p(a)."""
    advantage, (log_prob, size) = t["advantages"], action_log_probs(head, x, t)
    if head.surrogate == "log":
        loss, loss_size = -unless_zero(advantage, log_prob), np.abs(advantage) * (size + finite_size(log_prob))
        result = (loss, loss_size), (-advantage, np.abs(advantage))
        return _with_nan(result, has_nan(log_prob, advantage))
    ratios = Ratios.of(head, x, t, largest)
    clamped, clamped_size = ratios.clamped()
    if head.surrogate == "cispo":
        weight, weight_size = unless_zero(advantage, clamped), unless_zero(np.abs(advantage), clamped_size)
        loss_size = np.abs(weight) * (size + finite_size(log_prob)) + weight_size * finite_size(log_prob)
        result = (-unless_zero(weight, log_prob), loss_size), (-weight, weight_size)
        return _with_nan(result, has_nan(log_prob, advantage, t["log_probs"]))
    plain, limited = unless_zero(advantage, ratios.r), unless_zero(advantage, clamped)
    loss, follows = -np.minimum(plain, limited), plain <= limited
    unclear = np.where(advantage > 0, ratios.is_near(ratios.upper), ratios.is_near(ratios.lower))
    if head.dual_clip is not None:
        binds = (advantage < 0) & (loss > -head.dual_clip * advantage)
        loss, follows = np.where(binds, -head.dual_clip * advantage, loss), follows & ~binds
        unclear |= (advantage < 0) & ratios.is_near(head.dual_clip)
    moved = unless_zero(np.abs(advantage), ratios.r_size)
    loss_size = np.where(follows | unclear, moved, 0) + 2 * finite_size(loss)
    slope, slope_size = np.where(follows, -plain, 0), np.where(follows, moved, 0)
    slope_size = np.where(unclear & (advantage != 0), np.inf, slope_size)
    return _with_nan(((loss, loss_size), (slope, slope_size)), has_nan(log_prob, advantage, t["log_probs"]))


def _with_nan(results: tuple[Sized, Sized], where: Array) -> tuple[Sized, Sized]:
    first, second = ((np.where(where, np.nan, value), size) for value, size in results)
    return first, second


def policy_loss(head: Any, x: Fields, t: Fields, largest: float) -> FieldRows:
    (loss, size), (slope, slope_size) = surrogate(head, x, t, largest)
    log_prob, log_prob_size = action_log_probs(head, x, t)
    read = [x, {name: field for name, field in t.items() if name != "log_probs" or head.surrogate != "log"}]
    missing = has_nan(*[array for fields in read for array in fields.values()])
    if head.kl_weight:
        reference = t["reference_log_probs"]
        e = np.where((log_prob == -np.inf) & (reference == -np.inf), 0, reference - log_prob)
        e_size = log_prob_size + finite_size(log_prob) + finite_size(reference)
        (k3, k3_size), (by_e, by_e_size) = divergences(e, e_size, largest)
        loss, size = loss + head.kl_weight * k3, size + head.kl_weight * k3_size
        slope, slope_size = slope - head.kl_weight * by_e, slope_size + head.kl_weight * by_e_size
    if head.entropy_weight:
        entropy, entropy_size = policy_entropies(head, x)
        loss, size = loss - head.entropy_weight * entropy, size + abs(head.entropy_weight) * entropy_size
    loss = np.where(missing, np.nan, np.where(np.abs(loss) > largest, np.copysign(np.inf, loss), loss))
    # An illegal action has an infinite loss with "log" and "cispo", but a gradient.
    illegal = "" in x and x[""].ndim == 2 and head.surrogate != "ppo"
    known = np.isfinite(loss) | (illegal & (log_prob == -np.inf) & np.isfinite(slope) & ~missing)
    if "means" in x:
        known &= np.isfinite(standard_scores(x, t)[0][0]).all(-1)
    gradients, entering = {}, {}
    for field, (gradient, magnitude) in policy_gradients(head, x, t, slope, slope_size).items():
        is_missing, is_known = (rows.reshape(-1, *[1] * (gradient.ndim - 1)) for rows in (missing, known))
        gradients[field] = np.where(is_missing, np.nan, np.where(is_known, gradient, np.inf))
        entering[field] = np.where(is_known, magnitude, np.inf)
    return loss, size, gradients, entering


def policy_gradients(head: Any, x: Fields, t: Fields, slope: Array, slope_size: Array) -> dict[str, Sized]:
    """By field, the gradient of a loss whose derivative with respect to log p(a) is `slope`, with the entropy bonus."""
    if "" in x and x[""].ndim == 1:
        return {"": (slope, slope_size)}
    slope, slope_size, weight = slope[:, None], slope_size[:, None], head.entropy_weight

    def moved(derivative: Array, size: Array) -> Array:
        return unless_zero(slope_size, np.abs(derivative)) + unless_zero(np.abs(slope), size)

    if "means" in x:
        (z, z_size), (scale, scale_size) = standard_scores(x, t)
        by_mean, by_log_std = z * scale, z**2 - 1
        return {
            "means": (unless_zero(slope, by_mean), moved(by_mean, z_size * scale + np.abs(z) * scale_size)),
            "log_stds": (
                unless_zero(slope, by_log_std) - weight,
                moved(by_log_std, 2 * np.abs(z) * z_size + 1 + z**2) + abs(weight),
            ),
        }
    parts = []
    for logits, action in zip(groups(head, x[""]), np.atleast_2d(t["actions"].T), strict=True):
        logarithms, magnitude = log_softmax(logits)
        p, chosen_one = np.exp(logarithms), action[:, None] == np.arange(logits.shape[-1])
        derivative = chosen_one - p
        size = p * magnitude + chosen_one + FLUSHED
        gradient, entering = slope * derivative, moved(derivative, size)
        if weight:
            terms, term_sizes = entropy_terms(logits)
            entropy, total = terms.sum(-1, keepdims=True), term_sizes.sum(-1, keepdims=True)
            gradient = gradient + weight * product(p, logarithms + entropy)
            entering = entering + abs(weight) * (term_sizes + p * magnitude * (entropy + total))
        parts.append((gradient, entering))
    gradient, entering = (np.concatenate(arrays, -1) for arrays in zip(*parts, strict=True))
    return {"": (gradient, entering)}


def clipped_squared_error_loss(head: Any, x: Fields, t: Fields, largest: float) -> FieldRows:
    value, target = x[""], t["returns"]
    error, size = value - target, np.abs(value) + np.abs(target)
    loss, gradient, missing = error**2, 2 * error, has_nan(value, target)
    entering = 2 * size + np.abs(gradient)
    if head.clip is not None:
        old = t["values"]
        change, missing = value - old, missing | np.isnan(old)
        size = size + np.abs(old) + head.clip
        kept_error = old + np.clip(change, -head.clip, head.clip) - target
        is_second, is_clipped = kept_error**2 > loss, np.abs(change) > head.clip
        loss = np.where(is_second, kept_error**2, loss)
        gradient = np.where(is_second, np.where(is_clipped, 0, 2 * kept_error), gradient)
        unclear = np.abs(np.abs(error) - np.abs(kept_error)) <= 1e-5 * size
        unclear &= np.abs(change) >= head.clip - 1e-5 * size
        entering = np.where(unclear, np.inf, np.where(is_second & is_clipped, 0, 2 * size + np.abs(gradient)))
    loss = np.where(missing, np.nan, np.where(loss > largest, np.inf, loss))
    gradient = np.where(missing, np.nan, np.where(np.isfinite(loss), gradient, np.inf))
    return loss, 2 * np.sqrt(loss) * size + 4 * loss, {"": gradient}, {"": entering}


FIELD_LOSSES: dict[str, Any] = {
    "PolicyGradient": policy_loss,
    "GaussianPolicyGradient": policy_loss,
    "ClippedSquaredError": clipped_squared_error_loss,
}
POLICIES = ("PolicyGradient", "GaussianPolicyGradient")
LOGITS = ("TwoHot", "HLGauss", "SoftCrossEntropy", "CategoricalKL", "PolicyGradient")
LOSSES: dict[str, Any] = {
    "TwoHot": two_hot_loss,
    "HLGauss": hl_gauss_loss,
    "SoftCrossEntropy": soft_cross_entropy_loss,
    "MeanSquaredError": mean_squared_error_loss,
    "Huber": huber_loss,
    "BinaryCrossEntropy": binary_cross_entropy_loss,
    "NegativeCosine": negative_cosine_loss,
    "QuantileHuber": quantile_huber_loss,
    "CategoricalKL": categorical_kl_loss,
    "PerStepLoss": per_step_loss,
}


# ---- The multi-step loss --------------------------------------------------------------------------------------------


def loss_of(head: Any, x: Fields, t: Fields, largest: float) -> FieldRows:
    """A prediction or target without fields has the name ""."""
    kind = type(head).__name__
    if kind in FIELD_LOSSES:
        return FIELD_LOSSES[kind](head, x, t, largest)  # type: ignore[no-any-return]
    loss, size, gradient, entering = LOSSES[kind](head, x[""], t.get(""))
    gradient = np.where(np.isfinite(loss).reshape(-1, *[1] * (gradient.ndim - 1)), gradient, np.inf)
    return loss, size, {"": gradient}, {"": entering}


@dataclass
class MultiStep:
    """Output of a multi-step loss, and its allowed rounding."""

    loss: tuple[Array, Array]
    per_sample: tuple[Array, Array]
    per_step: dict[str, tuple[Array, Array]]
    expected: dict[str, tuple[Array, Array]]
    entropy: dict[str, tuple[Array, Array]]
    head_means: dict[str, tuple[Array, Array]]
    head_losses: dict[str, tuple[Array, Array]]
    num_nonfinite: int
    log_probs: dict[str, tuple[Array, Array]]
    approx_kl: dict[str, tuple[Array, Array]]
    clip_fraction: dict[str, tuple[Array, Array]]
    gradients: dict[tuple[str, str], tuple[Array, Array]]
    """`[B, T_h, ...]` by head and field, for the given gradient of the loss."""
    gradient_norms: dict[str, tuple[Array, Array]]
    """For a gradient of 1."""
    largest: dict[str, Array]
    """The largest magnitude of finite, unmasked logits."""
    known: dict[str, Array]
    """`[B, T_h]`: True where an entry has a gradient, as it has where its loss is finite."""


def multi_step(
    heads: dict[str, Any],
    x: dict[str, Fields],
    targets: dict[str, Fields],
    shared: dict[str, dict[str, Any]],
    wants_gradient: dict[str, tuple[str, ...]],
    masks: dict[str, Array],
    eps: dict[str, float],
    step_weights: dict[str, Array],
    step_gradient_scale: dict[str, Array],
    importance_weights: dict[str, Array],
    head_weights: dict[str, float],
    reduction: str,
    skip: bool,
    grad_output: Array,
    rounded: float,
    summed: float,
) -> MultiStep:
    """Predictions and targets `[B, T_h, ...]` by field, masks, step weights and scales `[B, T]`, importance weights
    `[B]`. The gradient of a `shared` field is the sum over all entries, each rounded to the type of the given
    `torch.finfo`. The norm counts the fields in `wants_gradient`.

    Allowed rounding: `rounded` epsilons of the magnitudes of a head's loss terms, `summed` epsilons of a sum's terms.
    """
    batch, coarsest = len(grad_output), max(eps.values())
    total, total_error = np.zeros(batch), np.zeros(batch)
    result = MultiStep(None, None, {}, {}, {}, {}, {}, 0, {}, {}, {}, {}, {}, {}, {})  # type: ignore[arg-type]
    weighted: dict[str, tuple[Array, Array]] = {}
    derivatives: dict[tuple[str, str], tuple[Array, Array]] = {}
    for name, head in heads.items():
        shape = next(iter(x[name].values())).shape
        rows, columns = (
            {field: array.reshape(-1, *array.shape[2:]) for field, array in fields.items()}
            for fields in (x[name], targets[name])
        )
        info = np.finfo(np.float32 if eps[name] > 1e-10 else np.float64)
        smallest = info.tiny  # below it precision is lost
        losses, size, gradients, all_entering = loss_of(head, rows, columns, float(info.max))
        weight = head.weight * head_weights[name]
        kept, weights = masks[name][:, head.first_step :], step_weights[name][:, head.first_step :]
        rounding = eps[name] + math.prod(shape[2:]) * 2.0**-53  # sums along a row are in float64
        error = chosen(kept, rounded * (rounding * (size + np.abs(losses)) + smallest).reshape(shape[:2]))
        losses = np.where(kept, losses.reshape(shape[:2]), 0)
        result.per_step[name] = losses, error
        factor = np.where(kept, weight * weights, 0)
        value = chosen(kept, losses * factor)
        weighted[name] = value, chosen(factor != 0, np.abs(factor) * error) + summed * coarsest * np.abs(value)
        total, total_error = total + value.sum(1), total_error + weighted[name][1].sum(1)
        count = max(kept.sum(), 1)
        mean_error = (error + summed * coarsest * np.abs(losses)).sum() / count
        result.head_means[name] = np.array(losses.sum() / count), np.array(mean_error)
        for field, gradient in gradients.items():
            entering = rounded * (rounding * (all_entering[field] + np.abs(gradient)) + smallest)
            derivatives[name, field] = tuple(array.reshape(x[name][field].shape) for array in (gradient, entering))
            result.known[name] = np.isfinite(derivatives[name, field][0]).all(tuple(range(2, len(shape)))) | ~kept
        has_distribution = type(head).__name__ != "PolicyGradient" or rows[""].ndim == 2
        if type(head).__name__ in LOGITS and has_distribution:
            sizes = np.abs(x[name][""][kept])
            result.largest[name] = sizes[np.isfinite(sizes)].max(initial=0)
        if type(head).__name__ in ("TwoHot", "HLGauss"):
            value, size = decoded(rows[""], head.support)
            error = rounded * (rounding * size + smallest)
            result.expected[name] = value.reshape(shape[:2]), error.reshape(shape[:2])
        if type(head).__name__ in ("SoftCrossEntropy", *POLICIES) and has_distribution:
            value, size = policy_entropies(head, rows)
            error = rounded * (rounding * size + smallest)
            result.entropy[name] = value.reshape(shape[:2]), error.reshape(shape[:2])
        if type(head).__name__ in POLICIES:
            value, size = action_log_probs(head, rows, columns)
            error = rounded * (rounding * size + smallest)
            result.log_probs[name] = value.reshape(shape[:2]), error.reshape(shape[:2])
        if type(head).__name__ in POLICIES and "log_probs" in columns:
            ratios, counted = Ratios.of(head, rows, columns, float(info.max)), kept.reshape(-1)
            (value, size), _ = divergences(ratios.d, ratios.d_size, float(info.max))
            error = rounded * (rounding * size + smallest) + summed * coarsest * np.abs(value)
            result.approx_kl[name] = (
                np.array(chosen(counted, value).sum() / count),
                np.array(chosen(counted, error).sum() / count),
            )
            outside = (ratios.r < ratios.lower) | (ratios.r > ratios.upper)
            unclear = ratios.is_near(ratios.lower) | ratios.is_near(ratios.upper)
            result.clip_fraction[name] = (
                np.array((outside & counted).sum() / count),
                np.array((unclear & counted).sum() / count + coarsest),
            )
    finite = np.isfinite(total)
    result.per_sample, result.num_nonfinite = (total, total_error), int((~finite).sum())
    taken = finite if skip else np.ones(batch, bool)
    loss, loss_error = np.zeros(batch), np.zeros(batch)
    for name, head in heads.items():
        kept = masks[name][:, head.first_step :]
        share = {"mean": 1 / max(batch, 1), "valid_mean": 1 / max(kept.sum(), 1)}.get(reduction, 1.0)
        value, error = weighted[name]
        samples = importance_weights[name]
        own = np.where(taken, samples * share * value.sum(1), 0)
        own_error = np.where(taken, np.abs(samples) * share * error.sum(1), 0)
        loss, loss_error = loss + own, loss_error + own_error
        result.head_losses[name] = own.sum(), (own_error + summed * coarsest * np.abs(own)).sum()
        rest = head.weight * head_weights[name] * (step_weights[name] * step_gradient_scale[name])[:, head.first_step :]
        for loss_gradient in (np.ones(batch), grad_output):
            factor = chosen(kept & taken[:, None], (loss_gradient * samples * share)[:, None] * rest)
            squares = np.zeros(2)
            for field in x[name]:
                gradient, entering = derivatives[name, field]
                by_row = factor.reshape(*factor.shape, *[1] * (gradient.ndim - 2))
                gradient = chosen(by_row != 0, by_row * gradient)
                entering = chosen(by_row != 0, np.abs(by_row) * entering) + 8 * eps[name] * np.abs(gradient)
                result.gradients[name, field] = gradient, entering
                if field in wants_gradient[name]:
                    own = (gradient, np.nan_to_num(entering, nan=np.inf, posinf=np.inf))
                    if field in shared[name]:
                        info, size = shared[name][field], np.abs(gradient)
                        entering = own[1] + (info.eps + summed * coarsest) * size
                        entering = np.where(size < info.max, entering, np.inf)  # an entry may overflow
                        own = gradient.sum((0, 1)), entering.sum((0, 1))
                    squares = squares + [(array**2).sum() for array in own]
            if name not in result.gradient_norms:
                norm, error = np.sqrt(squares)
                result.gradient_norms[name] = norm, error + 8 * coarsest * norm
    if reduction != "none":
        loss_error = (loss_error + summed * coarsest * np.abs(loss)).sum()
        loss = loss.sum()
    result.loss = np.asarray(loss), np.asarray(loss_error)
    return result


# ---- Many tensors ---------------------------------------------------------------------------------------------------


def statistics(tensor: Array, p: float) -> dict[str, float]:
    """Statistics of one tensor; complex numbers enter by their moduli."""
    size = np.abs(tensor).astype(np.longdouble)
    numbers = size if np.iscomplexobj(tensor) else tensor.astype(np.longdouble)
    finite = np.isfinite(size)
    return {
        "numel": size.size,
        "norm": float(norm_of(size[finite], p)),
        "abs_max": float(size[finite].max(initial=0)),
        "mean": float(numbers[finite].mean()) if finite.any() else 0.0,
        "mean_size": float(size[finite].mean()) if finite.any() else 0.0,
        "zeros": int((size == 0).sum()),
        "nans": int(np.isnan(size).sum()),
        "infs": int(np.isinf(size).sum()),
    }


def histogram(tensor: Array, edges: Array) -> Array:
    """Number of elements with edges[i] <= log2 |g| < edges[i + 1]."""
    size = np.abs(tensor)
    size = size[np.isfinite(size) & (size > 0)]
    return np.histogram(np.frexp(size)[1] - 1, bins=edges)[0]


def clipping_factor(tensors: list[Array], max_norm: float, p: float) -> tuple[float, float]:
    """The norm of all tensors as one vector, and the factor that scales them."""
    size = np.concatenate([np.abs(tensor).astype(np.longdouble).ravel() for tensor in [np.zeros(1), *tensors]])
    total = math.nan if np.isnan(size).any() else float(norm_of(size, p))
    return total, float(np.minimum(1.0, np.divide(max_norm, total + 1e-6)))  # NaN of inf / inf, as in PyTorch


def priorities(expected: Array, targets: Array, steps: str, alpha: float, eps: float) -> Array:
    """`[B]` priorities from values and targets `[B, T]`."""
    error = np.abs(expected - targets)
    chosen = {"first": lambda: error[:, 0], "mean": lambda: error.mean(1), "max": lambda: error.max(1)}[steps]()
    return (chosen + eps) ** alpha


def decoded_gradient(x: Array, support: Any) -> tuple[Array, Array]:
    """The derivative of `decoded`, `[N, S]`, and the magnitudes of its terms."""
    logarithms, magnitude = log_softmax(x)
    p, middles = np.exp(logarithms), centers(support)
    expectation = (p @ middles)[:, None]
    size = ((p * magnitude) @ np.abs(middles))[:, None] + np.abs(middles)
    gradient, entering = p * (middles - expectation), p * magnitude * size
    if support.space == "transformed":
        ends = max(abs(support.minimum), abs(support.maximum))
        slope = slope_back(expectation, support.transform, support.eps)
        # An error of the expectation changes the slope, at most by the expectation's relative error.
        entering = slope * (entering + p * ends) + np.abs(gradient) * slope * (1 + 2 * (size + ends))
        gradient = gradient * slope
    return gradient, entering


def standardize(x: Array, mask: Array | None, eps: float) -> tuple[Array, float]:
    """The standardized entries, and the largest difference of two of them, before eps is added."""
    counted = np.ones(x.shape, dtype=bool) if mask is None else mask
    result = np.zeros(x.shape)
    entries = x[counted].astype(np.longdouble)
    if not entries.size or (np.isfinite(entries[0]) and (entries == entries[0]).all()):
        return result, 0.0
    entries = entries - entries[0]  # exact enough, also if all entries are large
    centred = entries - entries.mean()
    std = np.sqrt((centred**2).mean())
    result[counted] = centred / (std + eps)
    return result, float(np.ptp(entries) / std)
