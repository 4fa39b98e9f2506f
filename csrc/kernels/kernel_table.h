// What an ISA offers to experts.cpp and linear.cpp: kernels over records. One table per ISA, each in its own
// namespace and compiled with its own flags; select_isa.cpp knows which of them this machine can run.
//
// There are two ways to the same bits. *Direct* kernels decode weights in registers and use each for a few
// rows: decode. *Tile* kernels decode a block of weights once into f32 and multiply it with many rows:
// prefill. Both sum in the order that experts.h states.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/experts.h"
#include "kernels/weight_format.h"

namespace duck {

// An activation silu(g) * u * weight below this counts as zero, so that its products are normal numbers too.
inline constexpr float kSmallestActivation = 0x1p-50f;
inline constexpr int kPartBlocks = 8;  // scale blocks whose sums are added up before they join a dot product
inline constexpr uint32_t kPartRecords = kPartBlocks * kRecordsPerBlock;
inline constexpr uint32_t kMaxDirectRows = 8;  // more rows of an expert go through the tile kernels
inline constexpr uint32_t kTileLanes = 2 * kStripeChannels;
inline constexpr uint32_t kPanelStride = kScaleBlock;   // floats from row to row of a panel
inline constexpr uint32_t kPanelOdd = kScaleBlock / 2;  // where a panel row's odd values begin

// One or two matrices of 16 lanes whose records alternate: gate and up, or one stripe of a dense layer.
struct Stream {
  const uint8_t* records = nullptr;           // of row block 0
  const uint8_t* scales[2] = {};              // f32 per scale block, any alignment; null: all 1
  uint32_t first_record = 0, end_record = 0;  // to go through; first_record is at a scale block
  const uint8_t* next = nullptr;              // what will be read after: prefetched at the end
  uint32_t prefetch_bytes = 0;                // how far ahead to prefetch: prefetch_bytes()
};

struct FormatKernels {
  // dots[row][part][lane] = sums over the stream's scale blocks, for num_rows <= kMaxDirectRows rows. x: rows
  // of x * prescale, zero beyond H. dots: [num_rows][parts][16].
  void (*dots1)(const Stream& stream, const float* const* x, uint32_t num_rows, float* dots);
  void (*dots2)(const Stream& stream, const float* const* x, uint32_t num_rows, float* dots);

  // y[row][32 * record + lane] += scale * sums over the 16 channels of a stripe, for the down records
  // [first, end) of one unit. scales: f32 of any alignment, one per scale block; for down_by_channel one per
  // output. next: of the unit that will be read after.
  using Down = void (*)(const uint8_t* records, const uint8_t* scales, const float* const* activations,
                        float* const* y, uint32_t num_rows, uint32_t first_record, uint32_t end_record,
                        const uint8_t* next, uint32_t prefetch_bytes);
  Down down, down_by_channel;

  // A tile for `multiply`: rows of 32 lanes, even rows of the source from 0, odd ones from num_rows / 2.
  // tile_of_streams: num_records records of two matrices side by side, which start `distance` bytes apart and
  // whose records are `stride` bytes apart; 32 * num_records rows. tile_of_down: one record of down, 16 rows.
  void (*tile_of_streams)(const uint8_t* records, size_t distance, size_t stride, uint32_t num_records,
                          float* tile);
  void (*tile_of_down)(const uint8_t* record, float* tile);
};

struct KernelTable {
  Isa isa;
  FormatKernels formats[kNumWeightFormats];  // by WeightFormat

  // activations[lane] = silu(gate) * up * weight * prescale, 0 from num_channels on. dots: [2][16].
  void (*activate)(const float* dots, float weight, float prescale, uint32_t num_channels,
                   float* activations);

  // out[row][lane] += scales[lane] * sum over k of panel[row][k] * tile[k][lane], for num_rows rows and 32
  // lanes. The panel's rows hold half_rows even values from 0 and half_rows odd ones from kPanelOdd.
  void (*multiply)(const float* panel, const float* tile, uint32_t half_rows, const float* scales,
                   float* const* out, uint32_t num_rows);

  // A panel row from `count` consecutive values, count even and at most 128.
  void (*fill_panel)(const float* values, uint32_t count, float* panel);
};

// Whether this CPU computes with denormal numbers as fast as with others.
bool denormals_are_fast();

// How a stored format is best decoded here: kFp8 may become kFp8Normal.
WeightFormat kernel_format(WeightFormat stored);

// How far ahead in a stream this CPU's threads prefetch best; docs/performance.md has the sweeps.
uint32_t prefetch_bytes();

// Whether this CPU's threads prefetch best into the second-level cache: AMD's Zen 3 and Zen 4 (family 25) and
// Intel's cores with AVX-512, where a prefetch into the first takes one of its few miss registers for as long
// as the memory takes, which held a core of Zen 4 to 15 of the 24 GB/s that it can read. Zen 5 is slower so
// (docs/performance.md).
extern const bool kPrefetchesFurtherOut;

// The table of an ISA. Calling its kernels is right only where isa_available(isa).
const KernelTable& kernel_table(Isa isa);

namespace scalar {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}

}  // namespace duck
