// Records of int8, int4 and mxfp4 as f32, for the exact path of Experts. Called by integer_steps.cpp.
#pragma once

#include <cstdint>

#include "kernels/weight_format.h"

namespace duck {

// A record of WeightFormat::kF32 from record `record` of gate (part 0) or up (part 1), or of down. The scales
// of groups are multiplied in, which is exact; those of int8 blocks and channels are not.
// zero_points: of gate and up, or of down, in the formats that have them.
void decode_gate_up(WeightFormat format, const uint8_t* records, const uint8_t* zero_points, uint32_t record,
                    int part, float* out);
void decode_down(WeightFormat format, const uint8_t* records, const uint8_t* zero_points, uint32_t record,
                 float* out);

}  // namespace duck
