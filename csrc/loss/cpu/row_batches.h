// Batches of 16 rows. The scalars of a row (target, coefficient, logarithm, decoded value) are computed for all 16 rows
// in the lanes of a vector.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Up to 16 rows of a segment.
struct RowBatch {
  int64_t first;
  int64_t count;
  double coefficients[kLanes]; // 0 for masked rows
  bool unmasked[kLanes];
};

// The sums of CrossEntropy for a row batch's rows. kWeighted weights the exponentials by 2j - width + 1 or by raw
// centre j, and by differences of logits for a policy. Unused lanes are undefined.
template <class A>
struct RowBatchSums {
  A at[CrossEntropy<A, 0>::kMostSums][kLanes];
};

// Elements of 16 rows. Column j holds element j of each row.
template <class A>
struct Columns {
  alignas(64) A at[kShortRow][kLanes];

  Lanes<A> column(int64_t j) const {
    return load_lanes(at[j]);
  }
  void store_column(int64_t j, Lanes<A> lanes) {
    store_lanes(at[j], lanes);
  }
};

// The row of a lane, or the first row for a lane without one.
template <class T>
const T* lane_row(const Rows& rows, const RowBatch& row_batch, int64_t lane) {
  return row_of<T>(rows, row_batch.first + (lane < row_batch.count ? lane : 0));
}

// Applies the transform of a support, or its inverse, to `count` numbers. It is vectorised if it needs no library
// function except sqrt. Whole vectors are then computed, for which x must have room: scalar code for the remaining
// numbers may round differently.
template <bool inverse, class A>
void transform_many(const Support& support, int64_t count, A* x) {
  const A eps = static_cast<A>(support.eps);
  if (support.transform == Transform::signed_hyperbolic) {
    const int64_t lanes = padded_width(count);
#pragma omp simd
    for (int64_t i = 0; i < lanes; ++i) {
      x[i] = inverse ? signed_parabolic(x[i], eps) : signed_hyperbolic(x[i], eps);
    }
  } else if (support.transform != Transform::identity) {
    for (int64_t i = 0; i < count; ++i) {
      x[i] = inverse ? inverse_transform_value(support.transform, x[i], eps)
                     : transform_value(support.transform, x[i], eps);
    }
  }
}

inline void encode_many(const Head& head, const RowBatch& row_batch, const double* scalars, HLGaussTarget* targets) {
  for (int64_t i = 0; i < row_batch.count; ++i) {
    targets[i] = hl_gauss(scalars[i], head.support, head.sigma_ratio);
  }
}

inline void encode_many(const Head& head, const RowBatch& row_batch, const double* scalars, TwoHotTarget* targets) {
  double positions[kLanes];
  int32_t bins[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    positions[i] = clamp_finite(scalars[i]);
  }
  transform_many</*inverse=*/false>(head.support, row_batch.count, positions);
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    positions[i] = position_among_bins(positions[i], head.support);
    bins[i] = bin_below(positions[i], head.support);
  }
  for (int64_t i = 0; i < row_batch.count; ++i) {
    targets[i] = two_hot_from(scalars[i], positions[i], bins[i], head.support);
  }
}

// The targets over the bins of a row batch's rows.
template <class Target>
struct Targets {
  Target encoded[kLanes];

  Targets(const Segment& s, const RowBatch& row_batch) {
    double scalars[kLanes] = {};
    widen_column(s.target, row_batch.first, row_batch.count, scalars);
    encode_many(*s.head, row_batch, scalars, encoded);
  }
};

// Stores the losses of a row batch's rows, and the entropies of policies.
template <bool is_policy, class A, int options>
void store_losses(
    const Segment& s, const RowBatch& row_batch, const RowBatchSums<A>& sums, const CrossEntropy<A, options>& formula) {
  using Formula = CrossEntropy<A, options>;
  A loss[kLanes], entropy[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    A row[Formula::kSums];
    for (int k = 0; k < Formula::kSums; ++k) {
      row[k] = sums.at[k][i];
    }
    loss[i] = formula.loss(row);
    entropy[i] = is_policy ? Formula::entropy(row) : A(0);
  }
  s.loss.store(row_batch.first, row_batch.count, loss);
  if (is_policy && s.detail.data != nullptr) {
    s.detail.store(row_batch.first, row_batch.count, entropy);
  }
}

// Stores the decoded values of categorical rows.
template <class A>
void store_decoded(const Segment& s, const RowBatch& row_batch, const RowBatchSums<A>& sums) {
  using Formula = CrossEntropy<A, 0>;
  const Support& support = s.head->support;
  if (s.detail.data == nullptr) {
    return;
  }
  A decoded[kLanes];
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) {
    decoded[i] = sums.at[Formula::kWeighted][i] / sums.at[Formula::kSum][i];
  }
  if (!support.raw) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      decoded[i] = expectation_from_moment(decoded[i], support);
    }
    transform_many</*inverse=*/true>(support, row_batch.count, decoded);
  }
  s.detail.store(row_batch.first, row_batch.count, decoded);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
