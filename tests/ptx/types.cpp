#include "types.h"

#include <algorithm>
#include <unordered_map>

namespace ptx {

Type type_of(string_view name) {
  static const std::unordered_map<string_view, Type> names = {
      {"pred", Type::pred},
      {"b8", Type::b8},
      {"u8", Type::u8},
      {"s8", Type::s8},
      {"b16", Type::b16},
      {"u16", Type::u16},
      {"s16", Type::s16},
      {"f16", Type::f16},
      {"bf16", Type::bf16},
      {"f16x2", Type::f16x2},
      {"bf16x2", Type::bf16x2},
      {"b32", Type::b32},
      {"u32", Type::u32},
      {"s32", Type::s32},
      {"f32", Type::f32},
      {"b64", Type::b64},
      {"u64", Type::u64},
      {"s64", Type::s64},
      {"f64", Type::f64}};
  const auto found = names.find(name);
  return found == names.end() ? Type::none : found->second;
}

size_t bytes_of(Type type) {
  switch (type) {
    case Type::b8:
    case Type::u8:
    case Type::s8:
    case Type::pred:
      return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
      return 8;
    default:
      return 4;
  }
}

bool is_float(Type type) {
  return type == Type::f32 || type == Type::f64 || type == Type::f16 || type == Type::bf16 || type == Type::f16x2 ||
         type == Type::bf16x2;
}

template <int mantissa, int bias>
Small<mantissa, bias>::Small(double value, int mode) {
  const bool negative = std::signbit(value);
  const u16 sign = negative ? 0x8000 : 0;
  if (value != value) {
    bits = 0x7fff;
    return;
  }
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) {
    bits = sign | infinity();
    return;
  }
  const int exponent = magnitude == 0 ? 1 - bias : std::max(std::ilogb(magnitude), 1 - bias);
  const double units = std::ldexp(magnitude, mantissa - exponent); // exact
  double whole = std::floor(units);
  const double rest = units - whole;
  const bool up = mode == FE_TONEAREST    ? rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) == 1)
                  : mode == FE_TOWARDZERO ? false
                                          : rest > 0 && negative == (mode == FE_DOWNWARD);
  whole += up;
  const u32 joined = static_cast<u32>(whole) + (static_cast<u32>(exponent + bias - 1) << mantissa);
  const bool to_largest = joined >= infinity() && (mode == FE_TOWARDZERO || (mode == FE_UPWARD && negative) ||
                                                   (mode == FE_DOWNWARD && !negative));
  bits = static_cast<u16>(sign | (to_largest ? infinity() - 1 : std::min<u32>(joined, infinity())));
}

template <int mantissa, int bias>
Small<mantissa, bias>::operator double() const {
  constexpr int largest = (1 << (15 - mantissa)) - 1;
  const int exponent = bits >> mantissa & largest;
  const int fraction = bits & ((1 << mantissa) - 1);
  const double magnitude = exponent == largest ? (fraction ? NAN : INFINITY)
                           : exponent          ? std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa)
                                               : std::ldexp(fraction, 1 - bias - mantissa);
  return bits & 0x8000 ? -magnitude : magnitude;
}

template struct Small<10, 15>;
template struct Small<7, 127>;

} // namespace ptx
