// The CPU kernels of n-step returns, of n-step transitions and of MuZero's targets. This file includes itself once for
// each instruction set.
#ifndef GRADSCALE_VARIANT
#include "../kernels.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <vector>

#define GRADSCALE_KERNELS "../returns/cpu/windows.cpp"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

const ReturnsRows n_step_kernel = GRADSCALE_CPU_KERNEL(n_step_rows);
const MuZeroRows muzero_kernel = GRADSCALE_CPU_KERNEL(muzero_rows);

} // namespace gradscale

#else
#include "../formulas.h"
#include "../window_rows.h"
#include "sources.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Reads a row, of any length, as one tile.
template <class A>
GRADSCALE_HOST_DEVICE void read_steps(Sources<A>& sources, int64_t row, StepOfRow<A>* out) {
  const int64_t steps = sources.call.steps;
  sources.read(row, 1, 0, steps);
  const Tile<A> tile = sources.tile;
  bool later_live = false;
  for (int64_t t = steps - 1; t >= 0; --t) {
    StepOfRow<A>& s = out[t];
    s.live = tile.live[t] != 0;
    s.terminated = tile.terminated[t] != 0;
    s.cut = s.terminated || tile.truncated[t] != 0 || !later_live;
    s.reward = s.live ? tile.numbers[kRewards][t] : A(0);
    s.discount = tile.numbers[kDiscount][t];
    s.bootstrap = s.terminated ? A(0) : tile.numbers[kNextValues][t];
    later_live = s.live;
  }
}

template <NStep kind, class A>
void n_step_rows_of(const ReturnsCall& call, int64_t begin, int64_t end) {
  Sources<A> sources(call, kStep);
  std::vector<StepOfRow<A> > steps(call.steps);
  std::vector<A> scratch(2 * n_step_block_size(call));
  const int64_t blocks = n_step_blocks_of_row(call);
  for (int64_t row = begin; row < end; ++row) {
    read_steps(sources, row, steps.data());
    for (int64_t block = 0; block < blocks; ++block) {
      n_step_results<kind, A>(call, steps.data(), row, block, scratch.data());
    }
  }
}

template <NStep kind>
void n_step_rows_of(const ReturnsCall& call, int64_t begin, int64_t end) {
  if (call.element == Element::float64) {
    n_step_rows_of<kind, double>(call, begin, end);
  } else {
    n_step_rows_of<kind, float>(call, begin, end);
  }
}

void n_step_rows(const ReturnsCall& call, int64_t begin, int64_t end) {
  if (call.is_adjoint) {
    n_step_rows_of<NStep::adjoint>(call, begin, end);
  } else if (call.formula == Formula::n_step_returns) {
    n_step_rows_of<NStep::returns>(call, begin, end);
  } else {
    n_step_rows_of<NStep::transitions>(call, begin, end);
  }
}

// ---- MuZero --------------------------------------------------------------------------------------------------------

template <class A>
void muzero_rows_of(const MuZeroCall& call, int64_t begin, int64_t end) {
  Source<A> rewards(call.rewards, kStep), root_values(call.root_values, kStep);
  for (int64_t k = begin; k < end; ++k) {
    const MuZeroRow<A> row(call, k);
    // The number of rewards that the targets use, at most. The sum cannot overflow, because td_steps <= moves.
    const int64_t used = std::min(row.length, call.unroll_steps + call.td_steps);
    const Piece<A> r = rewards.piece(k, 1, 0, used);
    const Piece<A> nu = root_values.piece(k, 1, 0, used + 1);
    for (int64_t j = 0; j <= call.unroll_steps; ++j) {
      row.write(j, r, nu);
    }
  }
}

void muzero_rows(const MuZeroCall& call, int64_t begin, int64_t end) {
  if (call.element == Element::float64) {
    muzero_rows_of<double>(call, begin, end);
  } else {
    muzero_rows_of<float>(call, begin, end);
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
