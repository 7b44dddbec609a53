"""Compiles all kernels that have a budget, for each GPU generation, counts instructions, and fails above budget.

`make cuda-check` needs no GPU: NVRTC compiles, the simulated driver runs the PTX, nvdisasm prints the machine code. The
calls come from tests/budget/cases.py. They run on a simulated GPU with so few multiprocessors that each call's batch
fills it, and again with a batch of 256 on a simulated H200. Reported for each call: warp instructions per unit (a row,
16 bytes or 32 steps) of the executed PTX, and of the machine code as estimated by tests/budget/sass.py; 32-byte sectors
of memory, compared with the minimum; registers, resident warps per multiprocessor, and their bytes in flight; and the
resulting times for 1 GB of logits. These are counts, not measurements: lower bounds without latency.

A loss of several heads, such as DreamerV3's, has a kernel for its set of heads, which is only compiled. With --nvrtc,
the folder of another NVRTC, all kernels are compiled with it too, in a process of its own, for all GPUs or for each
--other-target, but their instructions are not counted.

Fails if a kernel spills registers on any GPU with any NVRTC, a kernel of several heads has too many registers, a call
exceeds its instruction budget, issuing takes more than its share of the memory time on an H200, too few bytes are in
flight, or fp64 is the limit on an RTX 4090. Writes bench/results/instructions.json with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "budget")]

from cases import CASES, MIXED, MULTIPROCESSORS, USUAL_BATCH, Case  # noqa: E402
from gpus import GPUS, floors, pipes_of, resident_warps  # noqa: E402
from registers import TARGETS  # noqa: E402

from gradscale_ext.cli.compile import kernels_of  # noqa: E402

Record = dict[str, Any]


def counted(driver: str, parts: list[str], multiprocessors: int, batch: int | None) -> dict[str, Record]:
    """The output of tests/budget/count.py for each case."""
    command = [sys.executable, str(ROOT / "tests/budget/count.py"), "--driver", driver, *parts]
    command += [] if batch is None else ["--batch", str(batch)]
    environment = os.environ | {"PTX_MULTIPROCESSORS": str(multiprocessors), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return {record["case"]: record for record in map(json.loads, done.stdout.splitlines())}


def agreement(launch: Record) -> dict[str, float]:
    """Ratio of machine instructions to PTX instructions, for opcodes that map one to one: a check of the estimate."""

    def sum_of(counts: dict[str, float], *names: str) -> float:
        return sum(count for opcode, count in counts.items() if opcode.startswith(names))

    pairs = {"shuffles": (("shfl", "redux"), ("SHFL", "REDUX")), "ex2": (("ex2",), ("MUFU.EX2",))}
    found = {
        what: (sum_of(launch["opcodes"], *ptx), sum_of(launch["sass"], *own)) for what, (ptx, own) in pairs.items()
    }
    return {what: own / ptx for what, (ptx, own) in found.items() if ptx}


def summary(case: Case, record: Record) -> Record:
    """The figures of a case, for the launch with the most instructions; other launches are listed."""
    units = record["units"]
    counted = lambda launch: (case.chain or "") in launch["name"]
    launches = sorted(record["launches"], key=lambda launch: (not counted(launch), -launch["warp_instructions"]))
    launch, others = launches[0], launches[1:]
    opcodes = Counter({opcode: count / units for opcode, count in launch["sass"].items()})
    warps = resident_warps(launch["registers"], launch["shared"], launch["block"])
    least = (launch["memory_loaded"] + launch["memory_stored"]) / units
    sectors = (launch["load_sectors"] + launch["store_sectors"]) / units
    per_gb = 1e9 / case.unit_bytes
    return {
        "unit": case.unit,
        "kernel": f"{launch['file']}: {launch['name']}",
        "grid": launch["grid"],
        "block": launch["block"],
        "ptx": launch["warp_instructions"] / units,
        "sass": sum(opcodes.values()),
        "budget": case.budget,
        "measured": case.measured,
        "agreement": agreement(launch),
        "pipes": dict(pipes_of(opcodes)),
        "opcodes": dict(opcodes.most_common(16)),
        "lanes": launch["lanes"],
        "divergent_branches": launch["divergent_branches"] / units,
        "shared_conflicts": launch["shared_conflicts"] / units,
        "sectors": {"loaded": launch["load_sectors"] / units, "stored": launch["store_sectors"] / units},
        "least_sectors": {
            "loaded": launch["memory_loaded"] / 32 / units,
            "stored": launch["memory_stored"] / 32 / units,
        },
        "registers": launch["registers"],
        "shared": launch["shared"],
        "warps": warps,
        "bytes_in_flight": warps * launch["in_flight"],
        "ms_for_1_GB": {
            name: {pipe: 1e3 * per_gb * time for pipe, time in floors(opcodes, sectors, least, gpu).items()}
            for name, gpu in GPUS.items()
        },
        "other_launches": [
            {
                "kernel": other["name"],
                "ptx": other["warp_instructions"] / units,
                "sass": sum(other["sass"].values()) / units,
            }
            for other in others
        ],
    }


def is_chosen(name: str, parts: list[str]) -> bool:
    return not parts or any(part in name for part in parts)


def complaints(case: Case, figures: Record) -> list[str]:
    """Failures of a case."""
    h200, rtx = figures["ms_for_1_GB"]["H200"], figures["ms_for_1_GB"]["RTX 4090"]
    part = h200["issue"] / h200["memory"]
    found = []
    if figures["sass"] > case.budget:
        found.append(f"{figures['sass']:.4g} instructions per {case.unit} exceed the budget of {case.budget}")
    if case.chain is not None:
        return [f"{case.name}: {text}" for text in found]
    if part > case.issue:
        found.append(f"issuing takes {part:.2f} of the memory time on an H200, which exceeds {case.issue}")
    if figures["bytes_in_flight"] < case.in_flight:
        found.append(f"only {figures['bytes_in_flight'] / 1e3:.1f} KB are in flight per multiprocessor")
    if rtx["fp64"] >= max(rtx.values()):
        found.append(f"fp64 is the limit on an RTX 4090: {rtx['fp64']:.2f} ms")
    for what, ratio in figures["agreement"].items():
        if abs(ratio - 1) > case.disagreement:
            found.append(f"the estimate is wrong: it has {ratio:.2f} times as many {what} as the PTX")
    return [f"{case.name}: {text}" for text in found]


def usual_complaints(case: Case, figures: Record) -> list[str]:
    """Failures of a case with a batch of USUAL_BATCH."""
    if case.usual is None or figures["sass"] <= case.usual:
        return []
    cost = f"{figures['sass']:.4g} instructions per {case.unit}"
    return [f"{case.name}, batch of {USUAL_BATCH}: {cost} exceed the budget of {case.usual}"]


def show(name: str, figures: Record) -> None:
    unit, sectors, least = figures["unit"], figures["sectors"], figures["least_sectors"]
    moved = ", ".join(f"{sectors[way]:.2f} sectors {way} (least {least[way]:.2f})" for way in sectors)
    print(f"\n{name}: {figures['kernel']}, {figures['grid']} blocks of {figures['block']}")
    print(
        f"    per {unit}: {figures['sass']:.4g} instructions ({figures['ptx']:.4g} of PTX; budget {figures['budget']})"
    )
    print(f"    {moved}; {figures['divergent_branches']:.2g} divergent branches")
    print("    machine code / PTX: " + ", ".join(f"{ratio:.3f} {what}" for what, ratio in figures["agreement"].items()))
    print(
        f"    {figures['registers']} registers, {figures['shared']} bytes shared, {figures['warps']} warps and "
        f"{figures['bytes_in_flight'] / 1e3:.0f} KB in flight per multiprocessor"
    )
    print(
        "    by pipe: "
        + "  ".join(f"{k} {v:.3g}" for k, v in sorted(figures["pipes"].items(), key=lambda item: -item[1]))
    )
    for gpu, times in figures["ms_for_1_GB"].items():
        most = max(times, key=times.__getitem__)
        print(f"    {gpu:8s} ms for 1 GB: " + "  ".join(f"{k} {v:.2f}" for k, v in times.items()) + f"  -> {most}")
    if figures["measured"]:
        print(f"    measured before: {figures['measured']}")
    for other in figures["other_launches"]:
        print(f"    also launched: {other['kernel']}: {other['sass']:.3g} instructions per {unit}")


def compiled(kernels: list[tuple[str, str]], jobs: int, targets: Sequence[str], nvrtc: Path | None) -> list[Record]:
    """The output of tests/budget/registers.py: registers, shared memory and spills of kernels on these GPUs."""
    command = [sys.executable, str(ROOT / "tests/budget/registers.py"), "--jobs", str(jobs), "--targets", *targets]
    command += [] if nvrtc is None else ["--nvrtc", str(nvrtc)]
    done = subprocess.run(command, input=json.dumps(kernels), stdout=subprocess.PIPE, text=True, check=True)
    records: list[Record] = json.loads(done.stdout)
    return records


def show_compiled(records: list[Record]) -> None:
    compiler, targets = records[0]["compiler"], list(dict.fromkeys(record["target"] for record in records))
    print(f"\nregisters / bytes of shared memory / bytes spilled with {compiler}, by " + ", ".join(targets))
    for k in range(0, len(records), len(targets)):
        cells = (f"{r['registers']}/{r['shared']}/{r['spilled']}" for r in records[k : k + len(targets)])
        print("    " + "  ".join(f"{cell:12s}" for cell in cells) + records[k]["kernel"])


def rounded(value: Any) -> Any:
    """The value, with its floats rounded to four significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="part of a case's name")
    parser.add_argument(
        "--driver", default=str(ROOT / ".venv/driver.so"), help="the simulated driver, built by make .venv/driver.so"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers that run at once")
    parser.add_argument(
        "--nvrtc", type=Path, action="append", default=[], metavar="FOLDER", help="another NVRTC to compile with"
    )
    parser.add_argument(
        "--other-target", action="append", choices=TARGETS, help="a GPU to compile for with --nvrtc, instead of all"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    with ThreadPoolExecutor(2) as pool:
        full = pool.submit(counted, options.driver, options.cases, MULTIPROCESSORS, None)
        usual = pool.submit(counted, options.driver, options.cases, 132, USUAL_BATCH)
        records, usual_records = full.result(), usual.result()
    cases = {case.name: case for case in CASES}
    results = {name: summary(cases[name], record) for name, record in records.items()}
    small = {name: summary(cases[name], record) for name, record in usual_records.items()}
    launches = [launch for record in [*records.values(), *usual_records.values()] for launch in record["launches"]]
    mixed = {case: kernels_of([case.make()]) for case in MIXED if is_chosen(case.name, options.cases)}
    kernels = sorted(
        {(launch["file"], launch["name"]) for launch in launches} | {kernel for own in mixed.values() for kernel in own}
    )
    by_compiler = [compiled(kernels, options.jobs, TARGETS, None)]
    by_compiler += [compiled(kernels, options.jobs, options.other_target or TARGETS, nvrtc) for nvrtc in options.nvrtc]
    target_kernels = [record for records in by_compiler for record in records]
    for name, figures in results.items():
        show(name, figures)
        few = small[name]
        print(f"    batch of {USUAL_BATCH} on an H200: {few['sass']:.4g} instructions, {few['grid']} blocks")
    for records in by_compiler:
        show_compiled(records)
    failures = [text for name, figures in results.items() for text in complaints(cases[name], figures)]
    failures += [text for name, figures in small.items() for text in usual_complaints(cases[name], figures)]
    failures += [
        f"{r['kernel']} spills {r['spilled']} bytes on {r['target']} with {r['compiler']}"
        for r in target_kernels
        if r["spilled"]
    ]
    for case, own in mixed.items():
        found = [r for r in target_kernels if (r["file"], r["kernel"]) in own]
        print(f"{case.name}: up to {max(r['registers'] for r in found)} registers (limit {case.registers})")
        failures += [
            f"{case.name}: {r['registers']} registers on {r['target']} with {r['compiler']} exceed {case.registers}"
            for r in found
            if r["registers"] > case.registers
        ]
    if options.json is not None:
        report = {"cases": results, f"batch of {USUAL_BATCH}": small, "kernels": target_kernels}
        options.json.write_text(json.dumps(rounded(report), indent=1) + "\n")
    compilers = " and ".join(records[0]["compiler"] for records in by_compiler)
    print(f"\ncuda-check: {len(results)} calls, {len(mixed)} losses of several heads, {len(kernels)} kernels for")
    print(f"{' '.join(TARGETS)} with {compilers}: {len(failures)} fail")
    print(*failures, sep="\n")
    return 1 if failures or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
