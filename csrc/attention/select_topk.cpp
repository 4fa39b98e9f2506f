// The largest of many numbers, exactly: their order as integers, digit by digit from the highest.
#include <cstring>

#include "attention/attention.h"

namespace duck::attention {
namespace {

// Ascends as the number does; both zeros are one.
uint32_t order_of(float score) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

}  // namespace

void select_topk(const float* scores, uint32_t first, uint32_t stop, uint32_t topk, int32_t* out) {
  constexpr uint32_t kDigits[3] = {11, 11, 10};
  uint32_t counts[1 << 11];
  uint32_t threshold = 0, shift = 32, left = topk;  // `left` of those that begin like the threshold
  for (const uint32_t digits : kDigits) {
    shift -= digits;
    const uint32_t mask = (1u << digits) - 1;
    std::memset(counts, 0, sizeof counts);
    for (uint32_t position = first; position < stop; ++position) {
      const uint32_t order = order_of(scores[position]);
      if (shift + digits == 32 || order >> (shift + digits) == threshold) ++counts[order >> shift & mask];
    }
    uint32_t digit = mask;
    for (; counts[digit] < left; --digit) left -= counts[digit];
    threshold = threshold << digits | digit;
  }
  for (uint32_t position = first; position < stop; ++position) {
    const uint32_t order = order_of(scores[position]);
    if (order < threshold || (order == threshold && left == 0)) continue;
    if (order == threshold) --left;
    *out++ = static_cast<int32_t>(position);
  }
}

}  // namespace duck::attention
