// Denormal numbers on while a kernel runs. Used by experts.cpp and linear.cpp, on every thread of theirs.
#pragma once

#include <xmmintrin.h>

namespace duck {

// Denormals as IEEE 754 has them, until the end of the scope.
class DenormalsOn {
 public:
  DenormalsOn() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushAndZero); }
  ~DenormalsOn() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushAndZero = 0x8040;
  const unsigned saved_;
};

}  // namespace duck
