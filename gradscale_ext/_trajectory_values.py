"""Checks of the values in a call of a function over transitions, with ``check=True``."""

from __future__ import annotations

import torch

from . import _context
from ._trajectories import FUNCTIONS, Trajectories

Tensor = torch.Tensor


def check_values(function: str, call: Trajectories) -> None:
    """Check coefficients that are tensors, and warn where the value of a masked successor is bootstrapped from.

    Raises:
        ValueError: a discount is not from -1 to 1, a lambda_ is not from 0 to 1, or a ratio is negative.
        NotImplementedError: there are no values.
    """
    _context.require_values(function, function, *call)
    with torch.no_grad():
        for name, coefficient, low in (("discount", call.discount, -1), ("lambda_", call.lambda_, 0)):
            if isinstance(coefficient, Tensor):
                wrong = coefficient[~((coefficient >= low) & (coefficient <= 1))]
                if len(wrong):
                    raise ValueError(f"{function}: {name} must be from {low} to 1, but it has {float(wrong[0]):.6g}")
        if call.ratios is not None:
            unmasked = call.ratios if call.mask is None else call.ratios[call.mask]
            negative = unmasked[unmasked < 0]
            if len(negative):
                raise ValueError(
                    f"{function}: ratios must be at least 0, but it has {float(negative[0]):.6g}; if these are "
                    "logarithms, write ratios.exp()"
                )
        if call.mask is not None and (FUNCTIONS[function].values or call.n):  # others bootstrap from no value
            _warn_of_padding(function, call, call.mask)


def _warn_of_padding(function: str, call: Trajectories, mask: Tensor) -> None:
    """Warn where a transition has a masked successor, no flag, and a discount other than 0."""
    ends = torch.as_tensor(call.discount, device=mask.device).eq(0).expand_as(mask)
    for flags in (call.terminated, call.truncated):
        ends = ends if flags is None else ends | flags
    unmasked, ends = (flags if call.batch_first else flags.T for flags in (mask, ends))
    found = (unmasked[:, :-1] & ~unmasked[:, 1:] & ~ends[:, :-1]).nonzero()
    if len(found):
        row, step = found[0].tolist()
        other = (
            f"if values hold the value of its true successor at {step + 1}, ignore this warning"
            if call.next_values is None and call.values is not None
            else "if its successor has a value of its own, as after a time limit, truncated="
        )
        _context.warn(
            f"{function}: transition {step} of row {row} bootstraps from the value of its successor, which is masked, "
            f"and no end is flagged there. If padding follows, write terminated= with True at this transition; {other}"
        )
