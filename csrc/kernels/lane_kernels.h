// The two kernels of kernel_table.h over 16 lanes side by side, for an ISA that is described by `Lanes`: a
// struct in that ISA's namespace with the types Floats (16 f32), Signs (16 sign words) and the functions used
// below. Included by <isa>/kernels.cpp only. Every function here is a template over Lanes, so each copy is
// named after its ISA and the linker can never put an AVX2 copy where an older CPU runs.
//
// Lanes are channels in gate and up, outputs in down; x, or the activation, is broadcast. Rows go in blocks
// of up to four that share each decoded weight. A row's sums are the same operations in the same order
// whatever block it is in, hence the same bits.
#pragma once

#include <cstdint>

#include "kernels/fp9.h"
#include "kernels/kernel_table.h"

#define DUCK_INLINE __attribute__((always_inline)) inline

namespace duck {

template <class Lanes>
struct LaneKernels {
  using Floats = typename Lanes::Floats;
  using Signs = typename Lanes::Signs;

  static constexpr int kMaxRows = 4;
  static constexpr uint32_t kRecordsPerBlock = kScaleBlock / kRecordRows;
  static constexpr int kPrefetchBytes = 2048;  // ahead in a stream of records

  static DUCK_INLINE float load_f32(const uint8_t* bytes, uint32_t index) {
    float value;
    __builtin_memcpy(&value, bytes + 4 * index, 4);
    return value;
  }

  static DUCK_INLINE void prefetch(const uint8_t* stream, int num_bytes) {
    for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(stream + kPrefetchBytes + i);
  }

  // sums[part][row] += sum over i of weights(part)[i] * x[row][i], i < kNum: kParts matrices of [kNum][16]
  // weights that share x. signs[part]: bit 31 of each lane is the sign of i = 0, bit 30 of i = 1 and so on.
  template <int kParts, int kRows, int kNum>
  static DUCK_INLINE void add_products(const uint8_t* const (&magnitudes)[kParts], Signs (&signs)[kParts],
                                       const float* const (&x)[kRows], Floats (&sums)[kParts][kRows]) {
#pragma GCC unroll 4
    for (int i = 0; i < kNum; ++i) {
      Floats weights[kParts];
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        weights[part] = Lanes::decode(magnitudes[part] + i * kStripeChannels, signs[part]);
        signs[part] = Lanes::next_row(signs[part]);
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Floats value = Lanes::broadcast(x[row][i]);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          sums[part][row] = Lanes::fma(weights[part], value, sums[part][row]);
        }
      }
    }
  }

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

  // silu(gate) * up * weight * 2^64. The power of two goes in first, so that small factors do not underflow.
  static DUCK_INLINE Floats activate(Floats gate, Floats up, float weight) {
    const Floats scaled = Lanes::mul(silu(gate), Lanes::broadcast(kActivationPrescale));
    const Floats a = Lanes::mul(Lanes::mul(scaled, up), Lanes::broadcast(weight));
    const Floats smallest = Lanes::broadcast(kSmallestActivation * kActivationPrescale);
    return Lanes::select_less(Lanes::abs(a), smallest, Lanes::zero(), a);
  }

  template <int kRows>
  static void gate_up_rows(const Unit& unit, const float* const* rows_x, const float* weights,
                           float* const* activations, uint32_t channel_offset, uint32_t num_channels) {
    Floats dots[2][kRows];
    const float* x[kRows];
    for (int row = 0; row < kRows; ++row) {
      dots[0][row] = dots[1][row] = Lanes::zero();
      x[row] = rows_x[row];
    }
    for (uint32_t first = 0; first < unit.num_records; first += kRecordsPerBlock) {
      const uint32_t end =
          first + kRecordsPerBlock < unit.num_records ? first + kRecordsPerBlock : unit.num_records;
      Floats sums[2][kRows];
      gate_up_block<kRows>(unit, x, first, end, sums);
      const uint32_t block = first / kRecordsPerBlock;
      const Floats gate_scale = Lanes::broadcast(load_f32(unit.gate_scales, block) * kSumPostscale);
      const Floats up_scale = Lanes::broadcast(load_f32(unit.up_scales, block) * kSumPostscale);
      for (int row = 0; row < kRows; ++row) {
        dots[0][row] = Lanes::add(dots[0][row], Lanes::mul(sums[0][row], gate_scale));
        dots[1][row] = Lanes::add(dots[1][row], Lanes::mul(sums[1][row], up_scale));
      }
    }
    for (int row = 0; row < kRows; ++row) {
      float* out = activations[row] + channel_offset;
      Lanes::store(out, activate(dots[0][row], dots[1][row], weights[row]));
      for (uint32_t lane = num_channels; lane < kStripeChannels; ++lane) out[lane] = 0.0f;
    }
  }

  // The sums of one scale block, records [first, end). One row: gate and up side by side, which gives the two
  // short FMA chains each something to overlap with. Several rows: one after the other, or their sums leave
  // the registers.
  template <int kRows>
  static DUCK_INLINE void gate_up_block(const Unit& unit, const float* (&x)[kRows], uint32_t first,
                                        uint32_t end, Floats (&sums)[2][kRows]) {
    for (int row = 0; row < kRows; ++row) sums[0][row] = sums[1][row] = Lanes::zero();
    if constexpr (kRows <= Lanes::kRowsWithTwoParts) {
      for (uint32_t record = first; record < end; ++record) {
        const uint8_t* gate = unit.gate_up + 2 * static_cast<size_t>(record) * kRecordBytes;
        prefetch(gate, 2 * kRecordBytes);
        const uint8_t* const magnitudes[2] = {gate, gate + kRecordBytes};
        Signs signs[2] = {Lanes::load_signs(gate + kRecordMagnitudes),
                          Lanes::load_signs(gate + kRecordBytes + kRecordMagnitudes)};
        const float* record_x[kRows];
        for (int row = 0; row < kRows; ++row) record_x[row] = x[row] + record * kRecordRows;
        add_products<2, kRows, kRecordRows>(magnitudes, signs, record_x, sums);
      }
    } else {
      for (int part = 0; part < 2; ++part) {
        Floats part_sums[1][kRows];
        for (int row = 0; row < kRows; ++row) part_sums[0][row] = Lanes::zero();
        for (uint32_t record = first; record < end; ++record) {
          const uint8_t* const magnitudes[1] = {unit.gate_up +
                                                (2 * static_cast<size_t>(record) + part) * kRecordBytes};
          prefetch(magnitudes[0], kRecordBytes);
          Signs signs[1] = {Lanes::load_signs(magnitudes[0] + kRecordMagnitudes)};
          const float* record_x[kRows];
          for (int row = 0; row < kRows; ++row) record_x[row] = x[row] + record * kRecordRows;
          add_products<1, kRows, kRecordRows>(magnitudes, signs, record_x, part_sums);
        }
        for (int row = 0; row < kRows; ++row) sums[part][row] = part_sums[0][row];
      }
    }
  }

  static DUCK_INLINE void add_scaled(float* y, Floats sums, Floats scale) {
    Lanes::store(y, Lanes::add(Lanes::load(y), Lanes::mul(sums, scale)));
  }

  // A record of down is two tiles of [16 channels][16 outputs].
  template <int kRows>
  static void down_rows(const Unit& unit, float* const* activations, float* const* rows_y,
                        uint32_t channel_offset, uint32_t first_record, uint32_t end_record) {
    const float* a[kRows];
    for (int row = 0; row < kRows; ++row) a[row] = activations[row] + channel_offset;
    for (uint32_t record = first_record; record < end_record; ++record) {
      const uint8_t* tile = unit.down + static_cast<size_t>(record) * kRecordBytes;
      prefetch(tile, kRecordBytes);
      const Floats scale =
          Lanes::broadcast(load_f32(unit.down_scales, record / kRecordsPerBlock) * kSumPostscale);
      const Signs signs = Lanes::load_signs(tile + kRecordMagnitudes);
      const uint32_t output = record * kRecordRows;
      if constexpr (kRows <= Lanes::kRowsWithTwoParts) {
        Floats sums[2][kRows];
        for (int row = 0; row < kRows; ++row) sums[0][row] = sums[1][row] = Lanes::zero();
        const uint8_t* const magnitudes[2] = {tile, tile + kRecordMagnitudes / 2};
        Signs tile_signs[2] = {signs, Lanes::skip_16_rows(signs)};
        add_products<2, kRows, kStripeChannels>(magnitudes, tile_signs, a, sums);
        for (int row = 0; row < kRows; ++row) {
          add_scaled(rows_y[row] + output, sums[0][row], scale);
          add_scaled(rows_y[row] + output + kStripeChannels, sums[1][row], scale);
        }
      } else {
        for (int part = 0; part < 2; ++part) {
          Floats sums[1][kRows];
          for (int row = 0; row < kRows; ++row) sums[0][row] = Lanes::zero();
          const uint8_t* const magnitudes[1] = {tile + part * (kRecordMagnitudes / 2)};
          Signs tile_signs[1] = {part == 0 ? signs : Lanes::skip_16_rows(signs)};
          add_products<1, kRows, kStripeChannels>(magnitudes, tile_signs, a, sums);
          for (int row = 0; row < kRows; ++row) {
            add_scaled(rows_y[row] + output + part * kStripeChannels, sums[0][row], scale);
          }
        }
      }
    }
  }

  static void gate_up(const Unit& unit, const PairRows& pairs, uint32_t channel_offset,
                      uint32_t num_channels) {
    static constexpr decltype(&gate_up_rows<1>) kByRows[] = {&gate_up_rows<1>, &gate_up_rows<2>,
                                                             &gate_up_rows<3>, &gate_up_rows<4>};
    for (uint32_t pair = 0; pair < pairs.count; pair += kMaxRows) {
      const uint32_t rows = pairs.count - pair < kMaxRows ? pairs.count - pair : kMaxRows;
      kByRows[rows - 1](unit, pairs.x + pair, pairs.weights + pair, pairs.activations + pair, channel_offset,
                        num_channels);
    }
  }

  static void down(const Unit& unit, const PairRows& pairs, uint32_t channel_offset, uint32_t first_record,
                   uint32_t end_record) {
    static constexpr decltype(&down_rows<1>) kByRows[] = {&down_rows<1>, &down_rows<2>, &down_rows<3>,
                                                          &down_rows<4>};
    for (uint32_t pair = 0; pair < pairs.count; pair += kMaxRows) {
      const uint32_t rows = pairs.count - pair < kMaxRows ? pairs.count - pair : kMaxRows;
      kByRows[rows - 1](unit, pairs.activations + pair, pairs.y + pair, channel_offset, first_record,
                        end_record);
    }
  }
};

}  // namespace duck
