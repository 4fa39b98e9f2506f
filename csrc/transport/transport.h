// The host's end of the wire: sends each step to every worker and adds their partial sums in worker order.
// Called by duckllm/transport/transport.py through bind.cpp, without the GIL; knows neither models nor
// processes.
//
// Several steps may be in flight. Nothing here can deadlock on full socket buffers: while a request is still
// being sent, replies of earlier steps are received.
//
// Requests go to each worker over its connection, or to all that take them so once, by multicast
// (multicast.cpp): what of it did not arrive a worker asks for, and is sent over its connection.
//
// A worker that is lost takes its connection with it and nothing else: steps stay in flight with what the
// others have answered, and replace() sends them to whoever takes its place.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/experts.h"
#include "threads/fork_mark.h"
#include "transport/host_time.h"
#include "transport/multicast_sender.h"
#include "transport/step_times.h"
#include "transport/step_trace.h"
#include "wire/frame.h"
#include "wire/stream.h"

namespace duck {

// A worker is gone, late, or sent something else than its reply; or the transport is closed.
class TransportError : public std::runtime_error {
 public:
  TransportError(size_t worker, std::optional<uint32_t> layer, const std::string& reason)
      : std::runtime_error(reason), worker_(worker), layer_(layer) {}
  size_t worker() const { return worker_; }  // index in the order of the connections
  std::optional<uint32_t> layer() const { return layer_; }

 private:
  size_t worker_;
  std::optional<uint32_t> layer_;
};

struct TransportConfig {
  uint32_t hidden_size = 0;
  uint32_t top_k = 0;
  uint32_t max_step_tokens = 0;
  ActivationType x_type = ActivationType::kF32;      // of x on the wire
  ActivationType reply_type = ActivationType::kF32;  // of the partial sums on the wire
  int64_t step_timeout_ms = 30'000;
  int64_t submit_timeout_ms = 400;  // how long submit() waits for full buffers; wait() sends the rest
  int spin_us = 0;                  // how long wait() reads without sleeping
};

class Transport {
 public:
  // More steps in flight than this: the oldest is forgotten, and its replies are dropped.
  static constexpr size_t kMaxTickets = 64;

  // A worker's end of the wire: a socket, and the memory shared with it where there is any.
  struct Peer {
    int fd = -1;
    std::shared_ptr<wire::SharedMemory> memory = nullptr;
    size_t multicast_bytes = 0;  // what it can hold of datagrams that it has no time for; 0: it takes none
  };

  // What multicast did, in worker order where there is one a worker.
  struct MulticastCounts {
    uint64_t num_datagrams = 0;       // sent
    std::vector<uint64_t> num_asked;  // fragments asked for again
    std::vector<uint8_t> is_reached;  // whether requests still go to it so
  };

  // Takes the sockets over (one a worker, in worker order) and closes them in the end; workers hear of it,
  // but for the end in a process that was forked meanwhile.
  Transport(std::vector<Peer> peers, const TransportConfig& config,
            std::unique_ptr<MulticastSender> multicast = nullptr);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // Sends one step to every worker that is not lost and returns its ticket. x is [T, H] f32; nothing of it is
  // needed any more then. Throws std::invalid_argument for T or top_k out of range, TransportError when
  // closed.
  uint64_t submit(uint32_t layer, uint16_t lane, uint32_t num_tokens, uint32_t top_k, const float* x,
                  const int32_t* topk_ids, const float* topk_weights);

  // Waits for every worker's reply to that step, at most step_timeout_ms from the first wait for it, and
  // writes the sum ((y_0 + y_1) + y_2) + ... [T, H] f32. Tickets may be waited for in any order, each once.
  // A signal that arrives meanwhile has `interrupted` asked, if there is one: true gives the step up (its
  // replies are dropped when they come) and returns false.
  // Throws std::invalid_argument for a ticket that is not in flight, and TransportError when a worker is lost
  // that has not answered: the step stays in flight, to be waited for again after replace().
  bool wait(uint64_t ticket, float* sum, const std::function<bool()>& interrupted = nullptr);

  // As wait(), without waiting: false while somebody has not answered.
  bool poll(uint64_t ticket, float* sum);

  // The workers that have not answered a step in flight, ascending.
  std::vector<size_t> late() const;

  // As wait(), without the sum and for `ms` at most; `late` tells who has not answered by then.
  bool wait_some(uint64_t ticket, int64_t ms, std::vector<size_t>& late,
                 const std::function<bool()>& interrupted = nullptr);

  // Closes the connection of a worker that is known to be lost. Does nothing if it is lost already.
  void drop(size_t worker, const std::string& reason);

  // Takes what has come without any step being waited for: a worker that has closed its connection is lost.
  void look();

  // The workers that are lost, ascending.
  std::vector<size_t> lost() const;

  // Gives a worker's place to another connection, takes the socket over, and sends it what is in flight and
  // not answered; these steps' time-outs begin anew. What the old connection had answered by now is used,
  // what comes later never arrives.
  void replace(size_t worker, Peer peer);

  // Gives every step in flight up.
  void give_up();

  // How each worker is spoken with, in words.
  std::vector<std::string> describe() const;

  // All zeros without multicast.
  MulticastCounts multicast_counts() const;

  // The workers that multicast was found not to reach since this was asked for the last time.
  std::vector<size_t> take_unreached();

  // Tokens of a ticket in flight; throws std::invalid_argument for any other.
  uint32_t ticket_tokens(uint64_t ticket) const;

  // Each worker's own time for the step last waited for, microseconds, in worker order.
  std::vector<uint32_t> last_compute_us() const;

  // Means over the last steps, without waiting for one that is under way.
  std::vector<LayerTimes> step_times() const { return times_.layers(); }

  // Measures what the host's own work costs from now on, or stops to.
  void measure_host_time(bool on);
  std::array<HostTime::Spent, HostTime::kNumParts> host_time() const;

  // Notes every step from now on; nullptr ends it.
  void set_trace(std::shared_ptr<StepTrace> trace);

  // Says CLOSE to every worker and closes the sockets. Does nothing the second time.
  void close();
  bool closed() const;

  size_t num_workers() const { return links_.size(); }

 private:
  struct Step;  // one ticket: partial sums as they come in
  struct Link;  // one worker's socket and the reply that is being received from it
  struct Message;

  enum class Waited : uint8_t { kComplete, kInterrupted, kTimedOut };

  std::shared_ptr<Step> find(uint64_t ticket) const;
  std::shared_ptr<Step> find_or_throw(uint64_t ticket) const;
  void forget(uint64_t ticket);
  void connect(Link& link, Peer peer);
  void send_request(size_t worker, const std::shared_ptr<Step>& step);
  std::shared_ptr<Step> new_step(uint32_t layer, uint16_t lane, uint32_t num_tokens);
  Waited wait_until(Step& step, wire::Deadline until, const std::function<bool()>& interrupted);
  bool sleep(const Step* step, wire::Deadline until);
  void take_sum(const Step& step, float* sum);
  void add_in_order(Step& step) const;
  void trace_step(const Step& step);
  void send_until(wire::Deadline until);
  void send_to(size_t worker);
  void begin_multicast(const std::shared_ptr<Step>& step);
  bool fits_multicast(const Step& step) const;
  bool send_multicast();
  wire::Deadline announce_late_steps();
  void answer_missing(size_t worker, uint64_t sequence, const uint8_t* payload, size_t bytes);
  void say_over(size_t worker, uint64_t sequence);
  void receive_from(size_t worker, const Step* until);
  Step* expected_from(size_t worker) const;
  uint8_t* body_room(Link& link, Step& step, size_t worker) const;
  size_t body_bytes(const Step& step) const;
  bool advance(size_t worker);
  void begin_body(size_t worker);
  void finish_body(Link& link, size_t worker);
  void lose(size_t worker, const std::string& reason);
  void check_open() const;
  void close_sockets();

  const ForkMark made_;
  mutable std::mutex mutex_;  // one call at a time
  const TransportConfig config_;
  std::vector<std::unique_ptr<Link>> links_;
  std::unique_ptr<MulticastSender> multicast_;
  std::deque<std::shared_ptr<Step>> unsent_multicast_;  // of which the first may be half sent
  std::vector<size_t> unreached_;
  std::vector<pollfd> entries_;                   // of sleep(); the last is the group's
  std::vector<std::shared_ptr<Step>> in_flight_;  // oldest first
  std::vector<std::shared_ptr<Step>> spare_;
  std::vector<uint32_t> last_compute_us_;
  StepTimes times_;
  HostTime host_time_;
  std::shared_ptr<StepTrace> trace_;
  std::vector<WorkerMoments> moments_;  // of trace_step()
  uint64_t last_sequence_ = 0;
  bool closed_ = false;
};

}  // namespace duck
