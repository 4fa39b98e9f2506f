#include "simulate/stand_in.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace duck::simulate {
namespace {

Nanoseconds microseconds(double us) { return Nanoseconds(static_cast<int64_t>(1000.0 * us)); }

// Sleeps, and never spins: 64 nodes may share a core. The timer's slack, 50 us by default, is taken off.
void sleep_until(Time until) {
  thread_local const bool exact = ::prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0;
  static_cast<void>(exact);
  const auto ns = until.time_since_epoch().count();
  const timespec at{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
  }
}

// Any other weight names no step.
uint32_t step_number(float weight) {
  return weight >= 0.0f && weight < 0x1p24f ? static_cast<uint32_t>(weight) : UINT32_MAX;
}

}  // namespace

float pattern(uint64_t index) { return static_cast<float>(index * index % 31) - 15.0f; }

uint32_t pattern_offset(uint32_t step, uint32_t row, uint32_t first_stripe) {
  return (5 * step + 3 * row + 7 * first_stripe) % kNumOffsets;
}

StandIn::StandIn(const ExpertShape& shape, const NodeModel& node, std::shared_ptr<Network> network,
                 uint64_t request_row_bytes, uint64_t reply_row_bytes)
    : shape_(shape),
      node_(node),
      network_(std::move(network)),
      request_row_bytes_(request_row_bytes),
      reply_row_bytes_(reply_row_bytes),
      delay_(microseconds(node.delay_us)),
      in_(node.link_bytes_per_us),
      out_(node.link_bytes_per_us),
      seen_in_(shape.num_experts),
      pattern_(size_t{shape.hidden_size} + kNumOffsets) {
  for (size_t i = 0; i < pattern_.size(); ++i) pattern_[i] = pattern(i);
}

Nanoseconds StandIn::compute_time(const StepRows& rows) {
  const size_t num_ids = size_t{rows.num_tokens} * rows.top_k;
  for (size_t i = 0; i < num_ids; ++i) {
    const int32_t id = rows.topk_ids[i];
    if (static_cast<uint32_t>(id) < shape_.num_experts) continue;  // a negative one is far above
    throw std::invalid_argument("topk_ids: got " + std::to_string(id) + ", expected 0 to " +
                                std::to_string(shape_.num_experts - 1));
  }
  ++num_runs_;
  uint32_t num_distinct = 0;
  for (size_t i = 0; i < num_ids; ++i) {
    uint32_t& seen_in = seen_in_[static_cast<size_t>(rows.topk_ids[i])];
    num_distinct += seen_in != num_runs_;
    seen_in = num_runs_;
  }
  return microseconds(node_.fixed_us +
                      std::max(num_distinct * node_.expert_us, static_cast<double>(num_ids) * node_.row_us));
}

Time StandIn::computed(Time now, const StepRows& rows) {
  const Nanoseconds compute = compute_time(rows);
  // A request that was submitted while the loop was in an earlier step waited in the socket. When it came is
  // not known then, but for what the host needed to send it to the workers before this one.
  const Time submitted = network_->submitted_at(step_number(rows.topk_weights[0])).value_or(now);
  const Time from = submitted < returned_ ? submitted : now;
  const uint64_t request_bytes = rows.num_tokens * request_row_bytes_;
  const Time left_host = network_->host_out.reserve(from, request_bytes);
  const Time first_byte = left_host - network_->host_out.duration(request_bytes);
  const Time arrived = std::max(left_host, in_.reserve(first_byte, request_bytes)) + delay_;
  free_ = std::max(arrived, free_) + compute;
  return free_;
}

void StandIn::run(const LayerUnits&, const StepRows& rows, float* y) {
  const Time done = computed(Clock::now(), rows);
  const uint32_t step = step_number(rows.topk_weights[0]);
  for (uint32_t row = 0; row < rows.num_tokens; ++row) {
    std::memcpy(y + size_t{row} * shape_.hidden_size,
                pattern_.data() + pattern_offset(step, row, shape_.first_stripe),
                sizeof(float) * shape_.hidden_size);
  }
  // The host's port is asked for only now that the reply is at it: others may come first.
  const uint64_t reply_bytes = rows.num_tokens * reply_row_bytes_;
  const Time left_node = out_.reserve(done, reply_bytes);
  const Time at_host = left_node - out_.duration(reply_bytes);
  sleep_until(at_host);
  sleep_until(std::max(left_node, network_->host_in.reserve(at_host, reply_bytes)) + delay_);
  returned(Clock::now());
}

}  // namespace duck::simulate
