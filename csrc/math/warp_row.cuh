// Rows of logits that a warp keeps in its registers, and walks over: while a row is reduced and stored, the next one is
// on its way. Widths are known at compile time, beginnings of rows are not.
#pragma once

#include "rows.cuh"
#include "words.cuh"

namespace gradscale {

constexpr int kWindow = 4; // elements that a lane reads and writes at once: 16 bytes of float, 8 of halves

// Integers are ordered as the floats of these bits are, so that one instruction reduces them. A lane's NaN is beyond
// all numbers, or below.
GRADSCALE_DEVICE int32_t ordered(int32_t bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

GRADSCALE_DEVICE float warp_maximum(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  for (int distance = 16; distance > 0; distance /= 2) {
    value = larger(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
#else
  return bit_cast<float>(ordered(__reduce_max_sync(kWholeWarp, ordered(bit_cast<int32_t>(value)))));
#endif
}

// A number that all lanes have: the compiler learns that they do, and that branches on it do not part them.
GRADSCALE_DEVICE int32_t uniform(int32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, value);
#else
  return value;
#endif
}

GRADSCALE_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  }
  return value;
}

// Two sums at once: half of the warp adds up the one, half the other.
GRADSCALE_DEVICE void warp_sums(float& a, float& b, int lane) {
  const bool upper = lane >= 16;
  float own = upper ? b : a;
  own += __shfl_xor_sync(kWholeWarp, upper ? a : b, 16);
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    own += __shfl_xor_sync(kWholeWarp, own, distance);
  }
  a = __shfl_sync(kWholeWarp, own, 0);
  b = __shfl_sync(kWholeWarp, own, 16);
}

// The begin of the window that an element lies in.
template <class T>
GRADSCALE_DEVICE T* window_of(T* element) {
  const uintptr_t window = reinterpret_cast<uintptr_t>(element) & ~static_cast<uintptr_t>(kWindow * sizeof(T) - 1);
  return kept(reinterpret_cast<T*>(window));
}

// Where a row lies in a warp's windows: lane l has windows l, 32 + l, ... from the one on that has the first element.
template <int width>
struct RowPlace {
  static constexpr int kWindows = ((width + 2 * (kWindow - 1)) / kWindow + 31) / 32; // of a lane
  static constexpr int kLast = kWindows - 1;
  // The last windows may all be empty; then those before have the end of the row.
  static constexpr int kFirstWithEnd = width <= 128 * kLast ? kLast - 1 : kLast;
  int32_t shift; // elements of the first window that come before the row
  int32_t lane;

  // Elements of this lane's first window that come before the row.
  GRADSCALE_DEVICE int32_t begin() const {
    return lane == 0 ? shift : 0;
  }
  // Elements of this lane's window c, from the window's begin on, that come before the row's end; more than a window
  // has, or less than none.
  GRADSCALE_DEVICE int32_t end(int c) const {
    return width + shift - kWindow * (lane + 32 * c);
  }
  // Whether the lane's window c may reach beyond the row, and element k of it does.
  GRADSCALE_DEVICE bool is_outside(int c, int k) const {
    return (c == 0 && k < kWindow - 1 && k < begin()) || (c >= kFirstWithEnd && k >= end(c));
  }
};

// A row of logits of type T, float or a half type, as it was read.
template <class T, int width>
class WarpRow {
  using Place = RowPlace<width>;
  static constexpr int kWindows = Place::kWindows;
  static constexpr int kWords = sizeof(T);

 public:
  using Exponentials = float[kWindows][kWindow];

  GRADSCALE_DEVICE explicit WarpRow(int lane) : place_{0, lane} {
  }

  // Asks for a row, of which `own` is element kWindow * lane. Windows at its ends are read whole; they begin at
  // multiples of their size, so that they are in one page with elements of the row.
  GRADSCALE_DEVICE void load(const T* own) {
    place_.shift = static_cast<int32_t>(reinterpret_cast<uintptr_t>(own) / sizeof(T) % kWindow);
    const T* const from = window_of(own);
#pragma unroll
    for (int c = 0; c < kWindows; ++c) {
      if (c < Place::kLast || place_.end(c) > 0) {
        load_window(from + 128 * c, own - kWindow * place_.lane, words_[c]);
      }
    }
  }

  GRADSCALE_DEVICE Place place() const {
    return place_;
  }

  // The largest element; what is outside the row becomes -inf. Passes NaN over, as far as sums become NaN.
  GRADSCALE_DEVICE float maximum() {
    clear_outside();
    if constexpr (sizeof(T) == 4) {
      float largest[2] = {value(0, 0), value(0, 1)};
#pragma unroll
      for (int i = 2; i < kWindow * kWindows; ++i) {
        largest[i % 2] = larger(largest[i % 2], value(i / kWindow, i % kWindow));
      }
      return warp_maximum(larger(largest[0], largest[1]));
    } else {
      uint32_t largest[2] = {words_[0][0], words_[0][1]};
#pragma unroll
      for (int i = 2; i < kWords * kWindows; ++i) {
        largest[i % 2] = larger_halves(T(), largest[i % 2], words_[i / kWords][i % kWords]);
      }
      const uint32_t both = larger_halves(T(), largest[0], largest[1]);
      return warp_maximum(larger(low_half(T(), both), high_half(T(), both)));
    }
  }

  // An element of this lane.
  GRADSCALE_DEVICE float value(int c, int k) const {
    if constexpr (sizeof(T) == 4) {
      return bit_cast<float>(words_[c][k]);
    } else {
      return k % 2 == 0 ? low_half(T(), words_[c][k / 2]) : high_half(T(), words_[c][k / 2]);
    }
  }

 private:
  // On a CPU only elements of the row are read, and the others are NaN.
  GRADSCALE_DEVICE static void load_window(const T* from, const T* row, uint32_t (&words)[kWords]) {
#if defined(__CUDACC__)
    const auto window = load_packed<T, kWindow>(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = window.words[i];
    }
#else
    simt::check_aligned(from, kWindow * sizeof(T), "load");
    memset(words, 0xff, sizeof(words));
    for (int k = 0; k < kWindow; ++k) {
      if (from + k >= row && from + k < row + width) {
        memcpy(reinterpret_cast<T*>(words) + k, from + k, sizeof(T));
      }
    }
#endif
  }

  // Sets what is outside the row to -inf.
  GRADSCALE_DEVICE void clear_outside() {
#pragma unroll
    for (int c = 0; c < kWindows; ++c) {
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int k = 0; k < kWindow; ++k) {
          words_[c][k] = place_.is_outside(c, k) ? 0xff800000u : words_[c][k];
        }
      } else {
        constexpr uint32_t infinite = negative_infinity(T()) * 0x10001u;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          if (c == 0) {
            const uint32_t inside = ones_from(16 * place_.begin() - 32 * i);
            words_[c][i] = (words_[c][i] & inside) | (infinite & ~inside);
          }
          if (c >= Place::kFirstWithEnd) {
            const uint32_t outside = ones_from(16 * place_.end(c) - 32 * i);
            words_[c][i] = (words_[c][i] & ~outside) | (infinite & outside);
          }
        }
      }
    }
  }

  Place place_;
  uint32_t words_[kWindows][kWords];
};

// What a row's softmax comes to: p_j = exp(x_j - maximum) / sum.
struct WarpSoftmax {
  float maximum;
  float sum;
  float moment;  // sum of exp(x_j - maximum) (j - (width - 1) / 2)
  float shifted; // sum of x_j - maximum, where it is asked for
};

// Takes exponentials of a row and this lane's part of their sums. They are exactly 1 for equal logits, so that the
// moment adds up whole numbers, exactly.
template <bool shifts, class T, int width>
GRADSCALE_DEVICE WarpSoftmax
exponentials_of(const WarpRow<T, width>& row, float maximum, typename WarpRow<T, width>::Exponentials& e) {
  constexpr int windows = RowPlace<width>::kWindows;
  constexpr int middle = windows / 2;
  const RowPlace<width> place = row.place();
  float sum[2] = {0, 0}, moment[2] = {0, 0}, shifted = 0;
#pragma unroll
  for (int i = 0; i < kWindow * windows; ++i) {
    const int c = i / kWindow, k = i % kWindow;
    const float difference = row.value(c, k) - maximum;
    if (shifts) {
      shifted += place.is_outside(c, k) ? 0.0f : difference;
    }
    e[c][k] = approximate_exp(difference);
    const int weight = 128 * (c - middle) + k;
    sum[i % 2] = i < 2 ? e[c][k] : sum[i % 2] + e[c][k];
    moment[i % 2] += weight == 0 ? 0.0f : e[c][k] * static_cast<float>(weight);
  }
  const float first = static_cast<float>(kWindow * place.lane + 128 * middle - place.shift) - 0.5f * (width - 1);
  const float of_lane = sum[0] + sum[1];
  return {maximum, of_lane, moment[0] + moment[1] + of_lane * first, shifted};
}

template <int value>
using Constant = std::integral_constant<int, value>;

// Walks over `count` rows, of which the first has been asked for. `own` is element kWindow * lane of the row: all row
// pointers here are such. next(i, k, own, exists) asks for what row i needs besides, if there is one, and use(i, k,
// own, place, e, softmax, asked) has what row i came to and what next() returned; k, a Constant, is i modulo
// `together`, 1 or
// 2. All lanes of the warp take part.
template <bool shifts, int together, class T, int width, class Next, class Use>
GRADSCALE_DEVICE void walk_rows(WarpRow<T, width>& row, const T* own, int64_t stride, int count, Next next, Use use) {
  auto asked = next(0, Constant<0>(), own, true);
  const auto take = [&](int i, auto k) {
    const RowPlace<width> place = row.place();
    typename WarpRow<T, width>::Exponentials e;
    WarpSoftmax softmax = exponentials_of<shifts>(row, row.maximum(), e);
    const T* const of_row = own;
    const bool has_next = i + 1 < count;
    own += stride;
    const auto asked_next = next(i + 1, Constant<(decltype(k)::value + 1) % together>(), own, has_next);
    if (has_next) {
      row.load(own);
    }
    warp_sums(softmax.sum, softmax.moment, place.lane);
    if (shifts) {
      softmax.shifted = warp_sum(softmax.shifted);
    }
    use(i, k, of_row, place, e, softmax, asked);
    asked = asked_next;
  };
#pragma unroll 1
  for (int i = 0; i < count; i += together) {
    take(i, Constant<0>());
    if constexpr (together > 1) {
      if (i + 1 < count) {
        take(i + 1, Constant<1>());
      }
    }
  }
}

// Stores a row of G that begins where the logits' row does in its windows.
template <int width, class G>
GRADSCALE_DEVICE void store_row(
    G* own, const RowPlace<width>& place, const float (&values)[RowPlace<width>::kWindows][kWindow]) {
  using Place = RowPlace<width>;
  G* const to = window_of(own);
#pragma unroll
  for (int c = 0; c < Place::kWindows; ++c) {
    const Packed<G, kWindow> window = packed<G, kWindow>(values[c]);
    const bool has_begin = c == 0 && place.begin() > 0;
    const bool has_end = c >= Place::kFirstWithEnd && place.end(c) < kWindow;
    if (!has_begin && !has_end) {
      store_packed(to + 128 * c, window);
    }
    const int32_t from = has_begin ? place.shift : kWindow; // of the part at the begin
    const int32_t to_end = has_end ? place.end(c) : 0;      // of the part at the end, which another lane has
#pragma unroll
    for (int k = 0; k < kWindow; ++k) {
      if ((c == 0 && k > 0 && k >= from) || (c >= Place::kFirstWithEnd && k < kWindow - 1 && k < to_end)) {
        store_packed(to + 128 * c + k, element_of(window, k));
      }
    }
  }
}

// The same, where rows of G begin at other places in their windows: element by element.
template <int width, class G>
GRADSCALE_DEVICE void store_elements(
    G* own, const RowPlace<width>& place, const float (&values)[RowPlace<width>::kWindows][kWindow]) {
  G* const to = own - place.shift;
#pragma unroll
  for (int c = 0; c < RowPlace<width>::kWindows; ++c) {
#pragma unroll
    for (int k = 0; k < kWindow; ++k) {
      if (!place.is_outside(c, k)) {
        store_packed(to + 128 * c + k, packed<G, 1>(&values[c][k]));
      }
    }
  }
}

} // namespace gradscale
