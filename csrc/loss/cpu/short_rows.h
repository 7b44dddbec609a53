// Rows of few elements, 16 of them side by side: a vector holds the same element of all, so that none of its lanes
// idles and no sum crosses lanes. Targets are spread over all elements, also those that a scalar becomes over the bins.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class T, class A>
void read_tile_of(const Rows& rows, const Group& group, int64_t width, Tile<A>& tile) {
  if constexpr (in_lanes<A> && !std::is_same_v<T, double>) {
    read_tile_in_lanes<T>(rows, group, width, tile);
  } else {
    for (int64_t i = 0; i < kLanes; ++i) {
      const T* row = row_of_lane<T>(rows, group, i);
      for (int64_t j = 0; j < width; ++j) {
        tile.at[j][i] = static_cast<A>(to_accumulate(row[j]));
      }
    }
  }
}

template <class A>
void read_tile(const Rows& rows, const Group& group, int64_t width, Tile<A>& tile) {
  dispatch_element(rows.element, [&](auto type) { read_tile_of<decltype(type)>(rows, group, width, tile); });
}

template <class G, class A>
void write_tile_of(const Rows& rows, const Group& group, int64_t width, const Tile<A>& tile) {
  if constexpr (in_lanes<A>) {
    write_tile_in_lanes<G>(rows, group, width, tile);
  } else {
    for (int64_t i = 0; i < group.count; ++i) {
      G* row = static_cast<G*>(rows.data) + (group.first + i) * rows.stride;
      for (int64_t j = 0; j < width; ++j) {
        row[j] = from_accumulate<G, A>(tile.at[j][i]);
      }
    }
  }
}

template <class A>
void write_tile(const Rows& rows, const Group& group, int64_t width, const Tile<A>& tile) {
  dispatch_element(rows.element, [&](auto type) {
    using G = decltype(type);
    if constexpr (std::is_same_v<A, typename AccumulateType<G>::type>) {
      write_tile_of<G>(rows, group, width, tile);
    }
  });
}

// Leaves exp(x_j - maximum) in `x`, and x_j - maximum in `shifted`.
template <bool of_policy, class A>
void exponentials_of_tile(int64_t width, Tile<A>& x, Tile<A>& shifted, const Tile<A>& target, GroupSums<A>& sums) {
  A maximum[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    maximum[i] = -static_cast<A>(INFINITY);
    sums.exponentials[i] = sums.moment[i] = sums.target[i] = sums.correct[i] = 0;
  }
  for (int64_t j = 0; j < width; ++j) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      maximum[i] = x.at[j][i] > maximum[i] ? x.at[j][i] : maximum[i]; // passes NaN over
    }
  }
  for (int64_t j = 0; j < width; ++j) {
    const A place = static_cast<A>(2 * j + 1 - width);
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      const A below = x.at[j][i] - maximum[i];
      const A t = target.at[j][i];
      const A e = exp_nonpositive(below);
      shifted.at[j][i] = below;
      x.at[j][i] = e;
      sums.exponentials[i] += e;
      sums.moment[i] += of_policy ? product(e, below) : e * place;
      sums.target[i] += t;
      sums.correct[i] += product(t, below);
    }
  }
}

// Writes the gradient c (p_j sum(t) - t_j), which takes the place of exp(x_j - maximum).
template <class A>
void write_tile_gradient(
    const Segment& s, const Group& group, Tile<A>& x, const Tile<A>& target, const GroupSums<A>& sums) {
  if (s.gradient.data == nullptr) {
    return;
  }
  A factor[kLanes], coefficient[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    factor[i] = sums.target[i] / sums.exponentials[i];
    coefficient[i] = static_cast<A>(group.coefficients[i]);
  }
  for (int64_t j = 0; j < s.width; ++j) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      x.at[j][i] = (x.at[j][i] * factor[i] - target.at[j][i]) * coefficient[i];
    }
  }
  write_tile(s.gradient, group, s.width, x);
}

// The rows of categorical_rows.h.
template <class A, class Target>
void short_categorical_rows(const Segment& s, const Group& group, const Target* targets) {
  const A target_share = static_cast<A>(1 - s.head->label_smoothing);
  const A everywhere = static_cast<A>(s.head->label_smoothing / static_cast<double>(s.width));
  Tile<A> x, shifted, target;
  for (int64_t j = 0; j < s.width; ++j) {
    for (int64_t i = 0; i < kLanes; ++i) {
      target.at[j][i] = everywhere;
    }
  }
  for (int64_t i = 0; i < group.count; ++i) {
    targets[i].for_each([&](int32_t j, double mass) { target.at[j][i] += target_share * static_cast<A>(mass); });
  }
  read_tile(s.prediction, group, s.width, x);
  GroupSums<A> sums;
  exponentials_of_tile<false>(s.width, x, shifted, target, sums);
  for (int64_t i = 0; i < kLanes; ++i) {
    sums.target[i] = A(1) + A(0) * sums.target[i]; // 1 but for rounding; a NaN target makes the whole row NaN
  }
  if (s.head->support.raw) {
    for (int64_t i = 0; i < group.count; ++i) {
      A values[kShortRow];
      for (int64_t j = 0; j < s.width; ++j) {
        values[j] = x.at[j][i];
      }
      sums.moment[i] = raw_moment(values, s.head->support);
    }
  }
  store_losses(s, group, sums);
  store_decoded(s, group, sums);
  write_tile_gradient(s, group, x, target, sums);
}

// The smoothed targets of the rows of policy_rows.h. A class without a logit gives a row of NaN.
template <class A>
void read_target_tile(const Segment& s, const Group& group, Tile<A>& target) {
  const int64_t width = s.width;
  if (s.target.element == Element::int64) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t chosen = *row_of_lane<int64_t>(s.target, group, i);
      const bool valid = chosen >= 0 && chosen < width;
      for (int64_t j = 0; j < width; ++j) {
        target.at[j][i] = valid ? A(j == chosen) : static_cast<A>(NAN);
      }
    }
  } else {
    read_tile(s.target, group, width, target);
  }
  if (s.head->label_smoothing != 0) {
    const A target_share = static_cast<A>(1 - s.head->label_smoothing);
    const A everywhere = static_cast<A>(s.head->label_smoothing / static_cast<double>(width));
    for (int64_t j = 0; j < width; ++j) {
#pragma omp simd
      for (int64_t i = 0; i < kLanes; ++i) {
        target.at[j][i] = target.at[j][i] * target_share + everywhere;
      }
    }
  }
}

// Subtracts the entropy's part of the gradient from the targets.
template <class A>
void subtract_entropy(
    const Segment& s, const Tile<A>& x, const Tile<A>& shifted, const GroupSums<A>& sums, Tile<A>& target) {
  const A weight = static_cast<A>(s.head->entropy_weight);
  for (int64_t i = 0; i < kLanes; ++i) {
    const A inverse_sum = A(1) / sums.exponentials[i];
    const A expected = sums.moment[i] * inverse_sum; // of x_j - maximum
    for (int64_t j = 0; j < s.width; ++j) {
      const A p = x.at[j][i] * inverse_sum;
      target.at[j][i] -= weight * product(p, shifted.at[j][i] - expected);
    }
  }
}

// The rows of policy_rows.h.
template <class A>
void short_policy_rows(const Segment& s, const Group& group) {
  Tile<A> x, shifted, target;
  read_tile(s.prediction, group, s.width, x);
  read_target_tile(s, group, target);
  GroupSums<A> sums;
  exponentials_of_tile<true>(s.width, x, shifted, target, sums);
  for (int64_t i = 0; i < kLanes && s.head->subtract_target_entropy; ++i) {
    const A* first = &target.at[0][i];
    sums.correct[i] -= static_cast<A>(negative_entropy(s.width, [=](int64_t j) { return first[j * kLanes]; }));
  }
  if (s.head->entropy_weight != 0) {
    subtract_entropy(s, x, shifted, sums, target);
  }
  store_entropies(s, group, sums);
  store_losses(s, group, sums);
  write_tile_gradient(s, group, x, target, sums);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
