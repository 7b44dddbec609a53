#include "heads.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace gradscale {

namespace {

void set(bool& flag, double number) {
  flag = number != 0;
}
void set(double& value, double number) {
  value = number;
}
// A number outside int32 becomes -1, which is valid for no integer.
void set(int32_t& integer, double number) {
  integer = number >= 0 && number <= 2147483647.0 ? static_cast<int32_t>(number) : -1;
}
template <class Choice, std::enable_if_t<std::is_enum_v<Choice>, int> = 0>
void set(Choice& choice, double number) {
  int32_t index;
  set(index, number);
  choice = static_cast<Choice>(index);
}

template <class Target>
struct Number {
  const char* name;
  void (*set)(Target&, double);
};

// NOLINTNEXTLINE(bugprone-macro-parentheses): Target is a type
#define GRADSCALE_NUMBER(Target, name) {#name, [](Target& target, double number) { set(target.name, number); }}
#define GRADSCALE_NUMBER_OF_HEAD(type, name) GRADSCALE_NUMBER(Head, name),

constexpr Number<Head> kNumbers[] = {GRADSCALE_NUMBERS_OF_HEADS(GRADSCALE_NUMBER_OF_HEAD)};
constexpr Number<Support> kNumbersOfSupport[] = {
    GRADSCALE_NUMBER(Support, minimum),
    GRADSCALE_NUMBER(Support, maximum),
    GRADSCALE_NUMBER(Support, num_bins),
    GRADSCALE_NUMBER(Support, transform),
    GRADSCALE_NUMBER(Support, eps),
    GRADSCALE_NUMBER(Support, raw)};
#undef GRADSCALE_NUMBER_OF_HEAD
#undef GRADSCALE_NUMBER

// Sets the number of this name. Returns true if the target has one.
template <class Target, size_t size>
bool set_by_name(const Number<Target> (&numbers)[size], Target& target, const std::string& name, double number) {
  const auto* found = std::find_if(numbers, numbers + size, [&](const auto& known) { return name == known.name; });
  if (found == numbers + size) {
    return false;
  }
  found->set(target, number);
  return true;
}

Support support_from(const std::vector<std::string>& names, const std::vector<double>& numbers) {
  Support support{};
  for (size_t i = 0; i < names.size(); ++i) {
    TORCH_CHECK(
        set_by_name(kNumbersOfSupport, support, names[i], numbers[i]), "Support: it has no number '", names[i], "'");
  }
  return support;
}

} // namespace

OwnedSupport::OwnedSupport(const std::vector<std::string>& names, const std::vector<double>& numbers)
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

Heads::Heads(const std::vector<std::string>& names, const std::vector<double>& numbers) {
  TORCH_CHECK(
      !names.empty() && names.size() == numbers.size(),
      "multi_step_loss: heads must be names and as many numbers, but there are ",
      names.size(),
      " and ",
      numbers.size());
  for (size_t i = 0; i < names.size(); ++i) {
    const auto kind =
        std::find_if(kinds().begin(), kinds().end(), [&](const KindOfHead& known) { return known.name == names[i]; });
    if (kind != kinds().end()) {
      heads_.emplace_back().kind = static_cast<Kind>(kind - kinds().begin());
      continue;
    }
    TORCH_CHECK(!heads_.empty(), "multi_step_loss: '", names[i], "' is no kind of head");
    Head& head = heads_.back();
    TORCH_CHECK(
        set_by_name(kNumbers, head, names[i], numbers[i]) ||
            set_by_name(kNumbersOfSupport, head.support, names[i], numbers[i]),
        "multi_step_loss: a head has no number '",
        names[i],
        "'");
  }
  for (Head& head : heads_) {
    const KindOfHead& kind = description_of(head.kind);
    TORCH_CHECK(
        head.detail == kind.detail && head.first_step >= 0 && (!head.has_support() || head.support.num_bins >= 2) &&
            head.support.transform >= Transform::identity && head.support.transform <= Transform::symlog,
        "multi_step_loss: the numbers of a head are not those of a '",
        kind.name,
        "'");
    head.support = supports_.emplace_back(head.support).get();
  }
}

} // namespace gradscale
