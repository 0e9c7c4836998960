// Linear layers on few positions: outputs[m, n] = sum over k of values[m, k] * weight[n, k].
//
// Bound by reading the weight, which stays in torch's layout and is read once. Four rows are summed at a time, or three, each from
// another part of the weight: as many sequential streams of memory. Neighbouring rows at a time would be several streams within one
// page, which the processor prefetches badly. bfloat16 goes through the tiles of AMX where there are any.
// A sum does not depend on the other positions of the pass: the same bits for any number of them.
//
// Outputs that integer weights have found may have the largest of each position replaced by such sums.

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "handles.h"

namespace {

// Positions whose sums with `rows` rows fit in registers, and the number of turns in which all positions are summed. A Xeon with AMX
// takes 8 % longer for nine positions in two turns than for one position, so that one turn of three rows could not gain much.
constexpr int64_t most_at_once(int64_t rows) { return kLanes == 8 ? 5 : rows == 3 && kReadsNear ? 9 : 6; }
constexpr int64_t turns(int64_t positions, int64_t rows) { return (positions + most_at_once(rows) - 1) / most_at_once(rows); }

constexpr int64_t kBytesPerThread = 1 << 16;
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kCachedBytes = 26 << 10;  // of values that stay in a first cache of 32 KiB beside the weights
constexpr int64_t kBytesApart = 320;  // of positions that would begin at the same place of a page
constexpr int64_t kBytesAhead = kReadsNear ? 256 : 1024;  // to prefetch, of the same rows
constexpr int64_t kShortlist = 16;                        // outputs of a position that are computed again
constexpr int64_t kRowsAtOnce = 64;                       // that are copied to one place

// Numbers in float32, `V` vectors of them.
template <int V>
struct Vectors {
  Lanes each[V];
};

// How weights and values are multiplied: `kStep` at a time, values stored as `Stored`. With AVX2, the values of up to `kFew` positions
// stay in registers while rows are read.
template <typename Of>
struct Single {
  using Format = Of;
  using Value = typename Format::Value;
  using Stored = float;
  static constexpr int64_t kStep = kLanes;
  static constexpr int kFew = 3;
  static Lanes weights(const Value* from, int64_t count) { return Format::read(from, count); }
  static Lanes values(const Stored* from, int64_t count) { return held(load(from, count)); }
  static Lanes add(Lanes sum, Lanes weights, Lanes values) { return multiply_add(weights, values, sum); }
  static Vectors<1> unpacked(const Value* from, int64_t count) { return {Format::read(from, count)}; }
};

struct Pairs {
  using Format = BFloat16;
  using Value = uint16_t;
  static constexpr int64_t kStep = 2 * kLanes;
  static constexpr int kFew = 2;
  static Lanes weights(const Value* from, int64_t count) { return load_pairs(from, count); }
#ifdef SDTUNE_BFLOAT16
  using Stored = uint16_t;
  static Lanes values(const Stored* from, int64_t count) { return held(load_pairs(from, count)); }
  static Lanes add(Lanes sum, Lanes weights, Lanes values) { return multiply_add_pairs(weights, values, sum); }
#else
  using Stored = float;  // of `kStep` values the first of each pair, then the second
  static const Stored* values(const Stored* from, int64_t) { return from; }
  static Lanes add(Lanes sum, Lanes weights, const Stored* values) {
    sum = multiply_add(first_of_pairs(weights), load(values), sum);
    return multiply_add(second_of_pairs(weights), load(values + kLanes), sum);
  }
  static Vectors<2> unpacked(const Value* from, int64_t count) {
    const Lanes pairs = load_pairs(from, count);
    return {first_of_pairs(pairs), second_of_pairs(pairs)};
  }
#endif
};

template <typename Format>
using KindOf = std::conditional_t<std::is_same_v<Format, BFloat16>, Pairs, Single<Format>>;

// The values [positions, stride] as they are read. Unpacked, so that each is converted once and not in every row; and copied if
// several positions would begin at the same place of a page, or of half of one: these share sets of the first cache, which cannot
// hold all of them.
template <typename Kind>
struct Operands {
  static constexpr bool kUnpacks = !std::is_same_v<typename Kind::Stored, typename Kind::Value>;
  int64_t stride;
  std::vector<typename Kind::Stored> copied;
  const typename Kind::Stored* data;

  Operands(const typename Kind::Value* values, int64_t positions, int64_t inputs)
      : stride(kUnpacks ? (inputs + Kind::kStep - 1) / Kind::kStep * Kind::kStep : inputs) {
    constexpr int64_t kSize = sizeof(typename Kind::Stored);
    const bool share_sets = kReadsNear && positions > 2 && stride * kSize % (kPageBytes / 2) == 0;
    if (share_sets) stride += kBytesApart / kSize;
    if constexpr (!kUnpacks) {
      data = values;
      if (!share_sets) return;
    }
    copied.resize(positions * stride);
    for (int64_t m = 0; m < positions; ++m) {
      if constexpr (kUnpacks) {
        for (int64_t k = 0; k < inputs; k += Kind::kStep) {
          float* to = &copied[m * stride + k];
          for (const Lanes& part : Kind::unpacked(values + m * inputs + k, inputs - k).each) store(to, part), to += kLanes;
        }
      } else {
        std::copy_n(values + m * inputs, inputs, &copied[m * stride]);
      }
    }
    data = copied.data();
  }
};

// Positions that are summed at once: part number `index` of `parts`.
struct Piece {
  int64_t first, count, index, parts;
};

template <typename Kind>
struct Product {
  using Value = typename Kind::Value;
  const Operands<Kind>& values;
  const Value* weight;
  Value* outputs;
  int64_t positions, rows, inputs;

  // Sums of `R` rows that are `step` rows apart, for `M` positions; of fewer, at least `kLeast`, the last one is summed again. All
  // that the loop reads is local, so that it stays in registers.
  template <int R, int M, int kLeast>
  void sum(int64_t row, int64_t step, Piece piece) const {
    const int64_t inputs = this->inputs, stride = values.stride, apart = step * inputs, parts = piece.parts;
    const Value* w = weight + row * inputs;
    const auto* x = values.data + piece.first * stride;
    // Prefetched is what comes next. Several parts prefetch a share of the next rows each, or memory would be idle while the same
    // rows are summed again; so do several positions where lines are asked for shortly before, which would be too late then. With
    // AVX2 the processor prefetches well enough by itself for one position.
    constexpr bool prefetches = kLanes == 16 || M > 1;
    const bool of_next_rows = parts > 1 || (kReadsNear && M > 2);
    const Value* next = of_next_rows ? w + inputs + inputs * piece.index / parts : w + kBytesAhead / sizeof(Value);
    const int64_t next_step = Kind::kStep / parts;
    const int64_t last = kLeast < M ? piece.count - 1 : M - 1;
    Lanes sums[R][M];
    SDTUNE_UNROLLED
    for (auto& of_row : sums)
      SDTUNE_UNROLLED
      for (auto& each : of_row) each = zeros();
    const auto accumulate = [&](int64_t k, auto count) __attribute__((always_inline)) {
      if constexpr (values_stay<M>()) {
        decltype(Kind::values(x, count)) of_position[M];
        SDTUNE_UNROLLED
        for (int m = 0; m < M; ++m) {
          const int64_t at = m < kLeast ? m : std::min<int64_t>(m, last);
          of_position[m] = Kind::values(x + at * stride + k, count);
        }
        SDTUNE_UNROLLED
        for (int r = 0; r < R; ++r) {
          if (of_next_rows) _mm_prefetch((const char*)(next + r * apart), _MM_HINT_T1);
          else if (prefetches) _mm_prefetch((const char*)(next + r * apart), _MM_HINT_T0);
          const Lanes of_row = Kind::weights(w + r * apart + k, count);
          SDTUNE_UNROLLED
          for (int m = 0; m < M; ++m) sums[r][m] = Kind::add(sums[r][m], of_row, of_position[m]);
        }
      } else if constexpr (kLanes == 16) {
        Lanes of_row[R];
        SDTUNE_UNROLLED
        for (int r = 0; r < R; ++r) {
          _mm_prefetch((const char*)(next + r * apart), _MM_HINT_T1);
          of_row[r] = held(Kind::weights(w + r * apart + k, count));
        }
        SDTUNE_UNROLLED
        for (int m = 0; m < M; ++m) {
          const int64_t at = m < kLeast ? m : std::min<int64_t>(m, last);
          const auto of_position = Kind::values(x + at * stride + k, count);
          SDTUNE_UNROLLED
          for (int r = 0; r < R; ++r) sums[r][m] = Kind::add(sums[r][m], of_row[r], of_position);
        }
      } else {
        constexpr int kVectors = Kind::kStep / kLanes;
        Vectors<kVectors> of_row[R];
        SDTUNE_UNROLLED
        for (int r = 0; r < R; ++r) {
          if (of_next_rows) _mm_prefetch((const char*)(next + r * apart), _MM_HINT_T1);
          else _mm_prefetch((const char*)(next + r * apart), _MM_HINT_T0);
          of_row[r] = Kind::unpacked(w + r * apart + k, count);
        }
        SDTUNE_UNROLLED
        for (int m = 0; m < M; ++m) {
          const float* from = x + m * stride + k;
          SDTUNE_UNROLLED
          for (int v = 0; v < kVectors; ++v) {
            const Lanes of_position = in_register(kVectors == 1 ? load(from, count) : load(from + v * kLanes));
            SDTUNE_UNROLLED
            for (int r = 0; r < R; ++r) sums[r][m] = multiply_add(of_row[r].each[v], of_position, sums[r][m]);
          }
        }
      }
      next += next_step;
    };
    const int64_t rest = inputs % Kind::kStep, whole = inputs - rest;
    for (int64_t k = 0; k < whole; k += Kind::kStep) accumulate(k, std::integral_constant<int64_t, Kind::kStep>());
    if (rest) accumulate(whole, rest);
    SDTUNE_UNROLLED
    for (int m = 0; m < M; ++m) {
      const int64_t at = piece.first + (m < kLeast ? m : std::min<int64_t>(m, last));
      SDTUNE_UNROLLED
      for (int r = 0; r < R; ++r) outputs[at * rows + row + r * step] = Kind::Format::rounded(sum_of(sums[r][m]));
    }
  }

  // True if registers hold the sums of four rows and the values of all positions. Else they hold the sums and the weights of three
  // rows, with AVX2 of two.
  template <int M>
  static constexpr bool values_stay() {
    return M <= (kLanes == 16 ? 6 : Kind::kFew);
  }

  template <int R, int M, int kLeast = M>
  void sum_rows(int64_t row, int64_t step, Piece piece) const {
    constexpr int kAtOnce = values_stay<M>() ? R : std::min(R, kLanes == 16 ? 3 : 2);
    for (int r = 0; r < R; r += kAtOnce) sum<kAtOnce, M, kLeast>(row + r * step, step, piece);
  }

  template <int R, int M = 1>
  void sum_piece(int64_t row, int64_t step, Piece piece) const {
    // Zen 4 sums some numbers of positions faster if they are padded, some only if their values leave the first cache: why is not
    // understood.
    if constexpr (kReadsNear && R == 4 && std::is_same_v<Value, float> && (M == 3 || M == 5))
      if (piece.count <= M + 1) return sum_rows<R, M + 1, M>(row, step, piece);
    if constexpr (kReadsNear && (R == 3 ? M == 7 : R == 4 && std::is_same_v<Kind, Pairs> && M == 3))
      if (piece.count < most_at_once(R) && piece.parts == 1 && positions * values.stride * sizeof(*values.data) > kCachedBytes)
        return sum_rows<R, most_at_once(R), M>(row, step, piece);
    if constexpr (M < most_at_once(R))
      if (piece.count > M) return sum_piece<R, M + 1>(row, step, piece);
    sum_rows<R, M>(row, step, piece);
  }

  // All positions for these rows, which stay in the first cache meanwhile.
  template <int R>
  void all_positions(int64_t row, int64_t step) const {
    const int64_t parts = turns(positions, R);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = positions * i / parts;
      sum_piece<R>(row, step, {first, positions * (i + 1) / parts - first, i, parts});
    }
  }

  void compute() const {
    if constexpr (most_at_once(3) > most_at_once(4))
      if (turns(positions, 3) < turns(positions, 4)) return compute<3>();
    compute<4>();
  }

  // `R` rows at a time.
  template <int R>
  void compute() const {
    const int64_t grain = std::max<int64_t>(1, kBytesPerThread / (inputs * sizeof(Value)));
    at::parallel_for(0, rows, grain, [this](int64_t first, int64_t end) {
      int64_t step = (end - first) / R;
      // On Zen 4, streams a whole number of pages apart slow four to six positions down, probably by sharing sets of a cache.
      if (kReadsNear && R == 4 && positions > 3 && step > 1 && step * inputs * sizeof(Value) % kPageBytes == 0) --step;
      const int64_t whole = (end - first) / R, rest = first + step * R;
      for (int64_t i = 0; i < whole; ++i) {  // the last sets are of neighbours if there is a row less in each stream
        const bool is_last = i >= step;
        all_positions<R>(is_last ? rest + (i - step) * R : first + i, is_last ? 1 : step);
      }
      for (int64_t row = first + whole * R; row < end; ++row) all_positions<1>(row, 0);
    });
  }
};

#ifdef SDTUNE_AMX_BFLOAT16

// bfloat16 in the tiles of AMX: 16 rows of the weight as they lie in memory, by 32 inputs, times up to 16 positions, which take
// no longer than one.
class TiledProduct {
 public:
  static constexpr int64_t kTileRows = 16, kTileInputs = 32, kTilePositions = 16;
  static constexpr int64_t kStepsAhead = 4;

  // At least one tile of rows.
  TiledProduct(const uint16_t* values, const uint16_t* weight, uint16_t* outputs, int64_t positions, int64_t rows, int64_t inputs)
      : weight(weight), outputs(outputs), positions(positions), rows(rows), inputs(inputs),
        pieces((positions + kTilePositions - 1) / kTilePositions), columns((positions + pieces - 1) / pieces),
        steps((inputs + kTileInputs - 1) / kTileInputs), pairs(pieces * steps * kTileInputs / 2 * columns) {
    for (int64_t piece = 0; piece < pieces; ++piece)
      for (int64_t step = 0; step < steps; ++step) {
        Lanes tile[kLanes];
        for (int64_t m = 0; m < kTilePositions; ++m) {
          const int64_t position = piece * columns + m, first = step * kTileInputs;
          const bool exists = m < columns && position < positions;
          tile[m] = exists ? load_pairs(values + position * inputs + first, inputs - first) : zeros();
        }
        transpose(tile);
        float* to = &pairs[(piece * steps + step) * kTileInputs / 2 * columns];
        for (int64_t i = 0; i < kTileInputs / 2; ++i) store(to + i * columns, columns, tile[i]);
      }
  }

  void compute() const {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    const int64_t grain = std::max<int64_t>(1, kBytesPerThread / (kTileRows * inputs * sizeof(uint16_t)));
    at::parallel_for(0, tiles, grain, [this](int64_t first, int64_t end) {
      const Shapes shapes(columns);
      written();
      _tile_loadconfig(&shapes);
      const int64_t half = (end - first) / 2;
      for (int64_t tile = first; tile < first + half; ++tile) all_positions<2>(row_of(tile), row_of(tile + half));
      if ((end - first) % 2) all_positions<1>(row_of(end - 1), 0);
      _tile_release();
    });
  }

 private:
  // The tiles of a thread: sums [rows, positions] in 0 and 1, weights [rows, inputs] in 2 and 3, pairs [inputs / 2, positions] in 4.
  struct Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    explicit Shapes(int64_t columns) {
      for (int i = 0; i < 5; ++i) rows[i] = 16, bytes[i] = i == 2 || i == 3 ? 64 : 4 * columns;
    }
  };

  const uint16_t* weight;
  uint16_t* outputs;
  int64_t positions, rows, inputs, pieces, columns, steps;
  std::vector<float> pairs;  // [pieces, steps, 16, columns]: two neighbouring inputs of a position

  // Tells the compiler, which does not know what tiles read, to store everything before.
  static void written() { asm volatile("" ::: "memory"); }

  // The last tile begins earlier, so that it is whole: some of its rows are computed twice.
  int64_t row_of(int64_t tile) const { return std::min(tile * kTileRows, rows - kTileRows); }

  // One or two tiles of rows, which stay in the first cache meanwhile.
  template <int T>
  void all_positions(int64_t row, int64_t other) const {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      sum<T>(weight + row * inputs, weight + other * inputs, &pairs[piece * steps * kTileInputs / 2 * columns]);
      float sums[kTileRows * kTilePositions];
      _tile_stored(0, sums, kTilePositions * sizeof(float));
      write(sums, row, piece);
      if constexpr (T == 1) continue;
      _tile_stored(1, sums, kTilePositions * sizeof(float));
      write(sums, other, piece);
    }
  }

  template <int T>
  void sum(const uint16_t* row, const uint16_t* other, const float* values) const {
    const int64_t whole = inputs / kTileInputs, rest = inputs % kTileInputs, stride = inputs * sizeof(uint16_t);
    const int64_t value_stride = columns * sizeof(float), next = kTileInputs / 2 * columns;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < whole; ++step, values += next, row += kTileInputs, other += kTileInputs) {
      // The inputs of a few steps later, at the end those of the next tile.
      const int64_t ahead = kStepsAhead * kTileInputs + (step + kStepsAhead < whole ? 0 : (kTileRows - 1) * inputs);
      for (int64_t r = 0; r < kTileRows; ++r) {
        _mm_prefetch((const char*)(row + ahead + r * inputs), _MM_HINT_T0);
        if constexpr (T == 2) _mm_prefetch((const char*)(other + ahead + r * inputs), _MM_HINT_T0);
      }
      _tile_loadd(4, values, value_stride);
      _tile_loadd(2, row, stride);
      _tile_dpbf16ps(0, 2, 4);
      if constexpr (T == 1) continue;
      _tile_loadd(3, other, stride);
      _tile_dpbf16ps(1, 3, 4);
    }
    if (rest == 0) return;
    uint16_t padded[T][kTileRows * kTileInputs] = {};
    for (int t = 0; t < T; ++t)
      for (int64_t r = 0; r < kTileRows; ++r)
        std::copy_n((t ? other : row) + r * inputs, rest, padded[t] + r * kTileInputs);
    written();
    _tile_loadd(4, values, value_stride);
    _tile_loadd(2, padded[0], kTileInputs * sizeof(uint16_t));
    _tile_dpbf16ps(0, 2, 4);
    if constexpr (T == 1) return;
    _tile_loadd(3, padded[T - 1], kTileInputs * sizeof(uint16_t));
    _tile_dpbf16ps(1, 3, 4);
  }

  void write(const float* sums, int64_t row, int64_t piece) const {
    Lanes tile[kLanes];
    for (int64_t r = 0; r < kTileRows; ++r) tile[r] = load(sums + r * kTilePositions, columns);
    transpose(tile);
    const int64_t first = piece * columns, count = std::min(columns, positions - first);
    for (int64_t m = 0; m < count; ++m) store_halves(outputs + (first + m) * rows + row, to_bfloat16(tile[m]));
  }
};
#endif

void multiply(const void* values, const void* weight, void* outputs, int64_t positions, int64_t rows, int64_t inputs,
              Precision precision) {
#ifdef SDTUNE_AMX_BFLOAT16
  if (precision == Precision::kBFloat16 && rows >= TiledProduct::kTileRows && may_use_tiles())
    return TiledProduct((const uint16_t*)values, (const uint16_t*)weight, (uint16_t*)outputs, positions, rows, inputs).compute();
#endif
  with_format(precision, [&](auto format) {
    using Kind = KindOf<decltype(format)>;
    using Value = typename Kind::Value;
    const Operands<Kind> operands((const Value*)values, positions, inputs);
    Product<Kind>{operands, (const Value*)weight, (Value*)outputs, positions, rows, inputs}.compute();
  });
}

// The rows of a position's largest outputs.
class Largest {
 public:
  // The 16 largest of `found`.
  template <typename Format>
  static std::vector<int64_t> of(const typename Format::Value* found, int64_t rows) {
    Largest largest;
    for_each<Format>(found, rows, [&](int64_t first, int64_t count, Lanes some) {
      if (largest.rows_.size() == kShortlist && !exceeds(some, largest.smallest())) return;
      float each[kLanes];
      store(each, some);
      for (int64_t lane = 0; lane < count; ++lane) largest.offer(first + lane, each[lane]);
    });
    return largest.rows_;
  }

  // All that may have the largest product, equal ones among them. An output differs from what it stands for by at most its bound
  // times the norm of the values, and by roundings. So a product is larger than every other one can be unless its row is among these.
  template <typename Format>
  static std::vector<int64_t> among(
      const typename Format::Value* found, int64_t rows, const float* bounds, const typename Format::Value* values, int64_t inputs) {
    // What was found was rounded, and different products may be rounded to equal ones; comparing rounds, too.
    const Lanes norm = all(norm_of<Format>(values, inputs));
    const Lanes rounding = all(2.1f * Format::kRounding + 0x1p-23f), least_rounding = all(std::max(1e-30f, 2.1f * Format::kLeastRounding));
    const auto reach = [&](int64_t first, int64_t count, Lanes some) {
      return multiply_add(load(bounds + first, count), norm, multiply_add(absolute(some), rounding, least_rounding));
    };
    float least = -std::numeric_limits<float>::infinity();  // that the largest product can be
    Lanes lower = all(least);
    for_each<Format>(found, rows, [&](int64_t first, int64_t count, Lanes some) {
      const Lanes of_rows = subtract(some, reach(first, count, some));
      if (count == kLanes) return void(lower = greater(lower, of_rows));
      float each[kLanes];
      store(each, of_rows);
      least = std::max(least, *std::max_element(each, each + count));
    });
    least = std::nextafter(std::max(least, greatest_of(lower)), -std::numeric_limits<float>::infinity());
    std::vector<int64_t> chosen;
    for_each<Format>(found, rows, [&](int64_t first, int64_t count, Lanes some) {
      const Lanes of_rows = add(some, reach(first, count, some));
      if (!exceeds(of_rows, least)) return;
      float each[kLanes];
      store(each, of_rows);
      for (int64_t lane = 0; lane < count; ++lane)
        if (!(each[lane] <= least)) chosen.push_back(first + lane);  // also what is not a number
    });
    return chosen;
  }

 private:
  template <typename Format, typename Use>
  static void for_each(const typename Format::Value* found, int64_t rows, Use use) {
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = std::min(kLanes, rows - first);
      use(first, count, Format::read(found + first, count));
    }
  }

  // The norm, rounded up; not a number where its squares may leave the range of float32.
  template <typename Format>
  static float norm_of(const typename Format::Value* values, int64_t inputs) {
    Lanes squares = zeros(), largest = zeros();
    for_each<Format>(values, inputs, [&](int64_t, int64_t, Lanes some) {
      squares = multiply_add(some, some, squares), largest = greater(largest, absolute(some));
    });
    const float size = greatest_of(largest);
    return size > 1e-12f && size < 1e12f ? 1.01f * std::sqrt(sum_of(squares)) : std::numeric_limits<float>::quiet_NaN();
  }

  float smallest() const { return outputs_[last_]; }

  void offer(int64_t row, float output) {
    if (rows_.size() < kShortlist) rows_.push_back(row), outputs_.push_back(output);
    else if (output > smallest()) rows_[last_] = row, outputs_[last_] = output;
    else return;
    last_ = std::min_element(outputs_.begin(), outputs_.end()) - outputs_.begin();
  }

  std::vector<int64_t> rows_;
  std::vector<float> outputs_;
  int64_t last_ = 0;
};

template <typename Format>
void refine(const void* found, const void* values, const void* weight, const float* bounds, void* outputs, int64_t positions,
            int64_t rows, int64_t inputs, Precision precision) {
  using Value = typename Format::Value;
  const auto multiplied = [=](const Value* x, const Value* w, Value* to, int64_t count) {
    multiply(x, w, to, 1, count, inputs, precision);
  };
  at::parallel_for(0, positions, 1, [=](int64_t first, int64_t end) {
    std::vector<Value> some(kRowsAtOnce * inputs);
    for (int64_t m = first; m < end; ++m) {
      const Value *from = (const Value*)found + m * rows, *x = (const Value*)values + m * inputs, *w = (const Value*)weight;
      Value *to = (Value*)outputs + m * rows, products[kRowsAtOnce];
      const auto chosen = bounds ? Largest::among<Format>(from, rows, bounds, x, inputs) : Largest::of<Format>(from, rows);
      const int64_t size = chosen.size();
      if (size > rows / 4) {  // the whole weight is read faster
        multiplied(x, w, to, rows);
        continue;
      }
      std::copy_n(from, rows, to);
      for (int64_t begin = 0; begin < size; begin += kRowsAtOnce) {
        // With AMX, fewer than 16 rows would be computed another way: the same row fills the places.
        const int64_t count = std::min(kRowsAtOnce, size - begin), padded = std::max<int64_t>(count, 16);
        for (int64_t i = 0; i < padded; ++i)
          std::copy_n(w + chosen[begin + std::min(i, count - 1)] * inputs, inputs, &some[i * inputs]);
        multiplied(x, some.data(), products, padded);
        for (int64_t i = 0; i < count; ++i) to[chosen[begin + i]] = products[i];
      }
    }
  });
}

}  // namespace

// Multiply contiguous values.
extern "C" __attribute__((visibility("default"))) void sdtune_multiply(
    const void* values, const void* weight, void* outputs, int64_t positions, int64_t rows, int64_t inputs,
    int64_t precision) {
  multiply(values, weight, outputs, positions, rows, inputs, Precision(precision));
}

// Copy the outputs `found` [positions, rows], those that may be the largest products computed again. Without `bounds` [rows] these
// are the 16 largest.
extern "C" __attribute__((visibility("default"))) void sdtune_refine(
    const void* found, const void* values, const void* weight, const void* bounds, void* outputs, int64_t positions,
    int64_t rows, int64_t inputs, int64_t precision) {
  with_format(Precision(precision), [&](auto format) {
    refine<decltype(format)>(found, values, weight, (const float*)bounds, outputs, positions, rows, inputs, Precision(precision));
  });
}

// As inductor's code calls it: allocates the outputs.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_sdtune_few_positions(
    AtenTensorHandle values, AtenTensorHandle weight, AtenTensorHandle* outputs) {
  int64_t *weight_sizes, positions, inputs;
  Precision precision;
  void* data[3];
  SDTUNE_CHECK(aoti_torch_get_sizes(weight, &weight_sizes));
  const int64_t rows = weight_sizes[0];
  SDTUNE_CHECK(allocate(values, rows, outputs, &positions, &inputs, &precision));
  SDTUNE_CHECK(addresses({values, weight, *outputs}, data));
  multiply(data[0], data[1], data[2], positions, rows, inputs, precision);
  return AOTI_TORCH_SUCCESS;
}

// As inductor's code calls it: allocates the outputs. Empty `bounds` mean none.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_sdtune_refined(
    AtenTensorHandle found, AtenTensorHandle values, AtenTensorHandle weight, AtenTensorHandle bounds, AtenTensorHandle* outputs) {
  int64_t *weight_sizes, positions, inputs, num_bounds;
  Precision precision;
  void* data[5];
  SDTUNE_CHECK(aoti_torch_get_sizes(weight, &weight_sizes));
  SDTUNE_CHECK(aoti_torch_get_numel(bounds, &num_bounds));
  const int64_t rows = weight_sizes[0];
  SDTUNE_CHECK(allocate(values, rows, outputs, &positions, &inputs, &precision));
  SDTUNE_CHECK(addresses({found, values, weight, bounds, *outputs}, data));
  sdtune_refine(data[0], data[1], data[2], num_bounds ? data[3] : nullptr, data[4], positions, rows, inputs, int64_t(precision));
  return AOTI_TORCH_SUCCESS;
}
