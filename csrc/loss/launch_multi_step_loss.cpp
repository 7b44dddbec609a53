#include "../math/row_shape.h"
#include "../port/table_builder.h"
#include "row_options.h"
#include "row_specification.h"

#include <algorithm>
#include <stdexcept>

namespace gradscale {

namespace {

constexpr const char* kFile = "loss/totals.cuh";

bool has_divisor(const LossCall& call, int64_t head) {
  return call.divisors != nullptr && (!call.counts_unmasked || call.coefficients[head].mask.data != nullptr);
}

// An empty batch has a block too, whose sums are 0.
int64_t blocks_of_totals(const LossCall& call) {
  return call.batch <= kThreads ? 1 : (call.batch + kThreads - 1) / kThreads;
}

// The bytes before the tables in the workspace: partial sums, and the counter of blocks that are done.
int64_t bytes_of_sums(const LossCall& call) {
  const PartialSums partial{nullptr, call.num_heads};
  return (blocks_of_totals(call) * partial.size() + 1) * static_cast<int64_t>(sizeof(double));
}

// The launches of a call.
class Launches {
 public:
  // Without `backward`: of the forward pass.
  Launches(const LossCall& call, const LossBackward* backward)
      : call_(call), backward_(backward), has_gradients_(backward != nullptr && backward->has_gradients) {
    blocks_of_totals_ = blocks_of_totals(call);
    partial_ = {reinterpret_cast<double*>(call.workspace), call.num_heads};
    blocks_done_ = reinterpret_cast<unsigned*>(partial_.data + blocks_of_totals_ * partial_.size());
    rows_of_warp_ = rows_of_warp(call.batch * call.num_segments, multiprocessors());
    build();
  }

  void forward(Stream stream) {
    finish(stream);
    if (call_.counts_unmasked) {
      static const Kernel<CountArguments> count_unmasked(kFile, "count_unmasked");
      launch(count_unmasked, call_.num_heads, kThreads, stream, {table_, call_.batch, call_.divisors});
    }
    rows({}, {}, stream);
    const TotalsArguments arguments{
        table_,
        call_.batch,
        call_.each_sample,
        call_.skip_nonfinite,
        call_.per_sample,
        call_.skipped,
        call_.loss,
        call_.head_means,
        call_.head_losses,
        call_.num_nonfinite,
        partial_,
        blocks_done_};
    static const Kernel<TotalsArguments> loss_totals(kFile, "loss_totals");
    launch(loss_totals, blocks_of_totals_, kThreads, stream, arguments);
  }

  void backward(Stream stream) {
    finish(stream);
    rows(backward_->grad_output, call_.skip_nonfinite ? call_.skipped : Slab{}, stream);
  }

 private:
  void build() {
    std::vector<DeviceHead> heads(call_.num_heads);
    std::vector<DeviceSegment> segments;
    for (int64_t i = 0; i < call_.num_segments; ++i) {
      const Segment& segment = call_.segments[i];
      const auto index = static_cast<int32_t>(segment.head - call_.heads);
      DeviceHead& head = heads[index];
      if (head.num_segments++ == 0) {
        fill(head, segment, index);
      }
      add_raw_centers(head, segment);
      if (backward_ == nullptr || segment.gradient.data != nullptr) {
        add_to_span(i, specification_of(segment, head.threads_per_row, multiplies(segment)));
      }
      segments.push_back(device_segment(segment, index));
    }
    if (blocks_ > INT32_MAX) {
      throw std::runtime_error("multi_step_loss: the batch is too large for one launch; split it");
    }
    table_.num_heads = call_.num_heads;
    table_.num_segments = call_.num_segments;
    table_.num_spans = static_cast<int64_t>(spans_.size());
    table_.heads = builder_.add(heads.data(), table_.num_heads);
    table_.segments = builder_.add(segments.data(), table_.num_segments);
    table_.spans = builder_.add(spans_.data(), table_.num_spans);
  }

  // Halves would be rounded a second time.
  bool multiplies(const Segment& segment) const {
    return has_gradients_ && element_size(segment.gradient.element) > 2;
  }

  void add_to_span(int64_t segment, const RowSpecification& specification) {
    const bool follows = !spans_.empty() && last_segment_ == segment - 1 &&
                         call_.segments[segment].head == call_.segments[last_segment_].head;
    const auto found = std::find(kinds_of_rows_.begin(), kinds_of_rows_.end(), specification);
    const auto kind_of_rows = static_cast<int32_t>(found - kinds_of_rows_.begin());
    const int64_t blocks = specification.blocks(call_.batch, rows_of_warp_);
    if (found == kinds_of_rows_.end()) {
      kinds_of_rows_.push_back(specification);
    }
    if (!follows || spans_.back().kind_of_rows != kind_of_rows) {
      spans_.push_back(
          {static_cast<int32_t>(segment), static_cast<int32_t>(blocks_), static_cast<int32_t>(blocks), kind_of_rows});
    }
    blocks_ += blocks;
    last_segment_ = segment;
  }

  void fill(DeviceHead& head, const Segment& first, int32_t index) const {
    if (first.width > INT32_MAX - 64) {
      throw std::runtime_error("multi_step_loss: a row has more than 2^31 elements");
    }
    head.head = *first.head;
    head.coefficients = call_.coefficients[index];
    head.loss = first.loss;
    head.detail = first.detail;
    head.width = first.width;
    head.raw_centers_float = head.raw_centers_double = -1;
    head.threads_per_row = threads_for_row(first.width, element_size(first.prediction.element), kRowThreads);
    head.divisor = has_divisor(call_, index) ? call_.divisors + index : nullptr;
  }

  void add_raw_centers(DeviceHead& head, const Segment& segment) {
    const Support& support = head.head.support;
    if (!support.raw) {
      return;
    }
    if (segment.prediction.element == Element::float64 && head.raw_centers_double < 0) {
      head.raw_centers_double = builder_.add(support.raw_centers, support.num_bins);
    }
    if (segment.prediction.element != Element::float64 && head.raw_centers_float < 0) {
      head.raw_centers_float = builder_.add(support.raw_centers_float, support.num_bins);
    }
  }

  DeviceSegment device_segment(const Segment& segment, int32_t head) const {
    DeviceSegment of_device{};
    of_device.prediction = segment.prediction.data;
    of_device.target = segment.target.data;
    of_device.gradient = segment.gradient.data;
    of_device.prediction_stride = segment.prediction.stride;
    of_device.target_stride = segment.target.stride;
    of_device.gradient_stride = segment.gradient.stride;
    of_device.step_weight = call_.step_weights == nullptr ? 1 : call_.step_weights[segment.step];
    of_device.gradient_scale = call_.step_gradient_scale == nullptr ? 1 : call_.step_gradient_scale[segment.step];
    of_device.head = head;
    of_device.step = static_cast<int32_t>(segment.step);
    of_device.prediction_element = static_cast<int8_t>(segment.prediction.element);
    of_device.target_element = static_cast<int8_t>(segment.target.element);
    of_device.gradient_element = static_cast<int8_t>(segment.gradient.element);
    return of_device;
  }

  // Brings the table to the device where it does not fit into arguments.
  void finish(Stream stream) {
    table_.table = builder_.build(call_.workspace + bytes_of_sums(call_), stream);
  }

  void rows(const Slab& grad_output, const Slab& skipped, Stream stream) const {
    if (blocks_ == 0) {
      return;
    }
    const Kernel<RowsArguments>& loss_rows = loss_rows_for(kinds_of_rows_, table_.table.outside == nullptr);
    const RowsArguments arguments{
        table_, call_.batch, rows_of_warp_, blocks_done_, grad_output, has_gradients_, skipped};
    launch(loss_rows, blocks_, kRowThreads, stream, arguments);
  }

  const LossCall& call_;
  const LossBackward* backward_;
  bool has_gradients_;
  int32_t rows_of_warp_ = 0;
  int64_t blocks_of_totals_ = 0;
  PartialSums partial_{};
  unsigned* blocks_done_ = nullptr;
  TableBuilder builder_;
  LossTable table_{};
  std::vector<SegmentSpan> spans_;
  std::vector<RowSpecification> kinds_of_rows_;
  int64_t last_segment_ = -1; // of the last span
  int64_t blocks_ = 0;        // of loss_rows
};

} // namespace

int64_t bytes_for_loss(const LossCall& call) {
  // At most a span for each segment.
  int64_t table =
      call.num_heads * sizeof(DeviceHead) + call.num_segments * (sizeof(DeviceSegment) + sizeof(SegmentSpan));
  for (int64_t h = 0; h < call.num_heads; ++h) {
    const Support& support = call.heads[h].support;
    table += support.raw ? support.num_bins * static_cast<int64_t>(sizeof(double) + sizeof(float)) + 8 : 0;
  }
  return bytes_of_sums(call) + (table > Table::kInside ? table + 8 : 0);
}

void launch_loss(const LossCall& call, void* stream) {
  Launches(call, nullptr).forward(stream);
}

void launch_loss_backward(const LossCall& call, const LossBackward& backward, void* stream) {
  Launches(call, &backward).backward(stream);
}

} // namespace gradscale
