// Linear: few rows stream the weight through the direct kernels; many rows go through tiles and a panel of x
// that all threads share. Both sum in the order of linear.h.
//
// Few rows: the work is cut into groups of outputs, and where those are few for the threads into parts of a
// group, whose sums wait in scratch until the last finisher of the group adds them up. A thread's items lie
// one after another in memory. Many rows: all threads fill the panel, and after a barrier take (group, chunk
// of rows) items.
#include "kernels/linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/denormals.h"
#include "kernels/float_buffer.h"
#include "kernels/kernel_table.h"
#include "kernels/pack_linear.h"
#include "kernels/scale_values.h"
#include "kernels/tile_scales.h"
#include "threads/thread_pool.h"
#include "threads/work_ranges.h"

namespace duck {
namespace {

constexpr uint32_t kItemsPerThread = 32;    // fewer groups a thread: items are parts of them
constexpr size_t kInlineBytes = 128 << 10;  // a weight that is read sooner than other threads are woken
constexpr uint32_t kChunkFloats = Linear::kChunkRows * kTileLanes;

uint32_t checked_size(const char* field, uint32_t value) {
  constexpr uint32_t kMost = 1u << 24;
  if (value == 0) fail_shape(field, value, "at least 1");
  if (value > kMost) fail_shape(field, value, "at most " + std::to_string(kMost));
  return value;
}

void add_to(float* sums, const float* more, size_t count) {
  for (size_t i = 0; i < count; ++i) sums[i] += more[i];
}

}  // namespace

struct Linear::Impl {
  Impl(uint32_t max_rows_, uint32_t max_in_features_, Isa isa, ThreadPool& pool_)
      : max_rows(std::min(checked_size("max_rows", max_rows_), kPanelRowsMost)),
        max_in_features(checked_size("max_in_features", max_in_features_)),
        table(kernel_table(isa)),
        pool(pool_),
        max_parts(ceil_div(ceil_div(max_in_features, kRecordRows), kPartRecords)),
        most_split_groups(kItemsPerThread * pool.num_threads()),
        x(static_cast<size_t>(kMaxDirectRows) * padded_hidden(max_in_features)),
        panel(max_rows <= kMaxDirectRows ? 0
                                         : ceil_div(max_in_features, kScaleBlock) * max_rows * kPanelStride),
        partial_dots(max_parts == 1
                         ? 0
                         : static_cast<size_t>(most_split_groups) * max_parts * kMaxDirectRows * kTileLanes),
        parts_left(most_split_groups),
        items(pool.num_threads()),
        work([this](int thread) {
          const DenormalsOn denormals;
          if (few_rows()) return stream_groups(thread);
          fill_panel(thread);
          pool.barrier();
          multiply_groups(thread);
        }) {
    for (uint32_t row = 0; row < kMaxDirectRows; ++row) {
      x_rows[row] = x.data() + row * padded_hidden(max_in_features);
    }
    for (int thread = 0; thread < pool.num_threads(); ++thread) {
      workspaces.push_back(std::make_unique<Workspace>());
    }
  }

  struct Workspace {
    FloatBuffer tile{static_cast<size_t>(kScaleBlock) * kTileLanes};
    FloatBuffer sums{2 * kChunkFloats};  // total and part of each row
  };

  const uint32_t max_rows, max_in_features;
  const KernelTable& table;
  ThreadPool& pool;
  const uint32_t max_parts;
  const uint32_t prefetch_ahead = prefetch_bytes();
  const uint32_t most_split_groups;               // groups that may be cut into parts
  FloatBuffer x;                                  // [kMaxDirectRows, K'] x * prescale, zero beyond K
  FloatBuffer panel;                              // [blocks, T, 128]
  FloatBuffer partial_dots;                       // [groups, parts, T, 32]
  std::vector<std::atomic<uint32_t>> parts_left;  // [groups]
  std::vector<std::unique_ptr<Workspace>> workspaces;
  const float* x_rows[kMaxDirectRows];

  // What run() has published.
  LinearWeight weight;
  LinearRows rows;
  float* y = nullptr;
  uint32_t num_records = 0, num_parts = 0, num_groups = 0, num_chunks = 0;
  bool split = false;  // items are parts of groups
  WorkRanges items;
  const std::function<void(int)> work;

  bool few_rows() const { return rows.num_rows <= kMaxDirectRows; }
  // One thread alone, which takes the items of all.
  bool reads_little() const {
    return few_rows() && num_groups * group_bytes(weight.in_features, weight.format) <= kInlineBytes;
  }
  const FormatKernels& kernels() const { return table.formats[static_cast<int>(weight.format)]; }
  const uint8_t* group_records(uint32_t group) const {
    return weight.records + group * group_bytes(weight.in_features, weight.format);
  }
  // The scales of a group; null where the format has none.
  const float* group_scales(uint32_t group) const {
    if (!has_scales(weight.format)) return nullptr;
    return weight.scales + group * kGroupOutputs / kScaleBlock * ceil_div(weight.in_features, kScaleBlock);
  }

  void prepare(const LinearWeight& next_weight, const LinearRows& next_rows, float* next_y) {
    weight = next_weight;
    weight.format = kernel_format(weight.format);
    rows = next_rows;
    y = next_y;
    num_records = ceil_div(weight.in_features, kRecordRows);
    num_parts = ceil_div(num_records, kPartRecords);
    num_groups = ceil_div(weight.out_features, kGroupOutputs);
    if (!few_rows()) {
      num_chunks = ceil_div(rows.num_rows, kChunkRows);
      items.reset(static_cast<uint64_t>(num_groups) * num_chunks);
      return;
    }
    const DenormalsOn denormals;
    for (uint32_t row = 0; row < rows.num_rows; ++row) {
      scale_row(row, 0, weight.in_features, num_records * kRecordRows,
                x.data() + row * padded_hidden(max_in_features));
    }
    split = num_parts > 1 && num_groups <= most_split_groups;
    if (split) {
      for (uint32_t group = 0; group < num_groups; ++group) {
        parts_left[group].store(num_parts, std::memory_order_relaxed);
      }
    }
    items.reset(static_cast<uint64_t>(num_groups) * (split ? num_parts : 1));
  }

  // values[i] = x[row, first + i] * prescale for i < count, zero up to `padded`.
  void scale_row(size_t row, size_t first, size_t count, size_t padded, float* values) const {
    scale_values(rows.type, rows.x, row * weight.in_features + first, count, prescale(weight.format), values);
    std::fill(values + count, values + padded, 0.0f);
  }

  void store(uint32_t group, uint32_t first_row, uint32_t num_rows, const float* sums) const {
    const size_t first = group * kGroupOutputs;
    const size_t count = std::min<size_t>(kGroupOutputs, weight.out_features - first);
    for (size_t row = 0; row < num_rows; ++row) {
      std::memcpy(y + (first_row + row) * weight.out_features + first, sums + row * kGroupOutputs,
                  count * sizeof(float));
    }
  }

  // ---- few rows -----------------------------------------------------------------------------------------

  void stream_groups(int thread) {
    const size_t num_sums = rows.num_rows * kGroupOutputs;
    float sums[kMaxDirectRows * kGroupOutputs], part_sums[kMaxDirectRows * kGroupOutputs];
    for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
      const auto group = static_cast<uint32_t>(split ? item / num_parts : item);
      if (!split) {
        std::fill_n(sums, num_sums, 0.0f);
        for (uint32_t part = 0; part < num_parts; ++part) {
          stream_part(group, part, part_sums);
          add_to(sums, part_sums, num_sums);
        }
      } else {
        float* group_dots = partial_dots.data() + static_cast<size_t>(group) * num_parts * num_sums;
        const auto part = static_cast<uint32_t>(item % num_parts);
        stream_part(group, part, group_dots + part * num_sums);
        if (parts_left[group].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
        std::fill_n(sums, num_sums, 0.0f);
        for (uint32_t i = 0; i < num_parts; ++i) add_to(sums, group_dots + i * num_sums, num_sums);
      }
      store(group, 0, rows.num_rows, sums);
    }
  }

  void stream_part(uint32_t group, uint32_t part, float* dots) const {
    Stream stream;
    stream.records = group_records(group);
    const auto* scales = reinterpret_cast<const uint8_t*>(group_scales(group));
    stream.scales[0] = stream.scales[1] = scales;
    stream.first_record = part * kPartRecords;
    stream.end_record = std::min(num_records, stream.first_record + kPartRecords);
    // The next part lies right behind; behind the last one a prefetch reads nothing that is used.
    stream.next = stream.records + static_cast<size_t>(stream.end_record) * 2 * record_bytes(weight.format);
    stream.prefetch_bytes = prefetch_ahead;
    kernels().dots2(stream, x_rows, rows.num_rows, dots);
  }

  // ---- many rows ----------------------------------------------------------------------------------------

  void fill_panel(int thread) {
    const size_t first = static_cast<size_t>(rows.num_rows) * thread / pool.num_threads();
    const size_t end = static_cast<size_t>(rows.num_rows) * (thread + 1) / pool.num_threads();
    const size_t padded = static_cast<size_t>(num_records) * kRecordRows;
    float values[kScaleBlock];
    for (size_t row = first; row < end; ++row) {
      for (size_t k = 0; k < weight.in_features; k += kScaleBlock) {
        const size_t room = std::min<size_t>(kScaleBlock, padded - k);
        scale_row(row, k, std::min(room, weight.in_features - k), room, values);
        table.fill_panel(values, static_cast<uint32_t>(room),
                         panel.data() + k * rows.num_rows + row * kPanelStride);
      }
    }
  }

  void multiply_groups(int thread) {
    Workspace& workspace = *workspaces[thread];
    float* sums = workspace.sums.data();
    float* part = sums + kChunkFloats;
    float* part_rows[kChunkRows];
    for (uint32_t row = 0; row < kChunkRows; ++row) part_rows[row] = part + row * kTileLanes;
    const size_t bytes = record_bytes(weight.format);
    for (uint64_t item; (item = items.take(thread)) != WorkRanges::kNone;) {
      const auto group = static_cast<uint32_t>(item / num_chunks),
                 chunk = static_cast<uint32_t>(item % num_chunks);
      const uint32_t first_row = rows.num_rows * chunk / num_chunks;  // chunks as even as can be
      const uint32_t count = rows.num_rows * (chunk + 1) / num_chunks - first_row;
      const float* scales = group_scales(group);
      std::fill_n(sums, count * kTileLanes, 0.0f);
      for (uint32_t first = 0; first < num_records; first += kRecordsPerBlock) {
        const uint32_t block = first / kRecordsPerBlock;
        const uint32_t records = std::min<uint32_t>(kRecordsPerBlock, num_records - first);
        if (block % kPartBlocks == 0) std::fill_n(part, count * kTileLanes, 0.0f);
        kernels().tile_of_streams(group_records(group) + 2 * bytes * first, bytes, 2 * bytes, records,
                                  workspace.tile.data());
        const float scale = scales ? scales[block] * sum_postscale(weight.format) : 1.0f;
        const TileScales factors = TileScales::of_halves(scale, scale);
        table.multiply(panel.data() + (static_cast<size_t>(block) * rows.num_rows + first_row) * kPanelStride,
                       workspace.tile.data(), records * kRecordRows / 2, factors.lanes, part_rows, count);
        if (block % kPartBlocks == kPartBlocks - 1 || first + records == num_records) {
          add_to(sums, part, count * kTileLanes);
        }
      }
      store(group, first_row, count, sums);
    }
  }
};

Linear::Linear(uint32_t max_rows, uint32_t max_in_features, Isa isa, ThreadPool& pool)
    : impl_(std::make_unique<Impl>(max_rows, max_in_features, isa, pool)) {
  if (!isa_available(isa)) {
    throw std::invalid_argument(std::string("isa: got ") + isa_name(isa) +
                                ", expected one that this machine can run");
  }
}

Linear::~Linear() = default;

void Linear::run(const LinearWeight& weight, const LinearRows& rows, float* y) {
  checked_size("out_features", weight.out_features);
  checked_size("in_features", weight.in_features);
  if (weight.in_features > impl_->max_in_features) {
    fail_shape("in_features", weight.in_features, "at most " + std::to_string(impl_->max_in_features));
  }
  ThreadPool::Claim claim(impl_->pool, "Linear.run");
  const size_t row_bytes =
      static_cast<size_t>(weight.in_features) * (rows.type == ActivationType::kF32 ? 4 : 2);
  const uint32_t most = std::max(impl_->max_rows, kMaxDirectRows);
  for (uint32_t first = 0; first < rows.num_rows; first += most) {
    LinearRows turn = rows;
    turn.num_rows = std::min(most, rows.num_rows - first);
    turn.x = static_cast<const uint8_t*>(rows.x) + first * row_bytes;
    impl_->prepare(weight, turn, y + static_cast<size_t>(first) * weight.out_features);
    if (impl_->reads_little()) {
      impl_->work(0);
    } else {
      claim.run(impl_->work);
    }
  }
}

Isa Linear::isa() const { return impl_->table.isa; }

uint32_t Linear::max_in_features() const { return impl_->max_in_features; }

}  // namespace duck
