// What the host's thread does in a transport, as its CPU time by part: what a step costs a host whatever else
// its machine does. Off unless somebody measures, as the simulator does; a branch is all that it costs then.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace duck {

class HostTime {
 public:
  enum Part : uint8_t {
    kPack,     // the request as bytes
    kSend,     // it, to all workers
    kSleep,    // poll() and what surrounds it, while nothing has come
    kReceive,  // replies
    kCombine,  // their sum
    kNumParts,
  };
  struct Spent {
    uint64_t cpu_ns = 0;
    uint64_t wall_ns = 0;
    uint64_t times = 0;
  };

  // Begins to measure, from zero; the clocks' own cost is found out and taken off. False stops it.
  void measure(bool on);
  // The calling thread begins to do something here.
  void begin() {
    if (on_) restart();
  }
  // What it did since begin() or the last lap() was that.
  void lap(Part part) {
    if (on_) add(part);
  }
  const std::array<Spent, kNumParts>& spent() const { return spent_; }

 private:
  void restart();
  void add(Part part);

  bool on_ = false;
  uint64_t last_cpu_ns_ = 0;
  uint64_t last_wall_ns_ = 0;
  uint64_t clock_ns_ = 0;  // CPU time that a lap takes itself
  std::array<Spent, kNumParts> spent_;
};

}  // namespace duck
