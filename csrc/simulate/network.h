// Links of a flock that is not there, as timelines: when bytes would have passed a port that others use too.
// Shared by the stand-ins of all simulated workers (stand_in.h) and by whoever submits their steps.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>

namespace duck::simulate {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Nanoseconds = std::chrono::nanoseconds;

// One direction of a network port: what passes it passes one after the other, in the order of reserve().
class Port {
 public:
  // bytes_per_us 0: passing takes no time.
  explicit Port(double bytes_per_us) : bytes_per_us_(bytes_per_us) {}

  // When the last of these bytes has passed, where the first is there at `from`.
  Time reserve(Time from, uint64_t bytes);
  // How long these bytes take where nothing else passes.
  Nanoseconds duration(uint64_t bytes) const;

 private:
  const double bytes_per_us_;
  std::mutex mutex_;
  Time free_;
};

// The host's port, and when the host handed steps over: a worker that was busy does not know when its request
// came. Steps are told apart by the number that StepRows::topk_weights begins with.
class Network {
 public:
  // More steps in flight than this are not told apart; a transport has no more either.
  static constexpr uint32_t kMaxSteps = 64;

  explicit Network(double host_bytes_per_us) : host_out(host_bytes_per_us), host_in(host_bytes_per_us) {}

  void submitted(uint32_t step, Time at);
  std::optional<Time> submitted_at(uint32_t step) const;

  Port host_out;
  Port host_in;

 private:
  struct Submitted {
    uint32_t step = 0;
    Time at;
  };
  mutable std::mutex mutex_;
  std::array<std::optional<Submitted>, kMaxSteps> submitted_;
};

}  // namespace duck::simulate
