// The CPU kernels of the multi-step loss, in which a row is the prediction of one sample at one step, and of decoding.
// Included once for each instruction set.
#include "../cpu/logit_rows.h"
#include "../math/lane_sums.h"
#include "../math/logarithm.h"
#include "kinds.h"
#include "segment.h"

#include "row_groups.h"

#include "logits.h"
#include "regression_rows.h"

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// True for rows of logits that are computed side by side: short ones, if there are enough to fill most lanes.
bool side_by_side(int64_t width, int64_t count) {
  return width <= kShortRow && count >= 6;
}

template <class L>
struct LayoutOf {
  using Layout = L;
};

// Calls run(LayoutOf<layout>(), memory) for so many rows of logits.
template <class A, class Run>
void with_layout(int64_t width, int64_t count, double* scratch, Run run) {
  if (side_by_side(width, count)) {
    alignas(64) A tiles[3][kShortRow * Lanes<A>::kCount];
    run(LayoutOf<Beside<A>>(), RowMemory<A>{tiles[0], tiles[1], tiles[2]});
  } else {
    A* x = reinterpret_cast<A*>(scratch);
    const int64_t distance = scratch_row(width);
    run(LayoutOf<Along<A>>(), RowMemory<A>{x, x + distance, x + 2 * distance});
  }
}

template <class A>
void run_logits(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* scratch) {
  with_layout<A>(s.width, end - begin, scratch, [&](auto layout, RowMemory<A> memory) {
    using Layout = typename decltype(layout)::Layout;
    const auto groups = [&](auto run) { each_group(s, coefficients, begin, end, run); };
    const auto policy = [&](auto target) {
      using Target = decltype(target);
      groups([&](const Group& group) {
        s.head->entropy_weight != 0 ? logit_group<Weight::difference, true, Layout, Target>(s, group, memory)
                                    : logit_group<Weight::difference, false, Layout, Target>(s, group, memory);
      });
    };
    dispatch_kind<A>(
        *s.head,
        [&](auto encode) {
          using Target = decltype(encode(0.0));
          groups([&](const Group& group) { logit_group<Weight::place, false, Layout, Target>(s, group, memory); });
        },
        [&] { s.target.element == Element::int64 ? policy(ClassTarget()) : policy(Distribution()); },
        [](auto) {},
        [](auto) {});
  });
}

template <class T, class G>
void run_numbers(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* scratch) {
  using A = typename AccumulateType<T>::type;
  const auto nothing = [](auto...) {};
  const auto scalar = [&](auto of) { scalar_rows<typename decltype(of)::Head, T, G, A>(s, coefficients, begin, end); };
  dispatch_kind<A>(
      *s.head,
      nothing,
      nothing,
      [&](auto of) {
        using RowHead = typename decltype(of)::Head;
        if constexpr (!RowHead::kGradientWaits) {
          if (s.width == 1) {
            return scalar(of);
          }
        }
        each_group(s, coefficients, begin, end, [&](const Group& group) {
          for (int64_t i = 0; i < group.count; ++i) {
            vector_row<RowHead>(s, group.first + i, group.coefficients[i], reinterpret_cast<A*>(scratch));
          }
        });
      },
      scalar);
}

void run_rows(const Segment& s, const Coefficients& coefficients, int64_t begin, int64_t end, double* scratch) {
  if (has_logits(s.head->kind)) {
    return s.prediction.element == Element::float64 ? run_logits<double>(s, coefficients, begin, end, scratch)
                                                    : run_logits<float>(s, coefficients, begin, end, scratch);
  }
  dispatch_element(s.prediction.element, [&](auto type) {
    using T = decltype(type);
    using A = typename AccumulateType<T>::type;
    if (s.gradient.data == nullptr || s.gradient.element == ElementOf<T>::value) {
      run_numbers<T, T>(s, coefficients, begin, end, scratch);
    } else {
      run_numbers<T, A>(s, coefficients, begin, end, scratch);
    }
  });
}

template <class A>
void decode_all(const Decoding& d, int64_t begin, int64_t end, double* scratch) {
  with_layout<A>(d.width, end - begin, scratch, [&](auto layout, RowMemory<A> memory) {
    using Layout = typename decltype(layout)::Layout;
    fill_centers<Layout>(*d.support, memory.t);
    for (int64_t first = begin; first < end; first += kLanes) {
      const Group group{first, end - first < kLanes ? end - first : kLanes, {}, {}};
      decode_group<Layout>(d, group, memory);
    }
  });
}

void decode_rows(const Decoding& d, int64_t begin, int64_t end, double* scratch) {
  d.logits.element == Element::float64 ? decode_all<double>(d, begin, end, scratch)
                                       : decode_all<float>(d, begin, end, scratch);
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
