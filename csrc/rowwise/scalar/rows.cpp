// Row-wise operations for any x86-64 (SSE2), 4 numbers at a time.
#include "rowwise/lane_rows.h"

namespace duck::scalar {

struct RowLanes {
  static constexpr int kLanes = 4;
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef float Halves __attribute__((vector_size(8)));
  typedef double Doubles __attribute__((vector_size(16)));
  static DUCK_INLINE Doubles widen(const Halves& values) { return __builtin_convertvector(values, Doubles); }
};

const RowKernels kRows = LaneRows<RowLanes>::table(Isa::kScalar);

}  // namespace duck::scalar
