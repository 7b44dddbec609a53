"""The pieces of a loss in the usual eager PyTorch, for comparison."""

from __future__ import annotations

import torch


def h(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + 0.001 * x


def inverse_h(x: torch.Tensor) -> torch.Tensor:
    eps = 0.001
    return torch.sign(x) * (((torch.sqrt(1 + 4 * eps * (torch.abs(x) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1)


def symlog(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x) * torch.log(1 + torch.abs(x))


def two_hot(x: torch.Tensor, num_bins: int, limit: float) -> torch.Tensor:
    """Targets over integer bins from -limit to limit, as in MuZero implementations: clamp, scatter."""
    x = x.clamp(-limit, limit)
    floor = x.floor()
    upper = x - floor
    target = torch.zeros(x.shape[0], num_bins, device=x.device)
    index = (floor + limit).long()
    target.scatter_(1, index.unsqueeze(1), (1 - upper).unsqueeze(1))
    index = index + 1
    upper = upper.masked_fill(index >= num_bins, 0.0)
    index = index.masked_fill(index >= num_bins, 0)
    return target.scatter_add_(1, index.unsqueeze(1), upper.unsqueeze(1))


def raw_two_hot(x: torch.Tensor, num_bins: int, limit: float) -> torch.Tensor:
    """Two-hot targets over bins that are not transformed, as in DreamerV3: count, compare distances, one-hot."""
    y = torch.linspace(-limit, limit, num_bins, device=x.device)
    bins = torch.sign(y) * torch.expm1(torch.abs(y))
    below = ((bins <= x.unsqueeze(-1)).sum(-1) - 1).clamp(0, num_bins - 1)
    above = (num_bins - (bins > x.unsqueeze(-1)).sum(-1)).clamp(0, num_bins - 1)
    equal = below == above
    to_below = torch.where(equal, 1.0, (bins[below] - x).abs())
    to_above = torch.where(equal, 1.0, (bins[above] - x).abs())
    total = to_below + to_above
    one_hot = torch.nn.functional.one_hot
    return one_hot(below, num_bins) * (to_above / total).unsqueeze(-1) + one_hot(above, num_bins) * (
        to_below / total
    ).unsqueeze(-1)


def projected(
    probabilities: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, limit: float
) -> torch.Tensor:
    """C51's projection onto bins from -limit to limit: two index_add_; if an atom is on a bin, an index moves by 1."""
    batch, num_bins = probabilities.shape
    atoms = rewards.unsqueeze(1) + discounts.unsqueeze(1) * torch.linspace(-limit, limit, num_bins)
    atoms = atoms.clamp(-limit, limit)
    position = (atoms + limit) * ((num_bins - 1) / (2 * limit))
    lower, upper = position.floor().long(), position.ceil().long()
    lower = torch.where((upper > 0) & (lower == upper), lower - 1, lower)
    upper = torch.where((lower < num_bins - 1) & (lower == upper), upper + 1, upper)
    first = num_bins * torch.arange(batch).unsqueeze(1)
    result = torch.zeros(batch * num_bins)
    result.index_add_(0, (lower + first).view(-1), (probabilities * (upper - position)).view(-1))
    result.index_add_(0, (upper + first).view(-1), (probabilities * (position - lower)).view(-1))
    return result.view(batch, num_bins)


def hl_gauss(y: torch.Tensor, num_bins: int, limit: float, sigma_ratio: float = 0.75) -> torch.Tensor:
    """The histogram of a normal distribution around y over bins from -limit to limit."""
    width = 2 * limit / (num_bins - 1)
    edges = torch.linspace(-limit - width / 2, limit + width / 2, num_bins + 1)
    below = torch.special.erf((edges - y.unsqueeze(-1)) / (2**0.5 * sigma_ratio * width))
    return (below[..., 1:] - below[..., :-1]) / (below[..., -1:] - below[..., :1])


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Logits in half precision are converted to float32, as under autocast."""
    return -(torch.log_softmax(logits.float(), dim=-1) * target).sum(-1)


def quantile_huber(quantiles: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """`[B]` losses of QR-DQN, as Stable-Baselines3-contrib writes them, with a tensor of all pairs."""
    count = quantiles.shape[-1]
    fractions = (torch.arange(count, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / count
    pairs = samples.unsqueeze(-2) - quantiles.unsqueeze(-1)
    size = pairs.abs()
    huber = torch.where(size > 1, size - 0.5, pairs**2 * 0.5)
    return (torch.abs(fractions[None, :, None] - (pairs.detach() < 0).float()) * huber).mean(-1).sum(-1)


def categorical_kl(p_logits: torch.Tensor, q_logits: torch.Tensor, unimix: float = 0.01) -> torch.Tensor:
    """`[B]` divergences of logits `[B, G, C]`, as Dreamer's implementations write them."""

    def distribution(logits: torch.Tensor) -> torch.distributions.OneHotCategorical:
        probabilities = torch.softmax(logits, -1) * (1 - unimix) + unimix / logits.shape[-1]
        return torch.distributions.OneHotCategorical(logits=torch.log(probabilities), validate_args=False)

    return torch.distributions.kl_divergence(distribution(p_logits), distribution(q_logits)).sum(-1)
