// A call of the multi-step loss as the kernels see it: plain numbers and pointers, no tensors.
// CONTRIBUTING.md says how to add a head.
#pragma once

#include "../cuda/table.h"
#include "../formulas/element.h"
#include "../formulas/policy.h"
#include "../formulas/support.h"

namespace gradscale {

// The output of a row next to its loss: the decoded value, for a head with a support, or the entropy.
enum class Detail : int32_t { none, expected, entropy };

// The kinds of heads, with their detail. call.cpp has the tensors that each takes.
// clang-format off
#define GRADSCALE_KINDS(kind)                \
  kind(two_hot, expected)                    \
  kind(hl_gauss, expected)                   \
  kind(soft_cross_entropy, entropy)          \
  kind(mean_squared_error, none)             \
  kind(huber, none)                          \
  kind(binary_cross_entropy, none)           \
  kind(negative_cosine, none)                \
  kind(quantile_huber, none)                 \
  kind(categorical_kl, none)                 \
  kind(per_step_loss, none)                  \
  kind(policy_gradient, entropy)             \
  kind(gaussian_policy_gradient, entropy)    \
  kind(clipped_squared_error, none)
// clang-format on

#define GRADSCALE_ENUMERATOR(name, ...) name,
enum class Kind : int32_t { GRADSCALE_KINDS(GRADSCALE_ENUMERATOR) };
#undef GRADSCALE_ENUMERATOR

// True if a prediction is the logits of one distribution.
inline bool has_logits(Kind kind) {
  return kind == Kind::two_hot || kind == Kind::hl_gauss || kind == Kind::soft_cross_entropy;
}

// True for the heads that have the log-probability of an action.
GRADSCALE_HOST_DEVICE bool is_policy(Kind kind) {
  return kind == Kind::policy_gradient || kind == Kind::gaussian_policy_gradient;
}

// The parameters of a head, named as in `numbers()` of gradscale_ext/heads.py. The numbers of its support are
// stored next to them.
// clang-format off
#define GRADSCALE_NUMBERS_OF_HEADS(number)  \
  number(Detail, detail)                    \
  number(int32_t, first_step)               \
  number(double, weight)                    \
  number(double, label_smoothing)           \
  number(double, entropy_weight)            \
  number(bool, subtract_target_entropy)     \
  number(double, sigma_ratio)               \
  number(double, delta)                     \
  number(double, kappa)                     \
  number(bool, sum_over_quantiles)          \
  number(double, unimix)                    \
  number(double, free_nats)                 \
  number(bool, predicts_p)                  \
  number(Surrogate, surrogate)              \
  number(double, clip_low)                  \
  number(double, clip_high)                 \
  number(double, dual_clip)                 \
  number(double, kl_weight)
// clang-format on

// One head as the user describes it: a dataclass of gradscale_ext/heads.py.
struct Head {
  Kind kind;
  Support support; // heads without a support may use its `transform` and `eps`
#define GRADSCALE_MEMBER(type, name) type name;
  GRADSCALE_NUMBERS_OF_HEADS(GRADSCALE_MEMBER)
#undef GRADSCALE_MEMBER
  const int32_t* choice_ends; // on the host: where each choice of a policy ends in a row of logits
  int32_t num_choices;        // 0: the row is one choice

  GRADSCALE_HOST_DEVICE bool has_support() const {
    return detail == Detail::expected;
  }
};

// Results of a row that are reduced to outputs of its head.
struct alignas(16) RowMetrics { // one access
  double gradient_square;       // the sum of the squares of its gradient before rounding
  double largest_logit;         // the largest magnitude of its finite logits
};

// Sums over the samples of a head.
struct alignas(16) HeadSums {
  double losses;         // of unmasked entries
  double unmasked;       // the number of unmasked entries
  double share;          // of the loss, without the head weight
  double weighted_share; // the same with the head weight
  double squares;        // of the gradient
  double largest_logit;  // the maximum, not a sum
  double divergence;     // of unmasked entries, from the policy that chose the actions
  double clipped;        // the number of unmasked entries whose ratio is clipped

  GRADSCALE_HOST_DEVICE void add(const HeadSums& other) {
    losses += other.losses;
    unmasked += other.unmasked;
    share += other.share;
    weighted_share += other.weighted_share;
    squares += other.squares;
    largest_logit = other.largest_logit > largest_logit ? other.largest_logit : largest_logit;
    divergence += other.divergence;
    clipped += other.clipped;
  }
};

// The rows of a segment with fields, in Pass::fields from Segment::first_field on. The first field of a target is
// Segment::target. Data is null where a field was left out. kChosenLogProbs is an output. kDifferences are two numbers
// by row, for approx_kl and clip_fraction: PolicyScore::Difference.
constexpr int64_t kSecondField = 0; // of the heads with two fields
enum PolicyField {
  kAdvantages,
  kLogProbs,
  kReferenceLogProbs,
  kChosenLogProbs,
  kDifferences,
  kLogStds,
  kLogStdsGradient
};

// A head at a step: B rows of predictions with their targets.
struct Segment {
  const Head* head;     // on the host
  int64_t step;         // 0 is the root
  int64_t width;        // elements of a row of predictions
  int64_t target_width; // of a row of targets
  int64_t last_size;    // the size of a prediction's last dimension: `width` if a row has one dimension
  Rows prediction;
  Rows target;   // data is null where the head has none
  Rows gradient; // data is null where no gradient is wanted; in the prediction's type, or in the type of losses
  Slab loss;
  Slab detail;         // where the head has one
  RowMetrics* metrics; // by row
  int64_t first_field; // in Pass::fields
  bool wants_scales;   // kLogStdsGradient is given
  bool shares_scales;  // all rows have the same log_stds: their gradients are no part of the metrics
  bool sums_scales;    // a row of kLogStdsGradient is the sum over kLanes rows
  double step_weight = 1;
  double step_gradient_scale = 1;

  GRADSCALE_HOST_DEVICE bool wants_gradient() const {
    return gradient.data != nullptr || wants_scales;
  }
};

// The weight of a sample at a step; null data means 1.
struct StepWeight {
  Rows values;
  int64_t step_stride = 0;

  GRADSCALE_HOST_DEVICE double at(int64_t row, int64_t step) const {
    return values.data == nullptr ? 1.0 : values.load(row, step * step_stride);
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

// The factor of a row, from all weights.
struct RowFactor {
  bool counts;        // false: loss and gradient are 0 instead
  double coefficient; // of the gradient
};

// The divisor of the sum of a number of entries. No entries add up to 0, whatever the divisor.
GRADSCALE_HOST_DEVICE double divisor_for(double entries) {
  return entries == 0 ? 1 : entries;
}

// The weights of a head's rows. Step weights are numbers in the segment, tensors here, or absent.
struct Coefficients {
  double factor;                // Head::weight, divided by the reduction's divisor if the host has it
  double* entries = nullptr;    // the number of entries that the sum is divided by, if only the device has it
  bool counts_unmasked = false; // count_unmasked stores it
  StepWeight step_weights;
  StepWeight step_gradient_scale;
  StepWeight importance_weights; // step_stride 0
  StepMask mask;
  double head_weight_number = 1; // from the call's head_weights
  Rows head_weight_tensor;       // the same, if it is a tensor
  Slab share; // the head's share of the loss without its head weight, a scalar or one per sample; no data: not wanted
  int64_t first_segment = 0;     // of the head
  Slab approx_kl, clip_fraction; // of a policy with log_probs

  GRADSCALE_HOST_DEVICE double share_factor() const {
    return entries == nullptr ? factor : factor / divisor_for(*entries);
  }
  GRADSCALE_HOST_DEVICE double head_weight() const {
    return head_weight_tensor.data == nullptr ? head_weight_number : head_weight_tensor.load(0);
  }
  GRADSCALE_HOST_DEVICE double step_weight(const Segment& s, int64_t row) const {
    return s.step_weight * step_weights.at(row, s.step);
  }
  GRADSCALE_HOST_DEVICE double gradient_scale(const Segment& s, int64_t row) const {
    return s.step_gradient_scale * step_gradient_scale.at(row, s.step);
  }
  // The product of all weights. A gradient scale of 0 gives 0, also where another weight is not finite.
  GRADSCALE_HOST_DEVICE RowFactor row_factor(const Segment& s, int64_t row, const Slab& grad_output) const {
    const double scale = gradient_scale(s, row);
    const double head_factor = share_factor() * head_weight();
    const double incoming = grad_output.data == nullptr ? 1 : grad_output.load(row);
    const double product = head_factor * step_weight(s, row) * scale * importance_weights.at(row, 0) * incoming;
    return {mask.includes(row, s.step), scale == 0 ? 0 : product};
  }
};

// One pass over the rows of a call: plain numbers and pointers. The CPU reads it directly, a device reads a copy.
struct Pass {
  const Head* heads;                // on the host, like the next two lists
  const Coefficients* coefficients; // by head
  const Segment* segments;          // segments of a head are adjacent, in the order of steps
  const Rows* fields;               // of the segments that have some
  int64_t num_fields;
  int64_t num_heads;
  int64_t num_segments;
  int64_t batch;
  int64_t steps;        // T
  bool each_sample;     // one loss per sample, instead of their sum
  bool skips_nonfinite; // a sample whose loss is not finite adds nothing
  Slab grad_output;     // a scalar (stride 0) or one per sample; no data: 1
  Slab loss;
  Slab per_sample;
  Slab head_means;
  Slab head_losses;
  Slab head_gradient_norms;
  Slab max_abs_logit;
  int64_t* num_nonfinite;

  // These are for a device.
  bool counts_unmasked; // of some head
  bool has_old_policy;  // some head has approx_kl
  Slab skipped;         // with skips_nonfinite: a copy of per_sample for the backward pass
  bool is_backward;     // computes only the gradients, for grad_output
  bool has_gradients;   // in a backward pass: those for grad_output 1 exist, and are kept if grad_output is a scalar 1

  GRADSCALE_HOST_DEVICE int64_t steps_of(const Head& head) const {
    return steps - head.first_step;
  }
  // The factor of a row, on a CPU.
  GRADSCALE_HOST_DEVICE RowFactor row_factor(const Segment& s, int64_t row) const {
    return coefficients[s.head - heads].row_factor(s, row, grad_output);
  }
  // True if all rows of a segment are unmasked and have the same factor.
  bool has_common_factor(const Segment& s) const {
    const Coefficients& c = coefficients[s.head - heads];
    const bool has_tensor = c.step_weights.values.data != nullptr || c.step_gradient_scale.values.data != nullptr ||
                            c.importance_weights.values.data != nullptr || c.mask.data != nullptr;
    return !has_tensor && (grad_output.data == nullptr || grad_output.stride == 0);
  }
  // Sets the gradients of a row to 0, on a CPU.
  void clear_gradients(const Segment& s, int64_t row) const {
    const auto clear = [&](const Rows& gradient) {
      if (gradient.data != nullptr) {
        const int64_t size = element_size(gradient.element);
        memset(static_cast<char*>(gradient.data) + row * gradient.stride * size, 0, s.width * size);
      }
    };
    clear(s.gradient);
    if (s.head->kind == Kind::gaussian_policy_gradient && !s.sums_scales) {
      clear(fields[s.first_field + kLogStdsGradient]);
    }
  }
  // Stores the outputs of a head.
  GRADSCALE_HOST_DEVICE void store_head(int64_t head, const Coefficients& c, const HeadSums& sums) const {
    head_means.store(head, sums.losses / (sums.unmasked < 1 ? 1 : sums.unmasked));
    head_losses.store(head, sums.weighted_share);
    head_gradient_norms.store(head, std::sqrt(sums.squares));
    max_abs_logit.store(head, sums.largest_logit);
    if (c.approx_kl.data != nullptr) {
      c.approx_kl.store(0, sums.divergence / (sums.unmasked < 1 ? 1 : sums.unmasked));
      c.clip_fraction.store(0, sums.clipped / (sums.unmasked < 1 ? 1 : sums.unmasked));
    }
    if (!each_sample && c.share.data != nullptr) {
      c.share.store(0, sums.share);
    }
  }
};

// Computes loss, detail, metrics and gradient of rows begin to end - 1 of a segment. `scratch` holds
// scratch_elements(width) doubles.
using RunRows = void (*)(const Pass&, const Segment&, int64_t begin, int64_t end, double* scratch);
extern RunRows run_rows_kernel; // not const, because tests replace it

// Sums over samples: their part of the loss, and the number of those whose loss is not finite.
struct LossSums {
  double loss;
  double nonfinite;
};

// The sums of a block of samples: computed in a fixed order, and then added up over the blocks.
struct BlockSums {
  HeadSums* heads;
  LossSums total;
};
constexpr int64_t kSamplesOfBlock = 1024; // their numbers stay in the cache

inline int64_t elements_of_block(const Pass& pass) {
  return (2 * pass.num_heads + 4) * kSamplesOfBlock;
}

// Stores the loss of each sample of the block that begins with sample `first`, and its sums. `scratch` holds
// elements_of_block() doubles.
using SumSamples = void (*)(const Pass&, bool is_double, int64_t first, double* scratch, BlockSums&);
extern SumSamples sum_samples_kernel;

// ---- On a device ----------------------------------------------------------------------------------------------------

// Consecutive segments of one head with the same kind of rows, so that all of them take the same number of blocks of
// loss_rows.
struct RowRange {
  int32_t head;
  int32_t first_segment;
  int32_t first_block;
  int32_t blocks_per_segment;
  int32_t row_kind;        // the index of the kind of rows among the template arguments of loss_rows
  int32_t threads_per_row; // in ThreadGroupRows
  int64_t raw_centers;     // the offset in the table of the raw centres, in the type of sums; -1: none
  int64_t choice_ends;     // the offset in the table of Head::choice_ends
};

// The sums of each block of loss_totals.
struct PartialSums {
  LossSums* losses; // [blocks]
  HeadSums* heads;  // [blocks][num_heads]
};

constexpr int kTotalsThreads = 384; // of a block of loss_totals, at most

// The argument of all kernels of the loss: a pass, whose lists are at these offsets in the table.
struct DevicePass {
  Pass pass;
  Table table;
  int64_t heads;
  int64_t coefficients;
  int64_t segments;
  int64_t fields;
  int64_t row_ranges;
  int64_t num_row_ranges;
  int64_t num_blocks;    // of loss_rows; with fewer, a block computes the rows of several
  int32_t rows_per_warp; // LossRows rounds it up, with rounded_rows_per_warp()
  int32_t set_bits;      // in loss_totals, log2 of the sets of 32 samples of a block,
  int32_t part_bits;     // and log2 of the warps that share the steps of a head of a set
  PartialSums partial;   // of loss_totals
  unsigned* blocks_done; // a counter for loss_totals, which loss_rows sets to 0

  GRADSCALE_HOST_DEVICE const Head& head(int64_t index) const {
    return table.at<Head>(heads)[index];
  }
  GRADSCALE_HOST_DEVICE const Coefficients& coefficients_of(int64_t head) const {
    return table.at<Coefficients>(coefficients)[head];
  }
};

} // namespace gradscale
