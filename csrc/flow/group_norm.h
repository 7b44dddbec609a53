// Gradients rescaled by the norms of their groups: the common part of clip_gradient_norm and normalize_gradient.
#pragma once

#include "../formulas/norms.h"
#include "identity.h"

#include <string>

namespace gradscale {

// One norm of order p for each index of the first `batch_dims` dimensions. If a process group is named, a norm is over
// the elements of all its members.
struct NormGroups {
  int64_t batch_dims = 0;
  double p = 2;
  std::string process_group;
  int64_t process_group_size = 1;

  void check(const char* name, const at::Tensor& x) const;
};

// Raises unless `limit` broadcasts to the shape of the groups, and has no negative or NaN elements. The elements of a
// tensor on a device are not checked, because that would wait for the device.
void check_limit(
    const char* name, const char* argument, const Value& limit, const at::Tensor& x, const NormGroups& groups);

// The gradient with every group rescaled to its limit by the rule. A limit of 0 gives zeros, also where the gradient is
// inf or NaN; a negative or NaN limit that check_limit() could not see gives NaN. Adds to `counts`, if defined, the
// number of groups and the number of groups whose norm is not within the limit.
at::Tensor rescaled(at::Tensor gradient, Value limit, const NormGroups& groups, Rule rule, const at::Tensor& counts);

} // namespace gradscale
