"""Calls CUDA kernels on the simulated driver, a process for each call, and prints the errors as JSON.

python faulty_kernels.py DRIVER [[SOURCES, CALL], ...]     SOURCES: a copy of csrc, with or without a fault
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import torch

import gradscale_ext as gs
from gradscale_ext import _kernels
from gradscale_ext._native import _C


def policy_loss(batch: int, width: int) -> None:
    predictions = [torch.randn(batch, width, requires_grad=True) for _ in range(2)]
    targets = [torch.randn(batch, width + 1).softmax(1)[:, 1:] for _ in range(2)]  # of another alignment
    gs.multi_step_loss({"policy": gs.SoftCrossEntropy()}, {"policy": predictions}, {"policy": targets}).loss.backward()


CALLS = {
    "rows of a block": lambda: policy_loss(3, 1301),
    "rows of a warp": lambda: policy_loss(40, 18),
    "sums of several blocks": lambda: policy_loss(600, 2),
    "statistics": lambda: gs.gradient_statistics([torch.randn(5000)]),
    "chunks of rows": lambda: gs.lambda_returns(torch.randn(2, 2500), torch.randn(2, 2501), discount=0.9, lambda_=0.9),
}


def compiled(file: str, name: str, major: int, minor: int) -> tuple[bytes, str]:
    code, entry, _ = _kernels.Nvrtc().compile(file, name, f"compute_{major}{minor}")
    return code, entry


def error_of(sources: str, call: str) -> str:
    _kernels.SOURCES = Path(sources)
    _C.set_kernel_images(compiled)
    _C.use_driver_for_cpu(sys.argv[1])
    torch.manual_seed(0)
    try:
        CALLS[call]()
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        print(json.dumps(pool.starmap(error_of, json.loads(sys.argv[2]), chunksize=1)))
