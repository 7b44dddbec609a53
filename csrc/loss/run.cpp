#include "run.h"

#include "description.h"

#include <utility>

namespace gradscale {

RunResult run_loss(const HeadTable& heads, const GradientMemory& memory, const Arguments& arguments, bool wide) {
  Description call(heads, memory, arguments, wide);
  call.make_outputs();
  call.make_gradients();
  call.make_segments();
  DeviceState state;
  if (call.on_device) {
    state = run_on_device(call);
  } else {
    run_on_cpu(call);
  }
  return {std::move(call.outputs), std::move(call.gradients), std::move(state)};
}

} // namespace gradscale
