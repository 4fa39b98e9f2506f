// The kernels of kernel_table.h for an ISA that is described by `Lanes`: a struct in that ISA's namespace
// with the type Floats (kLanes f32 in one register) and the functions used below. Included by
// <isa>/kernels.cpp only. Every function here is a template over Lanes, so each copy is named after its ISA
// and the linker can never put an AVX2 copy where an older CPU runs.
//
// A lane is an output (a channel in gate and up); x, or the activation, is broadcast. The records' two rows
// of a pair go into two chains of sums, even and odd rows, which gives the FMA units twice as much to
// overlap. A row's sums are the same operations in the same order whatever rows go beside it, hence the same
// bits.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/weight_format.h"

#ifndef DUCK_INLINE
#define DUCK_INLINE __attribute__((always_inline)) inline
#endif

namespace duck {

template <class Lanes>
struct LaneKernels {
  using Floats = typename Lanes::Floats;

  static constexpr int kLanes = Lanes::kLanes;
  static constexpr int kVectors = kStripeChannels / kLanes;  // of one record row
  static constexpr uint32_t kPairs = kRecordRows / 2;
  static constexpr uint32_t kTilePrefetchBytes = 4096;  // ahead, while tiles are decoded

  static DUCK_INLINE float load_f32(const uint8_t* bytes, uint32_t index) {
    float value;
    __builtin_memcpy(&value, bytes + 4 * index, 4);
    return value;
  }

  // A weight that needs no decoding.
  struct F32 {
    static constexpr uint32_t kRecordBytes = record_bytes(WeightFormat::kF32);
    static constexpr float kPostscale = sum_postscale(WeightFormat::kF32);
    template <bool>
    static DUCK_INLINE void decode(const uint8_t* record, int pair, int vector, Floats& low, Floats& high) {
      const auto* rows =
          reinterpret_cast<const float*>(record) + 2 * kStripeChannels * pair + kLanes * vector;
      low = Lanes::load(rows);
      high = Lanes::load(rows + kStripeChannels);
    }
  };

  static DUCK_INLINE void prefetch(const uint8_t* from, uint32_t num_bytes) {
    if (kPrefetchesFurtherOut) {
      for (uint32_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    } else {
      for (uint32_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i);
    }
  }

  // Where to prefetch from while record `record` of a stream is computed with, `stride` bytes a record.
  static DUCK_INLINE const uint8_t* ahead_of(const uint8_t* records, uint32_t record, uint32_t end,
                                             uint32_t stride, const uint8_t* next, uint32_t num_bytes) {
    const uint32_t ahead = record + (num_bytes + stride - 1) / stride;
    return ahead < end ? records + static_cast<size_t>(ahead) * stride
                       : next + static_cast<size_t>(ahead - end) * stride;
  }

  // even[s][row] += sum over pairs of weights(s)[2p] * x[row][2p], odd likewise, for kParts records and
  // kVecs vectors of each from `vector` on; s counts both. Pairs [kFirst, kFirst + kNum) of the record,
  // x[row] from pair 0.
  template <class F, int kParts, int kVecs, int kRows, int kFirst, int kNum>
  static DUCK_INLINE void add_products(const uint8_t* const (&records)[kParts], int vector,
                                       const float* const (&x)[kRows], Floats (&even)[kParts * kVecs][kRows],
                                       Floats (&odd)[kParts * kVecs][kRows]) {
    constexpr int kStreams = kParts * kVecs;
    // Decoding by multiplication takes fewest operations, but from the units that many rows' FMAs need.
    constexpr bool kSpareMultipliers = kRows > 2;
    // Unrolled whole: the shift of the signs is then a constant.
#pragma GCC unroll 16
    for (int pair = 0; pair < kNum; ++pair) {
      if constexpr (kRows == 1) {  // stream by stream: fewer registers at once
        const Floats first = Lanes::broadcast(x[0][2 * pair]);
        const Floats second = Lanes::broadcast(x[0][2 * pair + 1]);
#pragma GCC unroll 4
        for (int s = 0; s < kStreams; ++s) {
          Floats low, high;
          F::template decode<false>(records[s / kVecs], kFirst + pair, vector + s % kVecs, low, high);
          even[s][0] = Lanes::fma(low, first, even[s][0]);
          odd[s][0] = Lanes::fma(high, second, odd[s][0]);
        }
        continue;
      }
      Floats low[kStreams], high[kStreams];
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; ++s) {
        F::template decode<kSpareMultipliers>(records[s / kVecs], kFirst + pair, vector + s % kVecs, low[s],
                                              high[s]);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const Floats first = Lanes::broadcast(x[row][2 * pair]);
        const Floats second = Lanes::broadcast(x[row][2 * pair + 1]);
#pragma GCC unroll 4
        for (int s = 0; s < kStreams; ++s) {
          even[s][row] = Lanes::fma(low[s], first, even[s][row]);
          odd[s][row] = Lanes::fma(high[s], second, odd[s][row]);
        }
      }
    }
  }

  static DUCK_INLINE Floats add_scaled(Floats to, Floats even, Floats odd, Floats scale) {
    return Lanes::add(to, Lanes::mul(Lanes::add(even, odd), scale));
  }

  template <int kStreams, int kRows>
  static DUCK_INLINE void clear(Floats (&sums)[kStreams][kRows]) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) sums[s][row] = Lanes::zero();
    }
  }

  // ---- direct kernels -------------------------------------------------------------------------------------

  // The sums of records [first, end) (one scale block) times its scale, added to part[...].
  template <class F, int kParts, int kRows>
  static DUCK_INLINE void dot_block(const Stream& stream, const float* const (&x)[kRows], uint32_t first,
                                    uint32_t end, Floats (&part)[kParts * kVectors][kRows]) {
    constexpr int kPartsAtOnce = Lanes::parts_at_once(kRows) < kParts ? Lanes::parts_at_once(kRows) : kParts;
    constexpr int kVecs = Lanes::vectors_at_once(kRows);
    constexpr uint32_t kStride = kParts * F::kRecordBytes;
    for (int p = 0; p < kParts; p += kPartsAtOnce) {
      for (int vector = 0; vector < kVectors; vector += kVecs) {
        Floats even[kPartsAtOnce * kVecs][kRows], odd[kPartsAtOnce * kVecs][kRows];
        clear(even);
        clear(odd);
        for (uint32_t record = first; record < end; ++record) {
          if (p == 0 && vector == 0) {
            prefetch(ahead_of(stream.records, record, stream.end_record, kStride, stream.next,
                              stream.prefetch_bytes),
                     kStride);
          }
          const uint8_t* records[kPartsAtOnce];
#pragma GCC unroll 2
          for (int i = 0; i < kPartsAtOnce; ++i) {
            records[i] = stream.records + static_cast<size_t>(record) * kStride + (p + i) * F::kRecordBytes;
          }
          const float* record_x[kRows];
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) record_x[row] = x[row] + record * kRecordRows;
          add_products<F, kPartsAtOnce, kVecs, kRows, 0, kPairs>(records, vector, record_x, even, odd);
        }
#pragma GCC unroll 2
        for (int i = 0; i < kPartsAtOnce; ++i) {
          const uint8_t* scales = stream.scales[p + i];
          const float scale =
              scales ? load_f32(scales, first / kRecordsPerBlock) * F::kPostscale : F::kPostscale;
#pragma GCC unroll 2
          for (int v = 0; v < kVecs; ++v) {
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
              Floats& sum = part[(p + i) * kVectors + vector + v][row];
              const int s = i * kVecs + v;
              sum = add_scaled(sum, even[s][row], odd[s][row], Lanes::broadcast(scale));
            }
          }
        }
      }
    }
  }

  template <class F, int kParts, int kRows>
  static void dot_rows(const Stream& stream, const float* const* rows_x, float* dots) {
    constexpr int kStreams = kParts * kVectors;
    const float* x[kRows];
    for (int row = 0; row < kRows; ++row) x[row] = rows_x[row];
    Floats total[kStreams][kRows];
    clear(total);
    for (uint32_t first = stream.first_record; first < stream.end_record;) {
      const uint32_t part_end = first + kPartBlocks * kRecordsPerBlock < stream.end_record
                                    ? first + kPartBlocks * kRecordsPerBlock
                                    : stream.end_record;
      Floats part[kStreams][kRows];
      clear(part);
      for (; first < part_end; first += kRecordsPerBlock) {
        const uint32_t end = first + kRecordsPerBlock < part_end ? first + kRecordsPerBlock : part_end;
        dot_block<F, kParts, kRows>(stream, x, first, end, part);
      }
      for (int s = 0; s < kStreams; ++s) {
        for (int row = 0; row < kRows; ++row) total[s][row] = Lanes::add(total[s][row], part[s][row]);
      }
      first = part_end;
    }
    for (int s = 0; s < kStreams; ++s) {
      for (int row = 0; row < kRows; ++row) {
        Lanes::store(dots + (row * kStreams + s) * kLanes, total[s][row]);
      }
    }
  }

  // The scales of a record's outputs, times `factor`: one for all of them, or one each.
  struct BlockScale {
    const float scale;
    DUCK_INLINE BlockScale(const uint8_t* scales, uint32_t record, float factor)
        : scale(load_f32(scales, record / kRecordsPerBlock) * factor) {}
    DUCK_INLINE Floats of_outputs(uint32_t) const { return Lanes::broadcast(scale); }
  };
  struct ChannelScales {
    const float* const first;
    const float factor;
    DUCK_INLINE ChannelScales(const uint8_t* scales, uint32_t record, float factor_)
        : first(reinterpret_cast<const float*>(scales) + record * kRecordRows), factor(factor_) {}
    DUCK_INLINE Floats of_outputs(uint32_t output) const {
      return Lanes::mul(Lanes::load(first + output), Lanes::broadcast(factor));
    }
  };

  // The two tiles of a record of down are its pairs 0 to 7, outputs 0 to 15, and 8 to 15, outputs 16 to 31.
  template <class F, int kRows, int kTile, class Scale>
  static DUCK_INLINE void down_tile(const uint8_t* record, const float* const (&activations)[kRows],
                                    float* const* y, uint32_t output, const Scale& scale) {
    constexpr int kVecs = Lanes::vectors_at_once(kRows);
    for (int vector = 0; vector < kVectors; vector += kVecs) {
      Floats even[kVecs][kRows], odd[kVecs][kRows];
      clear(even);
      clear(odd);
      const uint8_t* const records[1] = {record};
      add_products<F, 1, kVecs, kRows, kTile * 8, 8>(records, vector, activations, even, odd);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        const uint32_t first = kTile * kStripeChannels + (vector + v) * kLanes;
        const Floats factors = scale.of_outputs(first);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          float* out = y[row] + output + first;
          Lanes::store(out, add_scaled(Lanes::load(out), even[v][row], odd[v][row], factors));
        }
      }
    }
  }

  template <class F, int kRows, class Scale>
  static void down_rows(const uint8_t* records, const uint8_t* scales, const float* const* rows_a,
                        float* const* y, uint32_t first, uint32_t end, const uint8_t* next,
                        uint32_t prefetch_bytes) {
    const float* activations[kRows];
    for (int row = 0; row < kRows; ++row) activations[row] = rows_a[row];
    next += static_cast<size_t>(first) * F::kRecordBytes;
    for (uint32_t record = first; record < end; ++record) {
      prefetch(ahead_of(records, record, end, F::kRecordBytes, next, prefetch_bytes), F::kRecordBytes);
      const uint8_t* at = records + static_cast<size_t>(record) * F::kRecordBytes;
      const Scale scale(scales, record, F::kPostscale);
      down_tile<F, kRows, 0>(at, activations, y, record * kRecordRows, scale);
      down_tile<F, kRows, 1>(at, activations, y, record * kRecordRows, scale);
    }
  }

  template <int kRows>
  struct Rows {
    static constexpr int kCount = kRows;
  };

  // Calls function(Rows<n>, first row) for blocks of at most kMost rows, as even as can be.
  template <int kMost, class Function>
  static DUCK_INLINE void in_blocks(uint32_t num_rows, Function function) {
    const uint32_t num_blocks = (num_rows + kMost - 1) / kMost;
    for (uint32_t block = 0; block < num_blocks; ++block) {
      const uint32_t first = num_rows * block / num_blocks;
      with_rows<kMost>(num_rows * (block + 1) / num_blocks - first, first, function);
    }
  }
  template <int kRows, class Function>
  static DUCK_INLINE void with_rows(uint32_t count, uint32_t first, Function& function) {
    if constexpr (kRows > 1) {
      if (count < kRows) return with_rows<kRows - 1>(count, first, function);
    }
    function(Rows<kRows>{}, first);
  }

  template <class F, int kParts>
  static void dots(const Stream& stream, const float* const* x, uint32_t num_rows, float* dots) {
    in_blocks<Lanes::kBlockRows>(num_rows, [&](auto rows, uint32_t first) {
      dot_rows<F, kParts, rows.kCount>(stream, x + first, dots + first * kParts * kStripeChannels);
    });
  }

  template <class F, class Scale>
  static void down(const uint8_t* records, const uint8_t* scales, const float* const* activations,
                   float* const* y, uint32_t num_rows, uint32_t first_record, uint32_t end_record,
                   const uint8_t* next, uint32_t prefetch_bytes) {
    in_blocks<Lanes::kBlockRows>(num_rows, [&](auto rows, uint32_t first) {
      down_rows<F, rows.kCount, Scale>(records, scales, activations + first, y + first, first_record,
                                       end_record, next, prefetch_bytes);
    });
  }

  // ---- tile kernels ---------------------------------------------------------------------------------------

  // Pairs [kFirst, kFirst + kNum) of a record into columns [column, column + 16) of a tile whose odd rows
  // start at row half_rows.
  template <class F, int kFirst, int kNum>
  static DUCK_INLINE void decode_pairs(const uint8_t* record, float* tile, uint32_t half_rows) {
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma GCC unroll 16
      for (int pair = 0; pair < kNum; ++pair) {
        Floats low, high;
        F::template decode<false>(record, kFirst + pair, vector, low, high);
        float* to = tile + pair * kTileLanes + vector * kLanes;
        Lanes::store(to, low);
        Lanes::store(to + static_cast<size_t>(half_rows) * kTileLanes, high);
      }
    }
  }

  template <class F>
  static void tile_of_streams(const uint8_t* records, size_t distance, size_t stride, uint32_t num_records,
                              float* tile) {
    const uint32_t half_rows = num_records * kPairs;
    for (uint32_t record = 0; record < num_records; ++record) {
      const uint8_t* at = records + record * stride;
      prefetch(at + kTilePrefetchBytes, F::kRecordBytes);
      prefetch(at + distance + kTilePrefetchBytes, F::kRecordBytes);
      float* to = tile + record * kPairs * kTileLanes;
      decode_pairs<F, 0, kPairs>(at, to, half_rows);
      decode_pairs<F, 0, kPairs>(at + distance, to + kStripeChannels, half_rows);
    }
  }

  template <class F>
  static void tile_of_down(const uint8_t* record, float* tile) {
    prefetch(record + kTilePrefetchBytes, F::kRecordBytes);
    decode_pairs<F, 0, 8>(record, tile, 8);
    decode_pairs<F, 8, 8>(record, tile + kStripeChannels, 8);
  }

  // Two registers of sums a row, even rows of the tile first; their sums wait in memory for those of the odd.
  template <int kRows>
  static void multiply_rows(const float* panel, const float* tile, uint32_t half_rows, const float* scales,
                            float* const* out) {
    for (uint32_t lane = 0; lane < kTileLanes; lane += 2 * kLanes) {
      Floats even[kRows][2], sums[kRows][2];
      multiply_half<kRows>(panel, tile + lane, half_rows, even);
      multiply_half<kRows>(panel + kPanelOdd, tile + half_rows * kTileLanes + lane, half_rows, sums);
      const Floats first = Lanes::load(scales + lane), second = Lanes::load(scales + lane + kLanes);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        float* to = out[row] + lane;
        Lanes::store(to, add_scaled(Lanes::load(to), even[row][0], sums[row][0], first));
        to += kLanes;
        Lanes::store(to, add_scaled(Lanes::load(to), even[row][1], sums[row][1], second));
      }
    }
  }

  template <int kRows>
  static DUCK_INLINE void multiply_half(const float* panel, const float* tile, uint32_t half_rows,
                                        Floats (&sums)[kRows][2]) {
    Floats a[kRows][2];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) a[row][0] = a[row][1] = Lanes::zero();
    for (uint32_t k = 0; k < half_rows; ++k) {
      const Floats first = Lanes::load(tile), second = Lanes::load(tile + kLanes);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const Floats value = Lanes::broadcast(panel[row * kPanelStride]);
        a[row][0] = Lanes::fma(first, value, a[row][0]);
        a[row][1] = Lanes::fma(second, value, a[row][1]);
      }
      tile += kTileLanes;
      ++panel;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      sums[row][0] = a[row][0];
      sums[row][1] = a[row][1];
    }
  }

  static void multiply(const float* panel, const float* tile, uint32_t half_rows, const float* scales,
                       float* const* out, uint32_t num_rows) {
    in_blocks<Lanes::kTileRows>(num_rows, [&](auto rows, uint32_t first) {
      multiply_rows<rows.kCount>(panel + first * kPanelStride, tile, half_rows, scales, out + first);
    });
  }

  static void fill_panel(const float* values, uint32_t count, float* panel) {
    uint32_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      Lanes::store_even_odd(values + i, panel + i / 2, panel + kPanelOdd + i / 2);
    }
    for (; i < count; i += 2) {
      panel[i / 2] = values[i];
      panel[kPanelOdd + i / 2] = values[i + 1];
    }
  }

  // ---- SiLU -----------------------------------------------------------------------------------------------

  // e^t by t = n ln 2 + r and the Taylor series of e^r to r^7: |r| <= 0.347, so what is left out is under 0.1
  // ulp. |t| <= 88.
  static DUCK_INLINE Floats exp(Floats t) {
    const Floats n = Lanes::round(Lanes::mul(t, Lanes::broadcast(0x1.715476p+0f)));  // t / ln 2
    Floats r = Lanes::fma(n, Lanes::broadcast(-0x1.62e4p-1f), t);                    // ln 2, its upper bits
    r = Lanes::fma(n, Lanes::broadcast(-0x1.7f7d1cp-20f), r);                        // and the rest
    Floats p = Lanes::broadcast(1.0f / 5040);
    p = Lanes::fma(p, r, Lanes::broadcast(1.0f / 720));
    p = Lanes::fma(p, r, Lanes::broadcast(1.0f / 120));
    p = Lanes::fma(p, r, Lanes::broadcast(1.0f / 24));
    p = Lanes::fma(p, r, Lanes::broadcast(1.0f / 6));
    p = Lanes::fma(p, r, Lanes::broadcast(0.5f));
    p = Lanes::fma(p, r, Lanes::broadcast(1.0f));
    p = Lanes::fma(p, r, Lanes::broadcast(1.0f));
    return Lanes::mul(p, Lanes::power_of_two(n));
  }

  // g / (1 + e^-g). Below -88 e^-g is infinity: -0, and NaN for minus infinity as in the exact formula.
  static DUCK_INLINE Floats silu(Floats g) {
    const Floats limit = Lanes::broadcast(88.0f);
    const Floats minus_g = Lanes::negate(g);
    const Floats t = Lanes::max(Lanes::min(minus_g, limit), Lanes::broadcast(-87.0f));
    const Floats e = Lanes::select_less(limit, minus_g, Lanes::broadcast(__builtin_inff()), exp(t));
    return Lanes::div(g, Lanes::add(Lanes::broadcast(1.0f), e));
  }

  // The power of two goes in first, so that small factors do not underflow.
  static void activate(const float* dots, float weight, float prescale, uint32_t num_channels,
                       float* activations) {
    for (uint32_t lane = 0; lane < kStripeChannels; lane += kLanes) {
      const Floats gate = Lanes::load(dots + lane), up = Lanes::load(dots + kStripeChannels + lane);
      const Floats scaled = Lanes::mul(silu(gate), Lanes::broadcast(prescale));
      const Floats a = Lanes::mul(Lanes::mul(scaled, up), Lanes::broadcast(weight));
      const Floats smallest = Lanes::broadcast(kSmallestActivation * prescale);
      Lanes::store(activations + lane, Lanes::select_less(Lanes::abs(a), smallest, Lanes::zero(), a));
    }
    for (uint32_t lane = num_channels; lane < kStripeChannels; ++lane) activations[lane] = 0.0f;
  }

  template <class F>
  static constexpr FormatKernels format_kernels() {
    return {&dots<F, 1>,         &dots<F, 2>,     &down<F, BlockScale>, &down<F, ChannelScales>,
            &tile_of_streams<F>, &tile_of_down<F>};
  }

  static constexpr KernelTable table(Isa isa) {
    return {isa,
            {format_kernels<typename Lanes::Fp9>(), format_kernels<typename Lanes::Fp8>(),
             format_kernels<typename Lanes::Bf16>(), format_kernels<typename Lanes::Fp8Normal>(),
             format_kernels<F32>()},
            &activate,
            &multiply,
            &fill_panel};
  }
};

}  // namespace duck
