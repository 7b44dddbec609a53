#include "../port/launch.h"
#include "device_calls.h"

namespace gradscale {

namespace {

// Whether the elements lie one after the other, and arguments likewise or the same for all.
bool is_dense(const ElementwiseCall& call) {
  const int64_t size = element_size(call.element);
  const int64_t of_sums = call.element == Element::float64 ? 8 : 4;
  bool dense = call.dims == 1 && call.strides[0][0] == size && call.strides[1][0] == size;
  for (int k = 2; k < ElementwiseCall::kMaxOperands; ++k) {
    dense = dense && (call.data[k] == nullptr || call.strides[k][0] == 0 || call.strides[k][0] == of_sums);
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
    return "elementwise_" + layout + "<" + type + ", " + function + "<" + name_of_sums<T>() + ">>";
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

} // namespace gradscale
