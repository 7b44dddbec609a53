#include "encode.cuh"

#include "device_calls.h"

namespace gradscale {

void launch_encode(const Encoding& encoding, int64_t count, void* stream) {
  const int32_t threads = threads_for_row(encoding.width, element_size(encoding.out.element));
  const int64_t blocks = blocks_for_rows(count, threads);
  const EncodeArguments arguments{encoding, *encoding.support, count, threads};
  launch("encode_rows", encode_rows, blocks, kThreads, static_cast<Stream>(stream), arguments);
}

} // namespace gradscale
