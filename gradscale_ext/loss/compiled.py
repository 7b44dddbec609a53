"""The reference under torch.compile, for devices that have no kernels."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import reference
from .._native import _C
from ..call.entries import as_fields, by_step
from ..call.options import BY_HEAD, FieldEntries
from ..call.output import MultiStepLossOutput
from ..call.validate import Call, all_saveable
from ..heads import Head

_numbers = itertools.count()


def can_compile(call: Call) -> bool:
    """Return True for plain tensors outside torch.func transforms, forward mode and dispatch modes. A compiled function
    would ignore those contexts."""
    return (
        _C.ordinary_or_inference_context()
        and forward_ad._current_level < 0
        and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in call.tensors())
    )


def loss_by_compiler(
    call: Call, predictions: Mapping[str, FieldEntries], targets: Mapping[str, FieldEntries]
) -> MultiStepLossOutput:
    """Compute the loss of a checked call. `predictions` and `targets` are the arguments of the user, stacked or not."""
    given = [{name: as_fields(entries.get(name)) for name in call.heads} for entries in (predictions, targets)]
    given = all_saveable(given)
    left_out: dict[str, Any] = dict.fromkeys(BY_HEAD)  # `call.weights` has their tensors
    options = call.options._replace(**left_out)
    without_entries = replace(call, predictions={}, targets={}, options=options)
    tensors = [*_flat(*given, *vars(call.weights).values()), *options]
    function = _compiled(
        tuple((name, *_constants(head)) for name, head in call.heads.items()),
        tuple(map(_form, tensors)),
        torch.is_grad_enabled(),
    )
    out = function(without_entries, *given)
    if out.loss.requires_grad:
        # torch.compile raises for second derivatives only if a prediction is among the tensors that it saved.
        out.loss.register_hook(_refuse_second_derivatives)  # type: ignore[no-untyped-call]
    return out


def _refuse_second_derivatives(grad_output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "multi_step_loss: a compiled loss has no second derivative; impl='reference' computes it"
        )


def is_compiler_error(error: Exception) -> bool:
    """Return True if the compiler failed, False if the call is wrong."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))


def _flat(*mappings: Mapping[str, Any]) -> list[object]:
    """Names, lengths of lists, and tensors."""
    flat: list[object] = []
    for mapping in mappings:
        for name, entries in mapping.items():
            if isinstance(entries, dict):
                flat += [name, len(entries), *_flat(entries)]
            else:
                flat += [name, len(entries), *entries] if isinstance(entries, list | tuple) else [name, entries]
    return flat


def _constants(head: Head) -> tuple[object, ...]:
    """The attributes that a graph is specialised on: all except numbers of type float, which schedules may change."""
    return type(head), *[getattr(head, field.name) for field in fields(head) if field.type != "float"]


def _form(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.dim(), value.requires_grad
    return value


@functools.lru_cache(maxsize=256)
def _compiled(*key: object) -> Callable[..., MultiStepLossOutput]:
    """The compiled function for calls of one form. Each has its own code object, because torch.compile limits the
    number of graphs per code object."""
    code = _loss.__code__.replace(co_name=f"loss_{next(_numbers)}")
    return torch.compile(types.FunctionType(code, globals()))


def _loss(
    call: Call, predictions: dict[str, dict[str, Any]], targets: dict[str, dict[str, Any]]
) -> MultiStepLossOutput:
    entries = [
        {
            name: by_step(given[name], call.shared(name), call.options, call.batch, call.steps - head.first_step)
            for name, head in call.heads.items()
        }
        for given in (predictions, targets)
    ]
    return reference.loss_of(replace(call, predictions=entries[0], targets=entries[1]))
