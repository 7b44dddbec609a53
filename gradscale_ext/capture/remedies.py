"""What to write in place of what a graph would get wrong."""

from __future__ import annotations

import inspect

import torch

#: What to write in place of a call that waits for the device, by the name of the function or operator.
INSTEAD_OF_READS = {
    "__bool__": "torch.where or a product with a mask in place of the condition; a check that raises goes before or "
    "after the step; an early stop goes between captured steps, one for each epoch or batch",
    "masked_select": "torch.where(mask, x, 0) and sums over mask, so that the shape does not depend on values",
    "nonzero": "torch.where(mask, x, 0), or topk with a fixed number, so that the shape does not depend on values",
    "index": "torch.where(mask, x, 0), or a product with the mask, so that the shape does not depend on values",
    "index_put": "torch.where(mask, values, x), with values of the shape of x",
    "repeat_interleave": "repeat_interleave(..., output_size=n)",
    "one_hot": "one_hot(x, num_classes=n)",
    "bincount": "torch.zeros(n, device=x.device).scatter_add_(0, x, torch.ones_like(x, dtype=torch.float32))",
    "linalg_check_errors": "the function of torch.linalg that does not check, such as inv_ex, cholesky_ex, solve_ex",
    "normal": "mean + std * torch.randn_like(mean)",
    "print": "print after the step, what the step returns",
}
_LINEAR_ALGEBRA = "compute it outside of the step: on a GPU, too, the host reads whether the algorithm has converged"
#: The same for operators that read a value inside of C++, mostly in the backward pass.
INSIDE_OF_OPERATORS = {
    "prod": "torch.exp(torch.log(x).sum(dim)) for positive x, or a product of slices",
    "cumprod": "torch.exp(torch.log(x).cumsum(dim)) for positive x",
    "linalgdet": "torch.linalg.lu_factor_ex(x)[0].diagonal(dim1=-2, dim2=-1).abs().log().sum(-1) for its logarithm",
    "linalgslogdet": "torch.linalg.lu_factor_ex(x)[0].diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)",
    "histc": "torch.histc(x, bins, min, max) with numbers for min and max",
    "embeddingrenorm": "an Embedding without max_norm, and x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)",
    **dict.fromkeys(
        (
            "linalgsvd", "linalgsvdvals", "svd", "linalgeigh", "linalgeigvalsh", "linalgmatrixnorm", "linalgpinv",
            "linalglstsq", "linalgcond", "linalgmatrixrank",
        ),
        _LINEAR_ALGEBRA,
    ),
}  # fmt: skip
#: By the file of PyTorch that waits: why, and what to write.
WAITS_IN_LIBRARIES = {
    "amp/grad_scaler.py": (
        "GradScaler.step reads on the host whether gradients are finite",
        "an optimizer with fused=True, which skips such a step on the device",
    ),
    "distributions/": (
        "torch.distributions checks its arguments on the host",
        "torch.distributions.Distribution.set_default_validate_args(False), before the step",
    ),
    "optim/swa_utils.py": (
        "AveragedModel reads on the host how many models it has averaged",
        "call update_parameters() outside of the step",
    ),
}
#: What to write in place of seeds in a step.
RESEEDING_REMEDY = (
    "seed before the steps; for the same numbers at each step, draw them before and pass them as an argument; leave "
    "modules that draw, such as dropout, out of torch.utils.checkpoint"
)
#: What to write in place of a number that the step counts.
RETURN_REMEDY = "keep it in a tensor of the device that is part of the state, or change it outside of the step"
#: How users make a learning rate that schedules may change.
TENSOR_RATE = "lr=torch.tensor(0.001, device=device)"


def _accepts(optimizer: torch.optim.Optimizer, argument: str) -> bool:
    return argument in inspect.signature(type(optimizer).__init__).parameters


def step_count_remedy(optimizer: torch.optim.Optimizer) -> str:
    """How an optimizer keeps its numbers on the device."""
    kind = type(optimizer).__name__
    if _accepts(optimizer, "fused"):
        also = ", or on a GPU capturable=True" if _accepts(optimizer, "capturable") else ""
        return f"{kind}(..., fused=True), which reads nothing on the host{also}"
    if _accepts(optimizer, "capturable"):
        return f"on a GPU, {kind}(..., capturable=True), which reads nothing on the host"
    return "an optimizer that reads nothing on the host, such as AdamW(..., fused=True)"


def rate_remedy(optimizer: torch.optim.Optimizer | None = None) -> str:
    """How a schedule of the learning rate reaches the device."""
    kind = "the optimizer" if optimizer is None else type(optimizer).__name__
    fused = ", fused=True" if optimizer is None or _accepts(optimizer, "fused") else ""
    return f"{kind}(..., {TENSOR_RATE}{fused}): schedulers change a tensor with fill_()"


def option_remedy(optimizer: torch.optim.Optimizer | None, key: str) -> str:
    """What to write where a number in the parameter groups changes; empty if the program decides."""
    if key == "lr":
        return rate_remedy(optimizer)
    return "cycle_momentum=False for a scheduler that changes it" if key in ("betas", "momentum") else ""


def scheduler_remedy(optimizer: torch.optim.Optimizer | None = None) -> str:
    """Where a scheduler is called."""
    return f"call the scheduler's step() outside of the step, with {rate_remedy(optimizer)}"
