// The kinds of heads, and the heads of a loss as record_of() in gradscale_ext/heads.py describes them.
#pragma once

#include "../support/support.h"
#include "segment.h"

#include <memory>
#include <string>
#include <vector>

namespace gradscale {

// Dimensions after the batch that a prediction and its target may have.
struct Form {
  int64_t prediction_dims;
  int64_t target_dims;    // -1: no target
  bool classes;           // the target is an int64 index
  bool own_sizes = false; // the sizes of the target may differ from the prediction's
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

class Heads {
 public:
  Heads(const std::vector<std::string>& names, const std::vector<double>& numbers);

  size_t size() const {
    return heads_.size();
  }
  const Head* data() const {
    return heads_.data();
  }
  const Head& operator[](size_t head) const {
    return heads_[head];
  }
  const std::vector<Form>& forms(size_t head) const {
    return description_of(heads_[head].kind).forms;
  }
  bool has_target(size_t head) const {
    return forms(head)[0].target_dims >= 0;
  }

 private:
  std::vector<Head> heads_;
  std::vector<OwnedSupport> supports_;
};

} // namespace gradscale
