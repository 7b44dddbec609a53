// Roots, reciprocals, and functions that a GPU approximates. ex2, lg2, sin, cos and tanh are computed in double and
// rounded, which is more accurate than a GPU.
#include "assembler.h"
#include "operations.h"

namespace ptx {

namespace {

template <class T>
T from_double(double (*function)(double), T a) {
  return static_cast<T>(function(static_cast<double>(a)));
}

PTX_OPERATION(Sqrt, (T a), return static_cast<T>(std::sqrt(a));)
PTX_OPERATION(Rcp, (T a), return static_cast<T>(static_cast<T>(1) / a);)
PTX_OPERATION(Rsqrt, (T a), return static_cast<T>(1.0 / std::sqrt(static_cast<double>(a)));)
PTX_OPERATION(Ex2, (T a), return from_double(std::exp2, a);)
PTX_OPERATION(Lg2, (T a), return from_double(std::log2, a);)
PTX_OPERATION(Sin, (T a), return from_double(std::sin, a);)
PTX_OPERATION(Cos, (T a), return from_double(std::cos, a);)
PTX_OPERATION(Tanh, (T a), return from_double(std::tanh, a);)

// For doubles, rcp.approx and rsqrt.approx return only the upper 32 bits; the lower 32 bits are 0.
constexpr u64 kUpper = 0xffffffff00000000;
PTX_OPERATION(RcpUpper, (T a), return std::bit_cast<T>(std::bit_cast<u64>(1 / a) & kUpper);)
PTX_OPERATION(RsqrtUpper, (T a), return std::bit_cast<T>(std::bit_cast<u64>(1 / std::sqrt(a)) & kUpper);)

template <class Op>
struct Directed {
  template <class T>
  static void run(Warp& w, const Instruction& i, u32 m) {
    fesetround(i.mode);
    Unary<Op>::template run<T>(w, i, m);
    fesetround(FE_TONEAREST);
  }
};

// Op: the operation for float and double. OpUpper: its approximation for double, if there is one.
template <class Op, class OpUpper = void>
void root(Assembler& a) {
  const bool approximate = a.has("approx");
  a.rounding();
  a.types();
  a.simple(1);
  Run run = a.i.mode == FE_TONEAREST ? for_floats<Unary<Op>>(a.i.type) : for_floats<Directed<Op>>(a.i.type);
  if (a.i.type == Type::f64 && approximate) {
    run = nullptr;
    if constexpr (!std::is_void_v<OpUpper>) {
      a.i.ftz = false; // has no effect on doubles; see flushed()
      run = &Unary<OpUpper>::template run<double>;
    }
  }
  a.done(run, approximate ? special : division);
}

template <class Op>
void float_function(Assembler& a) {
  a.has("approx");
  a.i.ftz = a.has("ftz");
  a.types();
  a.simple(1);
  const bool small =
      a.i.type == Type::f16x2 || a.i.type == Type::f16 || a.i.type == Type::bf16 || a.i.type == Type::bf16x2;
  a.done(
      small                   ? for_all_floats<Unary<Op>>(a.i.type)
      : a.i.type == Type::f32 ? &Unary<Op>::template run<float>
                              : nullptr,
      special);
}

} // namespace

void add_functions(Instructions& all) {
  all.insert(
      {{"sqrt", root<Sqrt>},
       {"rcp", root<Rcp, RcpUpper>},
       {"rsqrt", root<Rsqrt, RsqrtUpper>},
       {"ex2", float_function<Ex2>},
       {"lg2", float_function<Lg2>},
       {"sin", float_function<Sin>},
       {"cos", float_function<Cos>},
       {"tanh", float_function<Tanh>}});
}

} // namespace ptx
