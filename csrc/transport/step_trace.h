// What happened to each step, moment by moment and worker by worker, for a file that is drawn later. Filled
// by the transport into memory that is set aside beforehand; drained as text from another place between
// steps. Knows neither files nor models.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace duck {

// Moments of one step at one worker, all on the host's clock, nanoseconds.
struct WorkerMoments {
  uint64_t free_ns = 0;      // the request had begun to leave, and the worker was done with earlier steps
  uint64_t started_ns = 0;   // it had the whole request
  uint64_t finished_ns = 0;  // it had its sums
  uint64_t taken_ns = 0;     // the host had them
  int64_t error_ns = -1;     // most that the worker's moments are wrong by; -1: they are not known
};

struct StepMoments {
  uint64_t sequence = 0;
  uint32_t layer = 0;
  uint32_t num_tokens = 0;
  uint16_t lane = 0;
  uint64_t submitted_ns = 0;   // the host began to hand it over
  uint64_t dispatched_ns = 0;  // and computed on
  uint64_t waited_ns = 0;      // it had nothing else to do
  uint64_t summed_ns = 0;      // partial sums were added and given back
};

// A step of the engine, which runs all layers.
struct EngineMoments {
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t num_prompt_tokens = 0;
  uint64_t num_decode_tokens = 0;
  uint64_t num_new_tokens = 0;
  std::array<uint64_t, 9> parts_ns = {};  // in the order of models/step_times.py
};

class StepTrace {
 public:
  // Room for so many bytes of records until they are drained; what comes beyond is counted only.
  explicit StepTrace(size_t capacity_bytes);

  // topk_ids: [T, K]. The workers' moments are put in order: none before the one before it.
  void record(const StepMoments& step, const std::vector<WorkerMoments>& workers, const int32_t* topk_ids,
              size_t num_ids);

  // Bytes that wait to be drained then.
  size_t record_engine(const EngineMoments& step);

  // Another worker is in that place now.
  void record_replaced(size_t worker, uint64_t at_ns);

  // Bytes that wait to be drained, and that there is room for.
  size_t pending_bytes() const;
  size_t capacity_bytes() const { return capacity_bytes_; }

  // What was recorded since the last time, as trace events in JSON, each with a comma and a line break before
  // it; moments are microseconds from origin_ns on.
  std::string drain(uint64_t origin_ns);

  // Steps that there was no room for, so far.
  uint64_t num_dropped() const;

 private:
  template <typename T>
  void put(const T& value);

  const size_t capacity_bytes_;
  mutable std::mutex mutex_;
  std::vector<uint8_t> records_, drained_;
  std::vector<uint32_t> counts_;  // of each expert, all 0 between two records
  std::vector<uint32_t> experts_;
  uint64_t num_dropped_ = 0;
};

}  // namespace duck
