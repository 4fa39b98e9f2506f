// Quantiser and packer of 4-bit units under sanitizers: odd sizes, buffers without a byte to spare, every
// code found where docs/weight-format.md says, the same bytes on every instruction set.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/experts.h"
#include "kernels/pack_grouped.h"
#include "kernels/quantise.h"
#include "kernels/weight_format.h"

namespace {

using duck::WeightFormat;

struct Matrix {
  size_t rows, columns, group;
  std::vector<uint8_t> codes, zeros;
  std::vector<uint16_t> words;

  Matrix(size_t rows_, size_t columns_, size_t group_, std::mt19937& random)
      : rows(rows_), columns(columns_), group(group_) {
    const size_t groups = rows * duck::ceil_div(columns, group);
    for (size_t i = 0; i < rows * columns; ++i) codes.push_back(random() % 16);
    for (size_t i = 0; i < groups; ++i) zeros.push_back(random() % 16);
    for (size_t i = 0; i < groups; ++i) words.push_back(static_cast<uint16_t>(random()));
  }

  duck::GroupedMatrix view(bool with_zeros) const {
    return {codes.data(), words.data(), with_zeros ? zeros.data() : nullptr, group};
  }
};

uint8_t code_at(const uint8_t* vectors, int row, int lane) {
  const uint8_t byte = vectors[duck::group_code_byte(row, lane)];
  return duck::is_high_half(row) ? byte >> 4 : byte & 15;
}

void test_every_code_is_in_its_place(size_t hidden, size_t intermediate, WeightFormat format) {
  std::mt19937 random(1);
  const bool with_zeros = duck::has_zero_points(format);
  const Matrix gate(intermediate, hidden, 32, random), up(intermediate, hidden, 64, random),
      down(hidden, intermediate, 16, random);
  const duck::GroupedExpert expert = {hidden, intermediate, gate.view(with_zeros), up.view(with_zeros),
                                      down.view(with_zeros)};
  const size_t stripes = duck::ceil_div(intermediate, 16), bytes = duck::unit_bytes(format, hidden);
  std::vector<uint8_t> units(stripes * bytes, 0xee);
  duck::pack_grouped_units(expert, format, units.data());
  const size_t blocks = duck::padded_hidden(hidden) / 32;
  for (size_t stripe = 0; stripe < stripes; ++stripe) {
    const uint8_t* pairs = units.data() + stripe * bytes + duck::unit_scale_bytes(format, hidden);
    const uint8_t* downs = pairs + blocks * 576;
    bool same = true;
    for (size_t channel = 16 * stripe; channel < std::min(intermediate, 16 * stripe + 16); ++channel) {
      const int lane = static_cast<int>(channel % 16);
      for (size_t index = 0; index < hidden; ++index) {
        const uint8_t* pair = pairs + index / 32 * 576;
        const int row = static_cast<int>(index % 32);
        same &= code_at(pair, row, lane) == gate.codes[channel * hidden + index];
        same &= code_at(pair + 256, row, lane) == up.codes[channel * hidden + index];
        const uint8_t* tile = downs + index / 32 * 320 + index % 32 / 16 * 128;
        same &=
            code_at(tile, lane, static_cast<int>(index % 16)) == down.codes[index * intermediate + channel];
      }
    }
    CHECK(same);
  }
}

void test_quantiser_of_odd_sizes() {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (size_t rows : {1, 5, 17, 33}) {
    for (size_t columns : {1, 31, 32, 70}) {
      std::vector<float> weights(rows * columns), importance(columns, 0.5f);
      for (float& weight : weights) weight = normal(random);
      weights[0] = 0.0f;
      std::vector<uint8_t> first;
      for (duck::Isa isa : duck::available_isas()) {
        std::vector<uint8_t> codes(rows * columns);
        std::vector<uint16_t> words(rows * duck::ceil_div(columns, 32));
        const duck::RoundingSums sums = duck::quantise_int4_groups(
            {weights.data(), importance.data(), rows, columns, 32, false, codes.data(), words.data()}, isa);
        CHECK(sums.squared_error <= 0.02 * sums.squared_source);
        if (first.empty()) first = codes;
        CHECK(codes == first);
      }
      std::vector<uint8_t> bytes(rows * columns);
      std::vector<float> scales(duck::ceil_div(rows, 128) * duck::ceil_div(columns, 128));
      const duck::RoundingSums sums =
          duck::quantise_int8_blocks(weights.data(), rows, columns, bytes.data(), scales.data());
      CHECK(sums.squared_error <= 0.001 * sums.squared_source);
      CHECK(bytes[0] == duck::kInt8CodeOfZero);
    }
  }
}

void test_scales_there_and_back() {
  for (uint32_t word = 0; word < 0x10000; ++word) {
    for (bool bf16 : {false, true}) {
      const float value = duck::scale_of_word(static_cast<uint16_t>(word), bf16);
      if (std::isfinite(value)) CHECK(duck::scale_word(value, bf16) == word);
    }
  }
  CHECK(duck::scale_word(65519.0f, false) == 0x7bff);
  CHECK(duck::scale_word(65520.0f, false) == 0x7c00);
}

}  // namespace

int main() {
  for (WeightFormat format : {WeightFormat::kInt4, WeightFormat::kInt4ZeroBf16, WeightFormat::kMxfp4}) {
    for (size_t hidden : {1, 32, 70}) {
      for (size_t intermediate : {1, 16, 40}) test_every_code_is_in_its_place(hidden, intermediate, format);
    }
  }
  test_quantiser_of_odd_sizes();
  test_scales_there_and_back();
  return duck::test::report();
}
