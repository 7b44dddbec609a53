// A stand-in for NVIDIA's driver: the functions of its API that csrc/cuda/driver.cpp uses. It simulates one GPU of
// compute capability 9.0, and executes the PTX that NVRTC generates, in host memory. Loads and launches are complete
// when they return, and run one at a time. An error in a kernel is CUDA_ERROR_LAUNCH_FAILED; its message is written to
// stderr, and returned by cuGetErrorString and gradscale_last_error().
//
// Environment, read at each launch:
//   PTX_REPORT   a file to which each launch adds one line of JSON
//   PTX_LINES    1: the report also counts by line of the PTX
//   PTX_BLOCKS   1: the report also counts by basic block, and contains the text of the blocks
//   PTX_CHECK    1: reading a register that was never written is an error
//   PTX_RACES    1: accesses that race are errors (races.h)
//   PTX_SLICE    instructions that a warp runs before the next warp runs (default 0: until a barrier or its return)
//   PTX_ORDER    reverse: the last block and the last warp come first
//   PTX_MULTIPROCESSORS  number of multiprocessors (default 132; read only once): with fewer, fewer rows fill the GPU
//   PTX_CUDA     the version that cuDriverGetVersion reports (default 13000; read when the driver is opened)
//   PTX_LIMIT    warp instructions after which a launch fails (default 4000000000)
#include "warp.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <utility>

namespace {

using namespace ptx;

enum Result {
  success = 0,
  invalid_value = 1,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  invalid_ptx = 218,
  invalid_handle = 400,
  not_found = 500,
  launch_failed = 719,
  capture_unsupported = 900
};

struct Error {
  Result result;
  const char *name, *text;
};
const Error kErrors[] = {
    {success, "CUDA_SUCCESS", "no error"},
    {invalid_value, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {invalid_device, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {invalid_image, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {invalid_context, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {invalid_ptx, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {invalid_handle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {not_found, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {launch_failed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {capture_unsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}};

constexpr int kCapability = 90;
constexpr int kRelaxed = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
char primary_context;       // its address is the context

std::recursive_mutex one_at_a_time;
std::map<const Module*, std::unique_ptr<Module>> modules;
string last_error;
std::atomic<bool> initialized = false, capturing = false;
thread_local void* current_context = nullptr;
thread_local int capture_mode = 0; // CU_STREAM_CAPTURE_MODE_GLOBAL

string environment(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

Result ready() {
  return !initialized || current_context != nullptr ? success : invalid_context;
}

Result failed(Result result, const string& message) {
  last_error = message;
  fprintf(stderr, "ptx: %s\n", message.c_str());
  return result;
}

// The N of ".target sm_N"; 0 where there is none.
int target_of(string_view text) {
  const size_t at = text.find(".target sm_");
  return at == string_view::npos ? 0 : atoi(text.data() + at + 11);
}

Kernel* known(const void* function) {
  for (const auto& [address, module] : modules) {
    for (auto& [name, kernel] : module->kernels) {
      if (&kernel == function) {
        return &kernel;
      }
    }
  }
  return nullptr;
}

void launch(Kernel& kernel, unsigned blocks, unsigned threads, void** arguments) {
  Launch launch{kernel, code_of(kernel), blocks, threads, {}, {}};
  launch.parameters.resize(kernel.parameter_bytes);
  for (size_t k = 0; k < kernel.parameters.size(); ++k) {
    memcpy(launch.parameters.data() + kernel.parameters[k].offset, arguments[k], kernel.parameters[k].bytes);
  }
  launch.checks = environment("PTX_CHECK", "0") == "1";
  launch.reverse = environment("PTX_ORDER", "") == "reverse";
  launch.slice = std::stoull(environment("PTX_SLICE", "0"));
  launch.limit = launch.left = std::stoull(environment("PTX_LIMIT", "4000000000"));
  if (environment("PTX_RACES", "0") == "1") {
    launch.races = std::make_unique<Races>(threads);
  }
  const string path = environment("PTX_REPORT", "");
  if (!path.empty()) {
    launch.counts.resize(launch.code.instructions.size());
  }
  run(launch);
  if (!path.empty()) {
    std::ofstream(path, std::ios::app) << report(
        launch, environment("PTX_LINES", "0") == "1", environment("PTX_BLOCKS", "0") == "1");
  }
}

int device_attribute(int attribute) {
  switch (attribute) {
    case 1:
      return 1024; // MAX_THREADS_PER_BLOCK
    case 2:
      return 1024; // MAX_BLOCK_DIM_X
    case 5:
      return 0x7fffffff; // MAX_GRID_DIM_X
    case 8:
      return 48 * 1024; // MAX_SHARED_MEMORY_PER_BLOCK
    case 10:
      return 32; // WARP_SIZE
    case 12:
      return 65536; // MAX_REGISTERS_PER_BLOCK
    case 13:
      return 1755000; // CLOCK_RATE, kHz
    case 16: {
      static const int multiprocessors = std::stoi(environment("PTX_MULTIPROCESSORS", "132"));
      return multiprocessors;
    }
    case 39:
      return 2048; // MAX_THREADS_PER_MULTIPROCESSOR
    case 75:
      return kCapability / 10;
    case 76:
      return kCapability % 10;
    case 81:
      return 228 * 1024; // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    case 82:
      return 65536; // MAX_REGISTERS_PER_MULTIPROCESSOR
    default:
      return -1;
  }
}

int function_attribute(const Kernel& kernel, int attribute) {
  switch (attribute) {
    case 0:
      return static_cast<int>(kernel.max_threads);
    case 1:
      return static_cast<int>(kernel.shared_bytes);
    case 3:
      return static_cast<int>(kernel.local_bytes);
    case 5:
    case 6:
      return kCapability; // PTX_VERSION, BINARY_VERSION
    default:
      return 0; // only ptxas knows the number of registers
  }
}

} // namespace

#define DRIVER extern "C" __attribute__((visibility("default"))) int

DRIVER cuInit(unsigned flags) {
  initialized = flags == 0;
  return flags == 0 ? success : invalid_value;
}

DRIVER cuDriverGetVersion(int* version) {
  *version = std::stoi(environment("PTX_CUDA", "13000"));
  return success;
}

DRIVER cuGetErrorName(int result, const char** name) {
  for (const Error& error : kErrors) {
    if (error.result == result) {
      *name = error.name;
      return success;
    }
  }
  *name = nullptr;
  return invalid_value;
}

DRIVER cuGetErrorString(int result, const char** text) {
  thread_local string launch_error;
  if (result == launch_failed || result == invalid_ptx) {
    const std::lock_guard lock(one_at_a_time);
    launch_error = last_error;
    if (!launch_error.empty()) {
      *text = launch_error.c_str();
      return success;
    }
  }
  for (const Error& error : kErrors) {
    if (error.result == result) {
      *text = error.text;
      return success;
    }
  }
  *text = nullptr;
  return invalid_value;
}

DRIVER cuDeviceGetCount(int* count) {
  *count = 1;
  return success;
}

DRIVER cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? success : invalid_device;
}

DRIVER cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = device_attribute(attribute);
  return device != 0 ? invalid_device : *value < 0 ? invalid_value : success;
}

DRIVER cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &primary_context;
  return device == 0 ? success : invalid_device;
}

DRIVER cuCtxGetCurrent(void** context) {
  *context = initialized ? current_context : &primary_context;
  return success;
}

DRIVER cuCtxSetCurrent(void* context) {
  if (context != nullptr && context != &primary_context) {
    return invalid_context;
  }
  current_context = context;
  return success;
}

DRIVER cuCtxGetDevice(int* device) {
  *device = 0;
  return ready();
}

DRIVER cuModuleLoadData(void** module, const void* image) {
  if (const Result result = ready(); result != success) {
    return result;
  }
  const std::lock_guard lock(one_at_a_time);
  if (capturing && capture_mode != kRelaxed) {
    return failed(capture_unsupported, "a module is loaded during a capture");
  }
  const string_view text(static_cast<const char*>(image));
  if (text.find(".version") == string_view::npos || target_of(text) == 0) {
    return failed(invalid_image, "the image is not PTX");
  }
  if (target_of(text) > kCapability) {
    return failed(invalid_ptx, "the PTX is for a newer GPU: sm_" + std::to_string(target_of(text)));
  }
  try {
    std::unique_ptr<Module> read = read_module(text);
    *module = read.get();
    modules[read.get()] = std::move(read);
    return success;
  } catch (const std::exception& error) {
    return failed(invalid_ptx, error.what());
  }
}

DRIVER cuModuleUnload(void* module) {
  const std::lock_guard lock(one_at_a_time);
  return modules.erase(static_cast<const Module*>(module)) == 1 ? success : invalid_handle;
}

DRIVER cuModuleGetFunction(void** function, void* module, const char* name) {
  const std::lock_guard lock(one_at_a_time);
  const auto found_module = modules.find(static_cast<const Module*>(module));
  if (found_module == modules.end()) {
    return invalid_handle;
  }
  const auto kernel = found_module->second->kernels.find(string_view(name));
  if (kernel == found_module->second->kernels.end()) {
    return not_found;
  }
  *function = &kernel->second;
  return success;
}

DRIVER cuFuncGetAttribute(int* value, int attribute, void* function) {
  const std::lock_guard lock(one_at_a_time);
  const Kernel* kernel = known(function);
  *value = kernel == nullptr ? 0 : function_attribute(*kernel, attribute);
  return kernel == nullptr ? invalid_handle : success;
}

DRIVER cuLaunchKernel(
    void* function,
    unsigned blocks,
    unsigned blocks_y,
    unsigned blocks_z,
    unsigned threads,
    unsigned threads_y,
    unsigned threads_z,
    unsigned shared_bytes,
    void* /*stream*/,
    void** arguments,
    void** extra) {
  if (const Result result = ready(); result != success) {
    return result;
  }
  const std::lock_guard lock(one_at_a_time);
  Kernel* kernel = known(function);
  if (kernel == nullptr) {
    return invalid_handle;
  }
  const bool one_dimension = blocks_y == 1 && blocks_z == 1 && threads_y == 1 && threads_z == 1;
  const bool fits = blocks >= 1 && blocks <= 0x7fffffff && threads >= 1 && threads <= kernel->max_threads;
  if (!one_dimension || !fits || shared_bytes != 0 || extra != nullptr ||
      (arguments == nullptr && !kernel->parameters.empty())) {
    return invalid_value;
  }
  try {
    launch(*kernel, blocks, threads, arguments);
    return success;
  } catch (const std::exception& error) {
    return failed(launch_failed, error.what());
  }
}

DRIVER cuStreamIsCapturing(void* /*stream*/, int* status) {
  *status = capturing ? 1 : 0;
  return ready();
}

DRIVER cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return success;
}

// For tests: from now on, streams are being captured (status 1) or not (0).
DRIVER gradscale_pretend_capture(int status) {
  capturing = status != 0;
  return success;
}

// For tests: returns the message of the last launch or load that failed, in any thread, and clears it.
extern "C" __attribute__((visibility("default"))) const char* gradscale_last_error() {
  thread_local string error;
  const std::lock_guard lock(one_at_a_time);
  error = std::exchange(last_error, {});
  return error.c_str();
}
