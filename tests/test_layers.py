"""Layers of csrc/ and of the package: includes point down, imports have no cycle, files are not too long."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "gradscale_ext"
# A folder may include from folders of a lower layer. Folders of one layer do not include each other.
LAYERS = {
    **{"formulas": 0, "cpu": 1, "cuda": 1, "torch": 2},
    **{"flow": 3, "statistics": 3, "returns": 3, "support": 3, "capture": 3, "loss": 4},
}
SOURCES = {path.relative_to(CSRC): path.read_text() for path in sorted(CSRC.rglob("*")) if path.is_file()}
INCLUDE = re.compile(r'^\s*#(include|define GRADSCALE_KERNELS) "([^"]+)"', re.MULTILINE)
MOST_LINES = 600


def upward_includes(file: Path, text: str) -> list[str]:
    """Includes that do not exist or that point up. module.cpp includes from every folder."""
    found = []
    for directive, included in set(INCLUDE.findall(text)):
        # cpu/each_instruction_set.h includes the file that GRADSCALE_KERNELS names.
        path = (CSRC / (file.parent if directive == "include" else "cpu") / included).resolve()
        if not path.is_file():
            found.append(f"{file} includes {included}, which does not exist")
            continue
        here, there = file.parts[0], path.relative_to(CSRC).parts[0]
        if file.name != "module.cpp" and here != there and LAYERS[here] <= LAYERS[there]:
            found.append(f"{file} includes {included}, which is not in a layer below")
    return found


def test_the_layers_of_csrc():
    violations = []
    for file, text in SOURCES.items():
        if file.parts[0] not in LAYERS and file != Path("module.cpp"):
            violations.append(f"{file} is in no layer")
            continue
        violations += upward_includes(file, text)
        if "default:" in text:  # hides an unhandled kind from -Werror=switch
            violations.append(f"{file}: a switch has a default")
        if len(text.splitlines()) > MOST_LINES:
            violations.append(f"{file} has more than {MOST_LINES} lines")
    assert len(SOURCES) > 50
    assert not violations, "\n".join(violations)


def test_kernels_have_their_folders():
    """The rooms of a subject, as docs/design.md describes them."""
    for file, text in SOURCES.items():
        assert (file.suffix == ".cuh") <= (file.parent.name == "cuda"), file
        assert ("#define GRADSCALE_KERNELS" in re.sub(r"//.*", "", text)) <= (file.parent.name == "cpu"), file
        assert ("PYBIND11_MODULE" in text) <= (file.name == "module.cpp"), file
        registers = "TORCH_LIBRARY_FRAGMENT" in text  # torch/ has the operator that several subjects call
        assert registers <= (file.name == "operator.cpp" or file.parts[0] in ("flow", "torch")), file


# Numbers with many digits. Each belongs to a formula, and a copy of the formula would repeat it.
CONSTANT = re.compile(r"(?<![\w.])(?:\d+\.\d{6,}(?:e[-+]?\d+)?|0x1\.[0-9a-f]{5,}p[-+]?\d+)")


def test_each_formula_is_in_one_file():
    files = collections.defaultdict(set)
    for file, text in SOURCES.items():
        for literal in CONSTANT.findall(text):
            number = float.fromhex(literal) if literal.startswith("0x") else float(literal)
            files[f"{number:.6e}"].add(str(file))
    assert len(files) > 30
    assert not {number: found for number, found in files.items() if len(found) > 1}


# Parts of the cross-entropy of a row of logits, and the only files of csrc/loss and csrc/formulas that may have them.
# CategoricalKL (own_heads.h and its rows) and BinaryCrossEntropy (regression_heads.h) are other losses with logarithms.
OTHER_LOSSES = {
    "loss/own_heads.h",
    "loss/cpu/own_rows.h",
    "loss/cuda/own_rows.cuh",
    "loss/cuda/divergence_rows.cuh",
    "loss/regression_heads.h",
}
CROSS_ENTROPY = {
    r"\bstd::log\(|\blog_normal\(": {"formulas/cross_entropy.h", *OTHER_LOSSES},
    r"\bproduct\(|== -\S*INFINITY": {"formulas/cross_entropy.h", *OTHER_LOSSES},
    r"\* \S*per_exponential\b|\bper_exponential \*|\binverse_sum \*|/ sums?\[": {"formulas/cross_entropy.h"},
    r"1 - \S*label_smoothing|label_smoothing\)? [*/]": {"formulas/targets.h"},
    r"\bstd::erf\b|\bposition - (?:bin|center)\b": {"formulas/targets.h"},
    r"\bapproximate_erfc\(": {"loss/cuda/lane_losses.cuh"},
}


def test_cross_entropy_is_in_formulas():
    """tests/native/test_formulas.py shows that all engines use it."""
    for pattern, files in CROSS_ENTROPY.items():
        found = {
            file.as_posix()
            for file, text in SOURCES.items()
            if file.parts[0] == "loss" or file.name in ("cross_entropy.h", "targets.h")
            if re.search(pattern, re.sub(r"//.*", "", text))
        }
        assert found <= files, pattern
        assert found - OTHER_LOSSES, pattern


# ---- The package ----------------------------------------------------------------------------------------------------

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path.name not in ("_build.py", "__main__.py")
}


@functools.cache
def imports(module: str, for_types: bool = True) -> set[str]:
    """Modules that a module of the package imports anywhere in its file, with or without imports for types alone."""
    path, found = MODULES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(path.read_text())
    types_alone = [node for block in ast.walk(tree) if _is_for_types(block) for node in block.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level > 0 and (for_types or node not in types_alone):
            origin = [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            names = {".".join([*origin, alias.name]) for alias in node.names}
            found |= names & MODULES.keys() or {".".join(origin)} & MODULES.keys()
    return found - {"gradscale_ext"}  # `from . import _C` names no Python file


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_imports_have_no_cycle():
    graph = {module: imports(module) for module in MODULES}
    assert len(graph) > 20
    assert "gradscale_ext.heads" in graph["gradscale_ext.reference.losses"]
    assert "gradscale_ext.support" in graph["gradscale_ext.heads"]
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_folders_have_no_cycle():
    """Folders and the modules next to them import in one direction, except `_native`, which reports errors with cli."""

    def place(module: str) -> str:
        parts = module.split(".")
        return parts[1] if len(parts) > 2 or (PACKAGE / parts[-1]).is_dir() else module

    graph = collections.defaultdict(set)
    for module in MODULES.keys() - {"gradscale_ext"}:
        graph[place(module)] |= {place(name) for name in imports(module, for_types=False)} - {place(module)}
    assert {"loss", "reference", "call"} <= graph.keys()
    graph["gradscale_ext._native"].remove("cli")
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_top_layers_are_not_imported():
    """Only `gradscale_ext` and `__main__` import monitor, diagnosis, capture and cli, which do not import each other.

    `_native` also imports cli.report, to report an extension that does not load. The reports of diagnosis and capture
    look alike, and name the user's lines in the same way. Captured steps count in monitors.
    """
    diagnosis = {"gradscale_ext.diagnosis.report", "gradscale_ext.diagnosis.lines"}
    monitor = {"gradscale_ext.monitor._open", "gradscale_ext.monitor.monitor", "gradscale_ext.monitor._kept"}
    shared = diagnosis | monitor
    for module in MODULES:
        for folder in ("monitor", "diagnosis", "capture", "cli"):
            prefix = f"gradscale_ext.{folder}."
            found = {name for name in imports(module) if name.startswith(prefix)}
            if module.startswith("gradscale_ext.capture."):
                found -= shared
            if not module.startswith(prefix) and module != "gradscale_ext":
                assert found <= ({"gradscale_ext.cli.report"} if module == "gradscale_ext._native" else set()), module


def test_the_reference_uses_nothing_compiled():
    seen, left = set(), {module for module in MODULES if module.startswith("gradscale_ext.reference")}
    while left:
        module = left.pop()
        seen.add(module)
        left |= imports(module, for_types=False) - seen
    assert "gradscale_ext._native" not in seen
    assert "gradscale_ext.transforms" in seen


def test_modules_are_not_too_long():
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert not {module: lines for module, lines in lengths.items() if lines > MOST_LINES}
