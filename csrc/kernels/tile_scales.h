// The factors that `multiply` of kernel_table.h and bf16_tiles.h takes. Not for the files of an ISA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/kernel_table.h"

namespace duck {

// One factor a lane of a tile.
struct TileScales {
  alignas(64) float lanes[kTileLanes];

  // One for the first half of the lanes, one for the second.
  static TileScales of_halves(float first, float second) {
    TileScales scales;
    std::fill_n(scales.lanes, kStripeChannels, first);
    std::fill_n(scales.lanes + kStripeChannels, kStripeChannels, second);
    return scales;
  }
  // f32 of any alignment, times `factor`.
  static TileScales of_lanes(const uint8_t* values, float factor) {
    TileScales scales;
    std::memcpy(scales.lanes, values, sizeof(scales.lanes));
    for (float& scale : scales.lanes) scale *= factor;
    return scales;
  }
};

}  // namespace duck
