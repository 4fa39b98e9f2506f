// The loops of bf16_rows.h for AVX2.
#include "wire/bf16_rows.h"

namespace duck::wire {

const Bf16Rows avx2::kBf16Rows = {encode_bf16_loop, decode_bf16_loop};

}  // namespace duck::wire
