// The simulator's links, and the time and the answers of a stand-in for experts.
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "simulate/network.h"
#include "simulate/stand_in.h"
#include "tests/check.h"

namespace {

using namespace duck;
using namespace duck::simulate;
using std::chrono::microseconds;

void a_port_lets_one_pass_after_the_other() {
  Port port(2.0);
  const Time start{microseconds(1000)};
  CHECK(port.duration(10) == microseconds(5));
  CHECK(port.reserve(start, 10) == start + microseconds(5));
  CHECK(port.reserve(start + microseconds(1), 4) == start + microseconds(7));
  CHECK(port.reserve(start + microseconds(50), 4) == start + microseconds(52));
  Port free(0.0);
  CHECK(free.reserve(start, 1'000'000) == start);
}

void a_step_is_known_until_another_takes_its_place() {
  Network network(0.0);
  CHECK(!network.submitted_at(0));
  const Time before = Clock::now();
  network.submitted(5);
  const auto at = network.submitted_at(5);
  CHECK(at && *at >= before && *at <= Clock::now());
  CHECK(!network.submitted_at(5 + Network::kMaxSteps));
  network.submitted(5 + Network::kMaxSteps);
  CHECK(!network.submitted_at(5));
}

constexpr uint32_t kHidden = 40, kExperts = 6, kFirstStripe = 3;

ExpertShape shape() {
  ExpertShape shape;
  shape.hidden_size = kHidden;
  shape.intermediate_size = 16 * 5;
  shape.num_experts = kExperts;
  shape.top_k = 2;
  shape.first_stripe = kFirstStripe;
  shape.num_stripes = 2;
  return shape;
}

StepRows rows_of(const std::vector<int32_t>& ids, const std::vector<float>& weights) {
  StepRows rows;
  rows.num_tokens = static_cast<uint32_t>(ids.size() / 2);
  rows.top_k = 2;
  rows.topk_ids = ids.data();
  rows.topk_weights = weights.data();
  return rows;
}

void time_is_that_of_distinct_experts_or_of_rows() {
  const auto network = std::make_shared<Network>(0.0);
  StandIn stand_in(shape(), {.fixed_us = 3, .expert_us = 10, .row_us = 4}, network, 0, 0);
  const std::vector<float> weights(8, 1.0f);
  CHECK(stand_in.compute_time(rows_of({0, 5}, weights)) == microseconds(23));
  CHECK(stand_in.compute_time(rows_of({0, 5, 5, 0}, weights)) == microseconds(23));
  CHECK(stand_in.compute_time(rows_of({0, 5, 5, 1}, weights)) == microseconds(33));
  // Eight rows of two experts: multiplying takes longer than reading.
  CHECK(stand_in.compute_time(rows_of({0, 1, 0, 1, 0, 1, 0, 1}, weights)) == microseconds(35));
  for (const int32_t wrong : {-1, 6, INT32_MAX}) {
    try {
      stand_in.compute_time(rows_of({0, wrong}, weights));
      CHECK(!"refused");
    } catch (const std::invalid_argument&) {
    }
  }
}

void answers_are_the_pattern_and_take_their_time() {
  const auto network = std::make_shared<Network>(1.0);
  StandIn stand_in(shape(), {.fixed_us = 400, .link_bytes_per_us = 1.0, .delay_us = 100}, network, 200, 300);
  const std::vector<int32_t> ids{0, 1, 2, 3};
  for (const float number : {7.0f, 123456.0f}) {
    std::vector<float> y(2 * kHidden, 99.0f);
    const std::vector<float> weights(4, number);
    const Time before = Clock::now();
    stand_in.run({}, rows_of(ids, weights), y.data());
    // 400 and 600 bytes at a byte a microsecond, two delays, and computing.
    CHECK(Clock::now() - before >= microseconds(400 + 100 + 400 + 600 + 100));
    for (uint32_t row = 0; row < 2; ++row) {
      const uint32_t offset = pattern_offset(static_cast<uint32_t>(number), row, kFirstStripe);
      for (uint32_t i = 0; i < kHidden; ++i) {
        const uint64_t index = offset + i;
        CHECK(y[row * kHidden + i] == static_cast<float>(static_cast<int>(index * index % 31) - 15));
      }
    }
  }
  CHECK(pattern_offset(1, 0, 0) != pattern_offset(2, 0, 0));
  CHECK(pattern_offset(1, 0, 0) != pattern_offset(1, 1, 0));
  CHECK(pattern_offset(1, 0, 0) != pattern_offset(1, 0, 1));
  // Weights that name no step are no error.
  for (const float odd : {-1.0f, 1e30f, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> y(2 * kHidden);
    stand_in.run({}, rows_of(ids, std::vector<float>(4, odd)), y.data());
  }
}

}  // namespace

int main() {
  a_port_lets_one_pass_after_the_other();
  a_step_is_known_until_another_takes_its_place();
  time_is_that_of_distinct_experts_or_of_rows();
  answers_are_the_pattern_and_take_their_time();
  return duck::test::report();
}
