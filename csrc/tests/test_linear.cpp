// The dense linear layers where Python cannot look: bounds of every buffer (under AddressSanitizer), races
// (under ThreadSanitizer), the caller's floating-point flags, and allocations in run(). The values themselves
// are compared with float64 in tests/linear.
#include <xmmintrin.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/linear.h"
#include "kernels/pack_linear.h"
#include "tests/check.h"
#include "tests/count_allocations.h"
#include "threads/thread_pool.h"

namespace duck {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kFp9, WeightFormat::kFp8, WeightFormat::kBf16,
                                     WeightFormat::kF32};

struct Weight {
  uint32_t out_features, in_features;
  WeightFormat format;
  std::vector<uint8_t> packed;
  std::vector<float> scales;

  LinearWeight view() const {
    return {out_features, in_features, format, packed.data(), scales.empty() ? nullptr : scales.data()};
  }
};

// Random finite weights; every buffer has exactly the size that is promised.
Weight random_weight(uint32_t out_features, uint32_t in_features, WeightFormat format) {
  Weight weight{out_features, in_features, format, {}, {}};
  std::minstd_rand random(17);
  const size_t size = static_cast<size_t>(out_features) * in_features;
  std::vector<uint8_t> codes(size);
  std::vector<uint16_t> words(size);
  std::vector<float> numbers(size);
  for (size_t i = 0; i < size; ++i) {
    codes[i] = static_cast<uint8_t>(random() >> 8);
    if ((codes[i] & 0x7f) == 0x7f) codes[i] ^= 1;
    words[i] = static_cast<uint16_t>((random() >> 8 & 0x80ff) | 0x3f00);
    numbers[i] = static_cast<float>(random() % 1000000) * 1e-6f - 0.5f;
  }
  weight.packed.resize(linear_bytes(out_features, in_features, format));
  const void* stored = codes.data();
  if (format == WeightFormat::kBf16) stored = words.data();
  if (format == WeightFormat::kF32) stored = numbers.data();
  pack_linear(stored, out_features, in_features, format, weight.packed.data());
  if (has_scales(format)) {
    weight.scales.resize(ceil_div(out_features, kScaleBlock) * ceil_div(in_features, kScaleBlock));
    for (float& scale : weight.scales) scale = 0x1p-9f * (1.0f + static_cast<float>(random() % 100) * 0.01f);
  }
  return weight;
}

std::vector<float> random_x(size_t size) {
  std::vector<float> x(size);
  std::minstd_rand random(23);
  for (float& value : x) value = static_cast<float>(random() % 1000000) * 2e-6f - 1.0f;
  return x;
}

std::vector<float> run(const Weight& weight, const std::vector<float>& x, Isa isa, int num_threads) {
  const auto num_rows = static_cast<uint32_t>(x.size() / weight.in_features);
  ThreadPool pool(num_threads, 0);
  Linear linear(num_rows, weight.in_features, isa, pool);
  std::vector<float> y(static_cast<size_t>(num_rows) * weight.out_features, -7.0f);
  linear.run(weight.view(), {num_rows, ActivationType::kF32, x.data()}, y.data());
  return y;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_sizes_and_threads() {
  for (auto [out_features, in_features] :
       {std::pair<uint32_t, uint32_t>{1, 1}, {15, 33}, {33, 31}, {129, 257}, {70, 1100}}) {
    for (WeightFormat format : kFormats) {
      const Weight weight = random_weight(out_features, in_features, format);
      for (uint32_t num_rows : {1, 3, 8, 9, 100}) {
        const std::vector<float> x = random_x(static_cast<size_t>(num_rows) * in_features);
        const auto scalar = run(weight, x, Isa::kScalar, 1);
        float largest = 0.0f;
        for (float value : scalar) largest = std::max(largest, std::fabs(value));
        for (Isa isa : available_isas()) {
          const auto y = run(weight, x, isa, 1);
          for (size_t i = 0; i < y.size(); ++i) CHECK(std::fabs(y[i] - scalar[i]) <= 1e-5f * largest);
          for (int num_threads : {2, 5}) CHECK(same_bits(run(weight, x, isa, num_threads), y));
          if (isa == Isa::kAvx512 && isa_available(Isa::kAvx2)) {
            CHECK(same_bits(y, run(weight, x, Isa::kAvx2, 1)));  // the same operations in the same order
          }
        }
      }
    }
  }
}

// The caller's flags change no bit and come back as they were, with denormals among the weights.
void test_floating_point_flags() {
  constexpr unsigned kFlushAndZero = 0x8040;
  const unsigned saved = _mm_getcsr();
  const std::vector<float> x = random_x(12 * 40);
  for (WeightFormat format : kFormats) {
    Weight weight = random_weight(40, 40, format);
    if (!has_scales(format)) {
      const size_t number_bytes = format == WeightFormat::kF32 ? 4 : 2;
      for (size_t i = number_bytes - 1; i < weight.packed.size(); i += number_bytes) {
        weight.packed[i] &= 0x80;
        weight.packed[i - 1] &= 0x7f;
      }
    }
    for (Isa isa : available_isas()) {
      for (size_t num_rows : {2, 12}) {
        const std::vector<float> part(x.begin(), x.begin() + static_cast<ptrdiff_t>(num_rows * 40));
        const auto expected = run(weight, part, isa, 1);
        CHECK(expected[0] != 0.0f);
        _mm_setcsr(saved | kFlushAndZero);
        const auto flushed = run(weight, part, isa, 1);
        CHECK((_mm_getcsr() & kFlushAndZero) == kFlushAndZero);
        _mm_setcsr(saved);
        CHECK(same_bits(flushed, expected));
      }
    }
  }
}

void test_run_allocates_nothing() {
  const std::vector<float> x = random_x(30 * 1100);
  std::vector<float> y(30 * 70);
  for (WeightFormat format : kFormats) {
    const Weight weight = random_weight(70, 1100, format);
    ThreadPool pool(2, 0);
    Linear linear(16, 1100, available_isas().back(), pool);
    const int64_t before = num_allocations;
    for (uint32_t num_rows : {1, 8, 9, 30}) {
      linear.run(weight.view(), {num_rows, ActivationType::kF32, x.data()}, y.data());
    }
    CHECK(num_allocations == before);
  }
}

void test_errors_leave_y_alone() {
  const Weight weight = random_weight(20, 40, WeightFormat::kFp8);
  const std::vector<float> x = random_x(40);
  std::vector<float> y(20, 7.0f);
  ThreadPool pool(2, 0);
  Linear linear(4, 39, Isa::kScalar, pool);
  bool refused = false;
  try {
    linear.run(weight.view(), {1, ActivationType::kF32, x.data()}, y.data());
  } catch (const std::invalid_argument& error) {
    refused = std::string(error.what()) == "in_features: got 40, expected at most 39";
  }
  CHECK(refused);
  for (float value : y) CHECK(value == 7.0f);
}

}  // namespace
}  // namespace duck

int main() {
  duck::test_sizes_and_threads();
  duck::test_floating_point_flags();
  duck::test_run_allocates_nothing();
  duck::test_errors_leave_y_alone();
  return duck::test::report();
}
