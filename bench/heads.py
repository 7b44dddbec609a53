"""Times of each head of the loss, forward and backward, and of decoding, which an acting agent needs.

    python bench/heads.py --json bench/results/heads.json

Each head has one step and a batch of 1024: 601 bins, 18 or 362 actions, 512 features. Quantiles: 32 x 200 x 200 (QR-
DQN), 512 x 25 x 46 (TQC). Latents: 32 distributions over 32 classes (DreamerV3). Bytes that must move: predictions and
targets read once, gradients written once.

C51's critic: projection of the target and cross-entropy, forward and backward, 51 bins, compared with the usual code.

Decoding: 601 bins of the signed hyperbolic transform, B from 1 to 512, compared with the usual chain of MuZero code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import gradscale_ext as gs
import harness
import usual

BATCH = 1024
CRITICS = (256, 4096)
DECODED = (1, 2, 8, 16, 32, 64, 128, 512)
Case = tuple[gs.heads.Head, torch.Tensor, torch.Tensor | None, Callable[..., torch.Tensor]]


def cases() -> dict[str, Case]:
    """Heads by name, each with a prediction, its target, and the usual loss in PyTorch."""
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator)
    bins, few, many, vector = normal(BATCH, 601), normal(BATCH, 18), normal(BATCH, 362), normal(BATCH, 512)
    scalars = normal(BATCH) * 30
    visits = {width: normal(BATCH, width).softmax(1) for width in (18, 362)}
    classes = torch.randint(362, (BATCH,), generator=generator)
    muzero = gs.Support.muzero()

    def with_entropy(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        log_p = torch.log_softmax(x, 1)
        return (-(t * log_p).sum(1) + 0.01 * (log_p.exp() * log_p).sum(1)).mean()

    return {
        "TwoHot": (
            gs.TwoHot(muzero),
            bins,
            scalars,
            lambda x, t: usual.cross_entropy(x, usual.two_hot(usual.h(t), 601, 300)).mean(),
        ),
        "HLGauss": (
            gs.HLGauss(muzero),
            bins,
            scalars,
            lambda x, t: usual.cross_entropy(x, usual.hl_gauss(usual.h(t), 601, 300)).mean(),
        ),
        "SoftCrossEntropy, A 18": (
            gs.SoftCrossEntropy(),
            few,
            visits[18],
            lambda x, t: usual.cross_entropy(x, t).mean(),
        ),
        "SoftCrossEntropy, A 362": (
            gs.SoftCrossEntropy(),
            many,
            visits[362],
            lambda x, t: usual.cross_entropy(x, t).mean(),
        ),
        "SoftCrossEntropy, entropy": (gs.SoftCrossEntropy(entropy_weight=0.01), many, visits[362], with_entropy),
        "SoftCrossEntropy, classes": (gs.SoftCrossEntropy(), many, classes, F.cross_entropy),
        "MeanSquaredError": (gs.MeanSquaredError(), vector, normal(BATCH, 512), F.mse_loss),
        "Huber": (gs.Huber(), vector, normal(BATCH, 512), F.huber_loss),
        "QuantileHuber, QR-DQN": (
            gs.QuantileHuber(),
            normal(32, 200),
            normal(32, 200),
            lambda x, t: usual.quantile_huber(x, t).mean(),
        ),
        "QuantileHuber, TQC": (
            gs.QuantileHuber(sum_over_quantiles=False),
            normal(512, 25),
            normal(512, 46),
            lambda x, t: usual.quantile_huber(x, t).mean() / 25,
        ),
        "CategoricalKL, Dreamer": (
            gs.CategoricalKL(free_nats=1.0),
            normal(1024, 32, 32),
            normal(1024, 32, 32),
            lambda x, t: usual.categorical_kl(t, x).clamp(min=1.0).mean(),
        ),
        "BinaryCrossEntropy": (
            gs.BinaryCrossEntropy(),
            normal(BATCH),
            torch.rand(BATCH, generator=generator),
            F.binary_cross_entropy_with_logits,
        ),
        "NegativeCosine": (
            gs.NegativeCosine(),
            vector,
            normal(BATCH, 512),
            lambda x, t: -F.cosine_similarity(x, t, dim=1).mean(),
        ),
    }


def head_rows(seconds: float) -> list[dict[str, Any]]:
    results = []
    for name, (head, prediction, target, eager) in cases().items():
        x = prediction.requires_grad_()
        module = gs.MultiStepLoss(head=head)

        def fused(x: torch.Tensor, t: torch.Tensor | None, module=module) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return module({"head": [x]}, {} if t is None else {"head": [t]}).loss

        torch._dynamo.reset()
        functions: dict[str, Callable[..., torch.Tensor]] = {
            "fused": fused,
            "eager": eager,
            "torch.compile": torch.compile(eager, dynamic=False),
        }
        expected = torch.autograd.grad(eager(x, target), x)[0]
        for contestant, function in functions.items():
            actual = torch.autograd.grad(function(x, target), x)[0]
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6, msg=lambda m, c=contestant: f"{c}: {m}")
        contestants = {
            contestant: functools.partial(lambda f, x, t: torch.autograd.grad(f(x, t), x), function, x, target)
            for contestant, function in functions.items()
        }
        moved = 2 * x.nbytes + (0 if target is None else target.nbytes)
        results += harness.rows({"size": name, "pass": "forward+backward"}, contestants, seconds, moved, "fused")
    return results


def critic_rows(seconds: float) -> list[dict[str, Any]]:
    limit, num_bins = 10.0, 51
    support = gs.Support(-limit, limit, num_bins, "identity")
    module = gs.MultiStepLoss(head=gs.SoftCrossEntropy())

    def fused(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return module({"head": [x]}, {"head": [support.project(*given)]}).loss

    def eager(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = usual.projected(*given, limit)
        return usual.cross_entropy(x, target).mean()

    results = []
    for batch in CRITICS:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, num_bins, generator=generator).requires_grad_()
        given = (
            torch.randn(batch, num_bins, generator=generator).softmax(1),
            torch.randn(batch, generator=generator),
            0.99 * (torch.rand(batch, generator=generator) > 0.05),
        )
        torch._dynamo.reset()
        functions = {"fused": fused, "eager": eager, "torch.compile": torch.compile(eager, dynamic=False)}
        (expected,) = torch.autograd.grad(eager(x, *given), x)
        for function in functions.values():
            torch.testing.assert_close(torch.autograd.grad(function(x, *given), x)[0], expected, rtol=1e-3, atol=1e-6)
        contestants = {
            contestant: functools.partial(lambda f, x, *g: torch.autograd.grad(f(x, *g), x), function, x, *given)
            for contestant, function in functions.items()
        }
        row = {"size": f"B {batch}", "pass": "C51"}
        results += harness.rows(row, contestants, seconds, 3 * x.nbytes, "fused")
    return results


def decode_rows(seconds: float) -> list[dict[str, Any]]:
    support = gs.Support.muzero()
    bins = support.centers()

    def chain(logits: torch.Tensor) -> torch.Tensor:
        return usual.inverse_h((torch.softmax(logits, 1) * bins).sum(1, keepdim=True))

    results = []
    torch._dynamo.reset()
    compiled = torch.compile(chain, dynamic=False)
    for batch in DECODED:
        logits = torch.randn(batch, 601, generator=torch.Generator().manual_seed(0)) * 2
        torch.testing.assert_close(support.decode(logits), chain(logits)[:, 0], rtol=2e-3, atol=2e-3)
        contestants = {
            "fused": functools.partial(support.decode, logits),
            "eager": functools.partial(chain, logits),
            "torch.compile": functools.partial(compiled, logits),
        }
        with torch.no_grad():
            results += harness.rows(
                {"size": f"B {batch}", "pass": "decode"}, contestants, seconds, logits.nbytes, "fused"
            )
    return results


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = [*head_rows(arguments.seconds), *critic_rows(arguments.seconds), *decode_rows(arguments.seconds)]
    for row in results:
        harness.show(row)
    harness.write(arguments.json, "heads", results)


if __name__ == "__main__":
    main()
