// The row of every head of logits, and of decoding. With logits x, d_j = x_j - max x, e_j = exp(d_j), s = sum e,
// p_j = e_j / s and a target t over the logits:
//
//   loss      sum(t) log s - sum_j t_j d_j
//   gradient  c (sum(t) p_j - t_j + w p_j (log p_j + H(p))), with log p_j + H(p) = d_j - sum(e d) / s
//
// A row is read from memory once, widened into scratch memory that stays in the first-level cache, and its gradient is
// written once; between the two there is one exponential per element. Formulas are written for a layout of rows in
// lanes (logit_layouts.h). Included once for each instruction set.
#include "logit_layouts.h"

#include "../formulas/targets.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Numbers of up to 16 rows, of which losses and decoded values are made. Lanes without a row hold harmless ones.
template <class A>
struct SumsOfRows {
  A exponentials[kLanes]; // s
  A weighted[kLanes];     // sum_j e_j (2j - width + 1), or times the raw centres; of a policy sum_j e_j d_j
  A target[kLanes];       // sum_j t_j
  A correct[kLanes];      // sum_j t_j d_j, and what else the loss lacks
};

// The exponentials of a row are weighted with the places of its bins, or with d: for an entropy.
enum class Weight { place, difference };

// Rows of a group that are computed at once: one along the lanes, or several side by side.
struct RowsOfGroup {
  int64_t index; // of the first, in the group
  int64_t first; // the first, of all rows
  int64_t count;
};

// Memory for logits, exponentials and targets of a row, or of rows side by side.
template <class A>
struct RowMemory {
  A* x;
  A* e;
  A* t;
};

// Memory that is needed next. It is fetched while exponentials are computed, which need none. Addresses are numbers:
// rows that do not exist have some too.
struct Ahead {
  uintptr_t read;
  int64_t read_size; // bytes of an element
  uintptr_t write;
  int64_t write_size;

  GRADSCALE_HOST_DEVICE void prefetch(int64_t element) const {
#if defined(__GNUC__)
    __builtin_prefetch(reinterpret_cast<const void*>(read + element * read_size), /*rw=*/0);
    __builtin_prefetch(reinterpret_cast<const void*>(write + element * write_size), /*rw=*/1);
#endif
  }
};

// The next row of logits, and the gradient of this row, or other memory if none is wanted.
inline Ahead ahead_of(const Rows& logits, const Rows& gradient, int64_t row, const void* other) {
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  const int64_t read = element_size(logits.element), write = element_size(gradient.element);
  return {
      address(logits.data) + (row + 1) * logits.stride * read,
      read,
      gradient.data == nullptr ? address(other) : address(gradient.data) + row * gradient.stride * write,
      write};
}

template <class A>
struct Sums {
  Lanes<A> exponentials, weighted, target, correct;
};

// Keeps the numbers of rows.
template <class Layout, class A>
GRADSCALE_HOST_DEVICE void keep(const Sums<A>& sums, const RowsOfGroup& rows, SumsOfRows<A>& all) {
  Layout::keep(sums.exponentials, all.exponentials + rows.index);
  Layout::keep(sums.weighted, all.weighted + rows.index);
  Layout::keep(sums.target, all.target + rows.index);
  Layout::keep(sums.correct, all.correct + rows.index);
}

// Widens logits into memory.x; returns the largest of each row. NaN may be passed over: exponentials keep it.
template <class Layout, class A>
GRADSCALE_HOST_DEVICE Lanes<A> read_logits(
    const Layout& layout, const Rows& logits, const RowsOfGroup& rows, RowMemory<A> memory) {
  const A none = -static_cast<A>(INFINITY);
  Lanes<A> m[4] = {none, none, none, none};
  layout.read(logits, rows.first, rows.count, memory.x, none, [&](int k, Lanes<A> x) GRADSCALE_INLINE_LAMBDA {
    m[k] = larger(x, m[k]);
    return x;
  });
  return layout.maximum(larger(larger(m[0], m[1]), larger(m[2], m[3])));
}

// Leaves exponentials in memory.e. The target is memory.t, if there is one over all logits.
template <Weight weight, bool has_target, class Layout, class A>
GRADSCALE_HOST_DEVICE Sums<A> sums_of(const Layout& layout, Lanes<A> maximum, RowMemory<A> memory, Ahead ahead) {
  constexpr int count = Lanes<A>::kCount;
  Lanes<A> sum(A(0)), weighted(A(0)), target(A(0)), correct(A(0)), place = layout.place();
  const int64_t end = layout.blocks() * count;
  for (int64_t at = 0; at < end; at += count) {
    if constexpr (Layout::kRows == 1) {
      ahead.prefetch(at);
    }
    const Lanes<A> d = load<A>(memory.x + at) - maximum;
    const Lanes<A> e = exp_nonpositive(d);
    store(memory.e + at, e);
    sum += e;
    if constexpr (weight == Weight::place) {
      weighted += e * place;
      place += Lanes<A>(static_cast<A>(Layout::kPlaces));
    } else {
      weighted += product(e, d);
    }
    if constexpr (has_target) {
      const Lanes<A> t = load<A>(memory.t + at);
      target += t;
      correct += product(t, d);
    }
  }
  return {layout.sum(sum), layout.sum(weighted), layout.sum(target), layout.sum(correct)};
}

// Adds a target with mass in few elements. Its mass is subtracted from the exponentials of these elements, in their
// unit, so that the gradient is a product for all elements.
template <class Target, class A>
GRADSCALE_HOST_DEVICE void add_target(
    const Along<A>& layout, const Target& target, Lanes<A> maximum, RowMemory<A> memory, Sums<A>& sums) {
  const A largest = maximum.first(), sum = sums.exponentials.first();
  A mass = 1, correct = 0;
  target.for_each([&](int32_t j, double of_element) {
    const A t = static_cast<A>(of_element);
    mass += A(0) * t;                                           // a NaN target makes the whole row NaN
    correct += product(t, memory.x[layout.at(j, 0)] - largest); // an illegal element (-inf) without mass costs nothing
    memory.e[layout.at(j, 0)] -= t * sum;
  });
  sums.target = mass;
  sums.correct = correct;
}

// Elements of the gradient of a row, or of rows side by side.
template <class A, bool has_entropy>
struct Gradient {
  Lanes<A> coefficient;
  Lanes<A> per_exponential; // sum(t) / s
  Lanes<A> entropy_weight;
  Lanes<A> inverse_sum;
  Lanes<A> expected; // sum(e d) / s

  GRADSCALE_HOST_DEVICE Gradient(const Sums<A>& sums, Lanes<A> c, A weight) : coefficient(c), entropy_weight(weight) {
    inverse_sum = Lanes<A>(A(1)) / sums.exponentials;
    per_exponential = sums.target * inverse_sum;
    expected = sums.weighted * inverse_sum;
  }
  GRADSCALE_HOST_DEVICE Lanes<A> operator()(Lanes<A> e, Lanes<A> d, Lanes<A> t) const {
    if constexpr (has_entropy) { // the entropy's part is a part of the target
      t = t - entropy_weight * product(e * inverse_sum, d - expected);
    }
    return (e * per_exponential - t) * coefficient; // p - t may cancel: it does not depend on the coefficient
  }
};

// ---- Supports

inline const float* raw_centers(const Support& support, float) {
  return support.raw_centers_float;
}

inline const double* raw_centers(const Support& support, double) {
  return support.raw_centers;
}

// What decoding differentiates a softmax with: centres, or in halves of bins the places of bins, which are whole
// numbers, so that the gradient of a softmax that is 1 in a bin is exactly 0. They are left in `t` as for a layout
// without a lead.
template <class Layout, class A>
void fill_centers(const Support& support, A* t) {
  const A* centers = raw_centers(support, A());
  for (int64_t j = 0; j < support.num_bins; ++j) {
    for (int64_t r = 0; r < Layout::kRows; ++r) {
      t[j * Layout::kRows + r] = support.raw ? centers[j] : static_cast<A>(2 * j + 1 - support.num_bins);
    }
  }
}

// The derivative of the decoded value by the mean of these.
template <class A>
A slope_of_centers(A mean, const Support& support) {
  if (support.raw) {
    return A(1);
  }
  const A expected = expectation_from_moment(mean, support);
  return inverse_transform_slope(support.transform, expected, static_cast<A>(support.eps)) *
         static_cast<A>(0.5 * bin_width(support));
}

// sum_j e_j c_j over the centres transformed back. Bins at equal distance from the middle are taken together: over a
// symmetric support each pair is exactly antisymmetric, so that equal e_j give exactly 0.
template <int64_t stride, class A>
A raw_moment(const A* e, const Support& support) {
  const A* centers = raw_centers(support, A());
  const int64_t last = support.num_bins - 1;
  const int64_t pairs = support.num_bins / 2;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < pairs; ++j) {
    sum += pair_moment(centers[j], centers[last - j], e[j * stride], e[(last - j) * stride]);
  }
  return last % 2 == 0 ? sum + e[pairs * stride] * centers[pairs] : sum;
}

// The same for rows in lanes.
template <class Layout, class A>
GRADSCALE_HOST_DEVICE Lanes<A> raw_moments(
    const Layout& layout, const RowsOfGroup& rows, const A* e, const Support& support) {
  A moments[Layout::kRows] = {};
  for (int64_t r = 0; r < rows.count; ++r) {
    moments[r] = raw_moment<Layout::kRows>(e + layout.at(0, r), support);
  }
  return Layout::of_rows(moments);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
