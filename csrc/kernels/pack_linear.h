// Packing of dense weights for linear.h, once when a model is loaded. Called by kernels/bind_linear.cpp.
//
// A packed weight is groups of 32 outputs; a group is ceil(K / 32) pairs of records (weight_format.h),
// outputs 0 to 15 and 16 to 31 by turns, so that two chains of sums overlap. What is beyond N or K is zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weight_format.h"

namespace duck {

inline constexpr size_t kGroupOutputs = 2 * kStripeChannels;

inline constexpr size_t group_bytes(size_t in_features, WeightFormat format) {
  return 2 * ceil_div(in_features, kRecordRows) * record_bytes(format);
}
inline constexpr size_t linear_bytes(size_t out_features, size_t in_features, WeightFormat format) {
  return ceil_div(out_features, kGroupOutputs) * group_bytes(in_features, format);
}

// Packs a row-major weight [N, K]: e4m3 bytes to fp9 or fp8 (none of them NaN), 16-bit words to bf16,
// f32 to f32.
// packed: linear_bytes(N, K, format).
void pack_linear(const void* weight, size_t out_features, size_t in_features, WeightFormat format,
                 uint8_t* packed);

}  // namespace duck
