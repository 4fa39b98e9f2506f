// AVX512-BF16: VDPBF16PS adds the two products of a pair to each of 16 f32 sums. The instruction rounds to
// nearest and takes denormals for zero, whatever MXCSR says.
#include <immintrin.h>

#include <cstring>

#include "kernels/avx512/words.h"
#include "kernels/bf16_tiles.h"

namespace duck::avx512_bf16 {
namespace {

struct Tag;
using Words = Avx512Words<Tag>;

constexpr uint32_t kTileRows = 12;  // 24 sums of 32 registers
constexpr uint32_t kTilePrefetchBytes = 4096;

DUCK_INLINE void prefetch(const uint8_t* from, uint32_t num_bytes) {
  for (uint32_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i);
}

struct Fp9 {
  static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp9);
  static DUCK_INLINE __m512i decode(const uint8_t* record, int pair) {
    return Words::fp9<false>(record, pair);
  }
};

// e4m3 at 2^-120 of its value to bf16 at 2^-104: normals by their exponent, the eight subnormals by a table,
// in integers, so that no denormal slows this down.
struct Fp8 {
  static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kFp8);
  static DUCK_INLINE __m512i decode(const uint8_t* record, int pair) {
    const __m512i words = Words::fp8<false>(record, pair);
    // bf16 of m * 2^-9 * 2^-104: m, the lowest three bits of the magnitude, has no exponent bit above it.
    const __m512i subnormals = _mm512_castsi128_si512(
        _mm_setr_epi16(0x0000, 0x0700, 0x0780, 0x07c0, 0x0800, 0x0820, 0x0840, 0x0860));
    const __m512i magnitudes = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), subnormals);
    const __mmask32 normal = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x0780));
    return _mm512_mask_add_epi16(Words::or_signs(magnitudes, words), normal, words,
                                 _mm512_set1_epi16(16 << 7));
  }
};

// Pairs [kFirst, kFirst + kNum) of a record into 16 columns of a tile.
template <class F, int kFirst, int kNum>
DUCK_INLINE void decode_pairs(const uint8_t* record, uint32_t* tile) {
#pragma GCC unroll 16
  for (int pair = 0; pair < kNum; ++pair) {
    _mm512_storeu_si512(tile + pair * kBf16Lanes, F::decode(record, kFirst + pair));
  }
}

template <class F>
void tile_of_streams(const uint8_t* records, size_t distance, size_t stride, uint32_t num_records,
                     uint32_t* tile) {
  for (uint32_t record = 0; record < num_records; ++record) {
    const uint8_t* at = records + record * stride;
    prefetch(at + kTilePrefetchBytes, F::kRecordBytes);
    prefetch(at + distance + kTilePrefetchBytes, F::kRecordBytes);
    decode_pairs<F, 0, 16>(at, tile);
    decode_pairs<F, 0, 16>(at + distance, tile + kStripeChannels);
    tile += 16 * kBf16Lanes;
  }
}

template <class F>
void tile_of_down(const uint8_t* record, uint32_t* tile) {
  prefetch(record + kTilePrefetchBytes, F::kRecordBytes);
  decode_pairs<F, 0, 8>(record, tile);
  decode_pairs<F, 8, 8>(record, tile + kStripeChannels);
}

void fill_panel(const float* values, uint32_t count, uint32_t* panel) {
  uint32_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(values + i + 16), _mm512_loadu_ps(values + i));
    std::memcpy(panel + i / 2, &pairs, sizeof(pairs));
  }
  if (i < count) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_setzero_ps(), _mm512_loadu_ps(values + i));
    std::memcpy(panel + i / 2, &pairs, sizeof(pairs));
  }
}

template <uint32_t kRows>
void multiply_rows(const uint32_t* panel, const uint32_t* tile, uint32_t num_pairs, const float* scales,
                   float* const* out) {
  __m512 sums[kRows][2];
#pragma GCC unroll 16
  for (uint32_t row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = _mm512_setzero_ps();
  for (uint32_t pair = 0; pair < num_pairs; ++pair) {
    const auto first = (__m512bh)_mm512_loadu_si512(tile + pair * kBf16Lanes);
    const auto second = (__m512bh)_mm512_loadu_si512(tile + pair * kBf16Lanes + kStripeChannels);
#pragma GCC unroll 16
    for (uint32_t row = 0; row < kRows; ++row) {
      const auto values = (__m512bh)_mm512_set1_epi32(static_cast<int>(panel[row * kBf16Pairs + pair]));
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], first, values);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], second, values);
    }
  }
  const __m512 factors[2] = {_mm512_loadu_ps(scales), _mm512_loadu_ps(scales + kStripeChannels)};
#pragma GCC unroll 16
  for (uint32_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* to = out[row] + half * kStripeChannels;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sums[row][half], factors[half], _mm512_loadu_ps(to)));
    }
  }
}

template <uint32_t kRows>
void with_rows(uint32_t count, const uint32_t* panel, const uint32_t* tile, uint32_t num_pairs,
               const float* scales, float* const* out) {
  if constexpr (kRows > 1) {
    if (count < kRows) return with_rows<kRows - 1>(count, panel, tile, num_pairs, scales, out);
  }
  multiply_rows<kRows>(panel, tile, num_pairs, scales, out);
}

void multiply(const uint32_t* panel, const uint32_t* tile, uint32_t num_pairs, const float* scales,
              float* const* out, uint32_t num_rows) {
  const uint32_t num_blocks = (num_rows + kTileRows - 1) / kTileRows;
  for (uint32_t block = 0; block < num_blocks; ++block) {  // as even as can be
    const uint32_t first = num_rows * block / num_blocks;
    with_rows<kTileRows>(num_rows * (block + 1) / num_blocks - first, panel + first * kBf16Pairs, tile,
                         num_pairs, scales, out + first);
  }
}

}  // namespace

const Bf16Tiles kTiles = {"avx512_bf16",
                          nullptr,
                          nullptr,
                          &fill_panel,
                          {{&tile_of_streams<Fp9>, &tile_of_down<Fp9>},
                           {&tile_of_streams<Fp8>, &tile_of_down<Fp8>},
                           {nullptr, nullptr},
                           {&tile_of_streams<Fp8>, &tile_of_down<Fp8>}},
                          &multiply};

}  // namespace duck::avx512_bf16
