// The tools of row_tools.h for rows that are summed in float, 16 lanes at a time. Compilers do not make this of a plain
// loop: masked ends instead of a loop over the rest, several chains of additions, and an exponential of less than half
// as many instructions. Compiled for AVX-512 only.
//
// Blocks of 16 follow the alignment of the row in memory, not its beginning: the first and the last may be partial. A
// gradient is aligned as its logits are when both are contiguous, so that no load or store crosses a cache line.
#include <immintrin.h>

namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

using gradscale::exp_nonpositive;
using gradscale::product;

struct Lanes {
  __m512 v;
  Lanes(__m512 value) : v(value) {
  }
  Lanes(float value) : v(_mm512_set1_ps(value)) {
  }
};

inline Lanes operator+(Lanes a, Lanes b) {
  return _mm512_add_ps(a.v, b.v);
}

inline Lanes operator-(Lanes a, Lanes b) {
  return _mm512_sub_ps(a.v, b.v);
}

inline Lanes operator*(Lanes a, Lanes b) {
  return _mm512_mul_ps(a.v, b.v);
}

// weight x, where 0 times anything is 0.
inline Lanes product(Lanes weight, Lanes x) {
  return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(weight.v, _mm512_setzero_ps(), _CMP_NEQ_UQ), weight.v, x.v);
}

// exp(x) for x <= 0: 2^n 2^f with f in 0..1 a polynomial with p(0) = 1. An error of 8.5e-8 from the polynomial, and of
// |x| 6e-8 from the rounding of x log2(e): small where exp(x) is not. -inf gives 0, NaN stays NaN.
inline Lanes exp_nonpositive(Lanes x) {
  constexpr int round_down = _MM_FROUND_TO_NEG_INF;
  const __m512 t = _mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504f));
  const __m512 f = _mm512_reduce_ps(t, round_down); // t - floor(t)
  __m512 p = _mm512_set1_ps(0x1.e9750ap-10f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.277858p-7f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c91ceep-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebdb58p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e4bap-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, t); // times 2^floor(t)
}

inline Lanes load_lanes(const float* from, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, from);
}

inline Lanes load_lanes(const BFloat16Bits* from, __mmask16 mask) {
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline Lanes load_lanes(const HalfBits* from, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
}

inline void store_lanes(float* to, __mmask16 mask, Lanes lanes) {
  _mm512_mask_storeu_ps(to, mask, lanes.v);
}

// Rounds as from_accumulate of formulas/element.h does.
inline void store_lanes(BFloat16Bits* to, __mmask16 mask, Lanes lanes) {
  const __m512i bits = _mm512_castps_si512(lanes.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(lanes.v, lanes.v, _CMP_UNORD_Q);
  const __m512i upper = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(upper));
}

inline void store_lanes(HalfBits* to, __mmask16 mask, Lanes lanes) {
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtps_ph(lanes.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The number of elements between a multiple of 16 and the beginning of a row.
template <class T>
int64_t lead_of(const T* row) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLanes);
}

// The blocks of a row: block b holds the elements from 16 b - lead on.
struct Blocks {
  int64_t lead;
  int64_t count;
  __mmask16 first;
  __mmask16 last;

  Blocks(int64_t lead_, int64_t width) : lead(lead_), count((lead_ + width + kLanes - 1) / kLanes) {
    first = static_cast<__mmask16>(0xffffu << lead);
    last = static_cast<__mmask16>(0xffffu >> (count * kLanes - lead - width));
    if (count == 1) {
      first = last = first & last;
    }
  }

  // Calls body(block, mask) for all of them; the mask of those in between is a constant.
  template <class Body>
  void for_each(Body body) const {
    body(int64_t(0), first);
    for (int64_t b = 1; b + 1 < count; ++b) {
      body(b, static_cast<__mmask16>(0xffffu));
    }
    if (count > 1) {
      body(count - 1, last);
    }
  }

  // Loads a block of the row whose element 0 is at `row`; lanes outside of it are 0.
  template <class T>
  Lanes load(const T* row, int64_t b, __mmask16 mask) const {
    return load_lanes(row - lead + b * kLanes, mask);
  }
};

template <class T>
Lanes logits_of_block(const Blocks& blocks, const T* logits, int64_t b, __mmask16 mask) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, blocks.load(logits, b, mask).v);
}

// A replacement of maximum_of_any() of row_tools.h.
template <class T>
float maximum_in_lanes(const T* logits, int64_t width) {
  const Blocks blocks(lead_of(logits), width);
  const auto logit = [&](int64_t b, __mmask16 mask) { return logits_of_block(blocks, logits, b, mask).v; };
  constexpr __mmask16 all = 0xffffu;
  const __m512 none = _mm512_set1_ps(-INFINITY);
  // A NaN in the first operand is passed over.
  __m512 m[4] = {logit(0, blocks.first), none, none, none};
  int64_t b = 1;
  for (; b + 4 < blocks.count; b += 4) {
    for (int k = 0; k < 4; ++k) {
      m[k] = _mm512_max_ps(logit(b + k, all), m[k]);
    }
  }
  for (; b + 1 < blocks.count; ++b) {
    m[0] = _mm512_max_ps(logit(b, all), m[0]);
  }
  if (blocks.count > 1) {
    m[1] = _mm512_max_ps(logit(blocks.count - 1, blocks.last), m[1]);
  }
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3])));
}

// A replacement of exponentials_of_any() of row_tools.h.
template <bool with_moment, class T>
Softmax<float> exponentials_in_lanes(const T* logits, int64_t width, float maximum, Ahead ahead, float* scratch) {
  const Blocks blocks(lead_of(logits), width);
  constexpr __mmask16 all = 0xffffu;
  int64_t b = 1;
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  __m512 moment[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  const auto* read = static_cast<const T*>(ahead.read);
  const void* write = ahead.write != nullptr ? ahead.write : scratch;
  const auto add = [&](int chain, int64_t block, __mmask16 mask, Lanes place) {
    // Prefetching past the end of either does nothing.
    __builtin_prefetch(read + block * kLanes, /*rw=*/0);
    __builtin_prefetch(static_cast<const T*>(write) + block * kLanes, /*rw=*/1);
    const __m512 e = exp_nonpositive(logits_of_block(blocks, logits, block, mask) - Lanes(maximum)).v;
    _mm512_store_ps(scratch + block * kLanes, e);
    sum[chain] = _mm512_add_ps(sum[chain], e);
    if (with_moment) {
      moment[chain] = _mm512_fmadd_ps(e, place.v, moment[chain]);
    }
  };
  add(0, 0, blocks.first, 0.0f);
  Lanes place = 1.0f;
  for (b = 1; b + 2 < blocks.count; b += 2, place = place + Lanes(2.0f)) {
    add(0, b, all, place);
    add(1, b + 1, all, place);
  }
  moment[1] = _mm512_add_ps(moment[1], sum[1]); // the second chain's blocks are one further
  if (b + 1 < blocks.count) {
    add(0, b, all, static_cast<float>(b));
  }
  if (blocks.count > 1) {
    add(1, blocks.count - 1, blocks.last, static_cast<float>(blocks.count - 1));
  }
  const __m512 total = _mm512_add_ps(sum[0], sum[1]);
  float weighted = 0;
  if (with_moment) {
    const __m512 twice_lane = _mm512_setr_ps(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 offset = _mm512_add_ps(twice_lane, _mm512_set1_ps(static_cast<float>(1 - width - 2 * blocks.lead)));
    const __m512 of_blocks = _mm512_mul_ps(_mm512_add_ps(moment[0], moment[1]), _mm512_set1_ps(2 * kLanes));
    weighted = _mm512_reduce_add_ps(_mm512_fmadd_ps(total, offset, of_blocks));
  }
  return {maximum, _mm512_reduce_add_ps(total), weighted, scratch + blocks.lead};
}

// A replacement of write_gradient() of row_tools.h.
template <class G, class Value>
void write_lanes(G* out, int64_t width, Value value) {
  const Blocks blocks(lead_of(out), width);
  blocks.for_each([&](int64_t b, __mmask16 mask) {
    const Lanes lanes = value([&](const float* row) { return blocks.load(row, b, mask); });
    store_lanes(out - blocks.lead + b * kLanes, mask, lanes);
  });
}

// A replacement of sums_of() of row_tools.h.
template <class T, class Terms>
std::array<float, 3> sums_of_lanes(const T* aligned_as, int64_t width, Terms terms) {
  const Blocks blocks(lead_of(aligned_as), width);
  Lanes sums[3] = {0.0f, 0.0f, 0.0f};
  blocks.for_each([&](int64_t b, __mmask16 mask) {
    const auto [first, second, third] = terms([&](const auto* row) { return blocks.load(row, b, mask); });
    sums[0] = _mm512_mask_add_ps(sums[0].v, mask, sums[0].v, first.v);
    sums[1] = _mm512_mask_add_ps(sums[1].v, mask, sums[1].v, second.v);
    sums[2] = _mm512_mask_add_ps(sums[2].v, mask, sums[2].v, third.v);
  });
  return {_mm512_reduce_add_ps(sums[0].v), _mm512_reduce_add_ps(sums[1].v), _mm512_reduce_add_ps(sums[2].v)};
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
