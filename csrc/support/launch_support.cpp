// The launches of the kernels that decode, encode and project.
#include "../cuda/driver.h"
#include "../cuda/row_lanes.h"
#include "../cuda/row_shape.h"
#include "../cuda/table_builder.h"
#include "calls.h"

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

constexpr const char* kFile = "support/decode.cuh";

} // namespace

void launch_decode(const Decoding& decoding, int64_t count, const OnDevice& device) {
  if (decoding.width > INT32_MAX - 64) {
    throw std::runtime_error("decode: a row has more than 2^31 - 65 elements");
  }
  const Support& support = *decoding.support;
  DecodeArguments arguments{decoding, support, FloatSupport(support), count, 0, 0};
  const auto [name, lanes] = specification_of(decoding);
  if (lanes != 0) {
    arguments.rows_per_warp = rounded_rows_per_warp(balanced_rows_per_warp(count, multiprocessors()), lanes);
    const int64_t rows_per_block = kRowThreads / 32 * arguments.rows_per_warp;
    device.launch(kFile, name, (count + rows_per_block - 1) / rows_per_block, kRowThreads, arguments);
    return;
  }
  arguments.threads_per_row = threads_for_row(decoding.width, element_size(decoding.logits.element));
  const int64_t blocks = blocks_for_rows(count, arguments.threads_per_row);
  if (!support.raw) {
    device.launch(kFile, name, blocks, kThreads, arguments);
    return;
  }
  TableBuilder centers; // in the type of sums
  if (decoding.logits.element == Element::float64) {
    centers.add(support.raw_centers, support.num_bins);
  } else {
    centers.add(support.raw_centers_float, support.num_bins);
  }
  device.launch(kFile, name, blocks, kThreads, RawDecodeArguments{arguments, centers.build(device)});
}

void launch_encode(const Encoding& encoding, int64_t count, const OnDevice& device) {
  const int32_t threads = threads_for_row(encoding.width, element_size(encoding.out.element));
  const EncodeArguments arguments{encoding, *encoding.support, count, threads};
  device.launch("support/encode.cuh", "encode_rows", blocks_for_rows(count, threads), kThreads, arguments);
}

void launch_project(const Projection& projection, int64_t count, const OnDevice& device) {
  if (projection.width > INT32_MAX - 64) {
    throw std::runtime_error("project: a row has more than 2^31 - 65 elements");
  }
  constexpr int64_t rows_per_block = kThreads / 32;
  const ProjectArguments arguments{projection, *projection.support, count};
  device.launch(
      "support/encode.cuh", "project_rows", (count + rows_per_block - 1) / rows_per_block, kThreads, arguments);
}

} // namespace gradscale
