"""scale_gradient against the usual ways to write it, from a hidden state of one sample to 64 MB.

    python bench/scale_gradient.py --json bench/results/scale_gradient.json

`x.view_as(x)` does nothing and is the floor. Bytes that must move, for GB/s: none forward; backward the gradient is
read once and written once. The gradient that comes in is made by an addition beside it, the same for all contestants.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import gradscale_ext as gs
import harness

SCALE = 0.5
SIZES = {"1 KB": 256, "64 KB": 2**14, "1 MB": 2**18, "8 MB": 2**21, "64 MB": 2**24}


class FunctionWithForwardContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * SCALE


class FunctionWithSetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * SCALE


def hook(x: torch.Tensor) -> torch.Tensor:
    y = x.view_as(x)
    y.register_hook(lambda gradient: gradient * SCALE)
    return y


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scale_gradient": lambda x: gs.scale_gradient(x, SCALE),
    "x.view_as(x)": lambda x: x.view_as(x),
    "tensor hook": hook,
    "autograd.Function": FunctionWithForwardContext.apply,
    "Function, setup_context": FunctionWithSetupContext.apply,
    "s*x + (1-s)*x.detach()": lambda x: SCALE * x + (1 - SCALE) * x.detach(),
}


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    for label, size in SIZES.items():
        x = torch.randn(size, requires_grad=True)
        y = x * 1  # not a leaf: what stands in the middle of a network
        incoming = torch.randn(size)

        def forward(way: Callable[[torch.Tensor], torch.Tensor], y=y) -> Callable[[], object]:  # type: ignore[no-untyped-def]
            return lambda: way(y)

        def both(way: Callable[[torch.Tensor], torch.Tensor], y=y, incoming=incoming) -> Callable[[], object]:  # type: ignore[no-untyped-def]
            # The negation makes a fresh gradient, as the operation after the operator does in a network.
            return lambda: torch.autograd.grad(way(y).neg(), y, incoming)

        for name, make, moved in (("forward", forward, 0), ("forward+backward", both, 8 * size)):
            contestants = {contestant: make(way) for contestant, way in WAYS.items()}
            for row in harness.rows(
                {"size": label, "pass": name}, contestants, arguments.seconds, moved, "scale_gradient"
            ):
                harness.show(row)
                results.append(row)
    harness.write(arguments.json, "scale_gradient", results)


if __name__ == "__main__":
    main()
