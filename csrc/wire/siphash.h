// SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed 64-bit tag of a message, which nobody can make without
// the key. Called by datagram.cpp; knows bytes only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duck::wire {

inline constexpr size_t kSipKeyBytes = 16;

struct SipKey {
  uint8_t bytes[kSipKeyBytes] = {};
};

// Of a message in two parts, of which the first is a multiple of 8 bytes long.
uint64_t siphash(const SipKey& key, const uint8_t* first, size_t first_bytes, const uint8_t* second,
                 size_t second_bytes);

}  // namespace duck::wire
