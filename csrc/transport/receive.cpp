// Reception: what comes from a worker, taken as far as it has come, and checked against what was asked.
#include <algorithm>
#include <string>

#include "transport/link.h"

namespace duck {
namespace {

using wire::FrameHeader;
using wire::FrameType;
using wire::IoResult;
using wire::IoState;
using wire::kFrameHeaderBytes;
using wire::kStepReplyHeaderBytes;
using wire::WireError;

std::string expected_got(const std::string& field, uint64_t got, uint64_t expected) {
  return field + ": got " + std::to_string(got) + ", expected " + std::to_string(expected);
}

bool is_reply_to(const uint8_t* head, uint64_t sequence) {
  const FrameHeader frame = wire::decode_frame_header(head);
  return frame.type == FrameType::kStepReply && frame.sequence == sequence;
}

}  // namespace

// Takes what has come from a worker, without waiting: all of it, or as far as its reply to `until`, so that a
// worker that answers and then leaves has answered. Whatever goes wrong loses the worker.
void Transport::receive_from(size_t worker, const Step* until) {
  Link& link = *links_[worker];
  while (link.fd >= 0) {
    uint8_t* out = link.head + link.head_bytes;
    size_t bytes = link.head_wanted_bytes - link.head_bytes;
    if (link.in_body) {
      const size_t left = link.body_bytes - link.body_got_bytes;
      out = link.step != nullptr ? link.body + link.body_got_bytes : link.scratch.data();
      bytes = link.step != nullptr ? left : std::min(left, kDropChunkBytes);
    }
    wire::TwoRooms rooms{out, bytes, nullptr, 0};
    // Along with a head comes the body of the reply that is due, put where it belongs.
    Step* due = !link.in_body && link.head_wanted_bytes == kReplyHeadBytes ? expected_from(worker) : nullptr;
    if (due != nullptr) {
      rooms.second = body_room(link, *due, worker);
      rooms.second_bytes = body_bytes(*due);
    }
    const IoResult result = link.receive(rooms);
    if (result.state == IoState::kWouldWait) return;
    if (result.state == IoState::kEnded) return lose(worker, "it closed the connection");
    if (result.state == IoState::kFailed) {
      return lose(worker, "the connection failed: " + wire::error_text(result.error));
    }
    const size_t first_bytes = std::min(result.bytes, bytes);
    const size_t second_bytes = result.bytes - first_bytes;
    (link.in_body ? link.body_got_bytes : link.head_bytes) += first_bytes;
    std::string reason;
    try {
      const bool in_place = second_bytes > 0 && is_reply_to(link.head, due->sequence);
      if (second_bytes > 0 && !in_place) link.put_back(rooms.second, second_bytes);
      bool further = advance(worker);
      if (in_place) link.body_got_bytes += second_bytes;
      while (further) further = advance(worker);
    } catch (const WireError& error) {
      reason = std::string("it sent a malformed frame: ") + error.what();
    } catch (const std::runtime_error& error) {
      reason = error.what();
    }
    if (!reason.empty()) return lose(worker, reason);
    if (until != nullptr && until->arrived[worker]) return;
  }
}

// Moves the link's reception on as far as its bytes allow; true when it may move further at once.
bool Transport::advance(size_t worker) {
  Link& link = *links_[worker];
  if (link.in_body) {
    if (link.body_got_bytes < link.body_bytes) return false;
    finish_body(link, worker);
    return false;
  }
  if (link.head_bytes < kFrameHeaderBytes) return false;
  const FrameHeader frame = wire::decode_frame_header(link.head);
  if (frame.type == FrameType::kError) {
    link.head_wanted_bytes = kFrameHeaderBytes + frame.payload_bytes;
    if (link.head_bytes < link.head_wanted_bytes) return false;
    const wire::ErrorPayload error =
        wire::decode_error_payload(link.head + kFrameHeaderBytes, frame.payload_bytes);
    throw std::runtime_error("it ended the session: " + error.text);
  }
  if (frame.type == FrameType::kStepMissing && multicast_ != nullptr) {
    link.head_wanted_bytes = kFrameHeaderBytes + frame.payload_bytes;
    if (link.head_bytes < link.head_wanted_bytes) return false;
    link.put_back_surplus();
    answer_missing(worker, frame.sequence, link.head + kFrameHeaderBytes, frame.payload_bytes);
    link.next_frame();
    return false;
  }
  if (frame.type != FrameType::kStepReply) {
    throw WireError(
        wire::ErrorCode::kProtocol,
        std::string("frame type: got ") + wire::frame_type_name(frame.type) + ", expected STEP_REPLY");
  }
  if (link.head_bytes < kReplyHeadBytes) return false;
  link.reply = wire::decode_step_reply_header(link.head + kFrameHeaderBytes);
  link.sequence = frame.sequence;
  link.body_bytes = frame.payload_bytes - kStepReplyHeaderBytes;
  begin_body(worker);
  return true;
}

// Decides where the body of a reply goes, and checks that it is the reply to what was asked.
void Transport::begin_body(size_t worker) {
  Link& link = *links_[worker];
  const auto check = [](const char* field, uint64_t got, uint64_t expected) {
    if (got != expected) throw WireError(wire::ErrorCode::kProtocol, expected_got(field, got, expected));
  };
  if (link.sequence > last_sequence_) {
    throw WireError(wire::ErrorCode::kProtocol, "reply sequence: got " + std::to_string(link.sequence) +
                                                    ", expected at most " + std::to_string(last_sequence_));
  }
  Step* step = find(link.sequence).get();
  if (step != nullptr && step->arrived[worker]) step = nullptr;  // a duplicate
  link.in_body = true;
  link.step = step;
  link.body_got_bytes = 0;
  if (step == nullptr) {
    link.scratch.resize(std::max(link.scratch.size(), kDropChunkBytes));
    return;
  }
  check("reply layer", link.reply.layer, step->layer);
  check("reply lane", link.reply.lane, step->lane);
  check("reply tokens", link.reply.num_tokens, step->num_tokens);
  check("reply dtype", static_cast<uint64_t>(link.reply.reply_type),
        static_cast<uint64_t>(config_.reply_type));
  check("STEP_REPLY payload bytes", kStepReplyHeaderBytes + link.body_bytes,
        wire::step_reply_bytes(link.reply, config_.hidden_size));
  link.body = body_room(link, *step, worker);
}

// The oldest step that a worker has not answered; it answers in order.
Transport::Step* Transport::expected_from(size_t worker) const {
  for (const auto& step : in_flight_) {
    if (!step->arrived[worker]) return step.get();
  }
  return nullptr;
}

uint8_t* Transport::body_room(Link& link, Step& step, size_t worker) const {
  if (config_.reply_type == ActivationType::kF32) {
    return reinterpret_cast<uint8_t*>(step.partial_sums[worker].data());
  }
  link.scratch.resize(std::max(link.scratch.size(), body_bytes(step)));
  return link.scratch.data();
}

size_t Transport::body_bytes(const Step& step) const {
  return size_t{step.num_tokens} * config_.hidden_size * wire::activation_bytes(config_.reply_type);
}

IoResult Transport::Link::receive(const wire::TwoRooms& rooms) {
  if (misplaced_taken == misplaced.size()) {
    return rooms.second_bytes > 0 ? stream.receive(rooms) : stream.receive(rooms.first, rooms.first_bytes);
  }
  const size_t count = std::min(rooms.first_bytes, misplaced.size() - misplaced_taken);
  std::copy_n(misplaced.data() + misplaced_taken, count, rooms.first);
  misplaced_taken += count;
  return {IoState::kDone, count, 0};
}

void Transport::finish_body(Link& link, size_t worker) {
  if (Step* step = link.step) {
    if (config_.reply_type == ActivationType::kBf16) {
      const size_t values = size_t{step->num_tokens} * config_.hidden_size;
      wire::decode_bf16(link.scratch.data(), values, step->partial_sums[worker].data());
    }
    step->arrived[worker] = 1;
    StepTimes::Answer& answer = step->answers[worker];
    answer.arrived = wire::Clock::now();
    answer.compute_us = link.reply.compute_us;
    answer.idle_since_ns = link.reply.idle_since_ns;
    answer.started_ns = link.reply.started_ns;
    answer.finished_ns = link.reply.finished_ns;
    if (step->by_multicast[worker] && !step->asked[worker]) link.heard_nothing = 0;
    --step->missing;
  }
  link.next_frame();
}

}  // namespace duck
