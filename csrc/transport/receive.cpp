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
using wire::kStepHeaderBytes;
using wire::WireError;

std::string expected_got(const std::string& field, uint64_t got, uint64_t expected) {
  return field + ": got " + std::to_string(got) + ", expected " + std::to_string(expected);
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
    const IoResult result = wire::receive_some(link.fd, out, bytes);
    if (result.state == IoState::kWouldWait) return;
    if (result.state == IoState::kEnded) return lose(worker, "it closed the connection");
    if (result.state == IoState::kFailed) {
      return lose(worker, "the connection failed: " + wire::error_text(result.error));
    }
    (link.in_body ? link.body_got_bytes : link.head_bytes) += result.bytes;
    std::string reason;
    try {
      while (advance(worker)) {
      }
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
  if (frame.type != FrameType::kStepReply) {
    throw WireError(
        wire::ErrorCode::kProtocol,
        std::string("frame type: got ") + wire::frame_type_name(frame.type) + ", expected STEP_REPLY");
  }
  if (link.head_bytes < kStepHeadBytes) return false;
  link.reply = wire::decode_step_reply_header(link.head + kFrameHeaderBytes);
  link.sequence = frame.sequence;
  link.body_bytes = frame.payload_bytes - kStepHeaderBytes;
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
  check("STEP_REPLY payload bytes", kStepHeaderBytes + link.body_bytes,
        wire::step_reply_bytes(link.reply, config_.hidden_size));
  if (config_.reply_type == ActivationType::kBf16) {
    link.scratch.resize(std::max(link.scratch.size(), link.body_bytes));
    link.body = link.scratch.data();
  } else {
    link.body = reinterpret_cast<uint8_t*>(step->partial_sums[worker].data());
  }
}

void Transport::finish_body(Link& link, size_t worker) {
  if (Step* step = link.step) {
    if (config_.reply_type == ActivationType::kBf16) {
      const size_t values = size_t{step->num_tokens} * config_.hidden_size;
      wire::decode_bf16(link.scratch.data(), values, step->partial_sums[worker].data());
    }
    step->arrived[worker] = 1;
    step->compute_us[worker] = link.reply.compute_us;
    --step->missing;
  }
  link.next_frame();
}

}  // namespace duck
