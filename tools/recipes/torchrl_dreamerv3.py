"""TorchRL: an update of its DreamerV3 example with Pendulum's networks, by `DreamerV3ModelLoss` and its companions."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit, Lines
from .lockstep import Idle, Side, clear, leaves
from .project import Project

BATCH, LENGTH, OBSERVATION, ACTION, STATE, BELIEF, BINS = 16, 16, 3, 1, 16, 32, 255
EXAMPLE = "sota-implementations/dreamer_v3"
SCRIPT = f"{EXAMPLE}/dreamer_v3.py"
LOSSES, MODELS = "torchrl/objectives/dreamer_v3.py", "torchrl/modules/models/dreamer_v3.py"
SETUP = Lines(SCRIPT, "main", "torch.manual_seed(", "explore_env = ")
UPDATE = Lines(SCRIPT, "main", "m_td, model_out = model_loss(sample)", "batch_losses[update_index] = ")


def support(num_bins):
    """The bins of `SymExpTwoHot`; `gs.Support.dreamer_v3()` for 255."""
    return gs.Support(-20, 20, num_bins, "symlog", space="raw")


def model_losses(loss, tensordict):
    """`loss_model`, the sum of all losses, and each of them for the log."""
    keys, found = loss.tensor_keys, tensordict["next"]
    prior, posterior, pixels = found[keys.prior_logits], found[keys.posterior_logits], found[keys.pixels].flatten(2)
    latents = {"unimix": loss.unimix, "free_nats": loss.free_bits}
    dynamic, representation = loss.lambda_kl * loss.lambda_dynamic, loss.lambda_kl * loss.lambda_representation
    heads = {
        "dynamic": gs.CategoricalKL(**latents, weight=dynamic),
        "representation": gs.CategoricalKL(**latents, prediction="p", weight=representation),
        "reco": gs.MeanSquaredError(transform="symlog", weight=loss.lambda_reco * pixels.shape[2]),
        "reward": gs.TwoHot(support(loss.num_reward_bins), weight=loss.lambda_reward),
        "continue": gs.BinaryCrossEntropy(weight=loss.lambda_continue),
    }
    predictions = {
        "dynamic": prior,
        "representation": posterior,
        "reco": gs.symlog(found[keys.reco_pixels].flatten(2)),
        "reward": found[keys.reward_logits],
        "continue": found[keys.continue_pred].squeeze(-1),
    }
    targets = {
        "dynamic": posterior.detach(),
        "representation": prior.detach(),
        "reco": pixels,
        "reward": found[keys.true_reward].squeeze(-1),
        "continue": loss.continue_target_scale * (~found[keys.terminated]).squeeze(-1).to(prior),
    }
    steps = pixels.shape[1]
    out = gs.multi_step_loss(heads, predictions, targets, step_weights=[1 / steps] * steps)
    return {"loss_model": out.loss, **{f"loss_model_{name}": part for name, part in out.head_losses.items()}}


def imagined_returns(reward, value, continuation, gamma, lambda_):
    """λ-returns `[B, H, 1]`; value and continuation are of the next states.

    Without REINFORCE the actor also gets a gradient through the discount, which `gs.lambda_returns` treats as a
    constant. A term that is 0 is therefore added to the rewards. Its factor `following` is the derivative of a return
    with respect to its discount.
    """
    reward, value, discount = reward.squeeze(-1), value.squeeze(-1), (gamma * continuation).squeeze(-1)
    options = {"next_values": value, "discount": discount.detach(), "lambda_": lambda_}
    with torch.no_grad():
        following = torch.cat((gs.lambda_returns(reward, **options)[:, 1:], value[:, -1:]), 1)
        following = (1 - lambda_) * value + lambda_ * following
    return gs.lambda_returns(reward + (discount - discount.detach()) * following, **options).unsqueeze(-1)


def critic_losses(loss, inputs, logits, target, discount):
    """The loss of `[B, H, S]` logits for the returns and for the target critic's predictions, and the latter alone."""
    with torch.no_grad(), loss.target_value_model_params.to_module(loss.value_model, preserve_module_state=False):
        slow = loss.value_model(inputs)[loss.tensor_keys.value].squeeze(-1)
    bins = support(logits.shape[-1])
    heads = {"value": gs.TwoHot(bins), "slow": gs.TwoHot(bins, weight=loss.slow_critic_regularization)}
    targets = {"value": target, "slow": slow}
    out = gs.multi_step_loss(heads, dict.fromkeys(heads, logits), targets, step_weights=discount / discount.shape[-1])
    return {"loss_value": out.loss, "value_slow_loss": out.head_losses["slow"] / heads["slow"].weight}


EDITS = [
    Edit(
        LOSSES,
        "forward",
        "# ---- KL loss ----",
        "self._clear_weakrefs(tensordict, td_out)",
        "td_out = TensorDict(model_losses(self, tensordict))",
    ),
    Edit(
        LOSSES,
        "__init__",
        'self.register_buffer("return_low"',
        "if gamma is not None:",
        """
        self.return_scale = gs.ReturnScale(
            lower_quantile, upper_quantile, 1 - return_normalization_rate, return_normalization_min_scale
        )
        """,
    ),
    Edit(
        LOSSES,
        "forward",
        '"return_low": self.return_low',
        '"return_scale": ',
        """
        "return_low": self.return_scale.running_percentiles[0].clone(),
        "return_high": self.return_scale.running_percentiles[1].clone(),
        """,
    ),
    Edit(LOSSES, "_return_scale", "if self.training:", "def lambda_target(", "return self.return_scale(returns)"),
    Edit(
        LOSSES,
        "lambda_target",
        "gamma = self.value_estimator.gamma.to(reward)",
        "done = torch.zeros(",
        """
        gamma, lmbda = self.value_estimator.gamma, self.value_estimator.lmbda
        return imagined_returns(reward, value, continuation, gamma, lmbda)
        """,
    ),
    Edit(
        LOSSES,
        "forward",
        "value_pred = tensordict_select.get(self.tensor_keys.value_logits",
        "self._clear_weakrefs(fake_data, loss_tensordict)",
        """
        logits, inputs = tensordict_select[self.tensor_keys.value_logits], fake_data.select(*self.value_model.in_keys)
        loss_tensordict = TensorDict(critic_losses(self, inputs, logits, target_sq, discount))
        """,
    ),
    Edit(MODELS, "decode", "return two_hot_decode(", "def loss(self", "return support(self.num_bins).decode(logits)"),
    Edit(
        SCRIPT,
        "adaptive_grad_clip_",
        "for parameter in parameters:",
        "def make_env(",
        'gs.clip_gradients_(parameters, adaptive=clip, eps=minimum, unit="tensor")',
    ),
    Edit(SCRIPT, "main", "total_m = (", "opt_model.zero_grad(", 'total_m = m_td["loss_model"]'),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    import dreamer_v3

    ours, losses, models = (_edited(checkout, file) for file in (SCRIPT, LOSSES, MODELS))
    for name in ("DreamerV3ModelLoss", "DreamerV3ActorLoss", "DreamerV3ValueLoss"):
        setattr(ours, name, getattr(losses, name))
    ours.SymExpTwoHot = models.SymExpTwoHot
    return _side(checkout, dreamer_v3, []), _side(checkout, ours, _edits_of(SCRIPT))


def _edits_of(file: str) -> list[Edit]:
    return [edit for edit in EDITS if edit.file == file]


def _edited(checkout: Checkout, file: str) -> Any:
    functions = (support, model_losses, imagined_returns, critic_losses)
    return checkout.edited(file, _edits_of(file), {"gs": gs, **{found.__name__: found for found in functions}})


def _side(checkout: Checkout, script: Any, edits: list[Edit]) -> Side:
    config = checkout.settings(f"{EXAMPLE}/config.yaml")
    config.optimization.device = "cpu"
    learner = checkout.part(SETUP, edits, {**vars(script), "make_env": _environment})({"cfg": config})
    update = checkout.part(UPDATE, edits, learner)

    def step(data: Any) -> dict[str, Any]:
        found = update({"sample": data.clone()})
        logged = {"loss": found["total_m"], **found["m_td"], **found["a_td"], **found["v_td"]}
        return {name.removeprefix("loss_"): value.reshape(()) for name, value in logged.items() if name != "loss_model"}

    optimizers = [learner[name] for name in ("opt_model", "opt_actor", "opt_value")]
    modules = [learner[name] for name in ("model_loss", "actor_loss", "value_loss")]
    return Side(step, optimizers, _loss_alone(update, learner), modules)


def _environment(*_: Any) -> Any:
    """The shapes of Pendulum, in the default dtype; nothing acts in it."""
    from torchrl.data import Bounded, Composite, Unbounded
    from torchrl.envs import EnvBase

    class Environment(EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded(OBSERVATION))
            self.action_spec = Bounded(-2.0, 2.0, (ACTION,))
            self.reward_spec = Unbounded(1)

        def _reset(self, *_: Any) -> Any: ...

        def _step(self, _: Any) -> Any: ...

        def _set_seed(self, _: Any) -> None: ...

    return Environment()


class _Module:
    """A module without parameters."""

    in_keys = ()

    def __init__(self, forward: Any):
        self.forward = forward

    def __call__(self, *arguments: Any) -> Any:
        return self.forward(*arguments)

    def parameters(self) -> list[torch.Tensor]:
        return []


def _loss_alone(update: Any, learner: dict[str, Any]) -> Any:
    """Losses and returns, from given predictions of the networks and given log-probabilities."""
    from tensordict import TensorDict

    model_loss, actor_loss, value_loss = (learner[name] for name in ("model_loss", "actor_loss", "value_loss"))
    networks = learner["cfg"].networks
    latent = [networks.num_categoricals, networks.num_classes]
    shapes = {"prior_logits": latent, "posterior_logits": latent, "reco_pixels": [OBSERVATION]}
    shapes |= {"reward_logits": [BINS], "continue_pred": [1]}
    imagined = [BATCH * LENGTH, actor_loss.imagination_horizon]
    every = leaves(*([BATCH, LENGTH, *shape] for shape in shapes.values()), [*imagined, BINS], [*imagined, 1])
    *predicted, logits, log_prob = every
    predictions = {("next", name): leaf for name, leaf in zip(shapes, predicted, strict=True)}
    sizes = {"state": STATE, "belief": BELIEF}
    predictions |= {("next", name): torch.zeros(BATCH, LENGTH, size) for name, size in sizes.items()}
    reward, value, slow_value = (torch.randn(*imagined, 1) for _ in range(3))
    continuation, weight = (torch.rand(*imagined, 1) for _ in range(2))
    parameters = SimpleNamespace(to_module=lambda *_, **__: contextlib.nullcontext())

    def stand_in(loss: Any, **changes: Any) -> Any:
        names = ("tensor_keys", "deterministic_sampling_mode", "_clear_weakrefs")
        found = SimpleNamespace(**{**vars(loss), **{name: getattr(loss, name) for name in names}, **changes})
        return _Module(lambda data: type(loss).forward(found, data))

    def actor(_: Any) -> Any:
        returns = actor_loss.lambda_target(reward, value, continuation)
        advantage = (returns - value) / actor_loss._return_scale(returns)
        imagination = TensorDict(lambda_target=returns, discount_weight=weight, batch_size=imagined)
        return {"loss_actor": -(weight * log_prob * advantage).mean()}, imagination

    def world_model(data: Any) -> Any:
        return data.update(predictions)

    def critic(data: Any) -> Any:
        return data.update({"state_value_logits": logits, "state_value": slow_value})

    changes = {"value_model": _Module(critic), "value_bins": value_loss.value_bins}
    changes |= {"value_model_params": parameters, "target_value_model_params": parameters}
    changes |= {"_reduce_loss": value_loss._reduce_loss}
    variables = {
        "sample": batch(0),
        "model_loss": stand_in(model_loss, world_model=world_model, reward_bins=model_loss.reward_bins),
        "actor_loss": _Module(actor),
        "actor_model": _Module(actor),
        "value_loss": stand_in(value_loss, **changes),
        "schedulers": [Idle()] * 3,
        **{name: Idle() for name in ("opt_model", "opt_actor", "opt_value", "value_target_updater")},
    }

    def loss() -> list[torch.Tensor]:
        clear(every)
        update(variables)
        return every

    return loss


def batch(seed: int) -> Any:
    from tensordict import TensorDict

    random = torch.Generator().manual_seed(seed)
    normal = lambda size: torch.randn(BATCH, LENGTH, size, generator=random)
    flags = lambda share: torch.rand(BATCH, LENGTH, 1, generator=random) < share
    found = {"action": normal(ACTION).tanh(), "is_init": flags(0.02)}
    found["next"] = {"observation": normal(OBSERVATION), "reward": normal(1), "terminated": flags(0.02)}
    found |= {"state": torch.zeros(BATCH, LENGTH, STATE), "belief": torch.zeros(BATCH, LENGTH, BELIEF)}
    return TensorDict(found, [BATCH, LENGTH])


PROJECT = Project(
    name="torchrl-dreamerv3",
    repository="pytorch/rl",
    commit="ae9719f17b1517af5c2523a36c4616f003ee55cf",
    marker=LOSSES,
    case=f"its DreamerV3 example, Pendulum's networks: B {BATCH}, T {LENGTH}, 15 imagined steps",
    edits=EDITS,
    sides=sides,
    batch=batch,
    roots=[".", EXAMPLE],
    stand_ins={"hydra": {"main": lambda **_: lambda main: main}, "omegaconf": {}},
    texts={"outscale=0.0": "outscale=0.01"},  # so that there are returns to normalize
)
