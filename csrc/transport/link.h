// What the transport keeps of a step in flight and of a worker's connection. Only csrc/transport includes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/clock_offset.h"
#include "transport/step_times.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/stream.h"

namespace duck {

constexpr size_t kRequestHeadBytes = wire::kFrameHeaderBytes + wire::kStepRequestHeaderBytes;
constexpr size_t kReplyHeadBytes = wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes;
constexpr size_t kMaxHeadBytes = wire::kFrameHeaderBytes + wire::kErrorCodeBytes + wire::kMaxErrorTextBytes;
constexpr size_t kDropChunkBytes = 64 * 1024;

struct Transport::Step {
  uint64_t sequence = 0;
  uint32_t layer = 0;
  uint16_t lane = 0;
  uint32_t num_tokens = 0;
  uint32_t top_k = 0;
  std::vector<uint8_t> request;            // the whole frame, kept until every worker has answered it
  size_t request_bytes = 0;                // of it; the vector may be larger
  wire::Deadline deadline = wire::kNever;  // of the answers, from the first wait on
  size_t missing = 0;
  size_t num_added = 0;  // workers, from the first on, whose sums are in the first one's
  std::vector<std::vector<float>> partial_sums;  // one a worker, [T, H]
  std::vector<uint8_t> arrived;                  // one a worker
  std::vector<StepTimes::Answer> answers;        // one a worker
  wire::Clock::time_point submitted;
  wire::Clock::time_point waited_from;  // first; the deadline counts from then on
  wire::Clock::time_point dispatched;   // submit() gave it back to the host
  bool sent_again = false;              // to another worker: its times tell nothing
  // By multicast: to whom, who has asked for what did not come, and how far it has gone out.
  std::vector<uint8_t> by_multicast;  // one a worker
  std::vector<uint8_t> asked;         // one a worker
  uint32_t next_datagram = 0;
  wire::Deadline announce_at = wire::kNever;  // to who has not answered by then

  bool awaited_by_multicast(size_t worker) const { return by_multicast[worker] != 0 && arrived[worker] == 0; }
};

// What is to be sent to one worker: a frame's head, where that is not in the request, and bytes of the
// request.
struct Transport::Message {
  std::shared_ptr<Step> step;  // nullptr: no bytes of any
  std::array<uint8_t, wire::kFrameHeaderBytes + wire::kStepSentBytes> head = {};
  size_t head_bytes = 0;
  size_t offset = 0;
  size_t bytes = 0;

  bool is_request() const { return step != nullptr && head_bytes == 0; }

  wire::TwoParts parts() const {
    const uint8_t* request = step == nullptr ? nullptr : step->request.data() + offset;
    if (head_bytes == 0) return {request, bytes, nullptr, 0};
    return {head.data(), head_bytes, request, bytes};
  }
};

struct Transport::Link {
  int fd = -1;          // -1: lost
  wire::Stream stream;  // of fd
  bool woken = false;   // out of the last sleep: there may be something to receive
  std::string lost_because;
  std::deque<Message> unsent;  // of which the first may be half sent
  size_t sent_bytes = 0;       // of the first
  ClockOffset clock;           // the worker's
  size_t multicast_bytes = 0;  // what the worker's buffer holds of datagrams; 0: requests over its connection
  uint32_t heard_nothing = 0;  // steps in a row of which no datagram reached it
  uint64_t num_asked = 0;      // fragments that it asked for
  // The frame being received: its head (or a whole ERROR frame), then its body.
  uint8_t head[kMaxHeadBytes] = {};
  size_t head_bytes = 0;
  size_t head_wanted_bytes = kReplyHeadBytes;
  wire::StepReplyHeader reply;
  uint64_t sequence = 0;
  bool in_body = false;
  Step* step = nullptr;  // whom the body is for; nullptr: nobody waits for it, drop it
  uint8_t* body = nullptr;
  size_t body_bytes = 0;
  size_t body_got_bytes = 0;
  std::vector<uint8_t> scratch;  // a bf16 body, or one to drop
  // Bytes that came with a head and do not belong where they were put; received before those of the stream.
  std::vector<uint8_t> misplaced;
  size_t misplaced_taken = 0;

  wire::IoResult receive(const wire::TwoRooms& rooms);

  void next_frame() {
    head_bytes = 0;
    head_wanted_bytes = kReplyHeadBytes;
    in_body = false;
    step = nullptr;
  }

  // Of a frame that is shorter than a reply's head, what came behind it: before whatever else was put back.
  void put_back_surplus() {
    misplaced.erase(misplaced.begin(), misplaced.begin() + static_cast<std::ptrdiff_t>(misplaced_taken));
    misplaced.insert(misplaced.begin(), head + head_wanted_bytes, head + head_bytes);
    misplaced_taken = 0;
    head_bytes = head_wanted_bytes;
  }

  void put_back(const uint8_t* bytes, size_t count) {
    misplaced.assign(bytes, bytes + count);
    misplaced_taken = 0;
  }
};

}  // namespace duck
