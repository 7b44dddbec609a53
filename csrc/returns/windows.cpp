// The CPU kernels of n-step returns and of MuZero's targets. This file includes itself once for each instruction set.
#ifndef GRADSCALE_VARIANT
#include "call.h"
#include "sources.h"

#include <algorithm>
#include <vector>

#define GRADSCALE_KERNELS "../returns/windows.cpp"
#include "../cpu/each_instruction_set.h"

namespace gradscale {

const ReturnsRows n_step_kernel = GRADSCALE_CPU_KERNEL(n_step_rows);
const MuZeroRows muzero_kernel = GRADSCALE_CPU_KERNEL(muzero_rows);

} // namespace gradscale

#else
#include "formulas.h"
#include "window_rows.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Reads the rows of a call as steps.
template <class A>
class RowSources {
 public:
  explicit RowSources(const ReturnsCall& call)
      : rewards_(call.operands[kRewards], kStep),
        next_values_(call.operands[kNextValues], kStep),
        discount_(call.operands[kDiscount], kStep),
        terminated_(call.operands[kTerminated], kStep),
        truncated_(call.operands[kTruncated], kStep),
        mask_(call.operands[kMask], kStep),
        steps_(call.steps),
        numbers_(3 * call.steps),
        flags_(3 * call.steps) {
  }

  void read(int64_t row, StepOfRow<A>* out) {
    const auto numbers = [&](Source<A>& source, int k) {
      return source.piece(row, 0, steps_, steps_, numbers_.data() + k * steps_);
    };
    const auto flags = [&](Source<uint8_t>& source, int k) {
      return source.piece(row, 0, steps_, steps_, flags_.data() + k * steps_);
    };
    const Piece<A> rewards = numbers(rewards_, 0), next_values = numbers(next_values_, 1),
                   discount = numbers(discount_, 2);
    const Piece<uint8_t> terminated = flags(terminated_, 0), truncated = flags(truncated_, 1), mask = flags(mask_, 2);
    bool later_live = false;
    for (int64_t t = steps_ - 1; t >= 0; --t) {
      StepOfRow<A>& s = out[t];
      s.live = mask[t] != 0;
      s.terminated = terminated[t] != 0;
      s.cut = s.terminated || truncated[t] != 0 || !later_live;
      s.reward = s.live ? rewards[t] : A(0);
      s.discount = discount[t];
      s.bootstrap = s.terminated ? A(0) : next_values[t];
      later_live = s.live;
    }
  }

 private:
  Source<A> rewards_, next_values_, discount_;
  Source<uint8_t> terminated_, truncated_, mask_;
  int64_t steps_;
  std::vector<A> numbers_;
  std::vector<uint8_t> flags_;
};

template <class A>
void n_step_rows_of(const ReturnsCall& call, int64_t begin, int64_t end) {
  RowSources<A> sources(call);
  std::vector<StepOfRow<A> > steps(call.steps);
  std::vector<A> scratch(2 * n_step_block_size(call));
  for (int64_t row = begin; row < end; ++row) {
    sources.read(row, steps.data());
    for (int64_t block = 0; block < n_step_blocks_of_row(call); ++block) {
      if (call.is_adjoint) {
        n_step_results<true, A>(call, steps.data(), row, block, scratch.data());
      } else {
        n_step_results<false, A>(call, steps.data(), row, block, scratch.data());
      }
    }
  }
}

void n_step_rows(const ReturnsCall& call, int64_t begin, int64_t end) {
  if (call.element == Element::float64) {
    n_step_rows_of<double>(call, begin, end);
  } else {
    n_step_rows_of<float>(call, begin, end);
  }
}

// ---- MuZero --------------------------------------------------------------------------------------------------------

template <class A>
void muzero_rows_of(const MuZeroCall& call, int64_t begin, int64_t end) {
  Source<A> rewards(call.rewards, kStep), root_values(call.root_values, kStep);
  std::vector<A> reward_row(call.moves + 1), value_row(call.moves + 1);
  for (int64_t k = begin; k < end; ++k) {
    const MuZeroRow<A> row(call, k);
    // The number of rewards that the targets use. The sum cannot overflow, because td_steps <= moves.
    const int64_t used = std::min(row.length, call.unroll_steps + call.td_steps);
    const Piece<A> r = rewards.piece(k, 0, used, used, reward_row.data());
    const Piece<A> nu = root_values.piece(k, 0, used + 1, used + 1, value_row.data());
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
