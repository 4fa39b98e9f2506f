// The kernels of integer_kernels.h for a set of instructions that is described by `Lanes`: a struct in its
// namespace with the types Floats and Ints (kLanes numbers of 32 bits in one register) and the functions used
// below. Included by <instructions>/integer*.cpp only.
//
// One row's dot products wait for memory alone, so a line is prefetched beside each word that is multiplied
// rather than all of a record's at once: int8 on one thread of an EPYC (Zen 4), 2026-11-30, 18.5 to 20.5 GB/s
// at once, 22 to 24.6 so, of a plain read's 24.7. int8 is fastest with half of the distance.
//
// A lane is an output. Four rows of it, bytes, are one 32-bit word, which one instruction multiplies with
// four bytes of x, broadcast, and adds up. Integers are exact, so that their order is free; a group's sum
// becomes an f32 without rounding (it is below 2^20), and joins its row's chain with one FMA.
#pragma once

#include <cstdint>

#include "kernels/integer_kernels.h"
#include "kernels/lane_kernels.h"

namespace duck {

// How large the first factors of a dot product of bytes are, which decides how sums fit in 16 bits where
// there is no instruction for 32.
enum class Codes : uint8_t {
  kSmall,  // at most 15
  kTable,  // at most 24
  kBytes,  // any byte, and 128 more than its value
};

template <class Lanes>
struct IntegerKernels {
  using Base = LaneKernels<Lanes>;
  using Floats = typename Lanes::Floats;
  using Ints = typename Lanes::Ints;
  static constexpr int kLanes = Lanes::kLanes;
  static constexpr int kVectors = kStripeChannels / kLanes;
  static constexpr int kGateUp = 2;
  // From so many rows on, each part loads its x again: kept in registers for the next part, they would not
  // fit. 8 rows with AVX512-VNNI, GCC 12, one thread of a Xeon (AMX), 2026-11-30: 335 GFLOP/s, and 415 to 425
  // so.
  static constexpr int kRowsToLoadAgain = 4;

  // ---- formats --------------------------------------------------------------------------------------------

  struct F16 {
    static DUCK_INLINE Floats load(const uint8_t* scales) { return Lanes::load_f16(scales); }
  };
  struct Bf16 {
    static DUCK_INLINE Floats load(const uint8_t* scales) { return Lanes::load_bf16(scales); }
  };

  template <class ScaleType, bool kZeroPoints, Codes kCodesOf>
  struct FourBits {
    static constexpr Codes kCodes = kCodesOf;
    static constexpr bool kHasZeroPoints = kZeroPoints;
    static constexpr bool kOneScale = false, kOneDownScale = false;  // of all lanes
    static constexpr uint32_t kPairBytes = 576, kDownBytes = 320;
    static constexpr uint32_t kPrefetchParts = 1;  // of the stream's distance
    static constexpr int32_t kZero = kZeroPoints ? 1 : kCodesOf == Codes::kTable ? kMxfp4Zero : 8;
    static constexpr float kFactor = kCodesOf == Codes::kTable ? 0.5f : 1.0f;

    static DUCK_INLINE const uint8_t* codes(const uint8_t* pair, int part) { return pair + 256 * part; }
    static DUCK_INLINE Floats scale(const Stream&, uint32_t, const uint8_t* pair, int part, int vector) {
      return ScaleType::load(pair + 512 + 32 * part + 2 * kLanes * vector);
    }
    static DUCK_INLINE const uint8_t* down_codes(const uint8_t* record, int tile) {
      return record + 128 * tile;
    }
    static DUCK_INLINE Floats down_scale(const uint8_t*, uint32_t, const uint8_t* record, int tile,
                                         int vector) {
      return ScaleType::load(record + 256 + 32 * tile + 2 * kLanes * vector);
    }

    // What a pair has beside its codes, and the line of codes that word `word` is in: the first time only.
    static DUCK_INLINE void prefetch_scales(const uint8_t* pair) { Base::prefetch(pair + 512, 64); }
    static DUCK_INLINE void prefetch_word(const uint8_t* codes, int word) {
      if (word % 2 == 0) Base::prefetch(codes + 32 * word, 64);
    }

    // Calls function(word, weights) for the words of a lane, in their order.
    template <int kWords, class Function>
    static DUCK_INLINE void for_words(const uint8_t* codes, int vector, Function function) {
#pragma GCC unroll 4
      for (int pair = 0; pair < kWords / 2; ++pair) {
        const Ints bytes = Lanes::load_ints(codes + 64 * pair + 4 * kLanes * vector);
        Ints low = Lanes::low_halves(bytes);
        if constexpr (kCodes == Codes::kTable) low = Lanes::look_up(kMxfp4Codes, low);
        function(2 * pair, low);
        Ints high = Lanes::high_halves(bytes);
        if constexpr (kCodes == Codes::kTable) high = Lanes::look_up(kMxfp4Codes, high);
        function(2 * pair + 1, high);
      }
    }
  };

  template <bool kByChannel>
  struct Int8 {
    static constexpr Codes kCodes = Codes::kBytes;
    static constexpr bool kHasZeroPoints = false;
    static constexpr bool kOneScale = true, kOneDownScale = !kByChannel;
    static constexpr uint32_t kPairBytes = 1024, kDownBytes = 512;
    static constexpr uint32_t kPrefetchParts = 2;
    static constexpr int32_t kZero = kInt8CodeOfZero;
    static constexpr float kFactor = 1.0f;

    static DUCK_INLINE const uint8_t* codes(const uint8_t* pair, int part) { return pair + 512 * part; }
    static DUCK_INLINE Floats scale(const Stream& stream, uint32_t record, const uint8_t*, int part, int) {
      if constexpr (kByChannel) return Lanes::broadcast(1.0f);
      return Lanes::broadcast(Base::load_f32(stream.scales[part], record / kRecordsPerBlock));
    }
    static DUCK_INLINE const uint8_t* down_codes(const uint8_t* record, int tile) {
      return record + 256 * tile;
    }
    static DUCK_INLINE Floats down_scale(const uint8_t* scales, uint32_t record, const uint8_t*, int tile,
                                         int vector) {
      if constexpr (kByChannel) {
        return Lanes::load_bytes(scales + 4 * (kRecordRows * record + kStripeChannels * tile) +
                                 4 * kLanes * vector);
      }
      return Lanes::broadcast(Base::load_f32(scales, record / kRecordsPerBlock));
    }
    static DUCK_INLINE void prefetch_scales(const uint8_t*) {}
    static DUCK_INLINE void prefetch_word(const uint8_t* codes, int word) {
      Base::prefetch(codes + 64 * word, 64);
    }
    template <int kWords, class Function>
    static DUCK_INLINE void for_words(const uint8_t* codes, int vector, Function function) {
#pragma GCC unroll 8
      for (int word = 0; word < kWords; ++word) {
        function(word, Lanes::load_ints(codes + 64 * word + 4 * kLanes * vector));
      }
    }
  };

  // ---- products -------------------------------------------------------------------------------------------

  // out[row] = what the group `groups[row]` of kWords words gives with the codes, as f32. kPrefetch:
  // meanwhile prefetches the codes from `ahead` on.
  template <class F, int kWords, bool kPrefetch, int kRows, class GroupType>
  static DUCK_INLINE void group_sums(const uint8_t* codes, const uint8_t* ahead, const uint8_t* zero_points,
                                     int vector, const GroupType* const (&groups)[kRows],
                                     Floats (&out)[kRows]) {
    using Dot = typename Lanes::template Dot<F::kCodes>;
    Ints offsets[kRows], sums[kRows];
    if constexpr (F::kHasZeroPoints) {
      const Ints zeros = Lanes::load_halves(zero_points + kLanes / 2 * vector);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        offsets[row] = Lanes::multiply_small(zeros, Lanes::broadcast_int(groups[row]->offset));
      }
    } else {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) offsets[row] = Lanes::broadcast_int(groups[row]->offset);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) sums[row] = Dot::start(offsets[row]);
    F::template for_words<kWords>(codes, vector, [&](int word, Ints weights) __attribute__((always_inline)) {
      if constexpr (kPrefetch) F::prefetch_word(ahead, word);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        int32_t bytes;
        __builtin_memcpy(&bytes, groups[row]->values + 4 * word, 4);
        sums[row] = Dot::add(sums[row], weights, Lanes::broadcast_int(bytes));
      }
    });
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) out[row] = Lanes::to_floats(Dot::finish(sums[row], offsets[row]));
  }

  // One pass over a stream for kParts parts from `part` on and kVecs vectors of each from `vector` on.
  template <class F, int kParts, int kVecs, int kRows>
  static DUCK_INLINE void dot_pass(const Stream& stream, int first_part, int first_vector,
                                   const HiddenGroup* const* x, float* dots) {
    const HiddenGroup* rows[kRows];
    Floats sums[kParts * kVecs][kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      rows[row] = x[row] + stream.first_record;
#pragma GCC unroll 4
      for (int s = 0; s < kParts * kVecs; ++s) sums[s][row] = Lanes::zero();
    }
    const uint8_t* pair = stream.records + static_cast<size_t>(stream.first_record) * F::kPairBytes;
    for (uint32_t record = stream.first_record; record < stream.end_record; ++record) {
      // Where nothing is to be prefetched, this pair once more, which costs little.
      const uint8_t* ahead = Base::ahead_of(stream.records, record, stream.end_record, F::kPairBytes,
                                            stream.next, stream.prefetch_bytes / F::kPrefetchParts);
      if (first_part == 0 && first_vector == 0) F::prefetch_scales(ahead);
#pragma GCC unroll 4
      for (int s = 0; s < kParts * kVecs; ++s) {
        const int part = first_part + s / kVecs, vector = first_vector + s % kVecs;
        if constexpr (kRows >= kRowsToLoadAgain) __asm__ volatile("" ::: "memory");
        const uint8_t* zero_points = nullptr;
        if constexpr (F::kHasZeroPoints) zero_points = stream.scales[0] + 16 * record + 8 * part;
        Floats values[kRows];
        if (s % kVecs == 0) {
          group_sums<F, kRecordRows / 4, true>(F::codes(pair, part), F::codes(ahead, part), zero_points,
                                               vector, rows, values);
        } else {
          group_sums<F, kRecordRows / 4, false>(F::codes(pair, part), nullptr, zero_points, vector, rows,
                                                values);
        }
        const Floats scale = F::scale(stream, record, pair, part, vector);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const Floats factor = Lanes::mul(scale, Lanes::broadcast(rows[row]->scale));
          sums[s][row] = Lanes::fma(values[row], factor, sums[s][row]);
        }
      }
      pair += F::kPairBytes;
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) ++rows[row];
    }
#pragma GCC unroll 4
    for (int s = 0; s < kParts * kVecs; ++s) {
      float* to = dots + (first_part + s / kVecs) * kStripeChannels + (first_vector + s % kVecs) * kLanes;
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) Lanes::store(to + row * kGateUp * kStripeChannels, sums[s][row]);
    }
  }

  template <class F>
  static void dots(const Stream& stream, const HiddenGroup* const* x, uint32_t num_rows, float* dots) {
    Base::template in_blocks<Lanes::kIntegerRows>(num_rows, [&](auto rows, uint32_t first) {
      constexpr int kRows = rows.kCount;
      constexpr int kParts = Lanes::integer_parts(kRows), kVecs = Lanes::integer_vectors(kRows);
      Stream mine = stream;
      if (first > 0) mine.prefetch_bytes = 0;  // the first block of rows has brought it
      for (int part = 0; part < kGateUp; part += kParts) {
        for (int vector = 0; vector < kVectors; vector += kVecs) {
          dot_pass<F, kParts, kVecs, kRows>(mine, part, vector, x + first,
                                            dots + first * kGateUp * kStripeChannels);
        }
      }
    });
  }

  template <class F, int kRows>
  static void down_rows(const DownStripe* stripes, uint32_t num_stripes,
                        const StripeGroup* const* activations, float* const* y, uint32_t first_record,
                        uint32_t end_record, uint32_t prefetch_bytes) {
    for (uint32_t record = first_record; record < end_record; ++record) {
      if (prefetch_bytes > 0) {
        for (uint32_t i = 0; i < num_stripes; ++i) {
          const uint8_t* next = stripes[i].next + static_cast<size_t>(first_record) * F::kDownBytes;
          Base::prefetch(Base::ahead_of(stripes[i].records, record, end_record, F::kDownBytes, next,
                                        prefetch_bytes / F::kPrefetchParts / num_stripes),
                         F::kDownBytes);
        }
      }
#pragma GCC unroll 4
      for (int place = 0; place < 2 * kVectors; ++place) {
        const int tile = place / kVectors, vector = place % kVectors;
        const size_t output = static_cast<size_t>(record) * kRecordRows + place * kLanes;
        const StripeGroup* groups[kRows];
        Floats sums[kRows];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          groups[row] = activations[row];
          sums[row] = Lanes::load(y[row] + output);
        }
        for (uint32_t i = 0; i < num_stripes; ++i) {
          const uint8_t* at = stripes[i].records + static_cast<size_t>(record) * F::kDownBytes;
          const uint8_t* zero_points = nullptr;
          if constexpr (F::kHasZeroPoints) zero_points = stripes[i].scales + 16 * record + 8 * tile;
          Floats values[kRows];
          group_sums<F, kStripeChannels / 4, false>(F::down_codes(at, tile), nullptr, zero_points, vector,
                                                    groups, values);
          const Floats scale = F::down_scale(stripes[i].scales, record, at, tile, vector);
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            const Floats factor = Lanes::mul(scale, Lanes::broadcast(groups[row]->scale));
            sums[row] = Lanes::fma(values[row], factor, sums[row]);
            ++groups[row];
          }
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) Lanes::store(y[row] + output, sums[row]);
      }
    }
  }

  template <class F>
  static void down(const DownStripe* stripes, uint32_t num_stripes, const StripeGroup* const* activations,
                   float* const* y, uint32_t num_rows, uint32_t first_record, uint32_t end_record,
                   uint32_t prefetch_bytes) {
    Base::template in_blocks<Lanes::kIntegerRows>(num_rows, [&](auto rows, uint32_t first) {
      down_rows<F, rows.kCount>(stripes, num_stripes, activations + first, y + first, first_record,
                                end_record, first > 0 ? 0 : prefetch_bytes);
    });
  }

  // ---- rounding -------------------------------------------------------------------------------------------

  template <int kValues>
  static DUCK_INLINE void quantise(const float* values, int32_t zero, float factor, Group<kValues>& group) {
    int32_t bits[kValues];
    __builtin_memcpy(bits, values, sizeof(bits));
    int32_t largest_bits = 0;
    for (int i = 0; i < kValues; ++i) {
      const int32_t magnitude = bits[i] & INT32_MAX;
      largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
    }
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    if (!(largest >= kSmallestGroup && largest <= __FLT_MAX__)) {
      __builtin_memset(&group, 0, sizeof(group));
      if (!(largest < kSmallestGroup)) group.scale = __builtin_nanf("");
      return;
    }
    const Floats inverse = Lanes::broadcast(kLargestByte / largest);
    int32_t rounded[kValues];
    for (int i = 0; i < kValues; i += kLanes) {
      Lanes::store_ints(rounded + i, Lanes::round_to_ints(Lanes::mul(Lanes::load(values + i), inverse)));
    }
    int32_t sum = 0;
    for (int i = 0; i < kValues; ++i) {
      group.values[i] = static_cast<int8_t>(rounded[i]);
      sum += rounded[i];
    }
    group.scale = largest / kLargestByte * factor;
    group.offset = -zero * sum;
  }

  static void quantise_hidden(const float* values, uint32_t num_groups, int32_t zero, float factor,
                              HiddenGroup* groups) {
    for (uint32_t i = 0; i < num_groups; ++i) {
      quantise<kRecordRows>(values + static_cast<size_t>(i) * kRecordRows, zero, factor, groups[i]);
    }
  }
  static void quantise_stripe(const float* values, int32_t zero, float factor, StripeGroup* group) {
    quantise<kStripeChannels>(values, zero, factor, *group);
  }

  template <class F>
  static constexpr IntegerFormat format() {
    return {&dots<F>, &down<F>, F::kZero, F::kFactor};
  }
  static constexpr IntegerTable table(const char* name) {
    return {name,
            {format<Int8<false>>(), format<Int8<true>>(), format<FourBits<F16, false, Codes::kSmall>>(),
             format<FourBits<Bf16, false, Codes::kSmall>>(), format<FourBits<F16, true, Codes::kSmall>>(),
             format<FourBits<Bf16, true, Codes::kSmall>>(), format<FourBits<Bf16, false, Codes::kTable>>()},
            &quantise_hidden,
            &quantise_stripe};
  }
};

}  // namespace duck
