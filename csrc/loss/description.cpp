#include "description.h"

#include "../host/tensor_element.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

namespace gradscale {

namespace {

bool has_double(const std::vector<Entries>& predictions) {
  return std::any_of(predictions.begin(), predictions.end(), [](const Entries& entries) {
    return std::any_of(entries.tensors.begin(), entries.tensors.end(), [](const at::Tensor& tensor) {
      return tensor.scalar_type() == at::kDouble;
    });
  });
}

at::Tensor as_floats(const at::Tensor& weights) {
  const bool readable = weights.scalar_type() == at::kDouble || weights.scalar_type() == at::kFloat;
  return readable ? weights : weights.to(at::kFloat);
}

} // namespace

Description::Description(const HeadTable& of_heads, const GradientMemory& memory, const Arguments& of_call, bool wide)
    : heads(of_heads),
      arguments(of_call),
      batch(of_call.batch),
      device(of_call.predictions[0].tensors[0].device()),
      on_device(runs_kernels(device)),
      is_double(has_double(of_call.predictions)),
      of_sums(at::TensorOptions().dtype(is_double ? at::kDouble : at::kFloat).device(device)),
      memory_(memory),
      wide_(wide) {
  make_coefficients();
}

Slab Description::slab(const at::Tensor& tensor, int64_t stride) const {
  return tensor.defined() ? Slab{tensor.mutable_data_ptr(), stride, is_double} : Slab{};
}

int64_t Description::steps_of(size_t head) const {
  return arguments.steps - heads[head].first_step;
}

// ---- Outputs and gradients ------------------------------------------------------------------------------------------

void Description::make_outputs() {
  outputs.per_sample = at::empty({batch}, of_sums);
  outputs.loss = arguments.reduction == Reduction::none ? at::empty({batch}, of_sums) : at::empty({}, of_sums);
  outputs.head_means = at::empty({static_cast<int64_t>(heads.size())}, of_sums);
  outputs.head_losses = at::empty_like(outputs.head_means);
  outputs.num_nonfinite = at::empty({}, of_sums.dtype(at::kLong));
  outputs.per_step.resize(heads.size());
  outputs.details.resize(heads.size());
  for (size_t h = 0; h < heads.size(); ++h) {
    outputs.per_step[h] = make_entries(h);
    if (heads[h].detail != Detail::none) {
      outputs.details[h] = make_entries(h);
    }
  }
}

// A number for every entry of a head; in memory a sample's steps are side by side, also where the sizes are [T_h, B].
at::Tensor Description::make_entries(size_t head) const {
  const int64_t steps = steps_of(head);
  return arguments.batch_first ? at::empty({batch, steps}, of_sums)
                               : at::empty_strided({steps, batch}, {1, steps}, of_sums);
}

void Description::make_gradients() {
  gradients.resize(heads.size());
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::vector<at::Tensor>& predictions = arguments.predictions[h].tensors;
    int64_t size = 0;
    for (size_t i = 0; !on_device && i < predictions.size(); ++i) {
      size += arguments.wants[h][i] ? gradient_bytes(predictions[i]) : 0;
    }
    const GradientMemory::Block block = size > 0 ? memory_.take(h, size) : nullptr;
    int64_t offset = 0;
    for (size_t i = 0; i < predictions.size(); ++i) {
      gradients[h].push_back(arguments.wants[h][i] ? make_gradient(predictions[i], block, offset) : at::Tensor());
    }
  }
}

at::ScalarType Description::gradient_type(const at::Tensor& prediction) const {
  return wide_ && prediction.scalar_type() != at::kDouble ? at::kFloat : prediction.scalar_type();
}

int64_t Description::gradient_bytes(const at::Tensor& prediction) const {
  constexpr int64_t alignment = 64;
  const auto element = static_cast<int64_t>(c10::elementSize(gradient_type(prediction)));
  return (prediction.numel() * element + alignment - 1) / alignment * alignment;
}

at::Tensor Description::make_gradient(
    const at::Tensor& prediction, const GradientMemory::Block& block, int64_t& offset) const {
  const at::ScalarType dtype = gradient_type(prediction);
  if (!block) {
    return at::empty(prediction.sizes(), of_sums.dtype(dtype));
  }
  const int64_t begin = offset;
  offset += gradient_bytes(prediction);
  return GradientMemory::piece_of(block, begin, prediction, dtype);
}

// ---- Coefficients ---------------------------------------------------------------------------------------------------

void Description::make_coefficients() {
  Coefficients common{};
  common.step_weights = step_weight(arguments.step_weights);
  common.step_gradient_scale = step_weight(arguments.step_gradient_scale);
  if (arguments.importance_weights.defined()) {
    const at::Tensor weights = keep_alive(as_floats(arguments.importance_weights));
    common.importance_weights.values = {
        weights.mutable_data_ptr(), weights.stride(0), weights.scalar_type() == at::kDouble};
  }
  for (size_t h = 0; h < heads.size(); ++h) {
    Coefficients own = common;
    const at::Tensor& mask = arguments.mask[h];
    if (mask.defined()) {
      const int64_t batch_dim = arguments.batch_dim();
      own.mask = {mask.const_data_ptr<bool>(), mask.stride(batch_dim), mask.stride(1 - batch_dim)};
    }
    const bool counted_there = on_device && mask.defined();
    num_unmasked.push_back(counted_there ? 1 : count_unmasked(h, own.mask));
    own.factor = heads[h].weight / divisor(h);
    coefficients.push_back(own);
  }
}

// What the sum of a head is divided by; 1 where a device knows it.
double Description::divisor(size_t head) const {
  if (arguments.num_entries.defined()) {
    return on_device ? 1.0 : arguments.num_entries.const_data_ptr<double>()[head];
  }
  switch (arguments.reduction) {
    case Reduction::mean:
      return static_cast<double>(std::max<int64_t>(batch, 1));
    case Reduction::valid_mean:
      return static_cast<double>(std::max<int64_t>(num_unmasked[head], 1));
    case Reduction::sum:
    case Reduction::none:
      break;
  }
  return 1.0;
}

StepWeight Description::step_weight(const StepNumbers& numbers) {
  if (numbers.tensor.defined()) {
    const at::Tensor tensor = keep_alive(as_floats(numbers.tensor));
    StepWeight weight;
    weight.values = {
        tensor.mutable_data_ptr(),
        tensor.dim() == 2 ? tensor.stride(arguments.batch_dim()) : 0,
        tensor.scalar_type() == at::kDouble};
    weight.step_stride = tensor.stride(tensor.dim() == 2 ? 1 - arguments.batch_dim() : 0);
    return weight;
  }
  if (numbers.numbers.empty() || on_device) { // a device finds them in its call
    return {};
  }
  return {{const_cast<double*>(numbers.numbers.data()), 0, true}, 1};
}

int64_t Description::count_unmasked(size_t head, const StepMask& mask) const {
  const int64_t first = heads[head].first_step;
  if (mask.data == nullptr) {
    return batch * (arguments.steps - first);
  }
  int64_t count = 0;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t k = first; k < arguments.steps; ++k) {
      count += mask.includes(b, k) ? 1 : 0;
    }
  }
  return count;
}

// ---- Segments -------------------------------------------------------------------------------------------------------

void Description::make_segments() {
  outputs.per_step.resize(heads.size());
  outputs.details.resize(heads.size());
  for (size_t h = 0; h < heads.size(); ++h) {
    add_segments(h);
  }
}

void Description::add_segments(size_t h) {
  const Head& head = heads[h];
  Entries predictions = arguments.predictions[h];
  Entries targets = arguments.targets[h];
  for (int64_t t = 0; t < steps_of(h); ++t) {
    Segment segment{};
    segment.head = &head;
    segment.step = head.first_step + t;
    segment.width = predictions.dims() == 1 ? predictions.tensors[0].size(-1) : 1;
    segment.prediction = rows_of(predictions, t);
    if (heads.has_target(h)) {
      segment.target = rows_of(targets, t);
    }
    const at::Tensor& gradient = gradients[h][predictions.stacked ? 0 : t];
    if (gradient.defined()) {
      segment.gradient = view_rows(gradient, predictions.stacked, t);
    }
    segment.loss = column(outputs.per_step[h], t);
    segment.detail = column(outputs.details[h], t);
    segments.push_back(segment);
  }
  for (Entries* entries : {&predictions, &targets}) { // the kernels read contiguous copies made by rows_of
    kept_alive_.insert(kept_alive_.end(), entries->tensors.begin(), entries->tensors.end());
  }
}

// Rows of the entries at a step, counted from the head's first; elements that are not contiguous are copied.
Rows Description::rows_of(Entries& entries, int64_t step) {
  at::Tensor& tensor = entries.tensors[entries.stacked ? 0 : step];
  const bool has_elements = tensor.dim() > (entries.stacked ? 2 : 1); // other steps may hold classes
  if (has_elements && tensor.size(-1) > 1 && tensor.stride(-1) != 1) {
    tensor = tensor.contiguous();
  }
  return view_rows(tensor, entries.stacked, step);
}

Rows Description::view_rows(const at::Tensor& tensor, bool stacked, int64_t step) const {
  const int64_t batch_dim = stacked ? arguments.batch_dim() : 0;
  const int64_t offset = stacked ? step * tensor.stride(1 - batch_dim) : 0;
  char* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  return {data + offset * tensor.element_size(), tensor.stride(batch_dim), element_of(tensor)};
}

// A step of [B, T_h].
Slab Description::column(const at::Tensor& tensor, int64_t step) const {
  return tensor.defined() ? slab(tensor, tensor.stride(arguments.batch_dim())).from(step) : Slab{};
}

at::Tensor Description::keep_alive(at::Tensor tensor) {
  kept_alive_.push_back(tensor);
  return tensor;
}

} // namespace gradscale
