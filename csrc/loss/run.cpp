#include "run.h"

#include "../host/cpu_kernels.h"
#include "../host/device.h"
#include "../host/tensor_element.h"
#include "device_calls.h"
#include "scratch.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cmath>

namespace gradscale {

namespace {

// One call: turns tensors into segments, and runs them on the CPU or on a device.
class Run {
 public:
  Run(const HeadTable& table, const GradientMemory& memory, const Arguments& arguments, bool wide)
      : table_(table),
        memory_(memory),
        arguments_(arguments),
        wide_(wide),
        batch_(arguments.batch),
        device_(arguments.predictions[0].tensors[0].device()),
        kernels_(device_kernels<LossKernels>(device_)) {
    is_double_ = std::any_of(arguments.predictions.begin(), arguments.predictions.end(), [](const Entries& entries) {
      return std::any_of(entries.tensors.begin(), entries.tensors.end(), [](const at::Tensor& tensor) {
        return tensor.scalar_type() == at::kDouble;
      });
    });
    options_ = at::TensorOptions().dtype(is_double_ ? at::kDouble : at::kFloat).device(device_);
    make_coefficients();
  }

  RunResult forward() {
    make_outputs();
    make_gradients();
    make_segments();
    if (kernels_ != nullptr) {
      run_on_device();
    } else {
      run_rows();
      reduce();
    }
    return {std::move(outputs_), std::move(gradients_), std::move(state_)};
  }

  // The gradients that a forward pass left, multiplied on the device. Undefined ones are made.
  Gradients backward(Gradients gradients, const at::Tensor& grad_output, const DeviceState& state) {
    const bool has_gradients = !gradients.empty();
    gradients_ = std::move(gradients);
    if (!has_gradients) {
      make_gradients();
    }
    outputs_.per_step.resize(table_.size());
    outputs_.expected.resize(table_.size());
    state_ = state;
    make_segments();
    LossCall call = device_call();
    const OnDevice on_device(device_);
    const at::Tensor workspace = give_workspace(call);
    const int64_t stride = grad_output.dim() == 0 ? 0 : grad_output.stride(0);
    kernels_->loss_backward(call, {slab(grad_output, stride), has_gradients}, on_device.stream());
    return std::move(gradients_);
  }

 private:
  // Rows are cut into chunks of about as many elements, which threads take in equal shares.
  void run_rows() {
    constexpr int64_t chunk_elements = 8192;
    constexpr int64_t serial_elements = 32768; // waking the other threads costs as much as this many exponentials
    struct Chunk {
      const Segment* segment;
      int64_t begin, end;
    };
    std::vector<Chunk> chunks;
    int64_t elements = 0;
    int64_t widest = 0;
    for (const Segment& segment : segments_) {
      const int64_t rows = std::max<int64_t>(1, chunk_elements / cost_of_row(segment.width));
      for (int64_t begin = 0; begin < batch_; begin += rows) {
        chunks.push_back({&segment, begin, std::min(begin + rows, batch_)});
      }
      elements += batch_ * cost_of_row(segment.width);
      widest = std::max(widest, segment.width);
    }
    const RunRows run = for_this_machine(run_rows_kernel);
    const auto count = static_cast<int64_t>(chunks.size());
    const int64_t grain = elements <= serial_elements ? count : 1;
    at::parallel_for(0, count, std::max<int64_t>(grain, 1), [&](int64_t begin, int64_t end) {
      Scratch scratch(widest);
      for (int64_t i = begin; i < end; ++i) {
        const Segment& segment = *chunks[i].segment;
        run(segment, coefficients_[table_.index_of(segment.head)], chunks[i].begin, chunks[i].end, scratch.data());
      }
    });
  }

  // L_b, the loss, the means of the heads and the number of samples whose loss is not finite, in a fixed order.
  void reduce() {
    return is_double_ ? reduce_as<double>() : reduce_as<float>();
  }

  LossCall device_call() const {
    LossCall call{};
    call.segments = segments_.data();
    call.num_segments = static_cast<int64_t>(segments_.size());
    call.heads = &table_[0];
    call.coefficients = coefficients_.data();
    call.num_heads = static_cast<int64_t>(table_.size());
    call.step_weights = numbers_of(arguments_.step_weights);
    call.step_gradient_scale = numbers_of(arguments_.step_gradient_scale);
    call.batch = batch_;
    call.each_sample = arguments_.reduction == Reduction::none;
    call.mean_of_unmasked = arguments_.reduction == Reduction::valid_mean;
    call.skip_nonfinite = arguments_.skip_nonfinite;
    call.skipped = slab(state_.skipped, 1);
    call.num_unmasked = state_.kept.defined() ? state_.kept.mutable_data_ptr<double>() : nullptr;
    return call;
  }

  at::Tensor give_workspace(LossCall& call) const {
    const at::Tensor workspace = make_workspace(kernels_->loss_bytes(call), arguments_.predictions[0].tensors[0]);
    call.workspace = static_cast<char*>(workspace.mutable_data_ptr());
    return workspace;
  }

  void run_on_device() {
    const bool masked = std::any_of(
        arguments_.masks.begin(), arguments_.masks.end(), [](const at::Tensor& mask) { return mask.defined(); });
    if (arguments_.skip_nonfinite) {
      state_.skipped = at::empty_like(outputs_.per_sample);
    }
    if (masked && arguments_.reduction == Reduction::valid_mean) {
      state_.kept = at::empty({static_cast<int64_t>(table_.size())}, options_.dtype(at::kDouble));
    }
    LossCall call = device_call();
    call.per_sample = slab(outputs_.per_sample, 1);
    call.loss = slab(outputs_.loss, 1);
    call.head_means = slab(outputs_.head_means, 1);
    call.num_nonfinite = outputs_.num_nonfinite.mutable_data_ptr<int64_t>();
    const OnDevice on_device(device_);
    const at::Tensor workspace = give_workspace(call);
    kernels_->loss(call, on_device.stream());
  }

  static const double* numbers_of(const StepNumbers& numbers) {
    return numbers.numbers.empty() ? nullptr : numbers.numbers.data();
  }

  Slab slab(const at::Tensor& tensor, int64_t stride) const {
    return tensor.defined() ? Slab{tensor.mutable_data_ptr(), stride, is_double_} : Slab{};
  }

  int64_t steps_of(size_t head) const {
    return arguments_.steps - table_[head].first_step;
  }

  void make_outputs() {
    const size_t heads = table_.size();
    outputs_.per_sample = at::empty({batch_}, options_);
    outputs_.loss = arguments_.reduction == Reduction::none ? at::empty({batch_}, options_) : at::empty({}, options_);
    outputs_.head_means = at::empty({static_cast<int64_t>(heads)}, options_);
    outputs_.num_nonfinite = at::empty({}, options_.dtype(at::kLong));
    outputs_.per_step.resize(heads);
    outputs_.expected.resize(heads);
    for (size_t h = 0; h < heads; ++h) {
      outputs_.per_step[h] = make_entries(h);
      if (is_categorical(table_[h].kind)) {
        outputs_.expected[h] = make_entries(h);
      }
    }
  }

  // A number for every entry of a head; in memory a sample's steps are side by side, also where the sizes are [T_h, B].
  at::Tensor make_entries(size_t head) const {
    const int64_t steps = steps_of(head);
    return arguments_.batch_first ? at::empty({batch_, steps}, options_)
                                  : at::empty_strided({steps, batch_}, {1, steps}, options_);
  }

  at::ScalarType gradient_type(const at::Tensor& prediction) const {
    return wide_ && prediction.scalar_type() != at::kDouble ? at::kFloat : prediction.scalar_type();
  }

  // Contiguous gradients like their predictions; on the CPU those of a head are cut from one block of memory.
  void make_gradients() {
    gradients_.resize(table_.size());
    for (size_t h = 0; h < table_.size(); ++h) {
      const std::vector<at::Tensor>& predictions = arguments_.predictions[h].tensors;
      int64_t size = 0;
      for (size_t i = 0; kernels_ == nullptr && i < predictions.size(); ++i) {
        size += arguments_.wants[h][i] ? gradient_bytes(predictions[i]) : 0;
      }
      const GradientMemory::Block block = size > 0 ? memory_.take(h, size) : nullptr;
      int64_t offset = 0;
      for (size_t i = 0; i < predictions.size(); ++i) {
        gradients_[h].push_back(arguments_.wants[h][i] ? make_gradient(predictions[i], block, offset) : at::Tensor());
      }
    }
  }

  int64_t gradient_bytes(const at::Tensor& prediction) const {
    constexpr int64_t alignment = 64;
    const auto element = static_cast<int64_t>(c10::elementSize(gradient_type(prediction)));
    return (prediction.numel() * element + alignment - 1) / alignment * alignment;
  }

  at::Tensor make_gradient(const at::Tensor& prediction, const GradientMemory::Block& block, int64_t& offset) const {
    const at::ScalarType dtype = gradient_type(prediction);
    if (!block) {
      return at::empty(prediction.sizes(), options_.dtype(dtype));
    }
    const int64_t begin = offset;
    offset += gradient_bytes(prediction);
    return GradientMemory::piece_of(block, begin, prediction, dtype);
  }

  StepWeight step_weight(const StepNumbers& numbers) {
    if (numbers.tensor.defined()) {
      const at::Tensor tensor = keep(weights_tensor(numbers.tensor));
      StepWeight weight;
      weight.values = {
          tensor.mutable_data_ptr(),
          tensor.dim() == 2 ? tensor.stride(arguments_.batch_dim()) : 0,
          tensor.scalar_type() == at::kDouble};
      weight.step_stride = tensor.stride(tensor.dim() == 2 ? 1 - arguments_.batch_dim() : 0);
      return weight;
    }
    if (numbers.numbers.empty() || kernels_ != nullptr) { // a device finds them in its call
      return {};
    }
    return {{const_cast<double*>(numbers.numbers.data()), 0, true}, 1};
  }

  static at::Tensor weights_tensor(const at::Tensor& tensor) {
    const bool readable = tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kFloat;
    return readable ? tensor : tensor.to(at::kFloat);
  }

  // Tensors made on the way live as long as the pointers into them.
  at::Tensor keep(at::Tensor tensor) {
    kept_tensors_.push_back(tensor);
    return tensor;
  }

  void make_coefficients() {
    Coefficients common{};
    common.step_weights = step_weight(arguments_.step_weights);
    common.step_gradient_scale = step_weight(arguments_.step_gradient_scale);
    if (arguments_.importance_weights.defined()) {
      const at::Tensor weights = keep(weights_tensor(arguments_.importance_weights));
      common.importance_weights.values = {
          weights.mutable_data_ptr(), weights.stride(0), weights.scalar_type() == at::kDouble};
    }
    for (size_t h = 0; h < table_.size(); ++h) {
      Coefficients own = common;
      const at::Tensor& mask = arguments_.masks[h];
      if (mask.defined()) {
        const int64_t batch_dim = arguments_.batch_dim();
        own.mask = {mask.const_data_ptr<bool>(), mask.stride(batch_dim), mask.stride(1 - batch_dim)};
      }
      const bool counted_there = kernels_ != nullptr && mask.defined();
      kept_.push_back(counted_there ? 1 : count_kept(h, own.mask));
      double reduction = 1.0;
      if (arguments_.reduction == Reduction::mean) {
        reduction = 1.0 / static_cast<double>(std::max<int64_t>(batch_, 1));
      } else if (arguments_.reduction == Reduction::valid_mean) {
        reduction = 1.0 / static_cast<double>(std::max<int64_t>(kept_[h], 1));
      }
      own.factor = table_[h].weight * reduction;
      coefficients_.push_back(own);
    }
  }

  int64_t count_kept(size_t head, const StepMask& mask) const {
    const int64_t first = table_[head].first_step;
    if (mask.data == nullptr) {
      return batch_ * (arguments_.steps - first);
    }
    int64_t kept = 0;
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t k = first; k < arguments_.steps; ++k) {
        kept += mask.keeps(b, k) ? 1 : 0;
      }
    }
    return kept;
  }

  // Rows of entry `index`, step `step` (counted from the head's first) of `entries`.
  Rows rows_of(Entries& entries, int64_t step, int64_t sample_dims) {
    at::Tensor& tensor = entries.tensors[entries.stacked ? 0 : step];
    if (sample_dims == 1 && tensor.size(-1) > 1 && tensor.stride(-1) != 1) {
      tensor = tensor.contiguous();
    }
    return view_rows(tensor, entries.stacked, step);
  }

  Rows view_rows(const at::Tensor& tensor, bool stacked, int64_t step) const {
    const int64_t batch_dim = stacked ? arguments_.batch_dim() : 0;
    const int64_t offset = stacked ? step * tensor.stride(1 - batch_dim) : 0;
    char* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
    return {data + offset * tensor.element_size(), tensor.stride(batch_dim), element_of(tensor)};
  }

  void make_segments() {
    for (size_t h = 0; h < table_.size(); ++h) {
      const Head& head = table_[h];
      Entries predictions = arguments_.predictions[h];
      Entries targets = arguments_.targets[h];
      const int64_t leading = predictions.stacked ? 2 : 1;
      const int64_t sample_dims = predictions.tensors[0].dim() - leading;
      const bool has_target = !targets.tensors.empty();
      const int64_t target_dims = has_target ? targets.tensors[0].dim() - (targets.stacked ? 2 : 1) : 0;
      for (int64_t t = 0; t < steps_of(h); ++t) {
        Segment segment{};
        segment.head = &head;
        segment.step = head.first_step + t;
        segment.width = sample_dims == 1 ? predictions.tensors[0].size(-1) : 1;
        segment.prediction = rows_of(predictions, t, sample_dims);
        if (has_target) {
          segment.target = rows_of(targets, t, target_dims);
        }
        const at::Tensor& gradient = gradients_[h][predictions.stacked ? 0 : t];
        if (gradient.defined()) {
          segment.gradient = view_rows(gradient, predictions.stacked, t);
        }
        segment.loss = column(outputs_.per_step[h], t);
        segment.expected = column(outputs_.expected[h], t);
        segments_.push_back(segment);
      }
      // Contiguous copies made above are read by the kernel.
      for (Entries* entries : {&predictions, &targets}) {
        kept_tensors_.insert(kept_tensors_.end(), entries->tensors.begin(), entries->tensors.end());
      }
    }
  }

  Slab column(const at::Tensor& tensor, int64_t step) const {
    Slab whole = slab(tensor, tensor.defined() ? tensor.stride(arguments_.batch_dim()) : 0);
    if (whole.data != nullptr) {
      whole.data = static_cast<char*>(whole.data) + step * (is_double_ ? 8 : 4);
    }
    return whole;
  }

  template <class T>
  void reduce_as() {
    std::vector<double> samples(batch_, 0.0);  // L_b
    std::vector<double> weighted(batch_, 0.0); // with the factors of the reduction
    T* means = outputs_.head_means.mutable_data_ptr<T>();
    for (size_t h = 0; h < table_.size(); ++h) {
      const double sum = add_head<T>(h, samples.data(), weighted.data());
      means[h] = static_cast<T>(sum / std::max<double>(1.0, static_cast<double>(kept_[h])));
    }
    T* per_sample = outputs_.per_sample.mutable_data_ptr<T>();
    T* loss = outputs_.loss.mutable_data_ptr<T>();
    const StepWeight& importance_weights = coefficients_[0].importance_weights;
    int64_t num_nonfinite = 0;
    double total = 0;
    for (int64_t b = 0; b < batch_; ++b) {
      per_sample[b] = static_cast<T>(samples[b]);
      const bool finite = std::isfinite(per_sample[b]); // as the user sees it, in float
      num_nonfinite += finite ? 0 : 1;
      double contribution = importance_weights.at(b, 0) * weighted[b];
      if (!finite && arguments_.skip_nonfinite) {
        contribution = 0;
        clear_gradients(b);
      }
      total += contribution;
      if (arguments_.reduction == Reduction::none) {
        loss[b] = static_cast<T>(contribution);
      }
    }
    if (arguments_.reduction != Reduction::none) {
      *loss = static_cast<T>(total);
    }
    *outputs_.num_nonfinite.mutable_data_ptr<int64_t>() = num_nonfinite;
  }

  // Adds the losses of a head, weighted and summed over its steps, to those of every sample; returns their plain sum.
  template <class T>
  double add_head(size_t head, double* samples, double* weighted) const {
    const int64_t steps = steps_of(head);
    const int64_t first = table_[head].first_step;
    const double weight = table_[head].weight;
    const Coefficients& coefficients = coefficients_[head];
    const bool plain = coefficients.mask.data == nullptr && coefficients.step_weights.values.data == nullptr;
    const T* losses = outputs_.per_step[head].const_data_ptr<T>();
    double of_head = 0;
    for (int64_t b = 0; b < batch_; ++b, losses += steps) {
      double of_sample = 0;
      double weighted_of_sample = 0;
      for (int64_t t = 0; t < steps; ++t) {
        if (plain) {
          of_sample += losses[t];
        } else if (coefficients.mask.keeps(b, first + t)) {
          of_sample += losses[t];
          weighted_of_sample += coefficients.step_weights.at(b, first + t) * losses[t];
        }
      }
      weighted_of_sample = plain ? of_sample : weighted_of_sample;
      of_head += of_sample;
      samples[b] += weight * weighted_of_sample;
      weighted[b] += coefficients.factor * weighted_of_sample;
    }
    return of_head;
  }

  void clear_gradients(int64_t sample) {
    for (const Segment& segment : segments_) {
      if (segment.gradient.data != nullptr) {
        const int64_t size = element_size(segment.gradient.element);
        char* row = static_cast<char*>(segment.gradient.data) + sample * segment.gradient.stride * size;
        std::fill(row, row + segment.width * size, 0);
      }
    }
  }

  const HeadTable& table_;
  const GradientMemory& memory_;
  const Arguments& arguments_;
  bool wide_;
  int64_t batch_;
  c10::Device device_;
  const LossKernels* kernels_; // null: the CPU's own
  bool is_double_ = false;
  at::TensorOptions options_;
  Outputs outputs_;
  Gradients gradients_;
  DeviceState state_;
  std::vector<Coefficients> coefficients_; // by head
  std::vector<int64_t> kept_;              // unmasked entries by head
  std::vector<Segment> segments_;
  std::vector<at::Tensor> kept_tensors_;
};

} // namespace

RunResult run_loss(const HeadTable& table, const GradientMemory& memory, const Arguments& arguments, bool wide) {
  return Run(table, memory, arguments, wide).forward();
}

Gradients multiplied_on_device(
    const HeadTable& table,
    const GradientMemory& memory,
    const Arguments& arguments,
    Gradients gradients,
    const at::Tensor& grad_output,
    const DeviceState& state) {
  return Run(table, memory, arguments, /*wide=*/false).backward(std::move(gradients), grad_output, state);
}

} // namespace gradscale
