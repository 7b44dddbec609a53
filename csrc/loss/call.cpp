#include "call.h"

#include "../cuda/driver.h"
#include "../cuda/empty_tensor.h"
#include "../torch/gradient_pool.h"
#include "../torch/tensor_element.h"
#include "checks.h"

#include <ATen/TensorGeometry.h>
#include <ATen/ops/empty_strided.h>

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace gradscale {

namespace {

#define GRADSCALE_NUMBER_OF_HEAD(type, name) GRADSCALE_NUMBER(Head, name),
constexpr Number<Head> kHeadParameters[] = {GRADSCALE_NUMBERS_OF_HEADS(GRADSCALE_NUMBER_OF_HEAD)};
#undef GRADSCALE_NUMBER_OF_HEAD

// A weight in a tensor with these dimensions of samples and steps; -1: the tensor has no such dimension.
StepWeight weight_of(const at::Tensor& tensor, int64_t batch_dim, int64_t step_dim) {
  if (!tensor.defined()) {
    return {};
  }
  const auto stride = [&](int64_t dim) { return dim < 0 ? 0 : tensor.stride(dim); };
  void* data = const_cast<void*>(tensor.const_data_ptr());
  return {{data, stride(batch_dim), element_of(tensor)}, stride(step_dim)};
}

} // namespace

// ---- Heads ----------------------------------------------------------------------------------------------------------

Heads::Heads(const std::vector<std::string>& names, const std::vector<double>& numbers, std::vector<std::string> labels)
    : labels_(std::move(labels)) {
  TORCH_CHECK(
      !names.empty() && names.size() == numbers.size(),
      "multi_step_loss: heads must be described by names and as many numbers, but there are ",
      names.size(),
      " names and ",
      numbers.size(),
      " numbers");
  for (size_t i = 0; i < names.size(); ++i) {
    const auto kind =
        std::find_if(kinds().begin(), kinds().end(), [&](const KindOfHead& known) { return known.name == names[i]; });
    if (kind != kinds().end()) {
      heads_.emplace_back().kind = static_cast<Kind>(kind - kinds().begin());
      continue;
    }
    TORCH_CHECK(!heads_.empty(), "multi_step_loss: '", names[i], "' is not a kind of head");
    Head& head = heads_.back();
    TORCH_CHECK(
        set_by_name(kHeadParameters, head, names[i], numbers[i]) ||
            set_by_name(kNumbersOfSupport, head.support, names[i], numbers[i]),
        "multi_step_loss: a head has no number '",
        names[i],
        "'");
  }
  for (Head& head : heads_) {
    const KindOfHead& kind = description_of(head.kind);
    TORCH_CHECK(
        head.detail == kind.detail && head.first_step >= 0 && (!head.has_support() || head.support.num_bins >= 2) &&
            head.support.transform >= Transform::identity && head.support.transform <= Transform::symlog,
        "multi_step_loss: the numbers of a head are not the numbers of a '",
        kind.name,
        "'");
    head.support = supports_.emplace_back(head.support).get();
  }
}

std::string Heads::words(const Part& part) const {
  if (part.head < 0) {
    return part.argument;
  }
  const std::string label = labels_.empty() ? std::to_string(part.head) : c10::str("'", labels_[part.head], "'");
  const std::string of_head = c10::str("the ", part.argument, " of head ", label);
  return part.entry < 0 ? of_head : c10::str(of_head, " at step ", heads_[part.head].first_step + part.entry);
}

// ---- The given tensors ----------------------------------------------------------------------------------------------

void Call::measure() {
  if (predictions.size() != heads->size() || targets.size() != heads->size()) {
    throw Refusal{"heads", c10::str("has ", heads->size(), " heads")};
  }
  size_t count = 0;
  for (Entries& entries : predictions) {
    if (entries.tensors.empty()) {
      throw Refusal{"predictions", "has a head without tensors"};
    }
    entries.first = std::exchange(count, count + entries.tensors.size());
  }
  const Entries& entries = predictions[0];
  const at::Tensor& first = entries.tensors[0];
  batch = first.dim() > batch_dim(entries) ? first.size(batch_dim(entries)) : 0;
  steps = count_steps();
  on_device = runs_kernels(first.device());
  is_double = false;
  each_prediction([&](const Entries&, const at::Tensor& tensor, size_t) {
    is_double = is_double || tensor.scalar_type() == at::kDouble;
  });
  sum_options = at::TensorOptions().dtype(is_double ? at::kDouble : at::kFloat).device(first.device());
}

int64_t Call::count_steps() const {
  int64_t most = 0;
  for (size_t h = 0; h < heads->size(); ++h) {
    most = std::max(most, (*heads)[h].first_step + steps_of(predictions[h], batch_first));
  }
  return most;
}

bool Call::wants_any() const {
  const std::vector<HeadWeight>& weights = head_weights.values;
  return std::find(wants.begin(), wants.end(), true) != wants.end() ||
         std::any_of(weights.begin(), weights.end(), [](const HeadWeight& weight) { return weight.wants_gradient; });
}

bool Call::wants_head(size_t head) const {
  const Entries& entries = predictions[head];
  const auto first = wants.begin() + static_cast<int64_t>(entries.first);
  const auto last = first + static_cast<int64_t>(entries.tensors.size());
  return std::find(first, last, true) != last;
}

// ---- Outputs and gradients ------------------------------------------------------------------------------------------

void Call::make_outputs() {
  const auto num_heads = static_cast<int64_t>(heads->size());
  outputs.per_sample = empty_tensor({batch}, sum_options);
  const auto make_loss = [&] {
    return reduction == Reduction::none ? empty_tensor({batch}, sum_options) : empty_tensor({}, sum_options);
  };
  outputs.loss = make_loss();
  for (at::Tensor* output :
       {&outputs.head_means, &outputs.head_losses, &outputs.head_gradient_norms, &outputs.max_abs_logit}) {
    *output = empty_tensor({num_heads}, sum_options);
  }
  outputs.num_nonfinite = empty_tensor({}, sum_options.dtype(at::kLong));
  int64_t segments = 0;
  for (size_t h = 0; h < heads->size(); ++h) {
    outputs.per_step.push_back(make_entries(h));
    outputs.details.push_back((*heads)[h].detail == Detail::none ? at::Tensor() : make_entries(h));
    outputs.shares.push_back(head_weights[h].wants_gradient ? make_loss() : at::Tensor());
    segments += steps - (*heads)[h].first_step;
  }
  metrics = empty_tensor({segments, batch, 2}, sum_options.dtype(at::kDouble));
  if (on_device && nonfinite == Nonfinite::skip) {
    skipped = empty_tensor({batch}, sum_options);
  }
  for (NumEntries& entries : num_entries.values) { // a kernel reads float64
    entries.tensor = on_device && entries.tensor.defined() ? entries.tensor.to(at::kDouble) : entries.tensor;
  }
  for (size_t h = 0; h < heads->size() && !counts.defined(); ++h) {
    if (counts_on_device(h)) {
      counts = empty_tensor({num_heads}, sum_options.dtype(at::kDouble));
    }
  }
}

// True if a kernel counts the unmasked entries of a head.
bool Call::counts_on_device(size_t head) const {
  const NumEntries& given = num_entries[head];
  return on_device && reduction == Reduction::valid_mean && mask[head].defined() && given.number == 0 &&
         !given.tensor.defined();
}

// Allocates a number per sample and step of a head. The steps of a sample are adjacent in memory, also in [T_h, B].
at::Tensor Call::make_entries(size_t head) const {
  const int64_t head_steps = steps - (*heads)[head].first_step;
  return batch_first ? empty_tensor({batch, head_steps}, sum_options)
                     : at::empty_strided({head_steps, batch}, {1, head_steps}, sum_options);
}

void Call::make_gradients() {
  begin_pooled_call(sum_options.device());
  gradients.resize(wants.size());
  each_prediction([&](const Entries&, const at::Tensor& tensor, size_t index) {
    if (wants[index]) {
      gradients[index] = empty_gradient(tensor.sizes(), sum_options.dtype(tensor.scalar_type()));
    }
  });
}

// ---- The pass -------------------------------------------------------------------------------------------------------

void run(Call& call) {
  const Pass pass = call.begin_pass();
  std::shared_ptr<const Launches> launches;
  if (call.on_device) {
    launches = launch_loss(pass, OnDevice(call.sum_options.device()));
  } else {
    compute_loss(pass, call.is_double);
  }
  call.end_pass(std::move(launches));
}

void run_again(const Call& call, const at::Tensor& grad_output) {
  const Slab incoming = call.slab(grad_output, grad_output.dim() == 0 ? 0 : grad_output.stride(0));
  launch_again(*call.launches, incoming, OnDevice(call.sum_options.device()));
}

Pass Call::begin_pass() {
  Pass pass{};
  pass.is_backward = grad_output.defined();
  if (!pass.is_backward) {
    measure();
    Checks(*this).all();
  }
  pass.has_gradients = !gradients.empty();
  if (!pass.has_gradients) {
    make_gradients();
  }
  if (!on_device || !pass.is_backward) {
    make_outputs();
  }
  outputs.per_step.resize(heads->size());
  outputs.details.resize(heads->size());
  outputs.shares.resize(heads->size());
  pass.grad_output = slab(grad_output, pass.is_backward && grad_output.dim() != 0 ? grad_output.stride(0) : 0);
  for (size_t h = 0; h < heads->size(); ++h) {
    add_coefficients(h);
    add_segments(h);
  }
  pass.heads = heads->data();
  pass.coefficients = coefficients_.data();
  pass.segments = segments_.data();
  pass.num_heads = static_cast<int64_t>(heads->size());
  pass.num_segments = static_cast<int64_t>(segments_.size());
  pass.batch = batch;
  pass.steps = steps;
  pass.each_sample = reduction == Reduction::none;
  pass.skips_nonfinite = nonfinite == Nonfinite::skip;
  pass.loss = slab(outputs.loss, 1);
  pass.per_sample = slab(outputs.per_sample, 1);
  pass.head_means = slab(outputs.head_means, 1);
  pass.head_losses = slab(outputs.head_losses, 1);
  pass.head_gradient_norms = slab(outputs.head_gradient_norms, 1);
  pass.max_abs_logit = slab(outputs.max_abs_logit, 1);
  pass.num_nonfinite = outputs.num_nonfinite.defined() ? outputs.num_nonfinite.mutable_data_ptr<int64_t>() : nullptr;
  pass.counts_unmasked = counts.defined();
  pass.skipped = slab(skipped, 1);
  return pass;
}

void Call::end_pass(std::shared_ptr<const Launches> used) {
  launches = copies_.empty() ? std::move(used) : nullptr;
  coefficients_.clear();
  segments_.clear();
  copies_.clear();
  metrics.reset();
}

Slab Call::slab(const at::Tensor& tensor, int64_t stride) const {
  return tensor.defined() ? Slab{tensor.mutable_data_ptr(), stride, is_double} : Slab{};
}

void Call::add_coefficients(size_t h) {
  const auto step_weight = [&](const StepNumbers& numbers) {
    const bool by_sample = numbers.tensor.defined() && numbers.tensor.dim() == 2;
    return by_sample ? weight_of(numbers.tensor, batch_dim(), 1 - batch_dim()) : weight_of(numbers.tensor, -1, 0);
  };
  Coefficients coefficients{};
  coefficients.step_weights = step_weight(step_weights[h]);
  coefficients.step_gradient_scale = step_weight(step_gradient_scale[h]);
  coefficients.importance_weights = weight_of(importance_weights[h], 0, -1);
  coefficients.mask = step_mask(h);
  coefficients.factor = (*heads)[h].weight / divisor_for(entries_of(h, coefficients.mask));
  coefficients.counts_unmasked = counts_on_device(h);
  if (coefficients.counts_unmasked) {
    coefficients.entries = counts.mutable_data_ptr<double>() + h;
  } else if (on_device && num_entries[h].tensor.defined()) {
    coefficients.entries = const_cast<double*>(num_entries[h].tensor.const_data_ptr<double>());
  }
  coefficients.head_weight_number = head_weights[h].number;
  coefficients.head_weight_tensor = weight_of(head_weights[h].tensor, -1, -1).values;
  coefficients.share = slab(outputs.shares[h], 1);
  coefficients.first_segment = static_cast<int64_t>(segments_.size());
  coefficients_.push_back(coefficients);
}

StepMask Call::step_mask(size_t head) const {
  const at::Tensor& tensor = mask[head];
  return tensor.defined()
             ? StepMask{tensor.const_data_ptr<bool>(), tensor.stride(batch_dim()), tensor.stride(1 - batch_dim())}
             : StepMask{};
}

// The number of entries that divides a head's sum; 1 if only the device has it.
double Call::entries_of(size_t head, const StepMask& counted) const {
  const NumEntries& given = num_entries[head];
  if (given.tensor.defined()) {
    return on_device ? 1.0 : given.tensor.item<double>();
  }
  if (given.number != 0 || !is_mean(reduction)) {
    return divisor_for(given.number);
  }
  if (reduction == Reduction::mean) {
    return static_cast<double>(batch);
  }
  const int64_t first = (*heads)[head].first_step;
  int64_t count = counted.data == nullptr ? batch * (steps - first) : 0;
  for (int64_t b = 0; b < batch && counted.data != nullptr && !on_device; ++b) {
    for (int64_t k = first; k < steps; ++k) {
      count += counted.includes(b, k) ? 1 : 0;
    }
  }
  return static_cast<double>(count);
}

void Call::add_segments(size_t h) {
  const Head& head = (*heads)[h];
  const Entries& predicted = with_contiguous_elements(predictions[h]);
  const Entries& wanted = with_contiguous_elements(targets[h]);
  const auto number_at = [](const StepNumbers& given, int64_t step) {
    return given.numbers.empty() ? 1.0 : given.numbers[step];
  };
  for (int64_t t = 0; t < steps - head.first_step; ++t) {
    Segment segment{};
    segment.head = &head;
    segment.step = head.first_step + t;
    const at::IntArrayRef sizes = predicted.sizes(t);
    segment.width = c10::multiply_integers(sizes);
    segment.last_size = sizes.empty() ? 1 : sizes.back();
    segment.prediction = rows_of(predicted, t);
    if (heads->has_target(h)) {
      segment.target_width = c10::multiply_integers(wanted.sizes(t));
      segment.target = rows_of(wanted, t);
    }
    const at::Tensor& gradient = gradients[predicted.first + (predicted.stacked ? 0 : t)];
    if (gradient.defined()) {
      segment.gradient = view_rows(gradient, predicted.stacked, t);
    }
    segment.loss = column(outputs.per_step[h], t);
    segment.detail = column(outputs.details[h], t);
    if (metrics.defined()) { // a backward pass has none
      segment.metrics = static_cast<RowMetrics*>(metrics.mutable_data_ptr()) + batch * segments_.size();
    }
    segment.step_weight = number_at(step_weights[h], segment.step);
    segment.step_gradient_scale = number_at(step_gradient_scale[h], segment.step);
    segments_.push_back(segment);
  }
}

// Returns the entries, or a copy of them in which the elements of each row are contiguous.
const Entries& Call::with_contiguous_elements(const Entries& entries) {
  const auto is_contiguous = [&](const at::Tensor& tensor) {
    const int64_t leading = entries.leading_dims();
    return at::geometry_is_contiguous(tensor.sizes().slice(leading), tensor.strides().slice(leading));
  };
  if (std::all_of(entries.tensors.begin(), entries.tensors.end(), is_contiguous)) {
    return entries;
  }
  Entries& copy = copies_.emplace_back(entries);
  for (at::Tensor& tensor : copy.tensors) {
    tensor = is_contiguous(tensor) ? tensor : tensor.contiguous();
  }
  return copy;
}

Rows Call::rows_of(const Entries& entries, int64_t step) const {
  return view_rows(entries.tensors[entries.stacked ? 0 : step], entries.stacked, step);
}

Rows Call::view_rows(const at::Tensor& tensor, bool stacked, int64_t step) const {
  const int64_t sample_dim = stacked ? batch_dim() : 0;
  const int64_t offset = stacked ? step * tensor.stride(1 - sample_dim) : 0;
  char* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  return {data + offset * tensor.element_size(), tensor.stride(sample_dim), element_of(tensor)};
}

// One step of a tensor [B, T_h] ([T_h, B] without batch_first).
Slab Call::column(const at::Tensor& tensor, int64_t step) const {
  return tensor.defined() ? slab(tensor, tensor.stride(batch_dim())).from(step) : Slab{};
}

} // namespace gradscale
