"""Losses from kernels with a chosen fault, compared with the reference in float64.

python engines.py PROCESSOR LIBRARY SOURCES SUITES     PROCESSOR: cpu or gpu. SOURCES: a copy of csrc with faults, which
are numbered from 1. LIBRARY: its CPU kernels, or the simulated driver. SUITES: the suite of each fault, as JSON.

Prints which results are wrong without a fault and with each fault, as JSON. CPU kernels read the number of the fault
from the library. GPU kernels read it from an address, which replaces MARKER in their PTX.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from policies import CASES, EXTREMES, assert_close, doubled, extremes_of, inputs_of, results_by_head

import gradscale_ext as gs
from gradscale_ext import _kernels
from gradscale_ext._native import _C

MARKER = 1592653589793238462
#: The cases of the suite "policies", of widths that have all kinds of rows of a CPU.
POLICIES = [name for name in CASES if name not in ("ppo 1", "ppo 362", "ppo 2100") and hasattr(CASES[name][0], "clip")]


class Call(NamedTuple):
    heads: dict[str, Any]
    predictions: dict[str, Any]
    targets: dict[str, Any]
    options: dict[str, Any]
    dtype: torch.dtype = torch.float64

    def results(self) -> dict[str, Any]:
        """Results of the kernels by head."""
        return results_by_head(self.heads, self.predictions, self.targets, impl="fused", **self.options)[1]

    def expected(self) -> dict[str, Any]:
        """Results of the reference by head."""
        predictions, targets = doubled(self.predictions), doubled(self.targets)
        return results_by_head(self.heads, predictions, targets, impl="reference", **self.options)[1]


def logits(width: int, rows: int, dtype: torch.dtype = torch.float64, kind: type = object) -> Call:
    """Heads of logits. An illegal action has no target in row 0, and makes the loss of row 1 infinite."""
    generator = torch.Generator().manual_seed(width)
    support = gs.Support(-(width // 2), width // 2, width, "identity")
    heads = {
        "two_hot": gs.TwoHot(support, label_smoothing=0.1),
        "hl_gauss": gs.HLGauss(support, sigma_ratio=0.75),
        "policy": gs.SoftCrossEntropy(entropy_weight=0.1, subtract_target_entropy=True),
        "class": gs.SoftCrossEntropy(label_smoothing=0.1),
    }
    predictions = {name: torch.randn(rows, width, generator=generator) for name in heads}
    values = (torch.rand(2, rows, generator=generator) - 0.5) * width
    policy = torch.rand(rows, width, generator=generator).softmax(1)
    predictions["policy"][0, 2] = predictions["policy"][1, 2] = -torch.inf
    policy[0, 2] = 0
    classes = torch.randint(width, (rows,), generator=generator)
    targets = {"two_hot": values[0], "hl_gauss": values[1], "policy": policy, "class": classes}
    heads = {name: head for name, head in heads.items() if isinstance(head, kind)}
    return Call(
        heads,
        {name: predictions[name].to(dtype).requires_grad_() for name in heads},
        {name: targets[name] if name == "class" else targets[name].to(dtype) for name in heads},
        {"steps": False},
        dtype,
    )


def call_of(names: Iterable[str], inputs: Callable[[str], tuple[Any, Any, Any]], **options: Any) -> Call:
    return Call(*(dict(zip(names, each, strict=True)) for each in zip(*map(inputs, names), strict=True)), options)


def policies() -> Call:
    """Policies and clipped values, with masked entries whose loss is NaN."""
    mask = torch.rand(19, 2, generator=torch.Generator().manual_seed(1)) > 0.2
    call = call_of(POLICIES, lambda name: inputs_of(name, (19, 2)), mask=mask)
    for fields in call.targets.values():
        fields["advantages" if "advantages" in fields else "returns"][~mask] = torch.nan
    return call


def suites_for(processor: str) -> dict[str, dict[str, Call]]:
    """Calls by suite and engine. Results go by engine in the first suite, and by head in the others."""
    engines = {
        "cpu": {"rows": logits(37, 4), "short rows": logits(21, 16)},
        "gpu": {
            "lanes": logits(21, 33, torch.float32),
            "blocks": logits(1301, 3, torch.float32, gs.SoftCrossEntropy),
            "thread groups": logits(21, 5),
        },
    }
    extremes = call_of(EXTREMES, extremes_of, steps=False, reduction="none")
    return {"logits": engines[processor], "policies": {"": policies()}, "extremes": {"": extremes}}


def use_cpu_kernels(library: str) -> ctypes.c_int:
    kernels = ctypes.CDLL(library)
    names = ("_ZN9gradscale15run_rows_kernelE", "_ZN9gradscale18sum_samples_kernelE")
    _C.use_loss_kernels(*(ctypes.c_void_p.in_dll(kernels, name).value for name in names))
    return ctypes.c_int.in_dll(kernels, "chosen_fault")


def use_gpu_kernels(driver: str, sources: str) -> ctypes.c_int:
    chosen = ctypes.c_int()

    def compiled(file: str, name: str, major: int, minor: int, errors: list[str]) -> tuple[bytes, str]:
        assert not errors, errors
        code, entry, _ = _kernels.Nvrtc().compile(file, name, f"compute_{major}{minor}")
        return code.replace(str(MARKER).encode(), str(ctypes.addressof(chosen)).encode()), entry

    _kernels.SOURCES = Path(sources)
    _C.set_kernel_images(compiled)
    _C.use_driver_for_cpu(driver)
    return chosen


def is_close(found: Any, expected: Any, dtype: torch.dtype) -> bool:
    try:
        assert_close(found, expected, dtype)
    except AssertionError:
        return False
    return True


def main(processor: str, library: str, sources: str, suites_of_faults: str) -> None:
    torch.set_num_threads(1)
    calls = suites_for(processor)
    expected = {suite: {engine: call.expected() for engine, call in calls[suite].items()} for suite in calls}
    chosen = use_cpu_kernels(library) if processor == "cpu" else use_gpu_kernels(library, sources)

    def wrong(suite: str) -> list[str]:
        found = {engine: call.results() for engine, call in calls[suite].items()}
        return [
            engine or head
            for engine, call in calls[suite].items()
            for head in call.heads
            if not is_close(found[engine][head], expected[suite][engine][head], call.dtype)
        ]

    found = [[name for suite in calls for name in wrong(suite)]]
    for chosen.value, suite in enumerate(json.loads(suites_of_faults), 1):
        found.append(wrong(suite))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
