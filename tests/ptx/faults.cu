// Cross-entropy of softmax with one block per row, and faults that the simulated driver must report: FAULT is one of
// them. With `none` the kernel is correct.
enum {
  none,
  missing_barrier,
  shared_write_out_of_bounds,
  divergent_barrier,
  misaligned_load,
  global_write_out_of_bounds,
  missing_warp_barrier,
  missing_second_warp_barrier,
  block_race,
  block_race_across_barrier,
  missing_fence,
  reader_missing_fence,
  block_fence,
  return_before_barrier,
  return_before_shuffle
};

constexpr int kThreads = 96, kWarp = 32, kWarps = kThreads / kWarp, kVector = 4, kTile = kWarp * kVector;
constexpr unsigned kAllLanes = 0xffffffff;
constexpr float kLeast = -3.4e38f;

// Over some columns: the maximum of x, and the sum of exp(x - maximum).
struct PartOfSoftmax {
  float maximum, sum;
};

struct Arguments {
  const float* logits;     // [rows, stride]
  const long long* target; // [rows]
  float* loss;             // [rows]
  float* gradient;         // [rows, stride]
  float* total;            // the sum of `loss`, stored by the last block to finish
  unsigned* finished;      // number of finished blocks, zero before the launch
  long long width, stride; // stride: a multiple of kVector
};

__device__ PartOfSoftmax join(PartOfSoftmax a, PartOfSoftmax b) {
  const float maximum = a.maximum < b.maximum ? b.maximum : a.maximum;
  return {maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
}

__device__ PartOfSoftmax join_in_warp(PartOfSoftmax part) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float maximum = __shfl_xor_sync(kAllLanes, part.maximum, distance);
    const float sum = __shfl_xor_sync(kAllLanes, part.sum, distance);
    part = join(part, {maximum, sum});
  }
  return part;
}

__device__ PartOfSoftmax part_of_thread(const float* logits, long long width) {
  PartOfSoftmax part = {kLeast, 0.0f};
  const long long first = FAULT == misaligned_load ? 1 : 0, vectors = (width - first) / kVector;
  for (long long i = threadIdx.x; i < vectors; i += kThreads) {
    const float4 v = *reinterpret_cast<const float4*>(logits + first + i * kVector);
    part = join(join(join(join(part, {v.x, 1.0f}), {v.y, 1.0f}), {v.z, 1.0f}), {v.w, 1.0f});
  }
  for (long long column = first + vectors * kVector + threadIdx.x; column < width; column += kThreads) {
    part = join(part, {logits[column], 1.0f});
  }
  return part;
}

// Each warp takes tiles of 32 vectors in turn. A lane computes a vector, and the warp stores the tile through shared
// memory, 32 neighbouring columns at a time.
__device__ void store_gradient(
    const float* logits, float* gradient, long long width, long long target, float log_of_sum) {
  __shared__ float tiles[kWarps * kTile];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float* const tile = tiles + warp * kTile;
  const long long end = FAULT == global_write_out_of_bounds ? width + 1 : width;
  for (long long first = warp * kTile; first < end; first += kWarps * kTile) {
    for (int i = lane * kVector; i < (lane + 1) * kVector; i++) {
      const long long column = first + i;
      const float probability = column < width ? expf(logits[column] - log_of_sum) : 0.0f;
      tile[i] = probability - (column == target ? 1.0f : 0.0f);
    }
    if (FAULT != missing_warp_barrier) {
      __syncwarp();
    }
    for (int i = lane; i < kTile && first + i < end; i += kWarp) {
      gradient[first + i] = tile[i];
    }
    if (FAULT != missing_second_warp_barrier) {
      __syncwarp();
    }
  }
}

__device__ void add_up_losses(const Arguments& arguments) {
  if (FAULT == block_fence) {
    __threadfence_block();
  } else if (FAULT != missing_fence) {
    __threadfence();
  }
  if (atomicAdd(arguments.finished, 1U) == gridDim.x - 1) {
    if (FAULT != reader_missing_fence) {
      __threadfence();
    }
    float total = 0.0f;
    for (unsigned row = 0; row < gridDim.x; row++) {
      total += arguments.loss[row];
    }
    *arguments.total = total;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) cross_entropy(const __grid_constant__ Arguments arguments) {
  __shared__ PartOfSoftmax parts[kWarps];
  const long long row = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const float* const logits = arguments.logits + row * arguments.stride;
  if (FAULT == return_before_barrier && threadIdx.x >= kThreads - kWarp) {
    return;
  }
  if (FAULT == block_race_across_barrier && row == 0 && threadIdx.x == 0) {
    *arguments.total = 0.0f;
  }
  const PartOfSoftmax part = part_of_thread(logits, arguments.width);
  if (FAULT == return_before_shuffle && lane == 7) {
    return;
  }
  const PartOfSoftmax part_of_warp = join_in_warp(part);
  if (lane == 0) {
    parts[FAULT == shared_write_out_of_bounds ? warp + 1 : warp] = part_of_warp;
  }
  if (FAULT == divergent_barrier && warp == 0) {
    __syncthreads();
  } else if (FAULT != missing_barrier) {
    __syncthreads();
  }

  PartOfSoftmax all = parts[0];
  for (int other = 1; other < kWarps; other++) {
    all = join(all, parts[other]);
  }
  const float log_of_sum = all.maximum + logf(all.sum);
  const long long target = arguments.target[row];
  store_gradient(logits, arguments.gradient + row * arguments.stride, arguments.width, target, log_of_sum);
  if (threadIdx.x == 0) {
    const float start = FAULT == block_race_across_barrier ? *arguments.total : 0.0f;
    arguments.loss[row] = start + log_of_sum - logits[target];
    if (FAULT == block_race) {
      *arguments.total += arguments.loss[row];
    } else {
      add_up_losses(arguments);
    }
  }
}
