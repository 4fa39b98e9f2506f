// The kernels of attention_table.h for an ISA that is described by `Lanes`: a struct in that ISA's namespace
// with the type Floats (kLanes f32 in one register) and the functions used below. Included by
// <isa>/attention.cpp only. Every function here is a template over Lanes, so that each copy is named after
// its ISA.
//
// All products have one shape: a block of queries, each number of which is broadcast, times rows of numbers
// side by side. For scores the lanes are keys, so that no sum goes across lanes; for values they are
// dimensions, and rows are read where the cache has them.
#pragma once

#include <cstring>

#include "attention/attention_table.h"
#include "kernels/lane_kernels.h"

namespace duck::attention {

template <class Lanes>
struct LaneAttention {
  using Floats = typename Lanes::Floats;
  using Kernels = LaneKernels<Lanes>;

  static constexpr uint32_t kLanes = Lanes::kLanes;
  static constexpr uint32_t kStrip = 2 * kLanes;  // keys or dimensions at once
  static constexpr int kMost = Lanes::kQueries;   // queries at once
  static constexpr uint32_t kLineFloats = 16;     // of a cache line

  // sums[query][v] += sum over k in [begin, end) of a[query * kTileKeys + k] * row_of(k)[v].
  template <int kQueries, bool kTail, class RowOf>
  static DUCK_INLINE void accumulate(const float* a, uint32_t begin, uint32_t end, uint32_t tail,
                                     RowOf row_of, Floats (&sums)[kQueries][2]) {
    for (uint32_t k = begin; k < end; ++k) {
      const float* row = row_of(k);
      const Floats first = load<kTail>(row, tail), second = load_second<kTail>(row, tail);
#pragma GCC unroll 16
      for (int query = 0; query < kQueries; ++query) {
        const Floats value = Lanes::broadcast(a[query * kTileKeys + k]);
        sums[query][0] = Lanes::fma(first, value, sums[query][0]);
        sums[query][1] = Lanes::fma(second, value, sums[query][1]);
      }
    }
  }

  // The first and the second register of a strip; of the last strip only `tail` numbers are there.
  template <bool kTail>
  static DUCK_INLINE Floats load(const float* row, uint32_t tail) {
    if constexpr (kTail) return Lanes::load_first(row, tail < kLanes ? tail : kLanes);
    return Lanes::load(row);
  }
  template <bool kTail>
  static DUCK_INLINE Floats load_second(const float* row, uint32_t tail) {
    if constexpr (kTail)
      return tail > kLanes ? Lanes::load_first(row + kLanes, tail - kLanes) : Lanes::zero();
    return Lanes::load(row + kLanes);
  }
  static DUCK_INLINE void store_strip(float* to, uint32_t count, Floats first, Floats second) {
    if (count >= kStrip) {
      Lanes::store(to, first);
      Lanes::store(to + kLanes, second);
      return;
    }
    Lanes::store_first(to, count < kLanes ? count : kLanes, first);
    if (count > kLanes) Lanes::store_first(to + kLanes, count - kLanes, second);
  }

  template <int kQueries>
  static DUCK_INLINE void clear(Floats (&sums)[kQueries][2]) {
#pragma GCC unroll 16
    for (int query = 0; query < kQueries; ++query) sums[query][0] = sums[query][1] = Lanes::zero();
  }

  // Products of queries [first, first + kQueries) of a panel with all rows of a strip, `stride` apart.
  template <int kQueries, class Meanwhile>
  static DUCK_INLINE void multiply_strip(const float* panel, uint32_t queries, uint32_t first, uint32_t dim,
                                         const float* strip, size_t stride, Floats (&sums)[kQueries][2],
                                         Meanwhile meanwhile) {
    clear(sums);
    for (uint32_t d = 0; d < dim; d += kTileKeys) {
      const float* rows = strip + d * stride;
      accumulate<kQueries, false>(
          panel + panel_index(queries, first, d), 0, dim - d < kTileKeys ? dim - d : kTileKeys, 0,
          [rows, stride, meanwhile](uint32_t k) {
            meanwhile();
            return rows + k * stride;
          },
          sums);
    }
  }

  // ---- scores
  // -----------------------------------------------------------------------------------------------

  // To the second cache: the first one holds the tile in work.
  static DUCK_INLINE void prefetch(const float* from) { __builtin_prefetch(from, 0, 2); }

  static void transpose(const float* const* rows, uint32_t begin, uint32_t end, uint32_t dim,
                        float* columns) {
    for (uint32_t key = begin / kLanes * kLanes; key < end; key += kLanes) {
      float* to = columns + static_cast<size_t>(key / kStrip) * dim * kStrip + key % kStrip;
      const float* from[kLanes];
      for (uint32_t i = 0; i < kLanes; ++i) {
        const uint32_t own = key + i < begin ? begin : key + i < end ? key + i : end - 1;
        from[i] = rows[own];  // beside the keys that are there, any number will do
      }
      uint32_t d = 0;
      Floats block[kLanes];
      for (; d + kLanes <= dim; d += kLanes) {
        Lanes::load_columns(from, d, block);
#pragma GCC unroll 16
        for (uint32_t i = 0; i < kLanes; ++i) Lanes::store(to + (d + i) * kStrip, block[i]);
      }
      for (; d < dim; ++d) {
        for (uint32_t i = 0; i < kLanes; ++i) to[d * kStrip + i] = from[i][d];
      }
    }
  }

  // Rows of the cache, two lines a call.
  struct Ahead {
    const float* const* row;
    const float* const* end;
    const uint32_t dim;
    uint32_t at = 0;
    DUCK_INLINE void prefetch_some() {
      if (row == end) return;
      prefetch(*row + at);
      prefetch(*row + at + kLineFloats);
      at += 2 * kLineFloats;
      if (at < dim) return;
      at = 0;
      ++row;
    }
  };

  static void scores(const float* panel, uint32_t queries, uint32_t dim, const float* columns, uint32_t begin,
                     uint32_t end, const float* const* ahead, uint32_t ahead_dim, float* scores) {
    for (uint32_t key = begin / kStrip * kStrip; key < end; key += kStrip) {
      const float* strip = columns + static_cast<size_t>(key) * dim;
      Kernels::template in_blocks<kMost>(queries, [&](auto rows, uint32_t first) {
        Floats sums[rows.kCount][2];
        if (first == 0 && ahead != nullptr) {
          Ahead next{ahead + key, ahead + key + kStrip, ahead_dim};
          multiply_strip(panel, queries, first, dim, strip, kStrip, sums, [&next] { next.prefetch_some(); });
        } else {
          multiply_strip(panel, queries, first, dim, strip, kStrip, sums, [] {});
        }
        for (int row = 0; row < rows.kCount; ++row) {
          float* to = scores + (first + row) * kTileKeys + key;
          Lanes::store(to, sums[row][0]);
          Lanes::store(to + kLanes, sums[row][1]);
        }
      });
    }
  }

  static void index_scores(const float* panel, uint32_t queries, uint32_t dim, const float* columns,
                           uint32_t begin, uint32_t end, const float* weights, float* scores) {
    for (uint32_t key = begin / kStrip * kStrip; key < end; key += kStrip) {
      const float* strip = columns + static_cast<size_t>(key) * dim;
      Floats total[2] = {Lanes::zero(), Lanes::zero()};
      Kernels::template in_blocks<kMost>(queries, [&](auto rows, uint32_t first) {
        Floats sums[rows.kCount][2];
        multiply_strip(panel, queries, first, dim, strip, kStrip, sums, [] {});
#pragma GCC unroll 16
        for (int row = 0; row < rows.kCount; ++row) {
          const Floats weight = Lanes::broadcast(weights[first + row]);
          // In this order a NaN stays one.
          total[0] = Lanes::fma(weight, Lanes::max(Lanes::zero(), sums[row][0]), total[0]);
          total[1] = Lanes::fma(weight, Lanes::max(Lanes::zero(), sums[row][1]), total[1]);
        }
      });
      Lanes::store(scores + key, total[0]);
      Lanes::store(scores + key + kLanes, total[1]);
    }
  }

  // ---- softmax
  // ----------------------------------------------------------------------------------------------

  // e^t for t <= 0, zero below -87; NaN stays one.
  static DUCK_INLINE Floats weight_of(Floats t) {
    const Floats least = Lanes::broadcast(-87.0f);
    return Lanes::select_less(t, least, Lanes::zero(), Kernels::exp(Lanes::max(least, t)));
  }

  static void softmax(float* scores, uint32_t queries, uint32_t begin, uint32_t end, float* largest,
                      float* sums, float* factors) {
    constexpr uint32_t kVectors = kTileKeys / kLanes;
    for (uint32_t query = 0; query < queries; ++query) {
      float* own = scores + query * kTileKeys;
      for (uint32_t key = 0; key < begin; ++key) own[key] = -__builtin_inff();
      for (uint32_t key = end; key < kTileKeys; ++key) own[key] = -__builtin_inff();
      Floats most = Lanes::load(own);
      for (uint32_t v = 1; v < kVectors; ++v) most = Lanes::max(most, Lanes::load(own + v * kLanes));
      const float tile = Lanes::largest(most);
      factors[query] = largest[query];
      largest[query] = tile > largest[query] ? tile : largest[query];
    }
    for (uint32_t query = 0; query < queries; query += kLanes) {
      const Floats t = Lanes::sub(Lanes::load(factors + query), Lanes::load(largest + query));
      Lanes::store(factors + query, weight_of(t));
    }
    for (uint32_t query = 0; query < queries; ++query) {
      float* own = scores + query * kTileKeys;
      const Floats most = Lanes::broadcast(largest[query]);
      Floats sum = Lanes::zero();
#pragma GCC unroll 4
      for (uint32_t v = 0; v < kVectors; ++v) {
        const Floats weight = weight_of(Lanes::sub(Lanes::load(own + v * kLanes), most));
        Lanes::store(own + v * kLanes, weight);
        sum = Lanes::add(sum, weight);
      }
      sums[query] = sums[query] * factors[query] + Lanes::sum(sum);
    }
  }

  // ---- values
  // -----------------------------------------------------------------------------------------------

  template <bool kTail>
  static DUCK_INLINE void add_strip(const float* weights, uint32_t queries, const float* const* rows,
                                    uint32_t begin, uint32_t end, uint32_t at, uint32_t tail, size_t stride,
                                    const float* factors, const float* const* ahead, float* values) {
    Kernels::template in_blocks<kMost>(queries, [&](auto block, uint32_t first) {
      Floats sums[block.kCount][2];
#pragma GCC unroll 16
      for (int row = 0; row < block.kCount; ++row) {
        const float* own = values + (first + row) * stride + at;
        const Floats factor = Lanes::broadcast(factors[first + row]);
        sums[row][0] = Lanes::mul(Lanes::load(own), factor);
        sums[row][1] = Lanes::mul(Lanes::load(own + kLanes), factor);
      }
      const float* own_weights = weights + first * kTileKeys;
      if (!kTail && first == 0) {
        const auto row_of = [rows, ahead, at](uint32_t key) {
#pragma GCC unroll 2
          for (uint32_t i = 0; i < kStrip; i += kLineFloats) prefetch(ahead[key] + at + i);
          return rows[key] + at;
        };
        accumulate<block.kCount, kTail>(own_weights, begin, end, tail, row_of, sums);
      } else {
        const auto row_of = [rows, at](uint32_t key) { return rows[key] + at; };
        accumulate<block.kCount, kTail>(own_weights, begin, end, tail, row_of, sums);
      }
#pragma GCC unroll 16
      for (int row = 0; row < block.kCount; ++row) {
        float* own = values + (first + row) * stride + at;
        Lanes::store(own, sums[row][0]);
        Lanes::store(own + kLanes, sums[row][1]);
      }
    });
  }

  static void add_values(const float* weights, uint32_t queries, const float* const* rows, uint32_t begin,
                         uint32_t end, uint32_t dim, const float* factors, const float* const* ahead,
                         float* values) {
    const size_t stride = padded(dim);
    uint32_t at = 0;
    for (; at + kStrip <= dim; at += kStrip) {
      add_strip<false>(weights, queries, rows, begin, end, at, 0, stride, factors, ahead, values);
    }
    if (at == dim) return;
    add_strip<true>(weights, queries, rows, begin, end, at, dim - at, stride, factors, ahead, values);
  }

  static void merge(const Partial& to, const Partial& from, uint32_t queries, uint32_t dim) {
    const size_t stride = padded(dim);
    for (uint32_t first = 0; first < queries; first += kLanes) {
      const uint32_t count = queries - first < kLanes ? queries - first : kLanes;
      const Floats before = Lanes::load(to.largest + first), after = Lanes::load(from.largest + first);
      const Floats most = Lanes::max(before, after);
      float old_factors[kLanes], new_factors[kLanes];
      Lanes::store(old_factors, weight_of(Lanes::sub(before, most)));
      Lanes::store(new_factors, weight_of(Lanes::sub(after, most)));
      Lanes::store_first(to.largest + first, count, most);
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t query = first + i;
        to.sums[query] = to.sums[query] * old_factors[i] + from.sums[query] * new_factors[i];
        const Floats a = Lanes::broadcast(old_factors[i]), b = Lanes::broadcast(new_factors[i]);
        float* own = to.values + query * stride;
        const float* added = from.values + query * stride;
        for (uint32_t d = 0; d < dim; d += kLanes) {
          Lanes::store(own + d, Lanes::fma(Lanes::load(added + d), b, Lanes::mul(Lanes::load(own + d), a)));
        }
      }
    }
  }

  static void finish(const Partial& from, uint32_t queries, uint32_t dim, float* out) {
    for (uint32_t query = 0; query < queries; ++query) {
      const Floats factor = Lanes::broadcast(1.0f / from.sums[query]);
      const float* own = from.values + query * padded(dim);
      float* to = out + static_cast<size_t>(query) * dim;
      for (uint32_t d = 0; d < dim; d += kStrip) {
        store_strip(to + d, dim - d, Lanes::mul(Lanes::load(own + d), factor),
                    Lanes::mul(Lanes::load(own + d + kLanes), factor));
      }
    }
  }

  // ---- matrices of heads
  // ------------------------------------------------------------------------------------

  static void multiply(const float* panel, uint32_t num_rows, uint32_t dim, const float* w, uint32_t outputs,
                       float* y, size_t stride) {
    for (uint32_t output = 0; output < outputs; output += kStrip) {
      const float* strip = w + static_cast<size_t>(output / kColumns) * dim * kColumns + output % kColumns;
      Kernels::template in_blocks<kMost>(num_rows, [&](auto rows, uint32_t first) {
        Floats sums[rows.kCount][2];
        multiply_strip(panel, num_rows, first, dim, strip, kColumns, sums, [] {});
        for (int row = 0; row < rows.kCount; ++row) {
          store_strip(y + (first + row) * stride + output, outputs - output, sums[row][0], sums[row][1]);
        }
      });
    }
  }

  static constexpr AttentionTable table(Isa isa) {
    return {isa, &transpose, &scores, &softmax, &add_values, &merge, &finish, &index_scores, &multiply};
  }
};

}  // namespace duck::attention
