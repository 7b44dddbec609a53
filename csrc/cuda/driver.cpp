#include "driver.h"

#include <ATen/DynamicLibrary.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace gradscale {

namespace {

namespace py = pybind11;

struct Driver {
  at::DynamicLibrary library; // declared first: the functions are looked up in it
#define GRADSCALE_FUNCTION(name, ...) \
  int (*name)(__VA_ARGS__) = reinterpret_cast<int (*)(__VA_ARGS__)>(library.sym(#name))
  GRADSCALE_FUNCTION(cuGetErrorString, int, const char**);
  GRADSCALE_FUNCTION(cuDriverGetVersion, int*);
  GRADSCALE_FUNCTION(cuCtxGetCurrent, void**);
  GRADSCALE_FUNCTION(cuCtxSetCurrent, void*);
  GRADSCALE_FUNCTION(cuDevicePrimaryCtxRetain, void**, int);
  GRADSCALE_FUNCTION(cuDeviceGetAttribute, int*, int, int);
  GRADSCALE_FUNCTION(cuModuleLoadData, void**, const void*);
  GRADSCALE_FUNCTION(cuModuleGetFunction, void**, void*, const char*);
  GRADSCALE_FUNCTION(cuStreamIsCapturing, void*, int*);
  GRADSCALE_FUNCTION(cuThreadExchangeStreamCaptureMode, int*);
  using U = unsigned;
  GRADSCALE_FUNCTION(cuLaunchKernel, void*, U, U, U, U, U, U, U, void*, void**, void**);
#undef GRADSCALE_FUNCTION

  int version = 0; // the newest CUDA that the driver supports: 13020 for 13.2

  explicit Driver(const char* name) : library(name, nullptr, /*leak_handle=*/true) {
    cuDriverGetVersion(&version);
  }

  std::string error(int code) const {
    const char* text = nullptr;
    cuGetErrorString(code, &text);
    return text == nullptr ? "error " + std::to_string(code) : text;
  }
};

// Constants of the CUDA driver.
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76; // attributes of a device
constexpr int kLargeArguments = 12010; // the first version whose kernels may have arguments of more than 4 KB
constexpr int kRelaxed = 2;            // capture mode: may load while other threads capture

// These Python functions are never freed, because the last launch may come after the interpreter's end.
py::function* images = nullptr;
py::function* recorder = nullptr;
const Driver* driver_for_cpu = nullptr;

const Driver& driver() {
  if (driver_for_cpu != nullptr) {
    return *driver_for_cpu;
  }
  static const Driver cuda_driver("libcuda.so.1");
  return cuda_driver;
}

void check(int error, const char* function) {
  TORCH_CHECK(error == 0, "gradscale_ext: ", function, " failed: ", driver().error(error));
}

// Returns the current device. Makes its context current in a new thread, which has none yet.
int current_device() {
  if (driver_for_cpu != nullptr) {
    return 0;
  }
  const int device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index();
  void* context = nullptr;
  if (driver().cuCtxGetCurrent(&context) != 0 || context == nullptr) {
    check(driver().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent");
  }
  return device;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int attribute(int which, int device) {
  int value = 0;
  const int error = driver().cuDeviceGetAttribute(&value, which, device);
  TORCH_CHECK(error == 0, "gradscale_ext: cuDeviceGetAttribute failed for GPU ", device, ": ", driver().error(error));
  return value;
}

// Returns the image of a kernel for a device, and the name of its entry point. `errors` are the driver's errors for the
// images that were returned before; Python raises when there is no other image.
std::pair<std::string, std::string> image_of(
    const char* file, const std::string& name, int device, const std::vector<std::string>& errors) {
  const int major = attribute(kMajor, device), minor = attribute(kMinor, device);
  const py::gil_scoped_acquire gil;
  TORCH_CHECK(images != nullptr, "gradscale_ext: CUDA kernels are not available in this process");
  py::list earlier;
  for (const std::string& error : errors) {
    earlier.append(error);
  }
  return (*images)(file, name, major, minor, earlier).cast<std::pair<py::bytes, std::string>>();
}

// Loads an image, and returns the driver's error. `function` is the kernel.
int load(const std::string& image, const std::string& entry, void*& function) {
  int mode = kRelaxed;
  check(driver().cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
  void* module = nullptr;
  int error = driver().cuModuleLoadData(&module, image.c_str());
  if (error == 0) {
    error = driver().cuModuleGetFunction(&function, module, entry.c_str());
  }
  check(driver().cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode"); // as it was
  return error;
}

// Returns the driver's function for a kernel. Compiles and loads the kernel if it is not loaded on this device yet.
void* function_of(const char* file, const std::string& name, int device, void* stream) {
  static std::mutex mutex;
  static auto& functions = *new std::map<std::pair<int, std::string>, void*>(); // by device and name; never freed
  const auto find = [&] {
    const auto found = functions.find({device, name});
    return found == functions.end() ? nullptr : found->second;
  };
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (void* function = find()) {
      return function;
    }
  }
  int capturing = 0;
  const int unknown = driver().cuStreamIsCapturing(stream, &capturing);
  TORCH_CHECK(
      unknown == 0 && capturing == 0,
      "gradscale_ext: the kernel ",
      name,
      " is not loaded yet, and loading is not possible while a CUDA graph is captured. Run the same call once before "
      "the capture, with tensors of the same shapes, dtypes and alignment: slices that begin at the same offset "
      "(torch.cuda.make_graphed_callables does that by itself)");
  std::vector<std::string> errors;
  while (true) {
    const auto [image, entry] = image_of(file, name, device, errors); // takes the GIL: the mutex must not be locked
    const std::lock_guard<std::mutex> lock(mutex);
    if (void* function = find()) {
      return function; // loaded by another thread
    }
    void* function = nullptr;
    const int error = load(image, entry, function);
    if (error == 0) {
      functions[{device, name}] = function;
      return function;
    }
    errors.push_back(driver().error(error));
  }
}

} // namespace

bool runs_kernels(c10::Device device) {
  if (device.is_cuda()) {
    return images != nullptr || recorder != nullptr;
  }
  return device.is_cpu() && (driver_for_cpu != nullptr || recorder != nullptr);
}

std::string instance(const std::string& template_name, const std::vector<std::string>& arguments) {
  return template_name + "<" + c10::Join(", ", arguments) + ">";
}

void OnDevice::start(
    const char* file, const std::string& name, int64_t blocks, int threads, const void* argument, size_t bytes) const {
  if (recorder != nullptr) {
    const py::gil_scoped_acquire gil;
    (*recorder)(file, name);
    return;
  }
  TORCH_CHECK(blocks <= INT32_MAX, "gradscale_ext: ", name, " would need more than 2^31 - 1 blocks; split the call");
  TORCH_CHECK(
      bytes <= 4096 || driver().version >= kLargeArguments,
      "gradscale_ext: the NVIDIA driver supports CUDA ",
      version_text(driver().version),
      " at most, but the kernel ",
      name,
      " has arguments of more than 4 KB, which need a driver for CUDA ",
      version_text(kLargeArguments),
      " or newer; update the driver");
  void* function = function_of(file, name, current_device(), stream_);
  void* pointers[] = {const_cast<void*>(argument)};
  const int error = driver().cuLaunchKernel(
      function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, /*shared=*/0, stream_, pointers, nullptr);
  TORCH_CHECK(error == 0, "gradscale_ext: the kernel ", name, " could not be launched: ", driver().error(error));
}

int64_t multiprocessors() {
  if (recorder != nullptr) {
    return 132;
  }
  static std::array<std::atomic<int>, 128> known{}; // PyTorch supports at most 120 devices
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
