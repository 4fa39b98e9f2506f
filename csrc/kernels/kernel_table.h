// What an ISA offers to experts.cpp: two kernels over one unit (expert, stripe). One table per ISA, each in
// its own namespace and compiled with its own flags; select_isa.cpp knows which of them this machine can run.
//
// Values inside the kernels are scaled by powers of two, which is exact: a decoded weight is w * 2^-104
// (fp9.h), an activation is held as x * 2^64, a sum of products is therefore the true one * 2^-40, and 2^40
// goes into the block scale. With that no f32 in the chain is denormal, for the ranges that experts.h states.
#pragma once

#include <cstdint>

#include "kernels/experts.h"

namespace duck {

inline constexpr float kActivationPrescale = 0x1p64f;
inline constexpr float kSumPostscale = 0x1p40f;
// An activation silu(g) * u * weight below this counts as zero, so that its products are normal numbers too.
inline constexpr float kSmallestActivation = 0x1p-50f;

// The (row, expert) pairs of one expert in (row, k) order, as parallel arrays.
struct PairRows {
  uint32_t count = 0;
  const float* const* x = nullptr;      // [H'] each: x * 2^64, zero beyond H
  const float* weights = nullptr;       // topk_weights
  float* const* activations = nullptr;  // [S * 16] each: silu(gate x) * (up x) * weight * 2^64
  float* const* y = nullptr;            // [H'] each: partial sums; pairs of the same row share it
};

// One unit in memory: where its parts are. Built by experts.cpp, so that the files compiled for an ISA need
// no inline function from outside their namespace.
struct Unit {
  const uint8_t* gate_scales = nullptr;  // f32 [ceil(H / 128)], any alignment
  const uint8_t* up_scales = nullptr;
  const uint8_t* down_scales = nullptr;
  const uint8_t* gate_up = nullptr;  // num_records times (gate record, up record)
  const uint8_t* down = nullptr;     // num_records records
  uint32_t num_records = 0;          // H' / 32
};

struct KernelTable {
  Isa isa;

  // Phase 1. For each pair: activations[channel_offset .. +16) of the unit's 16 channels; those at
  // num_channels and beyond are padding and become 0.
  void (*gate_up)(const Unit& unit, const PairRows& pairs, uint32_t channel_offset, uint32_t num_channels);

  // Phase 2. For each pair: y[32 * first_record .. 32 * end_record) += down * activations[channel_offset ..
  // +16).
  void (*down)(const Unit& unit, const PairRows& pairs, uint32_t channel_offset, uint32_t first_record,
               uint32_t end_record);
};

// The table of an ISA. Calling its kernels is right only where isa_available(isa).
const KernelTable& kernel_table(Isa isa);

namespace scalar {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}

}  // namespace duck
