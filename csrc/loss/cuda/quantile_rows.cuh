// Rows of quantiles: QuantileHuber. A thread of the row's group has every group.size-th quantile and goes through all
// targets for each, which the threads of a warp read at the same time from the cache. Bytes: predictions and targets
// read once from memory, gradients written once. The order of sums depends on the shape alone.
#pragma once

#include "../quantile_huber.h"
#include "row_tools.cuh"

namespace gradscale {

template <class T, class A>
GRADSCALE_DEVICE void own_row(const QuantileHuber<A>& of, const RowTask& task) {
  const Segment& s = task.segment();
  const T* x = task.template prediction<T>();
  const A factor = of.factor(task.coefficient);
  const auto count = static_cast<int32_t>(s.target_width);
  double sum = 0, square = 0;
  dispatch_element(s.target.element, [&](auto type) {
    using U = decltype(type);
    const U* targets = static_cast<const U*>(s.target.data) + task.row * s.target.stride;
    for (int32_t i = task.group.rank; i < task.width; i += task.group.size) {
      const A quantile = static_cast<A>(to_accumulate(x[i]));
      const QuantileWeights<A> weights = of.weights(i);
      A loss = 0, slope = 0;
      for (int32_t begin = 0; begin < count; begin += of.kPartialSum) {
        const int32_t end = begin + of.kPartialSum < count ? begin + of.kPartialSum : count;
        A part_of_loss = 0, part_of_slope = 0;
        for (int32_t j = begin; j < end; ++j) {
          const A u = static_cast<A>(to_accumulate(targets[j])) - quantile;
          of.add(u, weights.above, weights.below, part_of_loss, part_of_slope);
        }
        loss += part_of_loss;
        slope += part_of_slope;
      }
      sum += loss;
      if (s.gradient.data != nullptr) {
        A gradient = slope * factor;
        square += task.template write_gradient<T, 1>(i, &gradient);
      }
    }
  });
  task.store_loss(of.finish(task.group.sum(sum)));
  task.store_metrics(square, 0);
}

} // namespace gradscale
