// The (row, expert) pairs of one step, sorted by expert. Used by experts.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/experts.h"

namespace duck {

class Routing {
 public:
  // Memory for max_tokens rows of max_top_k ids.
  Routing(uint32_t num_experts, uint32_t max_tokens, uint32_t max_top_k);

  // Sorts the pairs of a step, those of an expert in ascending row order. An id that a row names several
  // times makes one pair, with the sum of its weights in the order of k. Without weights (read_units) they
  // are 0.
  void sort(const StepRows& rows);

  const std::vector<uint32_t>& active() const { return active_; }   // experts with a pair, ascending
  uint32_t begin(uint32_t expert) const { return begin_[expert]; }  // its first pair
  uint32_t count(uint32_t expert) const { return begin_[expert + 1] - begin_[expert]; }
  uint32_t row(uint32_t pair) const { return rows_[pair]; }
  float weight(uint32_t pair) const { return weights_[pair]; }

 private:
  std::vector<uint32_t> active_, begin_, filled_, rows_;
  std::vector<float> weights_;
};

}  // namespace duck
