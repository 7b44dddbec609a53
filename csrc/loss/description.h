// A call as the kernels read it: tensors become segments, weights and masks coefficients.
#pragma once

#include "../host/device.h"
#include "device_calls.h"
#include "run.h"

namespace gradscale {

class Description {
 public:
  Description(const HeadTable& heads, const GradientMemory& memory, const Arguments& arguments, bool wide);

  // Tensors for the results of a forward pass.
  void make_outputs();
  // Contiguous gradients like their predictions; on the CPU those of a head are cut from one block of memory.
  void make_gradients();
  // Segments of all heads and steps, with the outputs and gradients that there are.
  void make_segments();

  // A tensor of losses as the kernels see it; none for an undefined one.
  Slab slab(const at::Tensor& tensor, int64_t stride) const;
  int64_t steps_of(size_t head) const;

  const HeadTable& heads;
  const Arguments& arguments;
  const int64_t batch;
  const c10::Device device;
  const bool on_device;      // the kernels of a device run, and not the CPU's own
  bool is_double = false;    // the type of sums and losses
  at::TensorOptions of_sums; // type and device of losses
  Outputs outputs;
  Gradients gradients;
  std::vector<Coefficients> coefficients; // by head
  std::vector<int64_t> num_unmasked;      // entries by head; on a device, where a mask is not read, 1
  std::vector<Segment> segments;

 private:
  at::Tensor make_entries(size_t head) const;
  at::ScalarType gradient_type(const at::Tensor& prediction) const;
  int64_t gradient_bytes(const at::Tensor& prediction) const;
  at::Tensor make_gradient(const at::Tensor& prediction, const GradientMemory::Block& block, int64_t& offset) const;
  void make_coefficients();
  double divisor(size_t head) const;
  StepWeight step_weight(const StepNumbers& numbers);
  int64_t count_unmasked(size_t head, const StepMask& mask) const;
  void add_segments(size_t head);
  Rows rows_of(Entries& entries, int64_t step);
  Rows view_rows(const at::Tensor& tensor, bool stacked, int64_t step) const;
  Slab column(const at::Tensor& tensor, int64_t step) const;
  at::Tensor keep_alive(at::Tensor tensor);

  const GradientMemory& memory_;
  const bool wide_;
  std::vector<at::Tensor> kept_alive_; // tensors made on the way, which the kernels read
};

// The forward pass on the CPU, and on a device.
void run_on_cpu(Description& call);
DeviceState run_on_device(Description& call);

} // namespace gradscale
