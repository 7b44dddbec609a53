// Checks of the tensors of a call.
#pragma once

#include "../torch/tensor_element.h"
#include "call.h"

namespace gradscale {

// Checks that the shapes and types of a call's tensors agree with each other and with the forms of the heads.
class Checks {
 public:
  explicit Checks(const Call& call) : heads_(*call.heads), call_(call) {
  }

  bool all() const {
    for (size_t h = 0; h < heads_.size(); ++h) {
      if (!head(h)) {
        return false;
      }
    }
    return each(call_.step_weights, [&](const StepNumbers& numbers) { return step_numbers(numbers); }) &&
           each(call_.step_gradient_scale, [&](const StepNumbers& numbers) { return step_numbers(numbers); }) &&
           each(call_.importance_weights, [&](const at::Tensor& weights) { return importance_weights(weights); }) &&
           each(call_.mask, [&](const at::Tensor& mask) { return !mask.defined() || is_batch_by_steps(mask); }) &&
           each(call_.head_weights, [&](const HeadWeight& weight) { return head_weight(weight); }) &&
           each(call_.num_entries, [&](const NumEntries& entries) { return num_entries(entries); }) &&
           (call_.head_weights.values.size() != 1 || heads_.size() == 1) && // each head has its own share
           (call_.num_entries.values.empty() || is_mean(call_.reduction)) && on_one_device() && signs_of_step_weights();
  }

 private:
  template <class T, class Predicate>
  bool each(const ByHead<T>& by_head, Predicate predicate) const {
    const std::vector<T>& values = by_head.values;
    return (values.size() <= 1 || values.size() == heads_.size()) &&
           std::all_of(values.begin(), values.end(), predicate);
  }

  bool head(size_t h) const {
    const Entries& predictions = call_.predictions[h];
    const Entries& targets = call_.targets[h];
    const int64_t steps = call_.steps - heads_[h].first_step;
    if (steps < 1 || steps_of(predictions, call_.batch_first) != steps ||
        heads_.has_target(h) == targets.tensors.empty() ||
        (heads_.has_target(h) && steps_of(targets, call_.batch_first) != steps)) {
      return false;
    }
    if (predictions.tensors[0].dim() < predictions.leading_dims()) {
      return false;
    }
    const at::IntArrayRef sizes = predictions.sizes(0);
    const bool has_form = has_any_form(h, [=](const Form& form) { return has_dims(form.prediction_dims, sizes); });
    return has_form && has_elements(sizes) && (!heads_[h].has_support() || sizes[0] == heads_[h].support.num_bins) &&
           std::all_of(
               predictions.tensors.begin(),
               predictions.tensors.end(),
               [&](const at::Tensor& tensor) {
                 return has_element(tensor) && has_shape(tensor, predictions, sizes);
               }) &&
           std::all_of(targets.tensors.begin(), targets.tensors.end(), [&](const at::Tensor& tensor) {
             return target(h, tensor, sizes);
           });
  }

  static bool has_dims(int64_t dims, at::IntArrayRef sizes) {
    return dims == static_cast<int64_t>(sizes.size());
  }

  static bool has_elements(at::IntArrayRef sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 1; });
  }

  // True if a target has the dtype and the sizes of one of the head's forms, given the sizes of the prediction.
  bool target(size_t h, const at::Tensor& tensor, at::IntArrayRef prediction_sizes) const {
    const Entries& targets = call_.targets[h];
    const bool classes = tensor.scalar_type() == at::kLong;
    const int64_t leading = targets.leading_dims();
    if (tensor.dim() < leading) {
      return false;
    }
    const at::IntArrayRef sizes = tensor.sizes().slice(leading);
    const bool has_form = has_any_form(h, [=](const Form& form) {
      return form.classes == classes && has_dims(form.prediction_dims, prediction_sizes) &&
             has_dims(form.target_dims, sizes) &&
             (form.own_sizes ? has_elements(sizes) : sizes == prediction_sizes.slice(0, sizes.size()));
    });
    return has_form && (classes || has_element(tensor)) && has_shape(tensor, targets, sizes);
  }

  template <class Predicate>
  bool has_any_form(size_t h, Predicate predicate) const {
    const std::vector<Form>& forms = heads_.forms(h);
    return std::any_of(forms.begin(), forms.end(), predicate);
  }

  // True if the tensor has the call's batch size, and these sizes after the batch and step dimensions.
  bool has_shape(const at::Tensor& tensor, const Entries& entries, at::IntArrayRef sizes) const {
    const int64_t leading = entries.leading_dims();
    return tensor.dim() == leading + static_cast<int64_t>(sizes.size()) && tensor.sizes().slice(leading) == sizes &&
           tensor.size(call_.batch_dim(entries)) == call_.batch;
  }

  bool is_batch_by_steps(const at::Tensor& tensor) const {
    const int64_t batch_dim = call_.batch_dim();
    return tensor.dim() == 2 && tensor.size(batch_dim) == call_.batch && tensor.size(1 - batch_dim) == call_.steps;
  }

  bool step_numbers(const StepNumbers& numbers) const {
    if (numbers.tensor.defined()) {
      return has_element(numbers.tensor) &&
             (numbers.tensor.sizes() == at::IntArrayRef({call_.steps}) || is_batch_by_steps(numbers.tensor));
    }
    return numbers.numbers.empty() || static_cast<int64_t>(numbers.numbers.size()) == call_.steps;
  }

  bool importance_weights(const at::Tensor& weights) const {
    return !weights.defined() || (has_element(weights) && weights.sizes() == at::IntArrayRef({call_.batch}));
  }

  // True if no head reads a negative number. The elements of tensors are not read here.
  bool signs_of_step_weights() const {
    const auto is_negative = [](double number) { return number < 0; };
    for (size_t h = 0; h < heads_.size(); ++h) {
      const std::vector<double>& numbers = call_.step_weights[h].numbers;
      const int64_t first = numbers.empty() ? 0 : heads_[h].first_step;
      if (std::any_of(numbers.begin() + first, numbers.end(), is_negative)) {
        return false;
      }
    }
    return true;
  }

  static bool head_weight(const HeadWeight& weight) {
    return !weight.tensor.defined() || (has_element(weight.tensor) && weight.tensor.dim() == 0);
  }

  // Half types round counts.
  static bool num_entries(const NumEntries& entries) {
    const at::Tensor& tensor = entries.tensor;
    return !tensor.defined() ||
           (tensor.dim() == 0 && (tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kFloat ||
                                  at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)));
  }

  bool on_one_device() const {
    const c10::Device device = call_.predictions[0].tensors[0].device();
    bool same = true;
    call_.each_tensor(
        [&](const at::Tensor& tensor) { same = same && (!tensor.defined() || tensor.device() == device); });
    return same;
  }

  const Heads& heads_;
  const Call& call_;
};

} // namespace gradscale
