// Which table of row_kernels.h an ISA has.
#include "rowwise/row_kernels.h"

namespace duck {

const RowKernels& row_kernels(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return avx2::kRows;
    case Isa::kAvx512:
      return avx512::kRows;
    case Isa::kScalar:
      break;
  }
  return scalar::kRows;
}

}  // namespace duck
