// Sums, products, quotients, minima, maxima and signs, of integers and floats.
#include "assembler.h"
#include "operations.h"

namespace ptx {

namespace {

PTX_OPERATION(Add, (T a, T b), return static_cast<T>(a + b);)
PTX_OPERATION(Sub, (T a, T b), return static_cast<T>(a - b);)
PTX_OPERATION(Mul, (T a, T b), return static_cast<T>(a * b);)
PTX_OPERATION(MadLo, (T a, T b, T c), return static_cast<T>(a * b + c);)
PTX_OPERATION(MinNan, (T a, T b), return unordered(a) ? a : unordered(b) ? b : less(b, a) ? b : a;)
PTX_OPERATION(MaxNan, (T a, T b), return unordered(a) ? a : unordered(b) ? b : less(a, b) ? b : a;)
PTX_OPERATION(CopySign, (T a, T b), return std::copysign(b, a);)

struct Fma {
  template <class T>
  static T f(T a, T b, T c) {
    if constexpr (std::is_floating_point_v<T>) {
      return std::fma(a, b, c);
    } else {
      return static_cast<T>(std::fma(static_cast<double>(a), static_cast<double>(b), static_cast<double>(c)));
    }
  }
};

struct MulHi {
  template <class T>
  static T f(T a, T b) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<Wide>(a) * b) >> (8 * sizeof(T)));
  }
};
PTX_OPERATION(MadHi, (T a, T b, T c), return static_cast<T>(MulHi::f<T>(a, b) + c);)

template <class T>
T negative(T a) {
  return static_cast<T>(0 - static_cast<u64>(a));
}

struct Div {
  template <class T>
  static T f(T a, T b) {
    if constexpr (is_floating<T>) {
      return static_cast<T>(a / b);
    } else if (b == 0) {
      return static_cast<T>(-1);
    } else {
      return std::is_signed_v<T> && b == static_cast<T>(-1) ? negative(a) : static_cast<T>(a / b);
    }
  }
};
PTX_OPERATION(Rem,
              (T a, T b),
              return b == 0                                           ? a
                     : std::is_signed_v<T> && b == static_cast<T>(-1) ? T(0)
                                                                      : static_cast<T>(a % b);)

struct Neg {
  template <class T>
  static T f(T a) {
    if constexpr (std::is_floating_point_v<T>) {
      return -a;
    } else if constexpr (is_floating<T>) {
      a.bits ^= 0x8000;
      return a;
    } else {
      return negative(a);
    }
  }
};

struct Abs {
  template <class T>
  static T f(T a) {
    if constexpr (std::is_floating_point_v<T>) {
      return std::fabs(a);
    } else if constexpr (is_floating<T>) {
      a.bits &= 0x7fff;
      return a;
    } else {
      return a < 0 ? negative(a) : a;
    }
  }
};

// The product of two numbers, in twice their width. With `sum`, a third number is added.
template <bool sum>
struct Wide {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    using Signed = std::conditional_t<sizeof(T) == 4, s64, s32>;
    using D = std::conditional_t<std::is_signed_v<T>, Signed, std::make_unsigned_t<Signed>>;
    each(m, [&](int l) {
      const D product = static_cast<D>(get<T>(w, i.s[0], l)) * static_cast<D>(get<T>(w, i.s[1], l));
      put<D>(w, i.d[0], l, sum ? product + get<D>(w, i.s[2], l) : product);
    });
  }
};

template <bool sum>
Run wide(Type type) {
  return bytes_of(type) == 8 ? nullptr : for_integers<Wide<sum>>(type);
}

// An operation that does not round to nearest. The compiler cannot see into fesetround(), so it moves no read of a
// register before the first call, and no write after the second.
template <class K>
struct Directed {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    fesetround(i.mode);
    K::template run<T>(w, i, m);
    fesetround(FE_TONEAREST);
  }
};

template <class K>
Run rounded(const Instruction& i) {
  return i.mode == FE_TONEAREST ? for_all_floats<K>(i.type) : for_floats<Directed<K>>(i.type);
}

Class class_of(Type type, bool other) {
  return type == Type::f32 ? (other ? fp32_other : fp32) : type == Type::f64 ? (other ? fp64_other : fp64) : half_;
}

template <class Op>
void sum(Assembler& a) {
  const bool floats = a.has_floats();
  if (floats) {
    a.rounding();
  }
  a.types();
  a.simple(2);
  a.done(
      floats ? rounded<Binary<Op>>(a.i) : for_integers<Binary<Op>>(a.i.type),
      floats ? class_of(a.i.type, false) : integer);
}

void product(Assembler& a) {
  if (a.has_floats()) {
    sum<Mul>(a);
    return;
  }
  const bool is_wide = a.has("wide"), high = a.has("hi");
  a.has("lo");
  a.types();
  a.simple(2);
  a.done(
      is_wide ? wide<false>(a.i.type)
      : high  ? for_integers<Binary<MulHi>>(a.i.type)
              : for_integers<Binary<Mul>>(a.i.type),
      integer);
}

void product_and_sum(Assembler& a) {
  if (a.has_floats()) {
    a.unknown("mad of floats is not known");
  }
  const bool is_wide = a.has("wide"), high = a.has("hi");
  a.has("lo");
  a.types();
  a.simple(3);
  a.done(
      is_wide ? wide<true>(a.i.type)
      : high  ? for_integers<Ternary<MadHi>>(a.i.type)
              : for_integers<Ternary<MadLo>>(a.i.type),
      integer);
}

void fused(Assembler& a) {
  a.rounding();
  a.types();
  a.simple(3);
  a.done(rounded<Ternary<Fma>>(a.i), class_of(a.i.type, false));
}

void quotient(Assembler& a) {
  const bool floats = a.has_floats(), approximate = a.has("approx") || a.has("full");
  if (floats) {
    a.rounding();
  }
  a.types();
  a.simple(2);
  a.done(floats ? rounded<Binary<Div>>(a.i) : for_integers<Binary<Div>>(a.i.type), approximate ? special : division);
}

void remainder(Assembler& a) {
  a.types();
  a.simple(2);
  a.done(for_integers<Binary<Rem>>(a.i.type), division);
}

template <class Op, class OpNan>
void extremum(Assembler& a) {
  const bool nan = a.has("NaN");
  a.i.ftz = a.has("ftz");
  a.types();
  a.simple(2);
  if (is_float(a.i.type)) {
    a.done(
        nan ? for_all_floats<Binary<OpNan>>(a.i.type) : for_all_floats<Binary<Op>>(a.i.type), class_of(a.i.type, true));
  } else {
    a.done(for_integers<Binary<Op>>(a.i.type), integer);
  }
}

template <class Op>
void sign(Assembler& a) {
  a.i.ftz = a.has("ftz");
  a.types();
  a.simple(1);
  const bool floats = is_float(a.i.type);
  a.done(
      floats ? for_all_floats<Unary<Op>>(a.i.type) : for_integers<Unary<Op>>(a.i.type),
      floats ? class_of(a.i.type, true) : integer);
}

void copysign(Assembler& a) {
  a.types();
  a.simple(2);
  a.done(for_floats<Binary<CopySign>>(a.i.type), class_of(a.i.type, true));
}

} // namespace

void add_arithmetic(Instructions& all) {
  all.insert(
      {{"add", sum<Add>},
       {"sub", sum<Sub>},
       {"mul", product},
       {"mad", product_and_sum},
       {"fma", fused},
       {"div", quotient},
       {"rem", remainder},
       {"min", extremum<Min, MinNan>},
       {"max", extremum<Max, MaxNan>},
       {"neg", sign<Neg>},
       {"abs", sign<Abs>},
       {"copysign", copysign}});
}

} // namespace ptx
