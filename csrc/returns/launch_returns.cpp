#include "../port/launch.h"
#include "device_calls.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>

namespace gradscale {

namespace {

constexpr const char* kFile = "returns/recurrences.cuh";
constexpr int kWarps = kThreads / 32;
constexpr const char* kFormulas[] = {
    "LambdaReturns",
    "Advantages",
    "VTrace",
    "Retrace",
    "",
    "LambdaReturnsAdjoint",
    "AdvantagesAdjoint",
    "VTraceAdjoint",
    "RetraceAdjoint",
};

const char* number_name(bool is_double) {
  return is_double ? "double" : "float";
}

// The kernels by formula, type and layout.
const Kernel<ReturnsCall>& recurrence(Formula formula, bool is_double, bool across) {
  static const auto kernels = [] {
    std::array<std::unique_ptr<Kernel<ReturnsCall>>, std::size(kFormulas) * 4> made;
    for (size_t i = 0; i < made.size(); ++i) {
      const std::string name = (i & 1) != 0 ? "recur_across<" : "recur_along<";
      made[i] = std::make_unique<Kernel<ReturnsCall>>(
          kFile, name + number_name((i & 2) != 0) + ", " + kFormulas[i / 4] + ">");
    }
    return made;
  }();
  return *kernels[static_cast<size_t>(formula) * 4 + (is_double ? 2 : 0) + (across ? 1 : 0)];
}

} // namespace

int64_t bytes_for_returns(const ReturnsCall& call) {
  const bool is_n_step = call.formula == Formula::n_step || call.formula == Formula::n_step_adjoint;
  return is_n_step ? call.rows * 2 * std::min(call.n, call.steps) * (call.is_double ? 8 : 4) : 0;
}

void launch_returns(const ReturnsCall& call, bool across, void* stream) {
  static const Kernel<ReturnsCall> n_step[] = {{kFile, "n_step_rows<float>"}, {kFile, "n_step_rows<double>"}};
  const int64_t threads_blocks = (call.rows + kThreads - 1) / kThreads;
  if (call.formula == Formula::n_step || call.formula == Formula::n_step_adjoint) {
    launch(n_step[call.is_double ? 1 : 0], threads_blocks, kThreads, stream, call);
    return;
  }
  const Kernel<ReturnsCall>& kernel = recurrence(call.formula, call.is_double, across);
  launch(kernel, across ? threads_blocks : (call.rows + kWarps - 1) / kWarps, kThreads, stream, call);
}

void launch_muzero(const MuZeroCall& call, void* stream) {
  static const Kernel<MuZeroCall> kernels[] = {{kFile, "muzero_rows<float>"}, {kFile, "muzero_rows<double>"}};
  const int64_t threads = call.rows * (call.unroll_steps + 1);
  launch(kernels[call.is_double ? 1 : 0], (threads + kThreads - 1) / kThreads, kThreads, stream, call);
}

} // namespace gradscale
