// Which loops of bf16_rows.h an ISA has, and those without one.
#include "wire/bf16_rows.h"

namespace duck::wire {

const Bf16Rows& bf16_rows(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return avx2::kBf16Rows;
    case Isa::kAvx512:
      return avx512::kBf16Rows;
    case Isa::kScalar:
      break;
  }
  return scalar::kBf16Rows;
}

const Bf16Rows scalar::kBf16Rows = {encode_bf16_loop, decode_bf16_loop};

}  // namespace duck::wire
