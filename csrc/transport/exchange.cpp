#include "transport/exchange.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>

namespace duck {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr auto kSlice = milliseconds(50);      // between two questions whether there was a signal
constexpr auto kPause = microseconds(50);      // between two looks, once nothing has happened for spin_us
constexpr uint32_t kLooksBetweenClocks = 128;  // reading the clock takes as long as several looks

std::atomic_ref<uint32_t> word(uint32_t* at) { return std::atomic_ref<uint32_t>(*at); }

[[noreturn]] void fail(const std::string& field, uint64_t got, const std::string& expected) {
  throw std::invalid_argument(field + ": got " + std::to_string(got) + ", expected " + expected);
}

void check_range(const char* field, uint64_t got, uint64_t least, uint64_t most) {
  if (got < least || got > most) fail(field, got, std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

Exchange::Exchange(uint32_t* control, std::vector<LaneMemory> lanes, const ExchangeConfig& config,
                   std::shared_ptr<LaneServer> server)
    : control_(control), config_(config), server_(std::move(server)) {
  check_range("lanes", lanes.size(), 1, kMaxLanes);
  check_range("hidden_size", config.hidden_size, 1, UINT32_MAX);
  if (reinterpret_cast<uintptr_t>(control) % 64 != 0) {
    fail("control", reinterpret_cast<uintptr_t>(control) % 64, "an address that is a multiple of 64");
  }
  lanes_.resize(lanes.size());
  for (size_t lane = 0; lane < lanes.size(); ++lane) lanes_[lane].memory = lanes[lane];
  // Signals are for threads that can answer them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(&Exchange::run, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Exchange::~Exchange() {
  abort();
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Exchange::check(const Program& program) const {
  for (const ProgramStep& step : program) {
    check_range("step lane", step.lane, 0, lanes_.size() - 1);
    const LaneMemory& memory = lanes_[step.lane].memory;
    check_range("step rows", step.num_rows, 1, memory.max_tokens);
    check_range("step top_k", step.top_k, 1, memory.max_top_k);
    check_range("step flags", step.num_flags, 1, kLineWords);
  }
}

void Exchange::start(std::shared_ptr<const Program> program, const std::vector<uint32_t>& num_tokens) {
  check(*program);
  if (num_tokens.size() != lanes_.size()) {
    fail("num_tokens", num_tokens.size(), std::to_string(lanes_.size()) + " numbers, one a lane");
  }
  {
    const std::lock_guard lock(mutex_);
    if (is_under_way_) throw std::logic_error("exchange: got a program while another is under way");
    problem_ = nullptr;
    is_aborted_.store(false);
    program_ = std::move(program);
    num_left_ = program_->size();
    word(line(0)).store(epoch_, std::memory_order_relaxed);
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      word(line(0) + 1 + lane).store(num_tokens[lane], std::memory_order_relaxed);
      lanes_[lane].is_under_way = false;
      lanes_[lane].num_tokens = num_tokens[lane];
      find_next(lanes_[lane], lane, 0);
    }
    set_abort_words(0);
    is_under_way_ = true;
  }
  changed_.notify_all();
}

Exchange::Finished Exchange::finish(int64_t stall_ms, const std::function<bool()>& interrupted) {
  std::unique_lock lock(mutex_);
  uint64_t num_events = num_events_.load();
  auto stalled_at = Clock::now() + milliseconds(stall_ms);
  while (is_under_way_) {
    changed_.wait_until(lock, std::min(stalled_at, Clock::now() + kSlice));
    if (!is_under_way_) break;
    lock.unlock();
    if (interrupted && interrupted()) {
      abort();
      return Finished::kInterrupted;
    }
    lock.lock();
    const auto now = Clock::now();
    if (num_events_.load() != num_events) {
      num_events = num_events_.load();
      stalled_at = now + milliseconds(stall_ms);
    }
    if (is_under_way_ && now >= stalled_at) return Finished::kStalled;
  }
  if (problem_) std::rethrow_exception(problem_);
  return Finished::kComplete;
}

void Exchange::abort() {
  std::unique_lock lock(mutex_);
  if (!is_under_way_) return;
  is_aborted_.store(true);
  set_abort_words(kAbortedByHost);
  changed_.wait(lock, [this] { return !is_under_way_; });
}

void Exchange::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_under_way_ || is_closed_; });
    if (!is_under_way_) return;
    lock.unlock();
    std::exception_ptr problem;
    try {
      serve();
    } catch (...) {
      problem = std::current_exception();
      set_abort_words(kAbortedByHost);
      server_->give_up();
    }
    lock.lock();
    epoch_ += static_cast<uint32_t>(program_->size());
    problem_ = problem;
    is_under_way_ = false;
    changed_.notify_all();
  }
}

// The program, to its end.
void Exchange::serve() {
  auto quiet_since = Clock::now();
  for (uint32_t looks = 0; num_left_ > 0; ++looks) {
    bool progress = false;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) progress |= advance(lane);
    check_aborted();
    if (progress) {
      looks = 0;
      num_events_.fetch_add(1, std::memory_order_relaxed);
      quiet_since = Clock::now();
      continue;
    }
    __builtin_ia32_pause();
    if (looks < kLooksBetweenClocks) continue;
    const auto quiet = Clock::now() - quiet_since;
    if (quiet >= microseconds(config_.spin_us)) {
      std::this_thread::sleep_for(kPause);
    } else {
      looks = 0;
    }
    const bool is_waiting_for_gpu =
        std::none_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.is_under_way; });
    if (is_waiting_for_gpu && quiet >= milliseconds(config_.gpu_timeout_ms)) {
      throw std::runtime_error("the GPU published no step within " + std::to_string(config_.gpu_timeout_ms) +
                               " ms");
    }
  }
  check_aborted();
}

// Moves a lane on where it can be; whether it did.
bool Exchange::advance(size_t index) {
  Lane& lane = lanes_[index];
  if (lane.is_under_way) {
    if (!server_->poll(lane.step)) return false;
    answer(index);
    return true;
  }
  if (lane.next == program_->size() || !is_published(lane, index)) return false;
  const ProgramStep& step = (*program_)[lane.next];
  const uint32_t num_tokens = std::min(step.num_rows, lane.num_tokens);
  if (num_tokens == 0) {
    answer(index);
    return true;
  }
  const LaneMemory& memory = lane.memory;
  lane.step = {step.layer, step.lane,       num_tokens,          step.top_k, config_.hidden_size,
               memory.x,   memory.topk_ids, memory.topk_weights, memory.y};
  server_->begin(lane.step);
  lane.is_under_way = true;
  return true;
}

bool Exchange::is_published(const Lane& lane, size_t index) const {
  const uint32_t number = epoch_ + static_cast<uint32_t>(lane.next) + 1;
  const uint32_t num_flags = (*program_)[lane.next].num_flags;
  for (uint32_t flag = 0; flag < num_flags; ++flag) {
    if (word(requests(index) + flag).load(std::memory_order_acquire) != number) return false;
  }
  return true;
}

void Exchange::answer(size_t index) {
  Lane& lane = lanes_[index];
  const uint32_t number = epoch_ + static_cast<uint32_t>(lane.next) + 1;
  for (size_t copy = kReplyLines; copy-- > 1;) {
    word(reply(index, copy)).store(number, std::memory_order_release);
  }
  // Before any later look at the abort words, which a GPU that gives up sets before it looks here again.
  word(reply(index, 0)).store(number, std::memory_order_seq_cst);
  lane.is_under_way = false;
  find_next(lane, index, lane.next + 1);
  --num_left_;
  num_answered_.fetch_add(1, std::memory_order_relaxed);
}

void Exchange::find_next(Lane& lane, size_t index, size_t from) const {
  lane.next = from;
  while (lane.next < program_->size() && (*program_)[lane.next].lane != index) ++lane.next;
}

void Exchange::set_abort_words(uint32_t value) {
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    for (size_t copy = 0; copy < kReplyLines; ++copy) word(reply(lane, copy) + 1).store(value);
  }
}

void Exchange::check_aborted() const {
  if (is_aborted_.load(std::memory_order_relaxed)) throw std::runtime_error("the program was aborted");
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (word(reply(lane, 0) + 1).load(std::memory_order_seq_cst) != kTimedOutOnGpu) continue;
    throw std::runtime_error("the GPU waited too long for the answer to a step");
  }
}

}  // namespace duck
