// The rows of QuantileHuber. Each lane holds one quantile and loops over all targets, so that pairs are not stored and
// the order of summation is the same for all instruction sets.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// One quantile per lane, and its sums over the targets.
template <class A>
struct QuantileLanes {
  alignas(64) A x[kLanes];
  alignas(64) A above[kLanes];
  alignas(64) A below[kLanes];
  alignas(64) A loss[kLanes];
  alignas(64) A slope[kLanes]; // the negative derivative
};

template <class A>
[[gnu::noinline]] void add_pairs(
    const QuantileHuber<A>& head, const A* targets, int64_t count, QuantileLanes<A>& lanes) {
  for (int64_t begin = 0; begin < count; begin += head.kPartialSum) {
    const int64_t end = begin + head.kPartialSum < count ? begin + head.kPartialSum : count;
    A loss[kLanes] = {}, slope[kLanes] = {};
    for (int64_t j = begin; j < end; ++j) {
      const A target = targets[j];
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) {
        head.add(target - lanes.x[k], lanes.above[k], lanes.below[k], loss[k], slope[k]);
      }
    }
#pragma omp simd
    for (int k = 0; k < kLanes; ++k) {
      lanes.loss[k] += loss[k];
      lanes.slope[k] += slope[k];
    }
  }
}

template <class T, class G, class A>
void own_row(const QuantileHuber<A>& head, const Segment& s, int64_t row, double coefficient, A* targets) {
  const T* x = row_of<T>(s.prediction, row);
  widen_row(s.target, row, s.target_width, targets);
  const A factor = head.factor(coefficient);
  double loss = 0, squares = 0;
  for (int64_t first = 0; first < s.width; first += kLanes) {
    const int64_t count = s.width - first < kLanes ? s.width - first : kLanes;
    QuantileLanes<A> lanes{};
    for (int64_t k = 0; k < count; ++k) {
      const QuantileWeights<A> weights = head.weights(first + k);
      lanes.x[k] = static_cast<A>(to_accumulate(x[first + k]));
      lanes.above[k] = weights.above;
      lanes.below[k] = weights.below;
    }
    add_pairs(head, targets, s.target_width, lanes);
    G* gradient = static_cast<G*>(s.gradient.data) + row * s.gradient.stride + first;
    for (int64_t k = 0; k < count; ++k) {
      loss += lanes.loss[k];
      if (s.gradient.data != nullptr) {
        gradient[k] = from_accumulate<G, A>(lanes.slope[k] * factor);
        squares += squared(lanes.slope[k]);
      }
    }
  }
  s.loss.store(row, head.finish(loss));
  s.metrics[row] = {squared(factor) * squares, 0};
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
