"""Trains with a project's own loss, and with ours as in the recipes of docs/coming_from.md, on the same data.

    python tools/against.py muzero-general PATH      # PATH: a checkout of the project
    python tools/against.py all FOLDER               # FOLDER/muzero-general, FOLDER/LightZero and so on
    python tools/against.py tdmpc2 PATH --diagnose   # only what a CUDA graph of the project's own step would get wrong

Projects that are not in FOLDER are fetched from GitHub, at the commit that was measured.

The project is imported from the checkout, which is not modified. Stubs replace imports that its loss does not need.
The recipe's lines replace the project's lines in a second copy of the module, in memory. Each copy has its own
optimizer. First every step begins with the same weights; then both take as many steps independently. This runs in
float64, where only rounding may differ, and in float32, where times are measured: medians of the CPU time of one
thread, while the two learners take turns. A difference is the largest difference of an element, divided by the largest
value of the project's own result. The exit status is 1 if a step in float64 differs by more than the recipe's
tolerance, 1e-10 for most.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]

import torch  # noqa: E402

import gradscale_ext as gs  # noqa: E402
import harness  # noqa: E402
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
}
DOUBLE = {"torch.float32": "torch.float64", '"float32"': '"float64"'}


def project_of(name: str) -> Project:
    return importlib.import_module(f"recipes.{PROJECTS[name]}").PROJECT


def checked(project: Project, folder: Path, texts: dict[str, str]) -> Checkout:
    """The checkout, or an error if it cannot be used."""
    if not (folder / project.marker).is_file():
        raise UnusableError(f"{folder} is not a checkout of {project.folder}: it has no {project.marker}")
    return Checkout(folder, project.roots, project.stand_ins, {**project.texts, **texts})


def compare(project: Project, folder: Path, steps: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each dtype: differences, and times in float32."""
    return [_dtype_record(project, folder, dtype, steps, seconds) for dtype in ("float64", "float32")]


def diagnose(project: Project, folder: Path) -> gs.CaptureDiagnosis:
    """What a CUDA graph of the project's own learner step would get wrong."""
    checkout = checked(project, folder, {})
    with checkout.importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(None):
            theirs, _ = project.sides(checkout)
        batches = [(project.batch(seed),) for seed in range(3)]
        return gs.diagnose_capture(theirs.step, batches, *theirs.modules, *theirs.optimizers)


def _dtype_record(project: Project, folder: Path, dtype: str, steps: int, seconds: float) -> dict[str, Any]:
    double = dtype == "float64"
    checkout = checked(project, folder, DOUBLE if double else {})
    with checkout.importable(), lockstep.double_precision(double), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(None):  # messages of the projects
            theirs, ours = project.sides(checkout)
        row: dict[str, Any] = {"project": project.name, "dtype": dtype, "steps": steps, "case": project.case}
        row["differences"] = lockstep.differences(ours, theirs, map(project.batch, range(steps)))
        row["differences"]["gradients of the loss alone"] = lockstep.difference_alone(ours, theirs)
        apart = lockstep.differences(ours, theirs, map(project.batch, range(steps)), together=False)
        row["apart"] = {name: apart[name] for name in ("gradients", "weights")}
        if not double:
            data = project.batch(0)
            whole = {"theirs": lambda: theirs.step(data), "ours": lambda: ours.step(data)}
            alone = {"theirs": theirs.loss, "ours": ours.loss}
            row["loss"], row["step"] = lockstep.times(alone, seconds), lockstep.times(whole, seconds)
            row["commit"] = checkout.commit()
            row["edits"] = [
                {"file": edit.file, "function": edit.function, "lines": checkout.lines_of(edit)}
                for edit in project.edits
            ]
    return row


def report(project: Project, rows: list[dict[str, Any]]) -> None:
    last = rows[-1]
    print(f"{project.name}: {project.case}; {last['steps']} steps on the same data")
    for edit in last["edits"]:
        print("  replaced: {file}, {function}, lines {lines[0]} to {lines[1]}".format(**edit))
    for row in rows:
        for what, title in (("differences", "each from the same weights"), ("apart", "on their own")):
            found = ", ".join(f"{name} {value:.1e}" for name, value in row[what].items())
            print(f"  {row['dtype']}, {title}: {found}")
    for name in ("loss", "step"):
        theirs, ours = (last[name][side] for side in ("theirs", "ours"))
        what = "loss alone" if name == "loss" else "whole step"
        print(f"  {what}: theirs {theirs:.3f} ms, ours {ours:.3f} ms, {theirs / ours:.2f} times as fast")


def agrees(row: dict[str, Any]) -> bool:
    return row["dtype"] != "float64" or max(row["differences"].values()) <= project_of(row["project"]).tolerance


def one(project: Project, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    commit = Checkout(arguments.path).commit() if arguments.path.is_dir() else None
    if commit is not None and commit != project.commit:
        print(f"warning: {project.name} was measured at {project.commit[:7]}, this is {commit[:7]}", file=sys.stderr)
    if arguments.diagnose:
        print(diagnose(project, arguments.path))
        return []
    rows = compare(project, arguments.path, arguments.steps or project.steps, arguments.seconds)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=[*PROJECTS, "all"])
    parser.add_argument("path", type=Path, help="checkout of the project; for all, the folder with their checkouts")
    parser.add_argument("--steps", type=int, help="number of learner steps (default: the recipe's, in most recipes 20)")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds to time the loss, and again for the step")
    parser.add_argument("--json", type=harness.user_path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--diagnose", action="store_true", help="diagnose the project's own step for CUDA graphs, only")
    arguments = parser.parse_args()
    if arguments.diagnose and (arguments.project == "all" or arguments.json):
        parser.error("--diagnose takes one project, and no --json")
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
