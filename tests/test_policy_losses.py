"""The losses of policies and of clipped values, compared with formulas written from papers and other projects."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

import gradscale_ext as gs

#: Of the loss. "auto" runs the kernels.
IMPLEMENTATIONS = ["reference", "fused"]
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
INF, NAN = math.inf, math.nan
LOG_2 = math.log(2)


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def doubles(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()


def run(head: gs.Head, prediction: Any, target: Any, impl: str, **options: Any) -> gs.MultiStepLossOutput:
    options = {"steps": False, **options}
    return gs.multi_step_loss({"h": head}, {"h": prediction}, {"h": target}, impl=impl, **options)


def gradient_of(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss.sum(), tensors))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- Single numbers -------------------------------------------------------------------------------------------------

#: Arguments of the head, logits, action, advantage, log_probs; loss, gradient.
DISCRETE = {
    "ratio 1": ({}, [0, 0], 0, 1, -LOG_2, -1, [-0.5, 0.5]),
    "clipped above": ({}, [0, 0], 0, 1, -2 * LOG_2, -1.2, [0, 0]),
    "bounds of two numbers": ({"clip": (0.2, 0.28)}, [0, 0], 0, 1, -2 * LOG_2, -1.28, [0, 0]),
    "the high bound does not bind below": ({"clip": (0.2, 9)}, [0, 0], 0, 1, -2 * LOG_2, -2, [-1, 1]),
    "clipped below": ({"clip": (0.2, 9)}, [0, 0], 0, -1, 0, 0.8, [0, 0]),
    "no lower bound": ({"clip": (1, 9)}, [0, 0], 0, -1, 0, 0.5, [0.25, -0.25]),
    "not clipped upwards": ({}, [0, 0], 0, -1, -2 * LOG_2, 2, [1, -1]),
    "not clipped downwards": ({}, [0, 0], 0, 1, 0, -0.5, [-0.25, 0.25]),
    "dual clip": ({"dual_clip": 1.5}, [0, 0], 0, -1, -2 * LOG_2, 1.5, [0, 0]),
    "dual clip that does not bind": ({"dual_clip": 2.5}, [0, 0], 0, -1, -2 * LOG_2, 2, [1, -1]),
    "dual clip below the clip": ({"dual_clip": 1.1, "clip": 0.5}, [0, 0], 0, -1, -2 * LOG_2, 1.1, [0, 0]),
    "dual clip of a gain": ({"dual_clip": 1.5, "clip": None}, [0, 0], 0, 1, -2 * LOG_2, -2, [-1, 1]),
    "no clip": ({"clip": None}, [0, 0], 0, 1, -2 * LOG_2, -2, [-1, 1]),
    "a tie": ({"clip": 0}, [0, 0], 0, 1, -LOG_2, -1, [-0.5, 0.5]),
    "a tie of a loss": ({"clip": 0}, [0, 0], 0, -1, -LOG_2, 1, [0.5, -0.5]),
    "log": ({"surrogate": "log"}, [0, 0], 0, 2, -5, 2 * LOG_2, [-1, 1]),
    "cispo": ({"surrogate": "cispo", "clip": 0.2}, [0, 0], 0, 2, -LOG_2, 2 * LOG_2, [-1, 1]),
    "cispo above": ({"surrogate": "cispo", "clip": 0.2}, [0, 0], 0, 2, -9, 2.4 * LOG_2, [-1.2, 1.2]),
    "cispo below": ({"surrogate": "cispo", "clip": 0.2}, [0, 0], 0, 2, 9, 1.6 * LOG_2, [-0.8, 0.8]),
    "cispo of a loss": ({"surrogate": "cispo", "clip": (1, 4)}, [0, 0], 0, -2, -LOG_2, -2 * LOG_2, [1, -1]),
    "entropy": ({"entropy_weight": 0.5}, [0, 0], 0, 0, 0, -0.5 * LOG_2, [0, 0]),
    # A = 0
    "no advantage": ({}, [0, 0], 0, 0, -LOG_2, 0, [0, 0]),
    "no advantage, infinite ratio": ({"clip": None}, [0, 0], 0, 0, -1e4, 0, [0, 0]),
    "no advantage, infinite ratio, clip": ({}, [0, 0], 0, 0, -INF, 0, [0, 0]),
    "no advantage, cispo": ({"surrogate": "cispo", "clip": 0.2}, [0, -INF], 1, 0, -INF, 0, [0, 0]),
    "no advantage, log": ({"surrogate": "log"}, [0, -INF], 1, 0, 0, 0, [0, 0]),
    # r = inf
    "infinite ratio, gain": ({}, [0, 0], 0, 2, -1e4, -2.4, [0, 0]),
    "infinite ratio, gain, -inf": ({}, [0, 0], 0, 2, -INF, -2.4, [0, 0]),
    "infinite ratio, dual clip": ({"dual_clip": 3}, [0, 0], 0, -2, -INF, 6, [0, 0]),
    "infinite ratio, cispo": ({"surrogate": "cispo", "clip": 0.2}, [0, 0], 0, 1, -1e4, 1.2 * LOG_2, [-0.6, 0.6]),
    # An illegal action was taken.
    "illegal, gain": ({}, [0, -INF], 1, 1, -1, 0, [0, 0]),
    "illegal, loss": ({}, [0, -INF], 1, -1, -1, 0.8, [0, 0]),
    "illegal, no lower bound": ({"clip": (1, 0.2)}, [0, -INF], 1, -1, -1, 0, [0, 0]),
    "illegal, no clip": ({"clip": None}, [0, -INF], 1, -1, -1, 0, [0, 0]),
    "illegal for both": ({}, [0, -INF], 1, -1, -INF, 0.8, [0, 0]),
    "illegal, log": ({"surrogate": "log"}, [0, -INF], 1, 2, -1, INF, [2, -2]),
    "illegal, log of a loss": ({"surrogate": "log"}, [0, -INF], 1, -2, -1, -INF, [-2, 2]),
    "illegal, cispo": ({"surrogate": "cispo", "clip": 0.2}, [0, -INF], 1, 2, -1, INF, [1.6, -1.6]),
    "illegal, cispo, weight 0": ({"surrogate": "cispo", "clip": (1, 0.2)}, [0, -INF], 1, 2, -1, 0, [0, 0]),
    "another is illegal": ({}, [0, -INF], 0, 1, 0, -1, [0, 0]),
}


def discrete(case: str, impl: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    arguments, logits, action, advantage, old, *_ = DISCRETE[case]
    x = torch.tensor([logits], dtype=dtype, requires_grad=True)
    fields = {"actions": torch.tensor([action]), "advantages": doubles(advantage), "log_probs": doubles(old)}
    return run(gs.PolicyGradient(**arguments), x, fields, impl, **options), x


@every_implementation
@pytest.mark.parametrize("case", DISCRETE)
def test_one_discrete_action(case, impl):
    *_, loss, gradient = DISCRETE[case]
    out, x = discrete(case, impl)
    close(out.per_step["h"], [loss])
    close(gradient_of(out.loss, x)[0], [gradient])
    log_prob, old = torch.tensor(DISCRETE[case][1]).double().log_softmax(-1)[DISCRETE[case][2]], DISCRETE[case][4]
    close(out.log_probs["h"], [log_prob])
    if log_prob == -INF or old == -INF:
        assert out.approx_kl["h"] == INF
    else:
        d = log_prob - old
        close(out.approx_kl["h"], math.expm1(d) - d if d < 700 else INF)


@every_implementation
def test_an_infinite_ratio_of_a_loss(impl):
    """Nothing bounds the loss: it is infinite, and its gradient is not finite."""
    x = leaf([[0, 0]])
    fields = {"actions": torch.tensor([0]), "advantages": doubles(-1), "log_probs": doubles(-1e4)}
    out = run(gs.PolicyGradient(), x, fields, impl)
    assert out.loss == out.approx_kl["h"] == INF
    assert not gradient_of(out.loss, x)[0].isfinite().any()
    assert out.clip_fraction["h"] == 1


@every_implementation
@pytest.mark.parametrize("action", [INF, -INF, 1e200])
@pytest.mark.parametrize("head", [{}, {"surrogate": "log"}, {"surrogate": "cispo", "clip": 0.2}], ids=str)
def test_an_impossible_action_of_a_gaussian_policy(action, head, impl):
    """Its probability is 0, and so are its loss and gradient, although log pi(a) has an infinite derivative."""
    means, log_stds = leaf([[0, 1]]), leaf([[-400, 0]])
    for advantage in [0] if head else [0, 1]:
        fields = {"actions": doubles(action, 1)[None], "advantages": doubles(advantage), "log_probs": doubles(-1)}
        out = run(gs.GaussianPolicyGradient(**head), {"means": means, "log_stds": log_stds}, fields, impl)
        assert out.loss == 0
        assert out.log_probs["h"] == -INF
        for gradient in gradient_of(out.loss, means, log_stds):
            close(gradient, [[0, 0]])


@every_implementation
def test_approx_kl_and_clip_fraction(impl):
    """Over unmasked entries, without weights, also of skipped samples."""
    ratios = doubles(1, 1.1, 1.25, 0.7, 9, 1)
    fields = {"advantages": doubles(1, 1, 1, 1, 1, NAN), "log_probs": -ratios.log()}
    x, mask = torch.zeros(6, dtype=torch.float64), torch.tensor([True, True, True, True, False, True])
    kept = ratios[mask]
    for clip, share in ((0.2, 0.4), ((0.31, 0.2), 0.2), ((0.2, 0.3), 0.2), ((1, 0.05), 0.4), (None, 0)):
        out = run(gs.PolicyGradient(clip=clip), x, fields, impl, mask=mask, nonfinite="skip")
        close(out.approx_kl["h"], (kept - 1 - kept.log()).mean())
        close(out.clip_fraction["h"], share)
    out = run(gs.PolicyGradient(surrogate="log"), x, fields, impl, mask=mask)
    close(out.approx_kl["h"], (kept - 1 - kept.log()).mean())
    assert out.clip_fraction["h"] == 0
    nothing = run(gs.PolicyGradient(), x, fields, impl, mask=torch.zeros(6, dtype=torch.bool))
    assert nothing.approx_kl["h"] == 0 == nothing.clip_fraction["h"] == nothing.loss
    without = run(gs.PolicyGradient(surrogate="log"), x, {"advantages": torch.ones(6)}, impl)
    assert without.approx_kl == {} == without.clip_fraction
    assert list(without.log_probs) == ["h"]


@every_implementation
def test_the_divergences_keep_small_ratios(impl):
    """In float32, exp(1e-4) - 1 - 1e-4 has no digits; expm1(1e-4) - 1e-4 has three."""
    d, truth = torch.tensor([1e-4]), math.expm1(1e-4) - 1e-4
    fields = {"advantages": torch.zeros(1), "log_probs": torch.zeros(1), "reference_log_probs": torch.zeros(1)}
    out = run(gs.PolicyGradient(kl_weight=1), d, fields, impl)
    assert abs(out.approx_kl["h"].item() / truth - 1) < 2e-3
    assert abs(out.loss.item() / (math.expm1(-1e-4) + 1e-4) - 1) < 2e-3


@every_implementation
def test_log_probabilities_near_0_keep_their_digits(impl):
    x = leaf([[40, 0, 1]])
    fields = {"actions": torch.tensor([0]), "advantages": doubles(1)}
    out = run(gs.PolicyGradient(surrogate="log"), x, fields, impl)
    expected = -math.log1p(math.exp(-40) + math.exp(-39))
    assert abs(out.log_probs["h"].item() / expected - 1) < 1e-12
    assert abs(out.loss.item() / -expected - 1) < 1e-12


K3 = {  # log-probability, reference; divergence
    "equal": (-1, -1, 0),
    "above": (-1, -2, math.exp(-1)),
    "below": (-2, -1, math.e - 2),
    "the policy cannot": (-INF, -1, INF),
    "the reference cannot": (-1, -INF, INF),
    "neither can": (-INF, -INF, 0),
}


@every_implementation
@pytest.mark.parametrize("case", K3)
def test_the_divergence_from_a_reference(case, impl):
    log_prob, reference, expected = K3[case]
    fields = {"advantages": doubles(0), "log_probs": doubles(0), "reference_log_probs": doubles(reference)}
    x = leaf([log_prob])
    out = run(gs.PolicyGradient(kl_weight=0.5), x, fields, impl)
    close(out.loss, expected / 2)
    if expected < INF:
        slope = 0 if log_prob == reference else 1 - math.exp(reference - log_prob)
        close(gradient_of(out.loss, x)[0], [slope / 2])
    else:
        assert out.loss == INF


#: Heads with every field, for logits.
EVERY_SURROGATE = {
    "ppo": gs.PolicyGradient(kl_weight=0.1),
    "ppo without clip": gs.PolicyGradient(clip=None),
    "dual clip": gs.PolicyGradient(dual_clip=3),
    "log": gs.PolicyGradient(surrogate="log"),
    "cispo": gs.PolicyGradient(surrogate="cispo", clip=(1, 4)),
}


@every_implementation
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("where", ["advantages", "log_probs", "reference_log_probs", "prediction"])
@pytest.mark.parametrize("name", EVERY_SURROGATE)
def test_nan_stays_in_its_own_sample(name, where, advantage, impl):
    head = EVERY_SURROGATE[name]
    x = torch.zeros(2, 3, dtype=torch.float64)
    fields = {"actions": torch.tensor([0, 1]), "advantages": doubles(advantage, 1), "log_probs": doubles(-0.5, -1)}
    if head.kl_weight:
        fields["reference_log_probs"] = doubles(-1, -1)
    if where == "prediction":
        x[0, 2] = NAN
    elif where in fields:
        fields[where][0] = NAN
    else:
        pytest.skip("not a field of this head")
    x.requires_grad_()
    out = run(head, x, fields, impl, reduction="sum")
    gradient = gradient_of(out.loss, x)[0]
    is_read = (name, where) != ("log", "log_probs")
    assert out.per_step["h"].isnan().tolist() == [is_read, False]
    assert gradient[0].isnan().all() == is_read
    assert gradient[1].isfinite().all()
    assert out.approx_kl["h"].isnan() == (where in ("log_probs", "prediction"))


@every_implementation
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("name", EVERY_SURROGATE)
def test_nan_of_other_predictions(name, advantage, impl):
    """Of log-probabilities, of one dimension of several, and of logits that have no softmax."""
    arguments = {field: getattr(EVERY_SURROGATE[name], field) for field in ("clip", "surrogate", "dual_clip")}
    fields = {"advantages": doubles(advantage, 1), "log_probs": doubles(-1, -1)}
    x = leaf([NAN, -1])
    out = run(gs.PolicyGradient(**arguments), x, fields, impl, reduction="sum")
    assert out.per_step["h"].isnan().tolist() == [True, False]
    assert gradient_of(out.loss, x)[0].isnan().tolist() == [True, False]
    x = leaf([[0, INF], [0, 0]])
    discrete = {**fields, "actions": torch.tensor([0, 1])}
    out = run(gs.PolicyGradient(**arguments), x, discrete, impl, reduction="sum")
    assert out.per_step["h"].isnan().tolist() == [True, False]
    assert gradient_of(out.loss, x)[0].isnan().all(1).tolist() == [True, False]
    for wrong in ("means", "log_stds", "actions"):
        tensors = {name: torch.zeros(2, 2, dtype=torch.float64) for name in ("means", "log_stds", "actions")}
        tensors[wrong][0, 1] = NAN
        actions = tensors.pop("actions")
        leaves = [tensor.requires_grad_() for tensor in tensors.values()]
        out = run(
            gs.GaussianPolicyGradient(**arguments), tensors, {**fields, "actions": actions}, impl, reduction="sum"
        )
        assert out.per_step["h"].isnan().tolist() == [True, False]
        for gradient in gradient_of(out.loss, *leaves):
            assert gradient.isnan().all(1).tolist() == [True, False]


@every_implementation
@pytest.mark.parametrize("where", ["value", "returns", "values"])
def test_nan_of_clipped_values(where, impl):
    tensors = {"value": torch.zeros(2, dtype=torch.float64), "returns": doubles(1, 1), "values": doubles(0, 5)}
    tensors[where][0] = NAN
    value = tensors.pop("value").requires_grad_()
    out = run(gs.ClippedSquaredError(), value, {**tensors, "values": doubles(5, 5)}, impl, reduction="sum")
    if where != "values":  # also where v is clipped
        assert out.per_step["h"].isnan().tolist() == [True, False]
        assert gradient_of(out.loss, value)[0].isnan().tolist() == [True, False]
    out = run(gs.ClippedSquaredError(), value, tensors, impl, reduction="sum")
    assert out.per_step["h"].isnan().tolist() == [True, False]
    assert gradient_of(out.loss, value)[0].isnan().tolist() == [True, False]
    out = run(gs.ClippedSquaredError(clip=None), value, tensors, impl, reduction="sum")
    assert out.per_step["h"].isnan().tolist() == [where != "values", False]


@every_implementation
@pytest.mark.parametrize("head", [name for name in EVERY_SURROGATE if name != "log"])
def test_no_advantage_and_an_undefined_ratio(head, impl):
    """inf - inf is no NaN of an input: the loss is 0, as for any other ratio."""
    head = dataclasses.replace(EVERY_SURROGATE[head], kl_weight=0.0)
    x = leaf([INF, -1])
    out = run(head, x, {"advantages": doubles(0, 0), "log_probs": doubles(INF, -1)}, impl, reduction="sum")
    assert out.per_step["h"].tolist() == [0, 0]
    assert gradient_of(out.loss, x)[0].tolist() == [0, 0]
    assert out.approx_kl["h"].isnan()


@every_implementation
def test_an_illegal_action_without_an_old_probability_is_not_clipped(impl):
    fields = {"actions": torch.tensor([0]), "advantages": doubles(1), "log_probs": doubles(NAN)}
    out = run(gs.PolicyGradient(), leaf([[-INF, 0]]), fields, impl)
    assert out.clip_fraction["h"] == 0


@every_implementation
@pytest.mark.parametrize("clip", [0.2, 0.0])
@pytest.mark.parametrize(
    ("v", "returns", "old"),
    [(INF, INF, 0), (INF, INF, -INF), (INF, 0, INF), (INF, -INF, INF), (0, INF, INF), (0, -INF, -INF), (-INF, -INF, 0)],
)
def test_clipped_values_of_which_one_error_is_undefined(v, returns, old, clip, impl):
    """NaN of inf - inf stays through the maximum, and the gradient of such a loss is no number either."""
    value = leaf([v, 1])
    fields = {"returns": doubles(returns, 1), "values": doubles(old, 1)}
    out = run(gs.ClippedSquaredError(clip=clip), value, fields, impl, reduction="sum")
    assert out.per_step["h"].isnan().tolist() == [True, False]
    assert gradient_of(out.loss, value)[0].isnan().tolist() == [True, False]


VALUES = {  # v, v_old, R, clip; loss, gradient
    "clipped": (1, 0, 2, 0.2, 3.24, 0),
    "clipped downwards": (-1, 0, -2, 0.2, 3.24, 0),
    "the plain error is larger": (1, 0, -2, 0.2, 9, 6),
    "inside of the clip": (0.1, 0, 2, 0.2, 3.61, -3.8),
    "a clip of 0": (1, 0, 2, 0, 4, 0),
    "a tie": (0.5, 0, 0.25, 0, 0.0625, 0.5),
    "no clip": (1, 0, 2, None, 1, -2),
}


@every_implementation
@pytest.mark.parametrize("case", VALUES)
def test_one_clipped_value(case, impl):
    v, old, returns, clip, loss, gradient = VALUES[case]
    value = leaf([v])
    out = run(gs.ClippedSquaredError(clip=clip), value, {"returns": doubles(returns), "values": doubles(old)}, impl)
    close(out.loss, loss)
    close(gradient_of(out.loss, value)[0], [gradient])
    assert out.entropy == {} == out.log_probs == out.max_abs_logit == out.approx_kl


@every_implementation
def test_values_inside_of_the_clip_have_the_plain_gradient(impl):
    """Rounding of v_old + (v - v_old) must not decide which of two equal terms is the larger one."""
    value, old, returns = normal(500).requires_grad_(), normal(500, seed=1), normal(500, seed=2)
    out = run(gs.ClippedSquaredError(clip=20), value, {"returns": returns, "values": old}, impl, reduction="sum")
    close(gradient_of(out.loss, value)[0], 2 * (value - returns).detach())


@every_implementation
def test_choices_of_equal_logits(impl):
    x = leaf([[0.0] * 6])
    fields = {"actions": torch.tensor([[0, 2]]), "advantages": doubles(1), "log_probs": doubles(-2 * math.log(3))}
    out = run(gs.PolicyGradient(choices=(3, 3)), x, fields, impl)
    close(out.loss, -1)
    close(out.entropy["h"], [2 * math.log(3)])
    close(gradient_of(out.loss, x)[0], [[-2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3, -2 / 3]])


@every_implementation
def test_one_gaussian_action(impl):
    means, log_stds = leaf([[0]]), leaf([[0]])
    fields = {"actions": doubles(1).unsqueeze(0), "advantages": doubles(1)}
    out = run(gs.GaussianPolicyGradient(surrogate="log"), {"means": means, "log_stds": log_stds}, fields, impl)
    close(out.loss, 0.5 + 0.5 * math.log(2 * math.pi))
    close(out.entropy["h"], [0.5 + 0.5 * math.log(2 * math.pi)])
    assert [gradient.item() for gradient in gradient_of(out.loss, means, log_stds)] == [-1, 0]
    assert out.max_abs_logit == {}


# ---- Other projects -------------------------------------------------------------------------------------------------

B, T, A, D = 48, 6, 5, 3


class Policies:
    """Random policies, each as the prediction of a head and as the distribution of torch.distributions."""

    def __init__(self, kind: str, *shape: int) -> None:
        self.kind = kind
        self.x = normal(*shape, {"discrete": A, "choices": 6, "gaussian": D}[kind]).requires_grad_()
        self.leaves, self.arguments = [self.x], {}
        self.head = gs.GaussianPolicyGradient if kind == "gaussian" else gs.PolicyGradient
        if kind == "discrete":
            distributions = [Categorical(logits=self.x)]
        elif kind == "choices":
            self.arguments = {"choices": (3, 1, 2)}
            distributions = [Categorical(logits=part) for part in self.x.split((3, 1, 2), -1)]
        else:
            self.log_stds = (normal(D, seed=1) / 2).requires_grad_()
            self.leaves.append(self.log_stds)
            distributions = [Independent(Normal(self.x, self.log_stds.expand_as(self.x).exp()), 1)]
        torch.manual_seed(3)
        actions = [distribution.sample() for distribution in distributions]
        self.log_prob = sum(d.log_prob(action) for d, action in zip(distributions, actions, strict=True))
        self.entropy = sum(d.entropy() for d in distributions)
        self.prediction = {"means": self.x, "log_stds": self.log_stds} if kind == "gaussian" else self.x
        self.old = self.log_prob.detach() + 0.3 * normal(*shape, seed=4)
        self.advantages = normal(*shape, seed=5)
        self.fields = {
            "actions": torch.stack(actions, -1) if kind == "choices" else actions[0],
            "advantages": self.advantages,
            "log_probs": self.old,
        }

    def compare(self, loss: torch.Tensor, out: gs.MultiStepLossOutput) -> None:
        close(out.loss, loss.detach())
        leaves = [x for x in self.leaves]
        for found, expected in zip(gradient_of(out.loss, *leaves), gradient_of(loss, *leaves), strict=True):
            close(found, expected)


every_policy = pytest.mark.parametrize("kind", ["discrete", "choices", "gaussian"])


@every_implementation
@every_policy
@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_cleanrl(kind, value_clip, impl):
    """The loss of `ppo.py`, `ppo_continuous_action.py` and `ppo_multidiscrete.py` with their default coefficients."""
    p, newvalue, b_values, b_returns = (
        Policies(kind, B),
        normal(B, seed=6).requires_grad_(),
        normal(B),
        normal(B, seed=7),
    )
    logratio = p.log_prob - p.old
    ratio = logratio.exp()
    pg_loss1 = -p.advantages * ratio
    pg_loss2 = -p.advantages * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    if value_clip:
        v_loss_unclipped = (newvalue - b_returns) ** 2
        v_clipped = b_values + torch.clamp(newvalue - b_values, -0.2, 0.2)
        v_loss = 0.5 * torch.max(v_loss_unclipped, (v_clipped - b_returns) ** 2).mean()
    else:
        v_loss = 0.5 * ((newvalue - b_returns) ** 2).mean()
    loss = pg_loss - 0.01 * p.entropy.mean() + v_loss * 0.5

    continuous, choices = kind == "gaussian", p.arguments.get("choices")
    loss_fn = gs.MultiStepLoss.ppo(value_clip=value_clip, continuous=continuous, choices=choices)
    target = {"returns": b_returns, **({"values": b_values} if value_clip else {})}
    predictions = {"policy": p.prediction, "value": newvalue}
    out = loss_fn(predictions, {"policy": p.fields, "value": target}, steps=False, impl=impl)
    p.leaves.append(newvalue)
    p.compare(loss, out)
    close(out.approx_kl["policy"], ((ratio - 1) - logratio).mean().detach(), 1e-11)
    close(out.clip_fraction["policy"], ((ratio - 1.0).abs() > 0.2).double().mean())
    close(out.entropy["policy"], p.entropy.detach())
    close(out.log_probs["policy"], p.log_prob.detach())
    assert set(out.max_abs_logit) == (set() if continuous else {"policy"})


@every_implementation
@every_policy
def test_torchrl(kind, impl):
    """The objective of `ClipPPOLoss`, clip_epsilon 0.1, entropy_coeff 0.01."""
    p = Policies(kind, B)
    log_weight = p.log_prob - p.old
    clipped = log_weight.clamp(math.log1p(-0.1), math.log1p(0.1))
    gain = torch.stack([log_weight.exp() * p.advantages, clipped.exp() * p.advantages], -1).min(-1).values
    head = p.head(clip=0.1, entropy_weight=0.01, **p.arguments)
    p.compare(-gain.mean() - 0.01 * p.entropy.mean(), run(head, p.prediction, p.fields, impl))


@every_implementation
@every_policy
def test_tianshou(kind, impl):
    """The dual clip of its PPO."""
    p = Policies(kind, B)
    ratio = (p.log_prob - p.old).exp()
    surr1, surr2 = ratio * p.advantages, ratio.clamp(1 - 0.2, 1 + 0.2) * p.advantages
    clip1 = torch.min(surr1, surr2)
    clip2 = torch.max(clip1, 1.3 * p.advantages)
    assert ((ratio > 1.3) & (p.advantages < 0)).any()
    loss = -torch.where(p.advantages < 0, clip2, clip1).mean()
    p.compare(loss, run(p.head(dual_clip=1.3, **p.arguments), p.prediction, p.fields, impl))


@every_implementation
@every_policy
def test_impala(kind, impl):
    """The sum over batch and time of the policy gradient loss and the entropy loss."""
    p = Policies(kind, B, T)
    loss = (-p.log_prob * p.advantages).sum() - 0.01 * p.entropy.sum()
    head = p.head(surrogate="log", entropy_weight=0.01, **p.arguments)
    del p.fields["log_probs"]
    p.compare(loss, run(head, p.prediction, p.fields, impl, steps=True, reduction="sum"))


LENGTHS = torch.tensor([1 + 5 * b % T for b in range(B)])
MASK = torch.arange(T) < LENGTHS[:, None]
RECIPES = {
    "grpo": (lambda x: ((x * MASK).sum(-1) / MASK.sum(-1)).mean(), {"step_weights": MASK / LENGTHS[:, None].double()}),
    "dapo": (lambda x: (x * MASK).sum() / MASK.sum(), {"reduction": "valid_mean"}),
    "dr_grpo": (lambda x: (x * MASK).sum() / (B * T), {"num_entries": {"h": B * T}}),
}


@every_implementation
@pytest.mark.parametrize("kind", ["discrete", "log-probabilities"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_trl(recipe, beta, kind, impl):
    """The loss of TRL's `GRPOTrainer` by token, with epsilon 0.2, epsilon_high 0.28 and a reference policy."""
    p = Policies("discrete", B, T)
    p.advantages = normal(B, seed=8)[:, None].expand(B, T)  # one for each sequence
    reference = p.log_prob.detach() + 0.1 * normal(B, T, seed=9)
    coef_1 = torch.exp(p.log_prob - p.old)
    coef_2 = torch.clamp(coef_1, 1 - 0.2, 1 + 0.28)
    per_token_loss = -torch.min(coef_1 * p.advantages, coef_2 * p.advantages)
    per_token_kl = torch.exp(reference - p.log_prob) - (reference - p.log_prob) - 1
    reduce, options = RECIPES[recipe]

    fields = {**p.fields, "advantages": p.advantages, **({"reference_log_probs": reference} if beta else {})}
    prediction = p.x
    if kind == "log-probabilities":
        del fields["actions"]
        prediction = p.log_prob
    head = gs.PolicyGradient(clip=(0.2, 0.28), kl_weight=beta)
    out = run(head, prediction, fields, impl, steps=True, mask=MASK, **options)
    loss = reduce(per_token_loss + beta * per_token_kl)
    close(out.loss, loss.detach())
    close(torch.autograd.grad(out.loss, p.x, retain_graph=True)[0], torch.autograd.grad(loss, p.x)[0])
    assert set(out.entropy) == ({"h"} if kind == "discrete" else set()) == set(out.max_abs_logit)


@every_implementation
def test_trl_cispo(impl):
    """loss_type "cispo" with epsilon_high 5."""
    p = Policies("discrete", B)
    coef = torch.exp(4 * (p.log_prob - p.old))
    assert (coef > 5).any()
    loss = (-torch.clamp(coef, max=5).detach() * p.advantages * p.log_prob).mean()
    fields = {**p.fields, "log_probs": p.log_prob.detach() - 4 * (p.log_prob - p.old).detach()}
    p.compare(loss, run(gs.PolicyGradient(surrogate="cispo", clip=(1, 4)), p.x, fields, impl))


# ---- Recipes of the page --------------------------------------------------------------------------------------------


@every_implementation
def test_truncated_importance_weights(impl):
    """Of tokens that another engine sampled: they multiply the advantages."""
    p = Policies("discrete", B)
    weights = (p.old + 0.5 * normal(B, seed=11) - p.old).exp().clamp(max=2)
    ratio = (p.log_prob - p.old).exp()
    loss = -(weights * torch.min(ratio * p.advantages, ratio.clamp(0.8, 1.2) * p.advantages)).mean()
    p.compare(loss, run(gs.PolicyGradient(), p.x, {**p.fields, "advantages": weights * p.advantages}, impl))


@every_implementation
def test_a_scheduled_entropy_weight(impl):
    p, coefficient = Policies("discrete", B), torch.tensor(0.03, dtype=torch.float64)
    heads = {"policy": gs.PolicyGradient(), "entropy": gs.PolicyGradient(surrogate="log", entropy_weight=1)}
    targets = {"policy": p.fields, "entropy": {"actions": p.fields["actions"], "advantages": torch.zeros(B)}}
    predictions, options = {"policy": p.x, "entropy": p.x}, {"steps": False, "impl": impl}
    out = gs.multi_step_loss(heads, predictions, targets, head_weights={"entropy": coefficient}, **options)
    p.compare(run(gs.PolicyGradient(entropy_weight=0.03), p.x, p.fields, impl).loss, out)


@every_implementation
def test_the_actor_of_discrete_sac(impl):
    """sum_a p (alpha log p - Q), plus a constant."""
    x, q, alpha = normal(B, A).requires_grad_(), normal(B, A, seed=1), 0.3
    loss = (x.softmax(-1) * (alpha * x.log_softmax(-1) - q)).sum(-1).mean()
    head = gs.CategoricalKL(prediction="p", unimix=0, weight=alpha)
    out = run(head, x.unsqueeze(1), (q / alpha).unsqueeze(1), impl)
    close(out.loss, (loss + alpha * (q / alpha).logsumexp(-1).mean()).detach())
    close(gradient_of(out.loss, x)[0], gradient_of(loss, x)[0])


@every_implementation
@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_an_infinite_advantage_is_a_tie(impl, dual_clip):
    """r A and clamp(r) A are both infinite: -r A gives the gradient."""
    log_probs, old = leaf([-0.7, -0.7, -3, -0.1]), doubles(-1, -1, -1, -1)
    fields = {"advantages": doubles(INF, -INF, INF, -INF), "log_probs": old}
    out = run(gs.PolicyGradient(dual_clip=dual_clip), log_probs, fields, impl, reduction="none")
    close(out.loss, [-INF, INF, -INF, INF])
    close(gradient_of(out.loss, log_probs)[0], [-INF, INF, -INF, INF])


@every_implementation
def test_gspo(impl):
    """The ratio of a sequence is the geometric mean over its tokens: a log-probability that was computed elsewhere."""
    p = Policies("discrete", B, T)
    mean = lambda values: (values * MASK).sum(-1) / LENGTHS
    ratio, advantages = (mean(p.log_prob) - mean(p.old)).exp(), normal(B, seed=8)
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - 0.1, 1 + 0.2) * advantages).mean()
    fields = {"advantages": advantages, "log_probs": mean(p.old)}
    out = run(gs.PolicyGradient(clip=(0.1, 0.2)), mean(p.log_prob), fields, impl)
    close(out.loss, loss.detach())
    close(torch.autograd.grad(out.loss, p.x, retain_graph=True)[0], torch.autograd.grad(loss, p.x)[0])


# ---- Derivatives ----------------------------------------------------------------------------------------------------

GRADCHECKED = {
    "ppo": {"entropy_weight": 0.1, "kl_weight": 0.2, "dual_clip": 1.2},
    "log": {"surrogate": "log", "entropy_weight": -0.1},
    "no clip": {"clip": None},
}


@every_implementation
@every_policy
@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(kind, name, impl):
    p = Policies(kind, 8)
    head = p.head(**GRADCHECKED[name], **p.arguments)
    fields = dict(p.fields)
    if head.kl_weight:
        fields["reference_log_probs"] = p.log_prob.detach() + normal(8, seed=10)

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        prediction = {"means": leaves[0], "log_stds": leaves[1]} if kind == "gaussian" else leaves[0]
        return run(head, prediction, fields, impl, reduction="none").loss

    leaves = [tensor.detach().requires_grad_() for tensor in p.leaves]
    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@every_implementation
def test_gradcheck_of_the_other_losses(impl):
    logits, samples, classes = (
        normal(4, 7).requires_grad_(),
        normal(4, 3, seed=1),
        torch.tensor([[0, 6, 6], [1, 2, 3]] * 2),
    )
    sampled = {"classes": classes, "probabilities": samples.softmax(-1)}
    sampled_head = gs.SoftCrossEntropy(entropy_weight=0.1)
    quantiles = {"samples": samples, "fractions": normal(4, 7, seed=2).sigmoid()}
    values = {"returns": samples[:, 0], "values": samples[:, 1]}
    for head, x, target in (
        (sampled_head, logits, sampled),
        (gs.QuantileHuber(), logits, quantiles),
        (gs.ClippedSquaredError(), normal(4, seed=3).requires_grad_(), values),
    ):
        assert torch.autograd.gradcheck(lambda x, h=head, t=target: run(h, x, t, impl).loss, x)
        assert torch.autograd.gradgradcheck(lambda x, h=head, t=target: run(h, x, t, impl).loss, x)
