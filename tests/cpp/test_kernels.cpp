// Tests of the kernels in every variant that is linked: of the CPU kernels for the instruction sets that this machine
// has, or of the CUDA kernels in the simulator. Exit status 0: all is well.
//
//   test_kernels                 all of them
//   test_kernels --list          the variants
//   test_kernels NAME [PLACE]    one variant; memory in one place only: heap, page, or misaligned, a fault
#include "cases.h"

#include <csignal>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#define GRADSCALE_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GRADSCALE_SANITIZED 1
#endif
#endif
#ifdef GRADSCALE_SANITIZED
#include <sanitizer/common_interface_defs.h>
// UBSan calls it with each of its reports.
extern "C" void __ubsan_on_report();
#endif

namespace gradscale::test {

namespace {

Selection selected(const std::string& name, const std::string& place) {
  const Selection all = everything();
  Selection selection;
  for (const Variant& variant : all.variants) {
    if (name.empty() || name == variant.name) {
      selection.variants.push_back(variant);
    }
  }
  selection.widths = all.widths;
  if (place == "misaligned") {
    selection.layouts.push_back({Place::heap, 0, 0, /*misalignment=*/1});
    return selection;
  }
  for (const Layout& layout : all.layouts) {
    if (place.empty() || (place == "heap") == (layout.place == Place::heap)) {
      selection.layouts.push_back(layout);
    }
  }
  return selection;
}

void say_where() {
  const char* current = Report::get().current();
  [[maybe_unused]] const auto written = write(STDERR_FILENO, current, std::strlen(current));
}

// Whatever ends the program also says which case it was in.
void expect_the_worst() {
#ifdef GRADSCALE_SANITIZED
  __sanitizer_set_death_callback(say_where);
#else
  const auto handler = [](int) {
    say_where();
    _exit(1);
  };
  std::signal(SIGSEGV, handler);
  std::signal(SIGBUS, handler);
#endif
}

int main(int count, char** arguments) {
  const std::string name = count > 1 ? arguments[1] : "";
  if (name == "--list") {
    for (const Variant& variant : everything().variants) {
      std::printf("%s\n", variant.name);
    }
    return 0;
  }
  expect_the_worst();
  const Selection selection = selected(name, count > 2 ? arguments[2] : "");
  test_rows(selection);
  test_decode(selection);
  if (selection.variants[0].kernels.power_sum != nullptr) { // as the CPU's kernels have it
    test_elements(selection);
  }
  const Report& report = Report::get();
  std::printf("%lld checks, %d failed\n", static_cast<long long>(report.checks()), report.failures());
  return report.failures() == 0 ? 0 : 1;
}

} // namespace

} // namespace gradscale::test

#ifdef GRADSCALE_SANITIZED
void __ubsan_on_report() {
  gradscale::test::say_where();
}
#endif

int main(int count, char** arguments) {
  return gradscale::test::main(count, arguments);
}
