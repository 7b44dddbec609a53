#include "owned_support.h"

#include <c10/util/Exception.h>

namespace gradscale {

namespace {

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

} // namespace gradscale
