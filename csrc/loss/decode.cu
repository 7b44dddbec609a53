#include "decode.cuh"

#include "device_calls.h"

#include "../port/table_builder.h"

#include <stdexcept>

namespace gradscale {

namespace {

template <class A>
void launch_as(const Decoding& decoding, int64_t count, const A* raw_centers, char* workspace, Stream stream) {
  const int32_t threads = threads_for_row(decoding.width, element_size(decoding.logits.element));
  const int64_t blocks = blocks_for_rows(count, threads);
  const DecodeArguments arguments{decoding, *decoding.support, count, threads};
  if (!decoding.support->raw) {
    launch("decode_rows", decode_rows<A>, blocks, kThreads, stream, arguments);
    return;
  }
  TableBuilder builder;
  builder.add(raw_centers, decoding.width);
  launch("decode_rows", decode_rows_raw<A>, blocks, kThreads, stream, arguments, builder.build(workspace, stream));
}

} // namespace

int64_t bytes_for_decode(const Decoding& decoding) {
  const int64_t bytes = decoding.support->raw ? decoding.width * static_cast<int64_t>(sizeof(double)) : 0;
  return bytes > Table::kInside ? bytes : 0;
}

void launch_decode(const Decoding& decoding, int64_t count, char* workspace, void* stream) {
  if (decoding.width > INT32_MAX - 64) {
    throw std::runtime_error("decode: a row has more than 2^31 elements");
  }
  if (decoding.logits.element == Element::float64) {
    launch_as(decoding, count, decoding.support->raw_centers, workspace, static_cast<Stream>(stream));
  } else {
    launch_as(decoding, count, decoding.support->raw_centers_float, workspace, static_cast<Stream>(stream));
  }
}

} // namespace gradscale
