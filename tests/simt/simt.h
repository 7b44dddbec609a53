// A simulator that runs CUDA kernels on the CPU, for tests where there is no GPU: what csrc/cuda/device.h includes
// where nvcc does not compile. Every CUDA thread is a fiber; the threads of a block take turns on the calling thread in
// a chosen order and change only in barriers and in collectives of a warp. AddressSanitizer and ThreadSanitizer are
// told of every change, so the first sees what a thread does out of bounds, and the second takes each CUDA thread for a
// thread and finds the accesses that no barrier orders.
//
// A kernel that is to run here keeps these rules, besides those of csrc/cuda/device.h:
//
// - Threads and blocks have one dimension. No block waits for another one: they run one after the other.
// - A collective's mask names exactly the lanes that come to that line. No thread returns while others of its block
//   still meet in a barrier, nor while a mask names it.
// - A shuffle moves values and orders no memory: what lanes exchange through memory needs __syncwarp().
// - What a block hands to another one is published by __threadfence() and then atomicAdd, both by the same thread.
// - A shared array belongs to its line and its type: two arrays of one type stand on two lines, and a function template
//   with a shared array has the same one in all instantiations whose array has the same type.
// - atomicAdd exists for integers alone: a sum of floating-point numbers that depends on the order is not wanted.
// - ThreadSanitizer tells 255 threads apart: it sees the races of blocks that have fewer.
//
// Not seen: a missing __threadfence() on the reader's side, a second one that is missing on the writer's side after a
// first, and whatever rests on the rounding of a GPU's fast intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace simt {

// Who runs next. `forward` takes turns, `reverse` begins with the last thread and the last block and lets one warp run
// as far as it can, `random` follows the seed.
enum class Order { forward, reverse, random };

struct Options {
  Order order = Order::forward;
  uint64_t seed = 1;
};

// What launches follow from now on. SIMT_ORDER (forward, reverse or random) and SIMT_SEED give the first values.
Options& options();

struct Index {
  unsigned x;
  unsigned y;
  unsigned z;
};

// The rest of this namespace is in simt.cpp, which is compiled without sanitizers.
namespace runtime {

enum class Collective { sync, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, any, all };

using Body = void (*)(const void* kernel);

void launch(const char* name, int64_t blocks, int threads, Body body, const void* kernel);
void* shared(const char* file, int line, const void* type, size_t bytes, size_t alignment);
void barrier(const char* file, int line);
uint64_t meet(Collective what, unsigned mask, uint64_t value, int operand, int width, const char* file, int line);
void fence();
bool has_fenced();

template <class T>
inline constexpr char type_of = 0; // one address for each type

template <class T>
T shuffle(Collective what, unsigned mask, T value, int operand, int width, const char* file, int line) {
  static_assert(std::is_trivially_copyable<T>::value && (sizeof(T) == 4 || sizeof(T) == 8));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = meet(what, mask, bits, operand, width, file, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// Relaxed on a GPU, where __threadfence() before it publishes what the thread wrote. ThreadSanitizer does not know
// fences, so the order of the operation itself tells whether there was one.
template <class T>
T add(T* to, T value) {
  return has_fenced() ? __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL)
                      : __atomic_fetch_add(to, value, __ATOMIC_ACQUIRE);
}

} // namespace runtime

// Runs `kernel` once for each thread of each block. Throws std::runtime_error, which names the kernel, the block, the
// thread and the lines, where threads wait for ever, meet in different barriers or misuse a collective, and where an
// address is misaligned. Launches of several threads run one after the other.
template <class Kernel>
void launch(const char* name, int64_t blocks, int threads, const Kernel& kernel) {
  const auto body = [](const void* pointer) { (*static_cast<const Kernel*>(pointer))(); };
  runtime::launch(name, blocks, threads, body, &kernel);
}

// The array of this line and this type that the threads of a block share. It is allocated on the heap for each block,
// where AddressSanitizer guards its ends, and filled with bytes of 0xFF: NaN, or -1.
template <class Array>
Array& shared(const char* file, int line) {
  static_assert(std::is_array<Array>::value && std::is_trivially_copyable<Array>::value);
  return *static_cast<Array*>(runtime::shared(file, line, &runtime::type_of<Array>, sizeof(Array), alignof(Array)));
}

// `what` is what a message calls the access.
void check_aligned(const void* pointer, size_t bytes, const char* what, const char* file = nullptr, int line = 0);

} // namespace simt

extern simt::Index threadIdx;
extern simt::Index blockIdx;
extern simt::Index blockDim;
extern simt::Index gridDim;
constexpr int warpSize = 32;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::runtime::barrier(file, line);
}

inline void __syncwarp(unsigned mask = 0xffffffff, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::runtime::meet(simt::runtime::Collective::sync, mask, 0, 0, warpSize, file, line);
}

template <class T>
T __shfl_sync(
    unsigned mask,
    T value,
    int from,
    int width = warpSize,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()) {
  return simt::runtime::shuffle(simt::runtime::Collective::shuffle, mask, value, from, width, file, line);
}

template <class T>
T __shfl_up_sync(
    unsigned mask,
    T value,
    unsigned distance,
    int width = warpSize,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()) {
  const int operand = static_cast<int>(distance);
  return simt::runtime::shuffle(simt::runtime::Collective::shuffle_up, mask, value, operand, width, file, line);
}

template <class T>
T __shfl_down_sync(
    unsigned mask,
    T value,
    unsigned distance,
    int width = warpSize,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()) {
  const int operand = static_cast<int>(distance);
  return simt::runtime::shuffle(simt::runtime::Collective::shuffle_down, mask, value, operand, width, file, line);
}

template <class T>
T __shfl_xor_sync(
    unsigned mask,
    T value,
    int bits,
    int width = warpSize,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()) {
  return simt::runtime::shuffle(simt::runtime::Collective::shuffle_xor, mask, value, bits, width, file, line);
}

inline unsigned __ballot_sync(
    unsigned mask, int vote, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const uint64_t value = vote != 0;
  return static_cast<unsigned>(
      simt::runtime::meet(simt::runtime::Collective::ballot, mask, value, 0, warpSize, file, line));
}

inline int __any_sync(unsigned mask, int vote, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const uint64_t value = vote != 0;
  return static_cast<int>(simt::runtime::meet(simt::runtime::Collective::any, mask, value, 0, warpSize, file, line));
}

inline int __all_sync(unsigned mask, int vote, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const uint64_t value = vote != 0;
  return static_cast<int>(simt::runtime::meet(simt::runtime::Collective::all, mask, value, 0, warpSize, file, line));
}

inline int __reduce_max_sync(
    unsigned mask, int value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  for (int distance = warpSize / 2; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(mask, value, distance, warpSize, file, line);
    value = other > value ? other : value;
  }
  return value;
}

inline void __threadfence() {
  simt::runtime::fence();
}

inline int atomicAdd(int* to, int value) {
  return simt::runtime::add(to, value);
}

inline unsigned atomicAdd(unsigned* to, unsigned value) {
  return simt::runtime::add(to, value);
}

inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  return simt::runtime::add(to, value);
}
