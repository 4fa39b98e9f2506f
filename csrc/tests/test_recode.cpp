// The re-encoder under sanitizers: every finite e4m3 byte at every place of a record, there and back, in
// memory of exactly the unit's size and at odd addresses; and every byte that no weight is stored as.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/pack.h"
#include "kernels/recode.h"
#include "kernels/weight_format.h"

namespace {

using duck::WeightFormat;

bool recode(WeightFormat from, const std::vector<uint8_t>& unit, WeightFormat to, std::vector<uint8_t>& out) {
  return duck::recode_unit(32, duck::ScaleLayout::kBlock, from, unit.data() + 1, to, out.data() + 1);
}

// A unit of H = 32 that begins at an odd address: byte 0 is none of it.
std::vector<uint8_t> new_unit(WeightFormat format) {
  return std::vector<uint8_t>(1 + duck::unit_bytes(format, 32));
}

void test_every_code_there_and_back() {
  const size_t scales = duck::unit_scale_bytes(WeightFormat::kFp8, 32);
  std::vector<uint8_t> fp8 = new_unit(WeightFormat::kFp8), fp9 = new_unit(WeightFormat::kFp9), again = fp8;
  for (int first = 0; first < 256; ++first) {
    for (size_t i = 1 + scales; i < fp8.size(); ++i) {
      const uint8_t code = static_cast<uint8_t>(first + 5 * i + 37 * (i / 256));  // no half repeats
      fp8[i] = (code & 0x7f) == 0x7f ? 0x80 : code;
    }
    CHECK(recode(WeightFormat::kFp8, fp8, WeightFormat::kFp9, fp9));
    for (int row = 0; row < duck::kRecordRows; ++row) {
      for (int lane = 0; lane < duck::kStripeChannels; ++lane) {
        const int place = duck::weight_index(row, lane);
        const uint8_t code = fp8[1 + scales + place];
        const uint8_t* record = fp9.data() + 1 + scales;
        CHECK(record[place] == duck::fp9_magnitude(code));
        uint32_t signs;
        std::memcpy(&signs, record + duck::kRecordWeights + 4 * lane, 4);
        CHECK((signs >> duck::sign_bit(row) & 1) == (code >> 7));
      }
    }
    CHECK(recode(WeightFormat::kFp9, fp9, WeightFormat::kFp8, again));
    CHECK(again == fp8);
  }
}

void test_what_is_no_weight_is_refused() {
  const size_t last = duck::unit_bytes(WeightFormat::kFp8, 32);
  std::vector<uint8_t> fp8 = new_unit(WeightFormat::kFp8), fp9 = new_unit(WeightFormat::kFp9);
  int refused = 0;
  for (int byte = 0; byte < 256; ++byte) {
    fp8[last] = static_cast<uint8_t>(byte);
    refused += !recode(WeightFormat::kFp8, fp8, WeightFormat::kFp9, fp9);
  }
  CHECK(refused == 2);
  refused = 0;
  std::fill(fp9.begin(), fp9.end(), 0);
  for (int byte = 0; byte < 256; ++byte) {
    fp9[fp9.size() - 1 - 4 * duck::kStripeChannels] = static_cast<uint8_t>(byte);
    refused += !recode(WeightFormat::kFp9, fp9, WeightFormat::kFp8, fp8);
  }
  CHECK(refused == 256 - 127);
  duck::flush_from_caches(fp9.data(), fp9.size());
  duck::flush_from_caches(fp9.data(), 0);
}

}  // namespace

int main() {
  test_every_code_there_and_back();
  test_what_is_no_weight_is_refused();
  return duck::test::report();
}
