// The packer: see pack.h and docs/weight-format.md.
#include "kernels/pack.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "kernels/scale_blocks.h"
#include "kernels/weight_format.h"

static_assert(std::endian::native == std::endian::little, "the payload is little-endian");

namespace duck {
namespace {

constexpr uint8_t magnitude_of(uint8_t e4m3) {
  const uint8_t value = e4m3 & 0x7f;
  // Exponent bias 7 becomes 23, and what e4m3 stores as a subnormal, m * 2^-9, has room to be normal.
  return value < 8 ? kSmallMagnitudes[value] : static_cast<uint8_t>(value + 0x80);
}

constexpr std::array<uint8_t, 256> kMagnitudes = [] {
  std::array<uint8_t, 256> table{};
  for (int byte = 0; byte < 256; ++byte) table[byte] = magnitude_of(static_cast<uint8_t>(byte));
  return table;
}();

}  // namespace

void pack_rows(const RecordSource& source, size_t first_row, WeightFormat format, uint8_t* record) {
  for (size_t lane = 0; lane < source.lanes; ++lane) {
    const uint8_t* bytes = source.first + lane * source.lane_stride;
    uint32_t signs = 0;
    for (size_t i = 0; i < source.rows; ++i) {
      const int row = static_cast<int>(first_row + i);
      const uint8_t byte = bytes[i * source.row_stride];
      const bool is_fp9 = format == WeightFormat::kFp9;
      if (format == WeightFormat::kInt8) {
        record[int8_index(row, static_cast<int>(lane))] = byte;
        continue;
      }
      record[weight_index(row, static_cast<int>(lane))] = is_fp9 ? kMagnitudes[byte] : byte;
      signs |= static_cast<uint32_t>(byte >> 7) << sign_bit(row);
    }
    if (format != WeightFormat::kFp9) continue;
    uint8_t* word = record + kRecordWeights + 4 * lane;
    uint32_t others;
    std::memcpy(&others, word, 4);
    signs |= others;
    std::memcpy(word, &signs, 4);
  }
}

namespace {

void pack_block_scales(const E4m3Expert& expert, size_t first_channel, uint8_t* section) {
  const size_t hidden_blocks = ceil_div(expert.hidden_size, kScaleBlock),
               channel_blocks = ceil_div(expert.intermediate_size, kScaleBlock);
  const size_t channel_block = first_channel / kScaleBlock;
  for (size_t block = 0; block < hidden_blocks; ++block) {
    const float scales[3] = {expert.gate_scale[channel_block * hidden_blocks + block],
                             expert.up_scale[channel_block * hidden_blocks + block],
                             expert.down_scale[block * channel_blocks + channel_block]};
    for (size_t i = 0; i < 3; ++i) std::memcpy(section + 4 * (i * hidden_blocks + block), &scales[i], 4);
  }
}

void pack_channel_scales(const E4m3Expert& expert, size_t first_channel, size_t channels, uint8_t* section) {
  std::memcpy(section, expert.gate_scale + first_channel, 4 * channels);
  std::memcpy(section + 4 * kStripeChannels, expert.up_scale + first_channel, 4 * channels);
  std::memcpy(section + 8 * kStripeChannels, expert.down_scale, 4 * expert.hidden_size);
}

void pack_unit(const E4m3Expert& expert, size_t stripe, WeightFormat format, uint8_t* unit) {
  const size_t hidden = expert.hidden_size, intermediate = expert.intermediate_size;
  const size_t first_channel = stripe * kStripeChannels;
  const size_t channels = std::min<size_t>(kStripeChannels, intermediate - first_channel);

  const size_t scale_bytes = unit_scale_bytes(format, hidden, expert.scale_layout);
  std::memset(unit, 0, scale_bytes);
  if (expert.scale_layout == ScaleLayout::kChannel) {
    pack_channel_scales(expert, first_channel, channels, unit);
  } else {
    pack_block_scales(expert, first_channel, unit);
  }

  const size_t num_records = padded_hidden(hidden) / kRecordRows, bytes = record_bytes(format);
  uint8_t* gate_up = unit + scale_bytes;
  uint8_t* down = gate_up + 2 * num_records * bytes;
  std::memset(gate_up, format == WeightFormat::kInt8 ? kInt8CodeOfZero : 0, 3 * num_records * bytes);
  for (size_t index = 0; index < num_records; ++index) {
    const size_t first = index * kRecordRows;
    const size_t rows = std::min<size_t>(kRecordRows, hidden - first);
    for (int part = 0; part < 2; ++part) {
      const uint8_t* matrix = part == 0 ? expert.gate : expert.up;
      pack_rows({matrix + first_channel * hidden + first, 1, hidden, rows, channels}, 0, format,
                gate_up + (2 * index + part) * bytes);
    }
    for (size_t tile = 0; tile < 2; ++tile) {
      const size_t first_output = first + tile * kStripeChannels;
      if (first_output >= hidden) break;
      const size_t outputs = std::min<size_t>(kStripeChannels, hidden - first_output);
      pack_rows(
          {expert.down + first_output * intermediate + first_channel, 1, intermediate, channels, outputs},
          tile * kStripeChannels, format, down + index * bytes);
    }
  }
}

}  // namespace

uint8_t fp9_magnitude(uint8_t e4m3) { return kMagnitudes[e4m3]; }

size_t count_nan_e4m3(const uint8_t* bytes, size_t size) {
  size_t count = 0;
  for (size_t i = 0; i < size; ++i) count += (bytes[i] & 0x7f) == 0x7f;
  return count;
}

void pack_expert_units(const E4m3Expert& expert, WeightFormat format, uint8_t* units) {
  const size_t num_stripes = ceil_div(expert.intermediate_size, kStripeChannels);
  for (size_t stripe = 0; stripe < num_stripes; ++stripe) {
    pack_unit(expert, stripe, format,
              units + stripe * unit_bytes(format, expert.hidden_size, expert.scale_layout));
  }
}

uint8_t e4m3_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24) & 0x80;
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  if (magnitude >= 448.0f) return sign | 0x7e;
  // Below 2^-6 the grid is 2^-9 wide: adding 2^14 (whose last f32 bit is worth 2^-9) rounds to it.
  if (magnitude < 0x1p-6f) {
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(magnitude + 0x1p14f) -
                                       std::bit_cast<uint32_t>(0x1p14f));
  }
  // Elsewhere keep 3 mantissa bits, ties to even; a carry into the exponent is the next power of two.
  const uint32_t rounded = (bits & 0x7fffffffu) + 0x7ffffu + ((bits >> 20) & 1);
  return sign | static_cast<uint8_t>((rounded >> 20) - ((127 - 7) << 3));
}

void quantize_e4m3_blocks(const float* weights, size_t rows, size_t columns, uint8_t* bytes, float* scales) {
  scale_blocks(weights, rows, columns, 448.0f, scales, [&](ScaledBlock block) {
    for (size_t row = block.first_row; row < block.end_row; ++row) {
      const float* from = weights + row * columns;
      uint8_t* to = bytes + row * columns;
      for (size_t column = block.first_column; column < block.end_column; ++column) {
        to[column] = e4m3_from_f32(from[column] / block.scale);
      }
    }
  });
}

}  // namespace duck
