// A worker for tests: random weights, experts, and a step loop on a thread behind one end of a socket pair.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "threads/thread_pool.h"
#include "wire/frame.h"
#include "worker/multicast_receiver.h"
#include "worker/step_loop.h"

namespace duck::test {

inline constexpr uint32_t kHidden = 72;
inline constexpr uint32_t kExperts = 4;
inline constexpr uint32_t kStripes = 3;
inline constexpr uint32_t kTopK = 2;
inline constexpr uint32_t kMaxTokens = 6;
inline constexpr uint32_t kLayer = 9;

struct Step {
  uint32_t tokens = 0;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> x;

  std::vector<uint8_t> frame(uint64_t sequence) const {
    wire::StepRequestHeader header;
    header.layer = kLayer;
    header.num_tokens = tokens;
    header.top_k = kTopK;
    const uint64_t payload_bytes = wire::step_request_bytes(header, kHidden);
    std::vector<uint8_t> out(wire::kFrameHeaderBytes + payload_bytes);
    wire::encode_frame_header({wire::FrameType::kStepRequest, static_cast<uint32_t>(payload_bytes), sequence},
                              out.data());
    uint8_t* at = out.data() + wire::kFrameHeaderBytes;
    wire::encode_step_request_header(header, at);
    at += wire::kStepRequestHeaderBytes;
    for (const auto& [data, bytes] : {std::pair<const void*, size_t>{ids.data(), 4 * ids.size()},
                                      {weights.data(), 4 * weights.size()},
                                      {x.data(), 4 * x.size()}}) {
      std::memcpy(at, data, bytes);
      at += bytes;
    }
    return out;
  }
};

inline Step random_step(uint32_t tokens, uint32_t seed) {
  std::minstd_rand random(seed + 1);
  const auto uniform = [&random] { return static_cast<float>(random() % 20001) / 10000.0f - 1.0f; };
  Step step;
  step.tokens = tokens;
  for (uint32_t i = 0; i < tokens * kTopK; ++i) {
    step.ids.push_back(static_cast<int32_t>(random() % kExperts));
    step.weights.push_back(uniform());
  }
  for (uint32_t i = 0; i < tokens * kHidden; ++i) step.x.push_back(uniform());
  return step;
}

// Weights, experts, a step loop on a thread, and our end of its connection.
class Worker {
 public:
  explicit Worker(const StepLoopLimits& limits = {kMaxTokens, 0, 20'000, 20'000}) : pool_(2, 0) {
    experts_ = std::make_unique<Experts>(shape(), kMaxTokens, Isa::kScalar, pool_);
    fill_units();
    layers_[kLayer] = {units_, kStripes * unit_bytes(WeightFormat::kFp9, kHidden),
                       unit_bytes(WeightFormat::kFp9, kHidden)};
    loop_ = std::make_unique<StepLoop>(*experts_, layers_, limits);
  }
  ~Worker() { std::free(units_); }

  void start(std::shared_ptr<MulticastReceiver> multicast = nullptr) {
    int pair[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    fd = pair[0];
    thread_ = std::thread([this, theirs = pair[1], multicast = std::move(multicast)] {
      end_ = loop_->serve(theirs, nullptr, multicast);
      ::close(theirs);
    });
  }

  void send(const std::vector<uint8_t>& data) { send(data.data(), data.size()); }
  void send(const uint8_t* data, size_t bytes) {
    while (bytes > 0) {
      const ssize_t sent = ::send(fd, data, bytes, MSG_NOSIGNAL);
      if (sent <= 0) return;  // the loop has ended
      data += sent;
      bytes -= static_cast<size_t>(sent);
    }
  }

  // Everything until the loop ends, once nothing more is sent.
  std::vector<uint8_t> finish(bool end_input) {
    if (end_input) ::shutdown(fd, SHUT_WR);
    std::vector<uint8_t> received;
    uint8_t chunk[4096];
    for (ssize_t got = 0; (got = ::read(fd, chunk, sizeof(chunk))) > 0;) {
      received.insert(received.end(), chunk, chunk + got);
    }
    thread_.join();
    ::close(fd);
    return received;
  }

  // Once the other end, which was given away, is closed.
  void join() { thread_.join(); }

  const StepLoopEnd& end() const { return end_; }
  const LayerUnits& units() const { return layers_.at(kLayer); }

  static ExpertShape shape() {
    ExpertShape shape;
    shape.hidden_size = kHidden;
    shape.intermediate_size = 16 * kStripes;
    shape.num_experts = kExperts;
    shape.top_k = kTopK;
    shape.num_stripes = kStripes;
    return shape;
  }

  std::vector<float> expected(const Step& step) {
    std::vector<float> y(step.x.size());
    StepRows rows{step.tokens,   kTopK,           ActivationType::kF32,
                  step.x.data(), step.ids.data(), step.weights.data()};
    experts_->run(layers_.at(kLayer), rows, y.data());
    return y;
  }

  int fd = -1;

 private:
  // Magnitudes and signs at random, scales of about one: any magnitude byte from 1 << 3 on is a number.
  void fill_units() {
    const size_t bytes = kExperts * kStripes * unit_bytes(WeightFormat::kFp9, kHidden);
    units_ = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
    std::minstd_rand random(5);
    for (size_t i = 0; i < bytes; ++i) units_[i] = static_cast<uint8_t>(0x80 + random() % 0x50);
    for (size_t unit = 0; unit < kExperts * kStripes; ++unit) {
      const float scale = 0.001f * static_cast<float>(1 + unit);
      for (size_t i = 0; i < 3; ++i)
        std::memcpy(units_ + unit * unit_bytes(WeightFormat::kFp9, kHidden) + 4 * i, &scale, 4);
    }
  }

  ThreadPool pool_;
  std::unique_ptr<Experts> experts_;
  uint8_t* units_ = nullptr;
  std::unordered_map<uint32_t, LayerUnits> layers_;
  std::unique_ptr<StepLoop> loop_;
  std::thread thread_;
  StepLoopEnd end_;
};

}  // namespace duck::test
