// The re-encoder: see recode.h and docs/weight-format.md. SSE2, which every x86-64 has: with scalar code, or
// with what GCC 12 made of loops over bytes, it took 0.2 GB/s a thread.
#include "kernels/recode.h"

#include <emmintrin.h>

#include <cstring>

namespace duck {
namespace {

constexpr int kRowsAtOnce =
    4;  // of a lane: four bytes side by side, of which a vector holds those of four lanes
constexpr int kStep = kRowsAtOnce * kStripeChannels;       // bytes from four rows to the next four
constexpr int kNumSmall = sizeof(kSmallMagnitudes);        // zero and e4m3's subnormals
constexpr uint8_t kFirstNormalCode = 8, kBiasStep = 0x80;  // normal magnitude = code + kBiasStep
constexpr uint8_t kSign = 0x80, kNan = 0x7f;

__m128i all(uint8_t value) { return _mm_set1_epi8(static_cast<char>(value)); }
__m128i load(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }
void store(uint8_t* bytes, __m128i value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), value); }
__m128i at_least(__m128i value, uint8_t bound) {
  return _mm_cmpeq_epi8(_mm_max_epu8(value, all(bound)), value);
}
bool any(__m128i mask) { return _mm_movemask_epi8(mask) != 0; }

// The e4m3 codes, without sign, of magnitudes; where a byte is none, `bad` becomes all ones.
__m128i codes_of(__m128i magnitudes, __m128i& bad) {
  const __m128i normal = at_least(magnitudes, kFirstNormalCode + kBiasStep);
  __m128i codes = _mm_and_si128(normal, _mm_sub_epi8(magnitudes, all(kBiasStep)));
  __m128i known = _mm_andnot_si128(_mm_cmpeq_epi8(magnitudes, all(kNan + kBiasStep)), normal);
  for (int code = 0; code < kNumSmall; ++code) {
    const __m128i same = _mm_cmpeq_epi8(magnitudes, all(kSmallMagnitudes[code]));
    codes = _mm_or_si128(codes, _mm_and_si128(same, all(static_cast<uint8_t>(code))));
    known = _mm_or_si128(known, same);
  }
  bad = _mm_or_si128(bad, _mm_andnot_si128(known, all(0xff)));
  return codes;
}

// The magnitudes of e4m3 codes without sign.
__m128i magnitudes_of(__m128i codes) {
  const __m128i normal = at_least(codes, kFirstNormalCode);
  __m128i magnitudes = _mm_and_si128(normal, _mm_add_epi8(codes, all(kBiasStep)));
  for (int code = 1; code < kNumSmall; ++code) {
    const __m128i same = _mm_cmpeq_epi8(codes, all(static_cast<uint8_t>(code)));
    magnitudes = _mm_or_si128(magnitudes, _mm_and_si128(same, all(kSmallMagnitudes[code])));
  }
  return magnitudes;
}

// In each half of a lane's sign word the first of four rows is at bit 15 and the second at bit 14, and so on
// downwards; their bytes in the record have the signs at bits 7 and 15 of the same half.
bool fp8_from_fp9(const uint8_t* record, uint8_t* out) {
  __m128i bad = _mm_setzero_si128();
  for (int lanes = 0; lanes < kStep; lanes += 16) {
    __m128i words = load(record + kRecordWeights + lanes);
    for (int i = lanes; i < kRecordWeights; i += kStep) {
      const __m128i first = _mm_and_si128(_mm_srli_epi16(words, 8), _mm_set1_epi16(kSign));
      const __m128i second = _mm_and_si128(_mm_slli_epi16(words, 1), _mm_set1_epi16(INT16_MIN));
      const __m128i codes = codes_of(load(record + i), bad);
      store(out + i, _mm_or_si128(codes, _mm_or_si128(first, second)));
      words = _mm_slli_epi16(words, 2);
    }
  }
  return !any(bad);
}

bool fp9_from_fp8(const uint8_t* record, uint8_t* out) {
  __m128i bad = _mm_setzero_si128();
  for (int lanes = 0; lanes < kStep; lanes += 16) {
    __m128i words = _mm_setzero_si128();
    for (int i = lanes; i < kRecordWeights; i += kStep) {
      const __m128i bytes = load(record + i);
      const __m128i codes = _mm_andnot_si128(all(kSign), bytes);
      bad = _mm_or_si128(bad, _mm_cmpeq_epi8(codes, all(kNan)));
      store(out + i, magnitudes_of(codes));
      const __m128i first = _mm_and_si128(_mm_srli_epi16(bytes, 6), _mm_set1_epi16(2));
      const __m128i second = _mm_srli_epi16(bytes, 15);
      words = _mm_or_si128(_mm_slli_epi16(words, 2), _mm_or_si128(first, second));
    }
    store(out + kRecordWeights + lanes, words);
  }
  return !any(bad);
}

}  // namespace

bool recode_unit(size_t hidden_size, ScaleLayout layout, WeightFormat from, const uint8_t* unit,
                 WeightFormat to, uint8_t* out) {
  if (from == to) {
    std::memcpy(out, unit, unit_bytes(from, hidden_size, layout));
    return true;
  }
  const size_t scales = unit_scale_bytes(from, hidden_size, layout);
  std::memcpy(out, unit, scales);
  const auto recode_record = from == WeightFormat::kFp9 ? fp8_from_fp9 : fp9_from_fp8;
  const size_t num_records = 3 * (padded_hidden(hidden_size) / kRecordRows);
  bool good = true;
  for (size_t record = 0; record < num_records; ++record) {
    good &=
        recode_record(unit + scales + record * record_bytes(from), out + scales + record * record_bytes(to));
  }
  return good;
}

void flush_from_caches(const uint8_t* bytes, size_t size) {
  constexpr size_t kLineBytes = 64;
  for (size_t i = 0; i < size; i += kLineBytes) _mm_clflush(bytes + i);
  if (size != 0) _mm_clflush(bytes + size - 1);
  _mm_mfence();
}

}  // namespace duck
