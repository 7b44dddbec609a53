// A library for LD_PRELOAD that replaces posix_memalign, with which PyTorch allocates tensors, so that accesses outside
// of a tensor crash. The tensor's memory ends at an inaccessible page or, with GUARDED=begin, begins right after one.
// Freed memory is inaccessible too. A process may have 65,530 mappings, and a tensor takes two: while there are more
// than kMostGuarded tensors, further ones are not guarded.
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" void __libc_free(void* memory);
extern "C" void* __libc_memalign(size_t alignment, size_t bytes);

namespace {

constexpr size_t kPage = 4096, kRegion = size_t(1) << 36, kMostGuarded = 20000;

char* region() {
  static char* const begin =
      static_cast<char*>(mmap(nullptr, kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return begin;
}

std::atomic<size_t> used{0}, guarded{0};

} // namespace

// Layout: a page that stores the size and is then made inaccessible, the pages of the memory, and an inaccessible page.
extern "C" int posix_memalign(void** memory, size_t alignment, size_t bytes) noexcept {
  if (guarded >= kMostGuarded) {
    *memory = __libc_memalign(alignment, bytes);
    return *memory == nullptr ? ENOMEM : 0;
  }
  const size_t size = (bytes + kPage - 1) / kPage * kPage, place = used.fetch_add(size + 2 * kPage);
  if (region() == MAP_FAILED || place + size + 2 * kPage > kRegion) {
    return ENOMEM;
  }
  char* const header = region() + place;
  if (mprotect(header, kPage + size, PROT_READ | PROT_WRITE) != 0) {
    return ENOMEM;
  }
  memcpy(header, &size, sizeof(size));
  mprotect(header, kPage, PROT_NONE);
  ++guarded;
  static const bool at_begin = getenv("GUARDED") != nullptr && strcmp(getenv("GUARDED"), "begin") == 0;
  *memory = header + kPage + (at_begin ? 0 : size - bytes);
  return 0;
}

extern "C" void free(void* memory) noexcept {
  const auto place = static_cast<size_t>(static_cast<char*>(memory) - region());
  if (place >= kRegion) {
    return __libc_free(memory);
  }
  char* const header = region() + (place / kPage - 1) * kPage;
  mprotect(header, kPage, PROT_READ);
  size_t size = 0;
  memcpy(&size, header, sizeof(size));
  mprotect(header, kPage + size, PROT_NONE);
  madvise(header, kPage + size, MADV_DONTNEED);
  --guarded;
}
