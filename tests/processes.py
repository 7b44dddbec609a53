"""Checks that run in several processes.

The processes are forked from a server without threads that has imported PyTorch and its compiler, which takes 15
seconds. The tests are in one group of pytest-xdist, so that all modules share the server.
"""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

one_server = pytest.mark.xdist_group("processes")
PRELOADED = [
    "gradscale_ext",
    "torch._dynamo.backends.debugging",
    "torch._export.db",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
]
Check = Callable[[int], None]


def _worker(rank: int, ranks: int, checks: dict[str, Check], folder: str) -> None:
    """Run every check in the same order on every rank, and record the errors."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=600))
    for name, function in checks.items():
        try:
            function(rank)
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(outcome)
        dist.barrier()
    dist.destroy_process_group()


def run_in_processes(ranks: int, checks: dict[str, Check], folder: Path) -> None:
    """Run the checks in `ranks` processes."""
    start_processes(ranks, _worker, ranks, checks, str(folder))


def start_processes(number: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function with its rank and the arguments in several processes, and raise the error of any of them."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, arguments, number, start_method="forkserver")


class Checks(dict[str, Check]):
    """The checks of a module by name, which run in the same order on every rank. As a decorator, adds a function."""

    def __call__(self, function: Check) -> Check:
        self[function.__name__] = function
        return function

    def outcomes(self, *ranks: Any) -> Callable[..., Any]:
        """A fixture that runs all checks in so many processes, and gives a function that fails as a check did."""

        @pytest.fixture(scope="module", params=ranks)
        def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
            folder = tmp_path_factory.mktemp("ranks")
            run_in_processes(request.param, self, folder)
            return lambda name: assert_passed(name, request.param, folder)

        return outcomes


def assert_passed(name: str, ranks: int, folder: Path) -> None:
    """Fail with the error of the first rank in which the check failed."""
    for rank in range(ranks):
        outcome = (folder / f"{name}.{rank}").read_text()
        assert not outcome, f"rank {rank} of {ranks}:\n{outcome}"
