#include "threads/fork_mark.h"

#include <pthread.h>

#include <atomic>
#include <new>

namespace duck {
namespace {

std::atomic<uint32_t> num_forks{0};  // that lead to this process

}  // namespace

ForkMark::ForkMark() : num_forks_(num_forks.load()) {
  static const int failed = pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1); });
  if (failed) throw std::bad_alloc();
}

bool ForkMark::is_forked() const { return num_forks.load() != num_forks_; }

}  // namespace duck
