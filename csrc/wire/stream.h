// What a host and a worker say steps over: a connection alone, or memory that they share beside it, where the
// connection only tells that the other end lives. Called by the step loop and the transport; knows bytes
// only.
#pragma once

#include <poll.h>

#include <memory>
#include <string>
#include <utility>

#include "wire/shared_memory.h"
#include "wire/socket_io.h"

namespace duck::wire {

class Stream {
 public:
  static constexpr size_t kPollEntries = 2;

  Stream() = default;
  // Does not own the descriptor. Without memory the connection carries the bytes.
  explicit Stream(int fd, std::shared_ptr<SharedMemory> memory = nullptr)
      : fd_(fd), memory_(std::move(memory)) {}

  // Without waiting. What the other end wrote before its connection ended is received first.
  IoResult receive(uint8_t* out, size_t bytes);
  IoResult receive(const TwoRooms& rooms);
  IoResult send(const TwoParts& message, size_t sent_bytes);

  // How to sleep on several streams: announce_sleep() for each; where all say false, poll() the two entries
  // that each fills; then end_sleep() for each, which is due in any case. True from either: the next
  // receive() (or send()) has something to say.
  bool announce_sleep(bool to_receive, bool to_send, pollfd* entries);
  bool end_sleep(const pollfd* entries);

  // Waits for one stream: true when its next call has something to say, false when the deadline passed.
  bool wait(Direction direction, Deadline deadline);

  // Sleeps until there may be something to receive from the stream or from another descriptor, the deadline
  // has passed, to the microsecond, or a signal came.
  void sleep_beside(int other_fd, Deadline deadline);

  // In words.
  std::string describe() const;

 private:
  void look_at_connection();

  int fd_ = -1;
  std::shared_ptr<SharedMemory> memory_;
  IoResult ended_{IoState::kWouldWait, 0, 0};  // what the connection beside the memory said at last
};

}  // namespace duck::wire
