#include "driver.h"

#include <ATen/DynamicLibrary.h>
#include <c10/util/Exception.h>

#include <memory>
#include <mutex>

namespace gradscale {

namespace {

namespace py = pybind11;

// The functions of the CUDA driver that are called, each with the types of its parameters.
#define GRADSCALE_DRIVER_FUNCTIONS(function)                                                                         \
  function(cuGetErrorString, int, const char**) function(cuCtxGetCurrent, void**) function(cuCtxSetCurrent, void*)   \
      function(cuDevicePrimaryCtxRetain, void**, int) function(cuDeviceGetAttribute, int*, int, int)                 \
          function(cuModuleLoadData, void**, const void*) function(cuModuleGetFunction, void**, void*, const char*)  \
              function(cuStreamIsCapturing, void*, int*) function(cuThreadExchangeStreamCaptureMode, int*) function( \
                  cuLaunchKernel,                                                                                    \
                  void*,                                                                                             \
                  unsigned,                                                                                          \
                  unsigned,                                                                                          \
                  unsigned,                                                                                          \
                  unsigned,                                                                                          \
                  unsigned,                                                                                          \
                  unsigned,                                                                                          \
                  unsigned,                                                                                          \
                  void*,                                                                                             \
                  void**,                                                                                            \
                  void**)

struct Driver {
  std::unique_ptr<at::DynamicLibrary> library;
#define GRADSCALE_MEMBER(name, ...) int (*name)(__VA_ARGS__);
  GRADSCALE_DRIVER_FUNCTIONS(GRADSCALE_MEMBER)
#undef GRADSCALE_MEMBER

  explicit Driver(const char* name) : library(std::make_unique<at::DynamicLibrary>(name, nullptr, /*leak_handle=*/true)) {
#define GRADSCALE_FIND(name, ...) this->name = reinterpret_cast<int (*)(__VA_ARGS__)>(library->sym(#name));
    GRADSCALE_DRIVER_FUNCTIONS(GRADSCALE_FIND)
#undef GRADSCALE_FIND
  }

  std::string error(int code) const {
    const char* text = nullptr;
    cuGetErrorString(code, &text);
    return text == nullptr ? "error " + std::to_string(code) : text;
  }
};

// Constants of the CUDA driver.
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76; // attributes of a device
constexpr int kRelaxed = 2;                                    // capture mode: may load while other threads capture

// These Python functions are never freed, because the last launch may come after the interpreter's end.
py::function* images = nullptr;
py::function* recorder = nullptr;
const Driver* driver_for_cpu = nullptr;

const Driver& driver() {
  if (driver_for_cpu != nullptr) {
    return *driver_for_cpu;
  }
#ifdef _WIN32
  static const Driver cuda_driver("nvcuda.dll");
#else
  static const Driver cuda_driver("libcuda.so.1");
#endif
  return cuda_driver;
}

// Returns the current device. Makes its context current in a new thread, which has none yet.
int current_device() {
  if (driver_for_cpu != nullptr) {
    return 0;
  }
  const int device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index();
  void* context = nullptr;
  if (driver().cuCtxGetCurrent(&context) != 0 || context == nullptr) {
    driver().cuDevicePrimaryCtxRetain(&context, device);
    driver().cuCtxSetCurrent(context);
  }
  return device;
}

int attribute(int which, int device) {
  int value = 0;
  const int error = driver().cuDeviceGetAttribute(&value, which, device);
  TORCH_CHECK(error == 0, "gradscale_ext: cuDeviceGetAttribute failed for GPU ", device, ": ", driver().error(error));
  return value;
}

struct Image {
  std::string bytes;
  std::string entry;
};

Image image_of(const NamedKernel& kernel, int device) {
  const int major = attribute(kMajor, device), minor = attribute(kMinor, device);
  const py::gil_scoped_acquire gil;
  TORCH_CHECK(images != nullptr, "gradscale_ext: CUDA kernels are not available in this process");
  const auto [bytes, entry] =
      (*images)(kernel.file(), kernel.name(), major, minor).cast<std::pair<py::bytes, std::string>>();
  return {bytes, entry};
}

// Loads a kernel for a device. Compiles the kernel first if that has not been done yet.
void* load(const NamedKernel& kernel, int device, Stream stream) {
  int capturing = 0;
  const int unknown = driver().cuStreamIsCapturing(stream, &capturing);
  TORCH_CHECK(
      unknown == 0 && capturing == 0,
      "gradscale_ext: the kernel ",
      kernel.name(),
      " is not loaded yet, and loading is not possible while a CUDA graph is captured. Run the same call once before "
      "the capture, with tensors of the same shapes and dtypes (torch.cuda.make_graphed_callables does that by "
      "itself)");
  const Image image = image_of(kernel, device);
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (void* loaded = kernel.function(device).load(std::memory_order_acquire)) {
    return loaded; // by another thread
  }
  int mode = kRelaxed;
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  void* module = nullptr;
  void* function = nullptr;
  int error = driver().cuModuleLoadData(&module, image.bytes.c_str());
  if (error == 0) {
    error = driver().cuModuleGetFunction(&function, module, image.entry.c_str());
  }
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  TORCH_CHECK(error == 0, "gradscale_ext: the kernel ", kernel.name(), " could not be loaded: ", driver().error(error));
  kernel.function(device).store(function, std::memory_order_release);
  return function;
}

} // namespace

bool runs_kernels(c10::Device device) {
  if (device.is_cuda()) {
    return images != nullptr || recorder != nullptr;
  }
  return device.is_cpu() && (driver_for_cpu != nullptr || recorder != nullptr);
}

void start(const NamedKernel& kernel, int64_t blocks, int threads, Stream stream, const void* arguments) {
  if (recorder != nullptr) {
    const py::gil_scoped_acquire gil;
    (*recorder)(kernel.file(), kernel.name());
    return;
  }
  TORCH_CHECK(
      blocks <= INT32_MAX, "gradscale_ext: ", kernel.name(), " would need more than 2^31 - 1 blocks; split the call");
  const int device = current_device();
  void* function = kernel.function(device).load(std::memory_order_acquire);
  function = function == nullptr ? load(kernel, device, stream) : function;
  void* pointers[] = {const_cast<void*>(arguments)};
  const int error = driver().cuLaunchKernel(
      function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, /*shared=*/0, stream, pointers, nullptr);
  TORCH_CHECK(
      error == 0, "gradscale_ext: the kernel ", kernel.name(), " could not be launched: ", driver().error(error));
}

int64_t multiprocessors() {
  if (recorder != nullptr) {
    return 132;
  }
  static std::array<std::atomic<int>, NamedKernel::kMaxDevices> known{};
  const int device = current_device();
  if (known[device] == 0) {
    known[device] = attribute(kMultiprocessors, device);
  }
  return known[device];
}

void set_kernel_images(std::optional<py::function> image) {
  images = image ? new py::function(*image) : nullptr;
}

void use_driver_for_cpu(const std::optional<std::string>& library) {
  driver_for_cpu = library ? new Driver(library->c_str()) : nullptr;
}

void record_kernels(std::optional<py::function> record) {
  recorder = record ? new py::function(*record) : nullptr;
}

} // namespace gradscale
