// AVX2: VPMADDUBSW multiplies bytes and adds two products in 16 bits, with saturation. Codes of 4 bits stay
// far below that; int8 is multiplied by magnitude, 2 * 127 * 127 at most.
#include "kernels/integer_lanes_256.h"

namespace duck::avx2 {
namespace {

struct IntegerLanes : Lanes256 {
  static DUCK_INLINE Ints add_pairs(Ints words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

  template <Codes kCodes>
  struct Dot {
    static DUCK_INLINE Ints start(Ints offset) {
      return kCodes == Codes::kTable ? offset : _mm256_setzero_si256();
    }
    static DUCK_INLINE Ints add(Ints sum, Ints codes, Ints x) {
      if constexpr (kCodes == Codes::kSmall) {  // 8 words of 2 * 15 * 127 fit in 16 bits
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
      } else if constexpr (kCodes == Codes::kTable) {
        return _mm256_add_epi32(sum, add_pairs(_mm256_maddubs_epi16(codes, x)));
      } else {
        const Ints values = _mm256_xor_si256(codes, _mm256_set1_epi8(INT8_MIN));
        const Ints products = _mm256_maddubs_epi16(_mm256_abs_epi8(values), _mm256_sign_epi8(x, values));
        return _mm256_add_epi32(sum, add_pairs(products));
      }
    }
    static DUCK_INLINE Ints finish(Ints sum, Ints offset) {
      return kCodes == Codes::kSmall ? _mm256_add_epi32(add_pairs(sum), offset) : sum;
    }
  };
};

}  // namespace

const IntegerTable kIntegerTable = IntegerKernels<IntegerLanes>::table("avx2");

}  // namespace duck::avx2
