// Attention on the host over a paged cache, its sparse selection, and the products of MLA's heads. Called by
// attention/bind.cpp; knows slots and numbers, no model and no network.
//
// A row's result depends on that row, on what its context has in the cache, on the ISA and nothing else:
// neither on the other rows or contexts of the step, nor on how a prompt was cut, nor on where pages lie, nor
// on the number of threads. What another row's token or an unused slot holds, NaN included, never enters.
//
// Order. A score is one chain of fused products over ascending dimensions. Positions are taken in tiles of 64
// and splits of 512, both counted from position 0 (from the first entry of a list of positions): in a split
// the largest score, the sum and the values so far are rescaled as a tile raises the largest; splits are
// merged in ascending order. Threads share out (rows, heads, split).
//
// Bound. With u = 2^-24, D the dimensions of a key, n the keys of a row, A its largest sum of |scale q_i k_i|
// over them and V the weighted sum of |v|, to first order in u:
//   e(y) <= (4 (D + 8) A + 2 (min(n, 512) + 8 ceil(n / 64) + 16)) u V.
// e^t is a polynomial of degree 7 after t = n ln 2 + r, within 2 u; weights below e^-87 are zero.
// tests/attention computes it in float64 and holds every ISA to it. Products of heads: D u A.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "attention/contexts.h"
#include "kernels/experts.h"

namespace duck {

class ThreadPool;

namespace attention {

// Rows of a tensor of the cache, or of what goes there: row r begins at data + r * width.
struct Rows {
  const float* data = nullptr;
  size_t width = 0;
};

struct AttendShape {
  uint32_t num_heads = 0, num_kv_heads = 0;  // the first divisible by the second
  uint32_t key_dim = 0, value_dim = 0;       // kv head h is at h * key_dim, h * value_dim of a cache row
  uint32_t window = 0;                       // positions that a row attends to, its own included; 0 for all
  float scale = 1.0f;                        // of q
};

// [T, topk]: the positions that each row attends to, ascending; of a row that attends to all it has, -1
// first.
struct Selection {
  const int32_t* positions = nullptr;
  uint32_t topk = 0;
};

class Attention {
 public:
  // Throws std::invalid_argument when this machine lacks the ISA.
  Attention(Isa isa, ThreadPool& pool);
  ~Attention();
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  // One call at a time, of any of these, and none while the pool is used otherwise. Scratch memory grows to
  // what the largest call so far has needed.

  // out [T, num_heads, value_dim] for q [T, num_heads, key_dim].
  void attend(const StepContexts& step, const AttendShape& shape, const float* q, Rows keys, Rows values,
              Selection selection, float* out);

  // For each row the positions of its `topk` best scores, sum over heads of w[t, h] max(0, q[t, h] . k), of
  // equal ones the lowest positions; -1 first where it has no more than topk. q [T, num_heads, dim], w [T,
  // num_heads], out [T, topk].
  void select(const StepContexts& step, uint32_t num_heads, uint32_t dim, const float* q, const float* w,
              Rows keys, uint32_t topk, int32_t* out);

  // y[t, h] = x[t, h] W[h]: x [T, heads, inputs] with row and head strides, likewise y; w as
  // attention_table.h has it, head by head.
  struct HeadProduct {
    uint32_t num_rows = 0, num_heads = 0, inputs = 0, outputs = 0;
    const float* x = nullptr;
    size_t x_row = 0, x_head = 0;
    const float* w = nullptr;
    float* y = nullptr;
    size_t y_row = 0, y_head = 0;
  };
  void multiply_heads(const HeadProduct& product);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The positions [first, stop) of the `topk` largest scores[position], ascending; of equal scores the lowest
// positions. topk <= stop - first.
void select_topk(const float* scores, uint32_t first, uint32_t stop, uint32_t topk, int32_t* out);

}  // namespace attention
}  // namespace duck
