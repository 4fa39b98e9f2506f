// The loops of bf16_rows.h for AVX-512.
#include "wire/bf16_rows.h"

namespace duck::wire {

const Bf16Rows avx512::kBf16Rows = {encode_bf16_loop, decode_bf16_loop};

}  // namespace duck::wire
