// How host code starts kernels. Each kernel is compiled on its own, for the types and widths that it is needed for, and
// identified by its name; code that includes this needs neither a CUDA compiler nor CUDA headers.
#pragma once

#include "../formulas/port.h"

#include <array>
#include <atomic>
#include <string>
#include <utility>

namespace gradscale {

using Stream = void*; // of CUDA's driver; null: the default stream

// A kernel: the file that defines it, relative to csrc, and its name as C++ writes it inside of namespace gradscale. It
// is made once and lives as long as the program, because it remembers what has been loaded for it.
class NamedKernel {
 public:
  static constexpr int kMaxDevices = 128; // PyTorch supports 120 at most

  NamedKernel(const char* file, std::string name) : file_(file), name_(std::move(name)) {
  }
  NamedKernel(const NamedKernel&) = delete;
  NamedKernel& operator=(const NamedKernel&) = delete;

  const char* file() const {
    return file_;
  }
  const std::string& name() const {
    return name_;
  }
  // The driver's function for a device; null where it is not loaded yet.
  std::atomic<void*>& function(int device) const {
    return functions_[device];
  }

 private:
  const char* file_;
  std::string name_;
  mutable std::array<std::atomic<void*>, kMaxDevices> functions_{};
};

// A kernel whose argument is one struct of this type.
template <class Argument>
class Kernel : public NamedKernel {
 public:
  using NamedKernel::NamedKernel;
};

// Starts a kernel with its arguments, asynchronously. Compiles and loads it at its first use.
void start(const NamedKernel& kernel, int64_t blocks, int threads, Stream stream, const void* arguments);

// Starts `kernel` for `blocks` blocks of `threads` threads; none where there are no blocks.
template <class Argument>
void launch(const Kernel<Argument>& kernel, int64_t blocks, int threads, Stream stream, const Argument& arguments) {
  static_assert(std::is_trivially_copyable<Argument>::value && sizeof(Argument) <= 32764);
  if (blocks != 0) {
    start(kernel, blocks, threads, stream, &arguments);
  }
}

// The number of multiprocessors of the current device.
int64_t multiprocessors();

} // namespace gradscale
