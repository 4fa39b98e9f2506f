// The weight formats: constants and sizes that every reader and writer shares. docs/weight-format.md is the
// specification; src/duckllm/weights/ has the numpy twins.
//
// A matrix is stored as records of 32 rows of 16 lanes; a *row* is what x (or an activation) runs along, a
// lane is an output. Four rows of a lane lie side by side, in the order 0, 2, 1, 3 where they are bytes: one
// multiplication then puts rows 0 and 1 of every lane, a *pair*, into the two halves of its 32 bits, another
// rows 2 and 3; each half is the upper half of an f32.
//
//   fp9   512 magnitude bytes (5 exponent bits, 3 mantissa bits, no subnormals; 0 is zero), then 16 words of
//         sign bits. A byte shifted left by 20 is the bit pattern of an f32 that equals |w| * 2^-104; an
//         exponent field of 1 or more makes it a normal f32.
//   fp8   512 e4m3 bytes. A byte's sign at bit 31 and its other bits shifted left by 20 are an f32 that
//         equals w * 2^-120; e4m3 subnormals become f32 denormals. Where a CPU takes a trap of a hundred
//         cycles for each of those (Intel's), fp8 is decoded by way of fp9's magnitudes instead:
//         "fp8-normal".
//   bf16  512 bf16 words, for dense layers.
//   f32   512 f32, for dense layers: the rows one behind the other, 16 lanes each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck {

enum class WeightFormat : uint8_t {
  kFp9 = 0,
  kFp8 = 1,
  kBf16 = 2,
  kFp8Normal = 3,  // the bytes of kFp8, decoded without denormal numbers
  kF32 = 4,
};
inline constexpr int kNumWeightFormats = 5;

// Whether a weight has scales beside its values: those of e4m3.
inline constexpr bool has_scales(WeightFormat format) {
  return format != WeightFormat::kBf16 && format != WeightFormat::kF32;
}

// Which weights of an expert share a scale: 128 x 128 of a matrix, or one of its rows.
enum class ScaleLayout : uint8_t { kBlock = 0, kChannel = 1 };

inline constexpr int kStripeChannels = 16;  // intermediate channels of one stripe; lanes of a record
inline constexpr int kRecordRows = 32;      // rows (of 16 lanes) of one record
inline constexpr int kRecordWeights = kRecordRows * kStripeChannels;
inline constexpr int kScaleBlock = 128;  // rows and columns that share one f32 scale
inline constexpr int kRecordsPerBlock = kScaleBlock / kRecordRows;
inline constexpr int kStripesPerBlock = kScaleBlock / kStripeChannels;

inline constexpr size_t record_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp9:
      return kRecordWeights + 4 * kStripeChannels;
    case WeightFormat::kFp8:
    case WeightFormat::kFp8Normal:
      return kRecordWeights;
    case WeightFormat::kBf16:
      return 2 * kRecordWeights;
    case WeightFormat::kF32:
      return 4 * kRecordWeights;
  }
  return 0;
}

// The bit of a lane's sign word that belongs to row `row` of an fp9 record: even rows in the lower half, odd
// ones in the upper half, the first of each at its half's highest bit.
inline constexpr int sign_bit(int row) { return 16 * (row & 1) + 15 - row / 2; }

// Place of row `row`, lane `lane` among the weights of a record of bytes (fp9, fp8).
inline constexpr int weight_index(int row, int lane) {
  constexpr int kPlaces[4] = {0, 2, 1, 3};
  return 4 * kStripeChannels * (row / 4) + 4 * lane + kPlaces[row % 4];
}

// The same for bf16, whose pairs lie side by side as they are.
inline constexpr int bf16_index(int row, int lane) {
  return 2 * kStripeChannels * (row / 2) + 2 * lane + (row & 1);
}

// The same for f32.
inline constexpr int f32_index(int row, int lane) { return kStripeChannels * row + lane; }

// What x is multiplied with before, so that no f32 between decoded weight and sum is denormal (fp9), or an
// e4m3 subnormal at most (fp8); and the block sums after. Powers of two: exact, and the scaled sums of both
// formats are the same numbers.
inline constexpr float prescale(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp9:
    case WeightFormat::kFp8Normal:
      return 0x1p64f;
    case WeightFormat::kFp8:
      return 0x1p80f;
    case WeightFormat::kBf16:
    case WeightFormat::kF32:
      return 1.0f;
  }
  return 0.0f;
}
inline constexpr float sum_postscale(WeightFormat format) { return has_scales(format) ? 0x1p40f : 1.0f; }

// The fp9 magnitudes of e4m3's zero and subnormals; a normal code's is the code + 0x80.
inline constexpr uint8_t kSmallMagnitudes[8] = {0x00, 0x70, 0x78, 0x7c, 0x80, 0x82, 0x84, 0x86};

// Byte i of it: what to add to 0x80 + i, modulo 256, for the magnitude of code i.
inline constexpr int64_t kSmallCorrections = [] {
  uint64_t bytes = 0;
  for (int code = 0; code < 8; ++code) {
    bytes |= static_cast<uint64_t>(static_cast<uint8_t>(kSmallMagnitudes[code] - 0x80 - code)) << (8 * code);
  }
  return static_cast<int64_t>(bytes);
}();

inline constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// Hidden size rounded up to whole records.
inline constexpr size_t padded_hidden(size_t hidden_size) {
  return ceil_div(hidden_size, kRecordRows) * kRecordRows;
}

// Bytes of a unit's scale section, f32. By blocks: gate, up and down scales, ceil(H / 128) each, padded to 64
// bytes. By channels: gate and up scales of the stripe's 16 channels, then H' down scales.
inline constexpr size_t unit_scale_bytes(size_t hidden_size, ScaleLayout layout = ScaleLayout::kBlock) {
  if (layout == ScaleLayout::kChannel) return 4 * (2 * kStripeChannels + padded_hidden(hidden_size));
  return ceil_div(3 * 4 * ceil_div(hidden_size, kScaleBlock), 64) * 64;
}

// Bytes of one unit = (expert, stripe): scales, then H'/32 pairs of records (gate, up), then H'/32 records of
// down, H' = padded_hidden(H). A multiple of 64. fp9 or fp8.
inline constexpr size_t unit_bytes(WeightFormat format, size_t hidden_size,
                                   ScaleLayout layout = ScaleLayout::kBlock) {
  return unit_scale_bytes(hidden_size, layout) +
         3 * (padded_hidden(hidden_size) / kRecordRows) * record_bytes(format);
}

}  // namespace duck
