#include "worker/step_loop.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace duck {
namespace {

using wire::Clock;
using wire::ErrorCode;
using wire::FrameHeader;
using wire::FrameType;
using wire::IoResult;
using wire::IoState;
using wire::StepReplyHeader;
using wire::StepRequestHeader;
using wire::Stream;
using wire::WireError;

[[noreturn]] void refuse(const std::string& field, uint64_t got, const std::string& expected) {
  throw WireError(ErrorCode::kProtocol, field + ": got " + std::to_string(got) + ", expected " + expected);
}

void check_range(const char* field, uint64_t got, uint64_t most) {
  if (got < 1 || got > most) refuse(field, got, "1 to " + std::to_string(most));
}

uint64_t clock_ns(Clock::time_point moment) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(moment.time_since_epoch()).count());
}

// Best effort: a host that does not take its error frame within a second goes without.
void send_error(Stream& stream, const WireError& error) {
  const std::vector<uint8_t> frame = wire::encode_error_frame(error.code(), error.what());
  const wire::Deadline deadline = wire::deadline_after_ms(1000);
  const wire::TwoParts message{frame.data(), frame.size(), nullptr, 0};
  size_t sent = 0;
  while (sent < frame.size()) {
    const IoResult result = stream.send(message, sent);
    if (result.state == IoState::kFailed) return;
    sent += result.bytes;
    if (result.state == IoState::kWouldWait && !stream.wait(wire::Direction::kWrite, deadline)) return;
  }
}

}  // namespace

const char* end_reason_name(EndReason reason) {
  switch (reason) {
    case EndReason::kClosed:
      return "closed";
    case EndReason::kLost:
      return "lost";
    case EndReason::kMalformed:
      return "malformed";
    case EndReason::kTimeout:
      return "timeout";
  }
  return "lost";
}

uint64_t max_request_frame_bytes(const ExpertShape& shape, uint32_t max_step_tokens) {
  if (max_step_tokens < 1) throw std::invalid_argument("max_step_tokens: got 0, expected at least 1");
  StepRequestHeader largest;
  largest.num_tokens = max_step_tokens;
  largest.top_k = static_cast<uint16_t>(std::min<uint32_t>(shape.top_k, UINT16_MAX));
  const uint64_t payload_bytes = wire::step_request_bytes(largest, shape.hidden_size);
  const uint64_t limit_bytes = wire::payload_limits(FrameType::kStepRequest).max_bytes;
  if (payload_bytes > limit_bytes) {
    throw std::invalid_argument("max_step_tokens: got " + std::to_string(max_step_tokens) + " (steps of " +
                                std::to_string(payload_bytes) + " bytes), expected steps of at most " +
                                std::to_string(limit_bytes) + " bytes");
  }
  return wire::kFrameHeaderBytes + payload_bytes;
}

StepLoop::StepLoop(StepCompute& experts, const std::unordered_map<uint32_t, LayerUnits>& layers,
                   const StepLoopLimits& limits)
    : experts_(experts), layers_(layers), limits_(limits), hidden_size_(experts.shape().hidden_size) {
  // Twice the largest frame: the next lane's request is read along with this one.
  capacity_bytes_ = 2 * max_request_frame_bytes(experts.shape(), limits.max_step_tokens);
  received_ = std::make_unique_for_overwrite<uint8_t[]>(capacity_bytes_);
  const size_t values = size_t{limits.max_step_tokens} * hidden_size_;
  sums_ = std::make_unique_for_overwrite<float[]>(values);
  sums_bf16_ = std::make_unique_for_overwrite<uint8_t[]>(2 * values);
}

StepLoopEnd StepLoop::serve(int fd, std::shared_ptr<wire::SharedMemory> memory,
                            std::shared_ptr<MulticastReceiver> multicast) {
  StepLoopEnd end;
  wire::set_connection_options(fd);
  Stream stream(fd, std::move(memory));
  multicast_ = std::move(multicast);
  if (multicast_ != nullptr) multicast_->set_limit(capacity_bytes_ / 2);
  received_bytes_ = 0;
  frame_deadline_ = wire::kNever;
  idle_since_ = Clock::now();
  try {
    while (serve_next(stream, end)) {
    }
  } catch (const WireError& error) {
    send_error(stream, error);
    end.reason = EndReason::kMalformed;
    end.message = error.what();
  }
  multicast_.reset();
  return end;
}

// Serves one frame, or one step that came by multicast; false when the session is over (end says why). Throws
// WireError for a malformed frame.
bool StepLoop::serve_next(Stream& stream, StepLoopEnd& end) {
  const Filled filled = fill(stream, wire::kFrameHeaderBytes, end, true);
  if (filled == Filled::kStep) return serve_multicast_step(stream, end);
  if (filled == Filled::kEnd) return false;
  const FrameHeader frame = wire::decode_frame_header(received_.get());
  if (frame.type == FrameType::kClose) {
    end.reason = EndReason::kClosed;
    end.message = "closed by the host";
    return false;
  }
  if (frame.type != FrameType::kStepRequest) return serve_multicast_frame(stream, frame, end);
  if (fill(stream, wire::kFrameHeaderBytes + wire::kStepRequestHeaderBytes, end) == Filled::kEnd)
    return false;
  const StepRequestHeader request = check_request(frame, received_.get());
  const size_t frame_bytes = wire::kFrameHeaderBytes + frame.payload_bytes;
  if (fill(stream, frame_bytes, end) == Filled::kEnd) return false;
  if (multicast_ != nullptr) {
    // It was asked for, and came by multicast after all.
    const bool is_served = multicast_->is_over(frame.sequence);
    multicast_->over(frame.sequence);
    if (is_served) {
      consume(frame_bytes);
      return true;
    }
  }
  const StepReplyHeader header = compute(received_.get(), request);
  consume(frame_bytes);
  if (!reply(stream, frame.sequence, header, end)) return false;
  ++end.steps_served;
  return true;
}

bool StepLoop::serve_multicast_step(Stream& stream, StepLoopEnd& end) {
  const MulticastReceiver::Whole step = *multicast_->whole();
  const FrameHeader frame = wire::decode_frame_header(step.frame);
  if (frame.type != FrameType::kStepRequest) {
    throw WireError(ErrorCode::kProtocol, std::string("frame type by multicast: got ") +
                                              wire::frame_type_name(frame.type) + ", expected STEP_REQUEST");
  }
  if (frame.sequence != step.sequence) {
    refuse("sequence by multicast", frame.sequence, std::to_string(step.sequence));
  }
  if (wire::kFrameHeaderBytes + frame.payload_bytes != step.frame_bytes) {
    refuse("frame bytes by multicast", step.frame_bytes, "those that the frame says");
  }
  const StepReplyHeader header = compute(step.frame, check_request(frame, step.frame));
  multicast_->over(step.sequence);
  if (!reply(stream, frame.sequence, header, end)) return false;
  ++end.steps_served;
  return true;
}

// What is said over the connection about steps by multicast.
bool StepLoop::serve_multicast_frame(Stream& stream, const FrameHeader& frame, StepLoopEnd& end) {
  const bool known = frame.type == FrameType::kStepSent || frame.type == FrameType::kStepPart ||
                     frame.type == FrameType::kStepOver;
  if (!known || multicast_ == nullptr) {
    throw WireError(ErrorCode::kProtocol, std::string("frame type: got ") +
                                              wire::frame_type_name(frame.type) +
                                              ", expected STEP_REQUEST or CLOSE");
  }
  const size_t frame_bytes = wire::kFrameHeaderBytes + frame.payload_bytes;
  if (frame_bytes > capacity_bytes_ / 2) {
    refuse("STEP_PART payload bytes", frame.payload_bytes, "at most " + std::to_string(capacity_bytes_ / 2));
  }
  if (fill(stream, frame_bytes, end) == Filled::kEnd) return false;
  const uint8_t* payload = received_.get() + wire::kFrameHeaderBytes;
  if (frame.type == FrameType::kStepSent) {
    multicast_->announce(frame.sequence, wire::decode_step_sent(payload));
  } else if (frame.type == FrameType::kStepPart) {
    multicast_->put_part(frame.sequence, wire::decode_step_part_head(payload),
                         payload + wire::kStepPartHeadBytes, frame.payload_bytes - wire::kStepPartHeadBytes);
  } else {
    multicast_->over(frame.sequence);
  }
  consume(frame_bytes);
  return true;
}

// Runs the experts on the rows of a request frame, into sums_.
StepReplyHeader StepLoop::compute(const uint8_t* frame, const StepRequestHeader& request) {
  const size_t assignments = size_t{request.num_tokens} * request.top_k;
  const uint8_t* body = frame + wire::kFrameHeaderBytes + wire::kStepRequestHeaderBytes;
  StepRows rows;
  rows.num_tokens = request.num_tokens;
  rows.top_k = request.top_k;
  rows.x_type = request.x_type;
  rows.topk_ids = reinterpret_cast<const int32_t*>(body);
  rows.topk_weights = reinterpret_cast<const float*>(body + 4 * assignments);
  rows.x = body + 8 * assignments;

  StepReplyHeader header;
  header.layer = request.layer;
  header.num_tokens = request.num_tokens;
  header.lane = request.lane;
  header.reply_type = request.reply_type;
  const auto start = Clock::now();
  try {
    experts_.run(layers_.at(request.layer), rows, sums_.get());
  } catch (const std::invalid_argument& error) {
    throw WireError(ErrorCode::kProtocol, error.what());
  }
  const auto finish = Clock::now();
  const auto compute = std::chrono::round<std::chrono::microseconds>(finish - start).count();
  header.compute_us = static_cast<uint32_t>(std::min<int64_t>(compute, UINT32_MAX));
  header.idle_since_ns = clock_ns(idle_since_);
  header.started_ns = clock_ns(start);
  header.finished_ns = clock_ns(finish);
  return header;
}

// Lets go of the frame that was served; the next one begins at offset 0.
void StepLoop::consume(size_t frame_bytes) {
  received_bytes_ -= frame_bytes;
  std::memmove(received_.get(), received_.get() + frame_bytes, received_bytes_);
  frame_deadline_ = received_bytes_ > 0 ? wire::deadline_after_ms(limits_.frame_timeout_ms) : wire::kNever;
}

// Everything that the header says is checked here, before the body is waited for.
StepRequestHeader StepLoop::check_request(const FrameHeader& frame, const uint8_t* bytes) {
  const StepRequestHeader request = wire::decode_step_request_header(bytes + wire::kFrameHeaderBytes);
  check_range("step tokens", request.num_tokens, limits_.max_step_tokens);
  check_range("step top_k", request.top_k, experts_.shape().top_k);
  if (!layers_.contains(request.layer)) refuse("step layer", request.layer, "a layer of the plan");
  const uint64_t expected = wire::step_request_bytes(request, hidden_size_);
  if (frame.payload_bytes != expected) {
    refuse("STEP_REQUEST payload bytes", frame.payload_bytes, std::to_string(expected));
  }
  return request;
}

// Reads until `bytes` bytes of the current frame are there, or a step by multicast is whole, if that is asked
// for; takes along whatever else has come.
StepLoop::Filled StepLoop::fill(Stream& stream, size_t bytes, StepLoopEnd& end, bool or_step) {
  wire::Deadline spin_until = wire::kNever;
  while (received_bytes_ < bytes) {
    const IoResult result =
        stream.receive(received_.get() + received_bytes_, capacity_bytes_ - received_bytes_);
    switch (result.state) {
      case IoState::kDone:
        if (received_bytes_ == 0) frame_deadline_ = wire::deadline_after_ms(limits_.frame_timeout_ms);
        received_bytes_ += result.bytes;
        spin_until = wire::kNever;
        break;
      case IoState::kWouldWait: {
        bool needed = false;
        if (!hear_multicast(stream, end, needed)) return Filled::kEnd;
        if (or_step && multicast_ != nullptr && multicast_->whole()) return Filled::kStep;
        if (needed) {
          spin_until = wire::kNever;
          break;
        }
        if (limits_.spin_us > 0) {
          const wire::Deadline now = Clock::now();
          if (spin_until == wire::kNever) spin_until = now + std::chrono::microseconds(limits_.spin_us);
          if (now < spin_until) break;
        }
        if (!sleep(stream, end)) return Filled::kEnd;
        break;
      }
      case IoState::kEnded:
        end.reason = EndReason::kLost;
        end.message = received_bytes_ == 0 ? "the host closed the connection without CLOSE"
                                           : "the connection ended inside a frame";
        return Filled::kEnd;
      case IoState::kFailed:
        end.reason = EndReason::kLost;
        end.message = "the connection failed: " + wire::error_text(result.error);
        return Filled::kEnd;
    }
  }
  return Filled::kBytes;
}

// Takes datagrams that have come, and asks for those that have not when it is time to; `needed` says whether
// there was any that a step needed. False when the session is over.
bool StepLoop::hear_multicast(Stream& stream, StepLoopEnd& end, bool& needed) {
  if (multicast_ == nullptr) return true;
  needed = multicast_->receive();
  if (multicast_->next_due() == wire::kNever) return true;
  while (const auto question = multicast_->due(Clock::now())) {
    if (!send({question->data(), question->size(), nullptr, 0}, stream, "a question", end)) return false;
  }
  return true;
}

// Sleeps until there may be something to receive. False when the session is over.
bool StepLoop::sleep(Stream& stream, StepLoopEnd& end) {
  if (multicast_ != nullptr) {
    stream.sleep_beside(multicast_->fd(), std::min(frame_deadline_, multicast_->next_due()));
    if (frame_deadline_ == wire::kNever || Clock::now() < frame_deadline_) return true;
  }
  if (stream.wait(wire::Direction::kRead, frame_deadline_)) return true;
  const WireError error(ErrorCode::kTimeout, "half a frame: got " + std::to_string(received_bytes_) +
                                                 " bytes, expected the rest within " +
                                                 std::to_string(limits_.frame_timeout_ms) + " ms");
  send_error(stream, error);
  end.reason = EndReason::kTimeout;
  end.message = error.what();
  return false;
}

bool StepLoop::reply(Stream& stream, uint64_t sequence, const StepReplyHeader& header, StepLoopEnd& end) {
  uint8_t head[wire::kFrameHeaderBytes + wire::kStepReplyHeaderBytes];
  const uint64_t payload_bytes = wire::step_reply_bytes(header, hidden_size_);
  wire::encode_frame_header({FrameType::kStepReply, static_cast<uint32_t>(payload_bytes), sequence}, head);
  wire::encode_step_reply_header(header, head + wire::kFrameHeaderBytes);

  wire::TwoParts message;
  message.first = head;
  message.first_bytes = sizeof(head);
  message.second = reinterpret_cast<const uint8_t*>(sums_.get());
  message.second_bytes = payload_bytes - wire::kStepReplyHeaderBytes;
  if (header.reply_type == ActivationType::kBf16) {
    wire::encode_bf16(sums_.get(), size_t{header.num_tokens} * hidden_size_, sums_bf16_.get());
    message.second = sums_bf16_.get();
  }

  const bool sent = send(message, stream, "a reply", end);
  idle_since_ = Clock::now();
  return sent;
}

// False when the session is over: the host is gone, or does not take it.
bool StepLoop::send(const wire::TwoParts& message, Stream& stream, const char* what, StepLoopEnd& end) {
  const wire::Deadline deadline = wire::deadline_after_ms(limits_.send_timeout_ms);
  size_t sent = 0;
  while (sent < message.total_bytes()) {
    const IoResult result = stream.send(message, sent);
    if (result.state == IoState::kFailed) {
      end.reason = EndReason::kLost;
      end.message = "the connection failed: " + wire::error_text(result.error);
      return false;
    }
    sent += result.bytes;
    if (result.state == IoState::kWouldWait && !stream.wait(wire::Direction::kWrite, deadline)) {
      end.reason = EndReason::kTimeout;
      end.message = std::string(what) + ": the host did not take it within " +
                    std::to_string(limits_.send_timeout_ms) + " ms";
      return false;
    }
  }
  return true;
}

}  // namespace duck
