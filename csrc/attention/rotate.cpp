#include "attention/rotate.h"

#include <vector>

namespace duck::attention {
namespace {

void turn(const float* a, const float* b, const float* cos, const float* sin, uint32_t count, float* first,
          float* second) {
  for (uint32_t i = 0; i < count; ++i) {
    const float one = a[i] * cos[i] - b[i] * sin[i], other = b[i] * cos[i] + a[i] * sin[i];
    first[i] = one;
    second[i] = other;
  }
}

// a: room for all numbers, as results would overwrite those of other pairs where out is x.
void rotate_neighbours(const float* x, const float* cos, const float* sin, uint32_t pairs, float* a,
                       float* out) {
  float* b = a + pairs;
  for (uint32_t i = 0; i < pairs; ++i) {
    a[i] = x[2 * i];
    b[i] = x[2 * i + 1];
  }
  turn(a, b, cos, sin, pairs, out, out + pairs);
}

}  // namespace

void rotate(const Rotation& r) {
  std::vector<float> apart(r.interleaved ? 2 * r.pairs : 0);
  for (size_t row = 0; row < r.num_rows; ++row) {
    const float *cos = r.cos + row * r.pairs, *sin = r.sin + row * r.pairs;
    for (size_t head = 0; head < r.num_heads; ++head) {
      const float* x = r.x + row * r.x_row + head * r.x_head;
      float* out = r.out + row * r.out_row + head * r.out_head;
      if (r.interleaved) {
        rotate_neighbours(x, cos, sin, r.pairs, apart.data(), out);
      } else {
        turn(x, x + r.pairs, cos, sin, r.pairs, out, out + r.pairs);
      }
    }
  }
}

}  // namespace duck::attention
