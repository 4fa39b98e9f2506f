// What an instruction set offers to ceilings.cpp: loops that do nothing but read, write, copy or compute, so
// that their speed is a ceiling for everything else. One table per ISA, each in its own namespace and
// compiled with its own flags, like kernels/<isa>.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/experts.h"

namespace duck::bench {

// Every loop takes lengths that are multiples of this, and data aligned to 64 bytes.
inline constexpr size_t kGranuleBytes = 4096;

inline constexpr int kReadVariants = 4;
inline constexpr const char* kReadNames[kReadVariants] = {"plain", "prefetch", "streams", "streams_prefetch"};
inline constexpr int kWriteVariants = 3;  // of fill and of copy
inline constexpr const char* kWriteNames[kWriteVariants] = {"plain", "nontemporal", "libc"};

// Most steps of an FMA loop: beyond them its sums are no longer exact.
inline constexpr uint32_t kMostFmaSteps = 1u << 22;

// fma_loop: each of kFmaChains registers is a chain x <- x * a + b, x <- x * c + d, twice per step. With
// these constants x becomes 2x + 1 and then x + 1: exact, a multiplication that counts, and no chain is like
// another.
inline constexpr int kFmaChains = 12;
struct FmaConstants {
  float a = 2.0f, b = 1.0f, c = 0.5f, d = 0.5f;
};

struct LoopTable {
  Isa isa;
  uint32_t float_lanes;
  // The exclusive or of the 64-bit words.
  uint64_t (*read[kReadVariants])(const uint8_t* data, size_t bytes);
  void (*fill[kWriteVariants])(uint8_t* data, size_t bytes, uint8_t value);
  void (*copy[kWriteVariants])(uint8_t* to, const uint8_t* from, size_t bytes);
  // The sum of all lanes of all chains after `steps` steps; lane l of chain c starts at c * float_lanes + l.
  // A step is 4 * kFmaChains * float_lanes floating-point operations (two multiplications, two additions).
  double (*fma_loop)(const FmaConstants& constants, uint32_t steps);
};

// The table of an ISA. Calling its loops is right only where isa_available(isa).
const LoopTable& loop_table(Isa isa);

namespace scalar {
extern const LoopTable kLoops;
}
namespace avx2 {
extern const LoopTable kLoops;
}
namespace avx512 {
extern const LoopTable kLoops;
}

}  // namespace duck::bench
