"""Gradient scaling and fused multi-step losses for MuZero-family agents, as a C++/CUDA extension for PyTorch."""

__version__ = "0.3.0"  # defined first: the report on an extension that cannot be loaded needs it

from . import reference
from ._trajectories import GeneralizedAdvantages, MuZeroTargets, NStepTransitions, VTrace
from .call.output import MultiStepLossOutput
from .capture.diagnosis import diagnose_capture
from .capture.report import CaptureDiagnosis, CaptureFinding
from .capture.step import CapturedStep
from .completed_q import completed_q_policy
from .diagnosis.diagnosis import diagnose_gradients
from .diagnosis.report import Finding, GradientDiagnosis
from .diagnosis.tracer import GradientTracer
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
    CategoricalKL,
    Head,
    HLGauss,
    Huber,
    MeanSquaredError,
    NegativeCosine,
    PerStepLoss,
    QuantileHuber,
    SoftCrossEntropy,
    TwoHot,
)
from .loss.multi_step import MultiStepLoss, empty_cache, multi_step_loss
from .loss.priorities import priorities
from .loss.reduce import reduce_multi_step
from .monitor.monitor import GradientMonitor
from .normalization import ReturnScale, standardize
from .policy_heads import ClippedSquaredError, GaussianPolicyGradient, PolicyGradient
from .returns import (
    generalized_advantages,
    lambda_returns,
    muzero_targets,
    n_step_returns,
    n_step_transitions,
    retrace,
    vtrace,
)
from .statistics.gradients import GradientStatistics, clip_gradients_, gradient_statistics
from .statistics.l2 import l2_loss
from .support import Support
from .transforms import signed_hyperbolic, signed_parabolic, symexp, symlog
from .unroll import unroll

__all__ = [
    "BinaryCrossEntropy",
    "CaptureDiagnosis",
    "CaptureFinding",
    "CapturedStep",
    "CategoricalKL",
    "ClipGradientNorm",
    "ClipGradientValue",
    "ClippedSquaredError",
    "Finding",
    "GaussianPolicyGradient",
    "GeneralizedAdvantages",
    "GradientDiagnosis",
    "GradientMonitor",
    "GradientStatistics",
    "GradientTracer",
    "HLGauss",
    "Head",
    "Huber",
    "MeanSquaredError",
    "MuZeroTargets",
    "MultiStepLoss",
    "MultiStepLossOutput",
    "NStepTransitions",
    "NegativeCosine",
    "NormalizeGradient",
    "PerStepLoss",
    "PolicyGradient",
    "QuantileHuber",
    "ReturnScale",
    "ReverseGradient",
    "ScaleGradient",
    "SoftCrossEntropy",
    "Support",
    "TwoHot",
    "VTrace",
    "clip_gradient_norm",
    "clip_gradient_value",
    "clip_gradients_",
    "completed_q_policy",
    "diagnose_capture",
    "diagnose_gradients",
    "empty_cache",
    "generalized_advantages",
    "gradient_statistics",
    "l2_loss",
    "lambda_returns",
    "multi_step_loss",
    "muzero_targets",
    "n_step_returns",
    "n_step_transitions",
    "normalize_gradient",
    "priorities",
    "reduce_multi_step",
    "reference",
    "retrace",
    "reverse_gradient",
    "scale_gradient",
    "signed_hyperbolic",
    "signed_parabolic",
    "standardize",
    "symexp",
    "symlog",
    "unroll",
    "vtrace",
]
