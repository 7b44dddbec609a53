// Element types of the kernels. bfloat16 and IEEE half are raw bits, converted without branches so that loops over them
// vectorise on any CPU.
#pragma once

#include "port.h"

namespace gradscale {

struct BFloat16Bits {
  uint16_t bits;
};

struct HalfBits {
  uint16_t bits;
};

// int64 is the type of class indices only; nothing is computed in it.
enum class Element : int32_t { float64 = 0, float32 = 1, bfloat16 = 2, float16 = 3, int64 = 4 };

// The type in which elements of type T are accumulated.
template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
constexpr Element kElementOf = std::is_same_v<T, double>         ? Element::float64
                               : std::is_same_v<T, float>        ? Element::float32
                               : std::is_same_v<T, BFloat16Bits> ? Element::bfloat16
                               : std::is_same_v<T, HalfBits>     ? Element::float16
                                                                 : Element::int64;

// The C++ type of an element, as it is written in the names of kernels.
inline const char* type_name(Element element) {
  constexpr const char* kNames[] = {"double", "float", "BFloat16Bits", "HalfBits", "int64_t"};
  return kNames[static_cast<int32_t>(element)];
}

GRADSCALE_HOST_DEVICE int64_t element_size(Element element) {
  return element == Element::float64 || element == Element::int64 ? 8 : (element == Element::float32 ? 4 : 2);
}

// Calls function(T()) with the C++ type T of a floating-point element; does nothing for int64.
#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#pragma nv_exec_check_disable // the function may be host-only
#endif
template <class Function>
GRADSCALE_DISPATCH void dispatch_element(Element element, Function function) {
  switch (element) {
    case Element::float64:
      return function(double());
    case Element::float32:
      return function(float());
    case Element::bfloat16:
      return function(BFloat16Bits());
    case Element::float16:
      return function(HalfBits());
    case Element::int64:
      return;
  }
}

template <class T>
GRADSCALE_HOST_DEVICE T to_accumulate(T value) {
  return value;
}

GRADSCALE_HOST_DEVICE float to_accumulate(BFloat16Bits value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// The shifted exponent is 112 too small. Multiplying by 2^112 corrects it, for subnormals too.
GRADSCALE_HOST_DEVICE float to_accumulate(HalfBits value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t nonfinite = magnitude | 0x7f800000u;
  return bit_cast<float>(sign | (magnitude >= 0x0f800000u ? nonfinite : finite));
#endif
}

template <class T, class A>
GRADSCALE_HOST_DEVICE T from_accumulate(A value) {
  static_assert(std::is_same_v<T, A>);
  return value;
}

// Rounds to nearest, ties to even, by adding just under half a unit of the last bit that is kept.
template <>
GRADSCALE_HOST_DEVICE BFloat16Bits from_accumulate<BFloat16Bits, float>(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return {bits};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
#endif
}

template <>
GRADSCALE_HOST_DEVICE HalfBits from_accumulate<HalfBits, float>(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return {bits};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias the exponent and round in the integer; a carry correctly increments the exponent.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 aligns the mantissa so that the hardware rounds at the right bit.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half; // 65520 and above round to infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return {static_cast<uint16_t>(sign | half)};
#endif
}

// ---- Memory that kernels read and write, as plain pointers ----------------------------------------------------------

// Scalars [B] or [B, n], of the type of the losses: float or double.
struct Slab {
  void* data = nullptr; // null: not wanted
  int64_t stride = 0;
  bool is_double = false;

  // The slab that begins at an element.
  GRADSCALE_HOST_DEVICE Slab from(int64_t element) const {
    return {static_cast<char*>(data) + element * (is_double ? 8 : 4), stride, is_double};
  }
  GRADSCALE_HOST_DEVICE void store(int64_t row, double value) const {
    if (is_double) {
      static_cast<double*>(data)[row * stride] = value;
    } else {
      static_cast<float*>(data)[row * stride] = static_cast<float>(value);
    }
  }
  // Stores `count` rows from row `first` on.
  template <class A>
  void store(int64_t first, int64_t count, const A* values) const {
    if (count > 0 && stride == 1 && is_double == std::is_same_v<A, double>) { // an empty batch has no memory
      memcpy(from(first).data, values, count * sizeof(A));
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      store(first + i, static_cast<double>(values[i]));
    }
  }
  GRADSCALE_HOST_DEVICE double load(int64_t row) const {
    return is_double ? static_cast<const double*>(data)[row * stride] : static_cast<const float*>(data)[row * stride];
  }
};

// One row per sample, with contiguous elements and any stride between rows.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0; // elements from one sample to the next
  Element element = Element::float32;

  // An element as double; 0 if it is an int64.
  GRADSCALE_HOST_DEVICE double load(int64_t row, int64_t column = 0) const {
    const int64_t index = row * stride + column;
    if (element == Element::float32) { // the usual type
      return static_cast<const float*>(data)[index];
    }
    double value = 0;
    dispatch_element(
        element, [&](auto type) { value = to_accumulate(static_cast<const decltype(type)*>(data)[index]); });
    return value;
  }
};

} // namespace gradscale
