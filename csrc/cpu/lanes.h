// `Lanes` holds 16 numbers in as many vectors as the instruction set needs. They are neighbouring elements of a row, or
// one element of each of 16 rows. Included once for each instruction set.
#include "../formulas/element.h"
#include "../formulas/elementary.h"
#include "vectors.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

using gradscale::exp_nonpositive; // the overloads for single numbers

template <class A>
GRADSCALE_HOST_DEVICE typename Vectors<A>::V larger_bits(typename Vectors<A>::V a, typename Vectors<A>::V b) {
  using Bits = typename Vectors<A>::Bits;
  const Bits x = reinterpreted<Bits>(a), y = reinterpreted<Bits>(b);
  return reinterpreted<typename Vectors<A>::V>(x > y ? x : y);
}

template <class A>
struct Lanes {
  using V = typename Vectors<A>::V;
  static constexpr int kCount = Vectors<A>::kCount; // lanes of a part, which is one vector
  static constexpr int kParts = kLanes / kCount;
  V parts[kParts];

  Lanes() = default;
  GRADSCALE_HOST_DEVICE Lanes(A x) : Lanes(each([=](size_t) { return splat(x); })) {
  }

  // Lanes whose parts are function(0), function(1) and so on.
  template <class Function>
  static GRADSCALE_HOST_DEVICE Lanes each(Function function) {
    return each(function, std::make_index_sequence<kParts>());
  }
  template <class Function, size_t... p>
  static GRADSCALE_HOST_DEVICE Lanes each(Function function, std::index_sequence<p...> /*parts*/) {
    Lanes result;
    ((result.parts[p] = function(p)), ...);
    return result;
  }

  friend GRADSCALE_HOST_DEVICE Lanes operator+(Lanes a, Lanes b) {
    return each([&](size_t p) { return a.parts[p] + b.parts[p]; });
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator-(Lanes a, Lanes b) {
    return each([&](size_t p) { return a.parts[p] - b.parts[p]; });
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator*(Lanes a, Lanes b) {
    return each([&](size_t p) { return a.parts[p] * b.parts[p]; });
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator/(Lanes a, Lanes b) {
    return each([&](size_t p) { return a.parts[p] / b.parts[p]; });
  }
  friend GRADSCALE_HOST_DEVICE Lanes operator-(Lanes a) {
    return each([&](size_t p) { return -a.parts[p]; });
  }
  GRADSCALE_HOST_DEVICE void operator+=(Lanes b) {
    *this = *this + b;
  }
  // The larger one; b where a is NaN.
  friend GRADSCALE_HOST_DEVICE Lanes larger(Lanes a, Lanes b) {
    return each([&](size_t p) { return a.parts[p] > b.parts[p] ? a.parts[p] : b.parts[p]; });
  }
  // Compares the bits as unsigned integers: all negative numbers are above all positive ones, and of two negative
  // numbers the one with the larger magnitude is above.
  friend GRADSCALE_HOST_DEVICE Lanes larger_bits(Lanes a, Lanes b) {
    return each([&](size_t p) { return larger_bits<A>(a.parts[p], b.parts[p]); });
  }
  // The magnitude of finite numbers; 0 for others.
  friend GRADSCALE_HOST_DEVICE Lanes finite_magnitude(Lanes a) {
    return each([&](size_t p) {
      const V magnitude = a.parts[p] < V{} ? -a.parts[p] : a.parts[p];
      return magnitude < static_cast<A>(INFINITY) - V{} ? magnitude : V{};
    });
  }
  // weight * x, and 0 if the weight is 0, also for an infinite x.
  friend GRADSCALE_HOST_DEVICE Lanes product(Lanes weight, Lanes x) {
    return each([&](size_t p) { return weight.parts[p] == V{} ? V{} : weight.parts[p] * x.parts[p]; });
  }

  // 0, 1, ..., 15.
  static GRADSCALE_HOST_DEVICE Lanes numbers() {
    alignas(64) static constexpr A values[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return each([&](size_t p) { return load_vector(values + p * kCount); });
  }
};

// ---- Selected lanes -------------------------------------------------------------------------------------------------

struct AllLanes {};

// Lanes `first` to 15. The addresses of the other lanes must be valid, unless loads and stores have masks.
struct LanesFrom {
  int first;
};

// Lanes 0 to count - 1. The addresses of the other lanes need not be valid.
struct FirstLanes {
  int count;
};

template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> kept(AllLanes /*which*/, Lanes<A> x, Lanes<A> /*otherwise*/) {
  return x;
}

#if GRADSCALE_VECTOR_BYTES == 64
constexpr bool kHasMasks = true; // loads and stores with a mask do not access the memory of other lanes

inline __mmask16 mask_of(FirstLanes which) {
  return static_cast<__mmask16>((1u << which.count) - 1);
}

inline __mmask16 mask_of(LanesFrom which) {
  return static_cast<__mmask16>(0xffffu << which.first);
}

// Lane (i + distance) % 16 of the result is lane i of x.
inline Lanes<float> rotated(Lanes<float> x, int64_t distance) {
  const __m512i numbers = _mm512_cvtps_epi32(Lanes<float>::numbers().parts[0]);
  x.parts[0] =
      _mm512_permutexvar_ps(_mm512_sub_epi32(numbers, _mm512_set1_epi32(static_cast<int>(distance))), x.parts[0]);
  return x;
}

inline Lanes<double> rotated(Lanes<double> x, int64_t distance) {
  const Lanes<double> numbers = Lanes<double>::numbers();
  return Lanes<double>::each([&](size_t p) {
    const __m512i from = _mm512_sub_epi64(_mm512_cvtpd_epi64(numbers.parts[p]), _mm512_set1_epi64(distance));
    return (Lanes<double>::V)_mm512_permutex2var_pd(x.parts[0], from, x.parts[1]);
  });
}

// The selected lanes of x, and the other lanes of `otherwise`.
template <class A, class Which>
GRADSCALE_HOST_DEVICE Lanes<A> kept(Which which, Lanes<A> x, Lanes<A> otherwise) {
  const __mmask16 mask = mask_of(which);
  return Lanes<A>::each([&](size_t p) {
    if constexpr (std::is_same_v<A, float>) {
      return (typename Lanes<A>::V)_mm512_mask_mov_ps(otherwise.parts[p], mask, x.parts[p]);
    } else {
      const auto part = static_cast<__mmask8>(mask >> (8 * p));
      return (typename Lanes<A>::V)_mm512_mask_mov_pd(otherwise.parts[p], part, x.parts[p]);
    }
  });
}
#else
constexpr bool kHasMasks = false;

template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> kept(FirstLanes which, Lanes<A> x, Lanes<A> otherwise) {
  const Lanes<A> number = Lanes<A>::numbers(), end(static_cast<A>(which.count));
  return Lanes<A>::each([&](size_t p) { return number.parts[p] < end.parts[p] ? x.parts[p] : otherwise.parts[p]; });
}

template <class A>
GRADSCALE_HOST_DEVICE Lanes<A> kept(LanesFrom which, Lanes<A> x, Lanes<A> otherwise) {
  return kept(FirstLanes{which.first}, otherwise, x);
}
#endif

// ---- Memory ---------------------------------------------------------------------------------------------------------

#if GRADSCALE_VECTOR_BYTES >= 32
constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif

template <class T>
using LanesOf = Lanes<Accumulate<T>>;

// Half types are converted by an instruction, or by the formulas of element.h in a loop that compilers vectorise.
template <class T, class A = Accumulate<T>>
GRADSCALE_HOST_DEVICE typename Vectors<A>::V load_part(const T* from) {
  if constexpr (std::is_same_v<T, A>) {
    return load_vector(from);
#if GRADSCALE_VECTOR_BYTES == 64
  } else if constexpr (std::is_same_v<T, HalfBits>) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  } else if constexpr (std::is_same_v<T, BFloat16Bits>) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif GRADSCALE_VECTOR_BYTES == 32
  } else if constexpr (std::is_same_v<T, HalfBits>) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  } else if constexpr (std::is_same_v<T, BFloat16Bits>) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#endif
  } else {
    A numbers[Vectors<A>::kCount];
#pragma omp simd
    for (int k = 0; k < Vectors<A>::kCount; ++k) {
      numbers[k] = to_accumulate(from[k]);
    }
    return load_vector(numbers);
  }
}

template <class T, class A = Accumulate<T>>
GRADSCALE_HOST_DEVICE void store_part(T* to, typename Vectors<A>::V x) {
  if constexpr (std::is_same_v<T, A>) {
    store_vector(to, x);
#if GRADSCALE_VECTOR_BYTES == 64
  } else if constexpr (std::is_same_v<T, HalfBits>) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)x, kToNearest));
#elif GRADSCALE_VECTOR_BYTES == 32
  } else if constexpr (std::is_same_v<T, HalfBits>) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)x, kToNearest));
#endif
  } else {
    A numbers[Vectors<A>::kCount];
    store_vector(numbers, x);
#pragma omp simd
    for (int k = 0; k < Vectors<A>::kCount; ++k) {
      to[k] = from_accumulate<T, A>(numbers[k]);
    }
  }
}

template <class T>
GRADSCALE_HOST_DEVICE LanesOf<T> load_lanes(const T* from) {
  return LanesOf<T>::each([&](size_t p) { return load_part(from + p * LanesOf<T>::kCount); });
}

template <class T>
GRADSCALE_HOST_DEVICE void store_lanes(T* to, LanesOf<T> x) {
  for (int p = 0; p < LanesOf<T>::kParts; ++p) {
    store_part(to + p * LanesOf<T>::kCount, x.parts[p]);
  }
}

#if GRADSCALE_VECTOR_BYTES == 64
template <class T, class Which>
GRADSCALE_HOST_DEVICE LanesOf<T> load_masked(const T* from, Which which) {
  const __mmask16 mask = mask_of(which);
  if constexpr (std::is_same_v<T, float>) {
    return Lanes<float>::each([&](size_t) { return _mm512_maskz_loadu_ps(mask, from); });
  } else if constexpr (std::is_same_v<T, double>) {
    return Lanes<double>::each(
        [&](size_t p) { return _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask >> (8 * p)), from + 8 * p); });
  } else {
    alignas(32) T all[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(all), _mm256_maskz_loadu_epi16(mask, from));
    return load_lanes(all);
  }
}

template <class T, class Which>
GRADSCALE_HOST_DEVICE void store_masked(T* to, LanesOf<T> x, Which which) {
  const __mmask16 mask = mask_of(which);
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(to, mask, x.parts[0]);
  } else if constexpr (std::is_same_v<T, double>) {
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>(mask), x.parts[0]);
    _mm512_mask_storeu_pd(to + 8, static_cast<__mmask8>(mask >> 8), x.parts[1]);
  } else {
    alignas(32) T all[kLanes];
    store_lanes(all, x);
    _mm256_mask_storeu_epi16(to, mask, _mm256_load_si256(reinterpret_cast<const __m256i*>(all)));
  }
}
#else
template <class T>
GRADSCALE_HOST_DEVICE LanesOf<T> load_masked(const T* from, FirstLanes which) {
#if GRADSCALE_VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, float>) {
    const auto counts = Lanes<float>::numbers();
    const Lanes<float> end(static_cast<float>(which.count));
    return Lanes<float>::each(
        [&](size_t p) { return _mm256_maskload_ps(from + 8 * p, (__m256i)(counts.parts[p] < end.parts[p])); });
  }
#endif
  T all[kLanes] = {};
  memcpy(all, from, which.count * sizeof(T));
  return load_lanes(all);
}

template <class T>
GRADSCALE_HOST_DEVICE void store_masked(T* to, LanesOf<T> x, FirstLanes which) {
  T all[kLanes];
  store_lanes(all, x);
  memcpy(to, all, which.count * sizeof(T));
}
#endif

// True if loads and stores of these lanes do not access the memory of other lanes.
template <class Which>
constexpr bool kIsMasked = std::is_same_v<Which, FirstLanes> || (kHasMasks && std::is_same_v<Which, LanesFrom>);

// Loads and stores the selected lanes. If the addresses of the other lanes need not be valid, they are not accessed;
// otherwise they are accessed too. After a load, the other lanes are unspecified.
template <class T, class Which>
GRADSCALE_HOST_DEVICE LanesOf<T> load_lanes(const T* from, Which which) {
  if constexpr (kIsMasked<Which>) {
    return load_masked(from, which);
  } else {
    return load_lanes(from);
  }
}

template <class T, class Which>
GRADSCALE_HOST_DEVICE void store_lanes(T* to, LanesOf<T> x, Which which) {
  if constexpr (kIsMasked<Which>) {
    store_masked(to, x, which);
  } else {
    store_lanes(to, x);
  }
}

// ---- Functions ------------------------------------------------------------------------------------------------------

#if GRADSCALE_VECTOR_BYTES >= 32
// Combines the elements of a vector: its halves, the halves of the result, and so on.
template <class E, class V, class Combine>
GRADSCALE_HOST_DEVICE E combined_elements(V x, Combine combine) {
  if constexpr (sizeof(V) > 16) {
    typedef E Half __attribute__((vector_size(sizeof(V) / 2)));
#if GRADSCALE_VECTOR_BYTES == 64
    if constexpr (sizeof(V) == 64) {
      const __m256 low = _mm512_castps512_ps256((__m512)x), high = _mm512_extractf32x8_ps((__m512)x, 1);
      return combined_elements<E>(combine((Half)low, (Half)high), combine);
    }
#endif
    if constexpr (sizeof(V) == 32) {
      const __m128 low = _mm256_castps256_ps128((__m256)x), high = _mm256_extractf128_ps((__m256)x, 1);
      return combined_elements<E>(combine((Half)low, (Half)high), combine);
    }
  } else {
    x = combine(x, (V)_mm_movehl_ps((__m128)x, (__m128)x));
    if constexpr (sizeof(E) == 4) {
      x = combine(x, (V)_mm_movehdup_ps((__m128)x));
    }
    return x[0];
  }
}
#else
template <int distance, class V, class Combine, size_t... lane>
GRADSCALE_HOST_DEVICE V combined(V x, Combine combine, std::index_sequence<lane...> lanes) {
  if constexpr (distance > 0) {
    x = combine(x, shuffled(x, x, std::index_sequence<(lane ^ distance)...>()));
    return combined<distance / 2>(x, combine, lanes);
  }
  return x;
}

template <class E, class V, class Combine>
GRADSCALE_HOST_DEVICE E combined_elements(V x, Combine combine) {
  constexpr int count = sizeof(V) / sizeof(E);
  x = combined<count / 2>(x, combine, std::make_index_sequence<count>());
  E elements[count];
  memcpy(elements, &x, sizeof(x));
  return elements[0];
}
#endif

// Combines all lanes, in an order that depends only on the instruction set.
template <class A, class Combine>
GRADSCALE_HOST_DEVICE A combined(Lanes<A> x, Combine combine) {
  auto all = x.parts[0];
  for (int p = 1; p < Lanes<A>::kParts; ++p) {
    all = combine(all, x.parts[p]);
  }
  return combined_elements<A>(all, combine);
}

template <class A>
GRADSCALE_HOST_DEVICE A total(Lanes<A> x) {
  return combined(x, [](auto a, auto b) { return a + b; });
}

template <class A>
GRADSCALE_HOST_DEVICE A largest(Lanes<A> x) {
  return combined(x, [](auto a, auto b) { return a > b ? a : b; });
}

template <class A>
GRADSCALE_HOST_DEVICE A largest_bits(Lanes<A> x) {
  using Bits = typename Vectors<A>::Bits;
  using Element = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;
  for (int p = 1; p < Lanes<A>::kParts; ++p) {
    x.parts[0] = larger_bits<A>(x.parts[0], x.parts[p]);
  }
  return bit_cast<A>(
      combined_elements<Element>(reinterpreted<Bits>(x.parts[0]), [](auto a, auto b) { return a > b ? a : b; }));
}

// exp(x) for x <= 0: 2^t with t = x log2(e) is 2^n 2^f, n a whole number and f a fraction, and 2^f is a polynomial that
// is 1 at 0. The relative error is 8.6e-8 from the polynomial plus |x| 6e-8 from the rounding of t. Results below the
// smallest normal number are 0, or subnormal with AVX-512. -inf gives 0, and NaN stays NaN. With `in_range`, x must be
// neither below kLeastInRange nor NaN; this saves instructions, except with AVX-512.
constexpr float kLeastInRange = -87;
constexpr bool kIsFasterInRange = GRADSCALE_VECTOR_BYTES != 64;

template <bool in_range>
GRADSCALE_HOST_DEVICE Vectors<float>::V exp_part(Vectors<float>::V x) {
  using V = Vectors<float>::V;
  const V t = x * static_cast<float>(kLog2E);
#if GRADSCALE_VECTOR_BYTES == 64 // n = floor(t), as in the instruction that multiplies by 2^n
  const V f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
  V p = f * 0x1.e9750ap-10f + 0x1.277858p-7f;
  p = p * f + 0x1.c91ceep-5f;
  p = p * f + 0x1.ebdb58p-3f;
  p = p * f + 0x1.62e4bap-1f;
  p = p * f + 1.0f;
  return _mm512_scalef_ps(p, t);
#else // n is t rounded towards zero, as in a conversion to an integer
  using Bits = Vectors<float>::Bits;
  const auto n = converted<Vectors<float>::Integers>(t);
  const V f = t - converted<V>(n);
  V p = f * 0x1.ef66d4p-11f + 0x1.2da7d6p-7f;
  p = p * f + 0x1.c4fef8p-5f;
  p = p * f + 0x1.ebe392p-3f;
  p = p * f + 0x1.62e3bcp-1f;
  p = p * f + 1.0f;
  const V scaled = reinterpreted<V>(reinterpreted<Bits>(p) + (reinterpreted<Bits>(n) << 23));
  if constexpr (in_range) {
    return scaled;
  } else {
    return t < -126.0f ? V{} : scaled;
  }
#endif
}

template <bool in_range = false>
GRADSCALE_HOST_DEVICE Lanes<float> exp_nonpositive(Lanes<float> x) {
  return Lanes<float>::each([&](size_t p) { return exp_part<in_range>(x.parts[p]); });
}

template <bool in_range = false>
GRADSCALE_HOST_DEVICE Lanes<double> exp_nonpositive(Lanes<double> x) {
  double numbers[kLanes];
  store_lanes(numbers, x);
#pragma omp simd
  for (double& number : numbers) {
    number = gradscale::exp_nonpositive(number);
  }
  return load_lanes(numbers);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
