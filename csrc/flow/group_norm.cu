#include "group_norm.cuh"

namespace gradscale {

namespace {

template <class T>
void launch_as(const RescaleCall& call, Stream stream) {
  if (call.size <= kShortGroup) {
    const int threads = threads_for_row(call.size, sizeof(T));
    const int64_t blocks = blocks_for_rows(call.groups, threads);
    launch("rescale_groups", rescale_groups<T>, blocks, kThreads, stream, call, threads);
    return;
  }
  const Chunks chunks = chunks_of(call);
  launch("power_sums", power_sums<T>, call.groups * chunks.count, kThreads, stream, call, chunks);
  launch("rescale_chunks", rescale_chunks<T>, call.groups * chunks.count, kThreads, stream, call, chunks);
}

} // namespace

int64_t bytes_for_rescale(const RescaleCall& call) {
  return call.size <= kShortGroup ? 0 : call.groups * chunks_of(call).count * static_cast<int64_t>(sizeof(PowerSum));
}

void launch_rescale(const RescaleCall& call, void* stream) {
  dispatch_element(call.element, [&](auto type) { launch_as<decltype(type)>(call, static_cast<Stream>(stream)); });
}

} // namespace gradscale
