// Requests by multicast: which steps go so, when they are announced, and what is sent again.
#include <algorithm>
#include <string>
#include <utility>

#include "transport/link.h"

namespace duck {
namespace {

using wire::Clock;
using wire::Deadline;
using wire::ErrorCode;
using wire::FrameType;
using wire::kFrameHeaderBytes;
using wire::WireError;

// How long after a step went out who has not answered is told of it. A worker that has it knows already.
constexpr std::chrono::microseconds kAnnounceAfter{2000};
constexpr uint32_t kMostUnheard = 8;     // steps in a row without a datagram before a worker gets no more
constexpr size_t kMaxUnsent = 64 * 512;  // more questions than steps can have

}  // namespace

void Transport::begin_multicast(const std::shared_ptr<Step>& step) {
  if (multicast_ == nullptr || !fits_multicast(*step)) return;
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    const Link& link = *links_[worker];
    step->by_multicast[worker] = link.fd >= 0 && link.multicast_bytes > 0;
  }
  unsent_multicast_.push_back(step);
}

// Whether workers have room for it while they compute what they have; one that waits takes any size.
bool Transport::fits_multicast(const Step& step) const {
  size_t room = 0, queued = 0;
  for (size_t worker = 0; worker < links_.size(); ++worker) {
    const Link& link = *links_[worker];
    if (link.fd < 0 || link.multicast_bytes == 0) continue;
    room = room == 0 ? link.multicast_bytes : std::min(room, link.multicast_bytes);
    size_t bytes = 0;
    for (const auto& each : in_flight_) {
      if (each.get() != &step && each->awaited_by_multicast(worker)) bytes += each->request_bytes;
    }
    queued = std::max(queued, bytes);
  }
  return room > 0 && (queued == 0 || queued + step.request_bytes <= room);
}

// Sends as many datagrams as the socket takes; true when none are left.
bool Transport::send_multicast() {
  while (!unsent_multicast_.empty()) {
    Step& step = *unsent_multicast_.front();
    if (!multicast_->send(step.sequence, step.request.data(), static_cast<uint32_t>(step.request_bytes),
                          step.next_datagram)) {
      return false;
    }
    step.announce_at = Clock::now() + kAnnounceAfter;
    unsent_multicast_.pop_front();
  }
  return true;
}

// Tells who has not answered of the steps that went out some time ago, each once: whatever did not come of
// it, and if it was all of it, is asked for then. Returns when that is due again.
Deadline Transport::announce_late_steps() {
  Deadline next = wire::kNever;
  if (multicast_ == nullptr) return next;
  const Deadline now = Clock::now();
  for (const auto& step : in_flight_) {
    if (now < step->announce_at) {
      next = std::min(next, step->announce_at);
      continue;
    }
    step->announce_at = wire::kNever;
    for (size_t worker = 0; worker < links_.size(); ++worker) {
      if (!step->awaited_by_multicast(worker) || step->asked[worker] || links_[worker]->fd < 0) continue;
      Message message;
      message.step = step;
      message.head_bytes = kFrameHeaderBytes + wire::kStepSentBytes;
      wire::encode_frame_header({FrameType::kStepSent, wire::kStepSentBytes, step->sequence},
                                message.head.data());
      wire::encode_step_sent(static_cast<uint32_t>(step->request_bytes),
                             message.head.data() + kFrameHeaderBytes);
      links_[worker]->unsent.push_back(std::move(message));
    }
  }
  return next;
}

// Sends a worker what it says did not come. Throws WireError for a question that makes no sense.
void Transport::answer_missing(size_t worker, uint64_t sequence, const uint8_t* payload, size_t bytes) {
  Link& link = *links_[worker];
  if (sequence == 0 || sequence > last_sequence_) {
    throw WireError(ErrorCode::kProtocol, "STEP_MISSING sequence: got " + std::to_string(sequence) +
                                              ", expected 1 to " + std::to_string(last_sequence_));
  }
  if (link.unsent.size() > kMaxUnsent) {
    throw WireError(ErrorCode::kProtocol, "STEP_MISSING: got more questions than answers were taken");
  }
  const std::shared_ptr<Step> step = find(sequence);
  if (step == nullptr || step->arrived[worker]) return say_over(worker, sequence);
  const uint32_t fragment_bytes = multicast_->fragment_bytes();
  const auto request_bytes = static_cast<uint32_t>(step->request_bytes);
  const uint32_t num_fragments = wire::fragment_count(request_bytes, fragment_bytes);
  const wire::StepMissing missing = wire::decode_step_missing(payload, bytes, num_fragments);
  if (step->asked[worker]) {
    throw WireError(ErrorCode::kProtocol,
                    "STEP_MISSING: got two of step " + std::to_string(sequence) + ", expected one");
  }
  step->asked[worker] = 1;
  uint32_t num_missing = 0;
  for (const wire::FragmentRange& range : missing.ranges) num_missing += range.count;
  link.num_asked += num_missing;
  link.heard_nothing = missing.received == 0 ? link.heard_nothing + 1 : 0;
  if (link.heard_nothing >= kMostUnheard && link.multicast_bytes > 0) {
    link.multicast_bytes = 0;  // from now on it gets its requests over its connection
    unreached_.push_back(worker);
  }
  if (num_missing == num_fragments) return send_request(worker, step);
  for (const wire::FragmentRange& range : missing.ranges) {
    Message message;
    message.step = step;
    message.offset = size_t{range.first} * fragment_bytes;
    message.bytes = std::min(step->request_bytes - message.offset, size_t{range.count} * fragment_bytes);
    message.head_bytes = kFrameHeaderBytes + wire::kStepPartHeadBytes;
    const size_t payload_bytes = wire::kStepPartHeadBytes + message.bytes;
    wire::encode_frame_header({FrameType::kStepPart, static_cast<uint32_t>(payload_bytes), sequence},
                              message.head.data());
    wire::encode_step_part_head(range.first, message.head.data() + kFrameHeaderBytes);
    link.unsent.push_back(std::move(message));
  }
}

void Transport::say_over(size_t worker, uint64_t sequence) {
  if (links_[worker]->fd < 0) return;
  Message message;
  message.head_bytes = kFrameHeaderBytes;
  wire::encode_frame_header({FrameType::kStepOver, 0, sequence}, message.head.data());
  links_[worker]->unsent.push_back(std::move(message));
}

Transport::MulticastCounts Transport::multicast_counts() const {
  const std::lock_guard lock(mutex_);
  MulticastCounts counts;
  if (multicast_ != nullptr) counts.num_datagrams = multicast_->num_datagrams();
  for (const auto& link : links_) {
    counts.num_asked.push_back(link->num_asked);
    counts.is_reached.push_back(link->multicast_bytes > 0);
  }
  return counts;
}

std::vector<size_t> Transport::take_unreached() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unreached_, {});
}

}  // namespace duck
