// What the codes and scales of int8, int4 and mxfp4 mean, one at a time. Not for the files of an ISA but
// scalar's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/weight_format.h"

namespace duck {

// The code of row `row`, lane `lane` of a grouped format.
inline int four_bits(const uint8_t* codes, int row, int lane) {
  const int byte = codes[group_code_byte(row, lane)];
  return is_high_half(row) ? byte >> 4 : byte & 15;
}

inline float f16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? HUGE_VALF : std::nanf("");
  } else {
    magnitude = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : mantissa + 1024),
                           (exponent == 0 ? 1 : exponent) - 25);
  }
  return bits >> 15 ? -magnitude : magnitude;
}

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// A grouped format's scale of two bytes.
inline float scale_of_16_bits(WeightFormat format, const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, 2);
  return has_bf16_scales(format) ? bf16_value(bits) : f16_value(bits);
}

}  // namespace duck
