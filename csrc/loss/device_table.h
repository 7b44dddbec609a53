// One call of the multi-step loss as its kernels on a device look it up.
#pragma once

#include "device_calls.h"

#include "../port/table.h"

namespace gradscale {

struct DeviceHead {
  Head head; // the raw centres of its support are in the table
  Coefficients coefficients;
  Slab loss;     // those of its first step; the other steps follow
  Slab expected; // likewise
  int64_t width;
  int64_t raw_centers; // their place in the table, of the type of sums; -1: none
  int32_t threads_per_row;
  int32_t num_segments;
  const double* num_unmasked; // on the device, where coefficients are divided by it
};

struct DeviceSegment {
  const void* prediction;
  const void* target;
  void* gradient;
  int64_t prediction_stride;
  int64_t target_stride;
  int64_t gradient_stride;
  double step_weight;
  double gradient_scale;
  int32_t head;
  int32_t step;
  int32_t first_block; // in the launch of loss_rows
  int8_t prediction_element;
  int8_t target_element;
  int8_t gradient_element;

  GRADSCALE_HOST_DEVICE Rows target_rows() const {
    return {const_cast<void*>(target), target_stride, static_cast<Element>(target_element)};
  }
};

struct LossTable {
  Table table;
  int64_t heads;    // their place in the table
  int64_t segments; // likewise
  int64_t num_heads;
  int64_t num_segments;
  int64_t blocks; // in the launch of loss_rows

  GRADSCALE_HOST_DEVICE const DeviceHead& head(int64_t index) const {
    return table.at<DeviceHead>(heads)[index];
  }
  GRADSCALE_HOST_DEVICE const DeviceSegment& segment(int64_t index) const {
    return table.at<DeviceSegment>(segments)[index];
  }
};

} // namespace gradscale
