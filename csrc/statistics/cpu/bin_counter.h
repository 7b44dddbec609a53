// Counts how many elements are in each of 16 bins. The caller passes vectors with the bins of elements, one byte per
// element. Included once for each instruction set.
namespace gradscale {
namespace GRADSCALE_VARIANT {
namespace {

constexpr int kCountedBins = 16;                             // bins 0 to 15
constexpr int64_t kElementsPerStep = GRADSCALE_VECTOR_BYTES; // one byte of a vector per element

using ByteLanes = Vectors<uint8_t>::V; // the bins of kElementsPerStep elements

// The highest bits of all bytes. On instruction sets that cannot collect them, a number that is 0 only if all of them
// are 0.
GRADSCALE_HOST_DEVICE uint64_t highest_bits(ByteLanes x) {
#if GRADSCALE_VECTOR_BYTES == 64
  return _mm512_movepi8_mask((__m512i)x);
#elif GRADSCALE_VECTOR_BYTES == 32
  return static_cast<uint32_t>(_mm256_movemask_epi8((__m256i)x));
#else
  uint64_t words[2];
  memcpy(words, &x, sizeof(x));
  return (words[0] | words[1]) & 0x8080808080808080u;
#endif
}

GRADSCALE_HOST_DEVICE int32_t total_of(ByteLanes counts) {
  int32_t total = 0;
  for (int k = 0; k < kElementsPerStep; ++k) {
    total += counts[k];
  }
  return total;
}

#if GRADSCALE_VECTOR_BYTES > 16

// Counts how often each of the 8 bits of a byte is set, as Harley and Seal's population count does: full adders add up
// the bits of eight vectors, which leaves one vector of carries to count.
class BitCounter {
 public:
  static constexpr int kVectors = 8;

  GRADSCALE_HOST_DEVICE void add(const ByteLanes* vectors) {
    count(carry<kDigits>(vectors), kVectors);
  }

  // Adds the counts to out[0] to out[7].
  void add_to(int32_t* out) {
    for (int k = 0; k < kDigits; ++k) {
      count(digits_[k], 1 << k);
    }
    for (int k = 0; k < 8; ++k) {
      out[k] += counts_[k];
    }
  }

 private:
  static constexpr int kDigits = 3;

  // Adds 2^digit vectors to the digits below `digit`, and returns the carries.
  template <int digit>
  GRADSCALE_HOST_DEVICE ByteLanes carry(const ByteLanes* vectors) {
    if constexpr (digit == 0) {
      return *vectors;
    } else {
      const ByteLanes x = carry<digit - 1>(vectors), y = carry<digit - 1>(vectors + (1 << (digit - 1)));
      return full_add(digits_[digit - 1], x, y);
    }
  }

  // Leaves the sums of bits in `digit`, and returns the carries.
  static GRADSCALE_HOST_DEVICE ByteLanes full_add(ByteLanes& digit, ByteLanes x, ByteLanes y) {
    const ByteLanes before = digit;
#if GRADSCALE_VECTOR_BYTES == 64 // compilers generate more instructions for the code below
    digit = (ByteLanes)_mm512_ternarylogic_epi64((__m512i)before, (__m512i)x, (__m512i)y, 0x96);
    return (ByteLanes)_mm512_ternarylogic_epi64((__m512i)before, (__m512i)x, (__m512i)y, 0xe8);
#else
    const ByteLanes either = before ^ x;
    digit = either ^ y;
    return (before & x) | (either & y);
#endif
  }

  GRADSCALE_HOST_DEVICE void count(ByteLanes bits, int32_t weight) {
    for (int k = 7; k >= 0; --k) {
      counts_[k] += weight * __builtin_popcountll(highest_bits(bits));
      bits += bits;
    }
  }

  ByteLanes digits_[kDigits] = {}; // the number of vectors in which each bit is set, in binary: digit k counts 2^k
  int32_t counts_[8] = {};
};

class BinCounter {
 public:
  // In the result, the highest bit of a lane is set if its bin was not counted.
  GRADSCALE_HOST_DEVICE ByteLanes add(ByteLanes bins) {
    alignas(16) static constexpr uint8_t kLow[16] = {1, 2, 4, 8, 16, 32, 64, 128};
    alignas(16) static constexpr uint8_t kHigh[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 128};
    const __m128i low = _mm_load_si128(reinterpret_cast<const __m128i*>(kLow));
    const __m128i high = _mm_load_si128(reinterpret_cast<const __m128i*>(kHigh));
    // A lookup reads the lowest 4 bits of an index, and gives 0 if its highest bit is set.
#if GRADSCALE_VECTOR_BYTES == 64
    const __m512i index = _mm512_adds_epu8((__m512i)bins, _mm512_set1_epi8(128 - kCountedBins));
    low_[pending_] = (ByteLanes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(low), index);
    high_[pending_] = (ByteLanes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(high), index);
#else
    const __m256i index = _mm256_adds_epu8((__m256i)bins, _mm256_set1_epi8(128 - kCountedBins));
    low_[pending_] = (ByteLanes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(low), index);
    high_[pending_] = (ByteLanes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(high), index);
#endif
    if (++pending_ == BitCounter::kVectors) {
      add_pending();
    }
    return (ByteLanes)index;
  }

  // Adds the counts to a histogram.
  void add_to(int32_t* histogram) {
    while (pending_ < BitCounter::kVectors) {
      low_[pending_] = high_[pending_] = ByteLanes{};
      ++pending_;
    }
    add_pending();
    low_bins_.add_to(histogram);
    high_bins_.add_to(histogram + 8);
  }

 private:
  GRADSCALE_HOST_DEVICE void add_pending() {
    low_bins_.add(low_);
    high_bins_.add(high_);
    pending_ = 0;
  }

  BitCounter low_bins_, high_bins_;                                  // bins 0 to 7, and 8 to 15
  ByteLanes low_[BitCounter::kVectors], high_[BitCounter::kVectors]; // bit k: the bin is k (low_), or 8 + k (high_)
  int pending_ = 0;
};

#else

// Counts bins in counters of one byte, one for each bin and lane.
class BinCounter {
 public:
  // In the result, the highest bit of a lane is set if its bin was not counted.
  GRADSCALE_HOST_DEVICE ByteLanes add(ByteLanes bins) {
#pragma GCC unroll 16
    for (int k = 0; k < kCountedBins; ++k) {
      counts_[k] -= reinterpreted<ByteLanes>(bins == static_cast<uint8_t>(k));
    }
    return reinterpreted<ByteLanes>(bins >= static_cast<uint8_t>(kCountedBins));
  }

  // Adds the counts to a histogram.
  void add_to(int32_t* histogram) const {
    for (int k = 0; k < kCountedBins; ++k) {
      histogram[k] += total_of(counts_[k]);
    }
  }

 private:
  ByteLanes counts_[kCountedBins] = {};
};

#endif

} // namespace
} // namespace GRADSCALE_VARIANT
} // namespace gradscale
