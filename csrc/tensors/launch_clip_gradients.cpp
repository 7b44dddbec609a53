#include "range_table_builder.h"

namespace gradscale {

void launch_clipping(const ClippingCall& call, void* stream) {
  static const Kernel<ClippingCall> find_clipping("tensors/clip_gradients.cuh", "find_clipping");
  launch(find_clipping, 1, kThreads, stream, call);
}

int64_t bytes_for_clip(const ClipCall& call) {
  return RangeTableBuilder(call.ranges, call.count, kChunkOfTensor).bytes();
}

void launch_clip(const ClipCall& call, void* stream) {
  static const Kernel<ClippedTensors> clipped_tensors("tensors/clip_gradients.cuh", "clipped_tensors");
  const RangeTableBuilder builder(call.ranges, call.count, kChunkOfTensor);
  if (builder.blocks() > 0) {
    const ClippedTensors arguments{builder.build(call.workspace, stream), call.factor, call.zeros};
    launch(clipped_tensors, builder.blocks(), kThreads, stream, arguments);
  }
}

} // namespace gradscale
