// The kernels in plain C++, for any x86-64: the slow twin that the others are compared with. It sums in the
// same order as they do (experts.h), with a product and a sum where they have one FMA.
#include <cmath>
#include <cstring>

#include "kernels/kernel_table.h"
#include "kernels/weight_format.h"

namespace duck::scalar {
namespace {

float load_f32(const uint8_t* bytes, uint32_t index) {
  float value;
  std::memcpy(&value, bytes + 4 * index, 4);
  return value;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// w * 2^-104 for fp9 and fp8-normal, w * 2^-120 for fp8, w for bf16 and f32.
template <WeightFormat kFormat>
float decode(const uint8_t* record, int row, int lane) {
  if constexpr (kFormat == WeightFormat::kF32) return load_f32(record, f32_index(row, lane));
  const int index = kFormat == WeightFormat::kBf16 ? bf16_index(row, lane) : weight_index(row, lane);
  if constexpr (kFormat == WeightFormat::kFp9) {
    uint32_t signs;
    std::memcpy(&signs, record + kRecordWeights + 4 * lane, 4);
    return from_bits(static_cast<uint32_t>(record[index]) << 20 | (signs >> sign_bit(row) & 1) << 31);
  } else if constexpr (kFormat == WeightFormat::kFp8Normal) {
    const uint32_t byte = record[index], code = byte & 0x7f;
    return from_bits((code < 8 ? kSmallMagnitudes[code] : code + 0x80) << 20 | (byte >> 7) << 31);
  } else if constexpr (kFormat == WeightFormat::kFp8) {
    const uint32_t byte = record[index];
    return from_bits((byte & 0x7f) << 20 | (byte >> 7) << 31);
  } else {
    uint16_t word;
    std::memcpy(&word, record + 2 * index, 2);
    return from_bits(static_cast<uint32_t>(word) << 16);
  }
}

struct Sums {
  float even[kStripeChannels] = {};
  float odd[kStripeChannels] = {};
  float total(int lane) const { return even[lane] + odd[lane]; }
};

// Adds the products of the record's rows [first, first + num), num and first even, and x[0 .. num).
template <WeightFormat kFormat>
void add_products(const uint8_t* record, int first, int num, const float* x, Sums& sums) {
  for (int row = 0; row < num; ++row) {
    float* to = row % 2 == 0 ? sums.even : sums.odd;
    for (int lane = 0; lane < kStripeChannels; ++lane) {
      to[lane] += decode<kFormat>(record, first + row, lane) * x[row];
    }
  }
}

// One row's dot products with part `part` of kParts.
template <WeightFormat kFormat, int kParts>
void dot_products(const Stream& stream, int part, const float* x, float* dots) {
  constexpr size_t kBytes = record_bytes(kFormat);
  constexpr uint32_t kPartRecords = kPartBlocks * kRecordsPerBlock;
  for (int lane = 0; lane < kStripeChannels; ++lane) dots[lane] = 0.0f;
  for (uint32_t part_first = stream.first_record; part_first < stream.end_record;
       part_first += kPartRecords) {
    float part_sums[kStripeChannels] = {};
    for (uint32_t first = part_first; first < stream.end_record && first < part_first + kPartRecords;
         first += kRecordsPerBlock) {
      Sums sums;
      for (uint32_t record = first; record < stream.end_record && record < first + kRecordsPerBlock;
           ++record) {
        add_products<kFormat>(stream.records + (kParts * record + part) * kBytes, 0, kRecordRows,
                              x + record * kRecordRows, sums);
      }
      const uint8_t* scales = stream.scales[part];
      const float scale = (scales ? load_f32(scales, first / kRecordsPerBlock) : 1) * sum_postscale(kFormat);
      for (int lane = 0; lane < kStripeChannels; ++lane) part_sums[lane] += sums.total(lane) * scale;
    }
    for (int lane = 0; lane < kStripeChannels; ++lane) dots[lane] += part_sums[lane];
  }
}

template <WeightFormat kFormat, int kParts>
void dots(const Stream& stream, const float* const* x, uint32_t num_rows, float* dots) {
  for (uint32_t row = 0; row < num_rows; ++row) {
    for (int part = 0; part < kParts; ++part) {
      dot_products<kFormat, kParts>(stream, part, x[row], dots + (row * kParts + part) * kStripeChannels);
    }
  }
}

template <WeightFormat kFormat, ScaleLayout kLayout>
void down(const uint8_t* records, const uint8_t* scales, const float* const* activations, float* const* y,
          uint32_t num_rows, uint32_t first_record, uint32_t end_record, const uint8_t*, uint32_t) {
  for (uint32_t record = first_record; record < end_record; ++record) {
    for (int tile = 0; tile < 2; ++tile) {
      for (uint32_t row = 0; row < num_rows; ++row) {
        Sums sums;
        add_products<kFormat>(records + record * record_bytes(kFormat), tile * kStripeChannels,
                              kStripeChannels, activations[row], sums);
        const uint32_t output = record * kRecordRows + tile * kStripeChannels;
        for (int lane = 0; lane < kStripeChannels; ++lane) {
          const uint32_t scale = kLayout == ScaleLayout::kChannel ? output + lane : record / kRecordsPerBlock;
          const float factor = load_f32(scales, scale) * sum_postscale(kFormat);
          y[row][output + lane] += sums.total(lane) * factor;
        }
      }
    }
  }
}

// Rows [first, first + num) of a record into 16 columns of a tile.
template <WeightFormat kFormat>
void decode_rows(const uint8_t* record, int first, int num, float* tile, uint32_t half_rows) {
  for (int row = 0; row < num; ++row) {
    float* to = tile + (row % 2 * half_rows + row / 2) * kTileLanes;
    for (int lane = 0; lane < kStripeChannels; ++lane) to[lane] = decode<kFormat>(record, first + row, lane);
  }
}

template <WeightFormat kFormat>
void tile_of_streams(const uint8_t* records, size_t distance, size_t stride, uint32_t num_records,
                     float* tile) {
  const uint32_t half_rows = num_records * kRecordRows / 2;
  for (uint32_t record = 0; record < num_records; ++record) {
    float* to = tile + record * (kRecordRows / 2) * kTileLanes;
    decode_rows<kFormat>(records + record * stride, 0, kRecordRows, to, half_rows);
    decode_rows<kFormat>(records + record * stride + distance, 0, kRecordRows, to + kStripeChannels,
                         half_rows);
  }
}

template <WeightFormat kFormat>
void tile_of_down(const uint8_t* record, float* tile) {
  constexpr uint32_t kHalf = kStripeChannels / 2;
  decode_rows<kFormat>(record, 0, kStripeChannels, tile, kHalf);
  decode_rows<kFormat>(record, kStripeChannels, kStripeChannels, tile + kStripeChannels, kHalf);
}

void multiply(const float* panel, const float* tile, uint32_t half_rows, const float* scales,
              float* const* out, uint32_t num_rows) {
  for (uint32_t row = 0; row < num_rows; ++row) {
    float even[kTileLanes] = {}, odd[kTileLanes] = {};
    const float* values = panel + row * kPanelStride;
    for (uint32_t k = 0; k < half_rows; ++k) {
      for (uint32_t lane = 0; lane < kTileLanes; ++lane) {
        even[lane] += tile[k * kTileLanes + lane] * values[k];
        odd[lane] += tile[(half_rows + k) * kTileLanes + lane] * values[kPanelOdd + k];
      }
    }
    for (uint32_t lane = 0; lane < kTileLanes; ++lane) {
      out[row][lane] += (even[lane] + odd[lane]) * scales[lane];
    }
  }
}

void fill_panel(const float* values, uint32_t count, float* panel) {
  for (uint32_t i = 0; i < count; ++i) panel[i % 2 * kPanelOdd + i / 2] = values[i];
}

// As lane_kernels.h has it, operation by operation, so that the integer kernels round the same activations
// everywhere.
float exp_of(float t) {
  const float n = std::nearbyint(t * 0x1.715476p+0f);
  const float r = std::fma(n, -0x1.7f7d1cp-20f, std::fma(n, -0x1.62e4p-1f, t));
  float p = 1.0f / 5040;
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    p = std::fma(p, r, term);
  }
  return p * from_bits(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

float silu(float g) {
  const float at_most = -g < 88.0f ? -g : 88.0f;  // 88 for NaN, too
  const float e = exp_of(at_most > -87.0f ? at_most : -87.0f);
  return g / (1.0f + (-g > 88.0f ? HUGE_VALF : e));
}

void activate(const float* dots, float weight, float prescale, uint32_t num_channels, float* activations) {
  for (uint32_t lane = 0; lane < kStripeChannels; ++lane) {
    const float a = silu(dots[lane]) * prescale * dots[kStripeChannels + lane] * weight;
    const bool counts = lane < num_channels && !(std::fabs(a) < kSmallestActivation * prescale);
    activations[lane] = counts ? a : 0.0f;
  }
}

template <WeightFormat kFormat>
constexpr FormatKernels format_kernels() {
  return {&dots<kFormat, 1>,
          &dots<kFormat, 2>,
          &down<kFormat, ScaleLayout::kBlock>,
          &down<kFormat, ScaleLayout::kChannel>,
          &tile_of_streams<kFormat>,
          &tile_of_down<kFormat>};
}

}  // namespace

const KernelTable kTable = {
    Isa::kScalar,
    {format_kernels<WeightFormat::kFp9>(), format_kernels<WeightFormat::kFp8>(),
     format_kernels<WeightFormat::kBf16>(), format_kernels<WeightFormat::kFp8Normal>(),
     format_kernels<WeightFormat::kF32>()},
    &activate,
    &multiply,
    &fill_panel};

}  // namespace duck::scalar
