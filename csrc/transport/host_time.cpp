#include "transport/host_time.h"

#include <time.h>

#include <algorithm>

namespace duck {
namespace {

uint64_t read_ns(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

void HostTime::measure(bool on) {
  on_ = false;
  spent_ = {};
  clock_ns_ = 0;
  if (!on) return;
  // The cost between one lap and the next, where nothing else is done.
  std::array<uint64_t, 101> laps;
  restart();
  for (uint64_t& lap : laps) {
    const uint64_t before = last_cpu_ns_;
    restart();
    lap = last_cpu_ns_ - before;
  }
  std::nth_element(laps.begin(), laps.begin() + laps.size() / 2, laps.end());
  clock_ns_ = laps[laps.size() / 2];
  on_ = true;
}

void HostTime::restart() {
  last_cpu_ns_ = read_ns(CLOCK_THREAD_CPUTIME_ID);
  last_wall_ns_ = read_ns(CLOCK_MONOTONIC);
}

void HostTime::add(Part part) {
  const uint64_t cpu_ns = read_ns(CLOCK_THREAD_CPUTIME_ID);
  const uint64_t wall_ns = read_ns(CLOCK_MONOTONIC);
  Spent& spent = spent_[part];
  spent.cpu_ns += std::max(cpu_ns - last_cpu_ns_, clock_ns_) - clock_ns_;
  spent.wall_ns += wall_ns - last_wall_ns_;
  ++spent.times;
  last_cpu_ns_ = cpu_ns;
  last_wall_ns_ = wall_ns;
}

}  // namespace duck
