"""Process groups as arguments, and errors of ranks that wait for others."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from . import _context

#: What PyTorch's backends say when another rank closes its connections, ends, or lets this one wait too long.
_NO_ANSWER = re.compile(
    r"connection (closed|reset|refused|was likely closed)|closed by (remote )?peer|socket closed|broken pipe|"
    r"tim(e|ed|ing) ?out|remote process|communicator was aborted",
    re.IGNORECASE,
)


def group_of(function: str, process_group: Any) -> tuple[str, int]:
    """Name and size of a process group; an empty name for none."""
    if process_group is None:
        return "", 1
    if not torch.distributed.is_available() or not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"{function}: process_group must be a torch.distributed.ProcessGroup or None, "
            f"but it is of type {type(process_group).__name__}"
        )
    if _context.is_eager() and not _is_registered(process_group):
        raise ValueError(
            f"{function}: process_group must be in use, but the group {process_group.group_name!r} has been destroyed"
        )
    return process_group.group_name, process_group.size()


def _is_registered(group: Any) -> bool:
    """True if collectives find this group by its name. After `destroy_process_group` a new group may have the name."""
    try:
        return torch._C._distributed_c10d._resolve_process_group(group.group_name) is group
    except RuntimeError:
        return False


@contextlib.contextmanager
def waiting(function: str) -> Iterator[None]:
    """Say in which call a rank waited for the others when one of them has ended, or does not take part."""
    try:
        yield
    except RuntimeError as error:
        if not _says_no_answer(error):
            raise
        raise RuntimeError(
            f"{function}: rank {torch.distributed.get_rank()} got no answer from the other ranks of its process group: "
            f"one of them raised, ended, or made no such call; the first error of all ranks is the cause ({error})"
        ) from error


def _says_no_answer(error: RuntimeError) -> bool:
    """True if an error is about other ranks. Gloo raises plain RuntimeErrors; GPU errors have their own types."""
    about_ranks = type(error) is RuntimeError or isinstance(error, torch.distributed.DistError)
    return about_ranks and _NO_ANSWER.search(str(error)) is not None


def is_mapped() -> bool:
    """Return True inside of torch.func.vmap, also while torch.compile traces one."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any([level.key() == torch._C._functorch.TransformType.Vmap for level in levels])


is_mapped._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_vmap(function: str) -> None:
    """Refuse collectives inside of torch.func.vmap, which uses their results before they have arrived."""
    if is_mapped():
        raise NotImplementedError(
            f"{function}: process_group cannot be given inside of torch.func.vmap, which does not wait for other "
            "ranks; make a call for one example after the other, outside of vmap"
        )


def gathered(function: str, tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The tensors of all ranks, which have equal shapes, one after the other along the first dimension."""
    refuse_vmap(function)
    collectives = torch.ops._c10d_functional
    with waiting(function) if _context.is_eager() else contextlib.nullcontext():
        return collectives.wait_tensor(collectives.all_gather_into_tensor(tensor, size, group))  # type: ignore[no-any-return]
