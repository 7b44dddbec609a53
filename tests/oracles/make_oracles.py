"""Computes the numbers in this folder with rlax, optax and mctx, which share no code with this package.

    pip install jax==0.10.2 rlax==0.1.9 optax==0.2.8 mctx==0.0.71
    python tests/oracles/make_oracles.py

These versions and the default seed reproduce the files; another processor may round the last digits differently.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import mctx
    import optax
    import rlax
except ImportError as error:
    raise SystemExit(
        f"make_oracles.py: {error}. Install them: pip install jax==0.10.2 rlax==0.1.9 optax==0.2.8 mctx==0.0.71"
    ) from None

jax.config.update("jax_enable_x64", True)

EPS = 1e-3  # of signed_hyperbolic
# B, K, bins, A, smallest and largest centre, weight of the value head, spread of the value targets
UPDATES = [
    (3, 2, 11, 4, -5.0, 5.0, 0.25, 10.0),
    (2, 5, 21, 3, -10.0, 10.0, 1.0, 200.0),
    (4, 1, 5, 2, -2.0, 2.0, 0.5, 1.0),
]


def two_hot(x, minimum, maximum, num_bins):
    """[..., num_bins] by linear interpolation; rlax's own version adds 1e-5 to a denominator."""
    position = (jnp.clip(x, minimum, maximum) - minimum) / (maximum - minimum) * (num_bins - 1)
    low = jnp.clip(jnp.floor(position), 0, num_bins - 2)
    fraction = (position - low)[..., None]
    lower, upper = (jax.nn.one_hot(bins, num_bins, dtype=x.dtype) for bins in (low, low + 1))
    return lower * (1 - fraction) + upper * fraction


def cross_entropy(logits, target):
    return -jnp.sum(target * jax.nn.log_softmax(logits), -1)


def muzero_loss(predictions, targets, weights, mask, value_weight, minimum, maximum):
    """The update of the MuZero pseudocode: the losses of the steps after the root have 1/K of their gradient."""
    num_unroll_steps = len(predictions["value"]) - 1
    num_bins = predictions["value"][0].shape[-1]

    def scalar_loss(head, step):
        transformed = rlax.signed_hyperbolic(targets[head][:, step], EPS)
        return cross_entropy(predictions[head][step], two_hot(transformed, minimum, maximum, num_bins))

    total = 0.0
    for step in range(num_unroll_steps + 1):
        policy_loss = cross_entropy(predictions["policy"][step], targets["policy"][:, step])
        loss = value_weight * scalar_loss("value", step) + scalar_loss("reward", step) + policy_loss
        loss = jnp.where(mask[:, step], loss, 0.0)
        total = total + optax.scale_gradient(loss, 1.0 if step == 0 else 1.0 / num_unroll_steps)
    return jnp.mean(weights * total)


def update(rng, batch, num_unroll_steps, num_bins, num_actions, minimum, maximum, value_weight, spread):
    """Random predictions and targets, with the loss and its gradients."""
    steps = num_unroll_steps + 1
    sizes = {"value": num_bins, "reward": num_bins, "policy": num_actions}
    predictions = {head: [rng.normal(size=(batch, size)) * 2 for _ in range(steps)] for head, size in sizes.items()}
    targets = {
        "value": rng.normal(size=(batch, steps)) * spread,
        "reward": rng.normal(size=(batch, steps)),
        "policy": rng.dirichlet(np.ones(num_actions), size=(batch, steps)),
    }
    weights = rng.uniform(0.2, 1.0, size=batch)
    mask = rng.uniform(size=(batch, steps)) > 0.2
    loss, gradients = jax.value_and_grad(muzero_loss)(
        predictions, targets, weights, mask, value_weight, minimum, maximum
    )
    support = {"minimum": minimum, "maximum": maximum, "num_bins": num_bins}
    return {
        "support": {**support, "transform": "signed_hyperbolic", "eps": EPS},
        "unroll_steps": num_unroll_steps,
        "value_weight": value_weight,
        "reward_weight": 1.0,
        "policy_weight": 1.0,
        "step_gradient_scale": "1 for step 0, 1/K after",
        "reduction": "mean over the batch of importance_weight * sample loss",
        "predictions": dict(sorted(predictions.items())),
        "targets": dict(sorted(targets.items())),
        "importance_weights": weights,
        "mask": mask,
        "loss": float(loss),
        "gradients": gradients,
    }


def transforms(rng):
    """Values, their transforms and inverse transforms, and scalars and their two-hot vectors."""
    x = np.concatenate([[0, 1, -1, 10, 100, -3012.33, 1e5, 1e-6, -1e-3, 0.3], rng.normal(size=10) * 50])
    y = np.linspace(-300, 300, 13)
    z = rng.uniform(-1.5, 1.5, size=12)
    hyperbolic = rlax.signed_hyperbolic(jnp.asarray(x), EPS)
    back = rlax.signed_parabolic(hyperbolic, EPS)
    return {
        "signed_hyperbolic": {"eps": EPS, "x": x, "y": hyperbolic, "round_trip": back},
        "signed_parabolic": {"eps": EPS, "x": y, "y": rlax.signed_parabolic(jnp.asarray(y), EPS)},
        "symlog": {"x": x, "y": rlax.signed_logp1(jnp.asarray(x))},
        "two_hot": {
            "minimum": -1.0,
            "maximum": 1.0,
            "num_bins": 5,
            "x": z,
            "p": two_hot(jnp.asarray(z), -1.0, 1.0, 5),
            "rlax_p_within_1e_4": rlax.transform_to_2hot(jnp.asarray(z), -1.0, 1.0, 5),
        },
    }


def returns(rng, batch=3, steps=12, actions=4, n=3):
    """Trajectories, and their returns computed by rlax; a discount of 0 ends an episode."""
    ends = rng.uniform(size=(batch, steps)) < 0.2
    q, pi = rng.normal(size=(batch, steps + 1, actions)), rng.dirichlet(np.ones(actions), size=(batch, steps + 1))
    taken, mu = rng.integers(actions, size=(batch, steps + 1)), rng.uniform(0.1, 1.0, size=(batch, steps + 1))
    values, rewards = rng.normal(size=(batch, steps + 1)), rng.normal(size=(batch, steps))
    discount = np.where(ends, 0.0, rng.uniform(0.8, 1.0, size=(batch, steps)))
    lambda_, ratios = rng.uniform(size=(batch, steps)), np.exp(rng.normal(size=(batch, steps)))

    def next_lambda(lam):
        """rlax passes lambda with the state after the transition."""
        return np.append(lam[1:], 1.0)

    def compute(b):
        r, gamma, lam, rho, v = rewards[b], discount[b], lambda_[b], ratios[b], values[b]
        error, advantage, _ = rlax.vtrace_td_error_and_advantage(v[:-1], v[1:], r, gamma, rho, lam, 0.9, 1.3)
        q_taken = q[b][np.arange(steps), taken[b][:-1]]
        retrace_error = rlax.retrace(
            q[b][:-1], q[b][1:], taken[b][:-1], taken[b][1:], r, gamma, pi[b][1:], mu[b][1:], next_lambda(lam), eps=0.0
        )
        advantages = rlax.truncated_generalized_advantage_estimation(r, gamma, lam, v)
        return {
            "lambda_returns": [rlax.lambda_returns(r, gamma, v[1:], lam)],
            "n_step_returns": [rlax.n_step_bootstrapped_returns(r, gamma, v[1:], n)],
            "generalized_advantages": [advantages, advantages + v[:-1]],
            "vtrace": [v[:-1] + error, advantage],
            "retrace": [q_taken + retrace_error],
        }

    rows = [compute(b) for b in range(batch)]
    action_ratios = np.take_along_axis(pi, taken[..., None], -1)[..., 0] / mu
    return {
        "rewards": rewards,
        "values": values,
        "discount": discount,
        "lambda_": lambda_,
        "ratios": ratios,
        "n": n,
        "clip_rho": 0.9,
        "clip_pg_rho": 1.3,
        "q_values": np.take_along_axis(q, taken[..., None], -1)[:, :-1, 0],
        "expected_q_values": (pi * q).sum(-1)[:, 1:],
        "action_ratios": action_ratios[:, :-1],
        "results": {name: [[row[name][i] for row in rows] for i in range(len(rows[0][name]))] for name in rows[0]},
    }


def completed_q(rng, batch=6, actions=5):
    """Roots of searches with the policy targets of mctx; row 0 has no visits, and row 1 visits everywhere."""
    visit_counts = rng.integers(0, 20, size=(batch, actions)) * (rng.uniform(size=(batch, actions)) < 0.6)
    visit_counts[0], visit_counts[1] = 0, np.arange(1, actions + 1)
    prior_logits, q_values = rng.normal(size=(batch, actions)) * 3, rng.normal(size=(batch, actions)) * 2
    prior_logits[2, visit_counts[2].argmax()] = -800.0  # its probability is 0 in float64
    value = rng.normal(size=batch)
    cases = [
        {},
        {"use_mixed_value": False},
        {"rescale_values": False},
        {"maxvisit_init": 8.0, "value_scale": 0.5, "epsilon": 3.0},
    ]

    def policy(options, logits, q, visits, raw_value):
        """What `gumbel_muzero_policy` returns as action_weights after its search."""
        q_of_root = SimpleNamespace(
            qvalues=lambda node: q,
            children_visits=visits[None],
            children_prior_logits=logits[None],
            raw_values=raw_value[None],
        )
        return jax.nn.softmax(logits + mctx.qtransform_completed_by_mix_value(q_of_root, jnp.int32(0), **options))

    results = [
        jax.vmap(functools.partial(policy, options))(*map(jnp.asarray, (prior_logits, q_values, visit_counts, value)))
        for options in cases
    ]
    return {
        "made_with": {"mctx": importlib.metadata.version("mctx")},
        "prior_logits": prior_logits,
        "q_values": q_values,
        "visit_counts": visit_counts,
        "value": value,
        "cases": [{"options": options, "result": result} for options, result in zip(cases, results, strict=True)],
    }


def return_scale(rng, calls=6, batch=3, steps=7):
    """Batches of returns with masks, and percentiles by JAX and NumPy, with the running ones as in DreamerV3."""
    decay, fractions = 0.9, (0.05, 0.95)
    returns = rng.normal(size=(calls, batch, steps)) * 20 + 5
    mask = rng.uniform(size=returns.shape) < 0.7
    mask[1], mask[2] = False, True
    running, correction, rows = np.zeros(2), 0.0, []
    for entries, counts in zip(returns, mask, strict=True):
        percentiles = None
        if counts.any():
            percents = 100 * np.array(fractions)
            percentiles = np.asarray(jnp.percentile(jnp.asarray(entries[counts]), percents))
            np.testing.assert_allclose(percentiles, np.percentile(entries[counts], percents), rtol=1e-12)
            running = decay * running + (1 - decay) * percentiles
            correction = decay * correction + (1 - decay)
        rows.append({"percentiles": percentiles, "running": running, "debiased": running / correction})
    return {"decay": decay, "low": 0.05, "high": 0.95, "returns": returns, "mask": mask, "calls": rows}


def main():
    parser = argparse.ArgumentParser(description="Write the JSON files of this folder.")
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="folder to write to (default: next to this file)"
    )
    parser.add_argument("--seed", type=int, default=20261120, help="of the random numbers (default: %(default)s)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    versions = {module.__name__: module.__version__ for module in (jax, rlax, optax)}
    updates = {"made_with": versions, "dtype": "float64", "cases": [update(rng, *sizes) for sizes in UPDATES]}
    contents = {"muzero_update": updates, "transforms": transforms(rng), "returns": returns(rng)}
    contents |= {"completed_q": completed_q(rng), "return_scale": return_scale(rng)}
    for name, content in contents.items():
        (arguments.folder / f"{name}.json").write_text(
            json.dumps(content, default=lambda array: np.asarray(array).tolist())
        )


if __name__ == "__main__":
    main()
