// Policies that are too wide for the registers of a warp: WideRows is their kind of rows for loss_rows.
//
// It is a family of its own, next to lane_rows.cuh: in lane_rows.cuh a warp owns up to 32 rows, whose numbers its lanes
// hold, and exchanges data without barriers; here a row has thousands of elements, and needs the registers of a block.
#pragma once

#include "../../cuda/lanes.cuh"
#include "../../formulas/cross_entropy.h"
#include "../../formulas/targets.h"
#include "block_of_rows.cuh"

namespace gradscale {

// A block owns a row of `width` logits T. U is the type of its target: probabilities, or int64_t for a class. G is the
// type of its gradient (void: none is wanted). A thread owns every kRowThreads-th vector of `vector_size` elements,
// issues the loads of all its vectors of logits and targets before it waits for the first, and keeps them in registers
// as they are in memory. If there are too many, targets are loaded again for the gradient, from the cache. If vectors
// are not aligned (`at_once` is false), their elements are accessed one by one, so that the order of sums depends only
// on the width and the types. Bytes: logits and targets are read once, gradients are written once.
template <class T, class U, class G, int width, int vector_size, bool at_once, int options>
class WideRows {
  static constexpr bool kIsClass = std::is_same_v<U, int64_t>, kSmooths = (options & kSmoothing) != 0;
  static constexpr bool kOneHot = kIsClass && !kSmooths; // its targets, 0 for all but one action, cost nothing
  using Gradient = std::conditional_t<std::is_same_v<G, void>, T, G>;
  using Probability = std::conditional_t<kIsClass, float, U>;
  using Formula = CrossEntropy<float, options>;
  static constexpr int kStep = vector_size * kRowThreads; // elements from one vector of a thread to its next
  static constexpr int kVectors = (width + kStep - 1) / kStep, kWarps = kRowThreads / 32, kSums = Formula::kSums;
  template <class Element>
  static constexpr int kWords = kVectors * ((vector_size * static_cast<int>(sizeof(Element)) + 3) / 4); // registers
  static_assert(kWarps == 4);
  static constexpr bool kKeepsTargets = !kIsClass && kWords<T> + kWords<Probability> <= kMostWideWords;
  static constexpr int kReadAhead = 16 / vector_size; // vectors of targets in flight, if they are loaded twice
  static constexpr int kOthers =
      (kKeepsTargets ? kWords<Probability> : (kIsClass ? 8 : 32)) + (Formula::kHasEntropy ? 68 : 44);
  static constexpr int kRegisters = (kWords<T> + kOthers + 7) / 8 * 8;
  // The numbers of each warp in shared memory.
  enum { kMaximum, kFactor, kFirstSum, kSquare = kFirstSum + kSums, kLargest, kNumbers };

  const BlockOfRows& block_;
  const int64_t row_ = block_.index;
  const int thread_ = block_.thread;
  const Probability* const targets_from_ =
      first(static_cast<const Probability*>(block_.segment.target.data), block_.segment.target.stride);
  Vector<T, vector_size> logits_[kVectors];
  Vector<Probability, vector_size> targets_[kVectors];
  int32_t class_ = 0;     // as class_of() returns it
  float class_logit_ = 0; // in thread 0

 public:
  static constexpr int kBlocks = 65536 / kRowThreads / (kRegisters < 64 ? 64 : (kRegisters > 256 ? 256 : kRegisters));
  static constexpr int kSharedBytes = kNumbers * kWarps * 4;

  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    WideRows(block).compute();
  }

 private:
  GRADSCALE_DEVICE explicit WideRows(const BlockOfRows& block) : block_(block) {
    const Segment& s = block.segment;
    const T* const from = first(static_cast<const T*>(s.prediction.data), s.prediction.stride);
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      if (exists(c)) {
        logits_[c] = loaded(from + kStep * c);
        if constexpr (kKeepsTargets) {
          targets_[c] = loaded(targets_from_ + kStep * c);
        }
      }
    }
    if constexpr (kIsClass) {
      const int64_t index = static_cast<const int64_t*>(s.target.data)[row_ * s.target.stride];
      class_ = class_of(index, width);
      if (thread_ == 0 && class_ >= 0) {
        class_logit_ = to_accumulate(static_cast<const T*>(s.prediction.data)[row_ * s.prediction.stride + class_]);
      }
    }
    if (thread_ >= kRowThreads - 32) { // one warp; the others get the factor after a barrier
      const RowFactor factor = block.factor_of(row_);
      if (thread_ == kRowThreads - 1) {
        shared(kFactor, 0) = static_cast<float>(factor.coefficient);
        shared(kFactor, 1) = factor.counts ? 1 : 0;
      }
    }
  }

  template <class Element>
  GRADSCALE_DEVICE static Vector<Element, vector_size> loaded(const Element* from) {
    if constexpr (at_once) {
      return load_vector<Element, vector_size>(from);
    } else {
      return load_elements<Element, vector_size>(from);
    }
  }

  // The address of this thread's first element of the row.
  template <class Element>
  GRADSCALE_DEVICE Element* first(Element* data, int64_t stride) const {
    return kept(data + row_ * stride + vector_size * thread_);
  }

  // True if vector c is inside the row. The result is a compile-time constant, except for the last vector.
  GRADSCALE_DEVICE bool exists(int c) const {
    return kStep * (c + 1) <= width || kStep * c + vector_size * thread_ < width;
  }

  // Makes the compiler repeat computations with these elements, instead of keeping their results in registers.
  template <class Vectors>
  GRADSCALE_DEVICE static void forget(Vectors& vectors) {
#pragma unroll
    for (auto& packed : vectors) {
#pragma unroll
      for (auto& word : packed.words) {
        if constexpr (sizeof(word) == 2) {
          asm volatile("" : "+h"(word));
        } else {
          asm volatile("" : "+r"(word));
        }
      }
    }
  }

  // Calls function(c, logits, targets) for the vectors inside of the row.
  template <class Function>
  GRADSCALE_DEVICE void each_vector(Function function) {
    forget(logits_);
    if constexpr (kKeepsTargets) {
      forget(targets_);
    }
    class_ = opaque(class_);
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      if (!kKeepsTargets && !kIsClass && c > 0 && c % kReadAhead == 0) {
        __syncwarp(); // the following loads, which are not load_vector(), are not issued before
      }
      if (!exists(c)) {
        continue;
      }
      float x[vector_size], t[vector_size];
      unpack(logits_[c], x);
      if constexpr (kKeepsTargets) {
        unpack(targets_[c], t);
      } else if constexpr (!kIsClass && at_once) {
        unpack(*reinterpret_cast<const Vector<Probability, vector_size>*>(targets_from_ + kStep * c), t);
      } else if constexpr (!kIsClass) {
#pragma unroll
        for (int k = 0; k < vector_size; ++k) {
          t[k] = static_cast<float>(to_accumulate(targets_from_[kStep * c + k]));
        }
      }
#pragma unroll
      for (int k = 0; k < vector_size; ++k) {
        if constexpr (kIsClass) {
          t[k] = class_mass(class_, kStep * c + vector_size * thread_ + k);
        }
        if constexpr (kSmooths) {
          t[k] = Smoothing<float>(block_.head.label_smoothing, width).smoothed(t[k]);
        }
      }
      function(c, x, t);
    }
  }

  GRADSCALE_DEVICE float& shared(int number, int warp) const {
    return reinterpret_cast<float*>(block_.shared)[number * kWarps + warp];
  }
  GRADSCALE_DEVICE void put(int number, float of_warp) const {
    if (thread_ % 32 == 0) {
      shared(number, thread_ / 32) = of_warp;
    }
  }
  // The sum of the numbers of all warps, after a barrier.
  GRADSCALE_DEVICE float sum(int number) const {
    return (shared(number, 0) + shared(number, 1)) + (shared(number, 2) + shared(number, 3));
  }
  GRADSCALE_DEVICE float maximum(int number) const {
    return larger(larger(shared(number, 0), shared(number, 1)), larger(shared(number, 2), shared(number, 3)));
  }

  GRADSCALE_DEVICE void compute() {
    VectorExtremes<T, vector_size> extremes;
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      if (exists(c)) {
        extremes.add(logits_[c]);
      }
    }
    put(kMaximum, lane_maximum<32>(extremes.maximum()));
    float largest = extremes.magnitude(), sums[kSums] = {};
    if (__any_sync(kWholeWarp, !(largest < INFINITY))) { // rarely; each_vector() needs all lanes of the warp
      largest = add_illegal(sums);
    }
    put(kLargest, lane_maximum<32>(largest));
    __syncthreads();
    const BinaryExponent exponent(maximum(kMaximum));
    each_vector([&](int, const float* x, const float* t) {
#pragma unroll
      for (int k = 0; k < vector_size; ++k) {
        const float d = exponent.difference(x[k]), e = exponent.exponential(d);
        if constexpr (kOneHot) {
          Formula::add_exponential(sums, e, Formula::weighted(e, d));
        } else {
          Formula::add(sums, e, t[k], Formula::correct_finite(t[k], d), Formula::weighted(e, d));
        }
      }
    });
    if (kOneHot && thread_ == 0) {
      sums[Formula::kCorrect] = exponent.difference(class_logit_);
    }
    lane_sums<32, kSums>(sums, thread_ % 32);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      put(kFirstSum + i, sums[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i] = sum(kFirstSum + i);
    }
    if constexpr (kIsClass) {
      sums[Formula::kMass] = class_ < 0 ? NAN : 1.0f;
    }
    const bool counts = shared(kFactor, 1) != 0;
    if constexpr (!std::is_same_v<G, void>) {
      put(kSquare, lane_sum<32>(write_gradient(exponent, sums, counts)));
      __syncthreads();
    }
    if (thread_ == 0) {
      sums[Formula::kWeighted] *= exponent.unit();
      sums[Formula::kCorrect] *= exponent.unit();
      const auto formula = Formula::of(block_.head);
      const double square = std::is_same_v<G, void> ? 0 : sum(kSquare);
      block_.store(row_, counts, formula.loss(sums), Formula::entropy(sums), {square, maximum(kLargest)});
    }
  }

  // Adds the targets of illegal actions (-inf) to the sums. Returns this thread's largest magnitude of finite logits.
  GRADSCALE_DEVICE float add_illegal(float (&sums)[kSums]) {
    float largest = 0;
    each_vector([&](int, const float* x, const float* t) {
#pragma unroll
      for (int k = 0; k < vector_size; ++k) {
        largest = larger(largest, finite_magnitude(x[k]));
        Formula::add_illegal(sums, x[k], kOneHot ? 0.0f : t[k]);
      }
    });
    return largest;
  }

  GRADSCALE_DEVICE static void store(Gradient* to, const float (&values)[vector_size]) {
    constexpr int count = at_once ? vector_size : 1;
#pragma unroll
    for (int k = 0; k < vector_size; k += count) {
      store_vector(to + k, packed<Gradient, count>(values + k));
    }
  }

  // Returns this thread's part of the sum of squares.
  GRADSCALE_DEVICE float write_gradient(const BinaryExponent& exponent, const float (&sums)[kSums], bool counts) {
    const Segment& s = block_.segment;
    Gradient* const to = first(static_cast<Gradient*>(s.gradient.data), s.gradient.stride);
    const auto formula = Formula::of(block_.head).in_unit(exponent.unit());
    const auto factors = Formula::factors(sums, approximate_reciprocal(sums[Formula::kSum]), shared(kFactor, 0));
    float square = 0;
    each_vector([&](int c, const float* x, const float* t) {
      float gradient[vector_size];
      // Only one vector of a row has a target that is not 0.
      const bool has_target = static_cast<uint32_t>(class_ - kStep * c - vector_size * thread_) < vector_size;
      const auto compute = [&](int k, float target) {
        const float d = exponent.difference(x[k]);
        gradient[k] = formula.gradient(factors, exponent.exponential(d), d, target);
      };
#pragma unroll
      for (int k = 0; k < vector_size; ++k) {
        compute(k, kOneHot ? 0.0f : t[k]);
      }
      if (kOneHot && has_target) {
        asm volatile(""); // keeps the branch, instead of choices for all elements
#pragma unroll
        for (int k = 0; k < vector_size; ++k) {
          compute(k, t[k]);
        }
      }
#pragma unroll
      for (float value : gradient) {
        square = fmaf(value, value, square);
      }
      store(to + kStep * c, gradient);
    });
    if (!counts) { // rarely: the branch costs less than a choice for each element
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        if (exists(c)) {
          const float zeros[vector_size] = {};
          store(to + kStep * c, zeros);
        }
      }
    }
    return square;
  }
};

} // namespace gradscale
