// The types, functions and macros with which the same code compiles for GPUs and for CPUs.
#pragma once

#if defined(__CUDACC_RTC__)
// The parts of the C++ standard library that kernels use. NVRTC has no standard headers, but it declares the functions
// of <cmath> in the global namespace, for float and for double.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

#define INT32_MAX 2147483647
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

namespace std {

using ::abs;
using ::copysign;
using ::erf;
using ::exp;
using ::expm1;
using ::floor;
using ::fmax;
using ::fmin;
using ::ilogb;
using ::isfinite;
using ::isinf;
using ::ldexp;
using ::log;
using ::log1p;
using ::log2;
using ::rint;
using ::sqrt;

template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;

template <bool condition, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool condition, class A, class B>
using conditional_t = typename conditional<condition, A, B>::type;

template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr int digits = 24;
  static constexpr int max_exponent = 128;
  static constexpr float min() {
    return 1.17549435e-38f;
  }
  static constexpr float max() {
    return 3.40282347e38f;
  }
};
template <>
struct numeric_limits<double> {
  static constexpr int digits = 53;
  static constexpr int max_exponent = 1024;
  static constexpr double min() {
    return 2.2250738585072014e-308;
  }
  static constexpr double max() {
    return 1.7976931348623157e308;
  }
};

} // namespace std
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#endif

#if defined(__CUDACC__)
#define GRADSCALE_HOST_DEVICE __host__ __device__ __forceinline__
#define GRADSCALE_DISPATCH GRADSCALE_HOST_DEVICE
#else
#define GRADSCALE_HOST_DEVICE inline __attribute__((always_inline))
#define GRADSCALE_DISPATCH // the code for each type may be large: inlining is the compiler's choice
#endif

namespace gradscale {

template <class To, class From>
GRADSCALE_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

} // namespace gradscale
