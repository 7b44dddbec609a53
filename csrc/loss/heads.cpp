#include "heads.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace gradscale {

namespace {

#define GRADSCALE_NUMBER_OF_HEAD(type, name) GRADSCALE_NUMBER(Head, name),
constexpr Number<Head> kNumbers[] = {GRADSCALE_NUMBERS_OF_HEADS(GRADSCALE_NUMBER_OF_HEAD)};
#undef GRADSCALE_NUMBER_OF_HEAD

} // namespace

Heads::Heads(const std::vector<std::string>& names, const std::vector<double>& numbers) {
  TORCH_CHECK(
      !names.empty() && names.size() == numbers.size(),
      "multi_step_loss: heads must be described by names and as many numbers, but there are ",
      names.size(),
      " names and ",
      numbers.size(),
      " numbers");
  for (size_t i = 0; i < names.size(); ++i) {
    const auto kind =
        std::find_if(kinds().begin(), kinds().end(), [&](const KindOfHead& known) { return known.name == names[i]; });
    if (kind != kinds().end()) {
      heads_.emplace_back().kind = static_cast<Kind>(kind - kinds().begin());
      continue;
    }
    TORCH_CHECK(!heads_.empty(), "multi_step_loss: '", names[i], "' is not a kind of head");
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
        "multi_step_loss: the numbers of a head are not the numbers of a '",
        kind.name,
        "'");
    head.support = supports_.emplace_back(head.support).get();
  }
}

} // namespace gradscale
