// AVX-VNNI: VPDPBUSD on 256 bits, as CPUs without AVX-512 have it.
#include "kernels/integer_lanes_256.h"

namespace duck::avx_vnni {
namespace {

struct IntegerLanes : Lanes256 {
  template <Codes>
  struct Dot {
    static DUCK_INLINE Ints start(Ints offset) { return offset; }
    static DUCK_INLINE Ints add(Ints sum, Ints codes, Ints x) {
      return _mm256_dpbusd_avx_epi32(sum, codes, x);
    }
    static DUCK_INLINE Ints finish(Ints sum, Ints) { return sum; }
  };
};

}  // namespace

const IntegerTable kIntegerTable = IntegerKernels<IntegerLanes>::table("avx_vnni");

}  // namespace duck::avx_vnni
