#include "row_specification.h"

#include "../math/row_begins.h"
#include "../math/row_shape.h"
#include "../math/thread_row.h"
#include "kernel_names.h"
#include "thread_policy.h"
#include "warp_rows.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace gradscale {

namespace {

// What tells types apart.
auto members(const RowSpecification& of) {
  return std::tie(of.way, of.kind, of.logits, of.gradient, of.width, of.options, of.target, of.transform, of.stays);
}

bool is_categorical(Kind kind) {
  return kind == Kind::two_hot || kind == Kind::hl_gauss;
}

// Whether a warp or a thread computes such rows at all, of some widths.
bool is_lean(const Segment& segment) {
  const Head& head = *segment.head;
  const bool of_support = is_categorical(head.kind) && !head.support.raw;
  const bool bins_are_few = head.kind != Kind::hl_gauss ||
                            (head.sigma_ratio >= kSmallestSigmaOfWarp && head.sigma_ratio <= kLargestSigmaOfWarp);
  return (of_support || head.kind == Kind::soft_cross_entropy) && bins_are_few &&
         segment.prediction.element != Element::float64 && is_at_elements(segment.prediction) &&
         is_at_elements(segment.target) && is_at_elements(segment.gradient);
}

// The shared memory for the rows of a warp whose threads have one each.
int64_t shared_bytes_of_threads(const Segment& segment) {
  const auto bytes_of = [&](Element element) {
    return 32 * pitch_of_thread(static_cast<int32_t>(segment.width), static_cast<int32_t>(element_size(element)));
  };
  int64_t bytes = bytes_of(segment.prediction.element);
  if (segment.gradient.data != nullptr && segment.gradient.element != segment.prediction.element) {
    bytes += bytes_of(segment.gradient.element);
  }
  if (segment.head->kind == Kind::hl_gauss) {
    bytes += 32 * segment.width * static_cast<int64_t>(sizeof(float));
  } else if (segment.head->kind == Kind::soft_cross_entropy && segment.target.element != Element::int64) {
    bytes += bytes_of(segment.target.element);
  }
  return bytes;
}

bool fits_thread(const Segment& segment) {
  return is_lean(segment) && segment.width >= 2 && segment.width <= kMostOfThread &&
         kRowThreads / 32 * shared_bytes_of_threads(segment) <= kSharedBytesOfThreads;
}

int32_t options_of_threads(const Head& head) {
  if (is_categorical(head.kind)) {
    return head.label_smoothing != 0 ? kSmoothsPolicy : 0;
  }
  return (head.label_smoothing != 0 ? kSmoothsPolicy : 0) | (head.entropy_weight != 0 ? kWithEntropy : 0) |
         (head.subtract_target_entropy ? kSubtractsEntropy : 0);
}

bool has_few_bins(const Head& head) {
  return bins_beside_target(head.sigma_ratio) <= kFewBinsBeside;
}

bool fits_warp(const Segment& segment) {
  return is_lean(segment) && is_categorical(segment.head->kind) && segment.width >= kFewestOfWarp &&
         segment.width <= kMostOfWarp;
}

} // namespace

bool RowSpecification::operator==(const RowSpecification& other) const {
  return members(*this) == members(other);
}

bool RowSpecification::operator<(const RowSpecification& other) const {
  return members(*this) < members(other);
}

std::string RowSpecification::name() const {
  const std::string comma = ", ";
  switch (way) {
    case Way::thread:
      if (kind == Kind::soft_cross_entropy) {
        return "PolicyThreadRows<" + (type_name(logits) + comma + type_name(target)) + comma +
               name_of_gradient(gradient) + comma + std::to_string(width) + comma + std::to_string(options) + ">";
      }
      return "CategoricalThreadRows<" + (name_of(kind) + comma + type_name(logits)) + comma +
             name_of_gradient(gradient) + comma + std::to_string(width) + comma + name_of(transform) + comma +
             (options != 0 ? "true>" : "false>");
    case Way::warp:
      return "WarpRows<" + (name_of(kind) + comma + type_name(logits)) + comma + name_of_gradient(gradient) + comma +
             std::to_string(width) + comma + std::to_string(options) + ">";
    case Way::group:
      return "GroupRows<" + (name_of(kind) + comma + type_name(logits)) + comma + (stays ? "true>" : "false>");
    case Way::multiplied:
      break;
  }
  return std::string("MultipliedRows<") + name_of_gradient(gradient) + ">";
}

int64_t RowSpecification::blocks(int64_t rows, int64_t rows_of_warp) const {
  const int64_t rows_of_block =
      way == Way::thread ? kRowThreads : (way == Way::warp ? kRowThreads / 32 * rows_of_warp : kRowThreads / group);
  return (rows + rows_of_block - 1) / rows_of_block;
}

RowSpecification specification_of(const Segment& segment, int32_t threads_per_row, bool multiplies) {
  const bool wants_gradient = segment.gradient.data != nullptr;
  RowSpecification result{};
  result.gradient = wants_gradient ? segment.gradient.element : Element::int64;
  result.group = threads_per_row;
  if (multiplies) {
    result.way = Way::multiplied;
    return result;
  }
  result.kind = segment.head->kind;
  result.logits = segment.prediction.element;
  if (fits_thread(segment)) {
    result.way = Way::thread;
    result.width = static_cast<int32_t>(segment.width);
    result.options = options_of_threads(*segment.head);
    result.target = is_categorical(result.kind) ? Element::float64 : segment.target.element;
    result.transform = segment.head->support.transform;
    result.group = 0;
    return result;
  }
  if (fits_warp(segment)) {
    result.way = Way::warp;
    result.width = static_cast<int32_t>(segment.width);
    result.options = (segment.head->label_smoothing != 0 ? kSmoothing : 0) |
                     (wants_gradient && !begin_alike(segment.prediction, segment.gradient) ? kOtherBegin : 0) |
                     (result.kind == Kind::hl_gauss && has_few_bins(*segment.head) ? kFewBins : 0);
    result.group = 0;
    return result;
  }
  const int64_t size = element_size(segment.prediction.element);
  result.way = Way::group;
  result.gradient = Element::int64; // its type is asked for when the kernel runs
  result.stays =
      has_logits(result.kind) && windows_at_most(segment.width, size) <= cached_windows(size) * threads_per_row;
  return result;
}

const Kernel<RowsArguments>& loss_rows_for(const std::vector<RowSpecification>& kinds_of_rows, bool inside) {
  using Kernels = std::map<std::pair<std::vector<RowSpecification>, bool>, std::unique_ptr<Kernel<RowsArguments>>>;
  static std::mutex mutex;
  static auto& kernels = *new Kernels(); // for ever: what is loaded for a kernel is never unloaded
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Kernel<RowsArguments>>& kernel = kernels[{kinds_of_rows, inside}];
  if (kernel == nullptr) {
    std::string name = inside ? "loss_rows<true" : "loss_rows<false";
    for (const RowSpecification& kind_of_rows : kinds_of_rows) {
      name += ", " + kind_of_rows.name();
    }
    kernel = std::make_unique<Kernel<RowsArguments>>("loss/multi_step_loss.cuh", name + ">");
  }
  return *kernel;
}

} // namespace gradscale
