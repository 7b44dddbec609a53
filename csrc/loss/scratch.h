// Memory for the rows that a thread works on: a row of a wide head needs more than a stack should hold.
#pragma once

#include "segment.h"

#include <cstdint>
#include <memory>

namespace gradscale {

class Scratch {
 public:
  explicit Scratch(int64_t width) : memory_(new double[scratch_elements(width) + 8]) {
  }

  double* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<double*>((address + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<double[]> memory_;
};

} // namespace gradscale
