// Vectors of the instruction set, as lanes of the formulas. Included once for each instruction set.
#include "../formulas/port.h"

#include <utility>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

#define GRADSCALE_BYTES_baseline 16
#define GRADSCALE_BYTES_avx2 32
#define GRADSCALE_BYTES_avx512 64
#define GRADSCALE_JOINED(a, b) a##b
#define GRADSCALE_BYTES_OF(variant) GRADSCALE_JOINED(GRADSCALE_BYTES_, variant)

#if defined(__GNUC__)

template <class A>
struct Vectors {
  static constexpr int kBytes = GRADSCALE_BYTES_OF(GRADSCALE_VARIANT);
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(A));
  using Integer = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  typedef A V __attribute__((vector_size(kBytes)));
  typedef Integer M __attribute__((vector_size(kBytes)));
  typedef uint8_t Bytes __attribute__((vector_size(kCount)));
};

// A byte to each lane. Compilers do not make one instruction of this.
template <class Vectors, class M = typename Vectors::M>
GRADSCALE_HOST_DEVICE M widened(const uint8_t* from) {
#if GRADSCALE_X86_VARIANTS
  constexpr int lanes = Vectors::kCount;
  if constexpr (lanes == 16) {
    return (M)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  } else if constexpr (lanes == 8 && Vectors::kBytes == 64) {
    return (M)_mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  } else if constexpr (lanes == 8) {
    return (M)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  } else if constexpr (lanes == 4 && Vectors::kBytes == 32) {
    int32_t bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return (M)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
  }
#endif
  typename Vectors::Bytes bytes;
  memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, M);
}

// Lanes of vectors, whose coefficients of 0 multiply.
template <class A>
struct Lanes : Vectors<A> {
  using V = typename Vectors<A>::V;
  using M = typename Vectors<A>::M;

  static GRADSCALE_HOST_DEVICE V load(const A* from) {
    V x;
    memcpy(&x, from, sizeof(V));
    return x;
  }
  static GRADSCALE_HOST_DEVICE M load(const uint8_t* from) {
    return widened<Vectors<A>>(from) != 0;
  }
  static GRADSCALE_HOST_DEVICE void store(A* to, V x) {
    memcpy(to, &x, sizeof(V));
  }
  static GRADSCALE_HOST_DEVICE V splat(A x) {
    return x - V{};
  }
  static GRADSCALE_HOST_DEVICE V zero() {
    return V{};
  }
  static GRADSCALE_HOST_DEVICE V one() {
    return V{} + A(1);
  }
  // Joins bytes, which are fewer than lanes have.
  static GRADSCALE_HOST_DEVICE M
  load_cut(const uint8_t* terminated, const uint8_t* truncated, const uint8_t* later_live) {
    typename Vectors<A>::Bytes bytes[3];
    memcpy(&bytes[0], terminated, sizeof(bytes[0]));
    memcpy(&bytes[1], truncated, sizeof(bytes[1]));
    memcpy(&bytes[2], later_live, sizeof(bytes[2]));
    const auto cut = bytes[0] | bytes[1] | reinterpret_cast<typename Vectors<A>::Bytes>(bytes[2] == 0);
    uint8_t joined[sizeof(cut)];
    memcpy(joined, &cut, sizeof(cut));
    return load(joined);
  }
  static GRADSCALE_HOST_DEVICE M always() {
    return M{} - 1;
  }
  static GRADSCALE_HOST_DEVICE V select(M condition, V x, V y) {
    return condition ? x : y;
  }
  static GRADSCALE_HOST_DEVICE V times(V c, V x) {
    return c * x;
  }
  static GRADSCALE_HOST_DEVICE V product(V c, V d) {
    return c * d;
  }
  static GRADSCALE_HOST_DEVICE V least(V x, V limit) {
    return limit < x ? limit : x;
  }
};

// Shifts the lanes of x: lane i becomes lane i + distance, or lane i - distance for an adjoint. Lanes of `fill` replace
// lanes that do not exist.
template <bool kForward, int distance, class V, size_t... i>
GRADSCALE_HOST_DEVICE V shifted(V x, V fill, std::index_sequence<i...> /*lanes*/) {
  constexpr int count = sizeof...(i);
#define GRADSCALE_LANE(i)                                                                \
  (kForward ? (static_cast<int>(i) >= distance ? static_cast<int>(i) - distance : count) \
            : static_cast<int>(i) + distance)
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

// Composes the map of each lane with the maps of the lanes that precede it in the walk.
template <bool kForward, int distance, class A, class V>
GRADSCALE_HOST_DEVICE void compose(V& a, V& b) {
  if constexpr (distance < Vectors<A>::kCount) {
    a += b * shifted<kForward, distance, A>(a, V{});
    b *= shifted<kForward, distance, A>(b, V{} + A(1));
    compose<kForward, 2 * distance, A>(a, b);
  }
}

template <class A>
constexpr int kLanesOf = Vectors<A>::kCount;

#else

template <class A>
constexpr int kLanesOf = 1;

#endif

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
