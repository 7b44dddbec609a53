// Statistics of the elements of gradients, computed for chunks and then added up; and the factors of clipping.
#pragma once

#include "norms.h"

namespace gradscale {

// The bits of |x| as an integer. They have the same order as the numbers; inf is above all numbers, and NaN above inf.
template <class W>
struct Magnitude {
  using Bits = std::conditional_t<sizeof(W) == sizeof(int32_t), int32_t, int64_t>;
  static constexpr int32_t kFractionBits = std::numeric_limits<W>::digits - 1;
  static constexpr Bits kInfinity = (2 * static_cast<Bits>(std::numeric_limits<W>::max_exponent) - 1) << kFractionBits;
  static constexpr Bits kMagnitudeMask = kInfinity | ((Bits(1) << kFractionBits) - 1);

  static GRADSCALE_HOST_DEVICE Bits bits(W x) {
    return bit_cast<Bits>(x) & kMagnitudeMask;
  }
};

// Sums over finite elements. `root` is defined as in PowerSum (norms.h).
struct ElementSums {
  double powers;  // sum of (|g| / root^2)^p, or the largest |g| / root^2 if p is inf
  double sum;     // of g / root^2
  double maximum; // of |g|
  double root;    // 1 unless the plain sums would overflow or underflow
};

// Statistics of at most 2^31 - 1 elements.
struct ChunkStatistics {
  ElementSums sums;
  int32_t zeros;
  int32_t nans;
  int32_t infs;
};

GRADSCALE_HOST_DEVICE ElementSums no_elements() {
  return {0, 0, 0, 1};
}

GRADSCALE_HOST_DEVICE ElementSums from_root_to_root(const ElementSums& sums, double root, double p) {
  return {
      sums.powers * from_root_to_root(sums.root, root, p),
      sums.sum * from_root_to_root(sums.root, root, INFINITY),
      sums.maximum,
      root};
}

// Adds the sums of two parts.
GRADSCALE_HOST_DEVICE ElementSums added(const ElementSums& a, const ElementSums& b, double p) {
  if (a.maximum == 0 || b.maximum == 0) {
    return a.maximum == 0 ? b : a;
  }
  const double root = a.root > b.root ? a.root : b.root;
  const ElementSums x = from_root_to_root(a, root, p);
  const ElementSums y = from_root_to_root(b, root, p);
  const double larger = x.powers > y.powers ? x.powers : y.powers;
  return {
      std::isinf(p) ? larger : x.powers + y.powers, x.sum + y.sum, x.maximum > y.maximum ? x.maximum : y.maximum, root};
}

GRADSCALE_HOST_DEVICE double norm_of(const ElementSums& sums, double p) {
  return norm_of(sums.powers, p) * sums.root * sums.root;
}

// The mean; 0 if there are no elements.
GRADSCALE_HOST_DEVICE double mean_of(const ElementSums& sums, int64_t count) {
  return count == 0 ? 0 : sums.sum / static_cast<double>(count) * sums.root * sums.root;
}

// ---- Results of `count` tensors, as arrays --------------------------------------------------------------------------

struct StatisticsOut {
  double* values;  // norms, largest magnitudes, means
  int64_t* counts; // elements, zeros, NaN, inf, 1 for a missing tensor
  int64_t count;

  // Stores the statistics of tensor i. `implicit_zeros` is the number of zeros that a sparse tensor does not store; -1
  // if there is no tensor.
  GRADSCALE_HOST_DEVICE void store(
      int64_t i,
      const ElementSums& sums,
      int64_t size,
      int64_t implicit_zeros,
      int64_t zeros,
      int64_t nans,
      int64_t infs,
      double p) const {
    const bool missing = implicit_zeros < 0;
    const int64_t numel = missing ? 0 : size + implicit_zeros;
    values[i] = norm_of(sums, p);
    values[count + i] = sums.maximum;
    values[2 * count + i] = mean_of(sums, numel - nans - infs);
    counts[i] = numel;
    counts[count + i] = missing ? 0 : zeros + implicit_zeros;
    counts[2 * count + i] = nans;
    counts[3 * count + i] = infs;
    counts[4 * count + i] = missing;
  }
};

// ---- Clipping -------------------------------------------------------------------------------------------------------

// The factor of adaptive gradient clipping for a unit (a row of a weight, or all of it), from the norms of its gradient
// and its weight. NaN if either norm is NaN.
GRADSCALE_HOST_DEVICE double unit_factor(double gradient, double weight, double adaptive, double eps) {
  const double clamped = weight < eps ? eps : weight;
  const double limit = clamped == 0 ? 0 : adaptive * clamped;
  return gradient <= limit ? 1 : limit / gradient;
}

// Added to the norm to avoid a division by 0, as in torch.nn.utils.clip_grad_norm_.
constexpr double kNormEps = 1e-6;

// The norm of all tensors together: `largest` is the largest of their norms, and `powers` the sum of (norm /
// largest)^p.
GRADSCALE_HOST_DEVICE double total_norm(double largest, double powers, double p, int64_t nans, int64_t infs) {
  if (nans > 0) {
    return static_cast<double>(NAN);
  }
  if (infs > 0 || std::isinf(largest)) {
    return static_cast<double>(INFINITY);
  }
  return largest == 0 || std::isinf(p) ? largest : largest * norm_of(powers, p);
}

// Stores the total norm, the factor, and 1 if the factor is not 1, else 0. A max_norm that is negative or NaN gives a
// factor of NaN.
GRADSCALE_HOST_DEVICE void store_clipping(double total, double max_norm, bool skip_nonfinite, double* out) {
  double factor = max_norm >= 0 ? max_norm / (total + kNormEps) : static_cast<double>(NAN);
  if (factor > 1) { // false for NaN, which stays
    factor = 1;
  }
  if (skip_nonfinite && !(total < static_cast<double>(INFINITY))) {
    factor = 0;
  }
  out[0] = total;
  out[1] = factor;
  out[2] = factor == 1 ? 0 : 1;
}

} // namespace gradscale
