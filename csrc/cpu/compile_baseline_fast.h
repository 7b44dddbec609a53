// The baseline of x86-64, which machines with AVX2 never run, compiles the code after this include with -O1, in half of
// the time. Two kinds of code come before the include: headers that all instruction sets share, and loops that the
// compiler vectorises, because without vectors their sums have another order.
#if GRADSCALE_X86_VARIANTS && GRADSCALE_VECTOR_BYTES == 16 && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
