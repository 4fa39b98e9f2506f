// Persistent compute threads. The caller is thread 0; the others wait between steps, spinning for spin_us and
// then asleep on a futex.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace duck {

class ThreadPool {
 public:
  // num_threads counts the caller. spin_us = 0: waiting threads sleep at once (right when cores are short).
  ThreadPool(int num_threads, int spin_us);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Runs work(thread_index) on every thread and returns when all have finished. Not reentrant; one caller.
  void run(const std::function<void(int)>& work);

  // A barrier for use inside work(): returns when every thread of the pool has reached it.
  void barrier();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace duck
