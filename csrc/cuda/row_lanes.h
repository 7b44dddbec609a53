// How many lanes own a row of logits in lane_rows.cuh, and the C++ name of the kernel compiled for this number.
#pragma once

#include "../formulas/element.h"

#include <string>
#include <vector>

namespace gradscale {

struct Lanes {
  int32_t per_row; // 0: a group of threads owns the row (rows.cuh)
  int32_t unit;    // elements that a lane accesses at once
};

// The lanes for rows of logits over bins or actions. Gradients and targets have the shape of the logits, or no data.
Lanes bin_lanes(int64_t width, const Rows& logits, const Rows& gradient);
Lanes action_lanes(int64_t width, const Rows& logits, const Rows& gradient, const Rows& target);

// True if rows begin at multiples of `count` elements, or have no data.
bool is_aligned(const Rows& rows, int64_t count);

// An instance of a template: "name<first, second>".
std::string instance(const std::string& template_name, const std::vector<std::string>& arguments);

} // namespace gradscale
