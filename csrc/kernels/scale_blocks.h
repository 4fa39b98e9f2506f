// The walk of a rounding with one scale for each 128 x 128 block of a matrix: to e4m3 (pack.cpp) and to int8
// (quantise.cpp).
#pragma once

#include <cstddef>
#include <functional>

namespace duck {

struct ScaledBlock {
  size_t first_row, end_row, first_column, end_column;
  float largest;  // magnitude
  float scale;    // largest / largest_value, at least the smallest normal f32; 1 where all is 0
};

// Writes the scales of [rows, columns] weights, by row of blocks, and calls round(block) for each. Not a
// template: inlined into the walk, the loops of `round` have too few registers.
void scale_blocks(const float* weights, size_t rows, size_t columns, float largest_value, float* scales,
                  const std::function<void(ScaledBlock)>& round);

}  // namespace duck
