// Rows of groups of logits that lanes keep in registers: CategoricalKL. DivergenceRows is their kind of rows for
// loss_rows.
//
// It is a family of its own, next to lane_rows.cuh: there a row is one distribution, here it has many, whose maxima and
// sums are exchanged among a few lanes each.
#pragma once

#include "../own_heads.h"
#include "lane_losses.cuh"

namespace gradscale {

constexpr Mixture mixture_of(int options) {
  return (options & kMixesProbabilities) != 0 ? Mixture::probabilities
         : (options & kMixesLogarithms) != 0  ? Mixture::logarithms
                                              : Mixture::none;
}

// `lanes_per_row` lanes of a warp own a row of `groups` groups of `classes` logits T, with targets U of the same shape
// and gradients G (void: none is wanted). lanes_of_group() lanes own a group: each has every kLanes-th vector of
// `vector_size` classes, and at most kMostClassesOfLane classes. The lanes of a row compute kGroupsAtOnce groups side
// by side in each turn, and load the groups of the next turn before they compute. If vectors are not aligned (`at_once`
// is false), their elements are accessed one by one, so that the order of sums depends only on the shape of a row and
// the types. As in lane_rows.cuh, a warp owns up to 32 rows, and each lane holds the numbers of one. Bytes: logits and
// targets are read once, gradients are written once, and once more, as zeros, if the divergence is below the free nats.
template <
    class T,
    class U,
    class G,
    int groups,
    int classes,
    int lanes_per_row,
    int vector_size,
    bool at_once,
    int options>
class DivergenceRows {
  using Head = CategoricalKL<float>;
  using Gradient = NotVoid<G, T>;
  static constexpr bool kWantsGradient = !std::is_same_v<G, void>, kPredicts = (options & kPredictsP) != 0;
  static constexpr Mixture kMixture = mixture_of(options);
  static constexpr int kLanes = lanes_of_group(classes, vector_size), kStep = vector_size * kLanes;
  static constexpr int kVectors = (classes + kStep - 1) / kStep, kElements = kVectors * vector_size;
  static constexpr int kGroupsAtOnce = lanes_per_row / kLanes, kTurns = (groups + kGroupsAtOnce - 1) / kGroupsAtOnce;
  static constexpr int kSideBySide = 32 / lanes_per_row;
  static constexpr bool kHasTail = groups % kGroupsAtOnce != 0; // in the last turn, some lanes have no group
  using Values = float[kElements];
  // Logarithms that are computed from differences need them in units of 1.
  using Exponent = std::conditional_t<kMixture == Mixture::probabilities, BinaryExponent, NaturalExponent>;

  const BlockOfRows& block_;
  const RowsOfWarp warp_;
  const LaneLoss loss_;
  const Head head_;
  const T* logits_; // the rows to load next
  const U* targets_;
  Gradient* gradients_; // the row of this lane that is computed
  Vector<T, vector_size> x_[kVectors];
  Vector<U, vector_size> t_[kVectors];
  float largest_ = 0; // the largest magnitude of finite logits in the row

 public:
  static constexpr int kBlocks = 4;
  static constexpr int kSharedBytes = 0;

  GRADSCALE_DEVICE static void run(const BlockOfRows& block) {
    const int32_t rows_per_warp = rounded_rows_per_warp(block.rows_per_warp, lanes_per_row);
    const RowsOfWarp warp(block.thread, block.index, rows_per_warp, block.pass.batch, lanes_per_row);
    if (warp.count > 0) {
      DivergenceRows(block, warp).compute();
    }
  }

 private:
  GRADSCALE_DEVICE DivergenceRows(const BlockOfRows& block, const RowsOfWarp& warp)
      : block_(block), warp_(warp), loss_(block, warp, false, groups * classes), head_(block.head, classes, kMixture) {
    const Segment& s = block.segment;
    const int row = has_row(0) ? side() : warp.count - 1; // a lane without a row repeats the last one
    logits_ = warp.at(static_cast<const T*>(s.prediction.data), s.prediction.stride).row(row);
    targets_ = warp.at(static_cast<const U*>(s.target.data), s.target.stride).row(row);
    gradients_ = warp.at(static_cast<Gradient*>(s.gradient.data), s.gradient.stride).row(row);
  }

  // The place of this lane's row among the rows that the warp computes side by side.
  GRADSCALE_DEVICE int side() const {
    return warp_.lane / lanes_per_row;
  }
  // True if this lane has a row among the rows from `begin` on.
  GRADSCALE_DEVICE bool has_row(int begin) const {
    return begin + side() < warp_.count;
  }
  // This lane's group in a turn. A lane without a group repeats the last one.
  GRADSCALE_DEVICE int group(int turn) const {
    const int own = turn * kGroupsAtOnce + warp_.lane % lanes_per_row / kLanes;
    return kHasTail && own >= groups ? groups - 1 : own;
  }
  GRADSCALE_DEVICE bool has_group(int turn) const {
    return !kHasTail || turn * kGroupsAtOnce + warp_.lane % lanes_per_row / kLanes < groups;
  }
  // This lane's first class in a turn.
  GRADSCALE_DEVICE int first(int turn) const {
    return group(turn) * classes + vector_size * (warp_.lane % kLanes);
  }
  // True if vector c is inside the group. The result is a compile-time constant, except for the last vector.
  GRADSCALE_DEVICE bool exists(int c) const {
    return kStep * (c + 1) <= classes || kStep * c + vector_size * (warp_.lane % kLanes) < classes;
  }

  template <class Element>
  GRADSCALE_DEVICE void load(const Element* from, Vector<Element, vector_size> (&vectors)[kVectors]) const {
    float outside[vector_size];
#pragma unroll
    for (int k = 0; k < vector_size; ++k) {
      outside[k] = -INFINITY; // adds 0 to all sums
    }
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      vectors[c] = packed<Element, vector_size>(outside);
      if (exists(c)) {
        if constexpr (at_once) {
          vectors[c] = load_vector<Element, vector_size>(from + kStep * c);
        } else {
          vectors[c] = load_elements<Element, vector_size>(from + kStep * c);
        }
      }
    }
  }
  GRADSCALE_DEVICE void load(int turn) {
    load(logits_ + first(turn), x_);
    load(targets_ + first(turn), t_);
  }

  // Loads what is computed after a turn of the rows from `begin` on.
  GRADSCALE_DEVICE void load_next(int begin, int turn) {
    if (turn + 1 < kTurns) {
      load(turn + 1);
    } else if (has_row(begin + kSideBySide)) { // otherwise, the lane repeats its previous row
      logits_ += kSideBySide * block_.segment.prediction.stride;
      targets_ += kSideBySide * block_.segment.target.stride;
      load(0);
    }
  }

  // Reads the vectors that are loaded, and returns the largest of this lane's elements; -inf if all are NaN.
  template <class Element>
  GRADSCALE_DEVICE float unpack_all(
      const Vector<Element, vector_size> (&vectors)[kVectors], Values& values, float& magnitude) const {
    VectorExtremes<Element, vector_size> extremes;
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      unpack(vectors[c], values + vector_size * c);
      extremes.add(vectors[c]);
    }
    magnitude = extremes.magnitude();
    return extremes.maximum();
  }

  // The sum of the exponentials of a group's logits. Replaces the logits by their differences from the maximum.
  GRADSCALE_DEVICE static GroupSoftmax<float> softmax(float largest, Values& x, Values& e) {
    const float maximum = lane_maximum<kLanes>(largest);
    const Exponent exponent(maximum);
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      x[n] = exponent.difference(x[n]);
      e[n] = exponent.exponential(x[n]);
      sum += e[n];
    }
    sum = lane_sum<kLanes>(sum);
    return {maximum, approximate_reciprocal(sum), kMixture == Mixture::probabilities ? 0.0f : std::log(sum)};
  }

  // Computes the group that is loaded. Adds this lane's part of its divergence and of the squares of the gradient.
  GRADSCALE_DEVICE void compute_group(int begin, int turn, float factor, double& divergence, double& square) {
    Values x, t, x_exponential, t_exponential;
    float magnitude, unused;
    const float largest_x = unpack_all(x_, x, magnitude), largest_t = unpack_all(t_, t, unused);
    if (!(magnitude < INFINITY)) { // rarely: a class that has probability 0, or is outside of the group
      magnitude = 0;
#pragma unroll
      for (float value : x) {
        magnitude = larger(magnitude, finite_magnitude(value));
      }
    }
    largest_ = larger(largest_, magnitude);
    load_next(begin, turn);
    const auto x_softmax = softmax(largest_x, x, x_exponential), t_softmax = softmax(largest_t, t, t_exponential);
    DivergenceTerms<float> terms[kElements];
    float total = 0, h = 0;
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      terms[n] = head_.template terms<kMixture, kPredicts>(
          x_exponential[n], t_exponential[n], x[n], t[n], x_softmax, t_softmax);
      total += terms[n].divergence;
      h += terms[n].h;
    }
    divergence += has_group(turn) ? total : 0;
    if constexpr (kWantsGradient) {
      h = lane_sum<kLanes>(h);
      Values gradient;
      float squares = 0;
#pragma unroll
      for (int n = 0; n < kElements; ++n) {
        gradient[n] = (terms[n].h - terms[n].softmax * h) * factor;
        squares = fmaf(gradient[n], gradient[n], squares);
      }
      if (has_group(turn)) {
        square += squares;
        if (has_row(begin)) {
          store(turn, gradient);
        }
      }
    }
  }

  GRADSCALE_DEVICE void store(int turn, const Values& gradient) const {
    Gradient* const to = gradients_ + first(turn);
    constexpr int count = at_once ? vector_size : 1;
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      if (exists(c)) {
#pragma unroll
        for (int k = 0; k < vector_size; k += count) {
          store_vector(to + kStep * c + k, packed<Gradient, count>(gradient + vector_size * c + k));
        }
      }
    }
  }

  GRADSCALE_DEVICE void compute() {
    const float factor = head_.factor(static_cast<double>(INFINITY), loss_.coefficient);
    double own_divergence = 0, own_square = 0;
    float largest = 0;
    int owner = warp_.lane & -lanes_per_row;
    load(0);
#pragma unroll 1
    for (int begin = 0; begin < warp_.count; begin += kSideBySide, ++owner) {
      const float row_factor = from_owner<lanes_per_row>(owner, factor);
      double divergence = 0, square = 0;
      largest_ = 0;
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        compute_group(begin, turn, row_factor, divergence, square);
      }
      divergence = lane_sum<lanes_per_row>(divergence);
      square = lane_sum<lanes_per_row>(square);
      const bool counts = loss_.counts(owner), is_free = divergence < head_.free_nats;
      if (kWantsGradient && (is_free || !counts) && has_row(begin)) {
#pragma unroll 1
        for (int turn = 0; turn < kTurns; ++turn) {
          if (has_group(turn)) {
            store(turn, Values{}); // each lane clears what it wrote
          }
        }
      }
      gradients_ += kSideBySide * block_.segment.gradient.stride;
      largest = counts ? larger(largest, largest_) : largest;
      if (owner == warp_.lane) {
        own_divergence = divergence;
        own_square = is_free ? 0 : square;
      }
    }
    loss_.store(
        static_cast<float>(head_.loss(own_divergence)), 0, lane_maximum<32>(largest), static_cast<float>(own_square));
  }
};

} // namespace gradscale
