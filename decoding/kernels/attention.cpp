// Attention of few positions over a key-value cache, read in place and only as far as it is used.
//
// Query heads that share keys are rows of one pass over them (FlashAttention's online softmax, arXiv 2205.14135). Long
// contexts are split into chunks, whose results are combined at the end (Flash-Decoding). Blocks and chunks begin at
// multiples of their size, and a key that a row does not see adds exactly zero: a row's bits do not depend on the other
// rows, the reach of the pass or the number of threads. All numbers are float32; bfloat16 and
// float16 are how keys, values and results are stored.

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "handles.h"

namespace {

constexpr int64_t kBlock = 32;  // keys at a time
constexpr int kParts = kBlock / kLanes;  // vectors of scores
constexpr int64_t kChunk = 512;  // keys per task
constexpr int64_t kBytesAhead = kLanes == 16 ? 4096 : 8192;  // beyond a page, where the processor does not prefetch by itself
constexpr int kRows = kLanes == 16 ? 4 : 3, kVectors = 4;  // at a time: as many sums as fit in registers
constexpr float kNever = -std::numeric_limits<float>::infinity();

// 2 to the power of `x`, at most 0, to float32's precision: a Taylor polynomial of half an octave to either side.
Lanes power_of_two(Lanes x) {
  const Lanes whole = to_whole(x);
  const Lanes t = multiply(subtract(x, whole), all(0.69314718056f));
  Lanes sum = all(1.0f / 5040);
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f})
    sum = multiply_add(sum, t, all(factor));
  return times_power_of_two(sum, whole);
}

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

template <typename Format>
struct Attention {
  using Value = typename Format::Value;
  States<Value> query, key, value;
  const int64_t* positions;  // [batch or 1, width]: each row sees the keys up to its position
  int64_t position_stride;
  Value* outputs;  // [batch, width, heads, size]
  int64_t batch, heads, shared, width, slots, size, window;
  float scale;

  int64_t rows() const { return shared * width; }
  int64_t padded() const { return (size + kLanes - 1) / kLanes * kLanes; }
  int64_t groups() const { return heads / shared; }

  // The keys that row `row` sees: from `first` up to but not including `end`.
  void limits(int64_t text, int64_t row, int64_t* first, int64_t* end) const {
    const int64_t after = positions[text * position_stride + row % width] + 1;
    *end = std::min(after, slots);
    *first = window > 0 ? std::max<int64_t>(after - window, 0) : 0;
  }

  // Few rows read keys and values where they are. For more, each is converted once.
  bool are_few() const { return rows() <= kRows; }
  bool reads_values_in_place() const { return size == padded() && (are_few() || std::is_same_v<Format, Float32>); }

  // One thread's memory.
  struct Scratch {
    std::vector<float> queries, keys, values, weights;
    std::vector<int64_t> first, end;
    Scratch(const Attention& of)
        : queries(of.rows() * of.padded()), keys(of.are_few() ? 0 : of.padded() * kBlock),
          values(of.reads_values_in_place() ? 0 : kBlock * of.padded()), weights(of.rows() * kBlock), first(of.rows()),
          end(of.rows()) {}
  };

  void read_queries(Scratch& own, int64_t text, int64_t group) const {
    for (int64_t row = 0; row < rows(); ++row) {
      const Value* from = query.at(text, group * shared + row / width, row % width);
      for (int64_t d = 0; d < padded(); d += kLanes) store(&own.queries[row * padded() + d], Format::read(from + d, size - d));
      limits(text, row, &own.first[row], &own.end[row]);
    }
  }

  // The numbers [kLanes, kLanes keys] from `d` on of the keys from slot `slot` on; zeros after the first `count` keys. Meanwhile
  // the next keys, and the values of these, are prefetched in the order in which they lie in memory, which is faster than by columns.
  [[gnu::always_inline]] void read_tile(int64_t text, int64_t group, int64_t slot, int64_t d, int64_t count,
                                        Lanes (&tile)[kLanes]) const {
    const Value *keys = key.at(text, group, slot), *values = value.at(text, group, slot);
    const auto read_all = [&](int64_t present, auto numbers) __attribute__((always_inline)) {
      for (int64_t i = 0; i < kLanes; ++i) {
        _mm_prefetch((const char*)(keys + (d + i) * kLanes) + kBytesAhead, _MM_HINT_T1);
        _mm_prefetch((const char*)(values + (d + i) * kLanes), kReadsNear ? _MM_HINT_T1 : _MM_HINT_T0);
        tile[i] = i < present ? Format::read(keys + i * key.by.slot + d, numbers) : zeros();
      }
    };
    constexpr std::integral_constant<int64_t, kLanes> kAll;
    size - d < kLanes ? read_all(count, size - d) : count < kLanes ? read_all(count, kAll) : read_all(kLanes, kAll);
    transpose(tile);
  }

  // Keys [size, kBlock] from slot `slot` on; zeros after the first `count`.
  void read_keys(Scratch& own, int64_t text, int64_t group, int64_t slot, int64_t count) const {
    for (int64_t first = 0; first < kBlock; first += kLanes) {
      for (int64_t d = 0; d < padded(); d += kLanes) {
        Lanes tile[kLanes];
        read_tile(text, group, slot + first, d, count - first, tile);
        for (int64_t i = 0; i < kLanes; ++i) store(&own.keys[(d + i) * kBlock + first], tile[i]);
      }
    }
  }

  void read_values(Scratch& own, int64_t text, int64_t group, int64_t slot, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const Value* from = value.at(text, group, slot + i);
      for (int64_t d = 0; d < padded(); d += kLanes) store(&own.values[i * padded() + d], Format::read(from + d, size - d));
    }
  }

  // Scores of `R` rows, as `score` adds them up, with keys that are read for these rows alone.
  template <int R>
  void score_reading(Scratch& own, int64_t text, int64_t group, int64_t row, int64_t slot, int64_t count) const {
    for (int64_t first = 0; first < kBlock; first += kLanes) {
      Lanes sums[R];
      for (auto& sum : sums) sum = zeros();
      for (int64_t d = 0; d < padded(); d += kLanes) {
        Lanes tile[kLanes];
        read_tile(text, group, slot + first, d, count - first, tile);
        const float* q = &own.queries[row * padded() + d];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i)
          for (int r = 0; r < R; ++r) sums[r] = multiply_add(all(q[r * padded() + i]), tile[i], sums[r]);
      }
      for (int r = 0; r < R; ++r) store(&own.weights[(row + r) * kBlock + first], sums[r]);
    }
  }

  template <int R>
  void score(Scratch& own, int64_t row) const {
    Lanes sums[R][kParts];
    for (auto& of_row : sums)
      for (auto& part : of_row) part = zeros();
    const float *q = &own.queries[row * padded()], *k = own.keys.data();
    for (int64_t d = 0; d < size; ++d) {
      Lanes of_keys[kParts];
      for (int part = 0; part < kParts; ++part) of_keys[part] = held(load(k + d * kBlock + part * kLanes));
      for (int r = 0; r < R; ++r) {
        const Lanes of_query = all(q[r * padded() + d]);
        for (int part = 0; part < kParts; ++part) sums[r][part] = multiply_add(of_query, of_keys[part], sums[r][part]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int part = 0; part < kParts; ++part) store(&own.weights[(row + r) * kBlock + part * kLanes], sums[r][part]);
  }

  // Turn a row's scores into weights; return the factor of what was summed before.
  float weigh(Scratch& own, Partial& found, int64_t row, int64_t slot) const {
    float* stored = &own.weights[row * kBlock];
    const Lanes factor = all(scale * 1.44269504089f);  // for powers of two
    Mask seen[kParts];
    Lanes scores[kParts], most = all(kNever), sum = zeros();
    for (int part = 0; part < kParts; ++part) {
      const int64_t from = slot + part * kLanes;
      seen[part] = first_lanes(own.end[row] - from) & ~first_lanes(own.first[row] - from);
      scores[part] = chosen(seen[part], multiply(load(stored + part * kLanes), factor), all(kNever));
      most = greater(most, scores[part]);
    }
    const float before = found.greatest[row];
    const float greatest = std::max(before, greatest_of(most));
    for (int part = 0; part < kParts; ++part) {
      const Lanes weights = chosen(seen[part], power_of_two(subtract(scores[part], all(greatest))), zeros());
      store(stored + part * kLanes, weights);
      sum = add(sum, weights);
    }
    const float rescaled = before == greatest ? 1 : std::exp2(before - greatest);
    found.greatest[row] = greatest;
    found.sums[row] = found.sums[row] * rescaled + sum_of(sum);
    return rescaled;
  }

  // Add `V` vectors from `d` on of the first `count` values, weighted, to `R` rows. The values are `step` numbers apart.
  template <int R, int V, typename From>
  void add_vectors(Scratch& own, Partial& found, const float* factors, int64_t row, const typename From::Value* values, int64_t step,
                   int64_t d, int64_t count) const {
    float* to = found.values + row * padded() + d;
    Lanes sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        sums[r][v] = multiply(load(to + r * padded() + v * kLanes), all(factors[r]));
    const float* weights = &own.weights[row * kBlock];
    values += d;
    for (int64_t i = 0; i < count; ++i, values += step) {
      Lanes of_values[V];
      for (int v = 0; v < V; ++v) of_values[v] = held(From::read(values + v * kLanes));
      for (int r = 0; r < R; ++r) {
        const Lanes weight = all(weights[r * kBlock + i]);
        for (int v = 0; v < V; ++v) sums[r][v] = multiply_add(weight, of_values[v], sums[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(to + r * padded() + v * kLanes, sums[r][v]);
  }

  template <typename From, int R>
  void add_values(Scratch& own, Partial& found, const float* factors, int64_t row, const typename From::Value* values, int64_t step,
                  int64_t count) const {
    int64_t d = 0;
    for (; d + kVectors * kLanes <= padded(); d += kVectors * kLanes)
      add_vectors<R, kVectors, From>(own, found, factors, row, values, step, d, count);
    for (; d < padded(); d += kLanes) add_vectors<R, 1, From>(own, found, factors, row, values, step, d, count);
  }

  template <int R>
  void attend(Scratch& own, Partial& found, int64_t text, int64_t group, int64_t row, int64_t slot, int64_t count) const {
    are_few() ? score_reading<R>(own, text, group, row, slot, count) : score<R>(own, row);
    float factors[R];
    for (int r = 0; r < R; ++r) factors[r] = weigh(own, found, row + r, slot);
    if (reads_values_in_place()) add_values<Format, R>(own, found, factors, row, value.at(text, group, slot), value.by.slot, count);
    else add_values<Float32, R>(own, found, factors, row, own.values.data(), padded(), count);
  }

  // All rows of one group of heads over the keys from `first` up to `end`.
  void over(Scratch& own, Partial& found, int64_t text, int64_t group, int64_t first, int64_t end) const {
    std::fill_n(found.values, rows() * padded(), 0.0f);
    std::fill_n(found.greatest, rows(), kNever);
    std::fill_n(found.sums, rows(), 0.0f);
    read_queries(own, text, group);
    for (int64_t slot = first; slot < end; slot += kBlock) {
      const int64_t count = std::min(kBlock, end - slot);
      if (!are_few()) read_keys(own, text, group, slot, count);
      if (!reads_values_in_place()) read_values(own, text, group, slot, count);
      // Rows that see no key of the block are left as they are.
      for (int64_t row = 0; row < rows();) {
        if (!sees(own, row, slot)) {
          ++row;
          continue;
        }
        int64_t several = 1;
        while (several < kRows && row + several < rows() && sees(own, row + several, slot)) ++several;
        switch (several) {
          case 1: attend<1>(own, found, text, group, row, slot, count); break;
          case 2: attend<2>(own, found, text, group, row, slot, count); break;
          case 3: attend<3>(own, found, text, group, row, slot, count); break;
          default: attend<kRows>(own, found, text, group, row, slot, count);
        }
        row += several;
      }
    }
  }

  static bool sees(const Scratch& own, int64_t row, int64_t slot) {
    return own.first[row] < slot + kBlock && slot < own.end[row];
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
        Lanes total = zeros();
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
          total = multiply_add(all(share(found[chunk], row, greatest)), load(found[chunk].values + row * padded() + d), total);
        Format::write(to + d, size - d, divide(total, all(sum)));
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
      int64_t from, to;
      limits(text, row, &from, &to);
      *first = std::min(*first, from), *end = std::max(*end, to);
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

}  // namespace

// Attend. Data, strides and sizes are those of queries, keys and values; the last stride of each is 1.
extern "C" __attribute__((visibility("default"))) void sdtune_attend(
    const void* const* data, const int64_t* const* strides, const int64_t* positions, int64_t position_stride, void* outputs,
    const int64_t* sizes, const int64_t* key_sizes, double scale, int64_t window, int64_t precision) {
  with_format(Precision(precision), [&](auto format) {
    using Value = typename decltype(format)::Value;
    const auto states = [&](int i) {
      return States<Value>{(const Value*)data[i], {strides[i][0], strides[i][1], strides[i][2]}};
    };
    const int64_t heads = sizes[1];
    Attention<decltype(format)>{states(0), states(1), states(2), positions, position_stride, (Value*)outputs, sizes[0],
                                heads, heads / key_sizes[1], sizes[2], key_sizes[2], sizes[3], window, (float)scale}.compute();
  });
}

// As inductor's code calls it: allocates the outputs.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_sdtune_attend(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions, double scale,
    int64_t window, AtenTensorHandle* outputs) {
  const AtenTensorHandle given[3] = {query, key, value};
  void *data[3], *others[2];
  int64_t *strides[3], *sizes, *key_sizes, *position_sizes;
  int32_t dtype;
  for (int i = 0; i < 3; ++i) SDTUNE_CHECK(aoti_torch_get_strides(given[i], &strides[i]));
  SDTUNE_CHECK(aoti_torch_get_sizes(query, &sizes));
  SDTUNE_CHECK(aoti_torch_get_sizes(key, &key_sizes));
  SDTUNE_CHECK(aoti_torch_get_sizes(positions, &position_sizes));
  SDTUNE_CHECK(aoti_torch_get_dtype(query, &dtype));
  const int64_t new_sizes[4] = {sizes[0], sizes[2], sizes[1], sizes[3]};
  const int64_t new_strides[4] = {sizes[2] * sizes[1] * sizes[3], sizes[1] * sizes[3], sizes[3], 1};
  SDTUNE_CHECK(aoti_torch_empty_strided(4, new_sizes, new_strides, dtype, aoti_torch_device_type_cpu(), 0, outputs));
  SDTUNE_CHECK(addresses(given, data));
  SDTUNE_CHECK(addresses({positions, *outputs}, others));
  sdtune_attend(data, strides, (const int64_t*)others[0], position_sizes[0] == 1 ? 0 : sizes[2], others[1], sizes, key_sizes,
                scale, window, int64_t(precision_of(dtype)));
  return AOTI_TORCH_SUCCESS;
}
