// What the threads of attention compute in, grown to the largest call so far, and share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "attention/attention_table.h"
#include "kernels/float_buffer.h"
#include "threads/thread_pool.h"
#include "threads/work_ranges.h"

namespace duck::attention {

class GrowingBuffer {
 public:
  // At least `size` numbers; what was in it is lost when it grows.
  float* of(size_t size) {
    if (size > size_) {
      buffer_ = std::make_unique<FloatBuffer>(size);
      size_ = size;
    }
    return buffer_ ? buffer_->data() : nullptr;
  }

 private:
  std::unique_ptr<FloatBuffer> buffer_;
  size_t size_ = 0;
};

// Numbers that a Partial takes, and the Partial in them.
inline size_t partial_size(size_t queries, size_t dim) {
  return 2 * (queries + kMostLanes) + queries * padded(dim);
}
inline Partial partial_in(float* memory, size_t queries) {
  const size_t numbers = queries + kMostLanes;
  return {memory, memory + numbers, memory + 2 * numbers};
}

// Where a tile's keys and values lie; a valid address for each, if only to prefetch from.
struct TileRows {
  const float* keys[kTileKeys];
  const float* values[kTileKeys];
};

struct Workspace {
  GrowingBuffer panel, columns, scores, partials;
  TileRows tiles[2];  // the one in work and the next
};

// Positions, or places in a list of them.
struct Range {
  uint32_t begin, end;

  // What of it lies in [first, first + size), counted from first.
  Range within(uint32_t first, uint32_t size) const {
    const uint32_t from = std::clamp(begin, first, first + size) - first;
    return {from, std::max(from, std::clamp(end, first, first + size) - first)};
  }
};

inline uint32_t blocks_of(uint32_t count, uint32_t most) { return (count + most - 1) / most; }

// A query in a panel, times the scale.
inline void fill_panel(const float* from, uint32_t dim, uint32_t queries, uint32_t query, float scale,
                       float* panel) {
  for (uint32_t d = 0; d < dim; d += kTileKeys) {
    float* to = panel + panel_index(queries, query, d);
    const uint32_t count = std::min(kTileKeys, dim - d);
    for (uint32_t i = 0; i < count; ++i) to[i] = from[d + i] * scale;
  }
}

// What all calls share.
struct Shared {
  Shared(Isa isa, ThreadPool& pool_)
      : table(attention_table(isa)),
        pool(pool_),
        workspaces(pool_.num_threads()),
        items(pool_.num_threads()) {}

  const AttentionTable& table;
  ThreadPool& pool;
  std::vector<Workspace> workspaces;
  WorkRanges items;

  // A call under way, which alone may use what calls share (std::logic_error for a second one).
  struct Use {
    Use(Shared& shared_, const char* who) : shared(shared_), claim(shared_.pool, who) {
      shared.claim = &claim;
    }
    ~Use() { shared.claim = nullptr; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    Shared& shared;
    ThreadPool::Claim claim;
  };
  ThreadPool::Claim* claim = nullptr;

  // Little is computed sooner than other threads are woken.
  void run(uint64_t products, const std::function<void(int)>& work) {
    if (is_little(products)) return work(0);
    run_on_all(work);
  }
  void run_on_all(const std::function<void(int)>& work) { claim->run(work); }
  static bool is_little(uint64_t products) { return products <= 1 << 20; }
};

}  // namespace duck::attention
