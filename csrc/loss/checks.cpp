// Checks of the tensors of a call.
#include "../torch/refusal.h"
#include "../torch/tensor_element.h"
#include "call.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

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
  template <class Given>
  void require(bool condition, const Part& part, const Given& given) const {
    if (condition) {
      return;
    }
    if constexpr (std::is_convertible_v<Given, std::string>) {
      throw Refusal{heads_.words(part), given};
    } else {
      throw Refusal{heads_.words(part), described(given)};
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

  // One field of a head's prediction or target.
  struct FieldOfHead {
    Part part;
    const Entries& entries;
    const std::vector<const char*> Form::* fields; // of the same tensors
    size_t index;
  };

  void check_head(size_t h) const {
    const int64_t steps = call_.num_steps - heads_[h].first_step;
    require(call_.steps || heads_[h].first_step == 0, {"prediction", static_cast<int64_t>(h)}, "begins at a step");
    const std::vector<FieldOfHead> fields = fields_of(h);
    for (const FieldOfHead& field : fields) {
      const Entries& entries = field.entries;
      const bool has_steps = call_.steps ? steps_of(entries, call_.batch_first) == steps : !entries.stacked;
      require(
          steps >= 1 && (entries.tensors.empty() || entries.sums_gradient() || has_steps),
          field.part,
          "has another number of steps");
    }
    const Form& form = form_of(h, fields);
    for (int64_t step = 0; step < steps; ++step) {
      Sizes sizes(heads_[h]);
      for (const FieldOfHead& field : fields) {
        if (!field.entries.tensors.empty() && (step == 0 || !field.entries.stacked || is_letter_shared(form))) {
          check_entry(field, (form.*field.fields)[field.index], step, sizes);
        }
      }
    }
    for (const Entries& entries : call_.predictions[h]) { // the same at all steps
      for (int64_t step = 1; step < steps && !entries.stacked && !entries.shared; ++step) {
        require(
            entries.sizes(step) == entries.sizes(0),
            {"prediction", static_cast<int64_t>(h), step},
            entries.tensors[step]);
      }
    }
    check_scales(h);
    const bool has_probabilities = heads_[h].kind == Kind::soft_cross_entropy && !call_.targets[h][1].tensors.empty();
    const bool has_log_probs = heads_[h].kind == Kind::policy_gradient && !call_.has_logits(h);
    require(
        !has_log_probs || (heads_[h].entropy_weight == 0 && heads_[h].num_choices == 0),
        {"prediction", static_cast<int64_t>(h)},
        "is log-probabilities, which have no entropy and no choices");
    require(
        !has_probabilities || heads_[h].label_smoothing == 0,
        {"target", static_cast<int64_t>(h)},
        "has classes, which cannot be smoothed");
  }

  std::vector<FieldOfHead> fields_of(size_t h) const {
    std::vector<FieldOfHead> fields;
    const auto add = [&](const char* argument, const auto& entries, const auto& names, auto of_form) {
      for (size_t i = 0; i < entries.size(); ++i) {
        const Part part{argument, static_cast<int64_t>(h), -1, i < names.size() ? names[i] : nullptr};
        fields.push_back({part, entries[i], of_form, i});
      }
    };
    add("prediction", call_.predictions[h], heads_.kind(h).prediction, &Form::prediction);
    add("target", call_.targets[h], heads_.kind(h).target, &Form::target);
    return fields;
  }

  // The form with these fields, which their first tensors have.
  const Form& form_of(size_t h, const std::vector<FieldOfHead>& fields) const {
    std::vector<const Form*> possible;
    for (const Form& form : heads_.forms(h)) {
      possible.push_back(&form);
    }
    for (const FieldOfHead& field : fields) {
      const auto differs = [&](const Form* form) {
        const std::vector<const char*>& patterns = form->*field.fields;
        return field.index < patterns.size() ? !is_like(h, field, patterns[field.index])
                                             : !field.entries.tensors.empty();
      };
      possible.erase(std::remove_if(possible.begin(), possible.end(), differs), possible.end());
      if (possible.empty()) {
        require(!field.entries.tensors.empty(), field.part, "is missing");
        require(false, field.part, field.entries.tensors[0]);
      }
    }
    return *possible[0];
  }

  // True if a field is given as the pattern demands, and its first tensor has the dtype and the dimensions.
  bool is_like(size_t h, const FieldOfHead& field, const char* pattern) const {
    const bool is_given = !field.entries.tensors.empty();
    if (*pattern == '-' || !is_given) {
      return !is_given && (*pattern == '-' || (*pattern == '?' && !heads_.reads(h, field.part.field)));
    }
    if (*pattern == '?' && !heads_.reads(h, field.part.field) &&
        std::string(field.part.field) == "reference_log_probs") {
      return false;
    }
    const at::Tensor& tensor = field.entries.tensors[0];
    const std::string letters = letters_of(pattern);
    const bool has_choices = letters.find('G') != std::string::npos && *pattern == '#';
    return (*pattern == '#') == (tensor.scalar_type() == at::kLong) &&
           (*pattern != '#' || !is_policy(heads_[h].kind) || has_choices == (heads_[h].num_choices > 0)) &&
           tensor.dim() == field.entries.leading_dims() + static_cast<int64_t>(letters.size());
  }

  static std::string letters_of(const char* pattern) {
    return *pattern == '#' || *pattern == '?' ? pattern + 1 : pattern;
  }

  // The sizes of letters, as far as they are known; 0 for the others.
  struct Sizes {
    int64_t by_letter[26] = {};

    explicit Sizes(const Head& head) {
      of('S') = head.has_support() ? head.support.num_bins : 0;
      of('G') = head.num_choices;
      of('A') = head.num_choices > 0 ? head.choice_ends[head.num_choices - 1] : 0;
    }
    int64_t& of(char letter) {
      return by_letter[letter - 'A'];
    }
    bool match(const std::string& letters, at::IntArrayRef sizes) {
      for (size_t i = 0; i < letters.size(); ++i) {
        int64_t& known = of(letters[i]);
        known = known == 0 ? sizes[i] : known;
        if (sizes[i] < 1 || sizes[i] != known) {
          return false;
        }
      }
      return true;
    }
  };

  void check_entry(const FieldOfHead& field, const char* pattern, int64_t step, Sizes& sizes) const {
    const Entries& entries = field.entries;
    Part part = field.part;
    part.entry = entries.stacked || !call_.steps ? -1 : step;
    const at::Tensor& tensor = entries.tensors[entries.stacked || entries.shared ? 0 : step];
    const std::string letters = letters_of(pattern);
    require(
        (*pattern == '#' ? tensor.scalar_type() == at::kLong : has_element(tensor)) && is_on_device(tensor) &&
            tensor.dim() == entries.leading_dims() + static_cast<int64_t>(letters.size()) &&
            (entries.sums_gradient() || tensor.size(call_.batch_dim(entries)) == call_.batch) &&
            sizes.match(letters, entries.sizes(step)),
        part,
        tensor);
  }

  // True if a letter stands for a size of several fields whose steps may differ.
  static bool is_letter_shared(const Form& form) {
    return form.prediction.size() + form.target.size() > 2;
  }

  // The rows of means and deviations are computed in one type.
  void check_scales(size_t h) const {
    const std::vector<Entries>& fields = call_.predictions[h];
    for (size_t i = 0; i < fields.size(); ++i) {
      for (const at::Tensor& tensor : fields[i].tensors) {
        require(
            (tensor.scalar_type() == at::kDouble) == (fields[0].tensors[0].scalar_type() == at::kDouble),
            {"prediction",
             static_cast<int64_t>(h),
             -1,
             heads_.kind(h).prediction.empty() ? nullptr : heads_.kind(h).prediction[i]},
            tensor);
      }
    }
  }

  bool is_batch_by_steps(const at::Tensor& tensor) const {
    const int64_t batch_dim = call_.batch_dim();
    if (!call_.steps) {
      return tensor.sizes() == at::IntArrayRef({call_.batch});
    }
    return tensor.dim() == 2 && tensor.size(batch_dim) == call_.batch && tensor.size(1 - batch_dim) == call_.num_steps;
  }

  bool is_on_device(const at::Tensor& tensor) const {
    return tensor.device() == call_.sum_options.device();
  }

  bool fits(const StepNumbers& numbers) const {
    if (numbers.tensor.defined()) {
      return has_element(numbers.tensor) &&
             (numbers.tensor.sizes() == at::IntArrayRef({call_.num_steps}) || is_batch_by_steps(numbers.tensor));
    }
    return numbers.numbers.empty() || static_cast<int64_t>(numbers.numbers.size()) == call_.num_steps;
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

  // Raises if an unmasked class or action is out of range, for which the kernel would return NaN. Those on a device are
  // not checked, because reading them would synchronize.
  void check_classes(size_t h) const {
    if (call_.targets[h].empty() || call_.targets[h][0].tensors.empty()) {
      return;
    }
    const Entries& targets = call_.targets[h][0];
    const int64_t first_step = heads_[h].first_step, width = call_.predictions[h][0].tensors[0].size(-1);
    if (!targets.tensors[0].is_cpu() || targets.tensors[0].scalar_type() != at::kLong) {
      return;
    }
    const StepMask mask = call_.step_mask(h);
    for (int64_t k = 0; k < call_.num_steps - first_step; ++k) {
      const Rows rows = call_.rows_of(targets, k);
      const at::IntArrayRef sizes = targets.sizes(k);
      const int64_t count = sizes.empty() ? 1 : sizes[0];
      const int64_t stride = sizes.empty() ? 0 : targets.tensors[targets.stacked ? 0 : k].stride(-1);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t number = num_classes(heads_[h], i, width);
        const auto chosen = [&](int64_t b) {
          return static_cast<const int64_t*>(rows.data)[b * rows.stride + i * stride];
        };
        const auto is_outside = [&](int64_t b) {
          return static_cast<uint64_t>(chosen(b)) >= static_cast<uint64_t>(number);
        };
        bool any = false; // all are read first, without a branch for each
        for (int64_t b = 0; b < call_.batch; ++b) {
          any |= is_outside(b);
        }
        for (int64_t b = 0; b < call_.batch && any; ++b) {
          if (is_outside(b) && mask.includes(b, first_step + k)) {
            reject_class(h, k, b, i, number, chosen(b));
          }
        }
      }
    }
  }

  // The number of classes of element i of a target.
  static int64_t num_classes(const Head& head, int64_t i, int64_t width) {
    return head.num_choices == 0 ? width : head.choice_ends[i] - (i == 0 ? 0 : head.choice_ends[i - 1]);
  }

  void reject_class(size_t h, int64_t step, int64_t sample, int64_t index, int64_t number, int64_t chosen) const {
    const std::vector<const char*>& names = heads_.kind(h).target;
    const bool has_name = is_policy(heads_[h].kind) || call_.targets[h].back().tensors.size() > 0;
    const Part part{"target", static_cast<int64_t>(h), step, names.empty() || !has_name ? nullptr : names[0]};
    const bool has_choices = heads_[h].num_choices > 0;
    TORCH_CHECK_VALUE(
        false,
        "multi_step_loss: ",
        heads_.words(part),
        " must be ",
        is_policy(heads_[h].kind) ? "actions" : "classes",
        " from 0 to ",
        number - 1,
        has_choices ? c10::str(" in choice ", index) : "",
        ", but sample ",
        sample,
        " has ",
        chosen);
  }

  const Heads& heads_;
  const Call& call_;
};

} // namespace

void Call::find_types() {
  if (predictions.size() != heads->size() || targets.size() != heads->size()) {
    throw Refusal{"heads", c10::str("has ", heads->size(), " heads")};
  }
  size_t count = 0;
  for (std::vector<Entries>& fields : predictions) {
    for (Entries& entries : fields) {
      if (entries.tensors.empty()) {
        throw Refusal{"predictions", "has a head without tensors"};
      }
      entries.first = std::exchange(count, count + entries.tensors.size());
    }
  }
  is_double = false;
  each_prediction([&](const Entries&, const at::Tensor& tensor, size_t) {
    is_double = is_double || tensor.scalar_type() == at::kDouble;
  });
  const c10::Device device = predictions[0][0].tensors[0].device();
  sum_options = at::TensorOptions().dtype(is_double ? at::kDouble : at::kFloat).device(device);
  on_device = runs_kernels(device);
}

void Call::find_sizes() {
  const Entries& entries = predictions[0][0];
  const at::Tensor& first = entries.tensors[0];
  batch = first.dim() > batch_dim(entries) ? first.size(batch_dim(entries)) : 0;
  num_steps = count_steps();
}

int64_t Call::count_steps() const {
  int64_t most = 0;
  for (size_t h = 0; h < heads->size(); ++h) {
    most = std::max(most, (*heads)[h].first_step + steps_of(predictions[h][0], batch_first));
  }
  return most;
}

void Call::check() {
  find_types();
  find_sizes();
  Checks(*this).all();
}

} // namespace gradscale
