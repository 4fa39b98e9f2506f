// Who computes the steps that an exchange takes from a GPU: workers, experts in this process, or nobody (an
// echo). Called by the exchange's thread alone, but for late().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels/experts.h"
#include "threads/thread_pool.h"
#include "transport/transport.h"

namespace duck {

// One step of a lane. What the pointers show stays until the step is over.
struct LaneStep {
  uint32_t layer = 0;
  uint16_t lane = 0;
  uint32_t num_tokens = 0;  // T, at least 1
  uint32_t top_k = 0;
  uint32_t hidden_size = 0;
  const float* x = nullptr;             // [T, H]
  const int32_t* topk_ids = nullptr;    // [T, K]
  const float* topk_weights = nullptr;  // [T, K]
  float* y = nullptr;                   // [T, H], to be written
};

// At most one step of each lane is under way.
class LaneServer {
 public:
  virtual ~LaneServer() = default;

  virtual void begin(const LaneStep& step) = 0;

  // Whether the lane's step, begun with the same values, is over and y is written. Does not wait for others.
  virtual bool poll(const LaneStep& step) = 0;

  // Ends all that is under way.
  virtual void give_up() = 0;

  // Who keeps steps that are under way from being over. From any thread.
  virtual std::vector<size_t> late() const { return {}; }
};

// Workers. poll() throws TransportError where one is lost.
//
// Replies through shared memory are seen without the connection being looked at, which a worker that goes
// ends; so that is done now and then.
class TransportServer : public LaneServer {
 public:
  explicit TransportServer(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}
  void begin(const LaneStep& step) override;
  bool poll(const LaneStep& step) override;
  void give_up() override;
  std::vector<size_t> late() const override { return transport_->late(); }

 private:
  const std::shared_ptr<Transport> transport_;
  std::vector<uint64_t> tickets_;  // of each lane
  std::chrono::steady_clock::time_point next_look_;
};

// Experts in this process: the exchange's thread is compute thread 0, and computes in poll().
class ExpertsServer : public LaneServer {
 public:
  // Throws as Experts and ThreadPool do.
  ExpertsServer(const ExpertShape& shape, uint32_t max_tokens, Isa isa, Prefill prefill, int num_threads,
                int spin_us, std::unordered_map<uint32_t, LayerUnits> layers);
  void begin(const LaneStep& step) override;  // throws std::invalid_argument for a layer that it has not
  bool poll(const LaneStep& step) override;
  void give_up() override {}

 private:
  ThreadPool pool_;
  Experts experts_;
  const std::unordered_map<uint32_t, LayerUnits> layers_;
};

// Nobody: after a delay y is x, or zeros. What an exchange costs by itself.
class EchoServer : public LaneServer {
 public:
  EchoServer(int64_t delay_us, bool zeros) : delay_(delay_us), zeros_(zeros) {}
  void begin(const LaneStep& step) override;
  bool poll(const LaneStep& step) override;
  void give_up() override {}

 private:
  const std::chrono::microseconds delay_;
  const bool zeros_;
  std::vector<std::chrono::steady_clock::time_point> ready_;  // of each lane
};

}  // namespace duck
