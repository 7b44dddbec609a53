// The kernels of a device, as functions that start them on a stream of it: of CUDA, where the extension is built with
// it; and of the simulator, in tests. Nothing here knows of PyTorch; pointers lead into the device's memory.
#pragma once

#include "flow/device_calls.h"
#include "loss/loss_call.h"
#include "tensors/device_calls.h"

namespace gradscale {

// Losses and, where segments have a place for them, gradients.
void launch_loss(const LossCall& call, void* stream);
// The gradients alone, multiplied.
void launch_loss_backward(const LossCall& call, const LossBackward& backward, void* stream);
// Bytes that each of these calls needs.
int64_t bytes_for_loss(const LossCall& call);

// `count` rows decoded, or the gradient of that.
void launch_decode(const Decoding& decoding, int64_t count, char* workspace, void* stream);
int64_t bytes_for_decode(const Decoding& decoding);

// `count` scalars as distributions.
void launch_encode(const Encoding& encoding, int64_t count, void* stream);

void launch_elementwise(const ElementwiseCall& call, void* stream);
void launch_rescale(const RescaleCall& call, void* stream);
int64_t bytes_for_rescale(const RescaleCall& call);

void launch_squares(const SquaresCall& call, void* stream);
void launch_squares_backward(const SquaresCall& call, void* stream);
int64_t bytes_for_squares(const SquaresCall& call);

void launch_statistics(const StatisticsCall& call, void* stream);
int64_t bytes_for_statistics(const StatisticsCall& call);
void launch_clipping(const ClippingCall& call, void* stream);
void launch_clip(const ClipCall& call, void* stream);
int64_t bytes_for_clip(const ClipCall& call);

struct DeviceKernels {
  decltype(&launch_loss) loss;
  decltype(&launch_loss_backward) loss_backward;
  decltype(&bytes_for_loss) loss_bytes;
  decltype(&launch_decode) decode;
  decltype(&bytes_for_decode) decode_bytes;
  decltype(&launch_encode) encode;
  decltype(&launch_elementwise) elementwise;
  decltype(&launch_rescale) rescale;
  decltype(&bytes_for_rescale) rescale_bytes;
  decltype(&launch_squares) squares;
  decltype(&launch_squares_backward) squares_backward;
  decltype(&bytes_for_squares) squares_bytes;
  decltype(&launch_statistics) statistics;
  decltype(&bytes_for_statistics) statistics_bytes;
  decltype(&launch_clipping) clipping;
  decltype(&launch_clip) clip;
  decltype(&bytes_for_clip) clip_bytes;
};

// Those that are linked to.
inline DeviceKernels linked_device_kernels() {
  return {
      launch_loss,
      launch_loss_backward,
      bytes_for_loss,
      launch_decode,
      bytes_for_decode,
      launch_encode,
      launch_elementwise,
      launch_rescale,
      bytes_for_rescale,
      launch_squares,
      launch_squares_backward,
      bytes_for_squares,
      launch_statistics,
      bytes_for_statistics,
      launch_clipping,
      launch_clip,
      bytes_for_clip};
}

} // namespace gradscale
