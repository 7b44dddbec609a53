// Supports, and the operators that decode, encode and project over their bins.
#pragma once

#include "../formulas/support.h"

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace gradscale {

// ---- Structs whose numbers come from Python by name: supports here, and heads in loss/call.h ------------------------

inline void set(bool& flag, double number) {
  flag = number != 0;
}
inline void set(double& value, double number) {
  value = number;
}
// A number that is negative or beyond int32 becomes -1, which is invalid for every integer member.
inline void set(int32_t& integer, double number) {
  integer = number >= 0 && number <= INT32_MAX ? static_cast<int32_t>(number) : -1;
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

constexpr Number<Support> kNumbersOfSupport[] = {
    GRADSCALE_NUMBER(Support, minimum),
    GRADSCALE_NUMBER(Support, maximum),
    GRADSCALE_NUMBER(Support, num_bins),
    GRADSCALE_NUMBER(Support, transform),
    GRADSCALE_NUMBER(Support, eps),
    GRADSCALE_NUMBER(Support, raw)};

// names[i] is the name of numbers[i].
Support support_from(const std::vector<std::string>& names, const std::vector<double>& numbers);

// A support with the memory of its raw centres.
class OwnedSupport {
 public:
  explicit OwnedSupport(Support support);

  const Support& get() const {
    return support_;
  }

 private:
  Support support_;
  std::unique_ptr<double[]> centers_;
  std::unique_ptr<float[]> centers_float_;
};

// ---- Operators ------------------------------------------------------------------------------------------------------

// Decodes [..., num_bins] logits: softmax, expectation and inverse transform. Differentiable. `python_support` is the
// Python dataclass, which second derivatives use.
at::Tensor decode(
    const std::shared_ptr<OwnedSupport>& support, const pybind11::object& python_support, const at::Tensor& logits);

// Encodes scalars [...] as distributions [..., num_bins] of the same dtype: two-hot if sigma_ratio is 0, HL-Gauss
// otherwise. Not differentiable.
at::Tensor encode(const Support& support, double sigma_ratio, const at::Tensor& scalars);

// Moves the mass of [..., num_bins] probabilities to rewards + discounts * raw centres, and splits it between the two
// neighbouring bins (C51). The result is float64 if an input is, else float32. Not differentiable.
at::Tensor project(
    const Support& support, const at::Tensor& probabilities, const at::Tensor& rewards, const at::Tensor& discounts);

// Defines the functions that Python calls in eager mode.
void define_support(pybind11::module_& m);

} // namespace gradscale
