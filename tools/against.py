"""Trains with a project's own loss, and with ours as in the recipes of docs/coming_from.md, on the same data.

    python tools/against.py muzero-general PATH      # PATH: a checkout of the project
    python tools/against.py all FOLDER               # FOLDER/muzero-general, FOLDER/LightZero and so on
    python tools/against.py tdmpc2 PATH --diagnose   # only what a CUDA graph of the project's own step would get wrong
    python tools/against.py tdmpc2 PATH --device cuda --captured   # also our step as one CUDA graph

Projects that are not in FOLDER are fetched from GitHub, at the commit that was measured.

The project is imported from the checkout, which is not modified. Stubs replace imports that its loss does not need.
The recipe's lines replace the project's lines in a second copy of the module, in memory. Each copy has its own
optimizer. First every step begins with the same weights; then both take as many steps independently. This runs in
float64, where only rounding may differ, and in float32, where times are measured: medians of the CPU time of one
thread, while the two learners take turns. A difference is the largest difference of an element, divided by the largest
value of the project's own result. The exit status is 1 if a step in float64 differs by more than the recipe's
tolerance, 1e-10 for most.

With --captured a third learner has the lines replaced that `diagnose_capture` finds, too, and its step is a
`CapturedStep`. It is compared with the project's own eager step, and with plain calls of the same step. On a GPU all
learners run there, and times are those until the GPU has finished. On a CPU the stand-in for CUDA graphs of the tests
replays the step, and only the two others are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]
sys.path.append(str(ROOT / "tests"))  # the stand-in for CUDA graphs

import torch  # noqa: E402

import gradscale_ext as gs  # noqa: E402
import harness  # noqa: E402
from gradscale_ext.capture import graphs  # noqa: E402
from recipes import lockstep  # noqa: E402
from recipes.checkout import Checkout, UnusableError, fetch  # noqa: E402
from recipes.project import Project  # noqa: E402

# Names of recipes, most of which are the names of repositories, and their modules.
PROJECTS = {
    "muzero-general": "muzero_general",
    "LightZero": "lightzero",
    "LightZero-unizero": "lightzero_unizero",
    "tdmpc2": "tdmpc2_agent",
    "r2dreamer": "r2dreamer",
    "torchrl-dreamerv3": "torchrl_dreamerv3",
    "DANN": "dann",
    "audiocraft": "audiocraft_balancer",
    "sb3-qrdqn": "sb3_qrdqn",
    "sb3-tqc": "sb3_tqc",
    "sb3-tqc-critic": "sb3_tqc_critic",
    "FastTD3": "fasttd3",
    "EfficientZeroV2": "efficientzero_v2",
    "cleanrl-ppo": "cleanrl_ppo",
    "cleanrl-ppo-continuous": "cleanrl_ppo_continuous",
    "torchbeast": "torchbeast_impala",
    "trl-grpo": "trl_grpo",
}
CPU = lockstep.CPU
CALLS_BEFORE_REPLAYS = 10
"""Calls of a captured step until it only replays: warm-up, and verification of the graph."""
DOUBLE = {"torch.float32": "torch.float64", '"float32"': '"float64"'}


def project_of(name: str) -> Project:
    return importlib.import_module(f"recipes.{PROJECTS[name]}").PROJECT


def checked(project: Project, folder: Path, texts: dict[str, str], device: torch.device = CPU) -> Checkout:
    """The checkout, or an error if it cannot be used."""
    if not (folder / project.marker).is_file():
        raise UnusableError(f"{folder} is not a checkout of {project.folder}: it has no {project.marker}")
    on_cpu = project.texts_on_cpu if device == CPU else {}
    return Checkout(folder, project.roots, project.stand_ins, {**project.texts, **on_cpu, **texts})


def compare(project: Project, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each dtype: differences, and times in float32."""
    return [_dtype_record(project, dtype, arguments) for dtype in ("float64", "float32")]


def diagnose(project: Project, arguments: argparse.Namespace) -> gs.CaptureDiagnosis:
    """What a CUDA graph of the project's own learner step, or of our captured one, would get wrong."""
    checkout = checked(project, arguments.path, {}, arguments.device)
    with checkout.importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side = _learners(project, checkout, arguments.device, arguments.captured)[-1 if arguments.captured else 0]
        batches = [side.prepare(lockstep.on(arguments.device, project.batch(seed))) for seed in range(3)]
        return gs.diagnose_capture(side.step, batches, *side.modules, *side.optimizers)


def _learners(project: Project, checkout: Checkout, device: torch.device, captured: bool) -> list[lockstep.Side]:
    """Theirs, ours, and ours for a CUDA graph if it is wanted, all with the same weights."""
    with contextlib.redirect_stdout(None):  # messages of the projects
        if project.captured is None:
            return [*project.sides(checkout)]
        return [*project.sides(checkout, device), *([project.captured(checkout, device)] if captured else [])]


def _dtype_record(project: Project, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    double, device = dtype == "float64", arguments.device
    steps = arguments.steps or project.steps
    checkout = checked(project, arguments.path, DOUBLE if double else {}, device)
    learners = functools.partial(_learners, project, checkout, device, arguments.captured)
    batch = lambda seed: lockstep.on(device, project.batch(seed))

    def compared(ours: lockstep.Side, theirs: lockstep.Side, captured: bool) -> dict[str, dict[str, float]]:
        batches = [batch(seed) for seed in range(steps)]
        found = [lockstep.differences(ours, theirs, batches, together, captured) for together in (True, False)]
        return {"differences": found[0], "apart": {name: found[1][name] for name in ("gradients", "weights")}}

    with checkout.importable(), lockstep.double_precision(double), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="CapturedStep: ")
        theirs, ours, *captured = learners()
        row: dict[str, Any] = {"project": project.name, "dtype": dtype, "steps": steps, "case": project.case}
        row |= compared(ours, theirs, captured=False)
        row["differences"]["gradients of the loss alone"] = lockstep.difference_alone(ours, theirs)
        for side in captured:
            with _graphs(device):
                row["captured"] = compared(side, learners()[0], captured=True)
                alike, plain = learners()[-1], learners()[-1].plain()
                found = lockstep.differences(alike, plain, map(batch, range(steps)), together=False, captured=True)
                row["captured"]["plain calls"] = max(found.values())
        if not double:
            timed = {"theirs": theirs, "ours": ours}
            if captured and device != CPU:  # a stand-in is not timed
                timed["captured"] = learners()[-1].captured()
            row |= _times(timed, batch(0), arguments)
            row["commit"] = checkout.commit()
            row["edits"] = [
                {"file": edit.file, "function": edit.function, "lines": checkout.lines_of(edit)}
                for edit in (*project.edits, *(project.capture_edits if captured else ()))
            ]
    return row


@contextlib.contextmanager
def _graphs(device: torch.device) -> Iterator[None]:
    """In this context, captured steps run on a CPU as graphs of the tests' stand-in."""
    makers = graphs.graphs_of
    if device == CPU:
        import tape

        graphs.graphs_of = lambda device: tape.TapeGraphs()
    try:
        yield
    finally:
        graphs.graphs_of = makers


def _times(learners: dict[str, lockstep.Side], batch: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of the losses alone and of whole steps, and the graphs of the captured step."""
    found: dict[str, Any] = {}
    if (captured := learners.get("captured")) is not None:
        for _ in range(CALLS_BEFORE_REPLAYS):
            captured.run(batch)
        found["graphs"] = [graph._asdict() for graph in captured.step.graphs]
    alone = {name: learners[name].loss for name in ("theirs", "ours")}
    whole = {name: functools.partial(side.run, batch) for name, side in learners.items()}
    return found | {
        name: lockstep.times(calls, arguments.seconds, arguments.device)
        for name, calls in (("loss", alone), ("step", whole))
    }


def report(project: Project, rows: list[dict[str, Any]]) -> None:
    last = rows[-1]
    print(f"{project.name}: {project.case}; {last['steps']} steps on the same data")
    for edit in last["edits"]:
        print("  replaced: {file}, {function}, lines {lines[0]} to {lines[1]}".format(**edit))
    for row in rows:
        for form, found in (("", row), (", captured", row.get("captured", {}))):
            for what, title in (("differences", "each from the same weights"), ("apart", "on their own")):
                if what in found:
                    shown = ", ".join(f"{name} {value:.1e}" for name, value in found[what].items())
                    print(f"  {row['dtype']}{form}, {title}: {shown}")
        if "captured" in row:
            print(f"  {row['dtype']}, captured, plain calls of the same step: {row['captured']['plain calls']:.1e}")
    for name, what in (("loss", "loss alone"), ("step", "whole step")):
        theirs, *others = last[name].items()
        shown = (f"{side} {own:.3f} ms, {theirs[1] / own:.2f} times as fast" for side, own in others)
        print(f"  {what}: theirs {theirs[1]:.3f} ms, {', '.join(shown)}")
    for graph in last.get("graphs", []):
        print(f"  graph: {graph['launches']} launches, {graph['memory'] / 1e6:.0f} MB")


def agrees(row: dict[str, Any]) -> bool:
    if row["dtype"] != "float64":
        return True
    found = [*row["differences"].values()]
    if "captured" in row:
        found += [*row["captured"]["differences"].values(), row["captured"]["plain calls"]]
    return max(found) <= project_of(row["project"]).tolerance


def one(project: Project, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    commit = Checkout(arguments.path).commit() if arguments.path.is_dir() else None
    if commit is not None and commit != project.commit:
        print(f"warning: {project.name} was measured at {project.commit[:7]}, this is {commit[:7]}", file=sys.stderr)
    if arguments.diagnose:
        print(diagnose(project, arguments))
        return []
    rows = compare(project, arguments)
    report(project, rows)
    return rows


def every(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each project in its own process, because modules of different projects have the same names."""
    rows: list[dict[str, Any]] = []
    options = [f"--seconds={arguments.seconds}", *([f"--steps={arguments.steps}"] if arguments.steps else [])]
    for name in PROJECTS:
        project = project_of(name)
        if not (arguments.path / project.folder).exists():
            fetch(project.repository, project.commit, arguments.path / project.folder)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            command = [
                sys.executable,
                __file__,
                name,
                str(arguments.path / project.folder),
                f"--json={file}",
                *options,
            ]
            subprocess.run(command)
            if not file.exists():
                raise UnusableError(f"{name} was not compared")
            rows += json.loads(file.read_text())["rows"]
    return rows


def _check_captured(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    able = [name for name in PROJECTS if project_of(name).captured]
    if arguments.project not in able:
        parser.error(f"--device and --captured take one of these projects: {', '.join(able)}")
    if arguments.device != CPU and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: PyTorch finds no GPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=[*PROJECTS, "all"])
    parser.add_argument("path", type=Path, help="checkout of the project; for all, the folder with their checkouts")
    parser.add_argument("--steps", type=int, help="number of learner steps (default: the recipe's, in most recipes 20)")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds to time the loss, and again for the step")
    parser.add_argument("--json", type=harness.user_path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--diagnose",
        action="store_true",
        help="diagnose a step for CUDA graphs, only: the project's own, or with --captured ours",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: cpu)")
    parser.add_argument("--captured", action="store_true", help="also run our step as one CUDA graph")
    arguments = parser.parse_args()
    arguments.device = torch.device(arguments.device)
    if arguments.diagnose and (arguments.project == "all" or arguments.json):
        parser.error("--diagnose takes one project, and no --json")
    if arguments.captured or arguments.device != CPU:
        _check_captured(parser, arguments)
    torch.set_num_threads(1)
    try:
        rows = every(arguments) if arguments.project == "all" else one(project_of(arguments.project), arguments)
    except UnusableError as error:
        print(f"against.py: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"against.py: {arguments.project} imports {error.name}, which is not installed", file=sys.stderr)
        return 2
    if rows:
        harness.write(arguments.json, "clients", rows)
    return 0 if all(map(agrees, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
