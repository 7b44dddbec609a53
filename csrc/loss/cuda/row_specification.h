// The specification of a row kernel: the properties of rows that it is compiled for, and its name in C++. Template
// arguments are written only here.
//
// For leaner code for some rows: a type with kBlocks and run() (block_of_rows.cuh), a Way here, and its name, the rows
// of its block and its condition in row_specification.cpp.
#pragma once

#include "../../cuda/launch.h"
#include "device_pass.h"

#include <string>
#include <vector>

namespace gradscale {

// Who has a row: lanes of a warp (LossRows), or a group of threads (GroupRows). Or rows of gradients that exist and are
// multiplied.
enum class Way : int32_t { lanes, group, multiplied };

struct RowSpecification {
  Way way;
  Kind kind;
  Element logits;
  Element target;   // of a distribution over the logits; int64: a class; float64 where it is neither
  Element gradient; // int64: none is wanted
  int32_t width;    // 0: code for all widths
  int32_t threads;  // that have a row together
  int32_t unit;     // elements that a lane accesses at once
  int32_t options;  // bits of RowOptions

  // True if the types are the same.
  bool operator==(const RowSpecification& other) const;
  bool operator<(const RowSpecification& other) const;

  // The type, as C++ names it inside of namespace gradscale.
  std::string name() const;
  int64_t blocks(int64_t rows, int32_t rows_of_warp) const;
};

// The rows of a segment, whose gradient exists and is to be multiplied if `multiplies`.
RowSpecification specification_of(const Segment& segment, int32_t threads_per_row, bool multiplies);

// The kernel for these kinds of rows; `inside`: the table is in its arguments. Compiled once, for all calls.
const Kernel<DevicePass>& loss_rows_for(const std::vector<RowSpecification>& kinds_of_rows, bool inside);

} // namespace gradscale
