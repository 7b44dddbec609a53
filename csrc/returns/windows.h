// Targets that are sums over windows of steps, for the CPU and for GPUs: MuZero's.
//
// The CPU's kernels include this once for each instruction set, after formulas.h.

namespace gradscale {
#ifdef GRADSCALE_VARIANT
namespace GRADSCALE_VARIANT {
#endif

// ---- MuZero ---------------------------------------------------------------------------------------------------------

// A row of a call: a window of one game.
template <class A>
struct MuZeroRow {
  const MuZeroCall& call;
  int64_t row;
  int64_t length;
  bool is_over;
  A discount;

  GRADSCALE_HOST_DEVICE MuZeroRow(const MuZeroCall& call, int64_t row)
      : call(call),
        row(row),
        is_over(element_at<uint8_t>(call.terminated, row, 0) != 0),
        discount(element_at<A>(call.discount, row, 0)) {
    const int64_t recorded = call.lengths == nullptr ? call.moves : call.lengths[row * call.lengths_stride];
    length = recorded < 0 ? 0 : recorded < call.moves ? recorded : call.moves;
  }

  // Writes the targets of unroll step j. `rewards[i]` and `root_values[i]` are the numbers of move i of the row.
  template <class Rewards, class Values>
  GRADSCALE_HOST_DEVICE void write(int64_t j, const Rewards& rewards, const Values& root_values) const {
    const int64_t* players = call.to_play == nullptr ? nullptr : call.to_play + row * call.to_play_strides[kRow];
    const int64_t stride = call.to_play_strides[kStep];
    // x of move i, from the perspective of the player to move at step j.
    const auto in_perspective = [&](A x, int64_t i) {
      return players == nullptr || players[i * stride] == players[j * stride] ? x : -x;
    };
    A z = A(0);
    if (j <= length) {
      // The sum cannot overflow, because td_steps <= moves.
      const int64_t last = j + call.td_steps < length ? j + call.td_steps : length;
      z = is_over && last == length ? A(0) : in_perspective(root_values[last], last);
      if (discount == 0 && last > j) {
        z = in_perspective(rewards[j], j);
      } else {
        for (int64_t i = last - 1; i >= j; --i) {
          z = in_perspective(rewards[i], i) + discount * z;
        }
      }
    }
    const int64_t at = row * call.values.strides[kRow] + j * call.values.strides[kStep];
    static_cast<A*>(call.values.data)[at] = z;
    call.mask[at] = j <= length || is_over;
    call.policy_mask[at] = j < length;
    // The reward target of step j is the reward of move j - 1. The root has a target only if its reward is given.
    const bool has_root = call.root_reward.data != nullptr;
    A target = A(0);
    if (j == 0) {
      if (!has_root) {
        return;
      }
      target = element_at<A>(call.root_reward, row, 0);
    } else {
      const int64_t first = call.prefix_horizon == 0 ? j - 1 : (j - 1) / call.prefix_horizon * call.prefix_horizon;
      for (int64_t i = first; i < j && i < length; ++i) {
        target += rewards[i];
      }
    }
    Result<A>(call.targets, row).put(has_root ? j : j - 1, target);
  }
};

#ifdef GRADSCALE_VARIANT
} // namespace GRADSCALE_VARIANT
#endif
} // namespace gradscale
