// The CUDA kernels for the simulator: what starts them on a GPU finds them here by their names.
#include "cuda/launch.h"
#include "cuda/table.cuh"
#include "flow/elementwise.cuh"
#include "flow/group_norm.cuh"
#include "loss/cuda/multi_step_loss.cuh"
#include "loss/cuda/totals.cuh"
#include "statistics/clip_gradients.cuh"
#include "statistics/l2_loss.cuh"
#include "statistics/statistics.cuh"
#include "statistics/units.cuh"
#include "support/decode.cuh"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace gradscale {

namespace {

struct Simulated {
  const char* name;
  void (*run)(const char* name, int64_t blocks, int threads, const void* arguments);
};

template <auto kernel>
struct Run;

template <class Arguments, void (*kernel)(const Arguments&)>
struct Run<kernel> {
  static void with(const char* name, int64_t blocks, int threads, const void* arguments) {
    simt::launch(name, blocks, threads, [=] { kernel(*static_cast<const Arguments*>(arguments)); });
  }
};

#define GRADSCALE_SIMULATED(...) {#__VA_ARGS__, Run<&__VA_ARGS__>::with}

// The kernels that tests start.
constexpr Simulated kKernels[] = {
    GRADSCALE_SIMULATED(copy_table),
    GRADSCALE_SIMULATED(elementwise_dense<float, MultiplyNegated<float>>),
    GRADSCALE_SIMULATED(elementwise_dense<float, Clamp<float>>),
    GRADSCALE_SIMULATED(elementwise_dense<double, MultiplyNegated<double>>),
    GRADSCALE_SIMULATED(elementwise_dense<double, Clamp<double>>),
    GRADSCALE_SIMULATED(elementwise_broadcast<float, MultiplyNegated<float>>),
    GRADSCALE_SIMULATED(elementwise_broadcast<float, Clamp<float>>),
    GRADSCALE_SIMULATED(elementwise_broadcast<double, MultiplyNegated<double>>),
    GRADSCALE_SIMULATED(elementwise_broadcast<double, Clamp<double>>),
    GRADSCALE_SIMULATED(rescale_kept<float, 2>),
    GRADSCALE_SIMULATED(rescale_kept<float, 8>),
    GRADSCALE_SIMULATED(rescale_kept<float, 32>),
    GRADSCALE_SIMULATED(rescale_groups<float>),
    GRADSCALE_SIMULATED(rescale_groups<double>),
    GRADSCALE_SIMULATED(power_sums<float>),
    GRADSCALE_SIMULATED(power_sums<double>),
    GRADSCALE_SIMULATED(rescale_chunks<float>),
    GRADSCALE_SIMULATED(rescale_chunks<double>),
    GRADSCALE_SIMULATED(sums_of_squares),
    GRADSCALE_SIMULATED(squares_total),
    GRADSCALE_SIMULATED(scaled_tensors),
    GRADSCALE_SIMULATED(chunk_statistics<Order::square>),
    GRADSCALE_SIMULATED(chunk_statistics<Order::maximum>),
    GRADSCALE_SIMULATED(tensor_statistics),
    GRADSCALE_SIMULATED(find_clipping),
    GRADSCALE_SIMULATED(clipped_tensors),
    GRADSCALE_SIMULATED(unit_sums),
    GRADSCALE_SIMULATED(unit_norms),
    GRADSCALE_SIMULATED(clipped_units),
    GRADSCALE_SIMULATED(loss_totals),
    GRADSCALE_SIMULATED(count_unmasked),
    // clang-format off
    GRADSCALE_SIMULATED(loss_rows<true, LossRows<Kind::two_hot, float, double, float, 601, 16, 1, 0>, GroupRows<Kind::soft_cross_entropy, float, 2>, GroupRows<Kind::binary_cross_entropy, float, 0>>),
    GRADSCALE_SIMULATED(loss_rows<false, GroupRows<Kind::two_hot, float, 0>, LossRows<Kind::soft_cross_entropy, float, float, float, 18, 1, 2, 2>, GroupRows<Kind::binary_cross_entropy, float, 0>, GroupRows<Kind::mean_squared_error, float, 0>>),
    GRADSCALE_SIMULATED(loss_rows<true, GroupRows<Kind::two_hot, float, 0>, LossRows<Kind::soft_cross_entropy, float, float, float, 18, 1, 2, 2>, GroupRows<Kind::binary_cross_entropy, float, 0>>),
    // clang-format on
    GRADSCALE_SIMULATED(loss_rows<true, MultipliedRows<float>>),
    GRADSCALE_SIMULATED(loss_rows<false, MultipliedRows<float>>),
    GRADSCALE_SIMULATED(decode_by_lanes<float, void, 21, 1, 1, Transform::identity>),
    GRADSCALE_SIMULATED(decode_by_lanes<float, float, 21, 1, 1, Transform::identity>),
    GRADSCALE_SIMULATED(decode_by_lanes<float, void, 101, 8, 1, Transform::identity>),
    GRADSCALE_SIMULATED(decode_by_lanes<float, float, 101, 8, 1, Transform::identity>)};

// Names go over several lines here, and macros leave spaces in them.
std::string without_spaces(std::string name) {
  name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
  return name;
}

} // namespace

void start(const NamedKernel& kernel, int64_t blocks, int threads, Stream /*stream*/, const void* arguments) {
  const std::string wanted = without_spaces(kernel.name());
  const auto* found = std::find_if(std::begin(kKernels), std::end(kKernels), [&](const Simulated& known) {
    return without_spaces(known.name) == wanted;
  });
  if (found == std::end(kKernels)) {
    throw std::runtime_error("tests/simt/device_kernels.cpp does not name the kernel " + kernel.name());
  }
  found->run(found->name, blocks, threads, arguments);
}

// None: warps walk over as many rows as they do where there are rows enough.
int64_t multiprocessors() {
  return 0;
}

} // namespace gradscale
