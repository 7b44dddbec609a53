// What simt.h promises: what collectives return, who runs when, and what is said of each misuse.
#include "simt.h"

#include <cmath>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr unsigned kAllLanes = 0xffffffff;

int checks = 0;
int failed = 0;

void check(bool right, int line, const std::string& what) {
  checks++;
  if (!right) {
    failed++;
    fprintf(stderr, "test_runtime.cpp:%d: %s\n", line, what.c_str());
  }
}

#define CHECK(condition) check(condition, __LINE__, #condition)

// Checks that the launch is refused, with a message that has all of `parts`.
template <class Kernel>
void check_refused(int line, int64_t blocks, int threads, const std::vector<std::string>& parts, const Kernel& kernel) {
  try {
    simt::launch("misused", blocks, threads, kernel);
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    check(message.find("simt: kernel misused") == 0, line, "the message is: " + message);
    for (const std::string& part : parts) {
      check(message.find(part) != std::string::npos, line, "\"" + part + "\" is not in: " + message);
    }
    return;
  }
  check(false, line, "nothing was refused");
}

void test_indices() {
  std::vector<unsigned> seen(7 * 45);
  simt::launch("indices", 7, 45, [&] {
    const unsigned block = blockIdx.x;
    const unsigned thread = threadIdx.x;
    __syncthreads();
    if (blockIdx.x == block && threadIdx.x == thread && blockDim.x == 45 && gridDim.x == 7 && threadIdx.y == 0) {
      seen[block * 45 + thread]++;
    }
  });
  for (const unsigned times : seen) {
    CHECK(times == 1);
  }
}

void test_shuffles() {
  std::vector<int> index(32);
  std::vector<double> up(32);
  std::vector<int64_t> down(32);
  std::vector<float> exclusive(32);
  std::vector<unsigned> of_eight(32);
  simt::launch("shuffles", 1, 32, [&] {
    const unsigned lane = threadIdx.x;
    index[lane] = __shfl_sync(kAllLanes, static_cast<int>(lane) - 10, 37);
    up[lane] = __shfl_up_sync(kAllLanes, lane * 0.5, 3);
    down[lane] = __shfl_down_sync(kAllLanes, int64_t{1} << lane, 5);
    exclusive[lane] = __shfl_xor_sync(kAllLanes, static_cast<float>(lane), 9);
    of_eight[lane] = __shfl_down_sync(kAllLanes, lane, 5, 8);
  });
  for (int lane = 0; lane < 32; lane++) {
    const size_t i = static_cast<size_t>(lane);
    CHECK(index[i] == 5 - 10);
    CHECK(up[i] == (lane < 3 ? lane : lane - 3) * 0.5);
    CHECK(down[i] == int64_t{1} << (lane + 5 < 32 ? lane + 5 : lane));
    CHECK(exclusive[i] == static_cast<float>(lane ^ 9));
    CHECK(of_eight[i] == static_cast<unsigned>(lane % 8 + 5 < 8 ? lane + 5 : lane));
  }
}

void test_votes() {
  constexpr unsigned kLow = 0x0000ffff;
  std::vector<unsigned> ballot(40);
  std::vector<int> any(40);
  std::vector<int> all(40);
  simt::launch("votes", 1, 40, [&] {
    const unsigned thread = threadIdx.x;
    const unsigned lane = thread % warpSize;
    const unsigned mask = thread >= 32 ? kAllLanes : lane < 16 ? kLow : ~kLow;
    ballot[thread] = __ballot_sync(mask, lane % 3 == 0);
    any[thread] = __any_sync(mask, lane == 20);
    all[thread] = __all_sync(mask, lane < 16);
  });
  for (unsigned thread = 0; thread < 40; thread++) {
    const unsigned multiples_of_three = 0x49249249;
    const unsigned lanes = thread >= 32 ? 0xff : thread < 16 ? kLow : ~kLow;
    CHECK(ballot[thread] == (multiples_of_three & lanes));
    CHECK(any[thread] == (thread >= 16 && thread < 32));
    CHECK(all[thread] == (thread < 16 || thread >= 32));
  }
}

void test_shared_arrays() {
  std::vector<double> sums(3);
  bool all_filled = true;
  simt::launch("shared", 3, 64, [&] {
    float(&numbers)[64] = simt::shared<float[64]>(__FILE__, 1);
    int(&integers)[64] = simt::shared<int[64]>(__FILE__, 1); // another type: another array
    float(&others)[64] = simt::shared<float[64]>(__FILE__, 2);
    const unsigned thread = threadIdx.x;
    if (!std::isnan(numbers[thread]) || integers[thread] != -1 || !std::isnan(others[thread])) {
      all_filled = false;
    }
    numbers[thread] = static_cast<float>(thread);
    integers[thread] = 7;
    others[thread] = 0.5f;
    __syncthreads();
    if (thread == 0) {
      for (int i = 0; i < 64; i++) {
        sums[blockIdx.x] += numbers[i] * integers[i] + others[i];
      }
    }
  });
  CHECK(all_filled);
  for (const double sum : sums) {
    CHECK(sum == 7 * 63 * 32 + 32);
  }
}

void test_atomics() {
  int integer = 5;
  unsigned natural = 0;
  unsigned long long large = 0;
  std::vector<unsigned> tickets(4 * 64);
  simt::launch("atomics", 4, 64, [&] {
    atomicAdd(&integer, -1);
    atomicAdd(&large, 1ULL << 33);
    tickets[blockIdx.x * 64 + threadIdx.x] = atomicAdd(&natural, 1U);
  });
  CHECK(integer == 5 - 4 * 64);
  CHECK(natural == 4 * 64);
  CHECK(large == (4ULL * 64) << 33);
  CHECK(std::set<unsigned>(tickets.begin(), tickets.end()).size() == tickets.size());
}

// What a block publishes by a fence and a counter, the last one to count may read.
void test_last_block() {
  std::vector<int> parts(6);
  unsigned finished = 0;
  int total = 0;
  simt::launch("last_block", 6, 32, [&] {
    bool(&is_last)[1] = simt::shared<bool[1]>(__FILE__, __LINE__);
    if (threadIdx.x == 0) {
      parts[blockIdx.x] = static_cast<int>(blockIdx.x) + 1;
      __threadfence();
      is_last[0] = atomicAdd(&finished, 1U) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last[0]) {
      __threadfence();
      const unsigned lane = threadIdx.x;
      int sum = lane == 0 ? parts[0] + parts[1] + parts[2] + parts[3] + parts[4] + parts[5] : 0;
      sum = __shfl_sync(kAllLanes, sum, 0);
      if (lane == 31) {
        total = sum;
      }
    }
  });
  CHECK(total == 21);
}

// The blocks and threads of a small launch as they come, with a barrier after the first half.
std::vector<unsigned> sequence_of(simt::Order order, uint64_t seed) {
  const simt::Options before = simt::options();
  simt::options().order = order;
  simt::options().seed = seed;
  std::vector<unsigned> sequence(2 * 3 * 8);
  unsigned next = 0;
  simt::launch("sequence", 3, 8, [&] {
    sequence[atomicAdd(&next, 1U)] = blockIdx.x * 100 + threadIdx.x;
    __syncthreads();
    sequence[atomicAdd(&next, 1U)] = blockIdx.x * 100 + 50 + threadIdx.x;
  });
  simt::options() = before;
  return sequence;
}

void test_orders() {
  const std::vector<unsigned> forward = sequence_of(simt::Order::forward, 1);
  const std::vector<unsigned> reverse = sequence_of(simt::Order::reverse, 1);
  for (unsigned i = 0; i < 48; i++) {
    const unsigned in_half = i % 16 / 8 * 50;
    CHECK(forward[i] == i / 16 * 100 + in_half + i % 8);
    CHECK(reverse[i] == (2 - i / 16) * 100 + in_half + 7 - i % 8);
  }
  const std::vector<unsigned> random = sequence_of(simt::Order::random, 1);
  CHECK(random == sequence_of(simt::Order::random, 1));
  CHECK(random != sequence_of(simt::Order::random, 2));
  CHECK(random != forward);
  CHECK(std::set<unsigned>(random.begin(), random.end()).size() == 48);
}

// Launches of several threads of the system do not disturb each other.
void test_launches_of_several_threads() {
  std::vector<std::vector<int>> sums(4, std::vector<int>(10));
  std::vector<std::thread> launchers;
  for (std::vector<int>& sums_of_launcher : sums) {
    launchers.emplace_back([&sums_of_launcher] {
      simt::launch("launched", 10, 64, [&] {
        int(&numbers)[64] = simt::shared<int[64]>(__FILE__, __LINE__);
        numbers[threadIdx.x] = static_cast<int>(threadIdx.x);
        __syncthreads();
        if (threadIdx.x == 0) {
          for (const int number : numbers) {
            sums_of_launcher[blockIdx.x] += number;
          }
        }
      });
    });
  }
  for (std::thread& launcher : launchers) {
    launcher.join();
  }
  for (const std::vector<int>& sums_of_launcher : sums) {
    for (const int sum : sums_of_launcher) {
      CHECK(sum == 63 * 32);
    }
  }
}

void test_bad_launches() {
  check_refused(__LINE__, 0, 32, {"cannot be launched with 0 blocks of 32 threads"}, [] {});
  check_refused(__LINE__, int64_t{1} << 31, 32, {"2147483648 blocks of 32 threads"}, [] {});
  check_refused(__LINE__, 1, 0, {"1 blocks of 0 threads"}, [] {});
  check_refused(__LINE__, 1, 1025, {"1 blocks of 1025 threads"}, [] {});
}

// Lines are given by hand here; who does not give them gets the line of the call, which the last check is for.
void test_misused_barriers() {
  check_refused(
      __LINE__,
      2,
      64,
      {"block ", ", thread ", "divergent barrier: comes to __syncthreads at ", "left:1", "right:2"},
      [] {
        if (threadIdx.x < 40) {
          __syncthreads("left", 1);
        } else {
          __syncthreads("right", 2);
        }
      });
  check_refused(
      __LINE__,
      1,
      64,
      {"block 0: deadlock: 1 of 64 threads returned, 63 wait in __syncthreads at left:1 (the first is thread 0)"},
      [] {
        if (threadIdx.x != 3) {
          __syncthreads("left", 1);
        }
      });
  check_refused(
      __LINE__,
      1,
      64,
      {"block 0: deadlock: 0 of 64 threads returned",
       "10 wait in __syncwarp at left:1 (the first is thread 0)",
       "54 wait in __syncthreads at right:2 (the first is thread 10)"},
      [] {
        if (threadIdx.x < 10) {
          __syncwarp(kAllLanes, "left", 1);
        }
        __syncthreads("right", 2);
      });
  const int line = __LINE__ + 1;
  const auto returns_before_barrier = [] { threadIdx.x == 0 ? void() : __syncthreads(); };
  check_refused(__LINE__, 1, 2, {"test_runtime.cpp:" + std::to_string(line)}, returns_before_barrier);
}

void test_misused_collectives() {
  check_refused(
      __LINE__,
      1,
      32,
      {"block 0, thread 3: __shfl_xor_sync at left:1 reads lane 19, which is not in the mask 0000ffff"},
      [] {
        if (threadIdx.x < 16) {
          __shfl_xor_sync(0xffff, 1.0f, threadIdx.x == 3 ? 16 : 1, 32, "left", 1);
        }
      });
  check_refused(
      __LINE__, 1, 40, {"thread 3", "__shfl_down_sync at left:1 reads lane 8, which is not in the mask 000000ff"}, [] {
        __shfl_down_sync(threadIdx.x < 32 ? kAllLanes : 0xff, 1.0f, 1, 32, "left", 1);
      });
  check_refused(__LINE__, 1, 32, {"thread 5: __ballot_sync at left:1 is not for lane 5: its mask is 00000010"}, [] {
    if (threadIdx.x == 5) {
      __ballot_sync(0x10, 1, "left", 1);
    }
  });
  check_refused(__LINE__, 1, 32, {"divergent collective", "left:1 with mask", "right:2 with mask ffffffff"}, [] {
    if (threadIdx.x < 16) {
      __any_sync(kAllLanes, 1, "left", 1);
    } else {
      __any_sync(kAllLanes, 1, "right", 2);
    }
  });
  check_refused(__LINE__, 1, 32, {"divergent collective", "left:1", "mask ffffffff", "mask 7fffffff"}, [] {
    __syncwarp(threadIdx.x < 16 || threadIdx.x == 31 ? kAllLanes : 0x7fffffff, "left", 1);
  });
  const auto all_of_a_lane_that_returns = [] {
    if (threadIdx.x != 32) {
      __all_sync(kAllLanes, 1, "left", 1);
    }
  };
  const simt::Order before = simt::options().order;
  simt::options().order = simt::Order::forward; // lane 0 returns, then the others come
  check_refused(
      __LINE__,
      1,
      64,
      {"thread 33: __all_sync at left:1 waits for ever: its mask ffffffff names lanes that returned, 00000001"},
      all_of_a_lane_that_returns);
  simt::options().order = simt::Order::reverse;
  check_refused(
      __LINE__,
      1,
      64,
      {"deadlock: 33 of 64 threads returned, 31 wait in __all_sync at left:1 (the first is thread 33)"},
      all_of_a_lane_that_returns);
  simt::options().order = before;
  check_refused(__LINE__, 1, 32, {"__shfl_up_sync at left:1 has distance 32, which is not from 0 to 31"}, [] {
    __shfl_up_sync(kAllLanes, 1, 32, 32, "left", 1);
  });
  check_refused(__LINE__, 1, 32, {"__shfl_sync at left:1 has width 12, which is no power of two up to 32"}, [] {
    __shfl_sync(kAllLanes, 1, 0, 12, "left", 1);
  });
}

void test_other_misuses() {
  check_refused(__LINE__, 3, 32, {", thread 9: misaligned load16 of 16 bytes, address 0x", ", at left:1"}, [] {
    simt::check_aligned(reinterpret_cast<const void*>(threadIdx.x == 9 ? 0x1008 : 0x1010), 16, "load16", "left", 1);
  });
  check_refused(__LINE__, 1, 32, {"the shared array at left:2 brings the block to 49156 bytes in 2 shared"}, [] {
    simt::shared<float[12288]>("left", 1);
    simt::shared<float[1]>("left", 2);
  });
  check_refused(__LINE__, 1, 32, {"block 0, thread 7: exception: what a kernel threw"}, [] {
    if (threadIdx.x == 7) {
      throw std::runtime_error("what a kernel threw");
    }
    __syncthreads();
  });
}

} // namespace

int main() {
  test_indices();
  test_shuffles();
  test_votes();
  test_shared_arrays();
  test_atomics();
  test_last_block();
  test_orders();
  test_launches_of_several_threads();
  test_bad_launches();
  test_misused_barriers();
  test_misused_collectives();
  test_other_misuses();
  test_indices(); // what was refused leaves nothing behind
  test_shared_arrays();
  printf("%d checks, %d failed\n", checks, failed);
  return failed == 0 ? 0 : 1;
}
