#include "worker/multicast_receiver.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace duck {
namespace {

using wire::Clock;
using wire::Deadline;
using wire::ErrorCode;
using wire::WireError;

constexpr size_t kBatch = 32;
constexpr int kMaxBatches = 8;  // in one receive(): a flood must not keep the connection from being read
constexpr uint64_t kWindow = 64;
constexpr uint64_t kMinFrameBytes = wire::kFrameHeaderBytes + wire::kStepRequestHeaderBytes;

}  // namespace

MulticastReceiver::MulticastReceiver(int fd, const wire::MulticastSession& session)
    : fd_(fd), session_(session) {
  // A byte more than any datagram of the session: a longer one is seen to be.
  received_.resize(kBatch * (wire::kDatagramHeaderBytes + session.fragment_bytes + 1));
}

MulticastReceiver::~MulticastReceiver() { ::close(fd_); }

bool MulticastReceiver::receive() {
  const size_t room = received_.size() / kBatch;
  iovec parts[kBatch];
  mmsghdr messages[kBatch];
  bool needed = false;
  for (int batch = 0; batch < kMaxBatches; ++batch) {
    for (size_t i = 0; i < kBatch; ++i) {
      parts[i] = {received_.data() + i * room, room};
      messages[i] = {};
      messages[i].msg_hdr.msg_iov = &parts[i];
      messages[i].msg_hdr.msg_iovlen = 1;
    }
    const int count = ::recvmmsg(fd_, messages, kBatch, MSG_DONTWAIT, nullptr);
    if (count <= 0) break;  // nothing there, or an error of the network: what is missing is asked for
    const Deadline now = Clock::now();
    for (int i = 0; i < count; ++i) {
      needed |= take(received_.data() + static_cast<size_t>(i) * room, messages[i].msg_len, now);
    }
    if (static_cast<size_t>(count) < kBatch) break;
  }
  return needed;
}

bool MulticastReceiver::take(const uint8_t* datagram, size_t bytes, Deadline now) {
  const auto header = wire::decode_datagram(session_, datagram, bytes);
  if (!header) {
    ++counts_.refused;
    return false;
  }
  Step* step = find(header->sequence);
  const bool is_old = header->sequence + kWindow <= newest_over_;  // or it says a step of long ago again
  if (step == nullptr && !is_old && !is_over(header->sequence)) {
    step = begin(header->sequence, header->frame_bytes);
  }
  if (step == nullptr || step->frame_bytes != header->frame_bytes || step->have[header->index] != 0) {
    ++counts_.surplus;
    return false;
  }
  ++counts_.taken;
  ++step->num_received;
  put(*step, header->index, datagram + wire::kDatagramHeaderBytes);
  // Nothing overtakes on the way through a switch: behind the last fragment, and behind a later step, what
  // is missing is lost.
  step->heard_at = now;
  if (header->index + 1 == step->num_fragments) {
    step->ask_at = now;
  } else if (step->announced) {
    step->ask_at = now + kQuiet;
  }
  for (Step& earlier : steps_) {
    if (earlier.sequence < header->sequence) earlier.ask_at = now;
  }
  return true;
}

void MulticastReceiver::put(Step& step, uint32_t index, const uint8_t* bytes) {
  const uint32_t count = wire::fragment_size(step.frame_bytes, session_.fragment_bytes, index);
  std::memcpy(step.frame.data() + size_t{index} * session_.fragment_bytes, bytes, count);
  step.have[index] = 1;
  if (++step.num_have == step.num_fragments) ++counts_.steps;
}

MulticastReceiver::Step* MulticastReceiver::find(uint64_t sequence) {
  for (Step& step : steps_) {
    if (step.sequence == sequence) return &step;
  }
  return nullptr;
}

// Room for a step; nullptr where there is none, or for a size that no step has.
MulticastReceiver::Step* MulticastReceiver::begin(uint64_t sequence, uint32_t frame_bytes) {
  if (frame_bytes < kMinFrameBytes || frame_bytes > max_frame_bytes_) return nullptr;
  Step* step = find(0);
  if (step == nullptr) return nullptr;
  step->sequence = sequence;
  step->frame_bytes = frame_bytes;
  step->num_fragments = wire::fragment_count(frame_bytes, session_.fragment_bytes);
  step->num_have = step->num_received = 0;
  step->announced = step->asked = false;
  step->heard_at = Clock::now();
  step->ask_at = wire::kNever;
  step->frame.resize(std::max<size_t>(step->frame.size(), frame_bytes));
  step->have.assign(step->num_fragments, 0);
  return step;
}

std::optional<MulticastReceiver::Whole> MulticastReceiver::whole() const {
  const Step* first = nullptr;
  for (const Step& step : steps_) {
    if (step.sequence == 0 || step.num_have < step.num_fragments) continue;
    if (first == nullptr || step.sequence < first->sequence) first = &step;
  }
  if (first == nullptr) return std::nullopt;
  return Whole{first->sequence, first->frame.data(), first->frame_bytes};
}

void MulticastReceiver::announce(uint64_t sequence, uint32_t frame_bytes) {
  if (sequence == 0 || frame_bytes < kMinFrameBytes || frame_bytes > max_frame_bytes_) {
    throw WireError(ErrorCode::kProtocol, "STEP_SENT bytes: got " + std::to_string(frame_bytes) +
                                              ", expected 40 to " + std::to_string(max_frame_bytes_));
  }
  if (is_over(sequence)) return;
  Step* step = find(sequence);
  if (step == nullptr) step = begin(sequence, frame_bytes);
  if (step != nullptr) {
    step->announced = true;
    step->ask_at = std::min(step->ask_at, step->heard_at + kQuiet);
  } else {
    without_room_.push_back({sequence, frame_bytes});
  }
}

void MulticastReceiver::put_part(uint64_t sequence, uint32_t first, const uint8_t* bytes, size_t count) {
  Step* step = find(sequence);
  if (step == nullptr) return;
  const size_t start = size_t{first} * session_.fragment_bytes;
  const bool ends_frame = start + count == step->frame_bytes;
  if (start + count > step->frame_bytes || (!ends_frame && count % session_.fragment_bytes != 0)) {
    throw WireError(ErrorCode::kProtocol, "STEP_PART bytes: got " + std::to_string(count) +
                                              " from fragment " + std::to_string(first) +
                                              " on, expected whole fragments of " +
                                              std::to_string(step->frame_bytes) + " bytes");
  }
  for (size_t at = 0; at < count; at += session_.fragment_bytes, ++first) {
    if (step->have[first] == 0) put(*step, first, bytes + at);
  }
}

void MulticastReceiver::over(uint64_t sequence) {
  if (sequence > newest_over_) {
    const uint64_t distance = sequence - newest_over_;
    over_bits_ = distance < kWindow ? over_bits_ << distance | 1 : 1;
    newest_over_ = sequence;
  } else if (newest_over_ - sequence < kWindow) {
    over_bits_ |= uint64_t{1} << (newest_over_ - sequence);
  }
  if (Step* step = find(sequence)) step->sequence = 0;
}

bool MulticastReceiver::is_over(uint64_t sequence) const {
  if (sequence > newest_over_) return false;
  const uint64_t distance = newest_over_ - sequence;
  return distance < kWindow && (over_bits_ >> distance & 1) != 0;
}

Deadline MulticastReceiver::next_due() const {
  Deadline next = without_room_.empty() ? wire::kNever : Deadline::min();
  for (const Step& step : steps_) {
    if (step.sequence != 0 && !step.asked && step.num_have < step.num_fragments) {
      next = std::min(next, step.ask_at);
    }
  }
  return next;
}

std::optional<std::vector<uint8_t>> MulticastReceiver::due(Deadline now) {
  if (!without_room_.empty()) {  // these come over the connection, whole
    const auto [sequence, frame_bytes] = without_room_.back();
    without_room_.pop_back();
    const uint32_t count = wire::fragment_count(frame_bytes, session_.fragment_bytes);
    counts_.asked += count;
    return wire::encode_step_missing_frame(sequence, {count, {{0, count}}});
  }
  for (Step& step : steps_) {
    if (step.sequence == 0 || step.asked || step.num_have == step.num_fragments || now < step.ask_at)
      continue;
    step.asked = true;
    wire::StepMissing missing;
    missing.received = step.num_received;
    for (uint32_t index = 0; index < step.num_fragments;) {
      if (step.have[index] != 0) {
        ++index;
        continue;
      }
      uint32_t end = index + 1;
      // The last range that there is room for takes all that follows.
      const bool last = missing.ranges.size() + 1 == wire::kMaxMissingRanges;
      while (end < step.num_fragments && (last || step.have[end] == 0)) ++end;
      missing.ranges.push_back({index, end - index});
      counts_.asked += end - index;
      index = end;
    }
    return wire::encode_step_missing_frame(step.sequence, missing);
  }
  return std::nullopt;
}

}  // namespace duck
