// Dense linear layers on the host, y = x W^T, on the kernels of the experts. Called by
// kernels/bind_linear.cpp for attention's projections, dense and shared experts' matrices and the head; knows
// no network.
//
// A row's result depends on that row, the weight, the ISA and nothing else: neither on the other rows, nor on
// their number, nor on the number of threads, nor (fp8 and fp9) on the format. NaN and infinity in x come out
// in that row alone.
//
// Order of summation: 128 indices of x (a block) at a time, even and odd ones in a chain of their own, each
// ascending; the sum of the two times the block's scale (1 for bf16 and f32) is added to those of the eight
// blocks that make a part; parts are added in ascending order.
//
// Bound. With u = 2^-24, n = min(K, 128), B = ceil(K / 128) and A the sum of the absolute terms (scales
// included), to first order in u:
//   e(y) <= (n / 2 + min(B, 8) + ceil(B / 8) + 4) u A.
// tests/linear computes it in float64 and holds every ISA to it.
//
// Ranges. fp8 and fp9: no denormal number but an e4m3 subnormal of fp8 enters an addition or a product while
// |x| is 0 or in [2^-40, 2^47) and scales are 0 or in [2^-21, 2^40]; smaller x lose accuracy gradually, what
// is larger becomes infinite or NaN. bf16 and f32: products and sums are f32 as they stand. run() computes
// with denormals on, whatever the caller has set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/experts.h"
#include "kernels/weight_format.h"

namespace duck {

class ThreadPool;

// A weight packed by pack_linear.h.
struct LinearWeight {
  uint32_t out_features = 0;  // N
  uint32_t in_features = 0;   // K
  WeightFormat format = WeightFormat::kBf16;
  const uint8_t* records = nullptr;  // linear_bytes(N, K, format); 64-byte alignment is best
  const float* scales = nullptr;     // [ceil(N / 128), ceil(K / 128)]; read where has_scales()
};

struct LinearRows {
  uint32_t num_rows = 0;  // T
  ActivationType type = ActivationType::kF32;
  const void* x = nullptr;  // [T, K] f32 or bf16, no alignment needed
};

// What the linear layers of a model share: threads, ISA, and scratch memory that construction sizes.
class Linear {
 public:
  static constexpr uint32_t kChunkRows = 96;        // rows that a tile is multiplied with before the next
  static constexpr uint32_t kPanelRowsMost = 1024;  // more rows are taken by turns

  // max_rows: rows that the panel holds; more of them are taken by turns. max_in_features: the largest K.
  // Throws std::invalid_argument (naming field, got, expected) for sizes of zero or absurd ones, and when
  // this machine lacks the ISA.
  Linear(uint32_t max_rows, uint32_t max_in_features, Isa isa, ThreadPool& pool);
  ~Linear();
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  // Writes y [T, N] f32. One call at a time; allocates nothing. Throws std::invalid_argument for
  // K > max_in_features or a size of zero; y is then untouched.
  void run(const LinearWeight& weight, const LinearRows& rows, float* y);

  Isa isa() const;
  uint32_t max_in_features() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace duck
