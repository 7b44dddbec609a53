#include "clip_gradients.cuh"

#include "range_table.h"

namespace gradscale {

void launch_clipping(const ClippingCall& call, void* stream) {
  launch("find_clipping", find_clipping_on_device, 1, kThreads, static_cast<Stream>(stream), call);
}

int64_t bytes_for_clip(const ClipCall& call) {
  return RangeTableBuilder(call.ranges, call.count, kChunkOfTensor).bytes();
}

void launch_clip(const ClipCall& call, void* stream_) {
  const auto stream = static_cast<Stream>(stream_);
  const RangeTableBuilder builder(call.ranges, call.count, kChunkOfTensor);
  if (builder.blocks() > 0) {
    const RangeTable table = builder.build(call.workspace, stream);
    launch("clipped_tensors", clipped_tensors, builder.blocks(), kThreads, stream, table, call.factor, call.zeros);
  }
}

} // namespace gradscale
