"""The documentation: every Python snippet runs alone, and every link leads somewhere."""

from __future__ import annotations

import importlib
import re
import socket
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SNIPPETS = [
    pytest.param(snippet, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
OPTIONAL = ("accelerate", "lightning", "tensorboard", "tensordict")


def test_there_are_snippets():
    assert len(SNIPPETS) > 40


@pytest.mark.untraced
@pytest.mark.xdist_group("docs")  # in one process, which imports the clients once
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet, monkeypatch, tmp_path):
    """In an empty namespace, as the one process of a job, which the snippets about several processes need."""
    for name in OPTIONAL:
        if re.search(rf"^(?:from|import) \S*{name}", snippet, re.MULTILINE):
            pytest.importorskip(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    names = set(re.findall(r"`((?:csrc|tests|docs|bench|examples|gradscale_ext)/[\w/.]*[\w/])`", page.read_text()))
    assert not [name for name in names if not (ROOT / name).exists()]


def test_names_of_the_api_page():
    """Every public name has its place there."""
    gs = importlib.import_module("gradscale_ext")
    named = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert {*gs.__all__} - named == {"reference"}


def test_pictures_are_small():
    pictures = [*(ROOT / "docs" / "images").iterdir(), ROOT / "bench" / "results" / "loss.svg"]
    assert {picture.name: picture.stat().st_size for picture in pictures if picture.stat().st_size > 100_000} == {}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
