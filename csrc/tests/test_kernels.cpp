// The kernels where Python cannot look: bounds of every buffer (under AddressSanitizer), races (under
// ThreadSanitizer), denormal numbers (by the CPU's own flags), and allocations in run(). The values
// themselves are compared with float64 in tests/kernels.
#include <xmmintrin.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <vector>

#include "kernels/amx_bf16/kernels.h"
#include "kernels/bf16_tiles.h"
#include "kernels/experts.h"
#include "kernels/integer_kernels.h"
#include "kernels/pack.h"
#include "kernels/weight_format.h"
#include "tests/check.h"
#include "tests/count_allocations.h"
#include "threads/thread_pool.h"

namespace duck {
namespace {

struct Layer {
  size_t hidden, intermediate, experts;
  ScaleLayout layout;
  std::vector<uint8_t> units;
  WeightFormat format = WeightFormat::kFp9;

  size_t stripes() const { return ceil_div(intermediate, kStripeChannels); }
  size_t expert_bytes() const { return stripes() * unit_bytes(format, hidden, layout); }
  LayerUnits view() const {
    return {units.data(), expert_bytes(), unit_bytes(format, hidden, layout), format, layout};
  }
};

// Random finite weights of every exponent; scales of one magnitude.
Layer random_layer(size_t hidden, size_t intermediate, size_t experts, float gate_up_scale, float down_scale,
                   ScaleLayout layout = ScaleLayout::kBlock) {
  Layer layer{hidden, intermediate, experts, layout, {}, WeightFormat::kFp9};
  layer.units.resize(experts * layer.expert_bytes());
  std::minstd_rand random(17);
  const size_t blocks = ceil_div(hidden, kScaleBlock) * ceil_div(intermediate, kScaleBlock);
  const bool by_channel = layout == ScaleLayout::kChannel;
  for (size_t expert = 0; expert < experts; ++expert) {
    std::vector<uint8_t> codes[3];
    for (auto& matrix : codes) {
      matrix.resize(hidden * intermediate);
      for (auto& code : matrix) {
        code = static_cast<uint8_t>(random() >> 8);
        if ((code & 0x7f) == 0x7f) code ^= 1;
      }
    }
    const std::vector<float> gate_up(by_channel ? intermediate : blocks, gate_up_scale);
    const std::vector<float> down(by_channel ? hidden : blocks, down_scale);
    pack_expert_units({hidden, intermediate, codes[0].data(), codes[1].data(), codes[2].data(),
                       gate_up.data(), gate_up.data(), down.data(), layout},
                      WeightFormat::kFp9, layer.units.data() + expert * layer.expert_bytes());
  }
  return layer;
}

struct Step {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
  uint32_t top_k;

  StepRows rows(size_t hidden) const {
    return {static_cast<uint32_t>(x.size() / hidden),
            top_k,
            ActivationType::kF32,
            x.data(),
            ids.data(),
            weights.data()};
  }
};

Step random_step(const Layer& layer, uint32_t num_tokens, uint32_t top_k, float x_size) {
  Step step;
  step.top_k = top_k;
  std::minstd_rand random(23);
  for (size_t i = 0; i < num_tokens * layer.hidden; ++i) {
    const float magnitude = 1.0f + static_cast<float>(random() % 1000000) * 0.9e-6f;
    step.x.push_back((random() >> 8) % 2 ? magnitude * x_size : -magnitude * x_size);
  }
  for (uint32_t i = 0; i < num_tokens * top_k; ++i) {
    step.ids.push_back(static_cast<int32_t>(random() % layer.experts));
    step.weights.push_back(0.1f + static_cast<float>(random() % 1000) * 1e-3f);
  }
  return step;
}

std::vector<float> run(const Layer& layer, const Step& step, Isa isa, int num_threads,
                       Prefill prefill = Prefill::kF32) {
  ThreadPool pool(num_threads, 0);
  const StepRows rows = step.rows(layer.hidden);
  Experts experts(
      {static_cast<uint32_t>(layer.hidden), static_cast<uint32_t>(layer.intermediate),
       static_cast<uint32_t>(layer.experts), step.top_k, 0, static_cast<uint32_t>(layer.stripes())},
      rows.num_tokens, isa, pool, prefill);
  std::vector<float> y(rows.num_tokens * layer.hidden, -7.0f);
  experts.run(layer.view(), rows, y.data());
  return y;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test_sizes_and_threads(ScaleLayout layout) {
  for (auto [hidden, intermediate] :
       {std::pair<size_t, size_t>{1, 1}, {31, 15}, {33, 17}, {200, 40}, {257, 129}}) {
    const Layer layer = random_layer(hidden, intermediate, 3, 0x1p-9f, 0x1p-9f, layout);
    for (uint32_t num_tokens : {1, 2, 3, 4, 5, 9}) {
      const Step step = random_step(layer, num_tokens, 3, 1.0f);
      const auto scalar = run(layer, step, Isa::kScalar, 1);
      float largest = 0.0f;
      for (float value : scalar) largest = std::max(largest, std::fabs(value));
      for (Isa isa : available_isas()) {
        const auto y = run(layer, step, isa, 1);
        for (size_t i = 0; i < y.size(); ++i) CHECK(std::fabs(y[i] - scalar[i]) <= 3e-6f * largest);
        for (int num_threads : {2, 5}) CHECK(same_bits(run(layer, step, isa, num_threads), y));
        // The same operations in the same order, so no difference at all.
        if (isa == Isa::kAvx512 && isa_available(Isa::kAvx2))
          CHECK(same_bits(y, run(layer, step, Isa::kAvx2, 1)));
      }
    }
  }
}

Layer integer_layer(size_t hidden, size_t intermediate, size_t experts, WeightFormat format) {
  Layer layer{hidden, intermediate, experts, ScaleLayout::kBlock, {}, format};
  layer.units.resize(experts * layer.expert_bytes());
  std::minstd_rand random(5);
  for (uint8_t& byte : layer.units) byte = (random() >> 8) & 0x3f;  // no scale but a small one
  return layer;
}

// Every set of integer multipliers that goes with an ISA here, forced.
template <class Test>
void with_each_integer(const Test& test) {
  for (Isa isa : available_isas()) {
    for (const std::string& name : available_integer(isa)) {
      setenv("DUCK_FORCE_INTEGER", name.c_str(), 1);
      test(isa, name);
      unsetenv("DUCK_FORCE_INTEGER");
    }
  }
}

// Formats of integers: no buffer is left, the number of threads shows nowhere, nor do the multipliers.
void test_formats_of_integers() {
  for (auto [hidden, intermediate] : {std::pair<size_t, size_t>{31, 15}, {200, 40}, {1057, 129}}) {
    for (int format = static_cast<int>(WeightFormat::kInt8); format <= static_cast<int>(WeightFormat::kMxfp4);
         ++format) {
      const Layer layer = integer_layer(hidden, intermediate, 3, static_cast<WeightFormat>(format));
      for (uint32_t num_tokens : {1, 9, 30}) {
        const Step step = random_step(layer, num_tokens, 2, 1.0f);
        const auto y = run(layer, step, Isa::kScalar, 1);
        with_each_integer([&](Isa isa, const std::string&) {
          for (int num_threads : {1, 3}) CHECK(same_bits(run(layer, step, isa, num_threads), y));
        });
      }
    }
  }
}

// Whether this thread holds tiles, by the CPU's own word (XINUSE).
bool holds_tiles() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return (low & (1u << 18)) != 0;  // TILEDATA
}

// A step of many rows leaves neither memory behind nor tiles, which an idle core would keep awake for and
// which other code on the thread would not expect; and it computes whatever tiles that code has left.
void test_integer_steps_leave_nothing() {
  const Layer layer = integer_layer(96, 40, 1, WeightFormat::kInt4);
  const Step step = random_step(layer, 60, 1, 1.0f);
  with_each_integer([&](Isa isa, const std::string& name) {
    std::vector<float> y(60 * 96);
    ThreadPool pool(2, 0);
    Experts experts({96, 40, 1, 1, 0, 3}, 60, isa, pool);
    const int64_t before = num_allocations;
    for (int i = 0; i < 10; ++i) experts.run(layer.view(), step.rows(96), y.data());
    CHECK(num_allocations == before);
    if (name != "amx_int8") return;
    CHECK(!holds_tiles());
    amx_int8::kTiles.begin();
    PanelGroup panel[1] = {};
    float dots[16 * 32];
    Stream stream{layer.units.data(), {}, 0, 1, layer.units.data(), 0};
    amx_int8::kTiles.dots[integer_index(WeightFormat::kInt4, ScaleLayout::kBlock)](stream, panel, 1, 16,
                                                                                   dots);
    CHECK(holds_tiles());  // so that the test can fail
    amx_bf16::begin();     // tiles of other shapes
    const std::vector<float> expected = y;
    experts.run(layer.view(), step.rows(96), y.data());
    CHECK(same_bits(y, expected));
    CHECK(!holds_tiles());
  });
}

// Whether this CPU has bf16 multipliers; says so where it has none.
bool has_bf16() {
  if (!available_bf16().empty()) return true;
  std::puts("no bf16 multipliers on this CPU: prefill in bf16 is not tested");
  return false;
}

// Every multiplier that is there, forced.
template <class Test>
void with_each_bf16(const Test& test) {
  for (const std::string& name : available_bf16()) {
    setenv("DUCK_FORCE_BF16", name.c_str(), 1);
    test();
    unsetenv("DUCK_FORCE_BF16");
  }
}

void test_bf16_sizes_and_threads(ScaleLayout layout) {
  for (auto [hidden, intermediate] :
       {std::pair<size_t, size_t>{1, 1}, {31, 15}, {33, 17}, {200, 40}, {257, 145}}) {
    const Layer layer = random_layer(hidden, intermediate, 1, 0x1p-9f, 0x1p-9f, layout);
    for (uint32_t num_tokens : {9, 16, 17, 49, 97}) {
      const Step step = random_step(layer, num_tokens, 1, 1.0f);
      const auto f32 = run(layer, step, Isa::kAvx512, 1);
      float largest = 0.0f;
      for (float value : f32) largest = std::max(largest, std::fabs(value));
      const auto y = run(layer, step, Isa::kAvx512, 1, Prefill::kBf16);
      for (size_t i = 0; i < y.size(); ++i) CHECK(std::fabs(y[i] - f32[i]) <= 2e-2f * largest);
      CHECK(!same_bits(y, f32));
      for (int num_threads : {2, 5}) {
        CHECK(same_bits(run(layer, step, Isa::kAvx512, num_threads, Prefill::kBf16), y));
      }
    }
  }
}

void test_bf16_run_allocates_nothing() {
  const Layer layer = random_layer(96, 40, 1, 0x1p-9f, 0x1p-9f);
  const Step step = random_step(layer, 60, 1, 1.0f);
  std::vector<float> y(60 * 96);
  ThreadPool pool(2, 0);
  Experts experts({96, 40, 1, 1, 0, 3}, 60, Isa::kAvx512, pool, Prefill::kBf16);
  const int64_t before = num_allocations;
  for (int i = 0; i < 10; ++i) experts.run(layer.view(), step.rows(96), y.data());
  CHECK(num_allocations == before);
}

constexpr unsigned kDenormalsAreZero = 0x0040, kFlushToZero = 0x8000;
constexpr unsigned kDenormalOperand = 0x0002, kUnderflow = 0x0010;

// At the edges of the ranges in experts.h: flush-to-zero changes no bit, and the CPU saw neither a denormal
// operand nor an underflow. Activations come out of order one by the choice of the scales, except in the last
// cases.
void test_no_denormals() {
  struct Case {
    float x, gate_up_scale, down_scale;
  };
  const Case cases[] = {{1.0f, 0x1p-9f, 0x1p-9f},
                        {0x1p-40f, 0x1p31f, 0x1p-21f},
                        {0x1p-40f, 0x1p-31f, 0x1p40f},
                        {0x1p62f, 0x1p-71f, 0x1p-9f},
                        {0x1p-9f, 0x1p-21f, 0x1p-21f},
                        {0x1p-21f, 0x1p40f, 0x1p-21f},
                        {1.0f, 1.0f, 1.0f}};
  constexpr int kNumCases = sizeof(cases) / sizeof(Case);
  const unsigned saved = _mm_getcsr();
  for (Isa isa : available_isas()) {
    for (int i = 0; i < 2 * kNumCases; ++i) {
      const Case& c = cases[i / 2];
      const auto layout = i % 2 == 0 ? ScaleLayout::kBlock : ScaleLayout::kChannel;
      const Layer layer = random_layer(300, 40, 3, c.gate_up_scale, c.down_scale, layout);
      const Step step = random_step(layer, 6, 2, c.x);
      std::vector<float> results[2];
      for (unsigned flush : {0u, kDenormalsAreZero | kFlushToZero}) {
        _mm_setcsr((saved & ~0x3fu & ~(kDenormalsAreZero | kFlushToZero)) | flush);
        results[flush != 0] = run(layer, step, isa, 1);
        CHECK((_mm_getcsr() & (kDenormalOperand | kUnderflow)) == 0);
        _mm_setcsr(saved);
      }
      CHECK(same_bits(results[0], results[1]));
      for (float value : results[0]) CHECK(std::isfinite(value));
    }
  }
}

void test_run_allocates_nothing() {
  const Layer layer = random_layer(96, 40, 3, 0x1p-9f, 0x1p-9f);
  const Step step = random_step(layer, 5, 2, 1.0f);
  std::vector<float> y(5 * 96);
  for (Isa isa : available_isas()) {
    ThreadPool pool(2, 0);
    Experts experts({96, 40, 3, 2, 0, 3}, 5, isa, pool);
    const int64_t before = num_allocations;
    for (int i = 0; i < 10; ++i) experts.run(layer.view(), step.rows(96), y.data());
    CHECK(num_allocations == before);
  }
}

void test_errors_leave_y_alone() {
  const Layer layer = random_layer(33, 17, 3, 0x1p-9f, 0x1p-9f);
  ThreadPool pool(2, 0);
  Experts experts({33, 17, 3, 2, 0, 2}, 4, Isa::kScalar, pool);
  Step step = random_step(layer, 4, 2, 1.0f);
  std::vector<float> y(4 * 33, 7.0f);
  for (int32_t id : {-1, 3, INT32_MAX, INT32_MIN}) {
    step.ids[5] = id;
    bool refused = false;
    try {
      experts.run(layer.view(), step.rows(33), y.data());
    } catch (const std::invalid_argument& error) {
      refused = std::string(error.what()).rfind("topk_ids[2, 1]: got " + std::to_string(id), 0) == 0;
    }
    CHECK(refused);
  }
  for (float value : y) CHECK(value == 7.0f);
}

void test_e4m3_rounding() {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(8.0f + static_cast<float>(mantissa), exponent - 10);
    CHECK(e4m3_from_f32(code < 128 ? magnitude : -magnitude) == code);
    // fp9 holds it: |w| = 2^(e5 - 23) * (1 + m / 8).
    const int fp9 = fp9_magnitude(static_cast<uint8_t>(code));
    CHECK((fp9 == 0 ? 0.0f : std::ldexp(8.0f + static_cast<float>(fp9 & 7), (fp9 >> 3) - 26)) == magnitude);
  }
  CHECK(e4m3_from_f32(1e30f) == 0x7e);
  CHECK(e4m3_from_f32(-449.0f) == 0xfe);
}

}  // namespace
}  // namespace duck

int main() {
  duck::test_sizes_and_threads(duck::ScaleLayout::kBlock);
  duck::test_sizes_and_threads(duck::ScaleLayout::kChannel);
  duck::test_formats_of_integers();
  duck::test_integer_steps_leave_nothing();
  duck::test_no_denormals();
  if (duck::has_bf16()) {
    for (auto layout : {duck::ScaleLayout::kBlock, duck::ScaleLayout::kChannel}) {
      duck::with_each_bf16([layout] { duck::test_bf16_sizes_and_threads(layout); });
    }
    duck::with_each_bf16(duck::test_bf16_run_allocates_nothing);
  }
  duck::test_run_allocates_nothing();
  duck::test_errors_leave_y_alone();
  duck::test_e4m3_rounding();
  return duck::test::report();
}
