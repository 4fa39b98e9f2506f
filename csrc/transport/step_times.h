// Where the time of steps goes, by layer and worker, for people and metrics. Filled by the transport, read
// from any thread while a step is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "wire/socket_io.h"

namespace duck {

// Means over a layer's last steps, of which the newest weighs 1/32: [worker] each, microseconds.
struct LayerTimes {
  uint32_t layer = 0;
  uint64_t num_steps = 0;            // in all
  float tokens = 0;                  // of a step
  std::vector<float> compute_us;     // the worker's own
  std::vector<float> round_trip_us;  // from the step's submission to when its answer was taken
  std::vector<float> wait_us;        // of it, what the host had nothing else to do
};

class StepTimes {
 public:
  static constexpr size_t kMaxLayers = 4096;  // steps of further ones are not noted

  // What is known of one worker's answer.
  struct Answer {
    wire::Clock::time_point arrived;
    uint32_t compute_us = 0;
    wire::Clock::time_point sent_from = {};  // its request began to leave then
    // The worker's own clock, csrc/wire/frame.h.
    uint64_t idle_since_ns = 0, started_ns = 0, finished_ns = 0;
  };

  void record(uint32_t layer, uint32_t num_tokens, wire::Clock::time_point submitted,
              wire::Clock::time_point waited_from, const std::vector<Answer>& answers);

  // In the order in which layers came first.
  std::vector<LayerTimes> layers() const;

 private:
  mutable std::mutex mutex_;
  std::vector<LayerTimes> layers_;
};

}  // namespace duck
