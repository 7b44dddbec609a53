// Launches kernels on devices. Each kernel is compiled separately, for the types and widths in its name, so that host
// code needs neither a CUDA compiler nor CUDA headers. Python sets how kernels are compiled.
#pragma once

#include "../formulas/port.h"
#include "empty_tensor.h"
#include "table.h"
#include "threads.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace gradscale {

// True for GPUs when kernels are available. CPU tensors run device kernels only in tests.
bool runs_kernels(c10::Device device);

// The number of multiprocessors of the current device.
int64_t multiprocessors();

// Makes a device current during the lifetime of this object, and launches kernels on its current stream.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : guard_(device) {
    if (!device.is_cpu()) {
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    }
  }

  // Allocates memory for launches. PyTorch's allocator reuses it in the order of the stream.
  at::Tensor memory(int64_t bytes) const {
    return empty_tensor({bytes}, at::TensorOptions().dtype(at::kByte).device(guard_.current_device()));
  }

  // Launches `blocks` blocks of `threads` threads asynchronously; does nothing if `blocks` is 0. `file`, relative to
  // csrc, defines the kernel. `name` is its C++ name within namespace gradscale, and its argument is one struct. A
  // kernel is compiled and loaded at its first launch on a device.
  template <class Argument>
  void launch(const char* file, const std::string& name, int64_t blocks, int threads, const Argument& argument) const {
    static_assert(std::is_trivially_copyable<Argument>::value && sizeof(Argument) <= 32764);
    if (blocks != 0) {
      start(file, name, blocks, threads, &argument, sizeof(Argument));
    }
  }

 private:
  void start(
      const char* file, const std::string& name, int64_t blocks, int threads, const void* argument, size_t bytes) const;

  c10::DeviceGuard guard_;
  void* stream_ = nullptr; // a CUstream; null is the default stream
};

// The name of an instance of a template: "name<first, second>".
std::string instance(const std::string& template_name, const std::vector<std::string>& arguments);

// Builds a Table.
class TableBuilder {
 public:
  // Adds structs, and returns their offset in the table.
  template <class T>
  int64_t add(const T* items, int64_t count) {
    static_assert(alignof(T) <= 8);
    const auto offset = static_cast<int64_t>(bytes_.size());
    const auto* bytes = reinterpret_cast<const char*>(items);
    bytes_.insert(bytes_.end(), bytes, bytes + static_cast<int64_t>(sizeof(T)) * count);
    bytes_.resize((bytes_.size() + 7) / 8 * 8);
    return offset;
  }

  // Returns the table for kernels on this device. A table that is too large for arguments is copied to memory that
  // this object owns.
  Table build(const OnDevice& device) {
    Table table{};
    const auto size = static_cast<int64_t>(bytes_.size());
    if (size <= Table::kInside) {
      memcpy(table.inside, bytes_.data(), size);
      return table;
    }
    memory_ = device.memory(size);
    char* const memory = static_cast<char*>(memory_.mutable_data_ptr());
    for (int64_t begin = 0; begin < size; begin += CopyOfTable::kMost) {
      CopyOfTable copy; // NOLINT(cppcoreguidelines-pro-type-member-init): what is not copied is not set
      copy.to = memory + begin;
      copy.bytes = std::min(size - begin, CopyOfTable::kMost);
      memcpy(copy.part, bytes_.data() + begin, copy.bytes);
      device.launch("cuda/table.cuh", "copy_table", (copy.bytes / 8 + kThreads - 1) / kThreads, kThreads, copy);
    }
    table.outside = memory;
    return table;
  }

 private:
  std::vector<char> bytes_;
  at::Tensor memory_;
};

// ---- Python ---------------------------------------------------------------------------------------------------------

// `image(file, name, major, minor, errors)` returns the image of a kernel for GPUs of this compute capability, as
// bytes, and the name of its entry point. It is called with the GIL held, at the first launch of a kernel on a device,
// and again while the driver cannot load the image: `errors` are the driver's errors for the images so far. It raises
// if there is no other image. If no function is set, no kernels run for CUDA tensors.
void set_kernel_images(std::optional<pybind11::function> image);

// Treats CPU tensors as tensors of a GPU whose driver is `library`, a substitute for the CUDA driver, until the next
// call without a library.
void use_driver_for_cpu(const std::optional<std::string>& library);

// Calls `record(file, name)` for CPU and CUDA tensors instead of starting kernels, until the next call without a
// function. The outputs of kernels are not written.
void record_kernels(std::optional<pybind11::function> record);

} // namespace gradscale
