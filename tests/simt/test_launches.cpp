// Whole launches of the CUDA kernels in the simulator, in memory of exactly the size that they need: what they compute,
// and that it has the same bits in every order of the threads. Exit status 0: all is well.
//
//   test_launches           everything
//   test_launches small     as much as ThreadSanitizer does in half a minute
#include "../cpp/memory.h"
#include "cuda/device.h"
#include "flow/calls.h"
#include "loss/segment.h"
#include "simt.h"
#include "statistics/calls.h"
#include "support/calls.h"

#include <cmath>
#include <cstdio>
#include <deque>
#include <functional>
#include <random>
#include <string>

namespace gradscale::test {

namespace {

int failures = 0;

void check(bool passed, const std::string& what) {
  if (!passed) {
    std::fprintf(stderr, "FAILED %s\n", what.c_str());
    ++failures;
  }
}

// Memory of `count` numbers, `shift` of them behind a multiple of 16 bytes.
template <class T>
class Array {
 public:
  explicit Array(int64_t count, int64_t shift = 0)
      : count_(count), memory_(Place::heap, count * sizeof(T), shift * sizeof(T)) {
  }
  T* data() const {
    return reinterpret_cast<T*>(memory_.data());
  }
  T& operator[](int64_t i) const {
    return data()[i];
  }
  int64_t count() const {
    return count_;
  }
  bool same_bits(const Array& other) const {
    return std::memcmp(data(), other.data(), count_ * sizeof(T)) == 0;
  }

 private:
  int64_t count_;
  Memory memory_;
};

template <class T>
void fill(const Array<T>& array, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < array.count(); ++i) {
    array[i] = static_cast<T>(normal(generator));
  }
}

template <class T>
constexpr Element element = sizeof(T) == 8 ? Element::float64 : Element::float32;

bool close(double actual, double expected, double tolerance) {
  return std::isfinite(expected) ? std::fabs(actual - expected) <= tolerance * (1 + std::fabs(expected))
                                 : actual == expected || (std::isnan(actual) && std::isnan(expected));
}

// ---- Elements -------------------------------------------------------------------------------------------------------

// Rows of 7, and one factor for each, for all, or for each element.
template <class T>
void test_elementwise(int64_t rows, int64_t shift, int arguments_of) {
  constexpr int64_t columns = 7;
  const Array<T> gradient(rows * columns, shift), out(rows * columns, shift);
  const Array<T> factor(arguments_of == 0 ? 1 : (arguments_of == 1 ? rows : rows * columns));
  fill(gradient, 1);
  fill(factor, 2);
  factor[0] = 0;
  gradient[0] = static_cast<T>(INFINITY);
  ElementwiseCall call{};
  call.function = ElementFunction::multiply_negated;
  call.element = element<T>;
  call.count = rows * columns;
  const bool by_row = arguments_of == 1;
  call.dims = by_row ? 2 : 1;
  call.sizes[0] = by_row ? columns : rows * columns;
  call.sizes[1] = rows;
  const int64_t size = sizeof(T);
  for (int k = 0; k < 2; ++k) {
    call.strides[k][0] = size;
    call.strides[k][1] = columns * size;
  }
  call.strides[2][0] = arguments_of == 2 ? size : 0;
  call.strides[2][1] = size;
  call.data[0] = out.data();
  call.data[1] = gradient.data();
  call.data[2] = factor.data();
  launch_elementwise(call, nullptr);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const T by = factor[arguments_of == 0 ? 0 : (by_row ? i / columns : i)];
    check(out[i] == (by == 0 ? T(0) : gradient[i] * -by), "multiply_negated, element " + std::to_string(i));
  }
  call.function = ElementFunction::clamp;
  call.data[2] = call.data[3] = nullptr;
  call.constants[2] = -0.5;
  call.constants[3] = 0.25;
  launch_elementwise(call, nullptr);
  for (int64_t i = 0; i < rows * columns; ++i) {
    check(out[i] == std::fmin(std::fmax(gradient[i], T(-0.5)), T(0.25)), "clamp, element " + std::to_string(i));
  }
}

// ---- Norms ----------------------------------------------------------------------------------------------------------

double norm_of(const double* values, int64_t size, double p) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    sum = std::isinf(p) ? std::fmax(sum, std::fabs(values[i])) : sum + std::pow(std::fabs(values[i]), p);
  }
  return std::isinf(p) ? sum : std::pow(sum, 1 / p);
}

template <class T>
void test_rescale(int64_t groups, int64_t size, double p, Rule rule, int64_t shift) {
  const std::string name = "norm of order " + std::to_string(p) + " over " + std::to_string(size);
  const Array<T> from(groups * size, shift), to(groups * size, shift);
  const Array<double> limits(groups);
  const Array<int64_t> counts(2);
  fill(from, 3);
  for (int64_t group = 0; group < groups; ++group) {
    limits[group] = group % 2 == 0 ? 0.7 : 1e9;
  }
  counts[0] = counts[1] = 5;
  RescaleCall call{};
  call.from = from.data();
  call.to = to.data();
  call.element = element<T>;
  call.groups = groups;
  call.size = size;
  call.p = p;
  call.rule = rule;
  call.limits = limits.data();
  call.limits_stride = 1;
  call.counts = counts.data();
  const Array<char> workspace(bytes_for_rescale(call));
  call.workspace = workspace.data();
  launch_rescale(call, nullptr);
  int64_t beyond = 0;
  for (int64_t group = 0; group < groups; ++group) {
    std::vector<double> values;
    for (int64_t i = 0; i < size; ++i) {
      values.push_back(from[group * size + i]);
    }
    const double norm = norm_of(values.data(), size, p);
    beyond += norm > limits[group];
    const double factor = rule == Rule::clip && norm <= limits[group] ? 1 : limits[group] / norm;
    for (int64_t i = 0; i < size; ++i) {
      check(close(to[group * size + i], values[i] * factor, 1e-5), name);
    }
  }
  check(counts[0] == 5 + groups && counts[1] == 5 + beyond, name + ", counts");
  const Array<T> before(groups * size, shift);
  std::memcpy(before.data(), to.data(), groups * size * sizeof(T));
  call.to = from.data(); // in place
  launch_rescale(call, nullptr);
  check(from.same_bits(before), name + ", in place");
}

// Squares that overflow, and ones that vanish.
void test_extremes(int64_t size) {
  for (const double magnitude : {1e200, 1e-300, 4.9e-324}) {
    const Array<double> values(size);
    for (int64_t i = 0; i < size; ++i) {
      values[i] = magnitude;
    }
    RescaleCall call{};
    call.from = call.to = values.data();
    call.element = Element::float64;
    call.groups = 1;
    call.size = size;
    call.p = 2;
    call.rule = Rule::normalize;
    call.limit = 1;
    const Array<char> workspace(bytes_for_rescale(call));
    call.workspace = workspace.data();
    launch_rescale(call, nullptr);
    const double expected = 1 / std::sqrt(static_cast<double>(size));
    check(close(values[size - 1], expected, 1e-12), "norm of elements of " + std::to_string(magnitude));
  }
}

// ---- Many tensors ---------------------------------------------------------------------------------------------------

// So many that their table does not fit into the arguments of a kernel.
void test_squares(int64_t count) {
  std::deque<Array<float>> tensors;
  std::deque<Array<float>> gradients;
  std::vector<DeviceRange> ranges;
  double expected = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = i == 0 || i == count - 1 ? 0 : (i == 1 ? 16384 + 5 : 3 * i);
    tensors.emplace_back(size, i % 4);
    gradients.emplace_back(size);
    fill(tensors.back(), 10 + i);
    for (int64_t j = 0; j < size; ++j) {
      expected += static_cast<double>(tensors.back()[j]) * tensors.back()[j];
    }
    ranges.push_back({tensors.back().data(), gradients.back().data(), size, Element::float32});
  }
  const Array<float> loss(1), grad_output(1);
  grad_output[0] = 3;
  SquaresCall call{ranges.data(), count, 0.25, {loss.data(), 0, false}, {grad_output.data(), 0, false}, nullptr};
  const Array<char> workspace(bytes_for_squares(call));
  call.workspace = workspace.data();
  launch_squares(call, nullptr);
  check(close(loss[0], 0.25 * expected, 1e-6), "sum of squares");
  launch_squares_backward(call, nullptr);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < tensors[i].count(); ++j) {
      check(close(gradients[i][j], 0.75 * tensors[i][j], 1e-6), "gradient of squares");
    }
  }
}

// Tensors around the size of a chunk, empty and missing ones; and clipping them all.
void test_statistics(int64_t count, double p) {
  std::deque<Array<float>> tensors;
  std::vector<DeviceRange> ranges;
  double powers = 0;
  const bool is_maximum = std::isinf(p);
  const double rounding = p == 2 || is_maximum ? 9e-8 : 1e-12; // the elements of 16 bytes are added in float32
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = i == 0 || i == count - 1 ? 0 : (i == 1 ? 256 * kThreads + 5 : 3 * i);
    tensors.emplace_back(size, i % 4);
    fill(tensors.back(), 10 + i);
    for (int64_t j = 0; j < size; j += 7) {
      tensors.back()[j] = 0;
    }
    ranges.push_back({tensors.back().data(), tensors.back().data(), size, Element::float32, i == count - 1 ? -1 : i});
  }
  const Array<double> values(3 * count), clipping(3);
  const Array<int64_t> counts(5 * count), histogram(kHistogramBins * count);
  StatisticsCall call{ranges.data(), p, {values.data(), counts.data(), histogram.data(), count}, nullptr};
  const Array<char> workspace(bytes_for_statistics(call));
  call.workspace = workspace.data();
  launch_statistics(call, nullptr);
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0, total = 0, largest = 0;
    int64_t zeros = ranges[i].implicit_zeros < 0 ? 0 : ranges[i].implicit_zeros;
    std::vector<int64_t> bins(kHistogramBins);
    for (int64_t j = 0; j < tensors[i].count(); ++j) {
      const double value = tensors[i][j];
      sum += value;
      largest = std::fmax(largest, std::fabs(value));
      total = is_maximum ? largest : total + std::pow(std::fabs(value), p);
      zeros += value == 0;
      if (value != 0) {
        ++bins[std::min(std::max(std::ilogb(value) - (kFirstEdge - 1), 0), kHistogramBins - 1)];
      }
    }
    powers = is_maximum ? std::fmax(powers, total) : powers + total;
    const std::string where = " of tensor " + std::to_string(i);
    const bool missing = ranges[i].implicit_zeros < 0;
    const int64_t numel = missing ? 0 : tensors[i].count() + ranges[i].implicit_zeros;
    check(close(values[i], is_maximum ? total : std::pow(total, 1 / p), rounding), "norm" + where);
    check(values[count + i] == largest, "largest magnitude" + where);
    check(close(values[2 * count + i], numel > 0 ? sum / static_cast<double>(numel) : 0, 2 * rounding), "mean" + where);
    check(counts[i] == numel && counts[count + i] == zeros, "counts" + where);
    check(counts[2 * count + i] == 0 && counts[3 * count + i] == 0, "nonfinite" + where);
    check(counts[4 * count + i] == missing, "missing" + where);
    for (int bin = 0; bin < kHistogramBins; ++bin) {
      check(histogram[i * kHistogramBins + bin] == bins[bin], "histogram" + where);
    }
  }
  const double norm = is_maximum ? powers : std::pow(powers, 1 / p);
  launch_clipping({values.data(), counts.data(), count, p, 0.5 * norm, false, clipping.data()}, nullptr);
  check(close(clipping[0], norm, rounding) && close(clipping[1], 0.5, 1e-5) && clipping[2] == 1, "total norm");
  const float before = tensors[1][3];
  ClipCall clip{ranges.data(), count, clipping.data() + 1, false, nullptr};
  const Array<char> table(bytes_for_clip(clip));
  clip.workspace = table.data();
  launch_clip(clip, nullptr);
  check(close(tensors[1][3], before * clipping[1], 1e-6), "clipped");
  clipping[1] = 0;
  tensors[1][3] = NAN;
  clip.zeros = true;
  launch_clip(clip, nullptr);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < tensors[i].count(); ++j) {
      check(tensors[i][j] == 0, "skipped");
    }
  }
}

// Units of one piece and of several, in so many tensors; then clipping all of them to half.
void test_units(int64_t tensors_count, int64_t units, int64_t length) {
  std::deque<Array<float>> tensors;
  std::vector<UnitRange> ranges;
  for (int64_t i = 0; i < tensors_count; ++i) {
    tensors.emplace_back(units * length, i % 4);
    fill(tensors.back(), 20 + i);
    ranges.push_back({tensors.back().data(), units, length, Element::float32, i * units});
  }
  const int64_t count = tensors_count * units;
  const Array<double> norms(count), factors(count);
  UnitNormsCall call{ranges.data(), tensors_count, norms.data(), nullptr};
  const Array<char> workspace(bytes_for_unit_norms(call));
  call.workspace = workspace.data();
  launch_unit_norms(call, nullptr);
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < length; ++j) {
      const double value = tensors[i / units][i % units * length + j];
      sum += value * value;
    }
    check(close(norms[i], std::sqrt(sum), 9e-8), "norm of unit " + std::to_string(i));
    factors[i] = i % 3 == 0 ? 1 : (i % 3 == 1 ? 0.5 : 0);
  }
  std::vector<std::vector<float>> before;
  for (const Array<float>& tensor : tensors) {
    before.emplace_back(tensor.data(), tensor.data() + tensor.count());
  }
  ClipUnitsCall clip{ranges.data(), tensors_count, factors.data(), /*zeros=*/true, nullptr};
  const Array<char> table(bytes_for_clip_units(clip));
  clip.workspace = table.data();
  launch_clip_units(clip, nullptr);
  for (int64_t i = 0; i < tensors_count; ++i) {
    for (int64_t j = 0; j < tensors[i].count(); ++j) {
      check(tensors[i][j] == before[i][j] * factors[i * units + j / length], "clipped unit");
    }
  }
}

// ---- The loss -------------------------------------------------------------------------------------------------------

struct LossResult {
  std::vector<float> numbers;
};

// A value, a policy, a row of one number; two steps; and `heads` more, so many that the table does not fit into the
// arguments. Centres are raw; with `wide` they are not, so that warps walk over the value's rows, whose gradients begin
// at other places than logits in the second step, and a row of the policy takes a whole block. Forward, then backward.
LossResult run_loss(int64_t batch, bool wide, int64_t heads, bool valid_mean, bool skip) {
  constexpr int64_t kSteps = 2;
  const int32_t bins = wide ? 601 : 33;
  std::vector<Head> head(3 + heads);
  std::vector<int64_t> widths = {bins, wide ? 1300 : 18, 1};
  std::vector<double> centers(bins);
  std::vector<float> centers_float(bins);
  head[0].kind = Kind::two_hot;
  head[0].support = {-20, 20, 1e-3, bins, Transform::symlog, !wide, centers.data(), centers_float.data()};
  for (int32_t j = 0; j < bins; ++j) {
    centers[j] = raw_center(head[0].support, j);
    centers_float[j] = static_cast<float>(centers[j]);
  }
  head[1].kind = Kind::soft_cross_entropy;
  head[1].entropy_weight = 0.1;
  head[2].kind = Kind::binary_cross_entropy;
  for (int64_t h = 0; h < heads; ++h) {
    head[3 + h].kind = Kind::mean_squared_error;
    widths.push_back(5);
  }
  std::deque<Array<float>> memory;
  const auto numbers = [&](int64_t count, uint64_t seed) {
    memory.emplace_back(count, static_cast<int64_t>(seed % 4));
    fill(memory.back(), seed);
    return memory.back().data();
  };
  const Array<bool> mask(batch * kSteps);
  for (int64_t i = 0; i < mask.count(); ++i) {
    mask[i] = i % 3 != 1;
  }
  const double step_weights[] = {1, 0.5};
  std::vector<Segment> segments;
  const Array<RowMetrics> metrics(static_cast<int64_t>(head.size()) * kSteps * batch);
  std::vector<Coefficients> coefficients(head.size());
  for (size_t h = 0; h < head.size(); ++h) {
    head[h].weight = 1.0 / static_cast<double>(1 + h);
    coefficients[h].factor = head[h].weight;
    coefficients[h].importance_weights.values = {numbers(batch, 100), 1, false};
    coefficients[h].mask = {mask.data(), kSteps, 1};
    float* losses = numbers(batch * kSteps, 101);
    float* details = numbers(batch * kSteps, 102);
    for (int64_t t = 0; t < kSteps; ++t) {
      const int64_t width = widths[h];
      const int64_t target_width = head[h].kind == Kind::two_hot ? 1 : width;
      Segment segment{};
      segment.head = &head[h];
      segment.step = t;
      segment.width = width;
      segment.prediction = {numbers(batch * width, 7 * h + t), width, Element::float32};
      segment.target = {numbers(batch * target_width, 7 * h + t + 50), target_width, Element::float32};
      segment.gradient = {numbers(batch * width, 7 * h + 2 * t), width, Element::float32};
      segment.loss = {losses + t, kSteps, false};
      segment.detail = h < 2 ? Slab{details + t, kSteps, false} : Slab{};
      segment.step_weight = step_weights[t];
      segment.metrics = metrics.data() + segments.size() * batch;
      segments.push_back(segment);
    }
  }
  static_cast<float*>(segments[0].prediction.data)[bins] = NAN; // of sample 1
  Pass pass{};
  pass.heads = head.data();
  pass.coefficients = coefficients.data();
  pass.segments = segments.data();
  pass.num_heads = static_cast<int64_t>(head.size());
  pass.num_segments = static_cast<int64_t>(segments.size());
  pass.batch = batch;
  pass.steps = kSteps;
  pass.skips_nonfinite = skip;
  pass.counts_unmasked = valid_mean;
  const Array<float> per_sample(batch), loss(1), means(pass.num_heads), shares(pass.num_heads), grad_output(1);
  const Array<float> norms(pass.num_heads), largest(pass.num_heads);
  const Array<int64_t> num_nonfinite(1);
  pass.loss = {loss.data(), 0, false};
  pass.per_sample = {per_sample.data(), 1, false};
  pass.head_means = {means.data(), 1, false};
  pass.head_losses = {shares.data(), 1, false};
  pass.head_gradient_norms = {norms.data(), 1, false};
  pass.max_abs_logit = {largest.data(), 1, false};
  pass.num_nonfinite = num_nonfinite.data();
  const Array<float> skipped(batch);
  const Array<double> divisors(pass.num_heads);
  pass.skipped = skip ? Slab{skipped.data(), 1, false} : Slab{};
  for (size_t h = 0; h < head.size() && valid_mean; ++h) {
    coefficients[h].divisor = divisors.data() + h;
  }
  const Array<char> workspace(bytes_for_loss(pass));
  launch_loss(pass, workspace.data(), nullptr);
  LossResult result;
  const auto keep = [&](const float* data, int64_t count) {
    result.numbers.insert(result.numbers.end(), data, data + count);
  };
  const auto keep_gradients = [&] {
    for (const Segment& segment : segments) {
      keep(static_cast<float*>(segment.gradient.data), batch * segment.width);
    }
  };
  keep(loss.data(), 1);
  keep(per_sample.data(), batch);
  keep(means.data(), means.count());
  keep(shares.data(), shares.count());
  keep(norms.data(), norms.count());
  keep(largest.data(), largest.count());
  keep_gradients();
  const size_t forward = result.numbers.size();
  check(num_nonfinite[0] == 1, "one sample is not finite");
  check(std::isfinite(loss[0]) == skip, "the loss of skipped samples");
  double sum_of_shares = 0;
  for (int64_t h = 0; h < pass.num_heads; ++h) {
    sum_of_shares += shares[h];
  }
  check(!skip || close(loss[0], sum_of_shares, 1e-5), "the heads' shares of the loss");
  for (const float by : {1.0f, 3.0f}) {
    grad_output[0] = by;
    pass.grad_output = {grad_output.data(), 0, false};
    pass.has_gradients = true;
    const Array<char> other(bytes_for_loss(pass));
    launch_loss_backward(pass, other.data(), nullptr);
    result.numbers.resize(forward);
    keep_gradients();
    const size_t count = result.numbers.size() - forward;
    for (size_t i = 0; i < count; ++i) {
      const float before = result.numbers[forward - count + i];
      check(close(result.numbers[forward + i], by * before, 1e-5), "a gradient times " + std::to_string(by));
    }
  }
  return result;
}

// Rows decoded by a thread or a warp each, and the gradient of that.
LossResult run_decode(int32_t width, int64_t rows, int64_t shift) {
  const Support support{-10, 10, 1e-3, width, Transform::identity, false, nullptr, nullptr};
  const Array<float> logits(rows * width, shift), gradient(rows * width, shift), out(rows), grad_output(rows);
  fill(logits, width);
  fill(grad_output, 1);
  Decoding decoding{{logits.data(), width, Element::float32}, width, &support, {out.data(), 1, false}, {}, {}};
  launch_decode(decoding, rows, nullptr, nullptr);
  decoding.gradient = {gradient.data(), width, Element::float32};
  decoding.grad_output = {grad_output.data(), 1, false};
  launch_decode(decoding, rows, nullptr, nullptr);
  for (int64_t i = 0; i < rows * width; i += width) {
    double sum = 0, moment = 0;
    for (int32_t j = 0; j < width; ++j) {
      sum += std::exp(logits[i + j]);
      moment += std::exp(logits[i + j]) * center(support, j);
    }
    check(close(out[i / width], moment / sum, 1e-6), "a decoded row of " + std::to_string(width));
    for (int32_t j = 0; j < width; ++j) {
      const double expected = std::exp(logits[i + j]) / sum * (center(support, j) - moment / sum);
      check(close(gradient[i + j], grad_output[i / width] * expected, 1e-6), "the gradient of a decoded row");
    }
  }
  return {std::vector<float>(gradient.data(), gradient.data() + gradient.count())};
}

// As bits: what is not a number is one of a kind.
bool same(const LossResult& a, const LossResult& b) {
  return a.numbers.size() == b.numbers.size() &&
         std::memcmp(a.numbers.data(), b.numbers.data(), a.numbers.size() * sizeof(float)) == 0;
}

void in_all(const std::vector<simt::Order>& orders, const std::function<LossResult()>& run) {
  LossResult first;
  for (const simt::Order order : orders) {
    simt::options().order = order;
    LossResult result = run();
    if (order == orders[0]) {
      first = std::move(result);
    } else {
      check(same(result, first), "the same bits in every order");
    }
  }
}

} // namespace

int main(bool small) {
  std::vector<simt::Order> orders = {simt::Order::random, simt::Order::forward, simt::Order::reverse};
  std::vector<double> norms = {2.0, static_cast<double>(INFINITY), 1.0, 3.5};
  if (small) {
    orders.resize(1);
    norms.resize(2);
  }
  for (const simt::Order order : orders) {
    simt::options().order = order;
    for (const int arguments_of : {0, 1, 2}) {
      test_elementwise<float>(40, 1, arguments_of);
      test_elementwise<double>(3, 0, arguments_of);
    }
    test_elementwise<float>(600, 3, 2); // two blocks
    for (const double p : norms) {
      test_rescale<float>(3, 5, p, Rule::clip, 1);
      test_rescale<float>(2, 601, p, Rule::normalize, 3);
      for (const int64_t whole_windows : {8, 164, 1024}) {
        test_rescale<float>(5, whole_windows, p, Rule::clip, 0);
      }
      test_rescale<double>(2, 1300, p, Rule::clip, 0);
      if (p == 2 || !small) {
        test_rescale<float>(1, 33000, p, Rule::clip, 1);
      }
    }
    test_extremes(40);
    test_extremes(9000);
    test_squares(4);
    test_squares(small ? 90 : 300);
    test_units(3, 5, 7);
    test_units(2, 3, 4099);              // two pieces
    test_units(small ? 150 : 300, 2, 9); // a table outside the arguments
    test_statistics(4, INFINITY);
    test_statistics(small ? 20 : 300, 2);
  }
  for (const bool valid_mean : {false, true}) {
    in_all(orders, [=] { return run_loss(3, /*wide=*/true, 0, valid_mean, /*skip=*/true); });
  }
  in_all(orders, [] { return run_loss(35, true, 0, false, false); }); // more rows than a warp walks over
  in_all(orders, [] { return run_loss(2, false, 40, false, false); });
  in_all(orders, [=] { return run_loss(small ? 100 : 300, false, 0, false, true); }); // blocks of sums
  in_all(orders, [] { return run_decode(21, 37, 1); });
  in_all(orders, [] { return run_decode(101, 5, 3); });
  std::printf("%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}

} // namespace gradscale::test

int main(int count, char** arguments) {
  return gradscale::test::main(count > 1 && std::string(arguments[1]) == "small");
}
