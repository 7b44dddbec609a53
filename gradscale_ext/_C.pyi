from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

torch_version: str
cuda_version: str

class Plan:
    def __init__(
        self,
        heads: dict[str, Any],
        table: Sequence[tuple[int, int, float, float, float, float, int, int]],
        keeps_memory: bool,
    ) -> None: ...

def cpu_capability() -> str: ...
def scale_gradient(x: Tensor, scale: float | Tensor) -> Tensor: ...
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
def decode(
    logits: Tensor, minimum: float, maximum: float, eps: float, num_bins: int, transform: int
) -> Tensor | None: ...
def l2_loss(parameters: Sequence[Tensor], weight: float) -> Tensor | None: ...
