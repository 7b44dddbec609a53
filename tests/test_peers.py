"""Parity with other projects: their loss in plain PyTorch, compared with the equivalent heads and arguments.

Each project's computation is taken from its paper or published formula and written here without gradscale_ext, in fp64.
Loss and gradients of every prediction agree to 1e-10. `docs/coming_from.md` describes the same for users.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import gradscale_ext as gs

B, K, A, D = 3, 4, 5, 6
T = K + 1


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# ---- Random arguments -----------------------------------------------------------------------------------------------


def normal(*shape, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64)


def prediction(*shape):
    return normal(*shape, scale=2.0).requires_grad_()


def per_step(count, *shape):
    """A list of `count` predictions `[B, *shape]`, as from an unroll."""
    return [prediction(B, *shape) for _ in range(count)]


def distributions(*shape):
    return normal(*shape, scale=2.0).softmax(-1)


def valid_mask(*valid):
    """0/1 `[B, K + 1]`: the first `valid[b]` entries of sample b are 1."""
    return (torch.arange(T) < torch.tensor(valid).unsqueeze(1)).double()


def after_root(mask):
    """Bool mask `[B, T]` of all steps, from a 0/1 mask whose entry k - 1 is for step k. The root is always valid."""
    return torch.cat((torch.ones(B, 1), mask[:, :K]), 1).bool()


# ---- Formulas that several projects share ---------------------------------------------------------------------------


def h(x, eps=1e-3):
    """Pohlen et al. 2018."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x


def h_inverse(y, eps=1e-3):
    """Pohlen et al. 2018, proposition A.2."""
    root = ((1 + 4 * eps * (y.abs() + 1 + eps)).sqrt() - 1) / (2 * eps)
    return y.sign() * (root.square() - 1)


def symlog(x):
    return x.sign() * x.abs().log1p()


def symexp(x):
    return x.sign() * x.abs().expm1()


def integers(limit):
    return torch.arange(-limit, limit + 1, dtype=torch.float64)


def two_hot(x, bins):
    """The distribution on two neighbouring bins whose mean is x."""
    x = x.clamp(bins[0], bins[-1])
    upper = torch.searchsorted(bins, x).clamp(1, len(bins) - 1)
    share = (x - bins[upper - 1]) / (bins[upper] - bins[upper - 1])
    one_hot = torch.eye(len(bins), dtype=bins.dtype)
    return (1 - share).unsqueeze(-1) * one_hot[upper - 1] + share.unsqueeze(-1) * one_hot[upper]


def cross_entropy(logits, target):
    return -(target * logits.log_softmax(-1)).sum(-1)


def entropy(logits):
    return cross_entropy(logits, logits.softmax(-1))


def mean_of(logits, bins):
    return (logits.softmax(-1) * bins).sum(-1)


def cosine(x, y, eps):
    return ((x / x.norm(dim=-1, keepdim=True).clamp(min=eps)) * (y / y.norm(dim=-1, keepdim=True).clamp(min=eps))).sum(
        -1
    )


# ---- Comparison -----------------------------------------------------------------------------------------------------


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def same_loss(ours, theirs, *predictions):
    """Compare the values, and the gradients of all predictions (tensors, or lists and dicts of tensors)."""
    leaves = list(_leaves(predictions))
    same(ours, theirs)
    gradients = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs)]
    assert all(gradient.any() for gradient in gradients[1])
    for a, b in zip(*gradients, strict=True):
        same(a, b)


def _leaves(nested):
    if isinstance(nested, torch.Tensor):
        yield nested
        return
    for entry in nested.values() if isinstance(nested, dict) else nested:
        yield from _leaves(entry)


# ---- LightZero ------------------------------------------------------------------------------------------------------

BINS = integers(300)


def with_consistency(values, reward, value_weight, consistency_weight, transform=lambda x: x):
    """Heads, predictions and targets that LightZero and both EfficientZeros share."""
    support = gs.Support.muzero()
    heads = {name: gs.TwoHot(support, weight=value_weight) for name in values}
    heads[reward] = gs.TwoHot(support, first_step=1)
    heads["policy"] = gs.SoftCrossEntropy()
    heads["consistency"] = gs.NegativeCosine(eps=1e-5, weight=consistency_weight, first_step=1)
    sizes = {**dict.fromkeys((*values, reward), (601,)), "policy": (A,), "consistency": (D,)}
    x = {name: per_step(T - head.first_step, *sizes[name]) for name, head in heads.items()}
    targets = dict.fromkeys(values, transform(normal(B, T, scale=3e4)))
    targets |= {reward: transform(normal(B, K, scale=5)), "policy": distributions(B, T, A)}
    return heads, x, targets | {"consistency": normal(B, K, D)}


def test_lightzero_muzero():
    """LightZero's MuZero policy, with EfficientZero's consistency term, entropy bonus and smoothed policy targets.

    Only the consistency loss is masked; the gradient of the whole loss, root included, is divided by K.
    """
    heads, x, targets = with_consistency(("value",), "reward", value_weight=0.25, consistency_weight=2.0)
    heads["policy"] = gs.SoftCrossEntropy(label_smoothing=0.1, entropy_weight=5e-3)
    z, u, pi, latent = targets.values()
    pi[0, 3:] = 0  # after the end of the game
    mask, w = valid_mask(3, 5, 4), torch.rand(B, dtype=torch.float64)

    smooth = 0.9 * pi + 0.1 / A
    value = sum(cross_entropy(x["value"][k], two_hot(h(z[:, k]), BINS)) for k in range(T))
    reward = sum(cross_entropy(x["reward"][k], two_hot(h(u[:, k]), BINS)) for k in range(K))
    policy = sum(cross_entropy(x["policy"][k], smooth[:, k]) for k in range(T))
    bonus = sum(entropy(x["policy"][k]) for k in range(T))
    consistency = sum(-cosine(x["consistency"][k], latent[:, k], 1e-5) * mask[:, k] for k in range(K))
    theirs = (w * (2 * consistency + policy + 0.25 * value + reward - 5e-3 * bonus)).mean()
    theirs.register_hook(lambda gradient: gradient / K)

    options = {"importance_weights": w, "mask": {"consistency": after_root(mask)}}
    out = gs.multi_step_loss(heads, x, targets, step_gradient_scale=[1 / K] * T, **options)
    same_loss(out.loss, theirs, x)
    root = h_inverse(mean_of(x["value"][0], BINS))
    same(gs.priorities(out.expected["value"], z), ((root - z[:, 0]).abs() + 1e-6).detach())


def test_lightzero_gumbel_muzero():
    """The policy loss of LightZero's Gumbel MuZero: a divergence whose terms are averaged, not summed, over actions."""
    x, pi, mask = per_step(T, A), distributions(B, T, A), valid_mask(3, 5, 4)
    pi[1, 2] = torch.eye(A)[0]

    divergence = lambda k: functional.kl_div(x[k].log_softmax(-1), pi[:, k], reduction="none").mean(-1)
    theirs = sum(divergence(k) * mask[:, k] for k in range(T)).mean()
    theirs.register_hook(lambda gradient: gradient / K)

    heads = {"policy": gs.SoftCrossEntropy(subtract_target_entropy=True, weight=1 / A)}
    scale = [1 / K] * T
    out = gs.multi_step_loss(heads, {"policy": x}, {"policy": pi}, step_gradient_scale=scale, mask=mask.bool())
    same_loss(out.loss, theirs, [x[k] for k in range(T)])


# ---- muzero-general -------------------------------------------------------------------------------------------------


def test_muzero_general():
    """muzero-general: the root's gradient is unscaled, a later step's is divided by the sample's remaining steps."""
    bins, support = integers(10), gs.Support.muzero(10)
    x = {"value": per_step(T, 21), "reward": per_step(K, 21), "policy": per_step(T, A)}
    z, u, pi = normal(B, T, scale=60), normal(B, T, scale=5), distributions(B, T, A)
    remaining, w = torch.tensor([K, 2, 1]).double(), torch.rand(B, dtype=torch.float64)

    theirs = 0
    for k in range(T):
        loss = 0.25 * cross_entropy(x["value"][k], two_hot(h(z[:, k]), bins)) + cross_entropy(x["policy"][k], pi[:, k])
        if k > 0:
            loss = loss + cross_entropy(x["reward"][k - 1], two_hot(h(u[:, k]), bins))
            loss.register_hook(lambda gradient: gradient / remaining)
        theirs = theirs + loss
    theirs = (w * theirs).mean()

    heads = {
        "value": gs.TwoHot(support, weight=0.25),
        "reward": gs.TwoHot(support, first_step=1),
        "policy": gs.SoftCrossEntropy(),
    }
    scale = torch.cat((torch.ones(B, 1), (1 / remaining).unsqueeze(1).expand(B, K)), 1)
    targets = {"value": z, "reward": u[:, 1:], "policy": pi}
    out = gs.multi_step_loss(heads, x, targets, step_gradient_scale=scale, importance_weights=w)
    same_loss(out.loss, theirs, x)
    for k in range(T):  # muzero-general stores a priority for every step
        error = (h_inverse(mean_of(x["value"][k], bins)) - z[:, k]).abs().detach()
        nu, target = out.expected["value"][:, k : k + 1], z[:, k : k + 1]
        same(gs.priorities(nu, target, alpha=0.5, eps=0.0), error.sqrt())


def test_half_the_gradient_of_a_hidden_state():
    """muzero-general, EfficientZero and EfficientZeroV2 halve the total gradient of a recurrent state with a hook.

    The dynamics are s' = w s, and each state s adds s to the loss. `unroll` halves only the gradient from later steps;
    `scale_gradient` in `recurrent`, before the heads read the state, halves the total gradient.
    """

    def with_hook(root, w):
        total, hidden = root.sum(), root
        for _ in range(5):
            hidden = w * hidden
            hidden.register_hook(lambda gradient: 0.5 * gradient)
            total = total + hidden.sum()
        return total

    def with_unroll(root, w):
        def recurrent(hidden, action):
            hidden = gs.scale_gradient(w * hidden, 0.5)
            return {"value": hidden}, hidden

        initial = lambda observation: ({"value": observation}, observation)
        outputs = gs.unroll(initial, recurrent, root, torch.zeros(1, 5), hidden_scale=1.0)
        return sum(entry.sum() for entry in outputs["value"])

    leaves = [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    same_loss(with_unroll(*leaves), with_hook(*leaves), leaves)
    root, w = torch.autograd.grad(with_unroll(*leaves), leaves)
    assert (root.item(), w.item()) == (1.96875, 4.03125)


# ---- EfficientZero --------------------------------------------------------------------------------------------------


def test_efficientzero():
    """EfficientZero (Ye et al. 2021): value prefixes, consistency, and a mask on all recurrent steps of all heads."""
    heads, x, targets = with_consistency(("value",), "value_prefix", value_weight=0.25, consistency_weight=2.0)
    z, prefix, pi, latent = targets.values()
    mask, w = valid_mask(2, 4, 3)[:, :K], torch.rand(B, dtype=torch.float64)

    theirs = 0.25 * cross_entropy(x["value"][0], two_hot(h(z[:, 0]), BINS)) + cross_entropy(x["policy"][0], pi[:, 0])
    for k in range(1, T):
        step = 0.25 * cross_entropy(x["value"][k], two_hot(h(z[:, k]), BINS))
        step = step + cross_entropy(x["value_prefix"][k - 1], two_hot(h(prefix[:, k - 1]), BINS))
        step = step + cross_entropy(x["policy"][k], pi[:, k])
        step = step - 2 * cosine(x["consistency"][k - 1], latent[:, k - 1], 1e-5)
        theirs = theirs + step * mask[:, k - 1]
    theirs = (w * theirs).mean()
    theirs.register_hook(lambda gradient: gradient / K)

    options = {"importance_weights": w, "mask": after_root(mask)}
    out = gs.multi_step_loss(heads, x, targets, step_gradient_scale=[1 / K] * T, **options)
    same_loss(out.loss, theirs, x)
    root = h_inverse(mean_of(x["value"][0], BINS))  # EfficientZero sets |root| < 1e-3 to 0, which does not occur here
    assert (root.abs() > 1e-3).all()
    same(gs.priorities(out.expected["value"], z), ((root - z[:, 0]).abs() + 1e-6).detach())


# ---- EfficientZeroV2 ------------------------------------------------------------------------------------------------


def test_efficientzero_v2_atari():
    """EfficientZeroV2 (Wang et al. 2024), discrete actions, with two critics, each weighted by one half.

    In its transform for Atari the term eps x has the wrong sign for x < 0. For x >= 0 the transform equals h; the
    targets here are >= 0.
    """
    their_h = lambda x: torch.where(x < 0, -1.0, 1.0) * ((x.abs() + 1).sqrt() - 1 + 1e-3 * x)
    minus_thousand = torch.tensor(-1000.0, dtype=torch.float64)
    same(gs.signed_hyperbolic(minus_thousand), 1 - 1001**0.5 - 1 + 0 * minus_thousand)
    same(their_h(minus_thousand), 1 - 1001**0.5 + 1 + 0 * minus_thousand)

    critics = ("value_0", "value_1")
    heads, x, targets = with_consistency(critics, "value_prefix", 0.5 * 0.5 / 2, 5.0, torch.abs)
    z, _, prefix, pi, latent = targets.values()
    mask, w = valid_mask(2, 4, 3)[:, :K], torch.rand(B, dtype=torch.float64)

    def shared_terms(k):
        target = two_hot(their_h(z[:, k]), BINS)
        critics = torch.stack([0.5 * cross_entropy(x[f"value_{i}"][k], target) for i in (0, 1)])
        return 0.5 * critics.mean(0) + cross_entropy(x["policy"][k], pi[:, k])

    def recurrent_terms(k):
        reward = cross_entropy(x["value_prefix"][k - 1], two_hot(their_h(prefix[:, k - 1]), BINS))
        return reward - 5 * cosine(x["consistency"][k - 1], latent[:, k - 1], 1e-5)

    theirs = shared_terms(0) + sum((shared_terms(k) + recurrent_terms(k)) * mask[:, k - 1] for k in range(1, T))
    theirs = (w * theirs).mean()
    theirs.register_hook(lambda gradient: gradient / K)

    options = {"importance_weights": w, "mask": after_root(mask)}
    out = gs.multi_step_loss(heads, x, targets, step_gradient_scale=[1 / K] * T, **options)
    same_loss(out.loss, theirs, x)
    roots = torch.stack([h_inverse(mean_of(x[f"value_{i}"][0], BINS)) for i in (0, 1)])
    smallest = torch.minimum(out.expected["value_0"], out.expected["value_1"])
    same(gs.priorities(smallest, z), ((roots.amin(0) - z[:, 0]).abs() + 1e-6).detach())


def test_efficientzero_v2_continuous():
    """EfficientZeroV2 for continuous actions: 51 bins between h(-299) and h(299), and its own policy loss.

    The policy loss is minus the log-likelihood of the best action under a Gaussian squashed by tanh.
    """
    limit = 300**0.5 - 1 + 0.299
    bins, support = torch.linspace(-limit, limit, 51, dtype=torch.float64), gs.Support(-limit, limit, 51)
    value, mean, std = per_step(T, 51), per_step(T, D), [normal(B, D).exp().requires_grad_() for _ in range(T)]
    z, best = normal(B, T, scale=60), normal(B, T, D).tanh()
    mask = valid_mask(2, 4, 3)[:, :K]

    def negative_log_likelihood(k):
        raw = best[:, k].atanh()
        log_normal = -0.5 * ((raw - mean[k]) / std[k]).square() - std[k].log() - 0.5 * math.log(2 * math.pi)
        return -(log_normal - (1 - best[:, k].square()).log()).sum(-1)

    policy = [negative_log_likelihood(k) for k in range(T)]
    step = lambda k: 0.5 * 0.5 * cross_entropy(value[k], two_hot(h(z[:, k]), bins)) + policy[k]
    theirs = (step(0) + sum(step(k) * mask[:, k - 1] for k in range(1, T))).mean()
    theirs.register_hook(lambda gradient: gradient / K)

    heads = {"value": gs.TwoHot(support, weight=0.25), "policy": gs.PerStepLoss()}
    x, scale = {"value": value, "policy": policy}, [1 / K] * T
    out = gs.multi_step_loss(heads, x, {"value": z}, step_gradient_scale=scale, mask=after_root(mask))
    same_loss(out.loss, theirs, value, mean, std)


def test_efficientzero_v2_symlog():
    """EfficientZeroV2 with `type: symlog`: a scalar reward, and half its squared distance to symlog of the target."""
    x, prefix = per_step(K), normal(B, K, scale=50)
    theirs = sum(0.5 * (x[k] - symlog(prefix[:, k])).square() for k in range(K)).mean()
    heads = {"value_prefix": gs.MeanSquaredError(transform="symlog", weight=0.5, first_step=1)}
    same_loss(gs.multi_step_loss(heads, {"value_prefix": x}, {"value_prefix": prefix}).loss, theirs, x)


def test_efficientzero_v2_asymmetric_critic():
    """EfficientZeroV2 with `use_IQL`: 0.7 times the cross-entropy if the decoded value is too low, else 0.3 times."""
    bins, support = integers(300), gs.Support.muzero()
    x, z = prediction(B, T, 601), normal(B, T, scale=300)
    weight = torch.where(h_inverse(mean_of(x, bins)) > z, 0.3, 0.7).double()
    theirs = (weight * cross_entropy(x, two_hot(h(z), bins))).sum(1).mean()

    weights = torch.where(support.decode(x.detach()) > z, 0.3, 0.7)
    out = gs.multi_step_loss({"value": gs.TwoHot(support)}, {"value": x}, {"value": z}, step_weights=weights)
    same_loss(out.loss, theirs, x)


# ---- TD-MPC2 --------------------------------------------------------------------------------------------------------


def test_tdmpc2():
    """TD-MPC2 (Hansen et al. 2024), model loss: steps weighted by rho^t / H, five critics, and a termination head.

    The termination loss is the only term without rho. TD-MPC2's tensors are `[H, B, ...]`.
    """
    horizon, critics, rho = 3, 5, 0.5
    bins, support = torch.linspace(-10, 10, 101, dtype=torch.float64), gs.Support.tdmpc2()
    q, reward, end = prediction(critics, horizon, B, 101), prediction(horizon, B, 101), prediction(horizon, B)
    latent, next_latent = prediction(horizon, B, D), normal(horizon, B, D)
    td_target, r = normal(horizon, B, scale=100), normal(horizon, B, scale=2)
    td_target[0, 0] = 1e6  # beyond the last bin
    ended = torch.randint(2, (horizon, B)).double()

    decay = rho ** torch.arange(horizon, dtype=torch.float64)
    consistency = (decay * (latent - next_latent).square().mean((1, 2))).sum() / horizon
    reward_loss = (decay * cross_entropy(reward, two_hot(symlog(r), bins)).mean(1)).sum() / horizon
    value = cross_entropy(q, two_hot(symlog(td_target), bins)).mean(2)
    value_loss = (decay * value).sum() / (horizon * critics)
    end_loss = functional.binary_cross_entropy_with_logits(end, ended)
    theirs = 20 * consistency + 0.1 * reward_loss + 0.1 * value_loss + end_loss

    heads = {f"q_{i}": gs.TwoHot(support, weight=0.1 / critics) for i in range(critics)}
    heads |= {"reward": gs.TwoHot(support, weight=0.1), "consistency": gs.MeanSquaredError(weight=20.0)}
    x = {f"q_{i}": q[i] for i in range(critics)} | {"reward": reward, "consistency": latent}
    targets = {f"q_{i}": td_target for i in range(critics)} | {"reward": r, "consistency": next_latent}
    heads["end"], x["end"], targets["end"] = gs.BinaryCrossEntropy(), end, ended
    weights = {name: [rho**t / horizon for t in range(horizon)] for name in heads} | {"end": [1 / horizon] * horizon}
    out = gs.multi_step_loss(heads, x, targets, step_weights=weights, batch_first=False)
    same_loss(out.loss, theirs, q, reward, end, latent)
    same(out.expected["q_0"], symexp(mean_of(q[0], bins)).detach())


def test_tdmpc2_policy():
    """TD-MPC2, policy loss: -(Q + entropy bonus), which the user computes per step, averaged with the same rho^t."""
    horizon, rho = 3, 0.5
    q, bonus = prediction(horizon + 1, B), prediction(horizon + 1, B)
    per_entry = -(1e-4 * bonus + q)
    theirs = (per_entry.mean(1) * rho ** torch.arange(horizon + 1, dtype=torch.float64)).mean()
    weights = [rho**t / (horizon + 1) for t in range(horizon + 1)]
    same_loss(gs.reduce_multi_step(per_entry, step_weights=weights, batch_first=False).loss, theirs, q, bonus)


# ---- DreamerV3 ------------------------------------------------------------------------------------------------------


def dreamer_bins():
    """255 centres: symexp of -20 to 20. Targets are interpolated between them, in raw space."""
    half = symexp(torch.linspace(-20, 0, 128, dtype=torch.float64))
    return torch.cat((half, -half[:-1].flip(0)))


def test_dreamer_v3_port_with_bins_in_symlog_space():
    """NM512's dreamerv3-torch, `symlog_disc`: two-hot targets and expectations between equally spaced bins.

    NM512/dreamerv3-torch, tools.py, DiscDist.
    """
    buckets = torch.linspace(-20, 20, 255, dtype=torch.float64)
    logits = prediction(3, 4, 255)
    values = normal(3, 4).detach() * 1000
    values[0, :2] = torch.tensor([1e12, -1e12])  # beyond the bins
    x = values.sign() * values.abs().log1p()
    below = ((buckets <= x[..., None]).sum(-1) - 1).clamp(0, 254)
    above = (255 - (buckets > x[..., None]).sum(-1)).clamp(0, 254)
    to_below = torch.where(below == above, 1.0, (buckets[below] - x).abs())
    to_above = torch.where(below == above, 1.0, (buckets[above] - x).abs())
    total = to_below + to_above
    one_hot = torch.nn.functional.one_hot
    target = one_hot(below, 255) * (to_above / total)[..., None] + one_hot(above, 255) * (to_below / total)[..., None]
    loss = -(target * logits.log_softmax(-1)).sum(-1).mean()
    mean = (logits.softmax(-1) * buckets).sum(-1)

    heads = {"value": gs.TwoHot(gs.Support(-20, 20, 255, transform="symlog"))}
    out = gs.multi_step_loss(heads, {"value": logits}, {"value": values}, step_weights=[1 / 4] * 4)
    torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(out.expected["value"], mean.sign() * mean.abs().expm1(), rtol=1e-10, atol=1e-13)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (out.loss, loss)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def dreamer_kl(p, q):
    """KL(p, q), summed over categorical variables and clamped to at least 1 nat. p and q are mixed with 1 % uniform."""
    p, q = (0.99 * x.softmax(-1) + 0.01 / x.shape[-1] for x in (p, q))
    return (p * (p / q).log()).sum((-1, -2)).clamp(min=1)


def test_dreamer_v3_world_model():
    """DreamerV3 (Hafner et al. 2023), world model: reward, continuation, vector and image reconstruction, two KLs.

    The mean is over batch and time. Squared errors are summed over the D features: `MeanSquaredError` has weight D.
    """
    bins, even = dreamer_bins(), [1 / T] * T
    reward, goes_on, vector, image = prediction(B, T, 255), prediction(B, T), prediction(B, T, D), prediction(B, T, 12)
    posterior, prior = prediction(B, T, 2, 4), normal(B, T, 2, 4, scale=0.5).requires_grad_()
    r, observation, pixels = normal(B, T, scale=300), normal(B, T, D, scale=9), torch.rand(B, T, 12).double()
    r[0, 0] = 1e9  # beyond the last bin
    alive = torch.randint(2, (B, T)).double() * (1 - 1 / 333)
    dynamics, representation = dreamer_kl(posterior.detach(), prior), dreamer_kl(posterior, prior.detach())
    assert (dynamics == 1).any()
    assert (dynamics > 1).any()

    probability = goes_on.sigmoid()
    theirs = (
        cross_entropy(reward, two_hot(r, bins))
        - (alive * probability.log() + (1 - alive) * (1 - probability).log())
        + (vector - symlog(observation)).square().sum(-1)
        + (image - pixels).square().sum(-1)
        + dynamics
        + 0.1 * representation
    ).mean()

    heads = {
        "reward": gs.TwoHot(gs.Support.dreamer_v3()),
        "continue": gs.BinaryCrossEntropy(),
        "vector": gs.MeanSquaredError(transform="symlog", weight=D),
        "image": gs.MeanSquaredError(weight=12),
        "dynamics": gs.PerStepLoss(),
        "representation": gs.PerStepLoss(weight=0.1),
    }
    x = {"reward": reward, "continue": goes_on, "vector": vector, "image": image}
    x |= {"dynamics": dynamics, "representation": representation}
    targets = {"reward": r, "continue": alive, "vector": observation, "image": pixels}
    out = gs.multi_step_loss(heads, x, targets, step_weights=even)
    same_loss(out.loss, theirs, reward, goes_on, vector, image, posterior, prior)
    same(out.expected["reward"], mean_of(reward, bins).detach())


@pytest.mark.parametrize("replayed", [False, True])
def test_dreamer_v3_critic(replayed):
    """DreamerV3, critic: cross-entropy with the return and, as a regulariser, with the slow critic's prediction.

    Imagined steps are weighted by the probability that the episode reaches them. Replayed steps are masked after the
    end of their sequence, and weighted by 0.3. The two targets are two heads on the same logits.
    """
    bins, support = dreamer_bins(), gs.Support.dreamer_v3()
    logits, returns, slow = prediction(B, T, 255), normal(B, T, scale=300), normal(B, T, scale=300)
    reached = valid_mask(2, 5, 3) if replayed else torch.rand(B, T, dtype=torch.float64).cumprod(1)
    scale = 0.3 if replayed else 1.0
    both = cross_entropy(logits, two_hot(returns, bins)) + cross_entropy(logits, two_hot(slow, bins))
    theirs = scale * (reached * both).mean()

    heads = {"value": gs.TwoHot(support, weight=scale), "slow": gs.TwoHot(support, weight=scale)}
    options = {"mask": reached.bool(), "step_weights": [1 / T] * T} if replayed else {"step_weights": reached / T}
    out = gs.multi_step_loss(heads, {"value": logits, "slow": logits}, {"value": returns, "slow": slow}, **options)
    same_loss(out.loss, theirs, logits)


def test_dreamer_v3_actor():
    """DreamerV3, actor with discrete actions: REINFORCE and an entropy bonus.

    A policy target need not sum to 1: with the advantage at the chosen action, and 0 elsewhere, its cross-entropy is
    -advantage log p(action).
    """
    logits, advantage = prediction(B, T, A), normal(B, T)
    action = torch.randint(A, (B, T))
    reached = torch.rand(B, T, dtype=torch.float64).cumprod(1)
    log_p = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    theirs = (-reached * (log_p * advantage + 3e-4 * entropy(logits))).mean()

    target = torch.zeros(B, T, A, dtype=torch.float64).scatter(-1, action.unsqueeze(-1), advantage.unsqueeze(-1))
    heads = {"actor": gs.SoftCrossEntropy(entropy_weight=3e-4)}
    out = gs.multi_step_loss(heads, {"actor": logits}, {"actor": target}, step_weights=reached / T)
    same_loss(out.loss, theirs, logits)


# ---- UniZero --------------------------------------------------------------------------------------------------------


def unizero(latent_loss):
    """Heads, predictions, targets, bool mask `[B, T]`, and UniZero's weighted, unmasked losses `[B, T]`.

    `latent` predicts the next latent state, for steps 1 to T - 1.
    """
    bins, support = integers(50), gs.Support.muzero(50)
    x = {
        "value": prediction(B, T, 101),
        "reward": prediction(B, T, 101),
        "policy": prediction(B, T, A),
        "latent": prediction(B, T - 1, D),
    }
    targets = {
        "value": normal(B, T, scale=500),
        "reward": normal(B, T, scale=5),
        "policy": distributions(B, T, A),
        "latent": normal(B, T - 1, D),
    }
    smoothed = lambda name: 0.9 * two_hot(h(targets[name]), bins) + 0.1 / 101
    losses = {
        "value": 0.5 * cross_entropy(x["value"], smoothed("value")),
        "reward": cross_entropy(x["reward"], smoothed("reward")),
        "policy": cross_entropy(x["policy"], targets["policy"]) - 5e-3 * entropy(x["policy"]),
    }
    if latent_loss == "mse":
        losses["latent"] = 10 * (x["latent"] - targets["latent"]).square().mean(-1)
        latent_head = gs.MeanSquaredError(weight=10.0, first_step=1)
    else:
        losses["latent"] = 10 * (1 - cosine(x["latent"], targets["latent"], 1e-8))
        latent_head = gs.NegativeCosine(weight=10.0, first_step=1)
    heads = {
        "value": gs.TwoHot(support, label_smoothing=0.1, weight=0.5),
        "reward": gs.TwoHot(support, label_smoothing=0.1),
        "policy": gs.SoftCrossEntropy(entropy_weight=5e-3),
        "latent": latent_head,
    }
    return heads, x, targets, valid_mask(3, 5, 2).bool(), losses


@pytest.mark.parametrize("latent_loss", ["mse", "cos_sim"])
def test_unizero(latent_loss):
    """UniZero (Pu et al. 2024): discounted sum over batch and time, divided by the head's number of valid entries.

    UniZero's cosine loss is 1 - cos, ours is -cos: the gradients are equal, and the losses differ by 1 per entry.
    """
    heads, x, targets, mask, losses = unizero(latent_loss)
    gamma = 0.9 ** torch.arange(T, dtype=torch.float64)
    theirs = sum((losses[name] * gamma * mask).sum() / mask.sum() for name in ("value", "reward", "policy"))
    theirs = theirs + (losses["latent"] * gamma[1:] * mask[:, 1:]).sum() / mask[:, 1:].sum()

    out = gs.multi_step_loss(heads, x, targets, step_weights=gamma, mask=mask, reduction="valid_mean")
    constant = 10 * (gamma * mask)[:, 1:].sum() / mask[:, 1:].sum() if latent_loss == "cos_sim" else 0.0
    same_loss(out.loss + constant, theirs, x)


def test_unizero_with_prioritised_replay():
    """UniZero with importance weights: each sample's sum divided by its number of valid entries, then the mean over B.

    The latent head has one valid entry fewer. A priority is the mean error over the valid steps.
    """
    heads, x, targets, mask, losses = unizero("mse")
    gamma, w = 0.9 ** torch.arange(T, dtype=torch.float64), torch.rand(B, dtype=torch.float64)
    steps, later_steps = mask.sum(1), mask[:, 1:].sum(1).clamp(min=1)
    theirs = sum((losses[name] * gamma * mask).sum(1) for name in ("value", "reward", "policy")) / steps
    theirs = theirs + (losses["latent"] * gamma[1:] * mask[:, 1:]).sum(1) / later_steps
    theirs = (w * theirs).mean()

    weights = {name: gamma / (later_steps if name == "latent" else steps).unsqueeze(1) for name in heads}
    out = gs.multi_step_loss(heads, x, targets, step_weights=weights, mask=mask, importance_weights=w)
    same_loss(out.loss, theirs, x)

    error = (h_inverse(mean_of(x["value"], integers(50))) - targets["value"]).abs().detach()
    priority = (error * mask).sum(1) / steps + 1e-6
    nu = torch.where(mask, out.expected["value"], targets["value"])  # masked steps have no error
    same(gs.priorities(nu, targets["value"], steps="mean", eps=0.0) * T / steps + 1e-6, priority)


# ---- TorchRL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_torchrl_critics(weighted):
    """`SACLoss`: squared errors of N critics with one target, summed over them, and the mean over the batch.

    The weights of prioritised replay are divided by their sum, and a priority is the largest error of a critic.
    """
    q, target = prediction(2, B), normal(B)
    weights = torch.rand(B, dtype=torch.float64) if weighted else torch.ones(B, dtype=torch.float64)
    theirs = ((q - target) ** 2).sum(0)
    theirs = (theirs * weights).sum() / weights.sum()

    importance = weights / weights.mean() if weighted else None
    target = target.expand_as(q)
    out = gs.multi_step_loss(
        {"q": gs.MeanSquaredError()}, {"q": q}, {"q": target}, importance_weights=importance, batch_first=False
    )
    same_loss(out.loss, theirs, q)
    priority = (q - target).abs().detach().max(0).values
    same(gs.priorities(q, target, steps="max", eps=0.0, batch_first=False), priority)
