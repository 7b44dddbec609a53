// n-step returns, n-step transitions and MuZero's targets, which are sums over windows of steps, for the CPU and for
// GPUs.
//
// The CPU's kernels include this once for each instruction set, after formulas.h.

namespace gradscale {
#ifdef GRADSCALE_VARIANT
namespace GRADSCALE_VARIANT {
#endif

template <class A>
struct Result {
  A* data;
  int64_t stride;

  GRADSCALE_HOST_DEVICE Result(const ReturnsOutput& output, int64_t row)
      : data(output.data == nullptr ? nullptr : static_cast<A*>(output.data) + row * output.strides[kRow]),
        stride(output.strides[kStep]) {
  }

  GRADSCALE_HOST_DEVICE void put(int64_t t, A x) const {
    if (data != nullptr) {
      data[t * stride] = x;
    }
  }
};

// ---- n-step returns and n-step transitions --------------------------------------------------------------------------

// n-step returns, their adjoint and n-step transitions take O(T) for any n, without division by powers of the discount
// (van Herk 1992). A row is divided into blocks of n steps, so that a window is the end of one block and the beginning
// of the next. Blocks do not depend on each other.

template <class A>
struct StepOfRow {
  A reward = A(0); // of the adjoint: the gradient of the result
  A discount = A(0);
  A bootstrap = A(0); // B
  bool live = false;
  bool cut = false;
  bool terminated = false;

  // The return from this step on, for a window that ends with this step.
  GRADSCALE_HOST_DEVICE A last_return() const {
    return reward + OneLane<A>::times(discount, bootstrap);
  }
};

// A product of discounts. `open` is false after a discount of 0 or a cut: what follows then counts as 0.
template <class A>
struct Weight {
  A value = A(1);
  bool open = true;

  GRADSCALE_HOST_DEVICE void multiply(A discount) {
#ifdef GRADSCALE_VARIANT
    // A CPU predicts this branch, and would wait for the selections of product().
    if (const A product = value * discount; product != 0 && discount != 0) {
      value = product;
      return;
    }
#endif
    value = OneLane<A>::product(value, discount);
    open = open && discount != 0;
  }
};

// Computes the returns of the block of n steps that begins at `begin`. Calls put(t, sum, last, rest) for each step: the
// return is sum + rest. `sum` is the part in the block, `rest` the part after it, and `last` the bootstrap in `rest`.
// `steps[t]` is a StepOfRow; the last one is cut. `rests` and `lasts` hold n elements each. `lasts` is null if
// `last` is not needed.
template <class A, class Steps, class Put>
GRADSCALE_HOST_DEVICE void n_step_block(
    const Steps& steps, int64_t count, int64_t begin, int64_t n, A* rests, A* lasts, const Put& put) {
  const int64_t end = begin + n < count ? begin + n : count;
  const int64_t next_end = end + n < count ? end + n : count;
  // Walk forwards through the next block: the parts in it of the windows that end at its steps.
  A sum = A(0), rest = A(0);
  Weight<A> weight;
  for (int64_t t = end; t < next_end; ++t) {
    A last = A(0);
    if (weight.open) {
      const StepOfRow<A> s = steps[t];
      last = weight.value * OneLane<A>::times(s.discount, s.bootstrap);
      rest = sum + weight.value * s.last_return();
      sum += weight.value * s.reward;
      weight.multiply(s.discount);
      weight.open = weight.open && !s.cut && s.live;
    }
    rests[t - end] = rest;
    if (lasts != nullptr) {
      lasts[t - end] = last;
    }
  }
  // Walk backwards through this block: the sum up to its end or to a cut, and the weight of what follows.
  sum = A(0);
  weight = {};
  for (int64_t t = end - 1; t >= begin; --t) {
    const StepOfRow<A> s = steps[t];
    if (!s.live || s.cut) {
      sum = s.live ? s.last_return() : A(0);
      weight = {A(0), false};
    } else {
      sum = s.reward + OneLane<A>::times(s.discount, sum);
      weight.multiply(s.discount);
    }
    A last = A(0);
    rest = A(0);
    if (weight.open) {
      const int64_t window_end = t + n - 1 < count ? t + n - 1 : count - 1;
      const bool is_inside = window_end < end;
      rest = weight.value * (is_inside ? steps[window_end].bootstrap : rests[window_end - end]);
      last = is_inside || lasts == nullptr ? rest : weight.value * lasts[window_end - end];
    }
    put(t, sum, last, rest);
  }
}

// Computes the transitions of the block of n steps that begins at `begin`. Calls put(t, rewards, discount, m) for each
// step, whose window has m steps; m is 0 if the step is masked. `rests` and `discounts` hold n elements each.
template <class A, class Steps, class Put>
GRADSCALE_HOST_DEVICE void n_step_transitions_block(
    const Steps& steps, int64_t count, int64_t begin, int64_t n, A* rests, A* discounts, const Put& put) {
  using L = OneLane<A>;
  const int64_t end = begin + n < count ? begin + n : count;
  const int64_t next_end = end + n < count ? end + n : count;
  // Walk forwards through the next block, up to a cut: the parts in it of the windows that end at its steps.
  int64_t cut = next_end;
  A sum = A(0), discount = A(1);
  for (int64_t t = end; t < cut; ++t) {
    const StepOfRow<A> s = steps[t];
    sum += L::times(discount, s.reward);
    discount = s.terminated ? A(0) : L::product(discount, s.discount);
    rests[t - end] = sum;
    discounts[t - end] = discount;
    cut = s.cut ? t : cut;
  }
  // Walk backwards through this block: `sum` and `discount` of the steps up to its end or to a cut.
  for (int64_t t = end - 1; t >= begin; --t) {
    const StepOfRow<A> s = steps[t];
    cut = s.cut ? t : cut;
    const bool is_last = s.cut || t == end - 1;
    sum = is_last ? s.reward : s.reward + L::times(s.discount, sum);
    discount = s.terminated ? A(0) : is_last ? s.discount : L::product(s.discount, discount);
    const int64_t window_end = t + n - 1 < cut ? t + n - 1 : cut;
    if (!s.live) {
      put(t, A(0), A(0), 0);
    } else if (window_end < end) {
      put(t, sum, discount, window_end - t + 1);
    } else {
      const int64_t k = window_end - end;
      put(t, sum + L::times(discount, rests[k]), L::product(discount, discounts[k]), window_end - t + 1);
    }
  }
}

// The steps of a row in reverse. Their (n - 1)-step returns are the gradients of the rewards of n-step returns: the
// gradient of reward t is the sum of the gradients of the windows that begin at t, t - 1, ..., t - n + 1, each weighted
// by the discounts in between. The gradient of the last one, which ends at t, is the bootstrap.
template <class A, class Steps>
struct ReversedSteps {
  const Steps& steps;
  int64_t count;
  bool has_bootstrap; // n > 1

  GRADSCALE_HOST_DEVICE StepOfRow<A> operator[](int64_t k) const {
    const int64_t t = count - 1 - k;
    StepOfRow<A> s = steps[t];
    const StepOfRow<A> before = t > 0 ? steps[t - 1] : StepOfRow<A>();
    s.cut = !has_bootstrap || !before.live || before.cut;
    s.discount = s.cut ? A(0) : before.discount;
    s.bootstrap = s.cut ? A(0) : before.reward;
    return s;
  }
};

enum class NStep { returns, adjoint, transitions };

// Writes the results of a block of n_step_block_size() steps of a row. `scratch` has room for twice as many numbers.
template <NStep kind, class A, class Steps>
GRADSCALE_HOST_DEVICE void n_step_results(
    const ReturnsCall& call, const Steps& steps, int64_t row, int64_t block, A* scratch) {
  const int64_t count = call.steps, n = n_step_block_size(call);
  const Result<A> first(call.outputs[0], row);
  if constexpr (kind == NStep::transitions) {
    const Result<A> discounts(call.outputs[1], row);
    const Result<int64_t> lengths(call.outputs[2], row);
    const auto put = [&](int64_t t, A rewards, A discount, int64_t m) {
      first.put(t, rewards);
      discounts.put(t, discount);
      lengths.put(t, m);
    };
    n_step_transitions_block<A>(steps, count, block * n, n, scratch, scratch + n, put);
  } else if constexpr (kind == NStep::returns) {
    const auto put = [&](int64_t t, A sum, A /*last*/, A rest) { first.put(t, sum + rest); };
    n_step_block<A>(steps, count, block * n, n, scratch, nullptr, put);
  } else {
    const Result<A> to_next_value(call.outputs[2], row);
    const ReversedSteps<A, Steps> reversed{steps, count, call.n > 1};
    const auto put = [&](int64_t k, A sum, A last, A rest) {
      const int64_t t = count - 1 - k;
      const StepOfRow<A> s = steps[t];
      const A all = sum + rest;
      const A ended = !s.live || s.terminated ? A(0) : s.cut || call.n == 1 ? all : last; // of windows that end at t
      first.put(t, all);
      to_next_value.put(t, ended == 0 ? A(0) : OneLane<A>::times(s.discount, ended));
    };
    n_step_block<A>(reversed, count, block * n, n, scratch, scratch + n, put);
  }
}

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
    const int64_t recorded = length_at(call, row);
    length = recorded < 0 ? 0 : recorded < call.moves ? recorded : call.moves;
  }

  // Writes the targets of unroll step j. `rewards[i]` and `root_values[i]` are the numbers of move i of the row.
  template <class Rewards, class Values>
  GRADSCALE_HOST_DEVICE void write(int64_t j, const Rewards& rewards, const Values& root_values) const {
    const auto player = [&](int64_t i) { return integer_at(call.to_play, row, i); };
    // x of move i, from the perspective of the player to move at step j.
    const auto in_perspective = [&](A x, int64_t i) {
      return call.to_play.data == nullptr || player(i) == player(j) ? x : -x;
    };
    A z = A(0);
    if (j <= length) {
      const int64_t n = horizon_at(call, row, j),
                    last = j + n < length ? j + n : length; // n <= L, so the sum cannot overflow
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
