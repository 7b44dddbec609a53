"""Machine code of a kernel, and execution counts of its instructions, derived from counts of the PTX.

A cubin compiled with line information contains its PTX, and maps each machine instruction to a line of that PTX. The
counts of the executed PTX therefore give the number of times that each machine instruction would be issued. All
instructions of a basic block are issued equally often: the median over their lines is used, because some instructions
were moved from elsewhere.
"""

from __future__ import annotations

import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

SECTION = b".nv_debug_ptx_txt"
WIDTHS = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}


@dataclass(frozen=True)
class Instruction:
    """One instruction; `line` is its line in the PTX."""

    line: int
    text: str  # without the predicate

    @property
    def opcode(self) -> str:
        return self.text.split()[0].rstrip(";")


@dataclass
class Block:
    """A basic block."""

    labels: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)

    def issued(self, lines: dict[int, int]) -> float:
        return statistics.median(lines.get(i.line, 0) for i in self.instructions) if self.instructions else 0


def ptx_of(cubin: bytes) -> bytes:
    """The PTX in a cubin, as text with the line numbers that the cubin refers to."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections + size * k) for k in range(count)]
    text = headers[names][4]
    for name, _, _, _, offset, length, *_ in headers:
        if cubin[text + name :].startswith(SECTION + b"\0"):
            return cubin[offset : offset + length].replace(b"\0", b"\n") + b"\0"
    raise ValueError("the cubin has no PTX: it was compiled without line information")


def find_nvdisasm() -> str:
    """The path of nvdisasm, from the package nvidia-cuda-nvdisasm or from PATH."""
    for folder in map(Path, sys.path):
        for path in folder.glob("nvidia/cu1*/bin/nvdisasm*"):
            return str(path)
    path = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    if path is None:
        raise FileNotFoundError("no nvdisasm: python -m pip install nvidia-cuda-nvdisasm")
    return path


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [find_nvdisasm(), "-gp", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout


def blocks_of(text: str, entry: str) -> list[Block]:
    """Basic blocks of a kernel in the output of nvdisasm, without the slow paths after the kernel's end."""
    body = text[text.index(f".text.{entry}:\n") :].partition("\n//-----")[0]
    blocks, line, ended = [Block()], 0, False
    for row in body.splitlines()[1:]:
        if match := re.search(r'//## File "\.nv_debug_ptx_txt", line (\d+)', row):
            line = int(match[1])
        elif match := re.match(r"(\S+):", row):
            if match[1].startswith("$"):
                break  # a called function
            if ended or blocks[-1].instructions:
                blocks.append(Block())
            blocks[-1].labels.append(match[1])
            ended = False
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?;)", row):
            if ended:
                blocks.append(Block())
            instruction = Instruction(line, match[1])
            padding = not blocks[-1].instructions and goes_to(instruction) in blocks[-1].labels
            if padding or "WARPSYNC.COLLECTIVE" in match[1]:  # after the end: code for diverged lanes
                return blocks[:-1]
            if instruction.opcode != "NOP":
                blocks[-1].instructions.append(instruction)
            ended = re.match(r"BRA|BRX|EXIT|RET|JMP", instruction.opcode) is not None
    return blocks


def goes_to(instruction: Instruction) -> str | None:
    """The target label of a branch."""
    match = re.match(r"BRA.*`\((\.L_\w+)\)", instruction.text)
    return match[1] if match else None


def estimated(blocks: list[Block], lines: dict[int, int]) -> Counter[str]:
    """Issue count of each opcode, from the execution counts of the PTX lines."""
    result: Counter[str] = Counter()
    for block in blocks:
        times = block.issued(lines)
        for instruction in block.instructions:
            result[instruction.opcode] += times
    return result


# ---- Loads in flight -------------------------------------------------------------------------------------------------


def in_flight(blocks: list[Block], lines: dict[int, int]) -> int:
    """Maximum bytes that a warp has requested from global memory and not used yet, along the most executed path.

    Every loop is traversed twice, so that loads for the next iteration count.
    """
    run = [block for block in blocks if block.issued(lines) > 0]
    place = {label: index for index, block in enumerate(run) for label in block.labels}
    most, index = 0, 0
    pending: dict[int, int] = {}  # by register
    again = set()
    while index < len(run):
        for instruction in run[index].instructions:
            most = max(most, _step(instruction, pending))
        last = run[index].instructions[-1]
        back = place.get(goes_to(last) or "", len(run))
        if back <= index and index not in again:
            again.add(index)
            index = back
        else:
            index += 1
    return 32 * most


def _step(instruction: Instruction, pending: dict[int, int]) -> int:
    """Bytes in flight per lane after the instruction."""
    opcode, _, operands = instruction.text.partition(" ")
    registers = [int(number) for number in re.findall(r"\bR(\d+)\b", operands)]
    if not re.match(r"LDG?\b", opcode):
        for register in registers:
            pending.pop(register, None)
        return sum(pending.values())
    size = next((WIDTHS[part] for part in opcode.split(".") if part in WIDTHS), 4)
    for register in registers[1:]:
        pending.pop(register, None)
    if registers:
        for number in range(max(size // 4, 1)):
            pending[registers[0] + number] = min(size, 4)
    return sum(pending.values())
