// A file of kernels includes this where its own code begins, after the headers that all instruction sets share. On
// x86-64, the baseline is compiled with less optimisation, which takes half of the time: only machines without AVX2 run
// it.
#if GRADSCALE_X86_VARIANTS && GRADSCALE_VECTOR_BYTES == 16 && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
