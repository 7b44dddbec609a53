#include "gradient_pool.h"

#include "../cuda/empty_tensor.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

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
  int64_t call = 0; // `calls_` when the block was last taken or returned
};

// Free blocks by size in bytes. While a tensor uses a block, its node is out of the map, so that returning it allocates
// nothing.
using Blocks = std::multimap<size_t, Block>;
using Node = Blocks::node_type;

class GradientPool final : public c10::Allocator {
 public:
  GradientPool() {
    // A child process has no thread that could unlock a mutex that was locked during fork.
    pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
  }

  // Never destroyed: tensors may outlive the interpreter.
  static GradientPool& get() {
    static auto* const pool = new GradientPool();
    return *pool;
  }

  void begin_call() {
    Blocks released; // freed after the mutex is unlocked
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    for (auto block = free_.begin(); block != free_.end();) {
      const auto own = block++;
      if (calls_ - own->second.call > kMaxIdleCalls) {
        released.insert(free_.extract(own));
      }
    }
  }

  c10::DataPtr allocate(size_t size) override {
    if (size < kSmallestBlock) {
      return c10::GetCPUAllocator()->allocate(size);
    }
    auto node = std::make_unique<Node>(take(size));
    Block& block = node->mapped();
    if (block.memory == nullptr) {
      block.memory.reset(c10::alloc_cpu(size));
    }
    void* memory = block.memory.get();
    c10::profiledCPUMemoryReporter().New(memory, node->key());
    return {memory, node.release(), &take_back, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  int64_t release() {
    Blocks released;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      released.swap(free_);
    }
    size_t bytes = 0;
    for (const auto& [size, block] : released) {
      bytes += size;
    }
    return static_cast<int64_t>(bytes);
  }

 private:
  // Returns the smallest free block of `size` to four times `size` bytes, the last one returned if there are several.
  // If there is none, frees smaller blocks of at least a quarter of `size`, about `size` bytes in all, and returns a
  // block without memory.
  Node take(size_t size) {
    Blocks released;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.lower_bound(size);
    if (found == free_.end() || found->first / 4 > size) {
      size_t replaced = 0;
      for (auto block = free_.lower_bound(size / 4); block != found && replaced < size;) {
        replaced += block->first;
        released.insert(free_.extract(block++));
      }
      found = free_.emplace(size, Block());
    }
    found->second.call = calls_;
    return free_.extract(found);
  }

  static void take_back(void* context) {
    const std::unique_ptr<Node> node(static_cast<Node*>(context));
    Block& block = node->mapped();
    c10::profiledCPUMemoryReporter().Delete(block.memory.get());
    GradientPool& pool = get();
    const std::lock_guard<std::mutex> lock(pool.mutex_);
    if (pool.calls_ - block.call <= kMaxIdleCalls && pool.free_.size() < kMaxFreeBlocks) {
      block.call = pool.calls_;
      pool.free_.insert(pool.free_.lower_bound(node->key()), std::move(*node));
    }
  }

  std::mutex mutex_;
  Blocks free_; // among blocks of equal size, the last returned comes first
  int64_t calls_ = 0;
};

} // namespace

void begin_pooled_call(c10::Device device) {
  if (device.is_cpu()) {
    GradientPool::get().begin_call();
  }
}

at::Tensor empty_pooled(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    return empty_tensor(sizes, options);
  }
  const at::ScalarType dtype = options.dtype().toScalarType();
  return at::detail::empty_generic(
      sizes, &GradientPool::get(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
}

bool is_large(const at::TensorOptions& options, const c10::SymInt& count) {
  constexpr int64_t kLarge = 1 << 18; // bytes
  return options.device().is_cpu() && count.expect_int() * static_cast<int64_t>(options.dtype().itemsize()) >= kLarge;
}

at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return is_large(options, c10::multiply_integers(sizes)) ? empty_pooled(sizes, options) : empty_tensor(sizes, options);
}

int64_t release_gradient_pool() {
  return GradientPool::get().release();
}

} // namespace gradscale
