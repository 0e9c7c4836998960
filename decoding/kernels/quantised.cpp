// Linear layers with integer weights: outputs[m, n] = scale[n] * scale of position m * sum over k of x[m, k] * w[n, k].
//
// A value is 128 times a signed byte plus another one, so that each sum is two sums of products of bytes (VNNI). All
// sums are integers and exact: the same bits for any number of positions, and those of `QuantisedLinear`.
//
// Weights lie in tiles of 16 rows, which `quantised.py` describes. A lane sums a row, so that nothing is added
// across lanes. Several tiles are read at a time, each from another part of the weight.

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kRows = 16;       // of a tile: one per lane
constexpr int64_t kGroup = 32;      // inputs that share a scale and a minimum in int4
constexpr int64_t kMaxValue = 127 * 128 + 63;
constexpr float kSmallest = 1e-30f;
constexpr int64_t kMaxPositions = 6;  // at once
constexpr int64_t kBytesPerThread = 1 << 16;
constexpr int64_t kBytesAhead = 4096;  // beyond a page, where the processor does not prefetch by itself

enum class Precision : int64_t { kFloat32, kBFloat16, kFloat16 };

int64_t item_size(Precision precision) { return precision == Precision::kFloat32 ? 4 : 2; }

__m512 load(const void* from, Precision precision, __mmask16 mask) {
  if (precision == Precision::kFloat32) return _mm512_maskz_loadu_ps(mask, from);
  const __m256i halves = _mm256_maskz_loadu_epi16(mask, from);
  if (precision == Precision::kFloat16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

void store(void* to, Precision precision, __mmask16 mask, __m512 values) {
  if (precision == Precision::kFloat32) return _mm512_mask_storeu_ps(to, mask, values);
  if (precision == Precision::kFloat16)
    return _mm256_mask_storeu_epi16(to, mask, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i upper = _mm512_mask_mov_epi32(_mm512_srli_epi32(nearest, 16), is_nan, _mm512_set1_epi32(0x7fc0));
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(upper));
}

// The values of all positions as integers: 128 * high + low, zeros after the last input.
struct Values {
  int64_t padded;
  std::vector<int8_t> high, low;
  std::vector<int16_t> high_sums, low_sums;  // by position and group of 32
  std::vector<double> scales, sums;          // by position

  Values(const void* from, Precision precision, int64_t positions, int64_t inputs)
      : padded((inputs + 2 * kGroup - 1) / (2 * kGroup) * 2 * kGroup),
        high(positions * padded),
        low(positions * padded),
        high_sums(positions * padded / kGroup),
        low_sums(positions * padded / kGroup),
        scales(positions),
        sums(positions) {
    for (int64_t m = 0; m < positions; ++m) {
      quantise((const char*)from + m * inputs * item_size(precision), precision, inputs, m);
      add_up(m);
    }
  }

  void quantise(const char* from, Precision precision, int64_t inputs, int64_t m) {
    const auto values = [&](int64_t k) {
      const __mmask16 mask = inputs - k >= 16 ? 0xffff : (1u << (inputs - k)) - 1;
      return load(from + k * item_size(precision), precision, mask);
    };
    __m512 largest = _mm512_setzero_ps();
    __mmask16 bad = 0;
    for (int64_t k = 0; k < inputs; k += 16) {
      const __m512 sizes = _mm512_abs_ps(values(k));
      bad |= _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(std::numeric_limits<float>::max()), _CMP_NLE_UQ);
      largest = _mm512_max_ps(largest, sizes);
    }
    const float size = std::max(_mm512_reduce_max_ps(largest), kSmallest);
    scales[m] = bad ? std::numeric_limits<float>::quiet_NaN() : size / float(kMaxValue);
    if (bad) return;
    const __m512 steps = _mm512_set1_ps(1 / size * float(kMaxValue));
    for (int64_t k = 0; k < inputs; k += 16) {
      const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(values(k), steps));
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(integers, _mm512_set1_epi32(64)), 7);
      const __m512i lower = _mm512_sub_epi32(integers, _mm512_slli_epi32(upper, 7));
      _mm_storeu_si128((__m128i*)&high[m * padded + k], _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128((__m128i*)&low[m * padded + k], _mm512_cvtepi32_epi8(lower));
    }
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
};

// Two 16-bit or four 8-bit integers of a position, in each lane.
template <typename Value>
__m512i broadcast(const Value* from) {
  int32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return _mm512_set1_epi32(bits);
}

struct Int8 {
  static constexpr int kTiles = 4;   // read at a time
  static constexpr int kSums = 10;   // pairs of sums in registers
  static constexpr double kShift = 128;                 // a stored weight is this much larger
  const uint8_t* tiles;

  static int64_t tile_bytes(int64_t inputs) { return (inputs + 3) / 4 * 64; }

  // Add the sums of `R` tiles, `step` tiles apart, for `M` positions.
  template <int R, int M>
  void add(int64_t tile, int64_t step, const Values& values, int64_t position, int64_t inputs, __m512i (&high)[R][M],
           __m512i (&low)[R][M]) const {
    const int64_t bytes = tile_bytes(inputs), padded = values.padded;
    const uint8_t* w = tiles + tile * bytes;
    const int8_t *x_high = &values.high[position * padded], *x_low = &values.low[position * padded];
    for (int64_t k = 0; k < inputs; k += 4) {
      __m512i of_tile[R];
      for (int r = 0; r < R; ++r) {
        const uint8_t* from = w + r * step * bytes + k * 16;
        if constexpr (M >= 2) _mm_prefetch((const char*)from + kBytesAhead, _MM_HINT_T1);
        of_tile[r] = _mm512_loadu_si512(from);
      }
      for (int m = 0; m < M; ++m) {
        const __m512i upper = broadcast(x_high + m * padded + k), lower = broadcast(x_low + m * padded + k);
        for (int r = 0; r < R; ++r) {
          high[r][m] = _mm512_dpbusd_epi32(high[r][m], of_tile[r], upper);
          low[r][m] = _mm512_dpbusd_epi32(low[r][m], of_tile[r], lower);
        }
      }
    }
  }
};

struct Int4 {
  static constexpr int kTiles = 2, kSums = 6;
  static constexpr double kShift = 0;
  const uint8_t *tiles, *scales;
  const int16_t* minima;

  static int64_t groups(int64_t inputs) { return (inputs + 2 * kGroup - 1) / (2 * kGroup) * 2; }
  static int64_t tile_bytes(int64_t inputs) { return groups(inputs) * kGroup * kRows / 2; }

  template <int R, int M>
  void add(int64_t tile, int64_t step, const Values& values, int64_t position, int64_t inputs, __m512i (&high)[R][M],
           __m512i (&low)[R][M]) const {
    const int64_t count = groups(inputs);
    for (int64_t g = 0; g < count; g += 2) {
      for (int r = 0; r < R; ++r) {
        const int64_t first = (tile + r * step) * count + g;
        add_minima<M>(first, values, position, g, high[r], low[r]);
        add_group<M>(first, values, position, g, high[r], low[r]);
        add_group<M>(first + 1, values, position, g + 1, high[r], low[r]);
      }
    }
  }

  // The minima of two groups times the sums of the values in them.
  template <int M>
  void add_minima(int64_t index, const Values& values, int64_t position, int64_t group, __m512i (&high)[M],
                  __m512i (&low)[M]) const {
    const __m512i of_rows = _mm512_loadu_si512(minima + index * kRows);
    for (int m = 0; m < M; ++m) {
      const int64_t at = (position + m) * values.padded / kGroup + group;
      high[m] = _mm512_dpwssd_epi32(high[m], of_rows, broadcast(&values.high_sums[at]));
      low[m] = _mm512_dpwssd_epi32(low[m], of_rows, broadcast(&values.low_sums[at]));
    }
  }

  template <int M>
  void add_group(int64_t index, const Values& values, int64_t position, int64_t group, __m512i (&high)[M],
                 __m512i (&low)[M]) const {
    const int64_t padded = values.padded, first = position * padded + group * kGroup;
    const int8_t *x_high = &values.high[first], *x_low = &values.low[first];
    const uint8_t* w = tiles + index * kGroup * kRows / 2;
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i upper[M], lower[M];
    for (int m = 0; m < M; ++m) upper[m] = lower[m] = _mm512_setzero_si512();
    for (int64_t j = 0; j < 4; ++j) {
      _mm_prefetch((const char*)w + j * 64 + kBytesAhead, _MM_HINT_T1);
      const __m512i pairs = _mm512_loadu_si512(w + j * 64);
      const __m512i bits[2] = {_mm512_and_si512(pairs, mask), _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask)};
      for (int half = 0; half < 2; ++half) {
        for (int m = 0; m < M; ++m) {
          const int64_t k = m * padded + half * kGroup / 2 + j * 4;
          upper[m] = _mm512_dpbusd_epi32(upper[m], bits[half], broadcast(x_high + k));
          lower[m] = _mm512_dpbusd_epi32(lower[m], bits[half], broadcast(x_low + k));
        }
      }
    }
    const __m512i of_rows = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(scales + index * kRows)));
    for (int m = 0; m < M; ++m) {
      high[m] = _mm512_add_epi32(high[m], _mm512_mullo_epi32(upper[m], of_rows));
      low[m] = _mm512_add_epi32(low[m], _mm512_mullo_epi32(lower[m], of_rows));
    }
  }
};

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
    __m512i high[R][M], low[R][M];
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) high[r][m] = low[r][m] = _mm512_setzero_si512();
    weight.template add<R, M>(tile, step, values, position, inputs, high, low);
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) write(tile + r * step, position + m, high[r][m], low[r][m]);
  }

  void write(int64_t tile, int64_t position, __m512i high, __m512i low) const {
    const int64_t row = tile * kRows, count = std::min(kRows, rows - row);
    const __mmask16 mask = count == kRows ? 0xffff : (1u << count) - 1;
    const __m512 scales = _mm512_maskz_loadu_ps(mask, row_scales + row);
    const auto scaled = [&](__m256i upper, __m256i lower, __m256 of_rows) {
      const __m512d whole = _mm512_add_pd(_mm512_mul_pd(_mm512_cvtepi32_pd(upper), _mm512_set1_pd(128)),
                                          _mm512_cvtepi32_pd(lower));
      const __m512d sums = _mm512_sub_pd(whole, _mm512_set1_pd(Weight::kShift * values.sums[position]));
      const __m512d by_row = _mm512_mul_pd(sums, _mm512_cvtps_pd(of_rows));
      return _mm512_cvtpd_ps(_mm512_mul_pd(by_row, _mm512_set1_pd(values.scales[position])));
    };
    const __m256 first = scaled(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low), _mm512_castps512_ps256(scales));
    const __m256 second = scaled(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1),
                                 _mm512_extractf32x8_ps(scales, 1));
    char* to = (char*)outputs + (position * rows + row) * item_size(precision);
    store(to, precision, mask, _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1));
  }

  // `M` positions of `T` tiles, as many tiles at once as there are registers for their sums.
  template <int T, int M>
  void compute_tiles(int64_t tile, int64_t step, int64_t position) const {
    constexpr int kFit = Weight::kSums / M, R = kFit >= 4 ? std::min(T, 4) : kFit >= 2 ? std::min(T, 2) : 1;
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

  void compute() const {
    const int64_t tiles = (rows + kRows - 1) / kRows;
    const int64_t grain = std::max<int64_t>(1, kBytesPerThread / Weight::tile_bytes(inputs));
    at::parallel_for(0, tiles, grain, [this](int64_t first, int64_t end) {
      const int64_t step = (end - first) / Weight::kTiles;
      for (int64_t tile = first; tile < first + step; ++tile) all_positions<Weight::kTiles>(tile, step);
      for (int64_t tile = first + step * Weight::kTiles; tile < end; ++tile) all_positions<1>(tile, 0);
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

#define SDTUNE_CHECK(call) \
  if (auto error = (call)) return error

// As inductor's code calls it: allocates the outputs. Empty `group_scales` and `minima` mean int8.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_sdtune_quantised(
    AtenTensorHandle values, AtenTensorHandle tiles, AtenTensorHandle row_scales, AtenTensorHandle group_scales,
    AtenTensorHandle minima, AtenTensorHandle* outputs) {
  int64_t dims, *sizes, rows, new_sizes[8], strides[8], num_groups;
  int32_t dtype;
  void *from, *weight, *by_row, *by_group, *least, *to;
  SDTUNE_CHECK(aoti_torch_get_dim(values, &dims));
  SDTUNE_CHECK(aoti_torch_get_sizes(values, &sizes));
  SDTUNE_CHECK(aoti_torch_get_dtype(values, &dtype));
  SDTUNE_CHECK(aoti_torch_get_numel(row_scales, &rows));
  SDTUNE_CHECK(aoti_torch_get_numel(group_scales, &num_groups));
  if (dims < 1 || dims > 8) return AOTI_TORCH_FAILURE;
  int64_t positions = 1, stride = 1;
  for (int64_t dim = 0; dim < dims - 1; ++dim) positions *= sizes[dim];
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    new_sizes[dim] = dim == dims - 1 ? rows : sizes[dim];
    strides[dim] = stride;
    stride *= new_sizes[dim];
  }
  SDTUNE_CHECK(aoti_torch_empty_strided(dims, new_sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, outputs));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(values, &from));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(tiles, &weight));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(row_scales, &by_row));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(group_scales, &by_group));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(minima, &least));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(*outputs, &to));
  const Precision precision = dtype == aoti_torch_dtype_float32()    ? Precision::kFloat32
                              : dtype == aoti_torch_dtype_bfloat16() ? Precision::kBFloat16
                                                                     : Precision::kFloat16;
  sdtune_quantised(from, weight, by_row, num_groups ? by_group : nullptr, num_groups ? least : nullptr, to, positions,
                   rows, sizes[dims - 1], int64_t(precision));
  return AOTI_TORCH_SUCCESS;
}
