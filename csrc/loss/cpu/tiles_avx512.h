// Reading and writing the tiles of short_rows.h through transpositions in registers. Compiled for AVX-512 only.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

// Transposes 16 rows of 16.
inline void transpose(__m512 (&rows)[kLanes]) {
  __m512d pairs[kLanes];
  for (int i = 0; i < kLanes; i += 4) {
    const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
    const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    const __m512d next_low = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]));
    const __m512d next_high = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i + 2], rows[i + 3]));
    pairs[i] = _mm512_unpacklo_pd(low, next_low);
    pairs[i + 1] = _mm512_unpackhi_pd(low, next_low);
    pairs[i + 2] = _mm512_unpacklo_pd(high, next_high);
    pairs[i + 3] = _mm512_unpackhi_pd(high, next_high);
  }
  // Quarter q of pairs[4 g + k] has column 4 q + k of rows 4 g..4 g + 3.
  for (int k = 0; k < 4; ++k) {
    const __m512 quarters[4] = {
        _mm512_castpd_ps(pairs[k]),
        _mm512_castpd_ps(pairs[k + 4]),
        _mm512_castpd_ps(pairs[k + 8]),
        _mm512_castpd_ps(pairs[k + 12])};
    const __m512 even_above = _mm512_shuffle_f32x4(quarters[0], quarters[1], 0x88);
    const __m512 odd_above = _mm512_shuffle_f32x4(quarters[0], quarters[1], 0xdd);
    const __m512 even_below = _mm512_shuffle_f32x4(quarters[2], quarters[3], 0x88);
    const __m512 odd_below = _mm512_shuffle_f32x4(quarters[2], quarters[3], 0xdd);
    rows[k] = _mm512_shuffle_f32x4(even_above, even_below, 0x88);
    rows[k + 4] = _mm512_shuffle_f32x4(odd_above, odd_below, 0x88);
    rows[k + 8] = _mm512_shuffle_f32x4(even_above, even_below, 0xdd);
    rows[k + 12] = _mm512_shuffle_f32x4(odd_above, odd_below, 0xdd);
  }
}

inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count < kLanes ? (1u << count) - 1 : 0xffffu);
}

template <class T>
void read_tile_in_lanes(const Rows& rows, const Group& group, int64_t width, Tile<float>& tile) {
  for (int64_t begin = 0; begin < width; begin += kLanes) {
    const __mmask16 mask = first_lanes(width - begin);
    __m512 square[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      square[i] = load_lanes(row_of_lane<T>(rows, group, i) + begin, mask).v;
    }
    transpose(square);
    for (int64_t j = 0; j < kLanes; ++j) {
      _mm512_store_ps(tile.at[begin + j], square[j]);
    }
  }
}

template <class G>
void write_tile_in_lanes(const Rows& rows, const Group& group, int64_t width, const Tile<float>& tile) {
  for (int64_t begin = 0; begin < width; begin += kLanes) {
    const __mmask16 mask = first_lanes(width - begin);
    __m512 square[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      square[j] = begin + j < width ? _mm512_load_ps(tile.at[begin + j]) : _mm512_setzero_ps();
    }
    transpose(square);
    G* row = static_cast<G*>(rows.data) + group.first * rows.stride + begin;
    for (int64_t i = 0; i < group.count; ++i, row += rows.stride) {
      store_lanes(row, mask, square[i]);
    }
  }
}

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
