// Bytes as what a host sends to a worker that is ready: its step loop ends with a reason, and all that it has
// sent by then is whole frames of a worker.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fuzz/target.h"
#include "threads/thread_pool.h"
#include "wire/frame.h"
#include "worker/step_loop.h"

using namespace duck;

namespace {

constexpr uint32_t kHidden = 24, kExperts = 3, kStripes = 1, kMaxTokens = 4;

// A worker with a layer 1, made once: its experts are no part of what is tried.
struct Worker {
  Worker() : pool(1, 0), units(kExperts * unit_bytes(WeightFormat::kFp9, kHidden) + 64) {
    ExpertShape shape;
    shape.hidden_size = kHidden;
    shape.intermediate_size = kStripes * 16;
    shape.num_experts = kExperts;
    shape.top_k = 2;
    shape.num_stripes = kStripes;
    experts = std::make_unique<Experts>(shape, kMaxTokens, Isa::kScalar, pool);
    std::minstd_rand random(5);
    for (uint8_t& byte : units) byte = static_cast<uint8_t>(0x80 + random() % 0x50);
    const size_t stride = unit_bytes(WeightFormat::kFp9, kHidden);
    auto* aligned =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(units.data()) + 63) & ~uintptr_t{63});
    for (size_t unit = 0; unit < kExperts; ++unit) {
      const float scale = 0.001f;
      for (size_t i = 0; i < 3; ++i) std::memcpy(aligned + unit * stride + 4 * i, &scale, 4);
    }
    layers[1] = {aligned, kStripes * stride, stride};
    StepLoopLimits limits;
    limits.max_step_tokens = kMaxTokens;
    limits.frame_timeout_ms = 10'000;
    limits.send_timeout_ms = 10'000;
    loop = std::make_unique<StepLoop>(*experts, layers, limits);
  }

  ThreadPool pool;
  std::vector<uint8_t> units;
  std::unique_ptr<Experts> experts;
  std::unordered_map<uint32_t, LayerUnits> layers;
  std::unique_ptr<StepLoop> loop;
};

void check_frames(const std::vector<uint8_t>& sent) {
  size_t at = 0;
  while (at < sent.size()) {
    FUZZ_CHECK(sent.size() - at >= wire::kFrameHeaderBytes);
    const wire::FrameHeader frame = wire::decode_frame_header(sent.data() + at);
    FUZZ_CHECK(frame.type == wire::FrameType::kStepReply || frame.type == wire::FrameType::kError);
    at += wire::kFrameHeaderBytes;
    FUZZ_CHECK(sent.size() - at >= frame.payload_bytes);
    if (frame.type == wire::FrameType::kStepReply) {
      const wire::StepReplyHeader reply = wire::decode_step_reply_header(sent.data() + at);
      FUZZ_CHECK(wire::step_reply_bytes(reply, kHidden) == frame.payload_bytes);
      FUZZ_CHECK(reply.layer == 1 && reply.num_tokens >= 1 && reply.num_tokens <= kMaxTokens);
    } else {
      FUZZ_CHECK(at + frame.payload_bytes == sent.size());  // the last word
    }
    at += frame.payload_bytes;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Worker worker;
  int pair[2];
  FUZZ_CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  std::thread host([fd = pair[0], data, size] {
    for (size_t at = 0; at < size;) {
      const ssize_t sent = ::send(fd, data + at, size - at, MSG_NOSIGNAL);
      if (sent <= 0) break;
      at += static_cast<size_t>(sent);
    }
    ::shutdown(fd, SHUT_WR);
  });
  std::vector<uint8_t> sent;
  std::thread reader([fd = pair[0], &sent] {
    uint8_t chunk[4096];
    for (ssize_t got = 0; (got = ::read(fd, chunk, sizeof(chunk))) > 0;) {
      sent.insert(sent.end(), chunk, chunk + got);
    }
  });
  const StepLoopEnd end = worker.loop->serve(pair[1]);
  ::close(pair[1]);
  host.join();
  reader.join();
  ::close(pair[0]);
  FUZZ_CHECK(!end.message.empty());
  check_frames(sent);
  return 0;
}
