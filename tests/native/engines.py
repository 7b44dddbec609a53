"""Heads of logits and their inputs, and their results from CUDA kernels with a chosen fault.

python engines.py DRIVER SOURCES FOLDER COUNT     SOURCES: a copy of csrc with faults 1 to COUNT, of which code
MARKER chooses one. Prints the results without a fault and with each fault as JSON. The kernels are compiled once, into
FOLDER: a fault is chosen by replacing MARKER in their PTX.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

import gradscale_ext as gs
from gradscale_ext import _kernels
from gradscale_ext._native import _C

MARKER = 1592654359
Results = dict[str, list[float]]  # by head: the losses of rows, their details, and their gradients


def heads(width: int) -> dict[str, Any]:
    support = gs.Support(-(width // 2), width // 2, width, "identity")
    return {
        "two_hot": gs.TwoHot(support, label_smoothing=0.1),
        "hl_gauss": gs.HLGauss(support, sigma_ratio=0.75),
        "policy": gs.SoftCrossEntropy(entropy_weight=0.1, subtract_target_entropy=True),
        "class": gs.SoftCrossEntropy(label_smoothing=0.1),
    }


def inputs(width: int, rows: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Logits and targets. An illegal action has no target in row 0, and makes the loss of row 1 infinite."""
    generator = torch.Generator().manual_seed(width)
    logits = {name: torch.randn(rows, width, generator=generator) for name in heads(width)}
    values = (torch.rand(2, rows, generator=generator) - 0.5) * width
    policy = torch.rand(rows, width, generator=generator).softmax(1)
    logits["policy"][0, 2] = logits["policy"][1, 2] = -torch.inf
    policy[0, 2] = 0
    classes = torch.randint(width, (rows,), generator=generator)
    return logits, {"two_hot": values[0], "hl_gauss": values[1], "policy": policy, "class": classes}


def results(outputs: Any, width: int, rows: int, names: list[str], dtype: torch.dtype = torch.float32) -> Results:
    """The results of `outputs(heads, predictions, targets)`: losses, details and gradients by head."""
    logits, targets = inputs(width, rows)
    predictions = {name: [logits[name].to(dtype).requires_grad_()] for name in names}
    chosen = {name: [targets[name] if name == "class" else targets[name].to(dtype)] for name in names}
    found = outputs({name: heads(width)[name] for name in names}, predictions, chosen)
    return {
        name: torch.cat([tensors[name].detach().double().reshape(-1) for tensors in found]).tolist() for name in names
    }


def outputs_of(loss: Any) -> Any:
    """The function `outputs` of results() for a function like gs.multi_step_loss."""

    def outputs(heads: Any, predictions: Any, targets: Any) -> tuple[dict[str, torch.Tensor], ...]:
        out = loss(heads, predictions, targets)
        gradients = torch.autograd.grad(out.loss, [logits for (logits,) in predictions.values()])
        return out.per_step, out.expected | out.entropy, dict(zip(predictions, gradients, strict=True))

    return outputs


# The engines of a GPU: width, rows, heads, and the type of logits.
ENGINES = {
    "lanes": (21, 33, ["two_hot", "hl_gauss", "policy", "class"], torch.float32),
    "blocks": (1301, 3, ["policy", "class"], torch.float32),
    "thread groups": (21, 5, ["two_hot", "hl_gauss", "policy", "class"], torch.float64),
}


def with_fault(fault: int) -> dict[str, Results]:
    """The results of all engines."""
    sources, folder = Path(sys.argv[2]), Path(sys.argv[3])

    def compiled(file: str, name: str, major: int, minor: int, errors: list[str]) -> tuple[bytes, str]:
        assert not errors, errors
        path = folder / hashlib.sha256(f"{file} {name}".encode()).hexdigest()
        if not path.exists():
            code, entry, _ = _kernels.Nvrtc().compile(file, name, f"compute_{major}{minor}")
            path.write_bytes(entry.encode() + b"\n" + code)
        entry, _, code = path.read_bytes().partition(b"\n")
        return code.replace(str(MARKER).encode(), str(fault).encode()), entry.decode()

    _kernels.SOURCES = sources
    _C.set_kernel_images(compiled)
    _C.use_driver_for_cpu(sys.argv[1])
    torch.set_num_threads(1)
    return {name: results(outputs_of(gs.multi_step_loss), *engine) for name, engine in ENGINES.items()}


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        found = [pool.apply(with_fault, (0,))]  # compiles the kernels
    with context.Pool(maxtasksperchild=1) as pool:
        found += pool.map(with_fault, range(1, int(sys.argv[4]) + 1), chunksize=1)
    print(json.dumps(found))
