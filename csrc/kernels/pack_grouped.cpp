// The packer of grouped formats: see pack_grouped.h and docs/weight-format.md.
#include "kernels/pack_grouped.h"

#include <algorithm>
#include <cstring>

namespace duck {
namespace {

constexpr size_t kPairBytes = 2 * kGroupCodeBytes + 4 * kStripeChannels;
constexpr size_t kTileBytes = kGroupCodeBytes / 2;
constexpr size_t kZeroBytes = kStripeChannels;  // zero points of one block, of gate and up or of down

// A lane of codes, one a byte: `rows` of them, a multiple of 8, into the vectors that begin at `vectors`.
void put_lane(const uint8_t* codes, size_t rows, size_t lane, uint8_t* vectors) {
  for (size_t first = 0; first < rows; first += 8) {
    uint8_t* word = vectors + 8 * first + 4 * lane;
    for (size_t i = 0; i < 4; ++i) {
      word[i] = static_cast<uint8_t>(codes[first + i] | (codes[first + 4 + i] << 4));
    }
  }
}

void put_nibble(uint8_t value, size_t index, uint8_t* bytes) {
  bytes[index / 2] = static_cast<uint8_t>(bytes[index / 2] | (value << (4 * (index % 2))));
}

// One unit, whose stripe begins at first_channel.
class UnitPacker {
 public:
  UnitPacker(const GroupedExpert& expert, WeightFormat format, size_t first_channel, uint8_t* unit)
      : expert_(expert),
        first_channel_(first_channel),
        channels_(std::min<size_t>(kStripeChannels, expert.intermediate_size - first_channel)),
        blocks_(padded_hidden(expert.hidden_size) / kRecordRows),
        zeros_(has_zero_points(format) ? unit : nullptr),
        pairs_(unit + unit_scale_bytes(format, expert.hidden_size)),
        downs_(pairs_ + blocks_ * kPairBytes),
        code_of_zero_(format == WeightFormat::kMxfp4 ? 0 : kInt4CodeOfZero) {}

  void pack() {
    for (size_t block = 0; block < blocks_; ++block) {
      for (size_t half = 0; half < 2; ++half) {
        for (size_t lane = 0; lane < kStripeChannels; ++lane) put_gate_up(block, half, lane);
      }
      for (size_t output = 0; output < kRecordRows; ++output) put_down(block, output);
    }
  }

 private:
  void put_gate_up(size_t block, size_t half, size_t lane) {
    const GroupedMatrix& matrix = half == 0 ? expert_.gate : expert_.up;
    const size_t hidden = expert_.hidden_size, first = block * kRecordRows;
    uint8_t codes[kRecordRows];
    uint8_t zero = code_of_zero_;
    uint16_t scale = 0;
    size_t count = 0;
    if (lane < channels_) {
      const size_t row = first_channel_ + lane;
      const size_t group = row * ceil_div(hidden, matrix.group_size) + first / matrix.group_size;
      count = std::min<size_t>(kRecordRows, hidden - first);
      std::memcpy(codes, matrix.codes + row * hidden + first, count);
      scale = matrix.scale_words[group];
      if (matrix.zeros != nullptr) zero = matrix.zeros[group];
    }
    std::memset(codes + count, zero, kRecordRows - count);
    uint8_t* pair = pairs_ + block * kPairBytes;
    put_lane(codes, kRecordRows, lane, pair + half * kGroupCodeBytes);
    std::memcpy(pair + 2 * kGroupCodeBytes + 2 * (half * kStripeChannels + lane), &scale, 2);
    if (zeros_ != nullptr) put_nibble(zero, half * kStripeChannels + lane, zeros_ + block * kZeroBytes);
  }

  void put_down(size_t block, size_t output) {
    const GroupedMatrix& matrix = expert_.down;
    const size_t intermediate = expert_.intermediate_size, row = block * kRecordRows + output;
    uint8_t codes[kStripeChannels];
    uint8_t zero = code_of_zero_;
    uint16_t scale = 0;
    size_t count = 0;
    if (row < expert_.hidden_size) {
      const size_t group =
          row * ceil_div(intermediate, matrix.group_size) + first_channel_ / matrix.group_size;
      count = channels_;
      std::memcpy(codes, matrix.codes + row * intermediate + first_channel_, count);
      scale = matrix.scale_words[group];
      if (matrix.zeros != nullptr) zero = matrix.zeros[group];
    }
    std::memset(codes + count, zero, kStripeChannels - count);
    uint8_t* record = downs_ + block * (2 * kTileBytes + 2 * kRecordRows);
    put_lane(codes, kStripeChannels, output % kStripeChannels,
             record + output / kStripeChannels * kTileBytes);
    std::memcpy(record + 2 * kTileBytes + 2 * output, &scale, 2);
    if (zeros_ != nullptr) put_nibble(zero, output, zeros_ + (blocks_ + block) * kZeroBytes);
  }

  const GroupedExpert& expert_;
  const size_t first_channel_, channels_, blocks_;
  uint8_t *zeros_, *pairs_, *downs_;
  const uint8_t code_of_zero_;
};

}  // namespace

void pack_grouped_units(const GroupedExpert& expert, WeightFormat format, uint8_t* units) {
  const size_t bytes = unit_bytes(format, expert.hidden_size);
  const size_t stripes = ceil_div(expert.intermediate_size, kStripeChannels);
  for (size_t stripe = 0; stripe < stripes; ++stripe) {
    uint8_t* unit = units + stripe * bytes;
    std::memset(unit, 0, unit_scale_bytes(format, expert.hidden_size));
    UnitPacker(expert, format, stripe * kStripeChannels, unit).pack();
  }
}

}  // namespace duck
