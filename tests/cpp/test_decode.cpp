// The kernel that decodes rows of logits, and its gradient.
#include "cases.h"

namespace gradscale::test {

namespace {

enum class Content : int64_t {
  ordinary,
  spread,
  uniform,
  partly_illegal,
  nan,
  illegal,
  infinite,
  any_bits,
  sharp,
  end
};

constexpr int64_t kRows = static_cast<int64_t>(Content::end);

void fill(const RowBuffer& logits, Random& random) {
  for (int64_t row = 0; row < kRows; ++row) {
    const auto content = static_cast<Content>(row);
    const int64_t chosen = random.below(logits.width());
    for (int64_t j = 0; j < logits.width(); ++j) {
      const double ordinary = random.normal(2);
      switch (content) {
        case Content::spread:
          logits.set(row, j, random.uniform(-30, 30));
          break;
        case Content::uniform:
          logits.set(row, j, -1.25);
          break;
        case Content::partly_illegal:
          logits.set(row, j, j % 2 == 1 ? -kInfinity : ordinary);
          break;
        case Content::nan:
          logits.set(row, j, j == chosen ? kNaN : ordinary);
          break;
        case Content::illegal:
          logits.set(row, j, -kInfinity);
          break;
        case Content::infinite:
          logits.set(row, j, j == chosen ? kInfinity : ordinary);
          break;
        case Content::any_bits:
          logits.set_bits(row, j, random.bits());
          break;
        case Content::sharp:
          logits.set(row, j, j == chosen ? 90 : ordinary);
          break;
        default:
          logits.set(row, j, ordinary);
      }
    }
  }
}

void check_row(
    const RowBuffer& values,
    const RowBuffer& gradient,
    const Truth& truth,
    double grad_output,
    bool wants,
    int64_t row) {
  const double relative = precision(gradient.element(), gradient.width());
  const double nothing = 1e-30 * std::max(1.0, std::fabs(grad_output) * truth.loss_scale);
  if (!wants) {
    check_element("value", values, row, 0, truth.loss, relative * truth.loss_scale + nothing);
    return;
  }
  for (int64_t j = 0; j < gradient.width(); ++j) {
    const double error = std::fabs(grad_output) * relative * truth.gradient_scale[j] + nothing;
    check_element("gradient", gradient, row, j, grad_output * truth.gradient[j], error);
  }
}

void test_case(
    const Selection& selection, const Centers& centers, Element element, const Layout& layout, uint64_t seed) {
  Report& report = Report::get();
  Random random(seed);
  Support support = centers.support;
  const int64_t width = support.num_bins;
  const RawCenters raw_centers(layout, centers, support);
  const RowBuffer logits(layout, element, kRows, width);
  const RowBuffer grad_output(layout, wide(element), kRows, 1);
  const RowBuffer values(layout, seed % 2 == 0 ? wide(element) : Element::float64, kRows, 1);
  const RowBuffer gradient(layout, element, kRows, width);
  fill(logits, random);
  std::vector<Truth> truths;
  for (int64_t row = 0; row < kRows; ++row) {
    grad_output.set(row, 0, random.normal(1));
    truths.push_back(decoded(row_of(logits, row), centers));
  }
  const auto before = std::make_pair(logits.contents(), grad_output.contents());
  for (const Variant& variant : selection.variants) {
    for (const bool wants : {false, true}) {
      values.clear();
      gradient.clear();
      Decoding decoding{};
      decoding.logits = logits.rows();
      decoding.width = width;
      decoding.support = &support;
      decoding.out = wants ? Slab{} : slab_of(values);
      decoding.gradient = wants ? gradient.rows() : Rows{};
      decoding.grad_output = wants ? slab_of(grad_output) : Slab{};
      report.doing(wants ? "in the gradient kernels of" : "in the kernels of", variant.name);
      const ScratchRows scratch(layout.place, element, width);
      variant.kernels.decode_rows(decoding, 1, kRows, scratch.data());
      variant.kernels.decode_rows(decoding, 0, 0, scratch.data());
      report.check(values.untouched_row(0) && gradient.untouched_row(0), "a row that was not asked for is written");
      variant.kernels.decode_rows(decoding, 0, 1, scratch.data());
      report.doing(wants ? "gradient of" : "values of", variant.name);
      report.check(values.untouched_outside() && gradient.untouched_outside(), "something outside is written");
      report.check(
          before == std::make_pair(logits.contents(), grad_output.contents()), "something that is read is written");
      for (int64_t row = 0; row < kRows; ++row) {
        if (static_cast<Content>(row) != Content::any_bits) {
          check_row(values, gradient, truths[row], grad_output.get(row), wants, row);
        }
      }
    }
  }
}

Centers centers_of(Support support, int64_t width) {
  support.num_bins = static_cast<int32_t>(width);
  return Centers(support);
}

// Raw centres that are exactly antisymmetric, as the production's own are.
Centers symmetric_centers_of(Support support, int64_t width) {
  support.minimum = -20;
  support.maximum = 20;
  Centers centers = centers_of(support, width);
  for (int64_t j = 0; j < width; ++j) {
    centers.values[j] = raw_center(centers.support, j);
  }
  return centers;
}

// Uniform logits over a symmetric support are exactly 0, whatever the width and the place.
void test_symmetric(const Selection& selection, const Centers& centers, Element element, const Layout& layout) {
  Support support = centers.support;
  const int64_t width = support.num_bins;
  const RawCenters raw_centers(layout, centers, support);
  const RowBuffer logits(layout, element, 2, width);
  const RowBuffer values(layout, wide(element), 2, 1);
  for (int64_t j = 0; j < width; ++j) {
    logits.set(0, j, 1.625);
    logits.set(1, j, -300);
  }
  for (const Variant& variant : selection.variants) {
    Report::get().doing("symmetric supports of", variant.name);
    const ScratchRows scratch(layout.place, element, width);
    variant.kernels.decode_rows({logits.rows(), width, &support, slab_of(values), {}, {}}, 0, 2, scratch.data());
    Report::get().check_close("value", 0, 0, values.get(0), 0, 0);
    Report::get().check_close("value", 1, 0, values.get(1), 0, 0);
  }
}

} // namespace

void test_decode(const Selection& selection) {
  const std::pair<const char*, Support> supports[] = {
      {"identity", support_of(Transform::identity, false)},
      {"hyperbolic", support_of(Transform::signed_hyperbolic, false)},
      {"symlog", support_of(Transform::symlog, false)},
      {"raw hyperbolic", support_of(Transform::signed_hyperbolic, true)},
      {"raw symlog", support_of(Transform::symlog, true)},
  };
  uint64_t seed = 1000;
  for (const int64_t width : selection.widths) {
    for (const auto& [name, support] : supports) {
      if (width < 2) {
        continue;
      }
      const Centers centers = centers_of(support, width);
      const Centers symmetric = symmetric_centers_of(support, width);
      for (const Element element : kFloating) {
        for (const Layout& layout : selection.layouts) {
          Report::get().begin_case(
              std::string("decode ") + name + ", " + name_of(element) + " width " + std::to_string(width) + ", " +
              layout.name());
          test_case(selection, centers, element, layout, seed++);
          test_symmetric(selection, symmetric, element, layout);
        }
      }
    }
  }
}

} // namespace gradscale::test
