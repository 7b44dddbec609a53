// clip_gradient_norm and normalize_gradient: groups rescaled by their norms.
//
// rescale_kept      for p = 2 and groups of whole vectors of 16 bytes, with elements narrower than double. A few
//                   threads of a warp keep a group unconverted in registers, up to 128 bytes each: read once, written
//                   once. A thread issues all its loads before it uses the first, so that 2 blocks have up to 64 KB of
//                   loads in flight.
// rescale_groups    for other short groups. Several threads read a group twice, the second time from the cache, and
//                   write it once.
// power_sums        for long groups. One block for each chunk of a group, which reads its chunk once.
// rescale_chunks    after power_sums. One block for each chunk adds the sums of all chunks of its group, in a fixed
//                   order, and reads and writes its own chunk. So a group is read twice and written once.
//
// Sums are computed in double, as on the CPU, except squares of narrower elements (cuda/norms.cuh).
#pragma once

#include "../../cuda/norms.cuh"
#include "../kernels.h"

namespace gradscale {

template <class T>
GRADSCALE_DEVICE void scale_range(const T* from, T* to, int32_t size, const Scaling& by, const ThreadGroup& group) {
  if (!(by.changes_nothing() && from == to)) {
    change_range(from, to, size, group, ScaledElement(by));
  }
}

// Multiplies the elements of vectors by the factor; the root is 1 or 0.
template <class T, int count>
GRADSCALE_DEVICE void scale(RawVector<T> (&vectors)[count], const Scaling& by) {
  const auto change = [&](auto scaled) {
#pragma unroll
    for (RawVector<T>& vector : vectors) {
      RawVector<T> changed{};
#pragma unroll
      for (int k = 0; k < RawVector<T>::kSize; ++k) {
        changed.set(k, from_accumulate<T, float>(scaled(vector[k])));
      }
      vector = changed;
    }
  };
  if (by.is_normal_in_float()) {
    const auto factor = static_cast<float>(by.factor);
    change([=](float x) { return x * factor; });
  } else {
    change([=](float x) { return by.root == 0 ? 0 : static_cast<float>(static_cast<double>(x) * by.factor); });
  }
}

template <class T, int threads>
GRADSCALE_KERNEL(kThreads, 2)
rescale_kept(GRADSCALE_ARGUMENT(RescaleCall) call) {
  // Not RowOfThread: it serves blocks of any size, which costs 9 instructions more than these 320.
  const ThreadGroup group{threads, static_cast<int>(threadIdx.x) % threads, nullptr};
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / threads) + threadIdx.x / threads;
  const bool active = index < call.groups;
  const int32_t vectors = active ? static_cast<int32_t>(call.size) / RawVector<T>::kSize : 0;
  const int64_t begin = (active ? index * call.size : 0) + group.rank * RawVector<T>::kSize;
  const T* from = static_cast<const T*>(call.from) + begin;
  T* to = static_cast<T*>(call.to) + begin;
  RawVector<T> kept[kVectorsPerThread] = {};
#pragma unroll
  for (int c = 0; c < kVectorsPerThread; ++c) {
    if (group.rank + c * threads < vectors) {
      kept[c] = load16<RawVector<T>>(from + c * threads * RawVector<T>::kSize);
    }
  }
  const PowerSum sum{group.sum(squares_of(kept)), 1};
  const Scaling by = scaling(call.rule, sum, 2, limit_of(call, active ? index : 0));
  if (by.changes_nothing() && from == to) {
    return;
  }
  scale(kept, by);
#pragma unroll
  for (int c = 0; c < kVectorsPerThread; ++c) {
    if (group.rank + c * threads < vectors) {
      store16(to + c * threads * RawVector<T>::kSize, kept[c]);
    }
  }
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
rescale_groups(GRADSCALE_ARGUMENT(RescaleCall) call) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const RowOfThread own(blockIdx.x, threads_for_row(call.size, sizeof(T)), call.groups, shared);
  const int32_t size = own.active ? static_cast<int32_t>(call.size) : 0;
  const int64_t begin = own.row * call.size;
  const T* from = static_cast<const T*>(call.from) + begin;
  const PowerSum sum = range_power_sum(from, size, call.p, own.group);
  const Scaling by = scaling(call.rule, sum, call.p, limit_of(call, own.row));
  scale_range(from, static_cast<T*>(call.to) + begin, size, by, own.group);
}

struct Chunk {
  int64_t group;
  int64_t begin; // the index of its first element in the gradient
  int32_t size;
};

GRADSCALE_DEVICE Chunk block_chunk(const RescaleCall& call, const Chunks& chunks) {
  const int64_t group = blockIdx.x / chunks.count;
  const int64_t start = (blockIdx.x % chunks.count) * chunks.size;
  const int64_t rest = call.size - start;
  return {group, group * call.size + start, static_cast<int32_t>(rest < chunks.size ? rest : chunks.size)};
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
power_sums(GRADSCALE_ARGUMENT(RescaleCall) call) {
  const Chunks chunks = chunks_of(call);
  GRADSCALE_SHARED(double, shared, kWarps);
  const ThreadGroup group = block_threads(shared);
  const Chunk chunk = block_chunk(call, chunks);
  const PowerSum sum = range_power_sum(static_cast<const T*>(call.from) + chunk.begin, chunk.size, call.p, group);
  if (threadIdx.x == 0) {
    call.sums[blockIdx.x] = sum;
  }
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
rescale_chunks(GRADSCALE_ARGUMENT(RescaleCall) call) {
  const Chunks chunks = chunks_of(call);
  GRADSCALE_SHARED(double, shared, kWarps);
  const ThreadGroup group = block_threads(shared);
  const Chunk chunk = block_chunk(call, chunks);
  const PowerSum* sums = call.sums + chunk.group * chunks.count;
  const PowerSum sum = total_power_sum(sums, chunks.count, call.p, group);
  const Scaling by = scaling(call.rule, sum, call.p, limit_of(call, chunk.group));
  scale_range(
      static_cast<const T*>(call.from) + chunk.begin, static_cast<T*>(call.to) + chunk.begin, chunk.size, by, group);
}

} // namespace gradscale
