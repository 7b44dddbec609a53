// Launches the kernels of the gradient operators.
#include "../cuda/driver.h"
#include "../cuda/row_lanes.h"
#include "../cuda/row_shape.h"
#include "calls.h"

namespace gradscale {

// ---- Elements -------------------------------------------------------------------------------------------------------

void launch_scale(const ScaleCall& call, const OnDevice& device) {
  const int64_t size = element_size(call.element);
  const int64_t sum_bytes = call.element == Element::float64 ? 8 : 4;
  const bool contiguous = call.dims == 1 && call.strides[0][0] == size && call.strides[1][0] == size;
  const bool dense = call.count == 1 || (contiguous && (call.strides[2][0] == 0 || call.strides[2][0] == sum_bytes));
  const int64_t elements = dense ? kElementsOfBlock : kThreads; // of a block
  const std::string name = instance(dense ? "scale_dense" : "scale_broadcast", {type_name(call.element)});
  device.launch("flow/scale_gradient.cuh", name, (call.count + elements - 1) / elements, kThreads, call);
}

// ---- Groups ---------------------------------------------------------------------------------------------------------

namespace {

// The number of threads that keep a group in registers: 2, 4, 8, 16 or 32; 0 if they cannot.
int32_t threads_for_group_in_registers(const RescaleCall& call) {
  const auto begins = reinterpret_cast<uintptr_t>(call.from) | reinterpret_cast<uintptr_t>(call.to);
  const int64_t bytes = call.size * element_size(call.element);
  const bool whole = begins % 16 == 0 && bytes % 16 == 0; // each group consists of whole windows
  return whole && call.p == 2 && call.element != Element::float64 ? threads_for_row_in_registers(bytes / 16) : 0;
}

} // namespace

void launch_rescale(RescaleCall call, const OnDevice& device) {
  constexpr const char* file = "flow/group_norm.cuh";
  const std::string type = type_name(call.element);
  if (const int32_t kept = threads_for_group_in_registers(call); kept > 0) {
    const std::string name = instance("rescale_kept", {type, std::to_string(kept)});
    device.launch(file, name, blocks_for_rows(call.groups, kept), kThreads, call);
    return;
  }
  if (call.size <= kShortGroup) {
    const int32_t threads = threads_for_row(call.size, element_size(call.element));
    device.launch(file, instance("rescale_groups", {type}), blocks_for_rows(call.groups, threads), kThreads, call);
    return;
  }
  const int64_t blocks = call.groups * chunks_of(call).count;
  const at::Tensor sums = device.memory(blocks * static_cast<int64_t>(sizeof(PowerSum)));
  call.sums = static_cast<PowerSum*>(sums.mutable_data_ptr());
  device.launch(file, instance("power_sums", {type}), blocks, kThreads, call);
  device.launch(file, instance("rescale_chunks", {type}), blocks, kThreads, call);
}

} // namespace gradscale
