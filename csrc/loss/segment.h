// What the kernels of the multi-step loss see: plain numbers and pointers, no tensors.
//
// To add a head:
// - gradscale_ext/heads.py: its dataclass, with the name of its kind (and gradscale_ext/__init__.py, its name for
// users);
// - gradscale_ext/reference/losses.py: its formula;
// - here: its kind, and a number in Head (named in head_table.cpp) if it has one that no other head has;
// - the row of its family, loss and gradient, for the CPU (categorical_rows.h, policy_rows.h or regression_rows.h) and
//   for CUDA, with what both share in csrc/math/; the compiler names the switches where its case is missing.
#pragma once

#include "../math/element.h"
#include "../math/support.h"

namespace gradscale {

#define GRADSCALE_KINDS(kind)                                                                               \
  kind(two_hot) kind(hl_gauss) kind(soft_cross_entropy) kind(mean_squared_error) kind(binary_cross_entropy) \
      kind(negative_cosine) kind(per_step_loss)

#define GRADSCALE_ENUMERATOR(name) name,
enum class Kind : int32_t { GRADSCALE_KINDS(GRADSCALE_ENUMERATOR) };
#undef GRADSCALE_ENUMERATOR

// One head as the user describes it: a dataclass of gradscale_ext/heads.py.
struct Head {
  Kind kind;
  bool decodes; // has a support, and decoded predictions
  int32_t first_step;
  double weight;
  Support support; // without one: the transform and eps of mean_squared_error, the eps of negative_cosine
  double label_smoothing;
  double entropy_weight;
  bool subtract_target_entropy;
  double sigma_ratio;
};

// A [B] or [B, n] slab of scalars in the type that losses are given in.
struct Slab {
  void* data = nullptr; // null: not wanted
  int64_t stride = 0;
  bool is_double = false;

  // Without the first so many elements.
  GRADSCALE_HOST_DEVICE Slab from(int64_t element) const {
    return {static_cast<char*>(data) + element * (is_double ? 8 : 4), stride, is_double};
  }
  GRADSCALE_HOST_DEVICE void store(int64_t row, double value) const {
    if (is_double) {
      static_cast<double*>(data)[row * stride] = value;
    } else {
      static_cast<float*>(data)[row * stride] = static_cast<float>(value);
    }
  }
  // Rows first..first + count.
  template <class A>
  void store(int64_t first, int64_t count, const A* values) const {
    if (is_double) {
      for (int64_t i = 0; i < count; ++i) {
        static_cast<double*>(data)[(first + i) * stride] = static_cast<double>(values[i]);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        static_cast<float*>(data)[(first + i) * stride] = static_cast<float>(values[i]);
      }
    }
  }
  GRADSCALE_HOST_DEVICE double load(int64_t row) const {
    return is_double ? static_cast<const double*>(data)[row * stride] : static_cast<const float*>(data)[row * stride];
  }
};

// Rows of `width` elements, one a sample, whose elements are contiguous; rows may be any distance apart.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0; // elements from one sample to the next
  Element element = Element::float32;
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
  Slab expected; // decoded prediction, where the head has one
};

// Weight of a sample at a step; null data means 1.
struct StepWeight {
  Slab values;
  int64_t step_stride = 0;

  GRADSCALE_HOST_DEVICE double at(int64_t row, int64_t step) const {
    if (values.data == nullptr) {
      return 1.0;
    }
    return values.from(step * step_stride).load(row);
  }

  // Multiplies `products` by the weights of rows first..first + count.
  void multiply(int64_t first, int64_t count, int64_t step, double* products) const {
    for (int64_t i = 0; i < count && values.data != nullptr; ++i) {
      products[i] *= at(first + i, step);
    }
  }
};

struct StepMask {
  const bool* data = nullptr; // null: nothing is masked
  int64_t stride = 0;
  int64_t step_stride = 0;

  GRADSCALE_HOST_DEVICE bool keeps(int64_t row, int64_t step) const {
    return data == nullptr || data[row * stride + step * step_stride];
  }
};

// What a row's gradient is multiplied by: head weight, reduction, and the weights of its step and sample.
struct Coefficients {
  double factor;
  StepWeight step_weights;
  StepWeight step_gradient_scale;
  StepWeight importance_weights; // step_stride 0
  StepMask mask;

  GRADSCALE_HOST_DEVICE double at(int64_t row, int64_t step) const {
    return factor * step_weights.at(row, step) * step_gradient_scale.at(row, step) * importance_weights.at(row, 0);
  }

  // at() of rows first..first + count.
  void of_rows(int64_t first, int64_t count, int64_t step, double* products) const {
    for (int64_t i = 0; i < count; ++i) {
      products[i] = factor;
    }
    step_weights.multiply(first, count, step, products);
    step_gradient_scale.multiply(first, count, step, products);
    importance_weights.multiply(first, count, 0, products);
  }
};

// Rows begin..end of a segment: loss, decoded prediction and gradient. `scratch` holds scratch_elements(width) doubles.
using RunRows = void (*)(const Segment&, const Coefficients&, int64_t begin, int64_t end, double* scratch);

// Rows are padded to whole vectors.
inline int64_t padded_width(int64_t width) {
  return (width + kLanes - 1) / kLanes * kLanes;
}

// What a row costs, in elements of a long one: beside its own there are its target, its logarithm and its sums. Rows of
// one number are computed many at a time.
inline int64_t cost_of_row(int64_t width) {
  return width == 1 ? 16 : width + 128;
}

// Two rows, each with room for the lanes before its first element.
inline int64_t scratch_elements(int64_t width) {
  return 2 * (padded_width(width) + kLanes);
}

// Rows begin..end of decoded values, and of their gradient: where `gradient` has data, the derivative times
// `grad_output` is written there, and no value.
struct Decoding {
  Rows logits;
  int64_t width;
  const Support* support;
  Slab out;
  Rows gradient;
  Slab grad_output;
};

// Rows of distributions over bins, from scalars of the same type.
struct Encoding {
  Rows scalars; // of one element
  Rows out;
  int64_t width;
  const Support* support;
  double sigma_ratio; // 0: two-hot
};

using DecodeRows = void (*)(const Decoding&, int64_t begin, int64_t end, double* scratch);

} // namespace gradscale
