// The kernels over single elements: conversions, the loops of the flow operators, norms of ranges and their scaling.
#include "cases.h"

#include <algorithm>

namespace gradscale::test {

namespace {

constexpr int64_t kSizes[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 601, 1025};

// Equal bits, but that one NaN is as good as another.
bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

void check_same(const char* what, int64_t i, double actual, double expected) {
  Report::get().check(
      same(actual, expected), "%s[%lld] is %.17g, expected %.17g", what, static_cast<long long>(i), actual, expected);
}

// ---- Element loops --------------------------------------------------------------------------------------------------

// In the type of sums; a product of floats is exact in double.
double multiplied(double gradient, double scale, Element sums) {
  return scale == 0 ? 0.0 : rounded(gradient * scale, sums);
}

double clamped(double gradient, double low, double high) {
  if (!(low <= high)) {
    return kNaN;
  }
  return gradient < low ? low : (gradient > high ? high : gradient);
}

double random_number(Random& random, int64_t i) {
  const double special[] = {0.0, -0.0, 1, kInfinity, -kInfinity, kNaN, 1e-40, -3e-8, 6e4, 1e38};
  return i % 3 == 1 ? special[random.below(10)] : random.normal(3);
}

enum class Arguments { constant, dense, strided };

struct LoopCase {
  Layout layout;
  Element element;
  int64_t size;
  Arguments arguments;
  bool in_place;
};

class LoopTest {
 public:
  LoopTest(const LoopCase& of, Random& random)
      : of_(of),
        out_(of.layout, of.element, of.size, 1),
        gradient_(of.layout, of.element, of.size, 1),
        first_(layout_of(of), wide(of.element), of.arguments == Arguments::constant ? 1 : of.size, 1),
        second_(layout_of(of), wide(of.element), of.arguments == Arguments::constant ? 1 : of.size, 1) {
    for (int64_t i = 0; i < of.size; ++i) {
      gradients_.push_back(rounded(random_number(random, i), of.element));
    }
    for (int64_t i = 0; i < first_.count(); ++i) {
      first_.set(i, 0, random_number(random, i));
      second_.set(i, 0, random_number(random, i + 1));
    }
  }

  template <class Expected>
  void run(const char* variant, ElementLoop loop, int arguments, Expected expected) {
    Report::get().doing("in the element loops of", variant);
    out_.clear();
    for (int64_t i = 0; i < of_.size; ++i) {
      gradient_.set(i, 0, gradients_[i]);
    }
    const RowBuffer& result = of_.in_place ? gradient_ : out_;
    const int64_t size = element_size(of_.element);
    const int64_t of_argument =
        of_.arguments == Arguments::constant ? 0 : first_.stride() * element_size(first_.element());
    std::vector<char*> data = {result.data(), gradient_.data(), first_.data(), second_.data()};
    std::vector<int64_t> strides = {result.stride() * size, gradient_.stride() * size, of_argument, of_argument};
    data.resize(2 + arguments);
    strides.resize(2 + arguments);
    loop(of_.element, data.data(), strides.data(), of_.size);
    Report::get().doing("element loops of", variant);
    for (int64_t i = 0; i < of_.size; ++i) {
      const int64_t k = of_.arguments == Arguments::constant ? 0 : i;
      const double wanted = expected(gradients_[i], first_.get(k), second_.get(k));
      check_same("result", i, result.get(i), rounded(wanted, of_.element));
    }
    Report::get().check(out_.untouched_outside() && gradient_.untouched_outside(), "something outside is written");
  }

 private:
  static Layout layout_of(const LoopCase& of) {
    Layout layout = of.layout;
    layout.gap = of.arguments == Arguments::strided ? layout.gap + 2 : 0;
    return layout;
  }

  LoopCase of_;
  RowBuffer out_;
  RowBuffer gradient_;
  RowBuffer first_;
  RowBuffer second_;
  Row gradients_;
};

void test_loop(const Selection& selection, const LoopCase& of, Random& random) {
  const Element sums = wide(of.element);
  LoopTest test(of, random);
  for (const auto& [name, kernels] : selection.variants) {
    test.run(name, kernels.multiply, 1, [&](double g, double s, double) { return multiplied(g, s, sums); });
    test.run(name, kernels.multiply_negated, 1, [&](double g, double s, double) { return multiplied(g, -s, sums); });
    test.run(name, kernels.clamp, 2, clamped);
  }
}

// All numbers of 16 bits, read and written.
void test_conversions(const Selection& selection, Element element) {
  Report::get().begin_case(std::string("every ") + name_of(element));
  const RowBuffer numbers(kLayouts[0], element, 65536, 1);
  const RowBuffer out(kLayouts[0], element, 65536, 1);
  const RowBuffer scale(kLayouts[0], Element::float32, 1, 1);
  for (int64_t i = 0; i < 65536; ++i) {
    numbers.set_bits(i, 0, i);
  }
  for (const double by : {1.0, -1.0, 1 / 3.0, 1.0009765625, 0x1.01p0, 0x1p-14, 3e-5, 700.0, 0x1p-120}) {
    scale.set(0, 0, by);
    for (const Variant& variant : selection.variants) {
      Report::get().doing("conversions of", variant.name);
      char* data[] = {out.data(), numbers.data(), scale.data()};
      const int64_t strides[] = {2, 2, 0};
      variant.kernels.multiply(element, data, strides, 65536);
      for (int64_t i = 0; i < 65536; ++i) {
        const double product = multiplied(numbers.get(i), scale.get(0), Element::float32);
        check_same("number", i, out.get(i), rounded(product, element));
      }
    }
  }
}

// ---- Ranges ---------------------------------------------------------------------------------------------------------

// |g|_p of numbers over the largest of them, which cannot overflow.
double norm_of(const Row& magnitudes, double p) {
  double largest = 0;
  for (const double magnitude : magnitudes) {
    if (std::isnan(magnitude)) {
      return kNaN;
    }
    largest = std::max(largest, magnitude);
  }
  if (largest == 0 || std::isinf(largest) || std::isinf(p)) {
    return largest;
  }
  double sum = 0;
  for (const double magnitude : magnitudes) {
    sum += std::pow(magnitude / largest, p);
  }
  return largest * std::pow(sum, 1 / p);
}

enum class Content { ordinary, large, small, zeros, sparse, infinite, nan };

constexpr Content kContents[] = {
    Content::ordinary,
    Content::large,
    Content::small,
    Content::zeros,
    Content::sparse,
    Content::infinite,
    Content::nan};

double number_of(Content content, Element element, bool chosen, Random& random) {
  const Format format = format_of(element);
  switch (content) {
    case Content::large:
      return random.uniform(-1, 1) * std::ldexp(1, format.largest);
    case Content::small:
      return random.uniform(-1, 1) * std::ldexp(1, format.smallest);
    case Content::zeros:
      return 0;
    case Content::sparse: // as behind a ReLU, and with numbers in the lowest bin too
      return random.below(2) == 0 ? 0 : random.normal(random.below(8) == 0 ? 1e-14 : 1);
    case Content::infinite:
      return chosen ? -kInfinity : random.normal(1);
    case Content::nan:
      return chosen ? kNaN : random.normal(1);
    default:
      return random.normal(1);
  }
}

void check_norm(const PowerSum& sum, double p, const Row& magnitudes, double smallest) {
  const double norm = std::isinf(p) ? sum.sum : std::pow(sum.sum, 1 / p);
  const double expected = norm_of(magnitudes, p);
  const double error = 1e-12 * expected + smallest;
  Report::get().check_close("norm", 0, 0, norm * sum.root * sum.root, expected, error);
}

// Statistics of real numbers, of which those that are not finite are counted and left out.
void check_statistics(const ChunkStatistics& found, const Row& numbers, double p, double smallest) {
  Row magnitudes;
  double sum = 0, total = 0;
  int32_t zeros = 0, nans = 0, infs = 0;
  std::vector<int32_t> histogram(kHistogramBins);
  for (const double x : numbers) {
    nans += std::isnan(x);
    infs += std::isinf(x);
    if (std::isfinite(x)) {
      magnitudes.push_back(std::fabs(x));
      sum += x * 0x1p-40; // which does not overflow
      total += std::fabs(x) * 0x1p-40;
      zeros += x == 0;
      if (x != 0) {
        ++histogram[std::min(std::max(std::ilogb(x) - (kFirstEdge - 1), 0), kHistogramBins - 1)];
      }
    }
  }
  Report& report = Report::get();
  const double norm = norm_of(magnitudes, p);
  report.check_close("norm", 0, 0, norm_of(found.sums, p), norm, 1e-12 * norm + smallest);
  report.check_close("largest", 0, 0, found.sums.maximum, norm_of(magnitudes, kInfinity), 0);
  const double scale = found.sums.root * found.sums.root;
  report.check_close("sum", 0, 0, found.sums.sum * 0x1p-40 * scale, sum, 1e-13 * total + smallest);
  report.check(found.zeros == zeros && found.nans == nans && found.infs == infs, "zeros, NaN or inf are miscounted");
  for (int bin = 0; bin < kHistogramBins; ++bin) {
    report.check(found.histogram[bin] == histogram[bin], "bin %d has %d", bin, found.histogram[bin]);
  }
}

// Of numbers, and of a change that has been made to them.
void test_statistics(const Selection& selection, const RowBuffer& from, const Range& range, double smallest) {
  const Row numbers = row_of(from, 0);
  Row magnitudes;
  for (const double x : numbers) {
    magnitudes.push_back(std::fabs(x));
  }
  const bool finite = std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x); });
  for (const auto& [name, kernels] : selection.variants) {
    Report::get().doing("statistics of", name);
    for (const double p : {1.0, 2.0, 3.0, 40.0, kInfinity}) {
      ChunkStatistics found;
      kernels.statistics(range, p, found);
      check_statistics(found, numbers, p, smallest);
    }
    if (finite && range.element != Element::float64) {
      Report::get().doing("updates of", name);
      const UpdateSquares squares = kernels.update(range, range.data);
      const double norm = norm_of(magnitudes, 2);
      Report::get().check_close("norm", 0, 0, std::sqrt(squares.before), norm, 1e-12 * norm);
      Report::get().check_close("update", 0, 0, squares.update, 0, 0);
    }
  }
}

void test_range(
    const Selection& selection,
    const Layout& layout,
    Element element,
    int64_t size,
    bool is_complex,
    Content content,
    Random& random) {
  const int64_t numbers = is_complex ? 2 * size : size;
  const RowBuffer from(layout, element, 1, numbers);
  const RowBuffer to(layout, element, 1, numbers);
  const int64_t chosen = random.below(std::max<int64_t>(numbers, 1));
  for (int64_t i = 0; i < numbers; ++i) {
    from.set(0, i, number_of(content, element, i == chosen, random));
  }
  Row magnitudes;
  for (int64_t i = 0; i < size; ++i) {
    magnitudes.push_back(
        is_complex ? std::hypot(from.get(0, 2 * i), from.get(0, 2 * i + 1)) : std::fabs(from.get(0, i)));
  }
  const Range range{size == 0 ? nullptr : from.data(), size, element, is_complex};
  // Subnormal doubles have few digits, and their norm no more.
  const double subnormal = element == Element::float64 && content == Content::small ? 1e-320 : 0;
  for (const auto& [name, kernels] : selection.variants) {
    Report::get().doing("norms of", name);
    for (const double p : {1.0, 2.0, 3.0, 0.5, 40.0, kInfinity}) {
      check_norm(kernels.power_sum(range, p), p, magnitudes, subnormal);
    }
    Report::get().doing("scaling of", name);
    for (const auto& [root, factor] :
         {std::make_pair(1.0, 0.3), {1.0, -2.5}, {1.0, 1e-42}, {1.0, 1e40}, {0x1p20, 3.0}, {0x1p-30, 0x1p-50}}) {
      to.clear();
      kernels.scale_range(range, size == 0 ? nullptr : to.data(), root, factor);
      for (int64_t i = 0; i < numbers; ++i) {
        const double expected = from.get(0, i) / root / root * factor;
        const double error = wide(element) == Element::float64 ? 1e-15 : 2e-7;
        check_element("scaled", to, 0, i, expected, std::isfinite(expected) ? error * std::fabs(expected) : 0);
      }
      Report::get().check(to.untouched_outside(), "something outside is written");
    }
  }
  if (!is_complex) {
    test_statistics(selection, from, range, subnormal);
  }
  // In place, last: it writes over what the others read.
  for (const Variant& variant : selection.variants) {
    Report::get().doing("scaling in place of", variant.name);
    const Row before = row_of(from, 0);
    variant.kernels.scale_range(range, const_cast<void*>(range.data), 1, 0.5);
    for (int64_t i = 0; i < numbers; ++i) {
      check_element("scaled", from, 0, i, 0.5 * before[i], 0);
    }
  }
}

} // namespace

// More than one block, of numbers in many bins: most of them in a few, and some far away.
void test_long_range(const Selection& selection, Element element) {
  Random random(3000);
  const RowBuffer from(kLayouts[0], element, 1, 16384 + 77);
  for (const double spread : {1.0, 20.0}) {
    Report::get().begin_case(std::string("long range of ") + name_of(element));
    for (int64_t i = 0; i < from.width(); ++i) {
      const double magnitude = std::ldexp(1.0, static_cast<int>(spread * random.uniform(-1, 0.5)));
      from.set(0, i, i % 11 == 0 ? 0 : magnitude * random.normal(1));
    }
    const Range range{from.data(), from.width(), element, false};
    test_statistics(selection, from, range, 0);
  }
}

void test_elements(const Selection& selection) {
  Random random(2000);
  test_conversions(selection, Element::bfloat16);
  test_conversions(selection, Element::float16);
  for (const Element element : kFloating) {
    test_long_range(selection, element);
    for (const Layout& layout : selection.layouts) {
      for (const int64_t size : kSizes) {
        const std::string description =
            std::string(name_of(element)) + " size " + std::to_string(size) + ", " + layout.name();
        for (const bool in_place : {false, true}) {
          const char* names[] = {"constant", "dense", "strided"};
          for (const Arguments arguments : {Arguments::constant, Arguments::dense, Arguments::strided}) {
            Report::get().begin_case(
                std::string("element loops, arguments ") + names[static_cast<int>(arguments)] +
                (in_place ? ", in place, " : ", ") + description);
            test_loop(selection, {layout, element, size, arguments, in_place}, random);
          }
        }
        for (const bool is_complex : {false, true}) {
          for (const Content content : kContents) {
            Report::get().begin_case(
                std::string("range of content ") + std::to_string(static_cast<int>(content)) +
                (is_complex ? ", complex " : ", ") + description);
            test_range(selection, layout, element, size, is_complex, content, random);
          }
        }
      }
    }
  }
}

} // namespace gradscale::test
