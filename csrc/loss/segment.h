// What the kernels of the multi-step loss see: plain numbers and pointers, no tensors.
//
// To add a head:
// - here, give it a Kind, and a number in Head if it has one of its own;
// - write its row (loss and gradient) beside those of its family, in categorical_rows, policy_rows or regression_rows,
//   .h for a CPU and .cuh for a GPU, its formulas going to csrc/math/; the switches of rows.h, rows.cuh and
//   regression_rows.h do not compile without it;
// - in gradscale_ext/, add the dataclass to heads.py, at the same place in KINDS, and its formula to reference.py.
#pragma once

#include "../math/slab.h"
#include "../math/support.h"
#include "../port/cpu_kernel.h"

namespace gradscale {

enum class Kind : int32_t {
  two_hot = 0,
  hl_gauss = 1,
  soft_cross_entropy = 2,
  mean_squared_error = 3,
  binary_cross_entropy = 4,
  negative_cosine = 5,
  per_step_loss = 6,
};

// What the user says about one head: the dataclass of gradscale_ext/heads.py as numbers.
struct Head {
  Kind kind;
  int32_t first_step;
  double weight;
  Support support; // of other kinds: transform and eps of mean_squared_error, eps of negative_cosine
  double label_smoothing;
  double entropy_weight;
  bool subtract_target_entropy;
  double sigma_ratio;
};

// In the order of numbers_of() in gradscale_ext/heads.py.
constexpr int64_t kNumbersOfHead = 13;

// -1, which is none of a head's integers, where there is no such int32.
inline int32_t integer_from(double number) {
  return number >= 0 && number <= 2147483647.0 ? static_cast<int32_t>(number) : -1;
}

inline Head head_from_numbers(const double* numbers) {
  Head head{};
  head.kind = static_cast<Kind>(integer_from(numbers[0]));
  head.first_step = integer_from(numbers[1]);
  head.weight = numbers[2];
  head.support.minimum = numbers[3];
  head.support.maximum = numbers[4];
  head.support.eps = numbers[5];
  head.support.num_bins = integer_from(numbers[6]);
  head.support.transform = static_cast<Transform>(integer_from(numbers[7]));
  head.support.raw = numbers[8] != 0;
  head.label_smoothing = numbers[9];
  head.entropy_weight = numbers[10];
  head.subtract_target_entropy = numbers[11] != 0;
  head.sigma_ratio = numbers[12];
  return head;
}

GRADSCALE_HOST_DEVICE bool is_categorical(Kind kind) {
  return kind == Kind::two_hot || kind == Kind::hl_gauss;
}

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

// The factors of a row's gradient: head weight, reduction, and the weights of its step and sample.
struct Coefficients {
  double factor;
  StepWeight step_weights;
  StepWeight step_gradient_scale;
  StepWeight importance_weights; // step_stride 0
  StepMask mask;

  GRADSCALE_HOST_DEVICE double at(int64_t row, int64_t step) const {
    return factor * step_weights.at(row, step) * step_gradient_scale.at(row, step) * importance_weights.at(row, 0);
  }

  // Computes at() for rows first..first + count.
  void of_rows(int64_t first, int64_t count, int64_t step, double* products) const {
    for (int64_t i = 0; i < count; ++i) {
      products[i] = factor;
    }
    step_weights.multiply(first, count, step, products);
    step_gradient_scale.multiply(first, count, step, products);
    importance_weights.multiply(first, count, 0, products);
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

// The cost of a row, in elements of a long one: beside its own there are its target, its logarithm and its sums. Rows
// of one number are computed many at a time.
inline int64_t cost_of_row(int64_t width) {
  return width == 1 ? 16 : width + 128;
}

// The room for two rows, each with the lanes before its first element.
inline int64_t scratch_elements(int64_t width) {
  return 2 * (padded_width(width) + kLanes);
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
