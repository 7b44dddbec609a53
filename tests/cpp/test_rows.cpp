// The kernel of the multi-step loss: every kind of head, with rows of ordinary numbers between rows of everything else.
#include "cases.h"
#include "cpu/scratch.h"
#include "loss/heads.h"

#include <algorithm>
#include <memory>

namespace gradscale::test {

namespace {

// A build with GRADSCALE_TEST_FAULT is faulty: the last element of a gradient has no memory. It must be noticed.
#ifdef GRADSCALE_TEST_FAULT
constexpr int64_t kMissing = 1;
#else
constexpr int64_t kMissing = 0;
#endif

struct HeadCase {
  const char* name;
  Head head;
  bool classes = false; // targets are int64
};

// True if a prediction and its target may be vectors.
bool takes_vectors(Kind kind) {
  const std::vector<Form>& forms = description_of(kind).forms;
  return std::any_of(
      forms.begin(), forms.end(), [](const Form& form) { return form.prediction_dims >= 1 && form.target_dims >= 1; });
}

// The width of a target next to a prediction of this width.
int64_t target_width_of(const HeadCase& of, int64_t width) {
  if (of.classes || !takes_vectors(of.head.kind)) {
    return 1;
  }
  return of.head.kind == Kind::quantile_huber ? width / 2 + 35 : width;
}

// The size of the last dimension of a prediction.
int64_t last_size_of(Kind kind, int64_t width) {
  const int64_t groups = kind == Kind::categorical_kl ? (width % 3 == 0 ? 3 : width % 2 == 0 ? 2 : 1) : 1;
  return width / groups;
}

Head head_of(Kind kind) {
  Head head{};
  head.kind = kind;
  head.detail = description_of(kind).detail;
  head.weight = 1;
  head.support = support_of(Transform::identity, false);
  head.sigma_ratio = 0.75;
  return head;
}

Head two_hot_head(Transform transform, bool raw, double label_smoothing) {
  Head head = head_of(Kind::two_hot);
  head.support = support_of(transform, raw);
  head.label_smoothing = label_smoothing;
  return head;
}

Head hl_gauss_head(Transform transform, bool raw, double sigma_ratio) {
  Head head = head_of(Kind::hl_gauss);
  head.support = support_of(transform, raw);
  head.sigma_ratio = sigma_ratio;
  return head;
}

Head soft_cross_entropy_head(double label_smoothing, double entropy_weight, bool subtract_target_entropy) {
  Head head = head_of(Kind::soft_cross_entropy);
  head.label_smoothing = label_smoothing;
  head.entropy_weight = entropy_weight;
  head.subtract_target_entropy = subtract_target_entropy;
  return head;
}

Head mean_squared_error_head(Transform transform) {
  Head head = head_of(Kind::mean_squared_error);
  head.support.transform = transform;
  return head;
}

Head huber_head(double delta, Transform transform) {
  Head head = head_of(Kind::huber);
  head.delta = delta;
  head.support.transform = transform;
  return head;
}

Head quantile_huber_head(double kappa, bool sum_over_quantiles) {
  Head head = head_of(Kind::quantile_huber);
  head.kappa = kappa;
  head.sum_over_quantiles = sum_over_quantiles;
  return head;
}

Head categorical_kl_head(double unimix, double free_nats, bool predicts_p) {
  Head head = head_of(Kind::categorical_kl);
  head.unimix = unimix;
  head.free_nats = free_nats;
  head.predicts_p = predicts_p;
  return head;
}

Head negative_cosine_head(double eps) {
  Head head = head_of(Kind::negative_cosine);
  head.support.eps = eps;
  return head;
}

std::vector<HeadCase> head_cases() {
  const Transform identity = Transform::identity;
  const Transform hyperbolic = Transform::signed_hyperbolic;
  const Transform symlog = Transform::symlog;
  return {
      {"two_hot", two_hot_head(hyperbolic, false, 0)},
      {"two_hot identity", two_hot_head(identity, false, 0)},
      {"two_hot symlog smoothed", two_hot_head(symlog, false, 0.1)},
      {"two_hot all smoothed away", two_hot_head(hyperbolic, false, 1)},
      {"two_hot raw symlog", two_hot_head(symlog, true, 0)},
      {"two_hot raw smoothed", two_hot_head(hyperbolic, true, 0.2)},
      {"hl_gauss", hl_gauss_head(hyperbolic, false, 0.75)},
      {"hl_gauss raw symlog", hl_gauss_head(symlog, true, 2.5)},
      {"hl_gauss narrow", hl_gauss_head(identity, false, 1e-6)},
      {"hl_gauss narrowest", hl_gauss_head(hyperbolic, false, 1e-300)},
      {"hl_gauss a point", hl_gauss_head(hyperbolic, false, 1e-307)},
      {"hl_gauss broad", hl_gauss_head(hyperbolic, false, 1e6)},
      {"hl_gauss broadest", hl_gauss_head(identity, false, 1e300)},
      {"hl_gauss flat", hl_gauss_head(symlog, false, 1.7e308)},
      {"soft_cross_entropy", soft_cross_entropy_head(0, 0, false)},
      {"soft_cross_entropy smoothed", soft_cross_entropy_head(0.3, 0, false)},
      {"soft_cross_entropy entropy", soft_cross_entropy_head(0, 0.4, false)},
      {"soft_cross_entropy divergence", soft_cross_entropy_head(0, 0, true)},
      {"soft_cross_entropy everything", soft_cross_entropy_head(0.1, -0.7, true)},
      {"soft_cross_entropy classes", soft_cross_entropy_head(0, 0, false), true},
      {"soft_cross_entropy classes everything", soft_cross_entropy_head(0.2, 0.5, true), true},
      {"mean_squared_error", mean_squared_error_head(identity)},
      {"mean_squared_error hyperbolic", mean_squared_error_head(hyperbolic)},
      {"mean_squared_error symlog", mean_squared_error_head(symlog)},
      {"huber", huber_head(1, identity)},
      {"huber narrow hyperbolic", huber_head(0.1, hyperbolic)},
      {"huber broad symlog", huber_head(1e30, symlog)},
      {"binary_cross_entropy", head_of(Kind::binary_cross_entropy)},
      {"negative_cosine", negative_cosine_head(1e-8)},
      {"negative_cosine large eps", negative_cosine_head(3)},
      {"quantile_huber", quantile_huber_head(1, true)},
      {"quantile_huber mean narrow", quantile_huber_head(0.1, false)},
      {"quantile_huber absolute", quantile_huber_head(0, true)},
      {"categorical_kl q", categorical_kl_head(0.01, 0, false)},
      {"categorical_kl p free", categorical_kl_head(0.01, 1, true)},
      {"categorical_kl q plain free", categorical_kl_head(0, 1, false)},
      {"categorical_kl p plain", categorical_kl_head(0, 0, true)},
      {"per_step_loss", head_of(Kind::per_step_loss)},
  };
}

bool makes_sense(const HeadCase& of, int64_t width) {
  return of.head.has_support() ? width >= 2 : width == 1 || takes_vectors(of.head.kind);
}

// What the rows of a case hold, one each. NaN and infinities have ordinary neighbours, whose results they must not
// touch.
enum class Content : int64_t {
  ordinary,
  masked, // and not a number
  spread,
  none_of_target,
  equal,
  low_target,
  high_target,
  infinite_target,
  negative_infinite_target,
  last,
  nan_target,
  partly_illegal,
  nan_prediction,
  illegal,
  infinite_prediction,
  any_bits,
  ordinary_at_the_end,
};

constexpr int64_t kRows = static_cast<int64_t>(Content::ordinary_at_the_end) + 1;
constexpr int64_t kStep = 2; // steps before it are not read

double prediction_of(Content content, int64_t j, int64_t chosen, Random& random) {
  switch (content) {
    case Content::masked:
      return kNaN;
    case Content::spread:
      return random.uniform(-30, 30);
    case Content::equal:
      return 0.5;
    case Content::partly_illegal:
      return j % 2 == 1 ? -kInfinity : random.normal(2);
    case Content::nan_prediction:
      return j == chosen ? kNaN : random.normal(2);
    case Content::illegal:
      return -kInfinity;
    case Content::infinite_prediction:
      return j == chosen ? kInfinity : random.normal(2);
    default:
      return random.normal(2);
  }
}

double scalar_target(Content content, Kind kind, Random& random) {
  const bool probability = kind == Kind::binary_cross_entropy;
  switch (content) {
    case Content::masked:
    case Content::nan_target:
      return kNaN;
    case Content::none_of_target:
      return 0;
    case Content::low_target:
      return probability ? 0 : -3e4;
    case Content::high_target:
    case Content::last:
      return probability ? 1 : 3e4;
    case Content::infinite_target:
      return kInfinity;
    case Content::negative_infinite_target:
      return -kInfinity;
    default:
      return probability ? random.uniform(0, 1) : random.normal(8);
  }
}

int64_t class_target(Content content, int64_t width, Random& random) {
  switch (content) {
    case Content::none_of_target:
      return -1;
    case Content::equal:
      return 0;
    case Content::last:
      return width - 1;
    case Content::low_target:
      return INT64_MIN;
    case Content::high_target:
    case Content::masked:
      return INT64_MAX;
    case Content::infinite_target:
      return width;
    case Content::any_bits:
      return static_cast<int64_t>(random.bits());
    default:
      return random.below(width);
  }
}

// Probabilities for a policy, numbers for other kinds.
Row vector_target(Content content, Kind kind, int64_t width, Random& random) {
  const bool policy = kind == Kind::soft_cross_entropy;
  const double size = policy ? 2.0 / static_cast<double>(width) : 2;
  const int64_t chosen = random.below(width);
  Row target;
  for (int64_t j = 0; j < width; ++j) {
    const double ordinary = policy ? random.uniform(0, size) : random.normal(size);
    switch (content) {
      case Content::masked:
        target.push_back(kNaN);
        break;
      case Content::none_of_target:
        target.push_back(0);
        break;
      case Content::low_target: // a single action
        target.push_back(j == chosen ? 1 : 0);
        break;
      case Content::high_target: // does not sum to 1
        target.push_back(100 * ordinary);
        break;
      case Content::nan_target:
        target.push_back(j == chosen ? kNaN : ordinary);
        break;
      case Content::infinite_target:
        target.push_back(j == chosen && !policy ? kInfinity : ordinary);
        break;
      case Content::negative_infinite_target:
        target.push_back(j == chosen && !policy ? -kInfinity : ordinary);
        break;
      case Content::partly_illegal: // nothing for illegal actions
        target.push_back(j % 2 == 1 && policy ? 0 : ordinary);
        break;
      default:
        target.push_back(ordinary);
    }
  }
  return target;
}

// The elements that the kernels read, in exact memory.
struct Inputs {
  RowBuffer prediction;
  RowBuffer target;
  RowBuffer step_weights;
  RowBuffer gradient_scale;
  RowBuffer importance;
  Memory mask;
  int64_t mask_stride;

  Inputs(const Layout& layout, Element element, Element target_element, int64_t width, int64_t target_width)
      : prediction(layout, element, kRows, width),
        target(layout, target_element, kRows, target_width),
        step_weights(layout, Element::float32, kRows, kStep + 1),
        gradient_scale(layout, Element::float64, kRows, kStep + 1),
        importance(layout, wide(element), kRows, 1),
        mask(layout.place, (kRows - 1) * (kStep + 1 + layout.gap) + kStep + 1, layout.offset),
        mask_stride(kStep + 1 + layout.gap) {
  }

  void fill(const HeadCase& of, uint64_t seed) const {
    Random random(seed);
    for (int64_t row = 0; row < kRows; ++row) {
      const auto content = static_cast<Content>(row);
      const int64_t chosen = random.below(prediction.width());
      for (int64_t j = 0; j < prediction.width(); ++j) {
        if (content == Content::any_bits) {
          prediction.set_bits(row, j, random.bits());
        } else {
          prediction.set(row, j, prediction_of(content, j, chosen, random));
        }
      }
      fill_target(of, content, row, random);
      for (int64_t step = 0; step <= kStep; ++step) {
        step_weights.set(row, step, step < kStep ? kNaN : random.uniform(0.5, 2));
        gradient_scale.set(row, step, step < kStep ? kNaN : random.uniform(-1, 1));
        mask.data()[row * mask_stride + step] = step < kStep ? 0 : content != Content::masked;
      }
      importance.set(row, 0, random.uniform(0.1, 1));
    }
  }

  double coefficient(int64_t row) const {
    return kFactor * step_weights.get(row, kStep) * gradient_scale.get(row, kStep) * importance.get(row);
  }

  Coefficients coefficients() const {
    Coefficients all{};
    all.factor = kFactor;
    all.step_weights = {slab_of(step_weights), 1};
    all.step_gradient_scale = {slab_of(gradient_scale), 1};
    all.importance_weights = {slab_of(importance), 0};
    all.mask = {reinterpret_cast<const bool*>(mask.data()), mask_stride, 1};
    return all;
  }

  std::vector<std::vector<char>> contents() const {
    return {
        prediction.contents(),
        target.contents(),
        step_weights.contents(),
        gradient_scale.contents(),
        importance.contents(),
        {mask.data(), mask.data() + mask.bytes()}};
  }

 private:
  static constexpr double kFactor = 0.7;

  void fill_target(const HeadCase& of, Content content, int64_t row, Random& random) const {
    if (of.classes) {
      target.set_bits(row, 0, static_cast<uint64_t>(class_target(content, prediction.width(), random)));
      return;
    }
    const Row values = takes_vectors(of.head.kind) ? vector_target(content, of.head.kind, target.width(), random)
                                                   : Row{scalar_target(content, of.head.kind, random)};
    for (int64_t j = 0; j < target.width(); ++j) {
      if (content == Content::any_bits) {
        target.set_bits(row, j, random.bits());
      } else {
        target.set(row, j, values[j]);
      }
    }
  }
};

struct RowTruth {
  Truth of_loss;
  Truth of_detail;
  Row prediction;
  double coefficient = 0;
};

Row one_hot(int64_t chosen, int64_t width) {
  const bool valid = chosen >= 0 && chosen < width;
  Row target(width, valid ? 0 : kNaN);
  if (valid) {
    target[chosen] = 1;
  }
  return target;
}

Truth truth_of(const HeadCase& of, const Centers& centers, const Row& x, const Row& target) {
  const Head& head = of.head;
  const double eps = head.support.eps;
  switch (head.kind) {
    case Kind::two_hot:
      return soft_cross_entropy(x, smoothed(centers.two_hot(target[0]), head.label_smoothing), 0, false);
    case Kind::hl_gauss:
      return soft_cross_entropy(x, centers.hl_gauss(target[0], head.sigma_ratio), 0, false);
    case Kind::soft_cross_entropy:
      return soft_cross_entropy(
          x, smoothed(target, head.label_smoothing), head.entropy_weight, head.subtract_target_entropy);
    case Kind::mean_squared_error:
      return mean_squared_error(x, target, head.support.transform, eps);
    case Kind::huber:
      return huber(x, target, head.support.transform, eps, head.delta);
    case Kind::binary_cross_entropy:
      return binary_cross_entropy(x[0], target[0]);
    case Kind::negative_cosine:
      return negative_cosine(x, target, eps);
    case Kind::quantile_huber:
      return quantile_huber(x, target, head.kappa, head.sum_over_quantiles);
    case Kind::categorical_kl:
      return categorical_kl(
          x,
          target,
          last_size_of(head.kind, static_cast<int64_t>(x.size())),
          head.unimix,
          head.free_nats,
          head.predicts_p);
    case Kind::per_step_loss:
      return {x[0], std::fabs(x[0]), {1}, {1}};
  }
  return {};
}

// Central differences of the truth's own loss, so that its gradient is not taken on trust either.
void check_truth(const HeadCase& of, const Centers& centers, const Row& x, const Row& target, const Truth& truth) {
  Report::get().doing("differentiating the formulas of");
  const double step = 1e-5;
  for (size_t j = 0; j < x.size(); ++j) {
    Row above = x, below = x;
    above[j] += step;
    below[j] -= step;
    const double difference = truth_of(of, centers, above, target).loss - truth_of(of, centers, below, target).loss;
    Report::get().check_close("gradient of the formula", 0, j, truth.gradient[j], difference / (2 * step), 1e-6);
  }
}

std::vector<RowTruth> truths_of(const HeadCase& of, const Centers& centers, const Inputs& inputs) {
  std::vector<RowTruth> truths(kRows);
  const int64_t width = inputs.prediction.width();
  for (int64_t row = 0; row < kRows; ++row) {
    if (static_cast<Content>(row) == Content::any_bits) {
      continue;
    }
    const Row x = row_of(inputs.prediction, row);
    Row target = row_of(inputs.target, row);
    if (of.classes) {
      int64_t chosen;
      std::memcpy(&chosen, inputs.target.data() + row * inputs.target.stride() * 8, sizeof(chosen));
      target = one_hot(chosen, width);
    }
    // A kernel rounds targets to the type in which it computes. Only there may a kink lie between the two.
    if (of.head.kind == Kind::quantile_huber && inputs.prediction.element() != Element::float64) {
      for (double& t : target) {
        t = static_cast<float>(t);
      }
    }
    truths[row].of_loss = truth_of(of, centers, x, target);
    truths[row].prediction = x;
    truths[row].coefficient = inputs.coefficient(row);
    if (of.head.detail != Detail::none) {
      truths[row].of_detail = of.head.has_support() ? decoded(x, centers) : entropy(x);
    }
    // Without a kappa the loss has a kink wherever a quantile meets a target.
    const bool is_smooth = of.head.kind != Kind::quantile_huber || of.head.kappa > 0;
    if (static_cast<Content>(row) == Content::ordinary && width <= 33 && is_smooth) {
      check_truth(of, centers, x, target, truths[row].of_loss);
    }
  }
  return truths;
}

struct Outputs {
  RowBuffer loss;
  RowBuffer detail;
  RowBuffer gradient;
  std::unique_ptr<RowMetrics[]> metrics; // exactly as many as there are rows
  bool wants_gradient;

  Outputs(const Layout& layout, Element of_losses, Element of_gradient, int64_t width, bool wants_gradient_)
      : loss(layout, of_losses, kRows, 1),
        detail(layout, of_losses, kRows, 1),
        gradient(layout, of_gradient, kRows, width, kMissing),
        metrics(new RowMetrics[kRows]),
        wants_gradient(wants_gradient_) {
  }

  void clear() const {
    loss.clear();
    detail.clear();
    gradient.clear();
    std::fill(metrics.get(), metrics.get() + kRows, RowMetrics{kNaN, kNaN});
  }

  bool untouched_row(int64_t row) const {
    return loss.untouched_row(row) && detail.untouched_row(row) && gradient.untouched_row(row);
  }
  bool untouched_outside() const {
    return loss.untouched_outside() && detail.untouched_outside() && gradient.untouched_outside();
  }
};

void check_row(const HeadCase& of, const Outputs& out, const RowTruth& truth, double precision, int64_t row) {
  Report& report = Report::get();
  const bool masked = static_cast<Content>(row) == Content::masked;
  const double nothing = 1e-30; // below what matters, float exponentials are 0
  const double loss_error = precision * (truth.of_loss.loss_scale + 0.1);
  check_element("loss", out.loss, row, 0, masked ? 0 : truth.of_loss.loss, masked ? 0 : loss_error);
  if (of.head.detail != Detail::none) {
    check_element("detail", out.detail, row, 0, truth.of_detail.loss, precision * truth.of_detail.loss_scale + nothing);
  } else {
    report.check(out.detail.untouched_row(row), "a value was written in row %lld", static_cast<long long>(row));
  }
  // A vector of infinite length has no direction: which of its elements become NaN is open. So it is where q lacks a
  // class of p, and the divergence is infinite.
  const bool open = (of.head.kind == Kind::negative_cosine && std::isnan(truth.of_loss.loss)) ||
                    (of.head.kind == Kind::categorical_kl && !std::isfinite(truth.of_loss.loss));
  double squares = 0, error_of_squares = 1e-30;
  for (int64_t j = 0; out.wants_gradient && !open && j < out.gradient.width(); ++j) {
    const double c = truth.coefficient;
    const double error = std::fabs(c) * precision * (truth.of_loss.gradient_scale[j] + 0.01) + nothing;
    check_element("gradient", out.gradient, row, j, masked ? 0 : c * truth.of_loss.gradient[j], masked ? 0 : error);
    const double g = masked ? 0 : c * truth.of_loss.gradient[j];
    squares += g * g;
    error_of_squares += masked ? 0 : std::fabs(g) * (2 * error + precision * std::fabs(g)) + error * error;
  }
  if (!open) {
    report.check_close("squares", row, 0, out.metrics[row].gradient_square, squares, error_of_squares);
  }
  double largest = 0;
  for (const double x : truth.prediction) {
    largest =
        std::isfinite(x) && !masked && has_largest_logit(of.head.kind) ? std::max(largest, std::fabs(x)) : largest;
  }
  report.check_close("largest logit", row, 0, out.metrics[row].largest_logit, largest, 0);
}

// In several calls, so that it is seen which rows each of them writes, or in one, in which whole groups of rows meet.
void run(
    const Variant& variant,
    const Segment& segment,
    const Inputs& inputs,
    const Outputs& out,
    Place place,
    bool at_once) {
  Report& report = Report::get();
  report.doing("in the kernels of", variant.name);
  const ScratchRows scratch(place, segment.prediction.element, std::max(segment.width, segment.target_width));
  const auto rows = [&](int64_t begin, int64_t end) {
    variant.kernels.run_rows(segment, inputs.coefficients(), begin, end, scratch.data());
  };
  if (at_once) {
    return rows(0, kRows);
  }
  rows(kRows - 1, kRows);
  rows(0, 0);
  report.check(out.untouched_row(0) && out.untouched_row(kRows - 2), "a row that was not asked for is written");
  rows(1, kRows - 1);
  report.check(out.untouched_row(0), "a row that was not asked for is written");
  rows(0, 1);
}

void test_outputs(
    const Selection& selection,
    const HeadCase& of,
    const Layout& layout,
    const Inputs& inputs,
    const Outputs& out,
    const std::vector<RowTruth>& truths,
    bool at_once) {
  Report& report = Report::get();
  const Element element = inputs.prediction.element();
  Segment segment{};
  segment.head = &of.head;
  segment.step = kStep;
  segment.width = inputs.prediction.width();
  segment.target_width = inputs.target.width();
  segment.last_size = last_size_of(of.head.kind, segment.width);
  segment.prediction = inputs.prediction.rows();
  segment.target = of.head.kind == Kind::per_step_loss ? Rows{} : inputs.target.rows();
  segment.gradient = out.wants_gradient ? out.gradient.rows() : Rows{};
  segment.loss = slab_of(out.loss);
  segment.detail = of.head.detail != Detail::none ? slab_of(out.detail) : Slab{};
  segment.metrics = out.metrics.get();
  const auto before = inputs.contents();
  for (const Variant& variant : selection.variants) {
    out.clear();
    run(variant, segment, inputs, out, layout.place, at_once);
    report.doing("results of", variant.name);
    report.check(out.untouched_outside(), "something outside of the rows is written");
    report.check(inputs.contents() == before, "something that is only read is written");
    for (int64_t row = 0; row < kRows; ++row) {
      if (static_cast<Content>(row) != Content::any_bits) {
        check_row(of, out, truths[row], precision(element, segment.width), row);
      }
    }
  }
}

// Gradients: none, of the prediction's type, and of the type of sums where that is another. One call for all rows
// and several calls come by turns.
void test_width(
    const Selection& selection,
    HeadCase of,
    const Centers& centers,
    Element element,
    Element target_element,
    int64_t width,
    uint64_t seed) {
  std::vector<RowTruth> truths;
  bool at_once = seed % 2 == 0;
  for (const Layout& layout : selection.layouts) {
    const std::string description = std::string(of.name) + ", " + name_of(element) + " width " + std::to_string(width) +
                                    ", target " + name_of(target_element) + ", " + layout.name();
    Report::get().begin_case(description);
    const RawCenters raw_centers(layout, centers, of.head.support);
    const Inputs inputs(layout, element, target_element, width, target_width_of(of, width));
    inputs.fill(of, seed);
    if (truths.empty()) {
      truths = truths_of(of, centers, inputs);
    }
    const Element of_losses = seed % 3 == 0 ? Element::float64 : wide(element);
    for (const bool wants_gradient : {true, false}) {
      for (const Element of_gradient : {element, wide(element)}) {
        if (of_gradient == element || (wants_gradient && wide(element) != element)) {
          Report::get().begin_case(
              description + (wants_gradient ? std::string(", gradient ") + name_of(of_gradient) : ", no gradient"));
          const Outputs out(layout, of_losses, of_gradient, width, wants_gradient);
          test_outputs(selection, of, layout, inputs, out, truths, at_once);
          at_once = !at_once;
        }
      }
    }
  }
}

void test_kinds() {
  Report::get().begin_case("kinds of heads");
  const std::vector<HeadCase> cases = head_cases();
  for (const KindOfHead& kind : kinds()) {
    const bool has_case = std::any_of(
        cases.begin(), cases.end(), [&](const HeadCase& of) { return &description_of(of.head.kind) == &kind; });
    Report::get().check(has_case, "head_cases() has no %s", kind.name.c_str());
  }
}

// The production's own scratch: aligned, and as large as it promises.
void test_scratch(const Selection& selection) {
  for (const int64_t width : selection.widths) {
    Report::get().begin_case("scratch for a width of " + std::to_string(width));
    Scratch scratch(width);
    std::memset(scratch.data(), 0, scratch_elements(width) * sizeof(double));
    Report::get().check(reinterpret_cast<uintptr_t>(scratch.data()) % 64 == 0, "not aligned");
  }
}

} // namespace

void test_rows(const Selection& selection) {
  test_kinds();
  test_scratch(selection);
  uint64_t seed = 0;
  for (HeadCase of : head_cases()) {
    for (const int64_t width : selection.widths) {
      if (!makes_sense(of, width)) {
        continue;
      }
      of.head.support.num_bins = static_cast<int32_t>(std::max<int64_t>(width, 2));
      const Centers centers(of.head.support);
      for (const Element element : kFloating) {
        // Targets of all types come by turns.
        const Element target_element = of.classes ? Element::int64 : kFloating[(seed + seed / 4) % 4];
        test_width(selection, of, centers, element, target_element, width, seed++);
      }
    }
  }
}

} // namespace gradscale::test
