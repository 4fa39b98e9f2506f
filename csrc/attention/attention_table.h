// What an instruction set offers to attend_impl.h and select_impl.h: products of blocks of queries with
// blocks of cached keys and values. One table per ISA, each in its own namespace and compiled with its own
// flags, like kernels/<isa>.
//
// A tile is up to kTileKeys tokens of the cache, in order; keys [begin, end) of it are there. Blocks of
// queries lie in a panel [ceil(dim / kTileKeys)][queries][kTileKeys]: number d of query q is at
// panel_index(queries, q, d). What is said of a query below holds whatever queries go beside it: each number
// is the same operations in the same order, hence the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/experts.h"

namespace duck::attention {

inline constexpr uint32_t kTileKeys = 64;
inline constexpr uint32_t kMostLanes = 16;
inline constexpr uint32_t kColumns = 2 * kMostLanes;  // outputs side by side in a packed matrix of heads

constexpr size_t panel_size(size_t queries, size_t dim) {
  return (dim + kTileKeys - 1) / kTileKeys * queries * kTileKeys;
}
constexpr size_t panel_index(size_t queries, size_t query, size_t d) {
  return d / kTileKeys * queries * kTileKeys + query * kTileKeys + d % kTileKeys;
}
constexpr size_t padded(size_t dim) { return (dim + kColumns - 1) / kColumns * kColumns; }

// Softmax attention of some queries over some keys, on its way: the largest score, the sum of e^(score -
// largest), and the values weighted so. Arrays of one number a query have room for kMostLanes more.
struct Partial {
  float* largest;  // [queries]
  float* sums;     // [queries]
  float* values;   // [queries][padded(dim)]
};

struct AttentionTable {
  Isa isa;

  // The tile's keys with dimensions as rows, for `scores` and `index_scores`: columns holds dim * kTileKeys
  // numbers in an order of the ISA's own. rows: kTileKeys pointers, of which [begin, end) are read.
  void (*transpose)(const float* const* rows, uint32_t begin, uint32_t end, uint32_t dim, float* columns);

  // scores[query][key] = q . k for keys [begin, end), dimensions ascending in one chain of sums. What else is
  // in the row of kTileKeys is undefined after it. ahead: kTileKeys pointers to ahead_dim numbers each that
  // are read next, prefetched meanwhile; null for none.
  void (*scores)(const float* panel, uint32_t queries, uint32_t dim, const float* columns, uint32_t begin,
                 uint32_t end, const float* const* ahead, uint32_t ahead_dim, float* scores);

  // Adds the tile's scores to the queries' largest and sums, and turns them into weights e^(score - largest),
  // zero outside [begin, end). factors[query] is what the values so far are to be multiplied with.
  void (*softmax)(float* scores, uint32_t queries, uint32_t begin, uint32_t end, float* largest, float* sums,
                  float* factors);

  // values[query] = values[query] * factors[query] + sum of weights[query][key] * rows[key], keys ascending.
  // ahead: kTileKeys pointers to what is read next, prefetched meanwhile.
  void (*add_values)(const float* weights, uint32_t queries, const float* const* rows, uint32_t begin,
                     uint32_t end, uint32_t dim, const float* factors, const float* const* ahead,
                     float* values);

  // Adds what follows: both as if they had the same largest score.
  void (*merge)(const Partial& to, const Partial& from, uint32_t queries, uint32_t dim);

  // out[query][dim] = values / sums.
  void (*finish)(const Partial& from, uint32_t queries, uint32_t dim, float* out);

  // scores[key] = sum over queries (heads), ascending, of weights[query] * max(0, q . k).
  void (*index_scores)(const float* panel, uint32_t queries, uint32_t dim, const float* columns,
                       uint32_t begin, uint32_t end, const float* weights, float* scores);

  // y[row][output] = sum over d of x[row][d] * w[d][output], d ascending in one chain. w: [ceil(outputs /
  // kColumns)][dim][kColumns], zero beyond `outputs`; x as a panel.
  void (*multiply)(const float* panel, uint32_t num_rows, uint32_t dim, const float* w, uint32_t outputs,
                   float* y, size_t stride);
};

// The table of an ISA. Calling its kernels is right only where isa_available(isa).
const AttentionTable& attention_table(Isa isa);

namespace scalar {
extern const AttentionTable kTable;
}
namespace avx2 {
extern const AttentionTable kTable;
}
namespace avx512 {
extern const AttentionTable kTable;
}

}  // namespace duck::attention
