#include "../math/row_shape.h"
#include "../port/launch.h"
#include "device_calls.h"

namespace gradscale {

namespace {

constexpr const char* kFileOfNorms = "flow/group_norm.cuh";

// How many threads keep a group in registers; 0 where they cannot.
template <class T>
int32_t threads_that_keep_group(const RescaleCall& call) {
  const auto begins = reinterpret_cast<uintptr_t>(call.from) | reinterpret_cast<uintptr_t>(call.to);
  const auto bytes = call.size * static_cast<int64_t>(sizeof(T));
  const bool whole = begins % 16 == 0 && bytes % 16 == 0; // windows
  return whole && call.p == 2 && !std::is_same_v<T, double> ? threads_that_keep(bytes / 16) : 0;
}

// The kernels whose threads keep groups in registers: 2, 4, 8, 16 or 32 threads a group.
template <class T>
void launch_kept(const RescaleCall& call, int32_t threads, Stream stream) {
  static const auto kernel = [](int of_group) {
    return std::string("rescale_kept<") + type_name(ElementOf<T>::value) + ", " + std::to_string(of_group) + ">";
  };
  static const Kernel<RescaleCall> kernels[] = {
      {kFileOfNorms, kernel(2)},
      {kFileOfNorms, kernel(4)},
      {kFileOfNorms, kernel(8)},
      {kFileOfNorms, kernel(16)},
      {kFileOfNorms, kernel(32)}};
  int index = 0;
  while (2 << index < threads) {
    ++index;
  }
  launch(kernels[index], blocks_for_rows(call.groups, threads), kThreads, stream, call);
}

template <class T>
void launch_as(const RescaleCall& call, Stream stream) {
  static const auto kernel = [](const char* name) {
    return std::string(name) + "<" + type_name(ElementOf<T>::value) + ">";
  };
  static const Kernel<RescaleCall> groups(kFileOfNorms, kernel("rescale_groups"));
  static const Kernel<RescaleCall> sums(kFileOfNorms, kernel("power_sums"));
  static const Kernel<RescaleCall> chunks(kFileOfNorms, kernel("rescale_chunks"));
  const int32_t threads = threads_that_keep_group<T>(call);
  if (threads > 0) {
    return launch_kept<T>(call, threads, stream);
  }
  if (call.size <= kShortGroup) {
    launch(groups, blocks_for_rows(call.groups, threads_for_row(call.size, sizeof(T))), kThreads, stream, call);
    return;
  }
  const int64_t blocks = call.groups * chunks_of(call).count;
  launch(sums, blocks, kThreads, stream, call);
  launch(chunks, blocks, kThreads, stream, call);
}

} // namespace

int64_t bytes_for_rescale(const RescaleCall& call) {
  return call.size <= kShortGroup ? 0 : call.groups * chunks_of(call).count * static_cast<int64_t>(sizeof(PowerSum));
}

void launch_rescale(const RescaleCall& call, void* stream) {
  dispatch_element(call.element, [&](auto type) { launch_as<decltype(type)>(call, stream); });
}

} // namespace gradscale
