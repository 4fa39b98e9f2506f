// AVX2 with FMA: 16 lanes are two registers. A weight is decoded by a widening load, a shift and an OR.
#include <immintrin.h>

#include "kernels/lane_kernels.h"

namespace duck::avx2 {
namespace {

struct Floats {
  __m256 low, high;
};
struct Signs {
  __m256i low, high;
};

DUCK_INLINE __m256 decode_half(const uint8_t* magnitudes, __m256i signs) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(magnitudes)));
  const __m256i sign = _mm256_and_si256(signs, _mm256_set1_epi32(INT32_MIN));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(bytes, 20), sign));
}

DUCK_INLINE __m256 power_of_two_half(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

constexpr int kRoundNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

}  // namespace

struct Lanes {
  using Floats = avx2::Floats;
  using Signs = avx2::Signs;
  // 16 registers: one row leaves room for gate and up at once.
  static constexpr int kRowsWithTwoParts = 1;

  static DUCK_INLINE Signs load_signs(const uint8_t* words) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 32))};
  }
  static DUCK_INLINE Signs next_row(Signs s) {
    return {_mm256_add_epi32(s.low, s.low), _mm256_add_epi32(s.high, s.high)};
  }
  static DUCK_INLINE Signs skip_16_rows(Signs s) {
    return {_mm256_slli_epi32(s.low, 16), _mm256_slli_epi32(s.high, 16)};
  }
  static DUCK_INLINE Floats decode(const uint8_t* magnitudes, Signs s) {
    return {decode_half(magnitudes, s.low), decode_half(magnitudes + 8, s.high)};
  }

  static DUCK_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static DUCK_INLINE void store(float* p, Floats a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
  }
  static DUCK_INLINE Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static DUCK_INLINE Floats broadcast(float a) {
    const __m256 all = _mm256_set1_ps(a);
    return {all, all};
  }
  static DUCK_INLINE Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  static DUCK_INLINE Floats mul(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static DUCK_INLINE Floats div(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
  }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static DUCK_INLINE Floats min(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
  }
  static DUCK_INLINE Floats max(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  static DUCK_INLINE Floats negate(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.low, sign), _mm256_xor_ps(a.high, sign)};
  }
  static DUCK_INLINE Floats abs(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
  }
  static DUCK_INLINE Floats round(Floats a) {
    return {_mm256_round_ps(a.low, kRoundNearest), _mm256_round_ps(a.high, kRoundNearest)};
  }
  // 2^n of whole numbers -126 <= n <= 127.
  static DUCK_INLINE Floats power_of_two(Floats n) {
    return {power_of_two_half(n.low), power_of_two_half(n.high)};
  }
  // a < b ? yes : no; `no` where either is NaN.
  static DUCK_INLINE Floats select_less(Floats a, Floats b, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
  }
};

const KernelTable kTable = {Isa::kAvx2, &LaneKernels<Lanes>::gate_up, &LaneKernels<Lanes>::down};

}  // namespace duck::avx2
