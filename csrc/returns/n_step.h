// n-step returns of one row, and their adjoint, for the CPU and for GPUs. O(T) for any n, and no division by powers of
// the discount (van Herk 1992): a row is cut into blocks of n steps, so that a window is the end of one block and the
// begin of the next. The maps x -> r + discount x of each part are composed once, from where the blocks meet.
//
// `steps[t]` is a StepOfRow. The CPU's kernels include this once for each instruction set, after formulas.h.

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

template <class A>
struct StepOfRow {
  A reward; // of the adjoint: the gradient of the result
  A discount;
  A bootstrap; // B
  bool live;
  bool cut;
  bool terminated;

  // The return of a window that ends here, from here.
  GRADSCALE_HOST_DEVICE A last_return() const {
    return reward + OneLane<A>::times(discount, bootstrap);
  }
};

// A product of discounts; nothing passes once one of them is 0, or at a cut.
template <class A>
struct Weight {
  A value = A(1);
  bool open = true;

  GRADSCALE_HOST_DEVICE void multiply(A discount) {
    value = OneLane<A>::product(value, discount);
    open = open && discount != 0;
  }
  GRADSCALE_HOST_DEVICE A times(A x) const {
    return open ? value * x : A(0);
  }
};

// `scratch` has the block's size.
template <class A, class Steps>
GRADSCALE_HOST_DEVICE void n_step_row(
    const Steps& steps, int64_t count, int64_t n, A* scratch, const Result<A>& result) {
  for (int64_t begin = (count - 1) / n * n; begin >= 0; begin -= n) {
    const int64_t end = begin + n < count ? begin + n : count;
    // Backwards: the sum up to the block's end, or to a cut, and the weight of what follows. `scratch[i]` has what
    // follows where a window ends at step i of the next block.
    A sum = A(0);
    Weight<A> weight;
    for (int64_t t = end - 1; t >= begin; --t) {
      const StepOfRow<A> s = steps[t];
      if (!s.live || s.cut) {
        sum = s.live ? s.last_return() : A(0);
        weight = {A(0), false};
      } else {
        sum = s.reward + OneLane<A>::times(s.discount, sum);
        weight.multiply(s.discount);
      }
      A following = A(0);
      if (weight.open) {
        const int64_t last = t + n - 1 < count ? t + n - 1 : count - 1;
        following = weight.value * (last < end ? steps[last].bootstrap : scratch[last - end]);
      }
      result.put(t, sum + following);
    }
    // Walk forwards: add the terms of this block to windows that begin in the block before.
    sum = A(0);
    weight = {};
    A whole = A(0);
    for (int64_t t = begin; t < end; ++t) {
      const StepOfRow<A> s = steps[t];
      if (weight.open) {
        whole = sum + weight.value * s.last_return();
        sum += weight.value * s.reward;
        weight.multiply(s.discount);
        weight.open = weight.open && !s.cut && s.live;
      }
      scratch[t - begin] = whole;
    }
  }
}

// The gradient of reward i is the sum of the gradients of the windows that contain it: the windows of the steps
// i - n + 1 .. i that no cut separates from i. `sums` and `parts` have the block's size: weighted sums from a step of
// the block before to that block's end, and their terms.
template <class A, class Steps>
GRADSCALE_HOST_DEVICE void n_step_adjoint_row(
    const Steps& steps,
    int64_t count,
    int64_t n,
    A* sums,
    A* parts,
    const Result<A>& to_reward,
    const Result<A>& to_next_value) {
  for (int64_t begin = 0; begin < count; begin += n) {
    const int64_t end = begin + n < count ? begin + n : count;
    A sum = A(0);
    Weight<A> weight;
    for (int64_t i = begin; i < end; ++i) {
      const StepOfRow<A> s = steps[i];
      if (!s.live) {
        sum = A(0);
        weight = {A(0), false};
        to_reward.put(i, A(0));
        to_next_value.put(i, A(0));
        continue;
      }
      const int64_t first = i - n + 1;
      sum += s.reward;
      A whole = sum;
      A one = A(0); // of the window that ends here because it has n steps
      if (weight.open && first >= 0) {
        one = weight.value * (first >= begin ? steps[first].reward : parts[first - begin + n]);
        whole += first >= begin ? A(0) : weight.value * sums[first - begin + n];
      }
      to_reward.put(i, whole);
      to_next_value.put(i, s.terminated ? A(0) : OneLane<A>::times(s.discount, s.cut ? whole : one));
      sum = s.cut ? A(0) : OneLane<A>::times(s.discount, sum);
      if (s.cut) {
        weight = {A(0), false};
      } else {
        weight.multiply(s.discount);
      }
    }
    sum = A(0);
    weight = {};
    for (int64_t t = end - 1; t >= begin; --t) {
      const StepOfRow<A> s = steps[t];
      weight.multiply(s.discount);
      weight.open = weight.open && s.live && !s.cut;
      parts[t - begin] = weight.times(s.reward);
      sum += parts[t - begin];
      sums[t - begin] = sum;
    }
  }
}

#ifdef GRADSCALE_VARIANT
} // namespace GRADSCALE_VARIANT
#endif
} // namespace gradscale
