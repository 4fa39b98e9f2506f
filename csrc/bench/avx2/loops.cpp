// AVX2 with FMA: 32-byte registers.
#include "bench/wide_loops.h"

namespace duck::bench::avx2 {

struct Wide {
  using Word = __m256i;
  using Floats = __m256;
  static constexpr size_t kBytes = 32;

  static DUCK_INLINE Word zero() { return _mm256_setzero_si256(); }
  static DUCK_INLINE Word load(const uint8_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static DUCK_INLINE void store(uint8_t* p, Word w) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), w); }
  static DUCK_INLINE void stream(uint8_t* p, Word w) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), w);
  }
  static DUCK_INLINE Word exclusive_or(Word a, Word b) { return _mm256_xor_si256(a, b); }
  static DUCK_INLINE Word broadcast_byte(uint8_t value) { return _mm256_set1_epi8(static_cast<char>(value)); }

  static DUCK_INLINE Floats broadcast(float a) { return _mm256_set1_ps(a); }
  static DUCK_INLINE Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
  static DUCK_INLINE void store_floats(float* p, Floats a) { _mm256_storeu_ps(p, a); }
  static DUCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
};

constinit const LoopTable kLoops = WideLoops<Wide>::table(Isa::kAvx2);

}  // namespace duck::bench::avx2
