"""`python -m gradscale_ext check`: every operator and head against the reference, on the devices of this machine."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import gradscale_ext as gs

from .. import _distributed, reference
from .._native import DEVICE_TYPES
from .._table import table
from . import report

STEPS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
#: Largest accepted difference from the reference in double precision, relative to the largest number.
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Tensors = list[torch.Tensor]


class Case(NamedTuple):
    """Something to compute in two ways: `ours(tensors)` and `by_reference(tensors)` return tensors to compare."""

    name: str
    tensors: Tensors
    ours: Callable[[Tensors], Tensors]
    by_reference: Callable[[Tensors], Tensors]


def self_check(device: str = "cpu") -> str | None:
    """Compare a fused loss and its gradient with the reference; returns the difference in words, or None."""
    logits = torch.linspace(-3, 3, 21, dtype=torch.float64, device=device).repeat(2, 1).requires_grad_()
    heads = {"value": gs.TwoHot(gs.Support(-10, 10, 21))}
    arguments = (heads, {"value": [gs.scale_gradient(logits, 0.5)]}, {"value": [logits.detach()[:, 3]]})
    results = []
    for function in (gs.multi_step_loss, gs.reference.multi_step_loss):
        loss = function(*arguments).loss
        results.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
    (loss, gradient), (expected_loss, expected_gradient) = results
    if torch.allclose(loss, expected_loss) and torch.allclose(gradient, expected_gradient):
        return None
    return f"the fused loss {loss.item()} or its gradient differs from the reference {expected_loss.item()} on {device}"


def _value_and_gradients(function: Callable[[Tensors], torch.Tensor], tensors: Tensors) -> Tensors:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    value = function(leaves)
    weights = torch.linspace(-1, 2, value.numel(), dtype=torch.float64).reshape(value.shape)
    return [value, *torch.autograd.grad(value, leaves, weights.to(value))]


def _both(name: str, tensors: Tensors, ours: Any, by_reference: Any) -> Case:
    """Two functions from tensors to a tensor, whose gradients are compared too."""
    return Case(
        name,
        tensors,
        functools.partial(_value_and_gradients, ours),
        functools.partial(_value_and_gradients, by_reference),
    )


def _operators(batch: int) -> Iterator[Case]:
    x = [torch.randn(batch, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]
    for name, options in (
        ("scale_gradient", {"scale": 0.5}),
        ("reverse_gradient", {"scale": 0.5}),
        ("clip_gradient_value", {"min": -0.5, "max": 1.0}),
        ("clip_gradient_norm", {"max_norm": 1.0, "batch_dims": 1}),
        ("normalize_gradient", {"norm": 1.0, "batch_dims": 1}),
    ):
        ours, by_reference = (functools.partial(getattr(module, name), **options) for module in (gs, reference))
        yield _both(name, x, lambda t, f=ours: f(t[0]), lambda t, f=by_reference: f(t[0]))
    support = gs.Support.muzero()
    logits = [torch.randn(batch, support.num_bins, generator=torch.Generator().manual_seed(2), dtype=torch.float64)]
    yield _both("Support.decode", logits, lambda t: support.decode(t[0]), lambda t: reference.decode(t[0], support))
    scalars = [20 * x[0][:, 0]]
    yield Case(
        "Support.two_hot",
        scalars,
        lambda t: [support.two_hot(t[0])],
        lambda t: [reference.two_hot(t[0], support)],
    )
    yield Case(
        "Support.hl_gauss",
        scalars,
        lambda t: [support.hl_gauss(t[0])],
        lambda t: [reference.hl_gauss(t[0], support, 0.75)],
    )
    yield Case(
        "Support.project",
        [logits[0].softmax(-1), scalars[0], x[0][:, 1].sigmoid()],
        lambda t: [support.project(*t)],
        lambda t: [reference.project(t[0], t[1], t[2], support)],
    )
    yield _both("l2_loss", [*x, *logits], gs.l2_loss, lambda t: reference.l2_loss(t, 1.0))
    yield Case(
        "gradient_statistics",
        [*x, *logits],
        lambda t: [(found := gs.gradient_statistics(t)).norm, found.abs_max, found.mean],
        lambda t: list(reference.tensor_statistics(t, 2.0)[0]),
    )
    yield Case("clip_gradients_", [*x, *logits], _clipped, _clipped_by_formula)
    yield Case("clip_gradients_, adaptive", [*x, *logits], _clipped_adaptively, _clipped_adaptively_by_formula)


def _clipped(gradients: Tensors) -> Tensors:
    parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    total = gs.clip_gradients_(parameters, 1.0).total_norm
    return [total, *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def _clipped_by_formula(gradients: Tensors) -> Tensors:
    total = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
    return [total, *(gradient * (1 / (total + 1e-6)).clamp(max=1).to(gradient) for gradient in gradients)]


def _clipped_adaptively(gradients: Tensors) -> Tensors:
    parameters = [gradient.cos().requires_grad_() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    gs.clip_gradients_(parameters, adaptive=0.5)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _clipped_adaptively_by_formula(gradients: Tensors) -> Tensors:
    factors = (0.5 * g.cos().norm(dim=1, keepdim=True) / g.norm(dim=1, keepdim=True) for g in gradients)
    return [g * factor.clamp(max=1) for g, factor in zip(gradients, factors, strict=True)]


def _heads(batch: int) -> Iterator[Case]:
    """Each head alone, for `STEPS` steps, with the gradients of its predictions."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensors:
        return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]

    def fields(actions: Tensors) -> dict[str, Tensors]:
        return {"actions": actions, "advantages": normal(), "log_probs": [x - 3 for x in normal()]}

    support = gs.Support.muzero()
    policy = [logits.softmax(-1) for logits in normal(18)]
    classes = [torch.randint(18, (batch,), generator=generator) for _ in range(STEPS)]
    rows: list[tuple[gs.Head, Tensors | dict[str, Tensors], Tensors | dict[str, Tensors] | None]] = [
        (gs.TwoHot(support), normal(601), normal()),
        (gs.HLGauss(support), normal(601), normal()),
        (gs.SoftCrossEntropy(), normal(18), policy),
        (gs.MeanSquaredError(), normal(512), normal(512)),
        (gs.Huber(), normal(512), normal(512)),
        (gs.BinaryCrossEntropy(), normal(), [logits.sigmoid() for logits in normal()]),
        (gs.NegativeCosine(), normal(512), normal(512)),
        (gs.QuantileHuber(), normal(50), normal(46)),
        (gs.CategoricalKL(free_nats=1.0), normal(32, 32), normal(32, 32)),
        (gs.PerStepLoss(), normal(), None),
        (gs.PolicyGradient(entropy_weight=0.01), normal(18), fields(classes)),
        (gs.GaussianPolicyGradient(), {"means": normal(6), "log_stds": normal(6)}, fields(normal(6))),
        (gs.ClippedSquaredError(), normal(), {"returns": normal(), "values": normal()}),
    ]
    for head, predictions, targets in rows:

        def loss(
            function: Any, tensors: Tensors, head: Any = head, names: Any = predictions, targets: Any = targets
        ) -> torch.Tensor:
            steps = [tensors[i : i + STEPS] for i in range(0, len(tensors), STEPS)]
            given = dict(zip(names, steps, strict=True)) if isinstance(names, dict) else tensors
            wanted = _distributed.mapped(
                lambda t: (t.float() if t.is_floating_point() else t).to(tensors[0].device),
                {} if targets is None else {"head": targets},
            )
            out: gs.MultiStepLossOutput = function(
                {"head": head}, {"head": given}, wanted, step_gradient_scale="unroll"
            )
            return out.loss

        ours, by_reference = (functools.partial(loss, f) for f in (gs.multi_step_loss, reference.multi_step_loss))
        tensors = itertools.chain(*predictions.values()) if isinstance(predictions, dict) else predictions
        yield _both(type(head).__name__, list(tensors), ours, by_reference)


def _difference(found: Tensors, truth: Tensors) -> float:
    """Largest difference, divided by the largest magnitude in the same tensor if that is above 1."""
    differences = [
        (mine.detach().cpu().double() - true).abs().max() / true.abs().max().clamp(min=1)
        for mine, true in zip(found, (tensor.detach().cpu().double() for tensor in truth), strict=True)
    ]
    return float(torch.stack(differences).max())  # max() of Python could drop NaN


def _microseconds(function: Callable[[Tensors], Tensors], tensors: Tensors) -> float:
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        function(tensors)
        if tensors[0].is_cuda:
            torch.cuda.synchronize(tensors[0].device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def check(device: str, dtype: torch.dtype, batch: int) -> Iterator[dict[str, Any]]:
    """A row for each operator and head: its difference from the reference, and its time."""
    runs = "kernel" if torch.device(device).type in DEVICE_TYPES else "PyTorch"
    for case in (*_operators(batch), *_heads(batch)):
        rounded = [tensor.to(dtype) for tensor in case.tensors]  # the reference gets the same rounded numbers
        tensors = [tensor.to(device) for tensor in rounded]
        row: dict[str, Any] = {"device": device, "what": case.name, "runs": runs}
        try:
            truth = case.by_reference([tensor.double() for tensor in rounded])
            row["difference"] = _difference(case.ours(tensors), truth)
            row["ok"] = row["difference"] <= LIMITS[dtype]
            row["microseconds"] = _microseconds(case.ours, tensors)
            row["reference_microseconds"] = _microseconds(case.by_reference, tensors)
        except RuntimeError as error:  # a kernel that cannot be compiled or started
            row |= {"ok": False, "error": str(error)}
        yield row


def main(arguments: Sequence[str]) -> int:
    """Compare every operator and head with the reference in double precision; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m gradscale_ext check", description=main.__doc__)
    parser.add_argument("--device", nargs="+", type=report.device, metavar="cuda:0", help="devices; default: all")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="dtype of the tensors (float32)")
    parser.add_argument("--batch", type=report.positive, default=64, help="samples (64)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    devices = options.device or ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    dtype = DTYPES[options.dtype]
    rows = [row for device in devices for row in check(device, dtype, options.batch)]
    wrong = [row for row in rows if not row["ok"]]
    if options.json:
        print(json.dumps({"ok": not wrong, "dtype": options.dtype, "rows": rows}, indent=2))
        return bool(wrong)
    cells = [
        [row["device"], row["what"], row["runs"], row["error"].splitlines()[0][:100]]
        if "error" in row
        else [
            *(row["device"], row["what"], row["runs"], f"{row['difference']:.1e}", "" if row["ok"] else "WRONG"),
            *(f"{row['microseconds']:.0f}", f"{row['reference_microseconds']:.0f}"),
        ]
        for row in rows
    ]
    print(table(["device", "what", "runs", "difference", "", "us", "us of reference"], cells))
    print(f"\n{len(rows) - len(wrong)} of {len(rows)} within {LIMITS[dtype]:g} of the reference in double precision.")
    print(f"Kernels accept plain tensors on {' and '.join(DEVICE_TYPES)}. CUDA kernels: {report.kernels_in_words()}.")
    print("The reference is used for second derivatives, torch.func, forward mode, tensor subclasses, other devices.")
    return bool(wrong)
