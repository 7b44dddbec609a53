"""The project's own files name the same versions."""

from __future__ import annotations

import re
from pathlib import Path

import gradscale_ext as gs

ROOT = Path(__file__).resolve().parent.parent


def found(pattern, file):
    matches = re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert matches, f"{file} has no {pattern}"
    return matches


def test_version_of_the_package():
    assert found(r"^version: (.+)$", "CITATION.cff") == [gs.__version__]
    assert found(r"^  version: (\d.+)$", "conda/recipe.yaml") == [gs.__version__]
    newest, *_ = found(r"^## (\S+)", "CHANGELOG.md")
    assert newest in ("Unreleased", gs.__version__)


def test_linters():
    """pre-commit and `make lint` run the same linters in the same versions."""
    (line,) = found(r"^lint = \[(.*)\]$", "pyproject.toml")
    listed = set(re.findall(r'"([\w-]+==[\d.]+)"', line))
    hooks = found(r"additional_dependencies: \[(.*)\]$", ".pre-commit-config.yaml")
    assert set(hooks) == {entry for entry in listed if entry.startswith(("ruff==", "clang-format=="))}


def test_releases_of_pytorch_and_python():
    """`make wheels`, the workflow and the conda recipe build for the same ones."""
    (others,), (default,) = found(r"^VERSIONS \?= (.+)$", "Makefile"), found(r"^TORCH \?= torch==(.+)$", "Makefile")
    (pythons,) = found(r"^PYTHONS \?= (.+)$", "Makefile")
    releases = sorted([*others.split(), default])

    def quoted(pattern, file):
        return re.findall(r'"([\d.]+)', found(pattern, file)[0])

    assert quoted(r"^ +torch: \[(.+)\]$", ".github/workflows/wheels.yml") == releases
    assert quoted(r"^pytorch: \[(.+)\]$", "conda/variants.yaml") == releases
    assert found(r'\.ci/wheels "\$TORCH" "([\d. ]+)"', ".github/workflows/wheels.yml") == [pythons]
    assert [name.rstrip(".") for name in quoted(r"^python: \[(.+)\]$", "conda/variants.yaml")] == pythons.split()


def test_the_workflow_runs_all_checks():
    (checks,) = found(r"^ALL=\((.+)\)$", ".ci/run")
    (jobs,) = found(r"^ +checks: \[(.+)\]$", ".github/workflows/ci.yml")
    assert sorted(jobs.replace(",", "").split()) == sorted([*checks.split(), "slow"])


def test_wheels_are_tried_with_the_example_of_the_readme():
    (pattern,) = found(r're\.search\(r"(.+)", readme', ".ci/wheels")
    example = re.search(pattern.replace(r"\n", "\n"), (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    assert example[1].startswith("import torch\nimport gradscale_ext as gs\n")
