// Row-wise operations for AVX-512, 16 numbers at a time.
#include "rowwise/lane_rows.h"

namespace duck::avx512 {

struct RowLanes {
  static constexpr int kLanes = 16;
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Words __attribute__((vector_size(64)));
  typedef float Halves __attribute__((vector_size(32)));
  typedef double Doubles __attribute__((vector_size(64)));
  static DUCK_INLINE Doubles widen(const Halves& values) { return __builtin_convertvector(values, Doubles); }
};

const RowKernels kRows = LaneRows<RowLanes>::table(Isa::kAvx512);

}  // namespace duck::avx512
