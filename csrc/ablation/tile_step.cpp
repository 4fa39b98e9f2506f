#include "ablation/tile_step.h"

#include <algorithm>
#include <cstring>

namespace duck::ablation {

TileStep::TileStep(uint32_t hidden_size, uint32_t num_stripes, uint32_t max_experts, uint32_t max_rows,
                   Isa isa, ThreadPool& pool)
    : hidden_size_(hidden_size),
      num_stripes_(num_stripes),
      num_records_(hidden_size / kRecordRows),
      max_rows_(max_rows),
      table_(kernel_table(isa)),
      kernels_(table_.formats[static_cast<int>(WeightFormat::kFp9)]),
      pool_(pool),
      scaled_x_(static_cast<size_t>(max_rows) * hidden_size),
      activations_(static_cast<size_t>(max_experts) * max_rows * num_stripes * kStripeChannels),
      items_(pool.num_threads()),
      work_([this](int thread) { work(thread); }) {
  for (int thread = 0; thread < pool.num_threads(); ++thread) {
    workspaces_.push_back(std::make_unique<Workspace>(static_cast<size_t>(max_rows) * hidden_size,
                                                      2 * static_cast<size_t>(max_rows) * kDotFloats));
  }
}

Unit TileStep::unit(size_t index, uint32_t stripe) const {
  const size_t size = unit_bytes(WeightFormat::kFp9, hidden_size_);
  return Unit(layer_.base + experts_[index].first * layer_.expert_bytes + stripe * size, WeightFormat::kFp9,
              hidden_size_);
}

void TileStep::run(const TileVariant& variant, uint32_t chunk_rows, const Layer& layer, const int32_t* ids,
                   const float* weights, uint32_t num_experts, const float* x, uint32_t num_rows, float* y) {
  multiply_ = variant.multiply;
  chunk_rows_ = chunk_rows;
  num_rows_ = num_rows;
  layer_ = layer;
  experts_.clear();
  for (uint32_t k = 0; k < num_experts; ++k) experts_.emplace_back(ids[k], weights[k]);
  std::sort(experts_.begin(), experts_.end());
  x_ = x;
  y_ = y;
  for (auto& workspace : workspaces_) workspace->panel_of = UINT32_MAX;
  items_.reset(static_cast<uint64_t>(num_chunks()) * num_experts * num_stripes_);
  pool_.run(work_);
}

void TileStep::work(int thread) {
  for (uint32_t row = thread; row < num_rows_; row += pool_.num_threads()) {
    const float* from = x_ + static_cast<size_t>(row) * hidden_size_;
    float* to = scaled_x_.data() + static_cast<size_t>(row) * hidden_size_;
    for (uint32_t i = 0; i < hidden_size_; ++i) to[i] = from[i] * prescale(WeightFormat::kFp9);
  }
  pool_.barrier();
  Workspace& workspace = *workspaces_[thread];
  for (uint64_t item; (item = items_.take(thread)) != WorkRanges::kNone;) gate_up_unit(workspace, item);
  pool_.barrier();
  const uint32_t first = num_records_ * thread / pool_.num_threads();
  const uint32_t end = num_records_ * (thread + 1) / pool_.num_threads();
  for (uint32_t row = 0; row < num_rows_; ++row) {
    float* out = y_ + static_cast<size_t>(row) * hidden_size_;
    std::fill(out + first * kRecordRows, out + end * kRecordRows, 0.0f);
  }
  for (size_t expert = 0; expert < experts_.size(); ++expert) {
    for (uint32_t chunk = 0; chunk < num_chunks(); ++chunk) {
      const uint32_t first_row = num_rows_ * chunk / num_chunks();
      down_chunk(workspace, expert, first_row, num_rows_ * (chunk + 1) / num_chunks() - first_row, thread);
    }
  }
}

// One stripe of one expert for one chunk. The chunk is the slowest index: all experts use the same x.
void TileStep::gate_up_unit(Workspace& workspace, uint64_t item) {
  const uint32_t stripe = item % num_stripes_;
  const size_t expert = item / num_stripes_ % experts_.size();
  const uint32_t chunk = item / num_stripes_ / experts_.size();
  const uint32_t first_row = num_rows_ * chunk / num_chunks();
  const uint32_t count = num_rows_ * (chunk + 1) / num_chunks() - first_row;
  if (workspace.panel_of != chunk) {
    workspace.panel_of = chunk;
    for (uint32_t row = 0; row < count; ++row) {
      for (uint32_t k = 0; k < hidden_size_; k += kScaleBlock) {
        table_.fill_panel(scaled_x_.data() + static_cast<size_t>(first_row + row) * hidden_size_ + k,
                          kScaleBlock,
                          workspace.panel.data() + static_cast<size_t>(k) * chunk_rows_ + row * kPanelStride);
      }
    }
  }
  const Unit at = unit(expert, stripe);
  float* dots = workspace.dots.data();
  float* part = dots + static_cast<size_t>(count) * kDotFloats;
  std::vector<float*> part_rows;
  for (uint32_t row = 0; row < count; ++row) part_rows.push_back(part + row * kDotFloats);
  std::fill_n(dots, count * kDotFloats, 0.0f);
  const size_t bytes = record_bytes(WeightFormat::kFp9);
  for (uint32_t first = 0; first < num_records_; first += kRecordsPerBlock) {
    const uint32_t block = first / kRecordsPerBlock;
    if (block % kPartBlocks == 0) std::fill_n(part, count * kDotFloats, 0.0f);
    kernels_.tile_of_streams(at.gate_up + 2 * bytes * first, bytes, 2 * bytes, kRecordsPerBlock,
                             workspace.tile.data());
    float scales[2];
    std::memcpy(&scales[0], at.gate_scales + 4 * block, 4);
    std::memcpy(&scales[1], at.up_scales + 4 * block, 4);
    for (float& scale : scales) scale *= sum_postscale(WeightFormat::kFp9);
    const TileScales factors = TileScales::of_halves(scales[0], scales[1]);
    multiply_(workspace.panel.data() + static_cast<size_t>(block) * chunk_rows_ * kPanelStride,
              workspace.tile.data(), kScaleBlock / 2, factors.lanes, part_rows.data(), count);
    if (block % kPartBlocks == kPartBlocks - 1 || first + kRecordsPerBlock == num_records_) {
      for (uint32_t i = 0; i < count * kDotFloats; ++i) dots[i] += part[i];
    }
  }
  for (uint32_t row = 0; row < count; ++row) {
    float* activations = activations_.data() +
                         ((expert * max_rows_ + first_row + row) * num_stripes_ + stripe) * kStripeChannels;
    table_.activate(dots + row * kDotFloats, experts_[expert].second, prescale(WeightFormat::kFp9),
                    kStripeChannels, activations);
  }
}

void TileStep::down_chunk(Workspace& workspace, size_t expert, uint32_t first_row, uint32_t count,
                          int thread) {
  const uint32_t first = num_records_ * thread / pool_.num_threads();
  const uint32_t end = num_records_ * (thread + 1) / pool_.num_threads();
  std::vector<float*> out(count);
  for (uint32_t stripe = 0; stripe < num_stripes_; stripe += kStripesPerBlock) {
    const uint32_t num_stripes = std::min<uint32_t>(kStripesPerBlock, num_stripes_ - stripe);
    for (uint32_t row = 0; row < count; ++row) {
      table_.fill_panel(
          activations_.data() +
              ((expert * max_rows_ + first_row + row) * num_stripes_ + stripe) * kStripeChannels,
          num_stripes * kStripeChannels, workspace.panel.data() + row * kPanelStride);
    }
    for (uint32_t record = first; record < end; ++record) {
      for (uint32_t row = 0; row < count; ++row) {
        out[row] = y_ + static_cast<size_t>(first_row + row) * hidden_size_ + record * kRecordRows;
      }
      for (uint32_t i = 0; i < num_stripes; ++i) {
        const Unit at = unit(expert, stripe + i);
        kernels_.tile_of_down(at.down + record * record_bytes(WeightFormat::kFp9), workspace.tile.data());
        float scale;
        std::memcpy(&scale, at.down_scales + 4 * (record / kRecordsPerBlock), 4);
        scale *= sum_postscale(WeightFormat::kFp9);
        const TileScales factors = TileScales::of_halves(scale, scale);
        multiply_(workspace.panel.data() + i * kStripeChannels / 2, workspace.tile.data(),
                  kStripeChannels / 2, factors.lanes, out.data(), count);
      }
    }
  }
  workspace.panel_of = UINT32_MAX;
}

}  // namespace duck::ablation
