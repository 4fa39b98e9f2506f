// The kernels of avx_vnni with AVX-512's VPDPBUSD on 256 bits: the same operation in another encoding, so
// that they can be tested where a CPU has AVX512-VNNI only.
#include "kernels/integer_lanes_256.h"

namespace duck::avx512_vnni {
namespace {

struct IntegerLanes256 : Lanes256 {
  template <Codes>
  struct Dot {
    static DUCK_INLINE Ints start(Ints offset) { return offset; }
    static DUCK_INLINE Ints add(Ints sum, Ints codes, Ints x) { return _mm256_dpbusd_epi32(sum, codes, x); }
    static DUCK_INLINE Ints finish(Ints sum, Ints) { return sum; }
  };
};

}  // namespace

const IntegerTable kIntegerTable256 = IntegerKernels<IntegerLanes256>::table("avx512_vnni_256");

}  // namespace duck::avx512_vnni
