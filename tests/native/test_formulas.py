"""Target, sums, loss, entropy and gradient of a row of logits are computed in csrc/formulas alone.

Each fault changes a sign in one of their functions, and must change the results of all engines that use the function:
rows and short rows of the CPU, and lanes, blocks and thread groups of a GPU. One copy of csrc has all faults, and
chooses one when it runs, so that it is compiled once.
"""

from __future__ import annotations

import ctypes
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import engines
import pytest
import torch
from native import ROOT, compile_library, one_process

import gradscale_ext as gs

pytestmark = one_process

CPU, GPU = {"rows", "short rows"}, {"lanes", "blocks", "thread groups"}
EVERY, OF_BINS = CPU | GPU, {"rows", "short rows", "lanes", "thread groups"}
LOSS, TARGETS, LANES = "formulas/cross_entropy.h", "formulas/targets.h", "loss/cuda/lane_losses.cuh"
# Faults: a file of csrc, an expression in it, the expression that replaces it, and the engines that use it.
FAULTS = {
    "correct": (LOSS, "product(t, d)", "product(A(0) - t, d)", EVERY),
    "correct_finite": (LOSS, "t * finite(d)", "A(0) - t * finite(d)", {"lanes", "blocks"}),
    "add_illegal": (LOSS, "correct(t, x)", "A(0) - correct(t, x)", {"lanes", "blocks"}),
    "negative_entropy": (LOSS, "t * std::log(t)", "A(0) - t * std::log(t)", EVERY),
    "weighted": (LOSS, "e * finite(d)", "A(0) - e * finite(d)", EVERY),
    "entropy": (
        LOSS,
        "log_sum(sums) - sums[kWeighted] / sums[kSum]",
        "log_sum(sums) + sums[kWeighted] / sums[kSum]",
        EVERY,
    ),
    "loss, target's entropy": (
        LOSS,
        "subtracted - sums[kNegativeEntropy]",
        "subtracted + sums[kNegativeEntropy]",
        EVERY,
    ),
    "loss, entropy": (
        LOSS,
        "subtracted + entropy_weight * entropy(sums)",
        "subtracted - entropy_weight * entropy(sums)",
        EVERY,
    ),
    "loss": (LOSS, "sums[kMass] * log_sum(sums) - subtracted", "sums[kMass] * log_sum(sums) + subtracted", EVERY),
    "factors, exponential": (
        LOSS,
        "coefficient * inverse_sum * sums[kMass]",
        "A(0) - coefficient * inverse_sum * sums[kMass]",
        EVERY,
    ),
    "factors, expectation": (LOSS, "sums[kWeighted] * inverse_sum", "A(0) - sums[kWeighted] * inverse_sum", EVERY),
    "gradient, exponential": (LOSS, "e * row.per_exponential", "A(0) - e * row.per_exponential", EVERY),
    "gradient, target": (LOSS, "row.coefficient * t", "A(0) - row.coefficient * t", EVERY),
    "gradient, no target": (LOSS, "row.per_exponential * e", "A(0) - row.per_exponential * e", {"lanes"}),
    "gradient, entropy": (
        LOSS,
        "t - entropy_weight * (e * row.inverse_sum * (finite(d) - row.expected))",
        "t + entropy_weight * (e * row.inverse_sum * (finite(d) - row.expected))",
        EVERY,
    ),
    "two bins": (TARGETS, "position - bin", "bin - position", OF_BINS),
    "normal distribution": (TARGETS, "position - center", "center - position", OF_BINS),
    "error function": (TARGETS, "high - low", "low - high", {"rows", "short rows", "thread groups"}),
    "tails": (
        LANES,
        "low - high + (has_middle ? 2.0f : 0.0f)",
        "high - low - (has_middle ? 2.0f : 0.0f)",
        {"lanes"},
    ),
    "class": (TARGETS, "1.0f", "-1.0f", EVERY),
    "smoothing, share": (TARGETS, "1 - label_smoothing", "label_smoothing - 1", EVERY),
    "smoothing, everywhere": (
        TARGETS,
        "label_smoothing / static_cast<double>(width)",
        "-label_smoothing / static_cast<double>(width)",
        EVERY,
    ),
    "smoothing": (TARGETS, "t * share + everywhere", "t * share - everywhere", EVERY),
}
CHOICE = f"""
#if defined(__CUDACC_RTC__)
__device__ __forceinline__ bool is_fault(int fault) {{
  int chosen;
  asm("mov.u32 %0, {engines.MARKER};" : "=r"(chosen));
  return chosen == fault;
}}
#else
extern "C" {{
inline int chosen_fault = 0;
}}
inline bool is_fault(int fault) {{
  return chosen_fault == fault;
}}
#endif
"""
CPU_ENGINES = {"rows": (37, 4), "short rows": (21, 16)}  # width and rows


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of csrc with all faults."""
    folder = tmp_path_factory.mktemp("faulty") / "csrc"
    shutil.copytree(ROOT / "csrc", folder)
    for fault, (file, right, wrong, _) in enumerate(FAULTS.values(), 1):
        text = (folder / file).read_text()
        assert text.count(right) == 1, f"csrc/{file} has changed: change the fault too"
        (folder / file).write_text(text.replace(right, f"(is_fault({fault}) ? ({wrong}) : ({right}))"))
    port = folder / "formulas/port.h"
    port.write_text(port.read_text().replace("#pragma once\n", "#pragma once\n" + CHOICE))
    return folder


@pytest.fixture(scope="module")
def cpu(sources, tmp_path_factory):
    """Returns a function that computes the results of the CPU's engines with a fault, or without one: 0."""
    path = tmp_path_factory.mktemp("library") / "rows.so"
    source = Path(__file__).with_name("logits_rows.cpp")
    library = ctypes.CDLL(str(compile_library(path, source, "-std=c++20", "-fopenmp-simd", "-w", f"-I{sources}")))
    chosen = ctypes.c_int.in_dll(library, "chosen_fault")

    def results(fault: int) -> dict[str, engines.Results]:
        chosen.value = fault
        return {
            name: engines.results(functools.partial(outputs_of, library), width, rows, list(engines.heads(width)))
            for name, (width, rows) in CPU_ENGINES.items()
        }

    return results


@pytest.fixture(scope="module")
def gpu(sources, driver, tmp_path_factory):
    """The results of the GPU's engines without a fault, and with each of them."""
    script, folder = Path(__file__).with_name("engines.py"), tmp_path_factory.mktemp("ptx")
    command = [sys.executable, str(script), str(driver), str(sources), str(folder), str(len(FAULTS))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def outputs_of(library, heads, predictions, targets):
    """The losses, details and gradients of the library's kernel, for engines.results."""
    kinds = {gs.TwoHot: 0, gs.HLGauss: 1, gs.SoftCrossEntropy: 2}
    per_step, details, gradients = {}, {}, {}
    for name, head in heads.items():
        logits, target = predictions[name][0], targets[name][0]
        rows, width = logits.shape
        x = logits.detach().contiguous()
        losses, detail, gradient = torch.empty(rows), torch.empty(rows), torch.empty(rows, width)
        library.logits_rows(
            kinds[type(head)],
            *(ctypes.c_int64(n) for n in (rows, width)),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, target)),
            not target.is_floating_point(),
            *(ctypes.c_double(getattr(head, name, 0)) for name in ("label_smoothing", "entropy_weight")),
            getattr(head, "subtract_target_entropy", False),
            *(ctypes.c_double(number) for number in (getattr(head, "sigma_ratio", 0), 1 / rows)),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (losses, detail, gradient)),
        )
        per_step[name], details[name], gradients[name] = losses, detail, gradient
    return per_step, details, gradients


def differs(found: list[float], expected: list[float]) -> bool:
    return not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.fixture(scope="module")
def reference():
    """The results of each engine's inputs in float64."""
    sizes = {name: (width, rows, list(engines.heads(width))) for name, (width, rows) in CPU_ENGINES.items()}
    sizes |= {name: (width, rows, names) for name, (width, rows, names, _) in engines.ENGINES.items()}
    return {
        name: engines.results(engines.outputs_of(gs.reference.multi_step_loss), *size, torch.float64)
        for name, size in sizes.items()
    }


def engines_with_errors(found, reference):
    return {
        engine
        for engine, results in found.items()
        if any(differs(numbers, reference[engine][head]) for head, numbers in results.items())
    }


def users(results, reference, processor):
    """By fault, the engines of a processor whose results it changes, and the ones that FAULTS names."""
    assert engines_with_errors(results(0), reference) == set()
    found = {name: engines_with_errors(results(fault), reference) for fault, name in enumerate(FAULTS, 1)}
    return found, {name: every & processor for name, (*_, every) in FAULTS.items()}


def test_every_engine_of_a_cpu_uses_the_formulas(cpu, reference):
    found, expected = users(cpu, reference, CPU)
    assert found == expected


def test_every_engine_of_a_gpu_uses_the_formulas(gpu, reference):
    found, expected = users(gpu.__getitem__, reference, GPU)
    assert found == expected
