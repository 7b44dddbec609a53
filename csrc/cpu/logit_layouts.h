// How rows lie in the lanes: `Along`, one row whose neighbouring elements are neighbouring lanes; and `Beside`, as many
// short rows as there are lanes, one in each, so that no lane idles and no sum crosses lanes. A row is widened into
// scratch memory of whole vectors, where formulas do not see the difference. A layout has
//
// - kRows: the rows that it computes at once;
// - blocks(), place(), kPlaces: the vectors of a row, 2j + 1 - width of the elements of the first, and the difference
//   from one vector to the next;
// - read(rows, first, count, to, pad, map): widens rows; calls map(k, lanes) for each vector, k being 0, 1, 2 or 3 by
//   turns, and stores the result. Rows behind `count` repeat the first one. Lanes behind an element are `pad`;
// - write(rows, first, count, to, value): rounds value(at) to elements, with `at` the place of a vector in scratch
//   memory; may leave it at `to`;
// - fill(to, number): sets all elements;
// - at(j, row): the place of an element in scratch memory;
// - sum(lanes), maximum(lanes): of a row, in all of its lanes;
// - of_rows(numbers), keep(lanes, numbers): from and to a number a row.
#include "lanes.h"

#include "../math/slab.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

template <class T>
const T* row_of(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.stride;
}

// dispatch_element() of this instruction set, inlined: what the function changes stays in registers.
template <class Function>
GRADSCALE_HOST_DEVICE void with_element(Element element, Function function) {
  switch (element) {
    case Element::float64:
      return function(double());
    case Element::float32:
      return function(float());
    case Element::bfloat16:
      return function(BFloat16Bits());
    case Element::float16:
      return function(HalfBits());
    case Element::int64:
      return;
  }
}

// An element's type if it is summed in A, and otherwise A, for code that is never run.
template <class A, class T>
using NarrowOr = std::conditional_t<std::is_same_v<A, typename AccumulateType<T>::type>, T, A>;

// The vectors of a row follow its alignment in memory, so that few of them cross a cache line: the first may begin
// before the row. Vectors at its ends write elements that their neighbours write too, with the same result.
template <class A>
struct Along {
  static constexpr int kCount = Lanes<A>::kCount;
  static constexpr int kRows = 1;
  static constexpr int kPlaces = 2 * kCount;
  int64_t width;
  int64_t lead; // lanes of the first vector before the row

  GRADSCALE_HOST_DEVICE Along(int64_t width_, const Rows& rows, int64_t first)
      : width(width_), lead(lead_of(rows, first, element_size(rows.element))) {
  }
  GRADSCALE_HOST_DEVICE int64_t blocks() const {
    return (lead + width + kCount - 1) / kCount;
  }
  GRADSCALE_HOST_DEVICE Lanes<A> place() const {
    A places[kCount];
    for (int i = 0; i < kCount; ++i) {
      places[i] = static_cast<A>(2 * (i - lead) + 1 - width);
    }
    return load<A>(places);
  }
  GRADSCALE_HOST_DEVICE void fill(A* to, A number) const {
    store(to, Lanes<A>(A(0)));
    for (int64_t j = 0; j < width; j += kCount) {
      store(to + lead + j, Lanes<A>(number));
    }
    store(to + lead + width, Lanes<A>(A(0)));
  }
  GRADSCALE_HOST_DEVICE int64_t at(int64_t j, int64_t /*row*/) const {
    return lead + j;
  }
  static GRADSCALE_HOST_DEVICE Lanes<A> sum(Lanes<A> lanes) {
    return total(lanes);
  }
  static GRADSCALE_HOST_DEVICE Lanes<A> maximum(Lanes<A> lanes) {
    return largest_lane(lanes);
  }
  static GRADSCALE_HOST_DEVICE Lanes<A> of_rows(const A* numbers) {
    return *numbers;
  }
  static GRADSCALE_HOST_DEVICE void keep(Lanes<A> lanes, A* numbers) {
    *numbers = lanes.first();
  }

  template <class Map>
  GRADSCALE_HOST_DEVICE void read(const Rows& rows, int64_t first, int64_t /*count*/, A* to, A pad, Map map) const {
    store(to, Lanes<A>(pad));
    A* const begin = to + lead;
    with_element(rows.element, [&](auto type) GRADSCALE_INLINE_LAMBDA {
      using T = decltype(type);
      const T* row = row_of<T>(rows, first);
      if (width < kCount) {
        for (int64_t j = 0; j < width; ++j) {
          begin[j] = static_cast<A>(to_accumulate(row[j]));
        }
        store(begin + width, Lanes<A>(pad));
        store(begin, map(0, load<A>(begin)));
      } else {
        store(begin, map(0, load<A>(row)));
        int64_t j = kCount - lead;
        for (; j + 4 * kCount <= width; j += 4 * kCount) {
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k) {
            store(begin + j + k * kCount, map(k, load<A>(row + j + k * kCount)));
          }
        }
        for (; j + kCount <= width; j += kCount) {
          store(begin + j, map(0, load<A>(row + j)));
        }
        store(begin + width - kCount, map(1, load<A>(row + width - kCount)));
      }
    });
    store(begin + width, Lanes<A>(pad));
  }

  template <class Value>
  GRADSCALE_HOST_DEVICE void write(const Rows& rows, int64_t first, int64_t /*count*/, A* to, Value value) const {
    with_element(rows.element, [&](auto type) GRADSCALE_INLINE_LAMBDA {
      using G = NarrowOr<A, decltype(type)>;
      G* row = const_cast<G*>(row_of<G>(rows, first));
      if (width < kCount) {
        store(to + lead, value(lead));
        for (int64_t j = 0; j < width; ++j) {
          row[j] = from_accumulate<G, A>(to[lead + j]);
        }
        return;
      }
      store(row, value(lead));
      for (int64_t j = kCount - lead_of(rows, first, sizeof(G)); j + kCount <= width; j += kCount) {
        store(row + j, value(lead + j));
      }
      store(row + width - kCount, value(lead + width - kCount));
    });
  }

 private:
  static GRADSCALE_HOST_DEVICE int64_t lead_of(const Rows& rows, int64_t row, int64_t size) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.data) / size + row * rows.stride) % kCount;
  }
};

template <class A>
struct Beside {
  static constexpr int kCount = Lanes<A>::kCount;
  static constexpr int kRows = kCount;
  static constexpr int kPlaces = 2;
  static constexpr int64_t lead = 0;
  int64_t width;

  GRADSCALE_HOST_DEVICE Beside(int64_t width_, const Rows& /*rows*/, int64_t /*first*/) : width(width_) {
  }
  GRADSCALE_HOST_DEVICE int64_t blocks() const {
    return width;
  }
  GRADSCALE_HOST_DEVICE Lanes<A> place() const {
    return static_cast<A>(1 - width);
  }
  GRADSCALE_HOST_DEVICE void fill(A* to, A number) const {
    for (int64_t j = 0; j < width; ++j) {
      store(to + at(j, 0), Lanes<A>(number));
    }
  }
  static GRADSCALE_HOST_DEVICE int64_t at(int64_t j, int64_t row) {
    return j * kCount + row;
  }
  static GRADSCALE_HOST_DEVICE Lanes<A> sum(Lanes<A> lanes) {
    return lanes;
  }
  static GRADSCALE_HOST_DEVICE Lanes<A> maximum(Lanes<A> lanes) {
    return lanes;
  }
  static GRADSCALE_HOST_DEVICE Lanes<A> of_rows(const A* numbers) {
    return load<A>(numbers);
  }
  static GRADSCALE_HOST_DEVICE void keep(Lanes<A> lanes, A* numbers) {
    store(numbers, lanes);
  }

  template <class Map>
  GRADSCALE_HOST_DEVICE void read(const Rows& rows, int64_t first, int64_t count, A* to, A /*pad*/, Map map) const {
    read_tile(rows, first, count, to);
    for (int64_t j = 0; j < width; ++j) {
      store(to + at(j, 0), map(0, load<A>(to + at(j, 0))));
    }
  }

  template <class Value>
  GRADSCALE_HOST_DEVICE void write(const Rows& rows, int64_t first, int64_t count, A* to, Value value) const {
    for (int64_t j = 0; j < width; ++j) {
      store(to + at(j, 0), value(at(j, 0)));
    }
    write_tile(rows, first, count, to);
  }

 private:
  [[gnu::noinline]] void read_tile(const Rows& rows, int64_t first, int64_t count, A* to) const {
    with_element(rows.element, [&](auto type) GRADSCALE_INLINE_LAMBDA {
      using T = decltype(type);
      const auto row = [&](int64_t i) { return row_of<T>(rows, first + (i < count ? i : 0)); };
      if (width < kCount) {
        for (int i = 0; i < kCount; ++i) {
          for (int64_t j = 0; j < width; ++j) {
            to[at(j, i)] = static_cast<A>(to_accumulate(row(i)[j]));
          }
        }
        return;
      }
      each_square([&](int64_t j) GRADSCALE_INLINE_LAMBDA {
        Lanes<A> square[kCount];
        for (int i = 0; i < kCount; ++i) {
          square[i] = load<A>(row(i) + j);
        }
        transpose<1>(square);
        for (int k = 0; k < kCount; ++k) {
          store(to + at(j + k, 0), square[k]);
        }
      });
    });
  }

  [[gnu::noinline]] void write_tile(const Rows& rows, int64_t first, int64_t count, const A* from) const {
    with_element(rows.element, [&](auto type) GRADSCALE_INLINE_LAMBDA {
      using G = NarrowOr<A, decltype(type)>;
      const auto row = [&](int64_t i) { return const_cast<G*>(row_of<G>(rows, first + i)); };
      if (width < kCount) {
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t j = 0; j < width; ++j) {
            row(i)[j] = from_accumulate<G, A>(from[at(j, i)]);
          }
        }
        return;
      }
      each_square([&](int64_t j) GRADSCALE_INLINE_LAMBDA {
        Lanes<A> square[kCount];
        for (int k = 0; k < kCount; ++k) {
          square[k] = load<A>(from + at(j + k, 0));
        }
        transpose<1>(square);
        for (int64_t i = 0; i < count; ++i) {
          store(row(i) + j, square[i]);
        }
      });
    });
  }

  // Calls function(first element) for squares of rows; the last one repeats elements of the one before it.
  template <class Function>
  GRADSCALE_HOST_DEVICE void each_square(Function function) const {
    for (int64_t j = 0; j < width; j += kCount) {
      function(j + kCount <= width ? j : width - kCount);
    }
  }
};

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
