// Keeps a thread on one core. Used by the thread pool and by whoever calls it.
#pragma once

#include <sched.h>

namespace duck {

// Keeps the calling thread on one core while it lives: woken threads are else often put on the waker's core,
// and two of them then share it while another is idle. Thread t gets the t-th core that the caller may use,
// counted round where there are fewer. Where the system refuses, the thread stays where it is.
class OnCore {
 public:
  explicit OnCore(int thread) {
    if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    int left = thread % CPU_COUNT(&before_);
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &before_) || left-- != 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(core, &one);
      moved_ = sched_setaffinity(0, sizeof one, &one) == 0;
      return;
    }
  }
  ~OnCore() {
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
  }
  OnCore(const OnCore&) = delete;
  OnCore& operator=(const OnCore&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

}  // namespace duck
