"""Parameters of FSDP2: the optimizer holds shards, and the autograd graph leads to whole parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Sharded(NamedTuple):
    """A parameter that FSDP2 gathers before its module runs, and frees afterwards."""

    shard: torch.Tensor
    """The shard, which is the module's parameter between two passes and gets `.grad`."""
    leaf: torch.Tensor
    """The whole parameter, which the operations of a pass use. Its memory has been freed."""
    is_zero: bool
    """True if all elements of the whole parameter are zero."""


def sharded_parameters(model: torch.nn.Module) -> list[Sharded]:
    """Find the shard and the whole tensor of each parameter. Afterwards the model holds its shards.

    Parameters are gathered one group at a time. All ranks have to call this function, because gathering is collective.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule  # importing it takes a while

    found: dict[int, Sharded] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            shards = dict(module.named_parameters())
            module.unshard()
            for name, leaf in module.named_parameters():
                if leaf is not shards[name]:
                    found[id(shards[name])] = Sharded(shards[name], leaf, not leaf.any())
            module.reshard()
    return list(found.values())
