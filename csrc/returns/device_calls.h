// What starts the kernels of returns on a device.
#pragma once

#include "call.h"

namespace gradscale {

// The bytes of ReturnsCall::workspace, on the current device.
int64_t bytes_for_returns(const ReturnsCall& call);

// `across`: rows are neighbours in memory.
void launch_returns(const ReturnsCall& call, bool across, void* stream);
void launch_muzero(const MuZeroCall& call, void* stream);

} // namespace gradscale
