"""The L2 loss of many tensors in one pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import _context, _numbers, reference
from .._distributed import is_distributed
from .._native import _C, Refusal, seen_by_modes, warn_of_reference
from .passes import listed

_l2_loss = seen_by_modes(_C.l2_loss)


def l2_loss(parameters: Iterable[torch.Tensor] | torch.nn.Module, weight: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``weight * sum over tensors of |p|^2 / 2``: the weight decay term of the MuZero pseudocode, in one pass.

    Args:
        parameters: floating tensors of any shapes, or a module, whose parameters are used. An iterator without
            elements, which has probably been used up before, causes a warning.
        weight: factor, for instance 1e-4. A real tensor without dimensions that is on a device or requires grad is not
            read by the host, and gets a gradient; PyTorch's own operations then compute the loss.

    Returns:
        Scalar, float32 (float64 when a tensor is float64); the gradient of p is ``weight * p``. No tensors: 0. Sharded
        tensors (DTensor) give a plain scalar too, the same on every rank.

    Raises:
        TypeError: an element is not a floating tensor, or `weight` is not a real number.
        ValueError: `weight` is a tensor with dimensions.

    Related names: weight decay, L2 regularization. `l2_loss` of rlax and optax is another function: a squared error.

    >>> p = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> loss = l2_loss([p], weight=0.1)
    >>> loss.backward()
    >>> loss.item(), p.grad.tolist()
    (1.25, [0.30000001192092896, 0.4000000059604645])
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = list(parameters.parameters())
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    tensors = listed("l2_loss", "parameters", parameters)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else f"of type {type(tensor).__name__}"
            is_named = isinstance(tensor, tuple) and len(tensor) == 2 and isinstance(tensor[1], torch.Tensor)
            raise TypeError(
                f"l2_loss: parameters[{index}] must be a floating tensor, but it is {kind}"
                + ("; write [parameter for _, parameter in parameters]" if is_named else "")
            )
        if tensor.is_nested:
            raise TypeError(f"l2_loss: parameters[{index}] is a nested tensor; write parameters[{index}].values()")
    if isinstance(weight, torch.Tensor):
        _numbers.check_scalar("l2_loss: weight", weight)
    else:
        weight = _numbers.real("l2_loss: weight", weight, "a real number or a tensor without dimensions")
    if _context.is_eager():
        loss = _l2_loss(tensors, weight)
        if not isinstance(loss, Refusal):
            return loss
        if not any(map(is_distributed, tensors)):
            warn_of_reference("l2_loss", loss)
    elif tensors and not isinstance(weight, torch.Tensor) and _context.varies(weight):
        weight = _context.as_tensor(weight, tensors[0].device)
    return reference.l2_loss(tensors, weight)
