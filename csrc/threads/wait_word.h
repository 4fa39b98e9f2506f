// A 32-bit word that threads wait on: spin first, then sleep on a futex. Used by thread_pool.cpp alone.
//
// The writer stores and then looks at the count of sleepers; the waiter counts itself and then lets the
// kernel compare the word. Both sides are sequentially consistent, so one of them always sees the other and
// no wake-up is lost; a writer with no sleeper makes no system call.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace duck {

class alignas(64) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }

  void store(uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    wake_sleepers();
  }

  // Returns the value after the addition.
  uint32_t add(uint32_t amount) {
    const uint32_t after = value_.fetch_add(amount, std::memory_order_seq_cst) + amount;
    wake_sleepers();
    return after;
  }

  // The first value for which done(value) holds; waits for it.
  template <typename Done>
  uint32_t wait(int spin_us, Done done) {
    uint32_t value = load();
    if (done(value) || (spin_us > 0 && spin(spin_us, done, value))) return value;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (!done(value = value_.load(std::memory_order_seq_cst))) {
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr,
              0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return value;
  }

 private:
  template <typename Done>
  bool spin(int spin_us, Done done, uint32_t& value) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
    do {
      for (int i = 0; i < 32; ++i) {
        if (done(value = load())) return true;
        __builtin_ia32_pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  void wake_sleepers() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr,
            0);
  }

  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace duck
