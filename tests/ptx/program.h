// A loaded module of PTX: its text, its kernels, and the instructions of the kernels that were used recently.
#pragma once

#include "types.h"

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace ptx {

// The classes in which instructions are counted.
enum Class {
  fp32,
  fp32_other,
  fp64,
  fp64_other,
  half_,
  division,
  special,
  integer,
  logic,
  compare,
  convert,
  move,
  shuffle,
  vote,
  barrier,
  fence,
  atomic,
  global_load,
  global_store,
  shared_load,
  shared_store,
  local_load,
  local_store,
  param_load,
  const_load,
  control,
  num_classes
};

enum class Space { generic, global, shared, local, param, constant };
enum class Flow { none, branch, table, ret, bar, trap };

struct Warp;
struct Instruction;

// Runs an instruction on the lanes of a mask.
using Run = void (*)(Warp&, const Instruction&, u32 mask);

struct Instruction {
  Run run = nullptr;
  u32 d[8] = {}, s[8] = {}; // registers written and read; s holds predicates if `type` is pred
  u32 p[3] = {};            // predicates written (0, 1), and read (2)
  s64 offset = 0;
  string_view text;
  Class kind = move;
  Flow flow = Flow::none;
  Space space = Space::generic;
  Type type = Type::none, from = Type::none;
  int guard = -1;             // predicate of the lanes that run the instruction; -1: all lanes
  int target = -1, meet = -1; // of a branch: its target, and where divergent lanes reconverge (-1: at the exit)
  int table = -1;             // index in Code::tables
  int block = 0;
  u32 used = 0, used_end = 0; // range in Code::used
  s8 count = 1;               // elements of a vector
  s16 mode = 0, variant = 0;  // mode: rounding, or how predicates are combined
  bool atomic = false, acquires = false, releases = false, within_block = false, read_only = false; // of accesses
  bool guard_not = false, has_p1 = false, p2_not = false, integral = false, sat = false, ftz = false;
};

// Variables in shared memory, with guard zones around each.
struct SharedMemory {
  static constexpr size_t kGuard = 1024; // a multiple of the banks' 128 bytes

  struct Array {
    size_t begin, bytes;
  };

  std::vector<Array> arrays;
  size_t used = 0; // without guard zones

  u64 add(size_t bytes, size_t alignment); // returns the offset of the new array
  size_t extent() const {
    return used + (arrays.size() + 1) * kGuard;
  }
};

// Instructions of a kernel.
struct Code {
  std::vector<Instruction> instructions;
  std::vector<std::vector<int>> tables;   // targets of brx
  std::vector<u32> used;                  // 2 * register for each read, 2 * register + 1 for each write
  std::unordered_map<u64, u32> constants; // from a constant to its register
  std::map<string, u32, std::less<>> specials;
  u32 num_registers = 0, num_predicates = 2; // predicates 0 and 1 are false and true
  SharedMemory shared;
  size_t local_bytes = 0;
};

struct Symbol {
  Space space;
  u64 address; // on the host (global, const), or an offset within its space
};

struct Parameter {
  string name;
  size_t offset, bytes;
};

struct Module;

struct Kernel {
  Module* module = nullptr;
  string name, readable;
  string_view body;
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0;
  unsigned max_threads = 1024;
  size_t shared_bytes = 0, local_bytes = 0;
  std::unique_ptr<Code> code; // null: it must be read again

  ~Kernel();
};

struct Module {
  string text; // without comments; the string_views point into it
  std::map<string, Symbol, std::less<>> symbols;
  std::vector<std::unique_ptr<char[]>> memory;
  SharedMemory shared;
  std::map<string, Kernel, std::less<>> kernels;
};

// Reads a module and all of its kernels; throws std::runtime_error if anything in it is not known.
std::unique_ptr<Module> read_module(string_view text);

// The kernel's instructions. They are read again if they were dropped to make room for other kernels.
Code& code_of(Kernel& kernel);

// Finds the basic blocks, and where lanes that diverge at the end of a block reconverge.
void find_meetings(Code& code);

} // namespace ptx
