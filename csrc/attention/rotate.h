// Rotary position embedding: pairs of a vector turned by an angle. Called by attention/bind.cpp. Each number
// is two products and their sum or difference, rounded one by one, so that no row depends on another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck::attention {

struct Rotation {
  uint32_t num_rows = 0, num_heads = 0, pairs = 0;
  const float* cos = nullptr;  // [num_rows, pairs]
  const float* sin = nullptr;
  bool interleaved = false;  // pairs are neighbours, or lie in the two halves
  const float* x = nullptr;  // [num_rows, num_heads, 2 * pairs]
  size_t x_row = 0, x_head = 0;
  float* out = nullptr;  // first numbers of all pairs, then second ones; may be x
  size_t out_row = 0, out_head = 0;
};

void rotate(const Rotation& rotation);

}  // namespace duck::attention
