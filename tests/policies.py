"""Calls of policy losses and of targets by field, for tests of the kernels."""

from __future__ import annotations

import math

import torch

import gradscale_ext as gs

#: name -> (head, the sizes of a row of predictions)
CASES = {
    "ppo 1": (gs.PolicyGradient(), 1),
    "ppo 4": (gs.PolicyGradient(entropy_weight=0.01), 4),
    "ppo 18": (gs.PolicyGradient(clip=(0.1, 0.3), dual_clip=1.5), 18),
    "ppo 33": (gs.PolicyGradient(clip=None, kl_weight=0.1), 33),
    "ppo 362": (gs.PolicyGradient(entropy_weight=-0.2), 362),
    "ppo 2100": (gs.PolicyGradient(entropy_weight=0.1), 2100),
    "log 6": (gs.PolicyGradient(surrogate="log", entropy_weight=0.1), 6),
    "log 130": (gs.PolicyGradient(surrogate="log"), 130),
    "cispo 9": (gs.PolicyGradient(surrogate="cispo", clip=(0.5, 1.0), kl_weight=0.2), 9),
    "choices": (gs.PolicyGradient(choices=(3, 5, 2), entropy_weight=0.1), 10),
    "many choices": (gs.PolicyGradient(choices=(40, 1, 7, 40), entropy_weight=0.1), 88),
    "log-probabilities": (gs.PolicyGradient(kl_weight=0.3), None),
    "normal 1": (gs.GaussianPolicyGradient(entropy_weight=0.1), 1),
    "normal 6": (gs.GaussianPolicyGradient(kl_weight=0.01), 6),
    "normal 17": (gs.GaussianPolicyGradient(surrogate="log", entropy_weight=0.1), 17),
    "normal 40": (gs.GaussianPolicyGradient(dual_clip=2.0), 40),
    "shared 6": (gs.GaussianPolicyGradient(entropy_weight=0.1), 6),
    "clipped value": (gs.ClippedSquaredError(), None),
    "value": (gs.ClippedSquaredError(clip=None), None),
    "few classes": (gs.SoftCrossEntropy(entropy_weight=0.1, subtract_target_entropy=True), 50),
    "few classes of 7": (gs.SoftCrossEntropy(), 7),
    "fractions": (gs.QuantileHuber(), 32),
}


def inputs_of(name, leading, dtype=torch.float64, device="cpu", seed=0):
    """Head, prediction and target of a case, with `leading` dimensions. Predictions require grad."""
    head, width = CASES[name]
    generator = torch.Generator().manual_seed(seed)

    def numbers(*size, scale=1.0):
        return (torch.randn(*leading, *size, generator=generator, dtype=torch.float64) * scale).to(device, dtype)

    def indices(size, *shape):
        return torch.randint(0, size, (*leading, *shape), generator=generator).to(device)

    prediction = numbers() - 1 if width is None else numbers(width, scale=2.0)
    if isinstance(head, gs.GaussianPolicyGradient):
        shared = torch.randn(width, generator=generator, dtype=torch.float64).to(device, dtype) * 0.3
        prediction = {"means": prediction, "log_stds": shared if "shared" in name else numbers(width, scale=0.3)}
    for tensor in prediction.values() if isinstance(prediction, dict) else [prediction]:
        tensor.requires_grad_()
    if isinstance(head, gs.ClippedSquaredError):
        return head, prediction, {"returns": numbers(), "values": prediction.detach() + numbers(scale=0.3)}
    if isinstance(head, gs.SoftCrossEntropy):
        return head, prediction, {"classes": indices(width, 9), "probabilities": numbers(9).abs()}
    if isinstance(head, gs.QuantileHuber):
        return head, prediction, {"samples": numbers(5), "fractions": numbers(width).sigmoid()}
    target = {"advantages": numbers()}
    if isinstance(head, gs.GaussianPolicyGradient):
        target["actions"] = numbers(width)
    elif head.choices is not None:
        target["actions"] = torch.stack([indices(size) for size in head.choices], -1)
    elif width is not None:
        target["actions"] = indices(width)
    log_prob = gs.reference.multi_step_loss(
        {"p": gs.PolicyGradient(surrogate="log", choices=getattr(head, "choices", None))}
        if not isinstance(head, gs.GaussianPolicyGradient)
        else {"p": gs.GaussianPolicyGradient(surrogate="log")},
        {"p": prediction},
        {"p": target},
        steps=len(leading) == 2,
    ).log_probs["p"]
    target["log_probs"] = log_prob.to(dtype) + numbers(scale=0.7)
    if head.kl_weight:
        target["reference_log_probs"] = log_prob.to(dtype) + numbers(scale=0.7)
    return head, prediction, target


def leaves_of(prediction):
    """The tensors of a prediction."""
    return list(prediction.values()) if isinstance(prediction, dict) else [prediction]


def doubled(tree):
    """The same values in float64 on a CPU; tensors that require grad are leaves again."""
    if isinstance(tree, dict):
        return {name: doubled(value) for name, value in tree.items()}
    value = tree.detach().cpu()
    return value.double().requires_grad_(tree.requires_grad) if value.is_floating_point() else value


BY_HEAD = ("per_step", "expected", "entropy", "head_means", "head_losses", "head_gradient_norms", "max_abs_logit")
BY_HEAD += ("log_probs", "approx_kl", "clip_fraction")


def results_of(head, prediction, target, **options):
    """Everything that a call returns, its gradients, and those of its losses times factors, by name."""
    out, results = results_by_head({"p": head}, {"p": prediction}, {"p": target}, **options)
    return {"loss": out.loss.detach(), "per_sample": out.per_sample, **results["p"]}


def results_by_head(heads, predictions, targets, **options):
    """The output of a call; and by head, what it returns for the head, and the gradients, as in results_of()."""
    out = gs.multi_step_loss(heads, predictions, targets, **options)
    results = {
        name: {key: by_head[name] for key in BY_HEAD if name in (by_head := getattr(out, key))} for name in heads
    }
    factors = torch.linspace(0.5, 1.5, out.loss.numel(), dtype=out.loss.dtype).to(out.loss.device)
    leaves = [(name, i, leaf) for name in heads for i, leaf in enumerate(leaves_of(predictions[name]))]
    for what, loss in {
        "gradient": out.loss,
        "gradient of products": out.loss * factors.reshape(out.loss.shape),
    }.items():
        gradients = torch.autograd.grad(loss.sum(), [leaf for *_, leaf in leaves], retain_graph=True)
        for (name, i, _), gradient in zip(leaves, gradients, strict=True):
            results[name][f"{what} {i}"] = gradient
    return out, results


#: Relative and absolute errors of results and of gradients, which are rounded to the type of the predictions.
TOLERANCES = {
    torch.float64: (1e-11, 1e-11),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2e-5, 1e-2),
    torch.float16: (2e-5, 2e-3),
}


def assert_right(name, leading, dtype, device="cpu", **options):
    """Compare the kernels with the reference in float64, for the same values."""
    head, prediction, target = inputs_of(name, leading, dtype, device)
    if "mask" in options:
        options["mask"] = options["mask"].to(device)
    found = results_of(head, prediction, target, impl="fused", **options)
    if "mask" in options:
        options["mask"] = options["mask"].cpu()
    assert_close(found, results_of(head, doubled(prediction), doubled(target), impl="reference", **options), dtype)


def assert_close(found, expected, dtype):
    """Results are right for predictions of this type."""
    assert found.keys() == expected.keys()
    worse = 1 + largest(expected["log_probs"]) / 20 if "log_probs" in expected else 1  # digits of the ratio
    for key, value in found.items():
        tolerance = TOLERANCES[dtype][key.startswith("gradient")] * worse
        want = expected[key]
        scale = largest(want if key.startswith("gradient") else expected["per_step"])  # sums are rounded like terms
        if key.startswith("gradient") or key in ("entropy", "head_gradient_norms"):
            scale = max(scale, 1e-3)  # of a probability near 1, the reference has no digits of 1 - p
        options = {"rtol": tolerance, "atol": tolerance * min(scale, 1e3), "equal_nan": True}
        value, want = value.double().cpu(), want.double()
        if value.shape != want.shape or not torch.allclose(value, want, **options):
            torch.testing.assert_close(value, want, msg=lambda m, key=key: f"{key}: {m}", **options)


def largest(x):
    """The largest magnitude of finite elements."""
    return x.double().nan_to_num(0, 0, 0).abs().max().item()


def assert_large_ratios_are_right(device="cpu"):
    """The gradient of a mean fits into float32, but not before it is divided by the number of samples."""
    predictions, actions = {"means": torch.zeros(9, 2), "log_stds": torch.zeros(9, 2)}, torch.full((9, 2), 8.0)
    log_probs = -(actions.square() / 2 + 0.5 * math.log(2 * math.pi)).sum(1) - 87
    fields = {"actions": actions, "advantages": -torch.ones(9), "log_probs": log_probs}
    results = []
    for impl, dtype, where in (("fused", torch.float32, device), ("reference", torch.float64, "cpu")):
        own = {name: tensor.to(where, dtype).requires_grad_() for name, tensor in predictions.items()}
        given = {name: tensor.to(where, dtype) for name, tensor in fields.items()}
        heads = {"policy": gs.GaussianPolicyGradient()}
        out = gs.multi_step_loss(heads, {"policy": own}, {"policy": given}, steps=False, impl=impl)
        results.append([gradient.cpu().double() for gradient in torch.autograd.grad(out.loss, own["means"])])
    torch.testing.assert_close(*results, rtol=1e-4, atol=0)
    assert results[1][0].abs().min() * 9 > torch.finfo(torch.float32).max


INF, NAN = math.inf, math.nan
RATIOS = {"x": (-1, -INF, NAN, INF), "log_probs": (-1, -3, -INF, NAN, INF), "advantages": (1, -1, 0, NAN)}
LOGITS = {"x0": (0, 1, -INF), "x1": (0, -INF, NAN), "x2": (0, INF), "actions": (0, 1), "advantages": (1, 0)}
NORMAL = {"means": (0, 1), "log_stds": (0, -400), "actions": (1, INF, 1e200), "log_probs": (-1, -INF)}
VALUES = {"x": (INF, -INF, NAN, 0.5, -0.1), "returns": (INF, NAN, 0.25, 1), "values": (INF, NAN, 0, 0.05)}
#: Infinite and undefined numbers, ties, and numbers that cancel: name -> (head, the values of each column). The rows
#: are all combinations of the values.
EXTREMES = {
    "ppo": (gs.PolicyGradient(dual_clip=3), RATIOS),
    "no clip": (gs.PolicyGradient(clip=None), RATIOS),
    "log": (gs.PolicyGradient(surrogate="log"), RATIOS),
    "cispo": (gs.PolicyGradient(surrogate="cispo", clip=(1, 4)), RATIOS),
    "k3": (
        gs.PolicyGradient(surrogate="log", kl_weight=0.5),
        {"x": (-1, -2, -30, -INF, NAN), "reference_log_probs": (-1, -3, -INF, NAN), "advantages": (0, 1)},
    ),
    "near": (
        gs.PolicyGradient(kl_weight=0.5),
        {"x": (-1, -1.0001), "log_probs": (-1, -1.0002), "reference_log_probs": (-1, -1.0003), "advantages": (0,)},
    ),
    "impossible": (gs.PolicyGradient(), {"x": (-INF,), "log_probs": (-INF,), "advantages": (1, 0)}),
    "unknown": (gs.PolicyGradient(), {"x": (-INF,), "log_probs": (NAN,), "advantages": (1, 0)}),
    "logits": (gs.PolicyGradient(surrogate="log"), LOGITS),
    "wide logits": (gs.PolicyGradient(surrogate="log"), LOGITS),
    "entropy": (gs.PolicyGradient(surrogate="log", entropy_weight=0.1), LOGITS),
    "wide entropy": (gs.PolicyGradient(surrogate="log", entropy_weight=0.1), LOGITS),
    "certain": (
        gs.PolicyGradient(surrogate="log"),
        {"x0": (40, 41), "x1": (0, 1), "x2": (0,), "actions": (0,), "advantages": (1, 2)},
    ),
    "normal": (gs.GaussianPolicyGradient(), {**NORMAL, "advantages": (1, 0)}),
    "normal log": (gs.GaussianPolicyGradient(surrogate="log"), {**NORMAL, "advantages": (0,)}),
    "infinite entropy": (
        gs.GaussianPolicyGradient(),
        {"means": (0,), "log_stds": (INF, 0), "actions": (0,), "log_probs": (-1,), "advantages": (1, -1)},
    ),
    "value": (gs.ClippedSquaredError(), VALUES),
    "value in place": (gs.ClippedSquaredError(clip=0), VALUES),
    "value without clip": (gs.ClippedSquaredError(clip=None), VALUES),
}


def extremes_of(name, device="cpu"):
    """Head, prediction and target of a case of EXTREMES in float64, without steps. Predictions require grad."""
    head, columns = EXTREMES[name]
    rows = torch.cartesian_prod(*(torch.tensor(values, dtype=torch.float64) for values in columns.values()))
    rows = rows[torch.arange(80) % len(rows)].to(device)  # the same number of rows for all
    fields = dict(zip(columns, rows.unbind(-1), strict=True))
    if isinstance(head, gs.GaussianPolicyGradient):
        fields["actions"] = fields["actions"].unsqueeze(-1)
        prediction = {what: fields.pop(what).unsqueeze(-1).requires_grad_() for what in ("means", "log_stds")}
        return head, prediction, fields
    if "x" in fields:
        return head, fields.pop("x").clone().requires_grad_(), fields
    logits = torch.stack([fields.pop(what) for what in ("x0", "x1", "x2")], -1)
    fields["actions"] = fields["actions"].long()
    return head, torch.nn.functional.pad(logits, (0, 37 if "wide" in name else 0)).requires_grad_(), fields


def assert_extremes_are_right(name, device="cpu"):
    """Compare the kernels with the reference."""
    head, prediction, target = extremes_of(name, device)
    options = {"steps": False, "reduction": "none"}
    found = results_of(head, prediction, target, impl="fused", **options)
    expected = results_of(head, doubled(prediction), doubled(target), impl="reference", **options)
    assert_close(found, expected, torch.float64)
