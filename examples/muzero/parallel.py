"""Processes that train as one, started by `torchrun`.

Each process plays a share of the games, and learns from a share of the batch. DistributedDataParallel averages the
gradients, so that all weights stay bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from configuration import RunError


class Ranks:
    """The processes of a run, as seen by one of them. A process that `torchrun` did not start is alone."""

    def __init__(self) -> None:
        """Join the process group."""
        self.rank, self.size, self.process_group = 0, 1, None
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
            self.rank, self.size, self.process_group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

    def gather(self, value: Any, everywhere: bool = True) -> list[Any]:
        """The values of all ranks, in every rank or in rank 0 alone; other ranks then get None for each."""
        if self.process_group is None:
            return [value]
        values = [None] * self.size
        if everywhere:
            dist.all_gather_object(values, value)
        else:
            dist.gather_object(value, values if self.rank == 0 else None)
        return values

    def from_first(self, value: Any) -> Any:
        """The value of rank 0."""
        if self.process_group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def agree(self, problem: str) -> None:
        """End all ranks if one of them has a problem, so that none waits for a rank that has ended.

        Raises:
            RunError: this rank's problem, or the first of another rank. An empty one is none.
        """
        problems = list(filter(None, self.gather(problem)))
        if problems:
            raise RunError(problem or problems[0])

    def parallel(self, network: nn.Module) -> nn.Module:
        """The network, whose gradients are averaged over the ranks when it is called as a module."""
        return network if self.process_group is None else DistributedDataParallel(network)
