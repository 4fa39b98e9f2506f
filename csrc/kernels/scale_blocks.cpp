#include "kernels/scale_blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/weight_format.h"

namespace duck {

void scale_blocks(const float* weights, size_t rows, size_t columns, float largest_value, float* scales,
                  const std::function<void(ScaledBlock)>& round) {
  for (size_t first_row = 0; first_row < rows; first_row += kScaleBlock) {
    const size_t end_row = std::min<size_t>(first_row + kScaleBlock, rows);
    for (size_t first_column = 0; first_column < columns; first_column += kScaleBlock) {
      const size_t end_column = std::min<size_t>(first_column + kScaleBlock, columns);
      float largest = 0.0f;
      for (size_t row = first_row; row < end_row; ++row) {
        for (size_t column = first_column; column < end_column; ++column) {
          largest = std::max(largest, std::fabs(weights[row * columns + column]));
        }
      }
      const float scale =
          largest == 0.0f ? 1.0f : std::max(largest / largest_value, std::numeric_limits<float>::min());
      *scales++ = scale;
      round({first_row, end_row, first_column, end_column, largest, scale});
    }
  }
}

}  // namespace duck
