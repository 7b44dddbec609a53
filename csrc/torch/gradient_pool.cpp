#include "gradient_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>
#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

constexpr size_t kSmallestBlock = 1 << 14; // malloc itself reuses the pages of smaller allocations
constexpr size_t kMaxFreeBlocks = 1024;
constexpr int64_t kMaxIdleCalls = 16;

struct FreeMemory {
  void operator()(void* memory) const {
    c10::free_cpu(memory);
  }
};

struct Block {
  std::unique_ptr<void, FreeMemory> memory;
  size_t size = 0;
  int64_t call = 0; // `calls_` when the block was last taken or returned
};

class GradientPool final : public c10::Allocator {
 public:
  GradientPool() {
    free_.reserve(kMaxFreeBlocks); // returning a block must not allocate, which may fail
    // A child process has no thread that could unlock a mutex that was locked during fork.
    pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
  }

  // Never destroyed: tensors may outlive the interpreter.
  static GradientPool& get() {
    static auto* const pool = new GradientPool();
    return *pool;
  }

  void begin_call() {
    std::vector<Block> released; // freed after the mutex is unlocked
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    const auto is_recent = [&](const Block& block) { return calls_ - block.call <= kMaxIdleCalls; };
    release_until(std::find_if(free_.begin(), free_.end(), is_recent), released);
  }

  c10::DataPtr allocate(size_t size) override {
    if (size < kSmallestBlock) {
      return c10::GetCPUAllocator()->allocate(size);
    }
    auto block = std::make_unique<Block>(take(size));
    if (block->memory == nullptr) {
      block->memory.reset(c10::alloc_cpu(size));
      block->size = size;
    }
    void* memory = block->memory.get();
    c10::profiledCPUMemoryReporter().New(memory, block->size);
    return {memory, block.release(), &take_back, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  int64_t release() {
    std::vector<Block> released;
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(release_until(free_.end(), released));
  }

 private:
  using Blocks = std::vector<Block>;

  // True if `size` is at least a quarter of `larger`, so that a block of `larger` bytes may hold `size` bytes.
  static bool is_near(size_t size, size_t larger) {
    return size >= larger / 4;
  }

  // Returns the smallest free block that is large enough and near `size`. If there is none, frees smaller blocks of at
  // least a quarter of `size`, about `size` bytes in all, and returns a block without memory.
  Block take(size_t size) {
    std::vector<Block> released;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = free_.rend();
    for (auto block = free_.rbegin(); block != free_.rend(); ++block) {
      if (block->size >= size && is_near(size, block->size) && (best == free_.rend() || block->size < best->size)) {
        best = block;
        if (best->size == size) {
          break;
        }
      }
    }
    Block taken;
    if (best != free_.rend()) {
      taken = std::move(*best);
      free_.erase(std::next(best).base());
    } else {
      size_t replaced = 0;
      const auto is_replaced = [&](const Block& block) {
        const bool replace = block.size < size && is_near(block.size, size) && replaced < size;
        replaced += replace ? block.size : 0;
        return replace;
      };
      release_until(std::stable_partition(free_.begin(), free_.end(), is_replaced), released);
    }
    taken.call = calls_;
    return taken;
  }

  static void take_back(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    c10::profiledCPUMemoryReporter().Delete(block->memory.get());
    GradientPool& pool = get();
    const std::lock_guard<std::mutex> lock(pool.mutex_);
    if (pool.calls_ - block->call <= kMaxIdleCalls && pool.free_.size() < kMaxFreeBlocks) {
      block->call = pool.calls_;
      pool.free_.push_back(std::move(*block));
    }
  }

  // Moves the free blocks before `end` to `released`; returns their bytes.
  size_t release_until(Blocks::iterator end, Blocks& released) {
    size_t bytes = 0;
    released.assign(std::make_move_iterator(free_.begin()), std::make_move_iterator(end));
    free_.erase(free_.begin(), end);
    for (const Block& block : released) {
      bytes += block.size;
    }
    return bytes;
  }

  std::mutex mutex_;
  Blocks free_; // in the order in which they were returned
  int64_t calls_ = 0;
};

} // namespace

void begin_pooled_call() {
  GradientPool::get().begin_call();
}

// The deleter of the memory that a gradient gets when its own is moved; it marks the gradient as moved.
void free_replacement(void* memory) {
  c10::free_cpu(memory);
}

at::Tensor empty_gradient(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    return at::empty(sizes, options);
  }
  const at::ScalarType dtype = options.dtype().toScalarType();
  return at::detail::empty_generic(
      sizes, &GradientPool::get(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
}

at::Tensor move_gradient(const at::Tensor& gradient) {
  const c10::Storage& storage = gradient.storage();
  if (storage.allocator() != &GradientPool::get() || storage.use_count() != 1 ||
      gradient.nbytes() != storage.nbytes()) {
    return {};
  }
  void* untouched = c10::alloc_cpu(storage.nbytes()); // never touched, hence without pages
  c10::DataPtr memory = storage.set_data_ptr({untouched, untouched, &free_replacement, storage.device()});
  c10::Storage own(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), storage.allocator(), /*resizable=*/true);
  return at::empty({0}, gradient.options()).set_(own, 0, gradient.sizes(), gradient.strides());
}

bool was_moved(const at::Tensor& gradient) {
  return gradient.storage().data_ptr().get_deleter() == &free_replacement;
}

int64_t release_gradient_pool() {
  return GradientPool::get().release();
}

} // namespace gradscale
