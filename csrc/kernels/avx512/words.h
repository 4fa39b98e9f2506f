// AVX-512 decoding of a record's pair into 16 words of two upper halves of f32, the first row in the lower
// half. For the kernels.cpp of the ISAs that have AVX-512; Isa is a type of that file's own, so that each has
// its own copies.
#pragma once

#include <immintrin.h>

#include "kernels/weight_format.h"

#ifndef DUCK_INLINE
#define DUCK_INLINE __attribute__((always_inline)) inline
#endif

namespace duck {

template <class Isa>
struct Avx512Words {
  static DUCK_INLINE __m512i load_rows(const uint8_t* record, int pair) {
    return _mm512_loadu_si512(record + 4 * kStripeChannels * (pair / 2));
  }
  // Multiplies the bytes of the pair by 16 and the others by 0.
  static DUCK_INLINE __m512i factors(int pair) {
    return _mm512_set1_epi16(static_cast<int16_t>(pair % 2 == 0 ? 16 : 16 << 8));
  }

  // Decoding by multiplication takes fewest operations; kSpareMultipliers leaves those units to others.
  template <bool kSpareMultipliers>
  static DUCK_INLINE __m512i fp9(const uint8_t* record, int pair) {
    const __m512i rows = load_rows(record, pair);
    const __m512i signs = _mm512_slli_epi16(_mm512_loadu_si512(record + kRecordWeights), pair);
    __m512i magnitudes;
    if constexpr (kSpareMultipliers) {
      const __m512i moved = pair % 2 == 0 ? _mm512_slli_epi16(rows, 4) : _mm512_srli_epi16(rows, 4);
      magnitudes = _mm512_and_si512(moved, _mm512_set1_epi16(0x0ff0));
    } else {
      magnitudes = _mm512_maddubs_epi16(rows, factors(pair));
    }
    return or_signs(magnitudes, signs);
  }

  template <bool kSpareMultipliers>
  static DUCK_INLINE __m512i fp8(const uint8_t* record, int pair) {
    const __m512i rows = load_rows(record, pair);
    __m512i words;  // sign-extended bytes times 16
    if constexpr (kSpareMultipliers) {
      words = _mm512_srai_epi16(pair % 2 == 0 ? _mm512_slli_epi16(rows, 8) : rows, 4);
    } else {
      words = _mm512_maddubs_epi16(factors(pair), rows);
    }
    return _mm512_and_si512(words, _mm512_set1_epi16(static_cast<int16_t>(0x87f0)));
  }

  // magnitudes | (signs & 0x8000)
  static DUCK_INLINE __m512i or_signs(__m512i magnitudes, __m512i signs) {
    constexpr int kFirstOrSecondAndThird = 0xf8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(magnitudes, signs, _mm512_set1_epi16(INT16_MIN), kFirstOrSecondAndThird);
  }
};

}  // namespace duck
