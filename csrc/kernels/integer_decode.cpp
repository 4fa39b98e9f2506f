#include "kernels/integer_decode.h"

#include "kernels/integer_values.h"

namespace duck {
namespace {

constexpr float kE2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// Rows [0, num) of a group of each lane. zero_points: 16 halves of bytes.
void decode_groups(WeightFormat format, const uint8_t* codes, const uint8_t* scales,
                   const uint8_t* zero_points, int num, float* out) {
  float values[16];
  for (int lane = 0; lane < kStripeChannels; ++lane) {
    const float scale = scale_of_16_bits(format, scales + 2 * lane);
    const int zero =
        has_zero_points(format) ? zero_points[lane / 2] >> (4 * (lane % 2)) & 15 : kInt4CodeOfZero;
    for (int code = 0; code < 16; ++code) {
      values[code] = (format == WeightFormat::kMxfp4 ? kE2m1[code] : static_cast<float>(code - zero)) * scale;
    }
    for (int row = 0; row < num; ++row) {
      out[f32_index(row, lane)] = values[four_bits(codes, row, lane)];
    }
  }
}

void decode_int8(const uint8_t* codes, float* out) {
  for (int row = 0; row < kRecordRows; ++row) {
    for (int lane = 0; lane < kStripeChannels; ++lane) {
      out[f32_index(row, lane)] = static_cast<float>(codes[int8_index(row, lane)] - kInt8CodeOfZero);
    }
  }
}

}  // namespace

void decode_gate_up(WeightFormat format, const uint8_t* records, const uint8_t* zero_points, uint32_t record,
                    int part, float* out) {
  const uint8_t* pair = records + static_cast<size_t>(record) * 2 * record_bytes(format);
  if (format == WeightFormat::kInt8) return decode_int8(pair + part * kRecordWeights, out);
  decode_groups(format, pair + part * kGroupCodeBytes,
                pair + 2 * kGroupCodeBytes + 2 * kStripeChannels * part,
                zero_points + (2 * record + part) * (kStripeChannels / 2), kRecordRows, out);
}

void decode_down(WeightFormat format, const uint8_t* records, const uint8_t* zero_points, uint32_t record,
                 float* out) {
  const uint8_t* at = records + static_cast<size_t>(record) * down_record_bytes(format);
  if (format == WeightFormat::kInt8) return decode_int8(at, out);
  for (int tile = 0; tile < 2; ++tile) {
    decode_groups(format, at + tile * kGroupCodeBytes / 2, at + kGroupCodeBytes + 2 * kStripeChannels * tile,
                  zero_points + (2 * record + tile) * (kStripeChannels / 2), kStripeChannels,
                  out + tile * kStripeChannels * kStripeChannels);
  }
}

}  // namespace duck
