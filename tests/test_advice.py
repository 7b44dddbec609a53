"""Errors that say what to write: what they say is followed, runs, and means what was meant."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch

import gradscale_ext as gs
from gradscale_ext import _keywords

B, T, S = 4, 6, 601
SUPPORT = gs.Support.muzero()
VALUE = gs.MultiStepLoss(value=gs.TwoHot(SUPPORT))
FIRST = gs.MultiStepLoss(value=gs.TwoHot(SUPPORT), reward=gs.TwoHot(SUPPORT, first_step=1))
_generator = torch.Generator().manual_seed(0)
LOGITS, SCALARS = torch.randn(B, T, S, generator=_generator), torch.randn(B, T, generator=_generator)
REWARDS, VALUES = torch.randn(2, B, T, generator=_generator)
DONES = torch.rand(B, T, generator=_generator) < 0.3
LAST_VALUES = torch.randn(B, T + 1, generator=_generator)
OVER_TRAJECTORIES = (
    gs.lambda_returns,
    gs.n_step_returns,
    gs.n_step_transitions,
    gs.generalized_advantages,
    gs.vtrace,
    gs.retrace,
)


def message(error, call):
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def arguments_of(function, rewards, values, next_values):
    """A call of a function over trajectories, by names."""
    known = inspect.signature(function).parameters
    given = {"rewards": rewards, "discount": 0.9}
    options = {"values": values, "q_values": values, "next_values": next_values, "ratios": torch.ones_like(rewards)}
    options |= {"lambda_": 0.8, "n": 2}
    return given | {name: value for name, value in options.items() if name in known}


def first(results):
    return results if isinstance(results, torch.Tensor) else results[0]


# ---- The order of dimensions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_everything_in_the_other_order(batch_first):
    """The error says batch_first, and not that the root is to be left out."""
    turned = [x.transpose(0, 1) if batch_first else x for x in (LOGITS, SCALARS)]
    steps = [x[1:] if batch_first else x[:, 1:] for x in turned]
    predictions, targets = ({"value": x, "reward": y} for x, y in zip(turned, steps, strict=True))
    text = message(ValueError, lambda: FIRST(predictions, targets, batch_first=batch_first))
    assert text.endswith(f"; write batch_first={not batch_first}")
    assert "root" not in text
    right = FIRST(predictions, targets, batch_first=not batch_first)
    expected = FIRST({"value": LOGITS, "reward": LOGITS[:, 1:]}, {"value": SCALARS, "reward": SCALARS[:, 1:]})
    torch.testing.assert_close(right.loss, expected.loss)


def test_the_other_order_is_named_only_if_all_arguments_fit_it():
    turned = {"value": LOGITS.transpose(0, 1), "reward": LOGITS.transpose(0, 1)[1:]}
    targets = {"value": SCALARS.T, "reward": SCALARS.T[1:]}
    turned["value"] = turned["value"][:-1]
    assert "write batch_first" not in message(ValueError, lambda: FIRST(turned, targets))
    assert message(TypeError, lambda: FIRST(turned, targets, batch_first=1)).startswith("multi_step_loss: batch_first")


def test_the_other_order_of_priorities_and_windows():
    expected = list(SCALARS.T)
    text = message(ValueError, lambda: gs.priorities(expected, VALUES.T))
    assert text.endswith("; if stacked tensors are [T, B], write batch_first=False")
    assert torch.equal(gs.priorities(expected, VALUES.T, batch_first=False), gs.priorities(SCALARS, VALUES))
    options = {"num_unroll_steps": 2, "td_steps": 2, "discount": 0.9}
    ends = {"lengths": torch.full((B,), T), "terminated": torch.ones(B, dtype=torch.bool)}
    text = message(ValueError, lambda: gs.muzero_targets(REWARDS.T, LAST_VALUES.T[:, :-1], **options, **ends))
    assert "root_values" in text
    text = message(ValueError, lambda: gs.muzero_targets(torch.zeros(T, B), torch.zeros(T, B + 1), **options, **ends))
    assert text.endswith("lengths must have shape [6], but its shape is [4]"), "root_values have no other order"


# ---- Functions over trajectories ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("function", OVER_TRAJECTORIES, ids=lambda function: function.__name__)
def test_rewards_of_one_dimension_have_two_readings(function, batch_first):
    rewards, values = REWARDS[0], VALUES[0]
    given = arguments_of(function, rewards, values, values) | {"batch_first": batch_first}
    trajectory, steps = ("[None]", "[:, None]") if batch_first else ("[:, None]", "[None]")
    assert message(ValueError, lambda: function(**given)).endswith(
        f"; write rewards{trajectory} if they are one trajectory, or rewards{steps} if they are single steps of {T} "
        "trajectories"
    )
    one = first(
        function(**{k: x[None] if isinstance(x, torch.Tensor) else x for k, x in given.items()} | {"batch_first": True})
    )
    single = first(
        function(
            **{k: x[:, None] if isinstance(x, torch.Tensor) else x for k, x in given.items()} | {"batch_first": True}
        )
    )
    assert one.shape == (1, T)
    assert single.shape == (T, 1)
    assert not torch.equal(one[0], single[:, 0])


@pytest.mark.parametrize(
    ("function", "theirs", "ours"),
    [
        *((function, "gamma", "discount") for function in (*OVER_TRAJECTORIES, gs.muzero_targets)),
        (gs.generalized_advantages, "lam", "lambda_"),
        (gs.generalized_advantages, "gae_lambda", "lambda_"),
        (gs.lambda_returns, "lmbda", "lambda_"),
        (gs.vtrace, "dones", "terminated"),
        (gs.vtrace, "rhos", "ratios"),
        (gs.retrace, "done", "terminated"),
        (gs.n_step_returns, "n_steps", "n"),
        (gs.muzero_targets, "n_steps", "td_steps"),
        (gs.lambda_returns, "attention_mask", "mask"),
        (gs.lambda_returns, "discout", "discount"),
    ],
)
def test_arguments_with_the_names_of_others(function, theirs, ours):
    text = message(TypeError, lambda: function(REWARDS, LAST_VALUES, **{theirs: 0.5}))
    assert text == f"{function.__name__}: there is no argument {theirs}; write {ours}="
    assert ours in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("preset", "theirs", "ours"),
    [
        ("ppo", "clip_coef", "clip"),
        ("ppo", "clip_range", "clip"),
        ("ppo", "vf_coef", "value_weight"),
        ("ppo", "ent_coef", "entropy_weight"),
        ("ppo", "entropy_coef", "entropy_weight"),
        ("ppo", "nvec", "choices"),
        ("ppo", "value_wieght", "value_weight"),
        ("muzero", "value_coef", "value_weight"),
    ],
)
def test_arguments_of_presets_with_the_names_of_others(preset, theirs, ours):
    make = getattr(gs.MultiStepLoss, preset)
    text = message(TypeError, lambda: make(**{theirs: 0.5}))
    assert text == f"MultiStepLoss.{preset}: there is no argument {theirs}; write {ours}="
    assert ours in inspect.signature(make).parameters


def test_arguments_that_presets_do_not_have():
    text = message(TypeError, lambda: gs.MultiStepLoss.ppo(xyz=1))
    assert text.endswith("; its arguments are clip, value_clip, value_weight, entropy_weight, continuous, choices")
    for name in ("kl_weight", "dual_clip", "surrogate"):
        text = message(TypeError, lambda name=name: gs.MultiStepLoss.ppo(**{name: 1}))
        advised = text.partition("; write ")[2]
        assert f"policy=PolicyGradient({name}=..., " in advised
        # The advised heads are the preset's.
        loss = eval(advised.replace(f"{name}=..., ", ""), vars(gs).copy())
        assert loss.heads == gs.MultiStepLoss.ppo().heads


def test_presets_of_subclasses():
    class Loss(gs.MultiStepLoss):
        pass

    assert type(Loss.ppo()) is type(Loss.muzero()) is Loss
    assert Loss.ppo(0.1).heads["policy"].clip == 0.1
    assert message(TypeError, lambda: Loss.ppo(gamma=1)).startswith("MultiStepLoss.ppo: there is no argument gamma")


FUNCTIONS = [value for value in (getattr(gs, name) for name in gs.__all__) if inspect.isfunction(value)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_advised_keywords_are_accepted(function):
    """Of each public function, for each known name, and each name of another function over trajectories."""
    accepted = inspect.signature(function).parameters
    others = {name for other in (*OVER_TRAJECTORIES, gs.muzero_targets) for name in inspect.signature(other).parameters}
    for name in sorted((others | set(_keywords._OURS)) - set(accepted)):
        text = message(TypeError, lambda name=name: function(**{name: None}))
        advised = re.findall(r"write (\w+)=", text)
        assert set(advised) <= set(accepted), text
        if advised and name in _keywords._OURS and function is not gs.reverse_gradient:
            assert advised[0] in _keywords._OURS[name], text


@pytest.mark.parametrize(
    ("function", "name"),
    [(gs.muzero_targets, "truncated"), (gs.muzero_targets, "next_values"), (gs.lambda_returns, "root_reward")],
)
def test_an_argument_of_another_function_is_no_misspelling(function, name):
    text = message(TypeError, lambda: function(REWARDS, LAST_VALUES, **{name: 0.5}))
    assert text.startswith(f"{function.__name__}: there is no argument {name}; its arguments are rewards, ")


def test_other_errors_of_arguments_stay():
    assert "missing" in message(TypeError, lambda: gs.lambda_returns(REWARDS, LAST_VALUES))
    assert message(
        TypeError, lambda: gs.lambda_returns(REWARDS, LAST_VALUES, discount=0.9, lambda_=0.9, xyz=1)
    ).startswith("lambda_returns: there is no argument xyz; its arguments are rewards, values,")
    text = message(TypeError, lambda: gs.lambda_returns(REWARDS, LAST_VALUES, discount="x", lambda_=1.0))
    assert text.startswith("lambda_returns: discount must be a number")


def test_names_in_compiled_functions():
    compiled = torch.compile(
        lambda r, v: gs.lambda_returns(r, v, discount=0.9, lambda_=0.8), fullgraph=True, backend="eager"
    )
    expected = gs.lambda_returns(REWARDS, LAST_VALUES, discount=0.9, lambda_=0.8)
    assert torch.equal(compiled(REWARDS, LAST_VALUES), expected)


# ---- Padding --------------------------------------------------------------------------------------------------------


def padded(function, **options):
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[True, True, False]])
    values = torch.tensor([[0.0, 0.0, 100.0]])
    given = arguments_of(function, rewards, values, torch.tensor([[0.0, 100.0, 100.0]]))
    return first(function(**given, mask=mask, check=True, **options))


@pytest.mark.parametrize("function", OVER_TRAJECTORIES, ids=lambda function: function.__name__)
def test_check_warns_of_padding(function):
    with pytest.warns(UserWarning, match=f"^{function.__name__}: transition 1 of row 0 bootstraps .*write terminated="):
        padded(function)
    ends = torch.tensor([[False, True, False]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = padded(function, terminated=ends)
        padded(function, truncated=ends)
    assert result[0, 1] == 1
    assert result[0, 2] == 0


def test_check_with_other_ends_and_orders():
    rewards, values = torch.zeros(1, 3), torch.zeros(1, 4)
    mask = torch.tensor([[True, True, False]])
    call = lambda **options: gs.lambda_returns(rewards, values, lambda_=1.0, mask=mask, check=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(discount=torch.tensor([[0.9, 0.0, 0.9]]))
        call(discount=0.0)
        gs.lambda_returns(rewards, values, discount=0.9, lambda_=1.0, check=True)
        gs.lambda_returns(rewards[:, :0], values[:, :1], discount=0.9, lambda_=1.0, mask=mask[:, :0], check=True)
    with pytest.warns(UserWarning, match="if values hold the value of its true successor at 2, ignore"):
        call(discount=0.9)
    with pytest.warns(UserWarning, match="transition 1 of row 0"):
        gs.lambda_returns(rewards.T, values.T, discount=0.9, lambda_=1.0, mask=mask.T, check=True, batch_first=False)


def test_check_reads_coefficients():
    def call(**options):
        return gs.lambda_returns(REWARDS, LAST_VALUES, **({"discount": 0.9, "lambda_": 0.8, "check": True} | options))

    assert torch.equal(call(), call(check=False))
    text = message(ValueError, lambda: call(discount=torch.tensor(1.5)))
    assert text == "lambda_returns: discount must be from -1 to 1, but it has 1.5"
    text = message(ValueError, lambda: call(lambda_=torch.full((B, 1), torch.nan)))
    assert text == "lambda_returns: lambda_ must be from 0 to 1, but it has nan"
    assert message(TypeError, lambda: call(check=1)).startswith("lambda_returns: check")
    with pytest.raises(NotImplementedError, match="lambda_returns: check=True reads values"):
        torch.func.vmap(lambda r: gs.lambda_returns(r, LAST_VALUES, discount=0.9, lambda_=0.8, check=True))(
            REWARDS[None]
        )


# ---- The loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("shape", "written"),
    [
        ((B,), "mask[:, None].expand(4, 6)"),
        ((T,), "mask.expand(4, 6)"),
        ((B, 1), "mask.expand(4, 6)"),
        ((1, T), "mask.expand(4, 6)"),
        ((1, 1), "mask.expand(4, 6)"),
    ],
)
def test_masks_of_samples_or_steps(shape, written, batch_first):
    mask = (
        (torch.arange(max(shape)) % 2 == 0).expand(max(shape)).reshape(shape)
        if max(shape) > 1
        else torch.ones(1, 1).bool()
    )
    predictions, targets = {"value": LOGITS}, {"value": SCALARS}
    if not batch_first:
        predictions, targets = {"value": LOGITS.transpose(0, 1)}, {"value": SCALARS.T}
        mask = mask.T if mask.dim() == 2 else mask
        written = {"mask[:, None].expand(4, 6)": "mask.expand(6, 4)"}.get(written, written.replace("(4, 6)", "(6, 4)"))
        written = "mask[:, None].expand(6, 4)" if shape == (T,) else written
    loss = lambda mask: VALUE(predictions, targets, mask=mask, batch_first=batch_first)
    assert message(ValueError, lambda: loss(mask)).endswith(f"; write {written}")
    followed = eval(written, {"mask": mask})
    expected = VALUE({"value": LOGITS}, {"value": SCALARS}, mask=followed if batch_first else followed.T)
    torch.testing.assert_close(loss(followed).loss, expected.loss)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mask_of_as_many_samples_as_steps_has_two_readings(batch_first):
    predictions, targets = {"value": torch.randn(T, T, S)}, {"value": torch.randn(T, T)}
    mask = torch.arange(T) < 2
    for_sample, for_step = "mask[:, None].expand(6, 6)", "mask.expand(6, 6)"
    for_sample, for_step = (for_sample, for_step) if batch_first else (for_step, for_sample)
    text = message(ValueError, lambda: VALUE(predictions, targets, mask=mask, batch_first=batch_first))
    assert text.endswith(f"; write {for_sample} for an entry per sample, or {for_step} for an entry per step")
    found = VALUE(predictions, targets, mask=eval(for_sample), batch_first=batch_first)
    assert found.per_sample.ne(0).tolist() == mask.tolist()


def test_logits_of_another_number_of_bins():
    text = message(ValueError, lambda: VALUE({"value": LOGITS[..., :600]}, {"value": SCALARS}))
    assert text.endswith("; give the last layer 601 outputs, or the support num_bins=600")
    assert message(ValueError, lambda: SUPPORT.decode(LOGITS[..., :600])).endswith("or the support num_bins=600")
    gs.MultiStepLoss(value=gs.TwoHot(gs.Support(-300, 300, 600)))({"value": LOGITS[..., :600]}, {"value": SCALARS})


def test_a_column_of_rewards_in_a_projection():
    probabilities, rewards = LOGITS[:, 0].softmax(-1), torch.zeros(B, 1)
    text = message(ValueError, lambda: SUPPORT.project(probabilities, rewards, torch.ones(B)))
    assert text.endswith("; write rewards.squeeze(-1)")
    torch.testing.assert_close(SUPPORT.project(probabilities, rewards.squeeze(-1), torch.ones(B)), probabilities)


# ---- Nested tensors, and other devices ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: gs.lambda_returns(x, x, discount=0.9, lambda_=0.9),
        lambda x: gs.n_step_transitions(x, discount=0.9, n=1),
        lambda x: gs.muzero_targets(x, x, num_unroll_steps=1, td_steps=1, discount=0.9),
        lambda x: gs.gradient_statistics([x]),
        lambda x: gs.standardize(x),
        lambda x: gs.l2_loss([x]),
        lambda x: gs.clip_gradients_([torch.nn.Parameter(torch.ones(2))], x),
        lambda x: gs.priorities(x, x),
        lambda x: gs.scale_gradient(x, 0.5),
        lambda x: gs.Support.muzero().decode(x),
    ],
)
def test_nested_tensors(call, layout):
    nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=layout)
    assert "is a nested tensor" in message(TypeError, lambda: call(nested))
