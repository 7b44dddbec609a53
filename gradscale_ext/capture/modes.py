"""The modes of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Modes(NamedTuple):
    """The modes that decide what a step computes."""

    grad_mode: bool
    inference_mode: bool
    autocast: bool
    """On the device of the state, as the next one."""
    autocast_dtype: torch.dtype
    deterministic_mode: int
    """0, 1 (warn) or 2 (raise)."""
    default_dtype: torch.dtype
    matmul_precision: str
    convolution_precision: str
    default_devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, device: torch.device) -> Modes:
        """The modes as they are."""
        kind = device.type
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.get_deterministic_debug_mode(),
            torch.get_default_dtype(),
            torch._C._get_fp32_precision_getter("cuda", "matmul"),
            torch._C._get_fp32_precision_getter("cuda", "conv"),
            default_devices(),
        )

    def changes(self, now: Modes) -> Iterator[tuple[str, Any, Any]]:
        """Names of the modes that are other ones now, with both values."""
        for name, before, after in zip(self._fields, self, now, strict=True):
            if before != after:
                yield f"PyTorch's {name.replace('_', ' ')}", before, after

    def restore(self, device: torch.device) -> None:
        """Set the modes that a function can have left changed."""
        torch.set_grad_enabled(self.grad_mode)
        torch.set_autocast_enabled(device.type, self.autocast)
        torch.set_autocast_dtype(device.type, self.autocast_dtype)
        torch.set_deterministic_debug_mode(self.deterministic_mode)
        torch.set_default_dtype(self.default_dtype)
        torch._C._set_fp32_precision_setter("cuda", "matmul", self.matmul_precision)
        torch._C._set_fp32_precision_setter("cuda", "conv", self.convolution_precision)
        if default_devices() != self.default_devices:
            torch.set_default_device(self.default_devices[-1] if self.default_devices else None)


def _function_modes() -> list[Any]:
    """The active function modes."""
    return [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]


def default_devices() -> tuple[torch.device, ...]:
    """The devices of torch.set_default_device, and of devices as context managers."""
    return tuple([mode.device for mode in _function_modes() if isinstance(mode, torch.utils._device.DeviceContext)])


def watching_mode() -> str:
    """The name of an active mode that sees PyTorch's calls, such as `GradientTracer`; empty if there is none."""
    for mode in _function_modes():
        if not isinstance(mode, torch.utils._device.DeviceContext):
            return type(mode).__name__
    if torch._C._len_torch_dispatch_stack():
        return type(torch._C._get_dispatch_stack_at(0)).__name__
    if torch._C._autograd._top_saved_tensors_default_hooks(True):
        return "torch.autograd.graph.saved_tensors_hooks"
    return "torch.autograd.detect_anomaly" if torch.is_anomaly_enabled() else ""
