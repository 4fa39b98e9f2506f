// Quantisation to int8 blocks, 16-bit scales, and the choice of the ISA for int4 groups: see quantise.h.
#include "kernels/quantise.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/scale_blocks.h"
#include "kernels/weight_format.h"

namespace duck {

uint16_t scale_word(float value, bool bf16) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (bf16) return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520, which rounds to infinity
  if (magnitude < 0x38800000) {
    // Below 2^-14 the grid is 2^-24 wide: adding a half (whose last f32 bit is worth 2^-24) rounds to it.
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                                        std::bit_cast<uint32_t>(0.5f));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded >> 13) - ((127 - 15) << 10));
}

float scale_of_word(uint16_t word, bool bf16) {
  if (bf16) return std::bit_cast<float>(static_cast<uint32_t>(word) << 16);
  const uint32_t sign = static_cast<uint32_t>(word & 0x8000) << 16, rest = word & 0x7fff;
  if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
  if (rest < 0x400) {
    const float value = static_cast<float>(rest) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((rest << 13) + ((127 - 15) << 23)));
}

RoundingSums quantise_int4_groups(const GroupedJob& job, Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return avx512::quantise_int4_groups(job);
    case Isa::kAvx2:
      return avx2::quantise_int4_groups(job);
    case Isa::kScalar:
      break;
  }
  return scalar::quantise_int4_groups(job);
}

RoundingSums quantise_int8_blocks(const float* weights, size_t rows, size_t columns, uint8_t* codes,
                                  float* scales) {
  RoundingSums sums;
  constexpr float kRounder = 0x1.8p23f;
  scale_blocks(weights, rows, columns, 127.0f, scales, [&](ScaledBlock block) {
    float worst = 0.0f;
    for (size_t row = block.first_row; row < block.end_row; ++row) {
      const float* from = weights + row * columns;
      uint8_t* to = codes + row * columns;
      double errors = 0.0, sources = 0.0;  // squares may be beyond f32, or 0 in it
      uint32_t flushed = 0;
      for (size_t column = block.first_column; column < block.end_column; ++column) {
        const float q = (from[column] / block.scale + kRounder) - kRounder;
        to[column] = static_cast<uint8_t>(static_cast<int32_t>(q) + kInt8CodeOfZero);
        const float error = std::fabs(q * block.scale - from[column]);
        errors += static_cast<double>(error) * error;
        sources += static_cast<double>(from[column]) * from[column];
        worst = error > worst ? error : worst;
        flushed += q == 0.0f && from[column] != 0.0f;
      }
      sums.squared_error += errors;
      sums.squared_source += sources;
      sums.flushed += flushed;
    }
    if (block.largest != 0.0f) sums.max_relative = std::max(sums.max_relative, worst / block.largest);
  });
  return sums;
}

}  // namespace duck
