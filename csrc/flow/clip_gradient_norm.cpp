// clip_gradient_norm, g * min(1, max_norm / |g|), and normalize_gradient, g * norm / |g|, with one norm for each group.
#include "../cpu/range.h"
#include "../cuda/driver.h"
#include "../cuda/row_shape.h"
#include "identity.h"
#include "kernels.h"

#include <ATen/DimVector.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace gradscale {

namespace {

// One norm of order p for each index of the first `batch_dims` dimensions. If a process group is named, a norm is over
// the elements of all its members.
struct NormGroups {
  int64_t batch_dims = 0;
  Value p = 2.0; // a tensor only in compiled graphs, for a p that varies
  std::string process_group;
  int64_t process_group_size = 1;
};

// ---- In C++: two passes over the gradient ---------------------------------------------------------------------------

constexpr int64_t kElementsPerTask = 32768; // of a group

// True if each group is one dense block of memory, and the blocks follow each other. The order of the elements within a
// block is free.
bool is_contiguous_per_group(const at::Tensor& gradient, int64_t batch_dims, int64_t size) {
  if (!gradient.is_non_overlapping_and_dense()) {
    return false;
  }
  for (int64_t d = batch_dims - 1; d >= 0; --d) {
    if (gradient.size(d) != 1 && gradient.stride(d) != size) {
      return false;
    }
    size *= gradient.size(d);
  }
  return true;
}

// Rescales the groups on a CPU. A group that fits the cache is read from memory once. All threads sum, and then scale,
// the chunks of a larger group; the order of additions does not depend on the number of threads.
void rescale_groups(const RescaleCall& call) {
  const Range gradient{call.from, call.groups * call.size, call.element};
  const auto scale = [&](int64_t begin, int64_t size, const Scaling& by) {
    scale_range_kernel(
        gradient.part(begin, size), static_cast<char*>(call.to) + begin * element_size(call.element), by);
  };
  if (call.size <= kElementsPerTask) {
    at::parallel_for(
        0, call.groups, std::max<int64_t>(1, kElementsPerTask / call.size), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const PowerSum sum = power_sum_kernel(gradient.part(i * call.size, call.size), call.p);
            scale(i * call.size, call.size, scaling(call.rule, sum, call.p, limit_of(call, i)));
          }
        });
  } else {
    const int64_t chunks = (call.size + kElementsPerTask - 1) / kElementsPerTask;
    const auto for_each_chunk = [&](auto function) {
      at::parallel_for(0, call.groups * chunks, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t start = (i % chunks) * kElementsPerTask;
          function(i, i / chunks * call.size + start, std::min(kElementsPerTask, call.size - start));
        }
      });
    };
    std::vector<PowerSum> sums(call.groups * chunks);
    for_each_chunk([&](int64_t i, int64_t start, int64_t size) {
      sums[i] = power_sum_kernel(gradient.part(start, size), call.p);
    });
    std::vector<Scaling> by(call.groups);
    for (int64_t group = 0; group < call.groups; ++group) {
      PowerSum sum = sums[group * chunks];
      for (int64_t chunk = 1; chunk < chunks; ++chunk) {
        sum = added(sum, sums[group * chunks + chunk], call.p);
      }
      by[group] = scaling(call.rule, sum, call.p, limit_of(call, group));
    }
    for_each_chunk([&](int64_t i, int64_t start, int64_t size) { scale(start, size, by[i / chunks]); });
  }
}

// The number of threads that keep a group in registers: 2, 4, 8, 16 or 32; 0 if they cannot.
int32_t threads_for_group_in_registers(const RescaleCall& call) {
  const auto begins = reinterpret_cast<uintptr_t>(call.from) | reinterpret_cast<uintptr_t>(call.to);
  const int64_t bytes = call.size * element_size(call.element);
  const bool whole = begins % 16 == 0 && bytes % 16 == 0; // each group consists of whole vectors
  return whole && call.p == 2 && call.element != Element::float64 ? threads_for_row_in_registers(bytes / 16) : 0;
}

void launch_rescale(RescaleCall call, const OnDevice& device) {
  constexpr const char* file = "flow/cuda/clip_gradient_norm.cuh";
  const std::string type = type_name(call.element);
  if (const int32_t kept = threads_for_group_in_registers(call); kept > 0) {
    const std::string name = instance("rescale_kept", {type, std::to_string(kept)});
    device.launch(file, name, blocks_for_rows(call.groups, kept), kThreads, call);
    return;
  }
  if (call.size <= kShortGroup) {
    const int32_t threads = threads_for_row(call.size, element_size(call.element));
    device.launch(file, instance("rescale_groups", {type}), blocks_for_rows(call.groups, threads), kThreads, call);
    return;
  }
  const int64_t blocks = call.groups * chunks_of(call).count;
  const at::Tensor sums = device.memory(blocks * static_cast<int64_t>(sizeof(PowerSum)));
  call.sums = static_cast<PowerSum*>(sums.mutable_data_ptr());
  device.launch(file, instance("power_sums", {type}), blocks, kThreads, call);
  device.launch(file, instance("rescale_chunks", {type}), blocks, kThreads, call);
}

at::Tensor rescaled_in_two_passes(
    at::Tensor gradient, const Value& limit, const NormGroups& groups, double p, Rule rule) {
  const at::DimVector batch(gradient.sizes().slice(0, groups.batch_dims)); // a copy, because gradient is reassigned
  const int64_t count = c10::multiply_integers(batch);
  const int64_t size = gradient.numel() / count;
  bool ours = owned_by_nobody_else(gradient);
  if (!is_contiguous_per_group(gradient, groups.batch_dims, size)) {
    gradient = gradient.contiguous();
    ours = true;
  }
  const at::Tensor out = ours ? gradient : at::empty_like(gradient);
  RescaleCall call{};
  call.to = out.mutable_data_ptr();
  call.from = gradient.const_data_ptr();
  call.element = element_of(gradient);
  call.groups = count;
  call.size = (gradient.is_complex() ? 2 : 1) * size;
  call.p = p;
  call.rule = rule;
  at::Tensor limits; // owns the memory
  if (const double* number = std::get_if<double>(&limit)) {
    call.limit = *number;
  } else {
    limits = std::get<at::Tensor>(limit).to(gradient.device(), at::kDouble, /*non_blocking=*/true);
    limits = limits.dim() == 0 ? limits : limits.expand(batch).contiguous();
    call.limits = limits.const_data_ptr<double>();
    call.limits_stride = limits.dim() > 0 ? 1 : 0;
  }
  if (runs_kernels(gradient.device())) {
    launch_rescale(call, OnDevice(gradient.device()));
  } else {
    rescale_groups(call);
  }
  return out;
}

// ---- In tensor operations: what autograd, transforms, compilers and other devices see -------------------------------

at::Tensor call_by_name(const char* name, std::vector<c10::IValue> arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(arguments);
  return arguments.at(0).toTensor();
}

// The norms of all members of the process group, [members, *norms]. Differentiable where a graph is built.
at::Tensor gathered(const at::Tensor& norms, const NormGroups& groups) {
  const char* name = at::GradMode::is_enabled() ? "_c10d_functional_autograd::all_gather_into_tensor"
                                                : "_c10d_functional::all_gather_into_tensor";
  const at::Tensor all =
      call_by_name(name, {norms.contiguous().unsqueeze(0), groups.process_group_size, groups.process_group});
  return call_by_name("_c10d_functional::wait_tensor", {all});
}

// The largest magnitude of each group, a constant for derivatives; 1 if it is 0 or not finite.
at::Tensor largest_of(const at::Tensor& elements, at::IntArrayRef inner) {
  const at::NoGradGuard no_grad;
  const at::Tensor largest = elements.abs().amax(inner, /*keepdim=*/true);
  const at::Tensor usable = largest.gt(0).logical_and(largest.lt(std::numeric_limits<double>::infinity()));
  return at::where(usable, largest, at::ones_like(largest));
}

// The norm of each group divided by the group's scale, and that scale. They are separate, so that no power overflows.
// Both are [groups, 1 ...].
struct ScaledNorms {
  at::Tensor norm;
  at::Tensor scale;
};

// The norm of order p along dimensions, computed in the given type. For a tensor p, no power may overflow.
at::Tensor norm_along(
    const at::Tensor& elements, const Value& p, at::IntArrayRef dims, bool keepdim, at::ScalarType type) {
  if (const double* number = std::get_if<double>(&p)) {
    return at::linalg_vector_norm(elements, *number, dims, keepdim, type);
  }
  const at::Tensor order = std::get<at::Tensor>(p).to(elements.device(), type);
  // Zeros stay zeros. They are replaced before a power, whose derivative at 0 may be infinite.
  const auto power = [](const at::Tensor& base, const at::Tensor& exponent) {
    const at::Tensor is_zero = base.eq(0);
    return at::where(is_zero, at::zeros_like(base), at::where(is_zero, at::ones_like(base), base).pow(exponent));
  };
  return power(power(elements.to(type).abs(), order).sum(dims, keepdim), order.reciprocal());
}

// If `pairs` is true, elements are complex, and the last dimension has their real and imaginary parts.
ScaledNorms norms_by_operations(
    const at::Tensor& elements, bool pairs, at::IntArrayRef inner, const NormGroups& groups) {
  // Elements are divided by the largest magnitude, so that no power overflows, and only negligible powers underflow.
  const at::Tensor scale = largest_of(pairs ? elements.abs().amax(-1) : elements, inner);
  // A CPU adds one number after the other, so that long sums in float would lose digits: its sums are in double. With a
  // p below 1, quotients that are too small for float are not negligible: CUDA uses double, too.
  const double* p = std::get_if<double>(&groups.p);
  const c10::Device device = elements.device();
  const bool may_be_small = p == nullptr || *p < 1;
  const bool in_double = device.is_cpu() || (device.is_cuda() && may_be_small);
  const at::ScalarType sums = in_double ? at::kDouble : elements.scalar_type();
  at::Tensor relative = (may_be_small ? elements.to(sums) : elements) / (pairs ? scale.unsqueeze(-1) : scale);
  if (pairs) {
    relative = at::linalg_vector_norm(relative, 2, {-1}, /*keepdim=*/false, sums);
  }
  at::Tensor norm;
  if (pairs && (p == nullptr || *p > kLargestPower)) { // a modulus divided by the largest part may be above 1
    const at::Tensor largest = largest_of(relative, inner);
    norm = norm_along(relative / largest, groups.p, inner, /*keepdim=*/true, sums) * largest;
  } else {
    norm = norm_along(relative, groups.p, inner, /*keepdim=*/true, sums);
  }
  if (groups.process_group.empty()) {
    return {norm, scale};
  }
  const at::Tensor scales = gathered(scale, groups);
  const at::Tensor largest = scales.amax(0);
  const at::Tensor norms = gathered(norm, groups) * (scales / largest);
  return {norm_along(norms, groups.p, /*dims=*/{0}, /*keepdim=*/false, norms.scalar_type()), largest};
}

// The names of the operator with this rule, and of its limit.
constexpr const char* name_of(Rule rule) {
  return rule == Rule::clip ? "clip_gradient_norm" : "normalize_gradient";
}
constexpr const char* limit_name(Rule rule) {
  return rule == Rule::clip ? "max_norm" : "norm";
}

at::Tensor rescaled_by_operations(const at::Tensor& incoming, const Value& limit, const NormGroups& groups, Rule rule) {
  // If each group is a single element, the group gets a dimension of size 1.
  const bool single = groups.batch_dims == incoming.dim();
  const at::Tensor gradient = single ? incoming.unsqueeze(-1) : incoming;
  std::vector<int64_t> inner;
  for (int64_t d = groups.batch_dims; d < gradient.dim(); ++d) {
    inner.push_back(d);
  }
  // Complex numbers are pairs in a dimension of their own, because a complex division by a small number overflows.
  const bool pairs = gradient.is_complex();
  const auto beside_pairs = [&](const at::Tensor& by_group) { return pairs ? by_group.unsqueeze(-1) : by_group; };
  const at::ScalarType precise = precise_type(gradient.scalar_type());
  const at::Tensor wide = (pairs ? at::view_as_real(gradient.resolve_conj()) : gradient).to(precise);
  // A member of a process group that holds no elements takes part with a norm of zero.
  at::Tensor elements = wide;
  if (wide.sym_numel() == 0) {
    c10::SymDimVector sizes(wide.sym_sizes().begin(), wide.sym_sizes().end());
    std::fill(sizes.begin() + groups.batch_dims, sizes.begin() + gradient.dim(), 1);
    elements = at::zeros_symint(sizes, wide.options());
  }
  const auto [norm, scale] = norms_by_operations(elements, pairs, inner, groups);
  const at::ScalarType widest = widest_type(gradient.device());
  at::Tensor bound = value_like(gradient, limit, widest, name_of(rule), limit_name(rule));
  // A bound without dimensions would be rounded to the type of the norms by PyTorch's type promotion.
  const size_t missing = bound.dim() == 0 ? 1 : inner.size();
  for (size_t d = 0; d < missing; ++d) {
    bound = bound.unsqueeze(-1);
  }
  const at::Tensor unchanged = rule == Rule::clip ? norm.le(bound / scale) : norm.eq(0);
  // Where a group is unchanged, both operands are replaced by 1, so that the unused quotient has no NaN derivative.
  const at::Tensor one = at::ones_like(norm);
  const at::Tensor factor = at::where(unchanged, one, bound) / at::where(unchanged, one, norm);
  // An element is multiplied by factor / scale if that is a normal number: the quotients of small elements would be
  // subnormal. Otherwise it is divided by the scale, and a factor out of range becomes two factors.
  const bool is_double = precise == at::kDouble;
  const double least = is_double ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double most = is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const at::Tensor quotient = factor / scale;
  const at::Tensor is_normal = quotient.ge(least).logical_and(quotient.le(most));
  const at::Tensor in_range = factor.clamp(least, most);
  const at::Tensor divisor = at::where(is_normal, at::ones_like(scale), scale);
  const at::Tensor first = at::where(is_normal, quotient, in_range).to(precise);
  const at::Tensor second = at::where(is_normal, at::ones_like(factor), factor / in_range).to(precise);
  at::Tensor result = wide / beside_pairs(divisor) * beside_pairs(first) * beside_pairs(second);
  result = (pairs ? at::complex(result.select(-1, 0), result.select(-1, 1)) : result).to(gradient.scalar_type());
  result = at::where(unchanged, gradient, result);
  result = at::where(bound.eq(0), at::zeros({}, result.options()), result);
  result = at::where(bound.ge(0), result, at::full({}, std::numeric_limits<double>::quiet_NaN(), result.options()));
  return single ? result.squeeze(-1) : result;
}

// ---- The operators --------------------------------------------------------------------------------------------------

// The gradient with every group rescaled to its limit by the rule. A limit of 0 gives zeros, also where the gradient is
// inf or NaN; a negative or NaN limit that check() could not see gives NaN.
at::Tensor rescaled(at::Tensor gradient, Value limit, const NormGroups& groups, Rule rule) {
  if (groups.process_group.empty() && gradient.sym_numel() == 0) {
    return gradient;
  }
  limit = read_if_free(std::move(limit));
  const at::Tensor* tensor = std::get_if<at::Tensor>(&limit);
  // The kernels process complex numbers as pairs, which is right for p = 2 only.
  const double* p = std::get_if<double>(&groups.p);
  const bool has_kernel = p != nullptr && (*p == 2 || !gradient.is_complex()) && groups.process_group.empty();
  if (has_kernel && fused(gradient, {tensor != nullptr ? *tensor : at::Tensor()})) {
    return rescaled_in_two_passes(std::move(gradient), limit, groups, *p, rule);
  }
  return rescaled_by_operations(gradient, limit, groups, rule);
}

template <Rule rule>
struct Rescaled {
  static constexpr bool kClips = rule == Rule::clip;
  static constexpr const char* kName = name_of(rule);
  static constexpr const char* kNodeName = kClips ? "ClipGradientNormBackward" : "NormalizeGradientBackward";
  static constexpr const char* kLimit = limit_name(rule);
  static constexpr bool kLinear = false;
  static constexpr Overload kOverloads[] = {{"", 0b00}, {"tensor", 0b01}, {"norm_type", 0b11}};

  Value limit;
  NormGroups groups;

  template <class Self, class Visit>
  static void each(Self& self, Visit visit) {
    visit(kLimit, self.limit);
    visit("batch_dims", self.groups.batch_dims);
    visit("norm_type", self.groups.p);
    if constexpr (kClips) {
      visit("process_group", self.groups.process_group);
      visit("process_group_size", self.groups.process_group_size);
    }
  }

  // The elements of a limit on a device are not checked, because that would wait for the device.
  void check(const at::Tensor& x) const {
    TORCH_CHECK_VALUE(
        groups.batch_dims >= 0 && groups.batch_dims <= x.dim(),
        kName,
        ": batch_dims must be between 0 and the number of dimensions of x, ",
        x.dim(),
        ", but it is ",
        groups.batch_dims);
    const double* p = std::get_if<double>(&groups.p);
    TORCH_CHECK_VALUE(p == nullptr || *p > 0, kName, ": norm_type must be greater than 0, but it is ", *p);
    const c10::SymIntArrayRef batch = x.sym_sizes().slice(0, groups.batch_dims);
    check_value(kName, kLimit, limit, x, batch, "the first batch_dims dimensions of x");
    double smallest = 0;
    if (const double* number = std::get_if<double>(&limit)) {
      smallest = *number;
    } else if (const at::Tensor& tensor = std::get<at::Tensor>(limit);
               tensor.is_cpu() && ordinary_context() && ordinary_tensor(tensor) && tensor.numel() > 0) {
      smallest = tensor.dim() == 0 ? tensor.item<double>() : tensor.to(at::kDouble).min().item<double>();
    }
    TORCH_CHECK_VALUE(smallest >= 0, kName, ": ", kLimit, " must not be negative or NaN, but it is ", smallest);
  }

  at::Tensor gradient(at::Tensor incoming) const {
    return rescaled(std::move(incoming), limit, groups, rule);
  }

  bool keeps_zeros() const {
    return groups.batch_dims == 0;
  }
};

} // namespace

TORCH_LIBRARY_FRAGMENT(gradscale_ext, m) {
  register_operator<Rescaled<Rule::clip>, Value, int64_t, Value, std::string, int64_t>(m);
  register_operator<Rescaled<Rule::normalize>, Value, int64_t, Value>(m);
}

} // namespace gradscale
