// Cross-entropy of softmax with one block a row, and faults in it that the simulator must catch: the macro FAULT, a
// number, puts one of them in. Without it the kernel is right.
#pragma once

#include "cuda/device.h"

#ifndef FAULT
#define FAULT 0
#endif
#define FAULT_MISSING_BARRIER 1
#define FAULT_SHARED_WRITE_OUT_OF_BOUNDS 2
#define FAULT_DIVERGENT_BARRIER 3
#define FAULT_MISALIGNED_LOAD 4
#define FAULT_GLOBAL_WRITE_OUT_OF_BOUNDS 5
#define FAULT_MISSING_WARP_BARRIER 6
#define FAULT_RACE_OF_BLOCKS 7
#define FAULT_MISSING_FENCE 8
#define FAULT_RETURN_BEFORE_BARRIER 9
#define FAULT_RACE_OF_BLOCKS_ACROSS_BARRIER 10

namespace faults {

constexpr int kThreads = 96;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVector = 4; // floats in 16 bytes
constexpr unsigned kAllLanes = 0xffffffff;

struct alignas(16) Vector {
  float element[kVector];
};

// exp(x - maximum), summed over some columns.
struct PartOfSoftmax {
  float maximum;
  float sum;
};

struct Arguments {
  const float* logits;   // [rows, stride]
  const int64_t* target; // [rows]
  float* loss;           // [rows]
  float* gradient;       // [rows, stride]
  float* total;          // the sum of `loss`, by the block that is the last to finish
  unsigned* finished;    // blocks, zero before the launch
  int64_t width;
  int64_t stride; // a multiple of kVector
};

GRADSCALE_DEVICE PartOfSoftmax join(PartOfSoftmax a, PartOfSoftmax b) {
  const float maximum = a.maximum < b.maximum ? b.maximum : a.maximum;
  if (maximum == -INFINITY) {
    return {maximum, 0.0f};
  }
  return {maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
}

GRADSCALE_DEVICE PartOfSoftmax join_in_warp(PartOfSoftmax part) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float maximum = __shfl_xor_sync(kAllLanes, part.maximum, distance);
    const float sum = __shfl_xor_sync(kAllLanes, part.sum, distance);
    part = join(part, {maximum, sum});
  }
  return part;
}

GRADSCALE_DEVICE PartOfSoftmax part_of_thread(const float* logits, int64_t width) {
  PartOfSoftmax part = {-INFINITY, 0.0f};
#if FAULT == FAULT_MISALIGNED_LOAD
  const int64_t first = 1;
#else
  const int64_t first = 0;
#endif
  const int64_t vectors = (width - first) / kVector;
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) {
    const Vector vector = gradscale::load16<Vector>(logits + first + i * kVector);
    for (const float logit : vector.element) {
      part = join(part, {logit, 1.0f});
    }
  }
  for (int64_t column = first + vectors * kVector + threadIdx.x; column < width; column += kThreads) {
    part = join(part, {logits[column], 1.0f});
  }
  return part;
}

// Each warp takes tiles of 32 vectors in turn. A lane computes a vector, and the warp stores the tile through shared
// memory, 32 neighbouring columns at a time.
GRADSCALE_DEVICE void store_gradient(
    const float* logits, float* gradient, int64_t width, int64_t target, float log_of_sum) {
  constexpr int kTile = kWarp * kVector;
  GRADSCALE_SHARED(float, tiles, kWarps* kTile);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float* const tile = tiles + warp * kTile;
#if FAULT == FAULT_GLOBAL_WRITE_OUT_OF_BOUNDS
  const int64_t end = width + 1;
#else
  const int64_t end = width;
#endif
  for (int64_t first = static_cast<int64_t>(warp) * kTile; first < end; first += kWarps * kTile) {
    for (int i = lane * kVector; i < (lane + 1) * kVector; i++) {
      const int64_t column = first + i;
      const float probability = column < width ? expf(logits[column] - log_of_sum) : 0.0f;
      tile[i] = probability - (column == target ? 1.0f : 0.0f);
    }
#if FAULT != FAULT_MISSING_WARP_BARRIER
    __syncwarp();
#endif
    for (int i = lane; i < kTile && first + i < end; i += kWarp) {
      gradient[first + i] = tile[i];
    }
    __syncwarp();
  }
}

GRADSCALE_DEVICE void add_up_losses(const Arguments& arguments) {
#if FAULT != FAULT_MISSING_FENCE
  __threadfence();
#endif
  if (atomicAdd(arguments.finished, 1U) == gridDim.x - 1) {
    __threadfence();
    float total = 0.0f;
    for (unsigned row = 0; row < gridDim.x; row++) {
      total += arguments.loss[row];
    }
    *arguments.total = total;
  }
}

inline GRADSCALE_KERNEL(kThreads, 2) cross_entropy(GRADSCALE_ARGUMENT(Arguments) arguments) {
  GRADSCALE_SHARED(PartOfSoftmax, parts, kWarps);
  const int64_t row = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float* const logits = arguments.logits + row * arguments.stride;
#if FAULT == FAULT_RETURN_BEFORE_BARRIER
  if (threadIdx.x >= arguments.width) {
    return;
  }
#endif

#if FAULT == FAULT_RACE_OF_BLOCKS_ACROSS_BARRIER
  if (row == 0 && threadIdx.x == 0) {
    *arguments.total = 0.0f;
  }
#endif
  const PartOfSoftmax part = join_in_warp(part_of_thread(logits, arguments.width));
  if (lane == 0) {
#if FAULT == FAULT_SHARED_WRITE_OUT_OF_BOUNDS
    parts[warp + 1] = part;
#else
    parts[warp] = part;
#endif
  }
#if FAULT == FAULT_DIVERGENT_BARRIER
  if (warp == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
#elif FAULT != FAULT_MISSING_BARRIER
  __syncthreads();
#endif

  PartOfSoftmax all = parts[0];
  for (int other = 1; other < kWarps; other++) {
    all = join(all, parts[other]);
  }
  const float log_of_sum = all.maximum + logf(all.sum);
  const int64_t target = arguments.target[row];
  store_gradient(logits, arguments.gradient + row * arguments.stride, arguments.width, target, log_of_sum);
  if (threadIdx.x == 0) {
#if FAULT == FAULT_RACE_OF_BLOCKS_ACROSS_BARRIER
    arguments.loss[row] = *arguments.total + log_of_sum - logits[target];
#else
    arguments.loss[row] = log_of_sum - logits[target];
#endif
#if FAULT == FAULT_RACE_OF_BLOCKS
    *arguments.total += arguments.loss[row];
#else
    add_up_losses(arguments);
#endif
  }
}

} // namespace faults
