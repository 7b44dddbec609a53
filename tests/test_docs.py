"""The documentation: every Python snippet runs on its own, and every link has a target."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import socket
from pathlib import Path

import pytest
import torch
from processes import one_server, start_processes

import gradscale_ext as gs

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
OPTIONAL = ("accelerate", "gymnasium", "lightning", "tensorboard", "tensordict", "torchrl")
namespaces: list[dict[str, object]] = []


def test_there_are_snippets():
    assert len(SNIPPETS) > 40


def code_of(page):
    """Lines of fenced blocks, and lines indented by four spaces, without output, signatures and Sphinx's directives."""
    lines, fence, is_indented = [], None, False
    for before, line in itertools.pairwise(["", *page.read_text().splitlines()]):
        is_indented = line.startswith("    ") and (is_indented or not before)
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence is None and is_indented:
            lines.append(line[4:])
        elif fence is not None and not re.match("```(text$|py$|{)", fence):
            lines += [line] * (fence != "```pycon" or line.startswith((">>>", "...")))
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_the_column_of_the_site(page):
    assert [line for line in code_of(page) if len(line) > 88] == []


@pytest.mark.xdist_group("clients")  # one process imports the optional packages once
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet, monkeypatch, tmp_path):
    """Run each snippet in an empty namespace, as `python script.py` does: without the environment of torchrun."""
    for name in OPTIONAL:
        if re.search(rf"^(?:from|import) \S*{name}", snippet, re.MULTILINE):
            pytest.importorskip(name)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    namespace = {"__name__": "snippet"}
    # Keep the namespace alive: its DDP module may own the process group, whose destructor holds the GIL while it waits
    # for threads that may need the GIL to free the tensors of the last collective.
    namespaces.append(namespace)
    exec(compile(snippet, "snippet", "exec"), namespace)


def test_shown_output_is_printed(capsys):
    """A ```text block shows what the snippet before it prints."""
    pattern = r"(?s)```python\n([^`]*)```[^`]*```text\n(.*?)```"
    shown = [found for page in PAGES for found in re.findall(pattern, page.read_text())]
    assert shown
    for snippet, output in shown:
        exec(snippet, {"__name__": "snippet"})
        assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()


def run_snippet(rank, snippet, port):
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})


@one_server
@pytest.mark.parametrize("snippet", [param for param in SNIPPETS if "init_process_group" in param.values[0]])
def test_distributed_snippets_run_on_two_ranks(snippet):
    """With the environment of torchrun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    start_processes(2, run_snippet, snippet, port)


def test_old_and_new_code_of_the_readme_agree():
    """Both updates give a model the same loss and gradients."""
    old, new = {}, {}
    before, after = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[:2]
    exec(before, old)
    exec(after, new)
    heads = new["loss_fn"].heads

    def loss_of(outputs, targets, k):
        now = {name: target[:, k : k + 1] for name, target in targets.items()}
        return gs.reference.multi_step_loss(heads, {name: [x] for name, x in outputs.items()}, now).loss

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dynamics = torch.nn.Linear(6, 6, dtype=torch.float64)
            self.heads = torch.nn.Linear(6, 601 + 601 + 4, dtype=torch.float64)

        def initial(self, observation):
            names = ("value", "reward", "policy")
            return dict(zip(names, self.heads(observation).split((601, 601, 4), 1), strict=True)), observation

        def recurrent(self, hidden, action):
            return self.initial(torch.tanh(self.dynamics(hidden) + action[:, None]))

    old["loss_of"] = loss_of
    torch.manual_seed(0)
    model = Model()
    observation, actions = torch.randn(3, 6, dtype=torch.float64), torch.randint(4, (3, 5))
    targets = {name: torch.randn(3, 6, dtype=torch.float64) for name in ("value", "reward")}
    targets["policy"] = torch.rand(3, 6, 4, dtype=torch.float64).softmax(-1)
    losses = [code["update"](model, observation, actions, targets) for code in (old, new)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_each_line_of_the_readme_runs():
    """The lines of "You have, you write"."""
    part = PAGES[0].read_text().partition("## You have, you write")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| .* \| `(.+)` \|$", part, re.MULTILINE)
    assert len(lines) == 8
    batch, steps = 3, 5
    model, x = torch.nn.Linear(4, 2), torch.randn(batch, 4, requires_grad=True)
    names = {
        "gs": gs,
        "rewards": torch.randn(batch, steps),
        "values": torch.randn(batch, steps + 1),
        "terminated": torch.zeros(batch, steps, dtype=torch.bool),
        "support": gs.Support.linear(-10, 10, 51),
        "next_probabilities": torch.rand(batch, steps, 51).softmax(-1),
        "discounts": torch.full((batch, steps), 0.9),
        "classifier": model,
        "features": x,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "loss": model(x).sum(),
        "update": lambda x: model(x).sum().backward(),
    }
    sizes = {"value": (steps, 601), "reward": (steps, 601), "policy": (steps, 4)}
    inputs = {
        "muzero": {
            "predictions": {name: torch.randn(batch, *size) for name, size in sizes.items()},
            "targets": {"value": torch.randn(batch, steps), "reward": torch.randn(batch, steps)}
            | {"policy": torch.rand(batch, steps, 4)},
        },
        "ppo": {
            "logits": torch.randn(batch, 4),
            "values": torch.randn(batch),
            "targets": {
                "policy": {"actions": torch.tensor([0, 3, 1]), "advantages": torch.randn(batch)}
                | {"log_probs": torch.randn(batch)},
                "value": {"returns": torch.randn(batch)},
            },
        },
    }
    for line in lines:
        agent = re.search(r"MultiStepLoss\.(\w+)", line)
        exec(line, names | (inputs[agent[1]] if agent else {}))


def anchors(page):
    """The anchors that GitHub and the site generate for the headings of a page, or of the page that it includes."""
    included = re.match(r"```\{include\} (\S+)", page.read_text())
    source = page.parent / included[1] if included else page
    headings = re.findall(r"^#+ (.+)$", source.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    folders = "csrc|tests|tools|docs|bench|examples|gradscale_ext"
    names = set(re.findall(rf"`((?:{folders})/[\w/.]*[\w/])`", page.read_text()))
    assert not [name for name in names if not (ROOT / name).exists()]


def test_the_api_page_lists_every_public_name():
    named = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert {*gs.__all__} - {name.rpartition(".")[2] for name in named} == {"reference"}


def parts_of_the_api():
    """By name, the part of a page in docs/api/ that is about it."""
    texts = [page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")) if page.name != "README.md"]
    parts = [part for text in texts for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return {re.match(r"(?:class )?`(\w+)`", part)[1]: part for part in parts}


def test_the_api_pages_show_the_signatures():
    """Names of parameters, their order and kinds are the ones that Python reports."""
    parts = parts_of_the_api()
    assert {*gs.__all__} - {*parts} == {"reference"}
    assert len(re.findall(r"^```py$", "".join(parts.values()), re.MULTILINE)) > 60
    for name, part in parts.items():
        shown = re.match(rf".*\n\n```py\n[\w.]*{name}\((.*?)\)\n```", part, re.DOTALL)
        if shown and name in gs.__all__:
            written = eval(f"lambda {' '.join(shown[1].split())}: 0")
            expected, found = (inspect.signature(entry).parameters for entry in (getattr(gs, name), written))
            assert [(p.name, p.kind) for p in found.values()] == [(p.name, p.kind) for p in expected.values()], name
            defaults = [p.default for p in expected.values()]
            assert [p.default for p in found.values()] == pytest.approx(defaults), name
        else:
            assert name == "GradientMonitorCallback" or not shown


def test_public_signatures_show_arguments_that_users_can_give():
    """`*name` and `**name` appear only where the docstring says what they accept."""
    for name in gs.__all__:
        entry = getattr(gs, name)
        for parameter in inspect.signature(entry).parameters.values() if callable(entry) else ():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                assert re.search(rf"^ *\**{parameter.name}: ", inspect.getdoc(entry), re.MULTILINE), (name, parameter)


def test_no_line_of_the_api_is_only_punctuation():
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert not re.findall(r"^[^\w\n|]+$|^- `[^`]*`:\s*$", text, re.MULTILINE), page.name


def test_the_design_page_names_every_subject():
    text = (ROOT / "docs" / "design.md").read_text()
    subjects = {path.parent.name for path in (ROOT / "csrc").glob("*/*.cpp")} - {"cpu", "cuda", "torch"}
    for sentence in re.findall(r"(?s)Dependencies point down: .*? do not depend|Each subject of `csrc/` \(.*?\)", text):
        listed = {name.removeprefix("csrc/") for name in re.findall(r"`([\w/]+)`", sentence)}
        assert subjects - listed <= {"loss"}, sentence  # the loss depends on `support`
    assert subjects == set(re.findall(r"`(\w+)`", re.search(r"Each subject of `csrc/` (\(.*?\))", text, re.DOTALL)[1]))


def test_the_index_has_the_names_that_users_search_for():
    rows = (ROOT / "docs" / "api" / "README.md").read_text().splitlines()
    words = {
        "generalized_advantage_estimate": "generalized_advantages",
        "whitening": "standardize",
        "BCEWithLogits": "BinaryCrossEntropy",
        "weight decay": "l2_loss",
        "representation loss": "CategoricalKL",
        "AGC": "clip_gradients_",
        "gradient reversal": "reverse_gradient",
        "CUDA graphs": "CapturedStep",
    }
    for word, name in words.items():
        assert [row for row in rows if word in row and row.startswith(f"| [`{name}`]")], word


@pytest.mark.parametrize(
    "result",
    [
        gs.CaptureDiagnosis, gs.CaptureFinding, gs.Finding, gs.GeneralizedAdvantages, gs.GradientDiagnosis,
        gs.GradientStatistics, gs.MuZeroTargets, gs.MultiStepLossOutput, gs.NStepTransitions, gs.VTrace,
    ],
)  # fmt: skip
def test_fields_of_results_are_described(result):
    described = re.findall(r"^- `(\w+)`: ", parts_of_the_api()[result.__name__], re.MULTILINE)
    fields = [name for name in inspect.get_annotations(result) if not name.startswith("_")]
    assert fields
    assert set(fields) <= set(described)


def test_the_detach_formulas_are_wrong_in_the_last_bit_only():
    """In bench/results/matrix.json, which `make matrix` writes."""
    for verdicts in json.loads((ROOT / "bench" / "results" / "matrix.json").read_text()).values():
        rows = {name: row for name, row in verdicts.items() if "detach()" in name}
        assert len(rows) == 2
        for row in rows.values():
            assert {context for context, verdict in row.items() if verdict != "right"} == {"forward exact"}


def test_speeds_are_compared_with_the_faster_baseline():
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/benchmarks.md"))
    rows = re.findall(r"^\| .*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)x \((\w+)\) \|", text, re.MULTILINE)
    assert len(rows) >= 50
    for *numbers, name in rows:
        fused, compiled, eager, ratio = map(float, numbers)
        assert name == ("compile" if compiled < eager else "eager")
        assert ratio == pytest.approx(min(compiled, eager) / fused, rel=0.06)


def test_pictures_are_small():
    pictures = [*(ROOT / "docs" / "images").iterdir(), ROOT / "bench" / "results" / "loss.svg"]
    assert {picture.name: picture.stat().st_size for picture in pictures if picture.stat().st_size > 100_000} == {}


def test_pictures_fit_a_phone():
    """At most 4.6 inches wide: in the 358 pixels of a phone, words of 9 points are then at least 9 pixels high."""
    results = [ROOT / "bench" / "results" / f"{name}.svg" for name in ("loss", "learning", "learning_ppo")]
    pictures = [*(ROOT / "docs" / "images").glob("*.svg"), *results]
    widths = {path.name: float(re.search(r'width="([\d.]+)pt"', path.read_text())[1]) for path in pictures}
    assert len(widths) >= 12
    assert {name: width for name, width in widths.items() if width > 4.6 * 72} == {}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 155
