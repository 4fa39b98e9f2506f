// AVX-512 (F, DQ): 32 keys or dimensions and twelve queries at once are 24 of 32 registers.
#include <immintrin.h>

#include "attention/lane_attention.h"

namespace duck::attention::avx512 {

struct Lanes {
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kQueries = 12;

  static DUCK_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static DUCK_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
  static DUCK_INLINE __mmask16 first(uint32_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static DUCK_INLINE Floats load_first(const float* p, uint32_t count) {
    return _mm512_maskz_loadu_ps(first(count), p);
  }
  static DUCK_INLINE void store_first(float* p, uint32_t count, Floats a) {
    _mm512_mask_storeu_ps(p, first(count), a);
  }
  static DUCK_INLINE Floats zero() { return _mm512_setzero_ps(); }
  static DUCK_INLINE Floats broadcast(float a) { return _mm512_set1_ps(a); }
  static DUCK_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static DUCK_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static DUCK_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static DUCK_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static DUCK_INLINE float largest(Floats a) { return _mm512_reduce_max_ps(a); }
  static DUCK_INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a); }
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

  // Pairs of rows, then of pairs, within groups of four lanes; then the groups.
  static DUCK_INLINE void transpose(Floats (&rows)[16]) {
    Floats t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      rows[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      rows[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      rows[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      rows[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rows[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      rows[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
      rows[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
      rows[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }
};

const AttentionTable kTable = LaneAttention<Lanes>::table(Isa::kAvx512);

}  // namespace duck::attention::avx512
