// The functions of row_kernels.h written with the compiler's vector types.
// Lanes: a struct in an ISA's namespace that has them: kLanes f32 (Floats) and their bits (Words), half as
// many f32 (Halves) and f64 (Doubles), and how to widen. Included by <isa>/rows.cpp only. Every function here
// is a template over Lanes, so each copy is named after its ISA and the linker can never put an AVX2 copy
// where an older CPU runs.
//
// The rest of a row that fills no vector is computed in a vector too, beside zeros: a scalar twin of the same
// formula would be other code, and might round otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rowwise/row_kernels.h"

#ifndef DUCK_INLINE
#define DUCK_INLINE __attribute__((always_inline)) inline
#endif

namespace duck {

template <class Lanes>
struct LaneRows {
  static constexpr int kLanes = Lanes::kLanes;
  static constexpr int kHalf = kLanes / 2;
  static constexpr int kChains = 32;  // of a sum
  static constexpr int kSums = kChains / kHalf;

  using Floats = typename Lanes::Floats;
  using Words = typename Lanes::Words;
  using Halves = typename Lanes::Halves;
  using Doubles = typename Lanes::Doubles;

  static DUCK_INLINE Floats load(const float* from) {
    Floats values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
  }
  static DUCK_INLINE void store(float* to, const Floats& values) {
    __builtin_memcpy(to, &values, sizeof values);
  }
  static DUCK_INLINE Doubles widen(const float* from) {
    Halves values;
    __builtin_memcpy(&values, from, sizeof values);
    return Lanes::widen(values);
  }
  static void copy(const float* from, size_t count, float* to) {
    for (size_t i = 0; i < count; ++i) to[i] = from[i];
  }

  // y[i] = function(a vector of x0, x1, ...) for all i.
  template <class Function, class... Inputs>
  static DUCK_INLINE void map(size_t size, float* y, Function function, const Inputs*... x) {
    size_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(y + i, function(load(x + i)...));
    if (i == size) return;
    const auto rest = [&](const float* from) {
      float values[kLanes] = {};
      copy(from + i, size - i, values);
      return load(values);
    };
    float values[kLanes];
    store(values, function(rest(x)...));
    copy(values, size - i, y + i);
  }

  // The sum of term(double vector of x) over a row. term(0) may be other than 0: the rest is cut out of it.
  template <class Term>
  static DUCK_INLINE double sum(const float* x, size_t size, Term term) {
    Doubles sums[kSums] = {};
    size_t i = 0;
    for (; i + kChains <= size; i += kChains) {
#pragma GCC unroll 16
      for (int s = 0; s < kSums; ++s) sums[s] += term(widen(x + i + s * kHalf));
    }
    double chains[kChains];
    __builtin_memcpy(chains, sums, sizeof chains);
    if (i < size) {
      float rest[kChains] = {};
      copy(x + i, size - i, rest);
      double terms[kChains];
      for (int s = 0; s < kSums; ++s) {
        const Doubles of_rest = term(widen(rest + s * kHalf));
        __builtin_memcpy(terms + s * kHalf, &of_rest, sizeof of_rest);
      }
      for (size_t chain = 0; chain < size - i; ++chain) chains[chain] += terms[chain];
    }
    for (int half = kChains / 2; half > 0; half /= 2) {
      for (int chain = 0; chain < half; ++chain) chains[chain] += chains[chain + half];
    }
    return chains[0];
  }

  // e^t for -87 <= t <= 88: t = n ln 2 + r and the Taylor series of e^r to r^7. |r| <= 0.347, so what is left
  // out is under 0.1 ulp. NaN for NaN.
  static DUCK_INLINE Floats exp(const Floats& t) {
    constexpr float kRounder = 0x1.8p23f;  // added, it leaves a whole number in the lower bits
    const Floats shifted = t * 0x1.715476p+0f + kRounder;
    const Floats n = shifted - kRounder;
    const Floats r = (t - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts; the first is exact
    Floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Words exponents = (Words)shifted - 0x4b400000u + 127u;  // kRounder's bits
    return p * (Floats)(exponents << 23);
  }

  // 1 + e^-x, infinity below -88.
  static DUCK_INLINE Floats one_plus_exp_minus(const Floats& x) {
    const Floats t = -x;
    const Floats most = Floats{} + 88.0f, least = Floats{} - 87.0f;
    Floats within = t > most ? most : t;  // NaN stays NaN
    within = within < least ? least : within;
    const Floats infinity = Floats{} + __builtin_inff();
    return 1.0f + (t > most ? infinity : exp(within));
  }

  static void rms_norm(const float* x, const float* weight, size_t size, double eps, float* y) {
    const double squares = sum(x, size, [](const Doubles& values) { return values * values; });
    const double mean = squares / static_cast<double>(size);
    const auto factor = static_cast<float>(1.0 / __builtin_sqrt(mean + eps));
    map(size, y, [=](const Floats& a, const Floats& w) { return a * factor * w; }, x, weight);
  }

  static void layer_norm(const float* x, const float* weight, const float* bias, size_t size, double eps,
                         float* y) {
    const double mean =
        sum(x, size, [](const Doubles& values) { return values; }) / static_cast<double>(size);
    const double squares = sum(x, size, [=](const Doubles& values) {
      const Doubles off = values - mean;
      return off * off;
    });
    const double factor = 1.0 / __builtin_sqrt(squares / static_cast<double>(size) + eps);
    for (size_t i = 0; i < size; ++i) {
      const auto normal = static_cast<float>((static_cast<double>(x[i]) - mean) * factor);
      y[i] = normal * weight[i] + bias[i];
    }
  }

  static void silu_mul(const float* gate, const float* up, size_t size, float* y) {
    map(size, y, [](const Floats& g, const Floats& u) { return g / one_plus_exp_minus(g) * u; }, gate, up);
  }

  static void sigmoid(const float* x, size_t size, float* y) {
    map(size, y, [](const Floats& a) { return 1.0f / one_plus_exp_minus(a); }, x);
  }

  static void softmax(const float* x, size_t size, float* y) {
    float largest = x[0];
    for (size_t i = 1; i < size; ++i) largest = x[i] > largest ? x[i] : largest;
    map(
        size, y,
        [=](const Floats& a) {
          const Floats t = a - largest;
          const Floats least = Floats{} - 87.0f;
          return t < least ? Floats{} : exp(t < least ? least : t);
        },
        x);
    const auto total = static_cast<float>(sum(y, size, [](const Doubles& values) { return values; }));
    map(size, y, [=](const Floats& a) { return a / total; }, y);
  }

  static void scale(float* values, size_t size, float factor) {
    map(size, values, [=](const Floats& a) { return a * factor; }, values);
  }

  static constexpr RowKernels table(Isa isa) {
    return {isa, &rms_norm, &layer_norm, &silu_mul, &sigmoid, &softmax, &scale};
  }
};

}  // namespace duck
