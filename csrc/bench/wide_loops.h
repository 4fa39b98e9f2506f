// The loops of loop_table.h for an ISA that is described by `Wide`: a struct in that ISA's namespace with the
// types Word (a register of bytes) and Floats, and the functions used below. Included by <isa>/loops.cpp
// only. Every function here is a template over Wide, so that each copy is named after its ISA.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "bench/loop_table.h"

#define DUCK_INLINE __attribute__((always_inline)) inline

namespace duck::bench {

template <class Wide>
struct WideLoops {
  using Word = typename Wide::Word;
  using Floats = typename Wide::Floats;

  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kBlockBytes = 512;  // read, written or copied per iteration
  static constexpr size_t kPrefetchBytes = 2048;
  static constexpr int kSums = 8;

  // The compiler takes memory as changed here: it may neither merge iterations nor make them a call of
  // memset.
  static DUCK_INLINE void keep_stores() { __asm__ volatile("" ::: "memory"); }

  // Reads kStreams equal parts of the data side by side.
  template <int kStreams, bool kPrefetch>
  static uint64_t read(const uint8_t* data, size_t bytes) {
    constexpr size_t kPart = kBlockBytes / kStreams;  // of a stream, per iteration
    constexpr int kSumsOfStream = kSums / kStreams;
    static_assert(kGranuleBytes / kStreams % kPart == 0);
    const size_t stream_bytes = bytes / kStreams;
    Word sums[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) sums[i] = Wide::zero();
    for (size_t at = 0; at < stream_bytes; at += kPart) {
#pragma GCC unroll 4
      for (int stream = 0; stream < kStreams; ++stream) {
        const uint8_t* part = data + stream * stream_bytes + at;
        if (kPrefetch) {
#pragma GCC unroll 8
          for (size_t i = 0; i < kPart; i += kLineBytes) __builtin_prefetch(part + kPrefetchBytes + i);
        }
#pragma GCC unroll 32
        for (size_t i = 0; i < kPart / Wide::kBytes; ++i) {
          Word& sum = sums[stream * kSumsOfStream + i % kSumsOfStream];
          sum = Wide::exclusive_or(sum, Wide::load(part + i * Wide::kBytes));
        }
      }
    }
    Word all = sums[0];
#pragma GCC unroll 8
    for (int i = 1; i < kSums; ++i) all = Wide::exclusive_or(all, sums[i]);
    uint64_t words[Wide::kBytes / 8];
    __builtin_memcpy(words, &all, sizeof words);
    uint64_t result = 0;
    for (uint64_t word : words) result ^= word;
    return result;
  }

  template <bool kNontemporal>
  static DUCK_INLINE void put(uint8_t* to, Word word) {
    if (kNontemporal) {
      Wide::stream(to, word);
    } else {
      Wide::store(to, word);
    }
  }

  template <bool kNontemporal>
  static void fill(uint8_t* data, size_t bytes, uint8_t value) {
    const Word word = Wide::broadcast_byte(value);
    for (size_t at = 0; at < bytes; at += kBlockBytes) {
#pragma GCC unroll 32
      for (size_t i = 0; i < kBlockBytes; i += Wide::kBytes) put<kNontemporal>(data + at + i, word);
      keep_stores();
    }
    if (kNontemporal) _mm_sfence();
  }

  template <bool kNontemporal>
  static void copy(uint8_t* to, const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kBlockBytes) {
#pragma GCC unroll 32
      for (size_t i = 0; i < kBlockBytes; i += Wide::kBytes) {
        put<kNontemporal>(to + at + i, Wide::load(from + at + i));
      }
      keep_stores();
    }
    if (kNontemporal) _mm_sfence();
  }

  static void fill_libc(uint8_t* data, size_t bytes, uint8_t value) { memset(data, value, bytes); }
  static void copy_libc(uint8_t* to, const uint8_t* from, size_t bytes) { memcpy(to, from, bytes); }

  static double fma_loop(const FmaConstants& constants, uint32_t steps) {
    constexpr int kLanes = Wide::kBytes / 4;
    float lanes[kFmaChains * kLanes];
    for (int i = 0; i < kFmaChains * kLanes; ++i) lanes[i] = static_cast<float>(i);
    Floats chains[kFmaChains];
#pragma GCC unroll 12
    for (int i = 0; i < kFmaChains; ++i) chains[i] = Wide::load_floats(lanes + i * kLanes);
    const Floats a = Wide::broadcast(constants.a), b = Wide::broadcast(constants.b);
    const Floats c = Wide::broadcast(constants.c), d = Wide::broadcast(constants.d);
    for (uint32_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
      for (int i = 0; i < kFmaChains; ++i) chains[i] = Wide::fma(chains[i], a, b);
#pragma GCC unroll 12
      for (int i = 0; i < kFmaChains; ++i) chains[i] = Wide::fma(chains[i], c, d);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kFmaChains; ++i) Wide::store_floats(lanes + i * kLanes, chains[i]);
    double sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
  }

  static constexpr LoopTable table(Isa isa) {
    return {isa,
            Wide::kBytes / 4,
            {&read<1, false>, &read<1, true>, &read<4, false>, &read<4, true>},
            {&fill<false>, &fill<true>, &fill_libc},
            {&copy<false>, &copy<true>, &copy_libc},
            &fma_loop};
  }
};

}  // namespace duck::bench
