#include "ablation/variants.h"

#include <cstring>

namespace duck::ablation {
namespace {

void convert_record(const uint8_t* from, Layout layout, uint8_t* to) {
  std::memcpy(to, from, record_bytes(WeightFormat::kFp9));
  if (layout == Layout::kFours) return;
  uint32_t words[kStripeChannels], converted[kStripeChannels] = {};
  std::memcpy(words, from + kRecordWeights, sizeof words);
  for (int row = 0; row < kRecordRows; ++row) {
    for (int lane = 0; lane < kStripeChannels; ++lane) {
      const uint8_t magnitude = from[weight_index(row, lane)];
      const uint32_t negative = words[lane] >> sign_bit(row) & 1;
      if (layout == Layout::kMasks) {
        converted[row / 2] |= negative << (2 * lane + row % 2);
      } else if (layout == Layout::kRows) {
        to[kStripeChannels * row + lane] = magnitude;
        converted[lane] |= negative << (31 - row);
      } else {
        to[2 * kStripeChannels * (row / 2) + 2 * lane + row % 2] = magnitude;
        converted[lane] |= negative << sign_bit(row);
      }
    }
  }
  std::memcpy(to + kRecordWeights, converted, sizeof converted);
}

}  // namespace

SignTable::SignTable() {
  for (uint32_t number = 0; number < 65536; ++number) {
    for (int bit = 0; bit < 16; ++bit) words[number][bit] = number >> bit & 1 ? 0x8000 : 0;
  }
}

const SignTable kSignTable;

std::vector<Variant> variants(Isa isa) {
  if (isa == Isa::kAvx512) return avx512::variants();
  return isa == Isa::kAvx2 ? avx2::variants() : std::vector<Variant>{};
}

std::vector<TileVariant> tile_variants(Isa isa) {
  if (isa == Isa::kAvx512) return avx512::tile_variants();
  return isa == Isa::kAvx2 ? avx2::tile_variants() : std::vector<TileVariant>{};
}

void convert_layout(const uint8_t* from, Layout layout, size_t hidden_size, size_t num_units, uint8_t* to) {
  const size_t size = unit_bytes(WeightFormat::kFp9, hidden_size),
               head = unit_scale_bytes(WeightFormat::kFp9, hidden_size);
  for (size_t unit = 0; unit < num_units; ++unit, from += size, to += size) {
    std::memcpy(to, from, head);
    for (size_t at = head; at < size; at += record_bytes(WeightFormat::kFp9)) {
      convert_record(from + at, layout, to + at);
    }
  }
}

}  // namespace duck::ablation
