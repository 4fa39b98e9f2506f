// A worker's native loop: reads step requests from one connection, and from a multicast group where there is
// one, runs the experts and replies, until the connection ends. Called by worker/session.py through bind.cpp
// once the control phase is over, without the GIL. Knows the wire format and the experts; never prints, never
// exits, closes nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/experts.h"
#include "wire/frame.h"
#include "wire/stream.h"
#include "worker/multicast_receiver.h"

namespace duck {

// What a step loop may take and how long it waits.
struct StepLoopLimits {
  uint32_t max_step_tokens = 0;
  int spin_us = 0;                    // how long to read without sleeping between steps
  int64_t frame_timeout_ms = 30'000;  // from a frame's first byte to its last
  int64_t send_timeout_ms = 60'000;   // for one reply to be taken by the host
};

enum class EndReason : uint8_t {
  kClosed,     // the host said CLOSE
  kLost,       // the connection ended or failed
  kMalformed,  // a frame did not follow the format or the plan; the host was told why
  kTimeout,    // half a frame, or a host that does not take its replies
};

const char* end_reason_name(EndReason reason);  // "closed", "lost", "malformed", "timeout"

struct StepLoopEnd {
  EndReason reason = EndReason::kLost;
  std::string message;
  uint64_t steps_served = 0;
};

// The bytes of the largest step request frame. Throws std::invalid_argument where that is none, or more than
// a frame may have: to be asked before memory is set aside for such steps.
uint64_t max_request_frame_bytes(const ExpertShape& shape, uint32_t max_step_tokens);

class StepLoop {
 public:
  // experts and layers outlive the loop. Buffers for the largest frames are set aside here; their pages are
  // touched only as far as steps need them.
  StepLoop(StepCompute& experts, const std::unordered_map<uint32_t, LayerUnits>& layers,
           const StepLoopLimits& limits);

  // Serves a connected stream socket, and the memory or the multicast group beside it if there is any, until
  // it ends. Between frames it waits for ever (keepalive notices a host that is gone); once a byte of a frame
  // is there, the rest must come within frame_timeout_ms.
  StepLoopEnd serve(int fd, std::shared_ptr<wire::SharedMemory> memory = nullptr,
                    std::shared_ptr<MulticastReceiver> multicast = nullptr);

 private:
  enum class Filled : uint8_t {
    kBytes,
    kStep,  // a step came whole by multicast first
    kEnd,   // the session is over
  };

  Filled fill(wire::Stream& stream, size_t bytes, StepLoopEnd& end, bool or_step = false);
  bool sleep(wire::Stream& stream, StepLoopEnd& end);
  bool hear_multicast(wire::Stream& stream, StepLoopEnd& end, bool& needed);
  bool serve_next(wire::Stream& stream, StepLoopEnd& end);
  bool serve_multicast_step(wire::Stream& stream, StepLoopEnd& end);
  bool serve_multicast_frame(wire::Stream& stream, const wire::FrameHeader& frame, StepLoopEnd& end);
  wire::StepReplyHeader compute(const uint8_t* frame, const wire::StepRequestHeader& request);
  void consume(size_t frame_bytes);
  wire::StepRequestHeader check_request(const wire::FrameHeader& frame, const uint8_t* bytes);
  bool reply(wire::Stream& stream, uint64_t sequence, const wire::StepReplyHeader& header, StepLoopEnd& end);
  bool send(const wire::TwoParts& message, wire::Stream& stream, const char* what, StepLoopEnd& end);

  StepCompute& experts_;
  const std::unordered_map<uint32_t, LayerUnits>& layers_;
  const StepLoopLimits limits_;
  const uint32_t hidden_size_;
  std::shared_ptr<MulticastReceiver> multicast_;  // while it serves
  // Received bytes; the frame being served always begins at offset 0, so its ids and weights are aligned.
  std::unique_ptr<uint8_t[]> received_;
  size_t capacity_bytes_ = 0;
  size_t received_bytes_ = 0;
  wire::Deadline frame_deadline_ = wire::kNever;
  wire::Clock::time_point idle_since_;    // the last reply's last byte was handed over
  std::unique_ptr<float[]> sums_;         // [T, H]
  std::unique_ptr<uint8_t[]> sums_bf16_;  // the same, rounded for the wire
};

}  // namespace duck
