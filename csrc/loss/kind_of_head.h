// What GRADSCALE_KINDS says of the kinds of heads.
#pragma once

#include "segment.h"

#include <string>
#include <vector>

namespace gradscale {

// Dimensions behind the batch that a prediction and its target may have.
struct Form {
  int64_t prediction_dims;
  int64_t target_dims; // -1: no target
  bool classes;        // the target is an int64 index
};

struct KindOfHead {
  std::string name;
  Detail detail;
  std::vector<Form> forms;
};

// All kinds, in the order of Kind.
inline const std::vector<KindOfHead>& kinds() {
#define GRADSCALE_KIND(name, detail, ...) {#name, Detail::detail, {__VA_ARGS__}},
  static const std::vector<KindOfHead> all{GRADSCALE_KINDS(GRADSCALE_KIND)};
#undef GRADSCALE_KIND
  return all;
}

inline const KindOfHead& description_of(Kind kind) {
  return kinds()[static_cast<size_t>(kind)];
}

} // namespace gradscale
