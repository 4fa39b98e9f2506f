#include "wire/siphash.h"

#include <bit>
#include <cstring>

static_assert(std::endian::native == std::endian::little, "words are read from memory as they are");

namespace duck::wire {
namespace {

uint64_t word(const uint8_t* in) {
  uint64_t value;
  std::memcpy(&value, in, sizeof(value));
  return value;
}

struct State {
  uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1;
    v1 = std::rotl(v1, 13) ^ v0;
    v0 = std::rotl(v0, 32);
    v2 += v3;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1;
    v1 = std::rotl(v1, 17) ^ v2;
    v2 = std::rotl(v2, 32);
  }

  void take(uint64_t value) {
    v3 ^= value;
    round();
    round();
    v0 ^= value;
  }
};

}  // namespace

uint64_t siphash(const SipKey& key, const uint8_t* first, size_t first_bytes, const uint8_t* second,
                 size_t second_bytes) {
  const uint64_t k0 = word(key.bytes), k1 = word(key.bytes + 8);
  State state{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261,
              k1 ^ 0x7465646279746573};
  for (size_t at = 0; at < first_bytes; at += 8) state.take(word(first + at));
  size_t at = 0;
  for (; at + 8 <= second_bytes; at += 8) state.take(word(second + at));
  uint64_t last = uint64_t{(first_bytes + second_bytes) & 0xff} << 56;
  for (size_t i = 0; at + i < second_bytes; ++i) last |= uint64_t{second[at + i]} << (8 * i);
  state.take(last);
  state.v2 ^= 0xff;
  for (int i = 0; i < 4; ++i) state.round();
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

}  // namespace duck::wire
