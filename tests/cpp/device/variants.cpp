// The CUDA kernels as variants for the tests of rows and of decoding.
#include "cases.h"
#include "loss/segment.h"
#include "support/calls.h"

namespace gradscale::test {

namespace {

Rows from_row(Rows rows, int64_t row) {
  rows.data =
      rows.data == nullptr ? nullptr : static_cast<char*>(rows.data) + row * rows.stride * element_size(rows.element);
  return rows;
}

Slab from_row(const Slab& slab, int64_t row) {
  return slab.data == nullptr ? slab : slab.from(row * slab.stride);
}

// Workspace of exactly the size that was asked for.
Memory workspace_of(int64_t bytes) {
  return Memory(Place::heap, bytes, 0);
}

// Rows begin .. end as a call of its own.
void run_rows(const Segment& whole, const Coefficients& coefficients, int64_t begin, int64_t end, double* /*scratch*/) {
  Head head = *whole.head;
  Segment segment = whole;
  segment.head = &head;
  segment.prediction = from_row(whole.prediction, begin);
  segment.target = from_row(whole.target, begin);
  segment.gradient = from_row(whole.gradient, begin);
  segment.loss = from_row(whole.loss, begin);
  segment.detail = from_row(whole.detail, begin);
  segment.metrics = whole.metrics + begin;
  head.first_step = static_cast<int32_t>(segment.step);
  Coefficients own = coefficients;
  own.step_weights.values = from_row(own.step_weights.values, begin);
  own.step_gradient_scale.values = from_row(own.step_gradient_scale.values, begin);
  own.importance_weights.values = from_row(own.importance_weights.values, begin);
  own.mask.data = own.mask.data == nullptr ? nullptr : own.mask.data + begin * own.mask.stride;
  std::vector<double> per_sample(end - begin + 1, kNaN);
  double loss = 0, mean = 0, head_loss = 0, norm = 0, largest = 0;
  int64_t num_nonfinite = 0;
  Pass pass{};
  pass.heads = &head;
  pass.coefficients = &own;
  pass.segments = &segment;
  pass.num_heads = pass.num_segments = 1;
  pass.batch = end - begin;
  pass.steps = segment.step + 1;
  pass.loss = {&loss, 1, true};
  pass.per_sample = {per_sample.data(), 1, true};
  pass.head_means = {&mean, 1, true};
  pass.head_losses = {&head_loss, 1, true};
  pass.head_gradient_norms = {&norm, 1, true};
  pass.max_abs_logit = {&largest, 1, true};
  pass.num_nonfinite = &num_nonfinite;
  const Memory workspace = workspace_of(bytes_for_loss(pass));
  launch_loss(pass, workspace.data(), nullptr);
}

void decode_rows(const Decoding& whole, int64_t begin, int64_t end, double* /*scratch*/) {
  Decoding decoding = whole;
  decoding.logits = from_row(whole.logits, begin);
  decoding.gradient = from_row(whole.gradient, begin);
  decoding.out = from_row(whole.out, begin);
  decoding.grad_output = from_row(whole.grad_output, begin);
  const Memory workspace = workspace_of(bytes_for_decode(decoding));
  launch_decode(decoding, end - begin, workspace.data(), nullptr);
}

} // namespace

Selection everything() {
  Kernels kernels{};
  kernels.run_rows = run_rows;
  kernels.decode_rows = decode_rows;
  return {
      {{"device", kernels}},
      {{Place::heap, 1, 5}, {Place::page_end, 0, 3}, {Place::page_begin, 0, 0}},
      {1, 31, 601, 1025, 4672}};
}

} // namespace gradscale::test
