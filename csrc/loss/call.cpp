#include "call.h"

#include "../cpu/scratch.h"
#include "../cuda/driver.h"
#include "../cuda/empty_tensor.h"
#include "../torch/gradient_pool.h"
#include "../torch/tensor_element.h"

#include <ATen/TensorGeometry.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/hypot.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <utility>

namespace gradscale {

namespace {

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

// ---- The given tensors ----------------------------------------------------------------------------------------------

bool Call::wants_any() const {
  const std::vector<HeadWeight>& weights = head_weights.values;
  return std::find(wants.begin(), wants.end(), true) != wants.end() ||
         std::any_of(weights.begin(), weights.end(), [](const HeadWeight& weight) { return weight.wants_gradient; });
}

bool Call::wants_head(size_t head) const {
  const Entries &first = predictions[head].front(), &last = predictions[head].back();
  const auto begin = wants.begin() + static_cast<int64_t>(first.first);
  const auto end = wants.begin() + static_cast<int64_t>(last.first + last.tensors.size());
  return std::find(begin, end, true) != end;
}

bool Call::has_logits(size_t h) const {
  const Kind kind = (*heads)[h].kind;
  return gradscale::has_logits(kind) || kind == Kind::categorical_kl ||
         (kind == Kind::policy_gradient && predictions[h][0].row_dims() > 0);
}

// ---- Outputs and gradients ------------------------------------------------------------------------------------------

namespace {

// A tensor for a result. A tracer's symbolic sizes get no memory.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return empty_large(sizes, options);
}
at::Tensor empty_result(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty_symint(sizes, options);
}

template <class Size>
Size size_of(const at::Tensor& tensor, int64_t dim) {
  if constexpr (std::is_same_v<Size, int64_t>) {
    return tensor.size(dim);
  } else {
    return tensor.sym_size(dim);
  }
}

} // namespace

template <class Size>
void Call::make_outputs() {
  const auto make = [&](std::initializer_list<Size> sizes) {
    return empty_result(c10::ArrayRef<Size>(sizes), sum_options);
  };
  const Size samples = size_of<Size>(predictions[0][0].tensors[0], batch_dim(predictions[0][0]));
  const auto make_loss = [&] { return reduction == Reduction::none ? make({samples}) : make({}); };
  // A number per sample and step of a head. The steps of a sample are adjacent in memory, also in [T_h, B].
  const auto make_entries = [&](size_t h) {
    const Entries& entries = predictions[h][0];
    if (!steps) {
      return make({samples});
    }
    const Size count = entries.stacked ? size_of<Size>(entries.tensors[0], 1 - batch_dim())
                                       : Size(static_cast<int64_t>(entries.tensors.size()));
    return batch_first ? make({samples, count})
                       : at::symint::empty_strided<Size>({count, samples}, {1, count}, sum_options);
  };
  outputs.loss = make_loss();
  outputs.per_sample = make({samples});
  for (at::Tensor* output :
       {&outputs.head_means, &outputs.head_losses, &outputs.head_gradient_norms, &outputs.max_abs_logit}) {
    *output = make({Size(static_cast<int64_t>(heads->size()))});
  }
  outputs.num_nonfinite = empty_result(c10::ArrayRef<Size>(), sum_options.dtype(at::kLong));
  for (size_t h = 0; h < heads->size(); ++h) {
    outputs.per_step.push_back(make_entries(h));
    outputs.details.push_back(has_detail(h) ? make_entries(h) : at::Tensor());
    outputs.log_probs.push_back(is_policy((*heads)[h].kind) ? make_entries(h) : at::Tensor());
    for (Tensors* of_policy : {&outputs.approx_kl, &outputs.clip_fraction}) {
      of_policy->push_back(has_old_policy(h) ? make({}) : at::Tensor());
    }
    outputs.shares.push_back(head_weights[h].wants_gradient ? make_loss() : at::Tensor());
  }
}

void Call::trace_outputs() {
  find_types();
  make_outputs<c10::SymInt>();
}

void Call::make_scratch() {
  int64_t segments = 0;
  for (size_t h = 0; h < heads->size(); ++h) {
    segments += num_steps - (*heads)[h].first_step;
  }
  metrics = empty_large({segments, batch, 2}, sum_options.dtype(at::kDouble));
  for (size_t h = 0; h < heads->size() && !differences.defined(); ++h) {
    if (has_old_policy(h)) {
      differences = empty_large({segments, batch, 2}, sum_options);
    }
  }
  if (on_device && nonfinite == Nonfinite::skip) {
    skipped = empty_tensor({batch}, sum_options);
  }
  for (NumEntries& entries : num_entries.values) { // a kernel reads float64
    entries.tensor = on_device && entries.tensor.defined() ? entries.tensor.to(at::kDouble) : entries.tensor;
  }
  for (size_t h = 0; h < heads->size() && !counts.defined(); ++h) {
    if (counts_on_device(h)) {
      counts = empty_tensor({static_cast<int64_t>(heads->size())}, sum_options.dtype(at::kDouble));
    }
  }
}

// True if a kernel counts the unmasked entries of a head.
bool Call::counts_on_device(size_t head) const {
  const NumEntries& given = num_entries[head];
  return on_device && reduction == Reduction::valid_mean && mask[head].defined() && given.number == 0 &&
         !given.tensor.defined();
}

void Call::make_gradients() {
  begin_pooled_call(sum_options.device());
  gradients.resize(wants.size());
  each_prediction([&](const Entries&, const at::Tensor& tensor, size_t index) {
    if (wants[index]) {
      gradients[index] = empty_pooled(tensor.sizes(), sum_options.dtype(tensor.scalar_type()));
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
  pass.has_gradients = !gradients.empty();
  if (!pass.has_gradients) {
    make_gradients();
  }
  if (!on_device || !pass.is_backward) {
    make_outputs<int64_t>();
    make_scratch();
  }
  outputs.per_step.resize(heads->size());
  outputs.details.resize(heads->size());
  outputs.log_probs.resize(heads->size());
  outputs.approx_kl.resize(heads->size());
  outputs.clip_fraction.resize(heads->size());
  outputs.shares.resize(heads->size());
  scale_rows.assign(heads->size(), at::Tensor());
  pass.grad_output = slab(grad_output, pass.is_backward && grad_output.dim() != 0 ? grad_output.stride(0) : 0);
  for (size_t h = 0; h < heads->size(); ++h) {
    add_coefficients(h);
    add_segments(h);
  }
  pass.heads = heads->data();
  pass.coefficients = coefficients_.data();
  pass.segments = segments_.data();
  pass.fields = fields_.data();
  pass.num_fields = static_cast<int64_t>(fields_.size());
  pass.num_heads = static_cast<int64_t>(heads->size());
  pass.num_segments = static_cast<int64_t>(segments_.size());
  pass.batch = batch;
  pass.steps = num_steps;
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
  for (size_t h = 0; h < heads->size(); ++h) {
    pass.has_old_policy = pass.has_old_policy || has_old_policy(h);
  }
  pass.skipped = slab(skipped, 1);
  return pass;
}

void Call::end_pass(std::shared_ptr<const Launches> used) {
  sum_scales(gradients, outputs.head_gradient_norms.defined());
  if (!on_device) {
    scale_rows.clear();
  }
  launches = copies_.empty() ? std::move(used) : nullptr;
  coefficients_.clear();
  segments_.clear();
  fields_.clear();
  copies_.clear();
  metrics.reset();
  differences.reset();
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
  coefficients.approx_kl = slab(outputs.approx_kl[h], 0);
  coefficients.clip_fraction = slab(outputs.clip_fraction[h], 0);
  coefficients_.push_back(coefficients);
}

StepMask Call::step_mask(size_t head) const {
  const at::Tensor& tensor = mask[head];
  if (!tensor.defined()) {
    return {};
  }
  return {tensor.const_data_ptr<bool>(), tensor.stride(batch_dim()), steps ? tensor.stride(1 - batch_dim()) : 0};
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
  int64_t count = counted.data == nullptr ? batch * (num_steps - first) : 0;
  for (int64_t b = 0; b < batch && counted.data != nullptr && !on_device; ++b) {
    for (int64_t k = first; k < num_steps; ++k) {
      count += counted.includes(b, k) ? 1 : 0;
    }
  }
  return static_cast<double>(count);
}

void Call::add_segments(size_t h) {
  const Head& head = (*heads)[h];
  const Entries& predicted = with_contiguous_elements(predictions[h][0]);
  const auto number_at = [](const StepNumbers& given, int64_t step) {
    return given.numbers.empty() ? 1.0 : given.numbers[step];
  };
  for (int64_t t = 0; t < num_steps - head.first_step; ++t) {
    Segment segment{};
    segment.head = &head;
    segment.step = head.first_step + t;
    const at::IntArrayRef sizes = predicted.sizes(t);
    segment.width = c10::multiply_integers(sizes);
    segment.last_size = sizes.empty() ? 1 : sizes.back();
    segment.prediction = rows_of(predicted, t);
    segment.gradient = gradient_rows(predicted, t);
    segment.loss = column(outputs.per_step[h], t);
    segment.detail = column(outputs.details[h], t);
    if (metrics.defined()) { // a backward pass has none
      segment.metrics = static_cast<RowMetrics*>(metrics.mutable_data_ptr()) + batch * segments_.size();
    }
    segment.step_weight = number_at(step_weights[h], segment.step);
    segment.step_gradient_scale = number_at(step_gradient_scale[h], segment.step);
    segments_.push_back(segment);
  }
  if (heads->has_target(h)) {
    add_targets(h, segments_.data() + segments_.size() - (num_steps - head.first_step));
  }
}

// Sets the targets and fields of a head's segments.
void Call::add_targets(size_t h, Segment* segments) {
  std::vector<const Entries*> wanted;
  for (const Entries& entries : targets[h]) {
    wanted.push_back(&with_contiguous_elements(entries));
  }
  const bool has_policy = is_policy((*heads)[h].kind), has_scales = predictions[h].size() > 1;
  const Entries* scales = has_scales ? &with_contiguous_elements(predictions[h][1]) : nullptr;
  for (int64_t t = 0; t < num_steps - (*heads)[h].first_step; ++t) {
    Segment& segment = segments[t];
    const auto rows = [&](const Entries& entries) { return entries.tensors.empty() ? Rows{} : rows_of(entries, t); };
    segment.target = rows(*wanted[0]);
    segment.target_width = wanted[0]->tensors.empty() ? 0 : c10::multiply_integers(wanted[0]->sizes(t));
    segment.first_field = static_cast<int64_t>(fields_.size());
    for (size_t i = 1; i < wanted.size(); ++i) {
      fields_.push_back(rows(*wanted[i]));
    }
    if (has_policy) {
      const Slab chosen = column(outputs.log_probs[h], t);
      const Element element = is_double ? Element::float64 : Element::float32;
      fields_.push_back({chosen.data, chosen.stride, element});
      const bool has_differences = differences.defined() && has_old_policy(h);
      const int64_t first =
          batch * 2 * (static_cast<int64_t>(segments_.size()) - (num_steps - (*heads)[h].first_step) + t);
      char* memory = has_differences ? static_cast<char*>(differences.mutable_data_ptr()) : nullptr;
      fields_.push_back({has_differences ? memory + first * element_size(element) : nullptr, 2, element});
    }
    if (has_scales) {
      fields_.push_back(rows(*scales));
      fields_.push_back(scales->sums_gradient() ? scale_gradient_rows(h, *scales, t) : gradient_rows(*scales, t));
      segment.wants_scales = fields_.back().data != nullptr;
      segment.shares_scales = scales->shared;
      segment.sums_scales = scales->sums_gradient() && sums_rows();
    }
  }
}

// The gradient of one step of a prediction; without data if it is not wanted.
Rows Call::gradient_rows(const Entries& predicted, int64_t step) const {
  const at::Tensor& gradient = gradients[predicted.first + (predicted.stacked ? 0 : step)];
  return gradient.defined() ? view_rows(gradient, predicted.stacked, step) : Rows{};
}

// The gradients of shared log_stds at a step. They are added up afterwards. A CPU adds up each kLanes rows at once,
// unless samples may be skipped.
Rows Call::scale_gradient_rows(size_t h, const Entries& scales, int64_t step) {
  if (!gradients[scales.first].defined()) {
    return {};
  }
  const int64_t rows = sums_rows() ? (batch + kLanes - 1) / kLanes : batch, width = scales.tensors[0].size(0);
  at::Tensor& all = scale_rows[h];
  if (!all.defined()) {
    const bool is_double_row = scales.tensors[0].scalar_type() == at::kDouble;
    const int64_t steps_of_head = num_steps - (*heads)[h].first_step;
    all = empty_large({steps_of_head * rows, width}, sum_options.dtype(is_double_row ? at::kDouble : at::kFloat));
  }
  return {
      static_cast<char*>(all.mutable_data_ptr()) + step * rows * width * all.element_size(), width, element_of(all)};
}

void Call::sum_scales(Tensors& sums, bool adds_norms) const {
  for (size_t h = 0; h < predictions.size(); ++h) {
    const Entries& last = predictions[h].back();
    if (!last.shared || !sums[last.first].defined()) {
      continue;
    }
    const at::Tensor rows = last.sums_gradient() ? scale_rows[h] : sums[last.first].flatten(0, -2);
    const at::Tensor total = rows.sum(0, /*keepdim=*/false, sum_options.dtype().toScalarType());
    if (last.sums_gradient()) {
      sums[last.first].copy_(total);
    }
    if (adds_norms && on_device) {
      at::Tensor norm = outputs.head_gradient_norms.select(0, static_cast<int64_t>(h));
      norm.copy_(at::hypot(norm, at::linalg_vector_norm(total)));
    } else if (adds_norms) { // without the overhead of operators
      const Rows numbers{const_cast<void*>(total.const_data_ptr()), 0, element_of(total)};
      double norm = slab(outputs.head_gradient_norms, 1).load(static_cast<int64_t>(h));
      for (int64_t j = 0; j < total.size(0); ++j) {
        norm = std::hypot(norm, numbers.load(0, j));
      }
      slab(outputs.head_gradient_norms, 1).store(static_cast<int64_t>(h), norm);
    }
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
  if (entries.sums_gradient()) { // the same row for all
    const at::Tensor& row = entries.tensors[0];
    return {const_cast<void*>(row.const_data_ptr()), 0, element_of(row)};
  }
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
