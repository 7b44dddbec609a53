#include "elementwise.cuh"

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

template <class T, class Function>
void launch_as(const ElementwiseCall& call, Function function, Stream stream) {
  if (is_dense(call)) {
    const int64_t blocks = (call.count + kElementsOfBlock - 1) / kElementsOfBlock;
    launch("elementwise", elementwise_dense<T, Function>, blocks, kThreads, stream, call, function);
  } else {
    const int64_t blocks = (call.count + kThreads - 1) / kThreads;
    launch("elementwise", elementwise_broadcast<T, Function>, blocks, kThreads, stream, call, function);
  }
}

template <class T>
void launch_for(const ElementwiseCall& call, Stream stream) {
  using A = typename AccumulateType<T>::type;
  switch (call.function) {
    case ElementFunction::multiply:
      return launch_as<T>(call, Multiply<A>(), stream);
    case ElementFunction::multiply_negated:
      return launch_as<T>(call, MultiplyNegated<A>(), stream);
    case ElementFunction::clamp:
      return launch_as<T>(call, Clamp<A>(), stream);
  }
}

} // namespace

void launch_elementwise(const ElementwiseCall& call, void* stream) {
  dispatch_element(call.element, [&](auto type) { launch_for<decltype(type)>(call, static_cast<Stream>(stream)); });
}

} // namespace gradscale
