// The kernels of recurrences. Included once for each instruction set.
//
// Along steps: a vector has neighbouring steps of one row. Their maps y -> a + b y are composed in log2(lanes) rounds,
// which takes any number of rows, and reads and writes runs of memory. Composed maps multiply, they do not select: a
// tile with a result that is not finite is computed once more, step by step, by lanes that select.
// Across rows: a vector has one step of neighbouring rows, for trajectories in which these are neighbours in memory.
#include "formulas.h"
#include "sources.h"

#include <utility>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

#define GRADSCALE_BYTES_baseline 16
#define GRADSCALE_BYTES_avx2 32
#define GRADSCALE_BYTES_avx512 64
#define GRADSCALE_JOINED(a, b) a##b
#define GRADSCALE_BYTES_OF(variant) GRADSCALE_JOINED(GRADSCALE_BYTES_, variant)

// ---- Lanes -----------------------------------------------------------------------------------------------------------

#if defined(__GNUC__)

template <class A>
struct Vectors {
  static constexpr int kBytes = GRADSCALE_BYTES_OF(GRADSCALE_VARIANT);
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(A));
  using Integer = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  typedef A V __attribute__((vector_size(kBytes)));
  typedef Integer M __attribute__((vector_size(kBytes)));
  typedef uint8_t Bytes __attribute__((vector_size(kCount)));

  static GRADSCALE_HOST_DEVICE V load(const A* from) {
    V x;
    memcpy(&x, from, sizeof(V));
    return x;
  }
  static GRADSCALE_HOST_DEVICE M load(const uint8_t* from) {
    Bytes bytes;
    memcpy(&bytes, from, sizeof(Bytes));
    return __builtin_convertvector(bytes, M) != 0;
  }
  static GRADSCALE_HOST_DEVICE V splat(A x) {
    return x - V{};
  }
};

// Lanes of vectors. `kChecked`: results that are not finite are computed once more, so that a coefficient of 0 may
// multiply.
template <class A, bool kChecked>
struct Lanes : Vectors<A> {
  using V = typename Vectors<A>::V;
  using M = typename Vectors<A>::M;

  static GRADSCALE_HOST_DEVICE V zero() {
    return V{};
  }
  static GRADSCALE_HOST_DEVICE V one() {
    return V{} + A(1);
  }
  static GRADSCALE_HOST_DEVICE V select(M condition, V x, V y) {
    return condition ? x : y;
  }
  static GRADSCALE_HOST_DEVICE V times(V c, V x) {
    return kChecked ? c * x : select(c == 0, V{}, c * x);
  }
  static GRADSCALE_HOST_DEVICE V product(V c, V d) {
    if constexpr (kChecked) {
      return c * d;
    }
    V result;
    for (int i = 0; i < Vectors<A>::kCount; ++i) {
      result[i] = OneLane<A>::product(c[i], d[i]);
    }
    return result;
  }
  static GRADSCALE_HOST_DEVICE V least(V x, V limit) {
    return limit < x ? limit : x;
  }
};

// The lanes of x moved by `distance`, so that lane i has that of the step i + distance, or of i - distance for an
// adjoint; where there is none, of `fill`.
template <bool kForward, int distance, class V, size_t... i>
GRADSCALE_HOST_DEVICE V shifted(V x, V fill, std::index_sequence<i...> /*lanes*/) {
  constexpr int count = sizeof...(i);
#define GRADSCALE_LANE(i) \
  (kForward ? (static_cast<int>(i) >= distance ? static_cast<int>(i) - distance : count) : static_cast<int>(i) + distance)
#if defined(__clang__)
  return __builtin_shufflevector(x, fill, GRADSCALE_LANE(i)...);
#else
  using Integer = std::conditional_t<sizeof(x[0]) == 8, int64_t, int32_t>;
  typedef Integer Indices __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(x, fill, Indices{GRADSCALE_LANE(i)...});
#endif
#undef GRADSCALE_LANE
}

template <bool kForward, int distance, class A, class V>
GRADSCALE_HOST_DEVICE V shifted(V x, V fill) {
  return shifted<kForward, distance>(x, fill, std::make_index_sequence<Vectors<A>::kCount>());
}

// Composes the map of each lane with those of the lanes before it in the walk.
template <bool kForward, int distance, class A, class V>
GRADSCALE_HOST_DEVICE void compose(V& a, V& b) {
  if constexpr (distance < Vectors<A>::kCount) {
    a += b * shifted<kForward, distance, A>(a, V{});
    b *= shifted<kForward, distance, A>(b, V{} + A(1));
    compose<kForward, 2 * distance, A>(a, b);
  }
}

#endif

// ---- Reading and writing ---------------------------------------------------------------------------------------------

template <class A>
struct Sources {
  Source<A> rewards, values, next_values, discount, lambda, ratios;
  FlagSource terminated, truncated, mask;
  const ReturnsCall& call;

  Sources(const ReturnsCall& call, int inner)
      : rewards(call.rewards, inner),
        values(call.values, inner),
        next_values(call.next_values, inner),
        discount(call.discount, inner),
        lambda(call.lambda, inner),
        ratios(call.ratios, inner),
        terminated(call.terminated, inner),
        truncated(call.truncated, inner),
        mask(call.mask, inner),
        call(call) {
  }

  void enter(int64_t outer) {
    rewards.enter(outer);
    values.enter(outer);
    next_values.enter(outer);
    discount.enter(outer);
    lambda.enter(outer);
    ratios.enter(outer);
    terminated.enter(outer);
    truncated.enter(outer);
    mask.enter(outer);
  }

  // Step t of the row that was entered.
  Transition<OneLane<A>> at(int64_t t) const {
    Transition<OneLane<A>> s;
    const bool has_later = t + 1 < call.steps;
    s.reward = rewards.at(t);
    s.value = values.at(t);
    s.later_value = has_later ? values.at(t + 1) : A(0);
    s.next_value = next_values.at(t);
    s.discount = discount.at(t);
    s.lambda = lambda.at(t);
    s.ratio = ratios.at(t);
    for (int k = 0; k < 3; ++k) {
      s.limits[k] = static_cast<A>(call.limits[k]);
    }
    s.live = mask.at(t);
    s.terminated = terminated.at(t);
    s.cut = s.terminated || truncated.at(t) || !has_later || !mask.at(t + 1);
    return s;
  }
};

template <class A>
struct Result {
  A* data;
  int64_t stride;

  Result(const ReturnsOutput& output, int inner, int64_t outer)
      : data(output.data == nullptr ? nullptr : static_cast<A*>(output.data) + outer * output.strides[1 - inner]),
        stride(output.strides[inner]) {
  }

  void put(int64_t i, A x) const {
    if (data != nullptr) {
      data[i * stride] = x;
    }
  }

#if defined(__GNUC__)
  void put(int64_t i, typename Vectors<A>::V x, int count = Vectors<A>::kCount) const {
    if (data == nullptr) {
      return;
    }
    if (stride == 1 && count == Vectors<A>::kCount) {
      memcpy(data + i, &x, sizeof(x));
      return;
    }
    for (int k = 0; k < count; ++k) {
      data[(i + k) * stride] = x[k];
    }
  }
#endif
};

template <class A>
struct Results {
  Result<A> results[kOutputs];

  Results(const ReturnsCall& call, int inner, int64_t outer)
      : results{{call.outputs[0], inner, outer}, {call.outputs[1], inner, outer}, {call.outputs[2], inner, outer}} {
  }
};

// What a walk hands from step to step.
template <class V>
struct Carry {
  V y{};
  V extra{};
};

template <class F, class L>
GRADSCALE_HOST_DEVICE typename L::V extra_of(const Transition<L>& s) {
  if constexpr (std::is_same_v<F, VTraceAdjoint>) {
    return F::template extra<L>(s);
  } else {
    return L::zero();
  }
}

// One step of each lane; returns what it carries on.
template <class F, class L, class V = typename L::V>
GRADSCALE_HOST_DEVICE Carry<V> walk(const Transition<L>& s, const Carry<V>& carry, V* out) {
  const Affine<L> map = F::template map<L>(s);
  const V y = map.a + L::times(map.b, carry.y);
  F::template results<L>(s, y, carry.y, carry.extra, out);
  return {y, extra_of<F, L>(s)};
}

// Steps begin .. end of a row, one after the other.
template <class A, class F>
void step_by_step(
    const Sources<A>& sources, const Results<A>& results, int64_t begin, int64_t end, Carry<A>& carry) {
  A out[kOutputs];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t t = F::kAdjoint ? i : begin + end - 1 - i;
    carry = walk<F, OneLane<A>>(sources.at(t), carry, out);
    for (int k = 0; k < F::kResults; ++k) {
      results.results[k].put(t, out[k]);
    }
  }
}

// ---- Along steps -----------------------------------------------------------------------------------------------------

#if defined(__GNUC__)

constexpr int64_t kTile = 256; // steps that are checked together

// `count` lanes from i on, and zeros.
template <class L, class S, class T>
GRADSCALE_HOST_DEVICE auto load_lanes(const S& source, int64_t i, int count) {
  T buffer[L::kCount];
  if (count == L::kCount) {
    return L::load(source.read(i, L::kCount, buffer));
  }
  for (int k = 0; k < L::kCount; ++k) {
    buffer[k] = k < count ? source.at(i + k) : T(0);
  }
  return L::load(buffer);
}

template <class L, class A>
GRADSCALE_HOST_DEVICE typename L::V load(const Source<A>& source, int64_t i, int count = L::kCount) {
  return load_lanes<L, Source<A>, A>(source, i, count);
}

template <class L>
GRADSCALE_HOST_DEVICE typename L::M load(const FlagSource& source, int64_t i, int count = L::kCount) {
  return load_lanes<L, FlagSource, uint8_t>(source, i, count);
}

// `count` steps from t on; the lanes behind them are masked.
template <class A, class F, class L>
GRADSCALE_HOST_DEVICE Transition<L> read_steps(const Sources<A>& sources, int64_t t, int count) {
  using V = typename L::V;
  using M = typename L::M;
  Transition<L> s;
  const bool has_later = t + L::kCount < sources.call.steps;
  s.reward = load<L>(sources.rewards, t, count);
  s.value = load<L>(sources.values, t, count);
  s.next_value = load<L>(sources.next_values, t, count);
  s.discount = load<L>(sources.discount, t, count);
  s.lambda = load<L>(sources.lambda, t, count);
  s.ratio = load<L>(sources.ratios, t, count);
  for (int k = 0; k < 3; ++k) {
    s.limits[k] = L::splat(static_cast<A>(sources.call.limits[k]));
  }
  s.later_value = V{};
  if constexpr (std::is_same_v<F, VTrace>) {
    s.later_value = has_later ? load<L>(sources.values, t + 1) : shifted<false, 1, A>(s.value, V{});
  }
  s.live = load<L>(sources.mask, t, count);
  s.terminated = load<L>(sources.terminated, t, count);
  const M later_live = has_later ? load<L>(sources.mask, t + 1) : shifted<false, 1, A>(s.live, M{});
  s.cut = s.terminated | load<L>(sources.truncated, t, count) | ~later_live;
  return s;
}

// Steps begin .. end. Returns false if a number is not finite.
template <class A, class F>
bool walk_tile(const Sources<A>& sources, const Results<A>& results, int64_t begin, int64_t end, Carry<A>& carry) {
  using L = Lanes<A, /*kChecked=*/true>;
  using V = typename L::V;
  constexpr int last = F::kAdjoint ? L::kCount - 1 : 0; // in the order of the walk
  V y = L::splat(carry.y), extra = L::splat(carry.extra), check{};
  const int64_t vectors = (end - begin + L::kCount - 1) / L::kCount;
  for (int64_t i = 0; i < vectors; ++i) {
    const int64_t t = begin + (F::kAdjoint ? i : vectors - 1 - i) * L::kCount;
    const int count = static_cast<int>(std::min<int64_t>(L::kCount, end - t));
    const Transition<L> s = read_steps<A, F, L>(sources, t, count);
    Affine<L> map = F::template map<L>(s);
    compose<F::kAdjoint, 1, A>(map.a, map.b);
    const V own = map.a + map.b * y;
    const V own_extra = extra_of<F, L>(s);
    V out[kOutputs];
    F::template results<L>(
        s, own, shifted<F::kAdjoint, 1, A>(own, y), shifted<F::kAdjoint, 1, A>(own_extra, extra), out);
    check += own - own;
    for (int k = 0; k < F::kResults; ++k) {
      results.results[k].put(t, out[k], count);
      check += out[k] - out[k];
    }
    y = L::splat(own[last]);
    extra = L::splat(own_extra[last]);
  }
  carry = {y[0], extra[0]};
  A sum = extra[0] - extra[0];
  for (int k = 0; k < L::kCount; ++k) {
    sum += check[k];
  }
  return sum == 0;
}

template <class A, class F>
void along_row(const Sources<A>& sources, const Results<A>& results, Carry<A>& carry) {
  const int64_t steps = sources.call.steps;
  const int64_t tiles = (steps + kTile - 1) / kTile;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = (F::kAdjoint ? i : tiles - 1 - i) * kTile;
    const int64_t end = std::min(begin + kTile, steps);
    const Carry<A> before = carry;
    if (!walk_tile<A, F>(sources, results, begin, end, carry)) {
      carry = before;
      step_by_step<A, F>(sources, results, begin, end, carry);
    }
  }
}

#else

template <class A, class F>
void along_row(const Sources<A>& sources, const Results<A>& results, Carry<A>& carry) {
  step_by_step<A, F>(sources, results, 0, sources.call.steps, carry);
}

#endif

template <class Function>
void dispatch_call(const ReturnsCall& call, Function function) {
  dispatch_formula(call.formula, [&](auto formula) {
    if (call.is_double) {
      function(double(), formula);
    } else {
      function(float(), formula);
    }
  });
}

void along_steps(const ReturnsCall& call, int64_t begin, int64_t end) {
  dispatch_call(call, [&](auto number, auto formula) {
    using A = decltype(number);
    Sources<A> sources(call, kStep);
    for (int64_t row = begin; row < end; ++row) {
      sources.enter(row);
      Carry<A> carry;
      along_row<A, decltype(formula)>(sources, Results<A>(call, kStep, row), carry);
    }
  });
}

// ---- Across rows -----------------------------------------------------------------------------------------------------

#if defined(__GNUC__)

// Rows begin .. begin + vectors * lanes.
template <class A, class F, int vectors>
void across_block(Sources<A>& sources, int64_t begin) {
  using L = Lanes<A, /*kChecked=*/false>;
  using V = typename L::V;
  using M = typename L::M;
  const ReturnsCall& call = sources.call;
  Carry<V> carry[vectors];
  M later_live[vectors] = {};
  V later_value[vectors] = {};
  for (int64_t i = 0; i < call.steps; ++i) {
    const int64_t t = F::kAdjoint ? i : call.steps - 1 - i;
    if (F::kAdjoint && t + 1 < call.steps) {
      sources.mask.enter(t + 1);
      for (int k = 0; k < vectors; ++k) {
        later_live[k] = load<L>(sources.mask, begin + k * L::kCount);
      }
    } else if (F::kAdjoint) {
      std::fill(later_live, later_live + vectors, M{});
    }
    sources.enter(t);
    const Results<A> results(call, kRow, t);
    for (int k = 0; k < vectors; ++k) {
      const int64_t row = begin + k * L::kCount;
      Transition<L> s;
      s.reward = load<L>(sources.rewards, row);
      s.value = load<L>(sources.values, row);
      s.later_value = later_value[k];
      s.next_value = load<L>(sources.next_values, row);
      s.discount = load<L>(sources.discount, row);
      s.lambda = load<L>(sources.lambda, row);
      s.ratio = load<L>(sources.ratios, row);
      for (int limit = 0; limit < 3; ++limit) {
        s.limits[limit] = L::splat(static_cast<A>(call.limits[limit]));
      }
      s.live = load<L>(sources.mask, row);
      s.terminated = load<L>(sources.terminated, row);
      s.cut = s.terminated | load<L>(sources.truncated, row) | ~later_live[k];
      V out[kOutputs];
      carry[k] = walk<F, L>(s, carry[k], out);
      for (int output = 0; output < F::kResults; ++output) {
        results.results[output].put(row, out[output]);
      }
      if (!F::kAdjoint) {
        later_live[k] = s.live;
        later_value[k] = s.value;
      }
    }
  }
}

#endif

// Blocks of 64 rows: a cache line of flags.
void across_rows(const ReturnsCall& call, int64_t begin, int64_t end) {
#if defined(__GNUC__)
  dispatch_call(call, [&](auto number, auto formula) {
    using A = decltype(number);
    using F = decltype(formula);
    constexpr int count = Vectors<A>::kCount;
    Sources<A> sources(call, kRow);
    for (; begin + 4 * count <= end; begin += 4 * count) {
      across_block<A, F, 4>(sources, begin);
    }
    for (; begin + count <= end; begin += count) {
      across_block<A, F, 1>(sources, begin);
    }
  });
#endif
  along_steps(call, begin, end);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
