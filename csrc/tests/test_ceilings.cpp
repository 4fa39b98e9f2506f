// The loops behind the ceilings under sanitizers: they stay inside their memory, threads keep to their parts,
// and what they read, wrote and computed is what a plain loop says.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "bench/ceilings.h"
#include "tests/check.h"

namespace duck::bench {
namespace {

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<uint8_t[], Free>;

Memory aligned_memory(size_t bytes) { return Memory(static_cast<uint8_t*>(std::aligned_alloc(64, bytes))); }

uint64_t exclusive_or(const uint8_t* data, size_t bytes) {
  uint64_t result = 0;
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    result ^= word;
  }
  return result;
}

template <class Call>
bool refused(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_loops(Isa isa, int num_threads) {
  CeilingLoops loops(num_threads, isa);
  const size_t bytes = 3 * loops.granule_bytes();
  const Memory from = aligned_memory(bytes), to = aligned_memory(bytes);
  loops.randomise(from.get(), bytes, 7);
  for (const char* variant : {"plain", "prefetch", "streams", "streams_prefetch"}) {
    CHECK(loops.read(variant, from.get(), bytes, {3, 1}).checksum == exclusive_or(from.get(), bytes));
  }
  for (const char* variant : {"plain", "nontemporal", "libc"}) {
    loops.fill(variant, to.get(), bytes, 0xa5, {2, 0});
    for (size_t i = 0; i < bytes; ++i) CHECK(to[i] == 0xa5);
    loops.copy(variant, to.get(), from.get(), bytes, {1, 1});
    CHECK(std::memcmp(to.get(), from.get(), bytes) == 0);
  }
  const double lanes = loops.fma_lanes();
  CHECK(loops.fma(5).sum == lanes * (lanes - 1) / 2 + lanes * 5);
  CHECK(loops.flop_per_step() == 4 * loops.fma_lanes() * static_cast<uint64_t>(num_threads));
}

void test_refusals() {
  CeilingLoops loops(2, Isa::kScalar);
  const size_t bytes = 2 * loops.granule_bytes();
  const Memory memory = aligned_memory(bytes);
  std::memset(memory.get(), 1, bytes);
  const size_t half = bytes / 2;
  CHECK(refused([&] { loops.read("quick", memory.get(), half, {}); }));
  CHECK(refused([&] { loops.read("plain", memory.get() + 8, half, {}); }));
  CHECK(refused([&] { loops.read("plain", memory.get(), half - 4096, {}); }));
  CHECK(refused([&] { loops.read("plain", memory.get(), half, {0, 1}); }));
  CHECK(refused([&] { loops.copy("plain", memory.get() + 4096, memory.get(), half, {}); }));
  CHECK(refused([&] { loops.fma(0); }));
  CHECK(refused([&] { loops.fma((1u << 22) + 1); }));
}

}  // namespace
}  // namespace duck::bench

int main() {
  for (duck::Isa isa : duck::available_isas()) {
    for (int num_threads : {1, 3}) duck::bench::test_loops(isa, num_threads);
  }
  duck::bench::test_refusals();
  return duck::test::report();
}
