// What a GPU and the host's CPU hand to each other while a captured graph runs: for each MoE layer the GPU
// publishes activations, experts and weights in memory that both see, a thread of ours has the step computed,
// and the GPU takes the sum. Called by duckllm/transport/exchange.py through bind_exchange.cpp; the GPU's
// side is duckllm/kernels/exchange.py. Knows neither CUDA nor models: a test plays the GPU with threads.
//
// Flags. Control memory is lines of kLineWords words: line 0 is what the host tells the GPU before a replay
// (the epoch, then the tokens of each lane); then comes a line of requests for each lane, with one word for
// each program of the publishing kernel; then kReplyLines lines of the reply for each lane, all alike, whose
// second word says that all is aborted. (Reads of one line by several programs of a GPU take turns: 1.3 us
// each on an H200 in November 2026, so each has a line of its own.) Step i of a program has the number epoch
// + i + 1. A lane's request is there when all words that the step has are that number, and so is the reply.
// Epochs go up by a program's length, so a number comes again only after 2^32 steps, and what an aborted run
// left, or writes late, is never taken for the next one's.
//
// Order. Who publishes writes the data and then the flag (release, system scope), who waits reads the flag
// (acquire) and then the data. Each lane has at most one step under way; lanes are served independently.
//
// Failure. Whatever goes wrong sets the abort word of every lane, so that each wait of the graph, and every
// later one, ends at once; the graph then runs to its end on zeros. A GPU that has waited longer than it was
// told to sets these words itself, and then looks at the reply once more; the host, once it has replied,
// looks at the words. So either it has the reply, or the run fails.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "transport/lane_server.h"

namespace duck {

// One step of a captured graph, as it was published.
struct ProgramStep {
  uint32_t layer = 0;
  uint16_t lane = 0;
  uint32_t num_rows = 0;   // that the graph has; the first ones are tokens, the others padding
  uint32_t top_k = 0;      // K
  uint32_t num_flags = 0;  // programs of the kernel that published it
};

// Where a lane's steps are put. All of it stays longer than the exchange.
struct LaneMemory {
  uint32_t max_tokens = 0;
  uint32_t max_top_k = 0;
  const float* x = nullptr;             // [max_tokens, H]
  const int32_t* topk_ids = nullptr;    // max_tokens * max_top_k, of which a step has the first T * K
  const float* topk_weights = nullptr;  // likewise
  float* y = nullptr;                   // [max_tokens, H]
};

struct ExchangeConfig {
  uint32_t hidden_size = 0;
  int spin_us = 10'000;             // without anything happening, until the thread sleeps between looks
  int64_t gpu_timeout_ms = 30'000;  // how long nothing may be published while nothing is under way
};

class Exchange {
 public:
  static constexpr size_t kLineWords = 32;  // two cache lines: CPUs fetch them in pairs
  static constexpr size_t kReplyLines = 16;
  static constexpr size_t kMaxLanes = kLineWords - 1;
  // What an abort word says: why waits of the GPU end. 0: they do not.
  static constexpr uint32_t kAbortedByHost = 1;
  static constexpr uint32_t kTimedOutOnGpu = 2;

  using Program = std::vector<ProgramStep>;
  enum class Finished : uint8_t { kComplete, kStalled, kInterrupted };

  static constexpr size_t num_lines(size_t lanes) { return 1 + (1 + kReplyLines) * lanes; }

  // control has num_lines(lanes) lines, 64-byte aligned. Throws std::invalid_argument for sizes that make no
  // sense.
  Exchange(uint32_t* control, std::vector<LaneMemory> lanes, const ExchangeConfig& config,
           std::shared_ptr<LaneServer> server);
  ~Exchange();  // aborts what is under way
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Begins to serve a program; the graph may be replayed from now on, and none may be running yet.
  // num_tokens: of each lane; what a step has more rows than that is padding. Throws std::invalid_argument
  // for a step that the lanes have no room for, std::logic_error while a program is under way.
  void start(std::shared_ptr<const Program> program, const std::vector<uint32_t>& num_tokens);

  // Waits until the last step is answered: kComplete. Throws what went wrong: TransportError,
  // std::runtime_error where the GPU does not go on, or what the server threw. kStalled: no step was
  // published or answered for stall_ms; the program goes on. `interrupted` is asked now and then: true aborts
  // it, kInterrupted.
  Finished finish(int64_t stall_ms, const std::function<bool()>& interrupted = nullptr);

  // Ends the program under way, if there is one, and frees the GPU. The server has given it up on return.
  void abort();

  // Who keeps the program from going on, as far as known.
  std::vector<size_t> late() const { return server_->late(); }

  uint64_t num_answered() const { return num_answered_.load(std::memory_order_relaxed); }

 private:
  struct Lane {
    LaneMemory memory;
    uint32_t num_tokens = 0;
    size_t next = 0;  // step of the program, or its length
    bool is_under_way = false;
    LaneStep step;
  };

  uint32_t* line(size_t index) const { return control_ + index * kLineWords; }
  uint32_t* requests(size_t lane) const { return line(1 + lane); }
  uint32_t* reply(size_t lane, size_t copy) const {
    return line(1 + lanes_.size() + lane * kReplyLines + copy);
  }
  void check(const Program& program) const;
  void run();
  void serve();
  bool advance(size_t lane);
  bool is_published(const Lane& lane, size_t index) const;
  void answer(size_t lane);
  void find_next(Lane& lane, size_t index, size_t from) const;
  void set_abort_words(uint32_t value);
  void check_aborted() const;

  uint32_t* const control_;
  const ExchangeConfig config_;
  const std::shared_ptr<LaneServer> server_;
  std::vector<Lane> lanes_;                 // of the thread, while a program is under way
  std::shared_ptr<const Program> program_;  // likewise
  uint32_t epoch_ = 0;
  size_t num_left_ = 0;

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool is_under_way_ = false;
  bool is_closed_ = false;
  std::exception_ptr problem_;

  std::atomic<bool> is_aborted_{false};
  std::atomic<uint64_t> num_events_{0};
  std::atomic<uint64_t> num_answered_{0};
  std::thread thread_;  // last, so that all it uses is there
};

}  // namespace duck
