// Row-wise operations for AVX2, 8 numbers at a time.
#include "rowwise/lane_rows.h"

namespace duck::avx2 {

struct RowLanes {
  static constexpr int kLanes = 8;
  typedef float Floats __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  typedef float Halves __attribute__((vector_size(16)));
  typedef double Doubles __attribute__((vector_size(32)));
  static DUCK_INLINE Doubles widen(const Halves& values) { return __builtin_convertvector(values, Doubles); }
};

const RowKernels kRows = LaneRows<RowLanes>::table(Isa::kAvx2);

}  // namespace duck::avx2
