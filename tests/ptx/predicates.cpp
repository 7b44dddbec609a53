// Comparisons and selections.
#include "assembler.h"
#include "operations.h"

namespace ptx {

namespace {

enum Comparison { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan_ };

template <class T>
bool compared(int how, T a, T b) {
  const bool is_nan = unordered(a) || unordered(b);
  switch (how) {
    case eq:
      return a == b;
    case ne:
      return !is_nan && a != b;
    case lt:
      return a < b;
    case le:
      return a <= b;
    case gt:
      return a > b;
    case ge:
      return a >= b;
    case equ:
      return is_nan || a == b;
    case neu:
      return a != b;
    case ltu:
      return is_nan || a < b;
    case leu:
      return is_nan || a <= b;
    case gtu:
      return is_nan || a > b;
    case geu:
      return is_nan || a >= b;
    case num:
      return !is_nan;
    default:
      return is_nan;
  }
}

enum Join { alone, with_and, with_or, with_xor };

struct SetPredicate { // variant: the comparison; mode: how its result is joined with a third predicate
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    const u64 *const a = w.lanes(i.s[0]), *const b = w.lanes(i.s[1]);
    u32 result = 0;
    each(m, [&](int l) {
      const bool is = compared<T>(i.variant, start(i, value_of<T>(a[l])), start(i, value_of<T>(b[l])));
      result |= static_cast<u32>(is) << l;
    });
    const u32 third = i.mode == alone ? 0 : third_predicate(w, i);
    const auto joined = [&](u32 x) {
      return i.mode == with_and ? x & third : i.mode == with_or ? x | third : i.mode == with_xor ? x ^ third : x;
    };
    put_predicate(w, i.p[0], joined(result), m);
    if (i.has_p1) {
      put_predicate(w, i.p[1], joined(~result), m);
    }
  }
};

Run comparison_of(Type type) {
  const Run run = for_bits<SetPredicate>(type);
  return run || type == Type::f16x2 || type == Type::bf16x2 ? run : for_all_floats<SetPredicate>(type);
}

// set.CmpOp.dtype.stype with a dtype of 32 bits: p[0] is a scratch predicate.
void set_number(Warp& w, const Instruction& i, u32 m) {
  comparison_of(i.from)(w, i, m);
  each(m, [&](int l) {
    const bool is = w.predicates[i.p[0]] >> l & 1;
    w.lanes(i.d[0])[l] = !is ? 0 : i.type == Type::f32 ? bits_of(1.0f) : 0xffffffff;
  });
}

void select(Warp& w, const Instruction& i, u32 m) {
  const u32 choice = third_predicate(w, i);
  const u64 *const a = w.lanes(i.s[0]), *const b = w.lanes(i.s[1]);
  u64* const d = w.lanes(i.d[0]);
  each(m, [&](int l) { d[l] = choice >> l & 1 ? a[l] : b[l]; });
}

void read_comparison(Assembler& a) {
  static const std::unordered_map<string_view, int> comparisons = {
      {"eq", eq},
      {"ne", ne},
      {"lt", lt},
      {"le", le},
      {"gt", gt},
      {"ge", ge},
      {"lo", lt},
      {"ls", le},
      {"hi", gt},
      {"hs", ge},
      {"equ", equ},
      {"neu", neu},
      {"ltu", ltu},
      {"leu", leu},
      {"gtu", gtu},
      {"geu", geu},
      {"num", num},
      {"nan", nan_}};
  const auto found = a.words.empty() ? comparisons.end() : comparisons.find(a.words[0]);
  if (found == comparisons.end()) {
    a.unknown("the comparison is not known");
  }
  a.words.erase(a.words.begin());
  a.i.variant = static_cast<s16>(found->second);
  a.i.mode = a.has("and") ? with_and : a.has("or") ? with_or : a.has("xor") ? with_xor : alone;
  a.i.ftz = a.has("ftz");
  a.types();
  a.need(a.i.mode == alone ? 3 : 4);
  a.i.s[0] = a.source(a.o[1]);
  a.i.s[1] = a.source(a.o[2]);
  if (a.i.mode != alone) {
    a.third_predicate(a.o[3]);
  }
}

void setp(Assembler& a) {
  read_comparison(a);
  a.i.has_p1 = a.o[0].kind == Operand::pair;
  a.i.p[0] = a.predicate(a.i.has_p1 ? a.o[0].parts[0] : a.o[0]);
  if (a.i.has_p1) {
    a.i.p[1] = a.predicate(a.o[0].parts[1]);
  }
  a.done(comparison_of(a.i.from), compare);
}

void set(Assembler& a) {
  read_comparison(a);
  a.i.d[0] = a.destination(a.o[0]);
  a.i.p[0] = a.scratch_predicate();
  const bool known = a.i.type == Type::f32 || a.i.type == Type::u32 || a.i.type == Type::s32;
  a.done(known && comparison_of(a.i.from) ? set_number : nullptr, compare);
}

void selp(Assembler& a) {
  a.types();
  a.need(4);
  a.i.d[0] = a.destination(a.o[0]);
  a.i.s[0] = a.source(a.o[1]);
  a.i.s[1] = a.source(a.o[2]);
  a.third_predicate(a.o[3]);
  a.done(select, compare);
}

} // namespace

void add_predicates(Instructions& all) {
  all.insert({{"setp", setp}, {"set", set}, {"selp", selp}});
}

} // namespace ptx
