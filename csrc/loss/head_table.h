// The heads of a loss as the kernels read them.
#pragma once

#include "segment.h"

#include <c10/util/ArrayRef.h>

#include <memory>
#include <vector>

namespace gradscale {

// A support with the memory of its raw centres.
class OwnedSupport {
 public:
  explicit OwnedSupport(Support support);
  const Support& get() const {
    return support_;
  }

 private:
  Support support_;
  std::unique_ptr<double[]> centers_;
  std::unique_ptr<float[]> centers_float_;
};

class HeadTable {
 public:
  // kNumbersOfHead numbers a head, in the order of numbers_of() in gradscale_ext/heads.py.
  explicit HeadTable(c10::ArrayRef<double> numbers);

  size_t size() const {
    return heads_.size();
  }
  const Head& operator[](size_t head) const {
    return heads_[head];
  }
  size_t index_of(const Head* head) const {
    return head - heads_.data();
  }

 private:
  std::vector<Head> heads_;
  std::vector<OwnedSupport> supports_;
};

} // namespace gradscale
