#include "simulate/network.h"

#include <algorithm>

namespace duck::simulate {

Nanoseconds Port::duration(uint64_t bytes) const {
  if (bytes_per_us_ <= 0) return Nanoseconds(0);
  return Nanoseconds(static_cast<int64_t>(1000.0 * static_cast<double>(bytes) / bytes_per_us_));
}

Time Port::reserve(Time from, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  free_ = std::max(free_, from) + duration(bytes);
  return free_;
}

void Network::submitted(uint32_t step, Time at) {
  const std::lock_guard lock(mutex_);
  submitted_[step % kMaxSteps] = Submitted{step, at};
}

std::optional<Time> Network::submitted_at(uint32_t step) const {
  const std::lock_guard lock(mutex_);
  const std::optional<Submitted>& found = submitted_[step % kMaxSteps];
  if (!found || found->step != step) return std::nullopt;
  return found->at;
}

}  // namespace duck::simulate
