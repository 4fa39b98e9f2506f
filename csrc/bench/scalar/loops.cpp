// Baseline x86-64: 16-byte registers (SSE2), and a multiplication and an addition where others have one FMA.
#include "bench/wide_loops.h"

namespace duck::bench::scalar {

struct Wide {
  using Word = __m128i;
  using Floats = __m128;
  static constexpr size_t kBytes = 16;

  static DUCK_INLINE Word zero() { return _mm_setzero_si128(); }
  static DUCK_INLINE Word load(const uint8_t* p) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  }
  static DUCK_INLINE void store(uint8_t* p, Word w) { _mm_store_si128(reinterpret_cast<__m128i*>(p), w); }
  static DUCK_INLINE void stream(uint8_t* p, Word w) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), w); }
  static DUCK_INLINE Word exclusive_or(Word a, Word b) { return _mm_xor_si128(a, b); }
  static DUCK_INLINE Word broadcast_byte(uint8_t value) { return _mm_set1_epi8(static_cast<char>(value)); }

  static DUCK_INLINE Floats broadcast(float a) { return _mm_set1_ps(a); }
  static DUCK_INLINE Floats load_floats(const float* p) { return _mm_loadu_ps(p); }
  static DUCK_INLINE void store_floats(float* p, Floats a) { _mm_storeu_ps(p, a); }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
};

constinit const LoopTable kLoops = WideLoops<Wide>::table(Isa::kScalar);

}  // namespace duck::bench::scalar
