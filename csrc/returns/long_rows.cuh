// Recurrences of few long rows on GPUs, in one launch: a block has a chunk of a row, and waits for the maps of the
// chunks before it in the walk.
//
// A block takes the next chunk when it starts, so that it waits only for blocks that have started. It publishes the map
// of its chunk, reads the maps of the earlier chunks of its group, always in the same order, and walks its steps. The
// last chunk of a group of kGroup publishes y instead, as a map that ignores what came before, and so does a chunk
// whose map is not finite: it walks first. So a chunk reads at most kGroup maps, and results are the same from run to
// run.
//
// The workspace need not be initialised: its words count from `call.launch`, a number that no other memory holds but by
// a chance of 2^-60. The last block to end clears them, because a graph launches the same number again.
#pragma once

#include "recurrences.cuh"

namespace gradscale {

constexpr int kChunk = kThreads; // steps
constexpr int kGroup = 128;      // chunks

// In the workspace: two counters of blocks, then the chunks' maps.
template <class A>
struct PublishedMap {
  uint64_t launch;
  A a;
  A b;
};

GRADSCALE_DEVICE uint64_t load_acquired(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

GRADSCALE_DEVICE void store_released(uint64_t* to, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}

// Returns how many of the launch's blocks have counted before.
GRADSCALE_DEVICE int64_t count_block(uint64_t* counter, uint64_t launch) {
  auto* const word = reinterpret_cast<unsigned long long*>(counter);
  unsigned long long seen = launch;
  for (;;) {
    const uint64_t before = seen - launch < gridDim.x ? seen - launch : 0;
    const unsigned long long found = atomicCAS(word, seen, launch + before + 1);
    if (found == seen) {
      return static_cast<int64_t>(before);
    }
    seen = found;
  }
}

template <class A>
GRADSCALE_DEVICE void publish(PublishedMap<A>* to, const Map<A>& map, uint64_t launch) {
  to->a = map.a;
  to->b = map.b;
  store_released(&to->launch, launch);
}

// y before a chunk, given the maps of the `count` chunks that end before `published`. By one warp.
template <class A>
GRADSCALE_DEVICE A walk_chunks(const PublishedMap<A>* published, int64_t count, uint64_t launch, int lane) {
  A y = A(0);
  for (int64_t first = -count; first < 0; first += kWarpSize) {
    Map<A> map{A(0), A(1)};
    if (first + lane < 0) {
      const PublishedMap<A>& from = published[first + lane];
      while (load_acquired(&from.launch) != launch) {
      }
      map = {from.a, from.b};
    }
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < kWarpSize; ++k) {
      const Map<A> of_lane{__shfl_sync(kAllLanes, map.a, k), __shfl_sync(kAllLanes, map.b, k)};
      y = applied(of_lane, y); // behind the last chunk: y
    }
  }
  return y;
}

// The map of this lane's step and of all lanes before it.
template <class F, class A>
GRADSCALE_DEVICE Map<A> composed_lanes(Map<A> map, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const Map<A> before{shifted<F>(map.a, distance), shifted<F>(map.b, distance)};
    if (turn_of<F>(lane) >= distance) {
      map = composed(map, before);
    }
  }
  return map;
}

template <class A, class F, Layout layout, unsigned given>
GRADSCALE_KERNEL(kThreads, 2)
recur_chunks(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  using L = OneLane<A>;
  using Index = typename Row<A, F, layout, given>::Index;
  GRADSCALE_SHARED(int64_t, shared_count, 1);
  GRADSCALE_SHARED(A, shared, 3 * kWarps); // maps of the warps, and y before the chunk
  auto* const counters = static_cast<uint64_t*>(call.workspace);
  auto* const maps = reinterpret_cast<PublishedMap<A>*>(counters + 2);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
  if (threadIdx.x == 0) {
    *shared_count = count_block(counters, call.launch);
  }
  __syncthreads();
  const int64_t chunks = gridDim.x / call.rows, chunk = *shared_count / call.rows;
  const Row<A, F, layout, given> row(call, *shared_count % call.rows);
  PublishedMap<A>* const own = maps + (*shared_count % call.rows) * chunks + chunk;
  // Lanes have neighbouring steps, so that an adjoint's warps come in their order, and others in the opposite one.
  const int turn = F::kAdjoint ? warp : kWarps - 1 - warp;
  const auto t = static_cast<Index>((F::kAdjoint ? chunk : chunks - 1 - chunk) * kChunk + threadIdx.x);
  Transition<L> s = row.template read<false>(t);
  Later<A> of_last;
  if (lane == kWarpSize - 1) {
    of_last = row.read_later(t);
  }
  link(s, row.later_of_lanes(s, of_last, t, lane));
  A extra = extra_at<A, F>(s), extra_before = A(0);
  if constexpr (std::is_same_v<F, VTraceAdjoint>) {
    if (lane == 0 && t > 0) {
      Transition<L> before = row.template read<false>(t - 1);
      link(before, row.read_later(t - 1));
      extra_before = extra_at<A, F>(before);
    }
    extra_before = earlier<F>(extra, lane, extra_before);
  }
  const Map<A> map = F::template map<L>(s);
  const Map<A> of_lanes = composed_lanes<F>(map, lane);
  if (turn_of<F>(lane) == kWarpSize - 1) {
    shared[2 * turn] = of_lanes.a;
    shared[2 * turn + 1] = of_lanes.b;
  }
  __syncthreads();
  Map<A> all{A(0), A(1)};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    all = composed(Map<A>{shared[2 * w], shared[2 * w + 1]}, all);
  }
  const bool is_early = is_finite(all.a) && is_finite(all.b) && chunk % kGroup != kGroup - 1;
  if (warp == 0) {
    if (lane == 0 && is_early) {
      publish(own, all, call.launch);
    }
    // The last chunk of the group before has published y.
    const int64_t count = chunk % kGroup + (chunk >= kGroup ? 1 : 0);
    const A y = walk_chunks(own, count, call.launch, lane);
    if (lane == 0) {
      shared[2 * kWarps] = y;
    }
  }
  __syncthreads();
  A carry = shared[2 * kWarps];
  A y_before = carry;
  bool is_exact = true;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    y_before = w == turn ? carry : y_before;
    carry = applied(Map<A>{shared[2 * w], shared[2 * w + 1]}, carry);
    is_exact = is_exact && is_finite(carry) && is_finite(shared[2 * w + 1]);
  }
  __syncthreads();
  if (!is_exact) { // the same for all: the warps take turns
    carry = shared[2 * kWarps];
    for (int w = 0; w < kWarps; ++w) {
      if (w == turn) {
        y_before = carry;
        const A y = checked_lanes<F>(applied(of_lanes, carry), map, carry, lane);
        if (turn_of<F>(lane) == kWarpSize - 1) {
          shared[w] = y;
        }
      }
      __syncthreads();
      carry = shared[w];
    }
  }
  if (threadIdx.x == 0 && !is_early) {
    publish(own, Map<A>{carry, A(0)}, call.launch);
  }
  const A y = checked_lanes<F>(applied(of_lanes, y_before), map, y_before, lane);
  A out[kOutputs];
  F::template results<L>(s, y, earlier<F>(y, lane, y_before), extra_before, out);
  if (t < row.steps) {
    row.write(t, out);
  }
  // All maps that this block waits for have been read.
  if (threadIdx.x == 0) {
    __threadfence();
    *shared_count = count_block(counters + 1, call.launch);
  }
  __syncthreads();
  if (*shared_count == gridDim.x - 1) {
    for (int64_t k = threadIdx.x; k < gridDim.x; k += kThreads) {
      maps[k].launch = 0;
    }
    if (threadIdx.x < 2) {
      counters[threadIdx.x] = 0;
    }
  }
}

} // namespace gradscale
