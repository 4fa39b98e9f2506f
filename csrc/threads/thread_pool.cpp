// ThreadPool: see thread_pool.h for the phases.
#include "threads/thread_pool.h"

#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "threads/fork_mark.h"
#include "threads/on_core.h"
#include "threads/wait_word.h"

namespace duck {
namespace {

constexpr int kMaxThreads = 1024;

std::atomic<ThreadPool::DelayHook> delay_hook{nullptr};

void maybe_delay(ThreadPool::DelayPoint point) {
  if (auto hook = delay_hook.load(std::memory_order_relaxed)) hook(point);
}

// Leaves work() in the threads that wait at a barrier which another thread will never reach.
struct BarrierBroken {};

bool is_active(uint32_t phase) { return phase % 2 == 1; }

}  // namespace

struct ThreadPool::Impl {
  Impl(int threads, int spin) : num_threads(threads), spin_us(spin), errors(threads) {}

  const int num_threads;
  const int spin_us;
  const ForkMark made;
  std::vector<std::exception_ptr> errors;  // by thread; written in an active phase, read in the idle one
  std::vector<std::thread> threads;
  const std::function<void(int)>* work = nullptr;
  bool stopping = false;  // like `work`, published by the phase

  WaitWord phase;          // even: idle, odd: active; steps by one at each change
  WaitWord running;        // pool threads that have not finished the active phase
  WaitWord barrier_round;  // completed barriers
  std::atomic<int> barrier_arrived{0};
  std::atomic<bool> barrier_broken{false};
  std::atomic<bool> in_run{false};

  void take_step(int index) {
    try {
      (*work)(index);
    } catch (const BarrierBroken&) {
      // The thread that broke it has kept the reason.
    } catch (...) {
      errors[index] = std::current_exception();
      barrier_broken.store(true, std::memory_order_seq_cst);
      barrier_round.add(1);
    }
  }

  void thread_main(int index) {
    uint32_t taken = 0;
    for (;;) {
      maybe_delay(DelayPoint::kBeforeTakingStep);
      taken = phase.wait(spin_us, [taken](uint32_t now) { return is_active(now) && now != taken; });
      if (stopping) return;
      take_step(index);
      maybe_delay(DelayPoint::kBeforeFinishing);
      running.add(UINT32_MAX);
      maybe_delay(DelayPoint::kAfterFinishing);
    }
  }

  void open_phase() {
    running.store(static_cast<uint32_t>(threads.size()));
    phase.add(1);
  }

  bool has_lost_threads() const { return !threads.empty() && made.is_forked(); }

  void stop() {
    stopping = true;
    open_phase();
    for (auto& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int num_threads, int spin_us, bool pin_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads: got " + std::to_string(num_threads) + ", expected 1 to " +
                                std::to_string(kMaxThreads));
  }
  if (spin_us < 0) {
    throw std::invalid_argument("spin_us: got " + std::to_string(spin_us) + ", expected 0 or more");
  }
  impl_ = std::make_unique<Impl>(num_threads, spin_us);
  impl_->threads.reserve(num_threads - 1);
  try {
    for (int index = 1; index < num_threads; ++index) {
      impl_->threads.emplace_back([impl = impl_.get(), index, pin_threads] {
        std::optional<OnCore> on_core;
        if (pin_threads) on_core.emplace(index);
        impl->thread_main(index);
      });
    }
  } catch (...) {
    impl_->stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  // In a forked process there is nobody to join, and the system may have given the threads' memory away.
  if (impl_->has_lost_threads()) {
    static_cast<void>(impl_.release());
  } else {
    impl_->stop();
  }
}

int ThreadPool::num_threads() const { return impl_->num_threads; }

void ThreadPool::run(const std::function<void(int)>& work) { Claim(*this, "ThreadPool.run").run(work); }

ThreadPool::Claim::Claim(ThreadPool& pool, const char* who) : pool_(*pool.impl_) {
  if (pool_.has_lost_threads()) {
    throw std::logic_error(std::string(who) +
                           ": called in a process that was forked after its threads were started, expected "
                           "one that starts its own (multiprocessing: spawn)");
  }
  if (pool_.in_run.exchange(true, std::memory_order_acquire)) {
    throw std::logic_error(std::string(who) +
                           ": called while another run is in progress, expected one caller at a time");
  }
}

ThreadPool::Claim::~Claim() { pool_.in_run.store(false, std::memory_order_release); }

void ThreadPool::Claim::run(const std::function<void(int)>& work) {
  Impl& pool = pool_;
  pool.work = &work;
  pool.barrier_arrived.store(0, std::memory_order_relaxed);
  pool.barrier_broken.store(false, std::memory_order_relaxed);
  pool.open_phase();
  pool.take_step(0);
  pool.running.wait(pool.spin_us, [](uint32_t count) { return count == 0; });
  pool.phase.add(1);  // idle
  pool.work = nullptr;
  std::exception_ptr first;
  for (auto& error : pool.errors) {
    if (!first) first = error;
    error = nullptr;
  }
  if (first) std::rethrow_exception(first);
}

void ThreadPool::barrier() {
  Impl& pool = *impl_;
  maybe_delay(DelayPoint::kBeforeBarrier);
  // The round is read before arriving: it cannot end without this thread. It is read before `broken` too,
  // since a thread that breaks the barrier sets `broken` first and then ends the round.
  const uint32_t round = pool.barrier_round.load();
  if (pool.barrier_broken.load(std::memory_order_seq_cst)) throw BarrierBroken{};
  if (pool.barrier_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == pool.num_threads) {
    pool.barrier_arrived.store(0, std::memory_order_relaxed);
    pool.barrier_round.add(1);
  } else {
    pool.barrier_round.wait(pool.spin_us, [round](uint32_t now) { return now != round; });
  }
  if (pool.barrier_broken.load(std::memory_order_seq_cst)) throw BarrierBroken{};
  maybe_delay(DelayPoint::kAfterBarrier);
}

void ThreadPool::set_delay_hook(DelayHook hook) { delay_hook.store(hook, std::memory_order_relaxed); }

}  // namespace duck
