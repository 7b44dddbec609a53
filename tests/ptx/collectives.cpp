// Instructions that all lanes of a mask run together.
#include "assembler.h"
#include "operations.h"

#include <algorithm>

namespace ptx {

namespace {

enum Shuffle { up, down, butterfly, index_ };
enum Vote { all_, any_, uniform, ballot };
enum Reduction { r_add, r_min, r_max, r_and, r_or, r_xor };

// Reads the mask of lanes from a register. It must equal the lanes that execute the instruction.
u32 members(Warp& w, const Instruction& i, u32 m, u32 reg) {
  const u32 mask = get<u32>(w, reg, std::countr_zero(m)) & w.present;
  each(m, [&](int l) {
    if ((get<u32>(w, reg, l) & w.present) != mask) {
      fail_at(w, i, "lanes give different masks");
    }
  });
  if (mask != m) {
    char text[96];
    snprintf(
        text,
        sizeof(text),
        "divergent collective: the mask is %08x, but lanes %08x execute it (%08x have not exited)",
        mask,
        m,
        w.alive);
    fail_at(w, i, text);
  }
  return mask;
}

// Returns the lane that `lane` reads, and true. If that lane is outside of the segment, returns `lane` and false.
std::pair<int, bool> source_lane(const Instruction& i, int lane, u32 b, u32 c) {
  const int by = static_cast<int>(b & 31), clamp = static_cast<int>(c & 31), segment = static_cast<int>(c >> 8 & 31);
  const int first = lane & segment, last = first | (clamp & ~segment);
  const int from = i.variant == up          ? lane - by
                   : i.variant == down      ? lane + by
                   : i.variant == butterfly ? lane ^ by
                                            : first | (by & ~segment);
  const bool inside = i.variant == up ? from >= last : from <= last;
  return {inside ? from : lane, inside};
}

void shuffle_lanes(Warp& w, const Instruction& i, u32 m) {
  members(w, i, m, i.s[3]);
  const u64 *const a = w.lanes(i.s[0]), *const b = w.lanes(i.s[1]), *const c = w.lanes(i.s[2]);
  u32 in_range = 0;
  u64 values[32];
  each(m, [&](int l) {
    const auto [from, inside] = source_lane(i, l, static_cast<u32>(b[l]), static_cast<u32>(c[l]));
    if ((m >> from & 1) == 0) {
      fail_at(w, i, "lane " + std::to_string(l) + " reads lane " + std::to_string(from) + ", which is inactive");
    }
    values[l] = a[from] & 0xffffffff;
    in_range |= static_cast<u32>(inside) << l;
  });
  u64* const d = w.lanes(i.d[0]);
  each(m, [&](int l) { d[l] = values[l]; });
  if (i.has_p1) {
    put_predicate(w, i.p[1], in_range, m);
  }
}

void vote_lanes(Warp& w, const Instruction& i, u32 m) {
  const u32 mask = members(w, i, m, i.s[0]);
  const u32 votes = third_predicate(w, i) & mask;
  if (i.variant == ballot) {
    each(m, [&](int l) { put<u32>(w, i.d[0], l, votes); });
    return;
  }
  const bool is = i.variant == all_ ? votes == mask : i.variant == any_ ? votes != 0 : votes == 0 || votes == mask;
  put_predicate(w, i.p[0], is ? ~0u : 0, m);
}

void active_mask(Warp& w, const Instruction& i, u32 m) {
  each(m, [&](int l) { put<u32>(w, i.d[0], l, m); });
}

struct Match { // variant: any_ or all_
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    const u32 mask = members(w, i, m, i.s[1]);
    u32 same[32] = {};
    bool all = true;
    each(m, [&](int l) {
      each(m, [&](int k) { same[l] |= static_cast<u32>(get<T>(w, i.s[0], l) == get<T>(w, i.s[0], k)) << k; });
      all = all && same[l] == mask;
    });
    each(m, [&](int l) { put<u32>(w, i.d[0], l, i.variant == any_ ? same[l] : all ? mask : 0); });
    if (i.has_p1) {
      put_predicate(w, i.p[1], all ? ~0u : 0, m);
    }
  }
};

struct Reduce {
  template <class T>
  static T joined(int reduction, T a, T b) {
    switch (reduction) {
      case r_add:
        return static_cast<T>(a + b);
      case r_min:
        return std::min(a, b);
      case r_max:
        return std::max(a, b);
      case r_and:
        return static_cast<T>(a & b);
      case r_or:
        return static_cast<T>(a | b);
      default:
        return static_cast<T>(a ^ b);
    }
  }
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    members(w, i, m, i.s[1]);
    const int first = std::countr_zero(m);
    T r = get<T>(w, i.s[0], first);
    each(m & ~(1u << first), [&](int l) { r = joined<T>(i.variant, r, get<T>(w, i.s[0], l)); });
    each(m, [&](int l) { put<T>(w, i.d[0], l, r); });
  }
};

void sync_warp(Warp& w, const Instruction& i, u32 m) {
  members(w, i, m, i.s[0]);
  if (w.launch->races) {
    w.launch->races->warp_barrier(w, m);
  }
}

// Reads the variant, an index of `names`; returns false if there is none, or no `.sync`.
bool read_variant(Assembler& a, std::initializer_list<string_view> names) {
  const auto found = std::find_if(names.begin(), names.end(), [&](string_view name) { return a.has(name); });
  a.i.variant = static_cast<s16>(found - names.begin());
  return found != names.end() && a.has("sync");
}

void shfl(Assembler& a) {
  const bool known = read_variant(a, {"up", "down", "bfly", "idx"});
  a.types();
  a.need(5);
  a.written(a.o[0]);
  for (int k = 0; k < 4; ++k) {
    a.i.s[k] = a.source(a.o[1 + k]);
  }
  a.done(known ? shuffle_lanes : nullptr, shuffle);
}

void vote_instruction(Assembler& a) {
  const bool known = read_variant(a, {"all", "any", "uni", "ballot"});
  a.types();
  a.need(3);
  if (a.i.variant == ballot) {
    a.i.d[0] = a.destination(a.o[0]);
  } else {
    a.i.p[0] = a.predicate(a.o[0]);
  }
  a.third_predicate(a.o[1]);
  a.i.s[0] = a.source(a.o[2]);
  a.done(known ? vote_lanes : nullptr, vote);
}

void activemask(Assembler& a) {
  a.types();
  a.simple(0);
  a.done(active_mask, vote);
}

void match(Assembler& a) {
  const bool known = read_variant(a, {"all", "any"});
  a.types();
  a.need(3);
  a.written(a.o[0]);
  a.i.s[0] = a.source(a.o[1]);
  a.i.s[1] = a.source(a.o[2]);
  a.done(known ? for_bits<Match>(a.i.type) : nullptr, vote);
}

void redux(Assembler& a) {
  const bool known = read_variant(a, {"add", "min", "max", "and", "or", "xor"});
  a.types();
  a.simple(2);
  a.done(known && bytes_of(a.i.type) == 4 && !is_float(a.i.type) ? for_bits<Reduce>(a.i.type) : nullptr, shuffle);
}

void bar(Assembler& a) {
  if (a.has("warp")) {
    a.has("sync");
    a.need(1);
    a.i.s[0] = a.source(a.o[0]);
    a.done(sync_warp, barrier);
    return;
  }
  a.has("cta");
  a.has("aligned");
  if (!a.has("sync") || a.o.size() != 1 || a.o[0].kind != Operand::number) {
    a.unknown("this barrier is not known");
  }
  a.i.flow = Flow::bar;
  a.done([](Warp&, const Instruction&, u32) {}, barrier);
}

} // namespace

void add_collectives(Instructions& all) {
  all.insert(
      {{"shfl", shfl},
       {"vote", vote_instruction},
       {"activemask", activemask},
       {"match", match},
       {"redux", redux},
       {"bar", bar},
       {"barrier", bar}});
}

} // namespace ptx
