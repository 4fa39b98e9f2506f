// Phase 2 of a step: a thread's range of outputs, summed over all pairs in the order of experts.h.
#include <algorithm>
#include <cstring>

#include "kernels/experts_impl.h"

namespace duck {

// By channel all units of an expert have the same ones: those of the slice's first unit are in the caches.
const uint8_t* Experts::Impl::down_scales(uint32_t expert, const Unit& at) const {
  return by_channel ? unit(expert, 0).down_scales : at.down_scales;
}

TileScales Experts::Impl::down_factors(const uint8_t* scales, uint32_t record, float factor) const {
  if (by_channel) return TileScales::of_lanes(scales + 4 * kRecordRows * record, factor);
  float scale;
  std::memcpy(&scale, scales + 4 * (record / kRecordsPerBlock), 4);
  return TileScales::of_halves(scale * factor, scale * factor);
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
    if (is_exact()) {
      exact_down(*workspaces[thread], expert, first, end);
      continue;
    }
    if (integer != nullptr) {
      down_integer(index, first, end);
      continue;
    }
    if (count > kMaxDirectRows) {
      if (bf16 != nullptr) {
        down_bf16(*workspaces[thread], expert, first, end);
      } else {
        down_tiles(*workspaces[thread], expert, first, end);
      }
      continue;
    }
    const FormatKernels::Down direct_down = by_channel ? kernels->down_by_channel : kernels->down;
    for (uint32_t stripe = 0; stripe < shape.num_stripes; ++stripe) {
      const Unit at = unit(expert, stripe);
      const float* rows_a[kMaxDirectRows];
      for (uint32_t row = 0; row < count; ++row) {
        rows_a[row] = pair_activations[pair + row] + stripe * kStripeChannels;
      }
      direct_down(at.down, down_scales(expert, at), rows_a, pair_y.data() + pair, count, first, end,
                  unit_after(index, stripe).down, prefetch);
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
          const TileScales factors =
              down_factors(down_scales(expert, at), record, sum_postscale(layer.format));
          kernels->tile_of_down(at.down + record * record_bytes(layer.format), workspace.tile.data());
          table.multiply(workspace.panel.data() + i * kStripeChannels / 2, workspace.tile.data(),
                         kStripeChannels / 2, factors.lanes, out, count);
        }
      }
    }
  }
  workspace.panel_of = UINT64_MAX;
}

// The stripes of one block of 128 channels, of all of them that the slice has, are one sum.
void Experts::Impl::down_bf16(Workspace& workspace, uint32_t expert, uint32_t first, uint32_t end) {
  const uint32_t pairs = routing.count(expert), chunks = num_chunks(expert);
  const auto& format = bf16->formats[static_cast<int>(layer.format)];
  uint32_t* const panel = workspace.bf16_panel.data();
  uint32_t* const tile = workspace.bf16_tile.data();
  constexpr uint32_t kStripePairs = kStripeChannels / 2;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const uint32_t first_row = pairs * chunk / chunks, count = pairs * (chunk + 1) / chunks - first_row;
    const uint32_t pair = routing.begin(expert) + first_row;
    for (uint32_t stripe = 0, num_stripes; stripe < shape.num_stripes; stripe += num_stripes) {
      const uint32_t in_block = kStripesPerBlock - (shape.first_stripe + stripe) % kStripesPerBlock;
      num_stripes = std::min(in_block, shape.num_stripes - stripe);
      for (uint32_t row = 0; row < count; ++row) {
        bf16->fill_panel(pair_activations[pair + row] + stripe * kStripeChannels,
                         num_stripes * kStripeChannels, panel + row * kBf16Pairs);
      }
      const uint8_t* records[kStripesPerBlock];
      for (uint32_t i = 0; i < num_stripes; ++i) records[i] = unit(expert, stripe + i).down;
      const uint8_t* scales = down_scales(expert, unit(expert, stripe));
      const uint32_t num_pairs = ceil_div(num_stripes * kStripePairs, kBf16StepPairs) * kBf16StepPairs;
      std::fill(tile + num_stripes * kStripePairs * kBf16Lanes, tile + num_pairs * kBf16Lanes, 0u);
      for (uint32_t record = first; record < end; ++record) {
        const TileScales factors = down_factors(scales, record, bf16_postscale(layer.format));
        for (uint32_t i = 0; i < num_stripes; ++i) {
          format.tile_of_down(records[i] + record * record_bytes(layer.format),
                              tile + i * kStripePairs * kBf16Lanes);
        }
        float* out[kChunkRows];
        for (uint32_t row = 0; row < count; ++row) out[row] = pair_y[pair + row] + record * kRecordRows;
        bf16->multiply(panel, tile, num_pairs, factors.lanes, out, count);
      }
    }
  }
  workspace.panel_of = UINT64_MAX;
}

}  // namespace duck
