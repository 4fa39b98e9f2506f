// The thread pool: each thread takes each step exactly once, whatever the delays; barriers; exceptions;
// sleep.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "threads/on_core.h"
#include "threads/thread_pool.h"

using duck::ThreadPool;

namespace {

// Delays one call in four by up to 200 us, each thread with its own random numbers.
void random_delay(ThreadPool::DelayPoint) {
  static std::atomic<uint32_t> seed{1};
  thread_local std::minstd_rand random(seed.fetch_add(7919));
  if (random() % 4 == 0) usleep(random() % 200);
}

// Delays one of the points on every call.
template <ThreadPool::DelayPoint kPoint>
void delay_at(ThreadPool::DelayPoint point) {
  if (point == kPoint) usleep(300);
}

// Each thread must see step 0, 1, 2, ... once each. All data but the pool's own are plain, so that
// ThreadSanitizer sees an ordering that the pool fails to give.
void check_steps(int num_threads, int spin_us, int num_steps) {
  ThreadPool pool(num_threads, spin_us);
  CHECK(pool.num_threads() == num_threads);
  int published = -1;
  struct alignas(64) Taken {
    int last = -1, count = 0;
  };
  std::vector<Taken> taken(num_threads);
  for (int step = 0; step < num_steps; ++step) {
    published = step;
    pool.run([&](int thread) {
      CHECK(taken[thread].last == published - 1);
      taken[thread].last = published;
      ++taken[thread].count;
    });
    for (int thread = 0; thread < num_threads; ++thread) CHECK(taken[thread].count == step + 1);
  }
}

// What every thread writes before a barrier, every thread reads after it; three times a step, the last write
// racing with nothing only if the barriers hold.
void check_barriers(int num_threads, int spin_us, int num_steps) {
  ThreadPool pool(num_threads, spin_us);
  std::vector<int64_t> values(num_threads);
  for (int step = 0; step < num_steps; ++step) {
    pool.run([&](int thread) {
      for (int round = 0; round < 3; ++round) {
        values[thread] = static_cast<int64_t>(step) * 10 + round + thread;
        pool.barrier();
        int64_t sum = 0;
        for (int64_t value : values) sum += value;
        const int64_t n = num_threads;
        CHECK(sum == n * (static_cast<int64_t>(step) * 10 + round) + n * (n - 1) / 2);
        pool.barrier();
      }
    });
  }
}

void test_with_delays() {
  using Point = ThreadPool::DelayPoint;
  const ThreadPool::DelayHook hooks[] = {nullptr,
                                         &random_delay,
                                         &delay_at<Point::kBeforeTakingStep>,
                                         &delay_at<Point::kBeforeFinishing>,
                                         &delay_at<Point::kAfterFinishing>,
                                         &delay_at<Point::kBeforeBarrier>,
                                         &delay_at<Point::kAfterBarrier>};
  for (auto hook : hooks) {
    ThreadPool::set_delay_hook(hook);
    for (int num_threads : {1, 2, 3, 8}) {
      for (int spin_us : {0, 20, 2000}) {
        check_steps(num_threads, spin_us, 30);
        check_barriers(num_threads, spin_us, 8);
      }
    }
  }
  ThreadPool::set_delay_hook(nullptr);
}

void test_more_threads_than_cores() {
  check_steps(64, 0, 50);
  check_barriers(64, 0, 20);
  check_steps(32, 50, 20);
}

std::atomic<bool> hold{false};

void wait_while_held(int) {
  while (hold.load()) usleep(100);
}

// One thread at a time, the caller among them, is stopped wherever it is and resumed later.
void test_paused_threads() {
  struct sigaction action{};
  action.sa_handler = &wait_while_held;
  CHECK(sigaction(SIGUSR1, &action, nullptr) == 0);
  constexpr int kThreads = 4;
  for (int spin_us : {0, 20, 2000}) {
    ThreadPool pool(kThreads, spin_us);
    std::vector<pthread_t> threads(kThreads);
    pool.run([&](int thread) { threads[thread] = pthread_self(); });
    std::atomic<bool> finished{false};
    std::thread stopper([&] {
      std::minstd_rand random(5);
      while (!finished.load()) {
        hold = true;
        CHECK(pthread_kill(threads[random() % kThreads], SIGUSR1) == 0);
        usleep(random() % 2000);
        hold = false;
        usleep(random() % 300);
      }
    });
    std::vector<int64_t> taken(kThreads), seen(kThreads);
    constexpr int kSteps = 60;
    for (int step = 0; step < kSteps; ++step) {
      pool.run([&](int thread) {
        ++taken[thread];
        pool.barrier();
        for (int64_t count : taken) seen[thread] += count == step + 1;
      });
    }
    finished = true;
    stopper.join();
    for (int thread = 0; thread < kThreads; ++thread) {
      CHECK(taken[thread] == kSteps);
      CHECK(seen[thread] == kSteps * kThreads);
    }
  }
}

// The cores that the calling thread may use.
std::vector<int> allowed_cores() {
  cpu_set_t set;
  CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

void test_pinned_threads() {
  const std::vector<int> all = allowed_cores();
  const int num_threads = static_cast<int>(all.size()) + 2;
  ThreadPool pinned(num_threads, 0, true);
  ThreadPool free(num_threads, 0);
  std::vector<std::vector<int>> of_pinned(num_threads), of_free(num_threads);
  pinned.run([&](int thread) { of_pinned[thread] = allowed_cores(); });
  free.run([&](int thread) { of_free[thread] = allowed_cores(); });
  for (int thread = 0; thread < num_threads; ++thread) {
    const std::vector<int> own{all[thread % all.size()]};
    CHECK(of_pinned[thread] == (thread == 0 ? all : own));
    CHECK(of_free[thread] == all);
  }
  {
    const duck::OnCore on_core(static_cast<int>(all.size()) + 1);
    CHECK(allowed_cores() == std::vector<int>{all[1 % all.size()]});
  }
  CHECK(allowed_cores() == all);
}

std::string message_of(ThreadPool& pool, const std::function<void(int)>& work) {
  try {
    pool.run(work);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

void check_exceptions(int spin_us) {
  ThreadPool pool(4, spin_us);
  for (int thrower = 0; thrower < 4; ++thrower) {
    const auto throw_in = [thrower](int thread) {
      if (thread == thrower) throw std::runtime_error("thread " + std::to_string(thread));
    };
    const std::string expected = "thread " + std::to_string(thrower);
    CHECK(message_of(pool, throw_in) == expected);
    // The others wait at a barrier that the thrower never reaches.
    std::atomic<int> passed{0};
    CHECK(message_of(pool, [&](int thread) {
            throw_in(thread);
            pool.barrier();
            ++passed;
          }) == expected);
    CHECK(passed == 0);
    // The thrower leaves between two barriers.
    CHECK(message_of(pool, [&](int thread) {
            pool.barrier();
            throw_in(thread);
            pool.barrier();
            ++passed;
          }) == expected);
    CHECK(passed == 0);
    CHECK(message_of(pool, [](int thread) {
            throw std::runtime_error("thread " + std::to_string(thread));
          }) == "thread 0");
    // And the pool is as good as new.
    std::atomic<int> ran{0};
    CHECK(message_of(pool, [&](int) {
            pool.barrier();
            ++ran;
          }) == "none");
    CHECK(ran == 4);
  }
}

void test_exceptions() {
  for (auto hook : {static_cast<ThreadPool::DelayHook>(nullptr), &random_delay}) {
    ThreadPool::set_delay_hook(hook);
    for (int repeat = 0; repeat < 20; ++repeat) {
      check_exceptions(0);
      check_exceptions(100);
    }
  }
  ThreadPool::set_delay_hook(nullptr);
}

void test_run_inside_run_is_refused() {
  ThreadPool pool(2, 0);
  const std::string message = message_of(pool, [&](int thread) {
    if (thread == 0) pool.run([](int) {});
  });
  CHECK(message.find("one caller at a time") != std::string::npos);
  CHECK(message_of(pool, [](int) {}) == "none");
}

// None of the pool's threads is there: it is refused and let go of, neither of which may wait for them.
void test_a_forked_process_is_refused() {
  auto pool = std::make_unique<ThreadPool>(2, 0);
  ThreadPool alone(1, 0);
  pool->run([](int) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const bool refused = message_of(*pool, [](int) {}).find("forked") != std::string::npos;
    const bool runs_alone = message_of(alone, [](int) {}) == "none";
    pool.reset();
    _exit(refused && runs_alone ? 0 : 1);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(message_of(*pool, [](int) {}) == "none");
}

void test_arguments() {
  for (int num_threads : {0, -1, 1025}) {
    bool refused = false;
    try {
      ThreadPool pool(num_threads, 0);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void test_pools_come_and_go() {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 5, i % 3 * 30);
    if (i % 2 == 0) pool.run([](int) {});
  }
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Idle threads sleep once their spin is over: they use no CPU time, however long the pool is idle.
void test_idle_threads_sleep() {
  for (int spin_us : {0, 1000}) {
    ThreadPool pool(4, spin_us);
    pool.run([](int) {});
    usleep(100'000);
    const double before = cpu_seconds();
    usleep(300'000);
    CHECK(cpu_seconds() - before < 0.006);  // 2 % of one core
  }
}

}  // namespace

int main() {
  test_with_delays();
  test_more_threads_than_cores();
  test_paused_threads();
  test_pinned_threads();
  test_exceptions();
  test_run_inside_run_is_refused();
  test_a_forked_process_is_refused();
  test_arguments();
  test_pools_come_and_go();
  test_idle_threads_sleep();
  return duck::test::report();
}
