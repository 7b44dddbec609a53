"""Writes the README's tables from the files under bench/results/, so that no figure is typed by hand.

python bench/readme.py            # write
python bench/readme.py --check    # fail when the README is not what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"


def load(name: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a benchmark, and a line that names the machine."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    machine = data["machine"]
    line = (
        f"{machine['cpu']}, {machine['threads']} threads, {machine['instruction set']}, PyTorch {machine['torch']}; "
        f"medians of one run, contestants taking turns (`bench/results/{name}.json`)."
    )
    return data["rows"], line


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


def loss_table() -> str:
    rows, machine = load("loss")
    lines = []
    for size, found in contestants_by_row(rows, "forward+backward").items():
        times = [f"{found[name]['median_ms']:.3f}" for name in ("fused", "torch.compile", "eager")]
        ratios = [f"{found[name]['ratio']:.1f}x" for name in ("torch.compile", "eager")]
        memory = [f"{found[name]['peak_mb']:.1f}" for name in ("fused", "torch.compile", "eager")]
        lines.append([size, *times, *ratios, " / ".join(memory)])
    header = ["forward + backward, ms", "fused", "torch.compile", "eager", "vs compile", "vs eager", "peak MB"]
    return table(header, lines) + "\n\n" + machine


def scale_gradient_table() -> str:
    rows, machine = load("scale_gradient")
    sizes = contestants_by_row(rows, "forward+backward")
    names = list(next(iter(sizes.values())))
    forward = next(iter(contestants_by_row(rows, "forward").values()))
    lines = [
        [
            f"`{name}`",
            f"{1e3 * forward[name]['median_ms']:.2f}",
            *(f"{1e3 * found[name]['median_ms']:.1f}" for found in sizes.values()),
        ]
        for name in names
    ]
    first = next(iter(sizes))
    header = ["µs", f"forward, {first}", *(f"fwd+bwd, {size}" for size in sizes)]
    return table(header, lines) + "\n\n" + machine


def rewritten(text: str) -> str:
    for name, make in (("loss", loss_table), ("scale_gradient", scale_gradient_table)):
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{make()}\n{end}{after}"
    return text


def main() -> int:
    text = README.read_text()
    wanted = rewritten(text)
    if "--check" in sys.argv:
        if text != wanted:
            print(
                "README.md: the tables are not those of bench/results/; run `python bench/readme.py`", file=sys.stderr
            )
        return int(text != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
