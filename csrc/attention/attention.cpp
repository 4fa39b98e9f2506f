// Attention: cuts a step into blocks of rows and heads that share their keys, and these into splits of the
// context where there are few of them for the threads.
#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/attention_table.h"
#include "attention/workspace.h"
#include "kernels/denormals.h"
#include "kernels/kernel_table.h"
#include "threads/thread_pool.h"
#include "threads/work_ranges.h"

namespace duck::attention {
namespace {

constexpr uint32_t kSplitKeys = 512;
constexpr uint32_t kBlockQueries = 64;         // rows times heads that share a tile
constexpr uint32_t kTasksPerThread = 4;        // fewer: splits are shared out
constexpr uint64_t kInlineProducts = 1 << 20;  // computed sooner than other threads are woken
constexpr uint32_t kProductRows = 48;          // of an item of multiply_heads
constexpr uint32_t kScoreChunk = 512;          // positions of an item of select
constexpr uint32_t kScoreRows = 4;             // rows of it
constexpr size_t kScoresAtOnce = 4 << 20;

uint32_t blocks_of(uint32_t count, uint32_t most) { return (count + most - 1) / most; }

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

struct Range {
  uint32_t begin, end;
};

}  // namespace

struct Attention::Impl {
  Impl(Isa isa, ThreadPool& pool_)
      : table(attention_table(isa)),
        pool(pool_),
        workspaces(pool_.num_threads()),
        items(pool_.num_threads()) {}

  const AttentionTable& table;
  ThreadPool& pool;
  std::vector<Workspace> workspaces;
  WorkRanges items;

  void run(bool is_little, const std::function<void(int)>& work) {
    if (is_little) return work(0);
    pool.run(work);
  }

  // Queries in a panel, times the scale.
  static void fill_panel(const float* from, uint32_t dim, uint32_t queries, uint32_t query, float scale,
                         float* panel) {
    for (uint32_t d = 0; d < dim; d += kTileKeys) {
      float* to = panel + panel_index(queries, query, d);
      const uint32_t count = std::min(kTileKeys, dim - d);
      for (uint32_t i = 0; i < count; ++i) to[i] = from[d + i] * scale;
    }
  }

  // ---- attend -------------------------------------------------------------------------------------------

  struct Call {
    AttendShape shape;
    const float* q;
    Rows keys, values;
    Selection selection;
    float* out;
  };
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

  void attend(const StepContexts& step) {
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
    const bool is_little = products <= kInlineProducts;
    const auto threads = static_cast<size_t>(pool.num_threads());
    if (is_little || threads == 1 || num_items == tasks.size() || tasks.size() >= kTasksPerThread * threads) {
      items.reset(tasks.size());
      return run(is_little, [this](int thread) { attend_whole(thread); });
    }
    partials.of(one_partial * num_items);
    item_task.clear();
    for (uint32_t i = 0; i < tasks.size(); ++i) item_task.insert(item_task.end(), tasks[i].num_splits, i);
    if (splits_left.size() < tasks.size()) splits_left = std::vector<std::atomic<uint32_t>>(tasks.size());
    for (size_t i = 0; i < tasks.size(); ++i) {
      splits_left[i].store(tasks[i].num_splits, std::memory_order_relaxed);
    }
    items.reset(num_items);
    run(false, [this](int thread) { attend_splits(thread); });
  }

  // One thread takes all splits of a task.
  void attend_whole(int thread) {
    const DenormalsOn denormals;
    Workspace& own = workspaces[thread];
    for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
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
    Workspace& own = workspaces[thread];
    for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
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

  static Range within(Range range, uint32_t first, uint32_t size) {
    const uint32_t begin = std::clamp(range.begin, first, first + size) - first;
    return {begin, std::max(begin, std::clamp(range.end, first, first + size) - first)};
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
    if (begin < end) point_to_rows(task, begin, within(all, begin, kTileKeys), *rows);
    for (uint32_t tile = begin; tile < end; tile += kTileKeys, std::swap(rows, next)) {
      const Range there = within(all, tile, kTileKeys);
      point_to_rows(task, tile + kTileKeys, within(all, tile + kTileKeys, kTileKeys), *next);
      const bool is_latent = call.values.data == call.keys.data;
      table.transpose(rows->keys, there.begin, there.end, shape.key_dim, is_latent ? nullptr : rows->values,
                      columns);
      table.scores(panel, queries, shape.key_dim, columns, there.begin, there.end, scores);
      // Rows that see the same keys of the tile go together; one that does not see a key never meets it.
      for (uint32_t row = 0; row < task.num_rows;) {
        const Range seen = within(range_of(task, task.row + row), tile, kTileKeys);
        uint32_t last = row + 1;
        for (; last < task.num_rows; ++last) {
          const Range next = within(range_of(task, task.row + last), tile, kTileKeys);
          if (next.begin != seen.begin || next.end != seen.end) break;
        }
        const uint32_t first = row * task.num_heads, count = (last - row) * task.num_heads;
        row = last;
        if (seen.begin == seen.end) continue;
        float* weights = scores + static_cast<size_t>(first) * kTileKeys;
        table.softmax(weights, count, seen.begin, seen.end, to.largest + first, to.sums + first,
                      factors + first);
        table.add_values(weights, count, rows->values, seen.begin, seen.end, shape.value_dim, factors + first,
                         next->keys, to.values + first * padded(shape.value_dim));
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
        table.merge(to, from, task.num_heads, call.shape.value_dim);
      }
    }
  }

  void finish(const Task& task, const Partial& total) const {
    const size_t dim = call.shape.value_dim;
    for (uint32_t row = 0; row < task.num_rows; ++row) {
      const uint32_t first = row * task.num_heads;
      const Partial from{total.largest + first, total.sums + first, total.values + first * padded(dim)};
      const size_t place = static_cast<size_t>(task.row + row) * call.shape.num_heads + task.head;
      table.finish(from, task.num_heads, call.shape.value_dim, call.out + place * dim);
    }
  }

  // ---- select -------------------------------------------------------------------------------------------

  struct Scoring {
    const Context* context;
    uint32_t row, num_rows;
  };
  struct ScoreItem {
    uint32_t block, position;
  };
  std::vector<Scoring> blocks;
  std::vector<ScoreItem> score_items;
  GrowingBuffer all_scores;

  void select(const StepContexts& step, uint32_t num_heads, uint32_t dim, const float* q, const float* w,
              Rows keys, uint32_t topk, int32_t* out) {
    blocks.clear();
    uint32_t longest = 0;
    for (const Context& context : step.contexts) {
      const uint32_t end = context.first_row + context.num_rows;
      for (uint32_t row = context.first_row; row < end;) {
        const uint32_t position = context.start + row - context.first_row;
        if (position + 1 - context.first <= topk) {
          out[static_cast<size_t>(row) * topk] = -1;
          ++row;
          continue;
        }
        const uint32_t count = std::min(kScoreRows, end - row);
        blocks.push_back({&context, row, count});
        longest = std::max(longest, position + count);
        row += count;
      }
    }
    const size_t stride = blocks_of(longest, kTileKeys) * kTileKeys;
    const size_t turn = std::max<size_t>(1, kScoresAtOnce / std::max<size_t>(1, stride * kScoreRows));
    float* scores = all_scores.of(std::min(turn, blocks.size()) * kScoreRows * stride);
    for (size_t begin = 0; begin < blocks.size(); begin += turn) {
      const size_t end = std::min(blocks.size(), begin + turn);
      score_items.clear();
      for (size_t block = begin; block < end; ++block) {
        const uint32_t stop = last_position(blocks[block]) + 1;
        for (uint32_t at = blocks[block].context->first / kTileKeys * kTileKeys; at < stop;
             at += kScoreChunk) {
          score_items.push_back({static_cast<uint32_t>(block), at});
        }
      }
      items.reset(score_items.size());
      std::atomic<size_t> next{0};
      const size_t num_rows = (end - begin) * kScoreRows;
      run(false, [&](int thread) {
        const DenormalsOn denormals;
        for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
          const ScoreItem& own = score_items[item];
          score(workspaces[thread], blocks[own.block], own.position, num_heads, dim, q, w, keys,
                scores + (own.block - begin) * kScoreRows * stride, stride);
        }
        pool.barrier();
        for (size_t i; (i = next.fetch_add(1)) < num_rows;) {
          const Scoring& block = blocks[begin + i / kScoreRows];
          const auto row = static_cast<uint32_t>(i % kScoreRows);
          if (row >= block.num_rows) continue;
          const uint32_t stop = last_position(block) + 1 - (block.num_rows - 1 - row);
          select_topk(scores + i * stride, block.context->first, stop, topk,
                      out + static_cast<size_t>(block.row + row) * topk);
        }
      });
    }
  }

  static uint32_t last_position(const Scoring& block) {
    return block.context->start + block.row - block.context->first_row + block.num_rows - 1;
  }

  // Scores of a block's rows for positions [at, at + kScoreChunk).
  void score(Workspace& own, const Scoring& block, uint32_t at, uint32_t num_heads, uint32_t dim,
             const float* q, const float* w, Rows keys, float* scores, size_t stride) const {
    const size_t one = panel_size(num_heads, dim);
    float* panels = own.panel.of(block.num_rows * one);
    float* columns = own.columns.of(static_cast<size_t>(kTileKeys) * dim);
    for (uint32_t row = 0; row < block.num_rows; ++row) {
      for (uint32_t head = 0; head < num_heads; ++head) {
        fill_panel(q + (static_cast<size_t>(block.row + row) * num_heads + head) * dim, dim, num_heads, head,
                   1.0f, panels + row * one);
      }
    }
    const uint32_t stop = std::min(at + kScoreChunk, last_position(block) + 1);
    for (uint32_t tile = at; tile < stop; tile += kTileKeys) {
      const Range there = within({block.context->first, stop}, tile, kTileKeys);
      for (uint32_t i = there.begin; i < there.end; ++i) {
        own.tiles[0].keys[i] = keys.data + block.context->slot(tile + i) * keys.width;
      }
      table.transpose(own.tiles[0].keys, there.begin, there.end, dim, nullptr, columns);
      for (uint32_t row = 0; row < block.num_rows; ++row) {
        table.index_scores(panels + row * one, num_heads, dim, columns, there.begin, there.end,
                           w + static_cast<size_t>(block.row + row) * num_heads,
                           scores + row * stride + tile);
      }
    }
  }

  // ---- products of heads --------------------------------------------------------------------------------

  void multiply_heads(const HeadProduct& product) {
    const uint32_t num_blocks = blocks_of(product.num_rows, kProductRows);
    const size_t matrix = static_cast<size_t>(product.inputs) * padded(product.outputs);
    items.reset(static_cast<uint64_t>(product.num_heads) * num_blocks);
    const uint64_t products = static_cast<uint64_t>(product.num_rows) * product.num_heads * matrix;
    run(products <= kInlineProducts, [&](int thread) {
      const DenormalsOn denormals;
      for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
        const auto head = static_cast<uint32_t>(item / num_blocks);
        const uint32_t row = static_cast<uint32_t>(item % num_blocks) * kProductRows;
        const uint32_t count = std::min(kProductRows, product.num_rows - row);
        float* panel = workspaces[thread].panel.of(panel_size(count, product.inputs));
        for (uint32_t i = 0; i < count; ++i) {
          fill_panel(product.x + (row + i) * product.x_row + head * product.x_head, product.inputs, count, i,
                     1.0f, panel);
        }
        table.multiply(panel, count, product.inputs, product.w + head * matrix, product.outputs,
                       product.y + row * product.y_row + head * product.y_head, product.y_row);
      }
    });
  }
};

Attention::Attention(Isa isa, ThreadPool& pool) : impl_(std::make_unique<Impl>(isa, pool)) {
  if (!isa_available(isa)) {
    throw std::invalid_argument(std::string("isa: got ") + isa_name(isa) +
                                ", expected one that this machine can run");
  }
}

Attention::~Attention() = default;

void Attention::attend(const StepContexts& step, const AttendShape& shape, const float* q, Rows keys,
                       Rows values, Selection selection, float* out) {
  impl_->call = {shape, q, keys, values, selection, out};
  impl_->attend(step);
}

void Attention::select(const StepContexts& step, uint32_t num_heads, uint32_t dim, const float* q,
                       const float* w, Rows keys, uint32_t topk, int32_t* out) {
  impl_->select(step, num_heads, dim, q, w, keys, topk, out);
}

void Attention::multiply_heads(const HeadProduct& product) { impl_->multiply_heads(product); }

const AttentionTable& attention_table(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return avx2::kTable;
    case Isa::kAvx512:
      return avx512::kTable;
    case Isa::kScalar:
      break;
  }
  return scalar::kTable;
}

}  // namespace duck::attention
