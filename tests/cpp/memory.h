// Memory of exactly the size that is asked for, so that the first byte beyond it is noticed: on the heap by
// AddressSanitizer; and beside a page that nobody may touch, by the processor, which also sees what a compiler does not
// instrument (GCC's masked loads and stores) and works without any sanitizer.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <vector>

namespace gradscale::test {

enum class Place { heap, page_end, page_begin };

// A pattern that is NaN in every floating type: what is read from outside a row spoils its result.
constexpr unsigned char kUntouched = 0xff;

// Pages with a forbidden one on either side. They are used again, for mapping them anew would take most of the time.
class Pages {
 public:
  explicit Pages(int64_t bytes) : size_(std::max<int64_t>(1, (bytes + page() - 1) / page()) * page()) {
    std::vector<char*>& unused = unused_of(size_);
    if (unused.empty()) {
      void* block = mmap(nullptr, size_ + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (block == MAP_FAILED || mprotect(static_cast<char*>(block) + page(), size_, PROT_READ | PROT_WRITE) != 0) {
        std::perror("pages for the tests");
        std::exit(1);
      }
      unused.push_back(static_cast<char*>(block) + page());
    }
    begin_ = unused.back();
    unused.pop_back();
  }
  ~Pages() {
    unused_of(size_).push_back(begin_);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  char* begin() const {
    return begin_;
  }
  int64_t size() const {
    return size_;
  }

 private:
  static int64_t page() {
    return sysconf(_SC_PAGESIZE);
  }
  static std::vector<char*>& unused_of(int64_t size) {
    static std::map<int64_t, std::vector<char*>> unused;
    return unused[size];
  }

  int64_t size_;
  char* begin_ = nullptr;
};

class Memory {
 public:
  // On the heap the memory begins `offset` bytes after a multiple of 64; in a page its place is given.
  Memory(Place place, int64_t bytes, int64_t offset) : bytes_(bytes) {
    if (place == Place::heap) {
      size_ = offset + bytes;
      begin_ = static_cast<char*>(::operator new(size_, std::align_val_t(64)));
      data_ = begin_ + offset;
    } else {
      pages_ = std::make_unique<Pages>(bytes);
      begin_ = pages_->begin();
      size_ = pages_->size();
      data_ = place == Place::page_begin ? begin_ : begin_ + size_ - bytes;
    }
    clear();
  }
  ~Memory() {
    if (pages_ == nullptr) {
      ::operator delete(begin_, std::align_val_t(64));
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const {
    return data_;
  }
  int64_t bytes() const {
    return bytes_;
  }

  void clear() const {
    std::memset(begin_, kUntouched, size_);
  }

  // True if the readable bytes on both sides of the memory are unchanged.
  bool untouched_around() const {
    return untouched(begin_, data_ - begin_) && untouched(data_ + bytes_, begin_ + size_ - (data_ + bytes_));
  }

  static bool untouched(const char* begin, int64_t bytes) {
    // All are as the first one, which is as it was.
    return bytes == 0 || (static_cast<unsigned char>(*begin) == kUntouched &&
                          std::memcmp(begin, begin + 1, static_cast<size_t>(bytes - 1)) == 0);
  }

 private:
  int64_t bytes_;
  int64_t size_ = 0;
  char* begin_ = nullptr; // of what may be touched
  char* data_ = nullptr;
  std::unique_ptr<Pages> pages_;
};

} // namespace gradscale::test
