// Runs the kernel of faults.cuh and compares it with double precision. Options of the simulator are those of the
// environment. Ends with 0 where all is right, with 1 where a number is wrong, with 2 where the simulator refused.
#include "faults.cuh"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

namespace {

int checks = 0;
int failed = 0;

void check_close(const char* what, int64_t row, int64_t column, double actual, double expected, double tolerance) {
  checks++;
  if (std::abs(actual - expected) <= tolerance) {
    return;
  }
  failed++;
  if (failed <= 10) {
    printf(
        "%s of row %lld, column %lld: expected %.9g, got %.9g\n",
        what,
        static_cast<long long>(row),
        static_cast<long long>(column),
        expected,
        actual);
  }
}

// Memory that is exactly as long as it must be, and aligned to 16 bytes.
struct Floats {
  explicit Floats(int64_t count)
      : data(static_cast<float*>(malloc(sizeof(float) * static_cast<size_t>(count))), &free) {
    for (int64_t i = 0; i < count; i++) {
      data.get()[i] = NAN;
    }
  }

  float* get() const {
    return data.get();
  }

  std::unique_ptr<float, decltype(&free)> data;
};

void test(int64_t rows, int64_t width) {
  const int64_t stride = (width + faults::kVector - 1) / faults::kVector * faults::kVector;
  const Floats logits((rows - 1) * stride + width);
  const Floats gradient((rows - 1) * stride + width);
  const Floats loss(rows);
  std::vector<int64_t> target(static_cast<size_t>(rows));
  float total = 0.0f;
  unsigned finished = 0;
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t column = 0; column < width; column++) {
      logits.get()[row * stride + column] = static_cast<float>(rand() % 2001 - 1000) / 100.0f;
    }
    target[static_cast<size_t>(row)] = rand() % width;
  }
  const faults::Arguments arguments = {
      logits.get(), target.data(), loss.get(), gradient.get(), &total, &finished, width, stride};
  simt::launch("cross_entropy", rows, faults::kThreads, [&] { faults::cross_entropy(arguments); });

  double expected_total = 0;
  for (int64_t row = 0; row < rows; row++) {
    const float* const logits_of_row = logits.get() + row * stride;
    const int64_t target_of_row = target[static_cast<size_t>(row)];
    double sum = 0;
    for (int64_t column = 0; column < width; column++) {
      sum += std::exp(static_cast<double>(logits_of_row[column]));
    }
    const double expected_loss = std::log(sum) - logits_of_row[target_of_row];
    check_close("loss", row, 0, loss.get()[row], expected_loss, 1e-5);
    expected_total += expected_loss;
    for (int64_t column = 0; column < width; column++) {
      const double probability = std::exp(static_cast<double>(logits_of_row[column])) / sum;
      const double expected = probability - (column == target_of_row ? 1.0 : 0.0);
      check_close("gradient", row, column, gradient.get()[row * stride + column], expected, 1e-5);
    }
  }
  check_close("total", 0, 0, total, expected_total, 1e-4);
}

} // namespace

int main() {
  try {
    for (const int64_t width : {64, 601, 1, 33, 2048}) {
      test(/*rows=*/5, width);
    }
  } catch (const std::runtime_error& error) {
    fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  printf("%d checks, %d failed\n", checks, failed);
  return failed == 0 ? 0 : 1;
}
