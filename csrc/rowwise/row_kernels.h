// Row-wise operations in f32 around the dense layers: norms, gated activations, the router's scores. One
// table per ISA, each compiled with its own flags; called by rowwise/bind.cpp and rowwise/route.cpp.
//
// A row's result depends on that row alone: every element goes through the same operations wherever it lies,
// and sums have a fixed order. No operation is a fused multiply-add, so the tables of all ISAs give the same
// bits. NaN and infinity stay in their row. Nothing here starts a thread or allocates.
//
// Sums are of doubles, 32 chains (element i joins chain i mod 32, ascending), which are then added by halves.
//
// Errors, u = 2^-24: see each function; tests/rowwise holds every ISA to them in float64.
#pragma once

#include <cstddef>

#include "kernels/experts.h"

namespace duck {

struct RowKernels {
  Isa isa;

  // y = x / sqrt(mean(x^2) + eps) * weight. Relative error 3 u while |x| < 2^120.
  void (*rms_norm)(const float* x, const float* weight, size_t size, double eps, float* y);

  // y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. Error 3 u (|y - bias| + |bias|).
  void (*layer_norm)(const float* x, const float* weight, const float* bias, size_t size, double eps,
                     float* y);

  // y = silu(gate) * up, silu(g) = g / (1 + e^-g). Relative error 6 u; -0 for g below -88, where silu is
  // above -2^-120. y may be gate or up.
  void (*silu_mul)(const float* gate, const float* up, size_t size, float* y);

  // y = 1 / (1 + e^-x). Relative error 5 u; 0 below -88. y may be x.
  void (*sigmoid)(const float* x, size_t size, float* y);

  // y = e^(x - max) / sum of those. Relative error (4 + max - x) u, x - max being rounded; 0 where x is more
  // than 87 below the maximum. y may be x.
  void (*softmax)(const float* x, size_t size, float* y);

  // values *= factor.
  void (*scale)(float* values, size_t size, float factor);
};

// The table of an ISA. Calling its functions is right only where isa_available(isa).
const RowKernels& row_kernels(Isa isa);

namespace scalar {
extern const RowKernels kRows;
}
namespace avx2 {
extern const RowKernels kRows;
}
namespace avx512 {
extern const RowKernels kRows;
}

}  // namespace duck
