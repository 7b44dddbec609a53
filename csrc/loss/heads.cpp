// The kinds of heads, and the heads of a call as their records describe them.
#include "call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

#define GRADSCALE_NUMBER_OF_HEAD(type, name) GRADSCALE_NUMBER(Head, name),
constexpr Number<Head> kHeadParameters[] = {GRADSCALE_NUMBERS_OF_HEADS(GRADSCALE_NUMBER_OF_HEAD)};
#undef GRADSCALE_NUMBER_OF_HEAD

FieldsOfHead fields_of(Kind kind) {
  const std::vector<const char*> of_policy{"actions", "advantages", "log_probs", "reference_log_probs"};
  const Form scalars{{""}, {""}}, vectors{{"D"}, {"D"}};
  switch (kind) {
    case Kind::two_hot:
    case Kind::hl_gauss:
      return {{Form{{"S"}, {""}}}};
    case Kind::soft_cross_entropy:
      return {
          {Form{{"A"}, {"A", "-"}}, Form{{"A"}, {"#", "-"}}, Form{{"A"}, {"#K", "K"}}}, {"classes", "probabilities"}};
    case Kind::mean_squared_error:
    case Kind::huber:
      return {{scalars, vectors}};
    case Kind::binary_cross_entropy:
      return {{scalars}};
    case Kind::negative_cosine:
      return {{vectors}};
    case Kind::quantile_huber:
      return {{Form{{"N"}, {"M", "-"}}, Form{{"N"}, {"M", "N"}}}, {"samples", "fractions"}};
    case Kind::categorical_kl:
      return {{Form{{"GC"}, {"GC"}}}};
    case Kind::per_step_loss:
      return {{Form{{""}, {}}}};
    case Kind::policy_gradient:
      return {
          {Form{{"A"}, {"#", "", "?", "?"}}, Form{{"A"}, {"#G", "", "?", "?"}}, Form{{""}, {"-", "", "?", "?"}}},
          of_policy,
          {},
          false};
    case Kind::gaussian_policy_gradient:
      return {{Form{{"D", "D"}, {"D", "", "?", "?"}}}, of_policy, {"means", "log_stds"}, false};
    case Kind::clipped_squared_error:
      return {{Form{{""}, {"", "?"}}}, {"returns", "values"}, {}, false};
  }
  return {};
}

} // namespace

const std::vector<KindOfHead>& kinds() {
#define GRADSCALE_KIND(name, detail) {fields_of(Kind::name), #name, Detail::detail},
  static const std::vector<KindOfHead> all{GRADSCALE_KINDS(GRADSCALE_KIND)};
#undef GRADSCALE_KIND
  return all;
}

bool Heads::reads(size_t h, const char* field) const {
  const Head& head = heads_[h];
  const std::string name = field;
  return name == "log_probs"             ? head.surrogate != Surrogate::log
         : name == "reference_log_probs" ? head.kl_weight != 0
         : name == "values"              ? std::isfinite(head.clip_high)
                                         : true;
}

Heads::Heads(const std::vector<std::string>& names, const std::vector<double>& numbers, std::vector<std::string> labels)
    : labels_(std::move(labels)) {
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
      choice_ends_.emplace_back();
      continue;
    }
    TORCH_CHECK(!heads_.empty(), "multi_step_loss: '", names[i], "' is not a kind of head");
    if (names[i] == "choice") {
      std::vector<int32_t>& ends = choice_ends_.back();
      TORCH_CHECK(
          numbers[i] >= 1 && numbers[i] <= INT32_MAX / 2, "multi_step_loss: a choice has ", numbers[i], " actions");
      ends.push_back((ends.empty() ? 0 : ends.back()) + static_cast<int32_t>(numbers[i]));
      continue;
    }
    Head& head = heads_.back();
    TORCH_CHECK(
        set_by_name(kHeadParameters, head, names[i], numbers[i]) ||
            set_by_name(kNumbersOfSupport, head.support, names[i], numbers[i]),
        "multi_step_loss: a head has no number '",
        names[i],
        "'");
  }
  for (size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    head.choice_ends = choice_ends_[h].data();
    head.num_choices = static_cast<int32_t>(choice_ends_[h].size());
    const KindOfHead& kind = description_of(head.kind);
    TORCH_CHECK(
        head.detail == kind.detail && head.first_step >= 0 && (!head.has_support() || head.support.num_bins >= 2) &&
            head.support.transform >= Transform::identity && head.support.transform <= Transform::symlog &&
            head.surrogate >= Surrogate::ppo && head.surrogate <= Surrogate::cispo,
        "multi_step_loss: the numbers of a head are not the numbers of a '",
        kind.name,
        "'");
    head.support = supports_.emplace_back(head.support).get();
  }
}

std::string Heads::words(const Part& part) const {
  if (part.head < 0) {
    return part.argument;
  }
  const std::string label = labels_.empty() ? std::to_string(part.head) : c10::str("'", labels_[part.head], "'");
  const std::string what =
      part.field == nullptr ? part.argument : c10::str("'", part.field, "' in the ", part.argument);
  const std::string of_head = c10::str(part.field == nullptr ? "the " : "", what, " of head ", label);
  return part.entry < 0 ? of_head : c10::str(of_head, " at step ", heads_[part.head].first_step + part.entry);
}

} // namespace gradscale
