// Which register states the operating system saves on a task switch: a CPU flag alone does not say that an
// instruction may be used. Defined in select_isa.cpp.
#pragma once

#include <cstdint>

namespace duck {

inline constexpr uint64_t kXcr0Avx = 0x6;        // xmm and ymm
inline constexpr uint64_t kXcr0Avx512 = 0xe6;    // and the mask registers, zmm0-15 and zmm16-31
inline constexpr uint64_t kXcr0Tiles = 0x60000;  // TILECFG and TILEDATA

bool os_saves(uint64_t states);

// Asks the operating system for the use of tiles, once: Linux saves a process's only after that, which holds
// for all its threads from then on and for the processes that it forks. False where it saves none, or the CPU
// has none.
bool may_use_tiles();

}  // namespace duck
