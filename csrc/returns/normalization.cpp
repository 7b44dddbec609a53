#include "normalization.h"

#include "../torch/tensor_element.h"
#include "returns.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace gradscale {

namespace {

constexpr int64_t kPart = 8192; // entries, which fit in the second-level cache
constexpr int64_t kPartsPerThread = 4;

// Calls function(begin, size) for all parts, and returns the results in order, so that sums do not depend on the number
// of threads.
template <class Function>
auto over_parts(int64_t size, Function function) {
  c10::SmallVector<decltype(function(size, size)), 4> results((size + kPart - 1) / kPart);
  at::parallel_for(0, static_cast<int64_t>(results.size()), kPartsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      results[part] = function(part * kPart, std::min(kPart, size - part * kPart));
    }
  });
  return results;
}

Range range_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.numel(), element_of(tensor)};
}

// All entries, less the first one that counts, if one does.
Entries entries_of(const at::Tensor& x, const at::Tensor& mask) {
  Entries entries{range_of(x), nullptr, 0};
  int64_t first = 0;
  if (mask.defined()) {
    const auto* counts = static_cast<const uint8_t*>(mask.const_data_ptr());
    entries.mask = counts;
    first = std::find_if(counts, counts + x.numel(), [](uint8_t flag) { return flag != 0; }) - counts;
  }
  if (first < x.numel()) {
    dispatch_element(entries.range.element, [&](auto type) {
      entries.origin = to_accumulate(static_cast<const decltype(type)*>(entries.range.data)[first]);
    });
  }
  return entries;
}

Standard standard_of(const Entries& entries, double eps) {
  const int64_t size = entries.range.size;
  EntrySums sums{0, 0, 0};
  const auto sums_of = [&](int64_t begin, int64_t part) { return entry_sums_kernel(entries.part(begin, part)); };
  for (const EntrySums& part : over_parts(size, sums_of)) {
    sums.count += part.count;
    sums.sum += part.sum;
    sums.largest = std::max(sums.largest, part.largest);
  }
  const auto count = static_cast<double>(std::max<int64_t>(1, sums.count));
  const double mean = sums.sum / count;
  // The largest magnitude is the unit of float64 entries, because their squares may overflow or underflow.
  const double unit = sums.largest == 0 ? 1 : sums.largest;
  double squares = 0;
  const auto squares_of = [&](int64_t begin, int64_t part) {
    return entry_squares_kernel(entries.part(begin, part), mean, unit);
  };
  for (const double part : over_parts(size, squares_of)) {
    squares += part;
  }
  const double std = unit * std::sqrt(squares / count);
  if (std == 0) {
    return {count, mean, 1, std::numeric_limits<double>::infinity()};
  }
  return {count, mean, std, std + eps};
}

// Calls function(begin, size) for all entries, on several threads if there are many.
template <class Function>
void for_entries(int64_t size, Function function) {
  at::parallel_for(0, size, kPartsPerThread * kPart, [&](int64_t begin, int64_t end) { function(begin, end - begin); });
}

at::ScalarType dtype_of_result(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

} // namespace

at::Tensor standardize(const at::Tensor& x, const at::Tensor& mask, double eps) {
  at::Tensor result(at::detail::empty_cpu(x.sizes(), x.options().dtype(dtype_of_result(x))));
  const Entries entries = entries_of(x, mask);
  const Standard standard = standard_of(entries, eps);
  const Range to = range_of(result);
  for_entries(x.numel(), [&](int64_t begin, int64_t size) {
    standardize_kernel(entries.part(begin, size), standard, const_cast<void*>(to.part(begin, size).data));
  });
  return result;
}

at::Tensor standardize_gradient(const at::Tensor& x, const at::Tensor& mask, double eps, const at::Tensor& gradient) {
  at::Tensor result(at::detail::empty_cpu(x.sizes(), x.options()));
  const Entries entries = entries_of(x, mask);
  const Standard standard = standard_of(entries, eps);
  const Range from = range_of(gradient), to = range_of(result);
  GradientSums sums{0, 0};
  const auto sums_of = [&](int64_t begin, int64_t size) {
    return gradient_sums_kernel(entries.part(begin, size), standard, from.part(begin, size).data);
  };
  for (const GradientSums& part : over_parts(x.numel(), sums_of)) {
    sums.sum += part.sum;
    sums.projected += part.projected;
  }
  for_entries(x.numel(), [&](int64_t begin, int64_t size) {
    entry_gradients_kernel(
        entries.part(begin, size),
        standard,
        sums,
        from.part(begin, size).data,
        const_cast<void*>(to.part(begin, size).data));
  });
  return result;
}

// ---- Percentiles ----------------------------------------------------------------------------------------------------

namespace {

// The entry at `place`, from 0, of the sorted entries, interpolated linearly between its neighbours. Reorders the
// entries.
template <class A>
double entry_at_place(std::vector<A>& entries, double place) {
  const auto below = entries.begin() + static_cast<int64_t>(std::floor(place));
  std::nth_element(entries.begin(), below, entries.end());
  const double share = place - std::floor(place);
  const A above = share == 0 ? *below : *std::min_element(below + 1, entries.end());
  return (1 - share) * static_cast<double>(*below) + share * static_cast<double>(above);
}

} // namespace

at::Tensor percentiles(const at::Tensor& x, const at::Tensor& mask, double low, double high) {
  at::Tensor result(at::detail::empty_cpu({2}, x.options().dtype(at::kDouble)));
  auto* out = result.mutable_data_ptr<double>();
  bool is_empty = true;
  dispatch_element(element_of(x), [&](auto type) {
    using T = decltype(type);
    using A = Accumulate<T>;
    const auto* numbers = static_cast<const T*>(x.const_data_ptr());
    const bool* counts = mask.defined() ? mask.const_data_ptr<bool>() : nullptr;
    std::vector<A> entries;
    entries.reserve(x.numel());
    for (int64_t i = 0; i < x.numel(); ++i) {
      const A number = to_accumulate(numbers[i]);
      if ((counts == nullptr || counts[i]) && std::isfinite(number)) {
        entries.push_back(number);
      }
    }
    is_empty = entries.empty();
    if (!is_empty) {
      const auto last = static_cast<double>(entries.size() - 1);
      out[0] = entry_at_place(entries, last * low);
      out[1] = entry_at_place(entries, last * high);
    }
  });
  return is_empty ? at::Tensor() : result;
}

} // namespace gradscale
