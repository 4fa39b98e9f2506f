// Phase 1 of a step: gate, up and SiLU give each (row, expert) pair its activations.
#include <algorithm>
#include <cstring>

#include "kernels/experts_impl.h"

namespace duck {

// Scales by channel come when the dot products are whole; of groups these are the zero points.
void Experts::Impl::set_scales(Stream& stream, const Unit& at) const {
  if (by_channel) return;
  stream.scales[0] = at.gate_scales;
  stream.scales[1] = at.up_scales;
}

// dots: [2][16] of a pair, on which scales by channel are still to come.
void Experts::Impl::activate(uint32_t pair, uint32_t stripe, const Unit& at, float* dots) {
  if (by_channel) {
    float scales[kDotFloats];
    std::memcpy(scales, at.gate_scales, sizeof(scales));  // up's follow
    for (uint32_t lane = 0; lane < kDotFloats; ++lane) dots[lane] *= scales[lane];
  }
  if (integer == nullptr) {
    table.activate(dots, routing.weight(pair), x_factor, channels_of(stripe),
                   pair_activations[pair] + stripe * kStripeChannels);
    return;
  }
  alignas(64) float values[kStripeChannels];
  table.activate(dots, routing.weight(pair), x_factor, channels_of(stripe), values);
  integers.quantise_stripe(values, integer->zero, integer->factor, pair_stripes[pair] + stripe);
}

// Few rows: one part of one unit for all the expert's rows. Who finishes a unit's last part adds the parts
// up.
void Experts::Impl::gate_up_part(Workspace& workspace, uint64_t item) {
  const uint32_t part = item % num_parts;
  const uint64_t index = item / num_parts;
  const uint32_t stripe = index % shape.num_stripes;
  const auto& active = routing.active();
  const uint32_t expert = active[index / shape.num_stripes];
  const uint32_t first_pair = routing.begin(expert), count = routing.count(expert);
  const Unit at = unit(expert, stripe);

  Stream stream;
  stream.records = at.gate_up;
  set_scales(stream, at);
  stream.first_record = part * kPartRecords;
  stream.end_record = std::min(num_records, stream.first_record + kPartRecords);
  stream.next = part + 1 < num_parts
                    ? at.gate_up + static_cast<size_t>(stream.end_record) * 2 * record_bytes(layer.format)
                    : unit_after(index / shape.num_stripes, stripe).gate_up;
  stream.prefetch_bytes = prefetch;

  // [part][row] of this unit; rows are few, so the parts of one row are near each other.
  float* unit_dots =
      partial_dots.data() +
      (static_cast<size_t>(first_pair) * shape.num_stripes + stripe * count) * num_parts * kDotFloats;
  const size_t part_floats = static_cast<size_t>(count) * kDotFloats;
  part_dots(workspace, at, stream, first_pair, count, unit_dots + part * part_floats);
  if (parts_left[index].fetch_sub(1, std::memory_order_acq_rel) != 1) return;

  for (uint32_t row = 0; row < count; ++row) {
    float dots[kDotFloats] = {};
    for (uint32_t i = 0; i < num_parts; ++i) {
      for (uint32_t lane = 0; lane < kDotFloats; ++lane) {
        dots[lane] += unit_dots[i * part_floats + row * kDotFloats + lane];
      }
    }
    activate(first_pair + row, stripe, at, dots);
  }
}

// dots: [count][2][16] of one part.
void Experts::Impl::part_dots(Workspace& workspace, const Unit& at, const Stream& stream, uint32_t first_pair,
                              uint32_t count, float* dots) {
  if (integer != nullptr) {
    integer->dots(stream, pair_groups.data() + first_pair, count, dots);
  } else if (is_exact()) {
    exact_dots(workspace, at, stream, first_pair, count, dots);
  } else {
    kernels->dots2(stream, pair_x.data() + first_pair, count, dots);
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
  if (is_integer(layer.format)) {
    if (tiles != nullptr && rows_in_tiles(count) > 0 && workspace.panel_of != item - stripe) {
      workspace.panel_of = item - stripe;
      tiles->fill_panel(pair_groups.data() + first_pair, rows_in_tiles(count), num_records,
                        workspace.integer_panel.data());
    }
    gate_up_integer(workspace, at, first_pair, count);
  } else if (count <= kMaxDirectRows) {
    Stream stream{at.gate_up, {}, 0, num_records, at.gate_up, prefetch};
    set_scales(stream, at);
    kernels->dots2(stream, pair_x.data() + first_pair, count, dots);
  } else {
    if (workspace.panel_of != item - stripe) {
      workspace.panel_of = item - stripe;
      fill_panels(workspace, first_pair, count);
    }
    gate_up_tiles(workspace, at, count);
  }
  for (uint32_t row = 0; row < count; ++row) activate(first_pair + row, stripe, at, dots + row * kDotFloats);
}

void Experts::Impl::fill_panels(Workspace& workspace, uint32_t first_pair, uint32_t count) {
  for (uint32_t row = 0; row < count; ++row) {
    for (size_t k = 0; k < row_floats; k += kScaleBlock) {
      const float* values = pair_x[first_pair + row] + k;
      const uint32_t num_values = std::min<size_t>(kScaleBlock, row_floats - k);
      if (bf16 != nullptr) {
        bf16->fill_panel(values, num_values,
                         workspace.bf16_panel.data() + k / 2 * kChunkRows + row * kBf16Pairs);
      } else {
        table.fill_panel(values, num_values, workspace.panel.data() + k * kChunkRows + row * kPanelStride);
      }
    }
  }
}

void Experts::Impl::gate_up_tiles(Workspace& workspace, const Unit& at, uint32_t count) {
  float* dots = workspace.dots.data();
  float* part = dots + kChunkRows * kDotFloats;
  float* part_rows[kChunkRows];
  for (uint32_t row = 0; row < count; ++row) part_rows[row] = part + row * kDotFloats;
  std::fill_n(dots, count * kDotFloats, 0.0f);
  const size_t bytes = record_bytes(layer.format);
  const float postscale = bf16 != nullptr ? bf16_postscale(layer.format) : sum_postscale(layer.format);
  for (uint32_t first = 0; first < num_records; first += kRecordsPerBlock) {
    const uint32_t block = first / kRecordsPerBlock;
    if (block % kPartBlocks == 0) std::fill_n(part, count * kDotFloats, 0.0f);
    const uint32_t records = std::min<uint32_t>(kRecordsPerBlock, num_records - first);
    const uint8_t* from = at.gate_up + 2 * bytes * first;
    const size_t panel_row = static_cast<size_t>(block) * kChunkRows;
    float scales[2] = {1.0f, 1.0f};
    if (!by_channel) {
      std::memcpy(&scales[0], at.gate_scales + 4 * block, 4);
      std::memcpy(&scales[1], at.up_scales + 4 * block, 4);
    }
    const TileScales factors = TileScales::of_halves(scales[0] * postscale, scales[1] * postscale);
    if (bf16 != nullptr) {
      uint32_t* tile = workspace.bf16_tile.data();
      bf16->formats[static_cast<int>(layer.format)].tile_of_streams(from, bytes, 2 * bytes, records, tile);
      bf16->multiply(workspace.bf16_panel.data() + panel_row * kBf16Pairs, tile, records * kRecordRows / 2,
                     factors.lanes, part_rows, count);
    } else {
      float* tile = workspace.tile.data();
      kernels->tile_of_streams(from, bytes, 2 * bytes, records, tile);
      table.multiply(workspace.panel.data() + panel_row * kPanelStride, tile, records * kRecordRows / 2,
                     factors.lanes, part_rows, count);
    }
    if (block % kPartBlocks == kPartBlocks - 1 || first + records == num_records) {
      for (uint32_t i = 0; i < count * kDotFloats; ++i) dots[i] += part[i];
    }
  }
}

}  // namespace duck
