// The host's voice to a multicast group: sends a request frame once, as datagrams, as fast as the socket
// takes them. Called by the transport; knows neither steps nor workers.
#pragma once

#include <cstdint>
#include <string>

#include "wire/datagram.h"

namespace duck {

class MulticastSender {
 public:
  // Takes over a UDP socket that is connected to the group; `group` is what describe() calls it.
  MulticastSender(int fd, const wire::MulticastSession& session, std::string group);
  ~MulticastSender();
  MulticastSender(const MulticastSender&) = delete;
  MulticastSender& operator=(const MulticastSender&) = delete;

  int fd() const { return fd_; }
  uint32_t fragment_bytes() const { return session_.fragment_bytes; }

  // Sends a frame's datagrams from number `next` on, which it moves, without waiting: true when all were
  // handed over, or cannot be (workers then ask for them), false when the socket takes no more now.
  bool send(uint64_t sequence, const uint8_t* frame, uint32_t frame_bytes, uint32_t& next);

  uint64_t num_datagrams() const { return num_datagrams_; }

  // In words: the group, the datagrams' size, how they are handed over, and the last error if there was one.
  std::string describe() const;

 private:
  const int fd_;
  const wire::MulticastSession session_;
  const std::string group_;
  bool gso_ = false;
  int error_ = 0;
  uint64_t num_datagrams_ = 0;
};

}  // namespace duck
