// The fp9 weight format: constants that every reader and writer shares. docs/weight-format.md is the
// specification; src/duckllm/weights/fp9.py is the numpy twin.
//
// A weight is a magnitude byte (5 exponent bits, 3 mantissa bits, no subnormals; 0 is zero) and a sign bit.
// The byte shifted left by 20 is the bit pattern of an f32 that equals |w| * 2^-104: exponent field e5 >= 1
// makes it a normal f32, so no denormal enters an FMA. |w| = 2^(e5 - 23) * (1 + m / 8).
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck {

inline constexpr int kStripeChannels = 16;       // intermediate channels of one stripe
inline constexpr int kRecordRows = 32;           // rows (of 16 lanes) of one record
inline constexpr int kRecordMagnitudes = 512;    // bytes: [32 rows][16 lanes]
inline constexpr int kRecordBytes = 576;         // magnitudes, then 16 little-endian u32 of sign bits
inline constexpr int kScaleBlock = 128;          // rows and columns that share one f32 scale
inline constexpr int kFp9ExponentBias = 23;      // |w| = 2^(e5 - 23) * (1 + m / 8)
inline constexpr int kFp9DecodeExponent = -104;  // decoded f32 = w * 2^-104

// Hidden size rounded up to whole records.
inline constexpr size_t padded_hidden(size_t hidden_size) {
  return (hidden_size + kRecordRows - 1) / kRecordRows * kRecordRows;
}
inline constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// Bytes of a unit's scale section: gate, up and down scales, ceil(H / 128) f32 each, padded to 64 bytes.
inline constexpr size_t unit_scale_bytes(size_t hidden_size) {
  return ceil_div(3 * 4 * ceil_div(hidden_size, kScaleBlock), 64) * 64;
}

// Bytes of one unit = (expert, stripe): scales, then H'/32 pairs of records (gate, up), then H'/32 records of
// down, H' = padded_hidden(H). A multiple of 64.
inline constexpr size_t unit_bytes(size_t hidden_size) {
  return unit_scale_bytes(hidden_size) + 3 * (padded_hidden(hidden_size) / kRecordRows) * kRecordBytes;
}

}  // namespace duck
