// The packer of dense weights: see pack_linear.h.
#include "kernels/pack_linear.h"

#include <algorithm>
#include <cstring>

#include "kernels/pack.h"

namespace duck {
namespace {

// Copies numbers as they are. index(row, lane): a number's place in the record.
template <class Number, class Index>
void pack_numbers(const Number* numbers, size_t stride, size_t rows, size_t lanes, Index index,
                  uint8_t* record) {
  for (size_t lane = 0; lane < lanes; ++lane) {
    for (size_t row = 0; row < rows; ++row) {
      const size_t place = index(static_cast<int>(row), static_cast<int>(lane));
      std::memcpy(record + sizeof(Number) * place, numbers + lane * stride + row, sizeof(Number));
    }
  }
}

}  // namespace

void pack_linear(const void* weight, size_t out_features, size_t in_features, WeightFormat format,
                 uint8_t* packed) {
  std::memset(packed, 0, linear_bytes(out_features, in_features, format));
  uint8_t* record = packed;
  for (size_t group = 0; group < out_features; group += kGroupOutputs) {
    for (size_t k = 0; k < in_features; k += kRecordRows) {
      for (size_t first = group; first < group + kGroupOutputs; first += kStripeChannels) {
        const size_t rows = std::min<size_t>(kRecordRows, in_features - k);
        const size_t lanes = std::min<size_t>(kStripeChannels, out_features - std::min(first, out_features));
        const size_t offset = first * in_features + k;
        if (lanes != 0 && format == WeightFormat::kBf16) {
          pack_numbers(static_cast<const uint16_t*>(weight) + offset, in_features, rows, lanes, bf16_index,
                       record);
        } else if (lanes != 0 && format == WeightFormat::kF32) {
          pack_numbers(static_cast<const float*>(weight) + offset, in_features, rows, lanes, f32_index,
                       record);
        } else if (lanes != 0) {
          pack_rows({static_cast<const uint8_t*>(weight) + offset, 1, in_features, rows, lanes}, 0, format,
                    record);
        }
        record += record_bytes(format);
      }
    }
  }
}

}  // namespace duck
