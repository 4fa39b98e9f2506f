// AMX-INT8: gate and up of many rows. TDPBSSD multiplies a group of 16 rows of x with the codes of 16 lanes,
// bytes both. As each group has scales of its own, its sums leave the tile and join f32 chains in vector
// registers, which is most of the work: 4.6 ns for the multiplication, 1.7 more with the store, and 6.3 for
// 48 vector instructions, one thread of a 3.8 GHz Xeon, 2026-11-30.
//
// There, vector instructions of 512 bits run at half their speed while a tile instruction is in flight, and
// for some 25 ns after. So eight groups go through tiles first and then through vector registers; and what
// both touch stays in the first-level cache: eight groups' codes as bytes, 8 KiB, and their sums, 16 KiB.
// With 16 groups of codes 16 rows took 1.15 times as long, with the sums of 32 groups 48 rows 1.5 times.
// docs/log.md has what else was tried, down too.
#include <immintrin.h>

#include <atomic>
#include <type_traits>

#include "kernels/integer_lanes_512.h"

namespace duck::amx_int8 {
namespace {

struct Lanes : Lanes512 {};
using Kernels = IntegerKernels<Lanes>;
using Floats = Lanes::Floats;
using Ints = Lanes::Ints;

constexpr int kRows = kTileRows;
constexpr int kParts = Kernels::kGateUp;
constexpr uint32_t kBatch = 8;  // groups

// The operand of LDTILECFG. Tiles 0 to 3: sums; 4: 16 rows of x; 5: codes. A constant, so that no store to it
// can be moved behind the instruction, of whose reading the compiler knows only in part.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, kRecordRows, 64};
  uint8_t rows[16] = {kRows, kRows, kRows, kRows, kRows, kRecordRows / 4};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kConfig;

// Nor does it know what tile loads read: nothing may be moved past here.
DUCK_INLINE void compiler_fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Tile kTile = tile 4 times the codes. The instructions want the numbers of tiles as literals.
template <int kTile>
DUCK_INLINE void multiply(const int8_t* codes) {
  _tile_loadd(5, codes, 64);
  if constexpr (kTile == 0) {
    _tile_zero(0);
    _tile_dpbssd(0, 4, 5);
  } else if constexpr (kTile == 1) {
    _tile_zero(1);
    _tile_dpbssd(1, 4, 5);
  } else if constexpr (kTile == 2) {
    _tile_zero(2);
    _tile_dpbssd(2, 4, 5);
  } else {
    _tile_zero(3);
    _tile_dpbssd(3, 4, 5);
  }
}

template <int kTile>
DUCK_INLINE void store_sums(int32_t* to) {
  if constexpr (kTile == 0) {
    _tile_stored(0, to, 64);
  } else if constexpr (kTile == 1) {
    _tile_stored(1, to, 64);
  } else if constexpr (kTile == 2) {
    _tile_stored(2, to, 64);
  } else {
    _tile_stored(3, to, 64);
  }
}

// A group's codes less their zeros, as a tile's rows of 64 bytes.
template <class F>
DUCK_INLINE void unpack(const uint8_t* codes, const uint8_t* zero_points, int8_t* to) {
  Ints zeros = _mm512_set1_epi8(static_cast<char>(F::kZero));
  if constexpr (F::kHasZeroPoints) {
    zeros = _mm512_shuffle_epi8(Lanes::load_halves(zero_points),
                                _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
  }
  F::template for_words<kRecordRows / 4>(
      codes, 0, [&](int word, Ints weights) __attribute__((always_inline)) {
        _mm512_store_si512(to + 64 * word, _mm512_sub_epi8(weights, zeros));
      });
}

// Up to kBatch groups of gate and up, and what has become of them.
struct Batch {
  alignas(64) int8_t codes[kParts][kBatch][kRecordRows * kStripeChannels];
  alignas(64) int32_t sums[kParts][kBatch][kRows][kStripeChannels];
  alignas(64) float factors[kRows];
};

template <class F>
void unpack_batch(const Stream& stream, uint32_t first, uint32_t num, Batch& batch) {
  for (uint32_t i = 0; i < num; ++i) {
    const uint32_t record = first + i;
    const uint8_t* pair = stream.records + static_cast<size_t>(record) * F::kPairBytes;
    for (int part = 0; part < kParts; ++part) {
      const uint8_t* zero_points = nullptr;
      if constexpr (F::kHasZeroPoints) zero_points = stream.scales[0] + 16 * record + 8 * part;
      unpack<F>(F::codes(pair, part), zero_points, batch.codes[part][i]);
    }
  }
}

// The batch's sums. A tile is stored right before its next use, so that multiplications do not wait for each
// other.
DUCK_INLINE void multiply_batch(const PanelGroup* x, uint32_t num, Batch& batch) {
  const auto step = [&](auto odd, uint32_t i) __attribute__((always_inline)) {
    constexpr int kTile = 2 * decltype(odd)::value;
    if (i >= 2 && i - 2 < num) {
      store_sums<kTile>(batch.sums[0][i - 2][0]);
      store_sums<kTile + 1>(batch.sums[1][i - 2][0]);
    }
    if (i < num) {
      _tile_loadd(4, x[i].values, kRecordRows);
      multiply<kTile>(batch.codes[0][i]);
      multiply<kTile + 1>(batch.codes[1][i]);
    }
  };
  compiler_fence();
  for (uint32_t i = 0; i < num + 2; i += 2) {
    step(std::integral_constant<int, 0>{}, i);
    step(std::integral_constant<int, 1>{}, i + 1);
  }
  compiler_fence();
}

// chains[row] += sums[row] * (scale * x_scales[row]). factors: memory that the compiler cannot see through;
// it would permute registers instead, on the port that is busiest.
template <class F>
DUCK_INLINE void add_group(const int32_t (*sums)[kStripeChannels], Floats scale, const float* x_scales,
                           float* factors, Floats (&chains)[kRows]) {
  if constexpr (F::kOneScale) {
    Lanes::store(factors, Lanes::mul(scale, Lanes::load(x_scales)));
    compiler_fence();
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const Floats values = Lanes::to_floats(_mm512_load_si512(sums[row]));
    const Floats factor =
        F::kOneScale ? Lanes::broadcast(factors[row]) : Lanes::mul(scale, Lanes::broadcast(x_scales[row]));
    chains[row] = Lanes::fma(values, factor, chains[row]);
  }
}

// The batch's sums into the chains of one part, which begin here where `is_first`. What is to be prefetched
// is so beside the work on it: as many lines at once would wait for each other.
template <class F>
DUCK_INLINE void add_batch(const Stream& stream, const PanelGroup* x, uint32_t first, uint32_t num, int part,
                           bool is_first, bool prefetch, Batch& batch, float (*chains)[kStripeChannels]) {
  Floats values[kRows];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) values[row] = is_first ? Lanes::zero() : Lanes::load(chains[row]);
  for (uint32_t i = 0; i < num; ++i) {
    const uint8_t* pair = stream.records + static_cast<size_t>(first + i) * F::kPairBytes;
    if (prefetch) {
      const uint8_t* ahead =
          Kernels::Base::ahead_of(stream.records, first + i, stream.end_record, F::kPairBytes, stream.next,
                                  stream.prefetch_bytes / F::kPrefetchParts);
      if (part == 0) F::prefetch_scales(ahead);
      for (int word = 0; word < kRecordRows / 4; ++word) F::prefetch_word(F::codes(ahead, part), word);
    }
    add_group<F>(batch.sums[part][i], F::scale(stream, first + i, pair, part, 0), x[i].scales, batch.factors,
                 values);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) Lanes::store(chains[row], values[row]);
}

template <class F>
void dots(const Stream& stream, const PanelGroup* panel, uint32_t num_groups, uint32_t num_rows,
          float* dots) {
  constexpr uint32_t kMostBlocks = Experts::kChunkRows / kTileRows;
  alignas(64) float chains[kMostBlocks][kParts][kRows][kStripeChannels];
  Batch batch;
  for (uint32_t first = stream.first_record; first < stream.end_record; first += kBatch) {
    const uint32_t left = stream.end_record - first, num = left < kBatch ? left : kBatch;
    unpack_batch<F>(stream, first, num, batch);
    for (uint32_t block = 0; block * kTileRows < num_rows; ++block) {
      const PanelGroup* x = panel + static_cast<size_t>(block) * num_groups + first;
      multiply_batch(x, num, batch);
      for (int part = 0; part < kParts; ++part) {
        add_batch<F>(stream, x, first, num, part, first == stream.first_record, block == 0, batch,
                     chains[block][part]);
      }
    }
  }
  for (uint32_t row = 0; row < num_rows; ++row) {
    for (int part = 0; part < kParts; ++part) {
      Lanes::store(dots + (row * kParts + part) * kStripeChannels,
                   Lanes::load(chains[row / kTileRows][part][row % kTileRows]));
    }
  }
}

void begin() { _tile_loadconfig(&kConfig); }

void end() { _tile_release(); }

void fill_panel(const HiddenGroup* const* x, uint32_t num_rows, uint32_t num_groups, PanelGroup* panel) {
  for (uint32_t row = 0; row < num_rows || row % kTileRows != 0; ++row) {
    PanelGroup* block = panel + static_cast<size_t>(row / kTileRows) * num_groups;
    for (uint32_t group = 0; group < num_groups; ++group) {
      if (row < num_rows) {
        __builtin_memcpy(block[group].values[row % kTileRows], x[row][group].values, kRecordRows);
        block[group].scales[row % kTileRows] = x[row][group].scale;
      } else {
        block[group].scales[row % kTileRows] = 0.0f;
      }
    }
  }
}

}  // namespace

const IntegerTiles kTiles = {&begin,
                             &end,
                             &fill_panel,
                             {&dots<Kernels::Int8<false>>, &dots<Kernels::Int8<true>>,
                              &dots<Kernels::FourBits<Kernels::F16, false, Codes::kSmall>>,
                              &dots<Kernels::FourBits<Kernels::Bf16, false, Codes::kSmall>>,
                              &dots<Kernels::FourBits<Kernels::F16, true, Codes::kSmall>>,
                              &dots<Kernels::FourBits<Kernels::Bf16, true, Codes::kSmall>>,
                              &dots<Kernels::FourBits<Kernels::Bf16, false, Codes::kTable>>}};

}  // namespace duck::amx_int8
