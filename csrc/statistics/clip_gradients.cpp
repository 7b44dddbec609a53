#include "statistics.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <algorithm>

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
  store_clipping(total_norm(largest, powers, call.p, nans, infs), max_norm_of(call), call.skip_nonfinite, call.out);
}

// A gradient that is clipped: the memory to multiply, and where to copy it back to.
struct Target {
  at::Tensor memory; // elements one after the other, complex ones as pairs
  at::Tensor copy_to;
};

Target target_of(const at::Tensor& tensor, bool rows) {
  at::Tensor elements = tensor;
  if (elements.layout() == at::kSparse) {
    elements = elements.detach()._values();
  } else if (elements.layout() != at::kStrided) {
    elements = elements.detach().values();
  }
  TORCH_CHECK(
      at::has_internal_overlap(elements) != at::MemOverlap::Yes,
      "clip_gradients_: a gradient of shape ",
      tensor.sizes(),
      " is an expanded tensor, whose elements share memory, and cannot be multiplied in place; clone() it");
  if (has_element(c10::toRealValueType(elements.scalar_type())) && Units(elements, rows).are_blocks_of(elements) &&
      !elements.is_neg() && !elements.is_conj()) {
    return {elements, at::Tensor()};
  }
  elements = elements.detach();
  at::Tensor memory = elements.resolve_conj().resolve_neg();
  memory = (memory.is_complex() ? memory : with_element(memory)).contiguous();
  return {memory.is_same(elements) ? memory.clone() : memory, elements};
}

// Copies clipped elements back to where the gradients are.
void finish(const std::vector<at::Tensor>& tensors, const std::vector<Target>& targets) {
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].copy_to.defined()) {
      targets[i].copy_to.copy_(targets[i].memory);
    }
    tensors[i].unsafeGetTensorImpl()->bump_version();
  }
}

} // namespace

at::Tensor clipping_of(
    const at::Tensor& values, const at::Tensor& counts, double p, const Value& max_norm, bool skip_nonfinite) {
  const at::Tensor out = at::empty({3}, values.options());
  if (values.is_meta()) {
    return out;
  }
  const bool on_device = runs_kernels(values.device());
  ClippingCall call{
      values.const_data_ptr<double>(),
      counts.const_data_ptr<int64_t>(),
      values.size(1),
      p,
      /*max_norm=*/0,
      /*max_norm_on_device=*/nullptr,
      skip_nonfinite,
      out.mutable_data_ptr<double>()};
  at::Tensor limit; // keeps the memory alive
  if (const double* number = std::get_if<double>(&max_norm)) {
    call.max_norm = *number;
  } else if (limit = std::get<at::Tensor>(max_norm); on_device && limit.is_cpu() == values.is_cpu()) {
    limit = limit.to(values.options(), /*non_blocking=*/true);
    call.max_norm_on_device = limit.const_data_ptr<double>();
  } else {
    call.max_norm = limit.item<double>();
  }
  if (on_device) {
    OnDevice(values.device()).launch("statistics/cuda/clip_gradients.cuh", "find_clipping", 1, kThreads, call);
  } else {
    find_clipping(call);
  }
  return out;
}

namespace {

void clip_on_cpu(const std::vector<UnitRange>& ranges, const double* factors, bool skip_nonfinite) {
  std::vector<Range> clipped; // ranges that have a unit to clip
  std::vector<const UnitRange*> units;
  for (const UnitRange& range : ranges) {
    const double* own = factors + range.first;
    if (std::any_of(own, own + range.count, [](double factor) { return factor != 1; })) {
      clipped.push_back({range.data, range.count * range.length, range.element});
      units.push_back(&range);
    }
  }
  const std::vector<Chunk> chunks = chunks_of(clipped);
  for_each_chunk(chunks, [&](int64_t i) {
    const size_t index = chunks[i].range;
    for_each_unit(chunks[i], units[index]->length, [&](int64_t unit, int64_t begin, int64_t size) {
      const Range part = clipped[index].part(begin, size);
      const double factor = factors[units[index]->first + unit];
      scale_range_kernel(part, const_cast<void*>(part.data), multiplied_by(factor, skip_nonfinite));
    });
  });
}

} // namespace

std::pair<at::Tensor, at::Tensor> unit_factors(
    const at::Tensor& norms, const at::Tensor& clipping, double adaptive, double eps, bool skip) {
  std::pair<at::Tensor, at::Tensor> result{
      at::empty_symint({norms.sym_size(1)}, norms.options()), at::empty({3}, norms.options())};
  if (norms.is_meta()) {
    return result;
  }
  TORCH_CHECK(norms.is_cpu() && norms.is_contiguous(), "unit_factors: norms must be contiguous, on a CPU");
  const int64_t count = norms.size(1);
  const double* from = norms.const_data_ptr<double>();
  double* out = result.first.mutable_data_ptr<double>();
  double smallest = 1;
  bool changed = false;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = unit_factor(from[i], from[count + i], adaptive, eps);
    smallest = out[i] < smallest || out[i] != out[i] ? out[i] : smallest; // NaN stays: nothing is less than NaN
    changed = changed || out[i] != 1;
  }
  const double* whole = clipping.const_data_ptr<double>();
  if (skip && count > 0 && (whole[1] == 0 || smallest != smallest)) {
    std::fill(out, out + count, 0.0);
    smallest = 0;
    changed = true;
  }
  double* clipped = result.second.mutable_data_ptr<double>();
  clipped[0] = whole[0];
  clipped[1] = smallest;
  clipped[2] = changed ? 1 : 0;
  return result;
}

void clip_units(const std::vector<at::Tensor>& tensors, const at::Tensor& factors, bool rows, bool skip_nonfinite) {
  if (factors.is_meta()) {
    return;
  }
  std::vector<Target> targets; // made before anything is written, because target_of() may raise
  std::vector<UnitRange> ranges;
  targets.reserve(tensors.size());
  ranges.reserve(tensors.size());
  const bool is_one_for_all = factors.numel() == 1 && !rows;
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) {
    targets.push_back(target_of(tensor, rows));
    const at::Tensor& memory = targets.back().memory;
    const Units units(memory, rows); // a sparse gradient is one unit: its stored elements
    if (memory.numel() > 0) {
      void* data = memory.mutable_data_ptr();
      ranges.push_back(
          {data,
           data,
           units.count,
           units.length * (memory.is_complex() ? 2 : 1),
           is_one_for_all ? 0 : count,
           element_of(memory),
           /*first_block=*/0});
    }
    count += units.count;
  }
  TORCH_CHECK(
      is_one_for_all || factors.numel() == count, "clip_units: ", count, " units, but ", factors.numel(), " factors");
  if (!runs_kernels(factors.device())) {
    clip_on_cpu(ranges, factors.const_data_ptr<double>(), skip_nonfinite);
  } else if (is_one_for_all) {
    std::vector<WholeRange> whole;
    whole.reserve(ranges.size());
    for (const UnitRange& range : ranges) {
      whole.push_back({range.data, range.out, range.length, range.element, /*first_block=*/0});
    }
    launch_scaled_units(whole, slab_of(factors), /*times=*/1, skip_nonfinite, OnDevice(factors.device()));
  } else {
    launch_scaled_units(ranges, slab_of(factors), /*times=*/1, skip_nonfinite, OnDevice(factors.device()));
  }
  finish(tensors, targets);
}

} // namespace gradscale
