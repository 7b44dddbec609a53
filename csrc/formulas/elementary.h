// Elementary functions: exponentials, logarithms, products and maxima. They have no branches or library calls, so that
// compilers vectorise loops over them for any instruction set.
#pragma once

#include "port.h"

namespace gradscale {

constexpr double kLog2E = 1.4426950408889634074; // log2(e)

// exp(x) for x <= 0. Relative error: 1.2e-7 in float, 3e-16 in double; results below the smallest normal number are 0.
// NaN stays NaN.
//
// exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2)/2. Adding 1.5 * 2^m, where m is the number of mantissa
// bits, rounds to an integer and leaves that integer in the low bits; a shift moves it into the exponent of the factor
// 2^n.
GRADSCALE_HOST_DEVICE float exp_nonpositive(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x); // as accurate, in fewer instructions
#else
  constexpr float smallest = -87.3f;
  const float clamped = x < smallest ? smallest : x;
  const float shifted = clamped * static_cast<float>(kLog2E) + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.384364441e-3f; // minimax polynomial of degree 6 that is exactly 1 at 0; error 2e-9
  p = p * r + 8.374162950e-3f;
  p = p * r + 4.166800156e-2f;
  p = p * r + 1.666643173e-1f;
  p = p * r + 4.999999404e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float power = bit_cast<float>((bit_cast<uint32_t>(shifted) - 0x4B400000u + 127u) << 23);
  return x < smallest ? 0.0f : p * power;
#endif
}

GRADSCALE_HOST_DEVICE double exp_nonpositive(double x) {
  constexpr double smallest = -708.3;
  const double clamped = x < smallest ? smallest : x;
  const double shifted = clamped * kLog2E + 6755399441055744.0;
  const double n = shifted - 6755399441055744.0;
  double r = clamped - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  const double power = bit_cast<double>((bit_cast<uint64_t>(shifted) - 0x4338000000000000u + 1023u) << 52);
  return x < smallest ? 0.0 : p * power;
}

// a / b for normal numbers whose quotient is a normal number, and b of at most 2^125; 1 exactly for a = b.
GRADSCALE_HOST_DEVICE float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  const float inverse = __fdividef(1.0f, b), estimate = a * inverse;
  return fmaf(fmaf(-b, estimate, a), inverse, estimate); // 1 unit in the last place, in fewer instructions
#else
  return a / b;
#endif
}
GRADSCALE_HOST_DEVICE double quotient(double a, double b) {
  return a / b;
}

// 2 atanh(s), by the first terms of its series.
template <int terms, class T>
GRADSCALE_HOST_DEVICE T twice_atanh(T s) {
  const T square = s * s;
  T sum = T(1) / T(2 * terms - 1);
  for (int n = terms - 2; n >= 0; --n) {
    sum = sum * square + T(1) / T(2 * n + 1);
  }
  return T(2) * s * sum;
}

// log(x) for normal numbers x >= 1/2; relative error 2e-7 in float, 1e-15 in double. NaN and infinity are returned
// unchanged (infinity as NaN by a GPU, in float). x = 2^n m with m in sqrt(1/2)..sqrt(2), and log(m) = 2 atanh((m - 1)
// / (m + 1)), whose argument is at most 0.172. m - 1 is exact, so that nothing is lost near log(1) = 0.
GRADSCALE_HOST_DEVICE float log_normal(float x) {
#if defined(__CUDA_ARCH__)
  // Without a division: log(m) for m in 2/3..4/3 is a minimax polynomial of d = m - 1, which begins with d - d^2 / 2.
  const uint32_t bits = bit_cast<uint32_t>(x), exponent = (bits - 0x3f2aaaabu) & 0xff800000u;
  const float d = bit_cast<float>(bits - exponent) - 1.0f;
  float p = 0.14227296f;
  p = fmaf(p, d, -0.15124592f);
  p = fmaf(p, d, 0.13958003f);
  p = fmaf(p, d, -0.16471909f);
  p = fmaf(p, d, 0.20013089f);
  p = fmaf(p, d, -0.25004256f);
  p = fmaf(p, d, 0.33333179f);
  p = fmaf(p, d, -0.5f);
  const float log_m = fmaf(p, d * d, d);
  const auto n = static_cast<float>(static_cast<int32_t>(exponent)); // times 2^23
  return fmaf(n, 0.693147181f * 0x1p-23f, fmaf(x, 0.0f, log_m));
#else
  constexpr uint32_t root = 0x3f3504f3u; // sqrt(1/2)
  const uint32_t bits = bit_cast<uint32_t>(x);
  const int32_t n = static_cast<int32_t>(bits - root) >> 23;
  const float m = bit_cast<float>(bits - (static_cast<uint32_t>(n) << 23));
  const float power = static_cast<float>(n);
  const float sum = power * 0.693359375f + (twice_atanh<5>((m - 1) / (m + 1)) - power * 2.12194440e-4f);
  return x < INFINITY ? sum : x;
#endif
}

GRADSCALE_HOST_DEVICE double log_normal(double x) {
  constexpr uint64_t root = 0x3fe6a09e667f3bcdu; // sqrt(1/2)
  const uint64_t bits = bit_cast<uint64_t>(x);
  const int32_t n = static_cast<int32_t>(static_cast<int64_t>(bits - root) >> 52);
  const double m = bit_cast<double>(bits - (static_cast<uint64_t>(static_cast<int64_t>(n)) << 52));
  const double power = n;
  const double sum =
      power * 6.93147180369123816490e-01 + (twice_atanh<11>((m - 1) / (m + 1)) + power * 1.90821492927058770002e-10);
  return x < static_cast<double>(INFINITY) ? sum : x;
}

// weight * x, and 0 if the weight is 0, also for an infinite x.
template <class T>
GRADSCALE_HOST_DEVICE T product(T weight, T x) {
  return weight == T(0) ? T(0) : weight * x;
}

// Ignores NaN. One instruction for float; a comparison and a selection would be two.
template <class T>
GRADSCALE_HOST_DEVICE T larger(T a, T b) {
  return std::fmax(a, b);
}

// The magnitude of a finite number; NaN for others, which `larger` ignores.
template <class T>
GRADSCALE_HOST_DEVICE T finite_magnitude(T x) {
  return x * T(0) + std::abs(x);
}

// log(1 + e) for e in 0..1 without branches or library calls: 2 atanh(e / (2 + e)), whose argument is at most 1/3, by
// its series. Relative error 1e-7 in float, 4e-16 in double.
template <class T>
GRADSCALE_HOST_DEVICE T log1p_unit(T e) {
  constexpr int terms = sizeof(T) == 8 ? 17 : 8;
  return twice_atanh<terms>(e / (T(2) + e));
}

} // namespace gradscale
