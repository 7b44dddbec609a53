#include "description.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

namespace gradscale {

namespace {

const double* data_of(const StepNumbers& numbers) {
  return numbers.numbers.empty() ? nullptr : numbers.numbers.data();
}

LossCall device_call(const Description& call, const DeviceState& state) {
  LossCall of_device{};
  of_device.segments = call.segments.data();
  of_device.num_segments = static_cast<int64_t>(call.segments.size());
  of_device.heads = &call.heads[0];
  of_device.coefficients = call.coefficients.data();
  of_device.num_heads = static_cast<int64_t>(call.heads.size());
  of_device.step_weights = data_of(call.arguments.step_weights);
  of_device.step_gradient_scale = data_of(call.arguments.step_gradient_scale);
  of_device.batch = call.batch;
  of_device.each_sample = call.arguments.reduction == Reduction::none;
  of_device.counts_unmasked = state.divisors.defined() && !call.arguments.num_entries.defined();
  of_device.skip_nonfinite = call.arguments.nonfinite == Nonfinite::skip;
  of_device.skipped = call.slab(state.skipped, 1);
  of_device.divisors = state.divisors.defined() ? state.divisors.mutable_data_ptr<double>() : nullptr;
  return of_device;
}

at::Tensor give_workspace(const Description& call, LossCall& of_device) {
  const at::Tensor& beside = call.arguments.predictions[0].tensors[0];
  const at::Tensor workspace = make_workspace(bytes_for_loss(of_device), beside);
  of_device.workspace = static_cast<char*>(workspace.mutable_data_ptr());
  return workspace;
}

} // namespace

DeviceState run_on_device(Description& call) {
  DeviceState state;
  const auto is_defined = [](const at::Tensor& mask) { return mask.defined(); };
  const bool masked = std::any_of(call.arguments.mask.begin(), call.arguments.mask.end(), is_defined);
  if (call.arguments.nonfinite == Nonfinite::skip) {
    state.skipped = at::empty_like(call.outputs.per_sample);
  }
  if (call.arguments.num_entries.defined()) {
    state.divisors = call.arguments.num_entries;
  } else if (masked && call.arguments.reduction == Reduction::valid_mean) {
    state.divisors = at::empty({static_cast<int64_t>(call.heads.size())}, call.of_sums.dtype(at::kDouble));
  }
  LossCall of_device = device_call(call, state);
  of_device.per_sample = call.slab(call.outputs.per_sample, 1);
  of_device.loss = call.slab(call.outputs.loss, 1);
  of_device.head_means = call.slab(call.outputs.head_means, 1);
  of_device.head_losses = call.slab(call.outputs.head_losses, 1);
  of_device.num_nonfinite = call.outputs.num_nonfinite.mutable_data_ptr<int64_t>();
  const OnDevice on_device(call.device);
  const at::Tensor workspace = give_workspace(call, of_device);
  launch_loss(of_device, on_device.stream());
  return state;
}

Gradients multiplied_on_device(
    const HeadTable& heads,
    const GradientMemory& memory,
    const Arguments& arguments,
    Gradients gradients,
    const at::Tensor& grad_output,
    const DeviceState& state) {
  Description call(heads, memory, arguments, /*wide=*/false);
  const bool has_gradients = !gradients.empty();
  call.gradients = std::move(gradients);
  if (!has_gradients) {
    call.make_gradients();
  }
  call.make_segments();
  LossCall of_device = device_call(call, state);
  const OnDevice on_device(call.device);
  const at::Tensor workspace = give_workspace(call, of_device);
  const int64_t stride = grad_output.dim() == 0 ? 0 : grad_output.stride(0);
  launch_loss_backward(of_device, {call.slab(grad_output, stride), has_gradients}, on_device.stream());
  return std::move(call.gradients);
}

} // namespace gradscale
