// What loss_rows is compiled for: the different kinds of rows of a call, each as the host knows it and as C++ names it.
//
// To write leaner code for some rows: a type with kBlocks and run() (block_of_rows.cuh), a Way here, and its name, the
// rows of its block and when it is right in row_specification.cpp.
#pragma once

#include "../port/launch.h"
#include "device_table.h"

#include <string>
#include <vector>

namespace gradscale {

// Who has a row: a thread, a warp that walks over several, or a group of threads. Or rows of gradients that are
// multiplied.
enum class Way : int32_t { thread, warp, group, multiplied };

struct RowSpecification {
  Way way;
  Kind kind;
  Element logits;
  Element gradient;    // int64: none is wanted
  int32_t width;       // 0 where code is for all
  int32_t options;     // bits of WarpOptions or ThreadPolicyOptions
  Element target;      // of threads: the type of probabilities; int64: a class
  Transform transform; // of threads
  bool stays;          // in registers: rows of groups
  int32_t group;       // threads that have a row together

  // Whether the types are the same.
  bool operator==(const RowSpecification& other) const;
  bool operator<(const RowSpecification& other) const;

  // The type, as C++ names it inside of namespace gradscale.
  std::string name() const;
  int64_t blocks(int64_t rows, int64_t rows_of_warp) const;
};

// The rows of a segment, whose gradient is there already and to be multiplied where `multiplies` says so.
RowSpecification specification_of(const Segment& segment, int32_t threads_per_row, bool multiplies);

// The kernel for these kinds of rows; `inside`: the table is in its arguments. Compiled once, for all calls.
const Kernel<RowsArguments>& loss_rows_for(const std::vector<RowSpecification>& kinds_of_rows, bool inside);

} // namespace gradscale
