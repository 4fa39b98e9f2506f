// Non-blocking reads and writes with deadlines on a connected socket. Called by the step loop and the
// transport; knows bytes only. Every call is MSG_DONTWAIT plus poll(), so it works whatever the descriptor's
// mode is.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace duck::wire {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
inline constexpr Deadline kNever = Deadline::max();

inline Deadline deadline_after_ms(int64_t ms) { return Clock::now() + std::chrono::milliseconds(ms); }

enum class IoState : uint8_t {
  kDone,       // some bytes moved
  kWouldWait,  // none now
  kEnded,      // the other end closed its side (reads only)
  kFailed,     // errno says why
};

struct IoResult {
  IoState state = IoState::kFailed;
  size_t bytes = 0;
  int error = 0;  // errno of kFailed
};

IoResult receive_some(int fd, uint8_t* out, size_t bytes);

// Room in two parts, filled one after the other.
struct TwoRooms {
  uint8_t* first = nullptr;
  size_t first_bytes = 0;
  uint8_t* second = nullptr;
  size_t second_bytes = 0;
};
IoResult receive_some(int fd, const TwoRooms& rooms);

// A message in two parts, sent as one; sent_bytes counts over both.
struct TwoParts {
  const uint8_t* first = nullptr;
  size_t first_bytes = 0;
  const uint8_t* second = nullptr;
  size_t second_bytes = 0;
  size_t total_bytes() const { return first_bytes + second_bytes; }
};
IoResult send_some(int fd, const TwoParts& message, size_t sent_bytes);

// Waits until the socket is readable (or writable, for kWrite): true when it is, or when it has failed or
// ended (the next read or write says so); false when the deadline passed.
enum class Direction : uint8_t { kRead, kWrite };
bool wait_for(int fd, Direction direction, Deadline deadline);

// For poll(): -1 for kNever, else rounded up so that a wait never ends early.
int poll_timeout_ms(Deadline deadline);

// Small frames leave at once, and a peer whose machine is gone is noticed: keepalive after 5 s of silence,
// five probes 1 s apart; data unacknowledged for 60 s ends the connection; a lost packet is sent again soon.
// Errors are ignored: a descriptor that is no TCP socket (a socketpair) has nothing to set, and some kernels
// lack an option.
void set_connection_options(int fd);

// What of that is active, in words.
std::string describe_connection(int fd);

std::string error_text(int error);

}  // namespace duck::wire
