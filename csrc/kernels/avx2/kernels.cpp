// AVX2 with FMA: the 16 lanes of a record row are two registers, two rows of a pair are decoded together.
#include <immintrin.h>

#include "kernels/avx2/floats.h"
#include "kernels/lane_kernels.h"

namespace duck::avx2 {

struct Lanes : FloatLanes {
  // 16 registers: with three or four rows one vector at a time, which decodes no weight twice.
  static constexpr int kBlockRows = 4;
  static constexpr int kTileRows = 6;  // 12 sums
  static constexpr int parts_at_once(int rows) { return rows == 1 ? 2 : 1; }
  static constexpr int vectors_at_once(int rows) { return rows <= 2 ? 2 : 1; }

  // The two f32 of each lane from 16-bit words that are their upper halves, the first row in the lower one.
  static DUCK_INLINE void split(__m256i words, Floats& low, Floats& high) {
    low = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    high = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static DUCK_INLINE __m256i load_rows(const uint8_t* record, int pair, int vector) {
    return _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(record + 4 * kStripeChannels * (pair / 2) + 4 * kLanes * vector));
  }
  // Multiplies the bytes of the pair by 16 and the others by 0.
  static DUCK_INLINE __m256i factors(int pair) {
    return _mm256_set1_epi16(static_cast<int16_t>(pair % 2 == 0 ? 16 : 16 << 8));
  }

  struct Fp9 {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp9);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kFp9);
    template <bool kSpareMultipliers>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      const __m256i rows = load_rows(record, pair, vector);
      __m256i magnitudes;
      if constexpr (kSpareMultipliers) {
        const __m256i moved = pair % 2 == 0 ? _mm256_slli_epi16(rows, 4) : _mm256_srli_epi16(rows, 4);
        magnitudes = _mm256_and_si256(moved, _mm256_set1_epi16(0x0ff0));
      } else {
        magnitudes = _mm256_maddubs_epi16(rows, factors(pair));
      }
      const auto* words = reinterpret_cast<const __m256i*>(record + kRecordWeights + 4 * kLanes * vector);
      const __m256i signs = _mm256_slli_epi16(_mm256_loadu_si256(words), pair);
      split(_mm256_or_si256(magnitudes, _mm256_and_si256(signs, _mm256_set1_epi16(INT16_MIN))), low, high);
    }
  };

  struct Fp8 {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp8);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kFp8);
    template <bool kSpareMultipliers>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      const __m256i rows = load_rows(record, pair, vector);
      __m256i words;  // sign-extended bytes times 16
      if constexpr (kSpareMultipliers) {
        words = _mm256_srai_epi16(pair % 2 == 0 ? _mm256_slli_epi16(rows, 8) : rows, 4);
      } else {
        words = _mm256_maddubs_epi16(factors(pair), rows);
      }
      split(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0x87f0))), low, high);
    }
  };

  // e4m3 codes to fp9 magnitudes: code + 0x80, and for codes below 8 what the table adds to that. A byte of
  // 0x80 and more chooses zero from it, so 0x78 + code is the place.
  struct Fp8Normal {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp8Normal);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kFp8Normal);
    template <bool kSpareMultipliers>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      const __m256i rows = load_rows(record, pair, vector);
      const __m256i codes = _mm256_and_si256(rows, _mm256_set1_epi8(0x7f));
      const __m256i table = _mm256_set_epi64x(kSmallCorrections, 0, kSmallCorrections, 0);
      const __m256i added = _mm256_shuffle_epi8(table, _mm256_add_epi8(codes, _mm256_set1_epi8(0x78)));
      const __m256i bytes = _mm256_add_epi8(_mm256_or_si256(rows, _mm256_set1_epi8(INT8_MIN)), added);
      __m256i magnitudes;
      if constexpr (kSpareMultipliers) {
        const __m256i moved = pair % 2 == 0 ? _mm256_slli_epi16(bytes, 4) : _mm256_srli_epi16(bytes, 4);
        magnitudes = _mm256_and_si256(moved, _mm256_set1_epi16(0x0ff0));
      } else {
        magnitudes = _mm256_maddubs_epi16(bytes, factors(pair));
      }
      const __m256i signs = pair % 2 == 0 ? _mm256_slli_epi16(rows, 8) : rows;
      split(_mm256_or_si256(magnitudes, _mm256_and_si256(signs, _mm256_set1_epi16(INT16_MIN))), low, high);
    }
  };

  struct Bf16 {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kBf16);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kBf16);
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      split(_mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(record + 4 * kStripeChannels * pair + 4 * kLanes * vector)),
            low, high);
    }
  };

  // 16 values: those at even places to `even`, the others to `odd`.
  static DUCK_INLINE void store_even_odd(const float* values, float* even, float* odd) {
    const Floats a = load(values), b = load(values + 8);
    const Floats low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    store(even, _mm256_shuffle_ps(low, high, 0x88));
    store(odd, _mm256_shuffle_ps(low, high, 0xdd));
  }
  static DUCK_INLINE Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static DUCK_INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static DUCK_INLINE Floats negate(Floats a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static DUCK_INLINE Floats abs(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
};

const KernelTable kTable = LaneKernels<Lanes>::table(Isa::kAvx2);

}  // namespace duck::avx2
