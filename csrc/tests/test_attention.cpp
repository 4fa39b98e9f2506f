// Attention where Python cannot look: bounds of every buffer (under AddressSanitizer) and races (under
// ThreadSanitizer), for every ISA and odd sizes. The values are compared with float64 in tests/attention;
// here one row at a time on one thread is held against all rows on several.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_table.h"
#include "tests/check.h"
#include "threads/thread_pool.h"

namespace duck::attention {
namespace {

std::vector<float> random_numbers(size_t size, unsigned seed) {
  std::minstd_rand random(seed);
  std::vector<float> numbers(size);
  for (float& number : numbers) number = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
  return numbers;
}

// A context of `stop` tokens of which the last `rows` are the step's, its pages backwards. The cache ends
// with the last slot in use.
struct Case {
  Case(uint32_t rows, uint32_t stop, uint32_t page_tokens) {
    const uint32_t num_pages = (stop + page_tokens - 1) / page_tokens;
    for (uint32_t page = num_pages; page-- > 0;) step.pages.push_back(static_cast<int32_t>(page));
    step.contexts.push_back({0, rows, stop - rows, 0, page_tokens, step.pages.data()});
    step.num_rows = rows;
    step.num_slots = static_cast<size_t>(num_pages) * page_tokens;
  }
  StepContexts step;
};

void test_rows_and_threads_agree(Isa isa, const AttendShape& shape, uint32_t topk) {
  constexpr uint32_t kRows = 70, kStop = 700;
  const Case all(kRows, kStop, 7);
  const size_t key_width = shape.num_kv_heads * shape.key_dim;
  const size_t value_width = shape.num_kv_heads * shape.value_dim;
  const auto q = random_numbers(static_cast<size_t>(kRows) * shape.num_heads * shape.key_dim, 1);
  const auto keys = random_numbers(all.step.num_slots * key_width, 2);
  const auto values = random_numbers(all.step.num_slots * value_width, 3);
  const auto weights = random_numbers(static_cast<size_t>(kRows) * shape.num_heads, 4);
  std::vector<int32_t> selection(static_cast<size_t>(kRows) * topk);
  const size_t row_size = static_cast<size_t>(shape.num_heads) * shape.value_dim;
  std::vector<float> together(kRows * row_size), alone(row_size);
  ThreadPool three(3, 0), one(1, 0);
  Attention on_three(isa, three), on_one(isa, one);
  if (topk != 0) {
    on_three.select(all.step, shape.num_heads, shape.key_dim, q.data(), weights.data(),
                    {keys.data(), key_width}, topk, selection.data());
  }
  const Selection chosen{topk == 0 ? nullptr : selection.data(), topk};
  on_three.attend(all.step, shape, q.data(), {keys.data(), key_width}, {values.data(), value_width}, chosen,
                  together.data());
  for (uint32_t row = 0; row < kRows; ++row) {
    Case single(1, kStop - kRows + row + 1, 7);
    single.step.pages = all.step.pages;
    single.step.contexts[0].pages = single.step.pages.data();
    const float* own = q.data() + static_cast<size_t>(row) * shape.num_heads * shape.key_dim;
    Selection mine;
    std::vector<int32_t> positions(topk);
    if (topk != 0) {
      on_one.select(single.step, shape.num_heads, shape.key_dim, own, weights.data() + row * shape.num_heads,
                    {keys.data(), key_width}, topk, positions.data());
      mine = {positions.data(), topk};
      CHECK(std::memcmp(positions.data(), selection.data() + row * topk, topk * sizeof(int32_t)) == 0);
    }
    on_one.attend(single.step, shape, own, {keys.data(), key_width}, {values.data(), value_width}, mine,
                  alone.data());
    CHECK(std::memcmp(alone.data(), together.data() + row * row_size, row_size * sizeof(float)) == 0);
    CHECK(std::isfinite(alone[0]));
  }
}

void test_products_stay_in_bounds(Isa isa) {
  constexpr uint32_t kRows = 50, kHeads = 3, kInputs = 70, kOutputs = 33;
  const auto x = random_numbers(kRows * kHeads * kInputs, 1);
  const auto w = random_numbers(kHeads * kInputs * padded(kOutputs), 2);
  std::vector<float> y(kRows * kHeads * kOutputs);
  ThreadPool pool(2, 0);
  Attention(isa, pool).multiply_heads({kRows, kHeads, kInputs, kOutputs, x.data(), kHeads * kInputs, kInputs,
                                       w.data(), y.data(), kHeads * kOutputs, kOutputs});
  CHECK(std::isfinite(y.back()));
}

}  // namespace
}  // namespace duck::attention

int main() {
  using namespace duck::attention;
  for (const duck::Isa isa : duck::available_isas()) {
    test_rows_and_threads_agree(isa, {6, 2, 19, 5, 0, 0.5f}, 0);
    test_rows_and_threads_agree(isa, {3, 1, 33, 21, 100, 0.5f}, 0);
    test_rows_and_threads_agree(isa, {5, 1, 16, 16, 0, 0.5f}, 65);
    test_products_stay_in_bounds(isa);
  }
  return duck::test::report();
}
