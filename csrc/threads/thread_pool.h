// Persistent compute threads. The caller is thread 0; the others wait between steps, spinning for spin_us and
// then asleep on a futex. Used by kernels/experts.cpp; knows nothing of what it runs.
//
// The pool is in one of two explicit phases. ACTIVE number n: step n is published and every thread takes it
// exactly once. IDLE: every thread has finished the last step. The caller closes the active phase only when
// all have finished, and a thread takes only an active phase that it has not taken, so one that arrives late,
// at either end of a phase, can neither miss a step nor take one twice.
#pragma once

#include <functional>
#include <memory>

namespace duck {

class ThreadPool {
  struct Impl;

 public:
  // num_threads counts the caller, 1 to 1024. spin_us = 0: waiting threads sleep at once (right when cores
  // are short). pin_threads: thread t stays on the t-th core that the caller may use; the caller itself,
  // thread 0, is for the caller to keep (OnCore). Throws std::invalid_argument, or std::system_error when the
  // system gives no more threads.
  ThreadPool(int num_threads, int spin_us, bool pin_threads = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Runs work(thread_index) on every thread and returns when all have finished. One caller at a time and not
  // from inside work (std::logic_error). An exception thrown in work is thrown here once all threads have
  // finished, the one of the lowest thread index where there are several; the pool stays usable.
  void run(const std::function<void(int)>& work);

  // Holds the pool for one caller, which sets up what its work reads in between: another one, who would
  // overwrite that, is refused at once (std::logic_error, which names `who`). So is a process that was forked
  // after the pool was made, as none of its threads went along.
  class Claim {
   public:
    Claim(ThreadPool& pool, const char* who);
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    // As ThreadPool::run.
    void run(const std::function<void(int)>& work);

   private:
    Impl& pool_;
  };

  // A barrier for use inside work(): returns when every thread of the pool has reached it. When a thread
  // leaves work by an exception, the others are released from the barrier and leave work too.
  void barrier();

  // For tests: a function that every thread of every pool calls at the places where a delay could do harm.
  enum class DelayPoint {
    kBeforeTakingStep,
    kBeforeFinishing,
    kAfterFinishing,
    kBeforeBarrier,
    kAfterBarrier
  };
  using DelayHook = void (*)(DelayPoint point);
  static void set_delay_hook(DelayHook hook);  // nullptr: none

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace duck
