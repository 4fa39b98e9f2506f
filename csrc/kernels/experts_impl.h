// The inside of Experts, shared by experts.cpp (a step's course), gate_up.cpp (phase 1) and down.cpp (phase
// 2).
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/bf16_tiles.h"
#include "kernels/experts.h"
#include "kernels/float_buffer.h"
#include "kernels/integer_kernels.h"
#include "kernels/kernel_table.h"
#include "kernels/routing.h"
#include "kernels/tile_scales.h"
#include "kernels/weight_format.h"
#include "threads/thread_pool.h"
#include "threads/work_ranges.h"

namespace duck {

inline constexpr uint32_t kDotFloats = 2 * kStripeChannels;  // gate and up of a unit, for one row
inline constexpr uint32_t kChunkRows = Experts::kChunkRows;
static_assert(kChunkRows % kBf16RowBlock == 0);  // a panel's rows
static_assert(kChunkRows % kTileRows == 0);
inline constexpr uint32_t kTileFloats = kScaleBlock * kTileLanes;

inline constexpr size_t kZeroPointBytes = kStripeChannels;  // of a block of gate and up, or of down

// Where the parts of a unit are.
struct Unit {
  Unit(const uint8_t* bytes, WeightFormat format, size_t hidden_size,
       ScaleLayout layout = ScaleLayout::kBlock)
      : records(padded_hidden(hidden_size) / kRecordRows),
        gate_scales(bytes),
        up_scales(bytes + up_scales_at(format, hidden_size, layout)),
        down_scales(is_grouped(format) ? bytes + kZeroPointBytes * records : up_scales + (up_scales - bytes)),
        gate_up(bytes + unit_scale_bytes(format, hidden_size, layout)),
        down(gate_up + 2 * records * record_bytes(format)) {}

  static size_t up_scales_at(WeightFormat format, size_t hidden_size, ScaleLayout layout) {
    if (is_grouped(format)) return 0;
    return 4 * (layout == ScaleLayout::kChannel ? kStripeChannels : ceil_div(hidden_size, kScaleBlock));
  }

  const size_t records;  // H' / 32
  // Grouped formats: zero points, if they have any; those of gate and up lie together.
  const uint8_t *gate_scales, *up_scales, *down_scales;
  const uint8_t* gate_up;  // gate and up records by turns
  const uint8_t* down;
};

struct Experts::Impl {
  Impl(const ExpertShape& shape_, uint32_t max_tokens_, Isa isa, Prefill prefill, Activations activations_,
       ThreadPool& pool_);

  const ExpertShape shape;
  const uint32_t max_tokens;
  const KernelTable& table;
  const Bf16Tiles* const bf16;  // what experts of more than kMaxDirectRows rows go through; null: f32 tiles
  const IntegerTable& integers;
  const bool exact;  // formats of integers, too, are decoded to f32
  ThreadPool& pool;
  const size_t row_floats;     // H'
  const size_t pair_floats;    // S * 16
  const uint32_t num_records;  // H' / 32
  const uint32_t num_parts;    // of a unit's dot products
  const uint32_t prefetch = prefetch_bytes();

  Routing routing;
  // x and activations hold f32, or the groups of bytes that integer kernels take, which need less.
  FloatBuffer x;                                  // [T, H'] x * prescale, zero beyond H
  FloatBuffer y;                                  // [T, H'] sums of phase 2
  FloatBuffer activations;                        // [T * K, S * 16], in the order of the routing's pairs
  FloatBuffer partial_dots;                       // [min(T, kMaxDirectRows) * K, S, num_parts, 2, 16]
  std::vector<std::atomic<uint32_t>> parts_left;  // [active experts, S]
  std::vector<const float*> pair_x;
  std::vector<float*> pair_y, pair_activations;
  std::vector<const HiddenGroup*> pair_groups;  // pair_x as bytes
  std::vector<StripeGroup*> pair_stripes;       // pair_activations as bytes

  // One thread's memory for the tile kernels.
  struct Workspace {
    Workspace(size_t panel_rows, bool bf16, size_t panel_groups, bool exact)
        : panel(bf16 ? 0 : panel_rows * kPanelStride),
          tile(bf16 ? 0 : kTileFloats),
          bf16_panel(bf16 ? panel_rows * kBf16Pairs : 0),
          bf16_tile(bf16 ? kBf16TileWords : 0),
          integer_panel(panel_groups),
          dots(2 * kChunkRows * kDotFloats),
          decoded(exact ? 2 * kPartRecords * kRecordWeights : 0) {}
    FloatBuffer panel;  // [blocks, kChunkRows, 128]
    FloatBuffer tile;
    AlignedBuffer<uint32_t> bf16_panel, bf16_tile;  // the same in bf16
    AlignedBuffer<PanelGroup> integer_panel;        // [kChunkRows / 16, H' / 32], x as bytes
    FloatBuffer dots;                               // total and part of each row
    FloatBuffer decoded;                            // a part's records of gate and up by turns, in f32
    uint64_t panel_of = UINT64_MAX;                 // which chunk's x the panel holds
  };
  std::vector<std::unique_ptr<Workspace>> workspaces;

  // The step that run() has published, and what its layer's format brings.
  LayerUnits layer;                        // its format as the kernels decode it
  const FormatKernels* kernels = nullptr;  // where it is computed in f32
  const IntegerFormat* integer = nullptr;  // else
  const IntegerTiles* tiles = nullptr;     // for many rows of those, if the CPU has them
  bool by_channel = false;                 // the scales
  float x_factor = 1.0f;
  StepRows rows;
  float* output = nullptr;
  std::vector<uint64_t> first_item;  // [active experts + 1]: where an expert's items begin, with many rows
  WorkRanges items;
  std::atomic<uint64_t> read_words{0};
  const std::function<void(int)> work, read_work;

  bool few_rows() const { return rows.num_tokens <= kMaxDirectRows; }
  bool is_exact() const { return exact && is_integer(layer.format); }
  uint32_t num_chunks(uint32_t expert) const { return ceil_div(routing.count(expert), kChunkRows); }
  Unit unit(uint32_t expert, uint32_t stripe) const {
    const size_t offset = expert * layer.expert_stride_bytes + stripe * layer.stripe_stride_bytes;
    return Unit(layer.base + offset, layer.format, shape.hidden_size, layer.scale_layout);
  }
  uint32_t channels_of(uint32_t stripe) const {  // of which none is padding
    const uint32_t first = (shape.first_stripe + stripe) * kStripeChannels;
    return std::min<uint32_t>(kStripeChannels, shape.intermediate_size - first);
  }
  // The unit that is read after this one of the active expert `index`; the last one's is itself.
  Unit unit_after(size_t index, uint32_t stripe) const {
    const auto& active = routing.active();
    if (stripe + 1 < shape.num_stripes) return unit(active[index], stripe + 1);
    return index + 1 < active.size() ? unit(active[index + 1], 0) : unit(active[index], stripe);
  }

  void check(const StepRows& step) const;
  void use(const LayerUnits& step_layer);
  void prepare(const StepRows& step);
  void work_on(int thread);
  void scale_x(int thread, int num_threads);
  void gate_up_part(Workspace& workspace, uint64_t item);
  void gate_up_unit(Workspace& workspace, uint64_t item);
  void fill_panels(Workspace& workspace, uint32_t first_pair, uint32_t count);
  void gate_up_tiles(Workspace& workspace, const Unit& at, uint32_t count);
  void part_dots(Workspace& workspace, const Unit& at, const Stream& stream, uint32_t first_pair,
                 uint32_t count, float* dots);
  void gate_up_integer(Workspace& workspace, const Unit& at, uint32_t first_pair, uint32_t count);
  void begin_tiles() const;
  void end_tiles() const;
  void set_scales(Stream& stream, const Unit& at) const;
  void activate(uint32_t pair, uint32_t stripe, const Unit& at, float* dots);
  void run_down(int thread);
  const uint8_t* down_scales(uint32_t expert, const Unit& at) const;
  TileScales down_factors(const uint8_t* scales, uint32_t record, float factor) const;
  void down_tiles(Workspace& workspace, uint32_t expert, uint32_t first, uint32_t end);
  void down_bf16(Workspace& workspace, uint32_t expert, uint32_t first, uint32_t end);
  void down_integer(size_t index, uint32_t first, uint32_t end);
  void round_x(int thread, int num_threads);
  void exact_dots(Workspace& workspace, const Unit& at, const Stream& stream, uint32_t first_pair,
                  uint32_t count, float* dots);
  void exact_down(Workspace& workspace, uint32_t expert, uint32_t first, uint32_t end);
  void run_read(int thread);
};

}  // namespace duck
