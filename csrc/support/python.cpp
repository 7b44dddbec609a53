// Eager entry points.
#include "../torch/run_or_refuse.h"
#include "support.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

at::Tensor read(const char* argument, py::handle given) {
  return read_floats(given, [=] { return std::string(argument); });
}

void require(bool condition, const char* argument, const at::Tensor& tensor) {
  if (!condition) {
    throw Refusal{argument, described(tensor)};
  }
}

void require_bins(const OwnedSupport& support, const char* argument, const at::Tensor& tensor) {
  require(tensor.dim() >= 1 && tensor.size(-1) == support.get().num_bins, argument, tensor);
}

// Decoded values.
py::object decode_in_eager_mode(
    const std::shared_ptr<OwnedSupport>& support, const py::object& python_support, py::handle logits) {
  require_ordinary_context();
  const at::Tensor tensor = read("logits", logits);
  require_bins(*support, "logits", tensor);
  return py::cast(decode(support, python_support, tensor));
}

// Distributions. There is no kernel for the gradient.
py::object encode_in_eager_mode(const std::shared_ptr<OwnedSupport>& support, double sigma_ratio, py::handle scalars) {
  require_ordinary_context();
  const at::Tensor tensor = read("x", scalars);
  if (at::GradMode::is_enabled() && tensor.requires_grad()) {
    throw Refusal{"x", "requires grad: detach() it, if the distributions need no gradient"};
  }
  return py::cast(encode(support->get(), sigma_ratio, tensor));
}

// Projected probabilities.
py::object project_in_eager_mode(
    const std::shared_ptr<OwnedSupport>& support, py::handle probabilities, py::handle rewards, py::handle discounts) {
  require_ordinary_context();
  const at::Tensor p = read("probabilities", probabilities);
  require_bins(*support, "probabilities", p);
  const auto by_row = [&](const char* argument, py::handle given) {
    at::Tensor tensor = read(argument, given);
    require(tensor.sizes() == p.sizes().slice(0, p.dim() - 1) && tensor.device() == p.device(), argument, tensor);
    return tensor;
  };
  const at::Tensor r = by_row("rewards", rewards), d = by_row("discounts", discounts);
  py::gil_scoped_release no_gil;
  at::Tensor result = project(support->get(), p, r, d);
  py::gil_scoped_acquire gil;
  return py::cast(std::move(result));
}

} // namespace

void define_support(py::module_& m) {
  py::class_<OwnedSupport, std::shared_ptr<OwnedSupport>>(m, "Support")
      .def(py::init([](const std::vector<std::string>& names, const std::vector<double>& numbers) {
        return std::make_shared<OwnedSupport>(support_from(names, numbers));
      }));
  m.def("encode", run_or_refuse(&encode_in_eager_mode));
  m.def("project", run_or_refuse(&project_in_eager_mode));
  m.def("decode", run_or_refuse(&decode_in_eager_mode));
}

} // namespace gradscale
