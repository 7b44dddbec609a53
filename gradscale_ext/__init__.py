"""Gradient scaling and fused multi-step losses for MuZero-family agents, as a C++/CUDA extension for PyTorch."""

from . import reference
from .flow import ReverseGradient, ScaleGradient, reverse_gradient, scale_gradient
from .heads import MeanSquaredError, SoftCrossEntropy, TwoHot
from .loss import MultiStepLoss, multi_step_loss, priorities
from .output import MultiStepLossOutput
from .support import Support
from .tensors import l2_loss
from .transforms import signed_hyperbolic, signed_parabolic, symexp, symlog
from .unroll import unroll

__version__ = "0.1.0"

__all__ = [
    "MeanSquaredError",
    "MultiStepLoss",
    "MultiStepLossOutput",
    "ReverseGradient",
    "ScaleGradient",
    "SoftCrossEntropy",
    "Support",
    "TwoHot",
    "l2_loss",
    "multi_step_loss",
    "priorities",
    "reference",
    "reverse_gradient",
    "scale_gradient",
    "signed_hyperbolic",
    "signed_parabolic",
    "symexp",
    "symlog",
    "unroll",
]
