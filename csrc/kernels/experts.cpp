// Experts: one step in two phases with one barrier between them (a third before them when there are many
// rows).
//
// Phase 1 spreads gate and up over the threads: each (row, expert) pair gets the unit's 16 activations. With
// few rows the work is cut into parts of a unit, so that any number of threads share the bytes evenly; with
// many, into (expert, chunk of rows, unit), and a thread keeps the chunk's x in a panel of its own. Phase 2
// gives each thread its own range of outputs, which it sums over all pairs in a fixed order (experts.h); so
// no two threads add to one output, and the number of threads never shows in a result. run() allocates
// nothing.
#include "kernels/experts.h"

#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels/float_buffer.h"
#include "kernels/kernel_table.h"
#include "kernels/routing.h"
#include "kernels/weight_format.h"
#include "threads/thread_pool.h"
#include "threads/work_ranges.h"

namespace duck {
namespace {

constexpr uint32_t kDotFloats = 2 * kStripeChannels;  // gate and up of a unit, for one row
constexpr uint32_t kChunkRows = Experts::kChunkRows;
constexpr uint32_t kPartRecords = kPartBlocks * kRecordsPerBlock;
constexpr uint32_t kTileFloats = kScaleBlock * kTileLanes;

// Denormals as IEEE 754 has them, until the end of the scope.
class DenormalsOn {
 public:
  DenormalsOn() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushAndZero); }
  ~DenormalsOn() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushAndZero = 0x8040;
  const unsigned saved_;
};

// Where the parts of a unit are.
struct Unit {
  Unit(const uint8_t* bytes, WeightFormat format, size_t hidden_size)
      : records(padded_hidden(hidden_size) / kRecordRows),
        gate_scales(bytes),
        up_scales(bytes + 4 * ceil_div(hidden_size, kScaleBlock)),
        down_scales(bytes + 8 * ceil_div(hidden_size, kScaleBlock)),
        gate_up(bytes + unit_scale_bytes(hidden_size)),
        down(gate_up + 2 * records * record_bytes(format)) {}

  const size_t records;  // H' / 32
  const uint8_t *gate_scales, *up_scales, *down_scales;
  const uint8_t* gate_up;  // gate and up records by turns
  const uint8_t* down;
};

void scale_row(const StepRows& rows, size_t row, size_t hidden, float factor, float* out) {
  if (rows.x_type == ActivationType::kF32) {
    const uint8_t* from = static_cast<const uint8_t*>(rows.x) + row * hidden * 4;
    std::memcpy(out, from, hidden * 4);
    for (size_t i = 0; i < hidden; ++i) out[i] *= factor;
    return;
  }
  const uint8_t* from = static_cast<const uint8_t*>(rows.x) + row * hidden * 2;
  for (size_t i = 0; i < hidden; ++i) {
    uint16_t upper;
    std::memcpy(&upper, from + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(upper) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    out[i] = value * factor;
  }
}

}  // namespace

struct Experts::Impl {
  Impl(const ExpertShape& shape_, uint32_t max_tokens_, Isa isa, ThreadPool& pool_);

  const ExpertShape shape;
  const uint32_t max_tokens;
  const KernelTable& table;
  const FormatKernels& kernels;
  ThreadPool& pool;
  const float x_factor;
  const size_t row_floats;     // H'
  const size_t pair_floats;    // S * 16
  const uint32_t num_records;  // H' / 32
  const uint32_t num_parts;    // of a unit's dot products

  Routing routing;
  FloatBuffer x;                                  // [T, H'] x * prescale, zero beyond H
  FloatBuffer y;                                  // [T, H'] sums of phase 2
  FloatBuffer activations;                        // [T * K, S * 16], in the order of the routing's pairs
  FloatBuffer partial_dots;                       // [min(T, kMaxDirectRows) * K, S, num_parts, 2, 16]
  std::vector<std::atomic<uint32_t>> parts_left;  // [active experts, S]
  std::vector<const float*> pair_x;
  std::vector<float*> pair_y, pair_activations;

  // One thread's memory for the tile kernels.
  struct Workspace {
    Workspace(size_t panel_floats)
        : panel(panel_floats), tile(kTileFloats), dots(2 * kChunkRows * kDotFloats) {}
    FloatBuffer panel;  // [blocks, kChunkRows, 128]
    FloatBuffer tile;
    FloatBuffer dots;                // total and part of each row
    uint64_t panel_of = UINT64_MAX;  // which chunk's x the panel holds
  };
  std::vector<std::unique_ptr<Workspace>> workspaces;

  // The step that run() has published.
  LayerUnits layer;
  StepRows rows;
  float* output = nullptr;
  std::vector<uint64_t> first_item;  // [active experts + 1]: where an expert's items begin, with many rows
  WorkRanges items;
  std::atomic<uint64_t> read_words{0};
  const std::function<void(int)> work, read_work;

  bool few_rows() const { return rows.num_tokens <= kMaxDirectRows; }
  uint32_t num_chunks(uint32_t expert) const { return ceil_div(routing.count(expert), kChunkRows); }
  Unit unit(uint32_t expert, uint32_t stripe) const {
    const size_t offset =
        expert * layer.expert_stride_bytes + stripe * unit_bytes(shape.format, shape.hidden_size);
    return Unit(layer.base + offset, shape.format, shape.hidden_size);
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
  void prepare(const LayerUnits& step_layer, const StepRows& step);
  void work_on(int thread);
  void scale_x(int thread, int num_threads);
  void gate_up_part(uint64_t item);
  void gate_up_unit(Workspace& workspace, uint64_t item);
  void gate_up_tiles(Workspace& workspace, const Unit& at, uint32_t count);
  void activate(uint32_t pair, uint32_t stripe, const float* dots);
  void run_down(int thread);
  void down_tiles(Workspace& workspace, uint32_t expert, uint32_t first, uint32_t end);
  void run_read(int thread);
};

Experts::Impl::Impl(const ExpertShape& shape_, uint32_t max_tokens_, Isa isa, ThreadPool& pool_)
    : shape(checked_shape(shape_, max_tokens_)),
      max_tokens(max_tokens_),
      table(kernel_table(isa)),
      kernels(table.formats[static_cast<int>(shape.format)]),
      pool(pool_),
      x_factor(prescale(shape.format)),
      row_floats(padded_hidden(shape.hidden_size)),
      pair_floats(static_cast<size_t>(shape.num_stripes) * kStripeChannels),
      num_records(row_floats / kRecordRows),
      num_parts(ceil_div(num_records, kPartRecords)),
      routing(shape.num_experts, max_tokens, shape.top_k),
      x(max_tokens * row_floats),
      y(max_tokens * row_floats),
      activations(static_cast<size_t>(max_tokens) * shape.top_k * pair_floats),
      partial_dots(static_cast<size_t>(std::min(max_tokens, kMaxDirectRows)) * shape.top_k *
                   shape.num_stripes * num_parts * kDotFloats),
      parts_left(std::min<size_t>(static_cast<size_t>(std::min(max_tokens, kMaxDirectRows)) * shape.top_k,
                                  shape.num_experts) *
                 shape.num_stripes),
      items(pool.num_threads()),
      work([this](int thread) { work_on(thread); }),
      read_work([this](int thread) { run_read(thread); }) {
  const size_t max_pairs = static_cast<size_t>(max_tokens) * shape.top_k;
  pair_x.resize(max_pairs);
  pair_y.resize(max_pairs);
  for (size_t pair = 0; pair < max_pairs; ++pair) {
    pair_activations.push_back(activations.data() + pair * pair_floats);
  }
  first_item.reserve(std::min<size_t>(max_pairs, shape.num_experts) + 1);
  const size_t blocks = ceil_div(row_floats, kScaleBlock);
  const size_t panel_floats = max_tokens > kMaxDirectRows ? blocks * kChunkRows * kPanelStride : 0;
  for (int thread = 0; thread < pool.num_threads(); ++thread) {
    workspaces.push_back(std::make_unique<Workspace>(panel_floats));
  }
}

void Experts::Impl::check(const StepRows& step) const {
  if (step.num_tokens > max_tokens) {
    fail_shape("num_tokens", step.num_tokens, "at most " + std::to_string(max_tokens));
  }
  if (step.top_k == 0 || step.top_k > shape.top_k) {
    fail_shape("top_k", step.top_k, "1 to " + std::to_string(shape.top_k));
  }
  for (size_t pair = 0; pair < static_cast<size_t>(step.num_tokens) * step.top_k; ++pair) {
    const int32_t id = step.topk_ids[pair];
    if (id >= 0 && static_cast<uint32_t>(id) < shape.num_experts) continue;
    throw std::invalid_argument("topk_ids[" + std::to_string(pair / step.top_k) + ", " +
                                std::to_string(pair % step.top_k) + "]: got " + std::to_string(id) +
                                ", expected 0 to " + std::to_string(shape.num_experts - 1));
  }
}

void Experts::Impl::prepare(const LayerUnits& step_layer, const StepRows& step) {
  layer = step_layer;
  rows = step;
  routing.sort(step);
  // Where H needs no padding the sums go straight to the caller.
  float* sums = row_floats == shape.hidden_size ? output : y.data();
  const size_t num_active = routing.active().size();
  const uint32_t num_pairs = routing.begin(shape.num_experts);
  for (uint32_t pair = 0; pair < num_pairs; ++pair) {
    pair_x[pair] = x.data() + routing.row(pair) * row_floats;
    pair_y[pair] = sums + routing.row(pair) * row_floats;
  }
  if (few_rows()) {
    scale_x(0, 1);
    for (size_t i = 0; i < num_active * shape.num_stripes; ++i) {
      parts_left[i].store(num_parts, std::memory_order_relaxed);
    }
    items.reset(num_active * shape.num_stripes * num_parts);
    return;
  }
  first_item.assign(1, 0);
  for (uint32_t expert : routing.active()) {
    first_item.push_back(first_item.back() + static_cast<uint64_t>(num_chunks(expert)) * shape.num_stripes);
  }
  for (auto& workspace : workspaces) workspace->panel_of = UINT64_MAX;
  items.reset(first_item.back());
}

void Experts::Impl::work_on(int thread) {
  const DenormalsOn denormals;
  if (!few_rows()) {
    scale_x(thread, pool.num_threads());
    pool.barrier();
  }
  for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
    if (few_rows()) {
      gate_up_part(item);
    } else {
      gate_up_unit(*workspaces[thread], item);
    }
  }
  pool.barrier();
  run_down(thread);
}

void Experts::Impl::scale_x(int thread, int num_threads) {
  for (size_t row = thread; row < rows.num_tokens; row += num_threads) {
    scale_row(rows, row, shape.hidden_size, x_factor, x.data() + row * row_floats);
  }
}

void Experts::Impl::activate(uint32_t pair, uint32_t stripe, const float* dots) {
  table.activate(dots, routing.weight(pair), x_factor, channels_of(stripe),
                 pair_activations[pair] + stripe * kStripeChannels);
}

// Few rows: one part of one unit for all the expert's rows. Who finishes a unit's last part adds the parts
// up.
void Experts::Impl::gate_up_part(uint64_t item) {
  const uint32_t part = item % num_parts;
  const uint64_t index = item / num_parts;
  const uint32_t stripe = index % shape.num_stripes;
  const auto& active = routing.active();
  const uint32_t expert = active[index / shape.num_stripes];
  const uint32_t first_pair = routing.begin(expert), count = routing.count(expert);
  const Unit at = unit(expert, stripe);

  Stream stream;
  stream.records = at.gate_up;
  stream.scales[0] = at.gate_scales;
  stream.scales[1] = at.up_scales;
  stream.first_record = part * kPartRecords;
  stream.end_record = std::min(num_records, stream.first_record + kPartRecords);
  stream.next = part + 1 < num_parts
                    ? at.gate_up + static_cast<size_t>(stream.end_record) * 2 * record_bytes(shape.format)
                    : unit_after(index / shape.num_stripes, stripe).gate_up;

  // [part][row] of this unit; rows are few, so the parts of one row are near each other.
  float* unit_dots =
      partial_dots.data() +
      (static_cast<size_t>(first_pair) * shape.num_stripes + stripe * count) * num_parts * kDotFloats;
  const size_t part_floats = static_cast<size_t>(count) * kDotFloats;
  kernels.dots2(stream, pair_x.data() + first_pair, count, unit_dots + part * part_floats);
  if (parts_left[index].fetch_sub(1, std::memory_order_acq_rel) != 1) return;

  for (uint32_t row = 0; row < count; ++row) {
    float dots[kDotFloats] = {};
    for (uint32_t i = 0; i < num_parts; ++i) {
      for (uint32_t lane = 0; lane < kDotFloats; ++lane) {
        dots[lane] += unit_dots[i * part_floats + row * kDotFloats + lane];
      }
    }
    activate(first_pair + row, stripe, dots);
  }
}

// Many rows: one unit for one chunk of the expert's rows.
void Experts::Impl::gate_up_unit(Workspace& workspace, uint64_t item) {
  const size_t index = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
  const uint32_t expert = routing.active()[index];
  const uint32_t chunk = (item - first_item[index]) / shape.num_stripes;
  const uint32_t stripe = (item - first_item[index]) % shape.num_stripes;
  const uint32_t chunks = num_chunks(expert), pairs = routing.count(expert);
  const uint32_t first = pairs * chunk / chunks;  // chunks as even as can be
  const uint32_t count = pairs * (chunk + 1) / chunks - first;
  const uint32_t first_pair = routing.begin(expert) + first;
  const Unit at = unit(expert, stripe);
  float* dots = workspace.dots.data();
  if (count <= kMaxDirectRows) {
    Stream stream{at.gate_up, {at.gate_scales, at.up_scales}, 0, num_records, at.gate_up};
    kernels.dots2(stream, pair_x.data() + first_pair, count, dots);
  } else {
    if (workspace.panel_of != item - stripe) {
      workspace.panel_of = item - stripe;
      for (uint32_t row = 0; row < count; ++row) {
        for (size_t k = 0; k < row_floats; k += kScaleBlock) {
          table.fill_panel(pair_x[first_pair + row] + k, std::min<size_t>(kScaleBlock, row_floats - k),
                           workspace.panel.data() + k * kChunkRows + row * kPanelStride);
        }
      }
    }
    gate_up_tiles(workspace, at, count);
  }
  for (uint32_t row = 0; row < count; ++row) activate(first_pair + row, stripe, dots + row * kDotFloats);
}

void Experts::Impl::gate_up_tiles(Workspace& workspace, const Unit& at, uint32_t count) {
  float* dots = workspace.dots.data();
  float* part = dots + kChunkRows * kDotFloats;
  float* part_rows[kChunkRows];
  for (uint32_t row = 0; row < count; ++row) part_rows[row] = part + row * kDotFloats;
  std::fill_n(dots, count * kDotFloats, 0.0f);
  const size_t bytes = record_bytes(shape.format);
  for (uint32_t first = 0; first < num_records; first += kRecordsPerBlock) {
    const uint32_t block = first / kRecordsPerBlock;
    if (block % kPartBlocks == 0) std::fill_n(part, count * kDotFloats, 0.0f);
    const uint32_t records = std::min<uint32_t>(kRecordsPerBlock, num_records - first);
    kernels.tile_of_streams(at.gate_up + 2 * bytes * first, bytes, 2 * bytes, records, workspace.tile.data());
    float scales[2];
    std::memcpy(&scales[0], at.gate_scales + 4 * block, 4);
    std::memcpy(&scales[1], at.up_scales + 4 * block, 4);
    for (float& scale : scales) scale *= sum_postscale(shape.format);
    table.multiply(workspace.panel.data() + static_cast<size_t>(block) * kChunkRows * kPanelStride,
                   workspace.tile.data(), records * kRecordRows / 2, scales, part_rows, count);
    if (block % kPartBlocks == kPartBlocks - 1 || first + records == num_records) {
      for (uint32_t i = 0; i < count * kDotFloats; ++i) dots[i] += part[i];
    }
  }
}

void Experts::Impl::run_down(int thread) {
  const auto first = static_cast<uint32_t>(static_cast<uint64_t>(num_records) * thread / pool.num_threads());
  const auto end =
      static_cast<uint32_t>(static_cast<uint64_t>(num_records) * (thread + 1) / pool.num_threads());
  if (first == end) return;
  const bool direct = row_floats == shape.hidden_size;
  float* sums = direct ? output : y.data();
  const size_t first_output = static_cast<size_t>(first) * kRecordRows;
  const size_t end_output = static_cast<size_t>(end) * kRecordRows;
  for (size_t row = 0; row < rows.num_tokens; ++row) {
    std::fill(sums + row * row_floats + first_output, sums + row * row_floats + end_output, 0.0f);
  }
  const auto& active = routing.active();
  for (size_t index = 0; index < active.size(); ++index) {
    const uint32_t expert = active[index], count = routing.count(expert), pair = routing.begin(expert);
    if (count > kMaxDirectRows) {
      down_tiles(*workspaces[thread], expert, first, end);
      continue;
    }
    for (uint32_t stripe = 0; stripe < shape.num_stripes; ++stripe) {
      const Unit at = unit(expert, stripe);
      const float* rows_a[kMaxDirectRows];
      for (uint32_t row = 0; row < count; ++row) {
        rows_a[row] = pair_activations[pair + row] + stripe * kStripeChannels;
      }
      kernels.down(at.down, at.down_scales, rows_a, pair_y.data() + pair, count, first, end,
                   unit_after(index, stripe).down);
    }
  }
  if (direct) return;
  const size_t hidden = shape.hidden_size;
  const size_t num_outputs = std::min(end_output, hidden) - first_output;
  for (size_t row = 0; row < rows.num_tokens; ++row) {
    std::memcpy(output + row * hidden + first_output, sums + row * row_floats + first_output,
                num_outputs * sizeof(float));
  }
}

void Experts::Impl::down_tiles(Workspace& workspace, uint32_t expert, uint32_t first, uint32_t end) {
  const uint32_t pairs = routing.count(expert), chunks = num_chunks(expert);
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const uint32_t first_row = pairs * chunk / chunks, count = pairs * (chunk + 1) / chunks - first_row;
    const uint32_t pair = routing.begin(expert) + first_row;
    for (uint32_t stripe = 0; stripe < shape.num_stripes; stripe += kStripesPerBlock) {
      const uint32_t num_stripes = std::min<uint32_t>(kStripesPerBlock, shape.num_stripes - stripe);
      for (uint32_t row = 0; row < count; ++row) {
        table.fill_panel(pair_activations[pair + row] + stripe * kStripeChannels,
                         num_stripes * kStripeChannels, workspace.panel.data() + row * kPanelStride);
      }
      for (uint32_t record = first; record < end; ++record) {
        float* out[kChunkRows];
        for (uint32_t row = 0; row < count; ++row) out[row] = pair_y[pair + row] + record * kRecordRows;
        for (uint32_t i = 0; i < num_stripes; ++i) {
          const Unit at = unit(expert, stripe + i);
          kernels.tile_of_down(at.down + record * record_bytes(shape.format), workspace.tile.data());
          float scale;
          std::memcpy(&scale, at.down_scales + 4 * (record / kRecordsPerBlock), 4);
          const float scales[2] = {scale * sum_postscale(shape.format), scale * sum_postscale(shape.format)};
          table.multiply(workspace.panel.data() + i * kStripeChannels / 2, workspace.tile.data(),
                         kStripeChannels / 2, scales, out, count);
        }
      }
    }
  }
  workspace.panel_of = UINT64_MAX;
}

void Experts::Impl::run_read(int thread) {
  constexpr size_t kPrefetchBytes = 2048;
  const size_t size = unit_bytes(shape.format, shape.hidden_size);
  uint64_t words = 0;
  for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
    const uint8_t* bytes = layer.base +
                           routing.active()[item / shape.num_stripes] * layer.expert_stride_bytes +
                           item % shape.num_stripes * size;
    uint64_t parts[8] = {};
    for (size_t line = 0; line < size; line += sizeof(parts)) {
      __builtin_prefetch(bytes + line + kPrefetchBytes);
      uint64_t loaded[8];
      std::memcpy(loaded, bytes + line, sizeof(loaded));
      for (int i = 0; i < 8; ++i) parts[i] ^= loaded[i];
    }
    for (uint64_t part : parts) words ^= part;
  }
  read_words.fetch_xor(words, std::memory_order_relaxed);
}

Experts::Experts(const ExpertShape& shape, uint32_t max_tokens, Isa isa, ThreadPool& pool)
    : impl_(std::make_unique<Impl>(shape, max_tokens, isa, pool)) {
  if (!isa_available(isa)) {
    throw std::invalid_argument(std::string("isa: got ") + isa_name(isa) +
                                ", expected one that this machine can run");
  }
}

Experts::~Experts() = default;

void Experts::run(const LayerUnits& layer, const StepRows& rows, float* y) {
  impl_->check(rows);
  if (rows.num_tokens == 0) return;
  impl_->output = y;
  {
    const DenormalsOn denormals;
    impl_->prepare(layer, rows);
  }
  impl_->pool.run(impl_->work);
}

uint64_t Experts::read_units(const LayerUnits& layer, const StepRows& rows) {
  impl_->check(rows);
  impl_->routing.sort(rows);
  impl_->layer = layer;
  impl_->items.reset(impl_->routing.active().size() * impl_->shape.num_stripes);
  impl_->read_words.store(0, std::memory_order_relaxed);
  impl_->pool.run(impl_->read_work);
  return impl_->read_words.load(std::memory_order_relaxed);
}

const ExpertShape& Experts::shape() const { return impl_->shape; }

Isa Experts::isa() const { return impl_->table.isa; }

}  // namespace duck
