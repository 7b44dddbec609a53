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
    target["log_probs"] = log_prob.to(dtype) + numbers(scale=0.3)
    if head.kl_weight:
        target["reference_log_probs"] = log_prob.to(dtype) + numbers(scale=0.3)
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


BY_HEAD = ("per_step", "entropy", "head_means", "head_losses", "head_gradient_norms", "max_abs_logit")
BY_HEAD += ("log_probs", "approx_kl", "clip_fraction")


def results_of(head, prediction, target, **options):
    """Everything that a call returns, its gradients, and those of its losses times factors, by name."""
    out = gs.multi_step_loss({"p": head}, {"p": prediction}, {"p": target}, **options)
    results = {"loss": out.loss.detach(), "per_sample": out.per_sample}
    for name in BY_HEAD:
        if "p" in getattr(out, name):
            results[name] = getattr(out, name)["p"]
    factors = (
        torch.linspace(0.5, 1.5, out.loss.numel(), dtype=out.loss.dtype).to(out.loss.device).reshape(out.loss.shape)
    )
    for what, loss in {"gradient": out.loss, "gradient of products": out.loss * factors}.items():
        for i, gradient in enumerate(torch.autograd.grad(loss.sum(), leaves_of(prediction), retain_graph=True)):
            results[f"{what} {i}"] = gradient
    return results


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
    expected = results_of(head, doubled(prediction), doubled(target), impl="reference", **options)
    assert found.keys() == expected.keys()
    worse = 1 + expected["log_probs"].abs().max().item() / 20 if "log_probs" in expected else 1  # digits of the ratio
    for key, value in found.items():
        tolerance = TOLERANCES[dtype][key.startswith("gradient")] * worse
        want = expected[key]
        largest = want if key.startswith("gradient") else expected["per_step"]  # sums are rounded like their terms
        scale = largest.abs().max().clamp(1e-3, 1e3).item()
        torch.testing.assert_close(
            value.double().cpu(),
            want.double(),
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, key=key: f"{key}: {m}",
        )


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
