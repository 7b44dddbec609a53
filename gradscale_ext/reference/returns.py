"""Targets from trajectories: the papers' formulas as loops backwards over time.

The functions have the arguments of their namesakes in `gradscale_ext`. Where a formula has y_t, the loop has a tensor
`[B]`, an entry for each row. Results are differentiable with respect to rewards and values, except the results of
`muzero_targets`. A cut is a step that is terminated, truncated, the last, or followed by a masked step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import _context
from .._tensors import result_dtype
from .._trajectories import (
    FUNCTIONS,
    Discount,
    Function,
    GeneralizedAdvantages,
    MuZeroTargets,
    NStepTransitions,
    Trajectories,
    VTrace,
    check_trajectories,
)
from .._window_values import check_targets, check_values, horizons
from .._windows import Window, check_window

Tensor = torch.Tensor
Results = TypeVar("Results")


def times(*factors: Tensor) -> Tensor:
    """The product of coefficients and x, the last factor; exactly 0 if a coefficient is 0, even if others are NaN or
    inf."""
    *coefficients, x = factors
    is_zero = functools.reduce(torch.logical_or, [coefficient == 0 for coefficient in coefficients])
    for coefficient in coefficients:
        x = torch.where(is_zero, 0, coefficient) * x  # a NaN coefficient must not reach the gradient either
    return torch.where(is_zero, 0, x)


def behind(coefficient: Tensor, inner: Tensor) -> Tensor:
    """A coefficient inside of a term that is multiplied by `coefficient`: exactly 0 if that is 0. In nested calls of
    `times`, a gradient of 0 would be multiplied by an inner coefficient that is NaN."""
    return torch.where(coefficient == 0, 0, inner)


class _Steps:
    """The arguments of a call by step: entry t of each tuple is a tensor `[B]`.

    Everything is 0 in masked entries. `bootstrap` is B_t: the value of the next state, or 0 after a termination.
    `lambda_` is 0 at cuts, so that ``(1 - lambda_t) B_t + lambda_t y_{t+1}`` is B_t there.
    """

    def __init__(self, call: Trajectories) -> None:
        self.batch_first = call.batch_first
        self.dtype = result_dtype(*call)
        rewards = self._rows(call.rewards)
        self.shape = rewards.shape
        self.device = rewards.device
        never = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        terminated, truncated = (
            never if flags is None else self._rows(flags) for flags in (call.terminated, call.truncated)
        )
        live = ~never if call.mask is None else self._rows(call.mask)
        next_is_live = torch.cat([live[:, 1:], never[:, :1]], 1)
        cut = terminated | truncated | ~next_is_live
        if call.next_values is not None:
            values, next_values = call.values, self._rows(call.next_values)
            values = None if values is None else self._rows(values)[:, : self.shape[1]]
        elif call.values is not None:
            observations = self._rows(call.values)
            values, next_values = observations[:, :-1], observations[:, 1:]
        else:
            values, next_values = None, torch.zeros_like(rewards)

        def columns(matrix: Tensor, is_read: Tensor = live) -> tuple[Tensor, ...]:
            return torch.where(is_read, matrix.to(self.dtype), 0).unbind(1)

        self.r = columns(rewards)
        self.v = None if values is None else columns(values)
        self.bootstrap = columns(next_values, live & ~terminated)
        self.discount = columns(self._coefficients(call.discount))
        self.lambda_ = columns(self._coefficients(call.lambda_), live & ~cut)
        self.trace_lambda = columns(self._coefficients(call.lambda_))
        self.ratio = None if call.ratios is None else columns(self._rows(call.ratios.detach()))
        self.live, self.cut, self.terminated = live.unbind(1), cut.unbind(1), terminated.unbind(1)
        self.backwards = range(self.shape[1] - 1, -1, -1)
        self.zero = torch.zeros(self.shape[:1], dtype=self.dtype, device=self.device)

    def _rows(self, tensor: Tensor) -> Tensor:
        tensor = _context.saveable(tensor)
        return tensor if self.batch_first else tensor.T

    def _coefficients(self, value: Discount) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full(self.shape, value, dtype=self.dtype, device=self.device)
        rows = self._rows(value) if value.dim() else value
        return rows.detach().to(self.device).expand(self.shape)

    def discounted(self, t: int, later: Tensor, factor: Tensor | None = None) -> Tensor:
        """``discount_t ((1 - lambda_t) B_t + lambda_t later)``, in a term that is multiplied by `factor`."""
        discount = self.discount[t] if factor is None else behind(factor, self.discount[t])
        return times(discount, 1 - self.lambda_[t], self.bootstrap[t]) + times(discount, self.lambda_[t], later)

    def result(self, columns: list[Tensor]) -> Tensor:
        """Stack columns, listed from the last step to the first, in the caller's dimension order; 0 where masked."""
        time_dim = 1 if self.batch_first else 0
        if not columns:
            size = self.shape if self.batch_first else self.shape[::-1]
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        kept = [torch.where(live, column, 0) for live, column in zip(self.live, reversed(columns), strict=True)]
        return torch.stack(kept, time_dim)


def of_trajectories(function: str, call: Trajectories) -> Any:
    """The results of one of the functions for a checked call."""
    return globals()[function].__wrapped__(call)


def _over_trajectories(takes: Function) -> Callable[[Callable[[Trajectories], Results]], Callable[..., Results]]:
    """Give a function of a checked call the arguments of its namesake in `gradscale_ext`."""

    def decorate(compute: Callable[[Trajectories], Results]) -> Callable[..., Results]:
        name = compute.__name__
        FUNCTIONS[name] = takes
        signature = _signature(takes).replace(return_annotation=compute.__annotations__["return"])

        @functools.wraps(compute)
        def function(*args: Any, **kwargs: Any) -> Results:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            arguments = given.arguments
            values = arguments.pop(takes.values, None)
            clips = tuple(arguments.pop(clip) for clip in takes.clips)
            return compute(check_trajectories(name, Trajectories(values=values, clips=clips, **arguments)))

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def _signature(takes: Function) -> inspect.Signature:
    required = inspect.Parameter.empty
    positional: dict[str, Any] = {"rewards": required}
    if takes.values:
        positional[takes.values] = required if takes.reads_values else None
        positional["next_values"] = None if takes.has_observations else required
    keywords: dict[str, Any] = {"ratios": required} if takes.clips else {}
    keywords["discount"] = required
    keywords["n" if takes.has_n else "lambda_"] = 1.0 if takes.clips else required
    keywords |= dict.fromkeys(takes.clips, 1.0) | dict.fromkeys(("terminated", "truncated", "mask"))
    keywords["batch_first"] = True
    kinds = ((positional, inspect.Parameter.POSITIONAL_OR_KEYWORD), (keywords, inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=default) for named, kind in kinds for name, default in named.items()]
    )


@_over_trajectories(Function(reads_values=False))
def lambda_returns(call: Trajectories) -> Tensor:
    """``G_t = r_t + discount_t ((1 - lambda_t) B_t + lambda_t G_{t+1})``; at a cut ``r_t + discount_t B_t``."""
    s, returns = _Steps(call), []
    g = s.zero
    for t in s.backwards:
        g = s.r[t] + s.discounted(t, g)
        returns.append(g)
    return s.result(returns)


@_over_trajectories(Function(reads_values=False, has_n=True))
def n_step_returns(call: Trajectories) -> Tensor:
    """``G_t = r_t + discount_t (r_{t+1} + discount_{t+1} (... B_{t+m-1}))``; m = n, or fewer if a cut comes first."""
    s, returns = _Steps(call), []
    for t in s.backwards:
        last = min(t + call.n, s.shape[1]) - 1
        g = s.bootstrap[last]
        for i in range(last, t - 1, -1):
            g = s.r[i] + times(s.discount[i], torch.where(s.cut[i], s.bootstrap[i], g))
        returns.append(g)
    return s.result(returns)


@_over_trajectories(Function("", reads_values=False, has_n=True))
def n_step_transitions(call: Trajectories) -> NStepTransitions:
    """``r_t + discount_t (r_{t+1} + ...)``, the product of the discounts, and m, of windows of m <= n steps."""
    s = _Steps(call)
    sums, products, counts = [], [], []
    one = torch.ones_like(s.zero)
    for t in s.backwards:
        last = min(t + call.n, s.shape[1]) - 1
        total, product, m = s.zero, one, torch.zeros_like(s.zero, dtype=torch.int64)
        for i in range(last, t - 1, -1):
            is_last = s.cut[i] if i < last else torch.ones_like(s.cut[i])
            total = s.r[i] + times(torch.where(is_last, 0, s.discount[i]), total)
            product = torch.where(is_last, s.discount[i], times(s.discount[i], product, one))
            product = torch.where(s.terminated[i], 0, product)
            m = torch.where(is_last, 0, m) + 1
        sums.append(total)
        products.append(product)
        counts.append(m)
    return NStepTransitions(s.result(sums), s.result(products), s.result(counts).long())


@_over_trajectories(Function())
def generalized_advantages(call: Trajectories) -> GeneralizedAdvantages:
    """``A_t = delta_t + discount_t lambda_t A_{t+1}``, ``delta_t = r_t + discount_t B_t - V_t``; returns are A + V."""
    s, advantages, returns = _Steps(call), [], []
    assert s.v is not None
    a = s.zero
    for t in s.backwards:
        delta = s.r[t] + times(s.discount[t], s.bootstrap[t]) - s.v[t]
        a = delta + times(s.discount[t], s.lambda_[t], a)
        advantages.append(a)
        returns.append(a + s.v[t])
    return GeneralizedAdvantages(s.result(advantages), s.result(returns))


@_over_trajectories(Function(clips=("clip_rho", "clip_c", "clip_pg_rho")))
def vtrace(call: Trajectories) -> VTrace:
    """``e_t = rho_t (r_t + discount_t B_t - V_t) + discount_t c_t e_{t+1}``; targets are V + e."""
    s, targets, advantages = _Steps(call), [], []
    assert s.v is not None
    assert s.ratio is not None
    rho_limit, c_limit, pg_limit = call.clips
    e = next_target = s.zero
    for t in s.backwards:
        pg_rho, rho = s.ratio[t].clamp(max=pg_limit), s.ratio[t].clamp(max=rho_limit)
        advantages.append(times(pg_rho, s.r[t] + s.discounted(t, next_target, pg_rho) - s.v[t]))
        delta = s.r[t] + times(behind(rho, s.discount[t]), s.bootstrap[t]) - s.v[t]
        e = times(rho, delta) + times(s.discount[t], s.lambda_[t], s.ratio[t].clamp(max=c_limit), e)
        next_target = s.v[t] + e
        targets.append(next_target)
    return VTrace(s.result(targets), s.result(advantages))


@_over_trajectories(Function("q_values", has_observations=False, clips=("clip_c",)))
def retrace(call: Trajectories) -> Tensor:
    """``G_t = r_t + discount_t (B_t + c_{t+1} (G_{t+1} - Q_{t+1}))``; at a cut ``r_t + discount_t B_t``."""
    s, returns = _Steps(call), []
    assert s.v is not None
    assert s.ratio is not None
    correction = (s.zero, s.zero, s.zero)  # the factors of c_{t+1} (G_{t+1} - Q_{t+1})
    for t in s.backwards:
        g = s.r[t] + times(s.discount[t], s.bootstrap[t]) + times(s.discount[t], *correction)
        # Only step t - 1 reads c_t, and only if it is not cut.
        is_read = s.live[t - 1] & ~s.cut[t - 1] if t else torch.zeros_like(s.cut[t])
        lambda_, ratio = (torch.where(is_read, x, 0) for x in (s.trace_lambda[t], s.ratio[t]))
        correction = (lambda_, ratio.clamp(max=call.clips[0]), g - s.v[t])
        returns.append(g)
    return s.result(returns)


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
    reward: str = "reward",
    prefix_horizon: int | None = None,
    root_reward: Tensor | None = None,
    batch_first: bool = True,
    check: bool = False,
) -> MuZeroTargets:
    """``z_j = sum_{i<m} discount^i s_{j,j+i} r_{j+i} + discount^m s_{j,j+m} nu_{j+m}``, m <= td_steps_j."""
    steps = num_unroll_steps, td_steps, discount, lengths
    given = (rewards, root_values, *steps, terminated, to_play, reward, prefix_horizon, root_reward, batch_first, check)
    return of_window(check_window(Window(*given)))


def of_window(call: Window) -> MuZeroTargets:
    """The targets of a checked window."""
    check_values(call)
    lengths, td_steps, num_unroll_steps, batch_first = (
        call.lengths,
        call.td_steps,
        call.num_unroll_steps,
        call.batch_first,
    )
    dtype = result_dtype(*call)

    def rows(tensor: Tensor) -> Tensor:
        return (tensor if batch_first or tensor.dim() != 2 else tensor.T).detach()

    r, nu = rows(call.rewards).to(dtype), rows(call.root_values).to(dtype)
    size, moves = r.shape
    length = torch.full((size,), moves, device=r.device) if lengths is None else lengths.clamp(0, moves)
    is_over = torch.zeros(size, dtype=torch.bool, device=r.device) if call.terminated is None else call.terminated
    player = torch.zeros_like(nu, dtype=torch.int64) if call.to_play is None else rows(call.to_play).long()
    is_matrix = isinstance(call.discount, Tensor) and call.discount.dim() == 2
    gamma: Any = rows(call.discount)[:, 0] if is_matrix else call.discount  # type: ignore[arg-type]
    gamma = torch.as_tensor(gamma, dtype=dtype, device=r.device).detach().expand(size)
    row = torch.arange(size, device=r.device)
    if isinstance(td_steps, Tensor):
        n, longest = horizons(td_steps, batch_first).clamp(max=moves).expand(size, num_unroll_steps + 1), moves
    else:
        longest = min(td_steps, moves)
        n = torch.full((size, num_unroll_steps + 1), longest, device=r.device)

    def seen(x: Tensor, i: Tensor, j: int) -> Tensor:
        """``s_{j,i} x_i``: entry i of x, from the perspective of the player to move at j."""
        return torch.where(player[row, i] == player[:, j], x[row, i], -x[row, i])

    values = []
    for j in range(num_unroll_steps + 1):
        if j > moves:
            values.append(torch.zeros_like(gamma))
            continue
        last = torch.minimum(length, j + n[:, j]).clamp(min=j)  # j + m
        z = torch.where((last == length) & is_over, 0, seen(nu, last, j))
        for i in range(min(j + longest, moves) - 1, j - 1, -1):
            z = torch.where(i < last, seen(r, torch.full_like(row, i), j) + times(gamma, z), z)
        values.append(torch.where(j <= length, z, 0))
    steps = torch.arange(num_unroll_steps + 1, device=r.device)
    is_move = steps < length[:, None]
    targets: list[Tensor] = []
    for k in range(1, num_unroll_steps + 1):
        target = torch.where(is_move[:, k - 1], r[:, k - 1], 0) if k <= moves else torch.zeros_like(gamma)
        continues = call.prefix_horizon and (k - 1) % call.prefix_horizon
        targets.append(targets[-1] + target if continues else target)
    if call.root_reward is not None:
        targets.insert(0, call.root_reward.detach().to(dtype))
    stacked = torch.stack(targets, 1) if targets else r.new_zeros(size, 0)
    results = [torch.stack(values, 1), stacked, (steps <= length[:, None]) | is_over[:, None], is_move]
    targets_and_masks = MuZeroTargets(*(results if batch_first else [result.T.contiguous() for result in results]))
    check_targets(call, targets_and_masks)
    return targets_and_masks
