// Groups rescaled by their norms.
//
// rescale_groups    a group of threads has a short group of elements: it reads it twice, the second time from the
//                   cache, and writes it once.
// power_sums        one block for each chunk of a long group, which it reads once;
// rescale_chunks    then one block for each chunk takes the sums of all chunks of its group together, in their order,
//                   and reads and writes its own. Bytes: twice read, once written.
//
// Sums are taken in double, as on the CPU.
#pragma once

#include "../math/norms.cuh"
#include "device_calls.h"

namespace gradscale {

constexpr int64_t kShortGroup = 8192; // elements; the groups that are worked on at a time fit the cache

GRADSCALE_DEVICE double limit_of(const RescaleCall& call, int64_t group) {
  return call.limits == nullptr ? call.limit : call.limits[group * call.limits_stride];
}

// One thread of the launch counts the groups, and one of each group counts its norm.
GRADSCALE_DEVICE void count_groups(const RescaleCall& call) {
  if (call.counts != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(call.counts), static_cast<unsigned long long>(call.groups));
  }
}

GRADSCALE_DEVICE void count_norm(const RescaleCall& call, bool within) {
  if (call.counts != nullptr && !within) {
    atomicAdd(reinterpret_cast<unsigned long long*>(call.counts + 1), 1ull);
  }
}

template <class T>
GRADSCALE_DEVICE void scale_range(const T* from, T* to, int32_t size, const Scaling& by, const Group& group) {
  using A = typename AccumulateType<T>::type;
  constexpr int count = kVector<T>;
  if (by.changes_nothing() && from == to) {
    return;
  }
  const bool narrow = by.is_normal_in_float();
  const A factor = static_cast<A>(by.factor);
  const double reciprocal = 1 / by.root;
  each_window_of_range(from, size, group, [&](A* values, int32_t first) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      if (by.root == 0) {
        values[k] = 0;
      } else if (narrow) {
        values[k] *= factor;
      } else {
        values[k] = static_cast<A>(static_cast<double>(values[k]) * reciprocal * reciprocal * by.factor);
      }
    }
    write_elements<count>(to, size, first, 0, 0, values);
  });
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
rescale_groups(RescaleCall call, int threads_per_group) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group group{threads_per_group, static_cast<int>(threadIdx.x) % threads_per_group, shared};
  const int groups_of_block = kThreads / threads_per_group;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * groups_of_block + threadIdx.x / threads_per_group;
  const bool active = index < call.groups;
  const int32_t size = active ? static_cast<int32_t>(call.size) : 0;
  const int64_t begin = active ? index * call.size : 0;
  const T* from = static_cast<const T*>(call.from) + begin;
  const PowerSum sum = power_sum_of_range(from, size, call.p, group);
  const Scaling by = scaling(call.rule, sum, call.p, limit_of(call, active ? index : 0));
  count_groups(call);
  if (active && group.rank == 0) {
    count_norm(call, by.within);
  }
  scale_range(from, static_cast<T*>(call.to) + begin, size, by, group);
}

// A group has so few chunks that reading their sums takes little time beside reading the elements.
struct Chunks {
  int64_t size;
  int64_t count;
};

inline Chunks chunks_of(const RescaleCall& call) {
  const int64_t size = call.size / 1024 > 32768 ? (call.size / 1024 + 31) / 32 * 32 : 32768;
  return {size, (call.size + size - 1) / size};
}

struct Chunk {
  int64_t group;
  int64_t begin; // in memory
  int32_t size;
};

GRADSCALE_DEVICE Chunk chunk_of_block(const RescaleCall& call, const Chunks& chunks) {
  const int64_t group = blockIdx.x / chunks.count;
  const int64_t start = (blockIdx.x % chunks.count) * chunks.size;
  const int64_t rest = call.size - start;
  return {group, group * call.size + start, static_cast<int32_t>(rest < chunks.size ? rest : chunks.size)};
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
power_sums(RescaleCall call, Chunks chunks) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group group{kThreads, static_cast<int>(threadIdx.x), shared};
  const Chunk chunk = chunk_of_block(call, chunks);
  const PowerSum sum = power_sum_of_range(static_cast<const T*>(call.from) + chunk.begin, chunk.size, call.p, group);
  if (threadIdx.x == 0) {
    reinterpret_cast<PowerSum*>(call.workspace)[blockIdx.x] = sum;
  }
}

template <class T>
GRADSCALE_KERNEL(kThreads, 2)
rescale_chunks(RescaleCall call, Chunks chunks) {
  GRADSCALE_SHARED(double, shared, kWarps);
  const Group group{kThreads, static_cast<int>(threadIdx.x), shared};
  const Chunk chunk = chunk_of_block(call, chunks);
  const PowerSum* sums = reinterpret_cast<const PowerSum*>(call.workspace) + chunk.group * chunks.count;
  const Scaling by =
      scaling(call.rule, total_power_sum(sums, chunks.count, call.p, group), call.p, limit_of(call, chunk.group));
  count_groups(call);
  if (threadIdx.x == 0 && blockIdx.x % chunks.count == 0) {
    count_norm(call, by.within);
  }
  scale_range(
      static_cast<const T*>(call.from) + chunk.begin, static_cast<T*>(call.to) + chunk.begin, chunk.size, by, group);
}

} // namespace gradscale
