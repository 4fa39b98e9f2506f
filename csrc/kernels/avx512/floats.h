// 16 f32 in a register with AVX-512 (F, DQ): what the kernels of experts and of attention both ask of their
// lanes. Included by <isa>/kernels.cpp and <isa>/attention.cpp only, which have the flags for it.
#pragma once

#include <immintrin.h>

#include "kernels/lane_kernels.h"

namespace duck::avx512 {

struct FloatLanes {
  using Floats = __m512;
  static constexpr int kLanes = 16;

  static DUCK_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static DUCK_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
  static DUCK_INLINE Floats zero() { return _mm512_setzero_ps(); }
  static DUCK_INLINE Floats broadcast(float a) { return _mm512_set1_ps(a); }
  static DUCK_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static DUCK_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static DUCK_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
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

}  // namespace duck::avx512
