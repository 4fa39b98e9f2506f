#include "wire/stream.h"

#include <cerrno>

namespace duck::wire {

IoResult Stream::receive(uint8_t* out, size_t bytes) {
  if (memory_ == nullptr) return receive_some(fd_, out, bytes);
  // Looked at before the memory: what was written before the end is there then.
  const IoResult ended = ended_;
  const IoResult result = memory_->receive(out, bytes);
  return result.state == IoState::kWouldWait ? ended : result;
}

IoResult Stream::receive(const TwoRooms& rooms) {
  if (memory_ == nullptr) return receive_some(fd_, rooms);
  IoResult result = receive(rooms.first, rooms.first_bytes);
  if (result.bytes < rooms.first_bytes) return result;
  const IoResult second = memory_->receive(rooms.second, rooms.second_bytes);
  result.bytes += second.bytes;
  return result;
}

IoResult Stream::send(const TwoParts& message, size_t sent_bytes) {
  if (memory_ == nullptr) return send_some(fd_, message, sent_bytes);
  if (ended_.state != IoState::kWouldWait) return {IoState::kFailed, 0, EPIPE};
  return memory_->send(message, sent_bytes);
}

bool Stream::announce_sleep(bool to_receive, bool to_send, pollfd* entries) {
  const bool by_connection = memory_ == nullptr;
  entries[0] = {fd_, 0, 0};
  if (to_receive || !by_connection) entries[0].events |= POLLIN;
  if (to_send && by_connection) entries[0].events |= POLLOUT;
  entries[1] = {by_connection ? -1 : memory_->bell(), POLLIN, 0};
  return !by_connection &&
         (ended_.state != IoState::kWouldWait || memory_->announce_sleep(to_receive, to_send));
}

bool Stream::end_sleep(const pollfd* entries) {
  if (memory_ != nullptr) {
    memory_->end_sleep(entries[1].revents != 0);
    if (entries[0].revents != 0) look_at_connection();
  }
  return entries[0].revents != 0 || entries[1].revents != 0;
}

std::string Stream::describe() const {
  return memory_ != nullptr ? "shared memory" : describe_connection(fd_);
}

// Nothing is sent over a connection beside which there is memory: it is silent, or it has ended.
void Stream::look_at_connection() {
  uint8_t byte = 0;
  ended_ = receive_some(fd_, &byte, 1);
  if (ended_.state == IoState::kDone) ended_ = {IoState::kFailed, 0, EPROTO};
}

bool Stream::wait(Direction direction, Deadline deadline) {
  if (memory_ == nullptr) return wait_for(fd_, direction, deadline);
  for (;;) {
    pollfd entries[kPollEntries];
    const bool to_receive = direction == Direction::kRead;
    bool ready = announce_sleep(to_receive, !to_receive, entries);
    if (!ready) ::poll(entries, kPollEntries, poll_timeout_ms(deadline));
    ready |= end_sleep(entries);
    if (ready) return true;
    if (deadline != kNever && Clock::now() >= deadline) return false;
  }
}

void Stream::sleep_beside(int other_fd, Deadline deadline) {
  pollfd entries[kPollEntries + 1];
  const bool ready = announce_sleep(true, false, entries);
  entries[kPollEntries] = {other_fd, POLLIN, 0};
  timespec limit{};
  const auto left = deadline == kNever ? Clock::duration{} : deadline - Clock::now();
  if (left.count() > 0) {
    limit.tv_sec = static_cast<time_t>(left / std::chrono::seconds(1));
    limit.tv_nsec = static_cast<long>((left % std::chrono::seconds(1)).count());
  }
  if (!ready && ::ppoll(entries, kPollEntries + 1, deadline == kNever ? nullptr : &limit, nullptr) < 0) {
    for (pollfd& entry : entries) entry.revents = 0;
  }
  end_sleep(entries);
}

}  // namespace duck::wire
