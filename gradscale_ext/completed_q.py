"""The policy target of Gumbel MuZero."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from . import _context, _distributed, _numbers, _remedies, _tensors
from ._tensors import result_dtype


def completed_q_policy(
    prior_logits: torch.Tensor,
    q_values: torch.Tensor,
    visit_counts: torch.Tensor,
    value: torch.Tensor,
    *,
    visit_offset: float = 50.0,
    value_scale: float = 0.1,
    rescale: bool = True,
    mixed: bool = True,
    eps: float = 1e-8,
) -> torch.Tensor:
    """The policy target of Gumbel MuZero: the policy improved by completed Q-values (Danihelka et al. 2022).

    Equations 10 and 11. With p the prior policy, N the sum of the visit counts n, and sums over the visited actions, an
    action without a visit gets the mixed value of appendix D::

        mixed value  = (value + N (sum p q) / (sum p)) / (N + 1)
        completed_a  = q_a if n_a > 0 else mixed value
        rescaled_a   = (completed_a - smallest) / max(largest - smallest, eps)
        result       = softmax(prior_logits + (visit_offset + largest n) value_scale rescaled)

    Args:
        prior_logits: `[..., A]`, float64, float32, bfloat16 or float16. An action with -inf is illegal: its probability
            is exactly 0, and its Q and visits reach nothing, also if they are NaN.
        q_values: `[..., A]`, floats, from the perspective of the player to move. Q of actions without a visit is not
            read. If Q of a visited action is NaN or infinite, the row's result is NaN (with ``rescale=False``, -inf
            gives the action a probability of 0).
        visit_counts: `[..., A]`, integers or floats, of the children of the root.
        value: `[...]`, floats: the value that the network predicts for the root.
        visit_offset: `maxvisit_init` of mctx.
        value_scale: factor of the completed values.
        rescale: False: completed values are not rescaled to 0..1 by the smallest and the largest of the row.
        mixed: False: actions without a visit get `value`.
        eps: the smallest range that is rescaled to 0..1, at least 0.

    Returns:
        `[..., A]`, float64 if an input is float64, else float32: a target of `SoftCrossEntropy`. A row without a legal
        action is 0. All inputs are constants: there is no gradient.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, device or number is wrong, or a tensor requires grad while gradients are recorded.

    The result equals `qtransform_completed_by_mix_value` and `gumbel_muzero_policy` of mctx, if all actions are
    legal. mctx rescales over illegal actions too. Probabilities of visited actions count as the smallest normal number
    where they are smaller, as in mctx.

    Related names: `qtransform_completed_by_mix_value` (mctx), improved policy, Gumbel MuZero targets.

    >>> prior_logits, q_values = torch.zeros(3), torch.tensor([1.0, 0.0, 9.0])
    >>> completed_q_policy(
    ...     prior_logits,
    ...     q_values,
    ...     torch.tensor([2, 1, 0]),
    ...     torch.tensor(0.5),
    ...     visit_offset=8.0,
    ... )
    tensor([0.5065, 0.1863, 0.3072])
    """
    given = {"prior_logits": prior_logits, "q_values": q_values, "visit_counts": visit_counts, "value": value}
    _check(given)
    visit_offset, value_scale, eps = (
        _number(*named) for named in (("visit_offset", visit_offset), ("value_scale", value_scale), ("eps", eps))
    )
    if eps < 0:
        raise ValueError(f"completed_q_policy: eps must be at least 0, but it is {eps}")
    _numbers.check_flag("completed_q_policy: rescale", rescale)
    _numbers.check_flag("completed_q_policy: mixed", mixed)
    if _distributed.mesh_of(list(given.values())) is not None:
        options: dict[str, Any] = {"rescale": rescale, "mixed": mixed, "eps": eps}
        options |= {"visit_offset": visit_offset, "value_scale": value_scale}
        return _distributed.by_whole(functools.partial(completed_q_policy, **options), *given.values())  # type: ignore[no-any-return]
    dtype = result_dtype(*given.values())
    if prior_logits.numel() == 0:
        return prior_logits.to(dtype, copy=True)
    logits, q, counts, value = (tensor.detach().to(dtype) for tensor in given.values())
    legal = logits != -math.inf
    visited = legal & (counts > 0)
    counts = torch.where(visited, counts, 0)
    if mixed:
        value = _mixed_value(logits, torch.where(visited, q, 0), counts, visited, value)
    completed = torch.where(visited, q, value[..., None])
    if rescale:
        completed = _rescaled(completed, legal, _operand(eps, completed))
    scale = (_operand(visit_offset, counts) + counts.amax(-1, keepdim=True)) * _operand(value_scale, counts)
    improved = torch.where(legal, logits + scale * completed, -math.inf).softmax(-1)
    return torch.where(legal, improved, 0)


def _mixed_value(
    logits: torch.Tensor, q: torch.Tensor, counts: torch.Tensor, visited: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The mean of the network's value and of the visited actions' Q, `[...]`; `q` and `counts` are 0 elsewhere."""
    prior = torch.where(visited, logits.softmax(-1).clamp(min=torch.finfo(logits.dtype).tiny), 0)
    total = prior.sum(-1, keepdim=True)
    mean = (prior / torch.where(total > 0, total, 1) * q).sum(-1)
    visits = counts.sum(-1)
    return value / (visits + 1) + mean * (visits / (visits + 1))  # visits * mean may overflow


def _rescaled(completed: torch.Tensor, legal: torch.Tensor, eps: float | torch.Tensor) -> torch.Tensor:
    """The values as shares of the range of the legal ones. In a range of 0, they are 0."""
    smallest = torch.where(legal, completed, math.inf).amin(-1, keepdim=True)
    largest = torch.where(legal, completed, -math.inf).amax(-1, keepdim=True)
    # Halves, which are exact, because the difference of two finite values may overflow.
    half = (largest / 2 - smallest / 2).clamp(min=eps / 2)
    return (completed / 2 - smallest / 2) / torch.where(half == 0, 1, half)


def _operand(number: float, like: torch.Tensor) -> float | torch.Tensor:
    """A number in the dtype of a tensor, which does not recompile if it changes."""
    return number if _context.is_eager() else _context.as_tensor(number, like.device, like.dtype)


def _number(name: str, value: Any) -> float:
    number = _numbers.real(f"completed_q_policy: {name}", value)
    if not -math.inf < number < math.inf:
        raise ValueError(f"completed_q_policy: {name} must be finite, but it is {number}")
    return number


def _check(given: dict[str, Any]) -> None:
    """Check types, devices and shapes of the tensors."""
    function, counts = "completed_q_policy", given["visit_counts"]
    for name, tensor in given.items():
        if name != "visit_counts":
            _tensors.check_floats(function, name, tensor)
    _tensors.check_tensor(function, "visit_counts", counts, "a tensor of integers or floats")
    is_count = counts.dtype != torch.bool and not counts.is_complex()
    remedy = ".real" if counts.is_complex() else ".long()"
    _tensors.check_dtype(function, "visit_counts", counts, is_count, "a tensor of integers or floats", remedy)
    logits = given["prior_logits"]
    if logits.dim() == 0:
        raise ValueError(f"{function}: prior_logits must have shape [..., A], but they have no dimensions")
    for name, tensor in given.items():
        _tensors.check_device(function, name, tensor, "prior_logits", logits.device)
        wanted = logits.shape[:-1] if name == "value" else logits.shape
        if tensor.shape != wanted:
            raise ValueError(
                f"{function}: {name} must have shape {list(wanted)}, but its shape is {list(tensor.shape)}"
                f"{_remedies.remedy_for_shape(name, tensor.shape, [wanted])}"
            )
        _context.check_constant(function, name, tensor)
