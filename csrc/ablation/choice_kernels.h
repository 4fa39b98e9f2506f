// The direct kernel of lane_kernels.h for one row, with its choices as parameters. With production's choices
// it is the same operations in the same order.
#pragma once

#include "ablation/variants.h"
#include "kernels/lane_kernels.h"

namespace duck::ablation {

struct Choices {
  int chains = 2;            // 1, 2 or 4 chains of sums: rows modulo that
  int locality = 3;          // of __builtin_prefetch: 3 is T0, 2 T1, 0 NTA; -1: no prefetch
  bool scale_first = false;  // x * scale before the dot, else the block's sum * scale
  bool scaled_x = true;      // x comes multiplied by prescale; else the sums are multiplied by it
};

template <class Lanes, class F, Choices kChoices>
struct ChoiceKernels {
  using Floats = typename Lanes::Floats;
  using Base = LaneKernels<Lanes>;
  static constexpr int kLanes = Lanes::kLanes;
  static constexpr int kVectors = kStripeChannels / kLanes;
  static constexpr int kPartsAtOnce = Lanes::parts_at_once(1);
  static constexpr int kStreams = kPartsAtOnce * kVectors;
  static constexpr int kChains = kChoices.chains;
  static_assert(Lanes::vectors_at_once(1) == kVectors);

  static DUCK_INLINE void prefetch_ahead(const uint8_t* records, uint32_t record, uint32_t end,
                                         uint32_t stride, const uint8_t* next, uint32_t num_bytes) {
    if constexpr (kChoices.locality >= 0) {
      const uint8_t* ahead = Base::ahead_of(records, record, end, stride, next, num_bytes);
      for (uint32_t i = 0; i < stride; i += 64) __builtin_prefetch(ahead + i, 0, kChoices.locality);
    }
  }

  // Pairs [kFirst, kFirst + kNum) of the records; x[s] from pair 0.
  template <int kFirst, int kNum>
  static DUCK_INLINE void add_products(const uint8_t* const (&records)[kPartsAtOnce],
                                       const float* const (&x)[kPartsAtOnce],
                                       Floats (&sums)[kStreams][kChains]) {
#pragma GCC unroll 16
    for (int pair = 0; pair < kNum; ++pair) {
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; ++s) {
        const float* row = x[kChoices.scale_first ? s / kVectors : 0];
        Floats low, high;
        F::template decode<false>(records[s / kVectors], kFirst + pair, s % kVectors, low, high);
        Floats& even = sums[s][2 * pair % kChains];
        even = Lanes::fma(low, Lanes::broadcast(row[2 * pair]), even);
        Floats& odd = sums[s][(2 * pair + 1) % kChains];
        odd = Lanes::fma(high, Lanes::broadcast(row[2 * pair + 1]), odd);
      }
    }
  }

  static DUCK_INLINE void clear(Floats (&sums)[kStreams][kChains]) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) sums[s][chain] = Lanes::zero();
    }
  }

  static DUCK_INLINE Floats sum_of(const Floats (&chains)[kChains]) {
    if constexpr (kChains == 1) return chains[0];
    if constexpr (kChains == 2) return Lanes::add(chains[0], chains[1]);
    if constexpr (kChains == 4) {
      return Lanes::add(Lanes::add(chains[0], chains[1]), Lanes::add(chains[2], chains[3]));
    }
  }

  static DUCK_INLINE float scale_of(const uint8_t* scales, uint32_t block) {
    const float scale = Base::load_f32(scales, block) * F::kPostscale;
    return kChoices.scaled_x ? scale : scale * prescale(WeightFormat::kFp9);
  }

  // One part of a unit: records [first_record, end_record) are at most kPartBlocks scale blocks.
  static void dots2(const Stream& stream, const float* const* rows_x, uint32_t, float* dots) {
    constexpr uint32_t kStride = 2 * F::kRecordBytes;
    for (int p = 0; p < 2; p += kPartsAtOnce) {
      Floats total[kStreams], sums[kStreams][kChains];
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; ++s) total[s] = Lanes::zero();
      clear(sums);
      for (uint32_t first = stream.first_record; first < stream.end_record; first += kRecordsPerBlock) {
        const uint32_t left = stream.end_record - first;
        const uint32_t end = first + (left < kRecordsPerBlock ? left : kRecordsPerBlock);
        const float* block_x[kPartsAtOnce];
        float scaled[kPartsAtOnce][kScaleBlock];
        for (int i = 0; i < kPartsAtOnce; ++i) {
          block_x[i] = rows_x[0] + first * kRecordRows;
          if constexpr (kChoices.scale_first) {
            const Floats scale = Lanes::broadcast(scale_of(stream.scales[p + i], first / kRecordsPerBlock));
            for (uint32_t k = 0; k < (end - first) * kRecordRows; k += kLanes) {
              Lanes::store(scaled[i] + k, Lanes::mul(Lanes::load(block_x[i] + k), scale));
            }
            block_x[i] = scaled[i];
          } else {
            (void)scaled;
          }
        }
        for (uint32_t record = first; record < end; ++record) {
          if (p == 0) {
            prefetch_ahead(stream.records, record, stream.end_record, kStride, stream.next,
                           stream.prefetch_bytes);
          }
          const uint8_t* records[kPartsAtOnce];
          const float* x[kPartsAtOnce];
          for (int i = 0; i < kPartsAtOnce; ++i) {
            records[i] = stream.records + static_cast<size_t>(record) * kStride + (p + i) * F::kRecordBytes;
            x[i] = block_x[i] + (record - first) * kRecordRows;
          }
          add_products<0, kRecordRows / 2>(records, x, sums);
        }
        if constexpr (!kChoices.scale_first) {
#pragma GCC unroll 4
          for (int s = 0; s < kStreams; ++s) {
            const float scale = scale_of(stream.scales[p + s / kVectors], first / kRecordsPerBlock);
            total[s] = Lanes::add(total[s], Lanes::mul(sum_of(sums[s]), Lanes::broadcast(scale)));
          }
          clear(sums);
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; ++s) {
        Lanes::store(dots + (p * kVectors + s) * kLanes, kChoices.scale_first ? sum_of(sums[s]) : total[s]);
      }
    }
  }

  template <int kTile>
  static DUCK_INLINE void down_tile(const uint8_t* record, const float* activations, float* y, float scale) {
    float* out = y + kTile * kStripeChannels;
    Floats chains[kVectors][kChains];
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) chains[vector][chain] = Lanes::zero();
      if (kChoices.scale_first) chains[vector][0] = Lanes::load(out + vector * kLanes);
    }
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; ++pair) {
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; ++vector) {
        Floats low, high;
        F::template decode<false>(record, kTile * 8 + pair, vector, low, high);
        Floats& even = chains[vector][2 * pair % kChains];
        even = Lanes::fma(low, Lanes::broadcast(activations[2 * pair]), even);
        Floats& odd = chains[vector][(2 * pair + 1) % kChains];
        odd = Lanes::fma(high, Lanes::broadcast(activations[2 * pair + 1]), odd);
      }
    }
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector) {
      Floats sum = sum_of(chains[vector]);
      float* to = out + vector * kLanes;
      if (!kChoices.scale_first) sum = Lanes::add(Lanes::load(to), Lanes::mul(sum, Lanes::broadcast(scale)));
      Lanes::store(to, sum);
    }
  }

  static void down(const uint8_t* records, const uint8_t* scales, const float* const* rows_a, float* const* y,
                   uint32_t, uint32_t first, uint32_t end, const uint8_t* next, uint32_t prefetch_bytes) {
    next += static_cast<size_t>(first) * F::kRecordBytes;
    float scaled[kStripeChannels];
    const float* activations = rows_a[0];
    for (uint32_t record = first; record < end; ++record) {
      prefetch_ahead(records, record, end, F::kRecordBytes, next, prefetch_bytes);
      const float scale = Base::load_f32(scales, record / kRecordsPerBlock) * F::kPostscale;
      if constexpr (kChoices.scale_first) {
        if (record == first || record % kRecordsPerBlock == 0) {
          for (int i = 0; i < kStripeChannels; ++i) scaled[i] = rows_a[0][i] * scale;
          activations = scaled;
        }
      }
      const uint8_t* at = records + static_cast<size_t>(record) * F::kRecordBytes;
      down_tile<0>(at, activations, y[0] + record * kRecordRows, scale);
      down_tile<1>(at, activations, y[0] + record * kRecordRows, scale);
    }
  }
};

// lane_kernels.h itself for one row, over other Lanes: those that decode in another way.
template <class Lanes>
struct OneRow {
  using F = typename Lanes::Fp9;
  static void dots2(const Stream& stream, const float* const* x, uint32_t, float* dots) {
    LaneKernels<Lanes>::template dot_rows<F, 2, 1>(stream, x, dots);
  }
  static void down(const uint8_t* records, const uint8_t* scales, const float* const* activations,
                   float* const* y, uint32_t, uint32_t first, uint32_t end, const uint8_t* next,
                   uint32_t prefetch_bytes) {
    using Kernels = LaneKernels<Lanes>;
    Kernels::template down_rows<F, 1, typename Kernels::BlockScale>(records, scales, activations, y, first,
                                                                    end, next, prefetch_bytes);
  }
};

template <class Lanes, int kRows>
struct TileLanes : Lanes {
  static constexpr int kTileRows = kRows;
};

template <class Lanes, int kRows>
TileVariant tile_variant() {
  return {kRows, &LaneKernels<TileLanes<Lanes, kRows>>::multiply};
}

inline constexpr const char* kChoicesAgain = "production's choices again";

template <class Lanes, Choices kChoices>
Variant chosen(const char* name, const char* question, bool same_bits = true) {
  using Kernels = ChoiceKernels<Lanes, typename Lanes::Fp9, kChoices>;
  Variant variant{name, question};
  variant.dots2 = &Kernels::dots2;
  variant.down = &Kernels::down;
  variant.scale_x = kChoices.scaled_x;
  variant.same_bits = same_bits;
  variant.base = kChoicesAgain;
  return variant;
}

template <class Lanes>
Variant decoded(const char* name, const char* question, Layout layout) {
  Variant variant{name, question, layout};
  variant.dots2 = &OneRow<Lanes>::dots2;
  variant.down = &OneRow<Lanes>::down;
  return variant;
}

inline Variant prefetch_ahead(const char* name, int num_bytes) {
  Variant variant{name, "prefetch"};
  variant.prefetch_bytes = num_bytes;
  return variant;
}

// The variants that need no more than `Lanes`; those of its own decoders follow.
template <class Lanes>
std::vector<Variant> common_variants() {
  Variant production{"production", "production"};
  Variant prefetched{"whole expert prefetched first", "prefetch of the payload"};
  prefetched.prefetch_expert = true;
  Variant blocked{"down by blocks of 128 outputs", "down by blocks"};
  blocked.down_records = kRecordsPerBlock;
  Variant again = chosen<Lanes, Choices{}>(kChoicesAgain, "production");
  again.base = production.name;
  return {
      production,
      again,
      prefetched,
      chosen<Lanes, Choices{.scale_first = true}>("scale on x before the dot", "place of the scale", false),
      chosen<Lanes, Choices{.chains = 1}>("one chain of FMAs", "chains", false),
      chosen<Lanes, Choices{.chains = 4}>("four chains of FMAs", "chains", false),
      chosen<Lanes, Choices{.scaled_x = false}>("x unscaled, scale in the sums", "pre-scaled x"),
      blocked,
      chosen<Lanes, Choices{.locality = -1}>("no prefetch", "prefetch"),
      prefetch_ahead("prefetch 1 KiB", 1024),
      prefetch_ahead("prefetch 2 KiB", 2048),
      prefetch_ahead("prefetch 4 KiB", 4096),
      prefetch_ahead("prefetch 8 KiB", 8192),
      prefetch_ahead("prefetch 16 KiB", 16384),
      chosen<Lanes, Choices{.locality = 2}>("prefetch with hint T1", "prefetch"),
      chosen<Lanes, Choices{.locality = 0}>("prefetch with hint NTA", "prefetch"),
  };
}

template <class Lanes>
std::vector<Variant> with(std::vector<Variant> more) {
  std::vector<Variant> all = common_variants<Lanes>();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace duck::ablation
