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
//   int8  512 bytes q + 128, q from -127 to 127; four rows of a lane in their natural order, one operand of a
//         dot product of bytes.
//   int4, int4-bf16, int4-zero, int4-zero-bf16, mxfp4
//         512 codes of 4 bits, and for each *group* (32 rows of a lane in gate and up, 16 in down) a 16-bit
//         scale in the record. The formats "zero" have a zero point of 4 bits for each group in the scale
//         section; those of the others are 8. mxfp4's codes are e2m1.
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
  kInt8 = 5,
  kInt4 = 6,          // f16 scales
  kInt4Bf16 = 7,      // bf16 scales
  kInt4Zero = 8,      // f16 scales, zero points
  kInt4ZeroBf16 = 9,  // bf16 scales, zero points
  kMxfp4 = 10,        // bf16 scales
};
inline constexpr int kNumWeightFormats = 5;  // those that FormatKernels decode to f32: the first ones

// Whether a format holds e4m3 weights.
inline constexpr bool is_e4m3(WeightFormat format) {
  return format == WeightFormat::kFp9 || format == WeightFormat::kFp8 || format == WeightFormat::kFp8Normal;
}

// Whether the routed experts of a model come in a format.
inline constexpr bool is_expert_format(WeightFormat format) {
  return is_e4m3(format) || format >= WeightFormat::kInt8;
}

// Whether a format holds codes of 4 bits whose scales lie in the records: layout "group".
inline constexpr bool is_grouped(WeightFormat format) { return format >= WeightFormat::kInt4; }

// Whether the groups of a format have zero points of their own.
inline constexpr bool has_zero_points(WeightFormat format) {
  return format == WeightFormat::kInt4Zero || format == WeightFormat::kInt4ZeroBf16;
}

// Whether the scales of a grouped format are bf16; else they are f16.
inline constexpr bool has_bf16_scales(WeightFormat format) {
  return format == WeightFormat::kInt4Bf16 || format == WeightFormat::kInt4ZeroBf16 ||
         format == WeightFormat::kMxfp4;
}

// Whether a weight has f32 scales beside its value that a kernel multiplies block sums with: those of e4m3.
inline constexpr bool has_scales(WeightFormat format) { return is_e4m3(format); }

// Which weights of an expert share a scale: 128 x 128 of a matrix, or one of its rows, or a group of a row.
enum class ScaleLayout : uint8_t { kBlock = 0, kChannel = 1, kGroup = 2 };

inline constexpr int kStripeChannels = 16;  // intermediate channels of one stripe; lanes of a record
inline constexpr int kRecordRows = 32;      // rows (of 16 lanes) of one record
inline constexpr int kRecordWeights = kRecordRows * kStripeChannels;
inline constexpr int kScaleBlock = 128;  // rows and columns that share one f32 scale
inline constexpr int kRecordsPerBlock = kScaleBlock / kRecordRows;
inline constexpr int kStripesPerBlock = kScaleBlock / kStripeChannels;

inline constexpr size_t kGroupCodeBytes = kRecordWeights / 2;  // of a record of a grouped format

// Bytes of a record; of one of a grouped format's those of gate or up, whose codes and scales lie apart.
inline constexpr size_t record_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp9:
      return kRecordWeights + 4 * kStripeChannels;
    case WeightFormat::kFp8:
    case WeightFormat::kFp8Normal:
    case WeightFormat::kInt8:
      return kRecordWeights;
    case WeightFormat::kInt4:
    case WeightFormat::kInt4Bf16:
    case WeightFormat::kInt4Zero:
    case WeightFormat::kInt4ZeroBf16:
    case WeightFormat::kMxfp4:
      return kGroupCodeBytes + 2 * kStripeChannels;
    case WeightFormat::kBf16:
      return 2 * kRecordWeights;
    case WeightFormat::kF32:
      return 4 * kRecordWeights;
  }
  return 0;
}

// Bytes of a record of down: two groups a lane in a grouped format.
inline constexpr size_t down_record_bytes(WeightFormat format) {
  return is_grouped(format) ? kGroupCodeBytes + 4 * kStripeChannels : record_bytes(format);
}

// The bit of a lane's sign word that belongs to row `row` of an fp9 record: even rows in the lower half, odd
// ones in the upper half, the first of each at its half's highest bit.
inline constexpr int sign_bit(int row) { return 16 * (row & 1) + 15 - row / 2; }

// Place of row `row`, lane `lane` among the weights of a record of bytes (fp9, fp8).
inline constexpr int weight_index(int row, int lane) {
  constexpr int kPlaces[4] = {0, 2, 1, 3};
  return 4 * kStripeChannels * (row / 4) + 4 * lane + kPlaces[row % 4];
}

// The same for int8, whose rows keep their order.
inline constexpr int int8_index(int row, int lane) {
  return 4 * kStripeChannels * (row / 4) + 4 * lane + row % 4;
}

// The byte of row `row`, lane `lane` among the codes of a grouped format, and whether it is the high half:
// eight rows of a lane are one 32-bit word, rows j and j + 4 of them its byte j.
inline constexpr int group_code_byte(int row, int lane) {
  return 4 * kStripeChannels * (row / 8) + 4 * lane + row % 4;
}
inline constexpr bool is_high_half(int row) { return row % 8 >= 4; }

// The code of the value 0 of an int8 or int4 weight, without zero points of its own.
inline constexpr uint8_t kInt8CodeOfZero = 128, kInt4CodeOfZero = 8;

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
    case WeightFormat::kInt8:
    case WeightFormat::kInt4:
    case WeightFormat::kInt4Bf16:
    case WeightFormat::kInt4Zero:
    case WeightFormat::kInt4ZeroBf16:
    case WeightFormat::kMxfp4:
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

// Bytes of a unit's scale section. By blocks: gate, up and down scales, ceil(H / 128) f32 each, padded to 64
// bytes. By channels: gate and up scales of the stripe's 16 channels, then H' down scales, f32. By groups: a
// zero point of 4 bits for each group, gate and up of a block of 32 hidden indices in 16 bytes, all of those
// first, then down's 32 outputs of a block in 16 bytes, padded to 64; or nothing.
inline constexpr size_t unit_scale_bytes(WeightFormat format, size_t hidden_size,
                                         ScaleLayout layout = ScaleLayout::kBlock) {
  if (is_grouped(format)) return has_zero_points(format) ? ceil_div(padded_hidden(hidden_size), 64) * 64 : 0;
  if (layout == ScaleLayout::kChannel) return 4 * (2 * kStripeChannels + padded_hidden(hidden_size));
  return ceil_div(3 * 4 * ceil_div(hidden_size, kScaleBlock), 64) * 64;
}

// Bytes of one unit = (expert, stripe): scales, then H'/32 pairs of records (gate, up), then H'/32 records of
// down, H' = padded_hidden(H). A multiple of 64. Any format of experts; the layout of a grouped one is kGroup
// whatever is said.
inline constexpr size_t unit_bytes(WeightFormat format, size_t hidden_size,
                                   ScaleLayout layout = ScaleLayout::kBlock) {
  return unit_scale_bytes(format, hidden_size, layout) +
         padded_hidden(hidden_size) / kRecordRows * (2 * record_bytes(format) + down_record_bytes(format));
}

}  // namespace duck
