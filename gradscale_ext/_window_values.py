"""Checks of the values in a call of `muzero_targets`: always on a CPU, and with ``check=True`` on every device."""

from __future__ import annotations

import torch

from . import _context
from ._trajectories import MuZeroTargets
from ._windows import Window

Tensor = torch.Tensor


def check_values(window: Window) -> None:
    """Check `lengths` and `to_play`; with ``check=True`` also `discount`.

    Without ``check=True``, nothing is checked on devices other than a CPU, which would have to be waited for, and where
    there are no values.

    Raises:
        ValueError: a length is not from 0 to L, a row has more than two players, or a discount is not from -1 to 1.
        NotImplementedError: ``check=True``, and there are no values.
    """
    if window.check:
        _context.require_values("muzero_targets", "muzero_targets", *window)
    elif window.rewards.device.type != "cpu" or not _context.has_values(*window):
        return
    with torch.no_grad():
        moves = window.rewards.shape[1 if window.batch_first else 0]
        if window.lengths is not None:
            _check_lengths(window.lengths, moves)
        if window.to_play is not None:
            _check_players(window, window.to_play, moves)
        if window.check and isinstance(window.discount, Tensor):
            _check_discount(window.discount)


def _first(wrong: Tensor) -> int | None:
    """The index of the first True in `[N]`."""
    found = wrong.nonzero()
    return int(found[0]) if len(found) else None


def _check_lengths(lengths: Tensor, moves: int) -> None:
    row = _first((lengths < 0) | (lengths > moves))
    if row is not None:
        remedy = ""
        if lengths[row] > moves:
            remedy = (
                f"; where a game is longer than its row, write lengths=lengths.clamp(max={moves}) and "
                f"terminated=terminated & (lengths <= {moves})"
            )
        raise ValueError(
            f"muzero_targets: lengths must be from 0 to {moves}, the number of moves in rewards, but row {row} has "
            f"{int(lengths[row])}; a length counts the recorded moves of the row{remedy}"
        )


def _ends(window: Window) -> Tensor:
    """The state from which the value target of each unroll step bootstraps, in a row that is long enough: `[B, K + 1]`,
    or `[1, K + 1]` if rows are alike."""
    moves = window.rewards.shape[1 if window.batch_first else 0]
    steps = torch.arange(window.num_unroll_steps + 1, device=window.rewards.device)
    if not isinstance(window.td_steps, Tensor):
        return (steps + min(window.td_steps, moves))[None]
    return steps + horizons(window.td_steps, window.batch_first).clamp(max=moves)


def horizons(td_steps: Tensor, batch_first: bool) -> Tensor:
    """td_steps of at least 1: `[B, K + 1]`, or `[B, 1]` for a tensor `[B]`."""
    rows = td_steps[:, None] if td_steps.dim() == 1 else td_steps if batch_first else td_steps.T
    return rows.clamp(min=1)


def _check_players(window: Window, to_play: Tensor, moves: int) -> None:
    """Refuse a third player among the entries of a row that its targets read."""
    players = (to_play if window.batch_first else to_play.T).long()
    last = torch.full_like(players[:, 0], moves) if window.lengths is None else window.lengths
    if window.terminated is not None:
        last = last - window.terminated.long()  # nobody moves where the game has ended
    last = torch.minimum(last, _ends(window).amax(1))
    is_read = torch.arange(moves + 1, device=players.device) <= last[:, None]
    is_other = is_read & (players != players[:, :1])
    second = players.gather(1, is_other.long().argmax(1, keepdim=True))
    row = _first((is_other & (players != second)).any(1))
    if row is not None:
        seen = sorted(set(players[row][is_read[row]].tolist()))
        raise ValueError(
            f"muzero_targets: to_play must have at most two players in a row, but row {row} has "
            f"{', '.join(map(str, seen[:-1]))} and {seen[-1]}: signs would make one opponent of all players who do not "
            "move; for more players, or moves of chance, give the rewards and root_values of one player without to_play"
        )


def _check_discount(discount: Tensor) -> None:
    row = _first(~(discount.flatten().abs() <= 1))
    if row is not None:
        at = f"row {row} has" if discount.dim() else "it is"
        raise ValueError(
            f"muzero_targets: discount must be from -1 to 1, but {at} {float(discount.flatten()[row]):.6g}"
        )


def check_targets(window: Window, targets: MuZeroTargets) -> None:
    """With ``check=True``, refuse targets that are NaN. Entries that no target reads may be NaN.

    Raises:
        ValueError: a target is NaN.
    """
    if not window.check:
        return
    for what, result in (("value", targets.values), ("reward", targets.rewards)):
        rows = result if window.batch_first else result.T
        found = rows.isnan().nonzero()
        if len(found):
            row, column = found[0].tolist()
            step = column + (what == "reward" and window.root_reward is None)
            raise ValueError(
                f"muzero_targets: the {what} target of row {row} at step {step} is NaN, because {_cause(window, row)}; "
                "find where it comes from, or end the row before it with lengths"
            )


def _cause(window: Window, row: int) -> str:
    """Why a target of the row is NaN, from the entries that the row's targets read."""
    moves = window.rewards.shape[1 if window.batch_first else 0]
    length = moves if window.lengths is None else int(window.lengths[row])
    ends = _ends(window)
    ends = ends[row if len(ends) > 1 else 0].clamp(max=length)
    read = {"rewards": (window.rewards, torch.arange(int(ends.max()))), "root_values": (window.root_values, ends)}
    for name, (given, places) in read.items():
        places = places.to(given.device)
        place = _first((given if window.batch_first else given.T)[row, places].isnan())
        if place is not None:
            return f"{name} has NaN at index {int(places[place])} of the row"
    if window.root_reward is not None and bool(window.root_reward[row].isnan()):
        return "root_reward has NaN there"
    return "infinite rewards and root_values of opposite signs are added"
