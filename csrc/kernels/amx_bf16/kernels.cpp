// AMX-BF16: TDPBF16PS multiplies 16 panel rows of 16 pairs with 16 pairs of 16 lanes into 16 x 16 f32 sums.
// It rounds to nearest and takes denormals for zero, whatever MXCSR says.
#include "kernels/amx_bf16/kernels.h"

#include <immintrin.h>

#include <atomic>

#include "kernels/bf16_tiles.h"

namespace duck::amx_bf16 {
namespace {

// The operand of LDTILECFG: all eight tiles of 16 rows of 64 bytes. A constant, so that no store to it can be
// moved behind the instruction, of whose reading the compiler knows only in part.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kConfig;

constexpr size_t kPanelRowBytes = kBf16Pairs * sizeof(uint32_t);
constexpr size_t kTileRowBytes = kBf16Lanes * sizeof(uint32_t);
constexpr uint32_t kTileRows = kBf16RowBlock;

void add_scaled(const float* sums, const float* scales, float* to) {
  const __m512 scaled = _mm512_fmadd_ps(_mm512_load_ps(sums), _mm512_loadu_ps(scales), _mm512_loadu_ps(to));
  _mm512_storeu_ps(to, scaled);
}

}  // namespace

void begin() { _tile_loadconfig(&kConfig); }

void end() { _tile_release(); }

// Tiles 0 to 3: the sums of two blocks of panel rows, two halves of the lanes each; 4 and 5: weights; 6 and
// 7: panel rows.
void multiply(const uint32_t* panel, const uint32_t* tile, uint32_t num_pairs, const float* scales,
              float* const* out, uint32_t num_rows) {
  alignas(64) float sums[4][kTileRows][kStripeChannels];
  // Nor does the compiler know what TILELOADD reads: what was stored before must be in memory.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (uint32_t first = 0; first < num_rows; first += 2 * kTileRows) {
    const uint32_t* rows = panel + first * kBf16Pairs;
    const bool two_blocks = num_rows - first > kTileRows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t pair = 0; pair < num_pairs; pair += kBf16StepPairs) {
      _tile_loadd(4, tile + pair * kBf16Lanes, kTileRowBytes);
      _tile_loadd(5, tile + pair * kBf16Lanes + kStripeChannels, kTileRowBytes);
      _tile_loadd(6, rows + pair, kPanelRowBytes);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      if (two_blocks) {
        _tile_loadd(7, rows + kTileRows * kBf16Pairs + pair, kPanelRowBytes);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
      }
    }
    _tile_stored(0, sums[0], kStripeChannels * sizeof(float));
    _tile_stored(1, sums[1], kStripeChannels * sizeof(float));
    if (two_blocks) {
      _tile_stored(2, sums[2], kStripeChannels * sizeof(float));
      _tile_stored(3, sums[3], kStripeChannels * sizeof(float));
    }
    for (uint32_t row = 0; row < 2 * kTileRows && first + row < num_rows; ++row) {
      const uint32_t block = row / kTileRows * 2, in_block = row % kTileRows;
      float* to = out[first + row];
      add_scaled(sums[block][in_block], scales, to);
      add_scaled(sums[block + 1][in_block], scales + kStripeChannels, to + kStripeChannels);
    }
  }
}

}  // namespace duck::amx_bf16
