// Runs an operation on the lanes of a warp, and chooses its function by type.
#pragma once

#include "warp.h"

#include <cmath>

namespace ptx {

template <class T>
T flushed(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
  }
  return x;
}

template <class T>
T saturated(T x) {
  if constexpr (is_floating<T>) {
    return static_cast<T>(x > 0 ? (x < 1 ? static_cast<double>(x) : 1.0) : 0.0);
  }
  return x;
}

// `finish` applies .ftz and .sat of the instruction to a result; `start` applies .ftz to a source.
template <class T>
T finish(const Instruction& i, T x) {
  if constexpr (is_floating<T>) {
    x = i.ftz ? flushed(x) : x;
    return i.sat ? saturated(x) : x;
  }
  return x;
}
template <class T>
T start(const Instruction& i, T x) {
  return i.ftz ? flushed(x) : x;
}

// Stores f(lane, read) for each lane, where read(bits) is the value of a source.
template <class T, class F>
void compute(Warp& w, const Instruction& i, u32 m, F f) {
  u64* const d = w.lanes(i.d[0]);
  if (is_floating<T> && (i.ftz || i.sat)) {
    each(m, [&](int l) {
      d[l] = bits_of<T>(finish<T>(i, f(l, [&](u64 bits) { return start(i, value_of<T>(bits)); })));
    });
  } else {
    each(m, [&](int l) { d[l] = bits_of<T>(f(l, [](u64 bits) { return value_of<T>(bits); })); });
  }
}

template <class Op>
struct Unary {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    const u64* const a = w.lanes(i.s[0]);
    compute<T>(w, i, m, [&](int l, auto read) { return Op::template f<T>(read(a[l])); });
  }
};

template <class Op>
struct Binary {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    const u64 *const a = w.lanes(i.s[0]), *const b = w.lanes(i.s[1]);
    compute<T>(w, i, m, [&](int l, auto read) { return Op::template f<T>(read(a[l]), read(b[l])); });
  }
};

template <class Op>
struct Ternary {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    const u64 *const a = w.lanes(i.s[0]), *const b = w.lanes(i.s[1]), *const c = w.lanes(i.s[2]);
    compute<T>(w, i, m, [&](int l, auto read) { return Op::template f<T>(read(a[l]), read(b[l]), read(c[l])); });
  }
};

// An operation on both halves of a register.
template <class K>
struct Paired {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    Warp narrow;
    narrow.launch = w.launch;
    narrow.registers.resize(4 * 32);
    Instruction part = i;
    for (int half = 0; half < 2; ++half) {
      for (u32 k = 0; k < 3; ++k) {
        part.s[k] = k;
        each(m, [&](int l) { narrow.lanes(k)[l] = w.lanes(i.s[k])[l] >> 16 * half & 0xffff; });
      }
      part.d[0] = 3;
      K::template run<T>(narrow, part, m);
      // The first result stays in bits 32 to 47 until the second is known: the destination may also be a source.
      each(m, [&](int l) {
        u64& to = w.lanes(i.d[0])[l];
        to = half == 0 ? (to & 0xffffffff) | narrow.lanes(3)[l] << 32 : to >> 32 | narrow.lanes(3)[l] << 16;
      });
    }
  }
};

template <class K>
Run for_floats(Type type) {
  switch (type) {
    case Type::f32:
      return &K::template run<float>;
    case Type::f64:
      return &K::template run<double>;
    default:
      return nullptr;
  }
}

template <class K>
Run for_all_floats(Type type) {
  switch (type) {
    case Type::f16:
      return &K::template run<Half>;
    case Type::bf16:
      return &K::template run<BFloat>;
    case Type::f16x2:
      return &Paired<K>::template run<Half>;
    case Type::bf16x2:
      return &Paired<K>::template run<BFloat>;
    default:
      return for_floats<K>(type);
  }
}

template <class K>
Run for_integers(Type type) {
  switch (type) {
    case Type::u16:
      return &K::template run<u16>;
    case Type::s16:
      return &K::template run<s16>;
    case Type::u32:
      return &K::template run<u32>;
    case Type::s32:
      return &K::template run<s32>;
    case Type::u64:
      return &K::template run<u64>;
    case Type::s64:
      return &K::template run<s64>;
    default:
      return nullptr;
  }
}

template <class K>
Run for_bits(Type type) {
  switch (type) {
    case Type::b16:
      return &K::template run<u16>;
    case Type::b32:
      return &K::template run<u32>;
    case Type::b64:
      return &K::template run<u64>;
    default:
      return for_integers<K>(type);
  }
}

// Comparisons for minima and maxima: NaN is unordered, and -0 is less than 0.
template <class T>
bool unordered(T a) {
  return a != a;
}

template <class T>
bool less(T a, T b) {
  if constexpr (is_floating<T>) {
    return a < b || (!(b < a) && std::signbit(static_cast<double>(a)) > std::signbit(static_cast<double>(b)));
  }
  return a < b;
}

// Defines the operation NAME: its function f(ARGUMENTS) has the given body.
#define PTX_OPERATION(NAME, ARGUMENTS, ...) \
  struct NAME {                             \
    template <class T>                      \
    static T f ARGUMENTS {                  \
      __VA_ARGS__                           \
    }                                       \
  };

PTX_OPERATION(Min, (T a, T b), return unordered(a) ? b : unordered(b) ? a : less(b, a) ? b : a;)
PTX_OPERATION(Max, (T a, T b), return unordered(a) ? b : unordered(b) ? a : less(a, b) ? b : a;)

inline void put_predicate(Warp& w, u32 p, u32 value, u32 m) {
  w.predicates[p] = (w.predicates[p] & ~m) | (value & m);
}

inline u32 third_predicate(const Warp& w, const Instruction& i) {
  return i.p2_not ? ~w.predicates[i.p[2]] : w.predicates[i.p[2]];
}

} // namespace ptx
