// Launches kernels from host code. Each kernel is compiled separately, for the types and widths in its name. Code that
// includes this header needs neither a CUDA compiler nor CUDA headers.
#pragma once

#include "../formulas/port.h"

#include <array>
#include <atomic>
#include <string>
#include <utility>

namespace gradscale {

using Stream = void*; // a CUstream; null is the default stream

// A kernel, identified by the file that defines it (relative to csrc) and its C++ name within namespace gradscale.
// Instances must live until the program exits, because they cache the functions that the driver has loaded.
class NamedKernel {
 public:
  static constexpr int kMaxDevices = 128; // PyTorch supports at most 120

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
  // The driver's function for a device; null until it is loaded.
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

// Launches a kernel asynchronously, with untyped arguments. Compiles and loads the kernel at its first use.
void start(const NamedKernel& kernel, int64_t blocks, int threads, Stream stream, const void* arguments);

// Launches `blocks` blocks of `threads` threads; does nothing if `blocks` is 0.
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
