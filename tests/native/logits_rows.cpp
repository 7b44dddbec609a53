// The CPU kernel for rows of float logits, without PyTorch. test_formulas.py compiles it, and loads it with ctypes.
#define GRADSCALE_VARIANT baseline
#define GRADSCALE_VECTOR_BYTES 16
#include "loss/kernels.h"

#include "loss/cpu/rows.cpp"

using namespace gradscale;

extern "C" void logits_rows(
    int kind,
    int64_t rows,
    int64_t width,
    float* logits,
    void* target,
    bool is_class,
    double label_smoothing,
    double entropy_weight,
    bool subtract_target_entropy,
    double sigma_ratio,
    double coefficient,
    float* loss,
    float* detail,
    float* gradient) {
  Head head{};
  head.kind = static_cast<Kind>(kind);
  head.detail = head.kind == Kind::soft_cross_entropy ? Detail::entropy : Detail::expected;
  const double largest = static_cast<double>(width / 2);
  head.support = {-largest, largest, 0, static_cast<int32_t>(width), Transform::identity, false, nullptr, nullptr};
  head.label_smoothing = label_smoothing;
  head.entropy_weight = entropy_weight;
  head.subtract_target_entropy = subtract_target_entropy;
  head.sigma_ratio = sigma_ratio;
  Segment s{};
  s.head = &head;
  s.width = width;
  s.prediction = {logits, width, Element::float32};
  s.target = {target, head.has_support() || is_class ? 1 : width, is_class ? Element::int64 : Element::float32};
  s.gradient = {gradient, width, Element::float32};
  s.loss = {loss, 1, false};
  s.detail = {detail, 1, false};
  std::unique_ptr<RowMetrics[]> metrics(new RowMetrics[rows]);
  s.metrics = metrics.get();
  Coefficients coefficients{};
  coefficients.factor = coefficient;
  Pass pass{};
  pass.heads = &head;
  pass.coefficients = &coefficients;
  const Rows no_field{};
  pass.fields = &no_field; // a policy's target has one tensor
  Scratch scratch(width);
  baseline::run_rows_of(pass, s, 0, rows, reinterpret_cast<float*>(scratch.data()));
}
