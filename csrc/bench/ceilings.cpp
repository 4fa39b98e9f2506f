#include "bench/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "bench/loop_table.h"
#include "threads/on_core.h"
#include "threads/thread_pool.h"

namespace duck::bench {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void refuse(const std::string& field, const std::string& got, const std::string& expected) {
  throw std::invalid_argument(field + ": got " + got + ", expected " + expected);
}

template <int kNum>
int variant_index(const char* const (&names)[kNum], const std::string& variant) {
  std::string all;
  for (int i = 0; i < kNum; ++i) {
    if (variant == names[i]) return i;
    all += (i ? ", " : "") + std::string(names[i]);
  }
  refuse("variant", "'" + variant + "'", "one of " + all);
}

uint64_t mix(uint64_t word) {  // splitmix64's finaliser: neighbours differ in half of their bits
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

// What one thread leaves behind, on a cache line of its own.
struct alignas(64) ThreadResult {
  Clock::time_point start, end;
  uint64_t checksum = 0;
  double sum = 0;
  bool passes_differ = false;
};

}  // namespace

const LoopTable& loop_table(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return avx2::kLoops;
    case Isa::kAvx512:
      return avx512::kLoops;
    case Isa::kScalar:
      break;
  }
  return scalar::kLoops;
}

struct CeilingLoops::Impl {
  // Idle threads sleep at once: between two samples the cores belong to whatever is measured in turns.
  Impl(int num_threads, Isa isa) : pool(num_threads, 0), loops(loop_table(isa)), results(num_threads) {}

  ThreadPool pool;
  const LoopTable& loops;
  std::vector<ThreadResult> results;

  void check(const char* field, const uint8_t* data, size_t bytes, const Passes& passes) const {
    const size_t granule = kGranuleBytes * results.size();
    if (reinterpret_cast<uintptr_t>(data) % 64 != 0)
      refuse(field, "unaligned memory", "alignment to 64 bytes");
    if (bytes == 0 || bytes % granule != 0) {
      refuse(field, std::to_string(bytes) + " bytes", "a multiple of " + std::to_string(granule) + ", not 0");
    }
    if (passes.timed == 0) refuse("passes", "0", "1 or more");
  }

  // Threads meet before the clock starts. They spin rather than sleep, so that none is still waking up when
  // the others start; where there are fewer cores than threads they make room for each other.
  static void meet(std::atomic<size_t>& arrived, size_t num_threads) {
    arrived.fetch_add(1, std::memory_order_acq_rel);
    for (int spins = 0; arrived.load(std::memory_order_acquire) < num_threads; ++spins) {
      __builtin_ia32_pause();
      if (spins > 10000) std::this_thread::yield();
    }
  }

  Sample timed(const std::function<void(int)>& prepare, const std::function<void(int, ThreadResult&)>& work) {
    std::atomic<size_t> arrived{0};
    pool.run([&](int thread) {
      const OnCore on_core(thread);
      ThreadResult result;
      prepare(thread);
      meet(arrived, results.size());
      result.start = Clock::now();
      work(thread, result);
      result.end = Clock::now();
      results[thread] = result;
    });
    Sample sample;
    auto start = results[0].start, end = results[0].end;
    for (const ThreadResult& result : results) {
      start = std::min(start, result.start);
      end = std::max(end, result.end);
      sample.checksum ^= result.checksum;
    }
    sample.seconds = std::chrono::duration<double>(end - start).count();
    return sample;
  }

  // pass(offset, bytes) on each thread's own part.
  template <class Pass>
  Sample passes_over(size_t bytes, const Passes& passes, const Pass& pass) {
    const size_t part = bytes / results.size();
    return timed(
        [&](int thread) {
          for (uint32_t i = 0; i < passes.warm; ++i) pass(thread * part, part);
        },
        [&](int thread, ThreadResult& result) {
          result.checksum = pass(thread * part, part);
          for (uint32_t i = 1; i < passes.timed; ++i) {
            result.passes_differ |= pass(thread * part, part) != result.checksum;
          }
        });
  }
};

CeilingLoops::CeilingLoops(int num_threads, Isa isa) : impl_(std::make_unique<Impl>(num_threads, isa)) {}

CeilingLoops::~CeilingLoops() = default;

int CeilingLoops::num_threads() const { return impl_->pool.num_threads(); }

Isa CeilingLoops::isa() const { return impl_->loops.isa; }

size_t CeilingLoops::granule_bytes() const { return kGranuleBytes * impl_->results.size(); }

uint32_t CeilingLoops::fma_lanes() const { return kFmaChains * impl_->loops.float_lanes; }

uint64_t CeilingLoops::flop_per_step() const { return uint64_t{4} * fma_lanes() * impl_->results.size(); }

void CeilingLoops::randomise(uint8_t* data, size_t bytes, uint64_t seed) {
  impl_->check("data", data, bytes, {});
  const size_t part = bytes / impl_->results.size() / 8;
  auto* words = reinterpret_cast<uint64_t*>(data);
  impl_->pool.run([&](int thread) {
    for (size_t i = thread * part; i < (thread + 1) * part; ++i) {
      words[i] = mix(seed + i * 0x9e3779b97f4a7c15u);
    }
  });
}

Sample CeilingLoops::read(const std::string& variant, const uint8_t* data, size_t bytes, Passes passes) {
  const auto loop = impl_->loops.read[variant_index(kReadNames, variant)];
  impl_->check("data", data, bytes, passes);
  const Sample sample = impl_->passes_over(
      bytes, passes, [&](size_t offset, size_t part) { return loop(data + offset, part); });
  for (const ThreadResult& result : impl_->results) {
    if (result.passes_differ) throw std::runtime_error("read: two passes over the same memory differ");
  }
  return sample;
}

Sample CeilingLoops::fill(const std::string& variant, uint8_t* data, size_t bytes, uint8_t value,
                          Passes passes) {
  const auto loop = impl_->loops.fill[variant_index(kWriteNames, variant)];
  impl_->check("data", data, bytes, passes);
  return impl_->passes_over(bytes, passes, [&](size_t offset, size_t part) {
    loop(data + offset, part, value);
    return uint64_t{0};
  });
}

Sample CeilingLoops::copy(const std::string& variant, uint8_t* to, const uint8_t* from, size_t bytes,
                          Passes passes) {
  const auto loop = impl_->loops.copy[variant_index(kWriteNames, variant)];
  impl_->check("to", to, bytes, passes);
  impl_->check("from", from, bytes, passes);
  const auto first = reinterpret_cast<uintptr_t>(std::min<const uint8_t*>(to, from));
  const auto second = reinterpret_cast<uintptr_t>(std::max<const uint8_t*>(to, from));
  if (second - first < bytes) refuse("to", "memory that overlaps `from`", "memory of its own");
  return impl_->passes_over(bytes, passes, [&](size_t offset, size_t part) {
    loop(to + offset, from + offset, part);
    return uint64_t{0};
  });
}

Sample CeilingLoops::fma(uint32_t steps) {
  if (steps == 0 || steps > kMostFmaSteps) {
    refuse("steps", std::to_string(steps), "1 to " + std::to_string(kMostFmaSteps));
  }
  const FmaConstants constants;
  // A few untimed steps: wide units that were switched off are on when the clock starts.
  Sample sample =
      impl_->timed([&](int) { impl_->loops.fma_loop(constants, std::min(steps, 4096u)); },
                   [&](int, ThreadResult& result) { result.sum = impl_->loops.fma_loop(constants, steps); });
  sample.sum = impl_->results[0].sum;
  for (const ThreadResult& result : impl_->results) {
    if (result.sum != sample.sum) throw std::runtime_error("fma: two threads computed different sums");
  }
  return sample;
}

}  // namespace duck::bench
