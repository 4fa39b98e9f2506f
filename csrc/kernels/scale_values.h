// Activations as f32, scaled for the kernels. Used by experts.cpp and linear.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/experts.h"

namespace duck {

// out[i] = x[offset + i] * factor for i < count. x: f32 or bf16, no alignment needed.
inline void scale_values(ActivationType type, const void* x, size_t offset, size_t count, float factor,
                         float* out) {
  if (type == ActivationType::kF32) {
    std::memcpy(out, static_cast<const uint8_t*>(x) + 4 * offset, 4 * count);
    for (size_t i = 0; i < count; ++i) out[i] *= factor;
    return;
  }
  const uint8_t* from = static_cast<const uint8_t*>(x) + 2 * offset;
  for (size_t i = 0; i < count; ++i) {
    uint16_t upper;
    std::memcpy(&upper, from + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(upper) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    out[i] = value * factor;
  }
}

}  // namespace duck
