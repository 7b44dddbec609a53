"""The operators, losses and returns in plain PyTorch operations. Nothing here uses the compiled extension.

Tests compare the fused kernels with these functions. Calls that the fused kernels do not accept run them: calls in
transforms, with tensor subclasses, or on other devices.
"""

from .flow import clip_gradient_norm, clip_gradient_value, normalize_gradient, reverse_gradient, scale_gradient
from .formulas import entry_loss
from .losses import loss_of, multi_step_loss
from .returns import (
    generalized_advantages,
    lambda_returns,
    muzero_targets,
    n_step_returns,
    n_step_transitions,
    of_trajectories,
    of_window,
    retrace,
    vtrace,
)
from .supports import centers, decode, hl_gauss, project, raw_centers, two_hot
from .tensors import (
    HISTOGRAM_BINS,
    HISTOGRAM_FIRST_EDGE,
    Statistics,
    clip_units,
    clipping_of,
    histograms,
    histograms_from,
    l2_loss,
    norm_of,
    octaves_of,
    tensor_statistics,
    unit_factors,
    unit_norms,
    units_of,
)

__all__ = [
    "HISTOGRAM_BINS",
    "HISTOGRAM_FIRST_EDGE",
    "Statistics",
    "centers",
    "clip_gradient_norm",
    "clip_gradient_value",
    "clip_units",
    "clipping_of",
    "decode",
    "entry_loss",
    "generalized_advantages",
    "histograms",
    "histograms_from",
    "hl_gauss",
    "l2_loss",
    "lambda_returns",
    "loss_of",
    "multi_step_loss",
    "muzero_targets",
    "n_step_returns",
    "n_step_transitions",
    "norm_of",
    "normalize_gradient",
    "octaves_of",
    "of_trajectories",
    "of_window",
    "project",
    "raw_centers",
    "retrace",
    "reverse_gradient",
    "scale_gradient",
    "tensor_statistics",
    "two_hot",
    "unit_factors",
    "unit_norms",
    "units_of",
    "vtrace",
]
