// The part that clip_gradient_norm and normalize_gradient share: groups of a gradient rescaled by their norms.
#pragma once

#include "../formulas/norms.h"
#include "value.h"

#include <string>

namespace gradscale {

// One norm for each index of the first `batch_dims` dimensions, of order p, taken over all members of a process group
// where one is named.
struct NormGroups {
  int64_t batch_dims = 0;
  double p = 2;
  std::string process_group;
  int64_t process_group_size = 1;

  void check(const char* name, const at::Tensor& x) const;
};

// Raises unless `limit` broadcasts to the shape of the groups and holds nothing negative, as far as that can be seen
// without waiting for a device.
void check_limit(
    const char* name, const char* argument, const Value& limit, const at::Tensor& x, const NormGroups& groups);

// The gradient with every group rescaled to its limit by the rule. A limit of 0 gives zeros, also where the gradient is
// inf or NaN; a negative or NaN limit that could not be refused gives NaN. Adds to `counts`, where defined, the number
// of groups and of those whose norm is not within the limit.
at::Tensor rescaled(
    at::Tensor gradient, const Value& limit, const NormGroups& groups, Rule rule, const at::Tensor& counts);

} // namespace gradscale
