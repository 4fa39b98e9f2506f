// What a CPU with bf16 multipliers offers to experts.cpp for prefill: the tile kernels of kernel_table.h on
// pairs of bf16 instead of f32. The weights are exact in bf16; x and the activations are rounded to it, the
// sums are f32. experts.h states the error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/experts.h"
#include "kernels/weight_format.h"

namespace duck {

inline constexpr uint32_t kBf16Lanes = 2 * kStripeChannels;
inline constexpr uint32_t kBf16Pairs = kScaleBlock / 2;      // of a block's rows; words of a panel row
inline constexpr uint32_t kBf16StepPairs = kRecordRows / 2;  // num_pairs of `multiply` is a multiple
inline constexpr uint32_t kBf16RowBlock = 16;                // panel rows that `multiply` may read at once
inline constexpr uint32_t kBf16TileWords = kBf16Pairs * kBf16Lanes;

// The block sums' factor. Tiles hold w * 2^-104 in all formats, as bf16 multipliers take e4m3 subnormals,
// which would be denormal, for zero; the panels hold values * prescale(format).
inline constexpr float bf16_postscale(WeightFormat format) { return 0x1p104f / prescale(format); }

// Words are bf16 pairs: row 2p (or value 2p) in the lower half, row 2p + 1 in the upper one.
struct Bf16Tiles {
  const char* name;

  // A thread calls begin() before its first `multiply` of a step and end() after its last; null: nothing to
  // do.
  void (*begin)();
  void (*end)();

  // Rounds `count` values, a multiple of 16 and at most 128, to nearest, ties to even; zeros follow up to a
  // whole number of kBf16StepPairs.
  void (*fill_panel)(const float* values, uint32_t count, uint32_t* panel);

  struct Format {
    // A tile's rows of 32 words: a pair of weights of 32 lanes. tile_of_streams: num_records records of two
    // matrices side by side, which start `distance` bytes apart and whose records are `stride` bytes apart;
    // 16 * num_records rows. tile_of_down: one record of down, 8 rows.
    void (*tile_of_streams)(const uint8_t* records, size_t distance, size_t stride, uint32_t num_records,
                            uint32_t* tile);
    void (*tile_of_down)(const uint8_t* record, uint32_t* tile);
  } formats[kNumWeightFormats];  // by WeightFormat; none for those in which no expert is stored

  // out[row][lane] += scales[lane] * sum over the pairs of panel[row] and tile, for num_rows rows and 32
  // lanes. A panel row has kBf16Pairs words; there are panel rows up to a multiple of kBf16RowBlock. A row's
  // sum is in the same order whatever rows go beside it.
  void (*multiply)(const uint32_t* panel, const uint32_t* tile, uint32_t num_pairs, const float* scales,
                   float* const* out, uint32_t num_rows);
};

namespace avx512_bf16 {
extern const Bf16Tiles kTiles;
}

// Names of the multipliers that this CPU and its operating system offer, from the slowest to the best.
std::vector<std::string> available_bf16();

// The best of them, or the one that DUCK_FORCE_BF16 names. Throws std::invalid_argument, one sentence: there
// is none, the ISA is another than AVX-512, or the variable names none that is there.
const Bf16Tiles& select_bf16(Isa isa);

}  // namespace duck
