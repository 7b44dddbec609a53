// Runs a pass on a CPU.
#include "../cpu/scratch.h"
#include "../formulas/weighted_sum.h"
#include "call.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

namespace gradscale {

namespace {

struct RowChunk {
  const Segment* segment;
  int64_t begin, end;
};

// The cost of a row, in units of an element of a long row.
int64_t cost_of(const Segment& segment) {
  if (segment.head->kind == Kind::quantile_huber) {
    return segment.width * segment.target_width / 8 + 128; // a pair takes about an eighth of an exponential
  }
  if (segment.head->kind == Kind::categorical_kl) {
    return 3 * segment.width + 128; // two exponentials and a logarithm
  }
  return row_cost(segment.width);
}

// Splits the rows into chunks of about equal cost: multiples of kLanes rows, except the last chunk of a segment.
std::vector<RowChunk> row_chunks(const Pass& pass) {
  constexpr int64_t chunk_elements = 8192;
  std::vector<RowChunk> chunks;
  for (int64_t s = 0; s < pass.num_segments; ++s) {
    const Segment& segment = pass.segments[s];
    const int64_t row_batches = std::max<int64_t>(1, chunk_elements / (kLanes * cost_of(segment)));
    const int64_t rows = row_batches * kLanes;
    for (int64_t begin = 0; begin < pass.batch; begin += rows) {
      chunks.push_back({&segment, begin, std::min(begin + rows, pass.batch)});
    }
  }
  return chunks;
}

// Runs all rows. A thread first runs its own share of the chunks, whose rows are adjacent in memory, and then takes
// chunks from the shares of other threads.
void run_rows(const Pass& pass) {
  constexpr int64_t serial_elements = 32768; // waking the other threads costs as much as this many exponentials
  int64_t elements = 0;
  int64_t widest = 0;
  for (int64_t s = 0; s < pass.num_segments; ++s) {
    elements += pass.batch * cost_of(pass.segments[s]);
    widest = std::max({widest, pass.segments[s].width, pass.segments[s].target_width});
  }
  const std::vector<RowChunk> chunks = row_chunks(pass);
  const size_t most_threads = elements <= serial_elements ? 1 : at::get_num_threads();
  const size_t shares = std::min(most_threads, chunks.size());
  const auto begin_of = [&](size_t share) { return share * chunks.size() / shares; };
  std::vector<std::atomic<size_t>> taken(shares); // the number of chunks taken from each share
  at::parallel_for(0, static_cast<int64_t>(shares), 1, [&](int64_t own, int64_t) {
    Scratch scratch(widest);
    for (size_t k = 0; k < shares; ++k) {
      const size_t share = (static_cast<size_t>(own) + k) % shares;
      const size_t end = begin_of(share + 1);
      for (size_t i = begin_of(share) + taken[share]++; i < end; i = begin_of(share) + taken[share]++) {
        run_rows_kernel(pass, *chunks[i].segment, chunks[i].begin, chunks[i].end, scratch.data());
      }
    }
  });
}

// The sums of a block of samples.
struct BlockSums {
  std::vector<HeadSums> heads;
  LossSums total{0, 0};
};

// A block of samples. Sums are computed within each block in a fixed order, and then over the blocks.
template <class T>
class BlockOfSamples {
 public:
  static constexpr int64_t kSamples = 1024; // their losses and shares stay in the cache

  BlockOfSamples(const Pass& pass, int64_t index, BlockSums& sums)
      : pass_(pass),
        first_(index * kSamples),
        count_(std::min(kSamples, pass.batch - first_)),
        sums_(sums),
        losses_(count_, 0.0),
        by_head_(pass.num_heads * count_) {
  }

  // Stores the loss L_b of each sample, and adds up everything else.
  void run() {
    sums_.heads.resize(pass_.num_heads);
    const Segment* segments = pass_.segments;
    for (int64_t h = 0; h < pass_.num_heads; ++h) {
      add_head(h, segments);
      segments += pass_.steps_of(pass_.heads[h]);
    }
    store_samples();
    add_shares();
    segments = pass_.segments;
    for (int64_t h = 0; h < pass_.num_heads; ++h) {
      add_metrics(segments, pass_.steps_of(pass_.heads[h]), sums_.heads[h]);
      if (pass_.coefficients[h].approx_kl.data != nullptr) {
        add_policy(h, segments);
      }
      segments += pass_.steps_of(pass_.heads[h]);
    }
  }

 private:
  bool is_finite(int64_t b) const { // as the user reads it
    return std::isfinite(static_cast<T>(losses_[b]));
  }

  // Adds a head's losses, weighted and summed over its steps, to the loss of each sample. `segments` are the segments
  // of this head, as below.
  void add_head(int64_t h, const Segment* segments) {
    const Head& head = pass_.heads[h];
    const Coefficients& coefficients = pass_.coefficients[h];
    const int64_t steps = pass_.steps_of(head);
    const auto has_weight = [](const Segment& segment) { return segment.step_weight != 1; };
    const bool plain = coefficients.mask.data == nullptr && coefficients.step_weights.values.data == nullptr &&
                       std::none_of(segments, segments + steps, has_weight);
    const T* losses = static_cast<const T*>(segments->loss.data) + first_ * steps; // the steps of a sample are adjacent
    StepSums* own = by_head_.data() + h * count_;
    for (int64_t b = 0; b < count_; ++b, losses += steps) {
      StepSums of_sample{0, 0, 0};
      for (int64_t t = 0; t < steps; ++t) {
        if (plain) {
          of_sample.add(true, losses[t], 1);
        } else {
          const bool is_unmasked = coefficients.mask.includes(first_ + b, segments[t].step);
          of_sample.add(is_unmasked, losses[t], coefficients.step_weight(segments[t], first_ + b));
        }
      }
      own[b] = of_sample;
    }
    const double weight = head.weight, head_weight = coefficients.head_weight();
    double* of_samples = losses_.data();
    double sum = 0, unmasked = 0;
#pragma omp simd reduction(+ : sum, unmasked)
    for (int64_t b = 0; b < count_; ++b) {
      sum += own[b].losses;
      unmasked += own[b].unmasked;
      of_samples[b] += own[b].loss(weight, head_weight);
    }
    sums_.heads[h].losses = sum;
    sums_.heads[h].unmasked = unmasked;
  }

  void store_samples() {
    pass_.per_sample.store(first_, count_, losses_.data());
    int64_t nonfinite = 0;
    for (int64_t b = 0; b < count_; ++b) {
      nonfinite += is_finite(b) ? 0 : 1;
    }
    sums_.total.nonfinite = static_cast<double>(nonfinite);
    for (int64_t b = 0; b < count_ && nonfinite > 0 && pass_.skips_nonfinite; ++b) {
      for (int64_t s = 0; s < pass_.num_segments && !is_finite(b); ++s) {
        pass_.segments[s].metrics[first_ + b].gradient_square = 0;
        pass_.clear_gradients(pass_.segments[s], first_ + b);
      }
    }
  }

  // Adds up the part of each sample in the loss of the call.
  void add_shares() {
    std::vector<double> parts(count_, 0.0), weights(count_), shares(count_);
    for (int64_t h = 0; h < pass_.num_heads; ++h) {
      const Coefficients& coefficients = pass_.coefficients[h];
      const StepWeight importance = coefficients.importance_weights;
      for (int64_t b = 0; b < count_; ++b) {
        weights[b] = importance.at(first_ + b, 0);
      }
      const double head_weight = coefficients.head_weight();
      const StepSums* own = by_head_.data() + h * count_;
      double sum = 0, weighted_sum = 0;
#pragma omp simd reduction(+ : sum, weighted_sum)
      for (int64_t b = 0; b < count_; ++b) {
        const bool counts = !pass_.skips_nonfinite || is_finite(b);
        const double share = counts ? own[b].share(weights[b], coefficients.factor) : 0;
        const double weighted_share = counts ? own[b].weighted_share(share, head_weight) : 0;
        sum += share;
        weighted_sum += weighted_share;
        shares[b] = share;
        parts[b] += weighted_share;
      }
      sums_.heads[h].share = sum;
      sums_.heads[h].weighted_share = weighted_sum;
      if (pass_.each_sample && coefficients.share.data != nullptr) {
        coefficients.share.store(first_, count_, shares.data());
      }
    }
    if (pass_.each_sample) {
      pass_.loss.store(first_, count_, parts.data());
    } else {
      sums_.total.loss = std::accumulate(parts.begin(), parts.end(), 0.0);
    }
  }

  // Adds up the squares of a head's gradient, and finds its largest logit.
  void add_metrics(const Segment* segments, int64_t steps, HeadSums& sums) const {
    double squares = 0, largest = 0;
    for (int64_t t = 0; t < steps; ++t) {
      const RowMetrics* rows = segments[t].metrics + first_;
#pragma omp simd reduction(+ : squares) reduction(max : largest)
      for (int64_t b = 0; b < count_; ++b) {
        squares += rows[b].gradient_square;
        largest = rows[b].largest_logit > largest ? rows[b].largest_logit : largest;
      }
    }
    sums.squares = squares;
    sums.largest_logit = largest;
  }

  // Adds up the differences of a policy from the one that chose the actions.
  void add_policy(int64_t h, const Segment* segments) {
    const StepMask& mask = pass_.coefficients[h].mask;
    double divergence = 0, clipped = 0;
    for (int64_t t = 0; t < pass_.steps_of(pass_.heads[h]); ++t) {
      const auto* rows = static_cast<const typename PolicyScore<T>::Difference*>(
          pass_.fields[segments[t].first_field + kDifferences].data);
#pragma omp simd reduction(+ : divergence, clipped)
      for (int64_t b = first_; b < first_ + count_; ++b) {
        const bool counts = mask.includes(b, segments[t].step);
        divergence += counts ? rows[b].divergence : T(0);
        clipped += counts ? rows[b].clipped : T(0);
      }
    }
    sums_.heads[h].divergence = divergence;
    sums_.heads[h].clipped = clipped;
  }

  const Pass& pass_;
  const int64_t first_, count_;
  BlockSums& sums_;
  std::vector<double> losses_;    // L_b
  std::vector<StepSums> by_head_; // [heads, samples]
};

// Stores the loss L_b of each sample, the loss of the call, the means and shares of the heads, and the number of
// samples whose loss is not finite.
template <class T>
void reduce(const Pass& pass) {
  constexpr int64_t kSamples = BlockOfSamples<T>::kSamples;
  std::vector<BlockSums> blocks(std::max<int64_t>(1, (pass.batch + kSamples - 1) / kSamples));
  at::parallel_for(0, static_cast<int64_t>(blocks.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      BlockOfSamples<T>(pass, i, blocks[i]).run();
    }
  });
  BlockSums& sums = blocks[0];
  for (size_t i = 1; i < blocks.size(); ++i) {
    sums.total.loss += blocks[i].total.loss;
    sums.total.nonfinite += blocks[i].total.nonfinite;
    for (int64_t h = 0; h < pass.num_heads; ++h) {
      sums.heads[h].add(blocks[i].heads[h]);
    }
  }
  if (!pass.each_sample) {
    pass.loss.store(0, sums.total.loss);
  }
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    pass.store_head(h, pass.coefficients[h], sums.heads[h]);
  }
  *pass.num_nonfinite = static_cast<int64_t>(sums.total.nonfinite);
}

} // namespace

void compute_loss(const Pass& pass, bool is_double) {
  run_rows(pass);
  is_double ? reduce<double>(pass) : reduce<float>(pass);
}

} // namespace gradscale
