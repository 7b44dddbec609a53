// Batching for `is_grads_batched` and for `vectorize` of torch.autograd.functional: the examples become rows of one
// call. gradscale_ext/_returns_operator.py has the rule for torch.func.vmap.
#include "returns.h"

#include <ATen/LegacyVmapTransforms.h>

#include <algorithm>

namespace gradscale {

std::vector<at::Tensor> batched_returns(const LinearCall& call) {
  LinearCall flat = call;
  std::vector<at::Tensor*> places;
  for (at::Tensor& input : flat.inputs) {
    places.push_back(&input);
  }
  for (at::Tensor* tensor : flat.coefficients.tensors()) {
    places.push_back(tensor);
  }
  places.erase(
      std::remove_if(places.begin(), places.end(), [](const at::Tensor* place) { return !place->defined(); }),
      places.end());
  std::vector<at::Tensor> tensors;
  for (const at::Tensor* place : places) {
    tensors.push_back(*place);
  }
  const bool batch_first = call.coefficients.batch_first;
  const int64_t rows = tensors[0].size(batch_first ? 0 : 1);
  // Dimensions of examples first, of the same sizes in all tensors.
  const at::VmapPhysicalViewVec views = at::MultiBatchVmapTransform::logicalToPhysical(tensors);
  const int64_t dims = views[0].numBatchDims();
  const auto example_sizes = views[0].tensor().sizes().slice(0, dims).vec();
  for (size_t i = 0; i < places.size(); ++i) {
    const bool is_scalar = tensors[i].dim() == 0;
    at::Tensor tensor = views[i].tensor();
    tensor = is_scalar ? tensor.unsqueeze(-1).unsqueeze(-1) : batch_first ? tensor : tensor.transpose(-1, -2);
    std::vector<int64_t> sizes = example_sizes;
    sizes.insert(sizes.end(), {rows, tensor.size(-1)});
    tensor = tensor.expand(sizes).flatten(0, dims);
    *places[i] = batch_first ? tensor : tensor.t();
  }
  std::vector<at::Tensor> results = call_operator(flat);
  std::vector<int64_t> sizes = example_sizes;
  sizes.push_back(rows);
  for (at::Tensor& result : results) {
    result = batch_first ? result.unflatten(0, sizes) : result.t().unflatten(0, sizes).transpose(-1, -2).contiguous();
    result = views[0].getPhysicalToLogicalMap().apply(result);
  }
  return results;
}

} // namespace gradscale
