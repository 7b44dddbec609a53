"""Calls CUDA kernels on the simulated driver, each call in a new process, and prints its error and a digest of its
results as JSON.

python launches.py DRIVER [[SOURCES, CALL], ...]     SOURCES: csrc, or a copy of it with a fault
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_cuda import converted, heads_of, inputs_of, leaves

import gradscale_ext as gs
from gradscale_ext import _kernels
from gradscale_ext._native import _C

Tensors = list[torch.Tensor]


def policy_loss(batch: int, width: int, dtype: torch.dtype = torch.float32, **options: str) -> Tensors:
    predictions = [torch.randn(batch, width, dtype=dtype, requires_grad=True) for _ in range(2)]
    # Rows that are aligned differently.
    targets = [torch.randn(batch, width + 1, dtype=dtype).softmax(1)[:, 1:] for _ in range(2)]
    heads = {"policy": gs.SoftCrossEntropy()}
    out = gs.multi_step_loss(heads, {"policy": predictions}, {"policy": targets}, **options)
    out.loss.backward(torch.tensor(2.0, dtype=out.loss.dtype))
    return [out.loss, out.per_sample, *(step.grad for step in predictions)]


def few_blocks() -> Tensors:
    """A backward pass in which a block of the GPU's only multiprocessor computes rows of two kinds."""
    os.environ["PTX_MULTIPROCESSORS"] = "1"
    predictions = {"value": torch.randn(700, 21).requires_grad_(), "policy": torch.randn(700, 18).requires_grad_()}
    heads = {"value": gs.TwoHot(gs.Support(-10, 10, 21)), "policy": gs.SoftCrossEntropy()}
    targets = {"value": [torch.randn(700)], "policy": [torch.rand(700, 18).softmax(1)]}
    with tempfile.NamedTemporaryFile("r") as report:
        os.environ["PTX_REPORT"] = report.name
        out = gs.multi_step_loss(heads, {name: [logits] for name, logits in predictions.items()}, targets)
        gradients = torch.autograd.grad(out.loss, list(predictions.values()), torch.tensor(2.0))
        del os.environ["PTX_REPORT"]
        assert [json.loads(line)["grid"] for line in report] == [12, 22, 8]  # rows, totals, rows again
    return list(gradients)


def rows_of_chunks() -> Tensors:
    """Rows of one chunk of 1,024 steps, of one of 2,048, which is whole or not, and of three of 1,024."""
    os.environ["PTX_MULTIPROCESSORS"] = "2"  # more than half of the rows
    results = []
    with tempfile.NamedTemporaryFile("r") as report:
        os.environ["PTX_REPORT"] = report.name
        for steps in (1024, 1025, 2048, 2049):
            rewards, values = torch.randn(2, steps), torch.randn(2, steps + 1)
            results.append(gs.lambda_returns(rewards, values, discount=0.999, lambda_=0.99))
        del os.environ["PTX_REPORT"]
        launches = [(record["grid"], record["block"]) for record in map(json.loads, report)]
    assert launches == [(2, 256), (2, 512), (2, 512), (6, 256)]
    return results


def every_head(width: int, dtype: torch.dtype) -> Tensors:
    # With an odd number of raw centres the workspace would not be aligned, because guarded memory ends at a page.
    heads = {name: head for name, head in heads_of(width).items() if width % 2 == 0 or name != "raw"}
    predictions, targets = converted(inputs_of(heads, width, batch=3, steps=2), torch.device("cpu"), dtype)
    out = gs.multi_step_loss(heads, predictions, targets)
    return [out.loss, *out.expected.values(), *torch.autograd.grad(out.loss, leaves(predictions))]


def skipped_samples() -> Tensors:
    """Heads of several kinds, too many for a table in the kernel's arguments; one sample is not finite."""
    heads = {"value": gs.TwoHot(gs.Support(-20, 20, 601)), "end": gs.BinaryCrossEntropy()}
    heads |= {f"own {k}": gs.MeanSquaredError() for k in range(40)}
    widths = {name: (601,) if name == "value" else () if name == "end" else (5,) for name in heads}
    predictions = {name: [torch.randn(35, *widths[name], requires_grad=True) for _ in range(2)] for name in heads}
    targets = {name: [torch.rand(35, *(widths[name] if "own" in name else ())) for _ in range(2)] for name in heads}
    predictions["value"][0].data[1, 3] = torch.nan
    out = gs.multi_step_loss(heads, predictions, targets, nonfinite="skip", reduction="valid_mean")
    gradients = torch.autograd.grad(out.loss, [step for steps in predictions.values() for step in steps])
    return [out.loss, out.per_sample, *out.head_losses.values(), *gradients]


def decoded(width: int) -> Tensors:
    logits = torch.randn(37, width, requires_grad=True)
    values = gs.Support(-10, 10, width).decode(logits)
    return [values, *torch.autograd.grad(values.sum(), logits)]


def decoded_nan() -> Tensors:
    """Rows that are not aligned, and a table that is too large for the kernel's arguments."""
    logits = torch.full((4, 2049), torch.nan, requires_grad=True)
    values = gs.Support(-10, 10, 2049, "symlog", space="raw").decode(logits)
    return [values.isnan(), torch.autograd.grad(values.sum(), logits)[0].isnan()]


def flow() -> Tensors:
    results = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shape in ((3, 5), (2, 601), (1, 33000), (600, 7)):
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            scales = torch.rand(1), torch.rand(shape[1])  # one number, and dense or broadcast to the rows
            for y in (gs.clip_gradient_norm(x, 0.7), *(gs.scale_gradient(x, scale) for scale in scales)):
                results += torch.autograd.grad(y, x, torch.randn_like(x))
    return results


def many_tensors() -> Tensors:
    """One tensor just larger than a chunk, and short ones, too many for the smaller list of a kernel's arguments."""
    tensors = [torch.randn(3 * k if k > 1 else 65536 * k + 5) for k in range(300)]
    statistics = gs.gradient_statistics(tensors)
    parameters = [torch.nn.Parameter(torch.randn_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor
    loss = gs.l2_loss(parameters, 0.25)
    gradients = torch.autograd.grad(loss, parameters)
    for options in ({"max_norm": 3.0}, {"adaptive": 0.1, "unit": "row"}):
        gs.clip_gradients_(parameters, **options)
    return [statistics.norm, statistics.zeros, loss, *gradients, *tensors]


def short_rows() -> Tensors:
    """Rows of trajectories that share a warp, and the last warps have fewer. One row is not finite."""
    results = []
    for rows, steps in ((131, 5), (67, 16), (33, 32)):
        rewards, values = torch.randn(rows, steps), torch.randn(rows, steps + 1, requires_grad=True)
        rewards[3, 1] = torch.nan
        given = {"mask": torch.rand(rows, steps) < 0.9, "ratios": torch.rand(rows, steps)}
        for result in gs.vtrace(rewards, values, discount=0.9, **given):
            results += [result, *torch.autograd.grad(result.nansum(), values, retain_graph=True)]
    return [result.nan_to_num() for result in results]


CALLS = {
    "every head, a warp": lambda: every_head(31, torch.float32),
    "every head, half types": lambda: every_head(82, torch.bfloat16),
    "every head, a block": lambda: every_head(1025, torch.float32),
    "every head, float64": lambda: every_head(601, torch.float64),
    "rows of a block": lambda: policy_loss(3, 1301, torch.float64),
    "wide rows": lambda: policy_loss(3, 1301) + policy_loss(2, 9000),
    "rows of a warp": lambda: policy_loss(40, 18),
    "rows of several blocks in one": few_blocks,
    "sums of several blocks": lambda: policy_loss(600, 2),
    "skipped samples": skipped_samples,
    "rows decoded by lanes": lambda: decoded(21) + decoded(101) + decoded(601),
    "rows of NaN": decoded_nan,
    "elements and norms": flow,
    "statistics": many_tensors,
    "short rows of trajectories": short_rows,
    "chunks of rows": rows_of_chunks,
}


def compiled(file: str, name: str, major: int, minor: int, errors: list[str]) -> tuple[bytes, str]:
    """The code and entry of a kernel: from the cache, or compiled if the sources are a copy."""
    assert not errors, errors
    if _kernels.SOURCES == SOURCES:
        image, _ = _kernels.image_of(file, name, f"compute_{major}{minor}")
        return image.code, image.entry
    code, entry, _ = _kernels.Nvrtc().compile(file, name, f"compute_{major}{minor}")
    return code, entry


def outcome(sources: str, call: str) -> tuple[str, str]:
    _kernels.SOURCES = Path(sources)
    _kernels.OPTIONS = (*_kernels.OPTIONS, *os.environ.get("NVRTC_OPTIONS", "").split())
    _C.set_kernel_images(compiled)
    _C.use_driver_for_cpu(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digest = hashlib.sha256()
    try:
        for tensor in CALLS[call]():
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    except RuntimeError as error:
        return str(error), ""
    return "", digest.hexdigest()


SOURCES = _kernels.SOURCES

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        print(json.dumps(pool.starmap(outcome, json.loads(sys.argv[2]), chunksize=1)))
