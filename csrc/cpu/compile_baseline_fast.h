// What follows in a file of kernels is compiled with less optimisation for the baseline of x86-64, in half of the time:
// machines with AVX2 never run it. Loops that a compiler vectorises come before, because their sums would have another
// order; so do headers that all instruction sets share.
#if GRADSCALE_X86_VARIANTS && GRADSCALE_VECTOR_BYTES == 16 && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
