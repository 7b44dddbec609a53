#include "tensors.h"

#include "../cpu/instruction_set.h"
#include "../cuda/device_guard.h"
#include "../torch/tensor_element.h"
#include "chunks.h"
#include "device_calls.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace gradscale {

namespace {

// Computes the same as the kernel in clip_gradients.cuh.
void find_clipping(const ClippingCall& call) {
  int64_t nans = 0, infs = 0;
  double largest = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    largest = std::max(largest, call.values[i]);
    nans += call.counts[2 * call.count + i];
    infs += call.counts[3 * call.count + i];
  }
  double powers = 0;
  for (int64_t i = 0; i < call.count && largest > 0; ++i) {
    powers += power_in_norm(call.values[i] / largest, call.p);
  }
  store_clipping(total_norm(largest, powers, call.p, nans, infs), call.max_norm, call.skip_nonfinite, call.out);
}

// A gradient that is clipped: the memory to multiply, and where to copy it back to.
struct Target {
  at::Tensor memory; // elements one after the other, complex ones as pairs
  at::Tensor copy_to;
};

Target target_of(const at::Tensor& tensor) {
  at::Tensor elements = tensor.detach();
  if (elements.layout() == at::kSparse) {
    elements = elements._values();
  } else if (elements.layout() != at::kStrided) {
    elements = elements.values();
  }
  TORCH_CHECK(
      at::has_internal_overlap(elements) != at::MemOverlap::Yes,
      "clip_gradients_: a gradient of shape ",
      tensor.sizes(),
      " is an expanded tensor, whose elements share memory, and cannot be multiplied in place; clone() it");
  if (has_element(c10::toRealValueType(elements.scalar_type())) && elements.is_non_overlapping_and_dense() &&
      !elements.is_neg() && !elements.is_conj()) {
    return {elements, at::Tensor()};
  }
  at::Tensor memory = elements.resolve_conj().resolve_neg();
  memory = (memory.is_complex() ? memory : with_element(memory)).contiguous();
  return {memory.is_same(elements) ? memory.clone() : memory, elements};
}

Range range_of(const Target& target) {
  return {target.memory.const_data_ptr(), target.memory.numel(), element_of(target.memory), target.memory.is_complex()};
}

void clip(const std::vector<Target>& targets, double factor, bool skip_nonfinite) {
  if (factor == 1) {
    return;
  }
  std::vector<Range> ranges;
  for (const Target& target : targets) {
    ranges.push_back(range_of(target));
  }
  const std::vector<Range> chunks = chunks_of(ranges);
  const ScaleRange scale = for_this_machine(scale_range_kernel);
  for_each_chunk(chunks, [&](int64_t i) {
    const Range& chunk = chunks[i];
    void* to = const_cast<void*>(chunk.data);
    if (skip_nonfinite && factor == 0) {
      std::memset(to, 0, chunk.size * element_size(chunk.element) * (chunk.is_complex ? 2 : 1));
    } else {
      scale(chunk, to, /*root=*/1, factor);
    }
  });
}

} // namespace

at::Tensor clipping_of(
    const at::Tensor& values, const at::Tensor& counts, double p, double max_norm, bool skip_nonfinite) {
  const at::Tensor out = at::empty({3}, values.options());
  ClippingCall call{
      values.const_data_ptr<double>(),
      counts.const_data_ptr<int64_t>(),
      values.size(1),
      p,
      max_norm,
      skip_nonfinite,
      out.mutable_data_ptr<double>()};
  if (runs_kernels(values.device())) {
    const OnDevice on_device(values.device());
    launch_clipping(call, on_device.stream());
  } else {
    find_clipping(call);
  }
  return out;
}

void clip_tensors(const std::vector<at::Tensor>& tensors, const at::Tensor& clipping, bool skip_nonfinite) {
  std::vector<Target> targets; // all of them, before anything is written
  for (const at::Tensor& tensor : tensors) {
    targets.push_back(target_of(tensor));
  }
  if (runs_kernels(clipping.device())) {
    std::vector<DeviceRange> ranges;
    for (const Target& target : targets) {
      const Range range = range_of(target);
      void* memory = const_cast<void*>(range.data);
      ranges.push_back({memory, memory, range.is_complex ? 2 * range.size : range.size, range.element});
    }
    ClipCall call{
        ranges.data(),
        static_cast<int64_t>(ranges.size()),
        clipping.const_data_ptr<double>() + 1,
        skip_nonfinite,
        nullptr};
    const OnDevice on_device(clipping.device());
    const at::Tensor workspace = make_workspace(bytes_for_clip(call), clipping);
    call.workspace = static_cast<char*>(workspace.mutable_data_ptr());
    launch_clip(call, on_device.stream());
  } else {
    clip(targets, clipping.const_data_ptr<double>()[1], skip_nonfinite);
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].copy_to.defined()) {
      targets[i].copy_to.copy_(targets[i].memory);
    }
    tensors[i].unsafeGetTensorImpl()->bump_version();
  }
}

} // namespace gradscale
