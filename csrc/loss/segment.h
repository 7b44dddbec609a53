// A call of the multi-step loss as the kernels see it: plain numbers and pointers, no tensors.
// CONTRIBUTING.md says how to add a head.
#pragma once

#include "../math/slab.h"
#include "../math/support.h"
#include "../port/cpu_kernel.h"

namespace gradscale {

// What a head tells of a row beside its loss: what it decodes to, of a head that has a support, or its entropy.
enum class Detail : int32_t { none, expected, entropy };

// The kinds of heads, each with its detail and with the forms that its rows may have: dimensions of a prediction and of
// its target (-1: none) behind the batch, and whether the target is an int64 class.
// clang-format off
#define GRADSCALE_KINDS(kind)                                        \
  kind(two_hot, expected, {1, 0, false})                             \
  kind(hl_gauss, expected, {1, 0, false})                            \
  kind(soft_cross_entropy, entropy, {1, 1, false}, {1, 0, true})     \
  kind(mean_squared_error, none, {0, 0, false}, {1, 1, false})       \
  kind(binary_cross_entropy, none, {0, 0, false})                    \
  kind(negative_cosine, none, {1, 1, false})                         \
  kind(per_step_loss, none, {0, -1, false})
// clang-format on

#define GRADSCALE_ENUMERATOR(name, ...) name,
enum class Kind : int32_t { GRADSCALE_KINDS(GRADSCALE_ENUMERATOR) };
#undef GRADSCALE_ENUMERATOR

// Whether a prediction is the logits of a distribution.
inline bool has_logits(Kind kind) {
  return kind == Kind::two_hot || kind == Kind::hl_gauss || kind == Kind::soft_cross_entropy;
}

// The numbers of heads, by the names of `numbers()` in gradscale_ext/heads.py; those of a support come beside them.
// clang-format off
#define GRADSCALE_NUMBERS_OF_HEADS(number)  \
  number(Detail, detail)                    \
  number(int32_t, first_step)               \
  number(double, weight)                    \
  number(double, label_smoothing)           \
  number(double, entropy_weight)            \
  number(bool, subtract_target_entropy)     \
  number(double, sigma_ratio)
// clang-format on

// One head as the user describes it: a dataclass of gradscale_ext/heads.py.
struct Head {
  Kind kind;
  Support support; // a head without one may have its numbers too, such as `transform` and `eps`
#define GRADSCALE_MEMBER(type, name) type name;
  GRADSCALE_NUMBERS_OF_HEADS(GRADSCALE_MEMBER)
#undef GRADSCALE_MEMBER

  GRADSCALE_HOST_DEVICE bool has_support() const {
    return detail == Detail::expected;
  }
};

// A head at a step: B rows of predictions with their targets.
struct Segment {
  const Head* head;
  int64_t step; // 0 is the root
  int64_t width;
  Rows prediction;
  Rows target;   // data is null where the head has none
  Rows gradient; // data is null where no gradient is wanted; of the prediction's type, or of the type of sums
  Slab loss;
  Slab detail; // where the head has one
};

// The weight of a sample at a step; null data means 1.
struct StepWeight {
  Slab values;
  int64_t step_stride = 0;

  GRADSCALE_HOST_DEVICE double at(int64_t row, int64_t step) const {
    if (values.data == nullptr) {
      return 1.0;
    }
    return values.from(step * step_stride).load(row);
  }
};

struct StepMask {
  const bool* data = nullptr; // null: nothing is masked
  int64_t stride = 0;
  int64_t step_stride = 0;

  GRADSCALE_HOST_DEVICE bool includes(int64_t row, int64_t step) const {
    return data == nullptr || data[row * stride + step * step_stride];
  }
};

// The factors of a row's gradient: head weight, reduction, and the weights of its step and sample.
struct Coefficients {
  double factor;
  StepWeight step_weights;
  StepWeight step_gradient_scale;
  StepWeight importance_weights; // step_stride 0
  StepMask mask;

  // A gradient scale of 0 gives 0, also where another weight is not finite.
  GRADSCALE_HOST_DEVICE double at(int64_t row, int64_t step) const {
    const double scale = step_gradient_scale.at(row, step);
    return scale == 0 ? 0 : factor * step_weights.at(row, step) * scale * importance_weights.at(row, 0);
  }

  // Computes at() for rows first..first + count.
  void of_rows(int64_t first, int64_t count, int64_t step, double* products) const {
    for (int64_t i = 0; i < count; ++i) {
      products[i] = at(first + i, step);
    }
  }
};

// Computes loss, decoded prediction and gradient of rows begin..end of a segment. `scratch` holds
// scratch_elements(width) doubles.
using RunRows = void (*)(const Segment&, const Coefficients&, int64_t begin, int64_t end, double* scratch);
extern const CpuKernel<RunRows> run_rows_kernel;

// Rows are padded to whole vectors.
inline int64_t padded_width(int64_t width) {
  return (width + kLanes - 1) / kLanes * kLanes;
}

// Rows of at most so many elements are computed side by side, one in each lane.
constexpr int64_t kShortRow = 32;

// The cost of a row, in elements of a long one: beside its own there are its target, its logarithm and its sums. Rows
// of few numbers are computed many at a time.
inline int64_t cost_of_row(int64_t width) {
  return width == 1 ? 16 : (width <= kShortRow ? 2 * width + 48 : width + 128);
}

// The distance between rows of scratch memory, with a vector before and behind each.
inline int64_t scratch_row(int64_t width) {
  return padded_width(width) + 2 * kLanes;
}

// The room for three rows.
inline int64_t scratch_elements(int64_t width) {
  return 3 * scratch_row(width);
}

// Rows to decode; where `gradient` has data, the derivative times `grad_output` is written there, and no value.
struct Decoding {
  Rows logits;
  int64_t width;
  const Support* support;
  Slab out;
  Rows gradient;
  Slab grad_output;
};

// Scalars to encode as rows of distributions over bins, of the same type.
struct Encoding {
  Rows scalars; // one element each
  Rows out;
  int64_t width;
  const Support* support;
  double sigma_ratio; // 0: two-hot
};

using DecodeRows = void (*)(const Decoding&, int64_t begin, int64_t end, double* scratch);
extern const CpuKernel<DecodeRows> decode_rows_kernel;

} // namespace gradscale
