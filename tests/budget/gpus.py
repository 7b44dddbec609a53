"""Lower bounds on the time of a kernel's instructions and bytes on some GPUs.

The rates are published ones, not measured. Latencies, stalls and replays are not modelled, so these times are lower
bounds.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Warp instructions per clock and multiprocessor, by pipe; bandwidth of a copy, in bytes per second.

    "alu": integer sums, logic, shifts, comparisons, selects, minima, packing of halves; "fma": fp32, and integer
    products at half its rate ("imad"); "xu": ex2, rcp, sqrt, and conversions between integers, float and double; "lsu":
    128 bytes of loads or stores.
    """

    multiprocessors: int
    clock: float
    bandwidth: float
    fma: float
    fp64: float
    imad: float = 2
    alu: float = 2
    xu: float = 0.5
    shuffle: float = 1
    lsu: float = 1


GPUS = {
    "H200": Gpu(132, 1.755e9, 4.3e12, fma=4, fp64=2),
    "A100": Gpu(108, 1.41e9, 1.75e12, fma=2, fp64=1),
    "RTX 4090": Gpu(128, 2.5e9, 1.0e12, fma=4, fp64=1 / 16),
}
ISSUE = 4  # warp instructions per clock and multiprocessor
PIPES = [
    ("fma", r"F(ADD|MUL|FMA|FFMA|SWZADD)\b|FFMA32I|FADD32I|FMUL32I|HADD2|HFMA2|HMUL2"),
    ("imad", r"IMAD|IMUL"),
    ("fp64", r"D(ADD|MUL|FMA|SETP|MNMX)\b"),
    ("xu", r"MUFU|F2F\b|F2I|I2F|FRND|POPC|FLO|BREV|I2I"),
    ("shuffle", r"SHFL|REDUX|CREDUX"),
    ("lsu", r"LD|ST|ATOM|RED\b|CCTL"),
    ("uniform", r"U[A-Z]|R2UR|S2UR|VOTEU"),
    ("control", r"BRA|BSSY|BSYNC|EXIT|BAR|RET|CALL|NOP|WARPSYNC|BREAK|BRX|JMP|YIELD|MEMBAR|DEPBAR|BMOV|ERRBAR"),
    ("alu", r"."),
]


def pipes_of(opcodes: Counter[str]) -> Counter[str]:
    pipes: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        pipes[next(pipe for pipe, pattern in PIPES if re.match(pattern, opcode))] += count
    return pipes


def floors(opcodes: Counter[str], sectors: float, least_bytes: float, gpu: Gpu) -> dict[str, float]:
    """Minimum seconds of each pipe, the schedulers and the memory."""
    pipes = pipes_of(opcodes)
    pipes["fma"] += pipes["imad"]  # on the same pipe
    rate = gpu.multiprocessors * gpu.clock
    times = {"issue": sum(opcodes.values()) / ISSUE / rate}
    times |= {name: pipes[name] / getattr(gpu, name) / rate for name in ("fma", "imad", "alu", "fp64", "xu", "shuffle")}
    times["lsu"] = max(pipes["lsu"], sectors / 4) / rate
    times["memory"] = least_bytes / gpu.bandwidth
    return times


def resident_warps(registers: int, shared: int, threads: int) -> int:
    """Resident warps per multiprocessor of an H200, for registers per thread and bytes of shared memory per block."""
    warps = -(-threads // 32)
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // warps
    by_shared = 228 * 1024 // (-(-shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, 64 // warps, 32) * warps
