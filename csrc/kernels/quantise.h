// Quantisation of float weights to int8 blocks and to int4 groups. Called by kernels/bind_grouped.cpp for the
// converter; src/duckllm/weights/rounding.py is the numpy twin, byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/experts.h"

namespace duck {

// How far quantised weights lie from their source; sums over matrices.
struct RoundingSums {
  double squared_error = 0.0, squared_source = 0.0;
  float max_relative = 0.0f;  // largest |error| / largest magnitude of the weight's block or group
  uint64_t flushed = 0;       // weights that became 0
};

// Quantises [rows, columns] f32, all finite, to bytes q + 128 with one scale per 128x128 block: scale =
// amax / 127, at least the smallest normal f32 (1 where amax is 0); q = the whole number nearest to
// weight / scale, ties to even.
RoundingSums quantise_int8_blocks(const float* weights, size_t rows, size_t columns, uint8_t* codes,
                                  float* scales);

inline constexpr size_t kMostGroup = 32;

// What is quantised to int4 groups, and where to.
struct GroupedJob {
  const float* weights;     // [rows, columns], all finite
  const float* importance;  // [columns] of each squared error, above 0; null: all 1
  size_t rows, columns;
  size_t group_size;      // along columns, at most kMostGroup; the last one may be smaller
  bool bf16;              // type of the scales; else f16
  uint8_t* codes;         // [rows, columns], q + 8
  uint16_t* scale_words;  // [rows, ceil(columns / group_size)]
};

// The starts of the search: the weight of the largest magnitude is put at -kFirstStart / 4, then a quarter
// further, to -kLastStart / 4. For each, weights are rounded to -8 ... 7 and the scale with the least squared
// error for those is computed; the best of them, rounded to 16 bits, is kept, and weights are rounded again
// for it. A scale may be negative.
inline constexpr int kFirstStart = 24, kLastStart = 44;

// Quantises a matrix; the same bytes on every ISA. A scale beyond its type becomes infinite: the caller
// looks.
RoundingSums quantise_int4_groups(const GroupedJob& job, Isa isa);

namespace scalar {
RoundingSums quantise_int4_groups(const GroupedJob& job);
}
namespace avx2 {
RoundingSums quantise_int4_groups(const GroupedJob& job);
}
namespace avx512 {
RoundingSums quantise_int4_groups(const GroupedJob& job);
}

// The 16-bit pattern nearest to a value, ties to even, f16 or bf16; and the value of one.
uint16_t scale_word(float value, bool bf16);
float scale_of_word(uint16_t word, bool bf16);

}  // namespace duck
