// Ideas for the fp9 kernels that lost, or were chosen between, each beside production's kernel: what
// `duckllm bench ablation` measures. Not part of the library; built with DUCK_BUILD_ABLATION=ON only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"

namespace duck::ablation {

// How the 512 weights and 16 sign words of an fp9 record are stored; as many bytes in each.
enum class Layout : uint8_t {
  kFours,  // production's, weight_format.h
  kMasks,  // production's magnitudes; sign word p has pair p's signs, bit 2 * lane + (row & 1)
  kRows,   // magnitudes row by row, [32][16]; sign word l has lane l's, row 0 at the highest bit
  kPairs,  // rows 2p and 2p + 1 of a lane side by side, to be widened; production's sign words
};
inline constexpr int kNumLayouts = 4;

// One row's step in another way.
struct Variant {
  const char* name;
  const char* question;  // a short name, the same for the variants that are weighed against each other
  Layout layout = Layout::kFours;
  decltype(FormatKernels::dots2) dots2 = nullptr;  // null: production's
  FormatKernels::Down down = nullptr;
  bool scale_x = true;              // x * prescale into a buffer before; else the kernel scales the sums
  bool prefetch_expert = false;     // all of an expert's bytes, by the thread that takes its first part
  int prefetch_bytes = -1;          // ahead in a stream; -1: as production
  uint32_t down_records = 0;        // 0: down a whole stripe at a time; else so many records of every stripe
  bool same_bits = true;            // as production's result; else within rounding
  const char* base = "production";  // the variant to weigh it against: compiled from the same source
};

// One choice for the tile kernels.
struct TileVariant {
  int tile_rows;  // rows whose sums are kept in registers
  decltype(KernelTable::multiply) multiply;
};

// Of an ISA that this machine has; the first is production's own. Empty for scalar.
std::vector<Variant> variants(Isa isa);
std::vector<TileVariant> tile_variants(Isa isa);

// The records of `num_units` fp9 units from production's layout into another.
void convert_layout(const uint8_t* from, Layout layout, size_t hidden_size, size_t num_units, uint8_t* to);

// Of each 16-bit number 16 words, 0x8000 where its bit is set.
struct alignas(64) SignTable {
  uint16_t words[65536][16];
  SignTable();
};
extern const SignTable kSignTable;

// Functions, not objects: nothing of an ISA runs before the machine is known to have it.
namespace avx2 {
std::vector<Variant> variants();
std::vector<TileVariant> tile_variants();
}  // namespace avx2
namespace avx512 {
std::vector<Variant> variants();
std::vector<TileVariant> tile_variants();
}  // namespace avx512

}  // namespace duck::ablation
