// Offsets between clocks, and the trace that is made of moments on them.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/check.h"
#include "transport/clock_offset.h"
#include "transport/step_trace.h"

using namespace duck;

namespace {

constexpr uint64_t kSecond = 1'000'000'000;

// A step at host time `at` with these delays, at a worker whose clock is `ahead`.
void step(ClockOffset& clock, uint64_t at, uint64_t ahead, uint64_t there, uint64_t inside, uint64_t back) {
  clock.add(at, at + there + ahead, at + there + inside + ahead, at + there + inside + back);
}

void the_quickest_ways_count() {
  for (const uint64_t ahead : {uint64_t{0}, uint64_t{5} * kSecond, uint64_t(0) - 7, uint64_t{1} << 63}) {
    ClockOffset clock;
    CHECK(!clock.known());
    step(clock, kSecond, ahead, 100, 5000, 300);
    CHECK(clock.known());
    CHECK(clock.error_at(kSecond) == 200);
    CHECK(clock.offset_ns() == ahead - 100);            // between 100 more and 300 less
    step(clock, kSecond + 10'000, ahead, 5000, 1, 40);  // a quick way back
    CHECK(clock.error_at(kSecond + 15'041) == 70);
    CHECK(clock.offset_ns() == ahead + 30);
    step(clock, kSecond + 10'500, ahead, 40, 1, 7000);  // and a quick way there
    CHECK(clock.offset_ns() == ahead);
    CHECK(clock.error_at(kSecond + 17'541) == 40);
    step(clock, kSecond + 11'000, ahead, 10'000, 1, 500);  // slow ones tell nothing
    CHECK(clock.offset_ns() == ahead);
  }
}

void what_is_old_is_doubted() {
  ClockOffset clock;
  step(clock, kSecond, 0, 10, 1, 10);
  CHECK(clock.error_at(2 * kSecond) >= 10 + 49'000 && clock.error_at(2 * kSecond) <= 10 + 51'000);
  // The worker's clock has gained 40 us since; ways of 20 us say so, those of 1 s do not.
  step(clock, 2 * kSecond, 40'000, kSecond, 1, kSecond);
  CHECK(clock.offset_ns() + 10'000 < 20'000);
  step(clock, 4 * kSecond, 40'000, 20'000, 1, 20'000);
  CHECK(clock.offset_ns() == 40'000);
  clock.reset();
  CHECK(!clock.known());
}

// Steps of 7 us each, for a second of a clock that gains 50 parts in a million: bounds are let go in small
// parts too, and no sample ever contradicts them.
void bounds_follow_a_clock() {
  ClockOffset clock;
  uint64_t at = kSecond, ahead = 0;
  for (int i = 0; i < 140'000; ++i, at += 7000, ahead = (at - kSecond) / 20'000) {
    step(clock, at, ahead, 900, 100, 1100);
    const auto error = static_cast<int64_t>(clock.offset_ns() - ahead);
    const int64_t most = clock.error_at(at + 2100);
    CHECK(most <= 1002 && error <= most && error >= -most);
  }
}

// Whatever the ways: what is said of a step lies within it.
void a_step_is_in_order() {
  ClockOffset clock;
  std::minstd_rand random(1);
  uint64_t at = kSecond;
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t there = random() % 2000, inside = random() % 50, back = random() % 2000;
    step(clock, at, 12'345, there, inside, back);
    const uint64_t started = clock.to_host(at + there + 12'345);
    CHECK(started >= at && started + inside <= at + there + inside + back);
    at += 5000;
  }
}

void another_clock_begins_anew() {
  ClockOffset clock;
  step(clock, kSecond, 5, 100, 10, 100);
  step(clock, kSecond + 1000, 9 * kSecond, 100, 10, 100);
  CHECK(clock.offset_ns() == 9 * kSecond);
  step(clock, kSecond + 2000, (uint64_t{1} << 63) + 3, 100, 10, 100);
  CHECK(clock.offset_ns() == (uint64_t{1} << 63) + 3);
}

void impossible_readings_are_left_out() {
  ClockOffset clock;
  clock.add(1000, 50, 40, 2000);             // finished before it started
  clock.add(1000, 0, 1001, 2000);            // computed longer than it was away
  clock.add(2000, 0, 0, 1000);               // answered before it was asked
  clock.add(1000, 0, UINT64_MAX, 2000);      // anything
  clock.add(1000, UINT64_MAX / 2, 0, 2000);  // anything
  CHECK(!clock.known());
}

StepMoments moments(uint64_t sequence) { return {sequence, 3, 2, 1, 10'000, 12'000, 15'000, 30'500}; }

void a_step_in_words() {
  StepTrace trace(4096);
  const int32_t ids[] = {7, 2, 7, -1};
  trace.record(moments(9), {{11'000, 14'000, 20'123, 25'000, 80}, {0, 0, 0, 30'000, -1}}, ids, 4);
  trace.record_replaced(1, 40'000);
  CHECK(trace.pending_bytes() > 0);
  const std::string args = ",\"args\":{\"step\":9,\"layer\":3";
  const auto event = [&](const char* name, const char* pid, const char* from, const char* took) {
    return std::string(",\n{\"name\":\"") + name + "\",\"ph\":\"X\",\"pid\":" + pid +
           ",\"tid\":2,\"ts\":" + from + ",\"dur\":" + took + args;
  };
  const std::string expected =
      event("dispatch", "1", "9.000", "2.000") + ",\"tokens\":2,\"experts\":[2,7],\"rows\":[1,2]}}" +
      event("queue", "2", "9.000", "1.000") + "}}" + event("wire", "2", "10.000", "3.000") + "}}" +
      event("compute", "2", "13.000", "6.123") + ",\"error_ns\":80}}" +
      event("reply", "2", "19.123", "4.877") + "}}" + event("wait", "1", "14.000", "15.000") + "}}" +
      event("combine", "1", "29.000", "0.500") + "}}" +
      ",\n{\"name\":\"replaced\",\"ph\":\"i\",\"s\":\"p\",\"pid\":3,\"tid\":1,\"ts\":39.000}";
  CHECK(trace.drain(1000) == expected);
  CHECK(trace.pending_bytes() == 0);
  CHECK(trace.drain(1000).empty());
}

void moments_are_put_in_order() {
  StepTrace trace(4096);
  // Free after the answer, started before that, finished never.
  trace.record(moments(1), {{99'000, 1, 0, 20'000, 5}}, nullptr, 0);
  const std::string text = trace.drain(0);
  CHECK(text.find("\"wire\",\"ph\":\"X\",\"pid\":2,\"tid\":2,\"ts\":20.000,\"dur\":0.000") !=
        std::string::npos);
  CHECK(text.find("\"reply\",\"ph\":\"X\",\"pid\":2,\"tid\":2,\"ts\":20.000,\"dur\":0.000") !=
        std::string::npos);
  CHECK(text.find('-') == std::string::npos);
}

void what_has_no_room_is_counted() {
  StepTrace trace(600);
  const std::vector<WorkerMoments> workers(1);
  const int32_t id = 1;
  size_t kept = 0;
  while (trace.num_dropped() < 3) {
    trace.record(moments(kept), workers, &id, 1);
    if (trace.num_dropped() == 0) ++kept;
  }
  CHECK(kept >= 2);
  const std::string text = trace.drain(0);
  size_t steps = 0;
  for (size_t at = 0; (at = text.find("\"dispatch\"", at)) != std::string::npos; ++at) ++steps;
  CHECK(steps == kept);
  trace.record(moments(99), workers, &id, 1);
  CHECK(trace.num_dropped() == 3);
  CHECK(trace.drain(0).find("\"step\":99") != std::string::npos);
}

}  // namespace

int main() {
  the_quickest_ways_count();
  what_is_old_is_doubted();
  bounds_follow_a_clock();
  a_step_is_in_order();
  another_clock_begins_anew();
  impossible_readings_are_left_out();
  a_step_in_words();
  moments_are_put_in_order();
  what_has_no_room_is_counted();
  return test::report();
}
