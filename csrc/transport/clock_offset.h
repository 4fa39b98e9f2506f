// How far a worker's clock is ahead of the host's, from the steps themselves: each is a round trip.
//
// A worker had a request after it left, and was done with it before its answer was taken. Each step so bounds
// the offset from both sides, by what its way there and its way back took: of all steps the quickest way
// there and the quickest way back count, the middle between them is the guess, and half of what they leave is
// the most that it is wrong by. Clocks drift apart, so bounds are let go at the speed at which they may.
#pragma once

#include <algorithm>
#include <cstdint>

namespace duck {

class ClockOffset {
 public:
  // Two quartz clocks part by no more than 50 parts in a million: 1 ns in 20 us.
  static constexpr int64_t kNsPerDriftNs = 20'000;

  // sent and taken: host's clock; started and finished: the worker's. Nanoseconds. What the worker says may
  // be anything: a sample that cannot be is left out. Moments of the sample are in order by to_host() then.
  void add(uint64_t sent_ns, uint64_t started_ns, uint64_t finished_ns, uint64_t taken_ns) {
    const auto there = static_cast<int64_t>(taken_ns - sent_ns);
    const auto inside = static_cast<int64_t>(finished_ns - started_ns);
    if (there < 0 || inside < 0 || inside > there) return;
    // Unsigned, as clocks begin anywhere; the differences to the first sample's are small.
    const auto most = static_cast<int64_t>(started_ns - sent_ns - base_ns_);
    const auto least = static_cast<int64_t>(finished_ns - taken_ns - base_ns_);
    const auto drift = std::max<int64_t>(0, static_cast<int64_t>(taken_ns - at_ns_)) / kNsPerDriftNs;
    const bool fits =
        known_ && most < kFar && least > -kFar && least <= most_ns_ + drift && most >= least_ns_ - drift;
    if (!fits) {  // the first one, or another clock
      base_ns_ = started_ns - sent_ns;
      most_ns_ = 0;
      least_ns_ = inside - there;
      at_ns_ = taken_ns;
      known_ = true;
      return;
    }
    most_ns_ = std::min(most, most_ns_ + drift);
    least_ns_ = std::max(least, least_ns_ - drift);
    at_ns_ += static_cast<uint64_t>(drift * kNsPerDriftNs);
  }

  bool known() const { return known_; }

  // A moment of the worker's clock on the host's.
  uint64_t to_host(uint64_t worker_ns) const { return worker_ns - offset_ns(); }

  // The most that to_host() is wrong by at that moment of the host's clock.
  int64_t error_at(uint64_t host_ns) const {
    const auto age_ns = std::max<int64_t>(0, static_cast<int64_t>(host_ns - at_ns_));
    return (most_ns_ - least_ns_ + 1) / 2 + age_ns / kNsPerDriftNs;
  }

  // The worker's clock less the host's, modulo 2^64.
  uint64_t offset_ns() const {
    return base_ns_ + static_cast<uint64_t>(least_ns_ + (most_ns_ - least_ns_) / 2);
  }

  void reset() { *this = {}; }

 private:
  static constexpr int64_t kFar = int64_t{1} << 60;

  uint64_t base_ns_ = 0;  // the first sample's
  int64_t least_ns_ = 0;  // of the offset, less the base
  int64_t most_ns_ = 0;
  uint64_t at_ns_ = 0;  // when the bounds were let go last
  bool known_ = false;
};

}  // namespace duck
