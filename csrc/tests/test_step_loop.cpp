// The step loop on one end of a socket pair: the bits of Experts::run, requests in order, and an end with a
// reason for whatever else arrives. Meant to run under the sanitizers too.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tests/check.h"
#include "threads/thread_pool.h"
#include "wire/frame.h"
#include "worker/step_loop.h"

using namespace duck;

namespace {

constexpr uint32_t kHidden = 72;
constexpr uint32_t kExperts = 4;
constexpr uint32_t kStripes = 3;
constexpr uint32_t kTopK = 2;
constexpr uint32_t kMaxTokens = 6;
constexpr uint32_t kLayer = 9;

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
    at += wire::kStepHeaderBytes;
    for (const auto& [data, bytes] : {std::pair<const void*, size_t>{ids.data(), 4 * ids.size()},
                                      {weights.data(), 4 * weights.size()},
                                      {x.data(), 4 * x.size()}}) {
      std::memcpy(at, data, bytes);
      at += bytes;
    }
    return out;
  }
};

Step random_step(uint32_t tokens, uint32_t seed) {
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
    ExpertShape shape;
    shape.hidden_size = kHidden;
    shape.intermediate_size = 16 * kStripes;
    shape.num_experts = kExperts;
    shape.top_k = kTopK;
    shape.num_stripes = kStripes;
    experts_ = std::make_unique<Experts>(shape, kMaxTokens, Isa::kScalar, pool_);
    fill_units();
    layers_[kLayer] = {units_, kStripes * unit_bytes(WeightFormat::kFp9, kHidden),
                       unit_bytes(WeightFormat::kFp9, kHidden)};
    loop_ = std::make_unique<StepLoop>(*experts_, layers_, limits);
  }
  ~Worker() { std::free(units_); }

  void start() {
    int pair[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    fd = pair[0];
    thread_ = std::thread([this, theirs = pair[1]] {
      end_ = loop_->serve(theirs);
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

  const StepLoopEnd& end() const { return end_; }

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

std::vector<uint8_t> close_frame() {
  std::vector<uint8_t> frame(wire::kFrameHeaderBytes);
  wire::encode_frame_header({wire::FrameType::kClose, 0, 0}, frame.data());
  return frame;
}

std::vector<uint8_t> joined(std::initializer_list<std::vector<uint8_t>> parts) {
  std::vector<uint8_t> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

void check_replies(Worker& worker, const std::vector<uint8_t>& received, const std::vector<Step>& steps) {
  size_t at = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::vector<float> y = worker.expected(steps[i]);
    CHECK(std::any_of(y.begin(), y.end(), [](float value) { return value != 0.0f; }));
    const size_t body = wire::kFrameHeaderBytes + wire::kStepHeaderBytes;
    if (received.size() < at + body + 4 * y.size()) {
      CHECK(!"a reply is missing");
      return;
    }
    const wire::FrameHeader frame = wire::decode_frame_header(received.data() + at);
    CHECK(frame.type == wire::FrameType::kStepReply && frame.sequence == 100 + i);
    CHECK(std::memcmp(received.data() + at + body, y.data(), 4 * y.size()) == 0);
    at += body + 4 * y.size();
  }
}

void queued_steps(size_t piece, int spin_us) {
  Worker worker({kMaxTokens, spin_us, 20'000, 20'000});
  for (int session = 0; session < 2; ++session) {
    worker.start();
    const std::vector<Step> steps = {random_step(6, 1), random_step(1, 2), random_step(3, 3)};
    const auto data = joined({steps[0].frame(100), steps[1].frame(101), steps[2].frame(102), close_frame()});
    for (size_t start = 0; start < data.size(); start += piece) {
      worker.send(data.data() + start, std::min(piece, data.size() - start));
    }
    const std::vector<uint8_t> received = worker.finish(false);
    CHECK(worker.end().reason == EndReason::kClosed);
    CHECK(worker.end().steps_served == 3);
    check_replies(worker, received, steps);
  }
}

void a_cut_at_every_byte() {
  Worker worker;
  const Step step = random_step(1, 4);
  const std::vector<uint8_t> data = joined({step.frame(100), step.frame(101)});
  for (size_t cut = 0; cut < data.size(); ++cut) {
    worker.start();
    worker.send(data.data(), cut);
    const std::vector<uint8_t> received = worker.finish(true);
    CHECK(worker.end().reason == EndReason::kLost);
    CHECK(worker.end().steps_served == (cut >= data.size() / 2 ? 1 : 0));
    const bool between = cut % (data.size() / 2) == 0;
    CHECK((worker.end().message.find("inside a frame") == std::string::npos) == between);
  }
}

void flipped_bytes() {
  Worker worker;
  const Step step = random_step(2, 5);
  std::minstd_rand random(6);
  for (int attack = 0; attack < 1500; ++attack) {
    std::vector<uint8_t> data = step.frame(100);
    const size_t range = attack % 3 == 0 ? data.size() : 60;  // headers and ids matter most
    for (uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
      data[random() % range] = static_cast<uint8_t>(random());
    }
    worker.start();
    worker.send(data);
    worker.send(close_frame());
    worker.finish(true);
    CHECK(worker.end().reason != EndReason::kTimeout);
  }
  worker.start();
  worker.send(joined({step.frame(100), close_frame()}));
  check_replies(worker, worker.finish(false), {step});
}

void half_a_frame_and_silence() {
  Worker worker({kMaxTokens, 0, 50, 20'000});
  const std::vector<uint8_t> data = random_step(1, 7).frame(100);
  for (const size_t cut : {size_t{1}, size_t{30}, data.size() - 1}) {
    worker.start();
    worker.send(data.data(), cut);
    const std::vector<uint8_t> received = worker.finish(false);
    CHECK(worker.end().reason == EndReason::kTimeout);
    const wire::FrameHeader frame = wire::decode_frame_header(received.data());
    CHECK(frame.type == wire::FrameType::kError);
  }
}

void steps_too_large_for_a_frame() {
  ExpertShape shape;
  shape.hidden_size = 7168;
  shape.top_k = 8;
  CHECK(max_request_frame_bytes(shape, 1) == 24 + 16 + 8 * 8 + 4 * 7168);
  for (const uint32_t tokens : {0u, 40'000u, UINT32_MAX}) {
    try {
      max_request_frame_bytes(shape, tokens);
      CHECK(!"refused");
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

int main() {
  for (const size_t piece : {size_t{1}, size_t{17}, size_t{100'000}}) queued_steps(piece, 0);
  queued_steps(17, 200);
  a_cut_at_every_byte();
  flipped_bytes();
  half_a_frame_and_silence();
  steps_too_large_for_a_frame();
  return duck::test::report();
}
