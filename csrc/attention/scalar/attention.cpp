// Any x86-64: four lanes of its baseline, with a product and a sum where the others have one FMA.
#include <emmintrin.h>

#include "attention/lane_attention.h"

namespace duck::attention::scalar {

struct Lanes {
  using Floats = __m128;
  static constexpr int kLanes = 4;
  static constexpr int kQueries = 5;

  static DUCK_INLINE Floats load(const float* p) { return _mm_loadu_ps(p); }
  static DUCK_INLINE void store(float* p, Floats a) { _mm_storeu_ps(p, a); }
  static DUCK_INLINE Floats load_first(const float* p, uint32_t count) {
    float lanes[kLanes] = {};
    for (uint32_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
  }
  static DUCK_INLINE void store_first(float* p, uint32_t count, Floats a) {
    float lanes[kLanes];
    store(lanes, a);
    for (uint32_t i = 0; i < count; ++i) p[i] = lanes[i];
  }
  static DUCK_INLINE Floats zero() { return _mm_setzero_ps(); }
  static DUCK_INLINE Floats broadcast(float a) { return _mm_set1_ps(a); }
  static DUCK_INLINE Floats add(Floats a, Floats b) { return _mm_add_ps(a, b); }
  static DUCK_INLINE Floats sub(Floats a, Floats b) { return _mm_sub_ps(a, b); }
  static DUCK_INLINE Floats mul(Floats a, Floats b) { return _mm_mul_ps(a, b); }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
  static DUCK_INLINE Floats max(Floats a, Floats b) { return _mm_max_ps(a, b); }
  static DUCK_INLINE float largest(Floats a) {
    const Floats pairs = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
  }
  static DUCK_INLINE float sum(Floats a) {
    const Floats pairs = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
  }
  // Of numbers below 2^31.
  static DUCK_INLINE Floats round(Floats a) { return _mm_cvtepi32_ps(_mm_cvtps_epi32(a)); }
  // 2^n of whole numbers -126 <= n <= 127.
  static DUCK_INLINE Floats power_of_two(Floats n) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(_mm_cvtps_epi32(n), _mm_set1_epi32(127)), 23));
  }
  // a < b ? yes : no; `no` where either is NaN.
  static DUCK_INLINE Floats select_less(Floats a, Floats b, Floats yes, Floats no) {
    const Floats less = _mm_cmplt_ps(a, b);
    return _mm_or_ps(_mm_and_ps(less, yes), _mm_andnot_ps(less, no));
  }
  // Numbers [d, d + 4) of four rows as four columns.
  static DUCK_INLINE void load_columns(const float* const (&rows)[4], uint32_t d, Floats (&columns)[4]) {
    for (int i = 0; i < 4; ++i) columns[i] = load(rows[i] + d);
    _MM_TRANSPOSE4_PS(columns[0], columns[1], columns[2], columns[3]);
  }
};

const AttentionTable kTable = LaneAttention<Lanes>::table(Isa::kScalar);

}  // namespace duck::attention::scalar
