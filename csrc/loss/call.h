// One call of the multi-step loss, in eager mode or by the registered operator: the given tensors and options, the
// results by name, and the segments (each head at each of its steps) that the CPU or a device computes.
#pragma once

#include "../support/support.h"
#include "kernels.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace gradscale {

// ---- Heads ----------------------------------------------------------------------------------------------------------

// The tensors of a prediction and its target, field by field. A field is written as a letter for each dimension after
// the batch; equal letters are equal sizes. "#" before them: the field is an int64 index. "?" before them: it may be
// left out. "-": it is not given.
struct Form {
  std::vector<const char*> prediction;
  std::vector<const char*> target;
};

struct FieldsOfHead {
  std::vector<Form> forms;
  std::vector<const char*> target;     // names of the fields; none: a tensor
  std::vector<const char*> prediction; // the same
  bool may_be_tensor = true;           // the first field of a target with names may be given alone
};

struct KindOfHead : FieldsOfHead {
  std::string name;
  Detail detail;
};

// All kinds, in the order of Kind.
const std::vector<KindOfHead>& kinds();

inline const KindOfHead& description_of(Kind kind) {
  return kinds()[static_cast<size_t>(kind)];
}

// A part of the arguments of a call, for messages.
struct Part {
  const char* argument;
  int64_t head = -1;  // -1: one value for all heads
  int64_t entry = -1; // of the head, from its first step; -1: all
  const char* field = nullptr;
};

// The heads of a loss, as record_of() in gradscale_ext/heads.py describes them. Without labels, messages number them.
class Heads {
 public:
  Heads(
      const std::vector<std::string>& names, const std::vector<double>& numbers, std::vector<std::string> labels = {});

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
  const KindOfHead& kind(size_t head) const {
    return description_of(heads_[head].kind);
  }
  // The number of tensors of a prediction or a target at a step, also those that are left out.
  static size_t num_fields(const std::vector<const char*>& names) {
    return std::max<size_t>(1, names.size());
  }
  bool has_target(size_t head) const {
    return !forms(head)[0].target.empty();
  }
  // True if a field of a head's target must be given.
  bool reads(size_t head, const char* field) const;
  // "mask", "the mask of head 'value'", or "the target of head 'value' at step 2".
  std::string words(const Part& part) const;

 private:
  std::vector<std::string> labels_;
  std::vector<Head> heads_;
  std::vector<OwnedSupport> supports_;
  std::vector<std::vector<int32_t>> choice_ends_; // by head
};

// ---- Options and outputs --------------------------------------------------------------------------------------------

using Tensors = std::vector<at::Tensor>;

enum class Reduction { mean, sum, none, valid_mean };
enum class Nonfinite { propagate, skip };

// True if the sum of a head is divided by a number of entries.
inline bool is_mean(Reduction reduction) {
  return reduction == Reduction::mean || reduction == Reduction::valid_mean;
}

// The enumerators as users write them.
constexpr std::array<const char*, 4> names_of(Reduction) {
  return {"mean", "sum", "none", "valid_mean"};
}
constexpr std::array<const char*, 2> names_of(Nonfinite) {
  return {"propagate", "skip"};
}

// None, a number per step, or a tensor [T] or [B, T] ([T, B] without batch_first).
struct StepNumbers {
  std::vector<double> numbers;
  at::Tensor tensor;
};

// A factor of a head: a number, or a tensor without dimensions.
struct HeadWeight {
  double number = 1;
  at::Tensor tensor;
  bool wants_gradient = false; // of the tensor
};

// The number of entries that divides the sum of a head: a number, a tensor without dimensions, or neither (0), in which
// case the call counts its own entries.
struct NumEntries {
  double number = 0;
  at::Tensor tensor;
};

// A value for each head, one for all heads, or none.
template <class T>
struct ByHead {
  std::vector<T> values;

  const T& operator[](size_t head) const {
    static const T none{};
    return values.empty() ? none : values.at(values.size() == 1 ? 0 : head);
  }
};

// The options of a call, in the order of `Options` in gradscale_ext/call/options.py. Masks are [B, T] ([T, B] without
// batch_first); undefined: nothing is masked. num_entries: for "mean" and "valid_mean" alone. Without `steps` there is
// one step, and no tensor has a dimension for it.
// clang-format off
#define GRADSCALE_OPTIONS(option)                  \
  option(ByHead<StepNumbers>, step_weights)        \
  option(ByHead<StepNumbers>, step_gradient_scale) \
  option(ByHead<at::Tensor>, importance_weights)   \
  option(ByHead<at::Tensor>, mask)                 \
  option(ByHead<HeadWeight>, head_weights)         \
  option(ByHead<NumEntries>, num_entries)          \
  option(Reduction, reduction)                     \
  option(Nonfinite, nonfinite)                     \
  option(bool, batch_first)                        \
  option(bool, steps)

// The results of a call, in the order in which the operator returns them: float, or double when a prediction is double.
// Only the loss has a gradient. The lists are by head; the operator leaves out undefined tensors.
// per_step, details and log_probs: [B, T_h] ([T_h, B] without batch_first, [B] without steps); details are undefined
// for heads without a Detail, and what policies have, for others. approx_kl and clip_fraction: scalars.
// shares: the head's share of the loss without its head weight, with the shape of the loss; defined if the weight gets
// a gradient.
#define GRADSCALE_OUTPUTS(output)                             \
  output(at::Tensor, loss)          /* scalar, or [B] */      \
  output(at::Tensor, per_sample)    /* [B] */                 \
  output(at::Tensor, head_means)    /* [heads] */             \
  output(at::Tensor, head_losses)   /* [heads] */             \
  output(at::Tensor, head_gradient_norms) /* [heads] */       \
  output(at::Tensor, max_abs_logit) /* [heads] */             \
  output(at::Tensor, num_nonfinite) /* int64 scalar */        \
  output(Tensors, per_step)                                   \
  output(Tensors, details)                                    \
  output(Tensors, log_probs)                                  \
  output(Tensors, approx_kl)                                  \
  output(Tensors, clip_fraction)                              \
  output(Tensors, shares)
// clang-format on

// Defines a struct with these members; each(self, visit) calls visit(name, member) for all of them.
// NOLINTBEGIN(bugprone-macro-parentheses): types and names
#define GRADSCALE_MEMBER(type, name) type name{};
#define GRADSCALE_VISIT(type, name) visit(#name, self.name);
#define GRADSCALE_STRUCT(Name, LIST)              \
  struct Name {                                   \
    LIST(GRADSCALE_MEMBER)                        \
    template <class Self, class Visit>            \
    static void each(Self& self, Visit&& visit) { \
      LIST(GRADSCALE_VISIT)                       \
    }                                             \
  };
GRADSCALE_STRUCT(Options, GRADSCALE_OPTIONS)
GRADSCALE_STRUCT(Outputs, GRADSCALE_OUTPUTS)
#define GRADSCALE_ENUMERATOR(type, name) name,
enum class Option : size_t { GRADSCALE_OPTIONS(GRADSCALE_ENUMERATOR) };
#undef GRADSCALE_ENUMERATOR
#undef GRADSCALE_STRUCT
#undef GRADSCALE_VISIT
#undef GRADSCALE_MEMBER
// NOLINTEND(bugprone-macro-parentheses)

// ---- A call ---------------------------------------------------------------------------------------------------------

// One tensor per step, or one tensor with a step dimension.
struct Entries {
  Tensors tensors; // empty: the head has no target, or the field was left out
  bool stacked = false;
  bool shared = false; // one tensor for all samples and steps, [D], or expanded from it
  size_t first = 0;    // the index of the first tensor in the list of all prediction tensors; set by check()

  // True if the kernels add up the gradient over all samples and steps; autograd does it for an expanded tensor.
  bool sums_gradient() const {
    return shared && tensors[0].dim() == 1;
  }
  // The number of batch and step dimensions.
  int64_t leading_dims() const {
    return sums_gradient() ? 0 : (stacked ? 2 : 1);
  }
  int64_t row_dims() const {
    return tensors[0].dim() - leading_dims();
  }
  // The sizes of the dimensions after these. Step 0 is the first step of the head.
  at::IntArrayRef sizes(int64_t step) const {
    return tensors[stacked || shared ? 0 : step].sizes().slice(leading_dims());
  }
};

// The number of steps: the size of the step dimension, or the number of tensors.
inline int64_t steps_of(const Entries& entries, bool batch_first) {
  if (!entries.stacked) {
    return static_cast<int64_t>(entries.tensors.size());
  }
  const at::Tensor& tensor = entries.tensors[0];
  return tensor.dim() < 2 ? 0 : tensor.size(batch_first ? 1 : 0);
}

class Launches; // on a device, of a pass

struct Call : Options {
  std::vector<std::vector<Entries>> predictions; // by head and field
  std::vector<std::vector<Entries>> targets;
  std::vector<bool> wants; // by prediction tensor, in the order of each_prediction(): true if its gradient is wanted
  const Heads* heads = nullptr;
  at::Tensor grad_output; // of the loss, a scalar or [B]; undefined: the forward pass

  // Set by check().
  int64_t batch = 0;
  int64_t num_steps = 0;         // T
  bool is_double = false;        // the type of sums and losses
  bool on_device = false;        // device kernels run instead of CPU kernels
  at::TensorOptions sum_options; // type and device of losses

  // Set by run().
  Outputs outputs;
  Tensors gradients;      // for grad_output 1, by prediction tensor; undefined where none is wanted
  at::Tensor skipped;     // on a device, if samples are skipped: a copy of per_sample, because users may overwrite it
  at::Tensor counts;      // on a device: float64 [heads], the numbers of unmasked entries, if they divide sums of heads
  at::Tensor metrics;     // float64 [segments, B, 2], the RowMetrics of all rows
  at::Tensor differences; // [segments, B, 2], of the policies among the rows that have log_probs
  Tensors scale_rows;     // by head: gradients of shared log_stds by row, or sums over kLanes rows, [rows, D]
  std::shared_ptr<const Launches> launches; // on a device, for run_again(); null if they read copies of tensors

  // The largest number of steps of a head, counted from the root.
  int64_t count_steps() const;

  bool wants_any() const;
  // True if the gradient of a prediction of the head is wanted.
  bool wants_head(size_t head) const;

  // True if a prediction of the head is the logits of distributions.
  bool has_logits(size_t head) const;
  bool has_detail(size_t head) const {
    return (*heads)[head].kind == Kind::policy_gradient ? has_logits(head) : (*heads)[head].detail != Detail::none;
  }
  // True if approx_kl and clip_fraction are outputs of the head.
  bool has_old_policy(size_t head) const {
    return is_policy((*heads)[head].kind) && !targets[head][1 + kLogProbs].tensors.empty();
  }

  // True if the gradients of kLanes rows of shared log_stds are added up at once.
  bool sums_rows() const {
    return !on_device && nonfinite == Nonfinite::propagate;
  }

  // The dimension of the samples in a tensor that also has a step dimension.
  int64_t batch_dim() const {
    return batch_first || !steps ? 0 : 1;
  }
  int64_t batch_dim(const Entries& entries) const {
    return entries.stacked ? batch_dim() : 0;
  }

  // Calls visit(entries of the head, tensor, index) for all prediction tensors.
  template <class Visit>
  void each_prediction(Visit visit) const;

  // Calls visit(tensor) for all tensors of the call; undefined ones are options that were not given.
  template <class Visit>
  void each_tensor(Visit visit) const;

  // Finds types and sizes, and throws a Refusal of arguments that do not fit each other.
  void check();
  // Allocates the outputs, and the gradients if they are not allocated yet. The result is valid until end_pass(), which
  // accepts the launches that computed it.
  Pass begin_pass();
  void end_pass(std::shared_ptr<const Launches> used);
  // Makes outputs without values, whose sizes may be symbols, for a tracer.
  void trace_outputs();
  // Adds up the gradients of shared log_stds over their rows, and adds the sums to head_gradient_norms.
  void sum_scales(Tensors& sums, bool adds_norms) const;

  // The rows of a step. Step 0 is the first step of the head.
  Rows rows_of(const Entries& entries, int64_t step) const;
  StepMask step_mask(size_t head) const;

  // The Slab of a tensor that has the type of the losses; without data if the tensor is undefined.
  Slab slab(const at::Tensor& tensor, int64_t stride) const;

 private:
  void find_types();
  void find_sizes();
  // Makes tensors for the results of a forward pass. Size: int64_t, or c10::SymInt for a tracer.
  template <class Size>
  void make_outputs();
  // Makes tensors that only the kernels use.
  void make_scratch();
  // Allocates contiguous gradients with the shapes of the predictions.
  void make_gradients();

  void add_coefficients(size_t head);
  bool counts_on_device(size_t head) const;
  double entries_of(size_t head, const StepMask& counted) const;
  void add_segments(size_t head);
  void add_targets(size_t head, Segment* segments);
  Rows gradient_rows(const Entries& predicted, int64_t step) const;
  Rows scale_gradient_rows(size_t head, const Entries& scales, int64_t step);
  const Entries& with_contiguous_elements(const Entries& entries);
  Rows view_rows(const at::Tensor& tensor, bool stacked, int64_t step) const;
  Slab column(const at::Tensor& tensor, int64_t step) const;

  std::vector<Coefficients> coefficients_; // by head
  std::vector<Segment> segments_;
  std::vector<Rows> fields_;
  std::deque<Entries> copies_; // contiguous copies of entries, which the kernels read
};

// Runs a call that has been checked. Without a grad_output: computes the outputs, and the wanted gradients for a
// grad_output of 1. With one: computes the gradients times grad_output; a device computes nothing else, and does not
// synchronize.
void run(Call& call);

// The same for a call that has run without a grad_output, and whose gradients are still in their memory. Keeps them
// where grad_output is 1, and overwrites them otherwise. Needs `launches`.
void run_again(const Call& call, const at::Tensor& grad_output);

// ---- On a processor -------------------------------------------------------------------------------------------------

// Computes a pass on a CPU. is_double: the type of losses.
void compute_loss(const Pass& pass, bool is_double);

class OnDevice;

// Launches a pass on a device: losses, except in a backward pass, and gradients where segments have memory for them.
std::shared_ptr<const Launches> launch_loss(const Pass& pass, const OnDevice& device);

// Launches the rows of a forward pass again, for a grad_output.
void launch_again(const Launches& forward, const Slab& grad_output, const OnDevice& device);

template <class Visit>
void Call::each_prediction(Visit visit) const {
  size_t index = 0;
  for (const std::vector<Entries>& fields : predictions) {
    for (const Entries& entries : fields) {
      for (const at::Tensor& tensor : entries.tensors) {
        visit(entries, tensor, index++);
      }
    }
  }
}

template <class Visit>
void Call::each_tensor(Visit visit) const {
  for (const auto* both : {&predictions, &targets}) {
    for (const std::vector<Entries>& fields : *both) {
      for (const Entries& entries : fields) {
        std::for_each(entries.tensors.begin(), entries.tensors.end(), visit);
      }
    }
  }
  for (const ByHead<StepNumbers>* both : {&step_weights, &step_gradient_scale}) {
    for (const StepNumbers& numbers : both->values) {
      visit(numbers.tensor);
    }
  }
  for (const ByHead<at::Tensor>* both : {&importance_weights, &mask}) {
    std::for_each(both->values.begin(), both->values.end(), visit);
  }
  for (const HeadWeight& weight : head_weights.values) {
    visit(weight.tensor);
  }
  for (const NumEntries& entries : num_entries.values) {
    visit(entries.tensor);
  }
}

} // namespace gradscale
