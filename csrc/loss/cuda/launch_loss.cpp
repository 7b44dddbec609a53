#include "launch_loss.h"
#include "../../cuda/row_shape.h"
#include "../../cuda/table_builder.h"
#include "row_specification.h"

#include <algorithm>
#include <stdexcept>

namespace gradscale {

namespace {

constexpr const char* kFile = "loss/cuda/totals.cuh";

// An empty batch has a block too, whose sums are 0.
int64_t blocks_of_totals(const Pass& pass) {
  return pass.batch <= kThreads ? 1 : (pass.batch + kThreads - 1) / kThreads;
}

// The bytes before the tables in the workspace: partial sums, and the counter of blocks that are done.
int64_t bytes_of_sums(const Pass& pass) {
  const PartialSums partial{nullptr, pass.num_heads};
  return (blocks_of_totals(pass) * partial.size() + 1) * static_cast<int64_t>(sizeof(double));
}

// The launches of a pass.
class Launches {
 public:
  Launches(const Pass& pass, void* workspace, Stream stream)
      : pass_(pass), stream_(stream), raw_centers_(2 * pass.num_heads, -1) {
    device_.pass = pass;
    device_.partial = {static_cast<double*>(workspace), pass.num_heads};
    device_.blocks_done =
        reinterpret_cast<unsigned*>(device_.partial.data + blocks_of_totals(pass) * device_.partial.size());
    device_.rows_of_warp = rows_of_warp(pass.batch * pass.num_segments, multiprocessors());
    TableBuilder builder;
    for (int64_t i = 0; i < pass.num_segments; ++i) {
      if (!is_backward() || pass.segments[i].gradient.data != nullptr) {
        add_to_span(i, builder);
      }
    }
    if (blocks_ > INT32_MAX) {
      throw std::runtime_error("multi_step_loss: the batch is too large for one launch; split it");
    }
    device_.heads = builder.add(pass.heads, pass.num_heads);
    device_.coefficients = builder.add(pass.coefficients, pass.num_heads);
    device_.segments = builder.add(pass.segments, pass.num_segments);
    device_.num_spans = static_cast<int64_t>(spans_.size());
    device_.spans = builder.add(spans_.data(), device_.num_spans);
    // Brings the table to the device if it does not fit into the arguments.
    device_.table = builder.build(static_cast<char*>(workspace) + bytes_of_sums(pass), stream);
  }

  void rows() const {
    if (blocks_ > 0) {
      launch(loss_rows_for(kinds_of_rows_, device_.table.outside == nullptr), blocks_, kRowThreads, stream_, device_);
    }
  }

  void count_unmasked() const {
    static const Kernel<DevicePass> kernel(kFile, "count_unmasked");
    launch(kernel, pass_.num_heads, kThreads, stream_, device_);
  }

  void totals() const {
    static const Kernel<DevicePass> kernel(kFile, "loss_totals");
    launch(kernel, blocks_of_totals(pass_), kThreads, stream_, device_);
  }

 private:
  bool is_backward() const {
    return pass_.grad_output.data != nullptr;
  }

  // Halves would be rounded a second time.
  bool multiplies(const Segment& segment) const {
    return is_backward() && pass_.has_gradients && element_size(segment.gradient.element) > 2;
  }

  void add_to_span(int64_t index, TableBuilder& builder) {
    const Segment& segment = pass_.segments[index];
    if (std::max(segment.width, segment.target_width) > INT32_MAX - 64) {
      throw std::runtime_error("multi_step_loss: a row has more than 2^31 elements");
    }
    const int32_t threads = threads_for_row(segment.width, element_size(segment.prediction.element), kRowThreads);
    const RowSpecification specification = specification_of(segment, threads, multiplies(segment));
    const auto found = std::find(kinds_of_rows_.begin(), kinds_of_rows_.end(), specification);
    const auto kind_of_rows = static_cast<int32_t>(found - kinds_of_rows_.begin());
    if (found == kinds_of_rows_.end()) {
      kinds_of_rows_.push_back(specification);
    }
    const auto head = static_cast<int32_t>(segment.head - pass_.heads);
    const auto blocks = specification.blocks(pass_.batch, device_.rows_of_warp);
    const bool follows = !spans_.empty() && last_segment_ == index - 1 && spans_.back().head == head &&
                         spans_.back().kind_of_rows == kind_of_rows;
    if (!follows) {
      spans_.push_back(
          {head,
           static_cast<int32_t>(index),
           static_cast<int32_t>(blocks_),
           static_cast<int32_t>(blocks),
           kind_of_rows,
           threads,
           raw_centers(segment, head, builder)});
    }
    blocks_ += blocks;
    last_segment_ = index;
  }

  // The place of the raw centres of a head, of the type of a segment's sums; -1: its support is not raw.
  int64_t raw_centers(const Segment& segment, int32_t head, TableBuilder& builder) {
    const Support& support = segment.head->support;
    const bool is_double = segment.prediction.element == Element::float64;
    int64_t& place = raw_centers_[2 * head + (is_double ? 1 : 0)];
    if (support.raw && place < 0) {
      place = is_double ? builder.add(support.raw_centers, support.num_bins)
                        : builder.add(support.raw_centers_float, support.num_bins);
    }
    return place;
  }

  const Pass& pass_;
  Stream stream_;
  DevicePass device_{};
  std::vector<Span> spans_;
  std::vector<RowSpecification> kinds_of_rows_;
  std::vector<int64_t> raw_centers_; // by head, in float and in double: their places; -1: not added
  int64_t last_segment_ = -1;        // of the last span
  int64_t blocks_ = 0;               // of loss_rows
};

} // namespace

int64_t bytes_for_loss(const Pass& pass) {
  // At most a span for each segment.
  int64_t table =
      pass.num_heads * (sizeof(Head) + sizeof(Coefficients)) + pass.num_segments * (sizeof(Segment) + sizeof(Span));
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    const Support& support = pass.heads[h].support;
    table += support.raw ? support.num_bins * static_cast<int64_t>(sizeof(double) + sizeof(float)) + 8 : 0;
  }
  return bytes_of_sums(pass) + (table > Table::kInside ? table : 0);
}

void launch_loss(const Pass& pass, void* workspace, void* stream) {
  const Launches launches(pass, workspace, stream);
  if (pass.counts_unmasked) {
    launches.count_unmasked();
  }
  launches.rows();
  launches.totals();
}

void launch_loss_backward(const Pass& pass, void* workspace, void* stream) {
  Launches(pass, workspace, stream).rows();
}

} // namespace gradscale
