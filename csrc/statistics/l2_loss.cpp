#include "statistics.h"

#include "../torch/autograd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace gradscale {

namespace {

namespace autograd = torch::autograd;

double sum_of_squares(const std::vector<TensorRange>& ranges) {
  const std::vector<Chunk> chunks = chunks_of(ranges);
  std::vector<double> partial(chunks.size());
  for_each_chunk(chunks, [&](int64_t i) {
    const PowerSum squares = power_sum_kernel(ranges[chunks[i].range].part(chunks[i].begin, chunks[i].size), /*p=*/2);
    const double scale = squares.root * squares.root;
    partial[i] = squares.sum * scale * scale;
  });
  double sum = 0; // in the order of the tensors, whatever the number of threads
  for (const double part : partial) {
    sum += part;
  }
  return sum;
}

// loss = factor * sum of squares.
void launch_squares(const std::vector<TensorRange>& ranges, double factor, const at::Tensor& loss) {
  const OnDevice device(loss.device());
  constexpr const char* file = "statistics/cuda/l2_loss.cuh";
  int64_t most_sums = 0; // one for each tensor, or for each of its chunks
  for (const TensorRange& range : ranges) {
    most_sums += 1 + range.size * element_size(range.element) / kChunkOfSquares;
  }
  const at::Tensor memory = device.memory(most_sums * static_cast<int64_t>(sizeof(double)));
  auto* const sums = static_cast<double*>(memory.mutable_data_ptr());
  int64_t count = 0;
  for_each_list_of_tensors(ranges, kChunkOfSquares, [&](const auto& list, int64_t blocks) {
    const SquaresArguments<std::decay_t<decltype(list)>> arguments{list, sums + count};
    device.launch(file, instance("sums_of_squares", {type_name(list)}), blocks, kThreads, arguments);
    count += list.singles + blocks - list.blocks_of_singles();
  });
  device.launch(file, "squares_total", 1, kThreads, SquaresTotal{sums, count, factor, slab_of(loss)});
}

// Computes the wanted gradients; the others are undefined.
autograd::variable_list gradients_on_device(
    const std::vector<at::Tensor>& wanted, double factor, const at::Tensor& grad_output) {
  autograd::variable_list gradients(wanted.size());
  std::vector<WholeRange> ranges;
  std::vector<at::Tensor> dense_tensors; // keep the memory alive that `ranges` points to
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].defined()) {
      const at::Tensor dense = wanted[i].is_non_overlapping_and_dense() ? wanted[i] : wanted[i].contiguous();
      gradients[i] = at::empty_like(dense);
      dense_tensors.push_back(dense);
      if (dense.numel() > 0) {
        void* out = gradients[i].mutable_data_ptr();
        ranges.push_back({dense.const_data_ptr(), out, dense.numel(), element_of(dense), /*first_block=*/0});
      }
    }
  }
  launch_scaled_units(ranges, slab_of(grad_output), factor, /*zeros=*/false, OnDevice(grad_output.device()));
  return gradients;
}

struct L2LossBackward : public SavingNode { // saves the parameters
  double weight = 1;

  std::string name() const override {
    return "L2LossBackward";
  }

  autograd::variable_list apply(autograd::variable_list&& inputs) override {
    // The parameters whose gradients are needed; the others are undefined.
    std::vector<at::Tensor> wanted = unpacked([this](size_t i) { return should_compute_output(i); });
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i].defined()) {
        wanted[i] = with_edge(wanted[i], next_edge(i));
      }
    }
    autograd::variable_list result(wanted.size());
    if (!inputs[0].defined()) {
      return result;
    }
    if (runs_kernels(inputs[0].device()) && !at::GradMode::is_enabled() && ordinary_context() &&
        ordinary_tensor(inputs[0])) {
      return gradients_on_device(wanted, weight, inputs[0]);
    }
    const at::Tensor factor = inputs[0].mul(weight);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i].defined()) {
        result[i] = wanted[i].mul(factor).to(wanted[i].scalar_type());
      }
    }
    return result;
  }
};

} // namespace

at::Tensor l2_loss(std::vector<at::Tensor> parameters, double weight) {
  bool is_double = false;
  std::vector<at::Tensor> contiguous; // keep the memory alive that `ranges` points to
  std::vector<TensorRange> ranges;
  for (const at::Tensor& parameter : parameters) {
    is_double = is_double || parameter.scalar_type() == at::kDouble;
    // Any dense order will do: a sum of squares does not care.
    contiguous.push_back(
        parameter.is_non_overlapping_and_dense() ? parameter.detach() : parameter.detach().contiguous());
    ranges.push_back({range_of(contiguous.back())});
  }
  const c10::Device device = parameters.empty() ? c10::Device(at::kCPU) : parameters[0].device();
  at::Tensor loss = at::empty({}, at::TensorOptions().dtype(is_double ? at::kDouble : at::kFloat).device(device));
  if (runs_kernels(device)) {
    launch_squares(ranges, 0.5 * weight, loss);
  } else {
    const double value = 0.5 * weight * sum_of_squares(ranges);
    if (is_double) {
      *loss.mutable_data_ptr<double>() = value;
    } else { // fill_() raises an error for a value beyond float
      *loss.mutable_data_ptr<float>() = static_cast<float>(value);
    }
  }
  if (at::GradMode::is_enabled() && autograd::any_variable_requires_grad(parameters)) {
    L2LossBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    node->weight = weight;
    for (const at::Tensor& parameter : parameters) {
      node->add_next_edge(parameter.requires_grad() ? autograd::impl::gradient_edge(parameter) : autograd::Edge());
      node->save(parameter);
    }
    autograd::set_history(loss, handle);
  }
  return loss;
}

} // namespace gradscale
