// Linear layers with integer weights: outputs[m, n] = scale[n] * scale of position m * sum over k of x[m, k] * w[n, k].
//
// All sums are integers and exact: the same bits for any number of positions, those of `QuantisedLinear`, and the same by
// either instruction set. With AVX-512 a value is 128 times a signed byte plus another one, so that each sum is two sums of
// products of bytes (VNNI; int8 weights and several positions by the tiles of AMX), in 32 bits to the end. With AVX2 a value is
// an integer of 16 bits. Products of pairs are added in 32 bits as long as they fit, and then in float64.
//
// Weights lie in tiles of 16 rows, which `quantised.py` describes. A lane sums a row, so that nothing is added
// across lanes. Several tiles are read at a time, each from another part of the weight.

#include <ATen/Parallel.h>

#include <limits>
#include <type_traits>
#include <vector>

#ifndef __AVX512VNNI__
#define SDTUNE_AVX2
#endif
#include "lanes.h"
#include "handles.h"

namespace {

constexpr int64_t kRows = 16;       // of a tile: one per lane
constexpr int64_t kGroup = 32;      // inputs that share a scale and a minimum in int4
constexpr int64_t kMaxValue = 127 * 128 + 63;
constexpr float kSmallest = 1e-30f;
constexpr int64_t kMaxPositions = kLanes == 16 ? 6 : 5;  // at once
constexpr int64_t kBytesPerThread = 1 << 16;
constexpr int64_t kBytesAhead = 4096;  // beyond a page, where the processor does not prefetch by itself
// For one or two positions, with AVX2 for any number, into the first cache.
constexpr int64_t kBytesAheadOfFew = kReadsNear ? 256 : 1024;

int64_t item_size(Precision precision) { return precision == Precision::kFloat32 ? 4 : 2; }

Lanes load(const void* from, Precision precision, int64_t count) {
  return with_format(precision, [&](auto format) { return format.read((const typename decltype(format)::Value*)from, count); });
}

void store(void* to, Precision precision, int64_t count, Lanes values) {
  with_format(precision, [&](auto format) { format.write((typename decltype(format)::Value*)to, count, values); });
}

// The values of all positions as integers, zeros after the last input. How they are stored depends on the instructions.
struct Values {
  int64_t padded;
  std::vector<double> scales, sums;  // by position
#ifndef SDTUNE_AVX2
  std::vector<int8_t> high, low;  // 128 * high + low
  std::vector<int16_t> high_sums, low_sums;  // by position and group of 32
#else
  std::vector<int16_t> words;  // of four neighbours the first, the third, the second and the fourth
  std::vector<int32_t> group_sums;  // by position and group of 32
#endif

  Values(const void* from, Precision precision, int64_t positions, int64_t inputs)
      : padded((inputs + 2 * kGroup - 1) / (2 * kGroup) * 2 * kGroup),
        scales(positions),
        sums(positions),
#ifndef SDTUNE_AVX2
        high(positions * padded),
        low(positions * padded),
        high_sums(positions * padded / kGroup),
        low_sums(positions * padded / kGroup)
#else
        words(positions * padded),
        group_sums(positions * padded / kGroup)
#endif
  {
    for (int64_t m = 0; m < positions; ++m) {
      quantise((const char*)from + m * inputs * item_size(precision), precision, inputs, m);
      add_up(m);
    }
  }

  void quantise(const char* from, Precision precision, int64_t inputs, int64_t m) {
    const auto values = [&](int64_t k) { return load(from + k * item_size(precision), precision, inputs - k); };
    Lanes largest = zeros();
    bool bad = false;
    for (int64_t k = 0; k < inputs; k += kLanes) {
      const Lanes sizes = absolute(values(k));
      bad |= exceeds(sizes, std::numeric_limits<float>::max());
      largest = greater(largest, sizes);
    }
    const float size = std::max(greatest_of(largest), kSmallest);
    scales[m] = bad ? std::numeric_limits<float>::quiet_NaN() : size / float(kMaxValue);
    if (bad) return;
    const Lanes steps = all(1 / size * float(kMaxValue));
    for (int64_t k = 0; k < inputs; k += kLanes) put(multiply(values(k), steps), m * padded + k);
  }

#ifndef SDTUNE_AVX2
  void put(Lanes values, int64_t at) {
    const __m512i integers = _mm512_cvtps_epi32(values);
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(integers, _mm512_set1_epi32(64)), 7);
    const __m512i lower = _mm512_sub_epi32(integers, _mm512_slli_epi32(upper, 7));
    _mm_storeu_si128((__m128i*)&high[at], _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i*)&low[at], _mm512_cvtepi32_epi8(lower));
  }

  void add_up(int64_t m) {
    const __m512i ones = _mm512_set1_epi8(1);
    int64_t sum = 0;
    for (int64_t g = m * padded / kGroup; g < (m + 1) * padded / kGroup; ++g) {
      const auto of_group = [&](const int8_t* from) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
        const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm512_castsi512_si256(ones), bytes);
        return _mm512_reduce_add_epi32(_mm512_zextsi256_si512(sums));
      };
      high_sums[g] = of_group(&high[g * kGroup]);
      low_sums[g] = of_group(&low[g * kGroup]);
      sum += 128 * high_sums[g] + low_sums[g];
    }
    sums[m] = sum;
  }
#else
  void put(Lanes values, int64_t at) {
    const __m256i integers = _mm256_cvtps_epi32(values);
    const __m128i eight = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm_storeu_si128((__m128i*)&words[at], _mm_shuffle_epi8(eight, order));
  }

  void add_up(int64_t m) {
    int64_t sum = 0;
    for (int64_t g = m * padded / kGroup; g < (m + 1) * padded / kGroup; ++g) {
      for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) group_sums[g] += words[i];
      sum += group_sums[g];
    }
    sums[m] = sum;
  }
#endif
};

// Two 16-bit or four 8-bit integers of a position, in each lane.
template <typename Value>
int32_t bits_of(const Value* from) {
  int32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// The weights as `quantised.py` stores them, whatever the instructions.
struct Int8Weight {
  static constexpr double kShift = 128;  // a stored weight is this much larger
  const uint8_t* tiles;

  static int64_t tile_bytes(int64_t inputs) { return (inputs + 3) / 4 * 64; }
};

struct Int4Weight {
  static constexpr double kShift = 0;
  const uint8_t *tiles, *scales;
  const int16_t* minima;

  static int64_t groups(int64_t inputs) { return (inputs + 2 * kGroup - 1) / (2 * kGroup) * 2; }
  static int64_t tile_bytes(int64_t inputs) { return groups(inputs) * kGroup * kRows / 2; }
};

#ifndef SDTUNE_AVX2

template <typename Value>
__m512i broadcast(const Value* from) {
  return _mm512_set1_epi32(bits_of(from));
}

// The sums of a tile for one position.
struct Sums {
  __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();

  // (sums - shift) * scales of rows * scale of the position, for all rows.
  Lanes scaled(int64_t, double shift, Lanes of_rows, double of_position) const {
    const auto half = [&](__m256i upper, __m256i lower, __m256 scales) {
      const __m512d whole = _mm512_add_pd(_mm512_mul_pd(_mm512_cvtepi32_pd(upper), _mm512_set1_pd(128)), _mm512_cvtepi32_pd(lower));
      const __m512d by_row = _mm512_mul_pd(_mm512_sub_pd(whole, _mm512_set1_pd(shift)), _mm512_cvtps_pd(scales));
      return _mm512_cvtpd_ps(_mm512_mul_pd(by_row, _mm512_set1_pd(of_position)));
    };
    const __m256 first = half(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low), _mm512_castps512_ps256(of_rows));
    const __m256 second = half(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1),
                               _mm512_extractf32x8_ps(of_rows, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
  }
};

struct Int8 : Int8Weight {
  static constexpr int kTiles = kReadsNear ? 2 : 4, kTilesOfOne = kReadsNear ? 2 : 8;  // read at a time, and for one position
  static constexpr int kSums = 12;                                                     // pairs of sums in registers

  // Return the sums of `R` tiles, `step` tiles apart, for `M` positions in `results`. All that the loop changes is local, so that it
  // stays in registers.
  template <int R, int M>
  void add(int64_t tile, int64_t step, const Values& values, int64_t position, int64_t inputs, Sums (&results)[R][M]) const {
    const int64_t bytes = tile_bytes(inputs), padded = values.padded;
    const uint8_t* w = tiles + tile * bytes;
    const int8_t *x_high = &values.high[position * padded], *x_low = &values.low[position * padded];
    __m512i high[R][M], low[R][M];
    SDTUNE_UNROLLED
    for (int r = 0; r < R; ++r)
      SDTUNE_UNROLLED
      for (int m = 0; m < M; ++m) high[r][m] = low[r][m] = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += 4) {
      __m512i of_tile[R];
      SDTUNE_UNROLLED
      for (int r = 0; r < R; ++r) {
        const uint8_t* from = w + r * step * bytes + k * 16;
        if constexpr (M <= 2) _mm_prefetch((const char*)from + kBytesAheadOfFew, _MM_HINT_T0);
        else _mm_prefetch((const char*)from + kBytesAhead, _MM_HINT_T1);
        of_tile[r] = _mm512_loadu_si512(from);
      }
      SDTUNE_UNROLLED
      for (int m = 0; m < M; ++m) {
        const __m512i upper = broadcast(x_high + m * padded + k), lower = broadcast(x_low + m * padded + k);
        SDTUNE_UNROLLED
        for (int r = 0; r < R; ++r) {
          high[r][m] = _mm512_dpbusd_epi32(high[r][m], of_tile[r], upper);
          low[r][m] = _mm512_dpbusd_epi32(low[r][m], of_tile[r], lower);
        }
      }
    }
    SDTUNE_UNROLLED
    for (int r = 0; r < R; ++r)
      SDTUNE_UNROLLED
      for (int m = 0; m < M; ++m) results[r][m] = {high[r][m], low[r][m]};
  }
};

struct Int4 : Int4Weight {
  static constexpr int kTiles = 2, kTilesOfOne = kReadsNear ? 2 : 4, kSums = 6;

  // Add the sums of `R` tiles, `step` tiles apart, for `M` positions.
  template <int R, int M>
  void add(int64_t tile, int64_t step, const Values& values, int64_t position, int64_t inputs, Sums (&sums)[R][M]) const {
    const int64_t count = groups(inputs);
    for (int64_t g = 0; g < count; g += 2) {
      for (int r = 0; r < R; ++r) add_minima<M>((tile + r * step) * count + g, values, position, g, sums[r]);
      add_group<R, M>(tile * count + g, step * count, values, position, g, sums);
      add_group<R, M>(tile * count + g + 1, step * count, values, position, g + 1, sums);
    }
  }

  // The minima of two groups times the sums of the values in them.
  template <int M>
  void add_minima(int64_t index, const Values& values, int64_t position, int64_t group, Sums (&sums)[M]) const {
    const __m512i of_rows = _mm512_loadu_si512(minima + index * kRows);
    for (int m = 0; m < M; ++m) {
      const int64_t at = (position + m) * values.padded / kGroup + group;
      sums[m].high = _mm512_dpwssd_epi32(sums[m].high, of_rows, broadcast(&values.high_sums[at]));
      sums[m].low = _mm512_dpwssd_epi32(sums[m].low, of_rows, broadcast(&values.low_sums[at]));
    }
  }

  template <int R, int M>
  void add_group(int64_t index, int64_t step, const Values& values, int64_t position, int64_t group, Sums (&sums)[R][M]) const {
    const int64_t padded = values.padded, first = position * padded + group * kGroup;
    const int8_t *x_high = &values.high[first], *x_low = &values.low[first];
    const uint8_t* w = tiles + index * kGroup * kRows / 2;
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i upper[R][M], lower[R][M];
    SDTUNE_UNROLLED
    for (int r = 0; r < R; ++r)
      SDTUNE_UNROLLED
      for (int m = 0; m < M; ++m) upper[r][m] = lower[r][m] = _mm512_setzero_si512();
    for (int64_t j = 0; j < 4; ++j) {
      __m512i bits[2][R];
      SDTUNE_UNROLLED
      for (int r = 0; r < R; ++r) {
        const uint8_t* from = w + r * step * kGroup * kRows / 2 + j * 64;
        if constexpr (M <= 2) _mm_prefetch((const char*)from + kBytesAheadOfFew, _MM_HINT_T0);
        else _mm_prefetch((const char*)from + kBytesAhead, _MM_HINT_T1);
        const __m512i pairs = _mm512_loadu_si512(from);
        bits[0][r] = _mm512_and_si512(pairs, mask), bits[1][r] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask);
      }
      SDTUNE_UNROLLED
      for (int half = 0; half < 2; ++half) {
        SDTUNE_UNROLLED
        for (int m = 0; m < M; ++m) {
          const int64_t k = m * padded + half * kGroup / 2 + j * 4;
          const __m512i high = broadcast(x_high + k), low = broadcast(x_low + k);
          SDTUNE_UNROLLED
          for (int r = 0; r < R; ++r) {
            upper[r][m] = _mm512_dpbusd_epi32(upper[r][m], bits[half][r], high);
            lower[r][m] = _mm512_dpbusd_epi32(lower[r][m], bits[half][r], low);
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      const __m512i of_rows = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(scales + (index + r * step) * kRows)));
      for (int m = 0; m < M; ++m) {
        sums[r][m].high = _mm512_add_epi32(sums[r][m].high, _mm512_mullo_epi32(upper[r][m], of_rows));
        sums[r][m].low = _mm512_add_epi32(sums[r][m].low, _mm512_mullo_epi32(lower[r][m], of_rows));
      }
    }
  }
};

#else

// The same integers, of which the compiler knows nothing: it neither reads them again nor adds them in another order, which would take
// more registers than there are.
__m256i as_written(__m256i integers) {
  asm("" : "+x"(integers));
  return integers;
}

// Sixteen integers of 32 bits.
struct Integers {
  __m256i halves[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};

  // Add the products of four bytes of each row with four values. `words` are these as `Values` stores them.
  [[gnu::always_inline]] void add(const __m256i (&even)[2], const __m256i (&odd)[2], const int16_t* words) {
    const __m256i of_even = as_written(_mm256_set1_epi32(bits_of(words)));
    const __m256i of_odd = as_written(_mm256_set1_epi32(bits_of(words + 2)));
    SDTUNE_UNROLLED
    for (int half = 0; half < 2; ++half) {
      const __m256i sum = as_written(_mm256_add_epi32(halves[half], _mm256_madd_epi16(odd[half], of_odd)));
      halves[half] = _mm256_add_epi32(sum, _mm256_madd_epi16(even[half], of_even));
    }
  }
};

// The sums of a tile for one position.
struct Sums {
  __m256d quarters[4] = {};

  void add(const Integers& integers) {
    for (int i = 0; i < 4; ++i) {
      const __m256i eight = integers.halves[i / 2];
      const __m128i four = i % 2 ? _mm256_extracti128_si256(eight, 1) : _mm256_castsi256_si128(eight);
      quarters[i] = _mm256_add_pd(quarters[i], _mm256_cvtepi32_pd(four));
    }
  }

  // (sums - shift) * scales of rows * scale of the position, for 8 rows from `first` on.
  Lanes scaled(int64_t first, double shift, Lanes of_rows, double of_position) const {
    const auto four = [&](__m256d sum, __m128 scales) {
      const __m256d by_row = _mm256_mul_pd(_mm256_sub_pd(sum, _mm256_set1_pd(shift)), _mm256_cvtps_pd(scales));
      return _mm256_cvtpd_ps(_mm256_mul_pd(by_row, _mm256_set1_pd(of_position)));
    };
    const __m256d* sums = quarters + first / 4;
    return _mm256_set_m128(four(sums[1], _mm256_extractf128_ps(of_rows, 1)), four(sums[0], _mm256_castps256_ps128(of_rows)));
  }
};

void prefetch(const uint8_t* from) { _mm_prefetch((const char*)from + kBytesAheadOfFew, _MM_HINT_T0); }

struct Int8 : Int8Weight {
  // Several positions wait for products rather than for memory, so that one tile at a time will do.
  static constexpr int kTiles = 1, kTilesOfOne = 4;  // read at a time, and for one position
  static constexpr int kSums = 4;                    // in registers
  static constexpr int64_t kFit = 512;  // inputs whose products fit in 32 bits: 255 * kMaxValue each

  // Add the sums of `R` tiles, `step` tiles apart, for `M` positions.
  template <int R, int M>
  void add(int64_t tile, int64_t step, const Values& values, int64_t position, int64_t inputs, Sums (&sums)[R][M]) const {
    const int64_t bytes = tile_bytes(inputs), padded = values.padded;
    const uint8_t* w = tiles + tile * bytes;
    const int16_t* x = &values.words[position * padded];
    for (int64_t first = 0; first < inputs; first += kFit) {
      Integers found[R][M];
      sum_up(w + first * 16, step * bytes, x + first, padded, std::min(kFit, inputs - first), found);
      for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) sums[r][m].add(found[r][m]);
    }
  }

  // Tiles from `w` on, `apart` bytes apart, times values from `x` on. A function of its own, as gcc keeps too few sums in registers
  // where it is a part of another.
  template <int R, int M>
  [[gnu::noinline]] static void sum_up(const uint8_t* w, int64_t apart, const int16_t* x, int64_t padded, int64_t inputs,
                                       Integers (&results)[R][M]) {
    const __m256i lower = _mm256_set1_epi16(255);
    Integers sums[R][M];
    for (int64_t k = 0; k < inputs; k += 4) {
      SDTUNE_UNROLLED
      for (int r = 0; r < R; ++r) {
        const uint8_t* from = w + r * apart + k * 16;
        prefetch(from);
        const __m256i of_rows[2] = {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
        const __m256i even[2] = {_mm256_and_si256(of_rows[0], lower), _mm256_and_si256(of_rows[1], lower)};
        const __m256i odd[2] = {_mm256_srli_epi16(of_rows[0], 8), _mm256_srli_epi16(of_rows[1], 8)};
        SDTUNE_UNROLLED
        for (int m = 0; m < M; ++m) sums[r][m].add(even, odd, x + m * padded + k);
      }
    }
    SDTUNE_UNROLLED
    for (int r = 0; r < R; ++r)
      SDTUNE_UNROLLED
      for (int m = 0; m < M; ++m) results[r][m] = sums[r][m];
  }
};

struct Int4 : Int4Weight {
  static constexpr int kTiles = 2, kTilesOfOne = 2, kSums = 6;

  template <int R, int M>
  void add(int64_t tile, int64_t step, const Values& values, int64_t position, int64_t inputs, Sums (&sums)[R][M]) const {
    const int64_t count = groups(inputs);
    for (int64_t g = 0; g < count; ++g)
      for (int r = 0; r < R; ++r) add_group<M>((tile + r * step) * count + g, values, position, g, sums[r]);
  }

  // The sum of a group, times its scale, and its minimum times the sum of its values: together within 32 bits.
  template <int M>
  void add_group(int64_t index, const Values& values, int64_t position, int64_t group, Sums (&sums)[M]) const {
    const int64_t padded = values.padded;
    const int16_t* x = &values.words[position * padded + group * kGroup];
    const uint8_t* w = tiles + index * kGroup * kRows / 2;
    const __m256i mask = _mm256_set1_epi16(15);
    Integers found[M];
    for (int64_t j = 0; j < 4; ++j) {
      prefetch(w + j * 64);
      __m256i even[2][2], odd[2][2];
      for (int half = 0; half < 2; ++half) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)(w + j * 64) + half);
        even[0][half] = _mm256_and_si256(pairs, mask), odd[0][half] = _mm256_and_si256(_mm256_srli_epi16(pairs, 8), mask);
        even[1][half] = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask), odd[1][half] = _mm256_srli_epi16(pairs, 12);
      }
      SDTUNE_UNROLLED
      for (int upper = 0; upper < 2; ++upper)
        SDTUNE_UNROLLED
        for (int m = 0; m < M; ++m) found[m].add(even[upper], odd[upper], x + m * padded + upper * kGroup / 2 + j * 4);
    }
    const auto of_rows = [&](auto from) { return _mm256_loadu_si256((const __m256i*)from); };
    const __m128i bytes = _mm_loadu_si128((const __m128i*)(scales + index * kRows));
    const __m256i scale[2] = {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
    // Minima of two groups are pairs: the one of this group is in the lower or the upper half of each word.
    const int16_t* of_pair = minima + index / 2 * 2 * kRows;
    const auto minimum = [&](int half) {
      const __m256i words = of_rows(of_pair + half * kRows);
      return group % 2 ? _mm256_srai_epi32(words, 16) : _mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16);
    };
    const __m256i least[2] = {minimum(0), minimum(1)};
    for (int m = 0; m < M; ++m) {
      const __m256i sum = _mm256_set1_epi32(values.group_sums[(position + m) * padded / kGroup + group]);
      const auto whole = [&](__m256i of_group, int half) {
        return _mm256_add_epi32(_mm256_mullo_epi32(of_group, scale[half]), _mm256_mullo_epi32(least[half], sum));
      };
      Integers both;
      both.halves[0] = whole(found[m].halves[0], 0), both.halves[1] = whole(found[m].halves[1], 1);
      sums[m].add(both);
    }
  }
};

#endif

#ifdef SDTUNE_AMX_INT8

// int8 in the tiles of AMX: sixteen rows of the weight, 64 inputs at a time, times up to 16 positions, which take little longer
// than one.
class TilesAtOnce {
 public:
  static constexpr int64_t kPositions = 16, kFewest = 3;
  static constexpr int64_t kInputs = 64, kBytes = kInputs * kRows;  // of a tile of the processor
  static constexpr int64_t kAhead = 4;                              // tiles to prefetch

  // For `count` positions, until destroyed.
  explicit TilesAtOnce(int64_t count) {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = tile < 6 ? count : 16;
    asm volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
  }
  ~TilesAtOnce() { _tile_release(); }

  // Hand `write` the sums of one or two tiles of rows. Tiles 0 to 3 hold sums of high and low bytes [positions, rows], 4 and 5 the
  // high and low bytes of values [positions, inputs], 6 and 7 weights [inputs / 4, rows, 4].
  template <int T, typename Write>
  static void sum(const uint8_t* first, const uint8_t* second, const Values& values, int64_t position, int64_t count, int64_t inputs,
                  Write write) {
    const int64_t padded = values.padded, whole = inputs / kInputs;
    const int8_t *high = &values.high[position * padded], *low = &values.low[position * padded];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const auto add = [&](const uint8_t* of_first, const uint8_t* of_second) __attribute__((always_inline)) {
      _tile_loadd(4, high, padded);
      _tile_loadd(5, low, padded);
      _tile_loadd(6, of_first, 64);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 5, 6);
      if constexpr (T == 2) {
        _tile_loadd(7, of_second, 64);
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 5, 7);
      }
    };
    for (int64_t step = 0; step < whole; ++step, high += kInputs, low += kInputs, first += kBytes, second += kBytes) {
      for (int64_t line = 0; line < kBytes; line += 64) {
        _mm_prefetch((const char*)first + kAhead * kBytes + line, _MM_HINT_T0);
        if constexpr (T == 2) _mm_prefetch((const char*)second + kAhead * kBytes + line, _MM_HINT_T0);
      }
      add(first, second);
    }
    if (const int64_t rest = Int8Weight::tile_bytes(inputs) - whole * kBytes) {
      uint8_t last[T][kBytes] = {};
      for (int t = 0; t < T; ++t) std::copy_n(t ? second : first, rest, last[t]);
      asm volatile("" ::: "memory");  // the compiler does not know what tiles read
      add(last[0], last[T - 1]);
    }
    int32_t sums[4][kPositions][kRows];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if constexpr (T == 2) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    }
    asm volatile("" ::: "memory");
    for (int t = 0; t < T; ++t)
      for (int64_t m = 0; m < count; ++m)
        write(t, position + m, Sums{_mm512_loadu_si512(sums[2 * t][m]), _mm512_loadu_si512(sums[2 * t + 1][m])});
  }
};

#endif

template <typename Weight>
struct Product {
  const Weight weight;
  const float* row_scales;
  const Values& values;
  void* outputs;
  Precision precision;
  int64_t positions, rows, inputs;

  template <int R, int M>
  void compute(int64_t tile, int64_t step, int64_t position) const {
    Sums sums[R][M];
    weight.template add<R, M>(tile, step, values, position, inputs, sums);
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) write(tile + r * step, position + m, sums[r][m]);
  }

  void write(int64_t tile, int64_t position, const Sums& sums) const {
    for (int64_t first = 0; first < kRows; first += kLanes) {
      const int64_t row = tile * kRows + first, count = std::min(kLanes, rows - row);
      const double shift = Weight::kShift * values.sums[position];
      const Lanes found = sums.scaled(first, shift, load(row_scales + row, count), values.scales[position]);
      store((char*)outputs + (position * rows + row) * item_size(precision), precision, count, found);
    }
  }

  // `M` positions of `T` tiles, as many tiles at once as there are registers for their sums.
  template <int T, int M>
  void compute_tiles(int64_t tile, int64_t step, int64_t position) const {
    constexpr int kFit = Weight::kSums / M, R = kFit >= 8 ? T : kFit >= 4 ? std::min(T, 4) : kFit >= 2 ? std::min(T, 2) : 1;
    for (int r = 0; r < T; r += R) compute<R, M>(tile + r * step, step, position);
  }

  template <int T>
  void compute_piece(int64_t tile, int64_t step, int64_t position, int64_t count) const {
    switch (count) {
      case 1: return compute_tiles<T, 1>(tile, step, position);
      case 2: return compute_tiles<T, 2>(tile, step, position);
      case 3: return compute_tiles<T, 3>(tile, step, position);
      case 4: return compute_tiles<T, 4>(tile, step, position);
      case 5: return compute_tiles<T, 5>(tile, step, position);
      default: return compute_tiles<T, 6>(tile, step, position);
    }
  }

  // All positions for `T` tiles, which stay in the caches meanwhile.
  template <int T>
  void all_positions(int64_t tile, int64_t step) const {
    const int64_t pieces = (positions + kMaxPositions - 1) / kMaxPositions;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = positions * piece / pieces;
      compute_piece<T>(tile, step, first, positions * (piece + 1) / pieces - first);
    }
  }

  // `T` tiles at a time, each from another part of the weight. The rest goes by half as many, and so on: one tile at a time would wait
  // for memory.
  template <int T, bool kOne>
  void compute_all(int64_t first, int64_t end) const {
    const int64_t step = (end - first) / T, rest = first + step * T;
    for (int64_t tile = first; tile < first + step; ++tile) {
      if constexpr (kOne) compute_tiles<T, 1>(tile, step, 0);
      else all_positions<T>(tile, step);
    }
    if constexpr (T > 1) compute_all<T / 2, kOne>(rest, end);
  }

#ifdef SDTUNE_AMX_INT8
  // All positions of the tiles of a thread, by the processor's own tiles: two at a time, from the two halves.
  void compute_in_tiles(int64_t first, int64_t end) const {
    const int64_t pieces = (positions + TilesAtOnce::kPositions - 1) / TilesAtOnce::kPositions;
    const int64_t count = (positions + pieces - 1) / pieces, half = (end - first) / 2, bytes = Weight::tile_bytes(inputs);
    const TilesAtOnce configured(count);
    const auto run = [&](auto at_once, int64_t tile) {
      constexpr int T = decltype(at_once)::value;
      const uint8_t* from = weight.tiles + tile * bytes;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        // The last piece begins earlier, so that it is whole: some positions are computed twice.
        const int64_t position = std::min(piece * count, positions - count);
        TilesAtOnce::sum<T>(from, from + half * bytes, values, position, count, inputs,
                            [&](int t, int64_t m, const Sums& sums) { write(tile + t * half, m, sums); });
      }
    };
    for (int64_t tile = first; tile < first + half; ++tile) run(std::integral_constant<int, 2>(), tile);
    if ((end - first) % 2) run(std::integral_constant<int, 1>(), end - 1);
  }
#endif

  void compute() const {
    const int64_t tiles = (rows + kRows - 1) / kRows;
    const int64_t grain = std::max<int64_t>(1, kBytesPerThread / Weight::tile_bytes(inputs));
    at::parallel_for(0, tiles, grain, [this](int64_t first, int64_t end) {
#ifdef SDTUNE_AMX_INT8
      if constexpr (std::is_same_v<Weight, Int8>)
        if (positions >= TilesAtOnce::kFewest && may_use_tiles()) return compute_in_tiles(first, end);
#endif
      positions == 1 ? compute_all<Weight::kTilesOfOne, true>(first, end) : compute_all<Weight::kTiles, false>(first, end);
    });
  }
};

}  // namespace

// Multiply contiguous values. `group_scales` and `minima` are null for int8.
extern "C" __attribute__((visibility("default"))) void sdtune_quantised(
    const void* values, const void* tiles, const void* row_scales, const void* group_scales, const void* minima,
    void* outputs, int64_t positions, int64_t rows, int64_t inputs, int64_t precision) {
  const auto kind = Precision(precision);
  const Values integers(values, kind, positions, inputs);
  const auto compute = [&](auto weight) {
    Product<decltype(weight)>{weight, (const float*)row_scales, integers, outputs, kind, positions, rows, inputs}.compute();
  };
  if (group_scales == nullptr) return compute(Int8{(const uint8_t*)tiles});
  compute(Int4{(const uint8_t*)tiles, (const uint8_t*)group_scales, (const int16_t*)minima});
}

// As inductor's code calls it: allocates the outputs. Empty `group_scales` and `minima` mean int8.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_sdtune_quantised(
    AtenTensorHandle values, AtenTensorHandle tiles, AtenTensorHandle row_scales, AtenTensorHandle group_scales,
    AtenTensorHandle minima, AtenTensorHandle* outputs) {
  int64_t positions, rows, inputs, num_groups;
  Precision precision;
  void* data[6];
  SDTUNE_CHECK(aoti_torch_get_numel(row_scales, &rows));
  SDTUNE_CHECK(aoti_torch_get_numel(group_scales, &num_groups));
  SDTUNE_CHECK(allocate(values, rows, outputs, &positions, &inputs, &precision));
  SDTUNE_CHECK(addresses({values, tiles, row_scales, group_scales, minima, *outputs}, data));
  sdtune_quantised(data[0], data[1], data[2], num_groups ? data[3] : nullptr, num_groups ? data[4] : nullptr, data[5], positions, rows,
                   inputs, int64_t(precision));
  return AOTI_TORCH_SUCCESS;
}
