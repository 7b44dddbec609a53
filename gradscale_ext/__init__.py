"""Gradient scaling and fused multi-step losses for MuZero-family agents, as a C++/CUDA extension for PyTorch."""

__version__ = "0.2.0"  # first, for the report on an extension that cannot be loaded

from . import reference
from .flow import (
    ClipGradientNorm,
    ClipGradientValue,
    NormalizeGradient,
    ReverseGradient,
    ScaleGradient,
    clip_gradient_norm,
    clip_gradient_value,
    normalize_gradient,
    reverse_gradient,
    scale_gradient,
)
from .heads import (
    BinaryCrossEntropy,
    Head,
    HLGauss,
    MeanSquaredError,
    NegativeCosine,
    PerStepLoss,
    SoftCrossEntropy,
    TwoHot,
)
from .loss import MultiStepLoss, multi_step_loss, priorities, reduce_multi_step
from .monitor.diagnosis import diagnose_gradients
from .monitor.monitor import GradientMonitor
from .monitor.report import Finding, GradientDiagnosis
from .monitor.statistics import GradientStatistics, clip_gradients_, gradient_statistics
from .monitor.tracer import GradientTracer
from .output import MultiStepLossOutput
from .support import Support
from .tensors import l2_loss
from .transforms import signed_hyperbolic, signed_parabolic, symexp, symlog
from .unroll import unroll

__all__ = [
    "BinaryCrossEntropy",
    "ClipGradientNorm",
    "ClipGradientValue",
    "Finding",
    "GradientDiagnosis",
    "GradientMonitor",
    "GradientStatistics",
    "GradientTracer",
    "HLGauss",
    "Head",
    "MeanSquaredError",
    "MultiStepLoss",
    "MultiStepLossOutput",
    "NegativeCosine",
    "NormalizeGradient",
    "PerStepLoss",
    "ReverseGradient",
    "ScaleGradient",
    "SoftCrossEntropy",
    "Support",
    "TwoHot",
    "clip_gradient_norm",
    "clip_gradient_value",
    "clip_gradients_",
    "diagnose_gradients",
    "gradient_statistics",
    "l2_loss",
    "multi_step_loss",
    "normalize_gradient",
    "priorities",
    "reduce_multi_step",
    "reference",
    "reverse_gradient",
    "scale_gradient",
    "signed_hyperbolic",
    "signed_parabolic",
    "symexp",
    "symlog",
    "unroll",
]
