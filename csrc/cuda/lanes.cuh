// Elements packed in words of registers, approximate functions, and sums and maxima over lanes of a warp.
#pragma once

#include "../formulas/element.h"
#include "device.h"
#include "thread_group.cuh"

namespace gradscale {

// `count` elements that are read and written at once: 2, 4, 8 or 16 bytes.
template <class T, int count>
struct alignas(sizeof(T) * count) Vector {
  static constexpr int kBytes = sizeof(T) * count;
  using Word = std::conditional_t<kBytes == 2, uint16_t, uint32_t>;
  Word words[kBytes / sizeof(Word)];
};

GRADSCALE_DEVICE float low_half(BFloat16Bits, uint32_t word) {
  return bit_cast<float>(word << 16);
}
GRADSCALE_DEVICE float high_half(BFloat16Bits, uint32_t word) {
  return bit_cast<float>(word & 0xffff0000u);
}
GRADSCALE_DEVICE float low_half(HalfBits, uint32_t word) {
  return to_accumulate(HalfBits{static_cast<uint16_t>(word)});
}
GRADSCALE_DEVICE float high_half(HalfBits, uint32_t word) {
  return to_accumulate(HalfBits{static_cast<uint16_t>(word >> 16)});
}

// Two elements in a word, rounded to nearest as by from_accumulate.
GRADSCALE_DEVICE uint32_t halves(BFloat16Bits, float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return from_accumulate<BFloat16Bits, float>(low).bits |
         static_cast<uint32_t>(from_accumulate<BFloat16Bits, float>(high).bits) << 16;
#endif
}
GRADSCALE_DEVICE uint32_t halves(HalfBits, float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return from_accumulate<HalfBits, float>(low).bits | static_cast<uint32_t>(from_accumulate<HalfBits, float>(high).bits)
                                                          << 16;
#endif
}

template <class T, int count>
GRADSCALE_DEVICE void unpack(const Vector<T, count>& packed, float* values) {
#pragma unroll
  for (int k = 0; k < count; ++k) {
    if constexpr (sizeof(T) == 8) {
      const uint64_t bits = packed.words[2 * k] | static_cast<uint64_t>(packed.words[2 * k + 1]) << 32;
      values[k] = static_cast<float>(bit_cast<double>(bits));
    } else if constexpr (sizeof(T) == 4) {
      values[k] = bit_cast<float>(packed.words[k]);
    } else {
      values[k] = k % 2 == 0 ? low_half(T(), packed.words[k / 2]) : high_half(T(), packed.words[k / 2]);
    }
  }
}

template <class T, int count>
GRADSCALE_DEVICE Vector<T, count> packed(const float* values) {
  Vector<T, count> result;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const auto bits = bit_cast<uint64_t>(static_cast<double>(values[k]));
      result.words[2 * k] = static_cast<uint32_t>(bits);
      result.words[2 * k + 1] = static_cast<uint32_t>(bits >> 32);
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      result.words[k] = bit_cast<uint32_t>(values[k]);
    }
  } else if constexpr (count == 1) {
    result.words[0] = from_accumulate<T, float>(values[0]).bits;
  } else {
#pragma unroll
    for (int k = 0; k < count; k += 2) {
      result.words[k / 2] = halves(T(), values[k], values[k + 1]);
    }
  }
  return result;
}

// The larger and the smaller of two 16-bit numbers, in each half of a word. NaN is ignored. Before sm_80, the numbers
// must not be negative, and NaN is larger than any number.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define GRADSCALE_PAIRS(name, T, instruction)                        \
  GRADSCALE_DEVICE uint32_t name(T, uint32_t a, uint32_t b) {        \
    uint32_t result;                                                 \
    asm(instruction " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b)); \
    return result;                                                   \
  }
GRADSCALE_PAIRS(larger_pair, BFloat16Bits, "max.bf16x2")
GRADSCALE_PAIRS(larger_pair, HalfBits, "max.f16x2")
GRADSCALE_PAIRS(smaller_pair, BFloat16Bits, "min.bf16x2")
GRADSCALE_PAIRS(smaller_pair, HalfBits, "min.f16x2")
#undef GRADSCALE_PAIRS
#else
template <class T>
GRADSCALE_DEVICE uint32_t larger_pair(T, uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a : b;
  return (a > b ? a & 0xffff0000 : b & 0xffff0000) | (low & 0xffff);
}
template <class T>
GRADSCALE_DEVICE uint32_t smaller_pair(T, uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffff) < (b & 0xffff) ? a : b;
  return (a < b ? a & 0xffff0000 : b & 0xffff0000) | (low & 0xffff);
}
#endif

// The largest element and the largest magnitude of vectors, which are the elements that a lane loads at once. NaN is
// ignored. From sm_80 on, a word of two 16-bit elements takes one instruction for the maximum and one for the minimum.
template <class T, int count>
class VectorExtremes {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  static constexpr bool kPairs = sizeof(T) == 2 && count % 2 == 0;
#else
  static constexpr bool kPairs = false;
#endif
  static constexpr uint32_t kInfinity = std::is_same_v<T, HalfBits> ? 0x7c007c00u : 0x7f807f80u;
  Vector<T, 2> most_{}, least_{};
  float maximum_ = -INFINITY, magnitude_ = 0;

 public:
  GRADSCALE_DEVICE VectorExtremes() {
    if constexpr (kPairs) {
      most_.words[0] = kInfinity | 0x80008000u;
      least_.words[0] = kInfinity;
    }
  }
  GRADSCALE_DEVICE void add(const Vector<T, count>& vector) {
    if constexpr (kPairs) {
#pragma unroll
      for (uint32_t word : vector.words) {
        most_.words[0] = larger_pair(T(), most_.words[0], word);
        least_.words[0] = smaller_pair(T(), least_.words[0], word);
      }
    } else {
      float x[count];
      unpack(vector, x);
#pragma unroll
      for (float value : x) {
        maximum_ = larger(maximum_, value);
        magnitude_ = larger(magnitude_, std::abs(value));
      }
    }
  }
  GRADSCALE_DEVICE float maximum() const {
    float most[2];
    unpack(most_, most);
    return kPairs ? larger(most[0], most[1]) : maximum_;
  }
  // The largest magnitude. If there were no vectors, it is infinite for pairs, and otherwise 0.
  GRADSCALE_DEVICE float magnitude() const {
    float least[2];
    unpack(least_, least);
    return kPairs ? larger(std::abs(maximum()), std::abs(std::fmin(least[0], least[1]))) : magnitude_;
  }
};

// Replaces element k.
template <class T, int count>
GRADSCALE_DEVICE void set(Vector<T, count>& packed, int k, const Vector<T, 1>& element) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t others = packed.words[k / 2] & (k % 2 == 0 ? 0xffff0000u : 0xffffu);
    packed.words[k / 2] = others | static_cast<uint32_t>(element.words[0]) << (k % 2 * 16);
  } else {
    constexpr int words = sizeof(T) / 4;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      packed.words[words * k + i] = element.words[i];
    }
  }
}

// Loads elements that no thread writes.
template <class T, int count>
GRADSCALE_DEVICE Vector<T, count> load_vector(const T* from) {
  Vector<T, count> result;
  auto& words = result.words;
  const auto address = __cvta_generic_to_global(from);
  if constexpr (sizeof(result) == 2) {
    asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(words[0]) : "l"(address));
  } else if constexpr (sizeof(result) == 4) {
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(words[0]) : "l"(address));
  } else if constexpr (sizeof(result) == 8) {
    asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
  } else {
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address));
  }
  return result;
}

// Loads elements that no thread writes, one by one.
template <class T, int count>
GRADSCALE_DEVICE Vector<T, count> load_elements(const T* from) {
  Vector<T, count> result{};
#pragma unroll
  for (int k = 0; k < count; ++k) {
    set(result, k, load_vector<T, 1>(from + k));
  }
  return result;
}

// Stores all elements in one access; in PTX for the same reason as store16.
template <class T, int count>
GRADSCALE_DEVICE void store_vector(void* to, const Vector<T, count>& packed) {
  const auto address = __cvta_generic_to_global(to);
  const auto& words = packed.words;
  if constexpr (sizeof(packed) == 2) {
    asm volatile("st.global.b16 [%0], %1;" : : "l"(address), "h"(words[0]) : "memory");
  } else if constexpr (sizeof(packed) == 4) {
    asm volatile("st.global.b32 [%0], %1;" : : "l"(address), "r"(words[0]) : "memory");
  } else if constexpr (sizeof(packed) == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" : : "l"(address), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
    store16(to, packed);
  }
}

// Hides from the compiler that it has used this number before, so that it repeats computations instead of keeping their
// results in registers.
template <class T>
GRADSCALE_DEVICE T opaque(T value) {
  static_assert(sizeof(T) == 4);
  auto bits = bit_cast<uint32_t>(value);
  asm("" : "+r"(bits));
  return bit_cast<T>(bits);
}

// 2^x, 0 below -126.
GRADSCALE_DEVICE float approximate_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// exp(x): exactly 1 for 0, and 0 below -87. The error is 2 units in the last place for x near 0, and |x| units farther
// away.
GRADSCALE_DEVICE float approximate_exp(float x) {
  return approximate_exp2(x * static_cast<float>(kLog2E));
}

// Exponentials of a row of logits, relative to its maximum: 1 exactly for the maximum.
struct NaturalExponent {
  float maximum;

  GRADSCALE_DEVICE explicit NaturalExponent(float maximum) : maximum(maximum) {
  }
  GRADSCALE_DEVICE float difference(float x) const {
    return x - maximum;
  }
  GRADSCALE_DEVICE static float exponential(float d) {
    return approximate_exp(d);
  }
};

// The same with differences in units of log(2), in one instruction less. The rounding of `offset` multiplies all
// exponentials by the same factor, up to 2^64, which cancels in a softmax and its logarithm. If the maximum is 2^30 or
// more in magnitude, logits close to it are equal or differ by at least 64, and differences are in units of 1.
struct BinaryExponent {
  float scale, offset;

  GRADSCALE_DEVICE explicit BinaryExponent(float maximum)
      : scale(std::abs(maximum) < 0x1p30f ? static_cast<float>(kLog2E) : 1.0f), offset(-maximum * scale) {
  }
  GRADSCALE_DEVICE float unit() const {
    return scale == 1 ? 1.0f : static_cast<float>(1 / kLog2E);
  }
  GRADSCALE_DEVICE float difference(float x) const {
    return fmaf(x, scale, offset);
  }
  GRADSCALE_DEVICE static float exponential(float d) {
    return approximate_exp2(d);
  }
};

GRADSCALE_DEVICE float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

GRADSCALE_DEVICE float approximate_reciprocal_root(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// erfc(x) for x >= 0, by the Chebyshev fit of "Numerical Recipes" (relative error 1.2e-7). The argument of exp is
// rounded to float, so the relative error is 3e-7 for x up to 1, and 2e-7 x^2 beyond.
GRADSCALE_DEVICE float approximate_erfc(float x) {
  const float t = approximate_reciprocal(1.0f + 0.5f * x);
  float y = 0.17087277f;
  y = y * t - 0.82215223f;
  y = y * t + 1.48851587f;
  y = y * t - 1.13520398f;
  y = y * t + 0.27886807f;
  y = y * t - 0.18628806f;
  y = y * t + 0.09678418f;
  y = y * t + 0.37409196f;
  y = y * t + 1.00002368f;
  y = y * t - 1.26551223f;
  return t * approximate_exp(y - x * x);
}

// ---- Lanes ----------------------------------------------------------------------------------------------------------

// Sums and maxima over the lanes of a warp that own a row together: 1, 2, 4, 8, 16 or 32 neighbours. All lanes of the
// warp take part, and all lanes of a row get the result.

// Maps the bits of floats to integers in the same order, so that one instruction reduces them. NaN comes last, or first
// if its sign bit is set.
GRADSCALE_DEVICE int32_t ordered(int32_t bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Returns a number that is the same in all lanes, in a form that tells the compiler so: branches on it do not diverge.
GRADSCALE_DEVICE int32_t uniform(int32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, value);
#else
  return value;
#endif
}

// No lane may pass NaN: the two implementations treat it differently.
template <int lanes>
GRADSCALE_DEVICE float lane_maximum(float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (lanes == 32) {
    return bit_cast<float>(ordered(__reduce_max_sync(kWholeWarp, ordered(bit_cast<int32_t>(value)))));
  }
#endif
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value = larger(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

template <int lanes, class T>
GRADSCALE_DEVICE T lane_sum(T value) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  }
  return value;
}

// Two sums at once: one half of the lanes adds up a, the other half b.
template <int lanes>
GRADSCALE_DEVICE void lane_sums(float& a, float& b, int lane) {
  if constexpr (lanes > 1) {
    const bool upper = (lane & (lanes / 2)) != 0;
    const float own = (upper ? b : a) + __shfl_xor_sync(kWholeWarp, upper ? a : b, lanes / 2);
    const float sum = lane_sum<lanes / 2>(own);
    const int first = lane & -lanes;
    a = __shfl_sync(kWholeWarp, sum, first);
    b = __shfl_sync(kWholeWarp, sum, first + lanes / 2);
  }
}

template <int lanes, int count>
GRADSCALE_DEVICE void lane_sums(float* sums, int lane) {
#pragma unroll
  for (int i = 0; i + 1 < count; i += 2) {
    lane_sums<lanes>(sums[i], sums[i + 1], lane);
  }
  if constexpr (count % 2 != 0) {
    sums[count - 1] = lane_sum<lanes>(sums[count - 1]);
  }
}

} // namespace gradscale
