// AVX-512 (F, BW, VL, DQ): 16 lanes are one register. A weight is decoded by a widening load, a shift and one
// ternary logic operation that puts the sign in.
#include <immintrin.h>

#include "kernels/lane_kernels.h"

namespace duck::avx512 {

struct Lanes {
  using Floats = __m512;
  using Signs = __m512i;
  // 32 registers: four rows of gate and up at once, eight sums.
  static constexpr int kRowsWithTwoParts = 4;

  static DUCK_INLINE Signs load_signs(const uint8_t* words) { return _mm512_loadu_si512(words); }
  static DUCK_INLINE Signs next_row(Signs s) { return _mm512_add_epi32(s, s); }
  static DUCK_INLINE Signs skip_16_rows(Signs s) { return _mm512_slli_epi32(s, 16); }
  static DUCK_INLINE Floats decode(const uint8_t* magnitudes, Signs s) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(magnitudes)));
    constexpr int kFirstOrSecondAndThird = 0xf8;  // a | (b & c)
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_slli_epi32(bytes, 20), s, _mm512_set1_epi32(INT32_MIN), kFirstOrSecondAndThird));
  }

  static DUCK_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static DUCK_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
  static DUCK_INLINE Floats zero() { return _mm512_setzero_ps(); }
  static DUCK_INLINE Floats broadcast(float a) { return _mm512_set1_ps(a); }
  static DUCK_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static DUCK_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static DUCK_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static DUCK_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static DUCK_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static DUCK_INLINE Floats negate(Floats a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static DUCK_INLINE Floats abs(Floats a) { return _mm512_abs_ps(a); }
  static DUCK_INLINE Floats round(Floats a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // 2^n of whole numbers -126 <= n <= 127.
  static DUCK_INLINE Floats power_of_two(Floats n) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  // a < b ? yes : no; `no` where either is NaN.
  static DUCK_INLINE Floats select_less(Floats a, Floats b, Floats yes, Floats no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
};

const KernelTable kTable = {Isa::kAvx512, &LaneKernels<Lanes>::gate_up, &LaneKernels<Lanes>::down};

}  // namespace duck::avx512
