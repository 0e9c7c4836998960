// Numbers in a vector register, and what kernels do with them: 16 of AVX-512, 8 of AVX2.
//
// A source that defines SDTUNE_AVX2 gets AVX2 in either case, one that defines SDTUNE_AVX512 no tiles of AMX.

#include <immintrin.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// Declared here, as torch's header for it takes half of the time of compiling a kernel.
namespace at::cpu {
bool init_amx();
}

// Before a loop over an array of sums. gcc unrolls it by itself only after it has decided what stays in registers: it then stores
// every sum at every step, which takes longer than the products.
#define SDTUNE_UNROLLED _Pragma("GCC unroll 16")

namespace {

#if defined(__AVX512F__) && !defined(SDTUNE_AVX2)

constexpr int64_t kLanes = 16;
// How memory is read fastest: by a Xeon with AMX from many places at a time, lines asked for long before; by an EPYC without (Zen 4)
// from few places, lines asked for shortly before. Others were not measured.
#ifdef __AMX_TILE__
constexpr bool kReadsNear = false;
#else
constexpr bool kReadsNear = true;
#endif
#if defined(__AMX_INT8__) && !defined(SDTUNE_AVX512)
#define SDTUNE_AMX_INT8  // there is an instruction for products of tiles of bytes
#endif
#ifdef __AVX512BF16__
#define SDTUNE_BFLOAT16  // there is an instruction for products of pairs
#if defined(__AMX_BF16__) && !defined(SDTUNE_AVX512)
#define SDTUNE_AMX_BFLOAT16  // and one for products of tiles of pairs
#endif
#endif
using Lanes = __m512;
using Halves = __m256i;  // numbers of 16 bits
using Mask = __mmask16;

#if defined(SDTUNE_AMX_INT8) || defined(SDTUNE_AMX_BFLOAT16)
// True if the system lets this process use the tiles of AMX, which have to be asked for.
bool may_use_tiles() {
  static const bool is_allowed = at::cpu::init_amx();
  return is_allowed;
}
#endif

// The mask of the first `count` lanes.
Mask first_lanes(int64_t count) { return count >= kLanes ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

Lanes zeros() { return _mm512_setzero_ps(); }
Lanes all(float value) { return _mm512_set1_ps(value); }
Lanes load(const float* from) { return _mm512_loadu_ps(from); }
Lanes load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
void store(float* to, Lanes values) { _mm512_storeu_ps(to, values); }
void store(float* to, int64_t count, Lanes values) { _mm512_mask_storeu_ps(to, first_lanes(count), values); }
Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
Lanes subtract(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
Lanes multiply(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }
Lanes divide(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
Lanes greater(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
Lanes absolute(Lanes values) { return _mm512_abs_ps(values); }
// True if any value is larger than `limit`, or not a number.
bool exceeds(Lanes values, float limit) { return _mm512_cmp_ps_mask(values, _mm512_set1_ps(limit), _CMP_NLE_UQ); }
Lanes chosen(Mask mask, Lanes yes, Lanes no) { return _mm512_mask_blend_ps(mask, no, yes); }
Lanes to_whole(Lanes values) { return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
Lanes times_power_of_two(Lanes values, Lanes whole) { return _mm512_scalef_ps(values, whole); }
float sum_of(Lanes values) { return _mm512_reduce_add_ps(values); }
float greatest_of(Lanes values) { return _mm512_reduce_max_ps(values); }

// Transpose 16 x 16 values: `rows[i]` becomes column i.
[[gnu::always_inline]] inline void transpose(Lanes rows[kLanes]) {
  Lanes other[kLanes];
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

// bfloat16, one in a lane or, in memory and in products, two.
Lanes from_bfloat16(Halves values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

Lanes load_pairs(const uint16_t* from) { return _mm512_loadu_ps(from); }

Lanes load_pairs(const uint16_t* from, int64_t count) {
  const __mmask32 lanes = count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lanes, from));
}

Lanes first_of_pairs(Lanes pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }

Lanes second_of_pairs(Lanes pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(0xffff0000)));
}

Halves to_bfloat16(Lanes values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i upper = _mm512_mask_mov_epi32(_mm512_srli_epi32(nearest, 16), is_nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(upper);
}

Halves load_halves(const uint16_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
void store_halves(uint16_t* to, Halves values) { _mm256_storeu_si256((__m256i*)to, values); }
Lanes from_float16(Halves values) { return _mm512_cvtph_ps(values); }
Halves to_float16(Lanes values) { return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

#else

constexpr int64_t kLanes = 8;
constexpr bool kReadsNear = false;

using Lanes = __m256;
using Halves = __m128i;  // numbers of 16 bits
using Mask = uint8_t;

// The mask of the first `count` lanes.
Mask first_lanes(int64_t count) { return count >= kLanes ? 0xff : count <= 0 ? 0 : (1u << count) - 1; }

Lanes zeros() { return _mm256_setzero_ps(); }
Lanes all(float value) { return _mm256_set1_ps(value); }
Lanes load(const float* from) { return _mm256_loadu_ps(from); }
void store(float* to, Lanes values) { _mm256_storeu_ps(to, values); }

Lanes load(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float padded[kLanes] = {};
  std::memcpy(padded, from, std::max<int64_t>(count, 0) * sizeof(float));
  return load(padded);
}

void store(float* to, int64_t count, Lanes values) {
  if (count >= kLanes) return store(to, values);
  float padded[kLanes];
  store(padded, values);
  std::memcpy(to, padded, std::max<int64_t>(count, 0) * sizeof(float));
}

Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
Lanes subtract(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
Lanes multiply(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm256_fmadd_ps(a, b, sum); }
Lanes divide(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
Lanes greater(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
Lanes absolute(Lanes values) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values); }
// True if any value is larger than `limit`, or not a number.
bool exceeds(Lanes values, float limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps(values, _mm256_set1_ps(limit), _CMP_NLE_UQ));
}
Lanes to_whole(Lanes values) { return _mm256_round_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

Lanes chosen(Mask mask, Lanes yes, Lanes no) {
  const __m256i of_lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i is_yes = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), of_lane), of_lane);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(is_yes));
}

// By an exponent of -127 to 127. Smaller ones, and those that are no number, are taken as -127, whose power as 0.
Lanes times_power_of_two(Lanes values, Lanes whole) {
  const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(whole, _mm256_set1_ps(-127)));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(values, _mm256_castsi256_ps(power));
}

float sum_of(Lanes values) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

float greatest_of(Lanes values) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Transpose 8 x 8 values: `rows[i]` becomes column i.
[[gnu::always_inline]] inline void transpose(Lanes rows[kLanes]) {
  Lanes other[kLanes];
  for (int i = 0; i < 8; i += 2) {
    other[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    other[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    rows[i] = _mm256_shuffle_ps(other[i], other[i + 2], 0x44);
    rows[i + 1] = _mm256_shuffle_ps(other[i], other[i + 2], 0xee);
    rows[i + 2] = _mm256_shuffle_ps(other[i + 1], other[i + 3], 0x44);
    rows[i + 3] = _mm256_shuffle_ps(other[i + 1], other[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    other[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
    other[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
  }
  std::copy_n(other, kLanes, rows);
}

// bfloat16, one in a lane or, in memory and in products, two.
Lanes from_bfloat16(Halves values) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16)); }

Lanes load_pairs(const uint16_t* from) { return load((const float*)from); }

Lanes load_pairs(const uint16_t* from, int64_t count) {
  if (count >= 2 * kLanes) return load_pairs(from);
  uint16_t padded[2 * kLanes] = {};
  std::memcpy(padded, from, std::max<int64_t>(count, 0) * sizeof(uint16_t));
  return load_pairs(padded);
}

Lanes first_of_pairs(Lanes pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
Lanes second_of_pairs(Lanes pairs) { return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(0xffff0000))); }

Halves to_bfloat16(Lanes values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i upper = _mm256_blendv_epi8(_mm256_srli_epi32(nearest, 16), _mm256_set1_epi32(0x7fc0), is_nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

Halves load_halves(const uint16_t* from) { return _mm_loadu_si128((const __m128i*)from); }
void store_halves(uint16_t* to, Halves values) { _mm_storeu_si128((__m128i*)to, values); }
Lanes from_float16(Halves values) { return _mm256_cvtph_ps(values); }
Halves to_float16(Lanes values) { return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

#endif

// The same numbers, in a register: gcc would read them again for each use.
[[gnu::always_inline]] inline Lanes in_register(Lanes numbers) {
  asm("" : "+v"(numbers));
  return numbers;
}

// With AVX-512, which has enough registers.
[[gnu::always_inline]] inline Lanes held(Lanes numbers) { return kLanes == 16 ? in_register(numbers) : numbers; }

Halves load_halves(const uint16_t* from, int64_t count) {
  if (count >= kLanes) return load_halves(from);
  uint16_t padded[kLanes] = {};
  std::memcpy(padded, from, std::max<int64_t>(count, 0) * sizeof(uint16_t));
  return load_halves(padded);
}

void store_halves(uint16_t* to, int64_t count, Halves values) {
  if (count >= kLanes) return store_halves(to, values);
  uint16_t padded[kLanes];
  store_halves(padded, values);
  std::memcpy(to, padded, std::max<int64_t>(count, 0) * sizeof(uint16_t));
}

// Add the products of pairs of bfloat16 numbers.
Lanes multiply_add_pairs(Lanes a, Lanes b, Lanes sum) {
#ifdef SDTUNE_BFLOAT16
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  sum = multiply_add(first_of_pairs(a), first_of_pairs(b), sum);
  return multiply_add(second_of_pairs(a), second_of_pairs(b), sum);
#endif
}

// How numbers are stored: they are read as float32, and rounded, by at most `kRounding` of themselves or `kLeastRounding`.
struct Float32 {
  using Value = float;
  static constexpr float kRounding = 0x1p-24f, kLeastRounding = 0x1p-126f;  // smaller numbers may be flushed to zero
  static Lanes read(const Value* from) { return load(from); }
  static Lanes read(const Value* from, int64_t count) { return load(from, count); }
  static void write(Value* to, int64_t count, Lanes values) { store(to, count, values); }
  static Value rounded(float value) { return value; }
};

struct BFloat16 {
  using Value = uint16_t;
  static constexpr float kRounding = 0x1p-8f, kLeastRounding = 0x1p-126f;
  static Lanes read(const Value* from) { return from_bfloat16(load_halves(from)); }
  static Lanes read(const Value* from, int64_t count) { return from_bfloat16(load_halves(from, count)); }
  static void write(Value* to, int64_t count, Lanes values) { store_halves(to, count, to_bfloat16(values)); }
  static Value rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
};

struct Float16 {
  using Value = uint16_t;
  static constexpr float kRounding = 0x1p-11f, kLeastRounding = 0x1p-25f;
  static Lanes read(const Value* from) { return from_float16(load_halves(from)); }
  static Lanes read(const Value* from, int64_t count) { return from_float16(load_halves(from, count)); }
  static void write(Value* to, int64_t count, Lanes values) { store_halves(to, count, to_float16(values)); }
  static Value rounded(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
};

enum class Precision : int64_t { kFloat32, kBFloat16, kFloat16 };  // in the order of `compiled.py`

Precision precision_of(int32_t dtype) {
  return dtype == aoti_torch_dtype_float32()    ? Precision::kFloat32
         : dtype == aoti_torch_dtype_bfloat16() ? Precision::kBFloat16
                                                : Precision::kFloat16;
}

// Call `use` with the format of numbers in a precision.
template <typename Use>
[[gnu::always_inline]] inline auto with_format(Precision precision, Use use) {
  return precision == Precision::kFloat32 ? use(Float32()) : precision == Precision::kBFloat16 ? use(BFloat16()) : use(Float16());
}

}  // namespace
