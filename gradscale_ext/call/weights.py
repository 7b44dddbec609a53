"""The rules for the weights and masks of a multi-step loss, which may differ by head."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _context, _remedies
from .._numbers import as_float
from ..heads import Head
from .checks import as_dict, check_choice, check_device, check_dtype, check_kind, is_mapping, is_sequence, written
from .options import Options, maybe_transposed, unroll_scale


@dataclass(frozen=True)
class Weights:
    """Weights and masks by head, checked. A head without one is absent."""

    masks: dict[str, torch.Tensor]
    """Bool `[B, T]`."""
    step_weights: dict[str, torch.Tensor]
    """`[T]` or `[B, T]`."""
    step_gradient_scale: dict[str, torch.Tensor]
    """`[T]` or `[B, T]`."""
    importance_weights: dict[str, torch.Tensor]
    """`[B]`."""
    head_weights: dict[str, torch.Tensor]
    """Scalars, of the type of the loss."""
    num_entries: dict[str, torch.Tensor]
    """Scalars, of the widest type."""


@dataclass(frozen=True)
class Rules:
    """The heads, sizes, device and dtype that the weights of a call must match."""

    heads: Mapping[str, Head]
    batch: int
    steps: int
    batch_first: bool
    device: torch.device
    dtype: torch.dtype
    """Type of the loss."""
    has_steps: bool = True
    """False: a mask has no dimension of steps."""

    def check(self, options: Options) -> Weights:
        """Check the options, and return them by head."""
        weights = Weights(
            masks=self._by_head("mask", options.mask, self._mask),
            step_weights=self._by_head("step_weights", options.step_weights, self._step_numbers),
            step_gradient_scale=self._by_head("step_gradient_scale", options.step_gradient_scale, self._gradient_scale),
            importance_weights=self.check_importance_weights(options.importance_weights),
            head_weights=self._mapping("head_weights", options.head_weights, self._head_weight),
            num_entries=self._num_entries(options),
        )
        self._check_signs(options.step_weights)
        return weights

    def _check_signs(self, step_weights: Any) -> None:
        """Refuse negative numbers at steps that a head reads. The elements of tensors are read with check=True only."""
        for name, weights in step_weights.items() if is_mapping(step_weights) else [(None, step_weights)]:
            readers = self.heads.values() if name is None else [self.heads[name]]
            first = min(head.first_step for head in readers)
            for step, weight in enumerate(weights if is_sequence(weights) else ()):
                if step >= first and float(weight) < 0:
                    label = "step_weights" if name is None else f"the step_weights of head '{name}'"
                    raise ValueError(
                        f"multi_step_loss: {label} must be at least 0, but step {step} has {float(weight):.6g}; a "
                        "negative step_gradient_scale reverses gradients"
                    )

    def check_importance_weights(self, given: Any) -> dict[str, torch.Tensor]:
        """The importance weights by head."""
        return self._by_head("importance_weights", given, self._importance_weights)

    def _by_head(
        self, argument: str, given: Any, check: Callable[[str, str, Any], torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        """Apply `check(argument, label, value)` to one value for all heads, or to each value of a mapping."""
        if given is None:
            return {}
        if not is_mapping(given):
            common = check(argument, argument, given)
            return {} if common is None else dict.fromkeys(self.heads, common)
        by_head = {}
        for name, value in as_dict(argument, given).items():
            if name not in self.heads:
                raise ValueError(
                    f"multi_step_loss: {argument} names {name!r}, which is not a head; the heads are "
                    f"{', '.join(self.heads)}"
                )
            checked = check(argument, f"the {argument} of head '{name}'", value)
            if checked is not None:
                by_head[name] = checked
        return by_head

    def _mask(self, argument: str, label: str, mask: Any) -> torch.Tensor | None:
        if mask is None:  # of one head
            return None
        if not isinstance(mask, torch.Tensor):
            raise TypeError(
                f"multi_step_loss: {label} must be a bool tensor, but it is of type {type(mask).__name__}"
                f"{_remedies.remedy_for_type(mask, argument, {'': 1 if self.batch_first else 0})}"
            )
        check_kind(label, mask)
        if mask.dtype != torch.bool:
            raise TypeError(
                f"multi_step_loss: {label} must be a bool tensor, but it is {mask.dtype}; write mask.bool()"
            )
        if self.has_steps:
            self._check_step_shape(argument, label, mask, or_steps=False)
        elif tuple(mask.shape) != (self.batch,):
            raise ValueError(
                f"multi_step_loss: {label} must have shape [B] = [{self.batch}] with steps=False, but it has "
                f"{written(mask.shape)}{_remedies.remedy_for_shape(argument, mask.shape, [(self.batch,)])}"
            )
        check_device(label, mask, self.device)
        return maybe_transposed(mask, self.batch_first) if self.has_steps else mask.unsqueeze(1)

    def _gradient_scale(self, argument: str, label: str, given: Any) -> torch.Tensor | None:
        if isinstance(given, str):
            check_choice(label, given, ("unroll",))
            given = unroll_scale(self.steps)
        return self._step_numbers(argument, label, given)

    def _step_numbers(self, argument: str, label: str, given: Any) -> torch.Tensor | None:
        """`[T]` or `[B, T]`."""
        if given is None:
            return None
        if isinstance(given, torch.Tensor):
            self._check_weights(argument, label, given)
            self._check_step_shape(argument, label, given, or_steps=True)
            return maybe_transposed(given, self.batch_first).to(self.dtype)
        if not is_sequence(given):
            raise TypeError(
                f"multi_step_loss: {label} must be a tensor or a sequence of {self.steps} numbers, "
                f"but it is of type {type(given).__name__}"
                + (
                    f"; write [{argument}] * {self.steps}"
                    if isinstance(given, int | float)
                    else _remedies.remedy_for_type(given, argument)
                )
            )
        if (count := _length(given)) != self.steps:
            raise ValueError(
                f"multi_step_loss: {label} must have {self.steps} numbers, one per step, but it has {count}"
                + ("; T includes the root" if count == self.steps - 1 else "")
            )
        if any(isinstance(number, torch.Tensor) and number.device.type != "cpu" for number in given):
            raise TypeError(
                f"multi_step_loss: {label} is a sequence of tensors that are not on the CPU, and reading them would "
                f"wait for their device{self._remedy_for_tensors(argument, given)}"
            )
        for number in given:
            if isinstance(number, torch.Tensor):
                _check_constant(label, number)
            if isinstance(number, str | bytes):  # float() would read it
                raise TypeError(
                    f"multi_step_loss: {label} must be a tensor or a sequence of numbers, but it holds {number!r}"
                )
        try:
            values = [float(number) for number in given]
        except OverflowError:
            raise ValueError(
                f"multi_step_loss: {label} must be in the range of a float, but one is too large"
            ) from None
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"multi_step_loss: {label} must be a tensor or a sequence of numbers: {error}"
                f"{self._remedy_for_tensors(argument, given)}"
            ) from None
        if not _context.is_eager() and any([_context.varies(value) for value in values]):
            return torch.stack([_context.as_tensor(value, self.device, self.dtype) for value in values])
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def _remedy_for_tensors(self, argument: str, given: Sequence[Any]) -> str:
        """Remedy for a list with a tensor for each step."""
        if not all(isinstance(number, torch.Tensor) for number in given):
            return ""
        return f"; write torch.stack({argument}{', 1' if self.batch_first and given[0].dim() else ''})"

    def _importance_weights(self, argument: str, label: str, weights: Any) -> torch.Tensor | None:
        if weights is None:
            return None
        self._check_weights(argument, label, weights)
        if tuple(weights.shape) != (self.batch,):
            raise ValueError(
                f"multi_step_loss: {label} must have shape [B] = [{self.batch}], but it has {written(weights.shape)}"
                + (
                    _remedies.remedy_for_shape(argument, weights.shape, [(self.batch,)])
                    or ("; weights of steps go to step_weights" if weights.dim() == 2 else "")
                )
            )
        return weights  # type: ignore[no-any-return]

    def _mapping(
        self, argument: str, given: Any, check: Callable[[str, str, Any], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if given is not None:
            as_dict(argument, given)  # must be a mapping
        return self._by_head(argument, given, check)

    def _head_weight(self, argument: str, label: str, weight: Any) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            check_kind(label, weight)
            check_dtype(label, weight, "")
        return self._scalar(label, weight, self.dtype)

    def _num_entries(self, options: Options) -> dict[str, torch.Tensor]:
        if options.num_entries is not None and options.reduction not in ("mean", "valid_mean"):
            raise ValueError(
                "multi_step_loss: num_entries needs reduction 'mean' or 'valid_mean', but the reduction is "
                f"{options.reduction!r}; leave out num_entries"
            )
        return self._mapping("num_entries", options.num_entries, self._count)

    def _count(self, argument: str, label: str, count: Any) -> torch.Tensor:
        """A number of entries. A tensor of 0 counts as 1, as the number of a head without an unmasked entry does."""
        if isinstance(count, torch.Tensor):
            check_kind(label, count)
            if count.dtype == torch.bool or count.is_complex() or count.dtype in (torch.float16, torch.bfloat16):
                raise TypeError(
                    f"multi_step_loss: {label} must be an integer, float64 or float32, but it is {count.dtype}; count "
                    "with mask.sum(), which is int64"
                )
            _check_constant(label, count)
        return self._scalar(label, count, _context.widest(self.device), is_divisor=True)

    def _scalar(self, label: str, value: Any, dtype: torch.dtype, is_divisor: bool = False) -> torch.Tensor:
        """A number, or a tensor without dimensions."""
        if isinstance(value, torch.Tensor):
            if value.dim() > 0:
                raise ValueError(
                    f"multi_step_loss: {label} must be a number or a tensor without dimensions, but it has shape "
                    f"{written(value.shape)}" + ("; write .reshape(())" if value.numel() == 1 else "")
                )
            check_device(label, value, self.device)
            return value.to(dtype)
        if isinstance(value, bool) or not isinstance(value, int | float | numbers.Real):
            raise TypeError(
                f"multi_step_loss: {label} must be a number or a tensor without dimensions, but it is of type "
                f"{type(value).__name__}"
            )
        number = as_float(f"multi_step_loss: {label}", value)
        if not 0 <= number < math.inf or (is_divisor and number == 0):
            raise ValueError(
                f"multi_step_loss: {label} must be finite and {'above' if is_divisor else 'at least'} 0, but it is "
                f"{value!r}" + ("; write max(count, 1) if a batch may have no entries" if number == 0 else "")
            )
        if not isinstance(value, int | float):
            value = float(value)  # other numbers, such as fractions, cannot be multiplied by tensors
        return _context.as_tensor(value, self.device, dtype)

    def _check_weights(self, argument: str, label: str, weights: Any) -> None:
        if not isinstance(weights, torch.Tensor):
            raise TypeError(
                f"multi_step_loss: {label} must be a tensor, but it is of type {type(weights).__name__}"
                f"{_remedies.remedy_for_type(weights, argument)}"
            )
        check_kind(label, weights)
        check_dtype(label, weights, "")
        check_device(label, weights, self.device)
        _check_constant(label, weights)

    def _check_step_shape(self, argument: str, label: str, tensor: torch.Tensor, or_steps: bool) -> None:
        """Refuse shapes other than `[B, T]` in the caller's order, or `[T]` if `or_steps`."""
        wanted = (self.batch, self.steps) if self.batch_first else (self.steps, self.batch)
        shape = tuple(tensor.shape)
        if shape == wanted or (or_steps and shape == (self.steps,)):
            return
        forms = f"[T] = [{self.steps}] or " if or_steps else ""
        raise ValueError(
            f"multi_step_loss: {label} must have shape {forms}{'[B, T]' if self.batch_first else '[T, B]'} = "
            f"{written(wanted)}, but it has {written(shape)}"
            + _remedies.remedy_for_step_shape(argument, shape, self.batch, self.steps, self.batch_first)
        )


def _check_constant(label: str, weights: torch.Tensor) -> None:
    if why := _context.why_not_constant(weights):
        raise ValueError(f"multi_step_loss: {label} {why[0]}, but weights get no gradient; {why[1]}")


def _length(given: Sequence[Any]) -> int | str:
    try:
        return len(given)
    except OverflowError:  # a range
        return "too many"
