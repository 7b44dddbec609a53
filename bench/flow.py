"""The gradient-flow operators against the usual ways to write them, from a hidden state of one sample to 64 MB.

    python bench/flow.py --json bench/results/flow.json

`x.view_as(x)` does nothing and is the floor. "read twice, write once" is a sum and an in-place multiplication over a
buffer of the gradient's size: the memory traffic that a norm and its application need. Bytes that must move, for GB/s:
none in the forward pass; in the backward pass the gradient is read once (twice for norms) and written once. For all
contestants alike, a negation after the operator creates the incoming gradient, as the next operation of a network does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import gradscale_ext as gs
import harness
from gradscale_ext import _context
from gradscale_ext._native import is_ordinary

Tensor = torch.Tensor
Change = Callable[[Tensor], Tensor]
SHAPES = {
    "1 KB": (1, 256),
    "64 KB": (64, 256),
    "1 MB": (256, 1024),
    "9.4 MB": (1024, 64, 6, 6),
    "64 MB": (1024, 16384),
}


def clip_per_sample(gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return gradient * (1.0 / norm).clamp(max=1.0).view(-1, *[1] * (gradient.dim() - 1))


def normalize_per_sample(gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return gradient / norm.clamp(min=1e-12).view(-1, *[1] * (gradient.dim() - 1))


# Our operators, each with a hand-written counterpart that changes the gradient in the same way.
OPERATORS: dict[str, tuple[Change, Change]] = {
    "scale_gradient": (lambda x: gs.scale_gradient(x, 0.5), lambda g: g * 0.5),
    "reverse_gradient": (lambda x: gs.reverse_gradient(x), lambda g: -g),
    "clip_gradient_norm": (lambda x: gs.clip_gradient_norm(x, 1.0, batch_dims=1), clip_per_sample),
    "normalize_gradient": (lambda x: gs.normalize_gradient(x, 1.0, batch_dims=1), normalize_per_sample),
    "clip_gradient_value": (lambda x: gs.clip_gradient_value(x, -0.1, 0.1), lambda g: g.clamp(-0.1, 0.1)),
}


def hook(change: Change) -> Change:
    def way(x: Tensor) -> Tensor:
        y = x.view_as(x)
        y.register_hook(change)
        return y

    return way


def function(change: Change) -> Change:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return change(gradient)

    return Function.apply  # type: ignore[no-any-return]


def ways(operator: str) -> dict[str, Change]:
    ours, change = OPERATORS[operator]
    found = {
        operator: ours,
        "x.view_as(x)": lambda x: x.view_as(x),
        "tensor hook": hook(change),
        "autograd.Function": function(change),
    }
    if operator in ("scale_gradient", "reverse_gradient"):
        scale = 0.5 if operator == "scale_gradient" else -1.0
        formula = lambda x: scale * x + (1 - scale) * x.detach()
        found["s*x + (1-s)*x.detach()"] = formula
        found["torch.compile of that"] = torch.compile(formula, dynamic=False)
    else:
        found["torch.compile of a Function"] = torch.compile(function(change), dynamic=False)
    found[f"torch.compile of {operator}"] = torch.compile(ours, dynamic=False)
    return found


def detection() -> dict[str, Callable[[], object]]:
    """Cost of querying the context in eager mode, once in Python and once in C++."""
    return {"detection of the context": lambda: (_context.is_eager(), is_ordinary()), "nothing": lambda: None}


def main() -> None:
    arguments = harness.arguments(__doc__)
    harness.show_machine()
    results = []
    about = {"operator": "all", "size": "any", "pass": "detection"}
    for row in harness.rows(about, detection(), arguments.seconds, 0, "detection of the context"):
        harness.show(row)
        results.append(row)
    for operator in OPERATORS:
        passes_over_gradient = 3 if "norm" in operator else 2
        for label, shape in SHAPES.items():
            torch._dynamo.reset()
            x = torch.randn(shape, requires_grad=True)
            y = x * 1  # not a leaf, as in the middle of a network
            incoming = torch.randn(shape)
            buffer = torch.randn(shape)

            def forward(way: Change, y: Tensor = y) -> Callable[[], object]:
                return lambda: way(y)

            def both(way: Change, y: Tensor = y, incoming: Tensor = incoming) -> Callable[[], object]:
                return lambda: torch.autograd.grad(way(y).neg(), y, incoming)

            for name, make in (("forward", forward), ("forward+backward", both)):
                contestants = {contestant: make(way) for contestant, way in ways(operator).items()}
                if name != "forward":
                    contestants["multiply in place"] = lambda buffer=buffer: buffer.mul_(1.0)
                    contestants["read twice, write once"] = lambda buffer=buffer: (buffer.sum(), buffer.mul_(1.0))
                moved = 0 if name == "forward" else passes_over_gradient * 4 * x.numel()
                about = {"operator": operator, "size": label, "pass": name}
                for row in harness.rows(about, contestants, arguments.seconds, moved, operator):
                    harness.show(row)
                    results.append(row)
    harness.write(arguments.json, "flow", results)


if __name__ == "__main__":
    main()
