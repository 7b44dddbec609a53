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

constexpr const char* kDecodeFile = "support/decode.cuh";
constexpr const char* kEncodeFile = "support/encode.cuh";

// Throws if the kernels' indices of elements would overflow.
void check_width(const Support& support) {
  if (support.num_bins > INT32_MAX - 64) {
    throw std::runtime_error("Support: a row has more than 2^31 - 65 elements");
  }
}

} // namespace

void launch_decode(const Decoding& decoding, const OnDevice& device) {
  const Support& support = decoding.support;
  check_width(support);
  const Element element = decoding.logits.element;
  const std::string type = type_name(element);
  const Lanes lanes = support.raw ? Lanes{0, 0} : bin_lanes(support.num_bins, decoding.logits, decoding.gradient);
  if (lanes.per_row > 0) {
    const int32_t rows_per_warp =
        rounded_rows_per_warp(balanced_rows_per_warp(decoding.count, multiprocessors()), lanes.per_row);
    const int64_t rows_per_block = kRowThreads / 32 * rows_per_warp;
    const std::string name = instance(
        "decode_by_lanes",
        {type,
         decoding.gradient.data != nullptr ? type : "void",
         std::to_string(support.num_bins),
         std::to_string(lanes.per_row),
         std::to_string(lanes.unit),
         name_of(support.transform)});
    const int64_t blocks = (decoding.count + rows_per_block - 1) / rows_per_block;
    device.launch(kDecodeFile, name, blocks, kRowThreads, LaneDecoding{decoding, FloatSupport(support), rows_per_warp});
    return;
  }
  TableBuilder centers;
  if (support.raw && element == Element::float64) {
    centers.add(support.raw_centers, support.num_bins);
  } else if (support.raw) {
    centers.add(support.raw_centers_float, support.num_bins);
  }
  const int32_t threads = threads_for_row(support.num_bins, element_size(element));
  const int64_t blocks = blocks_for_rows(decoding.count, threads);
  const GroupDecoding arguments{decoding, threads, centers.build(device)};
  device.launch(kDecodeFile, instance("decode_by_groups", {type}), blocks, kThreads, arguments);
}

void launch_encode(const Encoding& encoding, const OnDevice& device) {
  check_width(encoding.support);
  const int32_t threads = threads_for_row(encoding.support.num_bins, element_size(encoding.out.element));
  device.launch(kEncodeFile, "encode_rows", blocks_for_rows(encoding.count, threads), kThreads, encoding);
}

void launch_project(const Projection& projection, const OnDevice& device) {
  check_width(projection.support);
  constexpr int64_t rows_per_block = kThreads / 32;
  const int64_t blocks = (projection.count + rows_per_block - 1) / rows_per_block;
  device.launch(kEncodeFile, "project_rows", blocks, kThreads, projection);
}

} // namespace gradscale
