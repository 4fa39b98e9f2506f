// Times the loops of loop_table.h on several threads: the ceilings of memory and of arithmetic. Called by
// bench/bind.cpp; which memory to go through and how often is the caller's business (duckllm/bench).
//
// Each thread has a part of its own, the same in every call. A time is that from the first thread's start to
// the last one's end, after all of them have met: waking threads is not in it. While it is timed a thread
// stays on a core of its own, among those that the caller may use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/experts.h"

namespace duck::bench {

struct Sample {
  double seconds = 0;
  uint64_t checksum = 0;  // of read: the exclusive or of all 64-bit words
  double sum = 0;         // of fma: the sum of all lanes of one thread
};

// Passes over the same memory in one sample: `warm` ones that are not timed, to bring it into a cache, then
// `timed` ones.
struct Passes {
  uint32_t timed = 1;
  uint32_t warm = 0;
};

// One caller at a time. Every function throws std::invalid_argument, naming field, got and expected, for an
// unknown variant, no timed pass, or memory that is not aligned to 64 bytes and a multiple of
// granule_bytes().
class CeilingLoops {
 public:
  // num_threads as ThreadPool; isa must be available.
  CeilingLoops(int num_threads, Isa isa);
  ~CeilingLoops();
  CeilingLoops(const CeilingLoops&) = delete;
  CeilingLoops& operator=(const CeilingLoops&) = delete;

  int num_threads() const;
  Isa isa() const;
  size_t granule_bytes() const;    // lengths are multiples of it: 4096 for each thread
  uint32_t fma_lanes() const;      // of one thread, all chains together
  uint64_t flop_per_step() const;  // of all threads

  // Writes words that depend on their index and on the seed; each thread touches its own part first.
  void randomise(uint8_t* data, size_t bytes, uint64_t seed);

  // Throws std::runtime_error when two passes over the memory read different words.
  Sample read(const std::string& variant, const uint8_t* data, size_t bytes, Passes passes);
  Sample fill(const std::string& variant, uint8_t* data, size_t bytes, uint8_t value, Passes passes);
  // The two must not overlap.
  Sample copy(const std::string& variant, uint8_t* to, const uint8_t* from, size_t bytes, Passes passes);
  // 1 to 2^22 steps of flop_per_step() each. With n = fma_lanes() the sum of every thread is exactly
  // n * (n - 1) / 2 + n * steps; throws std::runtime_error when two threads differ.
  Sample fma(uint32_t steps);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace duck::bench
