// AVX512-VNNI: VPDPBUSD on the 16 lanes of a record at once; x is a broadcast operand in memory.
#include "kernels/integer_lanes_512.h"

namespace duck::avx512_vnni {
namespace {

struct IntegerLanes : Lanes512 {
  template <Codes>
  struct Dot {
    static DUCK_INLINE Ints start(Ints offset) { return offset; }
    static DUCK_INLINE Ints add(Ints sum, Ints codes, Ints x) { return _mm512_dpbusd_epi32(sum, codes, x); }
    static DUCK_INLINE Ints finish(Ints sum, Ints) { return sum; }
  };
};

}  // namespace

const IntegerTable kIntegerTable = IntegerKernels<IntegerLanes>::table("avx512_vnni");

}  // namespace duck::avx512_vnni
