// Logic, shifts, and counts of bits.
#include "assembler.h"
#include "operations.h"

#include <algorithm>

namespace ptx {

namespace {

PTX_OPERATION(And, (T a, T b), return static_cast<T>(a & b);)
PTX_OPERATION(Or, (T a, T b), return static_cast<T>(a | b);)
PTX_OPERATION(Xor, (T a, T b), return static_cast<T>(a ^ b);)
PTX_OPERATION(Not, (T a), return static_cast<T>(~a);)
PTX_OPERATION(Cnot, (T a), return a == 0 ? 1 : 0;)

struct Reversed {
  template <class T>
  static T f(T a) {
    T r = 0;
    for (size_t k = 0; k < 8 * sizeof(T); ++k) {
      r = static_cast<T>(r << 1 | (a >> k & 1));
    }
    return r;
  }
};

template <bool left>
struct Shift {
  template <class T>
  static T shifted(T a, u32 by) {
    if (by >= 8 * sizeof(T)) {
      return static_cast<T>(!left && a < 0 ? -1 : 0);
    }
    return static_cast<T>(left ? a << by : a >> by);
  }
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    each(m, [&](int l) { put<T>(w, i.d[0], l, shifted(get<T>(w, i.s[0], l), get<u32>(w, i.s[1], l))); });
  }
};

enum Counted { population, leading_zeros, first_bit, first_bit_shift };

struct Count {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    using U = std::make_unsigned_t<T>;
    each(m, [&](int l) {
      const T a = get<T>(w, i.s[0], l);
      const bool finds = i.variant >= first_bit;
      const U bits = static_cast<U>(std::is_signed_v<T> && finds && a < 0 ? ~a : a);
      u32 r = i.variant == population ? std::popcount(bits) : std::countl_zero(bits);
      if (finds) {
        r = bits == 0 ? 0xffffffff : i.variant == first_bit_shift ? r : 8 * sizeof(T) - 1 - r;
      }
      put<u32>(w, i.d[0], l, r);
    });
  }
};

struct ExtractBits {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    using U = std::make_unsigned_t<T>;
    constexpr u32 size = 8 * sizeof(T);
    each(m, [&](int l) {
      const T a = get<T>(w, i.s[0], l);
      const u32 from = get<u32>(w, i.s[1], l) & 0xff, length = get<u32>(w, i.s[2], l) & 0xff;
      U r = 0;
      const bool sign = std::is_signed_v<T> && length != 0 && (a >> std::min(from + length - 1, size - 1) & 1);
      for (u32 k = 0; k < size; ++k) {
        const bool bit = k < length && from + k < size ? (a >> (from + k) & 1) != 0 : sign;
        r |= static_cast<U>(bit) << k;
      }
      put(w, i.d[0], l, r);
    });
  }
};

struct InsertBits {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    each(m, [&](int l) {
      const T a = get<T>(w, i.s[0], l);
      T r = get<T>(w, i.s[1], l);
      const u32 from = get<u32>(w, i.s[2], l) & 0xff, length = get<u32>(w, i.s[3], l) & 0xff;
      for (u32 k = 0; k < length && from + k < 8 * sizeof(T); ++k) {
        r = static_cast<T>((r & ~(T(1) << (from + k))) | (a >> k & 1) << (from + k));
      }
      put<T>(w, i.d[0], l, r);
    });
  }
};

u64 joined(Warp& w, const Instruction& i, int lane) {
  return get<u32>(w, i.s[0], lane) | static_cast<u64>(get<u32>(w, i.s[1], lane)) << 32;
}

void permute(Warp& w, const Instruction& i, u32 m) {
  each(m, [&](int l) {
    const u64 both = joined(w, i, l);
    const u32 selector = get<u32>(w, i.s[2], l);
    u32 r = 0;
    for (int k = 0; k < 4; ++k) {
      const u32 of = selector >> 4 * k & 0xf;
      u32 byte = static_cast<u32>(both >> 8 * (of & 7) & 0xff);
      byte = of & 8 ? (byte & 0x80 ? 0xff : 0) : byte;
      r |= byte << 8 * k;
    }
    put<u32>(w, i.d[0], l, r);
  });
}

enum Funnel { to_left = 1, wraps = 2 };

void funnel(Warp& w, const Instruction& i, u32 m) {
  each(m, [&](int l) {
    const u64 both = joined(w, i, l);
    const u32 asked = get<u32>(w, i.s[2], l), by = i.variant & wraps ? asked & 31 : std::min(asked, 32u);
    const u64 r = both >> (i.variant & to_left ? 32 - by : by);
    put<u32>(w, i.d[0], l, static_cast<u32>(r));
  });
}

void ternary_logic(Warp& w, const Instruction& i, u32 m) {
  each(m, [&](int l) {
    const u32 a = get<u32>(w, i.s[0], l), b = get<u32>(w, i.s[1], l), c = get<u32>(w, i.s[2], l);
    u32 r = 0;
    for (int k = 0; k < 8; ++k) {
      if (i.variant >> k & 1) {
        r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
      }
    }
    put<u32>(w, i.d[0], l, r);
  });
}

// variant: 0 for `and`, 1 for `or`, 2 for `xor`, 3 for `not`.
void predicate_logic(Warp& w, const Instruction& i, u32 m) {
  const u32 a = w.predicates[i.s[0]], b = w.predicates[i.s[1]];
  const u32 r = i.variant == 0 ? a & b : i.variant == 1 ? a | b : i.variant == 2 ? a ^ b : ~a;
  put_predicate(w, i.p[0], r, m);
}

template <class Op, int variant, size_t sources>
void binary_logic(Assembler& a) {
  a.types();
  if (a.i.type != Type::pred) {
    a.simple(sources);
    if constexpr (sources == 1) {
      a.done(for_bits<Unary<Op>>(a.i.type), logic);
    } else {
      a.done(for_bits<Binary<Op>>(a.i.type), logic);
    }
    return;
  }
  a.need(1 + sources);
  a.i.p[0] = a.predicate(a.o[0]);
  for (size_t k = 0; k < sources; ++k) {
    a.i.s[k] = a.predicate(a.o[1 + k]);
    if (a.o[1 + k].negated) {
      a.unknown("a negated predicate");
    }
  }
  a.i.variant = variant;
  a.done(predicate_logic, compare);
}

template <class K, size_t sources>
void bit_operation(Assembler& a) {
  a.types();
  a.simple(sources);
  a.done(for_bits<K>(a.i.type), logic);
}

template <Counted counted>
void count(Assembler& a) {
  a.i.variant = counted == first_bit && a.has("shiftamt") ? first_bit_shift : counted;
  bit_operation<Count, 1>(a);
}

void insert(Assembler& a) {
  a.types();
  a.simple(4);
  a.done(for_bits<InsertBits>(a.i.type), logic);
}

void prmt(Assembler& a) {
  a.types();
  a.simple(3);
  a.done(permute, logic);
}

void shf(Assembler& a) {
  a.i.variant = static_cast<s16>((a.has("l") ? to_left : 0) | (a.has("wrap") ? wraps : 0));
  a.has("r");
  a.has("clamp");
  a.types();
  a.simple(3);
  a.done(funnel, logic);
}

void lop3(Assembler& a) {
  a.types();
  a.need(5);
  a.i.variant = static_cast<s16>(a.o[4].bits);
  a.o.pop_back();
  a.simple(3);
  a.done(ternary_logic, logic);
}

} // namespace

void add_bits(Instructions& all) {
  all.insert(
      {{"and", binary_logic<And, 0, 2>},
       {"or", binary_logic<Or, 1, 2>},
       {"xor", binary_logic<Xor, 2, 2>},
       {"not", binary_logic<Not, 3, 1>},
       {"cnot", bit_operation<Unary<Cnot>, 1>},
       {"brev", bit_operation<Unary<Reversed>, 1>},
       {"shl", bit_operation<Shift<true>, 2>},
       {"shr", bit_operation<Shift<false>, 2>},
       {"popc", count<population>},
       {"clz", count<leading_zeros>},
       {"bfind", count<first_bit>},
       {"bfe", bit_operation<ExtractBits, 3>},
       {"bfi", insert},
       {"prmt", prmt},
       {"shf", shf},
       {"lop3", lop3}});
}

} // namespace ptx
