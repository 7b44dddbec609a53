from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

torch_version: str
cuda_version: str

class Plan:
    def __init__(
        self,
        heads: dict[str, Any],
        numbers: Sequence[float],
        layouts: Sequence[Sequence[tuple[int, int, bool]]],
        keeps_memory: bool,
    ) -> None: ...

class Support:
    def __init__(self, numbers: Sequence[float]) -> None: ...

def cpu_capability() -> str: ...
def ordinary_context() -> bool: ...
def scale_gradient(x: Tensor, scale: float | Tensor) -> Tensor | None: ...
def reverse_gradient(x: Tensor, scale: float | Tensor) -> Tensor | None: ...
def clip_gradient_norm(
    x: Tensor,
    max_norm: float | Tensor,
    batch_dims: int,
    norm_type: float,
    process_group: str,
    process_group_size: int,
    counts: Tensor | None,
) -> Tensor | None: ...
def clip_gradient_value(x: Tensor, min: float | Tensor, max: float | Tensor) -> Tensor | None: ...
def normalize_gradient(x: Tensor, norm: float | Tensor, batch_dims: int, norm_type: float) -> Tensor | None: ...
def multi_step_loss(
    plan: Plan,
    predictions: Any,
    targets: Any,
    step_weights: Any,
    step_gradient_scale: Any,
    importance_weights: Any,
    mask: Any,
    reduction: str,
    nonfinite: str,
    batch_first: bool,
) -> tuple[Any, ...] | None: ...
def set_differentiable_gradients(function: Callable[..., list[Tensor | None]]) -> None: ...
def decode(support: Support, python_support: Any, logits: Tensor) -> Tensor | None: ...
def set_decode_gradient(function: Callable[..., Tensor]) -> None: ...
def l2_loss(parameters: Sequence[Tensor], weight: float) -> Tensor | None: ...
