#include "arguments.h"

#include "../host/tensor_element.h"

namespace gradscale {

namespace {

// Steps of a tensor with a step dimension, or tensors.
int64_t count_steps(const Entries& entries, bool batch_first) {
  if (!entries.stacked) {
    return static_cast<int64_t>(entries.tensors.size());
  }
  const at::Tensor& tensor = entries.tensors[0];
  return tensor.dim() < 2 ? 0 : tensor.size(batch_first ? 1 : 0);
}

// Checks that a call's tensors have the shapes and types of each other and of the heads' forms.
class Checks {
 public:
  Checks(const HeadTable& heads, const Arguments& arguments) : heads_(heads), arguments_(arguments) {
  }

  bool all() const {
    for (size_t h = 0; h < heads_.size(); ++h) {
      if (!head(h) || (arguments_.mask[h].defined() && !is_of_samples_and_steps(arguments_.mask[h]))) {
        return false;
      }
    }
    const at::Tensor& weights = arguments_.importance_weights;
    return step_numbers(arguments_.step_weights) && step_numbers(arguments_.step_gradient_scale) &&
           (!weights.defined() || (has_element(weights) && weights.sizes() == at::IntArrayRef({arguments_.batch}))) &&
           counts(arguments_.num_entries) && on_one_device();
  }

 private:
  bool head(size_t h) const {
    const Entries& predictions = arguments_.predictions[h];
    const Entries& targets = arguments_.targets[h];
    const int64_t steps = arguments_.steps - heads_[h].first_step;
    if (steps < 1 || count_steps(predictions, arguments_.batch_first) != steps ||
        heads_.has_target(h) == targets.tensors.empty() ||
        (heads_.has_target(h) && count_steps(targets, arguments_.batch_first) != steps)) {
      return false;
    }
    const int64_t dims = predictions.dims();
    int64_t width = heads_[h].has_support() ? heads_[h].support.num_bins : -1;
    const bool has_form = has_any_form(h, [=](const Form& form) { return form.prediction_dims == dims; });
    return has_form &&
           std::all_of(
               predictions.tensors.begin(),
               predictions.tensors.end(),
               [&](const at::Tensor& tensor) {
                 return has_element(tensor) && has_shape(tensor, predictions, dims, width);
               }) &&
           (dims == 0 || width >= 1) &&
           std::all_of(targets.tensors.begin(), targets.tensors.end(), [&](const at::Tensor& tensor) {
             return target(h, tensor, dims, width);
           });
  }

  // A target has the dtype and the dimensions of one of the head's forms.
  bool target(size_t h, const at::Tensor& tensor, int64_t prediction_dims, int64_t& width) const {
    const Entries& targets = arguments_.targets[h];
    const bool classes = tensor.scalar_type() == at::kLong;
    const int64_t dims = tensor.dim() - (targets.stacked ? 2 : 1);
    const bool has_form = has_any_form(h, [=](const Form& form) {
      return form.classes == classes && form.prediction_dims == prediction_dims && form.target_dims == dims;
    });
    return has_form && (classes || has_element(tensor)) && has_shape(tensor, targets, dims, width);
  }

  template <class Predicate>
  bool has_any_form(size_t h, Predicate predicate) const {
    const std::vector<Form>& forms = heads_.forms(h);
    return std::any_of(forms.begin(), forms.end(), predicate);
  }

  // Behind batch and steps are `dims` dimensions, of `width` (-1: any, but the same for all) elements.
  bool has_shape(const at::Tensor& tensor, const Entries& entries, int64_t dims, int64_t& width) const {
    if (tensor.dim() != (entries.stacked ? 2 : 1) + dims) {
      return false;
    }
    if (dims == 1) {
      width = width < 0 ? tensor.size(-1) : width;
    }
    return tensor.size(arguments_.batch_dim(entries)) == arguments_.batch && (dims == 0 || tensor.size(-1) == width);
  }

  bool is_of_samples_and_steps(const at::Tensor& tensor) const {
    const int64_t batch_dim = arguments_.batch_dim();
    return tensor.dim() == 2 && tensor.size(batch_dim) == arguments_.batch &&
           tensor.size(1 - batch_dim) == arguments_.steps;
  }

  bool step_numbers(const StepNumbers& numbers) const {
    if (numbers.tensor.defined()) {
      return has_element(numbers.tensor) &&
             (numbers.tensor.sizes() == at::IntArrayRef({arguments_.steps}) || is_of_samples_and_steps(numbers.tensor));
    }
    return numbers.numbers.empty() || static_cast<int64_t>(numbers.numbers.size()) == arguments_.steps;
  }

  bool counts(const at::Tensor& tensor) const {
    return !tensor.defined() || (tensor.scalar_type() == at::kDouble && tensor.is_contiguous() &&
                                 tensor.sizes() == at::IntArrayRef({static_cast<int64_t>(heads_.size())}));
  }

  bool on_one_device() const {
    const c10::Device device = arguments_.predictions[0].tensors[0].device();
    bool same = true;
    arguments_.each_tensor([&](const at::Tensor& tensor) { same = same && tensor.device() == device; });
    return same;
  }

  const HeadTable& heads_;
  const Arguments& arguments_;
};

} // namespace

bool Arguments::settle(const HeadTable& heads) {
  const auto is_empty = [](const Entries& entries) { return entries.tensors.empty(); };
  if (predictions.size() != heads.size() || targets.size() != heads.size() || mask.size() != heads.size() ||
      std::any_of(predictions.begin(), predictions.end(), is_empty)) {
    return false;
  }
  steps = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    steps = std::max(steps, heads[h].first_step + count_steps(predictions[h], batch_first));
  }
  const Entries& first = predictions[0];
  if (first.tensors[0].dim() <= batch_dim(first)) {
    return false;
  }
  batch = first.tensors[0].size(batch_dim(first));
  if (step_gradient_scale.unroll && steps > 0) {
    step_gradient_scale.numbers.assign(steps, 1.0 / static_cast<double>(std::max<int64_t>(steps - 1, 1)));
    step_gradient_scale.numbers[0] = 1.0;
  }
  return Checks(heads, *this).all();
}

bool Arguments::wants_any() const {
  return std::any_of(wants.begin(), wants.end(), [](const std::vector<bool>& of_head) {
    return std::find(of_head.begin(), of_head.end(), true) != of_head.end();
  });
}

} // namespace gradscale
