// The number types of PTX, and how a register of 8 bytes stores them.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace ptx {

using std::string;
using std::string_view;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

[[noreturn]] inline void fail(const string& message) {
  throw std::runtime_error(message);
}

enum class Type {
  none,
  pred,
  b8,
  u8,
  s8,
  b16,
  u16,
  s16,
  f16,
  bf16,
  f16x2,
  bf16x2,
  b32,
  u32,
  s32,
  f32,
  b64,
  u64,
  s64,
  f64
};

Type type_of(string_view name); // none if it is not a type
size_t bytes_of(Type type);
bool is_float(Type type);

// A float of 16 bits that stores `mantissa` bits of its mantissa. Arithmetic is done in double and rounded once.
template <int mantissa, int bias>
struct Small {
  u16 bits = 0;

  Small() = default;
  explicit Small(double value, int mode = FE_TONEAREST);
  operator double() const;

  static constexpr u32 infinity() {
    return ((1 << (15 - mantissa)) - 1) << mantissa;
  }
};
using Half = Small<10, 15>;
using BFloat = Small<7, 127>;
extern template struct Small<10, 15>;
extern template struct Small<7, 127>;

template <class T>
constexpr bool is_floating = std::is_floating_point_v<T> || std::is_same_v<T, Half> || std::is_same_v<T, BFloat>;

template <class T>
T value_of(u64 bits) {
  T value;
  memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

template <class T>
u64 bits_of(T value) {
  u64 bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

} // namespace ptx
