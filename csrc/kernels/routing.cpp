// Routing: a counting sort, twice over the ids. It allocates nothing after construction.
#include "kernels/routing.h"

#include <algorithm>

namespace duck {
namespace {

// The first k of the row that names the same expert.
uint32_t first_place(const int32_t* ids, uint32_t k) {
  uint32_t first = 0;
  while (ids[first] != ids[k]) ++first;
  return first;
}

}  // namespace

Routing::Routing(uint32_t num_experts, uint32_t max_tokens, uint32_t max_top_k)
    : begin_(num_experts + 1), filled_(num_experts) {
  const size_t max_pairs = static_cast<size_t>(max_tokens) * max_top_k;
  active_.reserve(std::min<size_t>(max_pairs, num_experts));
  rows_.resize(max_pairs);
  weights_.resize(max_pairs);
}

void Routing::sort(const StepRows& rows) {
  std::fill(filled_.begin(), filled_.end(), 0);
  for (uint32_t row = 0; row < rows.num_tokens; ++row) {
    const int32_t* ids = rows.topk_ids + static_cast<size_t>(row) * rows.top_k;
    for (uint32_t k = 0; k < rows.top_k; ++k) filled_[ids[k]] += first_place(ids, k) == k;
  }
  active_.clear();
  uint32_t end = 0;
  for (uint32_t expert = 0; expert < filled_.size(); ++expert) {
    if (filled_[expert] != 0) active_.push_back(expert);
    begin_[expert] = end;
    end += filled_[expert];
    filled_[expert] = 0;
  }
  begin_.back() = end;

  for (uint32_t row = 0; row < rows.num_tokens; ++row) {
    const size_t first = static_cast<size_t>(row) * rows.top_k;
    for (uint32_t k = 0; k < rows.top_k; ++k) {
      const int32_t expert = rows.topk_ids[first + k];
      const float weight = rows.topk_weights != nullptr ? rows.topk_weights[first + k] : 0.0f;
      if (first_place(rows.topk_ids + first, k) == k) {
        const uint32_t pair = begin_[expert] + filled_[expert]++;
        rows_[pair] = row;
        weights_[pair] = weight;
      } else {
        weights_[begin_[expert] + filled_[expert] - 1] += weight;  // the row's pair is the expert's last
      }
    }
  }
}

}  // namespace duck
