#include "head_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace gradscale {

namespace {

template <class Target>
struct Number {
  const char* name;
  void (*set)(Target&, double);
};

// -1, which none of the integers may be, where there is no such int32.
int32_t integer_from(double number) {
  return number >= 0 && number <= 2147483647.0 ? static_cast<int32_t>(number) : -1;
}

constexpr Number<Support> kNumbersOfSupport[] = {
    {"minimum", [](Support& support, double number) { support.minimum = number; }},
    {"maximum", [](Support& support, double number) { support.maximum = number; }},
    {"num_bins", [](Support& support, double number) { support.num_bins = integer_from(number); }},
    {"transform",
     [](Support& support, double number) { support.transform = static_cast<Transform>(integer_from(number)); }},
    {"eps", [](Support& support, double number) { support.eps = number; }},
    {"raw", [](Support& support, double number) { support.raw = number != 0; }},
};

constexpr Number<Head> kNumbers[] = {
    {"decodes", [](Head& head, double number) { head.decodes = number != 0; }},
    {"first_step", [](Head& head, double number) { head.first_step = integer_from(number); }},
    {"weight", [](Head& head, double number) { head.weight = number; }},
    {"label_smoothing", [](Head& head, double number) { head.label_smoothing = number; }},
    {"entropy_weight", [](Head& head, double number) { head.entropy_weight = number; }},
    {"subtract_target_entropy", [](Head& head, double number) { head.subtract_target_entropy = number != 0; }},
    {"sigma_ratio", [](Head& head, double number) { head.sigma_ratio = number; }},
};

constexpr Number<Form> kNumbersOfForm[] = {
    {"prediction_dims", [](Form& form, double number) { form.prediction_dims = static_cast<int64_t>(number); }},
    {"target_dims", [](Form& form, double number) { form.target_dims = static_cast<int64_t>(number); }},
    {"classes", [](Form& form, double number) { form.classes = number != 0; }},
};

// Whether the numbers of the target have one of this name, which is set then.
template <class Target, size_t size>
bool set(const Number<Target> (&numbers)[size], Target& target, const std::string& name, double number) {
  const auto* found = std::find_if(numbers, numbers + size, [&](const auto& known) { return name == known.name; });
  if (found == numbers + size) {
    return false;
  }
  found->set(target, number);
  return true;
}

Support support_from(c10::ArrayRef<std::string> names, c10::ArrayRef<double> numbers) {
  Support support{};
  for (size_t i = 0; i < names.size(); ++i) {
    TORCH_CHECK(set(kNumbersOfSupport, support, names[i], numbers[i]), "Support: it has no number '", names[i], "'");
  }
  return support;
}

} // namespace

OwnedSupport::OwnedSupport(c10::ArrayRef<std::string> names, c10::ArrayRef<double> numbers)
    : OwnedSupport(support_from(names, numbers)) {
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

std::vector<std::string> kinds() {
#define GRADSCALE_NAME(name) #name,
  return {GRADSCALE_KINDS(GRADSCALE_NAME)};
#undef GRADSCALE_NAME
}

HeadTable::HeadTable(c10::ArrayRef<std::string> names, c10::ArrayRef<double> numbers) {
  TORCH_CHECK(
      !names.empty() && names.size() == numbers.size(),
      "multi_step_loss: heads must be names and as many numbers, but there are ",
      names.size(),
      " and ",
      numbers.size());
  static const std::vector<std::string> known = kinds();
  for (size_t i = 0; i < names.size(); ++i) {
    const auto kind = std::find(known.begin(), known.end(), names[i]);
    if (kind != known.end()) {
      heads_.emplace_back().kind = static_cast<Kind>(kind - known.begin());
      forms_.emplace_back();
      continue;
    }
    TORCH_CHECK(!heads_.empty(), "multi_step_loss: '", names[i], "' is no kind of head");
    if (names[i] == kNumbersOfForm[0].name) {
      forms_.back().emplace_back();
    }
    Head& head = heads_.back();
    const bool is_known = set(kNumbers, head, names[i], numbers[i]) ||
                          set(kNumbersOfSupport, head.support, names[i], numbers[i]) ||
                          (!forms_.back().empty() && set(kNumbersOfForm, forms_.back().back(), names[i], numbers[i]));
    TORCH_CHECK(is_known, "multi_step_loss: a head has no number '", names[i], "'");
  }
  for (size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    TORCH_CHECK(
        !forms_[h].empty() && head.first_step >= 0 && (!head.decodes || head.support.num_bins >= 2),
        "multi_step_loss: the numbers of head ",
        h,
        " are not those of a head");
    head.support = supports_.emplace_back(head.support).get();
  }
}

} // namespace gradscale
