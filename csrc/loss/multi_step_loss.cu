#include "multi_step_loss.cuh"

#include "../port/table_builder.h"

#include <stdexcept>

namespace gradscale {

namespace {

bool is_double(const Segment& segment) {
  return segment.prediction.element == Element::float64;
}

bool is_counted(const LossCall& call, int64_t head) {
  return call.mean_of_unmasked && call.coefficients[head].mask.data != nullptr;
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
  explicit Launches(const LossCall& call) : call_(call), used_(bytes_of_sums(call)) {
    for (int64_t i = 0; i < call.num_segments; ++i) {
      (is_double(call.segments[i]) ? has_doubles_ : has_floats_) = true;
    }
    for (int64_t h = 0; h < call.num_heads; ++h) {
      counts_ = counts_ || is_counted(call, h);
    }
    blocks_ = blocks_of_totals(call);
    partial_ = {reinterpret_cast<double*>(call.workspace), call.num_heads};
    blocks_done_ = reinterpret_cast<unsigned*>(partial_.data + blocks_ * partial_.size());
    all_ = build(/*of_doubles=*/true, /*of_floats=*/true);
    if (has_doubles_ && has_floats_) {
      doubles_ = build(true, false);
      floats_ = build(false, true);
    }
  }

  void forward(Stream stream) {
    finish(stream);
    if (counts_) {
      launch(
          "count_unmasked",
          count_unmasked,
          call_.num_heads,
          kThreads,
          stream,
          all_.table,
          call_.batch,
          call_.num_unmasked);
    }
    rows({call_.batch, blocks_done_, {}, false, {}}, stream);
    const TotalsArguments arguments{
        call_.batch,
        call_.each_sample,
        call_.skip_nonfinite,
        call_.per_sample,
        call_.skipped,
        call_.loss,
        call_.head_means,
        call_.num_nonfinite,
        partial_,
        blocks_done_};
    launch("loss_totals", loss_totals, blocks_, kThreads, stream, all_.table, arguments);
  }

  void backward(const LossBackward& backward, Stream stream) {
    finish(stream);
    const Slab skipped = call_.skip_nonfinite ? call_.skipped : Slab{};
    rows({call_.batch, blocks_done_, backward.grad_output, backward.has_gradients, skipped}, stream);
  }

 private:
  struct Built {
    LossTable table;
    TableBuilder builder;
    int64_t outside; // place in the workspace
  };

  Built build(bool of_doubles, bool of_floats) {
    Built built{};
    std::vector<DeviceHead> heads(call_.num_heads);
    std::vector<DeviceSegment> segments;
    int64_t block = 0;
    for (int64_t i = 0; i < call_.num_segments; ++i) {
      const Segment& segment = call_.segments[i];
      const auto index = static_cast<int32_t>(segment.head - call_.heads);
      DeviceHead& head = heads[index];
      if (head.num_segments++ == 0) {
        fill(head, segment, index);
        add_raw_centers(built.builder, head, /*as_double=*/has_doubles_ && of_doubles);
      }
      if (is_double(segment) ? of_doubles : of_floats) {
        segments.push_back(device_segment(segment, index, block));
        block += blocks_for_rows(call_.batch, head.threads_per_row);
      }
    }
    if (block > INT32_MAX) {
      throw std::runtime_error("multi_step_loss: the batch is too large for one launch; split it");
    }
    built.table.num_heads = call_.num_heads;
    built.table.num_segments = static_cast<int64_t>(segments.size());
    built.table.blocks = block;
    built.table.heads = built.builder.add(heads.data(), built.table.num_heads);
    built.table.segments = built.builder.add(segments.data(), built.table.num_segments);
    built.outside = used_;
    used_ += built.builder.bytes_outside();
    return built;
  }

  void fill(DeviceHead& head, const Segment& first, int32_t index) const {
    if (first.width > INT32_MAX - 64) {
      throw std::runtime_error("multi_step_loss: a row has more than 2^31 elements");
    }
    head.head = *first.head;
    head.coefficients = call_.coefficients[index];
    head.loss = first.loss;
    head.expected = first.expected;
    head.width = first.width;
    head.raw_centers = -1;
    head.threads_per_row = threads_for_row(first.width, element_size(first.prediction.element));
    head.num_unmasked = is_counted(call_, index) ? call_.num_unmasked + index : nullptr;
  }

  static void add_raw_centers(TableBuilder& builder, DeviceHead& head, bool as_double) {
    const Support& support = head.head.support;
    if (support.raw) {
      head.raw_centers = as_double ? builder.add(support.raw_centers, support.num_bins)
                                   : builder.add(support.raw_centers_float, support.num_bins);
    }
  }

  DeviceSegment device_segment(const Segment& segment, int32_t head, int64_t block) const {
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
    of_device.first_block = static_cast<int32_t>(block);
    of_device.prediction_element = static_cast<int8_t>(segment.prediction.element);
    of_device.target_element = static_cast<int8_t>(segment.target.element);
    of_device.gradient_element = static_cast<int8_t>(segment.gradient.element);
    return of_device;
  }

  // Brings the tables to the device where they do not fit into arguments.
  void finish(Stream stream) {
    for (Built* built : {&all_, &doubles_, &floats_}) {
      if (built->table.num_heads > 0) {
        built->table.table = built->builder.build(call_.workspace + built->outside, stream);
      }
    }
  }

  void rows(const RowsArguments& arguments, Stream stream) const {
    const bool both = has_doubles_ && has_floats_;
    if (has_floats_) {
      const LossTable& table = both ? floats_.table : all_.table;
      launch("loss_rows", loss_rows<float>, table.blocks, kThreads, stream, table, arguments);
    }
    if (has_doubles_) {
      const LossTable& table = both ? doubles_.table : all_.table;
      launch("loss_rows", loss_rows<double>, table.blocks, kThreads, stream, table, arguments);
    }
  }

  const LossCall& call_;
  int64_t used_; // bytes of the workspace
  bool has_doubles_ = false;
  bool has_floats_ = false;
  bool counts_ = false;
  int64_t blocks_ = 0; // of loss_totals
  PartialSums partial_{};
  unsigned* blocks_done_ = nullptr;
  Built all_{};
  Built doubles_{};
  Built floats_{};
};

} // namespace

int64_t bytes_for_loss(const LossCall& call) {
  int64_t table = call.num_heads * sizeof(DeviceHead) + call.num_segments * sizeof(DeviceSegment);
  for (int64_t h = 0; h < call.num_heads; ++h) {
    table += call.heads[h].support.raw ? call.heads[h].support.num_bins * sizeof(double) : 0;
  }
  return bytes_of_sums(call) + (table > Table::kInside ? 3 * (table + 8) : 0); // for all, doubles, and floats
}

void launch_loss(const LossCall& call, void* stream) {
  Launches(call).forward(static_cast<Stream>(stream));
}

void launch_loss_backward(const LossCall& call, const LossBackward& backward, void* stream) {
  Launches(call).backward(backward, static_cast<Stream>(stream));
}

} // namespace gradscale
