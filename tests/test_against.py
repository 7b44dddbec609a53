"""tools/against.py: differences between learners, replaced lines, and messages without a checkout.

The checks of the real projects run with `make recipes`; docs/coming_from.md shows their results.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import tape
import torch

from gradscale_ext.capture import graphs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import against  # noqa: E402
from recipes import lightzero, lightzero_unizero, lockstep  # noqa: E402
from recipes.checkout import Checkout, Edit, Lines, UnusableError, fetch  # noqa: E402

# ---- Differences -----------------------------------------------------------------------------------------------------


def learner(slope=1.0, reported=("loss",), rate=0.1):
    """Gradient descent on `slope * w` from w = 1."""
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=rate)

    def step(_):
        optimizer.zero_grad()
        (slope * weight).backward()
        optimizer.step()
        return dict.fromkeys(reported, weight.detach().clone())

    leaf = torch.ones((), requires_grad=True)

    def loss():
        lockstep.clear([leaf])
        (slope * leaf).backward()
        return [leaf]

    return lockstep.Side(step, [optimizer], loss)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([[1.0, 2.0]], [[1.0, 4.0]], 0.5),
        ([[1.0], [3.0]], [[1.0], [2.0]], 0.5),  # relative to all tensors together
        ([[1e-9]], [[0.0]], 1e-9),
        ([[]], [[]], 0.0),
        ([[math.nan]], [[math.nan]], math.inf),
        ([[math.inf]], [[1.0]], math.inf),
    ],
)
def test_difference(ours, theirs, expected):
    assert lockstep.difference(ours, theirs) == pytest.approx(expected)


def test_steps_from_the_same_weights():
    """The gradients are 1.5 and 1.

    Both learners start their three steps from the same weights: 1, 0.9 and 0.8. After each step, the weights differ by
    0.05. After the last step, the weight of theirs is 0.7.
    """
    found = lockstep.differences(learner(1.5), learner(1.0), [None] * 3)
    assert found == pytest.approx({"gradients": 0.5, "weights": 0.05 / 0.7, "loss": 0.05 / 0.7})


def test_independent_steps():
    """After three steps, the weights are 0.55 and 0.7."""
    found = lockstep.differences(learner(1.5), learner(1.0), [None] * 3, together=False)
    assert found == pytest.approx({"gradients": 0.5, "weights": 0.15 / 0.7, "loss": 0.15 / 0.7})


def test_optimizer_states_are_copied():
    """Before the second step, both momentum buffers are 1, because theirs replaces ours, which was 1.5."""
    sides = [learner(slope) for slope in (1.5, 1.0)]
    for side in sides:
        side.optimizers[0].param_groups[0]["momentum"] = 1.0
    lockstep.differences(*sides, [None] * 2)
    ours, theirs = (_momentum(side) for side in sides)
    assert (ours, theirs) == pytest.approx((2.5, 2.0))


def _momentum(side):
    (state,) = side.optimizers[0].state.values()
    return state["momentum_buffer"].item()


def test_both_learners_draw_the_same_random_numbers():
    """From PyTorch and from NumPy, in a step and in the loss alone."""

    def drawn():
        return torch.cat([torch.rand(3), torch.from_numpy(numpy.random.random(3))])

    def random_side():
        side, leaf = learner(), torch.ones(6, dtype=torch.float64, requires_grad=True)

        def loss():
            (drawn() * leaf).sum().backward()
            return [leaf]

        return lockstep.Side(lambda batch: {**side.step(batch), "drawn": drawn()}, side.optimizers, loss)

    assert lockstep.differences(random_side(), random_side(), [None] * 2)["drawn"] == 0
    assert lockstep.difference_alone(random_side(), random_side()) == 0


def test_gradient_of_the_loss_alone():
    assert lockstep.difference_alone(learner(1.5), learner(1.0)) == pytest.approx(0.5)


class Folder:
    """In place of a checkout."""

    def commit(self):
        return "0000000"

    def importable(self):
        return contextlib.nullcontext()

    def lines_of(self, edit):
        return 1, 2


def test_the_diagnosis_of_the_projects_own_step(monkeypatch, tmp_path, capsys):
    """With --diagnose, the step is not compared, and what a CUDA graph would get wrong is printed."""
    own = learner()

    def step(data):
        own.step(data)
        return {"loss": own.weights()[0].item()}

    project = SimpleNamespace(
        name="a project",
        commit="0000000",
        sides=lambda checkout: (lockstep.Side(step, own.optimizers, own.loss), None),
        captured=None,
        batch=lambda seed: seed,
    )
    monkeypatch.setattr(against, "project_of", lambda name: project)
    monkeypatch.setattr(against, "Checkout", lambda folder: Folder())
    monkeypatch.setattr(against, "checked", lambda *arguments: Folder())
    monkeypatch.setattr(sys, "argv", ["against.py", "tdmpc2", str(tmp_path), "--diagnose"])
    assert against.main() == 0
    printed = capsys.readouterr().out
    assert "item() waits for the device" in printed
    monkeypatch.setattr(sys, "argv", ["against.py", "all", str(tmp_path), "--diagnose"])
    with pytest.raises(SystemExit):
        against.main()


def test_a_step_without_an_update():
    idle = learner()
    with pytest.raises(ValueError, match="not stepped"):
        lockstep.differences(lockstep.Side(lambda _: {}, idle.optimizers, idle.loss), learner(), [None])


# ---- Captured steps --------------------------------------------------------------------------------------------------


@pytest.fixture
def tapes(monkeypatch):
    """The stand-ins for CUDA graphs that captured steps make."""
    made = []

    class Graphs(tape.TapeGraphs):
        def capture(self, *arguments):
            graph, result = super().capture(*arguments)
            made.append(graph)
            return graph, result

    monkeypatch.setattr(graphs, "graphs_of", lambda device: Graphs())
    return made


def learner_of_numbers(slope=1.0):
    """Gradient descent with momentum on `slope * x * w`, where x is prepared from a number outside of the step."""
    own = learner(rate=0.1)
    (optimizer,), (weight,) = own.optimizers, own.optimizers[0].param_groups[0]["params"]
    optimizer.param_groups[0]["momentum"] = 0.5

    def step(x):
        optimizer.zero_grad()
        loss = slope * x * weight
        loss.backward()
        optimizer.step()
        return {"loss": loss, "drawn": torch.rand(3, device=loss.device)}

    return lockstep.Side(step, [optimizer], own.loss, prepare=lambda number: (torch.tensor(1.0 + number),))


@pytest.mark.parametrize("together", [True, False])
def test_captured_steps(together, tapes):
    """Replays report the gradients, weights and random numbers of eager steps, each of its own batch.

    Weights and optimizers' states are copied into the tensors that the graph has captured: one graph suffices.
    """
    equal, other = (
        lockstep.differences(learner_of_numbers(slope), learner_of_numbers(), range(9), together, captured=True)
        for slope in (1.0, 1.5)
    )
    assert equal == {"gradients": 0, "weights": 0, "loss": 0, "drawn": 0}
    assert other == lockstep.differences(learner_of_numbers(1.5), learner_of_numbers(), range(9), together)
    assert other["gradients"] == pytest.approx(0.5)
    assert [graph.replays for graph in tapes] == [6, 6]


def test_plain_calls_of_a_captured_step(tapes):
    side = learner_of_numbers().plain()
    assert side.run(1.0)["loss"] == 2
    assert tapes == []


def captured_project(slope):
    """A project whose own step has the slope 1, and whose captured step has another."""
    edit = SimpleNamespace(file="a_learner.py", function="update")
    return SimpleNamespace(
        **{"name": "tdmpc2", "case": "numbers", "commit": "0000000", "steps": 8, "tolerance": 1e-10},
        sides=lambda checkout, device: (learner_of_numbers(), learner_of_numbers()),
        captured=lambda checkout, device: learner_of_numbers(slope),
        batch=float,
        edits=[edit],
        capture_edits=[edit],
    )


@pytest.mark.parametrize(("slope", "status"), [(1.0, 0), (1.5, 1)])
def test_the_command_with_captured_steps(slope, status, monkeypatch, tmp_path, capsys):
    """On a CPU a stand-in replays the captured step, and is not timed. A wrong step is an error."""
    before = graphs.graphs_of
    monkeypatch.setattr(against, "project_of", lambda name: captured_project(slope))
    monkeypatch.setattr(against, "checked", lambda *arguments: Folder())
    arguments = ["tdmpc2", tmp_path, "--captured", "--seconds=0", f"--json={tmp_path}/rows.json"]
    assert run(monkeypatch, *arguments) == status
    assert graphs.graphs_of is before
    printed = capsys.readouterr().out
    assert printed.count("replaced: a_learner.py") == 2
    assert "captured, plain calls of the same step: 0.0e+00" in printed
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    expected = pytest.approx(slope - 1)
    assert [row["captured"]["differences"]["gradients"] for row in rows] == [expected, expected]
    assert [row["differences"]["gradients"] for row in rows] == [0, 0]
    assert set(rows[-1]["step"]) == {"theirs", "ours"}


def test_times_on_a_gpu(tapes, monkeypatch, capsys):
    """All three learners are timed until the GPU has finished; a CPU with an index takes its place."""
    device, finished = torch.device("cpu", 0), []
    monkeypatch.setattr(torch.cuda, "synchronize", finished.append)
    monkeypatch.setattr(against, "project_of", lambda name: captured_project(1.0))
    monkeypatch.setattr(against, "checked", lambda *arguments: Folder())
    arguments = SimpleNamespace(path=None, device=device, captured=True, steps=8, seconds=0.0)
    rows = against.compare(captured_project(1.0), arguments)
    assert all(map(against.agrees, rows))
    assert set(rows[-1]["step"]) == {"theirs", "ours", "captured"}
    assert finished == [device] * 2 * 3 * (2 + 3)  # before and after each of 3 calls of 2 losses and 3 steps
    (graph,) = rows[-1]["graphs"]
    assert graph["launches"] > 0
    against.report(captured_project(1.0), rows)
    assert f"graph: {graph['launches']} launches" in capsys.readouterr().out


def test_the_diagnosis_of_a_captured_step(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(against, "project_of", lambda name: captured_project(1.0))
    monkeypatch.setattr(against, "checked", lambda *arguments: Folder())
    assert run(monkeypatch, "tdmpc2", tmp_path, "--diagnose", "--captured") == 0
    assert "No findings" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["LightZero", "--captured"], ["all", "--captured"], ["DANN", "--device=cuda"]])
def test_projects_without_a_captured_step(arguments, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments, tmp_path)
    assert "take one of these projects: muzero-general, tdmpc2\n" in capsys.readouterr().err


def test_no_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run(monkeypatch, "tdmpc2", tmp_path, "--device=cuda")
    assert "--device cuda: PyTorch finds no GPU" in capsys.readouterr().err


# ---- A checkout ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A project with a function to edit, a neighbouring module, and a missing dependency."""
    (tmp_path / "beside.py").write_text("NUMBER = 'cuda'\n")
    (tmp_path / "a_learner.py").write_text(
        "import nowhere.at_all\nfrom beside import NUMBER\n\n@nowhere.at_all.decorated\n"
        "def other():\n    first = 1\n    # end\n    return first\n\n"
        "def update():\n    first = 1\n    second = 2\n    # end\n    return first, NUMBER\n"
    )
    stand_ins = {"nowhere": {}, "nowhere.at_all": {"decorated": lambda found: found}}
    return Checkout(tmp_path, stand_ins=stand_ins, texts={"'cuda'": "'cpu'"})


def edit(**changes):
    return Edit(**{"file": "a_learner.py", "function": "update", "start": "first =", "stop": "# end", **changes})


def test_edited_modules(checkout):
    before = set(sys.modules)
    with checkout.importable():
        import a_learner as theirs

        ours = checkout.edited("a_learner.py", [edit(lines="\n    first = ours()\n    ")], {"ours": lambda: 10})
        assert (theirs.update(), theirs.other()) == ((1, "cpu"), 1)
        assert (ours.update(), ours.other()) == ((10, "cpu"), 1)
    assert set(sys.modules) == before
    assert sorted(path.name for path in checkout.folder.iterdir()) == ["a_learner.py", "beside.py"]
    assert checkout.lines_of(edit()) == (11, 12)


@pytest.mark.parametrize("changes", [{"start": "fifth ="}, {"stop": "no end"}, {"function": "unknown"}])
def test_missing_lines(checkout, changes):
    with pytest.raises(UnusableError, match=r"a_learner.py: no line of \w+ has .*does not fit this commit"):
        checkout.lines_of(edit(**changes))


def test_folders_that_are_not_packages(tmp_path):
    """They can be imported from, but do not hide an installed package of the same name."""
    (tmp_path / "json").mkdir()
    (tmp_path / "no_package").mkdir()
    (tmp_path / "no_package" / "chess.py").write_text("PLAYERS = 2\n")
    with Checkout(tmp_path).importable():
        assert sys.meta_path[0].find_spec("json") is None
        from no_package.chess import PLAYERS
    assert PLAYERS == 2


def test_inner_functions(tmp_path):
    """A function inside another, with lines replaced and with the given outer variables."""
    (tmp_path / "a_script.py").write_text(
        "import nowhere\n\ndef main():\n    factor = nowhere.factor()\n\n    def update(x):\n        first = 1\n"
        "        # end\n        return first + factor * x\n\n    update(1)\n"
    )
    edits = [edit(file="a_script.py", lines="first = 10")]
    for lines, expected in (([], 7), (edits, 16)):
        assert Checkout(tmp_path).inner_function("a_script.py", "update", lines, {"factor": 2})(3) == expected


def test_parts_of_scripts(tmp_path):
    """Lines under `if __name__ == "__main__":`, with lines replaced, without running the lines around them."""
    (tmp_path / "a_script.py").write_text(
        "def update(x):\n    # begin\n    raise AssertionError\n\nif __name__ == '__main__':\n    import nowhere\n"
        "    for x in nowhere.data():\n        # begin\n        first = 1\n        total = first + factor * x\n"
        "        # end\n        nowhere.log(total)\n"
    )
    found = Checkout(tmp_path)
    part = Lines("a_script.py", "__main__", "# begin", "# end")
    edits = [edit(file="a_script.py", function="__main__", stop="total =", lines="first = ours()\nother = 5")]
    names = {"factor": 2, "ours": lambda: 10}
    theirs, ours = (found.part(part, lines, names) for lines in ([], edits))
    assert [theirs({"x": x})["total"] for x in (3, 4)] == [7, 9]
    assert (ours({"x": 3})["total"], ours({"x": 3, "factor": 1})["total"], ours({"x": 3})["other"]) == (16, 13, 5)
    assert names.keys() == {"factor", "ours"}
    assert (found.lines_of(part), found.lines_of(edits[0])) == ((8, 10), (9, 9))
    with pytest.raises(NameError, match="'x'") as raised:
        theirs({})
    assert raised.traceback[-1].lineno + 1 == 10  # the number of the line in the file


def test_fetched_checkouts(monkeypatch, tmp_path):
    """The given commit is checked out, or an error leaves no folder behind. A local folder replaces GitHub."""
    origin = tmp_path / "github" / "owner" / "name"
    origin.mkdir(parents=True)
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=b"]
    commits = [["commit", "--allow-empty", "-qm", message] for message in ("One", "Two")]
    for command in (["init", "-q"], ["config", "uploadpack.allowAnySHA1InWant", "true"], *commits):
        subprocess.run([*git, *command], check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD~"], capture_output=True, text=True).stdout.strip()
    variables = {"COUNT": "1", "KEY_0": f"url.file://{tmp_path}/github/.insteadOf", "VALUE_0": "https://github.com/"}
    for name, value in variables.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    fetch("owner/name", first, tmp_path / "checkouts" / "name")
    assert Checkout(tmp_path / "checkouts" / "name").commit() == first
    with pytest.raises(UnusableError, match=r"owner/other was not fetched: .*repository"):
        fetch("owner/other", first, tmp_path / "checkouts" / "other")
    assert not (tmp_path / "checkouts" / "other").exists()


# ---- The command -----------------------------------------------------------------------------------------------------


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["against.py", *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        return against.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", against.PROJECTS)
def test_no_checkout(name, monkeypatch, capsys, tmp_path):
    project = against.project_of(name)
    for folder in (tmp_path, tmp_path / "missing"):
        assert run(monkeypatch, name, folder) == 2
        expected = f"against.py: {folder} is not a checkout of {project.folder}: it has no {project.marker}\n"
        assert capsys.readouterr().err == expected


def test_a_missing_dependency(monkeypatch, capsys, tmp_path):
    """The error also names a module that is imported by another module of the project."""
    (tmp_path / "trainer.py").write_text("import models\n")
    (tmp_path / "models.py").write_text("import not_installed_anywhere\n")
    assert run(monkeypatch, "muzero-general", tmp_path) == 2
    expected = "against.py: muzero-general imports not_installed_anywhere, which is not installed\n"
    assert capsys.readouterr().err == expected


# ---- The documentation -----------------------------------------------------------------------------------------------


def test_recipes_do_not_read_masked_entries():
    """What the recipes log and store for replay is finite where padding is NaN."""
    padded, mask = torch.tensor([[1.0, 2.0, math.nan]]), torch.tensor([[True, True, False]])
    errors = lightzero_unizero.priorities(padded, torch.zeros(1, 3), mask)
    assert errors.tolist() == [1.5]
    (text,) = [edit.lines for edit in lightzero_unizero.EDITS if "policy_entropy =" in edit.lines]
    (line,) = [line.strip() for line in text.splitlines() if "policy_entropy =" in line]
    names = {"torch": torch, "out": SimpleNamespace(entropy={"policy": padded}), "batch": {"mask_padding": mask}}
    exec(line, names)
    assert names["policy_entropy"].tolist() == [[1.0, 2.0, 0.0]]
    policy = torch.full((2, 3, 2), 0.5)
    policy[0, 2] = math.nan
    valid = torch.cat((mask, torch.ones_like(mask))).float()
    assert lightzero.target_entropy(policy, valid).item() == pytest.approx(2 * math.log(2), rel=1e-5)


def test_every_project_was_measured():
    rows = json.loads((ROOT / "bench" / "results" / "clients.json").read_text())["rows"]
    page = (ROOT / "docs" / "coming_from.md").read_text()
    assert {row["project"] for row in rows} == set(against.PROJECTS)
    assert all(map(against.agrees, rows))
    for name in against.PROJECTS:
        project = against.project_of(name)
        commits = {row["commit"] for row in rows if row["project"] == name and "commit" in row}
        assert commits == {project.commit}
        assert f"python tools/against.py {name} " in page
