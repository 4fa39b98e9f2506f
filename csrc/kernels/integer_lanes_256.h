// 8 integers of 32 bits in a register with AVX2: what integer_lanes.h asks of its lanes, but for the dot
// products of bytes. Included by <instructions>/integer*.cpp only.
#pragma once

#include <immintrin.h>

#include "kernels/avx2/floats.h"
#include "kernels/integer_lanes.h"

namespace duck {

struct Lanes256 : avx2::FloatLanes {
  using Ints = __m256i;
  static constexpr int kIntegerRows = 4;
  static constexpr int integer_parts(int rows) { return rows <= 2 ? 2 : 1; }
  static constexpr int integer_vectors(int rows) { return rows <= 2 ? 2 : 1; }

  static DUCK_INLINE Ints load_ints(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static DUCK_INLINE void store_ints(int32_t* p, Ints a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
  }
  static DUCK_INLINE Ints broadcast_int(int32_t a) { return _mm256_set1_epi32(a); }
  static DUCK_INLINE Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
  static DUCK_INLINE Ints round_to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
  static DUCK_INLINE Floats load_bytes(const uint8_t* p) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  }
  static DUCK_INLINE Floats load_f16(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static DUCK_INLINE Floats load_bf16(const uint8_t* p) {
    const Ints words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
  // The lower and the upper four bits of each byte.
  static DUCK_INLINE Ints low_halves(Ints a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
  static DUCK_INLINE Ints high_halves(Ints a) { return low_halves(_mm256_srli_epi16(a, 4)); }
  static DUCK_INLINE Ints look_up(const uint8_t* table, Ints places) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), places);
  }
  // 8 halves of bytes, the lower ones first.
  static DUCK_INLINE Ints load_halves(const uint8_t* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    const Ints wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    const Ints low = _mm256_and_si256(wide, _mm256_set1_epi64x(0x0f));
    return _mm256_or_si256(low, _mm256_slli_epi64(_mm256_andnot_si256(_mm256_set1_epi64x(0x0f), wide), 28));
  }
  // a * b where a is at most 15 and b fits in 16 bits.
  static DUCK_INLINE Ints multiply_small(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
};

}  // namespace duck
