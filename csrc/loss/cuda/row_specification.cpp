#include "row_specification.h"

#include "../../cuda/lanes_of_row.h"
#include "../../formulas/losses.h"
#include "../../support/calls.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace gradscale {

namespace {

Lanes lanes_of(const Segment& segment) {
  const Head& head = *segment.head;
  const Rows& target = segment.target;
  if (!has_logits(head.kind) || head.support.raw || !is_aligned({target.data, 0, target.element}, 1)) {
    return {0, 0};
  }
  if (head.kind == Kind::soft_cross_entropy) {
    const Rows over_logits = target.element == Element::int64 ? Rows{} : target;
    return lanes_of_actions(segment.width, segment.prediction, segment.gradient, over_logits);
  }
  const bool has_few_bins = head.kind != Kind::hl_gauss ||
                            (head.sigma_ratio >= kSmallestSigmaOfLanes && head.sigma_ratio <= kLargestSigmaOfLanes);
  return has_few_bins ? lanes_of_bins(segment.width, segment.prediction, segment.gradient) : Lanes{0, 0};
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

std::string name_of_gradient(Element element) {
  return element == Element::int64 ? "void" : type_name(element); // none is wanted
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
    kernel = std::make_unique<Kernel<DevicePass>>("loss/cuda/multi_step_loss.cuh", instance("loss_rows", arguments));
  }
  return *kernel;
}

} // namespace gradscale
