// Softmax attention of a step's rows: blocks of rows and heads that share their keys, and where there are few
// of them for the threads, splits of the context. Included by attention.cpp only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "attention/attention.h"
#include "attention/workspace.h"
#include "kernels/denormals.h"

namespace duck::attention {

inline constexpr uint32_t kSplitKeys = 512;
inline constexpr uint32_t kBlockQueries = 64;   // rows times heads that share a tile
inline constexpr uint32_t kTasksPerThread = 4;  // fewer: splits are shared out

// Rows of one context and heads of one kv head, over positions or a list of them.
struct Task {
  const Context* context;
  uint32_t row, num_rows;    // of the step
  uint32_t head, num_heads;  // query heads
  uint32_t kv_head;
  const int32_t* list;  // null for positions
  uint32_t list_size;
  uint32_t first_split, num_splits;
  size_t partials;  // index of its first Partial
};

struct Attend {
  struct Call {
    AttendShape shape;
    const float* q;
    Rows keys, values;
    Selection selection;
    float* out;
  };

  explicit Attend(Shared& shared_) : shared(shared_) {}

  void run(const StepContexts& step, const Call& next) {
    call = next;
    const AttendShape& shape = call.shape;
    const uint32_t group = shape.num_heads / shape.num_kv_heads;
    const uint32_t heads_at_once = blocks_of(group, blocks_of(group, kBlockQueries));
    const uint32_t rows_at_once = std::max(1u, kBlockQueries / group);
    tasks.clear();
    uint64_t products = 0;
    for (const Context& context : step.contexts) add_tasks(context, heads_at_once, rows_at_once);
    size_t num_items = 0;
    uint32_t most_queries = 0;
    for (Task& task : tasks) {
      task.partials = num_items;
      num_items += task.num_splits;
      most_queries = std::max(most_queries, task.num_rows * task.num_heads);
      const Range last = range_of(task, task.row + task.num_rows - 1);
      products += static_cast<uint64_t>(task.num_rows) * task.num_heads * (last.end - last.begin) *
                  (shape.key_dim + shape.value_dim);
    }
    one_partial = partial_size(most_queries, shape.value_dim);
    const bool is_little = Shared::is_little(products);
    const auto threads = static_cast<size_t>(shared.pool.num_threads());
    if (is_little || threads == 1 || num_items == tasks.size() || tasks.size() >= kTasksPerThread * threads) {
      shared.items.reset(tasks.size());
      return shared.run(products, [this](int thread) { attend_whole(thread); });
    }
    partials.of(one_partial * num_items);
    item_task.clear();
    for (uint32_t i = 0; i < tasks.size(); ++i) item_task.insert(item_task.end(), tasks[i].num_splits, i);
    if (splits_left.size() < tasks.size()) splits_left = std::vector<std::atomic<uint32_t>>(tasks.size());
    for (size_t i = 0; i < tasks.size(); ++i) {
      splits_left[i].store(tasks[i].num_splits, std::memory_order_relaxed);
    }
    shared.items.reset(num_items);
    shared.run_on_all([this](int thread) { attend_splits(thread); });
  }

  Shared& shared;
  Call call{};
  std::vector<Task> tasks;
  std::vector<std::atomic<uint32_t>> splits_left;  // [tasks]
  std::vector<uint32_t> item_task;                 // where splits are shared out
  GrowingBuffer partials;
  size_t one_partial = 0;

  // What row `row` of a task attends to, of positions or of its list.
  Range range_of(const Task& task, uint32_t row) const {
    if (task.list) return {0, task.list_size};
    const uint32_t position = task.context->start + (row - task.context->first_row);
    uint32_t first = task.context->first;
    const uint32_t window = call.shape.window;
    if (window != 0 && position + 1 > window) first = std::max(first, position + 1 - window);
    return {first, position + 1};
  }

  // Rows [row, ...) that can go together: those that have a list are alone.
  void add_tasks(const Context& context, uint32_t heads_at_once, uint32_t rows_at_once) {
    const AttendShape& shape = call.shape;
    const uint32_t group = shape.num_heads / shape.num_kv_heads;
    const uint32_t end = context.first_row + context.num_rows;
    for (uint32_t row = context.first_row; row < end;) {
      Task task{};
      task.context = &context;
      task.row = row;
      task.num_rows = 1;
      if (const int32_t* list = list_of(row)) {
        task.list = list;
        task.list_size = call.selection.topk;
      } else {
        while (task.num_rows < rows_at_once && row + task.num_rows < end && !list_of(row + task.num_rows)) {
          ++task.num_rows;
        }
      }
      row += task.num_rows;
      task.first_split = range_of(task, task.row).begin / kSplitKeys;
      task.num_splits = blocks_of(range_of(task, row - 1).end, kSplitKeys) - task.first_split;
      for (task.kv_head = 0; task.kv_head < shape.num_kv_heads; ++task.kv_head) {
        for (uint32_t head = 0; head < group; head += task.num_heads) {
          task.head = task.kv_head * group + head;
          task.num_heads = std::min(heads_at_once, group - head);
          tasks.push_back(task);
        }
      }
    }
  }

  const int32_t* list_of(uint32_t row) const {
    const Selection& selection = call.selection;
    if (!selection.positions) return nullptr;
    const int32_t* list = selection.positions + static_cast<size_t>(row) * selection.topk;
    return list[0] < 0 ? nullptr : list;
  }

  // One thread takes all splits of a task.
  void attend_whole(int thread) {
    const DenormalsOn denormals;
    Workspace& own = shared.workspaces[thread];
    for (uint64_t item; (item = shared.items.take(thread)) != WorkRanges::kNone;) {
      const Task& task = tasks[item];
      const uint32_t queries = task.num_rows * task.num_heads;
      float* memory = own.partials.of(2 * one_partial);
      const Partial total = partial_in(memory, queries), part = partial_in(memory + one_partial, queries);
      fill_queries(own, task);
      for (uint32_t i = 0; i < task.num_splits; ++i) {
        const uint32_t split = task.first_split + i;
        compute_split(own, task, split, i == 0 ? total : part);
        if (i > 0) merge_split(task, split, total, part);
      }
      finish(task, total);
    }
  }

  // Threads share the splits of a task; who finishes its last one merges them.
  void attend_splits(int thread) {
    const DenormalsOn denormals;
    Workspace& own = shared.workspaces[thread];
    for (uint64_t item; (item = shared.items.take(thread)) != WorkRanges::kNone;) {
      const uint32_t index = item_task[item];
      const Task& task = tasks[index];
      const uint32_t queries = task.num_rows * task.num_heads;
      fill_queries(own, task);
      compute_split(own, task, task.first_split + static_cast<uint32_t>(item - task.partials),
                    shared_partial(item, queries));
      if (splits_left[index].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      const Partial total = shared_partial(task.partials, queries);
      for (uint32_t i = 1; i < task.num_splits; ++i) {
        merge_split(task, task.first_split + i, total, shared_partial(task.partials + i, queries));
      }
      finish(task, total);
    }
  }

  Partial shared_partial(size_t index, uint32_t queries) {
    return partial_in(partials.of(0) + index * one_partial, queries);
  }

  void fill_queries(Workspace& own, const Task& task) const {
    const AttendShape& shape = call.shape;
    const uint32_t queries = task.num_rows * task.num_heads;
    float* panel = own.panel.of(panel_size(queries, shape.key_dim));
    for (uint32_t query = 0; query < queries; ++query) {
      const size_t row = task.row + query / task.num_heads, head = task.head + query % task.num_heads;
      fill_panel(call.q + (row * shape.num_heads + head) * shape.key_dim, shape.key_dim, queries, query,
                 shape.scale, panel);
    }
  }

  // Pointers to keys and values of entries [begin, end) of a tile that starts at `tile`.
  void point_to_rows(const Task& task, uint32_t tile, Range there, TileRows& rows) const {
    const AttendShape& shape = call.shape;
    const float* keys = call.keys.data + static_cast<size_t>(task.kv_head) * shape.key_dim;
    const float* values = call.values.data + static_cast<size_t>(task.kv_head) * shape.value_dim;
    for (uint32_t i = there.begin; i < there.end;) {
      const uint32_t position = task.list ? static_cast<uint32_t>(task.list[tile + i]) : tile + i;
      const uint32_t page_tokens = task.context->page_tokens;
      size_t slot = task.context->slot(position);
      const uint32_t run = task.list ? 1 : std::min(there.end - i, page_tokens - position % page_tokens);
      for (const uint32_t end = i + run; i < end; ++i, ++slot) {
        rows.keys[i] = keys + slot * call.keys.width;
        rows.values[i] = values + slot * call.values.width;
      }
    }
    for (uint32_t i = 0; i < there.begin; ++i) rows.keys[i] = rows.values[i] = keys;
    for (uint32_t i = there.end; i < kTileKeys; ++i) rows.keys[i] = rows.values[i] = keys;
  }

  void compute_split(Workspace& own, const Task& task, uint32_t split, const Partial& to) const {
    const AttendShape& shape = call.shape;
    const uint32_t queries = task.num_rows * task.num_heads;
    const float* panel = own.panel.of(0);
    float* columns = own.columns.of(static_cast<size_t>(kTileKeys) * shape.key_dim);
    float* scores = own.scores.of(static_cast<size_t>(queries) * kTileKeys + queries + kMostLanes);
    float* factors = scores + static_cast<size_t>(queries) * kTileKeys;
    std::fill_n(to.largest, queries, -INFINITY);
    std::fill_n(to.sums, queries, 0.0f);
    std::fill_n(to.values, queries * padded(shape.value_dim), 0.0f);
    const Range all{range_of(task, task.row).begin, range_of(task, task.row + task.num_rows - 1).end};
    const uint32_t begin = std::max(all.begin, split * kSplitKeys) / kTileKeys * kTileKeys;
    const uint32_t end = std::min(all.end, (split + 1) * kSplitKeys);
    TileRows *rows = &own.tiles[0], *next = &own.tiles[1];
    if (begin < end) point_to_rows(task, begin, all.within(begin, kTileKeys), *rows);
    for (uint32_t tile = begin; tile < end; tile += kTileKeys, std::swap(rows, next)) {
      const Range there = all.within(tile, kTileKeys);
      point_to_rows(task, tile + kTileKeys, all.within(tile + kTileKeys, kTileKeys), *next);
      const bool is_latent = call.values.data == call.keys.data;
      shared.table.transpose(rows->keys, there.begin, there.end, shape.key_dim, columns);
      shared.table.scores(panel, queries, shape.key_dim, columns, there.begin, there.end,
                          is_latent ? nullptr : rows->values, shape.value_dim, scores);
      // Rows that see the same keys of the tile go together; one that does not see a key never meets it.
      for (uint32_t row = 0; row < task.num_rows;) {
        const Range seen = range_of(task, task.row + row).within(tile, kTileKeys);
        uint32_t last = row + 1;
        for (; last < task.num_rows; ++last) {
          const Range next = range_of(task, task.row + last).within(tile, kTileKeys);
          if (next.begin != seen.begin || next.end != seen.end) break;
        }
        const uint32_t first = row * task.num_heads, count = (last - row) * task.num_heads;
        row = last;
        if (seen.begin == seen.end) continue;
        float* weights = scores + static_cast<size_t>(first) * kTileKeys;
        shared.table.softmax(weights, count, seen.begin, seen.end, to.largest + first, to.sums + first,
                             factors + first);
        shared.table.add_values(weights, count, rows->values, seen.begin, seen.end, shape.value_dim,
                                factors + first, next->keys, to.values + first * padded(shape.value_dim));
      }
    }
  }

  // Row by row: a row takes part in the splits that have keys of its own.
  void merge_split(const Task& task, uint32_t split, const Partial& total, const Partial& part) const {
    const size_t stride = padded(call.shape.value_dim);
    for (uint32_t row = 0; row < task.num_rows; ++row) {
      const Range range = range_of(task, task.row + row);
      if (range.end <= split * kSplitKeys || range.begin >= (split + 1) * kSplitKeys) continue;
      const uint32_t first = row * task.num_heads;
      const Partial to{total.largest + first, total.sums + first, total.values + first * stride};
      const Partial from{part.largest + first, part.sums + first, part.values + first * stride};
      if (range.begin >= split * kSplitKeys) {
        std::copy_n(from.largest, task.num_heads, to.largest);
        std::copy_n(from.sums, task.num_heads, to.sums);
        std::copy_n(from.values, task.num_heads * stride, to.values);
      } else {
        shared.table.merge(to, from, task.num_heads, call.shape.value_dim);
      }
    }
  }

  void finish(const Task& task, const Partial& total) const {
    const size_t dim = call.shape.value_dim;
    for (uint32_t row = 0; row < task.num_rows; ++row) {
      const uint32_t first = row * task.num_heads;
      const Partial from{total.largest + first, total.sums + first, total.values + first * padded(dim)};
      const size_t place = static_cast<size_t>(task.row + row) * call.shape.num_heads + task.head;
      shared.table.finish(from, task.num_heads, call.shape.value_dim, call.out + place * dim);
    }
  }
};

}  // namespace duck::attention
