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
  const Time at{microseconds(77)};
  network.submitted(5, at);
  CHECK(network.submitted_at(5) == at);
  CHECK(!network.submitted_at(5 + Network::kMaxSteps));
  network.submitted(5 + Network::kMaxSteps, at);
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

void links_and_nodes_are_busy_side_by_side() {
  const auto network = std::make_shared<Network>(10.0);
  const NodeModel node{.fixed_us = 100, .link_bytes_per_us = 5.0, .delay_us = 7};
  StandIn first(shape(), node, network, 1000, 300), second(shape(), node, network, 1000, 300);
  const std::vector<int32_t> ids{0, 1};
  const std::vector<float> one(2, 1.0f), two(2, 2.0f), three(2, 3.0f), unknown(2, 9.0f);
  const auto at = [](int us) { return Time{microseconds(us)}; };
  // 1000 bytes pass the host's port in 100 and a node's, at the same time, in 200.
  network->submitted(1, at(900));
  CHECK(first.computed(at(1000), rows_of(ids, one)) == at(1000 + 200 + 7 + 100));
  CHECK(second.computed(at(1000), rows_of(ids, one)) == at(1000 + 100 + 200 + 7 + 100));
  // One that was submitted while the loop was busy until 1400 passed the links meanwhile, and waited for the
  // node; one that was submitted later came when the loop saw it.
  first.returned(at(1400));
  network->submitted(2, at(1050));
  CHECK(first.computed(at(1400), rows_of(ids, two)) == at(1200 + 200 + 7 + 100));
  first.returned(at(1650));
  network->submitted(3, at(1700));
  CHECK(first.computed(at(1800), rows_of(ids, three)) == at(1800 + 200 + 7 + 100));
  first.returned(at(2200));
  CHECK(first.computed(at(3000), rows_of(ids, unknown)) == at(3000 + 307));
  // The node is free before the reply has gone: nothing but computing was in the way of this one.
  first.returned(at(3400));
  network->submitted(4, at(3010));
  CHECK(first.computed(at(3400), rows_of(ids, {4.0f, 4.0f})) == at(3200 + 200 + 7 + 100));
  NodeModel slow = node;
  slow.fixed_us = 5000;
  StandIn busy(shape(), slow, network, 1000, 300);
  network->submitted(5, at(4000));
  CHECK(busy.computed(at(4000), rows_of(ids, {5.0f, 5.0f})) == at(4000 + 207 + 5000));
  busy.returned(at(9300));
  network->submitted(6, at(4100));
  CHECK(busy.computed(at(9300), rows_of(ids, {6.0f, 6.0f})) == at(4000 + 207 + 5000 + 5000));
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
  links_and_nodes_are_busy_side_by_side();
  answers_are_the_pattern_and_take_their_time();
  return duck::test::report();
}
