// Bytes as what a host sends to a worker that is ready, which takes requests by multicast too: its step loop
// ends with a reason, and all that it has sent by then is whole frames of a worker. The first byte says how
// many of the bytes come as datagrams: each is a step's number, a fragment's, its bytes and a frame's, in
// a byte each, and then the fragment, which is given a true tag, or any bytes where the step's number is 0.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fuzz/target.h"
#include "threads/thread_pool.h"
#include "wire/datagram.h"
#include "wire/frame.h"
#include "worker/multicast_receiver.h"
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
    FUZZ_CHECK(frame.type == wire::FrameType::kStepReply || frame.type == wire::FrameType::kError ||
               frame.type == wire::FrameType::kStepMissing);
    at += wire::kFrameHeaderBytes;
    FUZZ_CHECK(sent.size() - at >= frame.payload_bytes);
    if (frame.type == wire::FrameType::kStepReply) {
      const wire::StepReplyHeader reply = wire::decode_step_reply_header(sent.data() + at);
      FUZZ_CHECK(wire::step_reply_bytes(reply, kHidden) == frame.payload_bytes);
      FUZZ_CHECK(reply.layer == 1 && reply.num_tokens >= 1 && reply.num_tokens <= kMaxTokens);
    } else if (frame.type == wire::FrameType::kStepMissing) {
      wire::decode_step_missing(sent.data() + at, frame.payload_bytes, UINT32_MAX);
    } else {
      FUZZ_CHECK(at + frame.payload_bytes == sent.size());  // the last word
    }
    at += frame.payload_bytes;
  }
}

wire::MulticastSession session() {
  wire::MulticastSession session;
  session.session = 1;
  session.fragment_bytes = 64;
  return session;
}

void say_to_group(int fd, const uint8_t* data, size_t size) {
  while (size >= 4) {
    const wire::DatagramHeader header{data[0], uint32_t{data[3]} * 4, data[1]};
    const size_t bytes = std::min<size_t>(data[2], size - 4);
    std::vector<uint8_t> datagram(data + 4, data + 4 + bytes);
    if (header.sequence != 0) {
      datagram.resize(64);  // whatever is said of it
      std::vector<uint8_t> whole(wire::kDatagramHeaderBytes);
      const bool fits = header.index < wire::fragment_count(header.frame_bytes, 64);
      if (fits) wire::encode_datagram_header(session(), header, datagram.data(), whole.data());
      if (fits) datagram.resize(wire::fragment_size(header.frame_bytes, 64, header.index));
      whole.insert(whole.end(), datagram.begin(), datagram.end());
      datagram = whole;
    }
    ::send(fd, datagram.data(), datagram.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    data += 4 + bytes;
    size -= 4 + bytes;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Worker worker;
  if (size == 0) return 0;
  int pair[2], group[2];
  FUZZ_CHECK(::socketpair(AF_UNIX, SOCK_DGRAM, 0, group) == 0);
  const auto ear = std::make_shared<MulticastReceiver>(group[1], session());
  const size_t group_bytes = (size - 1) * data[0] / 255;
  say_to_group(group[0], data + 1, group_bytes);
  data += 1 + group_bytes;
  size -= 1 + group_bytes;
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
  const StepLoopEnd end = worker.loop->serve(pair[1], nullptr, ear);
  ::close(pair[1]);
  host.join();
  reader.join();
  ::close(pair[0]);
  ::close(group[0]);
  FUZZ_CHECK(!end.message.empty());
  check_frames(sent);
  return 0;
}
