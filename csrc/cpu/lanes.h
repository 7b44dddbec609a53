// A vector of the numbers that rows are summed in, as wide as the registers of the instruction set: 4, 8 or 16 floats,
// half as many doubles. Included once for each instruction set.
//
// Lanes are the vector types of GCC and Clang; other compilers get one lane. Formulas that exist for one number (exp,
// conversions of elements) are applied lane by lane in a loop, which compilers turn into vector instructions. An
// operation that compilers do not find has a specialisation at the end of this file.
//
// Lanes are neither arguments nor results of functions that are not inlined: compilers may clear half of them there.
// NaN: arithmetic and exp_nonpositive() keep it. larger() may lose it.
#include "../math/element.h"
#include "../math/losses.h"

#include <utility>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

using gradscale::exp_nonpositive;
using gradscale::product;

template <class A>
struct VectorOf {
#if defined(__GNUC__)
  typedef A type __attribute__((vector_size(GRADSCALE_VECTOR_BYTES)));
#else
  using type = A;
#endif
};

template <class A>
struct Lanes {
  using Vector = typename VectorOf<A>::type;
  static constexpr int kCount = sizeof(Vector) / sizeof(A);
  Vector v;

  GRADSCALE_HOST_DEVICE Lanes() = default;
#if defined(__GNUC__)
  GRADSCALE_HOST_DEVICE Lanes(Vector value) : v(value) {
  }
#endif
  GRADSCALE_HOST_DEVICE Lanes(A number) : v(number - Vector{}) {
  }
  GRADSCALE_HOST_DEVICE A first() const {
    A number;
    memcpy(&number, &v, sizeof(number));
    return number;
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator+(Lanes a, Lanes b) {
    return Lanes(a.v + b.v);
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator-(Lanes a, Lanes b) {
    return Lanes(a.v - b.v);
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator*(Lanes a, Lanes b) {
    return Lanes(a.v * b.v);
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator/(Lanes a, Lanes b) {
    return Lanes(a.v / b.v);
  }
  GRADSCALE_HOST_DEVICE Lanes& operator+=(Lanes other) {
    v += other.v;
    return *this;
  }
};

// The type of sums that elements are widened to, as lanes.
template <class A, class T>
GRADSCALE_HOST_DEVICE Lanes<A> load(const T* from) {
  Lanes<A> result;
  if constexpr (std::is_same_v<A, T>) {
    memcpy(&result.v, from, sizeof(result.v));
  } else {
    A numbers[Lanes<A>::kCount];
#pragma omp simd
    for (int i = 0; i < Lanes<A>::kCount; ++i) {
      numbers[i] = static_cast<A>(to_accumulate(from[i]));
    }
    memcpy(&result.v, numbers, sizeof(result.v));
  }
  return result;
}

template <class T, class A>
GRADSCALE_HOST_DEVICE void store(T* to, Lanes<A> lanes) {
  if constexpr (std::is_same_v<A, T>) {
    memcpy(to, &lanes.v, sizeof(lanes.v));
  } else {
    A numbers[Lanes<A>::kCount];
    memcpy(numbers, &lanes.v, sizeof(lanes.v));
#pragma omp simd
    for (int i = 0; i < Lanes<A>::kCount; ++i) {
      to[i] = from_accumulate<T, A>(numbers[i]);
    }
  }
}

template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> larger(Lanes<A> a, Lanes<A> b) {
  return Lanes<A>(a.v > b.v ? a.v : b.v);
}

// weight x, where 0 times anything is 0.
template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> product(Lanes<A> weight, Lanes<A> x) {
  return Lanes<A>(weight.v != A(0) ? weight.v * x.v : typename Lanes<A>::Vector{});
}

template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> exp_nonpositive(Lanes<A> x) {
  A numbers[Lanes<A>::kCount];
  store(numbers, x);
#pragma omp simd
  for (int i = 0; i < Lanes<A>::kCount; ++i) {
    numbers[i] = exp_nonpositive(numbers[i]);
  }
  return load<A>(numbers);
}

#if defined(__GNUC__)
// As to_accumulate() and from_accumulate() of math/element.h do.
typedef uint16_t Halves __attribute__((vector_size(GRADSCALE_VECTOR_BYTES / 2)));
typedef uint32_t Words __attribute__((vector_size(GRADSCALE_VECTOR_BYTES)));

template <>
GRADSCALE_HOST_DEVICE Lanes<float> load<float, BFloat16Bits>(const BFloat16Bits* from) {
  Halves bits;
  memcpy(&bits, from, sizeof(bits));
  const Words words = __builtin_convertvector(bits, Words) << 16;
  Lanes<float> result;
  memcpy(&result.v, &words, sizeof(words));
  return result;
}

template <>
GRADSCALE_HOST_DEVICE void store<BFloat16Bits, float>(BFloat16Bits* to, Lanes<float> lanes) {
  Words bits;
  memcpy(&bits, &lanes.v, sizeof(bits));
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words nan = Words{} + 0x7fc0u;
  const Halves result = __builtin_convertvector(lanes.v == lanes.v ? rounded : nan, Halves);
  memcpy(to, &result, sizeof(result));
}
#endif

// ---- Between lanes

// The lanes of a and then of b whose numbers are index(0), index(1), ...
template <class A, class Index, int... i>
GRADSCALE_HOST_DEVICE Lanes<A> shuffle(Lanes<A> a, Lanes<A> b, Index index, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return Lanes<A>(__builtin_shufflevector(a.v, b.v, Index()(i)...));
#elif defined(__GNUC__)
  using Whole = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  typedef Whole Indices __attribute__((vector_size(GRADSCALE_VECTOR_BYTES)));
  return Lanes<A>(__builtin_shuffle(a.v, b.v, Indices{index(i)...}));
#else
  return a;
#endif
}

template <class A, class Index>
GRADSCALE_HOST_DEVICE Lanes<A> shuffle(Lanes<A> a, Lanes<A> b, Index index) {
  return shuffle(a, b, index, std::make_integer_sequence<int, Lanes<A>::kCount>());
}

// Lane i becomes lane i ^ distance.
template <int distance>
struct Exchanged {
  constexpr int operator()(int i) const {
    return i ^ distance;
  }
};

// Alternately the lanes of one half of two vectors.
template <int count, int half>
struct Interleaved {
  constexpr int operator()(int i) const {
    return i / 2 + half * (count / 2) + (i % 2) * count;
  }
};

// All lanes combined by a commutative operation, in every lane.
template <int distance, class A, class Combine>
GRADSCALE_HOST_DEVICE Lanes<A> combined(Lanes<A> lanes, Combine combine) {
  if constexpr (distance == 0) {
    return lanes;
  } else {
    return combined<distance / 2>(combine(lanes, shuffle(lanes, lanes, Exchanged<distance>())), combine);
  }
}

template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> total(Lanes<A> lanes) {
  return combined<Lanes<A>::kCount / 2>(lanes, [](Lanes<A> a, Lanes<A> b) { return a + b; });
}

template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> largest_lane(Lanes<A> lanes) {
  return combined<Lanes<A>::kCount / 2>(lanes, [](Lanes<A> a, Lanes<A> b) { return larger(a, b); });
}

// Transposes a square: each step interleaves rows that are half of the square apart.
template <int step, class A>
GRADSCALE_HOST_DEVICE void transpose(Lanes<A> (&rows)[Lanes<A>::kCount]) {
  constexpr int count = Lanes<A>::kCount;
  if constexpr (step < count) {
    Lanes<A> next[count];
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; ++i) {
      next[2 * i] = shuffle(rows[i], rows[i + count / 2], Interleaved<count, 0>());
      next[2 * i + 1] = shuffle(rows[i], rows[i + count / 2], Interleaved<count, 1>());
    }
    transpose<2 * step>(next);
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) {
      rows[i] = next[i];
    }
  }
}

// ---- Operations that compilers do not find

#if GRADSCALE_VECTOR_BYTES == 32

template <>
GRADSCALE_HOST_DEVICE Lanes<float> load<float, HalfBits>(const HalfBits* from) {
  return Lanes<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

template <>
GRADSCALE_HOST_DEVICE void store<HalfBits, float>(HalfBits* to, Lanes<float> lanes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(lanes.v, _MM_FROUND_TO_NEAREST_INT));
}

#elif GRADSCALE_VECTOR_BYTES == 64

template <>
GRADSCALE_HOST_DEVICE Lanes<float> load<float, HalfBits>(const HalfBits* from) {
  return Lanes<float>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

template <>
GRADSCALE_HOST_DEVICE void store<HalfBits, float>(HalfBits* to, Lanes<float> lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(lanes.v, _MM_FROUND_TO_NEAREST_INT));
}

// exp(x) for x <= 0: 2^n 2^f with f in 0..1 a polynomial with p(0) = 1. An error of 8.5e-8 from the polynomial, and of
// |x| 6e-8 from the rounding of x log2(e): small where exp(x) is not. -inf gives 0, NaN stays NaN.
template <>
GRADSCALE_HOST_DEVICE Lanes<float> exp_nonpositive(Lanes<float> x) {
  const __m512 t = _mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504f));
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF); // t - floor(t)
  __m512 p = _mm512_set1_ps(0x1.e9750ap-10f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.277858p-7f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c91ceep-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebdb58p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e4bap-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return Lanes<float>(_mm512_scalef_ps(p, t)); // times 2^floor(t)
}

#endif

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
