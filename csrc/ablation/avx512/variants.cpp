// The variants on AVX-512. Production's source is included for its Lanes; its table is in the library
// already, and the copy of it here is never used.
#include "kernels/kernel_table.h"
#define kTable kCopyOfTable
#include "kernels/avx512/kernels.cpp"
#undef kTable

#include "ablation/choice_kernels.h"

namespace duck::ablation::avx512 {
namespace {

using Production = duck::avx512::Lanes;

struct Fp9Base {
  static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp9);
  static constexpr float kPostscale = sum_postscale(WeightFormat::kFp9);
  static DUCK_INLINE __m512i magnitudes(const uint8_t* record, int pair) {
    return _mm512_maddubs_epi16(Production::Words::load_rows(record, pair), Production::Words::factors(pair));
  }
};

template <class Number>
DUCK_INLINE Number number_at(const uint8_t* bytes) {
  Number number;
  __builtin_memcpy(&number, bytes, sizeof number);
  return number;
}

// Adding the sign bit to words that lack it sets it.
DUCK_INLINE __m512i with_signs(__m512i words, __mmask32 negative) {
  return _mm512_mask_add_epi16(words, negative, words, _mm512_set1_epi16(INT16_MIN));
}

struct MaskLanes : Production {
  struct Fp9 : Fp9Base {
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      const auto negative = number_at<uint32_t>(record + kRecordWeights + 4 * pair);
      split(with_signs(magnitudes(record, pair), negative), low, high);
    }
  };
};

struct ChunkLanes : Production {
  struct Fp9 : Fp9Base {
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      const uint8_t* signs = record + kRecordWeights + 4 * pair;
      const __mmask32 negative = _mm512_kunpackw(number_at<uint16_t>(signs + 2), number_at<uint16_t>(signs));
      split(with_signs(magnitudes(record, pair), negative), low, high);
    }
  };
};

struct TableLanes : Production {
  struct Fp9 : Fp9Base {
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      const uint8_t* signs = record + kRecordWeights + 4 * pair;
      const auto* first = reinterpret_cast<const __m256i*>(kSignTable.words[number_at<uint16_t>(signs)]);
      const auto* second = reinterpret_cast<const __m256i*>(kSignTable.words[number_at<uint16_t>(signs + 2)]);
      const __m512i sign =
          _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256(first)), _mm256_load_si256(second), 1);
      split(_mm512_or_si512(magnitudes(record, pair), sign), low, high);
    }
  };
};

struct ShiftLanes : Production {
  struct Fp9 : Fp9Base {
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      Production::Fp9::decode<true>(record, pair, vector, low, high);
    }
  };
};

struct PairLanes : Production {
  struct Fp9 : Fp9Base {
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      const auto* bytes = reinterpret_cast<const __m256i*>(record + 2 * kStripeChannels * pair);
      const __m512i words = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(bytes)), 4);
      const __m512i signs = _mm512_slli_epi16(_mm512_loadu_si512(record + kRecordWeights), pair);
      constexpr int kFirstOrSecondAndThird = 0xf8;
      split(_mm512_ternarylogic_epi32(words, signs, _mm512_set1_epi16(INT16_MIN), kFirstOrSecondAndThird),
            low, high);
    }
  };
};

struct RowLanes : Production {
  struct Fp9 : Fp9Base {
    static DUCK_INLINE Floats row_of(const uint8_t* record, int row) {
      const auto* bytes = reinterpret_cast<const __m128i*>(record + kStripeChannels * row);
      const __m512i magnitude = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)), 20);
      const __m512i signs = _mm512_slli_epi32(_mm512_loadu_si512(record + kRecordWeights), row);
      constexpr int kFirstOrSecondAndThird = 0xf8;
      return _mm512_castsi512_ps(
          _mm512_ternarylogic_epi32(magnitude, signs, _mm512_set1_epi32(INT32_MIN), kFirstOrSecondAndThird));
    }
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int, Floats& low, Floats& high) {
      low = row_of(record, 2 * pair);
      high = row_of(record, 2 * pair + 1);
    }
  };
};

}  // namespace

std::vector<Variant> variants() {
  return with<Production>({
      decoded<MaskLanes>("signs: one 32-bit mask", "signs", Layout::kMasks),
      decoded<ChunkLanes>("signs: two 16-bit chunks", "signs", Layout::kMasks),
      decoded<TableLanes>("signs: table of 65536 entries", "signs", Layout::kMasks),
      decoded<ShiftLanes>("magnitudes by shift and mask", "layout", Layout::kFours),
      decoded<PairLanes>("two rows widened, not four", "layout", Layout::kPairs),
      decoded<RowLanes>("row by row", "layout", Layout::kRows),
  });
}

std::vector<TileVariant> tile_variants() {
  return {
      tile_variant<Production, 8>(),
      tile_variant<Production, 10>(),
      tile_variant<Production, 12>(),
      tile_variant<Production, 14>(),
  };
}

}  // namespace duck::ablation::avx512
