// Checks of the tensors of a call.
#pragma once

#include "../torch/refusal.h"
#include "../torch/tensor_element.h"
#include "call.h"

namespace gradscale {

// Checks that the shapes and types of a call's tensors agree with each other and with the forms of the heads. Throws a
// Refusal of the first that do not, and a ValueError of classes out of range.
class Checks {
 public:
  explicit Checks(const Call& call) : heads_(*call.heads), call_(call) {
  }

  void all() const {
    for (size_t h = 0; h < heads_.size(); ++h) {
      check_head(h);
    }
    each("step_weights", call_.step_weights, [&](const StepNumbers& numbers) { return fits(numbers); });
    each("step_gradient_scale", call_.step_gradient_scale, [&](const StepNumbers& numbers) { return fits(numbers); });
    each("importance_weights", call_.importance_weights, [&](const at::Tensor& weights) {
      return !weights.defined() || (has_element(weights) && weights.sizes() == at::IntArrayRef({call_.batch}));
    });
    each("mask", call_.mask, [&](const at::Tensor& mask) { return !mask.defined() || is_batch_by_steps(mask); });
    each("head_weights", call_.head_weights, [&](const HeadWeight& weight) {
      return !weight.tensor.defined() || (has_element(weight.tensor) && weight.tensor.dim() == 0);
    });
    each("num_entries", call_.num_entries, [](const NumEntries& entries) { return fits(entries); });
    require( // each head has its own share
        call_.head_weights.values.size() != 1 || heads_.size() == 1,
        {"head_weights"},
        "is one value for several heads");
    require(call_.num_entries.values.empty() || is_mean(call_.reduction), {"num_entries"}, "needs a mean");
    for (size_t h = 0; h < heads_.size(); ++h) {
      check_sign_of_step_weights(h);
      check_classes(h);
    }
  }

 private:
  template <class Came>
  void require(bool condition, const Part& part, const Came& came) const {
    if (condition) {
      return;
    }
    if constexpr (std::is_convertible_v<Came, std::string>) {
      throw Refusal{heads_.words(part), came};
    } else {
      throw Refusal{heads_.words(part), described(came)};
    }
  }

  // Checks the tensors of a head.
  template <class Fits>
  void each_entry(const char* argument, size_t h, const Entries& entries, Fits fits) const {
    const auto head = static_cast<int64_t>(h);
    for (size_t k = 0; k < entries.tensors.size(); ++k) {
      const at::Tensor& tensor = entries.tensors[k];
      const Part part{argument, head, entries.stacked ? -1 : static_cast<int64_t>(k)};
      require(fits(tensor) && is_on_device(tensor), part, tensor);
    }
  }

  static const at::Tensor& tensor_of(const at::Tensor& tensor) {
    return tensor;
  }
  template <class T>
  static const at::Tensor& tensor_of(const T& option) {
    return option.tensor;
  }

  template <class T, class Fits>
  void each(const char* argument, const ByHead<T>& by_head, Fits fits) const {
    const std::vector<T>& values = by_head.values;
    require(values.size() <= 1 || values.size() == heads_.size(), {argument}, "has another number of heads");
    for (size_t i = 0; i < values.size(); ++i) {
      const at::Tensor& tensor = tensor_of(values[i]);
      const Part part{argument, values.size() == 1 ? -1 : static_cast<int64_t>(i)};
      tensor.defined() ? require(fits(values[i]) && is_on_device(tensor), part, tensor)
                       : require(fits(values[i]), part, "does not have a number for each step");
    }
  }

  void check_head(size_t h) const {
    const auto head = static_cast<int64_t>(h);
    const Entries& predictions = call_.predictions[h];
    const Entries& targets = call_.targets[h];
    const int64_t steps = call_.steps - heads_[h].first_step;
    require(
        steps >= 1 && steps_of(predictions, call_.batch_first) == steps,
        {"prediction", head},
        "has another number of steps");
    require(
        heads_.has_target(h) ? !targets.tensors.empty() && steps_of(targets, call_.batch_first) == steps
                             : targets.tensors.empty(),
        {"target", head},
        "has another number of steps");
    const at::Tensor& first = predictions.tensors[0];
    require(first.dim() >= predictions.leading_dims(), {"prediction", head}, first);
    const at::IntArrayRef sizes = predictions.sizes(0);
    const bool has_form = has_any_form(h, [=](const Form& form) { return has_dims(form.prediction_dims, sizes); }) &&
                          has_elements(sizes) && (!heads_[h].has_support() || sizes[0] == heads_[h].support.num_bins);
    each_entry("prediction", h, predictions, [&](const at::Tensor& tensor) {
      return has_form && has_element(tensor) && has_shape(tensor, predictions, sizes);
    });
    each_entry("target", h, targets, [&](const at::Tensor& tensor) { return is_target(h, tensor, sizes); });
  }

  static bool has_dims(int64_t dims, at::IntArrayRef sizes) {
    return dims == static_cast<int64_t>(sizes.size());
  }

  static bool has_elements(at::IntArrayRef sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 1; });
  }

  // True if a target has the dtype and the sizes of one of the head's forms, given the sizes of the prediction.
  bool is_target(size_t h, const at::Tensor& tensor, at::IntArrayRef prediction_sizes) const {
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

  bool is_on_device(const at::Tensor& tensor) const {
    return tensor.device() == call_.sum_options.device();
  }

  bool fits(const StepNumbers& numbers) const {
    if (numbers.tensor.defined()) {
      return has_element(numbers.tensor) &&
             (numbers.tensor.sizes() == at::IntArrayRef({call_.steps}) || is_batch_by_steps(numbers.tensor));
    }
    return numbers.numbers.empty() || static_cast<int64_t>(numbers.numbers.size()) == call_.steps;
  }

  // Half types round counts.
  static bool fits(const NumEntries& entries) {
    const at::Tensor& tensor = entries.tensor;
    return !tensor.defined() ||
           (tensor.dim() == 0 && (tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kFloat ||
                                  at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)));
  }

  // The head must not read a negative number. The elements of tensors are not read here.
  void check_sign_of_step_weights(size_t h) const {
    const std::vector<double>& numbers = call_.step_weights[h].numbers;
    for (auto step = static_cast<size_t>(heads_[h].first_step); step < numbers.size(); ++step) {
      require(!(numbers[step] < 0), {"step_weights", static_cast<int64_t>(h)}, "has a negative number");
    }
  }

  // Raises if an unmasked class is out of range, for which the kernel would return NaN. Classes on a device are not
  // checked, because reading them would synchronize.
  void check_classes(size_t h) const {
    const Entries& targets = call_.targets[h];
    if (targets.tensors.empty() || !targets.tensors[0].is_cpu()) {
      return;
    }
    const int64_t first_step = heads_[h].first_step, number = call_.predictions[h].tensors[0].size(-1);
    const StepMask mask = call_.step_mask(h);
    for (int64_t k = 0; k < call_.steps - first_step; ++k) {
      const Rows classes = call_.rows_of(targets, k);
      if (classes.element != Element::int64) {
        continue;
      }
      for (int64_t b = 0; b < call_.batch; ++b) {
        const int64_t chosen = static_cast<const int64_t*>(classes.data)[b * classes.stride];
        TORCH_CHECK_VALUE(
            !mask.includes(b, first_step + k) || (chosen >= 0 && chosen < number),
            "multi_step_loss: ",
            heads_.words({"target", static_cast<int64_t>(h), k}),
            " must be classes from 0 to ",
            number - 1,
            ", but sample ",
            b,
            " has ",
            chosen);
      }
    }
  }

  const Heads& heads_;
  const Call& call_;
};

} // namespace gradscale
