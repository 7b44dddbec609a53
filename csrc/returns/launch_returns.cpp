#include "../cuda/driver.h"
#include "../cuda/row_lanes.h"
#include "call.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace gradscale {

namespace {

constexpr const char* kWindowsFile = "returns/windows.cuh";
constexpr const char* kFormulas[] = {
    "LambdaReturns",
    "Advantages",
    "VTrace",
    "Retrace",
    "",
    "LambdaReturnsAdjoint",
    "AdvantagesAdjoint",
    "VTraceAdjoint",
    "RetraceAdjoint",
};

const char* number_name(bool is_double) {
  return is_double ? "double" : "float";
}

// The layout of a call's tensors, and the set of given tensors as bits: template arguments of Row in recurrences.cuh.
std::string form_of(const ReturnsCall& call) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const Element own = call.is_double ? Element::float64 : Element::float32;
  unsigned given = 0, bit = 1;
  int64_t stride = 0; // between steps of the first output
  for (const ReturnsOutput& output : call.outputs) {
    stride = stride == 0 && output.data != nullptr ? output.strides[kStep] : stride;
  }
  bool is_plain = stride > 0 && call.steps < kMost / stride;
  const auto add = [&](const auto& tensor, bool has_own_type) {
    if (tensor.data != nullptr) {
      given |= bit;
      is_plain = is_plain && has_own_type && tensor.strides[kStep] == stride;
    }
    bit *= 2;
  };
  for (int k = 0; k < kOperands; ++k) {
    add(call.operands[k], k >= kNumbers || call.operands[k].element == own);
  }
  for (const ReturnsOutput& output : call.outputs) {
    add(output, true);
  }
  return !is_plain ? "Layout::any, " + std::to_string(bit - 1)
                   : (stride == 1 ? "Layout::runs, " : "Layout::columns, ") + std::to_string(given);
}

int64_t blocks_for(int64_t count, int64_t per_block) {
  return (count + per_block - 1) / per_block;
}

constexpr int64_t kChunk = 4 * kThreads; // steps; the same as in long_rows.cuh

int64_t row_chunks(const ReturnsCall& call) {
  return (call.steps + kChunk - 1) / kChunk;
}

// True if there are so few rows that a block for each chunk of a row is faster than a warp for each row.
//
// A warp takes about a microsecond, the time of a load, for 128 steps of its row: 8 us for 1024 steps. Chunks take
// about 4 us for their loads, for the maps of the chunks before them (see long_rows.cuh), and for their results. For
// 264 rows, two per multiprocessor of an H200, issuing 4 warp instructions per step of a row takes about 2 us more.
//
// If neighbouring rows are adjacent in memory, a chunk reads sectors with numbers of 8 rows and uses one of the rows,
// but most sectors come from the L2 cache. The alternative, recur_across, computes 32 steps of a row at a time: for
// 1024 steps it would need 32 passes, one after the other.
bool uses_chunks(const ReturnsCall& call) {
  return !is_n_step(call) && call.steps >= kChunk && call.rows < 2 * multiprocessors() &&
         row_chunks(call) <= std::numeric_limits<int32_t>::max() / call.rows;
}

// Returns the next number of a random sequence (splitmix64) from 2^63 to 1.5 x 2^63, which differs between processes.
uint64_t next_launch() {
  static std::atomic<uint64_t> last{std::random_device()() * 0x100000001u};
  uint64_t x = last += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return ((x ^ (x >> 31)) >> 2) | uint64_t(1) << 63;
}

} // namespace

void launch_returns(ReturnsCall call, bool across, const OnDevice& device) {
  const char* type = number_name(call.is_double);
  const int64_t bytes = call.is_double ? 8 : 4;
  if (is_n_step(call)) {
    const int64_t threads = call.rows * n_step_blocks_of_row(call);
    const at::Tensor memory = device.memory(threads * 2 * n_step_block_size(call) * bytes);
    call.workspace = memory.mutable_data_ptr();
    const char* formula = call.formula == Formula::n_step ? "Formula::n_step" : "Formula::n_step_adjoint";
    const std::string name = instance("n_step_blocks", {type, formula, across ? "true" : "false"});
    device.launch(kWindowsFile, name, blocks_for(threads, kThreads), kThreads, call);
    return;
  }
  const std::vector<std::string> arguments{type, kFormulas[static_cast<int>(call.formula)], form_of(call)};
  if (uses_chunks(call)) {
    const int64_t chunks = call.rows * row_chunks(call);
    const at::Tensor memory = device.memory(16 + chunks * (8 + 2 * bytes)); // counters, and maps of two numbers
    call.workspace = memory.mutable_data_ptr();
    call.launch = next_launch();
    device.launch("returns/long_rows.cuh", instance("recur_chunks", arguments), chunks, kThreads, call);
    return;
  }
  const std::string name = instance(across ? "recur_across" : "recur_along", arguments);
  device.launch("returns/recurrences.cuh", name, blocks_for(call.rows, across ? kWarpSize : kWarps), kThreads, call);
}

void launch_muzero(const MuZeroCall& call, const OnDevice& device) {
  const int64_t threads = call.rows * (call.unroll_steps + 1);
  const std::string name = instance("muzero_rows", {number_name(call.is_double)});
  device.launch(kWindowsFile, name, blocks_for(threads, kThreads), kThreads, call);
}

} // namespace gradscale
