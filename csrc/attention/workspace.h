// What one thread of attention.cpp computes in, grown to the largest call so far.
#pragma once

#include <cstddef>
#include <memory>

#include "attention/attention_table.h"
#include "kernels/float_buffer.h"

namespace duck::attention {

class GrowingBuffer {
 public:
  // At least `size` numbers; what was in it is lost when it grows.
  float* of(size_t size) {
    if (size > size_) {
      buffer_ = std::make_unique<FloatBuffer>(size);
      size_ = size;
    }
    return buffer_ ? buffer_->data() : nullptr;
  }

 private:
  std::unique_ptr<FloatBuffer> buffer_;
  size_t size_ = 0;
};

// Numbers that a Partial takes, and the Partial in them.
inline size_t partial_size(size_t queries, size_t dim) {
  return 2 * (queries + kMostLanes) + queries * padded(dim);
}
inline Partial partial_in(float* memory, size_t queries) {
  const size_t numbers = queries + kMostLanes;
  return {memory, memory + numbers, memory + 2 * numbers};
}

// Where a tile's keys and values lie; a valid address for each, if only to prefetch from.
struct TileRows {
  const float* keys[kTileKeys];
  const float* values[kTileKeys];
};

struct Workspace {
  GrowingBuffer panel, columns, scores, partials;
  TileRows tiles[2];  // the one in work and the next
};

}  // namespace duck::attention
