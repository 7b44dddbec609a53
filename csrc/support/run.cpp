#include "support.h"

#include "../cpu/scratch.h"
#include "../cuda/driver.h"
#include "../cuda/row_shape.h"
#include "../formulas/targets.h"
#include "../torch/autograd.h"
#include "../torch/gradient_pool.h"
#include "../torch/tensor_element.h"
#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>

namespace gradscale {

// ---- Supports -------------------------------------------------------------------------------------------------------

Support support_from(const std::vector<std::string>& names, const std::vector<double>& numbers) {
  Support support{};
  for (size_t i = 0; i < names.size(); ++i) {
    TORCH_CHECK(
        set_by_name(kNumbersOfSupport, support, names[i], numbers[i]), "Support: no number named '", names[i], "'");
  }
  return support;
}

OwnedSupport::OwnedSupport(Support support) : support_(support) {
  if (!support_.raw) {
    return;
  }
  centers_.reset(new double[support_.num_bins]);
  centers_float_.reset(new float[support_.num_bins]);
  for (int32_t bin = 0; bin < support_.num_bins; ++bin) {
    centers_[bin] = raw_center(support_, bin);
    centers_float_[bin] = static_cast<float>(centers_[bin]);
  }
  support_.raw_centers = centers_.get();
  support_.raw_centers_float = centers_float_.get();
}

// ---- Decoding -------------------------------------------------------------------------------------------------------

namespace {

namespace autograd = torch::autograd;

// The names of transforms in kernels, in the order of Transform.
constexpr const char* kTransforms[] = {"Transform::identity", "Transform::signed_hyperbolic", "Transform::symlog"};

// Throws if the indices of a kernel would overflow.
void check_width(const Support& support) {
  TORCH_CHECK(support.num_bins <= INT32_MAX - 64, "Support: a row has more than 2^31 - 65 elements");
}

void decode_on_device(const Decoding& decoding, const OnDevice& device) {
  check_width(decoding.support);
  const Support& support = decoding.support;
  const Element element = decoding.logits.element;
  const std::string type = type_name(element);
  constexpr const char* file = "support/cuda/decode.cuh";
  TableBuilder centers;
  if (support.raw && element == Element::float64) {
    centers.add(support.raw_centers, support.num_bins);
  } else if (support.raw) {
    centers.add(support.raw_centers_float, support.num_bins);
  }
  const RowLanes lanes =
      has_small_centers(support) ? bin_lanes(support.num_bins, decoding.logits, decoding.gradient) : RowLanes{};
  if (lanes.per_row > 0) {
    const int32_t rows_per_warp =
        rounded_rows_per_warp(balanced_rows_per_warp(decoding.count, multiprocessors()), lanes.per_row);
    const int64_t rows_per_block = kRowThreads / 32 * rows_per_warp;
    const std::string rows = instance(
        "LanesOfDecoding",
        {type,
         decoding.gradient.data != nullptr ? type : "void",
         std::to_string(support.num_bins),
         std::to_string(lanes.per_row),
         std::to_string(lanes.vector_size),
         lanes.at_once ? "true" : "false",
         kTransforms[support.raw ? 0 : static_cast<size_t>(support.transform)],
         support.raw ? "true" : "false"});
    const std::string name = instance("decode_by_lanes", {rows});
    const int64_t blocks = (decoding.count + rows_per_block - 1) / rows_per_block;
    const LaneDecoding arguments{decoding, FloatSupport(support), rows_per_warp};
    if (support.raw) {
      device.launch(file, name, blocks, kRowThreads, RawLaneDecoding{arguments, centers.build(device)});
    } else {
      device.launch(file, name, blocks, kRowThreads, arguments);
    }
    return;
  }
  const int64_t blocks = blocks_for_rows(decoding.count, threads_for_row(support.num_bins, element_size(element)));
  const GroupDecoding arguments{decoding, centers.build(device)};
  device.launch(file, instance("decode_by_groups", {type}), blocks, kThreads, arguments);
}

void run(const Decoding& decoding, const at::Tensor& logits) {
  if (runs_kernels(logits.device())) {
    decode_on_device(decoding, OnDevice(logits.device()));
    return;
  }
  const int64_t width = decoding.support.num_bins;
  const int64_t grain = std::max<int64_t>(1, 16384 / row_cost(width));
  at::parallel_for(0, decoding.count, grain, [&](int64_t begin, int64_t end) {
    Scratch scratch(width);
    decode_rows_kernel(decoding, begin, end, scratch.data());
  });
}

Decoding decoding_of(const at::Tensor& rows, const Support& support) {
  Decoding decoding{};
  decoding.logits = {const_cast<void*>(rows.const_data_ptr()), support.num_bins, element_of(rows)};
  decoding.count = c10::multiply_integers(rows.sizes().slice(0, rows.dim() - 1));
  decoding.support = support;
  return decoding;
}

at::ScalarType value_type(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor values_of(const at::Tensor& logits, const Support& support) {
  const at::Tensor rows = logits.contiguous();
  const at::Tensor out = at::empty(rows.sizes().slice(0, rows.dim() - 1), rows.options().dtype(value_type(rows)));
  Decoding decoding = decoding_of(rows, support);
  decoding.out = {out.mutable_data_ptr(), 1, out.scalar_type() == at::kDouble};
  run(decoding, rows);
  return out;
}

at::Tensor gradient_of(const at::Tensor& logits, const at::Tensor& grad_output, const Support& support) {
  const at::Tensor rows = logits.contiguous();
  // The gradient that a sum of the values passes back is one number for all rows, with strides of 0.
  at::Tensor grad_rows = grad_output.to(value_type(rows));
  const bool is_one =
      std::all_of(grad_rows.strides().begin(), grad_rows.strides().end(), [](int64_t stride) { return stride == 0; });
  grad_rows = is_one ? grad_rows : grad_rows.contiguous();
  begin_pooled_call(rows.device());
  const at::Tensor gradient = empty_pooled(rows.sizes(), rows.options());
  Decoding decoding = decoding_of(rows, support);
  decoding.gradient = {gradient.mutable_data_ptr(), support.num_bins, element_of(rows)};
  decoding.grad_output = {grad_rows.mutable_data_ptr(), is_one ? 0 : 1, grad_rows.scalar_type() == at::kDouble};
  run(decoding, rows);
  return gradient;
}

struct DecodeBackward : public SavingNode { // saves the logits
  std::shared_ptr<OwnedSupport> support;
  std::unique_ptr<c10::SafePyObject> python_support;

  std::string name() const override {
    return "DecodeBackward";
  }

  autograd::variable_list apply(autograd::variable_list&& inputs) override {
    if (!inputs[0].defined()) {
      return {at::Tensor()};
    }
    const at::Tensor logits = unpacked()[0];
    at::Tensor grad_output;
    if (!at::GradMode::is_enabled() && ordinary_context() && read_ordinary(inputs[0], grad_output) &&
        ordinary_tensor(logits)) {
      return {gradient_of(logits, grad_output, support->get())};
    }
    return {by_reference(with_edge(logits, next_edge(0)), inputs[0])};
  }

 private:
  // Decodes once more in plain PyTorch, and builds a graph if the result requires grad.
  at::Tensor by_reference(const at::Tensor& logits, const at::Tensor& grad_output) const {
    py::gil_scoped_acquire gil;
    const py::object support_object = py::reinterpret_borrow<py::object>(python_support->ptr(getPyInterpreter()));
    const py::object gradient = py::module_::import("gradscale_ext.support").attr("_decode_gradient");
    return gradient(logits, support_object, grad_output, at::GradMode::is_enabled()).cast<at::Tensor>();
  }
};

} // namespace

at::Tensor decode(
    const std::shared_ptr<OwnedSupport>& support, const py::object& python_support, const at::Tensor& logits) {
  const bool wants_gradient = at::GradMode::is_enabled() && logits.requires_grad();
  at::Tensor values;
  {
    py::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    values = values_of(logits, support->get());
  }
  if (wants_gradient) {
    DecodeBackward* node = nullptr;
    const NodePtr handle = make_node(node);
    node->add_next_edge(autograd::impl::gradient_edge(logits));
    node->support = support;
    node->python_support =
        std::make_unique<c10::SafePyObject>(py::object(python_support).release().ptr(), getPyInterpreter());
    node->save(logits);
    autograd::set_history(values, handle);
  }
  return values;
}

// ---- Encoding -------------------------------------------------------------------------------------------------------

namespace {

template <class T, class Target>
void encode_row(T* row, int64_t width, const Target& target) {
  using A = Accumulate<T>;
  const A elsewhere = target.is_nan() ? std::numeric_limits<A>::quiet_NaN() : A(0);
  std::fill(row, row + width, from_accumulate<T, A>(elsewhere));
  target.for_each([&](int32_t bin, double mass) { row[bin] = from_accumulate<T, A>(static_cast<A>(mass)); });
}

void encode_rows(const Encoding& e, int64_t begin, int64_t end) {
  const int64_t width = e.support.num_bins;
  dispatch_element(e.out.element, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; ++row) {
      const double x = to_accumulate(static_cast<const T*>(e.scalars.data)[row * e.scalars.stride]);
      T* out = static_cast<T*>(e.out.data) + row * e.out.stride;
      if (e.sigma_ratio > 0) {
        encode_row(out, width, hl_gauss(x, e.support, e.sigma_ratio));
      } else {
        encode_row(out, width, two_hot(x, e.support));
      }
    }
  });
}

} // namespace

at::Tensor encode(const Support& support, double sigma_ratio, const at::Tensor& scalars) {
  const at::Tensor dense = scalars.detach().contiguous();
  std::vector<int64_t> shape(dense.sizes().begin(), dense.sizes().end());
  shape.push_back(support.num_bins);
  const at::Tensor out = at::empty(shape, dense.options());
  const Element element = element_of(dense);
  const Encoding encoding{
      {const_cast<void*>(dense.const_data_ptr()), 1, element},
      {out.mutable_data_ptr(), support.num_bins, element},
      dense.numel(),
      support,
      sigma_ratio};
  if (runs_kernels(dense.device())) {
    const int64_t blocks = blocks_for_rows(dense.numel(), threads_for_row(support.num_bins, element_size(element)));
    check_width(support);
    OnDevice(dense.device()).launch("support/cuda/encode.cuh", "encode_rows", blocks, kThreads, encoding);
  } else {
    const int64_t grain = std::max<int64_t>(1, 16384 / row_cost(support.num_bins));
    at::parallel_for(0, dense.numel(), grain, [&](int64_t begin, int64_t end) { encode_rows(encoding, begin, end); });
  }
  return out;
}

// ---- Projection -----------------------------------------------------------------------------------------------------

at::Tensor project(
    const Support& support, const at::Tensor& probabilities, const at::Tensor& rewards, const at::Tensor& discounts) {
  const at::Tensor p = probabilities.detach().contiguous(), r = rewards.detach().contiguous(),
                   d = discounts.detach().contiguous();
  bool is_double = false;
  for (const at::Tensor* tensor : {&p, &r, &d}) {
    is_double = is_double || tensor->scalar_type() == at::kDouble;
  }
  const at::Tensor out = at::empty(p.sizes(), p.options().dtype(is_double ? at::kDouble : at::kFloat));
  const auto rows_of = [](const at::Tensor& tensor, int64_t stride) {
    return Rows{const_cast<void*>(tensor.const_data_ptr()), stride, element_of(tensor)};
  };
  const int64_t width = support.num_bins;
  const Projection projection{rows_of(p, width), rows_of(r, 1), rows_of(d, 1), rows_of(out, width), r.numel(), support};
  if (runs_kernels(p.device())) {
    const int64_t blocks = blocks_for_rows(r.numel(), /*threads_per_row=*/32);
    check_width(support);
    OnDevice(p.device()).launch("support/cuda/encode.cuh", "project_rows", blocks, kThreads, projection);
  } else {
    std::vector<double> centers(static_cast<size_t>(width));
    for (size_t j = 0; j < centers.size(); ++j) {
      centers[j] = raw_center(support, static_cast<int64_t>(j));
    }
    const int64_t grain = std::max<int64_t>(1, 16384 / row_cost(width));
    at::parallel_for(0, r.numel(), grain, [&](int64_t begin, int64_t end) {
      std::vector<double> scratch(static_cast<size_t>(kProjectScratch * width));
      project_rows_kernel(projection, centers.data(), begin, end, scratch.data());
    });
  }
  return out;
}

} // namespace gradscale
