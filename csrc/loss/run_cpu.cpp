#include "description.h"

#include "../host/cpu_kernels.h"
#include "scratch.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>

namespace gradscale {

namespace {

struct Chunk {
  const Segment* segment;
  int64_t begin, end;
};

// Cuts rows into chunks of about as many elements, and of whole groups of rows.
std::vector<Chunk> chunks_of(const Description& call) {
  constexpr int64_t chunk_elements = 8192;
  std::vector<Chunk> chunks;
  for (const Segment& segment : call.segments) {
    const int64_t groups = std::max<int64_t>(1, chunk_elements / (kLanes * cost_of_row(segment.width)));
    const int64_t rows = groups * kLanes;
    for (int64_t begin = 0; begin < call.batch; begin += rows) {
      chunks.push_back({&segment, begin, std::min(begin + rows, call.batch)});
    }
  }
  return chunks;
}

// Runs all rows. A thread goes through a share of its own, whose rows follow each other in memory, and then helps where
// others are late.
void run_rows(const Description& call) {
  constexpr int64_t serial_elements = 32768; // waking the other threads costs as much as this many exponentials
  int64_t elements = 0;
  int64_t widest = 0;
  for (const Segment& segment : call.segments) {
    elements += call.batch * cost_of_row(segment.width);
    widest = std::max(widest, segment.width);
  }
  const std::vector<Chunk> chunks = chunks_of(call);
  const RunRows run = for_this_machine(run_rows_kernel);
  const size_t most_threads = elements <= serial_elements ? 1 : at::get_num_threads();
  const size_t shares = std::min(most_threads, chunks.size());
  const auto begin_of = [&](size_t share) { return share * chunks.size() / shares; };
  std::vector<std::atomic<size_t>> taken(shares); // chunks of each share
  at::parallel_for(0, static_cast<int64_t>(shares), 1, [&](int64_t own, int64_t) {
    Scratch scratch(widest);
    for (size_t k = 0; k < shares; ++k) {
      const size_t share = (static_cast<size_t>(own) + k) % shares;
      const size_t end = begin_of(share + 1);
      for (size_t i = begin_of(share) + taken[share]++; i < end; i = begin_of(share) + taken[share]++) {
        const Segment& segment = *chunks[i].segment;
        const Coefficients& coefficients = call.coefficients[call.heads.index_of(segment.head)];
        run(segment, coefficients, chunks[i].begin, chunks[i].end, scratch.data());
      }
    }
  });
}

// Adds the losses of a head, weighted and summed over its steps, to those of every sample, and leaves them with its
// factor in `weighted`; returns their plain sum.
template <class T>
double add_head(const Description& call, size_t head, double* samples, double* weighted) {
  const int64_t steps = call.steps_of(head);
  const int64_t first = call.heads[head].first_step;
  const double weight = call.heads[head].weight;
  const Coefficients& coefficients = call.coefficients[head];
  const bool plain = coefficients.mask.data == nullptr && coefficients.step_weights.values.data == nullptr;
  const T* losses = call.outputs.per_step[head].const_data_ptr<T>();
  double of_head = 0;
  for (int64_t b = 0; b < call.batch; ++b, losses += steps) {
    double of_sample = 0;
    double weighted_of_sample = 0;
    for (int64_t t = 0; t < steps; ++t) {
      if (plain) {
        of_sample += losses[t];
      } else if (coefficients.mask.includes(b, first + t)) {
        of_sample += losses[t];
        weighted_of_sample += coefficients.step_weights.at(b, first + t) * losses[t];
      }
    }
    weighted_of_sample = plain ? of_sample : weighted_of_sample;
    of_head += of_sample;
    samples[b] += weight * weighted_of_sample;
    weighted[b] = coefficients.factor * weighted_of_sample;
  }
  return of_head;
}

bool has_entries(const Description& call, size_t head, int64_t sample) {
  for (int64_t step = call.heads[head].first_step; step < call.arguments.steps; ++step) {
    if (call.coefficients[head].mask.includes(sample, step)) {
      return true;
    }
  }
  return false;
}

void clear_gradients(const Description& call, int64_t sample) {
  for (const Segment& segment : call.segments) {
    if (segment.gradient.data != nullptr) {
      const int64_t size = element_size(segment.gradient.element);
      char* row = static_cast<char*>(segment.gradient.data) + sample * segment.gradient.stride * size;
      std::fill(row, row + segment.width * size, 0);
    }
  }
}

// L_b, the loss, the means and shares of the heads and the number of samples whose loss is not finite, in a fixed
// order.
template <class T>
void reduce(Description& call) {
  Outputs& outputs = call.outputs;
  const size_t heads = call.heads.size();
  std::vector<double> samples(call.batch, 0.0);     // L_b
  std::vector<double> weighted(heads * call.batch); // by head, with the factors of the reduction
  std::vector<double> shares(heads, 0.0);
  T* means = outputs.head_means.mutable_data_ptr<T>();
  for (size_t h = 0; h < heads; ++h) {
    const double sum = add_head<T>(call, h, samples.data(), weighted.data() + h * call.batch);
    means[h] = static_cast<T>(sum / std::max<double>(1.0, static_cast<double>(call.num_unmasked[h])));
  }
  T* per_sample = outputs.per_sample.mutable_data_ptr<T>();
  T* loss = outputs.loss.mutable_data_ptr<T>();
  const bool each_sample = call.arguments.reduction == Reduction::none;
  const StepWeight& importance_weights = call.coefficients[0].importance_weights;
  int64_t num_nonfinite = 0;
  double total = 0;
  for (int64_t b = 0; b < call.batch; ++b) {
    per_sample[b] = static_cast<T>(samples[b]);
    const bool finite = std::isfinite(per_sample[b]); // as the user sees it, in float
    num_nonfinite += finite ? 0 : 1;
    const bool skipped = !finite && call.arguments.nonfinite == Nonfinite::skip;
    const double weight = importance_weights.at(b, 0);
    double contribution = 0;
    for (size_t h = 0; h < heads && !skipped; ++h) {
      // A weight that is not finite adds nothing to a sample without entries.
      const double share =
          std::isfinite(weight) || has_entries(call, h, b) ? weight * weighted[h * call.batch + b] : 0.0;
      shares[h] += share;
      contribution += share;
    }
    if (skipped) {
      clear_gradients(call, b);
    }
    total += contribution;
    if (each_sample) {
      loss[b] = static_cast<T>(contribution);
    }
  }
  if (!each_sample) {
    *loss = static_cast<T>(total);
  }
  std::copy(shares.begin(), shares.end(), outputs.head_losses.mutable_data_ptr<T>());
  *outputs.num_nonfinite.mutable_data_ptr<int64_t>() = num_nonfinite;
}

} // namespace

void run_on_cpu(Description& call) {
  run_rows(call);
  return call.is_double ? reduce<double>(call) : reduce<float>(call);
}

} // namespace gradscale
