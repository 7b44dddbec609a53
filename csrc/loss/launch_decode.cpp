#include "../math/row_begins.h"
#include "../math/row_shape.h"
#include "../math/thread_row.h"
#include "../port/launch.h"
#include "../port/table_builder.h"
#include "device_arguments.h"
#include "kernel_names.h"
#include "warp_rows.h"

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace gradscale {

namespace {

// The kernel of that name, made once for all calls.
const Kernel<DecodeArguments>& kernel_named(const std::string& name) {
  static std::mutex mutex;
  static auto& kernels = *new std::map<std::string, std::unique_ptr<Kernel<DecodeArguments>>>(); // for ever
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Kernel<DecodeArguments>>& kernel = kernels[name];
  if (kernel == nullptr) {
    kernel = std::make_unique<Kernel<DecodeArguments>>("loss/decode_rows.cuh", name);
  }
  return *kernel;
}

// Whether a kernel of decode_rows.cuh can be compiled for the width and types of these rows.
bool fits_width(const Decoding& decoding) {
  return !decoding.support->raw && decoding.logits.element != Element::float64 && decoding.width >= 2 &&
         decoding.width <= kMostOfWarp && is_at_elements(decoding.logits) && is_at_elements(decoding.gradient);
}

void launch_for_width(const Decoding& decoding, int64_t count, Stream stream) {
  const std::string type = type_name(decoding.logits.element);
  const std::string width = std::to_string(decoding.width);
  const std::string transform = name_of(decoding.support->transform);
  const bool wants_gradient = decoding.gradient.data != nullptr;
  DecodeArguments arguments{decoding, *decoding.support, FloatSupport(*decoding.support), count, 0, 32};
  std::string name;
  if (decoding.width <= kMostOfThread) {
    name = "decode_by_threads<" + type + ", " + (wants_gradient ? type : "void") + ", " + width + ", " + transform;
  } else {
    arguments.rows_of_warp = rows_of_warp(count, multiprocessors());
    name = (wants_gradient ? "decode_gradient_by_warps<" : "decode_by_warps<") + type + ", " + width + ", " + transform;
    if (wants_gradient) {
      name += begin_alike(decoding.logits, decoding.gradient) ? ", true" : ", false";
    }
  }
  const int64_t rows_of_block = kRowThreads / 32 * arguments.rows_of_warp;
  launch(kernel_named(name + ">"), (count + rows_of_block - 1) / rows_of_block, kRowThreads, stream, arguments);
}

template <class A>
void launch_as(const Decoding& decoding, int64_t count, const A* raw_centers, char* workspace, Stream stream) {
  const int32_t threads = threads_for_row(decoding.width, element_size(decoding.logits.element));
  const int64_t blocks = blocks_for_rows(count, threads);
  const DecodeArguments arguments{decoding, *decoding.support, FloatSupport(*decoding.support), count, threads, 0};
  static const std::string of_sums = std::string("<") + type_name(ElementOf<A>::value) + ">";
  static const Kernel<DecodeArguments> decode_rows("loss/decode.cuh", "decode_rows" + of_sums);
  static const Kernel<RawDecodeArguments> decode_rows_raw("loss/decode.cuh", "decode_rows_raw" + of_sums);
  if (!decoding.support->raw) {
    launch(decode_rows, blocks, kThreads, stream, arguments);
    return;
  }
  TableBuilder builder;
  builder.add(raw_centers, decoding.width);
  launch(decode_rows_raw, blocks, kThreads, stream, {arguments, builder.build(workspace, stream)});
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
  if (fits_width(decoding)) {
    launch_for_width(decoding, count, stream);
  } else if (decoding.logits.element == Element::float64) {
    launch_as(decoding, count, decoding.support->raw_centers, workspace, stream);
  } else {
    launch_as(decoding, count, decoding.support->raw_centers_float, workspace, stream);
  }
}

} // namespace gradscale
