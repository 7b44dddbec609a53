"""Targets from trajectories: the step before the loss.

Transition t is (s_t, a_t, r_t, s'_t), all at index t: ``rewards[b, t]`` was received on leaving s_t, and ``terminated``
and ``truncated`` were returned by the same step of the environment. `n_step_returns`, `n_step_transitions` and
`muzero_targets` are sums over windows; the other functions are linear recurrences, ``y_t = a_t + b_t y_{t+1}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from . import _context, _numbers
from ._keywords import with_known_names
from ._native import _C, Refusal, seen_by_modes
from ._returns_operator import run, run_muzero
from ._trajectories import (
    Discount,
    GeneralizedAdvantages,
    MuZeroTargets,
    NStepTransitions,
    Trajectories,
    VTrace,
    check_trajectories,
)
from ._trajectory_values import check_values
from ._windows import Window, check_window

Tensor = torch.Tensor

_returns = seen_by_modes(_C.returns)
_muzero_targets = seen_by_modes(_C.muzero_targets)


def _results(
    function: str,
    rewards: Any,
    values: Any,
    next_values: Any,
    discount: Any,
    lambda_: Any,
    flags: tuple[Any, Any, Any],
    batch_first: Any,
    check: Any,
    ratios: Any = None,
    clips: tuple[Any, Any, Any] = (None, None, None),
    n: Any = None,
) -> Sequence[Tensor]:
    """Compute the results. Eager calls go straight to C++; other calls, and unusual arguments, are checked in Python
    first."""
    given = (rewards, values, next_values, ratios, discount, lambda_, *flags, clips, n, batch_first)
    if check is False and _context.is_eager():
        results = _returns(function, given)
        if results:  # a Refusal is False, which is asked sooner than its type
            return results
    call = check_trajectories(function, Trajectories(*given))
    _numbers.check_flag(f"{function}: check", check)
    if check:
        check_values(function, call)
    return run(function, call)


@with_known_names
def lambda_returns(
    rewards: Tensor,
    values: Tensor | None = None,
    next_values: Tensor | None = None,
    *,
    discount: Discount,
    lambda_: Discount,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> Tensor:
    """λ-returns: the mixture of all n-step returns (Sutton & Barto, 12.2; Dreamer, Hafner et al. 2020, equation 4).

    With γ the discount, B_t = 0 if terminated, else V(s'_t), and a cut after t where the transition is terminated,
    truncated, the last of the window, or followed by a masked one::

        G_t = r_t + γ_t ((1 - λ_t) B_t + λ_t G_{t+1});    at a cut  r_t + γ_t B_t

    Args:
        rewards: r, `[B, T]` float64, float32, bfloat16 or float16. All numeric tensors accept these dtypes.
        values: V of all T + 1 observations, `[B, T + 1]`. Not read, and optional, if `next_values` is given.
        next_values: V(s'_t), `[B, T]`, of the true successors, before any reset.
        discount: γ (gamma), a number from -1 to 1; a 0-dim tensor, read on its device without a synchronisation; or a
            tensor of two dimensions that broadcasts to `[B, T]`. 0 ends an episode as `terminated` does, which is the
            convention of rlax and Dreamer; negative for zero-sum games in which players alternate. A constant: it gets
            no gradient, and must not require grad.
        lambda_: λ, from 0 to 1, in the same forms. Not read at a cut. A constant, like `discount`.
        terminated: `[B, T]` bool. The episode ended by its rules: s'_t is worth 0, whatever `next_values` holds.
        truncated: `[B, T]` bool. The episode was cut, for example by a time limit: the result bootstraps from V(s'_t)
            and reads nothing of t + 1. If both are True, the transition counts as terminated. Cannot be combined with
            `values` `[B, T + 1]`: after a reset, ``values[:, t + 1]`` belongs to another episode.
        mask: `[B, T]` bool, False in padding. Results are 0 there, and the transition before is treated as truncated.
        batch_first: if False, all tensors of two dimensions, and results, are `[T, B]`.
        check: read values, which waits for the device: refuse a tensor `discount`, `lambda_` or `ratios` out of range,
            and warn where the value of a masked successor is bootstrapped from and no end is flagged (padding).

    Returns:
        G, `[B, T]` float32, or float64 if a tensor is float64. Differentiable with respect to rewards and values, to
        any order and in forward mode.

    Raises:
        TypeError: a type or dtype is wrong.
        ValueError: a shape, device or number is wrong, or a constant requires grad.
        NotImplementedError: ``check=True`` where there are no values, as while torch.compile traces.

    Cuts and coefficients of exactly 0 exclude a term instead of multiplying it: NaN and inf stay in their episode.

    Tensors may be made in inference mode. torch.compile refuses to save such constants for a backward pass; clone them.

    Flags are stored with the transition, as in Gymnasium and TorchRL. CleanRL, Stable-Baselines3 and PufferLib store
    them one step later: pass ``dones[1:]`` followed by the last done. TorchRL 0.14 multiplies by ``~done``, so that a
    NaN reaches the episode before it.

    Related names: TD(λ) targets, `td_lambda_return_estimate` (TorchRL), `lambda_return` (Dreamer).

    >>> rewards = torch.tensor([[1.0, 1.0, 1.0]])
    >>> values = torch.tensor([[0.0, 0.0, 0.0, 8.0]])
    >>> lambda_returns(rewards, values, discount=0.5, lambda_=1.0)
    tensor([[2.7500, 3.5000, 5.0000]])
    >>> lambda_returns(
    ...     rewards,
    ...     values,
    ...     discount=0.5,
    ...     lambda_=1.0,
    ...     terminated=torch.tensor([[False, True, False]]),
    ... )
    tensor([[1.5000, 1.0000, 5.0000]])
    """
    flags = terminated, truncated, mask
    return _results("lambda_returns", rewards, values, next_values, discount, lambda_, flags, batch_first, check)[0]


@with_known_names
def n_step_returns(
    rewards: Tensor,
    values: Tensor | None = None,
    next_values: Tensor | None = None,
    *,
    discount: Discount,
    n: int,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> Tensor:
    """n-step returns: up to n discounted rewards, and the value of the state after them.

    With m the smaller of n and the number of transitions from t up to and including the first cut::

        G_t = sum_{i<m} (Π_{j<i} γ_{t+j}) r_{t+i} + (Π_{j<m} γ_{t+j}) B_{t+m-1}

    The time does not depend on n. The algorithm does not divide by powers of the discount.

    Args:
        n: the largest number of rewards in a return, at least 1.
        rewards, values, next_values, discount, terminated, truncated, mask, batch_first, check: as in `lambda_returns`.

    Returns, raises: as `lambda_returns`.

    Related names: `n_step_bootstrapped_returns` (rlax), TD(n) targets, Monte Carlo returns if n is large.

    >>> rewards = torch.tensor([[1.0, 1.0, 1.0]])
    >>> values = torch.tensor([[0.0, 0.0, 4.0, 8.0]])
    >>> n_step_returns(rewards, values, discount=0.5, n=2)
    tensor([[2.5000, 3.5000, 5.0000]])
    """
    flags = terminated, truncated, mask
    results = _results("n_step_returns", rewards, values, next_values, discount, 1.0, flags, batch_first, check, n=n)
    return results[0]


@with_known_names
def n_step_transitions(
    rewards: Tensor,
    *,
    discount: Discount,
    n: int,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> NStepTransitions:
    """n-step transitions: the parts of an n-step target for critics that are not scalar (C51, QR-DQN, SAC).

    With m the smaller of n and the number of transitions from t up to and including the first cut::

        rewards_t = sum_{i<m} (Π_{j<i} γ_{t+j}) r_{t+i}
        discounts_t = Π_{j<m} γ_{t+j};    exactly 0 if transition t + m - 1 terminated
        steps_t = m

    The state to bootstrap from is s' of transition t + m - 1. So, where unmasked, `n_step_returns` is
    ``rewards + discounts * next_values.gather(1, t + steps - 1)``, except for rounding. For distributions, see
    `Support.project`.

    Args:
        rewards, discount, n, terminated, truncated, mask, batch_first, check: as in `n_step_returns`.

    Returns:
        `rewards` and `discounts`, float32, or float64 if a tensor is float64, and `steps`, int64; `[B, T]` each, and 0
        where masked. `rewards` is differentiable with respect to rewards, to any order and in forward mode;
        `discounts` and `steps` are constants. Behind a discount of 0, rewards are not read, and `discounts` is 0, but
        `steps` counts on up to a cut.

    Raises:
        TypeError, ValueError: as `lambda_returns`.

    The time does not depend on n. N-step replay buffers, as of Rainbow (Hessel et al. 2018), store these parts of each
    window when it is complete. Here they are computed from stored trajectories, with a discount for each step.

    Related names: n-step replay buffer, `MultiStepTransform` (TorchRL), n-step rewards.

    >>> parts = n_step_transitions(torch.tensor([[1.0, 1.0, 1.0]]), discount=0.5, n=2)
    >>> parts.rewards, parts.discounts, parts.steps
    (tensor([[1.5000, 1.5000, 1.0000]]), tensor([[0.2500, 0.2500, 0.5000]]), tensor([[2, 2, 1]]))
    """
    flags = terminated, truncated, mask
    results = _results("n_step_transitions", rewards, None, None, discount, 1.0, flags, batch_first, check, n=n)
    return NStepTransitions(*results)


@with_known_names
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor | None = None,
    *,
    discount: Discount,
    lambda_: Discount,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> GeneralizedAdvantages:
    """Generalized advantage estimation, GAE (Schulman et al. 2016, equation 16), as PPO uses it.

    With B_t and a cut as in `lambda_returns`::

        δ_t = r_t + γ_t B_t - V(s_t);    A_t = δ_t + γ_t λ_t A_{t+1};    at a cut  δ_t

    Args:
        values: V(s_t), `[B, T]`, if `next_values` is given; otherwise V of all T + 1 observations, `[B, T + 1]`.
        rewards, next_values, discount, lambda_, terminated, truncated, mask, batch_first, check: as in
            `lambda_returns`.

    Returns:
        `advantages`, and `returns` = advantages + values, which are the λ-returns. `[B, T]` each, as in
        `lambda_returns`.

    Raises:
        TypeError, ValueError: as `lambda_returns`.

    CleanRL treats a truncation as a termination, and stores flags with the observation, one step later. rlax has no
    flags: a discount of 0 is a termination, and a truncation cannot be expressed.

    Related names: GAE, gae, `generalized_advantage_estimate` (TorchRL), gae_lambda.

    >>> rewards, values = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 0.5, 2.0]])
    >>> generalized_advantages(rewards, values, discount=1.0, lambda_=0.5).advantages
    tensor([[2.2500, 2.5000]])
    """
    flags = terminated, truncated, mask
    results = _results(
        "generalized_advantages", rewards, values, next_values, discount, lambda_, flags, batch_first, check
    )
    return GeneralizedAdvantages(*results)


@with_known_names
def vtrace(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor | None = None,
    *,
    ratios: Tensor,
    discount: Discount,
    lambda_: Discount = 1.0,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> VTrace:
    """V-trace: targets and advantages from another policy's trajectories (IMPALA, Espeholt et al. 2018, equation 1).

    With ρ_t = min(clip_rho, ratio_t) and c_t = λ_t min(clip_c, ratio_t)::

        δ_t = ρ_t (r_t + γ_t B_t - V(s_t));    e_t = δ_t + γ_t c_t e_{t+1};    at a cut  δ_t
        targets = V + e
        advantages = min(clip_pg_rho, ratio_t) (r_t + γ_t u_t - V(s_t))
        u_t = (1 - λ_t) B_t + λ_t targets_{t+1};    at a cut  B_t

    Args:
        ratios: π(a_t|s_t) / μ(a_t|s_t), the probability under π divided by the probability under the acting policy μ,
            `[B, T]`, not its logarithm. A constant, like `discount`.
        clip_rho, clip_c, clip_pg_rho: limits of the ratios; None or inf clips nothing.
        rewards, values, next_values, discount, lambda_, terminated, truncated, mask, batch_first, check: as in
            `generalized_advantages`.

    Returns:
        `targets` of V(s_t), and `advantages` for the policy gradient, `[B, T]` each, as in `lambda_returns`.

    Raises:
        TypeError, ValueError: as `lambda_returns`.

    λ is a factor of c and mixes the bootstrap of the advantages, as in rlax. IMPALA, TorchRL and RLlib have no λ; the
    default of 1 gives their results. `clip_pg_rho` clips the ratio of the advantages; TorchRL uses `rho_thresh` there.

    Related names: `vtrace_advantage_estimate` (TorchRL), `vtrace_td_error_and_advantage` (rlax), off-policy correction.

    >>> ratios = torch.tensor([[2.0, 0.5]])
    >>> vtrace(torch.ones(1, 2), torch.zeros(1, 3), ratios=ratios, discount=1.0).targets
    tensor([[1.5000, 0.5000]])
    """
    flags, clips = (terminated, truncated, mask), (clip_rho, clip_c, clip_pg_rho)
    results = _results(
        "vtrace", rewards, values, next_values, discount, lambda_, flags, batch_first, check, ratios, clips
    )
    return VTrace(*results)


@with_known_names
def retrace(
    rewards: Tensor,
    q_values: Tensor,
    next_values: Tensor,
    *,
    ratios: Tensor,
    discount: Discount,
    lambda_: Discount = 1.0,
    clip_c: float | None = 1.0,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    mask: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> Tensor:
    """Retrace(λ): targets of Q from another policy's trajectories (Munos et al. 2016, equation 4).

    With q_t = Q(s_t, a_t) and c_t = λ_t min(clip_c, ratio_t)::

        G_t = r_t + γ_t (B_t + c_{t+1} (G_{t+1} - q_{t+1}));    at a cut  r_t + γ_t B_t

    Args:
        q_values: Q(s_t, a_t) of the actions that were taken, `[B, T]`.
        next_values: E_π Q(s'_t, ·), `[B, T]`.
        ratios: π(a_t|s_t) / μ(a_t|s_t), `[B, T]`. π(a_t|s_t) as ratios gives tree backup; a tensor of ones gives Q(λ).
            A constant, like `discount`.
        clip_c: limit of the ratios; None is importance sampling.
        lambda_: λ, in the forms of `lambda_returns`. λ_t and the ratio of t belong to the step that leads to s_t: they
            are read at every t but the first of an episode.
        rewards, discount, terminated, truncated, mask, batch_first, check: as in `lambda_returns`.

    Returns:
        Targets of Q(s_t, a_t), `[B, T]`, as in `lambda_returns`.

    Raises:
        TypeError, ValueError: as `lambda_returns`.

    Retrace uses c_{t+1}, aligned with q_{t+1}, as rlax does; V-trace uses c_t.

    Related names: Retrace, off-policy Q targets.

    >>> zeros, ratios = torch.zeros(1, 2), torch.tensor([[9.0, 0.5]])
    >>> retrace(torch.ones(1, 2), zeros, zeros, ratios=ratios, discount=1.0)
    tensor([[1.5000, 1.0000]])
    """
    flags, clips = (terminated, truncated, mask), (clip_c, None, None)
    results = _results(
        "retrace", rewards, q_values, next_values, discount, lambda_, flags, batch_first, check, ratios, clips
    )
    return results[0]


@with_known_names
def muzero_targets(
    rewards: Tensor,
    root_values: Tensor,
    *,
    num_unroll_steps: int,
    td_steps: int | Tensor,
    discount: Discount,
    lengths: Tensor | None = None,
    terminated: Tensor | None = None,
    to_play: Tensor | None = None,
    reward: Literal["reward", "value_prefix"] = "reward",
    prefix_horizon: int | None = None,
    root_reward: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> MuZeroTargets:
    """MuZero's targets for value and reward (`make_target` of the pseudocode, version 2), and their masks.

    A row is a window of one game that begins at the sampled position. With ℓ its length, ν the root values,
    n_j = td_steps, m = min(n_j, ℓ - j), and j from 0 to K = num_unroll_steps::

        z_j = sum_{i<m} γ^i s_{j,j+i} r_{j+i} + γ^m s_{j,j+m} ν_{j+m}

    ν_ℓ is 0 if the game ended there, and z_j is 0 for j > ℓ. s_{j,i} is 1; with `to_play`, it is -1 where the players
    who move at i and j differ.

    Args:
        rewards: r, `[B, L]`, of the window's moves, from the perspective of the player to move.
        root_values: ν, `[B, L + 1]`, of its states, searched or reanalysed, from the perspective of the player to move.
        num_unroll_steps: K, at least 0.
        td_steps: n, an integer of at least 1; or an int64 tensor, `[B]` or `[B, K + 1]`, in which numbers below 1 are
            read as 1 (EfficientZero's shorter horizons for old games). A window shorter than j + n_j bootstraps from
            its last state.
        discount: γ (gamma), a number from -1 to 1, a 0-dim tensor, or `[B, 1]`.
        lengths: ℓ, `[B]` int64 from 0 to L: the number of recorded moves; later entries are not read. None: L. Other
            lengths are errors on a CPU, and with `check`; elsewhere, they are clamped.
        terminated: `[B]` bool: True if the game ended, by its rules, after the recorded moves. Required with `lengths`.
        to_play: `[B, L + 1]` integers or bool: who moves. None: one player. A third player among the entries that a
            row's targets read is an error on a CPU, and with `check`; elsewhere, all but the player at j are opponents.
        reward: "reward", or "value_prefix", the undiscounted sum of the rewards since the sum last restarted, which it
            does every `prefix_horizon` steps (EfficientZero, Ye et al. 2021); not with `to_play`.
        prefix_horizon: h, the number of steps after which the sum restarts, counted from step 1 of a row. None: K.
        root_reward: `[B]`: the reward of the move that led to the sampled position, 0 where a game begins.
        batch_first: if False, all tensors of two dimensions, and results, are `[T, B]`.
        check: check values on every device, and wait for the device: `lengths`, `to_play`, a `discount` that is a
            tensor, and targets that are NaN. It raises an error under torch.compile, torch.export and torch.func
            transforms, where there are no values; there, a CPU does not check lengths and players either.

    Returns:
        `values` `[B, K + 1]`. `rewards` `[B, K]` for a head with ``first_step=1``: step k predicts r_{k-1}, the reward
        of the move that led there. With `root_reward`, `rewards` is `[B, K + 1]` and begins with it, for a head with
        ``first_step=0``. `mask` `[B, K + 1]` is True where the target is known: j <= ℓ, or the game has ended.
        `policy_mask` `[B, K + 1]` is True where a search was made: j < ℓ. Pass them to the loss as
        ``mask={"value": mask, "reward": mask, "policy": policy_mask}``. All results are constants.

    Raises:
        TypeError: a type or dtype is wrong.
        ValueError: a shape, device or number is wrong, or an argument requires grad.
        NotImplementedError: ``check=True`` where there are no values.

    The time grows with `num_unroll_steps` times `td_steps`. Under torch.compile, an integer `td_steps` that changes may
    recompile; a tensor does not.

    Version 1 of the pseudocode pairs step k with r_k; version 2 pairs it with r_{k-1}, as this function does.
    EfficientZero and LightZero store r_{k-1} at index k - 1. At a time limit, this function bootstraps; other
    libraries treat the limit as an absorbing state, or mask the value.

    Related names: `make_target`, bootstrapped value targets, reanalyse targets.

    >>> targets = muzero_targets(
    ...     torch.ones(1, 3),
    ...     torch.full((1, 4), 4.0),
    ...     num_unroll_steps=2,
    ...     td_steps=2,
    ...     discount=0.5,
    ...     lengths=torch.tensor([2]),
    ...     terminated=torch.tensor([True]),
    ... )
    >>> targets.values, targets.rewards, targets.policy_mask
    (tensor([[1.5000, 1.0000, 0.0000]]), tensor([[1., 1.]]), tensor([[ True,  True, False]]))
    """
    steps = num_unroll_steps, td_steps, discount, lengths
    given = (rewards, root_values, *steps, terminated, to_play, reward, prefix_horizon, root_reward, batch_first)
    if check is False and _context.is_eager():
        results = _muzero_targets(given)
        if not isinstance(results, Refusal):
            return MuZeroTargets(*results)
    return run_muzero(check_window(Window(*given, check)))
