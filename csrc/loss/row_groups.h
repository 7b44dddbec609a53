// Rows 16 at a time: what is one number a row (its target, coefficient, logarithm, decoded value) is computed for all
// of them in the lanes of a vector.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Up to 16 rows of a segment.
struct Group {
  int64_t first;
  int64_t count;
  double coefficients[kLanes]; // 0 for masked rows
  bool unmasked[kLanes];
};

inline void clear_row(const Segment& s, int64_t row) {
  s.loss.store(row, 0.0);
  if (s.gradient.data != nullptr) {
    const int64_t size = element_size(s.gradient.element);
    memset(static_cast<char*>(s.gradient.data) + row * s.gradient.stride * size, 0, s.width * size);
  }
}

// The lanes to compute. A vector of divisions takes longer than a few alone.
inline int64_t lanes_of(const Group& group) {
  return group.count < 4 ? group.count : kLanes;
}

// The first rows of first..end.
inline Group group_of(const Segment& s, const Coefficients& coefficients, int64_t first, int64_t end) {
  Group group{first, end - first < kLanes ? end - first : kLanes, {}, {}};
  coefficients.of_rows(first, group.count, s.step, group.coefficients);
  for (int64_t i = 0; i < group.count; ++i) {
    group.unmasked[i] = coefficients.mask.includes(first + i, s.step);
    group.coefficients[i] = group.unmasked[i] ? group.coefficients[i] : 0.0;
  }
  return group;
}

inline void clear_masked(const Segment& s, const Group& group) {
  for (int64_t i = 0; i < group.count; ++i) {
    if (!group.unmasked[i]) {
      clear_row(s, group.first + i);
    }
  }
}

// Calls run(group) for the rows. A masked one adds exactly nothing: it is computed into the outputs that do not depend
// on its target, and its loss and gradient are zero whatever it holds.
template <class Run>
void each_group(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, Run run) {
  for (int64_t first = begin; first < end; first += kLanes) {
    const Group group = group_of(s, coefficients, first, end);
    run(group);
    clear_masked(s, group);
  }
}

// Applies a transform to `count` numbers. The one that sqrt is enough for is computed in lanes.
template <class A>
void transform_many(const Support& support, int64_t count, A* x) {
  const A eps = static_cast<A>(support.eps);
  if (support.transform == Transform::signed_hyperbolic) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      x[i] = signed_hyperbolic(x[i], eps);
    }
  } else if (support.transform != Transform::identity) {
    for (int64_t i = 0; i < count; ++i) {
      x[i] = transform_value(support.transform, x[i], eps);
    }
  }
}

template <class A>
void inverse_transform_many(const Support& support, int64_t count, A* y) {
  const A eps = static_cast<A>(support.eps);
  if (support.transform == Transform::signed_hyperbolic) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      y[i] = signed_parabolic(y[i], eps);
    }
  } else if (support.transform != Transform::identity) {
    for (int64_t i = 0; i < count; ++i) {
      y[i] = inverse_transform_value(support.transform, y[i], eps);
    }
  }
}

inline void encode_many(const Head& head, const Group& group, const double* scalars, HLGaussTarget* targets) {
  for (int64_t i = 0; i < group.count; ++i) {
    targets[i] = hl_gauss(scalars[i], head.support, head.sigma_ratio);
  }
}

inline void encode_many(const Head& head, const Group& group, const double* scalars, TwoHotTarget* targets) {
  const int64_t lanes = lanes_of(group);
  double positions[kLanes];
  int32_t bins[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < lanes; ++i) {
    positions[i] = clamp_finite(scalars[i]);
  }
  transform_many(head.support, lanes, positions);
#pragma omp simd
  for (int64_t i = 0; i < lanes; ++i) {
    positions[i] = position_among_bins(positions[i], head.support);
    bins[i] = bin_below(positions[i], head.support);
  }
  for (int64_t i = 0; i < group.count; ++i) {
    targets[i] = two_hot_from(scalars[i], positions[i], bins[i], head.support);
  }
}

// Widens the first element of each of `count` rows of T.
template <class T, class A>
void widen_column(const Rows& rows, int64_t first, int64_t count, A* to) {
  const T* from = row_of<T>(rows, first);
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<A>(to_accumulate(from[i * rows.stride]));
  }
}

// The targets over the bins, or the classes, of a group's rows.
template <class Target>
void read_targets(const Segment& s, const Group& group, Target (&targets)[kLanes]) {
  double scalars[kLanes] = {};
  dispatch_element(
      s.target.element, [&](auto type) { widen_column<decltype(type)>(s.target, group.first, group.count, scalars); });
  encode_many(*s.head, group, scalars, targets);
}

inline void read_targets(const Segment& s, const Group& group, ClassTarget (&targets)[kLanes]) {
  for (int64_t i = 0; i < group.count; ++i) {
    targets[i] = ClassTarget(*row_of<int64_t>(s.target, group.first + i), s.width);
  }
}

// Stores log(sum of exponentials) sum_j t_j - sum_j t_j (x_j - maximum).
template <class A>
void store_losses(const Segment& s, const Group& group, const SumsOfRows<A>& sums) {
  const int64_t lanes = lanes_of(group);
  A loss[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < lanes; ++i) {
    loss[i] = sums.target[i] * log_normal(sums.exponentials[i]) - sums.correct[i];
  }
  s.loss.store(group.first, group.count, loss);
}

// Stores the entropy log(sum) - moment / sum of policies, and adds it to their losses with its weight.
template <class A>
void store_entropies(const Segment& s, const Group& group, SumsOfRows<A>& sums) {
  const A weight = static_cast<A>(s.head->entropy_weight);
  const int64_t lanes = lanes_of(group);
  A entropy[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < lanes; ++i) {
    entropy[i] = log_normal(sums.exponentials[i]) - sums.weighted[i] / sums.exponentials[i];
    sums.correct[i] += weight == 0 ? A(0) : weight * entropy[i];
  }
  if (s.detail.data != nullptr) {
    s.detail.store(group.first, group.count, entropy);
  }
}

// Stores what rows of bins decode to.
template <class A>
void store_decoded(const Slab& out, const Support& support, const Group& group, const SumsOfRows<A>& sums) {
  if (out.data == nullptr) {
    return;
  }
  const int64_t lanes = lanes_of(group);
  A decoded[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < lanes; ++i) {
    decoded[i] = sums.weighted[i] / sums.exponentials[i];
  }
  if (!support.raw) {
#pragma omp simd
    for (int64_t i = 0; i < lanes; ++i) {
      decoded[i] = expectation_from_moment(decoded[i], support);
    }
    inverse_transform_many(support, lanes, decoded);
  }
  out.store(group.first, group.count, decoded);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
