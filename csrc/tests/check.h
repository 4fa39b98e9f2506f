// What the native tests need of a test framework: CHECK, and a report at the end.
#pragma once

#include <atomic>
#include <cstdio>

namespace duck::test {

inline std::atomic<int> num_failures{0};

inline void fail(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: not true: %s\n", file, line, what);
  ++num_failures;
}

// The exit status of main().
inline int report() {
  if (num_failures != 0) std::fprintf(stderr, "%d checks failed\n", num_failures.load());
  return num_failures == 0 ? 0 : 1;
}

}  // namespace duck::test

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition)) duck::test::fail(__FILE__, __LINE__, #condition); \
  } while (false)
