// A launch, and its warps: every register has 32 lanes of 8 bytes.
#pragma once

#include "program.h"
#include "races.h"

#include <array>
#include <bit>
#include <unordered_map>

namespace ptx {

// The distinct sectors of 32 bytes that were accessed: one bit for each sector, in pages of 4 KiB.
struct Footprint {
  std::unordered_map<u64, std::array<u64, 2>> pages;
  std::array<u64, 2>* bits = nullptr; // of page `last`
  u64 last = 0;

  void add(u64 sector);
  u64 bytes() const;
};

// The counts of an instruction in a launch.
struct Counts {
  u64 issued = 0, lanes = 0, diverged = 0, sectors = 0, bytes = 0, conflicts = 0;
  u64 in_param = 0, in_shared = 0, in_local = 0; // accesses with generic addresses, by space
};

struct Launch {
  Kernel& kernel;
  Code& code;
  s64 blocks;
  unsigned threads;
  std::vector<char> parameters, shared;
  s64 block = 0;
  bool checks = false;        // fails if a register is read that was never written
  bool reverse = false;       // runs the last block and the last warp first
  u64 slice = 0;              // instructions that a warp runs before the next warp; 0: until a barrier or its return
  u64 limit = 0, left = 0;    // warp instructions after which the launch fails; those that are left
  std::vector<Counts> counts; // of each instruction; empty: not counted
  Footprint loaded, stored;
  std::unique_ptr<Races> races; // null: not checked

  bool counts_wanted() const {
    return !counts.empty();
  }
};

// Lanes that run together from instruction `pc` until they reach `meet`; -1: until they return.
struct Path {
  int pc, meet;
  u32 mask;
};

struct Warp {
  Launch* launch = nullptr;
  unsigned index = 0;
  u32 present = 0, alive = 0;
  std::vector<u64> registers;
  std::vector<u32> predicates;
  std::vector<u32> written; // for each register, the lanes that have written it; only with Launch::checks
  std::vector<Path> paths;
  std::vector<char> local; // [lane][bytes]
  bool waits = false;

  u64* lanes(u32 reg) {
    return registers.data() + static_cast<size_t>(reg) * 32;
  }
};

template <class T>
T get(Warp& w, u32 reg, int lane) {
  return value_of<T>(w.lanes(reg)[lane]);
}

template <class T>
void put(Warp& w, u32 reg, int lane, T value) {
  w.lanes(reg)[lane] = bits_of(value);
}

template <class F>
inline void each(u32 mask, F f) {
  if (mask == 0xffffffff) {
    for (int lane = 0; lane < 32; ++lane) {
      f(lane);
    }
  } else {
    for (; mask != 0; mask &= mask - 1) {
      f(std::countr_zero(mask));
    }
  }
}

// Runs all blocks. On an error, throws std::runtime_error with the names of the kernel and the instruction.
void run(Launch& launch);

// The counts of a launch, as one line of JSON.
string report(const Launch& launch, bool by_line, bool by_block);

[[noreturn]] void fail_at(const Warp& w, const Instruction& i, const string& message);

} // namespace ptx
