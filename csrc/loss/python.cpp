#include "python.h"

#include "backward.h"

#include "../torch/python_numbers.h"
#include "../torch/run_or_refuse.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace gradscale {

namespace {

bool is_text(py::handle given, const char* text) {
  return PyUnicode_Check(given.ptr()) && PyUnicode_CompareWithASCIIString(given.ptr(), text) == 0;
}

// True for a list, a tuple or a range, and for other objects with a length and items in one dimension, such as a deque
// or a NumPy array; is_sequence() of gradscale_ext/call/checks.py is the same. False for text and mappings.
bool is_sequence(py::handle given) {
  PyObject* items = given.ptr();
  if (PyList_Check(items) || PyTuple_Check(items) || PyRange_Check(items)) {
    return true;
  }
  const bool is_text = PyUnicode_Check(items) || PyBytes_Check(items) || PyByteArray_Check(items);
  return PySequence_Check(items) && !is_text && !py::hasattr(given, "items") &&
         py::getattr(given, "ndim", py::int_(1)).equal(py::int_(1));
}

// Reads the arguments of a call, or throws a Refusal.
class LossReader {
 public:
  explicit LossReader(const Plan& plan) : plan_(plan) {
  }

  // `options` is a tuple in the order of Option.
  Call read(py::handle predictions, py::handle targets, py::handle options) {
    Call call;
    call.heads = &plan_.table;
    const PyObject* steps = PyTuple_GET_ITEM(options.ptr(), static_cast<Py_ssize_t>(Option::steps));
    require(steps == Py_True || steps == Py_False, {"steps"}, "is not a bool");
    has_steps_ = steps == Py_True;
    call.predictions = all_fields("prediction", predictions, &KindOfHead::prediction, &LossReader::tensor);
    call.targets = all_fields("target", targets, &KindOfHead::target, &LossReader::constant);
    read_options(options, call);
    for (std::vector<Entries>& fields : call.predictions) { // the deviations [D] of a Gaussian policy
      Entries& last = fields.back();
      if (fields.size() > 1 && last.tensors.size() == 1 && last.tensors[0].dim() == 1) {
        last.shared = true;
        last.stacked = false;
      }
    }
    const bool records = at::GradMode::is_enabled();
    call.each_prediction([&](const Entries&, const at::Tensor& prediction, size_t) {
      call.wants.push_back(records && prediction.requires_grad());
    });
    return call;
  }

 private:
  template <class T>
  using Read = T (LossReader::*)(py::handle, const Part&) const;

  void require(bool condition, const Part& part, const char* problem) const {
    if (!condition) {
      throw Refusal{plan_.table.words(part), problem};
    }
  }

  at::Tensor tensor(py::handle given, const Part& part) const {
    return read_tensor(given, [&] { return plan_.table.words(part); });
  }

  // Targets and weights must not require grad.
  at::Tensor constant(py::handle given, const Part& part) const {
    at::Tensor read = tensor(given, part);
    require(!read.requires_grad() || !at::GradMode::is_enabled(), part, "requires grad");
    return read;
  }

  Entries entries(Part part, py::handle given, Read<at::Tensor> read) const {
    Entries entries;
    PyObject* items = given.ptr();
    if (!PyList_Check(items) && !PyTuple_Check(items)) {
      entries.stacked = has_steps_;
      entries.tensors.push_back((this->*read)(given, part));
      return entries;
    }
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    require(count > 0, part, "is empty");
    require(has_steps_, part, "is a list without steps");
    entries.tensors.reserve(count);
    for (part.entry = 0; part.entry < count; ++part.entry) {
      entries.tensors.push_back((this->*read)(PySequence_Fast_GET_ITEM(items, part.entry), part));
    }
    return entries;
  }

  // The fields of a prediction or target: a tensor or list, or a dict of them by these names.
  std::vector<Entries> fields(
      Part part,
      py::handle given,
      const std::vector<const char*>& names,
      bool may_be_tensor,
      Read<at::Tensor> read) const {
    std::vector<Entries> by_field(Heads::num_fields(names));
    if (!PyDict_Check(given.ptr())) {
      require(names.empty() || may_be_tensor, part, "is not a dict");
      by_field[0] = entries(part, given, read);
      return by_field;
    }
    Py_ssize_t found = 0;
    for (size_t i = 0; i < names.size(); ++i) {
      part.field = names[i];
      PyObject* value = PyDict_GetItemString(given.ptr(), names[i]);
      const bool is_given = value != nullptr && value != Py_None;
      require(is_given || !may_be_tensor, part, "is missing");
      if (is_given) {
        by_field[i] = entries(part, value, read);
      }
      found += value != nullptr ? 1 : 0;
    }
    part.field = nullptr;
    require(found == PyDict_Size(given.ptr()), part, "names what is not a field");
    return by_field;
  }

  // The predictions or targets of all heads, from a dict. A head without a target has none, or None.
  std::vector<std::vector<Entries>> all_fields(
      const char* argument,
      py::handle given,
      const std::vector<const char*> KindOfHead::* names,
      Read<at::Tensor> read) const {
    require(PyDict_Check(given.ptr()), {argument}, "is not a dict");
    std::vector<std::vector<Entries>> by_head(plan_.table.size());
    Py_ssize_t found = 0;
    for (size_t h = 0; h < by_head.size(); ++h) {
      const KindOfHead& kind = plan_.table.kind(h);
      PyObject* value = PyDict_GetItem(given.ptr(), plan_.names[h].ptr());
      found += value != nullptr ? 1 : 0;
      if (value != nullptr && value != Py_None) {
        const bool may_be_tensor = names == &KindOfHead::target && kind.may_be_tensor;
        by_head[h] = fields({argument, static_cast<int64_t>(h)}, value, kind.*names, may_be_tensor, read);
      } else {
        by_head[h].resize(Heads::num_fields(kind.*names));
      }
    }
    require(found == PyDict_Size(given.ptr()), {argument}, "names what is not a head");
    return by_head;
  }

  // ---- Options ------------------------------------------------------------------------------------------------------

  at::Tensor weights(py::handle given, const Part& part) const {
    return given.is_none() ? at::Tensor() : constant(given, part);
  }

  at::Tensor mask(py::handle given, const Part& part) const {
    if (given.is_none()) {
      return {};
    }
    at::Tensor mask = tensor(given, part);
    require(mask.scalar_type() == at::kBool, part, "is not a bool tensor");
    return mask;
  }

  HeadWeight head_weight(py::handle given, const Part& part) const {
    HeadWeight weight;
    if (THPVariable_Check(given.ptr())) {
      weight.tensor = tensor(given, part);
      weight.wants_gradient = at::GradMode::is_enabled() && weight.tensor.requires_grad();
      return weight;
    }
    weight.number = real_number(given).value_or(-1);
    require(weight.number >= 0 && std::isfinite(weight.number), part, "is not a number of at least 0");
    return weight;
  }

  NumEntries num_entries(py::handle given, const Part& part) const {
    NumEntries entries;
    if (THPVariable_Check(given.ptr())) {
      entries.tensor = constant(given, part);
      return entries;
    }
    entries.number = real_number(given).value_or(0);
    require(entries.number > 0 && std::isfinite(entries.number), part, "is not a number above 0");
    return entries;
  }

  StepNumbers step_numbers(py::handle given, const Part& part) const {
    StepNumbers numbers;
    PyObject* items = given.ptr();
    if (given.is_none() || THPVariable_Check(items)) {
      numbers.tensor = weights(given, part);
      return numbers;
    }
    // Read a copy: converting an item to a number may run Python code (`__float__`), which could change the list.
    const bool has_steps = is_sequence(given) && PySequence_Size(items) == steps_;
    const auto copy = py::reinterpret_steal<py::tuple>(has_steps ? PySequence_Tuple(items) : nullptr);
    require(!failed() && copy && steps_ > 0, part, "is not a sequence of a number for each step");
    for (const py::handle item : copy) {
      if (THPVariable_Check(item.ptr())) { // reading a number from another device would synchronize
        require(constant(item, part).is_cpu(), part, "is on a device");
      }
      numbers.numbers.push_back(PyFloat_AsDouble(item.ptr()));
      require(!failed(), part, "is not a sequence of a number for each step");
    }
    return numbers;
  }

  // Step numbers, or "unroll": 1 for the root and 1/K after.
  StepNumbers gradient_scale(py::handle given, const Part& part) const {
    if (!is_text(given, "unroll")) {
      return step_numbers(given, part);
    }
    StepNumbers numbers{{1.0}, {}};
    numbers.numbers.resize(std::max<int64_t>(steps_, 1), 1.0 / static_cast<double>(steps_ - 1));
    return numbers;
  }

  template <class Choice>
  void read_choice(const char* argument, py::handle given, Choice& choice) const {
    constexpr auto names = names_of(Choice());
    const auto found = std::find_if(names.begin(), names.end(), [=](const char* name) { return is_text(given, name); });
    require(found != names.end(), {argument}, "is not a choice");
    choice = static_cast<Choice>(found - names.begin());
  }

  // Reads one value for all heads, or a dict with a value for each head.
  template <class T>
  void read_by_head(const char* argument, py::handle given, ByHead<T>& by_head, Read<T> read) const {
    if (given.is_none()) {
      return;
    }
    if (!PyDict_Check(given.ptr())) {
      by_head.values.push_back((this->*read)(given, {argument}));
      return;
    }
    by_head.values.resize(plan_.table.size());
    Py_ssize_t found = 0;
    for (size_t h = 0; h < by_head.values.size(); ++h) {
      // A new reference: reading may run Python code, which could remove the value from the dict.
      const auto value = py::reinterpret_borrow<py::object>(PyDict_GetItem(given.ptr(), plan_.names[h].ptr()));
      if (value) {
        by_head.values[h] = (this->*read)(value, {argument, static_cast<int64_t>(h)});
        ++found;
      }
    }
    require(found == PyDict_Size(given.ptr()), {argument}, "names what is not a head");
  }

  void read_options(py::handle options, Call& call) {
    const auto given = [=](Option option) -> py::handle {
      return PyTuple_GET_ITEM(options.ptr(), static_cast<Py_ssize_t>(option));
    };
    const auto is_by_head = [](py::handle value) { return value.is_none() || PyDict_Check(value.ptr()); };
    const py::handle batch_first = given(Option::batch_first);
    const py::handle head_weights = given(Option::head_weights), num_entries = given(Option::num_entries);
    require(PyBool_Check(batch_first.ptr()), {"batch_first"}, "is not a bool");
    require(is_by_head(head_weights), {"head_weights"}, "is not a dict");
    require(is_by_head(num_entries), {"num_entries"}, "is not a dict");
    call.batch_first = batch_first.ptr() == Py_True;
    call.steps = has_steps_;
    steps_ = call.count_steps();
    for (const Option option : {Option::step_weights, Option::step_gradient_scale}) {
      require(has_steps_ || given(option).is_none(), {"step weights"}, "needs steps");
    }
    read_by_head("step_weights", given(Option::step_weights), call.step_weights, &LossReader::step_numbers);
    const py::handle gradient_scale = given(Option::step_gradient_scale);
    read_by_head("step_gradient_scale", gradient_scale, call.step_gradient_scale, &LossReader::gradient_scale);
    read_by_head(
        "importance_weights", given(Option::importance_weights), call.importance_weights, &LossReader::weights);
    read_by_head("mask", given(Option::mask), call.mask, &LossReader::mask);
    read_by_head("head_weights", head_weights, call.head_weights, &LossReader::head_weight);
    read_by_head("num_entries", num_entries, call.num_entries, &LossReader::num_entries);
    read_choice("reduction", given(Option::reduction), call.reduction);
    read_choice("nonfinite", given(Option::nonfinite), call.nonfinite);
  }

  const Plan& plan_;
  bool has_steps_ = true;
  int64_t steps_ = 0; // T
};

// The number of a head in [heads], as a tensor without dimensions that shares its memory. It is no view in the sense of
// autograd, because users never see the base.
at::Tensor number_of(const at::Tensor& numbers, size_t head) {
  at::Tensor number = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(numbers.storage()), numbers.key_set(), numbers.dtype());
  number.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(), at::IntArrayRef(), static_cast<int64_t>(head));
  return number;
}

py::dict outputs_to_python(const Plan& plan, const Call& call) {
  const Outputs& outputs = call.outputs;
  py::dict per_step, details[3]; // indexed by Detail
  py::dict head_means, head_losses, head_gradient_norms, max_abs_logit, log_probs, approx_kl, clip_fraction;
  for (size_t h = 0; h < plan.table.size(); ++h) {
    const py::object& name = plan.names[h];
    per_step[name] = outputs.per_step[h];
    if (call.has_detail(h)) {
      details[static_cast<size_t>(plan.table[h].detail)][name] = outputs.details[h];
    }
    if (is_policy(plan.table[h].kind)) {
      log_probs[name] = outputs.log_probs[h];
    }
    if (call.has_old_policy(h)) {
      approx_kl[name] = outputs.approx_kl[h];
      clip_fraction[name] = outputs.clip_fraction[h];
    }
    head_means[name] = number_of(outputs.head_means, h);
    head_losses[name] = number_of(outputs.head_losses, h);
    if (call.wants_head(h)) {
      head_gradient_norms[name] = number_of(outputs.head_gradient_norms, h);
    }
    if (call.has_logits(h)) {
      max_abs_logit[name] = number_of(outputs.max_abs_logit, h);
    }
  }
  py::dict result;
  result["loss"] = outputs.loss;
  result["per_sample"] = outputs.per_sample;
  result["per_step"] = per_step;
  result["expected"] = details[static_cast<size_t>(Detail::expected)];
  result["entropy"] = details[static_cast<size_t>(Detail::entropy)];
  result["head_means"] = head_means;
  result["head_losses"] = head_losses;
  result["head_gradient_norms"] = head_gradient_norms;
  result["max_abs_logit"] = max_abs_logit;
  result["num_nonfinite"] = outputs.num_nonfinite;
  result["log_probs"] = log_probs;
  result["approx_kl"] = approx_kl;
  result["clip_fraction"] = clip_fraction;
  return result;
}

// The names of heads for messages. Half a surrogate pair, which Python allows in text, is written as its number.
std::vector<std::string> labels_of(const py::dict& heads) {
  std::vector<std::string> labels;
  for (const auto& item : heads) {
    labels.push_back(item.first.attr("encode")("utf-8", "backslashreplace").cast<std::string>());
  }
  return labels;
}

// Makes a plan whose deleter takes the GIL: its last owner may be a node of the graph that a thread of autograd frees.
std::shared_ptr<Plan> make_plan(
    py::dict heads, const std::vector<std::string>& names, const std::vector<double>& numbers) {
  return {new Plan(std::move(heads), names, numbers), [](Plan* plan) {
            const py::gil_scoped_acquire gil;
            delete plan;
          }};
}

// Computes the loss. `options` is an `Options` of gradscale_ext/call/options.py, whose fields have the order of the C++
// Options (tests/test_loss_contexts.py checks it). Returns the fields of `MultiStepLossOutput` by name.
py::object multi_step_loss(
    const std::shared_ptr<Plan>& plan, py::handle predictions, py::handle targets, const py::tuple& options) {
  require_ordinary_context();
  Call call = LossReader(*plan).read(predictions, targets, options);
  {
    py::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    call.check();
    run(call);
  }
  py::dict result = outputs_to_python(*plan, call);
  if (call.wants_any()) {
    record_call(std::move(call), plan);
  }
  return result;
}

} // namespace

Plan::Plan(py::dict heads, const std::vector<std::string>& head_names, const std::vector<double>& numbers)
    : heads(std::move(heads)), table(head_names, numbers, labels_of(this->heads)) {
  for (const auto& item : this->heads) {
    names.push_back(py::reinterpret_borrow<py::object>(item.first));
  }
}

void define_loss(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(py::init(&make_plan));
  m.def("multi_step_loss", run_or_refuse(&multi_step_loss));
  m.def("fields", [] { // kind of head -> names of the fields of predictions and of targets
    py::dict fields;
    for (const KindOfHead& kind : kinds()) {
      const auto names = [](const std::vector<const char*>& given) {
        return given.empty() ? std::vector<std::string>{""} : std::vector<std::string>(given.begin(), given.end());
      };
      fields[py::str(kind.name)] = py::make_tuple(names(kind.prediction), names(kind.target));
    }
    return fields;
  });
  m.def("outputs", [] { // name -> true for a list by head; in the order in which the operator returns them
    const Outputs none;
    py::dict outputs;
    Outputs::each(none, [&](const char* name, const auto& output) {
      outputs[name] = !std::is_same_v<std::decay_t<decltype(output)>, at::Tensor>;
    });
    return outputs;
  });
  m.def("use_loss_kernels", [](uintptr_t rows, uintptr_t samples) { // addresses of other CPU kernels, for tests
    run_rows_kernel = reinterpret_cast<RunRows>(rows);
    sum_samples_kernel = reinterpret_cast<SumSamples>(samples);
  });
}

} // namespace gradscale
