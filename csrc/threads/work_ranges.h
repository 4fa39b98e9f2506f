// Divides the numbers 0 .. total - 1 among threads: each has a contiguous range of its own, so that it
// streams through memory without a break, and takes from the others' once its own is empty. Used by kernels/.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace duck {

class WorkRanges {
 public:
  static constexpr uint64_t kNone = UINT64_MAX;

  explicit WorkRanges(int num_threads) : ranges_(num_threads) {}

  // Before the threads start.
  void reset(uint64_t total) {
    const uint64_t num_threads = ranges_.size();
    for (uint64_t thread = 0; thread < num_threads; ++thread) {
      ranges_[thread].next.store(total * thread / num_threads, std::memory_order_relaxed);
      ranges_[thread].end = total * (thread + 1) / num_threads;
    }
  }

  // The next number for `thread`, each handed out exactly once, or kNone when all are.
  uint64_t take(int thread) {
    for (size_t i = 0; i < ranges_.size(); ++i) {
      Range& range = ranges_[(thread + i) % ranges_.size()];
      if (range.next.load(std::memory_order_relaxed) >= range.end) continue;
      const uint64_t taken = range.next.fetch_add(1, std::memory_order_relaxed);
      if (taken < range.end) return taken;
    }
    return kNone;
  }

 private:
  struct alignas(64) Range {  // a cache line each
    std::atomic<uint64_t> next{0};
    uint64_t end = 0;
  };
  std::vector<Range> ranges_;
};

}  // namespace duck
