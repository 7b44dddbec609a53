"""Runs every kernel on small sizes, for compute-sanitizer. Inputs are made on the CPU, so that few other kernels run.

    PYTHONPATH=.:tests compute-sanitizer --tool memcheck python tests/gpu/small.py

Numbers are compared as in tests/test_cuda.py. `--device cpu` runs without a GPU, with the CPU kernels.
"""

from __future__ import annotations

import argparse

import torch
from test_cuda import DTYPES, FLOW, REFERENCE, check, check_close, converted, heads_of, inputs_of

import gradscale_ext as gs

SIZES = [(1, 3), (2, 300), (33, 5), (601, 2), (1025, 2), (4672, 1), (9001, 1)]


def losses(device: torch.device, dtype: torch.dtype) -> None:
    for width, batch in SIZES:
        heads = heads_of(width)
        generator = torch.Generator().manual_seed(width)
        options = {
            "mask": torch.rand(batch, 2, generator=generator) < 0.7,
            "importance_weights": torch.rand(batch, generator=generator),
            "step_weights": [1.0, 0.5],
        }
        given = inputs_of(heads, width, batch, steps=2)
        check(heads, *given, device, dtype, grad_output=1.0)
        check(heads, *given, device, dtype, grad_output=0.5, reduction="valid_mean", nonfinite="skip", **options)
    heads = {"value": gs.TwoHot(gs.Support(-5, 5, 11))}
    # The table of so many steps exceeds the kernel's arguments, and is copied to the device.
    check(heads, *inputs_of(heads, 11, 2, steps=130), device, dtype)


def flow(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 33), (2, 9001)):
        g = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        numbers = {
            "last": torch.rand(shape[-1:], generator=generator),
            "sample": torch.rand(shape[0], 1, generator=generator),
            "limit": torch.rand(shape[0], generator=generator).mul(3),
        }
        for apply, formula in FLOW.values():
            x = torch.zeros(shape, dtype=dtype).to(device).requires_grad_()
            (gradient,) = torch.autograd.grad(apply(x, converted(numbers, device)), x, g.to(device))
            check_close(gradient, formula(g.double(), {name: value.double() for name, value in numbers.items()}), dtype)


def decoding(device: torch.device, dtype: torch.dtype) -> None:
    for width, batch in SIZES[1:]:
        for space in ("transformed", "raw"):
            support = gs.Support(-4, 6, width, transform="symlog", space=space)
            logits = torch.randn(batch, width, generator=torch.Generator().manual_seed(width)).to(dtype)
            incoming = torch.linspace(-1, 1, batch, dtype=torch.float64)
            exact = logits.double().requires_grad_()
            truth = REFERENCE.decode(exact, support)
            (expected,) = torch.autograd.grad(truth, exact, incoming)
            scale = gs.reference.raw_centers(support, torch.float64).abs().max().item()
            leaf = logits.to(device).requires_grad_()
            values = support.decode(leaf)
            (gradient,) = torch.autograd.grad(values, leaf, incoming.to(values.dtype).to(device))
            check_close(values, truth, dtype, scale)
            check_close(gradient, expected, dtype, scale)
            encoded = (support.two_hot(values.detach()), support.hl_gauss(values.detach()))
            exact = values.detach().cpu().double()
            check_close(encoded[0], gs.reference.two_hot(exact, support), dtype, scale=100.0)
            check_close(encoded[1], gs.reference.hl_gauss(exact, support, 0.75), dtype, scale=100.0)


def squares(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1 + 211 * i % 20000, generator=generator).to(dtype) for i in range(220)]
    parameters = [x.to(device).requires_grad_() for x in values]
    exact = [x.double().requires_grad_() for x in values]
    loss, truth = gs.l2_loss(parameters, 0.1), REFERENCE.l2_loss(exact, 0.1)
    check_close(loss, truth, dtype)
    found = torch.autograd.grad(loss, parameters, torch.tensor(3.0, dtype=loss.dtype).to(device))
    for ours, theirs in zip(found, torch.autograd.grad(truth, exact, torch.tensor(3.0).double()), strict=True):
        check_close(ours, theirs, dtype)


def statistics(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(211 * i % 20000, generator=generator).to(dtype) for i in range(220)]
    values[7][3], values[9][0] = float("nan"), float("inf")
    found = gs.gradient_statistics([*(x.to(device) for x in values), None], histogram=True)
    truth = REFERENCE.tensor_statistics([*(x.double() for x in values), None], 2.0)
    check_close(found.norm, truth[0][0], torch.float64)
    assert torch.equal(found.histogram.cpu(), REFERENCE.histograms([*values, None], truth[1]))
    parameters = [torch.zeros_like(x, device=device) for x in values]
    for parameter, x in zip(parameters, values, strict=True):
        parameter.grad = x.nan_to_num(0, 0, 0).to(device, copy=True)
    total = gs.clip_gradients_(parameters, 1.0).total_norm.item()
    for parameter, x in zip(parameters, values, strict=True):
        check_close(parameter.grad, x.nan_to_num(0, 0, 0).double() / (total + 1e-6), dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", type=torch.device)
    device = parser.parse_args().device
    for dtype in DTYPES:
        for part in (losses, flow, decoding, squares, statistics):
            part(device, dtype)
        print(f"{dtype}: passed", flush=True)


if __name__ == "__main__":
    main()
