// Numbers for the tests, and what the tests of rows and of decoding have in common.
#pragma once

#include "report.h"
#include "truth.h"

#include <random>

namespace gradscale::test {

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {
  }

  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(generator_);
  }
  double normal(double deviation) {
    return std::normal_distribution<double>(0, deviation)(generator_);
  }
  int64_t below(int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(generator_);
  }
  uint64_t bits() {
    return generator_();
  }

 private:
  std::mt19937_64 generator_;
};

// Relative to the scale of a result: what an exponential loses, and a sum that is taken one number after the other, as
// it is where a compiler does not vectorise it.
inline double precision(Element element, int64_t width) {
  return wide(element) == Element::float64 ? 1e-10 : 4e-6 + 2e-8 * static_cast<double>(width);
}

inline Support support_of(Transform transform, bool raw) {
  Support support{};
  support.minimum = -7.3; // no bin's centre or edge is at 0, where rounding would decide between two bins
  support.maximum = 9.1;
  support.eps = 1e-3;
  support.transform = transform;
  support.raw = raw;
  return support;
}

// The raw centres in memory of their own, as far as the kernels may read them.
class RawCenters {
 public:
  RawCenters(const Layout& layout, const Centers& centers, Support& support)
      : doubles_(layout, Element::float64, 1, support.num_bins),
        floats_(layout, Element::float32, 1, support.num_bins) {
    for (int32_t j = 0; j < support.num_bins; ++j) {
      doubles_.set(0, j, centers.values[j]);
      floats_.set(0, j, centers.values[j]);
    }
    if (support.raw) {
      support.raw_centers = reinterpret_cast<const double*>(doubles_.data());
      support.raw_centers_float = reinterpret_cast<const float*>(floats_.data());
    }
  }

 private:
  RowBuffer doubles_;
  RowBuffer floats_;
};

// Memory for the rows that a kernel works on; of floats where sums are taken in float, so that not even the room that
// doubles would need is there.
class ScratchRows {
 public:
  ScratchRows(Place place, Element element, int64_t width)
      : memory_(place, (scratch_elements(width) * element_size(wide(element)) + 63) / 64 * 64, 0) {
  }

  double* data() const {
    return reinterpret_cast<double*>(memory_.data());
  }

 private:
  Memory memory_;
};

inline Slab slab_of(const RowBuffer& buffer) {
  return {buffer.data(), buffer.stride(), buffer.element() == Element::float64};
}

inline Row row_of(const RowBuffer& buffer, int64_t row) {
  Row values;
  for (int64_t j = 0; j < buffer.width(); ++j) {
    values.push_back(buffer.get(row, j));
  }
  return values;
}

// All that there is to test.
Selection everything();

void test_rows(const Selection& selection);
void test_decode(const Selection& selection);
void test_elements(const Selection& selection);

} // namespace gradscale::test
