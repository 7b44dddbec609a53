// Runs a pass on a CPU.
#include "../cpu/scratch.h"
#include "call.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

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

// Stores the loss L_b of each sample, the loss of the call, the means and shares of the heads, and the number of
// samples whose loss is not finite.
void reduce(const Pass& pass, bool is_double) {
  const int64_t count = std::max<int64_t>(1, (pass.batch + kSamplesOfBlock - 1) / kSamplesOfBlock);
  std::vector<HeadSums> heads(count * pass.num_heads);
  std::vector<BlockSums> blocks(count);
  at::parallel_for(0, count, 4, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> scratch(new double[elements_of_block(pass)]);
    for (int64_t i = begin; i < end; ++i) {
      blocks[i].heads = heads.data() + i * pass.num_heads;
      sum_samples_kernel(pass, is_double, i * kSamplesOfBlock, scratch.get(), blocks[i]);
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
  reduce(pass, is_double);
}

} // namespace gradscale
