#include "head_table.h"

#include <c10/util/Exception.h>

namespace gradscale {

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

HeadTable::HeadTable(c10::ArrayRef<double> numbers) {
  TORCH_CHECK(
      !numbers.empty() && numbers.size() % kNumbersOfHead == 0,
      "multi_step_loss: heads must be ",
      kNumbersOfHead,
      " numbers a head, but there are ",
      numbers.size());
  for (size_t at = 0; at < numbers.size(); at += kNumbersOfHead) {
    Head head = head_from_numbers(numbers.data() + at);
    TORCH_CHECK(
        head.kind >= Kind::two_hot && head.kind <= Kind::per_step_loss && head.first_step >= 0 &&
            (!is_categorical(head.kind) || head.support.num_bins >= 2),
        "multi_step_loss: the numbers of head ",
        heads_.size(),
        " are not those of a head");
    supports_.emplace_back(head.support);
    head.support = supports_.back().get();
    heads_.push_back(head);
  }
}

} // namespace gradscale
