// AVX-512 (F, BW, VL, DQ): the 16 lanes of a record row are one register, two rows of a pair are decoded
// together. Under GCC a record row's broadcast is a memory operand of the FMA.
#include <immintrin.h>

#include "kernels/avx512/floats.h"
#include "kernels/avx512/words.h"
#include "kernels/lane_kernels.h"

namespace duck::avx512 {

struct Lanes : FloatLanes {
  using Words = Avx512Words<Lanes>;
  static constexpr int kBlockRows = 8;  // of the direct kernels: 16 sums
  static constexpr int kTileRows = 10;  // of the tile kernels: 20 sums of 32 registers
  static constexpr int parts_at_once(int rows) { return rows <= 4 ? 2 : 1; }
  static constexpr int vectors_at_once(int) { return 1; }

  // The two f32 of each lane from 16-bit words that are their upper halves, the first row in the lower one.
  static DUCK_INLINE void split(__m512i words, Floats& low, Floats& high) {
    low = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    high = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }

  struct Fp9 {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp9);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kFp9);
    template <bool kSpareMultipliers>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      split(Words::fp9<kSpareMultipliers>(record, pair), low, high);
    }
  };

  struct Fp8 {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp8);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kFp8);
    template <bool kSpareMultipliers>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      split(Words::fp8<kSpareMultipliers>(record, pair), low, high);
    }
  };

  // e4m3 codes to fp9 magnitudes: code + 0x80, and for codes below 8 what the table adds to that. A byte of
  // 0x80 and more chooses zero from it, so 0x78 + code is the place.
  struct Fp8Normal {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp8Normal);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kFp8Normal);
    template <bool kSpareMultipliers>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      const __m512i rows = Words::load_rows(record, pair);
      const __m512i codes = _mm512_and_si512(rows, _mm512_set1_epi8(0x7f));
      const __m512i table = _mm512_set_epi64(kSmallCorrections, 0, kSmallCorrections, 0, kSmallCorrections, 0,
                                             kSmallCorrections, 0);
      const __m512i added = _mm512_shuffle_epi8(table, _mm512_add_epi8(codes, _mm512_set1_epi8(0x78)));
      const __m512i bytes = _mm512_add_epi8(_mm512_or_si512(rows, _mm512_set1_epi8(INT8_MIN)), added);
      __m512i magnitudes;
      if constexpr (kSpareMultipliers) {
        const __m512i moved = pair % 2 == 0 ? _mm512_slli_epi16(bytes, 4) : _mm512_srli_epi16(bytes, 4);
        magnitudes = _mm512_and_si512(moved, _mm512_set1_epi16(0x0ff0));
      } else {
        magnitudes = _mm512_maddubs_epi16(bytes, Words::factors(pair));
      }
      const __m512i signs = pair % 2 == 0 ? _mm512_slli_epi16(rows, 8) : rows;
      split(Words::or_signs(magnitudes, signs), low, high);
    }
  };

  struct Bf16 {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kBf16);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kBf16);
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      split(_mm512_loadu_si512(record + 4 * kStripeChannels * pair), low, high);
    }
  };

  // 32 values: those at even places to `even`, the others to `odd`.
  static DUCK_INLINE void store_even_odd(const float* values, float* even, float* odd) {
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const Floats a = load(values), b = load(values + 16);
    store(even, _mm512_permutex2var_ps(a, places, b));
    store(odd, _mm512_permutex2var_ps(a, _mm512_add_epi32(places, _mm512_set1_epi32(1)), b));
  }
  static DUCK_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static DUCK_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static DUCK_INLINE Floats negate(Floats a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static DUCK_INLINE Floats abs(Floats a) { return _mm512_abs_ps(a); }
};

const KernelTable kTable = LaneKernels<Lanes>::table(Isa::kAvx512);

}  // namespace duck::avx512
