// Element types, converted the slow and obvious way, and rows of them in memory of exactly their size.
#pragma once

#include "cpu/scratch.h"
#include "loss/segment.h"
#include "memory.h"

#include <cmath>
#include <limits>
#include <string>

namespace gradscale::test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

constexpr Element kFloating[] = {Element::float32, Element::float64, Element::bfloat16, Element::float16};

struct Format {
  const char* name;
  int mantissa; // bits behind the point
  int smallest; // exponent of a normal number
  int largest;
};

inline Format format_of(Element element) {
  switch (element) {
    case Element::float64:
      return {"float64", 52, -1022, 1023};
    case Element::float32:
      return {"float32", 23, -126, 127};
    case Element::bfloat16:
      return {"bfloat16", 7, -126, 127};
    case Element::float16:
      return {"float16", 10, -14, 15};
    case Element::int64:
      return {"int64", 63, 0, 63};
  }
  return {};
}

inline const char* name_of(Element element) {
  return format_of(element).name;
}

// The type that sums over elements are taken in.
inline Element wide(Element element) {
  return element == Element::float64 ? Element::float64 : Element::float32;
}

inline uint16_t encode_16_bits(double x, const Format& format) {
  const int sign = std::signbit(x) ? 0x8000 : 0;
  const int infinity = (format.largest - format.smallest + 2) << format.mantissa;
  if (std::isnan(x)) {
    return static_cast<uint16_t>(infinity | 1 << (format.mantissa - 1));
  }
  const double magnitude = std::fabs(x);
  if (magnitude >= std::ldexp(1.0, format.largest + 1)) {
    return static_cast<uint16_t>(sign | infinity);
  }
  const int exponent = magnitude == 0 ? format.smallest : std::max(std::ilogb(magnitude), format.smallest);
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa - exponent));
  // The leading bit, and what rounding carries over, count the exponent up.
  const int bits = ((exponent - format.smallest) << format.mantissa) + static_cast<int>(units);
  return static_cast<uint16_t>(sign | bits);
}

inline double decode_16_bits(uint16_t bits, const Format& format) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = (bits & 0x7fff) >> format.mantissa;
  const int fraction = bits & ((1 << format.mantissa) - 1);
  if (exponent == format.largest - format.smallest + 2) {
    return fraction != 0 ? kNaN : sign * kInfinity;
  }
  const int unit = format.smallest - format.mantissa;
  return exponent == 0 ? sign * std::ldexp(fraction, unit)
                       : sign * std::ldexp(fraction + (1 << format.mantissa), exponent - 1 + unit);
}

inline double read_element(const char* from, Element element) {
  switch (element) {
    case Element::float64: {
      double value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    case Element::float32: {
      float value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    case Element::int64: {
      int64_t value;
      std::memcpy(&value, from, sizeof(value));
      return static_cast<double>(value);
    }
    default: {
      uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      return decode_16_bits(bits, format_of(element));
    }
  }
}

inline void write_element(char* to, Element element, double value) {
  if (element == Element::float64) {
    std::memcpy(to, &value, sizeof(value));
  } else if (element == Element::float32) {
    const float narrow = static_cast<float>(value);
    std::memcpy(to, &narrow, sizeof(narrow));
  } else {
    const uint16_t bits = encode_16_bits(value, format_of(element));
    std::memcpy(to, &bits, sizeof(bits));
  }
}

// `value` as an element of this type.
inline double rounded(double value, Element element) {
  char memory[8];
  write_element(memory, element, value);
  return read_element(memory, element);
}

// What rounding a number to this type may change.
inline double rounding_error(double value, Element element) {
  const Format format = format_of(element);
  if (value == 0 || !std::isfinite(value)) {
    return std::ldexp(0.5, format.smallest - format.mantissa);
  }
  return std::ldexp(0.5, std::max(std::ilogb(value), format.smallest) - format.mantissa);
}

// Where rows lie: how far after a multiple of 64 bytes, and how far apart, in elements.
struct Layout {
  Place place = Place::heap;
  int64_t offset = 0;
  int64_t gap = 0;
  int64_t misalignment = 0; // in bytes, which UBSan must notice

  std::string name() const {
    const char* places[] = {"heap", "end of a page", "begin of a page"};
    return std::string(places[static_cast<int>(place)]) + " offset " + std::to_string(offset) + " gap " +
           std::to_string(gap);
  }
};

constexpr Layout kLayouts[] = {
    {Place::heap, 0, 0},
    {Place::heap, 1, 0},
    {Place::heap, 3, 0},
    {Place::heap, 1, 5},
    {Place::page_end, 0, 0},
    {Place::page_end, 0, 3},
    {Place::page_begin, 0, 0},
};

class RowBuffer {
 public:
  // As many elements as `missing` says are left out at the end.
  RowBuffer(const Layout& layout, Element element, int64_t count, int64_t width, int64_t missing = 0)
      : element_(element),
        count_(count),
        width_(width),
        stride_(width + layout.gap),
        size_(element_size(element)),
        memory_(
            layout.place,
            count == 0 ? 0 : ((count - 1) * stride_ + width - missing) * size_,
            layout.offset * size_ + layout.misalignment) {
  }

  Rows rows() const {
    return {memory_.data(), stride_, element_};
  }
  char* data() const {
    return memory_.data();
  }
  Element element() const {
    return element_;
  }
  int64_t count() const {
    return count_;
  }
  int64_t width() const {
    return width_;
  }
  int64_t stride() const {
    return stride_;
  }

  double get(int64_t row, int64_t j = 0) const {
    return read_element(at(row, j), element_);
  }
  void set(int64_t row, int64_t j, double value) const {
    write_element(at(row, j), element_, value);
  }
  void set_bits(int64_t row, int64_t j, uint64_t bits) const {
    std::memcpy(at(row, j), &bits, size_);
  }

  void clear() const {
    memory_.clear();
  }

  bool untouched_outside() const {
    for (int64_t row = 0; row + 1 < count_; ++row) {
      if (!Memory::untouched(at(row, width_), (stride_ - width_) * size_)) {
        return false;
      }
    }
    return memory_.untouched_around();
  }
  bool untouched_row(int64_t row) const {
    return Memory::untouched(at(row, 0), width_ * size_);
  }

  std::vector<char> contents() const {
    return {memory_.data(), memory_.data() + memory_.bytes()};
  }

 private:
  char* at(int64_t row, int64_t j) const {
    return memory_.data() + (row * stride_ + j) * size_;
  }

  Element element_;
  int64_t count_;
  int64_t width_;
  int64_t stride_;
  int64_t size_;
  Memory memory_;
};

} // namespace gradscale::test
