// AVX-512: 64-byte registers, a cache line each.
#include "bench/wide_loops.h"

namespace duck::bench::avx512 {

struct Wide {
  using Word = __m512i;
  using Floats = __m512;
  static constexpr size_t kBytes = 64;

  static DUCK_INLINE Word zero() { return _mm512_setzero_si512(); }
  static DUCK_INLINE Word load(const uint8_t* p) { return _mm512_load_si512(p); }
  static DUCK_INLINE void store(uint8_t* p, Word w) { _mm512_store_si512(p, w); }
  static DUCK_INLINE void stream(uint8_t* p, Word w) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), w);
  }
  static DUCK_INLINE Word exclusive_or(Word a, Word b) { return _mm512_xor_si512(a, b); }
  static DUCK_INLINE Word broadcast_byte(uint8_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }

  static DUCK_INLINE Floats broadcast(float a) { return _mm512_set1_ps(a); }
  static DUCK_INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
  static DUCK_INLINE void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a); }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
};

constinit const LoopTable kLoops = WideLoops<Wide>::table(Isa::kAvx512);

}  // namespace duck::bench::avx512
