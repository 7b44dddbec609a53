"""The layers of csrc/ and of the package: no file includes from a folder above its own, no circle of imports."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "gradscale_ext"
# Machinery that names no kernel, formulas, rows in lanes, the glue to PyTorch, and the families, which know nothing of
# each other.
LAYERS = {"port": 0, "math": 1, "formulas": 2, "cpu": 3, "host": 3, "flow": 4, "loss": 4, "tensors": 4}
FILES = sorted(path for path in CSRC.rglob("*") if path.is_file())
SIMULATOR = "simt.h"  # of tests/simt, in place of CUDA


def name(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_includes_point_down(file):
    """From its own folder, or from one of a lower layer; module.cpp, the front door, from everywhere."""
    here = file.parent
    assert file == CSRC / "module.cpp" or here.name in LAYERS
    for included in re.findall(r'^\s*#(?:include|define GRADSCALE_KERNELS) "([^"]+)"', file.read_text(), re.MULTILINE):
        if included != SIMULATOR:
            path = (here / included).resolve()
            assert path.is_file(), included
            assert here in (CSRC, path.parent) or LAYERS[path.parent.name] < LAYERS[here.name], included


@pytest.mark.parametrize("file", FILES, ids=name)
def test_switches_name_every_case(file):
    """A kind without a case of its own is an error of the compiler (-Werror=switch) where no default takes it."""
    assert "default:" not in file.read_text()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_files_have_one_subject(file):
    assert len(file.read_text().splitlines()) <= 500


# ---- The package ----------------------------------------------------------------------------------------------------

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path.name not in ("_build.py", "__main__.py")
}


def imports(module: str, for_types: bool = True) -> set[str]:
    """The modules that a module's file names in its imports, wherever they stand; also those for types alone."""
    path, found = MODULES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(path.read_text())
    types_alone = [node for block in ast.walk(tree) if _is_for_types(block) for node in block.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level > 0 and (for_types or node not in types_alone):
            origin = [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            names = {".".join([*origin, alias.name]) for alias in node.names}
            found |= names & MODULES.keys() or {".".join(origin)} & MODULES.keys()
    return found - {"gradscale_ext"}  # `from . import _C` names no file of Python's


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_imports_make_no_circle():
    graph = {module: imports(module) for module in MODULES}
    assert len(graph) > 20
    assert "gradscale_ext.heads" in graph["gradscale_ext.reference.losses"]
    assert "gradscale_ext.support" in graph["gradscale_ext.heads"]
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_reference_uses_nothing_compiled():
    seen, left = set(), {module for module in MODULES if module.startswith("gradscale_ext.reference")}
    while left:
        module = left.pop()
        seen.add(module)
        left |= imports(module, for_types=False) - seen
    assert "gradscale_ext._native" not in seen
    assert "gradscale_ext.transforms" in seen


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_have_one_subject(module):
    assert len(MODULES[module].read_text().splitlines()) <= 500
