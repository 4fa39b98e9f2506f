// What a step does otherwise where the weights are int8, int4 or mxfp4: x and the activations rounded to
// groups of bytes, integer kernels on them, and the exact path, which decodes such weights to f32.
#include <algorithm>
#include <cstring>

#include "kernels/experts_impl.h"
#include "kernels/integer_decode.h"
#include "kernels/scale_values.h"

namespace duck {
namespace {

constexpr uint32_t kRecordsAtOnce = 16;  // of down for many rows: 40 KiB of 4-bit weights

}  // namespace

void Experts::Impl::round_x(int thread, int num_threads) {
  const size_t hidden = shape.hidden_size, whole = hidden / kRecordRows;
  auto* groups = reinterpret_cast<HiddenGroup*>(x.data());
  const auto round = [&](const float* values, size_t count, HiddenGroup* to) {
    integers.quantise_hidden(values, static_cast<uint32_t>(count), integer->zero, integer->factor, to);
  };
  for (size_t row = thread; row < rows.num_tokens; row += num_threads) {
    HiddenGroup* to = groups + row * num_records;
    const bool in_place = rows.x_type == ActivationType::kF32;
    if (in_place) round(static_cast<const float*>(rows.x) + row * hidden, whole, to);
    for (size_t group = in_place ? whole : 0; group < num_records; ++group) {
      alignas(64) float values[kRecordRows] = {};
      const size_t first = group * kRecordRows, count = std::min<size_t>(kRecordRows, hidden - first);
      scale_values(rows.x_type, rows.x, row * hidden + first, count, 1.0f, values);
      round(values, 1, to + group);
    }
  }
}

// One unit for one chunk of an expert's rows, a part at a time: that part's records and rows stay in the
// caches. Rows that go through tiles are in the panel.
void Experts::Impl::gate_up_integer(Workspace& workspace, const Unit& at, uint32_t first_pair,
                                    uint32_t count) {
  float* dots = workspace.dots.data();
  float* part = dots + kChunkRows * kDotFloats;
  std::fill_n(dots, count * kDotFloats, 0.0f);
  const uint32_t in_tiles = tiles != nullptr ? rows_in_tiles(count) : 0;
  Stream stream{at.gate_up, {}, 0, 0, at.down, prefetch};
  set_scales(stream, at);
  for (uint32_t first = 0; first < num_records; first += kPartRecords) {
    stream.first_record = first;
    stream.end_record = std::min(num_records, first + kPartRecords);
    stream.next = at.gate_up + static_cast<size_t>(stream.end_record) * 2 * record_bytes(layer.format);
    stream.prefetch_bytes = prefetch;
    if (in_tiles > 0) {
      const int format = integer_index(layer.format, layer.scale_layout);
      tiles->dots[format](stream, workspace.integer_panel.data(), num_records, in_tiles, part);
      stream.prefetch_bytes = 0;
    }
    if (in_tiles < count) {
      part_dots(workspace, at, stream, first_pair + in_tiles, count - in_tiles, part + in_tiles * kDotFloats);
    }
    for (uint32_t i = 0; i < count * kDotFloats; ++i) dots[i] += part[i];
  }
}

// Few rows: stripe by stripe, as they lie in memory. Many: several stripes at once, whose sums stay in
// registers, for some outputs at a time, so that their weights stay in the caches for all rows.
void Experts::Impl::down_integer(size_t index, uint32_t first, uint32_t end) {
  const uint32_t expert = routing.active()[index], count = routing.count(expert);
  const uint32_t pair = routing.begin(expert);
  const bool few = count <= kMaxDirectRows;
  const uint32_t at_once = few ? 1 : kStripesAtOnce;
  const uint32_t records_at_once = few ? end - first : kRecordsAtOnce;
  for (uint32_t stripe = 0; stripe < shape.num_stripes; stripe += at_once) {
    const uint32_t num_stripes = std::min(at_once, shape.num_stripes - stripe);
    DownStripe stripes[kStripesAtOnce];
    for (uint32_t i = 0; i < num_stripes; ++i) {
      const Unit at = unit(expert, stripe + i);
      const uint8_t* next = few ? unit_after(index, stripe + i).down
                                : at.down + records_at_once * down_record_bytes(layer.format);
      stripes[i] = {at.down, down_scales(expert, at), next};
    }
    for (uint32_t from = 0; from < count; from += kChunkRows) {
      const uint32_t num_rows = std::min(kChunkRows, count - from);
      const StripeGroup* groups[kChunkRows];
      for (uint32_t row = 0; row < num_rows; ++row) groups[row] = pair_stripes[pair + from + row] + stripe;
      for (uint32_t record = first; record < end; record += records_at_once) {
        integer->down(stripes, num_stripes, groups, pair_y.data() + pair + from, num_rows, record,
                      std::min(end, record + records_at_once), prefetch);
      }
    }
  }
}

// ---- the exact path ---------------------------------------------------------------------------------------

// As FormatKernels::dots2 for a part's records, decoded to f32: in the order of fp9 and fp8.
void Experts::Impl::exact_dots(Workspace& workspace, const Unit& at, const Stream& stream,
                               uint32_t first_pair, uint32_t count, float* dots) {
  float* decoded = workspace.decoded.data();
  const uint32_t first = stream.first_record, num = stream.end_record - first;
  for (uint32_t i = 0; i < num; ++i) {
    for (int part = 0; part < 2; ++part) {
      decode_gate_up(layer.format, at.gate_up, at.gate_scales, first + i, part,
                     decoded + (2 * i + part) * kRecordWeights);
    }
  }
  Stream mine{reinterpret_cast<const uint8_t*>(decoded), {}, 0, num,
              reinterpret_cast<const uint8_t*>(decoded), 0};
  if (layer.format == WeightFormat::kInt8 && !by_channel) {
    for (int part = 0; part < 2; ++part) {
      mine.scales[part] = stream.scales[part] + 4 * (first / kRecordsPerBlock);
    }
  }
  const float* values[kChunkRows];
  for (uint32_t row = 0; row < count; ++row) values[row] = pair_x[first_pair + row] + first * kRecordRows;
  for (uint32_t row = 0; row < count; row += kMaxDirectRows) {
    kernels->dots2(mine, values + row, std::min(kMaxDirectRows, count - row), dots + row * kDotFloats);
  }
}

void Experts::Impl::exact_down(Workspace& workspace, uint32_t expert, uint32_t first, uint32_t end) {
  static constexpr float kOnes[kPartRecords / kRecordsPerBlock] = {1, 1, 1, 1, 1, 1, 1, 1};
  static_assert(kPartRecords / kRecordsPerBlock == 8);
  float* decoded = workspace.decoded.data();
  const auto* ones = reinterpret_cast<const uint8_t*>(kOnes);
  const uint32_t count = routing.count(expert), pair = routing.begin(expert);
  const FormatKernels::Down direct_down = by_channel ? kernels->down_by_channel : kernels->down;
  for (uint32_t stripe = 0; stripe < shape.num_stripes; ++stripe) {
    const Unit at = unit(expert, stripe);
    // At scale blocks, so that a block's scale goes with its records.
    for (uint32_t from = first, to; from < end; from = to) {
      to = std::min<uint32_t>(end, (from / kRecordsPerBlock + 8) * kRecordsPerBlock);
      const uint32_t block_first = from / kRecordsPerBlock * kRecordsPerBlock;
      for (uint32_t record = from; record < to; ++record) {
        decode_down(layer.format, at.down, at.down_scales, record,
                    decoded + (record - block_first) * kRecordWeights);
      }
      const uint8_t* scales = ones;
      if (layer.format == WeightFormat::kInt8) {
        scales = down_scales(expert, at) +
                 4 * (by_channel ? block_first * kRecordRows : block_first / kRecordsPerBlock);
      }
      for (uint32_t row = 0; row < count; row += kMaxDirectRows) {
        const uint32_t num_rows = std::min(kMaxDirectRows, count - row);
        const float* values[kMaxDirectRows];
        float* out[kMaxDirectRows];
        for (uint32_t i = 0; i < num_rows; ++i) {
          values[i] = pair_activations[pair + row + i] + stripe * kStripeChannels;
          out[i] = pair_y[pair + row + i] + block_first * kRecordRows;
        }
        direct_down(reinterpret_cast<const uint8_t*>(decoded), scales, values, out, num_rows,
                    from - block_first, to - block_first, reinterpret_cast<const uint8_t*>(decoded), 0);
      }
    }
  }
}

}  // namespace duck
