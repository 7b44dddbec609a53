"""Estimates of `make cuda-check`: machine code counts from PTX counts, loads in flight, occupancy and lower bounds."""

from __future__ import annotations

import struct
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "budget"))

import gpus
import sass

LISTING = """
//--------------------- .text.first --------------------------
.text.first:
	//## File ".nv_debug_ptx_txt", line 1
        /*0000*/                   EXIT ;
//--------------------- .text.kernel --------------------------
kernel:
.text.kernel:
	//## File ".nv_debug_ptx_txt", line 10
        /*0000*/                   S2R R1, SR_TID.X ;
	//## File ".nv_debug_ptx_txt", line 11
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
	//## File ".nv_debug_ptx_txt", line 20
        /*0020*/                   FADD R8, R4, R5 ;
	//## File ".nv_debug_ptx_txt", line 10
        /*0030*/                   FADD R9, R6, R7 ;
	//## File ".nv_debug_ptx_txt", line 20
        /*0040*/                   LDG.E.64 R4, desc[UR4][R2.64+0x10] ;
        /*0050*/                   LDG.E.64 R6, desc[UR4][R2.64+0x20] ;
        /*0060*/              @!P0 BRA `(.L_x_0) ;
	//## File ".nv_debug_ptx_txt", line 10
        /*0070*/                   EXIT ;
.L_x_1:
	//## File ".nv_debug_ptx_txt", line 20
        /*0080*/                   WARPSYNC.COLLECTIVE R1, `(.L_x_2) ;
.L_x_2:
        /*0090*/                   SHFL.BFLY R1, R1, 0x1, 0x1f ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3) ;
        /*00b0*/                   NOP;
"""
LINES = {10: 2, 11: 2, 20: 50}


def test_machine_code_counts_follow_the_ptx():
    blocks = sass.blocks_of(LISTING, "kernel")
    assert [len(block.instructions) for block in blocks] == [2, 5, 1]
    opcodes = {"S2R": 2, "LDG.E.128": 2, "FADD": 100, "LDG.E.64": 100, "BRA": 50, "EXIT": 2}
    assert sass.estimated(blocks, LINES) == opcodes


def test_loads_are_in_flight_until_their_use():
    blocks = sass.blocks_of(LISTING, "kernel")
    assert sass.in_flight(blocks, LINES) == 32 * 16
    assert sass.in_flight(blocks[:1], LINES) == 32 * 16
    assert sass.in_flight(blocks[1:], {20: 1}) == 32 * 16  # two loads of 8 bytes, used in the loop's next iteration
    assert sass.in_flight(sass.blocks_of(LISTING, "first"), {1: 1}) == 0


def cubin(section: bytes) -> bytes:
    """An ELF file of two sections: the names of both, and two lines of PTX."""
    names, ptx = section + b"\0", b"mov\0ret"
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 0)
    first = struct.pack("<IIQQQQIIQQ", len(section), 0, 0, 0, 192, len(names), 0, 0, 0, 0)
    second = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 192 + len(names), len(ptx), 0, 0, 0, 0)
    return bytes(header) + first + second + names + ptx


def test_ptx_in_a_cubin():
    assert sass.ptx_of(cubin(b".nv_debug_ptx_txt")) == b"mov\nret\0"
    with pytest.raises(ValueError, match="no PTX"):
        sass.ptx_of(cubin(b".text"))


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "warps"),
    [(32, 0, 128, 64), (80, 0, 128, 24), (64, 0, 256, 32), (255, 0, 256, 8), (32, 48 * 1024, 128, 16), (33, 0, 32, 32)],
)
def test_resident_warps(registers, shared, threads, warps):
    assert gpus.resident_warps(registers, shared, threads) == warps


def test_lower_bounds_follow_from_rates():
    opcodes = Counter({"FFMA": 80.0, "MUFU.EX2": 10.0, "DADD": 2.0, "IMAD.WIDE": 6.0, "LDG.E": 2.0})
    times = gpus.floors(opcodes, sectors=8, least_bytes=256, gpu=gpus.GPUS["RTX 4090"])
    clock = 128 * 2.5e9
    assert times["issue"] == pytest.approx(100 / 4 / clock)
    assert times["fma"] == pytest.approx(86 / 4 / clock)
    assert times["xu"] == pytest.approx(10 * 2 / clock)
    assert times["fp64"] == pytest.approx(2 * 16 / clock)
    assert times["lsu"] == pytest.approx(2 / clock)
    assert times["memory"] == pytest.approx(256e-12)
