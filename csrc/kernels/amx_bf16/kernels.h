// What AMX-BF16 does other than AVX512-BF16: the multiplication of bf16_tiles.h and the tiles' configuration
// of a thread. Panels and tiles are filled by avx512_bf16, which every CPU with AMX has too.
#pragma once

#include <cstdint>

namespace duck::amx_bf16 {

void begin();
void end();
void multiply(const uint32_t* panel, const uint32_t* tile, uint32_t num_pairs, const float* scales,
              float* const* out, uint32_t num_rows);

}  // namespace duck::amx_bf16
