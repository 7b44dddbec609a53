// Recurrences of few long rows on GPUs, in one launch. A block owns a chunk of a row, and each of its warps owns
// kAhead x 32 neighbouring steps. The map y -> a + b y of a chunk gives y after the chunk, in the order of the walk,
// from y before it. A block waits for the maps of earlier chunks of its row. It has 8 warps, or 16 if the row then is
// one chunk.
//
// A block takes the next chunk when it starts, so that it waits only for blocks that have started. It publishes the map
// of its chunk, reads the maps of the earlier chunks of its series (kSeries chunks) and of the last chunk of the series
// before, always in the same order, and walks its steps. The last chunk of a series publishes a map that ignores its
// argument and gives the last y, so that a chunk reads at most kSeries maps. A block whose map is not finite walks its
// steps before it publishes such a map. Results are the same from run to run.
//
// The longest chain of a row is one read and one write of a map for each series, about a microsecond.
//
// The workspace is a counter of blocks and the chunks' maps. It is 0 before the launch, unless each row is one chunk,
// which waits for nothing.
#pragma once

#include "recurrences.cuh"

namespace gradscale {

constexpr int kSeries = 128; // chunks

template <class A>
struct PublishedMap {
  uint64_t is_there; // 1 once the map may be read
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

template <class A>
GRADSCALE_DEVICE void publish(PublishedMap<A>* to, const Map<A>& map) {
  to->a = map.a;
  to->b = map.b;
  store_released(&to->is_there, 1);
}

// The map of this lane composed with the maps of all lanes before it, within each `lanes` neighbours.
template <int lanes, class A>
GRADSCALE_DEVICE Map<A> composed_in_order(Map<A> map, int lane) {
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) {
    const Map<A> before{
        __shfl_up_sync(kWholeWarp, map.a, distance, lanes), __shfl_up_sync(kWholeWarp, map.b, distance, lanes)};
    if (lane % lanes >= distance) {
      map = composed(map, before);
    }
  }
  return map;
}

// GRADSCALE_RELAXED_POLLS is a variant that tests/gpu/run.py measures: polls without an order, then one fence.
template <class A>
GRADSCALE_DEVICE Map<A> wait_for(const PublishedMap<A>& from) {
#ifdef GRADSCALE_RELAXED_POLLS
  uint64_t is_there = 0;
  while (is_there == 0) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(is_there)
                 : "l"(__cvta_generic_to_global(&from.is_there))
                 : "memory");
  }
  asm volatile("fence.acq_rel.gpu;" : : : "memory");
#else
  while (load_acquired(&from.is_there) == 0) {
  }
#endif
  return {from.a, from.b};
}

// y before the chunk whose map is `published[0]`, from the maps of the `count` earlier chunks of its series, and from
// the series before. The series before is read last, because its map arrives last. Called by one warp.
template <class A>
GRADSCALE_DEVICE A walk_chunks(const PublishedMap<A>* published, int64_t count, bool is_first_series, int lane) {
  Map<A> series{A(0), A(1)};
  const auto round = [&](int64_t first) { // of 32 chunks; lanes without a chunk have the identity
    const Map<A> map = first + lane < 0 ? wait_for(published[first + lane]) : Map<A>{A(0), A(1)};
    __syncwarp();
    return map;
  };
  for (int64_t first = -count; first < 0; first += kWarpSize) {
    const Map<A> map = composed_in_order<kWarpSize>(round(first), lane);
    const A a = __shfl_sync(kWholeWarp, map.a, kWarpSize - 1), b = __shfl_sync(kWholeWarp, map.b, kWarpSize - 1);
    series = composed(Map<A>{a, b}, series);
  }
  const A start = is_first_series ? A(0) : wait_for(published[-count - 1]).a;
  A y = applied(series, start);
  if (!is_finite(y)) { // composing may have overflowed: the maps are applied one by one
    y = start;
#pragma unroll 1
    for (int64_t first = -count; first < 0; first += kWarpSize) {
      const Map<A> map = round(first);
#pragma unroll 1
      for (int k = 0; k < kWarpSize; ++k) {
        y = applied(Map<A>{__shfl_sync(kWholeWarp, map.a, k), __shfl_sync(kWholeWarp, map.b, k)}, y);
      }
    }
  }
  return y;
}

// Publishes the map of a chunk, unless it is not finite, and returns y before the chunk. Called by one warp.
template <class A>
GRADSCALE_DEVICE A enter_chunk(PublishedMap<A>* own, const Map<A>& map, int64_t chunk, int lane, bool& is_published) {
  const bool has_map = is_finite(map.a) && is_finite(map.b), ends_series = chunk % kSeries == kSeries - 1;
  is_published = has_map && !ends_series;
  if (lane == 0 && is_published) {
    publish(own, map);
  }
  const A y = walk_chunks(own, chunk % kSeries, chunk < kSeries, lane);
  const A after = applied(map, y);
  if (lane == 0 && ends_series && has_map && is_finite(after)) {
    publish(own, Map<A>{after, A(0)});
    is_published = true;
  }
  return y;
}

// kAhead rounds of a warp: the steps of this lane, their maps, and the composed maps up to this lane in each round.
template <class A, class F>
struct Rounds {
  Transition<OneLane<A>> steps[kAhead];
  Map<A> step_maps[kAhead];
  Map<A> lane_maps[kAhead];

  // Computes the maps of the steps, and returns the map of all steps of the warp. `first`: the first step of this lane.
  template <class Row, class Index>
  GRADSCALE_DEVICE Map<A> compose(const Row& row, Index first, const Later<A> (&beyond)[kAhead], int lane) {
    Map<A> warp_map{A(0), A(1)};
    bool has_zero = false;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      Transition<OneLane<A>>& s = steps[k];
      link(s, row.later_in_lanes(s, beyond[k], first + k * kRound<F>, lane));
      const Map<A> map = step_maps[k] = F::step(s).map();
      const Map<A> all = lane_maps[k] = composed_lanes<F>(map, lane);
      has_zero = has_zero || map.b == 0;
      const A a = __shfl_sync(kWholeWarp, all.a, kLast<F>), b = __shfl_sync(kWholeWarp, all.b, kLast<F>);
      warp_map = {a + b * warp_map.a, b * warp_map.b};
    }
    if (!__any_sync(kWholeWarp, has_zero) && warp_map.b == 0) {
      warp_map.b = OneLane<A>::underflow(warp_map.b);
    }
    return warp_map;
  }

  // Stores y of the steps in `ys`, given y before the first. Returns false for a lane with a y that is not finite.
  GRADSCALE_DEVICE bool apply(A y, A (&ys)[kAhead]) const {
    bool is_exact = true;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      ys[k] = lane_maps[k].a + lane_maps[k].b * y;
      y = __shfl_sync(kWholeWarp, ys[k], kLast<F>);
      is_exact = is_exact && is_finite(ys[k]);
    }
    return is_exact;
  }

  // The same, also where numbers are not finite. Returns y after the warp's steps.
  GRADSCALE_DEVICE A walk(A y, A (&ys)[kAhead], int lane) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      ys[k] = walk_lanes<F>(steps[k], step_maps[k], lane_maps[k], y, lane);
      y = __shfl_sync(kWholeWarp, ys[k], kLast<F>);
    }
    return y;
  }

  // Walks a chunk, one warp after the other, because maps are wrong where a number is not finite. `last` is y before
  // the chunk. `carry`, y before this warp, is replaced if it is not finite. Returns y after the chunk.
  template <int warps>
  GRADSCALE_DEVICE A walk_in_turns(int turn, A last, A& carry, A (&ys)[kAhead], int lane, A* shared) const {
#pragma unroll 1
    for (int w = 0; w < warps; ++w) {
      __syncthreads();
      if (w == turn) {
        carry = is_finite(carry) ? carry : last; // keeps its bits, whatever follows in the walk
        const A after = walk(carry, ys, lane);
        if (lane == 0) {
          shared[0] = after;
        }
      }
      __syncthreads();
      last = shared[0];
    }
    return last;
  }
};

// `begin`: the first step of the chunk. `whole`: the row has all steps of a chunk from there on.
template <bool whole, int warps, class A, class F, Layout layout, unsigned given>
GRADSCALE_DEVICE void walk_chunk(
    const Row<A, F, layout, given>& row, int64_t begin, int64_t chunk, PublishedMap<A>* own, A* shared) {
  using Index = typename Row<A, F, layout, given>::Index;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
  // The position of the warp in the walk. Steps increase with the warp, so an adjoint walks through the warps in their
  // order, and a function in reverse.
  const int turn = F::kAdjoint ? warp : warps - 1 - warp;
  const int64_t begin_of_warp = begin + warp * (kAhead * kWarpSize);
  const auto first = static_cast<Index>(begin_of_warp + (F::kAdjoint ? 0 : (kAhead - 1) * kWarpSize) + lane);
  Rounds<A, F> rounds;
  Later<A> beyond[kAhead];
  if (whole || begin_of_warp + kAhead * kWarpSize <= row.steps) {
    read_along<true>(row, first, lane, rounds.steps, beyond);
  } else {
    read_along<false>(row, first, lane, rounds.steps, beyond);
  }
  const Map<A> warp_map = rounds.compose(row, first, beyond, lane);
  if (lane == 0) {
    shared[2 * turn] = warp_map.a;
    shared[2 * turn + 1] = warp_map.b;
  }
  __syncthreads();
  const int place = lane % warps;
  const Map<A> to_warp = composed_in_order<warps>(Map<A>{shared[2 * place], shared[2 * place + 1]}, lane);
  bool is_published = false;
  if (warp == 0) {
    const Map<A> all{__shfl_sync(kWholeWarp, to_warp.a, warps - 1), __shfl_sync(kWholeWarp, to_warp.b, warps - 1)};
    const A y = enter_chunk(own, all, chunk, lane, is_published);
    if (lane == 0) {
      shared[2 * warps] = y;
    }
  }
  __syncthreads();
  const A chunk_value = shared[2 * warps];
  const A after_warp = applied(to_warp, chunk_value); // y after the warp whose turn is `place`
  const A before_warp = __shfl_sync(kWholeWarp, after_warp, turn == 0 ? 0 : turn - 1);
  A carry = turn == 0 ? chunk_value : before_warp;
  A last = __shfl_sync(kWholeWarp, after_warp, warps - 1);
  A ys[kAhead];
  if (__any_sync(kWholeWarp, !is_finite(after_warp))) { // the same in all warps, which walk one after the other
    last = rounds.template walk_in_turns<warps>(turn, chunk_value, carry, ys, lane, shared);
  } else if (__any_sync(kWholeWarp, !rounds.apply(carry, ys))) {
    rounds.walk(carry, ys, lane);
  }
  if (threadIdx.x == 0 && !is_published) {
    publish(own, Map<A>{last, A(0)});
  }
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    write_results<whole>(row, first + k * kRound<F>, rounds.steps[k], ys[k], carry, lane);
    carry = __shfl_sync(kWholeWarp, ys[k], kLast<F>);
  }
}

template <class A, class F, Layout layout, unsigned given, int warps>
GRADSCALE_KERNEL((warps * kWarpSize), 2 * kWarps / warps)
recur_chunks(GRADSCALE_ARGUMENT(ReturnsCall) call) {
  GRADSCALE_SHARED(unsigned, shared_count, 1);
  GRADSCALE_SHARED(A, shared, 2 * warps + 1); // maps of the warps, and y before the chunk
  const auto rows = static_cast<unsigned>(call.rows);
  unsigned count = blockIdx.x; // blocks that started before this one
  if (gridDim.x != rows) {
    if (threadIdx.x == 0) {
      *shared_count = atomicAdd(static_cast<unsigned*>(call.workspace), 1u);
    }
    __syncthreads();
    count = *shared_count;
  }
  auto* const maps = reinterpret_cast<PublishedMap<A>*>(static_cast<uint64_t*>(call.workspace) + 1);
  // 32 bits, like the grid's size: 64-bit divisions would be a third of the kernel's instructions.
  const int64_t chunks = gridDim.x / rows, chunk = count / rows, index = count % rows;
  constexpr int steps = warps * kAhead * kWarpSize; // of a chunk
  const Row<A, F, layout, given> row(call, index);
  PublishedMap<A>* const own = maps + index * chunks + chunk;
  const int64_t begin = (F::kAdjoint ? chunk : chunks - 1 - chunk) * steps;
  if (begin + steps <= call.steps) {
    walk_chunk<true, warps>(row, begin, chunk, own, shared);
  } else {
    walk_chunk<false, warps>(row, begin, chunk, own, shared);
  }
}

} // namespace gradscale
