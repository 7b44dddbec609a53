// Runs a pass on a CPU.
#include "../cpu/scratch.h"
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

// A sample of a head.
struct SampleOfHead {
  double weighted;  // its share of the reduced loss, without importance weight and head weight
  bool has_entries; // true if an entry is unmasked
};

// Adds a head's losses, weighted and summed over its steps, to the loss of each sample, and stores its samples in
// `own`. Sets the sums of the head's unmasked losses. `segments` are the segments of this head.
template <class T>
void add_head(
    const Pass& pass,
    const Head& head,
    const Coefficients& coefficients,
    const Segment* segments,
    double* samples,
    SampleOfHead* own,
    HeadSums& sums) {
  const int64_t steps = pass.steps_of(head);
  const auto has_weight = [](const Segment& segment) { return segment.step_weight != 1; };
  const bool plain = coefficients.mask.data == nullptr && coefficients.step_weights.values.data == nullptr &&
                     std::none_of(segments, segments + steps, has_weight);
  const T* losses = static_cast<const T*>(segments->loss.data); // the steps of a sample are adjacent
  const double head_weight = coefficients.head_weight();
  double head_sum = 0;
  int64_t count = plain ? pass.batch * steps : 0;
  for (int64_t b = 0; b < pass.batch; ++b, losses += steps) {
    double sample_sum = 0;
    double weighted_sum = 0;
    const int64_t count_before = plain ? -1 : count;
    for (int64_t t = 0; t < steps; ++t) {
      if (plain) {
        sample_sum += losses[t];
      } else if (coefficients.mask.includes(b, segments[t].step)) {
        sample_sum += losses[t];
        weighted_sum += coefficients.step_weight(segments[t], b) * losses[t];
        ++count;
      }
    }
    weighted_sum = plain ? sample_sum : weighted_sum;
    head_sum += sample_sum;
    own[b] = {coefficients.factor * weighted_sum, count != count_before};
    samples[b] += own[b].has_entries ? head.weight * head_weight * weighted_sum : 0.0;
  }
  sums.losses = head_sum;
  sums.unmasked = static_cast<double>(count);
}

void clear_gradients(const Pass& pass, int64_t sample) {
  for (int64_t s = 0; s < pass.num_segments; ++s) {
    pass.segments[s].metrics[sample].gradient_square = 0;
    pass.clear_gradients(pass.segments[s], sample);
  }
}

// Sets the sum of squares of a head's gradient, and its largest logit. `segments` are the segments of this head.
void add_metrics(const Pass& pass, const Segment* segments, int64_t steps, HeadSums& sums) {
  double squares = 0, largest = 0;
  for (int64_t t = 0; t < steps; ++t) {
    const RowMetrics* rows = segments[t].metrics;
#pragma omp simd reduction(+ : squares) reduction(max : largest)
    for (int64_t b = 0; b < pass.batch; ++b) {
      squares += rows[b].gradient_square;
      largest = rows[b].largest_logit > largest ? rows[b].largest_logit : largest;
    }
  }
  sums.squares = squares;
  sums.largest_logit = largest;
}

// Adds up the differences of a policy from the one that chose the actions. `segments` are the segments of this head.
template <class T>
void add_policy(
    const Pass& pass, const Head& head, const Coefficients& coefficients, const Segment* segments, HeadSums& sums) {
  for (int64_t t = 0; t < pass.steps_of(head); ++t) {
    const auto* rows = static_cast<const typename PolicyScore<T>::Difference*>(
        pass.fields[segments[t].first_field + kDifferences].data);
    for (int64_t b = 0; b < pass.batch; ++b) {
      if (coefficients.mask.includes(b, segments[t].step)) {
        sums.divergence += rows[b].divergence;
        sums.clipped += rows[b].clipped;
      }
    }
  }
}

// Stores the loss L_b of each sample, the loss of the call, the means and shares of the heads, and the number of
// samples whose loss is not finite. Sums are computed in a fixed order.
template <class T>
void reduce(const Pass& pass) {
  std::vector<double> samples(pass.batch, 0.0);                   // L_b
  std::vector<SampleOfHead> by_head(pass.num_heads * pass.batch); // [heads, batch]
  std::vector<HeadSums> sums(pass.num_heads);
  const Segment* segments = pass.segments;
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    const Head& head = pass.heads[h];
    SampleOfHead* own = by_head.data() + h * pass.batch;
    add_head<T>(pass, head, pass.coefficients[h], segments, samples.data(), own, sums[h]);
    segments += pass.steps_of(head);
  }
  const auto is_finite = [&](int64_t b) { return std::isfinite(static_cast<T>(samples[b])); }; // as the user reads it
  int64_t num_nonfinite = 0;
  for (int64_t b = 0; b < pass.batch; ++b) {
    pass.per_sample.store(b, samples[b]);
    num_nonfinite += is_finite(b) ? 0 : 1;
    if (pass.skips_nonfinite && !is_finite(b)) {
      clear_gradients(pass, b);
    }
  }
  std::vector<double> contributions(pass.batch, 0.0); // of the samples to the loss of the call
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    const Coefficients& coefficients = pass.coefficients[h];
    const StepWeight importance = coefficients.importance_weights;
    const double head_weight = coefficients.head_weight();
    const SampleOfHead* own = by_head.data() + h * pass.batch;
    for (int64_t b = 0; b < pass.batch; ++b) {
      const double weight = importance.at(b, 0);
      // A sample without unmasked entries adds 0, also if a weight is not finite.
      const bool counts = own[b].has_entries && !(pass.skips_nonfinite && !is_finite(b));
      const double share = counts ? weight * own[b].weighted : 0.0;
      const double weighted_share = counts ? head_weight * share : 0.0;
      sums[h].share += share;
      sums[h].weighted_share += weighted_share;
      contributions[b] += weighted_share;
      if (pass.each_sample && coefficients.share.data != nullptr) {
        coefficients.share.store(b, share);
      }
    }
  }
  if (pass.each_sample) {
    pass.loss.store(0, pass.batch, contributions.data());
  } else {
    pass.loss.store(0, std::accumulate(contributions.begin(), contributions.end(), 0.0));
  }
  segments = pass.segments;
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    const int64_t steps = pass.steps_of(pass.heads[h]);
    add_metrics(pass, segments, steps, sums[h]);
    if (pass.coefficients[h].approx_kl.data != nullptr) {
      add_policy<T>(pass, pass.heads[h], pass.coefficients[h], segments, sums[h]);
    }
    pass.store_head(h, pass.coefficients[h], sums[h]);
    segments += steps;
  }
  *pass.num_nonfinite = num_nonfinite;
}

} // namespace

void compute_loss(const Pass& pass, bool is_double) {
  run_rows(pass);
  is_double ? reduce<double>(pass) : reduce<float>(pass);
}

} // namespace gradscale
