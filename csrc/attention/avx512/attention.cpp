// AVX-512 (F, DQ): 32 keys or dimensions and twelve queries at once are 24 of 32 registers.
#include <immintrin.h>

#include "attention/lane_attention.h"
#include "kernels/avx512/floats.h"

namespace duck::attention::avx512 {

struct Lanes : duck::avx512::FloatLanes {
  static constexpr int kQueries = 12;

  static DUCK_INLINE __mmask16 first(uint32_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static DUCK_INLINE Floats load_first(const float* p, uint32_t count) {
    return _mm512_maskz_loadu_ps(first(count), p);
  }
  static DUCK_INLINE void store_first(float* p, uint32_t count, Floats a) {
    _mm512_mask_storeu_ps(p, first(count), a);
  }
  static DUCK_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static DUCK_INLINE float largest(Floats a) { return _mm512_reduce_max_ps(a); }
  static DUCK_INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a); }

  // Numbers [d, d + 16) of 16 rows as 16 columns: four numbers of four rows are loaded to one register, and
  // turned within its quarters.
  static DUCK_INLINE void load_columns(const float* const (&rows)[16], uint32_t d, Floats (&columns)[16]) {
#pragma GCC unroll 4
    for (int four = 0; four < 4; ++four) {
      Floats r[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = d + 4 * four;
        r[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + at));
        r[i] = _mm512_mask_broadcast_f32x4(r[i], 0x00f0, _mm_loadu_ps(rows[4 + i] + at));
        r[i] = _mm512_mask_broadcast_f32x4(r[i], 0x0f00, _mm_loadu_ps(rows[8 + i] + at));
        r[i] = _mm512_mask_broadcast_f32x4(r[i], 0xf000, _mm_loadu_ps(rows[12 + i] + at));
      }
      const Floats a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
      const Floats c = _mm512_unpacklo_ps(r[2], r[3]), e = _mm512_unpackhi_ps(r[2], r[3]);
      columns[4 * four] = _mm512_shuffle_ps(a, c, 0x44);
      columns[4 * four + 1] = _mm512_shuffle_ps(a, c, 0xee);
      columns[4 * four + 2] = _mm512_shuffle_ps(b, e, 0x44);
      columns[4 * four + 3] = _mm512_shuffle_ps(b, e, 0xee);
    }
  }
};

const AttentionTable kTable = LaneAttention<Lanes>::table(Isa::kAvx512);

}  // namespace duck::attention::avx512
