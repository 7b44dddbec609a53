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
  const int64_t n = std::min(call.n, call.steps);
  std::vector<A> scratch(2 * n);
  for (int64_t row = begin; row < end; ++row) {
    sources.read(row, steps.data());
    if (call.formula == Formula::n_step) {
      n_step_row<A>(steps.data(), call.steps, n, scratch.data(), Result<A>(call.outputs[0], row));
    } else {
      n_step_adjoint_row<A>(
          steps.data(),
          call.steps,
          n,
          scratch.data(),
          scratch.data() + n,
          Result<A>(call.outputs[0], row),
          Result<A>(call.outputs[2], row));
    }
  }
}

void n_step_rows(const ReturnsCall& call, int64_t begin, int64_t end) {
  if (call.steps == 0) {
    return;
  }
  if (call.is_double) {
    n_step_rows_of<double>(call, begin, end);
  } else {
    n_step_rows_of<float>(call, begin, end);
  }
}

// ---- MuZero --------------------------------------------------------------------------------------------------------

// Computes z = r + discount * z, backwards from the bootstrap, for each unroll step.
template <class A>
void muzero_rows_of(const MuZeroCall& call, int64_t begin, int64_t end) {
  Source<A> rewards(call.rewards, kStep), root_values(call.root_values, kStep);
  std::vector<A> reward_row(call.moves + 1), value_row(call.moves + 1);
  const int64_t steps = call.unroll_steps;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t recorded = call.lengths == nullptr ? call.moves : call.lengths[row * call.lengths_stride];
    const int64_t length = std::max<int64_t>(0, std::min(recorded, call.moves));
    const bool is_over = element_at<uint8_t>(call.terminated, row, 0) != 0;
    // The number of rewards that the targets use. Sums with td_steps cannot overflow, because td_steps <= moves here.
    const int64_t used = std::min(length, steps + call.td_steps);
    const Piece<A> r = rewards.piece(row, 0, used, used, reward_row.data());
    const Piece<A> nu = root_values.piece(row, 0, used + 1, used + 1, value_row.data());
    const A discount = element_at<A>(call.discount, row, 0);
    const int64_t* players = call.to_play == nullptr ? nullptr : call.to_play + row * call.to_play_strides[kRow];
    const int64_t stride = call.to_play_strides[kStep];
    A* values = static_cast<A*>(call.values) + row * call.values_strides[kRow];
    for (int64_t j = 0; j <= steps; ++j) {
      A z = A(0);
      if (j <= length) {
        const int64_t last = std::min(j + call.td_steps, length);
        // x of step i, from the perspective of the player to move at step j.
        const auto in_perspective = [&](A x, int64_t i) {
          return players == nullptr || players[i * stride] == players[j * stride] ? x : -x;
        };
        z = is_over && last == length ? A(0) : in_perspective(nu[last], last);
        if (discount == 0 && last > j) {
          z = in_perspective(r[j], j);
        } else if (players == nullptr) {
          for (int64_t i = last - 1; i >= j; --i) {
            z = r[i] + discount * z;
          }
        } else {
          for (int64_t i = last - 1; i >= j; --i) {
            z = in_perspective(r[i], i) + discount * z;
          }
        }
      }
      values[j * call.values_strides[kStep]] = z;
      const int64_t at = row * call.masks_strides[kRow] + j * call.masks_strides[kStep];
      call.mask[at] = j <= length || is_over;
      call.policy_mask[at] = j < length;
    }
    A* targets = static_cast<A*>(call.targets) + row * call.targets_strides[kRow];
    if (call.root_reward.data != nullptr) {
      *targets = element_at<A>(call.root_reward, row, 0);
      targets += call.targets_strides[kStep];
    }
    A sum = A(0);
    int64_t summed = 0;
    for (int64_t k = 0; k < steps; ++k) {
      const A reward = k < length ? r[k] : A(0);
      sum = summed == 0 ? reward : sum + reward;
      summed = summed + 1 < call.prefix_horizon ? summed + 1 : 0;
      targets[k * call.targets_strides[kStep]] = sum;
    }
  }
}

void muzero_rows(const MuZeroCall& call, int64_t begin, int64_t end) {
  if (call.is_double) {
    muzero_rows_of<double>(call, begin, end);
  } else {
    muzero_rows_of<float>(call, begin, end);
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
