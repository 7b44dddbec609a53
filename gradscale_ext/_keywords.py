"""Names of arguments in other libraries and papers, and their names here."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any

from ._context import Function

_NAMES = {
    "discount": ("gamma", "gammas", "discounts", "pcontinues"),
    "lambda_": ("lam", "lambd", "lmbda", "gae_lambda", "td_lambda", "lambdas"),
    "terminated": ("done", "dones", "terminal", "terminals", "terminations", "is_terminal"),
    "truncated": ("truncations", "truncateds", "timeouts", "time_outs"),
    "mask": ("masks", "valid", "valid_mask", "attention_mask", "response_mask"),
    "ratios": ("rho", "rhos", "rho_tm1", "importance_ratios", "importance_weights"),
    "next_values": ("values_next", "next_value", "bootstrap_value", "v_t"),
    "n": ("n_step", "n_steps", "steps", "td_steps"),
    "td_steps": ("n", "n_step", "n_steps"),
    "num_unroll_steps": ("unroll_steps", "K"),
    "clip": ("clip_coef", "clip_range", "clip_epsilon"),
    "value_weight": ("vf_coef", "value_coef"),
    "entropy_weight": ("ent_coef", "entropy_coef", "entropy_coeff"),
    "choices": ("nvec",),
}
_OURS = {theirs: [ours for ours in _NAMES if theirs in _NAMES[ours]] for names in _NAMES.values() for theirs in names}
#: Arguments of heads that a preset does not have: by preset, the names, and the preset's heads with such an argument.
_OF_HEADS = {
    "MultiStepLoss.ppo": (
        ("kl_weight", "dual_clip", "surrogate"),
        "MultiStepLoss(policy=PolicyGradient({}=..., entropy_weight=0.01), "
        "value=ClippedSquaredError(clip=None, weight=0.25))",
    )
}


def with_known_names(function: Function) -> Function:
    """Make the error for an unknown keyword argument say what it is called here."""
    parameters = [name for name in inspect.signature(function).parameters if name != "cls"]
    of_heads, preset = _OF_HEADS.get(function.__qualname__, ((), ""))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in parameters), None)
            if unknown is None:
                raise
            meant = [name for name in _OURS.get(unknown, ()) if name in parameters]
            # A misspelling is close to its name, and is no other name: truncated is no misspelling of terminated.
            if unknown not in _OURS and not meant:
                meant = difflib.get_close_matches(unknown, parameters, 1, cutoff=0.8)
            remedy = f"write {meant[0]}=" if meant else f"its arguments are {', '.join(parameters)}"
            if unknown in of_heads:
                remedy = f"write {preset.format(unknown)}"
            raise TypeError(f"{function.__qualname__}: there is no argument {unknown}; {remedy}") from error

    return call  # type: ignore[return-value]
