#include "transport/lane_server.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace duck {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(2);

template <typename T>
T& of_lane(std::vector<T>& lanes, uint16_t lane) {
  if (lanes.size() <= lane) lanes.resize(lane + 1);
  return lanes[lane];
}

}  // namespace

void TransportServer::begin(const LaneStep& step) {
  of_lane(tickets_, step.lane) = transport_->submit(step.layer, step.lane, step.num_tokens, step.top_k,
                                                    step.x, step.topk_ids, step.topk_weights);
}

bool TransportServer::poll(const LaneStep& step) {
  const auto now = std::chrono::steady_clock::now();
  if (now >= next_look_) {
    transport_->look();
    next_look_ = now + kLookEvery;
  }
  return transport_->poll(tickets_[step.lane], step.y);
}

void TransportServer::give_up() { transport_->give_up(); }

ExpertsServer::ExpertsServer(const ExpertShape& shape, uint32_t max_tokens, Isa isa, Prefill prefill,
                             int num_threads, int spin_us, std::unordered_map<uint32_t, LayerUnits> layers)
    : pool_(num_threads, spin_us),
      experts_(shape, max_tokens, isa, pool_, prefill),
      layers_(std::move(layers)) {}

void ExpertsServer::begin(const LaneStep& step) {
  if (layers_.count(step.layer) > 0) return;
  throw std::invalid_argument("layer: got " + std::to_string(step.layer) + ", expected one with experts");
}

bool ExpertsServer::poll(const LaneStep& step) {
  experts_.run(layers_.at(step.layer),
               {step.num_tokens, step.top_k, ActivationType::kF32, step.x, step.topk_ids, step.topk_weights},
               step.y);
  return true;
}

void EchoServer::begin(const LaneStep& step) {
  of_lane(ready_, step.lane) = std::chrono::steady_clock::now() + delay_;
}

bool EchoServer::poll(const LaneStep& step) {
  if (delay_.count() > 0 && std::chrono::steady_clock::now() < ready_[step.lane]) return false;
  const size_t values = size_t{step.num_tokens} * step.hidden_size;
  if (zeros_) {
    std::memset(step.y, 0, 4 * values);
  } else {
    std::memcpy(step.y, step.x, 4 * values);
  }
  return true;
}

}  // namespace duck
