"""Numbers that a multi-step loss needs from all ranks whose batches form one batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from .. import _context, _numbers
from .._ranks import group_of, refuse_vmap, waiting
from .checks import is_mapping
from .validate import Call


def for_all_ranks(call: Call, process_group: Any, normalize_importance_weights: bool) -> Call:
    """Add the counts of "mean" and "valid_mean" over all ranks, and divide importance weights by their largest.

    A rank's loss is divided by the number of all entries over the number of ranks, so that the average over the ranks
    is the mean over all entries.
    """
    _numbers.check_flag("multi_step_loss: normalize_importance_weights", normalize_importance_weights)
    group, size = group_of("multi_step_loss", process_group)
    if group and call.options.reduction not in ("mean", "valid_mean"):
        raise ValueError(
            "multi_step_loss: process_group needs reduction 'mean' or 'valid_mean', but the reduction is "
            f"{call.options.reduction!r}"
        )
    sent: dict[str, tuple[torch.Tensor, str]] = {}
    weights = call.weights.importance_weights if normalize_importance_weights else {}
    differ = is_mapping(call.options.importance_weights)
    names = [name for name in call.heads if name in weights][: None if differ else 1]  # one stands for all
    if names:
        sent["largest"] = (
            torch.stack([_largest(call, weights[name], [name] if differ else call.heads) for name in names]),
            "max",
        )
    if group:
        sent["total"] = _num_entries(call), "sum"
    found = _all_reduced(sent, group)
    if names:
        normalized = {
            name: torch.where(largest == 0, weights[name], weights[name] / largest)
            for name, largest in zip(names, found["largest"].unbind(), strict=True)
        }
        if not differ:
            normalized = dict.fromkeys(call.heads, normalized[names[0]])
        call = replace(
            call,
            weights=replace(call.weights, importance_weights=normalized),
            options=call.options._replace(importance_weights=normalized if differ else normalized[names[0]]),
        )
    if "total" in found:
        entries = dict(zip(call.heads, (found["total"] / size).unbind(), strict=True))
        call = replace(
            call,
            weights=replace(call.weights, num_entries=entries),
            options=call.options._replace(num_entries=entries),
        )
    return call


def _largest(call: Call, weights: torch.Tensor, heads: Iterable[str]) -> torch.Tensor:
    """The largest weight of this rank's samples with an unmasked entry in one of the heads; 0 if there is none."""
    masks = call.weights.masks
    if all(name in masks for name in heads):
        counts = [masks[name][:, call.heads[name].first_step :].any(1) for name in heads]
        weights = torch.where(functools.reduce(torch.logical_or, counts), weights, 0)
    return torch.cat([weights, weights.new_zeros(1)]).amax().to(_context.widest(weights.device))


def _num_entries(call: Call) -> torch.Tensor:
    """`[heads]`: the number of entries of this rank's batch, or batches, that the reduction divides by."""
    counts: list[Any] = []
    for name, head in call.heads.items():
        if name in call.weights.num_entries:
            counts.append(call.weights.num_entries[name])
        elif call.options.reduction == "mean":
            counts.append(call.batch)
        elif name in call.weights.masks:
            counts.append(call.weights.masks[name][:, head.first_step :].sum())
        else:
            counts.append(call.batch * (call.steps - head.first_step))
    dtype = _context.widest(call.device)
    return torch.stack([torch.as_tensor(count, dtype=dtype, device=call.device) for count in counts])


def _all_reduced(sent: dict[str, tuple[torch.Tensor, str]], group: str) -> dict[str, torch.Tensor]:
    """Reduce each tensor by its named reduction. All reductions are started before the first is waited for."""
    if not group:
        return {name: tensor for name, (tensor, _) in sent.items()}
    refuse_vmap("multi_step_loss")
    collectives = torch.ops._c10d_functional
    with waiting("multi_step_loss") if _context.is_eager() else contextlib.nullcontext():
        begun = {name: collectives.all_reduce(tensor, how, group) for name, (tensor, how) in sent.items()}
        return {name: collectives.wait_tensor(tensor) for name, tensor in begun.items()}
