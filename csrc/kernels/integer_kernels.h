// What a CPU's integer multipliers offer to experts.cpp for the formats int8, int4 and mxfp4: x and the
// activations are rounded to bytes, a scale for each group of them, and multiplied with the codes in
// integers. One table per set of instructions, each in its own namespace and compiled with its own flags;
// select_integer.cpp knows which of them this machine can run. All give the same bits, for one row or many:
// experts.h states the order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/experts.h"
#include "kernels/kernel_table.h"
#include "kernels/weight_format.h"

namespace duck {

// A row's values of one group: value = values[i] * scale.
template <int kValues>
struct Group {
  int8_t values[kValues];  // -127 to 127
  float scale;             // times the format's `factor`; NaN where a value is not finite
  int32_t offset;          // minus the format's `zero` times the sum of the values
};
using HiddenGroup = Group<kRecordRows>;      // of x
using StripeGroup = Group<kStripeChannels>;  // of the activations
static_assert(sizeof(HiddenGroup) == 40 && sizeof(StripeGroup) == 24);

// A group whose largest magnitude is below this counts as zero, so that no scale is denormal.
inline constexpr float kSmallestGroup = 0x1p-100f;
inline constexpr float kLargestByte = 127.0f;

// One stripe's down records, for `down`.
struct DownStripe {
  const uint8_t* records;  // of output 0
  const uint8_t* scales;   // int8: its f32 scales; formats with zero points: those of down
  const uint8_t* next;     // output 0 of the down records that will be read after
};

inline constexpr uint32_t kStripesAtOnce = 16;  // most stripes of one call of `down`

struct IntegerFormat {
  // dots[row][part][lane] = sums over the stream's groups, one chain; parts are gate and up. The stream's
  // scales: int8: f32 per scale block of each part; formats with zero points: scales[0] are those of gate and
  // up; else unused. dots: [num_rows][2][16].
  void (*dots)(const Stream& stream, const HiddenGroup* const* x, uint32_t num_rows, float* dots);

  // y[row][32 * record + lane] += sums over the stripes, in their order, for the down records [first, end).
  // activations[row]: of the first stripe, those of the others follow.
  void (*down)(const DownStripe* stripes, uint32_t num_stripes, const StripeGroup* const* activations,
               float* const* y, uint32_t num_rows, uint32_t first_record, uint32_t end_record,
               uint32_t prefetch_bytes);

  int32_t zero;  // of Group::offset
  float factor;  // of Group::scale
};

// By format, int8 with scales by channel apart.
inline constexpr int kNumIntegerFormats = 7;
inline constexpr int integer_index(WeightFormat format, ScaleLayout layout) {
  if (format == WeightFormat::kInt8) return layout == ScaleLayout::kChannel ? 1 : 0;
  return 2 + static_cast<int>(format) - static_cast<int>(WeightFormat::kInt4);
}
inline constexpr bool is_integer(WeightFormat format) { return format >= WeightFormat::kInt8; }

// Tiles (AMX) take this many rows at once.
inline constexpr uint32_t kTileRows = 16;
inline constexpr uint32_t kLeastTileRows = 12;  // fewer are as fast without, or faster

// How many of an expert's rows go through tiles: whole blocks of kTileRows, and what is left if that is
// enough.
inline constexpr uint32_t rows_in_tiles(uint32_t num_rows) {
  const uint32_t left = num_rows % kTileRows;
  return left < kLeastTileRows ? num_rows - left : num_rows;
}

// A HiddenGroup of each of kTileRows rows.
struct PanelGroup {
  int8_t values[kTileRows][kRecordRows];
  float scales[kTileRows];
};
static_assert(sizeof(PanelGroup) % 64 == 0);

// What a CPU with tiles offers beside `dots`, for many rows of an expert: the same bits.
struct IntegerTiles {
  // A thread calls begin() before its first use of the others in a step and end() after its last.
  void (*begin)();
  void (*end)();

  // panel[block][group]: groups [0, num_groups) of the rows in blocks of kTileRows, of which the last is
  // filled up with rows that count as zero.
  void (*fill_panel)(const HiddenGroup* const* x, uint32_t num_rows, uint32_t num_groups, PanelGroup* panel);

  // By integer_index(). As IntegerFormat::dots; the panel has num_groups groups in a block.
  void (*dots[kNumIntegerFormats])(const Stream& stream, const PanelGroup* panel, uint32_t num_groups,
                                   uint32_t num_rows, float* dots);
};

struct IntegerTable {
  const char* name;
  IntegerFormat formats[kNumIntegerFormats];  // by integer_index()

  // The groups of num_groups * 32 values, and that of a stripe's 16 activations.
  void (*quantise_hidden)(const float* values, uint32_t num_groups, int32_t zero, float factor,
                          HiddenGroup* groups);
  void (*quantise_stripe)(const float* values, int32_t zero, float factor, StripeGroup* group);

  const IntegerTiles* tiles = nullptr;  // null: there are none
};

// Twice the values of e2m1 by their codes, plus kMxfp4Zero.
inline constexpr int32_t kMxfp4Zero = 12;
inline constexpr uint8_t kMxfp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

namespace scalar {
extern const IntegerTable kIntegerTable;
}
namespace avx2 {
extern const IntegerTable kIntegerTable;
}
namespace avx_vnni {
extern const IntegerTable kIntegerTable;
}
namespace avx512_vnni {
extern const IntegerTable kIntegerTable;
extern const IntegerTable kIntegerTable256;  // avx_vnni's kernels with the same instruction of AVX-512
}  // namespace avx512_vnni
namespace amx_int8 {
extern const IntegerTiles kTiles;
}

// Names of the integer multipliers that go with an ISA here, from the slowest to the best.
std::vector<std::string> available_integer(Isa isa);

// The best of them, or the one that DUCK_FORCE_INTEGER names. Throws std::invalid_argument where the variable
// names none that is there.
const IntegerTable& select_integer(Isa isa);

}  // namespace duck
