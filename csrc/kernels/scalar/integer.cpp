// The integer kernels in plain C++: the slow twin of integer_lanes.h, whose operations it repeats one by one,
// FMAs included, so that all give the same bits.
#include <cmath>
#include <cstring>

#include "kernels/integer_kernels.h"
#include "kernels/integer_values.h"

namespace duck::scalar {
namespace {

template <WeightFormat kFormat, ScaleLayout kLayout>
struct Kernels {
  static constexpr bool kIsInt8 = kFormat == WeightFormat::kInt8;
  static constexpr size_t kPairBytes = 2 * record_bytes(kFormat), kDownBytes = down_record_bytes(kFormat);
  static constexpr int32_t kZero = kIsInt8                           ? kInt8CodeOfZero
                                   : kFormat == WeightFormat::kMxfp4 ? kMxfp4Zero
                                   : has_zero_points(kFormat)        ? 1
                                                                     : kInt4CodeOfZero;

  static int32_t code(const uint8_t* codes, int row, int lane) {
    if constexpr (kIsInt8) return codes[int8_index(row, lane)];
    const int value = four_bits(codes, row, lane);
    return kFormat == WeightFormat::kMxfp4 ? kMxfp4Codes[value] : value;
  }

  // The sum of a group's products with `num` rows of lane `lane` from `codes` on. zero_points: of this lane's
  // matrix or tile.
  template <class GroupType>
  static float group_sum(const uint8_t* codes, const uint8_t* zero_points, int num, int lane,
                         const GroupType& group) {
    int32_t sum = group.offset;
    if (has_zero_points(kFormat)) sum *= zero_points[lane / 2] >> (4 * (lane % 2)) & 15;
    for (int row = 0; row < num; ++row) sum += code(codes, row, lane) * group.values[row];
    return static_cast<float>(sum);
  }

  static float block_scale(const uint8_t* scales, uint32_t record) {
    float scale;
    std::memcpy(&scale, scales + 4 * (record / kRecordsPerBlock), 4);
    return scale;
  }

  static void dots(const Stream& stream, const HiddenGroup* const* x, uint32_t num_rows, float* dots) {
    for (uint32_t row = 0; row < num_rows; ++row) {
      for (int part = 0; part < 2; ++part) {
        for (int lane = 0; lane < kStripeChannels; ++lane) {
          float sum = 0.0f;
          for (uint32_t record = stream.first_record; record < stream.end_record; ++record) {
            const uint8_t* pair = stream.records + record * kPairBytes;
            const uint8_t* codes = pair + part * (kIsInt8 ? kRecordWeights : kGroupCodeBytes);
            const uint8_t* zeros =
                has_zero_points(kFormat) ? stream.scales[0] + 16 * record + 8 * part : nullptr;
            float scale = 1.0f;
            if constexpr (!kIsInt8) {
              scale =
                  scale_of_16_bits(kFormat, pair + 2 * kGroupCodeBytes + 2 * (part * kStripeChannels + lane));
            } else if (kLayout == ScaleLayout::kBlock) {
              scale = block_scale(stream.scales[part], record);
            }
            const HiddenGroup& group = x[row][record];
            sum = std::fma(group_sum(codes, zeros, kRecordRows, lane, group), scale * group.scale, sum);
          }
          dots[(row * 2 + part) * kStripeChannels + lane] = sum;
        }
      }
    }
  }

  static void down(const DownStripe* stripes, uint32_t num_stripes, const StripeGroup* const* activations,
                   float* const* y, uint32_t num_rows, uint32_t first_record, uint32_t end_record, uint32_t) {
    for (uint32_t record = first_record; record < end_record; ++record) {
      for (int output = 0; output < kRecordRows; ++output) {
        const int tile = output / kStripeChannels, lane = output % kStripeChannels;
        for (uint32_t row = 0; row < num_rows; ++row) {
          float& sum = y[row][record * kRecordRows + output];
          for (uint32_t i = 0; i < num_stripes; ++i) {
            const uint8_t* at = stripes[i].records + record * kDownBytes;
            const uint8_t* codes = at + tile * (kIsInt8 ? kRecordWeights : kGroupCodeBytes) / 2;
            const uint8_t* zeros =
                has_zero_points(kFormat) ? stripes[i].scales + 16 * record + 8 * tile : nullptr;
            float scale;
            if constexpr (!kIsInt8) {
              scale = scale_of_16_bits(kFormat, at + kGroupCodeBytes + 2 * output);
            } else if (kLayout == ScaleLayout::kChannel) {
              std::memcpy(&scale, stripes[i].scales + 4 * (record * kRecordRows + output), 4);
            } else {
              scale = block_scale(stripes[i].scales, record);
            }
            const StripeGroup& group = activations[row][i];
            sum = std::fma(group_sum(codes, zeros, kStripeChannels, lane, group), scale * group.scale, sum);
          }
        }
      }
    }
  }

  static constexpr IntegerFormat format() {
    return {&dots, &down, kZero, kFormat == WeightFormat::kMxfp4 ? 0.5f : 1.0f};
  }
};

template <int kValues>
void quantise(const float* values, int32_t zero, float factor, Group<kValues>& group) {
  group = {};
  bool finite = true;
  float largest = 0.0f;
  for (int i = 0; i < kValues; ++i) {
    finite = finite && std::isfinite(values[i]);
    largest = std::fmax(largest, std::fabs(values[i]));
  }
  if (!finite) group.scale = std::nanf("");
  if (!finite || largest < kSmallestGroup) return;
  const float inverse = kLargestByte / largest;
  int32_t sum = 0;
  for (int i = 0; i < kValues; ++i) {
    const float rounded = std::nearbyint(values[i] * inverse);
    group.values[i] = static_cast<int8_t>(rounded);
    sum += group.values[i];
  }
  group.scale = largest / kLargestByte * factor;
  group.offset = -zero * sum;
}

void quantise_hidden(const float* values, uint32_t num_groups, int32_t zero, float factor,
                     HiddenGroup* groups) {
  for (uint32_t i = 0; i < num_groups; ++i) quantise(values + i * kRecordRows, zero, factor, groups[i]);
}

void quantise_stripe(const float* values, int32_t zero, float factor, StripeGroup* group) {
  quantise(values, zero, factor, *group);
}

}  // namespace

const IntegerTable kIntegerTable = {"scalar",
                                    {Kernels<WeightFormat::kInt8, ScaleLayout::kBlock>::format(),
                                     Kernels<WeightFormat::kInt8, ScaleLayout::kChannel>::format(),
                                     Kernels<WeightFormat::kInt4, ScaleLayout::kGroup>::format(),
                                     Kernels<WeightFormat::kInt4Bf16, ScaleLayout::kGroup>::format(),
                                     Kernels<WeightFormat::kInt4Zero, ScaleLayout::kGroup>::format(),
                                     Kernels<WeightFormat::kInt4ZeroBf16, ScaleLayout::kGroup>::format(),
                                     Kernels<WeightFormat::kMxfp4, ScaleLayout::kGroup>::format()},
                                    &quantise_hidden,
                                    &quantise_stripe};

}  // namespace duck::scalar
