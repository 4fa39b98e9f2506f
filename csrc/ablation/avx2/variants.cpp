// The variants on AVX2. Production's source is included for its Lanes; its table is in the library already,
// and the copy of it here is never used.
#include "kernels/kernel_table.h"
#define kTable kCopyOfTable
#include "kernels/avx2/kernels.cpp"
#undef kTable

#include "ablation/choice_kernels.h"

namespace duck::ablation::avx2 {
namespace {

using Production = duck::avx2::Lanes;

struct Fp9Base {
  static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp9);
  static constexpr float kPostscale = sum_postscale(WeightFormat::kFp9);
  static DUCK_INLINE __m256i magnitudes(const uint8_t* record, int pair, int vector) {
    return _mm256_maddubs_epi16(Production::load_rows(record, pair, vector), Production::factors(pair));
  }
  // The signs of the 16 weights of a pair in one register.
  static DUCK_INLINE uint16_t chunk(const uint8_t* record, int pair, int vector) {
    uint16_t signs;
    __builtin_memcpy(&signs, record + kRecordWeights + 4 * pair + 2 * vector, sizeof signs);
    return signs;
  }
};

struct ChunkLanes : Production {
  struct Fp9 : Fp9Base {
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      const __m256i bits =
          _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, INT16_MIN);
      const __m256i signs = _mm256_set1_epi16(static_cast<int16_t>(chunk(record, pair, vector)));
      const __m256i negative = _mm256_cmpeq_epi16(_mm256_and_si256(signs, bits), bits);
      const __m256i sign = _mm256_slli_epi16(negative, 15);
      split(_mm256_or_si256(magnitudes(record, pair, vector), sign), low, high);
    }
  };
};

struct TableLanes : Production {
  struct Fp9 : Fp9Base {
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      const auto* sign = reinterpret_cast<const __m256i*>(kSignTable.words[chunk(record, pair, vector)]);
      split(_mm256_or_si256(magnitudes(record, pair, vector), _mm256_load_si256(sign)), low, high);
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
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      const auto* bytes =
          reinterpret_cast<const __m128i*>(record + 2 * kStripeChannels * pair + 2 * kLanes * vector);
      const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(bytes)), 4);
      const auto* signs = reinterpret_cast<const __m256i*>(record + kRecordWeights + 4 * kLanes * vector);
      const __m256i sign =
          _mm256_and_si256(_mm256_slli_epi16(_mm256_loadu_si256(signs), pair), _mm256_set1_epi16(INT16_MIN));
      split(_mm256_or_si256(words, sign), low, high);
    }
  };
};

struct RowLanes : Production {
  struct Fp9 : Fp9Base {
    static DUCK_INLINE Floats row_of(const uint8_t* record, int row, int vector) {
      const auto* bytes = reinterpret_cast<const __m128i*>(record + kStripeChannels * row + kLanes * vector);
      const __m256i magnitude = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)), 20);
      const auto* words = reinterpret_cast<const __m256i*>(record + kRecordWeights + 4 * kLanes * vector);
      const __m256i signs = _mm256_slli_epi32(_mm256_loadu_si256(words), row);
      return _mm256_castsi256_ps(
          _mm256_or_si256(magnitude, _mm256_and_si256(signs, _mm256_set1_epi32(INT32_MIN))));
    }
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      low = row_of(record, 2 * pair, vector);
      high = row_of(record, 2 * pair + 1, vector);
    }
  };
};

}  // namespace

std::vector<Variant> variants() {
  return with<Production>({
      decoded<ChunkLanes>("signs: 16-bit chunks", "signs", Layout::kMasks),
      decoded<TableLanes>("signs: table of 65536 entries", "signs", Layout::kMasks),
      decoded<ShiftLanes>("magnitudes by shift and mask", "layout", Layout::kFours),
      decoded<PairLanes>("two rows widened, not four", "layout", Layout::kPairs),
      decoded<RowLanes>("row by row", "layout", Layout::kRows),
  });
}

std::vector<TileVariant> tile_variants() {
  return {
      tile_variant<Production, 4>(),
      tile_variant<Production, 5>(),
      tile_variant<Production, 6>(),
      tile_variant<Production, 7>(),
  };
}

}  // namespace duck::ablation::avx2
