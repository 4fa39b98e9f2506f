// Re-encoding of units between fp9 and fp8, in memory and without loss: a worker makes its slice into the
// format that its machine computes faster. Called by weights/bind.cpp; knows no files.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weight_format.h"

namespace duck {

// Writes the unit, unit_bytes(from, H, layout) bytes, as unit_bytes(to, H, layout) bytes, with the same
// scales; the two must not overlap. False when it holds what no finite e4m3 value is stored as; what is
// written then means nothing.
bool recode_unit(size_t hidden_size, ScaleLayout layout, WeightFormat from, const uint8_t* unit,
                 WeightFormat to, uint8_t* out);

// Makes the bytes be in no cache of this machine, so that reading them next reads memory.
void flush_from_caches(const uint8_t* bytes, size_t size);

}  // namespace duck
