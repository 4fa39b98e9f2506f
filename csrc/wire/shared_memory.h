// Two rings of bytes in memory that a host and a worker on one machine share, one in each direction: what TCP
// carries between machines. Called by wire/stream.cpp; docs/wire-format.md has the layout.
//
// The memory has no name; who holds its descriptor may map it. Nothing that the other end writes there is
// believed: positions are checked before they are used, and bytes are copied out before anyone reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "wire/socket_io.h"

namespace duck::wire {

class SharedMemory {
 public:
  // Of the memory: room for positions, then the ring from host to worker, then the other.
  static constexpr size_t kRingBytes = size_t{1} << 24;
  static constexpr size_t kHeadBytes = 4096;
  static constexpr size_t kBytes = kHeadBytes + 2 * kRingBytes;

  enum class End : uint8_t { kHost, kWorker };

  // Maps the memory, and takes copies of the descriptors: my_bell is an eventfd that this end sleeps on,
  // their_bell the other end's. Throws std::system_error when it cannot be mapped, std::invalid_argument when
  // it is smaller than kBytes or may still shrink.
  SharedMemory(End end, int memory_fd, int my_bell_fd, int their_bell_fd);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Empties both rings. Only while neither end uses them.
  void reset();

  // As of a socket, without waiting: some bytes, none now, or EPROTO where positions make no sense.
  IoResult receive(uint8_t* out, size_t bytes);
  IoResult send(const TwoParts& message, size_t sent_bytes);

  // Has the other end ring this end's bell once there is something to receive, or room to send. True where
  // there is already. end_sleep() is due afterwards in any case.
  bool announce_sleep(bool to_receive, bool to_send);
  void end_sleep(bool bell_rang);
  int bell() const { return my_bell_; }

 private:
  struct Ring;
  struct Layout;

  uint8_t* bytes_of(const Ring& ring) const;
  void ring_bell() const;

  Layout* layout_ = nullptr;
  Ring* in_ = nullptr;
  Ring* out_ = nullptr;
  int my_bell_ = -1;
  int their_bell_ = -1;
};

}  // namespace duck::wire
