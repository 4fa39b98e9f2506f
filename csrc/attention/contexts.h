// The rows of a step by the contexts that they belong to, and where each context lies in the cache. Made once
// a step by bind.cpp and shared by all layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace duck::attention {

// Consecutive tokens of one context. Position p of it lies in slot
// pages[p / page_tokens] * page_tokens + p % page_tokens of every cache tensor.
struct Context {
  uint32_t first_row = 0;  // of the step
  uint32_t num_rows = 0;
  uint32_t start = 0;  // position of the first row
  uint32_t first = 0;  // first position that the context has, at most start
  uint32_t page_tokens = 1;
  const int32_t* pages = nullptr;

  uint32_t stop() const { return start + num_rows; }
  size_t slot(uint32_t position) const {
    return static_cast<size_t>(pages[position / page_tokens]) * page_tokens + position % page_tokens;
  }
};

struct StepContexts {
  StepContexts() = default;
  StepContexts(StepContexts&&) = default;  // no copies: contexts point into pages

  std::vector<int32_t> pages;     // of all contexts, one behind the other
  std::vector<Context> contexts;  // in the order of their rows
  uint32_t num_rows = 0;
  uint32_t longest = 0;  // positions that the longest context has, up to the last of the step
  size_t num_slots = 0;  // one more than the last slot in use
};

}  // namespace duck::attention
