// AVX2 with FMA: 16 keys or dimensions and six queries at once are 12 of 16 registers.
#include <immintrin.h>

#include "attention/lane_attention.h"
#include "kernels/avx2/floats.h"

namespace duck::attention::avx2 {

struct Lanes : duck::avx2::FloatLanes {
  static constexpr int kQueries = 6;

  static DUCK_INLINE __m256i first(uint32_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static DUCK_INLINE Floats load_first(const float* p, uint32_t count) {
    return _mm256_maskload_ps(p, first(count));
  }
  static DUCK_INLINE void store_first(float* p, uint32_t count, Floats a) {
    _mm256_maskstore_ps(p, first(count), a);
  }
  static DUCK_INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static DUCK_INLINE float largest(Floats a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  static DUCK_INLINE float sum(Floats a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // Numbers [d, d + 8) of eight rows as eight columns: four numbers of two rows are loaded to one register,
  // and turned within its halves.
  static DUCK_INLINE void load_columns(const float* const (&rows)[8], uint32_t d, Floats (&columns)[8]) {
#pragma GCC unroll 2
    for (int four = 0; four < 2; ++four) {
      Floats r[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = d + 4 * four;
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[i] + at)),
                                    _mm_loadu_ps(rows[4 + i] + at), 1);
      }
      const Floats a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
      const Floats c = _mm256_unpacklo_ps(r[2], r[3]), e = _mm256_unpackhi_ps(r[2], r[3]);
      columns[4 * four] = _mm256_shuffle_ps(a, c, 0x44);
      columns[4 * four + 1] = _mm256_shuffle_ps(a, c, 0xee);
      columns[4 * four + 2] = _mm256_shuffle_ps(b, e, 0x44);
      columns[4 * four + 3] = _mm256_shuffle_ps(b, e, 0xee);
    }
  }
};

const AttentionTable kTable = LaneAttention<Lanes>::table(Isa::kAvx2);

}  // namespace duck::attention::avx2
