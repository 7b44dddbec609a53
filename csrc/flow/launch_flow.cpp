// Launches the kernels of the gradient operators.
#include "../cuda/launch.h"
#include "../cuda/row_shape.h"
#include "calls.h"

namespace gradscale {

// ---- Functions of elements ------------------------------------------------------------------------------------------

namespace {

// True if the elements are contiguous, and each argument is contiguous or one number for all elements.
bool is_dense(const ElementwiseCall& call) {
  const int64_t size = element_size(call.element);
  const int64_t sum_bytes = call.element == Element::float64 ? 8 : 4;
  bool dense = call.dims == 1 && call.strides[0][0] == size && call.strides[1][0] == size;
  for (int k = 2; k < ElementwiseCall::kMaxOperands; ++k) {
    dense = dense && (call.data[k] == nullptr || call.strides[k][0] == 0 || call.strides[k][0] == sum_bytes);
  }
  return dense || call.count == 1;
}

// The kernels for elements of T and one function.
template <class T>
class Kernels {
 public:
  explicit Kernels(const std::string& function)
      : dense_(kFile, name("dense", function)), any_(kFile, name("broadcast", function)) {
  }

  void launch_for(const ElementwiseCall& call, Stream stream) const {
    if (is_dense(call)) {
      launch(dense_, (call.count + kElementsOfBlock - 1) / kElementsOfBlock, kThreads, stream, call);
    } else {
      launch(any_, (call.count + kThreads - 1) / kThreads, kThreads, stream, call);
    }
  }

 private:
  static constexpr const char* kFile = "flow/elementwise.cuh";

  static std::string name(const std::string& layout, const std::string& function) {
    const std::string type = type_name(ElementOf<T>::value);
    return "elementwise_" + layout + "<" + type + ", " + function + "<" + sum_type_name<T>() + ">>";
  }

  Kernel<ElementwiseCall> dense_;
  Kernel<ElementwiseCall> any_;
};

} // namespace

void launch_elementwise(const ElementwiseCall& call, void* stream) {
  dispatch_element(call.element, [&](auto type) {
    using T = decltype(type);
    static const Kernels<T> multiply("Multiply"), multiply_negated("MultiplyNegated"), clamp("Clamp");
    switch (call.function) {
      case ElementFunction::multiply:
        return multiply.launch_for(call, stream);
      case ElementFunction::multiply_negated:
        return multiply_negated.launch_for(call, stream);
      case ElementFunction::clamp:
        return clamp.launch_for(call, stream);
    }
  });
}

// ---- Groups ---------------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kNormsFile = "flow/group_norm.cuh";

// The number of threads that keep a group in registers; 0 if they cannot.
template <class T>
int32_t threads_for_group_in_registers(const RescaleCall& call) {
  const auto begins = reinterpret_cast<uintptr_t>(call.from) | reinterpret_cast<uintptr_t>(call.to);
  const auto bytes = call.size * static_cast<int64_t>(sizeof(T));
  const bool whole = begins % 16 == 0 && bytes % 16 == 0; // each group consists of whole windows
  return whole && call.p == 2 && !std::is_same_v<T, double> ? threads_for_row_in_registers(bytes / 16) : 0;
}

// The kernels whose threads keep groups in registers: 2, 4, 8, 16 or 32 threads a group.
template <class T>
void launch_kept(const RescaleCall& call, int32_t threads, Stream stream) {
  static const auto kernel = [](int kept) {
    return std::string("rescale_kept<") + type_name(ElementOf<T>::value) + ", " + std::to_string(kept) + ">";
  };
  static const Kernel<RescaleCall> kernels[] = {
      {kNormsFile, kernel(2)},
      {kNormsFile, kernel(4)},
      {kNormsFile, kernel(8)},
      {kNormsFile, kernel(16)},
      {kNormsFile, kernel(32)}};
  int index = 0;
  while (2 << index < threads) {
    ++index;
  }
  launch(kernels[index], blocks_for_rows(call.groups, threads), kThreads, stream, call);
}

template <class T>
void launch_as(const RescaleCall& call, Stream stream) {
  static const auto kernel = [](const char* name) {
    return std::string(name) + "<" + type_name(ElementOf<T>::value) + ">";
  };
  static const Kernel<RescaleCall> groups(kNormsFile, kernel("rescale_groups"));
  static const Kernel<RescaleCall> sums(kNormsFile, kernel("power_sums"));
  static const Kernel<RescaleCall> chunks(kNormsFile, kernel("rescale_chunks"));
  const int32_t threads = threads_for_group_in_registers<T>(call);
  if (threads > 0) {
    return launch_kept<T>(call, threads, stream);
  }
  if (call.size <= kShortGroup) {
    launch(groups, blocks_for_rows(call.groups, threads_for_row(call.size, sizeof(T))), kThreads, stream, call);
    return;
  }
  const int64_t blocks = call.groups * chunks_of(call).count;
  launch(sums, blocks, kThreads, stream, call);
  launch(chunks, blocks, kThreads, stream, call);
}

} // namespace

int64_t bytes_for_rescale(const RescaleCall& call) {
  return call.size <= kShortGroup ? 0 : call.groups * chunks_of(call).count * static_cast<int64_t>(sizeof(PowerSum));
}

void launch_rescale(const RescaleCall& call, void* stream) {
  dispatch_element(call.element, [&](auto type) { launch_as<decltype(type)>(call, stream); });
}

} // namespace gradscale
