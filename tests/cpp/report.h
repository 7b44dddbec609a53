// What is being tested, for messages: of a comparison that fails, and of a sanitizer or the processor that stops the
// program.
#pragma once

#include "elements.h"
#include "flow/calls.h"
#include "loss/segment.h"
#include "statistics/calls.h"
#include "support/calls.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace gradscale::test {

// The kernels of one instruction set, or of the simulator, which has the first two.
struct Kernels {
  RunRows run_rows;
  DecodeRows decode_rows;
  PowerSumOfRange power_sum;
  StatisticsOfRange statistics;
  UpdateOfRange update;
  ScaleRange scale_range;
  ElementLoop multiply;
  ElementLoop multiply_negated;
  ElementLoop clamp;
};

struct Variant {
  const char* name;
  Kernels kernels;
};

// What the command line leaves of the variants, the layouts and the widths.
struct Selection {
  std::vector<Variant> variants;
  std::vector<Layout> layouts;
  std::vector<int64_t> widths;
};

class Report {
 public:
  static Report& get() {
    static Report report;
    return report;
  }

  // The case under test; what is printed of it comes before each message.
  void begin_case(std::string description) {
    description_ = std::move(description);
    doing("preparing");
  }
  void doing(const char* what, const char* variant = "") {
    std::snprintf(
        current_, sizeof(current_), "%s%s%s: %s\n", what, *variant != 0 ? " " : "", variant, description_.c_str());
  }
  const char* current() const {
    return current_;
  }

  void check(bool passed, const char* format, ...) __attribute__((format(printf, 3, 4))) {
    ++checks_;
    if (passed || !judges_) {
      return;
    }
    std::fprintf(stderr, "FAILED %s    ", current_);
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
    if (++failures_ == 20) {
      std::fprintf(stderr, "and perhaps more\n");
      std::exit(1);
    }
  }

  // NaN and infinities must be the same; finite numbers may be as far apart as `tolerance` says.
  void check_close(const char* what, int64_t row, int64_t j, double actual, double expected, double tolerance) {
    const bool passed = std::isfinite(expected) ? std::fabs(actual - expected) <= tolerance
                                                : actual == expected || (std::isnan(actual) && std::isnan(expected));
    check(
        passed,
        "%s[%lld, %lld] is %.17g, expected %.17g within %.3g",
        what,
        static_cast<long long>(row),
        static_cast<long long>(j),
        actual,
        expected,
        tolerance);
  }

  // From now on nothing fails: nothing is computed.
  void stop_judging() {
    judges_ = false;
  }

  int64_t checks() const {
    return checks_;
  }
  int failures() const {
    return failures_;
  }

 private:
  std::string description_;
  char current_[512] = "starting\n"; // read from a signal handler
  int64_t checks_ = 0;
  int failures_ = 0;
  bool judges_ = true;
};

// A number that was computed exactly but for `error`, and rounded to the type of the row that it is in.
inline void check_element(
    const char* what, const RowBuffer& buffer, int64_t row, int64_t j, double expected, double error) {
  const double nearest = rounded(expected, buffer.element()); // infinite where it is too large for the type
  const double target = std::isfinite(nearest) ? expected : nearest;
  Report::get().check_close(
      what, row, j, buffer.get(row, j), target, error + rounding_error(expected, buffer.element()));
}

} // namespace gradscale::test
