// The launches of the kernels that decode, encode and project.
#include "../cuda/launch.h"
#include "../cuda/row_lanes.h"
#include "../cuda/row_shape.h"
#include "../cuda/table_builder.h"
#include "calls.h"

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace gradscale {

namespace {

const char* name_of(Transform transform) {
  switch (transform) {
    case Transform::identity:
      return "Transform::identity";
    case Transform::signed_hyperbolic:
      return "Transform::signed_hyperbolic";
    case Transform::symlog:
      return "Transform::symlog";
  }
  return "";
}

// The kernel of a call. `lanes` lanes own a row; if it is 0, a group of threads owns a row.
struct DecodeSpecification {
  std::string name;
  int32_t lanes;
};

DecodeSpecification specification_of(const Decoding& decoding) {
  const std::string type = type_name(decoding.logits.element);
  if (decoding.support->raw) {
    return {instance("decode_raw_by_groups", {type}), 0};
  }
  const bool wants_gradient = decoding.gradient.data != nullptr;
  const Lanes lanes = bin_lanes(decoding.width, decoding.logits, decoding.gradient);
  if (lanes.per_row == 0) {
    return {instance("decode_by_groups", {type}), 0};
  }
  return {
      instance(
          "decode_by_lanes",
          {type,
           wants_gradient ? type : "void",
           std::to_string(decoding.width),
           std::to_string(lanes.per_row),
           std::to_string(lanes.unit),
           name_of(decoding.support->transform)}),
      lanes.per_row};
}

// Returns the kernel with this name. It is made once, at the first launch.
template <class Argument>
const Kernel<Argument>& kernel_named(const std::string& name) {
  static std::mutex mutex;
  static auto& kernels = *new std::map<std::string, std::unique_ptr<Kernel<Argument>>>(); // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Kernel<Argument>>& kernel = kernels[name];
  if (kernel == nullptr) {
    kernel = std::make_unique<Kernel<Argument>>("support/decode.cuh", name);
  }
  return *kernel;
}

void launch_raw(
    const std::string& name, const DecodeArguments& arguments, int64_t blocks, char* workspace, Stream stream) {
  const Decoding& decoding = arguments.decoding;
  TableBuilder builder;
  if (decoding.logits.element == Element::float64) {
    builder.add(decoding.support->raw_centers, decoding.width);
  } else {
    builder.add(decoding.support->raw_centers_float, decoding.width);
  }
  launch(
      kernel_named<RawDecodeArguments>(name), blocks, kThreads, stream, {arguments, builder.build(workspace, stream)});
}

} // namespace

int64_t bytes_for_decode(const Decoding& decoding) {
  const int64_t bytes = decoding.support->raw ? decoding.width * static_cast<int64_t>(sizeof(double)) : 0;
  return bytes > Table::kInside ? bytes : 0;
}

void launch_decode(const Decoding& decoding, int64_t count, char* workspace, void* stream) {
  if (decoding.width > INT32_MAX - 64) {
    throw std::runtime_error("decode: a row has more than 2^31 - 65 elements");
  }
  const Support& support = *decoding.support;
  DecodeArguments arguments{decoding, support, FloatSupport(support), count, 0, 0};
  const auto [name, lanes] = specification_of(decoding);
  if (lanes != 0) {
    arguments.rows_per_warp = rounded_rows_per_warp(balanced_rows_per_warp(count, multiprocessors()), lanes);
    const int64_t rows_per_block = kRowThreads / 32 * arguments.rows_per_warp;
    const int64_t blocks = (count + rows_per_block - 1) / rows_per_block;
    launch(kernel_named<DecodeArguments>(name), blocks, kRowThreads, stream, arguments);
    return;
  }
  arguments.threads_per_row = threads_for_row(decoding.width, element_size(decoding.logits.element));
  const int64_t blocks = blocks_for_rows(count, arguments.threads_per_row);
  if (support.raw) {
    launch_raw(name, arguments, blocks, workspace, stream);
  } else {
    launch(kernel_named<DecodeArguments>(name), blocks, kThreads, stream, arguments);
  }
}

void launch_encode(const Encoding& encoding, int64_t count, void* stream) {
  const int32_t threads = threads_for_row(encoding.width, element_size(encoding.out.element));
  const int64_t blocks = blocks_for_rows(count, threads);
  const EncodeArguments arguments{encoding, *encoding.support, count, threads};
  static const Kernel<EncodeArguments> encode_rows("support/encode.cuh", "encode_rows");
  launch(encode_rows, blocks, kThreads, stream, arguments);
}

void launch_project(const Projection& projection, int64_t count, void* stream) {
  if (projection.width > INT32_MAX - 64) {
    throw std::runtime_error("project: a row has more than 2^31 - 65 elements");
  }
  constexpr int64_t rows_per_block = kThreads / 32;
  static const Kernel<ProjectArguments> project_rows("support/encode.cuh", "project_rows");
  launch(
      project_rows,
      (count + rows_per_block - 1) / rows_per_block,
      kThreads,
      stream,
      {projection, *projection.support, count});
}

} // namespace gradscale
