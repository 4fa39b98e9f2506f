// 16 integers of 32 bits in a register with AVX-512: what integer_lanes.h asks of its lanes, but for the dot
// products of bytes. Included by <instructions>/integer*.cpp only.
#pragma once

#include <immintrin.h>

#include "kernels/avx512/floats.h"
#include "kernels/integer_lanes.h"

namespace duck {

struct Lanes512 : avx512::FloatLanes {
  using Ints = __m512i;
  static constexpr int kIntegerRows = 8;
  static constexpr int integer_parts(int) { return 2; }
  static constexpr int integer_vectors(int) { return 1; }

  static DUCK_INLINE Ints load_ints(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static DUCK_INLINE void store_ints(int32_t* p, Ints a) { _mm512_storeu_si512(p, a); }
  static DUCK_INLINE Ints broadcast_int(int32_t a) { return _mm512_set1_epi32(a); }
  static DUCK_INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
  static DUCK_INLINE Ints round_to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
  static DUCK_INLINE Floats load_bytes(const uint8_t* p) { return _mm512_loadu_ps(p); }
  static DUCK_INLINE Floats load_f16(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static DUCK_INLINE Floats load_bf16(const uint8_t* p) {
    const Ints words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  // The lower and the upper four bits of each byte.
  static DUCK_INLINE Ints low_halves(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static DUCK_INLINE Ints high_halves(Ints a) { return low_halves(_mm512_srli_epi16(a, 4)); }
  static DUCK_INLINE Ints look_up(const uint8_t* table, Ints places) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), places);
  }
  // 16 halves of bytes, the lower ones first.
  static DUCK_INLINE Ints load_halves(const uint8_t* p) {
    const Ints wide = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const Ints mask = _mm512_set1_epi64(0x0f);
    return _mm512_or_si512(_mm512_and_si512(wide, mask),
                           _mm512_slli_epi64(_mm512_andnot_si512(mask, wide), 28));
  }
  // a * b where a is at most 15 and b fits in 16 bits.
  static DUCK_INLINE Ints multiply_small(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
};

}  // namespace duck
