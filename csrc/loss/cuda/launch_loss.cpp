// The kernels of the loss for the rows of a call, and their launches.
#include "../../cuda/driver.h"
#include "../../cuda/row_shape.h"
#include "../../formulas/cross_entropy.h"
#include "../../support/kernels.h"
#include "../call.h"
#include "../own_heads.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace gradscale {

// ---- Kinds of rows --------------------------------------------------------------------------------------------------

// The specification of a row kernel: the properties of rows that it is compiled for, and its name in C++. Template
// arguments are written only here.
//
// To add faster code for some rows, write a type as block_of_rows.cuh describes, and add its name in type_of(), its
// condition in specification_of() and its rows per block in rows_of_block().
struct RowSpecification {
  Kind kind;
  Element logits;
  std::optional<Element> target;   // a distribution over the logits, or an int64 class; none: something else
  std::optional<Element> gradient; // none: not wanted, or its type is read when the kernel runs
  int32_t width;                   // 0: code for all widths
  int32_t groups;                  // of a row in DivergenceRows
  int32_t lanes; // that own a row: of a warp (LossRows, DivergenceRows), or a block (WideRows); 0: ThreadGroupRows
  int32_t vector_size; // as in RowLanes, like the next one
  bool at_once;
  int32_t options; // bits of RowOptions

  auto members() const {
    return std::tie(kind, logits, target, gradient, width, groups, lanes, vector_size, at_once, options);
  }
  bool operator==(const RowSpecification& other) const {
    return members() == other.members();
  }
  bool operator<(const RowSpecification& other) const {
    return members() < other.members();
  }
};

namespace {

// The kernels in which lanes own rows (lane_rows.cuh) compute HLGauss targets in float. They are used only for supports
// that are not raw, and for a sigma_ratio in this range, where few bins have mass and float is accurate enough.
constexpr double kSmallestSigmaOfLanes = 0.1;
constexpr double kLargestSigmaOfLanes = 2;

RowLanes lanes_of(const Pass& pass, const Segment& segment) {
  const Head& head = *segment.head;
  const Rows& target = segment.target;
  if (head.kind == Kind::categorical_kl) {
    const int64_t groups = segment.width / segment.last_size;
    return group_lanes(groups, segment.last_size, segment.prediction, segment.gradient, target);
  }
  if (!has_logits(head.kind) || !has_small_centers(head.support) || !is_aligned({target.data, 0, target.element}, 1)) {
    return {};
  }
  if (head.kind == Kind::soft_cross_entropy) {
    if (pass.fields[segment.first_field + kSecondField].data != nullptr) {
      return {}; // few classes have a probability
    }
    const Rows over_logits = target.element == Element::int64 ? Rows{} : target;
    return action_lanes(segment.width, segment.prediction, segment.gradient, over_logits);
  }
  const bool has_few_bins =
      head.kind != Kind::hl_gauss ||
      (!head.support.raw && head.sigma_ratio >= kSmallestSigmaOfLanes && head.sigma_ratio <= kLargestSigmaOfLanes);
  return has_few_bins ? bin_lanes(segment.width, segment.prediction, segment.gradient) : RowLanes{};
}

int32_t options_of(const Segment& segment) {
  const Head& head = *segment.head;
  if (head.kind == Kind::categorical_kl) {
    const bool is_double = segment.prediction.element == Element::float64;
    const Mixture mixture = is_double ? CategoricalKL<double>::mixture_of(head, segment.last_size)
                                      : CategoricalKL<float>::mixture_of(head, segment.last_size);
    return (head.predicts_p ? kPredictsP : 0) | (mixture == Mixture::probabilities ? kMixesProbabilities : 0) |
           (mixture == Mixture::logarithms ? kMixesLogarithms : 0);
  }
  return has_logits(head.kind) ? row_options(head) : 0;
}

// The type of these rows, as C++ names it inside of namespace gradscale.
std::string type_of(const RowSpecification& rows) {
  const std::string kind_name = "Kind::" + description_of(rows.kind).name;
  if (rows.lanes == 0) {
    return instance("ThreadGroupRows", {kind_name, type_name(rows.logits), std::to_string(rows.options)});
  }
  const auto name_of = [](std::optional<Element> type) { return type ? type_name(*type) : "void"; };
  const std::vector<std::string> types{type_name(rows.logits), name_of(rows.target), name_of(rows.gradient)};
  if (rows.kind == Kind::categorical_kl) {
    std::vector<std::string> arguments = types;
    for (const int32_t number : {rows.groups, rows.width / rows.groups, rows.lanes, rows.vector_size}) {
      arguments.push_back(std::to_string(number));
    }
    arguments.insert(arguments.end(), {rows.at_once ? "true" : "false", std::to_string(rows.options)});
    return instance("DivergenceRows", arguments);
  }
  const std::string of_width = std::to_string(rows.width), of_vector_size = std::to_string(rows.vector_size),
                    access = rows.at_once ? "true" : "false", bits = std::to_string(rows.options);
  if (rows.lanes == kRowThreads) {
    return instance("WideRows", {types[0], types[1], types[2], of_width, of_vector_size, access, bits});
  }
  return instance(
      "LossRows",
      {kind_name, types[0], types[1], types[2], of_width, std::to_string(rows.lanes), of_vector_size, access, bits});
}

// Specifies the kernel for the rows of a segment.
RowSpecification specification_of(const Pass& pass, const Segment& segment) {
  RowSpecification result{};
  result.kind = segment.head->kind;
  result.logits = segment.prediction.element;
  result.options = options_of(segment);
  const RowLanes lanes = lanes_of(pass, segment);
  const bool is_divergence = result.kind == Kind::categorical_kl;
  if (lanes.per_row == 0) {
    return result;
  }
  if (result.kind == Kind::soft_cross_entropy || is_divergence) {
    result.target = segment.target.element;
  }
  if (segment.gradient.data != nullptr) {
    result.gradient = segment.gradient.element;
  }
  if (segment.head->support.raw) {
    result.options |= kRawCenters;
  }
  result.width = static_cast<int32_t>(segment.width);
  result.groups = is_divergence ? static_cast<int32_t>(segment.width / segment.last_size) : 1;
  result.lanes = lanes.per_row;
  result.vector_size = lanes.vector_size;
  result.at_once = lanes.at_once;
  return result;
}

// The name of the kernel for these kinds of rows; `inside`: the table is in its arguments. Made once, for all calls.
const std::string& loss_rows_for(const std::vector<RowSpecification>& row_kinds, bool inside) {
  static std::mutex mutex;
  static auto& names = *new std::map<std::pair<std::vector<RowSpecification>, bool>, std::string>(); // never freed
  const std::lock_guard<std::mutex> lock(mutex);
  std::string& name = names[{row_kinds, inside}];
  if (name.empty()) {
    std::vector<std::string> arguments{inside ? "true" : "false"};
    for (const RowSpecification& row_kind : row_kinds) {
      arguments.push_back(type_of(row_kind));
    }
    name = instance("loss_rows", arguments);
  }
  return name;
}

// ---- Launches -------------------------------------------------------------------------------------------------------

constexpr const char* kFile = "loss/cuda/totals.cuh";

// Sets how the warps of a block of loss_totals share samples, heads and steps. It does not depend on the GPU, so that
// sums are the same on all GPUs. Returns the number of warps of a block, and of sets of 32 samples.
std::pair<int64_t, int64_t> share_totals(const Pass& pass, DevicePass& argument) {
  constexpr int64_t most_warps = kTotalsThreads / 32;
  constexpr int64_t enough_blocks = 128;                             // fill most GPUs
  const int64_t sets = std::max<int64_t>(1, (pass.batch + 31) / 32); // a set without samples has sums of 0
  int64_t warps = std::min(pass.num_heads, most_warps);              // for more heads, they repeat, one warp a head
  for (; 2 * warps <= most_warps && sets > enough_blocks << argument.set_bits; warps *= 2) {
    ++argument.set_bits;
  }
  for (; 2 * warps <= most_warps && 1 << argument.part_bits < pass.steps; warps *= 2) {
    ++argument.part_bits;
  }
  return {warps, sets};
}

} // namespace

// The launches of a pass, with their arguments.
class Launches {
 public:
  Launches(const Pass& pass, const OnDevice& device) {
    argument_.pass = pass;
    if (!pass.is_backward) {
      prepare_totals(device);
    }
    argument_.rows_per_warp = balanced_rows_per_warp(pass.batch * pass.num_segments, multiprocessors());
    for (int64_t i = 0; i < pass.num_segments; ++i) {
      if (!pass.is_backward || pass.segments[i].wants_gradient()) {
        add_to_row_range(i);
      }
    }
    constexpr int64_t most_blocks = INT32_MAX / 2; // the index of a block plus their number does not overflow
    TORCH_CHECK_VALUE(
        blocks_ <= most_blocks,
        "multi_step_loss: a batch of ",
        pass.batch,
        " samples needs ",
        blocks_,
        " blocks in one launch, and at most ",
        most_blocks,
        " are possible; split the batch");
    argument_.num_blocks = blocks_;
    argument_.heads = table_.add(pass.heads, pass.num_heads);
    argument_.coefficients = table_.add(pass.coefficients, pass.num_heads);
    argument_.segments = table_.add(pass.segments, pass.num_segments);
    argument_.fields = table_.add(pass.fields, pass.num_fields);
    argument_.num_row_ranges = static_cast<int64_t>(row_ranges_.size());
    argument_.row_ranges = table_.add(row_ranges_.data(), argument_.num_row_ranges);
    argument_.table = table_.build(device);
    rows_name_ = &loss_rows_for(row_kinds_, argument_.table.outside == nullptr);
  }

  void run(const OnDevice& device) {
    if (argument_.pass.counts_unmasked && !argument_.pass.is_backward) {
      device.launch(kFile, "count_unmasked", argument_.pass.num_heads, kThreads, argument_);
    }
    rows(device, argument_);
    if (!argument_.pass.is_backward) {
      const char* name = argument_.table.outside == nullptr ? "loss_totals<true>" : "loss_totals<false>";
      device.launch(kFile, name, totals_blocks_, totals_threads_, argument_);
    }
    workspace_.reset();
  }

  void rows(const OnDevice& device, const DevicePass& argument) const {
    constexpr int64_t most_blocks = 8; // per multiprocessor, if they may have nothing to do
    const int64_t blocks = argument.pass.has_gradients ? std::min(blocks_, most_blocks * multiprocessors()) : blocks_;
    device.launch("loss/cuda/multi_step_loss.cuh", *rows_name_, blocks, kRowThreads, argument);
  }

  void again(const Slab& grad_output, const OnDevice& device) const {
    DevicePass argument = argument_;
    argument.pass.is_backward = true;
    argument.pass.has_gradients = true;
    argument.pass.grad_output = grad_output;
    rows(device, argument);
  }

 private:
  void prepare_totals(const OnDevice& device) {
    const int64_t num_heads = argument_.pass.num_heads;
    const auto [warps, sets] = share_totals(argument_.pass, argument_);
    totals_threads_ = static_cast<int>(32 * warps);
    totals_blocks_ = (sets + (1 << argument_.set_bits) - 1) >> argument_.set_bits;
    const auto bytes_of_block = static_cast<int64_t>(sizeof(LossSums) + num_heads * sizeof(HeadSums));
    workspace_ =
        device.memory(totals_blocks_ * bytes_of_block + static_cast<int64_t>(sizeof(LossSums))); // the counter, aligned
    argument_.partial.losses = static_cast<LossSums*>(workspace_.mutable_data_ptr());
    argument_.partial.heads = reinterpret_cast<HeadSums*>(argument_.partial.losses + totals_blocks_);
    argument_.blocks_done = reinterpret_cast<unsigned*>(argument_.partial.heads + totals_blocks_ * num_heads);
  }

  void add_to_row_range(int64_t index) {
    const Segment& segment = argument_.pass.segments[index];
    constexpr int64_t widest = INT32_MAX - 64;
    TORCH_CHECK_VALUE(
        std::max(segment.width, segment.target_width) <= widest,
        "multi_step_loss: a row must have at most ",
        widest,
        " elements on a GPU, but a prediction has ",
        segment.width,
        " and its target ",
        segment.target_width);
    const int32_t bytes = element_size(segment.prediction.element);
    const int32_t threads = is_policy(segment.head->kind) ? threads_for_short_row(segment.width, bytes, kRowThreads)
                                                          : threads_for_row(segment.width, bytes, kRowThreads);
    const RowSpecification specification = specification_of(argument_.pass, segment);
    const auto found = std::find(row_kinds_.begin(), row_kinds_.end(), specification);
    const auto row_kind = static_cast<int32_t>(found - row_kinds_.begin());
    if (found == row_kinds_.end()) {
      row_kinds_.push_back(specification);
    }
    const auto head = static_cast<int32_t>(segment.head - argument_.pass.heads);
    const int64_t rows_per_block = rows_of_block(specification.lanes, threads);
    const int64_t blocks = (argument_.pass.batch + rows_per_block - 1) / rows_per_block;
    const bool follows = !row_ranges_.empty() && last_segment_ == index - 1 && row_ranges_.back().head == head &&
                         row_ranges_.back().row_kind == row_kind;
    if (!follows) {
      row_ranges_.push_back(
          {head,
           static_cast<int32_t>(index),
           static_cast<int32_t>(blocks_),
           static_cast<int32_t>(blocks),
           row_kind,
           threads,
           add_raw_centers(segment),
           table_.add(segment.head->choice_ends, segment.head->num_choices)});
    }
    blocks_ += blocks;
    last_segment_ = index;
  }

  int64_t rows_of_block(int32_t lanes, int32_t threads_per_row) const {
    if (lanes == 0) {
      return kRowThreads / threads_per_row;
    }
    return lanes == kRowThreads ? 1 : kRowThreads / 32 * rounded_rows_per_warp(argument_.rows_per_warp, lanes);
  }

  // Adds the raw centres of a segment's head to the table, in the type of its sums. Returns their offset, or -1 if the
  // support is not raw.
  int64_t add_raw_centers(const Segment& segment) {
    const Support& support = segment.head->support;
    if (!support.raw) {
      return -1;
    }
    return segment.prediction.element == Element::float64 ? table_.add(support.raw_centers, support.num_bins)
                                                          : table_.add(support.raw_centers_float, support.num_bins);
  }

  int64_t totals_blocks_ = 0;
  int totals_threads_ = 0;
  DevicePass argument_{};
  at::Tensor workspace_; // the partial sums and the counter of blocks
  TableBuilder table_;
  std::vector<RowRange> row_ranges_;
  std::vector<RowSpecification> row_kinds_;
  const std::string* rows_name_ = nullptr; // of loss_rows
  int64_t last_segment_ = -1;              // of the last row range
  int64_t blocks_ = 0;                     // of loss_rows
};

std::shared_ptr<const Launches> launch_loss(const Pass& pass, const OnDevice& device) {
  auto launches = std::make_shared<Launches>(pass, device);
  launches->run(device);
  return launches;
}

void launch_again(const Launches& forward, const Slab& grad_output, const OnDevice& device) {
  forward.again(grad_output, device);
}

} // namespace gradscale
