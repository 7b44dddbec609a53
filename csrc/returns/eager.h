// The entry points of eager mode. They accept the usual calls, which are right in every argument; Python checks all
// others, and says what is wrong.
#pragma once

#include <pybind11/pybind11.h>

namespace gradscale {

// The results of the function with this Formula as a tuple, or None.
pybind11::object returns_in_eager_mode(
    int64_t formula,
    pybind11::handle rewards,
    pybind11::handle values,
    pybind11::handle next_values,
    pybind11::handle ratios,
    pybind11::handle discount,
    pybind11::handle lambda,
    pybind11::handle terminated,
    pybind11::handle truncated,
    pybind11::handle mask,
    pybind11::handle limits, // a tuple of three
    pybind11::handle n,
    pybind11::handle batch_first);

// (values, rewards, mask, policy_mask), or None.
pybind11::object muzero_targets_in_eager_mode(
    pybind11::handle rewards,
    pybind11::handle root_values,
    pybind11::handle num_unroll_steps,
    pybind11::handle td_steps,
    pybind11::handle discount,
    pybind11::handle lengths,
    pybind11::handle terminated,
    pybind11::handle to_play,
    pybind11::handle reward,
    pybind11::handle prefix_horizon,
    pybind11::handle root_reward,
    pybind11::handle batch_first);

} // namespace gradscale
