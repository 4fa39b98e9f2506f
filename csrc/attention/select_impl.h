// The positions that rows select by their index scores: scores of (rows, positions) first, then row by row
// the best of them. Included by attention.cpp only.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention/attention.h"
#include "attention/workspace.h"
#include "kernels/denormals.h"

namespace duck::attention {

inline constexpr uint32_t kScoreChunk = 512;  // positions of an item
inline constexpr uint32_t kScoreRows = 4;     // rows of it
inline constexpr size_t kScoresAtOnce = 4 << 20;

struct Select {
  explicit Select(Shared& shared_) : shared(shared_) {}

  void run(const StepContexts& step, uint32_t num_heads, uint32_t dim, const float* q, const float* w,
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
      shared.items.reset(score_items.size());
      std::atomic<size_t> next{0};
      const size_t num_rows = (end - begin) * kScoreRows;
      shared.run_on_all([&](int thread) {
        const DenormalsOn denormals;
        for (uint64_t item; (item = shared.items.take(thread)) != WorkRanges::kNone;) {
          const ScoreItem& own = score_items[item];
          score(shared.workspaces[thread], blocks[own.block], own.position, num_heads, dim, q, w, keys,
                scores + (own.block - begin) * kScoreRows * stride, stride);
        }
        shared.pool.barrier();
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

  Shared& shared;
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
      const Range there = Range{block.context->first, stop}.within(tile, kTileKeys);
      for (uint32_t i = there.begin; i < there.end; ++i) {
        own.tiles[0].keys[i] = keys.data + block.context->slot(tile + i) * keys.width;
      }
      shared.table.transpose(own.tiles[0].keys, there.begin, there.end, dim, columns);
      for (uint32_t row = 0; row < block.num_rows; ++row) {
        shared.table.index_scores(panels + row * one, num_heads, dim, columns, there.begin, there.end,
                                  w + static_cast<size_t>(block.row + row) * num_heads,
                                  scores + row * stride + tile);
      }
    }
  }
};

}  // namespace duck::attention
