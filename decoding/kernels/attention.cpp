// Attention of few positions over a key-value cache, read in place and only as far as it is used.
//
// Query heads that share keys are rows of one pass over them (FlashAttention's online softmax, arXiv 2205.14135). Long
// contexts are split into chunks, whose results are combined at the end (Flash-Decoding). Blocks and chunks begin at
// multiples of their size, and a key that a row does not see adds exactly zero: a row's bits do not depend on the other
// rows, the reach of the pass or the number of threads. All sums are in float32.

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kBlock = 32;   // keys at a time: two vectors of scores
constexpr int64_t kChunk = 512;  // keys per task
constexpr int64_t kBytesAhead = 4096;  // beyond a page, where the processor does not prefetch by itself
constexpr int kRows = 4;  // at a time
constexpr float kNever = -std::numeric_limits<float>::infinity();

__mmask16 first_lanes(int64_t count) { return count >= kLanes ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

// Numbers are multiplied as words of 32 bits: one float, or a pair of bfloat16 numbers.
struct Float32 {
  using Value = float;
  static constexpr int64_t kPerWord = 1;
  static __m512 load(const Value* from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
  // Words of one number from each of `kPerWord` rows.
  static __m512 across(const Value* const from[1], int64_t count) { return load(from[0], count); }
  static __m512 add(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
  static void store(Value* to, int64_t count, __m512 values) { _mm512_mask_storeu_ps(to, first_lanes(count), values); }
  // Store 32 weights as words, and round them to what is stored.
  static void store_weights(float* to, __m512 weights[2]) {
    _mm512_storeu_ps(to, weights[0]);
    _mm512_storeu_ps(to + kLanes, weights[1]);
  }
};

#ifdef __AVX512BF16__
struct BFloat16 {
  using Value = uint16_t;
  static constexpr int64_t kPerWord = 2;
  static __m512 load(const Value* from, int64_t count) {
    const __mmask32 lanes = count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lanes, from));
  }
  static __m512i widened(const Value* from, int64_t count) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), from));
  }
  static __m512 across(const Value* const from[2], int64_t count) {
    const __m512i low = widened(from[0], count), high = widened(from[1], count);
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static __m512 add(__m512 sum, __m512 a, __m512 b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static void store(Value* to, int64_t count, __m512 values) {
    _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)_mm512_cvtneps_pbh(values));
  }
  static void store_weights(float* to, __m512 weights[2]) {
    const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]);
    _mm512_storeu_ps(to, _mm512_castsi512_ps(pairs));
    weights[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pairs)), 16));
    weights[1] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pairs, 1)), 16));
  }
};
#endif

// 2 to the power of `x`, at most 0, to float32's precision: a Taylor polynomial of half an octave to either side.
__m512 power_of_two(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 t = _mm512_mul_ps(_mm512_sub_ps(x, whole), _mm512_set1_ps(0.69314718056f));
  __m512 sum = _mm512_set1_ps(1.0f / 5040);
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(sum, whole);
}

// Transpose 16 x 16 values: `rows[i]` becomes column i.
void transpose(__m512 rows[kLanes]) {
  __m512 other[kLanes];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    const auto pair = [&](int a) { return _mm512_castps_pd(other[i + a]); };
    rows[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pair(0), pair(2)));
    rows[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pair(0), pair(2)));
    rows[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pair(1), pair(3)));
    rows[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pair(1), pair(3)));
  }
  for (int i = 0; i < 4; ++i) {
    other[i] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
    other[i + 4] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
    other[i + 8] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
    other[i + 12] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_f32x4(other[i + 4], other[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_f32x4(other[i + 4], other[i + 12], 0xdd);
  }
}

// Ask for what is read soon. Beyond the end of a cache this does nothing.
void prefetch(const void* from) { _mm_prefetch((const char*)from + kBytesAhead, _MM_HINT_T1); }

struct Strides {
  int64_t batch, head, slot;
};

template <typename Value>
struct States {
  const Value* data;
  Strides by;
  const Value* at(int64_t batch, int64_t head, int64_t slot) const {
    return data + batch * by.batch + head * by.head + slot * by.slot;
  }
};

// The results of some rows over some keys: the weighted values before division by the sum of weights.
struct Partial {
  float *values, *greatest, *sums;
};

template <typename Kind>
struct Attention {
  using Value = typename Kind::Value;
  States<Value> query, key, value;
  // [batch or 1, 1 or 2, width]: the position of each row, which sees the keys before it, and its own key. In a tree the two
  // differ, and own keys are in the second row.
  const int64_t* positions;
  int64_t position_stride, own_offset;
  Value* outputs;  // [batch, width, heads, size]
  int64_t batch, heads, shared, width, slots, size, window;
  float scale;

  int64_t rows() const { return shared * width; }
  int64_t padded() const { return (size + kLanes - 1) / kLanes * kLanes; }
  int64_t groups() const { return heads / shared; }
  // Words of a query or key, which lie along the size, and of a row's weights, which lie along the keys.
  int64_t words() const { return (size + Kind::kPerWord - 1) / Kind::kPerWord; }
  int64_t padded_words() const { return (words() + kLanes - 1) / kLanes * kLanes; }
  static constexpr int64_t kWeightWords = kBlock / Kind::kPerWord;

  // The keys that row `row` sees: from `first` up to but not including `end`, and its own, which is not before them.
  void limits(int64_t text, int64_t row, int64_t* first, int64_t* end, int64_t* self) const {
    const int64_t* of_row = positions + text * position_stride + row % width;
    *end = std::min(of_row[0], slots);
    *first = window > 0 ? std::max<int64_t>(of_row[0] + 1 - window, 0) : 0;
    *self = std::min(of_row[own_offset], slots - 1);
  }

  // One thread's memory, in words.
  struct Scratch {
    std::vector<float> queries, keys, values, weights;
    std::vector<int64_t> first, end, self;
    Scratch(const Attention& of)
        : queries(of.rows() * of.padded_words()), keys(of.padded_words() * kBlock), values(kWeightWords * of.padded()),
          weights(of.rows() * kBlock), first(of.rows()), end(of.rows()), self(of.rows()) {}
  };

  void read_queries(Scratch& own, int64_t text, int64_t group) const {
    for (int64_t row = 0; row < rows(); ++row) {
      const Value* from = query.at(text, group * shared + row / width, row % width);
      for (int64_t word = 0; word < padded_words(); word += kLanes) {
        const int64_t d = word * Kind::kPerWord;
        _mm512_storeu_ps(&own.queries[row * padded_words() + word], Kind::load(from + d, size - d));
      }
      limits(text, row, &own.first[row], &own.end[row], &own.self[row]);
    }
  }

  // Keys [words, kBlock] from slot `slot` on; zeros after the first `count`.
  void read_keys(Scratch& own, int64_t text, int64_t group, int64_t slot, int64_t count) const {
    for (int64_t word = 0; word < padded_words(); word += kLanes) {
      const int64_t d = word * Kind::kPerWord;
      for (int64_t first = 0; first < kBlock; first += kLanes) {
        __m512 tile[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          const Value* from = key.at(text, group, slot + first + i) + d;
          prefetch(from);
          tile[i] = first + i < count ? Kind::load(from, size - d) : _mm512_setzero_ps();
        }
        transpose(tile);
        for (int64_t i = 0; i < kLanes; ++i) _mm512_storeu_ps(&own.keys[(word + i) * kBlock + first], tile[i]);
      }
    }
  }

  // Values [kWeightWords, size] from slot `slot` on. A word that is not whole repeats its number: the other one's weight is 0.
  void read_values(Scratch& own, int64_t text, int64_t group, int64_t slot, int64_t count) const {
    for (int64_t i = 0; i < count; i += Kind::kPerWord) {
      for (int64_t d = 0; d < padded(); d += kLanes) {
        const Value* from[Kind::kPerWord];
        for (int64_t j = 0; j < Kind::kPerWord; ++j) {
          from[j] = value.at(text, group, slot + std::min(i + j, count - 1)) + d;
          prefetch(from[j]);
        }
        _mm512_storeu_ps(&own.values[i / Kind::kPerWord * padded() + d], Kind::across(from, size - d));
      }
    }
  }

  template <int R>
  void score(Scratch& own, int64_t row) const {
    __m512 sums[R][2];
    for (auto& of_row : sums) of_row[0] = of_row[1] = _mm512_setzero_ps();
    const int64_t step = padded_words();
    const float *q = &own.queries[row * step], *k = own.keys.data();
    for (int64_t word = 0; word < words(); ++word) {
      const __m512 left = _mm512_loadu_ps(k + word * kBlock), right = _mm512_loadu_ps(k + word * kBlock + kLanes);
      for (int r = 0; r < R; ++r) {
        const __m512 of_query = _mm512_set1_ps(q[r * step + word]);
        sums[r][0] = Kind::add(sums[r][0], of_query, left);
        sums[r][1] = Kind::add(sums[r][1], of_query, right);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int half = 0; half < 2; ++half) _mm512_storeu_ps(&own.weights[(row + r) * kBlock + half * kLanes], sums[r][half]);
  }

  // Turn a row's scores into weights; return the factor of what was summed before.
  float weigh(Scratch& own, Partial& found, int64_t row, int64_t slot) const {
    float* stored = &own.weights[row * kBlock];
    const __m512 factor = _mm512_set1_ps(scale * 1.44269504089f);  // for powers of two
    __mmask16 seen[2];
    __m512 scores[2], weights[2];
    for (int half = 0; half < 2; ++half) {
      const int64_t from = slot + half * kLanes;
      const int64_t self = own.self[row] - from;
      seen[half] = first_lanes(own.end[row] - from) & ~first_lanes(own.first[row] - from);
      seen[half] |= self >= 0 && self < kLanes ? 1u << self : 0;
      scores[half] = _mm512_mask_mul_ps(_mm512_set1_ps(kNever), seen[half], _mm512_loadu_ps(stored + half * kLanes), factor);
    }
    const float before = found.greatest[row];
    const float greatest = std::max(before, _mm512_reduce_max_ps(_mm512_max_ps(scores[0], scores[1])));
    for (int half = 0; half < 2; ++half)
      weights[half] = _mm512_maskz_mov_ps(seen[half], power_of_two(_mm512_sub_ps(scores[half], _mm512_set1_ps(greatest))));
    Kind::store_weights(stored, weights);
    const float rescaled = before == greatest ? 1 : std::exp2(before - greatest);
    found.greatest[row] = greatest;
    found.sums[row] = found.sums[row] * rescaled + _mm512_reduce_add_ps(_mm512_add_ps(weights[0], weights[1]));
    return rescaled;
  }

  // Add the weighted values of `V` vectors from `d` on to `R` rows.
  template <int R, int V>
  void add(Scratch& own, Partial& found, const float* factors, int64_t row, int64_t d, int64_t count) const {
    float* to = found.values + row * padded() + d;
    __m512 sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        sums[r][v] = _mm512_mul_ps(_mm512_loadu_ps(to + r * padded() + v * kLanes), _mm512_set1_ps(factors[r]));
    const float *from = own.values.data() + d, *weights = &own.weights[row * kBlock];
    const int64_t step = padded();
    for (int64_t word = 0; word * Kind::kPerWord < count; ++word, from += step) {
      __m512 of_values[V];
      for (int v = 0; v < V; ++v) of_values[v] = _mm512_loadu_ps(from + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const __m512 weight = _mm512_set1_ps(weights[r * kBlock + word]);
        for (int v = 0; v < V; ++v) sums[r][v] = Kind::add(sums[r][v], weight, of_values[v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(to + r * padded() + v * kLanes, sums[r][v]);
  }

  template <int R>
  void attend(Scratch& own, Partial& found, int64_t row, int64_t slot, int64_t count) const {
    score<R>(own, row);
    float factors[R];
    for (int r = 0; r < R; ++r) factors[r] = weigh(own, found, row + r, slot);
    int64_t d = 0;
    for (; d + 4 * kLanes <= padded(); d += 4 * kLanes) add<R, 4>(own, found, factors, row, d, count);
    for (; d < padded(); d += kLanes) add<R, 1>(own, found, factors, row, d, count);
  }

  // All rows of one group of heads over the keys from `first` up to `end`.
  void over(Scratch& own, Partial& found, int64_t text, int64_t group, int64_t first, int64_t end) const {
    std::fill_n(found.values, rows() * padded(), 0.0f);
    std::fill_n(found.greatest, rows(), kNever);
    std::fill_n(found.sums, rows(), 0.0f);
    read_queries(own, text, group);
    for (int64_t slot = first; slot < end; slot += kBlock) {
      const int64_t count = std::min(kBlock, end - slot);
      read_keys(own, text, group, slot, count);
      read_values(own, text, group, slot, count);
      // Rows that see no key of the block are left as they are.
      for (int64_t row = 0; row < rows();) {
        if (!sees(own, row, slot)) {
          ++row;
          continue;
        }
        int64_t several = 1;
        while (several < kRows && row + several < rows() && sees(own, row + several, slot)) ++several;
        switch (several) {
          case 1: attend<1>(own, found, row, slot, count); break;
          case 2: attend<2>(own, found, row, slot, count); break;
          case 3: attend<3>(own, found, row, slot, count); break;
          default: attend<kRows>(own, found, row, slot, count);
        }
        row += several;
      }
    }
  }

  static bool sees(const Scratch& own, int64_t row, int64_t slot) {
    const int64_t self = own.self[row] - slot;
    return (own.first[row] < slot + kBlock && slot < own.end[row]) || (self >= 0 && self < kBlock);
  }

  // Divide by the sums of weights, after combining `chunks` results.
  void combine(const Partial* found, int64_t chunks, int64_t text, int64_t group) const {
    for (int64_t row = 0; row < rows(); ++row) {
      float greatest = kNever, sum = 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) greatest = std::max(greatest, found[chunk].greatest[row]);
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        sum += found[chunk].sums[row] * share(found[chunk], row, greatest);
      Value* to = outputs + ((text * width + row % width) * heads + group * shared + row / width) * size;
      for (int64_t d = 0; d < size; d += kLanes) {
        __m512 total = _mm512_setzero_ps();
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
          total = _mm512_fmadd_ps(_mm512_set1_ps(share(found[chunk], row, greatest)),
                                  _mm512_loadu_ps(found[chunk].values + row * padded() + d), total);
        Kind::store(to + d, size - d, _mm512_div_ps(total, _mm512_set1_ps(sum)));
      }
    }
  }

  static float share(const Partial& of, int64_t row, float greatest) {
    return of.greatest[row] == kNever ? 0 : of.greatest[row] == greatest ? 1 : std::exp2(of.greatest[row] - greatest);
  }

  // The keys that any row of a sequence sees, from the beginning of a block.
  void range(int64_t text, int64_t* first, int64_t* end) const {
    *first = slots, *end = 0;
    for (int64_t row = 0; row < width; ++row) {
      int64_t from, to, self;
      limits(text, row, &from, &to, &self);
      *first = std::min(*first, from), *end = std::max({*end, to, self + 1});
    }
    *first = *first / kBlock * kBlock;
  }

  void compute() const {
    std::vector<int64_t> first(batch), end(batch), chunks(batch);
    int64_t most = 1;
    for (int64_t text = 0; text < batch; ++text) {
      range(text, &first[text], &end[text]);
      chunks[text] = (end[text] + kChunk - 1) / kChunk - first[text] / kChunk;
      most = std::max(most, chunks[text]);
    }
    const int64_t floats = rows() * (padded() + 2), parts = batch * groups();
    std::vector<float> memory(parts * most * floats);
    std::vector<Partial> found(parts * most);
    for (int64_t i = 0; i < parts * most; ++i) {
      float* own = &memory[i * floats];
      found[i] = {own, own + rows() * padded(), own + rows() * (padded() + 1)};
    }
    at::parallel_for(0, parts * most, 1, [&](int64_t from, int64_t to) {
      Scratch own(*this);
      for (int64_t task = from; task < to; ++task) {
        const int64_t text = task / most / groups(), group = task / most % groups(), chunk = task % most;
        const int64_t begin = (first[text] / kChunk + chunk) * kChunk;
        if (chunk < chunks[text])
          over(own, found[task], text, group, std::max(begin, first[text]), std::min(begin + kChunk, end[text]));
      }
    });
    for (int64_t part = 0; part < parts; ++part)
      combine(&found[part * most], chunks[part / groups()], part / groups(), part % groups());
  }
};

template <typename Kind>
void attend(const void* const data[3], const int64_t* const strides[3], const int64_t* positions, int64_t position_stride,
            int64_t own_offset, void* outputs, const int64_t* sizes, const int64_t* key_sizes, double scale, int64_t window) {
  using Value = typename Kind::Value;
  const auto states = [&](int i) {
    return States<Value>{(const Value*)data[i], {strides[i][0], strides[i][1], strides[i][2]}};
  };
  const int64_t heads = sizes[1];
  Attention<Kind>{states(0), states(1), states(2), positions, position_stride, own_offset, (Value*)outputs,
                  sizes[0], heads, heads / key_sizes[1], sizes[2], key_sizes[2], sizes[3], window, (float)scale}.compute();
}

}  // namespace

// Attend in float32, or bfloat16 if `item_size` is 2. Data, strides and sizes are those of queries, keys and values; the
// last stride of each is 1.
extern "C" __attribute__((visibility("default"))) void sdtune_attend(
    const void* const* data, const int64_t* const* strides, const int64_t* positions, int64_t position_stride,
    int64_t own_offset, void* outputs, const int64_t* sizes, const int64_t* key_sizes, double scale, int64_t window, int64_t item_size) {
#ifdef __AVX512BF16__
  if (item_size == 2)
    return attend<BFloat16>(data, strides, positions, position_stride, own_offset, outputs, sizes, key_sizes, scale, window);
#endif
  attend<Float32>(data, strides, positions, position_stride, own_offset, outputs, sizes, key_sizes, scale, window);
}

#define SDTUNE_CHECK(call) \
  if (auto error = (call)) return error

// As inductor's code calls it: allocates the outputs.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_sdtune_attend(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions, double scale,
    int64_t window, AtenTensorHandle* outputs) {
  const AtenTensorHandle given[3] = {query, key, value};
  void *data[3], *seen, *to;
  int64_t *strides[3], *sizes, *key_sizes, *position_sizes;
  int32_t dtype;
  for (int i = 0; i < 3; ++i) {
    SDTUNE_CHECK(aoti_torch_get_data_ptr(given[i], &data[i]));
    SDTUNE_CHECK(aoti_torch_get_strides(given[i], &strides[i]));
  }
  SDTUNE_CHECK(aoti_torch_get_sizes(query, &sizes));
  SDTUNE_CHECK(aoti_torch_get_sizes(key, &key_sizes));
  SDTUNE_CHECK(aoti_torch_get_sizes(positions, &position_sizes));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(positions, &seen));
  SDTUNE_CHECK(aoti_torch_get_dtype(query, &dtype));
  const int64_t new_sizes[4] = {sizes[0], sizes[2], sizes[1], sizes[3]};
  const int64_t new_strides[4] = {sizes[2] * sizes[1] * sizes[3], sizes[1] * sizes[3], sizes[3], 1};
  SDTUNE_CHECK(aoti_torch_empty_strided(4, new_sizes, new_strides, dtype, aoti_torch_device_type_cpu(), 0, outputs));
  SDTUNE_CHECK(aoti_torch_get_data_ptr(*outputs, &to));
  const int64_t position_rows = position_sizes[2], width = sizes[2];
  sdtune_attend(data, strides, (const int64_t*)seen, position_sizes[0] == 1 ? 0 : position_rows * width,
                (position_rows - 1) * width, to, sizes, key_sizes, scale, window, dtype == aoti_torch_dtype_bfloat16() ? 2 : 4);
  return AOTI_TORCH_SUCCESS;
}
