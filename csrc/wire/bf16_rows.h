// f32 to bf16 and back: one loop, which the compiler vectorizes with the flags of each file that includes it
// (wire/bf16_rows.cpp and those under wire/<isa>), all with the same bits. Called by wire/frame.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/experts.h"

namespace duck::wire {

struct Bf16Rows {
  void (*encode)(const float* values, size_t count, uint8_t* out);
  void (*decode)(const uint8_t* in, size_t count, float* values);
};

// The table of an ISA. Calling its functions is right only where isa_available(isa).
const Bf16Rows& bf16_rows(Isa isa);

namespace scalar {
extern const Bf16Rows kBf16Rows;
}
namespace avx2 {
extern const Bf16Rows kBf16Rows;
}
namespace avx512 {
extern const Bf16Rows kBf16Rows;
}

// In every file that includes this a copy of its own.
namespace {

typedef uint16_t Half __attribute__((may_alias, aligned(1)));
typedef uint32_t Word __attribute__((may_alias));

[[maybe_unused]] void encode_bf16_loop(const float* values, size_t count, uint8_t* out) {
  const Word* words = reinterpret_cast<const Word*>(values);
  Half* halves = reinterpret_cast<Half*>(out);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = words[i];
    const uint32_t nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t rounded = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : nearest;
    halves[i] = static_cast<uint16_t>(rounded >> 16);
  }
}

[[maybe_unused]] void decode_bf16_loop(const uint8_t* in, size_t count, float* values) {
  Word* words = reinterpret_cast<Word*>(values);
  const Half* halves = reinterpret_cast<const Half*>(in);
  for (size_t i = 0; i < count; ++i) words[i] = uint32_t{halves[i]} << 16;
}

}  // namespace
}  // namespace duck::wire
