// The step loop on one end of a socket pair: the bits of Experts::run, requests in order, and an end with a
// reason for whatever else arrives. Meant to run under the sanitizers too.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/step_worker.h"
#include "wire/frame.h"
#include "worker/step_loop.h"

using namespace duck;

namespace {

using test::kHidden;
using test::kMaxTokens;
using test::random_step;
using test::Step;
using test::Worker;

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
    const size_t body = wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes;
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
