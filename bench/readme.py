"""Writes the tables of README.md and docs/ from the files under bench/results/, so that no figure is typed by hand, and
checks that the pictures were drawn from these files.

A table is between two markers, in one of these files:

    <!-- table: loss -->
    <!-- end: loss -->

python bench/readme.py            # write
python bench/readme.py --check    # fail if a table or a picture differs from the results
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "bench" / "results"


def load(name: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a benchmark, and a line that describes the machine."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    line = f"{described(data['machine'])}; medians of one run, timed alternately (`bench/results/{name}.json`)."
    return data["rows"], line


def described(machine: dict[str, str]) -> str:
    threads = "1 thread" if machine["threads"] == "1" else f"{machine['threads']} threads"
    return f"{machine['cpu']}, {threads}, {machine['instruction set']}, PyTorch {machine['torch']}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def contestants_by_row(rows: list[dict[str, Any]], wanted: str) -> dict[str, dict[str, dict[str, Any]]]:
    by_size: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["pass"] == wanted:
            by_size.setdefault(row["size"], {})[row["contestant"]] = row
    return by_size


def cells(found: dict[str, dict[str, Any]], microseconds: bool = False) -> list[str]:
    """Times of our loss, the compiled one and the eager one, and the speedup over the faster of the last two."""
    medians = [found[name]["median_ms"] for name in ("fused", "torch.compile", "eager")]
    times = [
        f"{1e3 * median:.1f}" if microseconds else f"{median:.3f}" if median >= 0.02 else f"{median:.4f}"
        for median in medians
    ]
    faster = min(("torch.compile", "eager"), key=lambda name: found[name]["median_ms"])
    return [*times, f"{found[faster]['ratio']:.1f}x ({faster.removeprefix('torch.')})"]


def doors_table() -> str:
    """The ways to call the loss, and the module with other instruction sets, each compared with the module."""
    rows, machine = load("loss")
    own = [row for row in rows if row["agent"] == "doors of the loss"]
    capability = json.loads((RESULTS / "loss.json").read_text())["machine"]["instruction set"]
    sizes = contestants_by_row(own, "forward+backward")
    lines = []
    for size, found in sizes.items():
        for name, row in found.items():
            called = DOORS[name] + (f", {capability}" if name == "module" else "")
            lines.append([called, size, f"{row['median_ms']:.3f}", f"{row['ratio']:.2f}"])
    return table(["call", "size", "forward + backward, ms", "relative to the module"], lines) + "\n\n" + machine


def parts_table() -> str:
    """What the time of a small batch consists of, in microseconds."""
    rows, machine = load("loss")
    own = contestants_by_row([row for row in rows if row["agent"] == "parts of a small batch"], "parts")
    names = list(next(iter(own.values())))
    lines = [[size, *(f"{1e3 * found[name]['median_ms']:.0f}" for name in names)] for size, found in own.items()]
    shown = {"autograd alone": "autograd alone, a view of each prediction"}
    return table(["µs", *(shown.get(name, name) for name in names)], lines) + "\n\n" + machine


#: The call of each contestant of bench/doors.py.
DOORS = {
    "module": "`gs.MultiStepLoss(...)(...)`",
    "function": "`gs.multi_step_loss(...)`",
    "module in torch.compile": "`torch.compile(gs.MultiStepLoss(...))`",
    'module, impl="compiled"': '`gs.MultiStepLoss(...)(..., impl="compiled")`',
    "reference in torch.compile": "`gs.reference.multi_step_loss(...)` in `torch.compile`, all outputs used",
    'module, impl="reference"': '`gs.MultiStepLoss(...)(..., impl="reference")`',
    "module with AVX2": "`gs.MultiStepLoss(...)(...)` in a process of its own, AVX2",
    "module with AVX-512": "`gs.MultiStepLoss(...)(...)` in a process of its own, AVX512",
    "by hand, torch.compile": "the loss written by hand, in `torch.compile`",
    "by hand, eager": "the loss written by hand, eager",
}

CELLS = ["fused", "torch.compile", "eager", "vs the faster"]


def speed_rows() -> dict[str, dict[str, dict[str, Any]]]:
    """Rows for the README: losses of two agents, heads of a third, the costliest head, and decoding for acting."""
    loss, heads = load("loss")[0], load("heads")[0]
    threads = max(row["threads"] for row in loss)
    dreamer = "reward, critic and continue heads of DreamerV3"
    wanted = {
        "loss of MuZero": "B 256 K 5 S 601 A 18",
        "loss of TD-MPC2": "B 256 H 3 S 101",
        dreamer: "B 16 T 64 S 255",
    }
    rows = {}
    for name, size in wanted.items():
        agent = name.removeprefix("loss of ")
        own = [row for row in loss if (row["agent"], row["dtype"], row["threads"]) == (agent, "fp32", threads)]
        rows[f"{name}: {size}"] = contestants_by_row(own, "forward+backward")[size]
    rows["`HLGauss` head alone: B 1024"] = contestants_by_row(heads, "forward+backward")["HLGauss"]
    rows["`Support.decode`, 601 bins: B 64"] = contestants_by_row(heads, "decode")["B 64"]
    return rows


def speed_table() -> str:
    called = {"`HLGauss` head alone: B 1024": "module", "`Support.decode`, 601 bins: B 64": "method"}
    lines = [[name, called.get(name, "module"), *cells(found)] for name, found in speed_rows().items()]
    found = returns_rows()[1, "GAE 4096 x 128", 0.01]
    lines.append(
        [
            "generalized advantages, B 4096 T 128, one thread",
            "function",
            f"{found['ours']['median_ms']:.3f}",
            "",
            f"{found['loop']['median_ms']:.3f}",
            f"{min(row['ratio'] for name, row in found.items() if name.startswith('TorchRL')):.1f}x (TorchRL)",
        ]
    )
    sources = {"Losses of agents": "loss", "Head and decoding": "heads", "Advantages": "returns"}
    measured = " ".join(f"{what}: {machine_of(file)}" for what, file in sources.items())
    header = ["ms, forward + backward; decoding and advantages: forward", "what is called", *CELLS]
    return table(header, lines) + "\n\n" + measured


def loss_table() -> str:
    """fp32 with all threads, by agent, smallest batch first; with our time relative to a copy."""
    rows, machine = load("loss")
    threads = max(row["threads"] for row in rows)
    lines = []
    for agent in dict.fromkeys(row["agent"] for row in rows):
        own = [row for row in rows if (row["agent"], row["dtype"], row["threads"]) == (agent, "fp32", threads)]
        for size, found in contestants_by_row(own, "forward+backward").items():
            if "fused" not in found:  # the entry points of the loss
                continue
            memory = [f"{found[name]['peak_mb']:.1f}" for name in ("fused", "torch.compile", "eager")]
            over_copy = f"{found['fused']['over_copy']:.1f}"
            lines.append([f"{agent}: {size}", *cells(found), over_copy, " / ".join(memory)])
    header = ["forward + backward, ms", *CELLS, "fused / copy", "peak MB"]
    return table(header, lines) + "\n\n" + machine


def variations_table() -> str:
    """bf16, and one thread, compared with the same sizes in fp32 with all threads."""
    rows, machine = load("loss")
    varied = dict.fromkeys(row["size"] for row in rows if row["dtype"] == "bf16")
    lines = []
    for size in varied:
        for dtype, threads in dict.fromkeys((row["dtype"], row["threads"]) for row in rows if row["size"] == size):
            own = [row for row in rows if (row["size"], row["dtype"], row["threads"]) == (size, dtype, threads)]
            found = contestants_by_row(own, "forward+backward")[size]
            lines.append([size, dtype, str(threads), *cells(found)])
    return table(["forward + backward, ms", "dtype", "threads", *CELLS], lines) + "\n\n" + machine


def policies_table() -> str:
    rows, machine = load("policy_losses")
    lines = [[size, *cells(found)] for size, found in contestants_by_row(rows, "forward+backward").items()]
    return table(["PPO with its value, forward + backward, ms", *CELLS], lines) + "\n\n" + machine


def heads_table(wanted: str, header: str) -> str:
    rows, machine = load("heads")
    microseconds = header.endswith("µs")
    lines = [[size, *cells(found, microseconds)] for size, found in contestants_by_row(rows, wanted).items()]
    return table([header, *CELLS], lines) + "\n\n" + machine


def flow_table() -> str:
    rows, machine = load("flow")
    blocks = []
    for operator in ("scale_gradient", "clip_gradient_norm"):
        own = [row for row in rows if row["operator"] == operator]
        sizes = contestants_by_row(own, "forward+backward")
        forward = next(iter(contestants_by_row(own, "forward").values()))
        first, last = next(iter(sizes)), list(sizes)[-1]
        lines = [
            [
                f"`{name}`",
                significant(1e3 * forward[name]["median_ms"]) if name in forward else "",
                *(significant(1e3 * found[name]["median_ms"]) for found in sizes.values()),
                f"{sizes[last][name]['peak_mb']:.0f}",
            ]
            for name in sizes[first]
        ]
        header = ["forward + backward, µs", f"{first}, forward", *sizes, f"peak MB, {last}"]
        blocks.append(table(header, lines))
    return "\n\n".join([*blocks, machine])


def in_code(text: str) -> str:
    """Names that end in an underscore as code. Between two of them Markdown reads emphasis."""
    return re.sub(r"[\w.]*(?:_foreach_|clip_grad_)\w+", r"`\g<0>`", text)


def ours_and_others(name: str) -> str:
    """Our times, and the other contestants' with ratios to ours. If a size has several rows, the last one is shown."""
    rows, machine = load(name)
    lines = []
    for what in dict.fromkeys(row["pass"] for row in rows):
        for size, found in contestants_by_row(rows, what).items():
            own, *others = found.items()
            compared = (f"{in_code(other)} {row['median_ms']:.2f} ({row['ratio']:.1f}x)" for other, row in others)
            lines.append([f"{what}: {size}", f"{own[1]['median_ms']:.2f}", ", ".join(compared)])
    return table(["ms", "ours", "others"], lines) + "\n\n" + machine


def monitor_table() -> str:
    """Time of a training step, and the costs of monitoring it, each relative to the plain loop of the same run."""
    rows, machine = load("monitor")
    watched = ["every=100", "every=1, histograms", "usual way"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        found = {row["contestant"]: row for row in reversed(rows) if row["model"] == model}
        parameters = f"{found['without']['parameters'] / 1e6:.1f} M parameters"
        costs = (f"{found[name]['cost_percent']:+.1f} %" for name in watched)
        lines.append([f"{model}; {parameters}", f"{found['without']['median_ms']:.0f} ms", *costs])
    header = ["", "step", "`every=100`", "`every=1`, histograms", "`norm().item()` and `add_histogram` by hand"]
    return table(header, lines) + "\n\n" + machine


def actors_table() -> str:
    """Transitions per second of the example agent with several actors on Ray."""
    data = json.loads((RESULTS / "actors.json").read_text())
    rows, machine = data["rows"], data["machine"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    rates = {(row["actors"], row["mode"]): f"{row['median_per_s']:.0f}" for row in rows}
    actors = dict.fromkeys(row["actors"] for row in rows)
    lines = [[str(n) if n else "none, one process", *(rates[n, mode] for mode in modes)] for n in actors]
    measured = (
        f"{machine['cpu']}, {machine['cores']} cores, other processes' load {rows[0]['load_before']:.1f}, PyTorch "
        f"{machine['torch']}; medians, timed alternately (`bench/results/actors.json`)."
    )
    return table(["actors", *modes], lines) + "\n\n" + measured


def curves_table(name: str) -> str:
    """What an example has learned at the end of each run, the agent's own result first."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    lines = []
    for row in data["rows"]:
        agent, other = row["evaluation"].values()
        compared = f"{other['mean']:.4g} ({'random play' if row['players'] == 1 else 'second player'})"
        counts = [f"{row[name]:,}" for name in ("environment_steps", "learner_steps", "processor_s")]
        run = f"{row['title']}, seed {row['seed']}" + (", solved" if row["solved"] else "")
        lines.append([run, f"{agent['mean']:.4g}", compared, *counts])
    header = ["game", "mean return", "compared with", "steps of the game", "learner steps", "processor, s"]
    games = {row["title"]: next(iter(row["evaluation"].values()))["episodes"] for row in data["rows"]}
    episodes = ", ".join(f"{title} {number}" for title, number in games.items())
    measured = (
        f"Mean returns of the evaluation, in episodes: {episodes}. {described(data['machine'])}; one run for each row "
        f"(`bench/results/{name}.json`)."
    )
    return table(header, lines) + "\n\n" + measured


def matrix_table() -> str:
    """By context, the ways of changing a gradient that raise, and the ones that are wrong without an error."""
    everything = json.loads((RESULTS / "matrix.json").read_text())
    names = list(dict.fromkeys(name for verdicts in everything.values() for name in verdicts))
    contexts = list(next(iter(everything.values()))[names[0]])

    def found(context: str, verdict: str) -> str:
        """Names with this verdict, and the versions of PyTorch unless all of them agree."""
        cells = []
        for name in names:
            judged = {version: row[name].get(context) for version, row in everything.items() if name in row}
            versions = [version for version, judgement in judged.items() if judgement == verdict]
            if versions:
                cells.append(f"`{name}`" + (f" ({' '.join(versions)})" if len(versions) < len(judged) else ""))
        return ", ".join(cells)

    rows = {context: [found(context, "error"), found(context, "wrong")] for context in contexts}
    lines = [[context, *cells] for context, cells in rows.items() if any(cells)]
    right = ", ".join(context for context, cells in rows.items() if not any(cells))
    versions = ", ".join(everything)
    later = [name for name in names if any(name not in verdicts for verdicts in everything.values())]
    if later:
        judged = ", ".join(version for version, verdicts in everything.items() if later[0] in verdicts)
        versions += f", for {', '.join(f'`{name}`' for name in later)} {judged}"
    caption = f"All are right in these contexts: {right}. PyTorch {versions}, CPU (`bench/results/matrix.json`)."
    return table(["context", "raises", "wrong"], lines) + "\n\n" + caption


#: Contestants of bench/gpu.py by column: the fastest of the names that were measured, and its time in a CUDA graph.
GPU_COLUMNS = {
    "fused": ("fused",),
    "torch.compile": ("torch.compile", "torch.compile reduce-overhead", "torch.compile max-autotune"),
    "eager": ("eager",),
}


def gpu_table(is_wanted: Callable[[dict[str, Any]], bool]) -> str:
    """The loss on the GPUs that were measured. Where a size was measured with one set of inputs and with several, which
    do not stay in the cache, the several are shown."""
    blocks = []
    for path in sorted(RESULTS.glob("nvidia-*.json")):
        data = json.loads(path.read_text())
        cases: dict[tuple[str, ...], dict[str, float]] = {}
        for row in data["rows"]:
            if row["group"] == "loss" and is_wanted(row):
                case = cases.setdefault((row["size"], row["dtype"], row["pass"]), {})
                case.setdefault(row["contestant"], row["median_ms"])
        lines = []
        for what, case in cases.items():
            times = []
            for column, names in GPU_COLUMNS.items():
                call = min((case[name] for name in names if name in case), default=None)
                pair = (call, case.get(f"{column}, CUDA graph"))
                times.append("" if pair == (None, None) else " / ".join(significant(t) if t else "–" for t in pair))
            lines.append([", ".join(what), *times, significant(case["device copy"])])
        machine = data["machine"]
        measured = (
            f"{machine['gpu']}, PyTorch {machine['torch']}, gradscale_ext {machine['gradscale_ext']}; medians of one "
            f"run, timed alternately; `torch.compile` in its fastest measured mode (`bench/results/{path.name}`)."
        )
        header = ["call / CUDA graph, ms", *GPU_COLUMNS, "copy of the bytes"]
        blocks.append(table(header, lines) + "\n\n" + measured)
    return "\n\n".join(blocks)


def for_readme(row: dict[str, Any]) -> bool:
    is_small = row["size"] in ("B 256 K 5 S 601 A 18", "B 1024 K 5 S 601 A 362")
    return is_small and row["pass"] == "forward+backward" and row["dtype"] == "fp32"


def by_project() -> tuple[dict[str, dict[str, dict[str, Any]]], str]:
    """Results of tools/against.py, by project and dtype. A row with a machine was measured there."""
    rows, machine = load("clients")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["project"], {})[row["dtype"]] = row
    elsewhere: dict[str, list[str]] = {}
    for project, by_dtype in found.items():
        if "machine" in by_dtype["float32"]:
            elsewhere.setdefault(described(by_dtype["float32"]["machine"]), []).append(project)
    machine = " ".join([machine, *(f"{', '.join(projects)}: {other}." for other, projects in elsewhere.items())])
    return found, machine.replace("1 threads", "1 thread").replace(
        "medians of one run, timed alternately", "medians, timed alternately"
    )


def recipes_table() -> str:
    """Times of other projects' own losses and of ours as a replacement."""
    found, machine = by_project()
    lines = []
    for name, rows in found.items():
        row = rows["float32"]
        times = (significant(row[what][side]) for what in ("loss", "step") for side in ("theirs", "ours"))
        ratios = [f"{row[what]['theirs'] / row[what]['ours']:.2f}x" for what in ("loss", "step")]
        theirs, ours, whole, our_whole = times
        lines.append(
            [f"{name} `{row['commit'][:7]}`: {row['case']}", theirs, ours, ratios[0], whole, our_whole, ratios[1]]
        )
    header = ["CPU time, ms", "loss alone: theirs", "ours", "", "whole step: theirs", "ours", ""]
    return table(header, lines) + "\n\n" + machine


def numbers_list() -> str:
    """The numbers that README begins with."""
    found = speed_rows()["loss of MuZero: B 256 K 5 S 601 A 18"]
    ours, *_, ratio = cells(found)
    gpu = json.loads((RESULTS / "nvidia-h200.json").read_text())
    case: dict[str, float] = {}
    for row in filter(for_readme, gpu["rows"]):
        if row["group"] == "loss" and row["size"] == "B 256 K 5 S 601 A 18":
            case.setdefault(row["contestant"], row["median_ms"])
    names = ("fused", "eager, CUDA graph", "torch.compile, CUDA graph", "fused, CUDA graph")
    fused, eager_graph, compiled_graph, graph = (significant(case[name]) for name in names)
    projects = [rows["float32"]["step"] for rows in by_project()[0].values()]
    gains = [step["theirs"] / step["ours"] for step in projects]
    install = json.loads((RESULTS / "install.json").read_text())
    return "\n".join(
        [
            f"- MuZero's loss on a CPU, forward and backward: {ours} ms, {ratio.split('x')[0]} times as fast as the "
            "faster of `torch.compile` and eager PyTorch.",
            f"- The same on a GPU: {fused} ms, and {graph} ms in a CUDA graph, in which `torch.compile` takes "
            f"{compiled_graph} ms and eager PyTorch {eager_graph} ms ({gpu['machine']['gpu']}, measured with version "
            f"{gpu['machine']['gradscale_ext']}).",
            f"- Whole learner steps of {len(gains)} projects on a CPU, with our loss in place of theirs: "
            f"{min(gains):.2f} to {max(gains):.1f} times as fast, half of them below {statistics.median(gains):.2f}, "
            "depending on the network's share.",
            f"- `pip install .` compiles for {install['rows'][0]['seconds'] / 60:.1f} minutes on "
            f"{install['machine']['cores']} cores of an {install['machine']['cpu'].partition(' (')[0]}.",
        ]
    )


def significant(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def returns_rows() -> dict[tuple[int, str, float], dict[str, dict[str, Any]]]:
    """Contestants by threads, size and fraction of transitions that end an episode."""
    found: dict[tuple[int, str, float], dict[str, dict[str, Any]]] = {}
    for row in load("returns")[0]:
        found.setdefault((row["threads"], row["size"], row["ends"]), {})[row["contestant"]] = row
    return found


def fastest(found: dict[str, dict[str, Any]], start: str | tuple[str, ...]) -> dict[str, Any] | None:
    """The fastest contestant whose name has this prefix, or one of these."""
    rows = [row for name, row in found.items() if name.startswith(start)]
    return min(rows, key=lambda row: row["median_ms"], default=None)


def returns_table() -> str:
    lines = []
    for (threads, size, ends), found in returns_rows().items():
        others = []
        for start in ("copy", "TorchRL", "loop", ("NumPy", "three calls")):
            row = fastest(found, start)
            others.append(f"{significant(row['median_ms'])} ({significant(row['ratio'])}x)" if row else "")
        with_ends = f", {ends:.0%} of steps terminate, {ends:.0%} are truncated" if ends else ""
        lines.append([size + with_ends, str(threads), significant(found["ours"]["median_ms"]), *others])
    header = ["ms", "threads", "ours", "copy of the bytes", "TorchRL's faster form", "Python loop"]
    return table([*header, "NumPy windows, or three calls of `n_step_returns`"], lines) + "\n\n" + machine_of("returns")


def machine_of(name: str) -> str:
    """The machine of a file of results; each row of returns has its own number of threads."""
    machine = load(name)[1]
    return machine.replace("2 threads, ", "") if name == "returns" else machine


def small(pair: Iterable[float | None]) -> str:
    return " / ".join(f"{value:.0e}" if value else "0" for value in pair if value is not None)


def recipes_differences_table() -> str:
    """Difference between our result and theirs after a step, relative to their largest value."""
    found, _ = by_project()
    named = ["loss", "gradients", "weights", "priorities", "gradients of the loss alone"]
    lines = []
    for name, rows in found.items():
        step_differences = [
            [rows[dtype]["differences"].get(what) for dtype in ("float64", "float32")] for what in named
        ]
        apart = [rows[dtype]["apart"]["weights"] for dtype in ("float64", "float32")]
        lines.append([name, str(rows["float32"]["steps"]), *map(small, [*step_differences, apart])])
    header = ["float64 / float32", "steps", *named, "weights after all steps, each on its own"]
    return table(header, lines)


def ranks_table() -> str:
    """A learner step on several processes, part by part, and the messages it sends."""
    found = json.loads((RESULTS / "ranks.json").read_text())
    rows = found["measured"].values()
    lines = []
    for part in ("forward", "loss", "backward", "clip", "optimizer", "step"):
        lines.append([f"{part}, ms", *(f"{row['milliseconds'][part]:.1f}" for row in rows)])
    for sent, name in (("loss", "the loss"), ("gradients", "gradients"), ("clip", "statistics")):
        messages = (row["messages"][sent] for row in rows)
        lines.append([f"messages of {name}", *(f"{len(sizes)}: {sum(sizes):,} B" for sizes in messages)])
    header = ["processes", *found["measured"]]
    first, machine = found["measured"]["1"], found["machine"]
    complete = first["milliseconds"]["first bucket complete"] / first["milliseconds"]["backward"]
    caption = (
        f"{first['parameters']:,} parameters in {first['tensors']} tensors, {found['batch of a rank']} samples a "
        f"process; {machine['cpu']}, {machine['cores']} cores, one thread a process, gloo (`bench/results/ranks.json`)."
        f" The first of the {len(first['messages']['gradients'])} buckets of gradients is complete after "
        f"{100 * complete:.0f} % of the backward pass."
    )
    return table(header, lines) + "\n\n" + caption


def hosts_table() -> str:
    """Two hosts with links of several speeds: the gradients' all-reduce, and the extra time of a step."""
    found = json.loads((RESULTS / "hosts.json").read_text())
    alone = found["alone"]["milliseconds"]["step"]
    lines = []
    for link in found["links"]:
        measured = link["measured"]
        sent = 8e-6 * sum(measured["messages"]["gradients"]) / link["gigabits"]
        step = measured["milliseconds"]["step"]
        times = (sent, measured["all_reduce_ms"]["gradients"], step, step - alone)
        lines.append([f"{link['gigabits']:g}", *(f"{time:.1f}" for time in times)])
    header = [
        "link, Gbit/s",
        "gradients over bandwidth, ms",
        "all-reduce alone, ms",
        "step, ms",
        "more than one process, ms",
    ]
    caption = (
        f"The network of the first table, whose step takes one process {alone:.1f} ms; {found['machine']['cpu']}, "
        f"{found['machine']['cores']} cores, one thread a process, gloo (`bench/results/hosts.json`)."
    )
    return table(header, lines) + "\n\n" + caption


def captured_step_table() -> str:
    """What a captured step adds to the replay of its graph, on the host."""
    rows, machine = load("captured_step")
    header = ["parameters", "guards, µs", "whole call, without replay and copies, µs", "audit, ms", "plain step, ms"]
    lines = [
        [f"{row['parameters']:,}", f"{row['guards_us']:.1f}", f"{row['call_us']:.1f}"]
        + [f"{row[kind] / 1e3:.1f}" for kind in ("audit_us", "plain_us")]
        for row in rows
    ]
    caption = f"{rows[0]['audits_in_10000_calls']} of the first 10,000 replays are audited."
    return table(header, lines) + "\n\n" + caption + "\n\n" + machine


TABLES: dict[str, Callable[[], str]] = {
    "captured step": captured_step_table,
    "curves": lambda: curves_table("curves"),
    "curves of PPO": lambda: curves_table("ppo"),
    "recipes": recipes_table,
    "recipes, differences": recipes_differences_table,
    "speed": speed_table,
    "GPU": lambda: gpu_table(for_readme),
    "GPU, all": lambda: gpu_table(lambda row: True),
    "doors": doors_table,
    "small batches": parts_table,
    "numbers": numbers_list,
    "returns": returns_table,
    "loss": loss_table,
    "loss, variations": variations_table,
    "heads": lambda: heads_table("forward+backward", "B 1024, forward + backward, µs"),
    "policies": policies_table,
    "C51": lambda: heads_table("C51", "51 bins, µs"),
    "decode": lambda: heads_table("decode", "601 bins, µs"),
    "matrix": matrix_table,
    "gradients": lambda: ours_and_others("gradients"),
    "parameters": lambda: ours_and_others("parameters"),
    "monitor": monitor_table,
    "actors": actors_table,
    "ranks": ranks_table,
    "ranks, hosts": hosts_table,
    "flow": flow_table,
}


#: Pictures under bench/results/, and what they are drawn from.
PICTURES: dict[str, Callable[[], Any]] = {
    "speed": speed_rows,
    "loss": lambda: load("loss"),
    "learning": lambda: load("curves"),
    "learning_ppo": lambda: load("ppo"),
}


def source_of(picture: str) -> str:
    """A mark of the results that a picture is drawn from. bench/plot.py writes it into the picture."""
    return "results " + hashlib.sha256(json.dumps(PICTURES[picture]()).encode()).hexdigest()[:16]


MARKED = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end: \2 -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """The text with each table regenerated from the results."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text)


def main() -> int:
    texts = {page: page.read_text() for page in PAGES}
    shown = [found[2] for text in texts.values() for found in MARKED.finditer(text)]
    if sorted(shown) != sorted(TABLES):
        print(f"each of {sorted(TABLES)} must be shown once, but the pages show {sorted(shown)}", file=sys.stderr)
        return 1
    outdated = {page: rewritten(text) for page, text in texts.items() if text != rewritten(text)}
    for page, text in outdated.items():
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)}: the tables differ from bench/results/; run `python bench/readme.py`")
        else:
            page.write_text(text)
    if "--check" not in sys.argv:
        return 0
    pictures = [name for name in PICTURES if source_of(name) not in (RESULTS / f"{name}.svg").read_text()]
    for name in pictures:
        print(f"bench/results/{name}.svg was not drawn from these results; run `python bench/plot.py`")
    return int(bool(outdated or pictures))


if __name__ == "__main__":
    sys.exit(main())
