// Moves and conversions.
#include "assembler.h"
#include "operations.h"

#include <algorithm>
#include <limits>

namespace ptx {

namespace {

void copy(Warp& w, const Instruction& i, u32 m) {
  const u64* const from = w.lanes(i.s[0]);
  u64* const to = w.lanes(i.d[0]);
  each(m, [&](int l) { to[l] = from[l]; });
}

void copy_predicate(Warp& w, const Instruction& i, u32 m) {
  put_predicate(w, i.p[0], w.predicates[i.s[0]], m);
}

u64 part_mask(const Instruction& i) {
  const int bits = static_cast<int>(8 * bytes_of(i.type)) / i.count;
  return (u64(1) << bits) - 1;
}

void pack(Warp& w, const Instruction& i, u32 m) {
  const u64 part = part_mask(i);
  each(m, [&](int l) {
    u64 r = 0;
    for (int k = 0; k < i.count; ++k) {
      r |= (w.lanes(i.s[k])[l] & part) << std::popcount(part) * k;
    }
    w.lanes(i.d[0])[l] = r;
  });
}

void unpack(Warp& w, const Instruction& i, u32 m) {
  const u64 part = part_mask(i);
  each(m, [&](int l) {
    const u64 whole = w.lanes(i.s[0])[l];
    for (int k = 0; k < i.count; ++k) {
      w.lanes(i.d[k])[l] = whole >> std::popcount(part) * k & part;
    }
  });
}

double rounded_to_whole(int mode, double x) {
  switch (mode) {
    case FE_TONEAREST:
      return std::nearbyint(x);
    case FE_TOWARDZERO:
      return std::trunc(x);
    case FE_DOWNWARD:
      return std::floor(x);
    default:
      return std::ceil(x);
  }
}

template <class D>
D to_integer(const Instruction& i, double x) {
  using Limits = std::numeric_limits<D>;
  const double whole = rounded_to_whole(i.mode, x);
  const double low = static_cast<double>(Limits::min()), past = 2.0 * static_cast<double>(Limits::max() / 2 + 1);
  if (whole != whole) {
    return 0;
  }
  return whole < low ? Limits::min() : whole >= past ? Limits::max() : static_cast<D>(whole);
}

template <class D, class S>
D saturated_to(S x) {
  const __int128 wide = x, low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
  return static_cast<D>(std::clamp(wide, low, high));
}

template <class D, class S>
D converted(const Instruction& i, S x) {
  if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
    return i.sat ? saturated_to<D>(x) : static_cast<D>(x);
  } else if constexpr (std::is_integral_v<D>) {
    return to_integer<D>(i, static_cast<double>(x));
  } else if constexpr (std::is_floating_point_v<D>) {
    constexpr bool wide = std::is_arithmetic_v<S>; // not a 16-bit float
    D r = static_cast<D>(static_cast<std::conditional_t<wide, S, double>>(x));
    if (i.integral) {
      r = static_cast<D>(rounded_to_whole(i.mode, static_cast<double>(r)));
    }
    return finish(i, r);
  } else {
    double wide = static_cast<double>(x);
    wide = i.integral ? rounded_to_whole(i.mode, wide) : wide;
    return D(i.sat ? saturated(wide) : wide, i.integral ? FE_TONEAREST : i.mode);
  }
}

template <class D, class S>
void convert_lanes(Warp& w, const Instruction& i, u32 m) {
  const bool directed = i.mode != FE_TONEAREST && std::is_floating_point_v<D> && !i.integral;
  if (directed) {
    fesetround(i.mode);
  }
  const u64* const from = w.lanes(i.s[0]);
  u64* const to = w.lanes(i.d[0]);
  each(m, [&](int l) {
    const D r = converted<D, S>(i, start(i, value_of<S>(from[l])));
    if constexpr (std::is_integral_v<D> && std::is_signed_v<D>) {
      to[l] = static_cast<u64>(static_cast<s64>(r)); // the register may be wider than D
    } else {
      to[l] = bits_of(r);
    }
  });
  if (directed) {
    fesetround(FE_TONEAREST);
  }
}

template <class D>
Run conversion_to(Type from) {
  switch (from) {
    case Type::u8:
      return convert_lanes<D, u8>;
    case Type::s8:
      return convert_lanes<D, s8>;
    case Type::u16:
      return convert_lanes<D, u16>;
    case Type::s16:
      return convert_lanes<D, s16>;
    case Type::u32:
      return convert_lanes<D, u32>;
    case Type::s32:
      return convert_lanes<D, s32>;
    case Type::u64:
      return convert_lanes<D, u64>;
    case Type::s64:
      return convert_lanes<D, s64>;
    case Type::f16:
      return convert_lanes<D, Half>;
    case Type::bf16:
      return convert_lanes<D, BFloat>;
    case Type::f32:
      return convert_lanes<D, float>;
    case Type::f64:
      return convert_lanes<D, double>;
    default:
      return nullptr;
  }
}

Run conversion(Type to, Type from) {
  switch (to) {
    case Type::u8:
      return conversion_to<u8>(from);
    case Type::s8:
      return conversion_to<s8>(from);
    case Type::u16:
      return conversion_to<u16>(from);
    case Type::s16:
      return conversion_to<s16>(from);
    case Type::u32:
      return conversion_to<u32>(from);
    case Type::s32:
      return conversion_to<s32>(from);
    case Type::u64:
      return conversion_to<u64>(from);
    case Type::s64:
      return conversion_to<s64>(from);
    case Type::f16:
      return conversion_to<Half>(from);
    case Type::bf16:
      return conversion_to<BFloat>(from);
    case Type::f32:
      return conversion_to<float>(from);
    case Type::f64:
      return conversion_to<double>(from);
    default:
      return nullptr;
  }
}

template <class D>
void convert_two(Warp& w, const Instruction& i, u32 m) { // the first source goes into the upper half
  each(m, [&](int l) {
    const u32 high = D(get<float>(w, i.s[0], l), i.mode).bits, low = D(get<float>(w, i.s[1], l), i.mode).bits;
    put<u32>(w, i.d[0], l, high << 16 | low);
  });
}

void cvt(Assembler& a) {
  for (const string_view word : a.words) {
    a.i.integral = a.i.integral || word == "rni" || word == "rzi" || word == "rmi" || word == "rpi";
  }
  a.has("rni");
  a.rounding();
  a.types();
  if (a.i.type == Type::f16x2 || a.i.type == Type::bf16x2) {
    a.simple(2);
    a.done(
        a.i.from != Type::f32 || a.i.sat ? nullptr
        : a.i.type == Type::f16x2        ? convert_two<Half>
                                         : convert_two<BFloat>,
        convert);
    return;
  }
  a.simple(1);
  a.done(conversion(a.i.type, a.i.from), is_float(a.i.type) || is_float(a.i.from) ? convert : integer);
}

void mov(Assembler& a) {
  a.types();
  a.need(2);
  if (a.i.type == Type::pred) {
    a.i.p[0] = a.predicate(a.o[0]);
    a.i.s[0] = a.predicate(a.o[1]);
    a.done(copy_predicate, move);
    return;
  }
  const bool unpacks = a.o[0].kind == Operand::list, packs = a.o[1].kind == Operand::list;
  const std::vector<Operand> to = unpacks ? a.o[0].parts : std::vector<Operand>{a.o[0]};
  const std::vector<Operand> from = packs ? a.o[1].parts : std::vector<Operand>{a.o[1]};
  if (to.size() > 8 || from.size() > 8) {
    a.unknown("too many parts");
  }
  a.i.count = static_cast<s8>(std::max(to.size(), from.size()));
  for (size_t k = 0; k < to.size(); ++k) {
    a.i.d[k] = a.destination(to[k]);
  }
  for (size_t k = 0; k < from.size(); ++k) {
    a.i.s[k] = a.source(from[k]);
  }
  a.done(unpacks ? unpack : packs ? pack : copy, move);
}

} // namespace

void add_conversions(Instructions& all) {
  all.insert({{"cvt", cvt}, {"mov", mov}});
}

} // namespace ptx
