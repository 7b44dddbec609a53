"""Random trajectories, and returns by definition: sums over one episode, in NumPy, row by row.

An episode `e` is a dict of arrays with an entry for each step: rewards r, values v, next values w, discounts gamma,
lambda and ratio. `nu` are the root values of MuZero.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def nstep(r, w, gamma, t, m):
    """Sum of m discounted rewards from step t, plus the discounted value after them."""
    weights = np.concatenate([[1.0], np.cumprod(gamma[t : t + m])])
    return (weights[:m] * r[t : t + m]).sum() + weights[m] * w[t + m - 1]


def lambda_return(e, t):
    """Forward view: n-step returns, weighted by products of lambda."""
    left = len(e["r"]) - t
    total, weight = 0.0, 1.0
    for m in range(1, left + 1):
        stop = 1.0 if m == left else 1 - e["lambda"][t + m - 1]
        total += weight * stop * nstep(e["r"], e["w"], e["gamma"], t, m)
        weight *= e["lambda"][t + m - 1]
    return total


def n_step_return(e, t, n):
    return nstep(e["r"], e["w"], e["gamma"], t, min(n, len(e["r"]) - t))


def advantage(e, t):
    """Sum of temporal differences."""
    delta = e["r"] + e["gamma"] * e["w"] - e["v"]
    weights = np.cumprod(np.concatenate([[1.0], (e["gamma"] * e["lambda"])[t:-1]]))
    return (weights * delta[t:]).sum()


def vtrace_target(e, t, clip_rho=1.0, clip_c=1.0):
    if t == len(e["r"]):
        return np.nan
    delta = np.minimum(clip_rho, e["ratio"]) * (e["r"] + e["gamma"] * e["w"] - e["v"])
    c = e["lambda"] * np.minimum(clip_c, e["ratio"])
    weights = np.cumprod(np.concatenate([[1.0], (e["gamma"] * c)[t:-1]]))
    return e["v"][t] + (weights * delta[t:]).sum()


def vtrace_advantage(e, t, clip_rho=1.0, clip_c=1.0, clip_pg_rho=1.0):
    u = e["w"][t]
    if t + 1 < len(e["r"]):
        u = (1 - e["lambda"][t]) * u + e["lambda"][t] * vtrace_target(e, t + 1, clip_rho, clip_c)
    return min(clip_pg_rho, e["ratio"][t]) * (e["r"][t] + e["gamma"][t] * u - e["v"][t])


def retrace_target(e, t, clip_c=1.0):
    c = e["lambda"] * np.minimum(clip_c, e["ratio"])
    delta = e["r"] + e["gamma"] * e["w"] - e["v"]
    coefficients = np.concatenate([[1.0], e["gamma"][t:-1] * c[t + 1 :]])
    return e["v"][t] + (np.cumprod(coefficients) * delta[t:]).sum()


#: Definitions of each function's results, with n = 3 for n-step returns.
DEFINITIONS = {
    "lambda_returns": (lambda_return,),
    "n_step_returns": (lambda e, t: n_step_return(e, t, 3),),
    "generalized_advantages": (advantage, lambda e, t: advantage(e, t) + e["v"][t]),
    "vtrace": (vtrace_target, vtrace_advantage),
    "retrace": (retrace_target,),
}


def muzero_row(r, nu, length, is_over, steps, n, gamma, to_play=None, horizon=0, root_reward=None):
    """Results of one row by definition. `n` is a number, or has one for each unroll step."""
    horizons = np.broadcast_to(np.maximum(n, 1), steps + 1)

    def sign(j, i):
        return 1.0 if to_play is None or to_play[j] == to_play[min(i, len(r))] else -1.0

    values = np.zeros(steps + 1)
    for j in range(min(steps, length) + 1):
        m = min(int(horizons[j]), length - j)
        nu_last = 0.0 if is_over and j + m == length else nu[j + m]
        values[j] = sum(gamma**i * sign(j, j + i) * r[j + i] for i in range(m)) + gamma**m * sign(j, j + m) * nu_last
    received = np.array([r[k - 1] if k - 1 < length else 0.0 for k in range(1, steps + 1)])
    rewards = received.copy()
    for k in range(1, steps + 1 if horizon else 0):
        rewards[k - 1] = received[k - 1 - (k - 1) % horizon : k].sum()
    if root_reward is not None:
        rewards = np.append(root_reward, rewards)
    known = np.array([j <= length or is_over for j in range(steps + 1)])
    return values, rewards, known, np.arange(steps + 1) < length


def episodes(terminated, truncated, mask):
    """(begin, end, terminated) of the episodes of one row."""
    found, begin, steps = [], None, len(mask)
    for t in range(steps):
        if not mask[t]:
            continue
        begin = t if begin is None else begin
        if terminated[t] or truncated[t] or t == steps - 1 or not mask[t + 1]:
            found.append((begin, t + 1, bool(terminated[t])))
            begin = None
    return found


def by_definition(data, entry):
    """`entry(episode, t)` for every transition of every row; 0 where masked."""
    arrays = {name: value.double().numpy() for name, value in data.items()}
    flags = [data[name].numpy() for name in ("terminated", "truncated", "mask")]
    out = np.zeros(data["rewards"].shape)
    names = {
        "rewards": "r",
        "values": "v",
        "next_values": "w",
        "discount": "gamma",
        "lambda_": "lambda",
        "ratios": "ratio",
    }
    for b in range(out.shape[0]):
        for begin, end, is_over in episodes(*[flag[b] for flag in flags]):
            e = {short: arrays[name][b, begin:end].copy() for name, short in names.items()}
            if is_over:
                e["w"][-1] = 0.0
            for t in range(end - begin):
                out[b, begin + t] = entry(e, t)
    return torch.from_numpy(out)


def random_data(seed, batch=4, steps=12, ends=0.15, padding=0.1, dtype=torch.float64):
    """Tensors `[B, T]` by name. Inside an episode, `next_values` at step t equals `values` at step t + 1."""
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(batch, steps, generator=g, dtype=torch.float64)

    def uniform():
        return torch.rand(batch, steps, generator=g, dtype=torch.float64)

    terminated, truncated, mask = uniform() < ends, uniform() < ends, uniform() >= padding
    values, next_values = normal(), normal()
    is_inside = ~(terminated | truncated)[:, :-1] & mask[:, 1:]
    next_values[:, :-1] = torch.where(is_inside, values[:, 1:], next_values[:, :-1])
    data = {
        "rewards": normal(),
        "values": values,
        "next_values": next_values,
        "discount": 0.8 + 0.2 * uniform(),
        "lambda_": uniform(),
        "ratios": normal().exp(),
    }
    data = {name: value.to(dtype) for name, value in data.items()}
    return data | {"terminated": terminated, "truncated": truncated, "mask": mask}


# ---- The loops, one number at a time -------------------------------------------------------------------------------


def product(*factors):
    """The product of coefficients and x, the last factor; exactly 0 if a coefficient is 0, also where others, or x, are
    not finite."""
    return 0.0 if 0 in factors[:-1] else math.prod(factors)


def looped_row(function, e, n, clips):
    """The results of one row, with Python's numbers: the recurrences as the documentation writes them.

    `e` holds lists, also of the flags. `clips` are the limits of the function, None for none.
    """
    steps = len(e["r"])
    limits = [np.inf if clip is None else clip for clip in clips]
    results, later = [None] * steps, None  # what step t + 1 hands on
    for t in reversed(range(steps)):
        r, v, gamma, lambda_, ratio = (float(e[name][t]) for name in ("r", "v", "gamma", "lambda", "ratio"))
        if not e["mask"][t]:
            results[t], later = (0.0, 0.0), None
            continue
        is_cut = e["terminated"][t] or e["truncated"][t] or t == steps - 1 or not e["mask"][t + 1]
        b = 0.0 if e["terminated"][t] else float(e["w"][t])
        one_step = r + product(gamma, b)

        def clipped(k, ratio=ratio):
            return limits[k] if limits[k] < ratio else ratio

        if function == "lambda_returns":
            later = one_step if is_cut else r + product(gamma, product(1 - lambda_, b) + product(lambda_, later))
            results[t] = (later,)
        elif function == "generalized_advantages":
            later = one_step - v + (0.0 if is_cut else product(gamma, lambda_, later))
            results[t] = (later, later + v)
        elif function == "n_step_returns":
            # The returns of windows that begin here and have 1, 2, ... steps; the last one that there is serves others.
            later = [one_step] if is_cut else [one_step, *[r + product(gamma, g) for g in later[: n - 1]]]
            results[t] = (later[-1],)
        elif function == "vtrace":
            e_later, target = (0.0, 0.0) if is_cut else later
            own = product(clipped(0), one_step - v)
            own += 0.0 if is_cut else product(gamma, lambda_, clipped(1), e_later)
            u = b if is_cut else product(1 - lambda_, b) + product(lambda_, target)
            results[t] = (v + own, product(clipped(2), r + product(gamma, u) - v))
            later = (own, v + own)
        else:
            assert function == "retrace"
            g = one_step
            if not is_cut:
                c, difference = later
                g = r + product(gamma, b + (0.0 if 0 in c else c[0] * c[1] * difference))
            results[t] = (g,)
            later = ((lambda_, clipped(0)), g - v)
    return results


def looped(function, data, n=3, clips=(1.0, 1.0, 1.0)):
    """The results of all rows, each `[B, T]`, from the loops."""
    names = {"rewards": "r", "values": "v", "next_values": "w", "discount": "gamma", "lambda_": "lambda"}
    names |= {"ratios": "ratio"} | {flag: flag for flag in ("terminated", "truncated", "mask")}
    lists = {short: data[name].tolist() for name, short in names.items()}
    rows = [
        looped_row(function, {short: values[row] for short, values in lists.items()}, n, clips)
        for row in range(len(lists["r"]))
    ]
    count = 2 if function in ("generalized_advantages", "vtrace") else 1
    return tuple(
        torch.tensor([[step[k] for step in row] for row in rows], dtype=torch.float64).view(data["rewards"].shape)
        for k in range(count)
    )
