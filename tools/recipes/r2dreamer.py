"""r2dreamer: `Dreamer.update` with the networks of dmc_proprio: world model, returns, critics, actor, and clipping."""

from __future__ import annotations

import copy
import functools
import operator
from types import SimpleNamespace
from typing import Any

import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit, Settings
from .lockstep import Side, clear, leaves
from .project import Project

BATCH, LENGTH, ACTIONS, BINS = 4, 64, 6, 255
LOSS_BATCH = 16  # the default; a step with it takes more than ten seconds on a CPU
VECTORS = {"orientations": 14, "height": 1, "velocity": 9}  # of dmc_walker_walk


def world_model_losses(scales, kl_free, prior, posterior, reward, cont, data):
    """The weighted sum of four losses, and each one without its weight. Predictions are logits."""
    heads = {
        "dyn": gs.CategoricalKL(unimix=0, free_nats=kl_free, weight=scales["dyn"]),
        "rep": gs.CategoricalKL(unimix=0, free_nats=kl_free, prediction="p", weight=scales["rep"]),
        "rew": gs.TwoHot(gs.Support.dreamer_v3(), weight=scales["rew"]),
        "con": gs.BinaryCrossEntropy(weight=scales["con"]),
    }
    predictions = {"dyn": prior, "rep": posterior, "rew": reward, "con": cont.squeeze(-1)}
    targets = {"dyn": posterior.detach(), "rep": prior.detach()}
    targets |= {"rew": data["reward"].squeeze(-1), "con": 1 - data["is_terminal"].squeeze(-1).to(cont)}
    steps = reward.shape[1]
    out = gs.multi_step_loss(heads, predictions, targets, step_weights=[1 / steps] * steps)
    return out.loss, {name: out.head_losses[name] / head.weight for name, head in heads.items()}


def lambda_returns(last, term, reward, boot, disc, lamb):
    """λ-returns `[B, T - 1, 1]` from `[B, T, 1]`. Rewards and flags at t are of the transition to state t."""
    last, term, reward, boot = (tensor[:, 1:].squeeze(-1) for tensor in (last, term, reward, boot))
    found = gs.lambda_returns(reward, next_values=boot, discount=disc * (1 - term), lambda_=lamb * (1 - last))
    return found.unsqueeze(-1)


def critic_losses(scale, logits, returns, slow_value, weight):
    """The weighted loss, and the loss without its weight, of `[B, T, 255]` logits for T - 1 returns."""
    heads = {name: gs.TwoHot(gs.Support.dreamer_v3(), weight=scale) for name in ("value", "slow")}
    predictions = dict.fromkeys(heads, logits[:, :-1])
    targets = {"value": returns.squeeze(-1), "slow": slow_value.detach()[:, :-1].squeeze(-1)}
    steps = returns.shape[1]
    out = gs.multi_step_loss(heads, predictions, targets, step_weights=weight[:, :-1].squeeze(-1) / steps)
    return out.loss, out.loss.detach() / scale


DREAMER, DISTRIBUTIONS = "dreamer.py", "distributions.py"
EDITS = [
    Edit(DISTRIBUTIONS, "__init__", "self.probs = F.softmax(self.logits", "self.squash ="),
    Edit(
        DISTRIBUTIONS,
        "mode",
        "n = self.logits.shape[-1]",
        "def log_prob(self, target)",
        "return gs.Support.dreamer_v3().decode(self.logits).unsqueeze(-1)",
    ),
    Edit(DREAMER, "__init__", "self.return_ema = ", "self.act_dim =", "self.return_ema = gs.ReturnScale()"),
    Edit(
        DREAMER,
        "_agc",
        "clip_grad_agc_(",
        "self._agc = _agc",
        'gs.clip_gradients_(params, adaptive=float(config.agc), eps=float(config.pmin), unit="tensor")',
    ),
    Edit(DREAMER, "_cal_grad", "dyn_loss, rep_loss = ", "# === Representation"),
    Edit(
        DREAMER,
        "_cal_grad",
        'losses["rew"] = ',
        "# log",
        """
        model_loss, logged = world_model_losses(
            self._loss_scales, self.kl_free, prior_logit, post_logit,
            self.reward(feat).logits, self.cont(feat).base_dist.logits, data,
        )
        """,
    ),
    Edit(DREAMER, "_cal_grad", "ret_offset, ret_scale = ", "# (B*T", "ret_scale = self.return_ema(ret)"),
    Edit(
        DREAMER,
        "_cal_grad",
        "tar_padded = ",
        'metrics["adv"] = ',
        """
        value_loss, logged["value"] = critic_losses(
            self._loss_scales["value"], imag_value_dist.logits, ret, imag_slow_value, weight.detach()
        )
        # log
        ret_low, ret_high = self.return_ema.running_percentiles
        metrics["ret"] = torch.mean((ret - ret_low) / ret_scale)
        metrics["ret_005"], metrics["ret_095"] = ret_low, ret_high
        """,
    ),
    Edit(
        DREAMER,
        "_cal_grad",
        "ret_padded = ",
        "# log",
        """
        repval_loss, logged["repval"] = critic_losses(
            self._loss_scales["repval"], self.value(feat).logits, ret, slow_value, weight
        )
        """,
    ),
    Edit(
        DREAMER,
        "_cal_grad",
        "total_loss = sum(",
        "self._scaler.scale(total_loss)",
        """
        total_loss = sum([v * self._loss_scales[k] for k, v in losses.items()])
        total_loss = total_loss + model_loss + value_loss + repval_loss
        losses.update(logged)
        """,
    ),
    Edit(
        DREAMER,
        "_lambda_return",
        "live = (1 - to_f32(term))",
        "@torch.no_grad()",
        "return lambda_returns(last, term, reward, boot, disc, lamb)",
    ),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    import distributions
    import dreamer

    def edited(file: str) -> Any:
        helpers = (world_model_losses, lambda_returns, critic_losses)
        names = {"gs": gs, **{function.__name__: function for function in helpers}}
        return checkout.edited(file, [edit for edit in EDITS if edit.file == file], names)

    ours, our_distributions = edited(DREAMER), edited(DISTRIBUTIONS)
    ours.networks = edited("networks.py")
    ours.networks.dists = our_distributions
    settings = _settings(checkout)
    return _side(dreamer, distributions, settings), _side(ours, our_distributions, settings)


def _settings(checkout: Checkout) -> Settings:
    """The model of 12 M parameters for dmc_proprio, as Hydra composes its settings, for the CPU and not compiled.

    Rewards and critics of a new model are 0 for every state. Here they differ from the start.
    """
    files = ("model/_base_", "model/size12M", "env/dmc_proprio")
    base, size, env = (checkout.settings(f"configs/{file}.yaml") for file in files)
    changes = {"compile": False, **{head: {"outscale": 0.01} for head in ("reward", "critic")}}
    model = base.updated(size).updated(changes)
    return _resolved(model, {"model": model, "env": env, "device": "cpu"})


def _resolved(value: Any, root: dict[str, Any]) -> Any:
    """The settings, with values in place of references such as `${model.units}`."""
    if isinstance(value, dict):
        return Settings({name: _resolved(entry, root) for name, entry in value.items()})
    if isinstance(value, str) and value.startswith("${"):
        return functools.reduce(operator.getitem, value[2:-1].split("."), root)
    return value


def _side(dreamer: Any, distributions: Any, settings: Settings) -> Side:
    torch.manual_seed(0)
    space = SimpleNamespace(spaces={name: SimpleNamespace(shape=(size,)) for name, size in VECTORS.items()})
    agent = dreamer.Dreamer(copy.deepcopy(settings), space, SimpleNamespace(shape=(ACTIONS,)))

    def step(data: Any) -> dict[str, Any]:
        initial = agent.rssm.initial(len(data))
        found = agent.update(SimpleNamespace(sample=lambda: (data, None, initial), update=lambda *_: None))
        logged = ("dyn", "rep", "barlow", "rew", "con", "policy", "value", "repval")
        names = {"opt/loss": "loss"} | {f"loss/{name}": name for name in logged}
        names |= {name: name for name in ("ret", "ret_005", "ret_095", "adv", "val", "tar", "slowval")}
        return {name: found[key] for key, name in names.items()}

    return Side(step, [agent._optimizer], _loss_alone(dreamer, distributions, agent), [agent])


def _loss_alone(dreamer: Any, distributions: Any, agent: Any) -> Any:
    """Returns and losses, except the loss of the representation, from given predictions of the networks."""
    real, imagined = [LOSS_BATCH, LENGTH], [LOSS_BATCH * LENGTH, agent.imag_horizon + 1]
    latent = [*real, agent.rssm._stoch, agent.rssm._discrete]
    every = leaves(
        latent, latent, [*real, BINS], [*real, BINS], [*imagined, BINS], [*real, 1], [*imagined, 2 * ACTIONS]
    )
    posterior, prior, reward, value, imagined_value, cont, action = every
    random = lambda shape, size: torch.randn(*shape, size)
    feature, imagined_feature = torch.empty(*real, 1), torch.empty(*imagined, 1)
    imagined_action, data = random(imagined, ACTIONS), batch(0, LOSS_BATCH)

    def two_hot(*logits: torch.Tensor) -> Any:
        """A head of both kinds of features."""
        by_count = {len(found): found for found in logits}
        return lambda feature: distributions.symexp_twohot(by_count[len(feature)], BINS)

    def binary(logits: torch.Tensor) -> Any:
        return lambda _: distributions.binary(logits)

    nothing = SimpleNamespace(entropy=lambda: torch.zeros(()))
    dynamics = SimpleNamespace(
        observe=lambda *_: (posterior, feature, posterior),
        prior=lambda _: (None, prior),
        kl_loss=agent.rssm.kl_loss,
        get_feat=lambda *_: feature,
        get_dist=lambda _: nothing,
    )
    stand_in = SimpleNamespace(
        **{name: getattr(agent, name) for name in ("kl_free", "imag_horizon", "horizon", "lamb", "act_entropy")},
        _loss_scales=agent._loss_scales,
        _lambda_return=agent._lambda_return,
        return_ema=copy.deepcopy(agent.return_ema),
        rep_loss="dreamer",
        decoder=lambda *_: {},
        encoder=lambda _: feature,
        rssm=dynamics,
        reward=two_hot(reward),
        value=two_hot(value, imagined_value),
        cont=binary(cont),
        actor=lambda _: distributions.bounded_normal(action, min_std=0.1, max_std=1.0),
        _imagine=lambda *_: (imagined_feature, imagined_action),
        _frozen_reward=two_hot(random(imagined, BINS)),
        _frozen_value=two_hot(random(real, BINS), random(imagined, BINS)),
        _frozen_slow_value=two_hot(random(real, BINS), random(imagined, BINS)),
        _frozen_cont=binary(random(imagined, 1)),
        _scaler=SimpleNamespace(scale=lambda loss: loss),
    )

    def loss() -> list[torch.Tensor]:
        clear(every)
        dreamer.Dreamer._cal_grad(stand_in, data, None)
        return every

    return loss


def batch(seed: int, count: int = BATCH) -> Any:
    from tensordict import TensorDict

    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(count, LENGTH, *shape, generator=random)
    first = torch.zeros(count, LENGTH, 1, dtype=torch.bool)
    first[:, 0] = True
    terminal = torch.rand(count, LENGTH, 1, generator=random) < 0.02
    found = {name: normal(size) for name, size in VECTORS.items()}
    found |= {"action": normal(ACTIONS).tanh(), "reward": normal(1), "is_first": first}
    found |= {"is_terminal": terminal, "is_last": terminal | (torch.rand(count, LENGTH, 1, generator=random) < 0.02)}
    return TensorDict(found, [count, LENGTH])


PROJECT = Project(
    name="r2dreamer",
    repository="NM512/r2dreamer",
    commit="546e4fab8146ea4b14e1d7726bbc1a8a1d50322f",
    marker="dreamer.py",
    case=f"dmc_proprio: B {BATCH} (loss alone {LOSS_BATCH}), T {LENGTH}, 24 numbers observed, 15 imagined steps",
    edits=EDITS,
    sides=sides,
    batch=batch,
    steps=3,
    texts={
        "GradScaler()": "GradScaler(enabled=False)",
        "autocast(device_type=self.device.type, dtype=torch.float16)": "autocast(self.device.type, enabled=False)",
    },
)
