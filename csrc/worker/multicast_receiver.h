// A worker's ear for requests by multicast: takes datagrams, puts steps together of them and of what is sent
// again over the connection, and says what is missing. Called by the step loop; knows datagrams and bytes of
// frames, but no experts.
//
// Whatever arrives, at most kMaxSteps steps are put together at once, each of at most the plan's largest
// request; a datagram that is not of the session, or that its step does not need, is dropped.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "wire/datagram.h"
#include "wire/frame.h"
#include "wire/socket_io.h"

namespace duck {

class MulticastReceiver {
 public:
  static constexpr size_t kMaxSteps = 8;
  // A step that the host has sent all of, and of which no datagram has come for so long, is asked for. Before
  // that silence says nothing: a host that loses its core, or whose link is busy, is silent for longer.
  static constexpr std::chrono::microseconds kQuiet{1000};

  struct Counts {
    uint64_t taken = 0;    // datagrams that a step needed
    uint64_t refused = 0;  // not of this session: garbage, another's, a wrong tag or length
    uint64_t surplus = 0;  // of this session, and had or over already, or more than there is room for
    uint64_t asked = 0;    // fragments asked for again
    uint64_t steps = 0;    // put together
  };

  // Takes over a UDP socket that has joined the group.
  MulticastReceiver(int fd, const wire::MulticastSession& session);
  ~MulticastReceiver();
  MulticastReceiver(const MulticastReceiver&) = delete;
  MulticastReceiver& operator=(const MulticastReceiver&) = delete;

  int fd() const { return fd_; }
  const Counts& counts() const { return counts_; }

  // Before the first step: the largest request frame.
  void set_limit(uint64_t max_frame_bytes) { max_frame_bytes_ = max_frame_bytes; }

  // Takes what has come, without waiting and a bounded number of datagrams: true when any was needed.
  bool receive();

  // A step that is whole; it stays so until it is over().
  struct Whole {
    uint64_t sequence = 0;
    const uint8_t* frame = nullptr;
    size_t frame_bytes = 0;
  };
  std::optional<Whole> whole() const;

  // The host says that this step went out; throws WireError for a size that none has.
  void announce(uint64_t sequence, uint32_t frame_bytes);
  // Bytes of a step that were sent again, from a fragment on; throws WireError where they are no whole
  // fragments of it. Nothing for a step that is over.
  void put_part(uint64_t sequence, uint32_t first, const uint8_t* bytes, size_t count);
  // A step was served, or nobody waits for it: what comes of it from now on is dropped.
  void over(uint64_t sequence);
  // Whether over() was said of a step, as far back as is known.
  bool is_over(uint64_t sequence) const;

  // When due() has something next; kNever where nothing is missing.
  wire::Deadline next_due() const;
  // A whole STEP_MISSING frame for a step that it is time to ask for; once for every step.
  std::optional<std::vector<uint8_t>> due(wire::Deadline now);

 private:
  struct Step {
    uint64_t sequence = 0;  // 0: free
    uint32_t frame_bytes = 0;
    uint32_t num_fragments = 0;
    uint32_t num_have = 0;      // fragments, from wherever
    uint32_t num_received = 0;  // as datagrams
    bool announced = false;
    bool asked = false;
    wire::Deadline heard_at;
    wire::Deadline ask_at = wire::kNever;
    std::vector<uint8_t> frame;
    std::vector<uint8_t> have;  // one a fragment
  };

  Step* find(uint64_t sequence);
  Step* begin(uint64_t sequence, uint32_t frame_bytes);
  bool take(const uint8_t* datagram, size_t bytes, wire::Deadline now);
  void put(Step& step, uint32_t index, const uint8_t* bytes);

  const int fd_;
  const wire::MulticastSession session_;
  uint64_t max_frame_bytes_ = 0;
  std::array<Step, kMaxSteps> steps_;
  std::vector<std::pair<uint64_t, uint32_t>> without_room_;  // sequence and bytes of announced steps
  uint64_t newest_over_ = 0;                                 // sequence
  uint64_t over_bits_ = 0;                                   // bit i: the sequence newest_over_ - i
  std::vector<uint8_t> received_;
  Counts counts_;
};

}  // namespace duck
