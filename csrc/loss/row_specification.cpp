#include "row_specification.h"

#include "../math/row_shape.h"
#include "row_options.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace gradscale {

namespace {

// ---- How many lanes own a row

// The widest rows of so many lanes. Fewer lanes exchange less; more lanes keep more of a row in registers, of which a
// row with targets over its logits takes twice as many. One lane has a row in shared memory.
struct LanesOfWidth {
  int64_t widest;
  int32_t lanes;
};
constexpr LanesOfWidth kLanesOfBins[] = {{64, 1}, {256, 8}, {640, 16}, {1024, 32}};
constexpr LanesOfWidth kLanesOfActions[] = {{40, 1}, {112, 8}, {224, 16}, {448, 32}};
constexpr int64_t kSharedBytesOfBlock = 48 * 1024;
constexpr int64_t kSector = 32; // bytes

struct Lanes {
  int32_t per_row; // 0: a group of threads has the row
  int32_t unit;    // elements that a lane accesses at once
};

// True if rows begin at multiples of `count` elements, or if there are none.
bool is_aligned(const Rows& rows, int64_t count) {
  return rows.data == nullptr || (reinterpret_cast<uintptr_t>(rows.data) % (count * element_size(rows.element)) == 0 &&
                                  rows.stride % count == 0);
}

int64_t bytes_in_tile(const Rows& rows, int64_t width) {
  const auto bytes = static_cast<int32_t>(element_size(rows.element));
  return rows.data == nullptr ? 0 : tile_pitch(static_cast<int32_t>(width), bytes);
}

// The lanes for rows of so many logits, with gradients and targets over the logits where these have data.
template <size_t count>
Lanes lanes_of(
    const LanesOfWidth (&table)[count], int64_t width, const Rows& logits, const Rows& gradient, const Rows& target) {
  const auto all_aligned = [&](int64_t unit) {
    return is_aligned(logits, unit) && is_aligned(gradient, unit) && is_aligned(target, unit);
  };
  if (logits.element == Element::float64 || width < 2 || !all_aligned(1)) {
    return {0, 0};
  }
  const int32_t unit = width % 2 == 0 && all_aligned(2) ? 2 : 1;
  const int64_t tiles = std::max(bytes_in_tile(logits, width), bytes_in_tile(gradient, width));
  for (const LanesOfWidth& of : table) {
    if (width <= of.widest && of.lanes > 1 && of.lanes * unit * element_size(logits.element) >= kSector) {
      return {of.lanes, unit};
    }
    if (width <= of.widest && of.lanes == 1 &&
        kRowThreads * (tiles + bytes_in_tile(target, width)) <= kSharedBytesOfBlock) {
      return {1, width % 2 == 0 ? 2 : 1};
    }
  }
  return {0, 0};
}

Lanes lanes_of(const Segment& segment) {
  const Head& head = *segment.head;
  const Rows& target = segment.target;
  if (!has_logits(head.kind) || head.support.raw || !is_aligned({target.data, 0, target.element}, 1)) {
    return {0, 0};
  }
  if (head.kind == Kind::soft_cross_entropy) {
    const Rows over_logits = target.element == Element::int64 ? Rows{} : target;
    return lanes_of(kLanesOfActions, segment.width, segment.prediction, segment.gradient, over_logits);
  }
  const bool has_few_bins = head.kind != Kind::hl_gauss ||
                            (head.sigma_ratio >= kSmallestSigmaOfLanes && head.sigma_ratio <= kLargestSigmaOfLanes);
  return has_few_bins ? lanes_of(kLanesOfBins, segment.width, segment.prediction, segment.gradient, {}) : Lanes{0, 0};
}

int32_t options_of(const Head& head) {
  const bool is_policy = head.kind == Kind::soft_cross_entropy;
  return (has_logits(head.kind) && head.label_smoothing != 0 ? kSmoothing : 0) |
         (is_policy && head.entropy_weight != 0 ? kEntropy : 0) |
         (is_policy && head.subtract_target_entropy ? kSubtractsEntropy : 0);
}

// ---- How C++ names what kernels are compiled for, inside of namespace gradscale

const char* name_of(Kind kind) {
  switch (kind) {
#define GRADSCALE_CASE(name, ...) \
  case Kind::name:                \
    return "Kind::" #name;
    GRADSCALE_KINDS(GRADSCALE_CASE)
#undef GRADSCALE_CASE
  }
  return "";
}

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

std::string name_of_gradient(Element element) {
  return element == Element::int64 ? "void" : type_name(element); // none is wanted
}

std::string instance(const std::string& of_template, const std::vector<std::string>& arguments) {
  std::string name = of_template;
  for (const std::string& argument : arguments) {
    name += (&argument == arguments.data() ? "<" : ", ") + argument;
  }
  return name + ">";
}

// The members that distinguish two specifications.
auto members(const RowSpecification& of) {
  const int32_t lanes = of.way == Way::lanes ? of.threads : 0; // others are known when the kernel runs
  return std::make_tuple(of.way, of.kind, of.logits, of.target, of.gradient, of.width, lanes, of.unit, of.options);
}

} // namespace

bool RowSpecification::operator==(const RowSpecification& other) const {
  return members(*this) == members(other);
}

bool RowSpecification::operator<(const RowSpecification& other) const {
  return members(*this) < members(other);
}

std::string RowSpecification::name() const {
  switch (way) {
    case Way::lanes:
      return instance(
          "LossRows",
          {name_of(kind),
           type_name(logits),
           type_name(target),
           name_of_gradient(gradient),
           std::to_string(width),
           std::to_string(threads),
           std::to_string(unit),
           std::to_string(options)});
    case Way::group:
      return instance("GroupRows", {name_of(kind), type_name(logits), std::to_string(options)});
    case Way::multiplied:
      break;
  }
  return instance("MultipliedRows", {name_of_gradient(gradient)});
}

int64_t RowSpecification::blocks(int64_t rows, int32_t rows_of_warp) const {
  const int64_t rows_of_block =
      way == Way::lanes ? kRowThreads / 32 * rows_per_warp(rows_of_warp, threads) : kRowThreads / threads;
  return (rows + rows_of_block - 1) / rows_of_block;
}

RowSpecification specification_of(const Segment& segment, int32_t threads_per_row, bool multiplies) {
  RowSpecification result{};
  result.gradient = segment.gradient.data == nullptr ? Element::int64 : segment.gradient.element;
  result.threads = threads_per_row;
  if (multiplies) {
    result.way = Way::multiplied;
    return result;
  }
  result.kind = segment.head->kind;
  result.logits = segment.prediction.element;
  result.options = options_of(*segment.head);
  const Lanes lanes = lanes_of(segment);
  if (lanes.per_row == 0) {
    result.way = Way::group;
    result.gradient = Element::int64; // its type is asked for when the kernel runs
    return result;
  }
  result.way = Way::lanes;
  result.target = result.kind == Kind::soft_cross_entropy ? segment.target.element : Element::float64;
  result.width = static_cast<int32_t>(segment.width);
  result.threads = lanes.per_row;
  result.unit = lanes.unit;
  return result;
}

const Kernel<DevicePass>& loss_rows_for(const std::vector<RowSpecification>& kinds_of_rows, bool inside) {
  using Kernels = std::map<std::pair<std::vector<RowSpecification>, bool>, std::unique_ptr<Kernel<DevicePass>>>;
  static std::mutex mutex;
  static auto& kernels = *new Kernels(); // for ever: what is loaded for a kernel is never unloaded
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Kernel<DevicePass>>& kernel = kernels[{kinds_of_rows, inside}];
  if (kernel == nullptr) {
    std::vector<std::string> arguments{inside ? "true" : "false"};
    for (const RowSpecification& kind_of_rows : kinds_of_rows) {
      arguments.push_back(kind_of_rows.name());
    }
    kernel = std::make_unique<Kernel<DevicePass>>("loss/multi_step_loss.cuh", instance("loss_rows", arguments));
  }
  return *kernel;
}

DecodeSpecification specification_of(const Decoding& decoding) {
  const std::string type = type_name(decoding.logits.element);
  if (decoding.support->raw) {
    return {instance("decode_raw_by_groups", {type}), 0};
  }
  const bool wants_gradient = decoding.gradient.data != nullptr;
  const Lanes lanes = lanes_of(kLanesOfBins, decoding.width, decoding.logits, decoding.gradient, {});
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

} // namespace gradscale
