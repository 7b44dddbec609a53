// The CPU kernel of the multi-step loss. A row is the prediction of one sample at one step. This file includes itself
// once for each instruction set.
//
// Short rows are computed 16 at a time, one per lane, and longer rows one at a time. The width alone decides which, and
// lanes without a row are computed too, so that a row gets the same bits among any number of rows. A longer row is read
// from memory once, into a padded and widened scratch row that stays in the L1 cache. One exponential is computed per
// element, and the gradient is written once.
#ifndef GRADSCALE_VARIANT
#include "../kernels.h"

#define GRADSCALE_KERNELS "../loss/cpu/loss_rows.cpp"
#include "../../cpu/each_instruction_set.h"

namespace gradscale {

RunRows run_rows_kernel = GRADSCALE_CPU_KERNEL(run_rows);

} // namespace gradscale

#else
#include "../../cpu/softmax.h"
#include "../../formulas/cross_entropy.h"
#include "../../formulas/distributions.h"
#include "../../formulas/elementary.h"
#include "../../formulas/targets.h"
#include "../kinds.h"

#include "row_batches.h"

#include "own_rows.h"
#include "regression_rows.h"

#include "../../cpu/compile_baseline_fast.h"

#include "logits_rows.h"
#include "short_rows.h"

#include "policy_rows.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

inline void clear_row(const Pass& pass, const Segment& s, int64_t row) {
  s.loss.store(row, 0.0);
  s.metrics[row] = {};
  pass.clear_gradients(s, row);
}

// The row batch that begins with row `first`, of up to 16 rows before row `end`. `common` is the factor of all rows;
// null if each has its own.
inline RowBatch row_batch_of(const Pass& pass, const Segment& s, int64_t first, int64_t end, const RowFactor* common) {
  RowBatch row_batch{first, end - first < kLanes ? end - first : kLanes, {}, {}};
  for (int64_t i = 0; i < row_batch.count; ++i) {
    const RowFactor factor = common != nullptr ? *common : pass.row_factor(s, first + i);
    row_batch.unmasked[i] = factor.counts;
    row_batch.coefficients[i] = factor.counts ? factor.coefficient : 0.0;
  }
  return row_batch;
}

inline void clear_masked(const Pass& pass, const Segment& s, const RowBatch& row_batch) {
  for (int64_t i = 0; i < row_batch.count; ++i) {
    if (!row_batch.unmasked[i]) {
      clear_row(pass, s, row_batch.first + i);
    }
  }
}

// Calls run(row batch) for the row batches of rows begin to end - 1. A masked row adds exactly nothing: its loss,
// metrics and gradient are 0 whatever it holds, and only its detail, which does not depend on its target, is kept.
template <class Run>
void each_row_batch(const Pass& pass, const Segment& s, int64_t begin, int64_t end, Run run) {
  const bool is_common = pass.has_common_factor(s);
  const RowFactor common = pass.row_factor(s, begin);
  for (int64_t first = begin; first < end; first += kLanes) {
    const RowBatch row_batch = row_batch_of(pass, s, first, end, is_common ? &common : nullptr);
    run(row_batch);
    if (!is_common) {
      clear_masked(pass, s, row_batch);
    }
  }
}

template <class A>
void run_rows_of(const Pass& pass, const Segment& s, int64_t begin, int64_t end, A* scratch) {
  const bool side_by_side = s.width <= kShortRow;
  const auto row_batches = [&](auto run) { each_row_batch(pass, s, begin, end, run); };
  const auto each = [&](auto run) {
    row_batches([&](const RowBatch& row_batch) {
      for (int64_t i = 0; i < row_batch.count; ++i) {
        run(row_batch.first + i, row_batch.coefficients[i]);
      }
    });
  };
  const auto scalar = [&](auto tag) { scalar_rows<typename decltype(tag)::Head, A>(pass, s, begin, end); };
  dispatch_kind<A>(
      *s.head,
      [&](auto encode) {
        row_batches([&](const RowBatch& row_batch) {
          const Targets<decltype(encode(0.0))> targets(s, row_batch);
          side_by_side ? short_categorical_rows<A>(s, row_batch, targets.encoded)
                       : categorical_rows(s, row_batch, targets.encoded, scratch);
        });
      },
      [&] {
        row_batches([&](const RowBatch& row_batch) {
          side_by_side ? short_policy_rows<A>(pass, s, row_batch)
                       : soft_cross_entropy_rows(pass, s, row_batch, scratch);
        });
      },
      [&](auto tag) {
        using RowHead = typename decltype(tag)::Head;
        if constexpr (!RowHead::kGradientWaits) {
          if (s.width == 1) {
            return scalar(tag);
          }
        }
        each([&](int64_t row, double coefficient) { vector_row<RowHead>(s, row, coefficient, scratch); });
      },
      scalar,
      [&](auto tag) {
        using RowHead = typename decltype(tag)::Head;
        each(
            [&](int64_t row, double coefficient) { own_row(RowHead(*s.head, s), pass, s, row, coefficient, scratch); });
      },
      [&](auto tag) {
        row_batches([&](const RowBatch& row_batch) { scored_rows(tag, pass, s, row_batch, scratch); });
      });
}

void run_rows(const Pass& pass, const Segment& s, int64_t begin, int64_t end, double* scratch) {
  s.prediction.element == Element::float64 ? run_rows_of(pass, s, begin, end, scratch)
                                           : run_rows_of(pass, s, begin, end, reinterpret_cast<float*>(scratch));
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale

#endif
