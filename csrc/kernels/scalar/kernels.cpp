// The kernels in plain C++, for any x86-64: the slow twin that the others are compared with. It sums in the
// same order as they do (experts.h), with a product and a sum where they have one FMA.
#include <cmath>
#include <cstring>

#include "kernels/fp9.h"
#include "kernels/kernel_table.h"

namespace duck::scalar {
namespace {

constexpr int kRecordsPerBlock = kScaleBlock / kRecordRows;

float load_f32(const uint8_t* bytes, uint32_t index) {
  float value;
  std::memcpy(&value, bytes + 4 * index, 4);
  return value;
}

// w * 2^-104 for row `row` of lane `lane`.
float decode(const uint8_t* record, int row, int lane) {
  uint32_t signs;
  std::memcpy(&signs, record + kRecordMagnitudes + 4 * lane, 4);
  const uint32_t bits =
      (static_cast<uint32_t>(record[row * kStripeChannels + lane]) << 20) | ((signs << row) & 0x80000000u);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The rows [first, first + num) of a record, decoded once for all pairs.
void decode_rows(const uint8_t* record, int first, int num, float (*weights)[kStripeChannels]) {
  for (int row = 0; row < num; ++row) {
    for (int lane = 0; lane < kStripeChannels; ++lane) weights[row][lane] = decode(record, first + row, lane);
  }
}

// sums[lane] += sum over row of weights[row][lane] * x[row]
void add_products(const float (*weights)[kStripeChannels], int num, const float* x, float* sums) {
  for (int row = 0; row < num; ++row) {
    for (int lane = 0; lane < kStripeChannels; ++lane) sums[lane] += weights[row][lane] * x[row];
  }
}

float silu(float g) {
  const float t = std::fmax(-g, -87.0f);  // e^t is then no denormal
  const double e = t > 88.0f ? HUGE_VAL : std::exp(static_cast<double>(t));
  return g / (1.0f + static_cast<float>(e));
}

float activate(float gate, float up, float weight) {
  const float a = silu(gate) * kActivationPrescale * up * weight;
  return std::fabs(a) < kSmallestActivation * kActivationPrescale ? 0.0f : a;
}

// dots[lane] = x . column `lane` of the gate (part 0) or up (part 1) matrix.
void dot_products(const Unit& unit, int part, const float* x, float* dots) {
  const uint8_t* scales = part == 0 ? unit.gate_scales : unit.up_scales;
  float weights[kRecordRows][kStripeChannels];
  for (uint32_t first = 0; first < unit.num_records; first += kRecordsPerBlock) {
    float sums[kStripeChannels] = {};
    for (uint32_t record = first; record < unit.num_records && record < first + kRecordsPerBlock; ++record) {
      decode_rows(unit.gate_up + (2 * record + part) * kRecordBytes, 0, kRecordRows, weights);
      add_products(weights, kRecordRows, x + record * kRecordRows, sums);
    }
    const float scale = load_f32(scales, first / kRecordsPerBlock) * kSumPostscale;
    for (int lane = 0; lane < kStripeChannels; ++lane) dots[lane] += sums[lane] * scale;
  }
}

void gate_up(const Unit& unit, const PairRows& pairs, uint32_t channel_offset, uint32_t num_channels) {
  for (uint32_t pair = 0; pair < pairs.count; ++pair) {
    float gate[kStripeChannels] = {};
    float up[kStripeChannels] = {};
    dot_products(unit, 0, pairs.x[pair], gate);
    dot_products(unit, 1, pairs.x[pair], up);
    float* activations = pairs.activations[pair] + channel_offset;
    for (uint32_t lane = 0; lane < kStripeChannels; ++lane) {
      activations[lane] = lane < num_channels ? activate(gate[lane], up[lane], pairs.weights[pair]) : 0.0f;
    }
  }
}

void down(const Unit& unit, const PairRows& pairs, uint32_t channel_offset, uint32_t first_record,
          uint32_t end_record) {
  float weights[kStripeChannels][kStripeChannels];
  for (uint32_t record = first_record; record < end_record; ++record) {
    const float scale = load_f32(unit.down_scales, record / kRecordsPerBlock) * kSumPostscale;
    for (int tile = 0; tile < 2; ++tile) {
      decode_rows(unit.down + record * kRecordBytes, tile * kStripeChannels, kStripeChannels, weights);
      for (uint32_t pair = 0; pair < pairs.count; ++pair) {
        float sums[kStripeChannels] = {};
        add_products(weights, kStripeChannels, pairs.activations[pair] + channel_offset, sums);
        float* y = pairs.y[pair] + record * kRecordRows + tile * kStripeChannels;
        for (int lane = 0; lane < kStripeChannels; ++lane) y[lane] += sums[lane] * scale;
      }
    }
  }
}

}  // namespace

const KernelTable kTable = {Isa::kScalar, &gate_up, &down};

}  // namespace duck::scalar
