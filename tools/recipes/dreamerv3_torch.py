"""dreamerv3-torch: the world model, and returns and critic of imagined steps, with the networks of dmc_proprio."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy
import torch

import gradscale_ext as gs

from .checkout import Checkout, Edit, Settings
from .lockstep import Side, clear, leaves
from .project import Project

BATCH, LENGTH, ACTIONS = 4, 64, 6  # a step with the default of 16 sequences takes half a minute on a CPU
LOSS_BATCH = 16
VECTORS = {"orientations": 14, "height": 1, "velocity": 9}  # of dmc_walker_walk


def support():
    """255 bins in symlog space, where this port interpolates."""
    return gs.Support(-20, 20, 255, transform="symlog")


def world_model_losses(config, scales, post, prior, preds, data):
    """The mean of the weighted losses, and losses `[B, T]` by head. Images have the loss `mse`, vectors `symlog_mse`.

    Posterior and prior are logits `[B, T, G, C]`. "kl" is their divergence without free nats, for the log.
    """
    divergence = {"unimix": config.unimix_ratio, "free_nats": config.kl_free}
    heads = {
        "dyn": gs.CategoricalKL(**divergence, weight=config.dyn_scale),
        "rep": gs.CategoricalKL(**divergence, prediction="p", weight=config.rep_scale),
        "kl": gs.CategoricalKL(unimix=config.unimix_ratio, weight=0),
    }
    predictions = {"dyn": prior, "rep": post, "kl": prior.detach()}
    targets = {"dyn": post.detach(), "rep": prior.detach(), "kl": post.detach()}
    for name, pred in preds.items():
        weight = scales.get(name, 1.0)
        if name == "reward":
            heads[name], predictions[name] = gs.TwoHot(support(), weight=weight), pred.logits
            targets[name] = data[name]
        elif name == "cont":
            heads[name] = gs.BinaryCrossEntropy(weight=weight)
            predictions[name], targets[name] = pred.base_dist.logits.squeeze(-1), data[name].squeeze(-1)
        else:
            predictions[name], targets[name] = pred._mode.flatten(2), data[name].flatten(2)
            size, transform = targets[name].shape[-1], "identity" if data[name].dim() == 5 else "symlog"
            heads[name] = gs.MeanSquaredError(transform=transform, weight=weight * size)
    steps = post.shape[1]
    out = gs.multi_step_loss(heads, predictions, targets, step_weights=[1 / steps] * steps)
    sizes = {name: heads[name].weight / scales.get(name, 1.0) for name in preds}  # 1, or the size of a vector
    return out.loss, {name: loss * sizes.get(name, 1) for name, loss in out.per_step.items()}


def imagined_returns(reward, value, discount, lambda_):
    """λ-returns `[T, B, 1]` of T rewards and T + 1 values.

    The discount depends on the actions through the imagined states, but `lambda_returns` treats it as a constant. A
    term that is 0 is therefore added to the rewards. Its factor `following` is the derivative of a return with respect
    to its discount.
    """
    reward, value, discount = (tensor.squeeze(-1) for tensor in (reward, value, discount))
    options = {"discount": discount.detach(), "lambda_": lambda_, "batch_first": False}
    with torch.no_grad():
        following = torch.cat((gs.lambda_returns(reward, value, **options)[1:], value[-1:]))
        following = (1 - lambda_) * value[1:] + lambda_ * following
    return gs.lambda_returns(reward + (discount - discount.detach()) * following, value, **options).unsqueeze(-1)


def critic_loss(logits, target, slow_target, weights):
    """Loss of `[T, B, 255]` logits for the returns and the predictions of the slow critic, both `[T, B, 1]`."""
    heads = {"value": gs.TwoHot(support()), "slow": gs.TwoHot(support())}
    targets = {"value": target.detach().squeeze(-1), "slow": slow_target.detach().squeeze(-1)}
    weights = weights.squeeze(-1) / len(weights)
    return gs.multi_step_loss(
        heads, dict.fromkeys(heads, logits), targets, step_weights=weights, batch_first=False
    ).loss


EDITS = [
    Edit("models.py", "_train", "kl_loss, kl_value, dyn_loss, rep_loss = ", "preds = {}"),
    Edit(
        "models.py",
        "_train",
        "losses = {}",
        "metrics = self._model_opt(",
        """
        model_loss, losses = world_model_losses(
            self._config, self._scales, post["logit"], prior["logit"], preds, data
        )
        kl_value, dyn_loss, rep_loss = (losses.pop(name) for name in ("kl", "dyn", "rep"))
        """,
    ),
    Edit(
        "models.py",
        "_train",
        "target = torch.stack(target, dim=1)",
        "metrics.update(tools.tensorstats(value.mode()",
        """
        slow_target = self._slow_value(value_input[:-1].detach()).mode()
        value_loss = critic_loss(value.logits, target, slow_target, weights[:-1])
        """,
    ),
    Edit(
        "models.py",
        "_compute_target",
        "target = tools.lambda_return(",
        "weights = torch.cumprod(",
        "target = imagined_returns(reward[1:], value, discount[1:], self._config.discount_lambda)",
    ),
    Edit("models.py", "_compute_actor_loss", "target = torch.stack(target, dim=1)", "if self._config.reward_EMA"),
]


def sides(checkout: Checkout) -> tuple[Side, Side]:
    import models

    names = {function.__name__: function for function in (world_model_losses, imagined_returns, critic_loss)}
    settings = _settings(checkout)
    return _side(models, settings), _side(checkout.edited("models.py", EDITS, names), settings)


def _settings(checkout: Checkout) -> Settings:
    """The project's defaults, updated by the settings of dmc_proprio, for the CPU."""
    found = checkout.settings("configs.yaml")
    return found.defaults.updated(found.dmc_proprio).updated({"device": "cpu", "num_actions": ACTIONS})


def _side(models: Any, settings: Any) -> Side:
    torch.manual_seed(0)
    shapes = {name: (size,) for name, size in VECTORS.items()} | {"image": (8, 8, 3)}
    space = SimpleNamespace(spaces={name: numpy.zeros(shape) for name, shape in shapes.items()})
    settings = copy.deepcopy(settings)
    model = models.WorldModel(space, None, 0, settings)
    behavior = models.ImagBehavior(settings, model)
    optimizers = [model._model_opt._opt, behavior._actor_opt._opt, behavior._value_opt._opt]

    def reward(features: Any, state: Any, action: Any) -> torch.Tensor:
        return model.heads["reward"](model.dynamics.get_feat(state)).mode()

    def step(data: Any) -> dict[str, Any]:
        start, _, found = model._train(data)
        found = found | behavior._train(start, reward)[-1]
        found["loss"] = found.pop("model_loss")
        logged = ("dyn", "rep", "reward", "cont", *VECTORS, "actor", "value")
        return {name: found[name] for name in ("loss", "kl", *(f"{name}_loss" for name in logged))}

    return Side(step, optimizers, _loss_alone(models, model, settings), [model, behavior])


def _loss_alone(models: Any, model: Any, settings: Any) -> Any:
    """Loss of the world model from the predictions of its networks."""
    import networks
    import tools

    sizes = {"reward": 255, "cont": 1, **VECTORS}
    predicted = dict(zip(sizes, leaves(*([LOSS_BATCH, LENGTH, size] for size in sizes.values())), strict=True))
    post, prior = leaves(*[[LOSS_BATCH, LENGTH, settings.dyn_stoch, settings.dyn_discrete]] * 2)
    every, data = [*predicted.values(), post, prior], model.preprocess(batch(0, LOSS_BATCH))
    cont = networks.MLP.dist(SimpleNamespace(), "binary", predicted["cont"], None, ())
    features = torch.empty(LOSS_BATCH, LENGTH, 0)

    def decoded(_: Any) -> dict[str, Any]:
        return {name: tools.SymlogDist(predicted[name]) for name in VECTORS}

    heads = {
        "decoder": decoded,
        "reward": lambda _: tools.DiscDist(predicted["reward"], device="cpu"),
        "cont": lambda _: cont,
    }
    nothing = SimpleNamespace(entropy=lambda: torch.zeros(()))
    dynamics = SimpleNamespace(
        observe=lambda *_: ({"logit": post}, {"logit": prior}),
        kl_loss=model.dynamics.kl_loss,
        get_feat=lambda _: features,
        get_dist=lambda _: nothing,
    )

    def optimize(loss: torch.Tensor, _: Any) -> dict[str, Any]:
        loss.backward()
        return {}

    stand_in = SimpleNamespace(
        preprocess=lambda found: found,
        requires_grad_=lambda requires_grad: None,
        parameters=list,
        encoder=lambda _: features,
        dynamics=dynamics,
        heads=SimpleNamespace(items=heads.items),
        _config=settings,
        _use_amp=False,
        _scales=model._scales,
        _model_opt=optimize,
    )

    def loss() -> list[torch.Tensor]:
        clear(every)
        models.WorldModel._train(stand_in, data)
        return every

    return loss


def batch(seed: int, count: int = BATCH) -> dict[str, Any]:
    random = numpy.random.default_rng(seed)
    normal = lambda *shape: random.normal(size=(count, LENGTH, *shape))
    first = numpy.zeros((count, LENGTH))
    first[:, 0] = 1
    return {
        **{name: normal(size) for name, size in VECTORS.items()},
        "image": numpy.zeros((count, LENGTH, 8, 8, 3)),  # required, but not used by any network
        "action": numpy.tanh(normal(ACTIONS)),
        "reward": normal(),
        "is_first": first,
        "is_terminal": (random.random((count, LENGTH)) < 0.02).astype(float),
    }


PROJECT = Project(
    name="dreamerv3-torch",
    repository="NM512/dreamerv3-torch",
    commit="6ef8646d807cd10ce0c88e10a7e943211e7fc44c",
    marker="models.py",
    case=f"dmc_proprio: B {BATCH} (loss alone {LOSS_BATCH}), T {LENGTH}, 24 numbers observed, 15 imagined steps",
    edits=EDITS,
    sides=sides,
    batch=batch,
    steps=3,
    texts={'"cuda"': '"cpu"', "tol=1e-8": "tol=0.0"},  # as in our loss, small errors of vectors are not set to 0
)
