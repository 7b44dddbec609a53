// Short rows, 16 at a time: the lanes of a vector hold the same element of 16 rows, so that no lane idles and no sum
// crosses lanes. A target has a number for each element, also if it encodes a scalar and few bins have mass.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Transposes a square of vectors in shuffles that are one instruction each. Vectors consist of slots of 16 bytes:
// first, numbers are zipped within slots until each slot holds numbers of one column, and then slots are dealt out to
// vectors.
template <class A, size_t... i>
GRADSCALE_HOST_DEVICE void transpose(typename Vectors<A>::V* square, std::index_sequence<i...> /*lanes*/) {
  constexpr size_t count = sizeof...(i), slot = 16 / sizeof(A) < count ? 16 / sizeof(A) : count, slots = count / slot;
  const auto zip = [](auto x, auto y, auto upper) {
    return shuffled(
        x, y, std::index_sequence<(i / slot * slot + i % slot / 2 + i % 2 * count + upper * slot / 2)...>());
  };
  const auto deal = [](auto x, auto y, auto odd) {
    return shuffled(x, y, std::index_sequence<((2 * (i / slot) + odd) * slot + i % slot)...>());
  };
  constexpr std::integral_constant<size_t, 0> first;
  constexpr std::integral_constant<size_t, 1> second;
  typename Vectors<A>::V next[count];
  for (size_t round = 1; round < slot; round *= 2) {
    for (size_t k = 0; k < count; k += 2) {
      const size_t row = k / slot * slot + k % slot / 2;
      next[k] = zip(square[row], square[row + slot / 2], first);
      next[k + 1] = zip(square[row], square[row + slot / 2], second);
    }
    std::copy(next, next + count, square);
  }
  for (size_t round = 1; round < slots; round *= 2) {
    for (size_t k = 0; k < count / 2; ++k) {
      const size_t row = k / slot * 2 * slot + k % slot;
      next[k] = deal(square[row], square[row + slot], first);
      next[k + count / 2] = deal(square[row], square[row + slot], second);
    }
    std::copy(next, next + count, square);
  }
}

// Transposes 16 rows of 16: calls load(i) for each row, and then store(j, column) for each column. Not with loops,
// which compilers turn into copies of the whole square in memory.
template <class A, class Load, class Store, size_t... i>
GRADSCALE_HOST_DEVICE void transpose(Load load, Store store, std::index_sequence<i...> /*lanes*/) {
  constexpr int count = Vectors<A>::kCount, parts = Lanes<A>::kParts;
  typename Vectors<A>::V squares[parts][parts][count];
  const auto load_row = [&](size_t row, Lanes<A> lanes) {
    for (int p = 0; p < parts; ++p) {
      squares[row / count][p][row % count] = lanes.parts[p];
    }
  };
  (load_row(i, load(i)), ...);
  for (auto& squares_of_rows : squares) {
    for (auto& square : squares_of_rows) {
      transpose<A>(square, std::make_index_sequence<count>());
    }
  }
  (store(i, Lanes<A>::each([&](size_t p) { return squares[p][i / count][i % count]; })), ...);
}

// Calls body(first, lanes) for vectors of 16 elements. Without masks, the last vector overlaps the one before it.
template <class Body>
GRADSCALE_HOST_DEVICE void each_square(int64_t width, Body body) {
  if (width < kLanes) {
    return body(int64_t(0), FirstLanes{static_cast<int>(width)});
  }
  body(int64_t(0), AllLanes());
  if (width == kLanes) {
    return;
  }
  if constexpr (kHasMasks) {
    body(kLanes, FirstLanes{static_cast<int>(width - kLanes)});
  } else {
    body(width - kLanes, AllLanes());
  }
}

template <class A>
void read_columns(const Rows& rows, const RowBatch& row_batch, int64_t width, Columns<A>& columns) {
  dispatch_element(rows.element, [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<A, Accumulate<T>>) {
      const T* begin = row_of<T>(rows, row_batch.first);
      if (rows.stride == 0) { // the same row for all lanes
        for (int64_t j = 0; j < width; ++j) {
          columns.store_column(j, Lanes<A>(to_accumulate(begin[j])));
        }
        return;
      }
      const int64_t stride = rows.stride, last = row_batch.count - 1;
      each_square(width, [=, &columns](int64_t first, auto lanes) {
        const T* row = begin + first;
        transpose<A>(
            [&](int64_t i) { // lanes without a row repeat the last one
              const T* own = row;
              row += i < last ? stride : 0;
              return load_lanes(own, lanes);
            },
            [&](int64_t j, Lanes<A> column) { columns.store_column(first + j, column); },
            std::make_index_sequence<kLanes>());
      });
    } else { // targets of another type than the predictions
      for (int64_t i = 0; i < kLanes; ++i) {
        const T* row = lane_row<T>(rows, row_batch, i);
        for (int64_t j = 0; j < width; ++j) {
          columns.at[j][i] = static_cast<A>(to_accumulate(row[j]));
        }
      }
    }
  });
}

template <class A>
void write_columns(const Rows& rows, const RowBatch& row_batch, int64_t width, const Columns<A>& columns) {
  dispatch_element(rows.element, [&](auto type) {
    using G = decltype(type);
    if constexpr (std::is_same_v<A, Accumulate<G>>) {
      G* const begin = static_cast<G*>(rows.data) + row_batch.first * rows.stride;
      const int64_t stride = rows.stride, count = row_batch.count;
      each_square(width, [=, &columns](int64_t first, auto lanes) {
        G* row = begin + first;
        transpose<A>(
            [&](int64_t j) { return columns.column(first + j); },
            [&](int64_t i, Lanes<A> elements) {
              if (i < count) {
                store_lanes(row, elements, lanes);
                row += stride;
              }
            },
            std::make_index_sequence<kLanes>());
      });
    }
  });
}

// The logits of a row batch, and the numbers computed from them.
template <class A>
struct ShortRows {
  Columns<A> x;           // logits, then their exponentials, then the gradient
  Columns<A> differences; // x_j - maximum
  Columns<A> target;
  A largest_logits[kLanes];

  // Replaces logits by exponentials, and stores the differences. The moment weights exponentials by positions, or by
  // differences for a policy.
  template <bool is_policy>
  RowBatchSums<A> sums(int64_t width) {
    using Formula = CrossEntropy<Lanes<A>, 0>;
    Lanes<A> maximum = -static_cast<A>(INFINITY), smallest = A(0);
    for (int64_t j = 0; j < width; ++j) {
      maximum = larger(x.column(j), maximum); // ignores NaN
      smallest = larger_bits(x.column(j), smallest);
    }
    Lanes<A> magnitude = larger(Lanes<A>(A(0)) - smallest, maximum);
    if (total((maximum - smallest) * Lanes<A>(A(0))) != 0) { // NaN: a logit is NaN or infinite
      magnitude = A(0);
      for (int64_t j = 0; j < width; ++j) {
        magnitude = larger(finite_magnitude(x.column(j)), magnitude);
      }
    }
    store_lanes(largest_logits, magnitude);
    Lanes<A> row_sums[Formula::kSums];
    std::fill(row_sums, row_sums + Formula::kSums, Lanes<A>(A(0)));
    for (int64_t j = 0; j < width; ++j) {
      const Lanes<A> d = x.column(j) - maximum, e = exp_nonpositive(d);
      const Lanes<A> weighted = is_policy ? Formula::weighted(e, d) : e * Lanes<A>(static_cast<A>(2 * j + 1 - width));
      const Lanes<A> t = target.column(j);
      Formula::add(row_sums, e, t, Formula::correct(t, d), weighted);
      differences.store_column(j, d);
      x.store_column(j, e);
    }
    RowBatchSums<A> sums;
    for (int k = 0; k < Formula::kSums; ++k) {
      store_lanes(sums.at[k], row_sums[k]);
    }
    store_lanes(sums.at[Formula::kNegativeEntropy], Lanes<A>(A(0)));
    return sums;
  }

  // The sum of the squares of the gradient of one row, in double.
  [[gnu::noinline]] double row_squares(int64_t width, int64_t lane) const {
    double sum = 0;
    for (int64_t j = 0; j < width; ++j) {
      sum += squared(x.at[j][lane]);
    }
    return sum;
  }

  // Writes the gradient.
  template <class Formula>
  void write_gradient(const Segment& s, const RowBatch& row_batch, const RowBatchSums<A>& sums, Formula formula) {
    for (int64_t i = 0; i < row_batch.count; ++i) {
      s.metrics[row_batch.first + i] = {0, largest_logits[i]};
    }
    if (s.gradient.data == nullptr) {
      return;
    }
    A coefficients[kLanes];
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      coefficients[i] = static_cast<A>(row_batch.coefficients[i]);
    }
    const Lanes<A> c = load_lanes(coefficients);
    Lanes<A> row_sums[Formula::kSums];
    for (int k = 0; k < Formula::kSums; ++k) {
      row_sums[k] = load_lanes(sums.at[k]);
    }
    const auto factors = Formula::factors(row_sums, A(1) / row_sums[Formula::kSum], A(1));
    Lanes<A> squares = A(0);
    for (int64_t j = 0; j < s.width; ++j) {
      const Lanes<A> value = formula.gradient(factors, x.column(j), differences.column(j), target.column(j));
      squares += value * value;
      x.store_column(j, value * c);
    }
    A stored[kLanes];
    store_lanes(stored, squares);
    for (int64_t i = 0; i < row_batch.count; ++i) {
      s.metrics[row_batch.first + i].gradient_square =
          factor_can_wait(stored[i], coefficients[i]) ? squared(coefficients[i]) * stored[i] : row_squares(s.width, i);
    }
    write_columns(s.gradient, row_batch, s.width, x);
  }
};

// Short rows of the heads with a support: see categorical_row().
template <class A, class Target>
[[gnu::noinline]] void short_categorical_rows(const Segment& s, const RowBatch& row_batch, const Target* targets) {
  using Formula = CrossEntropy<A, 0>;
  const Smoothing<A> smoothing(s.head->label_smoothing, s.width);
  ShortRows<A> rows;
  std::fill(rows.target.at[0], rows.target.at[s.width], smoothing.everywhere);
  for (int64_t i = 0; i < row_batch.count; ++i) {
    targets[i].for_each(
        [&](int32_t j, double mass) { rows.target.at[j][i] = smoothing.smoothed(static_cast<A>(mass)); });
  }
  read_columns(s.prediction, row_batch, s.width, rows.x);
  RowBatchSums<A> sums = rows.template sums<false>(s.width);
  for (A& mass : sums.at[Formula::kMass]) {
    mass = one_or_nan(mass);
  }
  if (s.head->support.raw) {
    for (int64_t i = 0; i < row_batch.count; ++i) {
      A values[kShortRow];
      for (int64_t j = 0; j < s.width; ++j) {
        values[j] = rows.x.at[j][i];
      }
      sums.at[Formula::kWeighted][i] = raw_moment(values, s.head->support);
    }
  }
  store_losses<false>(s, row_batch, sums, Formula{});
  store_decoded(s, row_batch, sums);
  rows.write_gradient(s, row_batch, sums, CrossEntropy<Lanes<A>, 0>{});
}

// Reads the smoothed targets of short_policy_rows(). A class index out of range gives a row of NaN.
template <class A>
void read_target_columns(const Pass& pass, const Segment& s, const RowBatch& row_batch, Columns<A>& target) {
  const int64_t width = s.width;
  if (s.target.element == Element::int64 && !is_class(pass, s)) {
    std::fill(target.at[0], target.at[width], A(0));
    for (int64_t i = 0; i < row_batch.count; ++i) {
      each_class<A>(pass, s, row_batch.first + i, [&](int32_t chosen, A probability) {
        target.at[std::max(chosen, 0)][i] += chosen < 0 ? static_cast<A>(NAN) : probability;
      });
    }
    return;
  }
  if (s.target.element == Element::int64) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int32_t chosen = class_of(*lane_row<int64_t>(s.target, row_batch, i), width);
      for (int64_t j = 0; j < width; ++j) {
        target.at[j][i] = class_mass(chosen, j);
      }
    }
  } else {
    read_columns(s.target, row_batch, width, target);
  }
  if (s.head->label_smoothing != 0) {
    const Smoothing<A> smoothing(s.head->label_smoothing, width);
    for (A* t = target.at[0]; t != target.at[width]; ++t) {
      *t = smoothing.smoothed(*t);
    }
  }
}

// Short rows of policies: see soft_cross_entropy_row().
template <class A>
[[gnu::noinline]] void short_policy_rows(const Pass& pass, const Segment& s, const RowBatch& row_batch) {
  ShortRows<A> rows;
  read_columns(s.prediction, row_batch, s.width, rows.x);
  read_target_columns(pass, s, row_batch, rows.target);
  RowBatchSums<A> sums = rows.template sums<true>(s.width);
  for (int64_t i = 0; i < row_batch.count && s.head->subtract_target_entropy; ++i) {
    const A* first = &rows.target.at[0][i];
    sums.at[CrossEntropy<A, 0>::kNegativeEntropy][i] =
        negative_entropy<A>(pass, s, row_batch.first + i, [=](int64_t j) { return first[j * kLanes]; });
  }
  store_policy(s, row_batch, sums);
  with_entropy<Lanes<A>>(s, [&](auto formula) { rows.write_gradient(s, row_batch, sums, formula); });
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
